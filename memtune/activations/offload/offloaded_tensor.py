"""Saved storage that the activation table packs: its states, its copies, and views of it.

States: resident → copying to the host → on the host (→ on SSD → on the host) → resident, or resident →
compressed → resident.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

import memtune.ssd.ssd_tensors  # noqa: F401  (defines torch.ops.memtune, to_ssd and from_ssd there too)
from memtune.activations.offload.compression import seed_of
from memtune.program import Compression, SavedTensorPolicy
from memtune.runtime import seam, transfer


class EntryOwner(Protocol):
    """Operations of the activation table that an entry calls."""

    entries: dict[int, weakref.ref[SavedStorage]]
    """Entries by the address of their storage."""

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

    moved = False
    """Its offload has begun."""
    _size: torch.Size | None = None
    """Size of the contiguous tensor that is all of the storage, as its host copy and its reload are too; None
    if it was made of another one, and these are flat.
    """
    _source: Tensor | None = None
    _host: Tensor | None = None
    """Its packed form, on the host or compressed."""
    _kept: Tensor | None = None
    """The last bytes of a cut storage, which remain on the device."""
    _ssd: Tensor | None = None
    _back: Tensor | None = None
    _asked = False

    def __init__(self, moves: EntryOwner, tensor: Tensor, policy: SavedTensorPolicy, name: str) -> None:
        self._moves, self.policy, self._name = moves, policy, name
        self._dtype, self.device = tensor.dtype, tensor.device
        storage = tensor.untyped_storage()
        self._key = storage._cdata
        self._storage = weakref.ref(storage)  # not its address, which the allocator reuses

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

    def is_of(self, storage: torch.UntypedStorage) -> bool:
        """Return whether `storage` is the one that autograd saved."""
        return self._storage() is storage

    def keep_readable(self, tensor: Tensor) -> None:
        """Keep it resident and readable until it is offloaded; `tensor` is the one that it was made of."""
        self._asked = True
        covers = tensor.nbytes == tensor.untyped_storage().nbytes() and _is_contiguous(tensor)
        if covers and self.policy.is_exact:
            self._size, self._back = tensor.size(), tensor.detach()
        else:
            self._back = _flat_storage(tensor)

    def handle(self, tensor: Tensor) -> OffloadedTensor:
        """Return a handle to the view `tensor` of the storage."""
        is_all = tensor.size() == self._size and tensor.dtype == self._dtype and _is_contiguous(tensor)
        return OffloadedTensor(
            self, None if is_all else View.describe(tensor), requires_grad=tensor.requires_grad
        )

    def offload(self, n_bytes: int) -> None:
        """Start the copy of `n_bytes` to the host, clone the rest; hold the source until it has ended."""
        source, self._back = self._back, None
        assert source is not None
        self._source, self._asked, self.moved = source, False, True
        if n_bytes == source.nbytes:
            self._host = seam.to_host(source)
            return
        flat = source.view(-1).view(torch.uint8)
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

    def fetch(self) -> Tensor:
        """Return the storage on the device; the first read reloads it, for all views."""
        if not self._asked:
            self._asked = True
            # First, because copies in flight hold device memory that the reload may need.
            self._moves.complete_offloads()
            self._moves.reload(self)
        assert self._back is not None
        return self._back

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
            flat = torch.ops.memtune.to_device_with_tail(self._host, self._kept, self.device)
            self._back = flat if self._size is None else flat.view(self._dtype).view(self._size)
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
        weak = self._moves.entries.get(self._key)
        if weak is not None and weak() is self:  # not the entry of the next storage at this address
            del self._moves.entries[self._key]
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
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, whole: Tensor) -> Tensor:
        """Return the same view of `whole`, a contiguous tensor of the storage's bytes."""
        flat = whole if whole.dtype == self.dtype else whole.view(-1).view(self.dtype)
        return _conj_neg_view(
            torch.as_strided(flat, self.size, self.stride, self.offset), conj=self.is_conj, neg=self.is_neg
        )


class OffloadedTensor:
    """Tensor whose storage is, or may be, on the host or SSD; autograd saves this object instead."""

    __slots__ = ("entry", "requires_grad", "view")

    def __init__(self, entry: SavedStorage, view: View | None, *, requires_grad: bool) -> None:
        self.entry, self.view, self.requires_grad = entry, view, requires_grad
        """`view`: its layout; None: it is all of the storage, in the shape that a reload returns."""

    def get(self) -> Tensor:
        """Return the tensor on the device, after a reload if necessary."""
        whole = self.entry.fetch()
        return whole if self.view is None else self.view.on(whole)


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


def _is_contiguous(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` follow each other in memory as they are."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


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
