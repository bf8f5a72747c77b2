"""Host memory in huge pages: requested for streamed tensors, and for no byte outside of them."""

import mmap
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memtune import _native
from memtune.offload.optimizer.native_update import master_of, zeros_in_order_of
from memtune.runtime import transfer
from memtune.runtime.transfer import PAGE_BYTES, in_huge_pages

NUMEL = 3 * PAGE_BYTES


def wished(address: int) -> bool:
    """Return True if the kernel was asked for large pages at `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if last and not line.split()[0].endswith(":"):
            inside = int(first, 16) <= address < int(last, 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


def middle(memory: torch.Tensor) -> int:
    return memory.data_ptr() + memory.nbytes // 2


@pytest.fixture(autouse=True)
def _system() -> None:
    with mmap.mmap(-1, 4 * PAGE_BYTES) as memory:
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            pytest.skip("the system has no large pages")


@pytest.mark.parametrize("which", ["moments", "masters", "copies"])
def test_streamed_memory_is_in_huge_pages(which: str) -> None:
    like = torch.ones(NUMEL, dtype=torch.bfloat16 if which == "masters" else torch.float32)
    made = {
        "moments": lambda: zeros_in_order_of(like, torch.float32),
        "masters": lambda: master_of(like, True),
    }.get(which, lambda: transfer.to_host(like))()
    transfer.finish(made)
    assert wished(middle(made))
    assert torch.equal(made, torch.zeros(NUMEL) if which == "moments" else like.float())


def test_huge_pages_are_requested_inside_the_tensor_only() -> None:
    with mmap.mmap(-1, 8 * PAGE_BYTES) as memory:
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        inside = whole[PAGE_BYTES + 1 : 6 * PAGE_BYTES - 1]
        in_huge_pages(inside)
        first = -(-inside.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        last = (inside.data_ptr() + inside.nbytes) // PAGE_BYTES * PAGE_BYTES
        assert [wished(each) for each in (first - 1, first, last - 1, last)] == [False, True, True, False]
        del whole, inside


def test_memory_below_one_huge_page_is_unchanged() -> None:
    with mmap.mmap(-1, 4 * PAGE_BYTES) as memory:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        assert not _native.wish_huge_pages(address + 1 - address % PAGE_BYTES + PAGE_BYTES, PAGE_BYTES)
    with FakeTensorMode():
        fake = torch.empty(NUMEL)
        assert in_huge_pages(fake) is fake  # has no address
