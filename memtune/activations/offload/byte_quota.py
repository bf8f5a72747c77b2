"""Selection of tensors so that the offloaded share of a block's saved bytes is met exactly; for runtime and
pass.

A tensor is offloaded in full when it is saved if the offloaded bytes stay within the share of the bytes saved
so far. At the end of the block's call the missing bytes are taken from the last tensor that was kept. It is
large enough: it exceeded the missing bytes when it was saved, and tensors offloaded since then have not
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
        self._seen_bytes = self._offloaded_bytes = 0
        self._kept: T | None = None

    def _missing_bytes(self) -> int:
        return round(self._fraction * self._seen_bytes) - self._offloaded_bytes

    def is_offloaded_whole(self, tensor: T, n_bytes: int) -> bool:
        """Return whether `tensor`, which is being saved, is offloaded in full."""
        self._seen_bytes += n_bytes
        if n_bytes > self._missing_bytes():
            self._kept = tensor
            return False
        self._offloaded_bytes += n_bytes
        return True

    def partial_tensor(self) -> tuple[T, int] | None:
        """Return the tensor to cut at the end of the call and its bytes to offload, if bytes are missing."""
        missing = self._missing_bytes()
        return None if self._kept is None or not missing else (self._kept, missing)
