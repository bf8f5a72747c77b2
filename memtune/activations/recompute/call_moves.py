"""Storages that one call of a region packs, of those that its forward saves (Rules 1, 2, 10 and 11 of
`activations.recompute.activation_table`).

Most saved tensors are parameters or small, and remain: the hook `packer` lets them through before it asks
anything else, so the region's parameters are looked up only in a call that saves larger storages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memtune.activations.offload import (
    ByteShare,
    OffloadedTensor,
    SavedStorage,
    accepts,
    float_bytes,
    id_of,
    is_cast_weight,
    is_written_part,
)
from memtune.activations.recompute.region import Region
from memtune.activations.recompute.saved_outputs import NamedOutputs
from memtune.activations.recompute.second_forward import CallArguments, is_plain
from memtune.program import INPUTS
from memtune.runtime import EagerRecorder

if TYPE_CHECKING:
    from memtune.activations.recompute.activation_table import ActivationTable

_NONE: frozenset[Any] = frozenset()


class CallMoves:
    """Claim of a region on the storages that one of its calls saves.

    Args:
        table: The table of the region.
        region: One with a share to move.
        args: The call's arguments, of which some claims read the storages.
        kwargs: The same, by name.
    """

    __slots__ = (
        "__weakref__",
        "_decided",
        "_entered",
        "_fixed",
        "_foreign",
        "_region",
        "_shapes",
        "_share",
        "_table",
        "least_bytes",
        "named",
    )

    def __init__(
        self, table: ActivationTable, region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._table, self._region = table, region
        policy, only = region.policy, region.only
        self.named = None if only is None else NamedOutputs(only)
        """Notes the outputs that alone may move; None: all saved tensors may."""
        self._entered, self._foreign, self._shapes = _NONE, _NONE, _NONE
        largest_input = 0
        if table.own is not None or only is not None or not policy.is_exact:
            leaves = CallArguments(args, kwargs).leaves
            inputs = [each for each in leaves if is_plain(each)]
            if table.own is not None:
                self._foreign = table.own.others(leaves)
            if only is not None and INPUTS in only:
                self._entered = frozenset(map(id_of, inputs))
            if not policy.is_exact:
                sizes = [each.untyped_storage().nbytes() for each in inputs if float_bytes(each)]
                largest_input = max(sizes, default=0)
                self._shapes = region.contract.shapes()
        self.least_bytes = policy.hops[0].least_bytes(region.min_bytes, largest_input)
        """Size of the smallest storage that it packs."""
        self._share = ByteShare[SavedStorage](region.move)
        self._decided: dict[int, SavedStorage] = {}
        self._fixed: dict[int, str] | None = None

    def claim(self, tensor: Tensor) -> Tensor | OffloadedTensor:
        """Return `tensor`, or a handle to its offloaded storage (Rule 2)."""
        storage = tensor.untyped_storage()
        key, table = storage._cdata, self._table
        if storage.nbytes() < self.least_bytes and key not in table.entries:
            return tensor
        # Parameters, buffers, and parts being written. Most tensors are of the class itself, which asking
        # `nn.Parameter`'s metaclass costs more than to compare.
        if (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)) or key in table.lasting:
            return tensor
        if key in self._foreign or is_written_part(tensor):
            return tensor
        exact = self._region.policy.is_exact
        if not exact and is_cast_weight(tensor, self._shapes):
            return tensor
        entry = self._decided.get(key)
        # An id may belong to another storage by now.
        if entry is None or not entry.is_of(storage):
            may_move = self.named is None or self.named.is_output(tensor) or key in self._entered
            may_move = may_move and (exact or accepts(self._region.policy, tensor))
            entry = self._decided[key] = table.entry(
                tensor, storage, self._region, self._share, self.least_bytes, may_move=may_move
            )
        return entry.handle(tensor) if entry.must_fetch(tensor) else tensor

    def pack(self, tensor: Tensor) -> Tensor | OffloadedTensor:
        """Return the object that autograd saves instead of `tensor` (Rules 1 and 2)."""
        # A copy of a parameter would be stale or double: FSDP2 frees it after forward and refills it in
        # place.
        if not is_plain(tensor) or self._is_fixed(tensor):
            return tensor
        saved = self.claim(tensor)
        return saved if saved is not tensor else detached(tensor)

    def _is_fixed(self, tensor: Tensor) -> bool:
        """Return whether the storage is that of a parameter or buffer of the region."""
        base = tensor if tensor._base is None else tensor._base
        if base.grad_fn is not None and type(base) is Tensor:
            return False  # an op made it, in memory of its own
        if self._fixed is None:
            # FSDP2 registers unsharded parameters for compute, so storages change between calls.
            self._region.contract.refresh()
            self._fixed = self._region.contract.names()
        return tensor.untyped_storage()._cdata in self._fixed

    def packer(self) -> Callable[[Tensor], Tensor | OffloadedTensor]:
        """Return the pack hook of a region that is not recomputed."""
        least_bytes, entries, pack_large = self.least_bytes, self._table.entries, self.pack

        def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
            storage = tensor.untyped_storage()
            if storage.nbytes() < least_bytes and storage._cdata not in entries:
                return tensor if tensor.grad_fn is None or not is_plain(tensor) else tensor.detach()
            return pack_large(tensor)

        return pack

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward of a region that is not recomputed; each tensor that autograd saves is packed."""
        with saved_tensors_hooks(self.packer(), unpack):
            if self.named is None:
                out = forward(*args, **kwargs)
            else:
                with EagerRecorder(self.named):
                    out = forward(*args, **kwargs)
        self.end()
        return out

    def end(self) -> None:
        """Cut the last storage that was kept, to meet the share exactly (Rule 10); forget the call."""
        rest = self._share.partial_tensor()
        if rest is not None:
            self._table.offload(rest[0], self._region, rest[1])
        # Handles hold the entries from now on. Autograd keeps the hook, and so this object, for as long as
        # the saved tensors: these tables would keep storages alive.
        self._decided, self.named, self._share = {}, None, ByteShare(0.0)


def detached(saved: Tensor | OffloadedTensor) -> Tensor | OffloadedTensor:
    """Return `saved` detached; autograd restores the graph on unpack."""
    # A node that holds its own output would be a reference cycle. Backward would break it, but a graph that
    # no loss reaches would never be freed.
    return saved.detach() if isinstance(saved, Tensor) and saved.grad_fn is not None else saved


def unpack(packed: Any) -> Tensor:
    """Return the tensor that autograd saved, from what `pack` returned for it."""
    found: Tensor = packed if isinstance(packed, Tensor) else packed.get()
    return found
