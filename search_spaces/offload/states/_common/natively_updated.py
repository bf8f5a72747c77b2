"""Base of techniques that run the native update on optimizer state off the device."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.technique import Exactness, Technique


class NativelyUpdated(Technique):
    """Keeps optimizer state off the device, where the native update runs."""

    exactness: ClassVar[Exactness] = Exactness.REORDERED

    update: Literal["native", "master"] = "native"
    """`native` is for float32 parameters and has the bits of torch's fused AdamW; `master` keeps float32
    masters for bfloat16 parameters, on the tier of the state as well.
    """

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"update": ("native", "master")}

    def exactly(self) -> Exactness:
        # With masters it trains as bfloat16 with float32 masters, not as the user's optimizer.
        return Exactness.LOSSY if self.update == "master" else self.exactness
