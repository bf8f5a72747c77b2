"""Every activation that autograd saves is kept until backward has used it: the fastest choice where it
fits.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Target, Technique


class KeepAll(Technique):
    """Autograd's own choice: what backward needs stays in device memory."""

    kind: Literal["none"] = "none"
    slot: ClassVar[str] = "recompute"
    title: ClassVar[str] = "Keep every activation"
    source: ClassVar[str] = "PyTorch autograd"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def record(self, target: Target) -> dict[str, Any]:
        """No mechanism is used."""
        return {}
