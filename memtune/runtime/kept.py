"""What a recomputed region keeps: outputs of some ops, handed out in the second run in place of running them again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from memtune.calls import Call, Calls
from memtune.runtime.left_out import LeftOut
from memtune.runtime.moved import Moved, View, id_of
from memtune.runtime.op_arguments import draws, mutated
from memtune.runtime.random_state import RandomState

Keep = Callable[[Any], bool] | Calls
"""What a region keeps: the outputs of all ops that a function accepts, or what a list of calls says."""


class Kept:
    """The outputs of one op that a recomputed region keeps."""

    def __init__(self, out: Any, before: int, random: RandomState | None = None) -> None:
        self.before = before
        """How many recomputed tensors had been saved when the op ran."""
        self._random = random
        """What the op left of the random state, if it may have drawn: the ops after it draw on from there."""
        # Rule 5 needs to see later writes: a detach below autograd would count them apart from the original's.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            self._out: Any = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, out)
        tensors = [t for t in tree_leaves(self._out) if isinstance(t, Tensor)]
        self._versions = [(t, t._version) for t in tensors]
        self._storages = [weakref.ref(t.untyped_storage()) for t in tensors]
        self._written = False

    def note_write(self, storage: torch.UntypedStorage) -> None:
        """An op of the region writes into `storage`: views that count writes apart (`unsafe_split`) show it in no other way."""
        self._written = self._written or any(kept() is storage for kept in self._storages)

    def unchanged(self) -> bool:
        """Nothing has written into the outputs since they were kept."""
        return not self._written and all(t._version == version for t, version in self._versions)

    def holds(self, tensor: Tensor) -> bool:
        """`tensor` looks into one of the outputs, as they were kept or as they came back from the host."""
        storage = tensor.untyped_storage()
        return any(kept() is storage for kept in self._storages) and self.unchanged()

    def settle(self, claim: Callable[[Tensor], Tensor | Moved]) -> None:
        """Let the table move what is kept; from here on nothing can change it."""
        self._out = tree_map(lambda t: claim(t) if isinstance(t, Tensor) else t, self._out)
        self._versions = []

    def claimed(self, tensor: Tensor, claim: Tensor | Moved) -> Tensor | Moved:
        """Autograd saved an output and the table decided; what went to the host is not held here any longer."""
        if isinstance(claim, Moved) and claim.entry.moved:  # what may still leave can be changed before it does
            storage = tensor.untyped_storage()
            self._versions = [(t, version) for t, version in self._versions if t.untyped_storage() is not storage]
            self._out = tree_map(
                lambda t: Moved(claim.entry, View.describe(t)) if isinstance(t, Tensor) and t.untyped_storage() is storage else t,
                self._out,
            )
        return claim

    def take(self) -> Any:
        """The outputs, for the second run."""
        if self._random is not None:
            self._random.continue_from()
        out = tree_map(lambda t: t.get() if isinstance(t, Moved) else t.detach() if isinstance(t, Tensor) else t, self._out)
        self._storages = [weakref.ref(t.untyped_storage()) for t in tree_leaves(out) if isinstance(t, Tensor)]
        return out


class KeepMode(TorchDispatchMode):
    """First run: remembers the outputs of the ops that the region keeps, and the calls that it leaves out."""

    def __init__(
        self,
        keep: Keep,
        kept: dict[Call, Kept],
        left_out: LeftOut,
        count: Callable[[], int],
        random: Callable[[], RandomState],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keep, self._kept, self._left_out, self._count, self._random = keep, kept, left_out, count, random
        self._seen = _Occurrences()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op and notes what it returned if it does not run again."""
        out = func(*args, **(kwargs or {}))
        if isinstance(self._keep, Calls):
            call = self._seen.next(func)
            if call in self._keep.left_out:
                self._left_out.leave_out(
                    call, func, args, out, before=self._count(), random=self._state_after(func, args, kwargs)
                )
            elif call in self._keep.kept:
                self._kept[call] = self._output(func, args, kwargs, out)
            else:
                self._left_out.read_by(func, (args, kwargs), out, before=self._count())
        elif self._keep(func):
            self._kept[self._seen.next(func)] = self._output(func, args, kwargs, out)
        if func._schema.is_mutable:
            for storage in {tensor.untyped_storage() for tensor in mutated(func, args, kwargs or {})}:
                for kept in self._kept.values():
                    kept.note_write(storage)
        return out

    def _output(self, func: Any, args: Any, kwargs: Any, out: Any) -> Kept:
        return Kept(out, self._count(), self._state_after(func, args, kwargs))

    def _state_after(self, func: Any, args: Any, kwargs: Any) -> RandomState | None:
        return self._random() if draws(func, args, kwargs or {}) else None


class ReplayMode(TorchDispatchMode):
    """Second run: hands out what was kept instead of computing it, each once."""

    def __init__(self, kept: dict[Call, Kept], left_out: LeftOut) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._left_out, self._seen = kept, left_out, _Occurrences()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op, unless its outputs were kept or are not needed."""
        call = self._seen.next(func)
        if call in self._left_out:
            return self._left_out.take(call, func, args, kwargs or {})
        kept = self._kept.get(call)
        return func(*args, **(kwargs or {})) if kept is None else kept.take()


class NamedMode(TorchDispatchMode):
    """Notes what some calls of a region return, for as long as its storages live."""

    def __init__(self, calls: frozenset[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._seen = calls, _Occurrences()
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op."""
        out = func(*args, **(kwargs or {}))
        if self._seen.next(func) in self._calls:
            self._made |= {id_of(t): weakref.ref(t.untyped_storage()) for t in tree_leaves(out) if isinstance(t, Tensor)}
        return out

    def made(self, tensor: Tensor) -> bool:
        """`tensor` looks into what one of the calls returned."""
        found = self._made.get(id_of(tensor))
        return found is not None and found() is tensor.untyped_storage()


class _Occurrences:
    """Numbers the calls of each op: (op, 0), (op, 1) and so on."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}

    def next(self, func: Any) -> Call:
        name = str(func)
        self._count[name] = self._count.get(name, -1) + 1
        return name, self._count[name]
