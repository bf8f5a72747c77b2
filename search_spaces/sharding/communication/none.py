"""The null technique: sharded tensors travel in their own type, in one flat collective."""

from __future__ import annotations

from typing import ClassVar, Literal

from memtune.technique import NullTechnique


class Plain(NullTechnique):
    """Uses the collective library's own all-gather and reduce-scatter."""

    kind: Literal["none"] = "none"
    title: ClassVar[str] = "Plain collectives"
    clause: ClassVar[str] = "uses torch's own collectives"
    source: ClassVar[str] = "torch.distributed"
