"""Record the construction of a model on fake tensors, and run it later for real, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes

from memtune._replaced import replaced
from memtune.device import accelerator
from memtune.errors import ApplyError
from memtune.runtime import HOST, EagerRecorder, OpVisitor, mutated, tensors_in, tier

_FILLS = frozenset(
    f"aten.{name}_"
    for name in (
        "normal uniform zero fill copy random bernoulli exponential log_normal cauchy geometric".split()
    )
)
"""Ops that write every element of their first argument and read none."""
_SIZES = frozenset(("aten.resize_", "aten.set_"))
"""Ops that change a storage to which other ops refer."""

Place = Callable[[str, Tensor], None]
"""Receives a parameter or buffer by name when its value is final; the tensor is freed after the call."""


@dataclass(frozen=True)
class Ref:
    """A tensor as storage, sizes, strides and offset."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class RecordedOp:
    """One recorded op of the construction."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Ref | None, ...]
    """Outputs with storages of their own, in the order of the outputs."""
    writes: frozenset[int]
    reads: frozenset[int]
    fills: int
    """Storage that it overwrites completely without reading it; -1: none."""
    draws: bool


@dataclass
class Construction:
    """The recorded construction of a model's tensors."""

    device: torch.device
    """Device of the model."""
    ops: list[RecordedOp] = field(default_factory=list)
    tensors: dict[str, Ref] = field(default_factory=dict)
    """Parameters and buffers of the finished model, one name each."""
    bytes: list[int] = field(default_factory=list)
    """Bytes of each storage."""
    places: list[torch.device] = field(default_factory=list)
    """Device of each storage in the user's code."""
    states: dict[Any, Tensor] = field(default_factory=dict)
    """Initial states of the generators; None is torch's CPU generator, a device that of an accelerator."""

    def run(self, place: Place) -> None:
        """Run the construction; pass each parameter and buffer to `place` when its value is final.

        torch's generators end as the plain construction would leave them, if they still have their initial
        states; if numbers were drawn since, they are restored.
        """
        needed = self._needed(self.tensors.values())
        # By storage, not by name: tied weights and views of one storage are final at the same time.
        named: dict[int, list[str]] = {}
        for name, ref in self.tensors.items():
            named.setdefault(ref.storage, []).append(name)
        last = {storage: at for at in sorted(needed) if needed[at] for storage in self._touched(self.ops[at])}
        now = {which: _state(which) for which in self.states}
        # The user has drawn nothing since: then the generators go on from where `build()` would have left
        # them.
        untouched = all(torch.equal(state, self.states[which]) for which, state in now.items())
        for which, state in self.states.items():
            _set_state(which, state)
        try:
            with torch.no_grad(), tier(HOST):
                memory = _Memory(self)
                for at in sorted(needed):
                    memory.run(self.ops[at], useful=needed[at])
                    for storage in self._touched(self.ops[at]) if needed[at] else ():
                        if last[storage] == at:
                            self._finish(storage, named.pop(storage, []), memory, place)
                for storage, names in named.items():  # storages that no op writes: empty tensors
                    self._finish(storage, names, memory, place)
        finally:
            if not untouched:
                for which, state in now.items():
                    _set_state(which, state)

    def _finish(self, storage: int, names: list[str], memory: _Memory, place: Place) -> None:
        for name in names:
            place(name, memory.tensor(self.tensors[name]))
        # At most one layer's tensors have memory at a time.
        memory.storages.pop(storage, None)

    def value(self, ref: Ref) -> Tensor:
        """Return the tensor's value at this point of the construction.

        Raises:
            ApplyError: It depends on random numbers, which must not be drawn twice.
        """
        needed = self._needed([ref], draws=False)
        drawn = next((self.ops[at] for at in needed if self.ops[at].draws), None)
        if drawn is not None:
            raise not_deferred(f"it reads a value that {drawn.func} has drawn")
        with torch.no_grad(), tier(HOST):
            memory = _Memory(self)
            for at in sorted(needed):
                memory.run(self.ops[at], useful=True)
            return memory.tensor(ref)

    def _needed(self, wanted: Iterable[Ref], *, draws: bool = True) -> dict[int, bool]:
        """Return the ops to run; False for those whose outputs are not needed, but whose draws are."""
        live, needed = {ref.storage for ref in wanted}, dict[int, bool]()
        # Liveness, backwards as in a compiler: what is overwritten before it is read is not needed.
        for at in range(len(self.ops) - 1, -1, -1):
            op = self.ops[at]
            made = {ref.storage for ref in op.made if ref is not None}
            if live & (op.writes | made):
                needed[at] = True
                live -= made
                # It overwrites all of it, so earlier writes are not needed.
                live.discard(op.fills)
                live |= op.reads
            elif op.draws and draws:
                # An overwritten initialization: it can run on any memory of that size, only to advance the
                # generator.
                scratch = op.fills >= 0 and op.reads <= {op.fills}
                needed[at] = not (scratch or not op.reads)
                if needed[at]:  # its draws depend on its inputs, so these must be computed
                    live -= made
                    live |= op.reads
        return needed

    @staticmethod
    def _touched(op: RecordedOp) -> set[int]:
        return {ref.storage for ref in op.made if ref is not None} | op.writes | op.reads


class _Memory:
    """The storages that currently have memory."""

    def __init__(self, construction: Construction) -> None:
        self._of = construction
        self.storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, ref: Ref) -> Tensor:
        """Return the real tensor; its memory is allocated on first use."""
        storage = self.storages.get(ref.storage)
        if storage is None:
            storage = torch.empty(
                self._of.bytes[ref.storage], dtype=torch.uint8, device=self._of.places[ref.storage]
            ).untyped_storage()
            self.storages[ref.storage] = storage
        empty = torch.empty(0, dtype=ref.dtype, device=storage.device)
        return empty.set_(storage, ref.offset, ref.size, ref.stride)

    def run(self, op: RecordedOp, *, useful: bool) -> None:
        """Run the op of `op`; unless `useful`, it only advances a generator and its outputs are freed."""
        memory = self if useful else _Memory(self._of)
        real = _mapped(
            lambda each: memory.tensor(each) if isinstance(each, Ref) else each, (op.args, op.kwargs)
        )
        out = op.func(*real[0], **real[1])
        for ref, each in zip(op.made, tensors_in((out,)), strict=True):
            if ref is None or not useful:
                continue
            # A real kernel may lay its output out otherwise than the fake one; later ops refer to that
            # layout.
            if (tuple(each.stride()), each.storage_offset(), each.untyped_storage().nbytes()) != (
                ref.stride,
                ref.offset,
                self._of.bytes[ref.storage],
            ):
                self.tensor(ref).copy_(each)
            else:
                self.storages[ref.storage] = each.untyped_storage()


class _Converter(FakeTensorConverter):
    """Converter that does not memoize outputs of ops."""

    # `Module.to` cannot swap a parameter that has a weak reference.

    def set_tensor_memo(self, t: torch.Tensor, v: FakeTensor) -> None:
        """Memoize real tensors only, which may be converted again."""
        if t.device.type != "meta":
            super().set_tensor_memo(t, v)


_PLAIN_ARGUMENTS = frozenset((int, float, bool, type(None), torch.dtype, torch.device))


class OneFakeMode(FakeTensorMode):
    """One fake mode for a whole model that is recorded, or initialized later.

    A model may be built from deep copies of a layer (`nn.TransformerEncoder`), and the copy of a fake tensor
    copies the mode it belongs to as well: under another mode its views have storages of their own, so that
    each would count as new memory.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = _Converter()

    def __deepcopy__(self, memo: dict[int, Any]) -> OneFakeMode:
        return self

    def _prep_args_for_hash(self, result: list[object], args: Any, *more: Any) -> None:
        """Append the key of `args` in torch's cache of fake ops."""
        # torch's own takes half of the time of a fake op.
        if type(args) not in (tuple, list):
            return super()._prep_args_for_hash(result, args, *more)
        result += (type(args), len(args))
        for arg in args:
            if type(arg) in _PLAIN_ARGUMENTS:
                result += (type(arg), arg)  # 1 and 1.0 are equal, but give outputs of other types
            elif (
                type(arg) is FakeTensor
                and arg.fake_mode is self
                and arg.constant is None
                and arg.layout is torch.strided
                and not arg._has_symbolic_sizes_strides
            ):
                result.append(
                    (
                        arg.dtype,
                        arg.shape,
                        arg.stride(),
                        arg.storage_offset(),
                        arg.untyped_storage().nbytes(),
                        arg.fake_device,
                        arg.requires_grad,
                        arg.is_conj(),
                        arg.is_neg(),
                        arg.is_inference(),
                    )
                )
            else:
                super()._prep_args_for_hash(result, [arg], *more)
        return None


class ConstructionRecorder(OpVisitor):
    """Runs a model's construction on fake tensors and records it."""

    def __init__(self, device: torch.device) -> None:
        self.construction = Construction(device, states={which: _state(which) for which in _generators()})
        self._fake = OneFakeMode()
        self._storages: dict[int, int] = {}
        # See `_new`: an address is a key only while its storage lives.
        self._alive: list[torch.UntypedStorage] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all tensors that are made in the context.

        Raises:
            ApplyError: An op cannot be recorded.
        """
        whole = torch.nn.init._no_grad_trunc_normal_

        def at_once(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                return whole(tensor, *args, **kwargs)
            self._note_generator(kwargs)
            fills, ref = self._filled(tensor), self.ref(tensor)
            reads = frozenset(() if fills >= 0 else (ref.storage,))
            op = RecordedOp(
                whole, (ref, *args), kwargs, (None,), frozenset((ref.storage,)), reads, fills, draws=True
            )
            self.construction.ops.append(op)
            return tensor

        # It draws in a loop until all values are in range, which fake tensors cannot follow: one
        # recorded op instead.
        with replaced(torch.nn.init, _no_grad_trunc_normal_=at_once), EagerRecorder(self):
            yield

    def ref(self, tensor: Tensor) -> Ref:
        """Return the reference of a fake `tensor`.

        Raises:
            ApplyError: It was not made while this recorded.
        """
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None:
            raise not_deferred("it uses a fake tensor that was made before")
        return Ref(
            storage, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype
        )

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the op's output on fake tensors, recorded."""
        given = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        fakes = [each for each in given if isinstance(each, FakeTensor)]
        if func is torch.ops.aten._local_scalar_dense.default and fakes:
            # `.item()` on a value that no draw affects, such as a linspace of drop rates.
            return self.construction.value(self.ref(fakes[0])).item()
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if given and not fakes:
            if draws:
                raise not_deferred(f"{func} draws into a tensor with real values")
            return NotImplemented  # real tensors, made from values: not recorded
        if str(func.overloadpacket) in _SIZES:
            raise not_deferred(f"{func} changes memory that other tensors share")
        try:
            with self._fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise not_deferred(f"{func} needs values") from None
        # prim.device and its like make no tensors.
        if func.namespace != "prim":
            self._record(func, args, kwargs, fakes, out, draws)
        return out

    def _record(
        self, func: Any, args: Any, kwargs: dict[str, Any], fakes: Sequence[Tensor], out: Any, draws: bool
    ) -> None:
        written = mutated(func, args, kwargs)
        made = tuple(self._new(each) for each in tensors_in((out,)))
        if not any(made) and not written:
            return  # a view
        if any(not isinstance(each, FakeTensor) for each in written):
            raise not_deferred(f"{func} writes a computed value into a tensor with real values")
        self._note_generator(kwargs)
        named, more = _mapped(self._as_now, (args, kwargs))
        fills = self._filled(args[0]) if str(func.overloadpacket) in _FILLS else -1
        storages = [self.ref(each).storage for each in fakes]
        reads = frozenset(each for each in storages if each != fills or storages.count(each) > 1)
        writes = frozenset(self.ref(each).storage for each in written)
        self.construction.ops.append(RecordedOp(func, named, more, made, writes, reads, fills, draws))

    def _as_now(self, value: Any) -> Any:
        """Return a copy of real tensors, which may be written into before the op runs."""
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
        self._alive.append(storage)  # keeps the address, the key of `_storages`, from being reused
        self.construction.bytes.append(int(storage.nbytes()))
        self.construction.places.append(tensor.device)
        return self.ref(tensor)

    def _note_generator(self, kwargs: dict[str, Any]) -> None:
        which = kwargs.get("generator")
        if which is not None and which not in self.construction.states:
            self.construction.states[which] = _state(which)

    def _filled(self, tensor: Tensor) -> int:
        """Return the storage of `tensor` if the tensor covers all of it, else -1."""
        whole = tensor.nbytes == tensor.untyped_storage().nbytes() and _is_dense(tensor)
        return self.ref(tensor).storage if whole else -1


def not_deferred(why: str) -> ApplyError:
    """Return the error for a construction that cannot be deferred."""
    return ApplyError(
        f"the model's construction cannot be deferred: {why}.",
        fix="build the model itself, without memtune.deferred",
        code="MT398",
    )


def _mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """Return `values` with `change` applied to every leaf of their tuples, lists and dicts."""
    if isinstance(values, dict):
        return {name: _mapped(change, value) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_mapped(change, value) for value in values)
    return change(values)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's elements are contiguous in memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _generators() -> list[Any]:
    return [None, *accelerator.started_devices()]


def _state(which: Any) -> Tensor:
    with tier(HOST):
        if isinstance(which, torch.Generator):
            return which.get_state()
        return torch.get_rng_state() if which is None else accelerator.get_rng_state(which)


def _set_state(which: Any, state: Tensor) -> None:
    if isinstance(which, torch.Generator):
        which.set_state(state)
    elif which is None:
        torch.set_rng_state(state)
    else:
        accelerator.set_rng_state(which, state)
