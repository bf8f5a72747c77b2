"""Saved storage that the activation table packs: its states, its copies, and views of it.

States: resident → copying to the host → on the host (→ on SSD → on the host) → resident, or resident →
compressed → resident.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

import memtune.ssd.ssd_tensors  # noqa: F401  (defines torch.ops.memtune, to_ssd and from_ssd there too)
from memtune.activations.offload.compression import seed_of
from memtune.program import Compression, SavedTensorPolicy
from memtune.runtime import seam, to_host_together, transfer


class EntryOwner(Protocol):
    """Operations of the activation table that an entry calls."""

    def complete_offloads(self) -> None:
        """Complete the copies to the host that are in flight."""

    def read_from_ssd(self, entry: SavedStorage) -> None:
        """Read `entry` from SSD into host memory."""

    def reload(self, entry: SavedStorage) -> None:
        """Reload `entry`, which backward reads."""


class SavedStorage:
    """Storage that autograd saved: resident, being copied, on the host, on SSD, or compressed.

    Args:
        moves: The table that it belongs to.
        tensor: A view of the storage.
        policy: Determines how it is packed.
        name: Its name in error messages.
    """

    def __init__(self, moves: EntryOwner, tensor: Tensor, policy: SavedTensorPolicy, name: str) -> None:
        self._moves, self.policy, self._name = moves, policy, name
        self._dtype = tensor.dtype
        self.moved = False
        """Its offload has begun."""
        self._source: Tensor | None = None
        self._host: Tensor | None = None
        """Its packed form, on the host or compressed."""
        self._numel = 0
        self._kept: Tensor | None = None
        """The last bytes of a cut storage, which remain on the device."""
        self._ssd: Tensor | None = None
        self.device = tensor.device
        self._storage = weakref.ref(tensor.untyped_storage())  # not its address, which the allocator reuses
        self._back: Tensor | None = None
        self._asked = False

    def must_fetch(self, tensor: Tensor) -> bool:
        """Return whether a reader of the view `tensor` must get it by `fetch`: it is packed, or may be."""
        # Other bits than the values that were compressed, such as a float's bytes, are not those of the
        # source.
        same = self.policy.is_exact or tensor.dtype == self._dtype
        return same and (self.moved or self._back is not None)

    @property
    def is_resident(self) -> bool:
        """True if it is on the device again."""
        return self._back is not None

    @property
    def n_bytes(self) -> int:
        """Bytes of the host copy, complete or in flight; 0 without one."""
        return 0 if self._host is None else self._host.nbytes

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a view of this storage."""
        return self._storage() is tensor.untyped_storage()

    def keep_readable(self, tensor: Tensor) -> None:
        """Keep it resident and readable until it is offloaded."""
        self._back, self._asked = _flat_storage(tensor), True

    def offload(self, n_bytes: int) -> None:
        """Start the copy of `n_bytes` to the host, clone the rest; hold the source until it has ended."""
        source, self._back = self._back, None
        assert source is not None
        self._source, self._asked, self.moved = source, False, True
        if n_bytes == source.nbytes:
            (self._host,) = to_host_together([source])
            return
        flat = source.view(torch.uint8)
        # The copy first: its stream waits for all compute issued so far, which would include the clone.
        self._host = torch.ops.memtune.to_host(flat[:n_bytes])
        self._kept = flat[n_bytes:].clone()

    def compress(self) -> None:
        """Compress it where it is; the source is freed with its last reader."""
        (hop,) = self.policy.hops
        assert isinstance(hop, Compression)
        assert self._back is not None
        source, self._back = self._back, None
        self._asked, self.moved, self._numel = False, True, source.numel()
        self._host = torch.ops.memtune.compress(source, hop.bits, hop.group, seed_of(hop))

    def complete_offload(self) -> None:
        """Wait for the copy to the host and free the source."""
        assert self._host is not None
        # In stream order on a GPU: the source's memory is reused after the copy, and the host does not wait.
        transfer.wait(self._host)
        self._source = None

    def spill(self) -> tuple[Tensor, Tensor]:
        """Start the write from host to SSD; return both tensors, and hold only the one on SSD."""
        host, self._host = self._host, None
        assert host is not None
        self._ssd = torch.ops.memtune.to_ssd(host, self._name)
        return host, self._ssd

    def start_read(self) -> None:
        """Start the read from SSD to the host."""
        assert self._ssd is not None
        self._host = torch.ops.memtune.from_ssd(self._ssd)

    def fetch(self, like: View) -> Tensor:
        """Return the tensor on the device; the first read reloads the storage, which all views share."""
        if not self._asked:
            self._asked = True
            # First, because copies in flight hold device memory that the reload may need.
            self._moves.complete_offloads()
            self._moves.reload(self)
        assert self._back is not None
        return like.on(self._back)

    def reload(self) -> None:
        """Copy it to the device, from SSD through the host if necessary."""
        if self._ssd is not None:
            self._moves.read_from_ssd(self)
        assert self._host is not None
        hop = self.policy.hops[0]
        if isinstance(hop, Compression):
            self._back = torch.ops.memtune.decompress(
                self._host, self._numel, self._dtype, hop.bits, hop.group
            )
        elif self._kept is None:
            self._back = seam.to_device(self._host, self.device)
        else:
            self._back = torch.ops.memtune.to_device_with_tail(self._host, self._kept, self.device)
        self._host = self._ssd = self._kept = None

    def prefetch(self) -> None:
        """Reload it before it is read, on a separate stream; hold the host copy until `complete_prefetch`."""
        # The host copy is held even if the copy ends early, so that host bytes do not depend on timing.
        host = self._host
        with transfer.prefetching_separately(self.device):
            self.reload()
        self._source = host

    def complete_prefetch(self) -> None:
        """Wait for the copy that `prefetch` started."""
        assert self._back is not None
        transfer.wait_tensor(self._back)
        self._source = None

    def __del__(self) -> None:
        # A copy in flight would write into memory that the allocator hands out again.
        if self._back is not None and not self._asked:
            transfer.wait_tensor(self._back)  # prefetched but never read
        if self._ssd is not None and self._host is not None:
            transfer.abandon(self._host)  # read from SSD but never reloaded


class View(NamedTuple):
    """The layout of a tensor within its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    is_conj: bool
    """It is a conjugate view."""
    is_neg: bool
    """It is a negative view, as the imaginary part of a conjugate is."""

    @classmethod
    def describe(cls, tensor: Tensor) -> View:
        """Return the layout of `tensor` within its storage."""
        return cls(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.requires_grad,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, whole: Tensor) -> Tensor:
        """Return the same view of `whole`, a flat tensor of the storage's bytes."""
        flat = whole if whole.dtype == self.dtype else whole.view(self.dtype)
        return _conj_neg_view(
            torch.as_strided(flat, self.size, self.stride, self.offset), conj=self.is_conj, neg=self.is_neg
        )


@dataclass(slots=True, eq=False)
class OffloadedTensor:
    """Tensor whose storage is, or may be, on the host or SSD; autograd saves this object instead."""

    entry: SavedStorage
    view: View

    def get(self) -> Tensor:
        """Return the tensor on the device, after a reload if necessary."""
        return self.entry.fetch(self.view)


def id_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, valid while the storage lives."""
    found: int = tensor.untyped_storage()._cdata
    return found


def is_written_part(tensor: Tensor) -> bool:
    """Return whether `tensor` was changed in place and shares its storage with other base tensors."""
    # Autograd does not treat those as its views. Recurrent cells on CPU split their gates with
    # `unsafe_chunk` and write the parts one by one, some after the first was saved: a copy of the
    # storage made at that time would have stale values of the others.
    return tensor._version > 0 and not tensor._is_view() and tensor.nbytes < tensor.untyped_storage().nbytes()


def _flat_storage(tensor: Tensor) -> Tensor:
    """Return all of `tensor`'s storage as one flat tensor, with the values in memory."""
    # Lazy conjugation is a flag of the view: applied again, it cancels, and the bytes are read as they are.
    flat = _conj_neg_view(tensor.detach(), conj=tensor.is_conj(), neg=tensor.is_neg())
    return torch.as_strided(flat, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def _conj_neg_view(tensor: Tensor, *, conj: bool, neg: bool) -> Tensor:
    """Return `tensor` as its conjugate view, its negative view, or both."""
    if not (conj or neg):
        return tensor
    tensor = tensor.conj() if conj else tensor
    return torch._neg_view(tensor) if neg else tensor
