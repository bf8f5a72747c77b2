"""Tape of a region: the ATen ops of its forward and backward, and their recorder.

Data flow is by storage: an op reads a storage through size, stride and offset. Views are no ops; they are
made again where they are read. A region whose ops do not follow from shapes is refused, by the op's name:
data-dependent sizes, writes into inputs, outside tensors that are neither parameter nor buffer nor argument.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from memtune._replaced import replaced
from memtune.memory import with_kernel_layout
from memtune.program import BATCH_NORMS, EMPTY, OpGraph
from memtune.runtime import READ_OUTS, OpVisitor, draws, mutated, tensors_in

# Its fake implementation returns one tensor as the gradients of both biases.
_FAKE_SHARES = frozenset({"aten.mkldnn_rnn_layer_backward.default"})
COLLECTIVE_INSIDE = "a collective runs inside"


class CaptureError(Exception):
    """Error when a region cannot be captured; the message is part of a user-facing one."""


class SideEffectError(CaptureError):
    """Error when the forward has a side effect, which it may have in its first run only."""


class Outside(NamedTuple):
    """Outside tensor, by kind (`parameter`, `buffer`, `input`, `gradient`, `constant`) and number."""

    kind: str
    number: int


class Slot(NamedTuple):
    """Tensor as an op sees it: a storage, and the view of it."""

    value: int | Outside
    """Number of the value, or the outside tensor."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class GradientLike:
    """Layout of a gradient that flows into an output."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Call:
    """One recorded op."""

    func: Any
    args: tuple[Any, ...]
    """`Slot`s instead of tensors."""
    kwargs: dict[str, Any]
    out: Any
    """The result; `Slot`s instead of tensors."""


@dataclass(frozen=True)
class Tape:
    """Captured region."""

    graph: OpGraph
    calls: tuple[Call, ...]
    outputs: tuple[Any, ...]
    """Leaves of the forward's result: `Slot`s instead of tensors."""
    output_spec: TreeSpec
    differentiable: tuple[int, ...]
    """Outputs that can have a gradient."""
    with_gradient: tuple[int, ...]
    """Those of them with a gradient in the captured backward."""
    ready_gradients: tuple[tuple[int, int, Slot], ...]
    """(parameter, op after which its gradient was accumulated, the gradient)."""
    input_gradients: tuple[tuple[int, Slot], ...]
    constants: tuple[Tensor, ...]
    given: Mapping[Outside, Slot]
    """The outside tensors, as the capture had them."""


@dataclass(eq=False)
class Recorder(OpVisitor):
    """Op visitor that runs and records every op with its arguments as slots."""

    calls: list[Call] = field(default_factory=list)
    makes: list[list[int]] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    writes: list[list[int]] = field(default_factory=list)
    random: set[int] = field(default_factory=set)
    once: set[int] = field(default_factory=set)
    constants: list[Tensor] = field(default_factory=list)
    given: dict[Outside, Slot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._of: dict[int, int | Outside] = {}
        self._readers: dict[Outside, set[int]] = {}
        self._n_values = 0
        self.known = ConstantTensors()

    def register_outside(self, tensor: Tensor, outside: Outside) -> None:
        """Register `tensor` as the outside tensor `outside`."""
        self._note(tensor, outside)
        self.given[outside] = self.slot(tensor)

    def _note(self, tensor: Tensor, of: int | Outside) -> None:
        storage = tensor.untyped_storage()
        self._of[storage._cdata] = of
        # Without this a later storage at the address would be taken for the earlier value.
        weakref.finalize(storage, self._forget, storage._cdata, of)  # the allocator reuses addresses

    def _forget(self, address: int, of: int | Outside) -> None:
        if self._of.get(address) == of:
            del self._of[address]

    def slot(self, tensor: Tensor) -> Slot:
        """Return the slot of a registered or recorded `tensor`.

        Raises:
            CaptureError: It is unknown, or no plain view.
        """
        if tensor.is_conj() or tensor.is_neg() or tensor.layout != torch.strided:
            raise CaptureError("a sparse or lazily conjugated tensor is used")
        of = self._of.get(tensor.untyped_storage()._cdata)
        if of is None:
            raise CaptureError("a tensor is used that is neither parameter nor buffer nor argument")
        return Slot(of, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the op's output, recorded."""
        if func.namespace in ("prim", "prims"):
            return NotImplemented
        # Masks and positions may steer the code: their values follow from shapes, so reading them is safe.
        constant = self.known.read_constant(func, args)
        if constant is not None:
            return constant
        try:
            plain = self._slots(func, args), {key: self._slots(func, value) for key, value in kwargs.items()}
            out = func(*args, **kwargs)
            on_cpu = any(each.device.type == "cpu" for each in tensors_in([out]))
            out = with_kernel_layout(func, args, kwargs, out, on_cpu=on_cpu)
            # As the real kernel does; otherwise two gradients would be one value.
            if str(func) in _FAKE_SHARES:
                out = _separate_storages(out)
            self.known.follow(func, args, kwargs, out)
            self._record(func, args, kwargs, plain, out)
        except CaptureError as error:
            raise CaptureError(f"{func}: {error}") from None
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise CaptureError(f"{func}: its output depends on the data") from None
        return out

    def _slots(self, func: Any, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not isinstance(value, FakeTensor) and "lift_fresh" in str(func):
                self.constants.append(value)
                self.register_outside(value, Outside("constant", len(self.constants) - 1))
            return self.slot(value)
        if isinstance(value, list | tuple):
            return type(value)(self._slots(func, each) for each in value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool | torch.Generator):
            raise CaptureError(f"one of its arguments is a {type(value).__name__}")
        return value

    def _record(self, func: Any, args: Any, kwargs: Any, plain: tuple[Any, Any], out: Any) -> None:
        inputs, outputs = tensors_in([*args, *kwargs.values()]), tensors_in([out])
        written = mutated(func, args, kwargs)
        known = {t.untyped_storage()._cdata for t in inputs}
        fresh = [
            t
            for t in outputs
            if t.untyped_storage()._cdata not in self._of and t.untyped_storage()._cdata not in known
        ]
        # Views are rebuilt at their readers from size, stride and offset.
        if not fresh and not written:
            return  # a view
        op = len(self.calls)
        # Again by storage: two outputs may be views of one new storage, which is one value.
        made: list[int] = []
        for tensor in fresh:
            if tensor.untyped_storage()._cdata not in self._of:
                made.append(self._n_values)
                self._note(tensor, self._n_values)
                self._n_values += 1
        # `empty_like` and the like read only the shape.
        touched = [] if str(func) in EMPTY else [self.slot(t).value for t in inputs]
        self.makes.append(made)
        self.reads.append(sorted({of for of in touched if isinstance(of, int)}))
        changed = [self.slot(t).value for t in written]
        self.writes.append(sorted({of for of in changed if isinstance(of, int)}))
        self._check_outside(func, op, [of for of in changed if isinstance(of, Outside)])
        if str(func) not in BATCH_NORMS:  # BatchNorm in training reads no running statistics
            for of in touched:
                if isinstance(of, Outside):
                    self._readers.setdefault(of, set()).add(op)
        if draws(func, args, kwargs):
            self.random.add(op)
        self.calls.append(Call(func, tuple(plain[0]), plain[1], tree_map(self._out, out)))

    def _out(self, value: Any) -> Any:
        return self.slot(value) if isinstance(value, Tensor) else value

    def _check_outside(self, func: Any, op: int, changed: list[Outside]) -> None:
        for each in changed:
            if each.kind != "buffer":
                raise CaptureError(f"it writes into the region's {each.kind}")
            if str(func) not in BATCH_NORMS:
                # A second run would write the buffer twice (a step counter, an average).
                self.once.add(op)
            # Ops that read the buffer before would read another value in a second run.
            self.once |= self._readers.get(each, set())
        if func.namespace in ("c10d", "_c10d_functional"):
            raise CaptureError(COLLECTIVE_INSIDE)


def _separate_storages(outputs: Any) -> Any:
    """Return `outputs` with a separate storage for each."""
    seen: set[int] = set()
    found = []
    for each in outputs:
        address = each.untyped_storage()._cdata if isinstance(each, Tensor) else None
        found.append(torch.empty_like(each) if address in seen else each)
        if address is not None:
            seen.add(address)
    return tuple(found)


# Values that follow from shapes and constants alone: positions, masks. Code that reads them is independent of
# data.
MOST_ELEMENTS, _MOST_DRAWN = 1 << 20, 1 << 16  # initial weights are draws, too


_SELECTS = torch.ops.aten.masked_select.default
_INDEXES = torch.ops.aten.index.Tensor
_DRAWS, _UNLIKELY = torch.ops.aten.rand.default, 0.999
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_ALIGNS = torch.ops.aten._ctc_loss.Tensor
SIZED_BY_VALUES = frozenset(
    {
        _SELECTS,
        _INDEXES,
        _ALIGNS,
        torch.ops.aten.nonzero.default,
        torch.ops.aten._unique2.default,
        torch.ops.aten.unique_consecutive.default,
        torch.ops.aten.unique_dim.default,
        torch.ops.aten.repeat_interleave.Tensor,
        torch.ops.aten.bincount.default,
    }
)
"""Ops whose output size follows from values: `aten.index` of masks, CTC of its targets' lengths."""


class ConstantTensors:
    """Real twins on the CPU of fake integer and bool tensors that follow from constants.

    Args:
        draws: Keep floating-point values and random draws too: masks are made of both.
    """

    def __init__(self, *, draws: bool = False) -> None:
        self._twin: Any = WeakIdKeyDictionary()
        self._draws = draws

    def register(self, fake: Tensor, real: Tensor) -> None:
        """Register `real`, a constant of the code, as the value of `fake`."""
        # Floating-point values may steer no index, and large ones cost memory.
        if self._is_kept(real):
            with _disable_current_modes():
                self._twin[fake] = real.detach().to("cpu", copy=True)

    def read_constant(self, func: Any, args: Any) -> Any | None:
        """Return the value that code reads from constant tensors with `func`, else None."""
        if func not in READ_OUTS or any(each not in self._twin for each in tensors_in(args)):
            return None
        with _disable_current_modes():
            return func(*tree_map(self._real, args))

    def sized(self, func: Any, args: Any, kwargs: Any, mode: FakeTensorMode) -> Any | None:
        """Return the fake output of one of `SIZED_BY_VALUES` in the size that known values give, if any."""
        if func in (_SELECTS, _INDEXES):
            return self._selected(args[0], [args[1]] if func is _SELECTS else args[1], flat=func is _SELECTS)
        if func is _ALIGNS:
            return self._aligned(args[0], args[3])
        if any(each not in self._twin for each in tensors_in([*args, *kwargs.values()])):
            return None
        with _disable_current_modes():
            real = func(*tree_map(self._real, args), **tree_map(self._real, kwargs))
        out = tree_map_only(Tensor, mode.from_tensor, real)
        for each, value in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(value, Tensor):
                self.register(each, value)
        return out

    def _selected(self, source: Tensor, indices: list[Tensor | None], *, flat: bool) -> Tensor | None:
        """Return the rows of `source`, whose values need not be known, that known masks select."""
        given = [each for each in indices if each is not None]
        if not any(map(_is_mask, given)) or any(each not in self._twin for each in given):
            return None
        shape: Any = source.shape
        with _disable_current_modes():
            real: list[Any] = [None if each is None else self._twin[each] for each in indices]
            if flat:  # `masked_select` broadcasts both and returns one row
                both = torch.broadcast_shapes(shape, real[0].shape)
                shape = (int(real[0].expand(both).sum()),)
            else:
                # Indices of dimensions as the kernel makes them of a mask; no data of the source are read.
                found: list[Any] = []
                for each in real:
                    if each is None:
                        found.append(None)
                    else:
                        found += each.nonzero().to("meta").unbind(1) if _is_mask(each) else [each.to("meta")]
                shape = _INDEXES(torch.empty(shape, device="meta"), found).shape
        return torch.empty(shape, dtype=source.dtype, device=source.device)

    def _aligned(self, log_probs: Tensor, target_lengths: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return CTC's losses, and its table of log probabilities of prefixes, where lengths are known."""
        lengths = self.value(target_lengths)
        if lengths is None:
            return None
        steps, samples = log_probs.shape[:2]
        with _disable_current_modes():
            longest = int(lengths.max())
        table = log_probs.new_empty((samples, steps, 2 * longest + 1))
        return log_probs.new_empty((samples,)), table

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Register the results of `func` if all its arguments are constant and it draws nothing."""
        if func in _LIFTS and not isinstance(args[0], FakeTensor):
            self.register(out, args[0])
            return
        inputs = tensors_in([*args, *kwargs.values()])
        known = self.are_known(inputs)
        if not known and not func._schema.is_mutable:
            return
        writes = mutated(func, args, kwargs)
        for each in writes:  # a twin has no views that share its memory, so its value would be stale
            self._forget(each)
        kept = not writes and known and any(self._is_kept(each) for each in tensors_in([out]))
        if not kept or func.namespace not in ("aten", "memtune"):
            return
        # The twin is on the CPU already, wherever the fake tensor moves to.
        if func is torch.ops.memtune.to_device.default:
            self._twin[out] = self._twin[args[0]]
            return
        # The values of `empty` are no constants of the code.
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        if drawn and not (self._draws and all(each.numel() <= _MOST_DRAWN for each in tensors_in([out]))):
            return
        if func.namespace != "aten" or "empty" in str(func):
            return
        host = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs
        with _disable_current_modes():
            real = func(*tree_map(self._real, args), **tree_map(self._real, host))
            if func is _DRAWS and real.numel() == 1:
                real.fill_(_UNLIKELY)  # code that drops whole layers by one number drops none
        for each, value in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(value, Tensor) and self._is_kept(value):
                self._twin[each] = value

    def are_known(self, tensors: list[Tensor]) -> bool:
        """Return whether the values of all `tensors` are known."""
        return all(each in self._twin for each in tensors)

    def alias(self, tensor: Tensor, other: Tensor) -> None:
        """Register the value of `tensor`, if it is known, as that of `other`."""
        if tensor in self._twin:
            self._twin[other] = self._twin[tensor]

    def forget(self, tensor: Tensor) -> None:
        """Drop the value of `tensor` and the weak reference to it."""
        self._twin.pop(tensor, None)

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the value of a fake tensor, None if it is not known."""
        found: Tensor | None = self._twin.get(tensor)
        return found

    def _real(self, value: Any) -> Any:
        return self._twin[value] if isinstance(value, Tensor) else value

    def _is_kept(self, tensor: Tensor) -> bool:
        floats = tensor.is_floating_point() or tensor.is_complex()
        return (self._draws or not floats) and tensor.numel() <= MOST_ELEMENTS

    def _forget(self, written: Tensor) -> None:
        address = written.untyped_storage()._cdata
        for each in [t for t in self._twin if t.untyped_storage()._cdata == address]:
            del self._twin[each]


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


@contextmanager
def distributions_are_valid(note: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Take the arguments of `torch.distributions` as valid, whose checks read data; call `note` at each."""
    checked = torch._is_all_true

    def is_all_true(valid: Tensor) -> Any:
        out = checked(valid)
        if isinstance(out, FakeTensor):
            note()
            return True
        return out

    with replaced(torch, _is_all_true=is_all_true):
        yield


@contextmanager
def fakes_look_real() -> Iterator[None]:
    """Let transformers treat fake tensors as real ones, so that it takes the code path of training."""
    # If that path reads values that depend on data, the capture refuses it.
    module = sys.modules.get("transformers.utils.import_utils")
    is_there = hasattr(module, "is_fake_tensor")
    with replaced(module, is_fake_tensor=lambda _: False) if is_there else nullcontext():
        yield
