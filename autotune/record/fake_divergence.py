"""Keep code that branches differently or fails on fake tensors on the path of training."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from memtune._replaced import replaced
from memtune.activations.capture import (
    MOST_ELEMENTS,
    SIZED_BY_VALUES,
    ConstantTensors,
    distributions_are_valid,
    fakes_look_real,
    packing_by_known_lengths,
)
from memtune.runtime import READ_OUTS, EagerRecorder, OpVisitor, tensors_in

_NUMBER = torch.ops.aten._local_scalar_dense.default
_NUMBERS = "assumed that the numbers which the optimizer reads from tensors are 1: no size depends on them"
_ONE_SEQUENCE = (
    "assumed that no sample holds several packed sequences: transformers decides by looking at position_ids"
)


_SAME_MASKS = "assumed that every batch has masks like those recorded with: the code decides by them"
_SAME_COUNTS = (
    "sizes depend on the data (a mask selects, nonzero, lengths of packed sequences): they are those of the"
    " batches drawn, between which sizes of other micro-batches are extrapolated linearly; worst_batch(size)"
    " in model.py gives the largest"
)
_VALID = "assumed that the arguments of torch.distributions are valid"
_EVEN_CHOICES = (
    "assumed that choices by computed values (a router's topk or argmax, sort) are spread evenly, that"
    " these values are finite and other conditions on them false: sizes that depend on them differ in"
    " training"
)
_SMALL = 1e-9
_CYCLE = 7919  # floats of 16 bits hold it
_ATEN = torch.ops.aten
_CHOOSES = frozenset(
    {
        _ATEN.topk.default,
        _ATEN.sort.default,
        _ATEN.sort.stable,
        _ATEN.argsort.stable,
        _ATEN.argmax.default,
        _ATEN.argmin.default,
        _ATEN.max.dim,
        _ATEN.min.dim,
        _ATEN.multinomial.default,
    }
)
"""Ops that return indices of chosen elements, alone or last."""


@contextmanager
def as_in_training(assumed: list[str], optimizer: Optimizer, batch: BatchValues | None) -> Iterator[None]:
    """Answer reads of fake tensors' data as in training; append each assumption to `assumed`."""
    # Optimizers that scale by a norm (`torch.optim.Adafactor`) read numbers in every step; a fake
    # tensor has none.
    numbers = _OptimizerScalarReads(assumed)
    before = optimizer.register_step_pre_hook(lambda *_: numbers.begin())
    after = optimizer.register_step_post_hook(lambda *_: numbers.end())
    value_reads = nullcontext() if batch is None else batch.answering_reads(assumed)
    try:
        with _one_sequence(assumed), fakes_look_real(), value_reads:
            yield
    finally:
        numbers.end()
        before.remove()
        after.remove()


class BatchValues:
    """Known values of a session's micro-batches, taken before they were made fake, of constants and draws.

    Attributes:
        chooses: Numbers, conditions and choices by values that are not known are assumed.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.known, self.mode, self.chooses = ConstantTensors(draws=True), mode, False

    def fake(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as a fake one whose values remain known, unless they are many."""
        made = self.mode.from_tensor(tensor)
        self.known.register(made, tensor)
        return made

    @contextmanager
    def answering_reads(self, assumed: list[str]) -> Iterator[None]:
        """Answer reads of values computed from known ones as in training; note assumptions in `assumed`."""
        reads = _KnownValueReads(self, assumed)
        convert = Tensor.numpy
        swap = cast(Any, torch.utils.swap_tensors)

        def numpy(tensor: Tensor, *, force: bool = False) -> Any:
            values = reads.array(tensor) if isinstance(tensor, FakeTensor) else None
            with _disable_current_modes():
                return convert(tensor if values is None else values, force=force)

        def swap_tensors(one: Tensor, other: Tensor) -> None:
            # `model.bfloat16()` swaps its weights, and torch swaps no tensor that is weakly referenced.
            self.known.forget(one)
            self.known.forget(other)
            swap(one, other)

        with (
            replaced(Tensor, numpy=numpy),
            replaced(torch.utils, swap_tensors=swap_tensors),
            distributions_are_valid(lambda: reads.assume(_VALID)),
            packing_by_known_lengths(self.known, lambda: reads.assume(_SAME_COUNTS)),
            EagerRecorder(reads),
        ):
            yield


class _KnownValueReads(OpVisitor):
    def __init__(self, values: BatchValues, assumed: list[str]) -> None:
        self._values, self._known, self._assumed = values, values.known, assumed

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        number = self._known.read_constant(func, args)
        if number is not None:
            self.assume(_SAME_MASKS)
            return number
        if func in SIZED_BY_VALUES:
            out = self._known.sized(func, args, kwargs, self._values.mode)
            if out is not None:
                self.assume(_SAME_COUNTS)
                return out
        if self._values.chooses and func in READ_OUTS:
            self.assume(_EVEN_CHOICES)
            is_number = func is _NUMBER and args[0].dtype is not torch.bool
            # A loop until an error is small ends.
            return (_SMALL if args[0].dtype.is_floating_point else 1) if is_number else False
        return NotImplemented

    def array(self, tensor: Tensor) -> Tensor | None:
        """Return values for code that leaves torch (scipy's assignment); None where none may be assumed."""
        value = self._known.value(tensor)
        if value is None and self._values.chooses and tensor.numel() <= MOST_ELEMENTS:
            self.assume(_EVEN_CHOICES)
            with _disable_current_modes():
                value = torch.arange(tensor.numel()).remainder(_CYCLE).to(tensor.dtype).view(tensor.shape)
        return value

    def assume(self, note: str) -> None:
        """Note an assumption, once."""
        if note not in self._assumed:
            self._assumed.append(note)

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        inputs = tensors_in([*args, *kwargs.values()])
        if self._values.chooses and func in _CHOOSES and not self._known.are_known(inputs):
            self.assume(_EVEN_CHOICES)
            chosen = out if isinstance(out, Tensor) else out[-1]
            self._known.register(chosen, _spread_evenly(func, args, kwargs, chosen))
        elif self._values.chooses and (finite := _of_finite(func, args)) is not None:
            self.assume(_EVEN_CHOICES)
            with _disable_current_modes():
                self._known.register(out, torch.full(out.shape, finite))
        else:
            self._known.follow(func, args, kwargs, out)


def _of_finite(func: Any, args: Any) -> bool | None:
    """Return what a check for infinities and NaN gives where there are none; None for other ops."""
    if func in (_ATEN.isnan.default, _ATEN.isinf.default):
        return False
    if func is _ATEN.ne.Scalar and args[1] == math.inf:  # of isfinite, as is the next one
        return True
    return True if func is _ATEN.eq.Tensor and args[0] is args[1] else None


def _spread_evenly(func: Any, args: Any, kwargs: Any, chosen: Tensor) -> Tensor:
    """Return indices of `chosen`'s layout, different in a slice, and all equally frequent."""
    source = args[0]
    declared = [each.name for each in func._schema.arguments]
    given = dict(zip(declared, args, strict=False)) | kwargs
    dim = given.get("dim", None if func in (_ATEN.argmax.default, _ATEN.argmin.default) else -1)
    choices = source.numel() if dim is None else source.shape[dim] if source.dim() else 1
    with _disable_current_modes():
        if dim is None or chosen.dim() < source.dim() or not chosen.dim():
            return (torch.arange(chosen.numel()) % choices).view(chosen.shape)
        last = chosen.shape[:dim] + chosen.shape[dim:][1:] + (chosen.shape[dim],)
        return (torch.arange(chosen.numel()) % choices).view(last).movedim(-1, dim)


class _OptimizerScalarReads(OpVisitor):
    """Visitor that answers 1 where the optimizer reads a fake tensor's value in its step."""

    def __init__(self, assumed: list[str]) -> None:
        self._assumed, self._recorder = assumed, EagerRecorder(self)
        self._steps = False

    def begin(self) -> None:
        if not self._steps:
            self._steps = True
            self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        if self._steps:
            self._steps = False
            self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not _NUMBER:
                raise
        if _NUMBERS not in self._assumed:
            self._assumed.append(_NUMBERS)
        dtype = args[0].dtype
        return 1.0 if dtype.is_floating_point else True if dtype is torch.bool else 1


@contextmanager
def watch_random_states(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `note` with every state of the CPU generator that is read inside, since no op creates it."""
    original = torch.get_rng_state

    def get_rng_state() -> Tensor:
        state = original()
        # Dispatch modes are off while a kernel is measured, which is not part of the step.
        if torch._C._len_torch_dispatch_stack():
            note(state)
        return state

    with replaced(torch, get_rng_state=get_rng_state):
        yield


@contextmanager
def _one_sequence(assumed: list[str]) -> Iterator[None]:
    """Make Hugging Face models choose their attention mask as on real data."""
    # On fake tensors transformers cannot see that no sample is packed, so it would build a full mask instead
    # of using the causal kernel: other ops, and a full mask more at the peak.
    module: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(module, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        found = original(position_ids)
        if found is not None:
            (found[:, -1] == 0).all()  # the ops of the check that transformers makes in training
            if _ONE_SEQUENCE not in assumed:
                assumed.append(_ONE_SEQUENCE)
        return None

    with replaced(module, find_packed_sequence_indices=find_packed_sequence_indices):
        yield
