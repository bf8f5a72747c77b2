"""A model's construction, written down on fake tensors and run later, a tensor at a time.

The user's code runs once, on tensors without memory; every op that makes or fills one is a line of the `Construction`. Run later
for real, in the same order, each tensor is whole only from the first op whose work is still in it to the last one. Six rules:

1. A line names storages, with size, stride and offset: views need no line, and tied weights are one storage.
2. What draws random numbers runs in any case, and first from the generators' states of the beginning: so each tensor gets the
   bits that the plain construction would have given it. What a later op overwrites whole is drawn into memory that is let go.
3. Other lines run only if what they write is in a parameter or buffer in the end.
4. A number that the code asks for (`.item()`) is computed at once, if nothing on the way to it draws.
5. Tensors that the code has real values for (lists, arrays, files) stay real; a line that reads one keeps what it held then.
6. torch's `trunc_normal_` draws until it likes what it has drawn: it is a line as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memtune.errors import ApplyError
from memtune.runtime.fake_mode import OneFakeMode
from memtune.runtime.op_arguments import mutated, tensors_in
from memtune.runtime.tiers import HOST, tier

_FILLS = frozenset(
    f"aten.{name}_" for name in "normal uniform zero fill copy random bernoulli exponential log_normal cauchy geometric".split()
)
"""Write every element of their first argument, and read none."""
_SIZES = frozenset(("aten.resize_", "aten.set_"))
"""Change a storage under the lines that name it."""

Place = Callable[[str, Tensor], None]
"""Gets a parameter or buffer by name when its value is final; it keeps what it wants, the tensor is let go then."""


@dataclass(frozen=True)
class Ref:
    """A tensor: where it is in which storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Line:
    """An op of the construction."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Ref | None, ...]
    """Outputs in storages of their own, in the order of the outputs."""
    writes: frozenset[int]
    reads: frozenset[int]
    fills: int
    """The storage that it overwrites whole without a look at it; -1: none."""
    draws: bool


@dataclass
class Construction:
    """How a model's tensors came to be (rule 1)."""

    device: torch.device
    """Where the model is to be."""
    lines: list[Line] = field(default_factory=list)
    tensors: dict[str, Ref] = field(default_factory=dict)
    """Parameters and buffers of the finished model, one name each."""
    bytes: list[int] = field(default_factory=list)
    """Of each storage."""
    places: list[torch.device] = field(default_factory=list)
    """Where the user's code would have had each storage."""
    states: dict[Any, Tensor] = field(default_factory=dict)
    """States of the generators at the beginning; None is torch's own of the CPU, an index that of a GPU."""

    def run(self, place: Place) -> None:
        """Make every parameter and buffer, as the plain construction would, and hand each to `place` (rules 2 and 3).

        torch's generators are left as the plain construction would have left them if they still are as they were before it;
        numbers that were drawn since stay drawn: then they are left alone.
        """
        needed = self._needed(self.tensors.values())
        named: dict[int, list[str]] = {}
        for name, ref in self.tensors.items():
            named.setdefault(ref.storage, []).append(name)
        last = {storage: at for at in sorted(needed) if needed[at] for storage in self._touched(self.lines[at])}
        now = {which: _state(which) for which in self.states}
        untouched = all(torch.equal(state, self.states[which]) for which, state in now.items())
        for which, state in self.states.items():
            _set_state(which, state)
        try:
            with torch.no_grad(), tier(HOST):
                memory = _Memory(self)
                for at in sorted(needed):
                    memory.run(self.lines[at], useful=needed[at])
                    for storage in self._touched(self.lines[at]) if needed[at] else ():
                        if last[storage] == at:
                            self._finish(storage, named.pop(storage, []), memory, place)
                for storage, names in named.items():  # never written: empty tensors
                    self._finish(storage, names, memory, place)
        finally:
            if not untouched:
                for which, state in now.items():
                    _set_state(which, state)

    def _finish(self, storage: int, names: list[str], memory: _Memory, place: Place) -> None:
        for name in names:
            place(name, memory.tensor(self.tensors[name]))
        memory.storages.pop(storage, None)

    def value(self, ref: Ref) -> Tensor:
        """What the tensor holds now (rule 4).

        Raises:
            ApplyError: It follows from random numbers.
        """
        needed = self._needed([ref], draws=False)
        drawn = next((self.lines[at] for at in needed if self.lines[at].draws), None)
        if drawn is not None:
            raise not_deferred(f"it looks at a number that {drawn.func} has drawn")
        with torch.no_grad(), tier(HOST):
            memory = _Memory(self)
            for at in sorted(needed):
                memory.run(self.lines[at], useful=True)
            return memory.tensor(ref)

    def _needed(self, wanted: Iterable[Ref], *, draws: bool = True) -> dict[int, bool]:
        """Lines to run, and whether for what they write or only for what they draw."""
        live, needed = {ref.storage for ref in wanted}, dict[int, bool]()
        for at in range(len(self.lines) - 1, -1, -1):
            line = self.lines[at]
            made = {ref.storage for ref in line.made if ref is not None}
            if live & (line.writes | made):
                needed[at] = True
                live -= made
                live.discard(line.fills)
                live |= line.reads
            elif line.draws and draws:
                scratch = line.fills >= 0 and line.reads <= {line.fills}
                needed[at] = not (scratch or not line.reads)
                if needed[at]:  # what it draws depends on what it reads
                    live -= made
                    live |= line.reads
        return needed

    @staticmethod
    def _touched(line: Line) -> set[int]:
        return {ref.storage for ref in line.made if ref is not None} | line.writes | line.reads


class _Memory:
    """The storages that are real at the moment."""

    def __init__(self, construction: Construction) -> None:
        self._of = construction
        self.storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, ref: Ref) -> Tensor:
        """The real one; its memory is made at first use."""
        storage = self.storages.get(ref.storage)
        if storage is None:
            storage = torch.empty(
                self._of.bytes[ref.storage], dtype=torch.uint8, device=self._of.places[ref.storage]
            ).untyped_storage()  # fmt: skip
            self.storages[ref.storage] = storage
        empty = torch.empty(0, dtype=ref.dtype, device=storage.device)
        return empty.set_(storage, ref.offset, ref.size, ref.stride)

    def run(self, line: Line, *, useful: bool) -> None:
        """The op of `line`; where it is only there to draw, what it writes is let go (rule 2)."""
        memory = self if useful else _Memory(self._of)
        real = _mapped(lambda each: memory.tensor(each) if isinstance(each, Ref) else each, (line.args, line.kwargs))
        out = line.func(*real[0], **real[1])
        for ref, each in zip(line.made, tensors_in((out,)), strict=True):
            if ref is None or not useful:
                continue
            if (tuple(each.stride()), each.storage_offset(), each.untyped_storage().nbytes()) != (
                ref.stride, ref.offset, self._of.bytes[ref.storage],
            ):  # fmt: skip
                self.tensor(ref).copy_(each)
            else:
                self.storages[ref.storage] = each.untyped_storage()


class Recorder(TorchDispatchMode):
    """Runs a model's construction on fake tensors and writes it down."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.construction = Construction(device, states={which: _state(which) for which in _generators()})
        self._fake = OneFakeMode()
        self._storages: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, everything that is made is written down.

        Raises:
            ApplyError: Something cannot be.
        """
        whole = torch.nn.init._no_grad_trunc_normal_

        def at_once(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                return whole(tensor, *args, **kwargs)
            self._note_generator(kwargs)
            fills, ref = self._filled(tensor), self.ref(tensor)
            reads = frozenset(() if fills >= 0 else (ref.storage,))
            line = Line(whole, (ref, *args), kwargs, (None,), frozenset((ref.storage,)), reads, fills, draws=True)
            self.construction.lines.append(line)
            return tensor

        torch.nn.init._no_grad_trunc_normal_ = at_once
        try:
            with self:
                yield
        finally:
            torch.nn.init._no_grad_trunc_normal_ = whole

    def ref(self, tensor: Tensor) -> Ref:
        """Where a fake `tensor` is.

        Raises:
            ApplyError: It was not made while this recorded.
        """
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None:
            raise not_deferred("it uses a tensor without memory that was made before")
        return Ref(storage, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        fakes = [each for each in given if isinstance(each, FakeTensor)]
        if func is torch.ops.aten._local_scalar_dense.default and fakes:
            return self.construction.value(self.ref(fakes[0])).item()
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if given and not fakes:
            if draws:
                raise not_deferred(f"{func} draws into a tensor that was made of values")
            return func(*args, **kwargs)  # rule 5
        if str(func.overloadpacket) in _SIZES:
            raise not_deferred(f"{func} changes memory under other tensors")
        try:
            with self._fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise not_deferred(f"{func} needs values") from None
        if func.namespace != "prim":
            self._write_down(func, args, kwargs, fakes, out, draws)
        return out

    def _write_down(self, func: Any, args: Any, kwargs: dict[str, Any], fakes: Sequence[Tensor], out: Any, draws: bool) -> None:
        written = mutated(func, args, kwargs)
        made = tuple(self._new(each) for each in tensors_in((out,)))
        if not any(made) and not written:
            return  # a view
        if any(not isinstance(each, FakeTensor) for each in written):
            raise not_deferred(f"{func} writes what was computed into a tensor that was made of values")
        self._note_generator(kwargs)
        named, more = _mapped(self._as_now, (args, kwargs))
        fills = self._filled(args[0]) if str(func.overloadpacket) in _FILLS else -1
        storages = [self.ref(each).storage for each in fakes]
        reads = frozenset(each for each in storages if each != fills or storages.count(each) > 1)
        writes = frozenset(self.ref(each).storage for each in written)
        self.construction.lines.append(Line(func, named, more, made, writes, reads, fills, draws))

    def _as_now(self, value: Any) -> Any:
        """Real tensors may be written into before the line is run, so it keeps their values."""
        if isinstance(value, FakeTensor):
            return self.ref(value)
        if not isinstance(value, Tensor):
            return value
        with _disable_current_modes(), tier(HOST):
            return value.detach().clone()

    def _new(self, tensor: Tensor) -> Ref | None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages or not isinstance(tensor, FakeTensor):
            return None
        self._storages[storage._cdata] = len(self._alive)
        self._alive.append(storage)  # so that its address is no one else's
        self.construction.bytes.append(int(storage.nbytes()))
        self.construction.places.append(tensor.device)
        return self.ref(tensor)

    def _note_generator(self, kwargs: dict[str, Any]) -> None:
        which = kwargs.get("generator")
        if which is not None and which not in self.construction.states:
            self.construction.states[which] = _state(which)

    def _filled(self, tensor: Tensor) -> int:
        """The storage of `tensor` if that is all of it, else -1."""
        whole = tensor.nbytes == tensor.untyped_storage().nbytes() and _is_dense(tensor)
        return self.ref(tensor).storage if whole else -1


def not_deferred(why: str) -> ApplyError:
    """The error that says why a construction cannot be put off."""
    return ApplyError(
        f"the model's construction cannot be put off: {why}.",
        fix="build the model itself, without memtune.deferred", code="MT398",
    )  # fmt: skip


def _mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """`values` with `change` done to everything in their tuples, lists and dicts."""
    if isinstance(values, dict):
        return {name: _mapped(change, value) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_mapped(change, value) for value in values)
    return change(values)


def _is_dense(tensor: Tensor) -> bool:
    """Whether every element of the memory between its first and its last is one of its own."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _generators() -> list[Any]:
    return [None, *(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ())]


def _state(which: Any) -> Tensor:
    with tier(HOST):
        if isinstance(which, torch.Generator):
            return which.get_state()
        return torch.get_rng_state() if which is None else torch.cuda.get_rng_state(which)


def _set_state(which: Any, state: Tensor) -> None:
    if isinstance(which, torch.Generator):
        which.set_state(state)
    elif which is None:
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, which)
