"""Which of the tensors that a block saves leave under a share of their bytes, to the byte: shared by the mechanism and the pass.

Rule 1. A tensor leaves whole when it is saved, where what has left stays within the share of what has been saved so far.
Rule 2. When the block's call is over, what is missing to the share leaves from the last tensor that stayed. That one is larger:
        it was more than what was missing then, and a whole tensor that left later has not made that more.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ByteShare(Generic[T]):
    """The running sums of one call of a block.

    Args:
        fraction: How much of the bytes leaves, from 0 to 1; rounded to whole bytes.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._seen_bytes = self._gone_bytes = 0
        self._stayed: T | None = None

    def _missing_bytes(self) -> int:
        return round(self._fraction * self._seen_bytes) - self._gone_bytes

    def takes(self, tensor: T, n_bytes: int) -> bool:
        """Whether `tensor`, which is saved now, leaves whole (Rule 1)."""
        self._seen_bytes += n_bytes
        if n_bytes > self._missing_bytes():
            self._stayed = tensor
            return False
        self._gone_bytes += n_bytes
        return True

    def rest(self) -> tuple[T, int] | None:
        """What is cut at the end of the call, and how many of its bytes leave (Rule 2); None where none are missing."""
        missing = self._missing_bytes()
        return None if self._stayed is None or not missing else (self._stayed, missing)
