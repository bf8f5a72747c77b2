"""Captures a region: the ATen ops of its forward and backward, run once on fake tensors, with who reads what.

Rule 1. Storages are counted, not tensors: what an op reads is a storage seen through size, stride and offset. Views are no
        ops; they are made again where they are read.
Rule 2. Nothing of the capture leaves it: the ops run below all modes that are on, on fake copies of parameters, buffers and
        inputs, and no attribute of the modules may have changed afterwards.
Rule 3. What cannot be told from shapes refuses by name: sizes that depend on data, inputs that are written into, tensors
        from outside that are neither parameter nor buffer nor argument.
"""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedFakeTensorException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from memtune.calls import EMPTY
from memtune.runtime.known_values import KnownValues, unnoticed
from memtune.runtime.op_arguments import draws_nothing, mutated, tensors_in
from memtune.runtime.set_elsewhere import nothing_set_elsewhere
from memtune.schedule import OpGraph

_FAKE_SHARES = frozenset({"aten.mkldnn_rnn_layer_backward.default"})  # its fake gradients of the two biases are one tensor
BATCH_NORMS = frozenset(f"aten.{name}.default" for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"))
"""They update running statistics beside what they return: a second run leaves those out."""


_CONTAINERS = frozenset({list, dict, OrderedDict, defaultdict, set})  # of attributes: what forward puts into them is taken back


class CaptureError(Exception):
    """Why a region cannot be captured; data for a message, never seen by the user as it is."""


class Outside(NamedTuple):
    """A tensor that a region is given: by kind (`parameter`, `buffer`, `input`, `gradient`, `constant`) and number."""

    kind: str
    number: int


class Slot(NamedTuple):
    """A tensor as an op sees it: a storage, and the view of it."""

    of: int | Outside
    """The value, or what comes from outside."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """One op as it ran."""

    func: Any
    args: tuple[Any, ...]
    """Slots in place of tensors."""
    kwargs: dict[str, Any]
    out: Any
    """What it returned; Slots in place of tensors."""


@dataclass(frozen=True)
class Tape:
    """A captured region."""

    graph: OpGraph
    calls: tuple[Call, ...]
    outputs: tuple[Any, ...]
    """Leaves of what forward returned: Slots in place of tensors."""
    output_spec: TreeSpec
    differentiable: tuple[int, ...]
    """Outputs that a gradient can flow into."""
    asked: tuple[int, ...]
    """Of those, the ones whose gradient the backward was captured with."""
    landed: tuple[tuple[int, int, Slot], ...]
    """(parameter, op after which its gradient was in place, the gradient)."""
    input_gradients: tuple[tuple[int, Slot], ...]
    constants: tuple[Tensor, ...]
    given: Mapping[Outside, Slot]
    """What comes from outside, as the capture had it."""


def is_plain(tensor: Any) -> bool:
    """`tensor` is an ordinary dense one, real or fake."""
    return isinstance(tensor, Tensor) and type(tensor) in (Tensor, nn.Parameter, FakeTensor) and tensor.layout == torch.strided


def named_state(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Every parameter, then every buffer of `module`, each tensor once: the dictionary that holds it, its key, itself."""
    found: list[tuple[dict[str, Any], str, Tensor]] = []
    for attribute in ("_parameters", "_buffers"):
        seen: set[int] = set()
        for each in module.modules():
            held: dict[str, Any] = getattr(each, attribute)
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found.append((held, name, tensor))
    return found


@dataclass
class _Recorder(TorchDispatchMode):
    """Writes every op down, as slots."""

    calls: list[Call] = field(default_factory=list)
    makes: list[list[int]] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    writes: list[list[int]] = field(default_factory=list)
    random: set[int] = field(default_factory=set)
    once: set[int] = field(default_factory=set)
    constants: list[Tensor] = field(default_factory=list)
    given: dict[Outside, Slot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._of: dict[int, int | Outside] = {}
        self._readers: dict[Outside, set[int]] = {}
        self._n_values = 0
        self._known = KnownValues()

    def __hash__(self) -> int:
        return id(self)

    def know(self, tensor: Tensor, outside: Outside) -> None:
        """`tensor` comes from outside, as `outside`."""
        self._note(tensor, outside)
        self.given[outside] = self.slot(tensor)

    def _note(self, tensor: Tensor, of: int | Outside) -> None:
        storage = tensor.untyped_storage()
        self._of[storage._cdata] = of
        weakref.finalize(storage, self._forget, storage._cdata, of)

    def _forget(self, address: int, of: int | Outside) -> None:
        if self._of.get(address) == of:
            del self._of[address]

    def slot(self, tensor: Tensor) -> Slot:
        """`tensor` as what it is known as.

        Raises:
            CaptureError: It is not known, or no plain view.
        """
        if tensor.is_conj() or tensor.is_neg() or tensor.layout != torch.strided:
            raise CaptureError("a sparse or lazily conjugated tensor is used")
        of = self._of.get(tensor.untyped_storage()._cdata)
        if of is None:
            raise CaptureError("a tensor is used that is neither parameter nor buffer nor argument")
        return Slot(of, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "prims"):
            return func(*args, **kwargs)
        told = self._known.look(func, args)
        if told is not None:
            return told
        try:
            plain = self._slots(func, args), {key: self._slots(func, value) for key, value in kwargs.items()}
            out = func(*args, **kwargs)
            if str(func) in _FAKE_SHARES:
                out = _apart(out)
            self._follow(func, args, kwargs, out)
            self._record(func, args, kwargs, plain, out)
        except CaptureError as error:
            raise CaptureError(f"{func}: {error}") from None
        except (UnsupportedFakeTensorException, RuntimeError) as error:
            if type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"):
                raise CaptureError(f"{func}: what it returns depends on the data") from None
            raise
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if "lift_fresh" in str(func) and not isinstance(args[0], FakeTensor):
            self._known.know(out, args[0])
        else:
            self._known.follow(func, args, kwargs, out, writes=mutated(func, args, kwargs))

    def _slots(self, func: Any, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not isinstance(value, FakeTensor) and "lift_fresh" in str(func):
                self.constants.append(value)
                self.know(value, Outside("constant", len(self.constants) - 1))
            return self.slot(value)
        if isinstance(value, list | tuple):
            return type(value)(self._slots(func, each) for each in value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | torch.Generator):
            raise CaptureError(f"it is given a {type(value).__name__}")
        return value

    def _record(self, func: Any, args: Any, kwargs: Any, plain: tuple[Any, Any], out: Any) -> None:
        inputs, outputs = tensors_in([*args, *kwargs.values()]), tensors_in([out])
        written = mutated(func, args, kwargs)
        known = {t.untyped_storage()._cdata for t in inputs}
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in self._of and t.untyped_storage()._cdata not in known]
        if not fresh and not written:
            return  # a view
        op = len(self.calls)
        made: list[int] = []
        for tensor in fresh:
            if tensor.untyped_storage()._cdata not in self._of:
                made.append(self._n_values)
                self._note(tensor, self._n_values)
                self._n_values += 1
        touched = [] if str(func) in EMPTY else [self.slot(t).of for t in inputs]
        self.makes.append(made)
        self.reads.append(sorted({of for of in touched if isinstance(of, int)}))
        changed = [self.slot(t).of for t in written]
        self.writes.append(sorted({of for of in changed if isinstance(of, int)}))
        self._check_outside(func, op, [of for of in changed if isinstance(of, Outside)])
        if str(func) not in BATCH_NORMS:  # in training they read no statistics
            for of in touched:
                if isinstance(of, Outside):
                    self._readers.setdefault(of, set()).add(op)
        if torch.Tag.nondeterministic_seeded in func.tags and not draws_nothing(func, args, kwargs):
            self.random.add(op)
        self.calls.append(Call(func, tuple(plain[0]), plain[1], tree_map(self._out, out)))

    def _out(self, value: Any) -> Any:
        return self.slot(value) if isinstance(value, Tensor) else value

    def _check_outside(self, func: Any, op: int, changed: list[Outside]) -> None:
        for each in changed:
            if each.kind != "buffer":
                raise CaptureError(f"it writes into an {each.kind} of the region")
            if str(func) not in BATCH_NORMS:
                self.once.add(op)
            self.once |= self._readers.get(each, set())  # run again after this, they would read something else
        if func.namespace in ("c10d", "_c10d_functional"):
            raise CaptureError("a collective runs inside")


def _apart(outputs: Any) -> Any:
    """`outputs` with a storage of its own for each."""
    seen: set[int] = set()
    found = []
    for each in outputs:
        address = each.untyped_storage()._cdata if isinstance(each, Tensor) else None
        found.append(torch.empty_like(each) if address in seen else each)
        if address is not None:
            seen.add(address)
    return tuple(found)


class _Arrive(torch.autograd.Function):
    """Where an input of the region enters: what flows back is noted and goes no further."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[Tensor], None]) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.note(gradients[0])
        return None, None


@dataclass(frozen=True)
class GradientLike:
    """Shape of a gradient that flows into an output."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def capture(
    module: nn.Module,
    forward: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    autocast: Sequence[Callable[[], AbstractContextManager[Any]]],
    gradients: dict[int, GradientLike] | Callable[[int, Tensor], bool],
) -> Tape:
    """Run `forward` and its backward on fake copies of everything, and write down what ran.

    Args:
        module: Whose parameters and buffers it reads.
        forward: Its forward.
        arguments: Of the call at hand, by position and by name; of tensors only the shapes are looked at (`shapes_of`).
        autocast: As `autocast_state` gave it when the module was called.
        gradients: Which outputs get a gradient and what it looks like; or which do, as contiguous ones.

    Raises:
        CaptureError: It cannot be captured: the op, and why.
    """
    with (
        _disable_current_modes(), FakeTensorMode() as fake, torch.enable_grad(), _nothing_drawn(), _unchanged(module),
        nothing_set_elsewhere(module, CaptureError), unnoticed(),
    ):  # fmt: skip
        recorder = _Recorder()
        landed: list[tuple[int, int, Slot]] = []
        arrived: dict[int, Slot] = {}
        with _faked_state(module, fake, recorder, landed):
            leaves, spec = tree_flatten(arguments)
            faked: dict[int, Tensor] = {}
            for number, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and id(leaf) not in faked:
                    faked[id(leaf)] = _faked_input(leaf, number, fake, recorder, arrived)
            given = tree_unflatten([faked[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
            with recorder:
                with ExitStack() as stack:
                    for context in (no_autocast, *autocast):
                        stack.enter_context(context())
                    out = forward(*given[0], **given[1])
                return _with_backward(recorder, out, gradients, fake, landed, arrived)


def _with_backward(
    recorder: _Recorder,
    out: Any,
    gradients: dict[int, GradientLike] | Callable[[int, Tensor], bool],
    fake: FakeTensorMode,
    landed: list[tuple[int, int, Slot]],
    arrived: dict[int, Slot],
) -> Tape:
    leaves, spec = tree_flatten(out)
    odd = next((leaf for leaf in leaves if not isinstance(leaf, Tensor | int | float | str | bool | None)), None)
    if odd is not None:
        raise CaptureError(f"its forward returns a {type(odd).__name__}")
    outputs = tuple(recorder.slot(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    n_forward = len(recorder.calls)
    differentiable = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    asked = [i for i in differentiable if (i in gradients if isinstance(gradients, dict) else gradients(i, leaves[i]))]
    if not asked:
        raise CaptureError("nothing that its forward returns can be differentiated")
    flowing = []
    for i in asked:
        like = gradients[i] if isinstance(gradients, dict) else _contiguous_like(leaves[i])
        with _disable_current_modes(), fake:
            gradient = torch.empty_strided(like.size, like.stride, dtype=like.dtype, device=leaves[i].device)
        recorder.know(gradient, Outside("gradient", i))
        flowing.append(gradient)
    roots = [leaves[i] for i in asked]
    del out, leaves
    with no_autocast():
        torch.autograd.backward(roots, flowing)
    names = tuple(str(call.func) for call in recorder.calls)
    makes, reads, writes = (tuple(map(tuple, part)) for part in (recorder.makes, recorder.reads, recorder.writes))
    graph = OpGraph(names, n_forward, makes, reads, writes, frozenset(recorder.random), frozenset(recorder.once))
    return Tape(
        graph, tuple(recorder.calls), outputs, spec, tuple(differentiable), tuple(asked), tuple(landed),
        tuple(sorted(arrived.items())), tuple(recorder.constants), recorder.given,
    )  # fmt: skip


def _contiguous_like(out: Tensor) -> GradientLike:
    stride = torch._prims_common.make_contiguous_strides_for(out.shape)
    return GradientLike(tuple(out.shape), tuple(stride), out.dtype)


def _faked_input(leaf: Tensor, number: int, fake: FakeTensorMode, recorder: _Recorder, arrived: dict[int, Slot]) -> Tensor:
    if not is_plain(leaf):
        raise CaptureError(f"it is given a {type(leaf).__name__}")
    twin = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    recorder.know(twin, Outside("input", number))
    if not leaf.requires_grad:
        return twin

    def note(gradient: Tensor) -> None:
        arrived[number] = recorder.slot(gradient)

    arrive: Any = _Arrive.apply
    arriving: Tensor = arrive(twin.requires_grad_(), note)
    return arriving


@contextmanager
def _faked_state(
    module: nn.Module, fake: FakeTensorMode, recorder: _Recorder, landed: list[tuple[int, int, Slot]]
) -> Iterator[None]:
    """Inside, every parameter and buffer of `module` is a fake twin, wherever it is held."""
    state = named_state(module)
    twins: dict[int, Tensor] = {}
    for number, (_, name, tensor) in enumerate(state):
        if not is_plain(tensor):
            raise CaptureError(f"{name} is a {type(tensor).__name__}")
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        recorder.know(twin, Outside(kind, number))
        if isinstance(tensor, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
            if tensor.requires_grad:
                twin.register_post_accumulate_grad_hook(_landing(number, recorder, landed))
        twins[id(tensor)] = twin
    held_by: list[dict[str, Any]] = [held for each in module.modules() for held in (each._parameters, each._buffers)]
    undo = [(held, dict(held)) for held in held_by]
    set_inside = ""
    try:
        for held, before in undo:
            held.update({name: twins[id(tensor)] for name, tensor in before.items() if tensor is not None})
        yield
        set_inside = next((name for held, before in undo for name in _set_in(held, before, twins)), "")
    finally:
        for held, before in undo:
            _put_back(held, before)
    if set_inside:
        raise CaptureError(f"its forward sets the parameter or buffer {set_inside}")


def _set_in(held: dict[str, Any], before: dict[str, Any], twins: dict[int, Tensor]) -> Iterator[str]:
    """What a forward has put into `held`, or taken out, whose tensors were twins of those in `before`."""
    for name in {**before, **held}:
        tensor = before.get(name)
        if (name in held) is not (name in before) or held[name] is not (None if tensor is None else twins[id(tensor)]):
            yield name


def _put_back(held: Any, before: Any) -> None:
    """Give a list, dict or set the items that it had, in their order."""
    held.clear()
    (held.extend if isinstance(held, list) else held.update)(before)


def _landing(number: int, recorder: _Recorder, landed: list[tuple[int, int, Slot]]) -> Callable[[Tensor], None]:
    def note(parameter: Tensor) -> None:
        assert parameter.grad is not None
        landed.append((number, len(recorder.calls) - 1, recorder.slot(parameter.grad)))

    return note


@contextmanager
def _nothing_drawn() -> Iterator[None]:
    """Refuses what draws from generators of Python or numpy, whose next numbers a frozen region would not know.

    What was drawn is put back, whatever else the capture fails at: the run that follows draws it.
    """
    before, numpy_before = random.getstate(), np.random.get_state()
    drawn = False
    try:
        yield
    finally:
        drawn = random.getstate() != before or str(np.random.get_state()) != str(numpy_before)
        if drawn:
            random.setstate(before)
            np.random.set_state(numpy_before)
    if drawn:
        raise CaptureError("its forward draws random numbers in Python")


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Refuses a forward that leaves something in an attribute of a module, and takes it back."""
    before = [
        (each, {k: v for k, v in vars(each).items() if k[0] != "_" or not isinstance(v, dict)}) for each in module.modules()
    ]
    kept = [(each, name, value, _items(value), value.copy()) for each, attributes in before
            for name, value in attributes.items() if type(value) in _CONTAINERS]  # fmt: skip
    try:
        yield
    finally:
        changed = ""
        for each, attributes in before:
            for name in [n for n in vars(each) if n not in attributes and (n[0] != "_" or not isinstance(vars(each)[n], dict))]:
                changed = name
                del vars(each)[name]
            for name, value in attributes.items():
                if vars(each).get(name) is not value:
                    changed = changed if _is_flat_weight(each, name) else name
                    vars(each)[name] = value
        for each, name, value, items, copy in kept:
            if len(items) != len(now := _items(value)) or any(one is not two for one, two in zip(items, now, strict=True)):
                changed = changed if _is_flat_weight(each, name) else name
                _put_back(value, copy)
        if changed:
            raise CaptureError(f"its forward sets the attribute {changed}")


def _is_flat_weight(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.RNNBase) and name.startswith("_flat_weight")


def _items(held: Any) -> list[Any]:
    return [*held, *held.values()] if isinstance(held, dict) else list(held)


def autocast_state() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Contexts that bring autocast back as it is now."""
    return [
        partial(torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=torch.is_autocast_cache_enabled())
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]


def shapes_of(values: Any) -> Any:
    """`values` with weightless twins in place of tensors; the same twin for the same tensor."""
    twins: dict[int, Tensor] = {}

    def twin(leaf: Any) -> Any:
        if not is_plain(leaf):
            return leaf
        if id(leaf) not in twins:
            twins[id(leaf)] = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            twins[id(leaf)].requires_grad_(leaf.requires_grad)
        return twins[id(leaf)]

    with _disable_current_modes(), FakeTensorMode():
        return tree_map(twin, values)


class no_autocast(AbstractContextManager[None]):
    """The ops of a tape say themselves which type they compute in."""

    def __enter__(self) -> None:
        self._kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        for kind in self._kinds:
            torch.set_autocast_enabled(kind, False)

    def __exit__(self, *_: object) -> None:
        for kind in self._kinds:
            torch.set_autocast_enabled(kind, True)
