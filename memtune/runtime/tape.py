"""The tape of a region: the ATen ops of its forward and backward, with who reads what, and the recorder that writes them down.

Rule 1. Storages are counted, not tensors: what an op reads is a storage seen through size, stride and offset. Views are no
        ops; they are made again where they are read.
Rule 2. What cannot be told from shapes refuses by name: sizes that depend on data, inputs that are written into, tensors
        from outside that are neither parameter nor buffer nor argument.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, UnsupportedFakeTensorException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_map

from memtune.calls import BATCH_NORMS, EMPTY
from memtune.runtime.known_values import KnownValues
from memtune.runtime.op_arguments import draws, mutated, tensors_in
from memtune.schedule import OpGraph

_FAKE_SHARES = frozenset({"aten.mkldnn_rnn_layer_backward.default"})  # its fake gradients of the two biases are one tensor
COLLECTIVE_INSIDE = "a collective runs inside"


class CaptureError(Exception):
    """Why a region cannot be captured; data for a message, never seen by the user as it is."""


class LeavesError(CaptureError):
    """The forward leaves something behind, which it may do in its first run alone."""


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
class GradientLike:
    """Shape of a gradient that flows into an output."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
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


@dataclass
class Recorder(TorchDispatchMode):
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
        if draws(func, args, kwargs):
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
            raise CaptureError(COLLECTIVE_INSIDE)


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
