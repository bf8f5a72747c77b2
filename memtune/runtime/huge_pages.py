"""Host memory in pages of 2 MiB: what streams through it each step (gradients, masters, moments) walks fewer page tables."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtune import _native

PAGE_BYTES = 2 << 20


def in_huge_pages(memory: Tensor) -> Tensor:
    """`memory`, which nothing has been written to yet, after asking for large pages for it.

    A wish: where the system has none the memory is as it was. Only whole large pages within the tensor are asked for, so the
    process takes no byte more than without.
    """
    if memory.nbytes >= PAGE_BYTES and not (isinstance(memory, FakeTensor) or memory.is_meta):
        _native.wish_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory
