"""The null technique: sharded tensors travel in their own type, in one flat collective over all ranks that
share them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Target, Technique


class Plain(Technique):
    """Uses the collective library's own all-gather and reduce-scatter."""

    kind: Literal["none"] = "none"
    slot: ClassVar[str] = "sharding.communication"
    title: ClassVar[str] = "Plain collectives"
    source: ClassVar[str] = "torch.distributed"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return "uses torch's own collectives"

    def record(self, target: Target) -> dict[str, Any]:
        """Return no settings: no mechanism is used."""
        return {}
