"""In which order tensors are read from SSD before they are asked for: shared by the mechanisms and the passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

WRITES: Final = 2
"""Tensors that are being written at once; before another write begins, the oldest is finished."""
T = TypeVar("T")


def reads(left: Sequence[T], asked: Sequence[T], ahead: int) -> list[tuple[T, T]]:
    """The reads of `runtime.shelf`, Rule 3: (the tensor that is fetched, a tensor that is read then), in order.

    Args:
        left: Tensors that are fetched some time, in the order in which they left.
        asked: The same ones in the order in which they are fetched.
        ahead: How many tensors are read before they are asked for.
    """
    shelved, waiting, found = list(left), 0, []
    is_read: set[T] = set()
    for each in asked:
        if each in is_read:
            waiting -= 1
        else:
            shelved.remove(each)
            found.append((each, each))
        while shelved and waiting < ahead:
            found.append((each, shelved.pop()))
            is_read.add(found[-1][1])
            waiting += 1
    return found
