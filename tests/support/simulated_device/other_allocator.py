"""Replaces the functions by which torch's builds for CUDA take another allocator (`memory.cuda_arena`).

Imported before memtune: `import memtune` installs the allocator that `MEMTUNE_ALLOCATOR` names.
"""

from __future__ import annotations

import os

import torch

addresses: list[int] = []
"""C functions of the allocator instead of the simulated one, empty if there is none: to allocate, free,
record a stream, limit and return memory.
"""


class _Functions:
    """Takes the functions one by one, as torch's class does."""

    def __init__(self, alloc: int, free: int) -> None:
        self.of = [alloc, free, 0, 0, 0]

    def set_record_stream_fn(self, function: int) -> None:
        self.of[2] = function

    def set_memory_fraction_fn(self, function: int) -> None:
        self.of[3] = function

    def set_reset_fn(self, function: int) -> None:
        self.of[4] = function


def _change(allocator: _Functions) -> None:
    addresses[:] = allocator.of


if "MEMTUNE_ALLOCATOR" in os.environ:
    for _name, _function in {
        "_cuda_customAllocator": _Functions,
        "_cuda_changeCurrentAllocator": _change,
    }.items():
        setattr(torch._C, _name, _function)
