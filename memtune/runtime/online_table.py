"""The tensors of a running model under a byte budget: who made what, who still wants it, what was evicted and runs again.

Rule 1. The native machine (`csrc/remat`) keeps the books and decides; this table does what its journal says to real tensors.
Rule 2. What Python or autograd's engine hold cannot be evicted: it is held on the books until only the table's own alias of
        its storage is left. What autograd would save, the table keeps in its place (`pack`), or brings back (`unpack`).
Rule 3. An op runs again on what it read then: a tensor from outside that has been written into since is an error, a buffer or
        input is copied before it is written into, a value changed in place is a version of its own.
Rule 4. Collectives, ops that write into what comes from outside, and ops of backward never run again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from memtune import _native, flops
from memtune.errors import ApplyError
from memtune.remat import EVICT, OVERWRITE, REPLAY, Policy
from memtune.runtime.below_autograd import ASK_GRAD_MODE, as_recorded
from memtune.runtime.op_arguments import mutated, tensors_in
from memtune.runtime.output_sizes import OutputSizes, key_of
from memtune.runtime.random_state import RandomState
from memtune.runtime.tape import BATCH_NORMS, no_autocast
from memtune.units import format_bytes

_TRIES = 4
"""Runs of an op that the device refuses, each after more was evicted."""


class View(NamedTuple):
    """How a tensor looks into its storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """How `tensor` does."""
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def on(self, alias: Tensor) -> Tensor:
        """The same view of the storage behind `alias`."""
        if alias.dtype != self.dtype:
            alias = alias.view(self.dtype)
        return alias.as_strided(self.size, self.stride, self.offset)


@dataclass(slots=True, eq=False)
class Value:
    """One version of one storage that an op of the model made."""

    number: int
    """On the books."""
    bytes: int
    again: bool
    alias: Tensor | None = None
    """Looks at its storage while that is there."""
    outside: bool = True
    """Whether Python or the engine hold it, as far as was seen."""
    writes: int = 0
    """How often it was written into without becoming another value."""


@dataclass(slots=True, eq=False)
class Given:
    """A tensor from outside; replaced by a copy before it is written into."""

    tensor: Tensor
    version: int


class Read(NamedTuple):
    """A tensor that an op read."""

    of: Value | Given
    view: View
    writes: int
    """Of the value, so far."""


@dataclass(slots=True, eq=False)
class Ran:
    """An op that may run again."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    made: list[tuple[int, Value]]
    """Position among the tensors that it returns, and the value."""
    over: tuple[Value, Value] | None
    """The value that it writes into, and what it makes of it."""
    random: RandomState | None


@dataclass(slots=True, eq=False)
class Kept:
    """What autograd holds in place of a tensor; when it goes, so does the value's reference."""

    value: Value
    view: View
    writes: int
    gone: Callable[[Value], None]

    def __del__(self) -> None:
        self.gone(self.value)


@dataclass(frozen=True)
class Costs:
    """Seconds of an op by its size, which decides what is cheap to have again: equal on every rank and in every run."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float

    def of(self, n_flops: float, n_bytes: float) -> float:
        """Seconds of an op."""
        return n_flops / self.flops_per_s + n_bytes / self.bytes_per_s + self.launch_s


@dataclass(eq=False)
class OnlineTable:
    """Values and books of the forwards that wait for their backward.

    Args:
        module: Whose forward runs.
        policy: Who is evicted.
        budget_bytes: For the values alone.
        background_bytes: What else there is, for messages.
        costs: Of ops.
        scratch: Bytes that a kernel takes while it runs, by name of the op.
        sizes: What ops make; kept over many steps.
    """

    module: nn.Module
    policy: Policy
    budget_bytes: int
    background_bytes: int
    costs: Costs
    scratch: Mapping[str, int]
    sizes: OutputSizes
    backward: bool = False
    _paused: bool = False
    _values: dict[int, Value] = field(default_factory=dict)  # by address of the storage
    _by_number: dict[int, Value] = field(default_factory=dict)
    _held: dict[int, Value] = field(default_factory=dict)  # those outside, by number
    _given: dict[int, Given] = field(default_factory=dict)
    _ops: list[Ran] = field(default_factory=list)
    _dead: deque[int] = field(default_factory=deque)
    _unkept: deque[Value] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._books = _native.Rematerializer(self.policy.settings(max(self.budget_bytes, 1)))

    # -- an op runs ----------------------------------------------------------------------------------------------------

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op of the model's forward or backward, with room made for what it makes."""
        if self._paused or func.is_view or func.namespace in ("prim", "prims", "profiler"):
            return func(*args, **kwargs)
        self._settle()
        inputs, written = tensors_in([*args, *kwargs.values()]), mutated(func, args, kwargs)
        key = key_of(func, args, kwargs)
        expected = sum(self.sizes.of(key, func, args, kwargs))
        noted = None if self.backward else self._noted(func, args, kwargs, inputs, written)
        out = self._fitted(func, args, kwargs, expected + self.scratch.get(str(func), 0), bool(written))
        known = {each.untyped_storage()._cdata for each in inputs}
        fresh: dict[int, tuple[int, Tensor]] = {}
        for at, each in enumerate(tensors_in([out])):
            if each.untyped_storage()._cdata not in known:
                fresh.setdefault(each.untyped_storage()._cdata, (at, each))
        self.sizes.learn(key, tuple(each.untyped_storage().nbytes() for _, each in fresh.values()))
        self._enter(func, args, kwargs, out, noted, inputs, list(fresh.values()))
        return out

    def _fitted(self, func: Any, args: Any, kwargs: Any, needs_bytes: int, writes: bool) -> Any:
        """Run it; where the device has no room although the books have, evict more and try again."""
        for attempt in range(_TRIES):
            self._do(partial(self._books.make_room, needs_bytes << attempt), func)
            try:
                return func(*args, **kwargs)
            except torch.OutOfMemoryError:
                if writes or attempt == _TRIES - 1 or needs_bytes << (attempt + 1) > self.budget_bytes:
                    raise
        raise AssertionError

    def _noted(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], written: list[Tensor]) -> Ran | None:
        """The op as it could run again; None where it must not."""
        owners = {each.untyped_storage()._cdata for each in written if each.untyped_storage()._cdata in self._values}
        abroad = [each for each in written if each.untyped_storage()._cdata not in self._values]
        for each in abroad:
            self._copy_given(each)
        odd = any(each.is_conj() or each.is_neg() or each.layout != torch.strided for each in inputs)
        buffers_only = abroad and str(func) in BATCH_NORMS
        if odd or (abroad and not buffers_only) or len(owners) > 1 or func.namespace in ("c10d", "_c10d_functional", "memtune"):
            self._spoil(written)
            return None
        over = None if abroad or not written else self._values[written[0].untyped_storage()._cdata]
        if over is not None and not over.again:
            self._spoil(written)
            return None
        random = RandomState.capture(self.module) if torch.Tag.nondeterministic_seeded in func.tags else None
        plain_args, plain_kwargs = self._reads(tuple(args)), {name: self._reads(value) for name, value in kwargs.items()}
        return Ran(func, plain_args, plain_kwargs, [], (over, over) if over is not None else None, random)

    def _reads(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            address = value.untyped_storage()._cdata
            mine: Value | Given | None = self._values.get(address)
            if mine is None:
                mine = self._given.get(address)
                if mine is None:
                    mine = self._given[address] = Given(value, value._version)
            return Read(mine, View.of(value), mine.writes if isinstance(mine, Value) else 0)
        if isinstance(value, list | tuple):
            return type(value)(self._reads(each) for each in value)
        return value

    def _copy_given(self, tensor: Tensor) -> None:
        """What ops have read and is about to change stays as a copy for them; parameters are too large for that."""
        given = self._given.pop(tensor.untyped_storage()._cdata, None)
        if given is not None and not isinstance(tensor, nn.Parameter) and not self.backward:
            whole = _whole(given.tensor).clone()
            given.tensor, given.version = whole, whole._version

    def _spoil(self, written: list[Tensor]) -> None:
        """Values that an op wrote into which cannot be repeated: who read them before cannot run again."""
        for each in written:
            value = self._values.get(each.untyped_storage()._cdata)
            if value is not None:
                value.writes += 1

    def _enter(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        noted: Ran | None,
        inputs: list[Tensor],
        fresh: list[tuple[int, Tensor]],
    ) -> None:
        """Put what the op made on the books."""
        if noted is None or (noted.over is not None and fresh):
            for _, each in fresh:
                self._enter_constant(func, each)
            return
        if noted.over is None and not fresh:
            return
        traffic = sum(each.nbytes for each in inputs) + sum(each.nbytes for each in tensors_in([out]))
        cost = self.costs.of(flops.count(func, args, kwargs, out), traffic)
        found = (self._values.get(each.untyped_storage()._cdata) for each in inputs)
        numbers = list(dict.fromkeys(value.number for value in found if value is not None))
        made: list[int] = []
        if noted.over is not None:
            self._overwrite(func, cost, numbers, noted)
            return
        n_bytes = [each.untyped_storage().nbytes() for _, each in fresh]
        self._do(lambda: made.extend(self._books.call(cost, numbers, n_bytes, -1)), func)
        self._ops.append(noted)
        for number, size, (at, each) in zip(made, n_bytes, fresh, strict=True):
            value = Value(number, size, again=True)
            noted.made.append((at, value))
            self._adopt(value, each.detach())

    def _enter_constant(self, func: Any, tensor: Tensor) -> None:
        storage, number = tensor.untyped_storage(), [-1]
        size = storage.nbytes()

        def ask() -> None:
            number[0] = self._books.constant(size)

        self._do(ask, func)
        if self.backward:
            weakref.finalize(storage, self._dead.append, number[0]).atexit = False
        else:
            self._adopt(Value(number[0], size, again=False), tensor.detach())

    def _overwrite(self, func: Any, cost: float, numbers: list[int], noted: Ran) -> None:
        """The value as it was ends, a new version of it lives in the same storage."""
        assert noted.over is not None
        old, made = noted.over[0], list[int]()
        alias, old.alias, old.writes = old.alias, None, old.writes + 1
        assert alias is not None
        self._books.let_go(old.number)
        self._do(lambda: made.extend(self._books.call(cost, numbers, [old.bytes], old.number)), func)
        self._ops.append(noted)
        self._books.release(old.number)
        old.outside = False
        del self._held[old.number]
        value = Value(made[0], old.bytes, again=True)
        noted.over = (old, value)
        self._adopt(value, alias)

    def _adopt(self, value: Value, alias: Tensor) -> None:
        """`value` is there for the first time, and the op's caller holds it."""
        self._by_number[value.number] = self._held[value.number] = value
        self._books.hold(value.number)
        self._place(value, alias)

    def _place(self, value: Value, alias: Tensor) -> None:
        value.alias = alias
        self._values[alias.untyped_storage()._cdata] = value

    def _remove(self, value: Value) -> None:
        """Let its storage go, if it was there."""
        if value.alias is not None:
            address = value.alias.untyped_storage()._cdata
            value.alias = None
            if self._values.get(address) is value:
                del self._values[address]

    # -- who still wants it --------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Tell the books what Python and autograd have let go of since the last op."""
        while self._dead:
            self._books.release(self._dead.popleft())
        for number, value in sorted(self._held.items()):
            assert value.alias is not None
            if _count(value.alias.untyped_storage()._cdata) <= _ALONE:
                value.outside = False
                del self._held[number]
                self._books.let_go(number)
                self._books.release(number)
        while self._unkept:
            self._books.release(self._unkept.popleft().number)
        self._obey(self._books.drain())

    # -- autograd ------------------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> Any:
        """What autograd holds in place of `tensor`, which it saves for backward."""
        value = self._values.get(tensor.untyped_storage()._cdata)
        if self._paused or value is None or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor, tensor._version
        self._books.retain(value.number)
        return Kept(value, View.of(tensor), value.writes, self._unkept.append)

    def unpack(self, kept: Any) -> Tensor:
        """The tensor that autograd had saved; runs again what it takes."""
        if not isinstance(kept, Kept):
            tensor, version = kept
            if tensor._version != version:
                raise _written("a tensor that backward needs")
            return tensor  # type: ignore[no-any-return]
        value = kept.value
        if value.writes != kept.writes:
            raise _written("a tensor that backward needs")
        self._settle()
        self._do(lambda: self._books.bring(value.number), None)
        assert value.alias is not None
        if not value.outside:
            value.outside = True
            self._held[value.number] = value
            self._books.retain(value.number)
            self._books.hold(value.number)
        self._paused = True
        try:
            return kept.view.on(value.alias)
        finally:
            self._paused = False

    # -- what the books decide -----------------------------------------------------------------------------------------

    def leave_room(self, n_bytes: int) -> None:
        """Evict until so many bytes are free: for what runs between forward and backward."""
        self._settle()
        self._do(lambda: self._books.make_room(n_bytes), None)

    def counted(self) -> dict[str, Any]:
        """Counters of the books."""
        found: dict[str, Any] = self._books.counted()
        return found

    def _do(self, ask: Callable[[], object], func: Any) -> None:
        try:
            ask()
        except RuntimeError as error:
            self._obey(self._books.drain())
            counted = self._books.counted()
            least = self.background_bytes + counted["wanted_bytes"] + counted["held_bytes"]
            raise ApplyError(
                f"the budget is too small for {func or 'the model'}: nothing is left to evict.",
                evidence=f"It asks for {format_bytes(counted['wanted_bytes'])} beside {format_bytes(counted['held_bytes'])} that "
                f"must stay and {format_bytes(self.background_bytes)} of parameters, gradients, optimizer state and inputs.",
                fix=f"give a budget of at least {format_bytes(least)}, or a smaller micro-batch",
                code="MT337",
            ) from error
        self._obey(self._books.drain())

    def _obey(self, journal: list[tuple[int, int]]) -> None:
        over = False
        for act, number in journal:
            if act == EVICT:
                value = self._by_number.get(number)
                if value is not None:
                    self._remove(value)
            elif act == REPLAY:
                self._again(self._ops[number], over)
            over = act == OVERWRITE

    def _again(self, ran: Ran, over: bool) -> None:
        """Run an op once more (Rule 3)."""
        self._paused = True
        try:
            with torch.no_grad(), no_autocast():
                whole = _written_again(ran, over)
                args, kwargs = tree_map(
                    lambda each: _given_again(each, ran, whole), (ran.args, ran.kwargs), is_leaf=lambda x: isinstance(x, Read)
                )
                if str(ran.func) in BATCH_NORMS:
                    args = (*args[:3], None, None, *args[5:])  # the running statistics have had their update
                out = _called(ran, args, kwargs)
        finally:
            self._paused = False
        if ran.over is not None:
            assert whole is not None
            if over:
                self._remove(ran.over[0])
            self._place(ran.over[1], whole)
        made = tensors_in([out])
        for at, value in ran.made:
            if value.alias is None:
                self._place(value, made[at])


def _written_again(ran: Ran, over: bool) -> Tensor | None:
    """The whole storage that an in-place op writes into, when it runs again: that of the value, or a copy."""
    if ran.over is None:
        return None
    old = ran.over[0]
    assert old.alias is not None
    whole = _whole(old.alias)
    return whole if over else whole.clone()


def _given_again(each: Any, ran: Ran, whole: Tensor | None) -> Any:
    if not isinstance(each, Read):
        return each
    if isinstance(each.of, Given):
        if each.of.tensor._version != each.of.version:
            raise _written(f"a tensor that {ran.func} has read and must read again")
        return each.view.on(each.of.tensor)
    if ran.over is not None and each.of is ran.over[0]:
        assert whole is not None
        return each.view.on(whole)
    if each.of.alias is None or (not each.of.again and each.of.writes != each.writes):
        raise _written(f"a tensor that {ran.func} has read and must read again")
    return each.view.on(each.of.alias)


def _called(ran: Ran, args: Any, kwargs: Any) -> Any:
    if str(ran.func) in ASK_GRAD_MODE:
        with as_recorded():
            return ran.func(*args, **kwargs)
    if ran.random is not None:
        with ran.random.restored():
            return ran.func(*args, **kwargs)
    return ran.func(*args, **kwargs)


def _whole(alias: Tensor) -> Tensor:
    """All of the storage behind `alias`."""
    return alias.as_strided((alias.untyped_storage().nbytes() // alias.element_size(),), (1,), 0)


def _written(what: str) -> ApplyError:
    return ApplyError(
        f"{what} was written into in place after the model's forward had used it.",
        fix="write x = x + y instead of x += y, and step the optimizer after backward", code="MT326",
    )  # fmt: skip


_count: Callable[[int], int] = torch._C._storage_Use_Count


def _alone() -> int:
    tensor = torch.zeros(1)
    return _count(tensor.untyped_storage()._cdata)


_ALONE = _alone()
"""Use count of a storage that one tensor holds."""
