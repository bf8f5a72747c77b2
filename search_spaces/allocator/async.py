"""The CUDA driver's own pool, cudaMallocAsync, instead of torch's caching allocator."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.device import Capability
from memtune.program import Program
from memtune.search_spaces.allocator import environment, not_remapped
from memtune.technique import Exactness, Reason, Target, Technique


class Async(Technique):
    """Reduces fragmentation, since the driver remaps memory behind fixed addresses, at the cost of a driver
    call per request.

    Predicted approximately: live bytes in pages of 32 MiB, no fragmentation, kept until memory runs out. The
    driver alone decides what it really holds; memory snapshots and `torch.cuda.MemPool` do not exist under
    it.
    """

    kind: Literal["async"] = "async"
    title: ClassVar[str] = "cudaMallocAsync (modelled approximately)"
    clause: ClassVar[str] = "allocates with cudaMallocAsync"
    source: ClassVar[str] = (
        "NVIDIA, CUDA stream-ordered memory allocator; PyTorch: backend:cudaMallocAsync of PYTORCH_ALLOC_CONF"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    @property
    def needs(self) -> tuple[Capability, ...]:
        return (Capability.STREAM_ORDERED,)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse CPU, and NCCL that registers torch's memory."""
        return not_remapped(target)

    def env(self) -> dict[str, str]:
        # Read when CUDA starts.
        return environment({"backend": "cudaMallocAsync"})

    def record(self, target: Target) -> dict[str, Any]:
        # On CPU the option has no effect.
        return {} if target.device == "cpu" else {"allocator": {"backend": "cudaMallocAsync"}}
