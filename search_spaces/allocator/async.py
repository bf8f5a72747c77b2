"""The CUDA driver's own pool, cudaMallocAsync, in place of torch's caching allocator."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.program import Program
from memtune.search_spaces.allocator import environment, not_remapped
from memtune.technique import Exactness, Reason, Target, Technique


class Async(Technique):
    """Trades a call of the driver per request for memory that the driver remaps behind fixed addresses:
    little fragmentation.

    Predicted approximately: live bytes in pages of 32 MiB, nothing lost to fragmentation, kept until memory
    runs out. What the driver really holds it alone decides; memory snapshots and `torch.cuda.MemPool` do not
    exist under it.
    """

    kind: Literal["async"] = "async"
    slot: ClassVar[str] = "allocator"
    title: ClassVar[str] = "cudaMallocAsync (modelled approximately)"
    source: ClassVar[str] = (
        "NVIDIA, CUDA stream-ordered memory allocator; PyTorch: backend:cudaMallocAsync of PYTORCH_ALLOC_CONF"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Only CUDA has it, and NCCL must not register its memory."""
        return not_remapped(target)

    def env(self) -> dict[str, str]:
        """The backend, read when CUDA starts."""
        return environment({"backend": "cudaMallocAsync"})

    def record(self, target: Target) -> dict[str, Any]:
        """One option of the allocator; none on CPU, where it changes nothing."""
        return {} if target.device == "cpu" else {"allocator": {"backend": "cudaMallocAsync"}}
