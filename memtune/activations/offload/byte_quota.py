"""Selects the tensors that a block offloads so that a share of its saved bytes is met exactly.

Used by the runtime and the pass.

Rule 1. A tensor is offloaded whole when it is saved if the offloaded bytes stay within the share of the bytes
saved so far.
Rule 2. At the end of the block's call the missing bytes are taken from the last tensor that was kept. It is
large enough: it exceeded the missing bytes when it was saved, and tensors offloaded whole since then have not
increased them.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ByteShare(Generic[T]):
    """Running byte sums of one call of a block.

    Args:
        fraction: Share of the bytes to offload, from 0 to 1; rounded to whole bytes.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._seen_bytes = self._gone_bytes = 0
        self._stayed: T | None = None

    def _missing_bytes(self) -> int:
        return round(self._fraction * self._seen_bytes) - self._gone_bytes

    def takes(self, tensor: T, n_bytes: int) -> bool:
        """Return whether `tensor`, which is saved now, is offloaded whole (Rule 1)."""
        self._seen_bytes += n_bytes
        if n_bytes > self._missing_bytes():
            self._stayed = tensor
            return False
        self._gone_bytes += n_bytes
        return True

    def rest(self) -> tuple[T, int] | None:
        """Return the tensor to cut at the end of the call and the bytes of it to offload (Rule 2).

        None if none are missing.
        """
        missing = self._missing_bytes()
        return None if self._stayed is None or not missing else (self._stayed, missing)
