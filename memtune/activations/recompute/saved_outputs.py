"""Outputs that a recomputed region keeps: collected in its first run, returned in the second."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from memtune.activations.offload import OffloadedTensor, View, id_of
from memtune.program import SHAPE_ALONE, OpAddress, OpAddresses
from memtune.runtime import OpVisitor, RandomState, draws, mutated

Keep = Callable[[Any], bool] | OpAddresses
"""Selection of the kept outputs: a predicate on ops, or a list of calls."""


class KeptOutputs:
    """Outputs of one op that a recomputed region keeps."""

    def __init__(self, out: Any, before: int, random: RandomState | None = None) -> None:
        self.before = before
        """Number of recomputed tensors that had been saved when the op ran."""
        self._random = random
        """The random state after the op, if it may have drawn; later ops continue from it."""
        # Inside a dispatch mode ADInplaceOrView is excluded, and `detach` would give the alias a version
        # counter of its own. With the key included it shares the original's, which counts later in-place
        # writes (Rule 5).
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._out: Any = _of_tensors(Tensor.detach, out)
        tensors = _tensors_in(self._out)
        self._versions = [(t, t._version) for t in tensors]
        self._storages = [weakref.ref(t.untyped_storage()) for t in tensors]
        self._written = False

    def note_write(self, storage: torch.UntypedStorage) -> None:
        """Note that an op of the region writes into `storage`."""
        # Views with a version counter of their own (`unsafe_split`) do not show it.
        self._written = self._written or any(kept() is storage for kept in self._storages)

    def unchanged(self) -> bool:
        """Return whether no op has written into the outputs since they were kept."""
        return not self._written and all(t._version == version for t, version in self._versions)

    def keys(self) -> list[int]:
        """Return the identities of the storages."""
        return [found._cdata for each in self._storages if (found := each()) is not None]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a view of one of the outputs, as kept or as reloaded from the host."""
        storage = tensor.untyped_storage()
        return any(kept() is storage for kept in self._storages) and self.unchanged()

    def settle(self, claim: Callable[[Tensor], Tensor | OffloadedTensor] | None) -> None:
        """Offload what the table claims, if it claims any; after the first run outputs cannot change."""
        if claim is not None:
            self._out = _of_tensors(lambda each: claim(each) if isinstance(each, Tensor) else each, self._out)
        self._versions = []

    def claimed(self, tensor: Tensor, claim: Tensor | OffloadedTensor) -> Tensor | OffloadedTensor:
        """Return `claim` on an output that autograd saved; drop the reference to an offloaded output."""
        # An output whose offload has not begun can still be changed in place, so its versions are kept.
        if isinstance(claim, OffloadedTensor) and claim.entry.moved:
            storage = tensor.untyped_storage()
            self._versions = [
                (t, version) for t, version in self._versions if t.untyped_storage() is not storage
            ]
            self._out = tree_map(
                lambda t: (
                    claim.entry.handle(t) if isinstance(t, Tensor) and t.untyped_storage() is storage else t
                ),
                self._out,
            )
        return claim

    def pop_outputs(self) -> Any:
        """Return the outputs to the second run."""
        # The op is skipped, so the generator must move past the numbers that it drew.
        if self._random is not None:
            self._random.continue_from()
        out = _of_tensors(_pop_tensor, self._out)
        # A reload has a storage of its own, by which the second run's saved views are recognised.
        self._storages = [weakref.ref(t.untyped_storage()) for t in _tensors_in(out)]
        return out


def _pop_tensor(kept: Tensor | OffloadedTensor) -> Tensor:
    return (kept.get() if isinstance(kept, OffloadedTensor) else kept).detach()


def _of_tensors(convert: Callable[[Any], Any], out: Any) -> Any:
    """Return the result of an op with its tensors converted."""
    if isinstance(out, _CONVERTED):
        return convert(out)
    if type(out) is tuple and not any(isinstance(each, tuple | list | dict) for each in out):
        return tuple([convert(each) if isinstance(each, _CONVERTED) else each for each in out])
    return tree_map(lambda each: convert(each) if isinstance(each, _CONVERTED) else each, out)


def _tensors_in(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    return [each for each in tree_leaves(out) if isinstance(each, Tensor)]


_CONVERTED = (Tensor, OffloadedTensor)


class KeptByStorage:
    """Kept outputs of a region by address and by the storages that hold them now."""

    def __init__(self) -> None:
        self.calls: dict[OpAddress, KeptOutputs] = {}
        self._by_storage: dict[int, list[KeptOutputs]] = {}

    def add(self, call: OpAddress, kept: KeptOutputs) -> None:
        """Add the outputs of `call`, which the first run made."""
        self.calls[call] = kept
        self.index_storages(kept)

    def index_storages(self, kept: KeptOutputs) -> None:
        """Note the storages that `kept` has now."""
        for key in kept.keys():
            self._by_storage.setdefault(key, []).append(kept)

    def find(self, key: int, tensor: Tensor) -> KeptOutputs | None:
        """Return the outputs of which `tensor`, with storage `key`, is a view; None if it is of none."""
        for kept in self._by_storage.get(key, ()):
            if kept.holds(tensor):
                return kept
        return None

    def settle(self, last: int) -> bool:
        """Keep the unchanged outputs that a second run up to recomputed tensor `last` reads; return whether
        none of them has changed.
        """
        # Ops behind the last tensor that backward needs do not run again, so their outputs have no reader.
        asked = {call: kept for call, kept in self.calls.items() if kept.before <= last}
        self.calls = {call: kept for call, kept in asked.items() if kept.unchanged()}
        self._by_storage = {}
        return len(asked) == len(self.calls)


class KeepOutputs(OpVisitor):
    """Visitor of the first forward: collects kept outputs, and notes skipped calls."""

    def __init__(
        self,
        keep: Keep,
        kept: KeptByStorage,
        skipped: SkippedCalls,
        count: Callable[[], int],
        random: Callable[[], RandomState],
    ) -> None:
        self._keep, self._kept, self._skipped = keep, kept, skipped
        self._count, self._random = count, random
        self._seen, self._answers = _Occurrences(), dict[Any, bool]()

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keep the outputs of an op that is not run again."""
        if isinstance(self._keep, OpAddresses):
            call = self._seen.next(func)
            if call in self._keep.skipped:
                # Both visitors count calls of an op in the order of the run, so a plan names an op and its
                # occurrence.
                self._skipped.skip(
                    call, func, args, out, before=self._count(), random=self._state_after(func, args, kwargs)
                )
            elif call in self._keep.kept:
                self._kept.add(call, self._output(func, args, kwargs, out))
            else:
                self._skipped.read_by(func, (args, kwargs), out, before=self._count())
        elif self._is_kept(func):
            self._kept.add(self._seen.next(func), self._output(func, args, kwargs, out))
        if self._kept.calls and is_mutable(func):
            for storage in {tensor.untyped_storage() for tensor in mutated(func, args, kwargs)}:
                for kept in self._kept.calls.values():
                    kept.note_write(storage)

    def _is_kept(self, func: Any) -> bool:
        found = self._answers.get(func)
        if found is None:
            found = self._answers[func] = self._keep(func)  # type: ignore[operator]
        return found

    def _output(self, func: Any, args: Any, kwargs: Any, out: Any) -> KeptOutputs:
        return KeptOutputs(out, self._count(), self._state_after(func, args, kwargs))

    def _state_after(self, func: Any, args: Any, kwargs: Any) -> RandomState | None:
        return self._random() if draws(func, args, kwargs) else None


class ReplayOutputs(OpVisitor):
    """Visitor of the second forward: returns each kept output instead of computing it."""

    def __init__(self, kept: KeptByStorage, skipped: SkippedCalls) -> None:
        self._kept, self._skipped, self._seen = kept, skipped, _Occurrences()

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the outputs of an op if they were kept or are not needed."""
        call = self._seen.next(func)
        if call in self._skipped:
            return self._skipped.placeholder_outputs(call, func, args, kwargs)
        kept = self._kept.calls.get(call)
        if kept is not None:
            out = kept.pop_outputs()
            self._kept.index_storages(kept)
            return out
        return NotImplemented


class NamedOutputs(OpVisitor):
    """Visitor that notes the outputs of some calls of a region, while their storages live."""

    def __init__(self, calls: frozenset[OpAddress]) -> None:
        self._calls, self._seen = calls, _Occurrences()
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note the storages of the op's outputs if it is among the calls."""
        if self._seen.next(func) in self._calls:
            self._made |= {
                id_of(t): weakref.ref(t.untyped_storage()) for t in tree_leaves(out) if isinstance(t, Tensor)
            }

    def is_output(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a view of an output of one of the calls."""
        found = self._made.get(id_of(tensor))
        return found is not None and found() is tensor.untyped_storage()


class _Occurrences:
    """Counter of the calls of each op: (op, 0), (op, 1) and so on."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}

    def next(self, func: Any) -> OpAddress:
        name = name_of(func)
        self._count[name] = number = self._count.get(name, -1) + 1
        return name, number


@cache
def name_of(func: Any) -> str:
    """Return the name of an op, which torch composes at each call of `str`."""
    return str(func)


@cache
def is_mutable(func: Any) -> bool:
    """Return whether an op writes into an argument."""
    return bool(func._schema.is_mutable)


NEVER = sys.maxsize


@dataclass(frozen=True)
class _Shape:
    view: View
    device: torch.device

    def unwritten(self) -> Tensor:
        return torch.empty_strided(
            self.view.size, self.view.stride, dtype=self.view.dtype, device=self.device
        )


@dataclass(frozen=True)
class _SkippedCall:
    out: Any
    """The result of the call, with `_Shape`s instead of tensors; None for a call that wrote in place."""
    random: RandomState | None
    """The random state after the call, if it may have drawn."""


class SkippedCalls:
    """Calls that a recomputed region neither keeps nor runs again, with the shapes of their outputs.

    The first run checks that no op of the second run needs their values. If one does, all calls of the region
    run again: a plan made for other code costs time, never a wrong gradient.
    """

    def __init__(self) -> None:
        self._needed = NEVER
        self._all_run = False
        self._calls: dict[OpAddress, _SkippedCall] = {}
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def skip(
        self, call: OpAddress, func: Any, args: Any, out: Any, *, before: int, random: RandomState | None
    ) -> None:
        """Note that `call`, which ran `func` on `args` and returned `out`, is not to run again.

        `before`, here and below: number of recomputed tensors saved so far. `random`: the state now, if
        `func` may draw.
        """
        if func._schema.is_mutable:
            # A write into a skipped output may be skipped too; into any other tensor it must be repeated.
            if not all(self.is_output(t) for t in _written(func, args)):
                self.is_needed(before)
            self._calls[call] = _SkippedCall(None, random)
            return
        self._calls[call] = _SkippedCall(
            tree_map(lambda t: _Shape(View.describe(t), t.device) if isinstance(t, Tensor) else t, out),
            random,
        )
        self._note(out)

    def read_by(self, func: Any, args: Any, out: Any, *, before: int) -> None:
        """Require that an op that runs again reads no values of skipped outputs."""
        # It may read the shape of one, or make a view.
        # memtune's own ops copy saved tensors, which the second run does not repeat.
        if func.namespace in ("prim", "memtune") or str(func) in SHAPE_ALONE:
            return
        if not any(self.is_output(t) for t in tree_leaves(args) if isinstance(t, Tensor)):
            return
        outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        # A view of a skipped output reads no values and is made again from uninitialized memory.
        if func._schema.is_mutable or not outs or not all(self.is_output(t) for t in outs):
            self.is_needed(before)

    def is_needed(self, before: int) -> None:
        """Note that an op that runs again needs the values of a skipped call."""
        self._needed = min(self._needed, before)

    def is_output(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a view of an output of a skipped call, in the current run."""
        if not self._made:
            return False
        found = self._made.get(id_of(tensor))
        return found is not None and found() is tensor.untyped_storage()

    def settle(self, last: int, *, all_kept: bool) -> None:
        """Decide after the first run whether calls are skipped; ops after the `last` needed do not count."""
        self._made = {}
        # A kept output that was changed is computed again, and its inputs may be skipped outputs.
        self._all_run = self._needed <= last or not all_kept

    @property
    def is_empty(self) -> bool:
        """True if no call is skipped."""
        return not self._calls

    def __contains__(self, call: OpAddress) -> bool:
        """Return whether the second run skips `call`."""
        return call in self._calls

    def placeholder_outputs(self, call: OpAddress, func: Any, args: Any, kwargs: Any) -> Any:
        """Return uninitialized tensors like the outputs of `call`; of an in-place call its argument."""
        left = self._calls[call]
        if self._all_run:
            out = func(*args, **kwargs)
        elif left.out is None:
            return args[0]
        else:
            if left.random is not None:
                left.random.continue_from()
            out = tree_map(lambda shape: shape.unwritten() if isinstance(shape, _Shape) else shape, left.out)
        if not func._schema.is_mutable:
            self._note(out)
        return out

    def _note(self, out: Any) -> None:
        self._made |= {
            id_of(t): weakref.ref(t.untyped_storage()) for t in tree_leaves(out) if isinstance(t, Tensor)
        }


def _written(func: Any, args: Any) -> list[Tensor]:
    arguments = func._schema.arguments
    written = [
        given
        for given, known in zip(args, arguments, strict=False)
        if known.alias_info and known.alias_info.is_write
    ]
    return [t for t in written if isinstance(t, Tensor)]
