"""Check that the mean gradient of micro-batches is that of the whole batch; otherwise the search may not
trade micro-batch against accumulation.

The gradients of a batch are compared with the mean over its two halves, and the buffers that both leave, for
two batches drawn. Dropout is off, because it draws other numbers for a half; everything else is in training
mode, so that BatchNorm takes effect. The check runs in float64 if the model allows it. The tolerance is half
of the digits of its dtype: a sum of n terms in another order differs by about √n roundings, which reaches
half of the digits only at n = 1/u terms (u: one rounding).

A model whose comparison takes long is compared with one block of each sort: the other blocks run the same
ops. Its parameters are drawn here, so that the time and the memory of the whole model are not needed. Where
even that takes too long, only ops that are known to couple samples are looked for; trials compare losses.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memtune._replaced import replaced
from memtune.errors import MemtuneError
from memtune.hardware import cpu_threads
from memtune.offload.optimizer import available_bytes
from memtune.program import Kind, Phase, Recording, Step
from memtune.random_seeds import PythonRandomState, preserved_random, seed_all
from memtune.runtime import no_dropout
from memtune.technique import Reason
from memtune.units import format_bytes
from memtune.workload import Workload, map_tensors, split_batch, summary

SAMPLES = 4
_COPIES = 6  # parameters and three gradients, in a dtype up to twice as wide, at the least
_ACTIVATION_COPIES = 3  # saved tensors in a dtype up to twice as wide, and the kernels' own buffers
_LARGE_BYTES = 1 << 28
_LARGE_FLOPS = 1e10
"""Parameters, and FLOPs of a batch with its halves, above which repeated blocks are left out."""
_MOST_FLOPS = 3e12
"""FLOPs of a search's comparison, about 45 s on two cores in float64."""
_MOST_FLOPS_OF_PLAN = 2e11
"""Of a plan, which runs no trials for minutes: about 3 s."""
_SPREAD = 0.02
"""Standard deviation of drawn parameters, as of GPT-2's."""

Gradients = list[Tensor | None]


def batch_is_lossless(
    workload: Workload,
    *,
    parameter_bytes: int = 0,
    activation_bytes: int = 0,
    without: Sequence[str] = (),
    threads: int | None = None,
    draws: int = 2,
) -> Reason | None:
    """Compare real gradients on the CPU; return None, or why the micro-batch must not change.

    Args:
        workload: The user's model, batch and loss.
        parameter_bytes: Of the model, to check first whether the comparison fits into host memory; 0 skips
            that.
        activation_bytes: Of a comparison (`activation_bytes`), checked likewise.
        without: Qualified names of blocks that the comparison leaves out (`repeated_blocks`).
        threads: CPU threads to use; None for torch's number. On a busy machine, many threads wait for each
            other.
        draws: Batches to compare. A loss that is a mean over selected tokens passes with one whose halves
            select equally many.
    """
    with preserved_random(), cpu_threads(threads):
        if without:
            try:
                return _check(workload, _short_model(workload, without), draws, activation_bytes)
            except (MemtuneError, RuntimeError, TypeError, NotImplementedError, LookupError):
                pass  # its code needs every block, or parameters with the values that it gave them
        if (room := _no_room(parameter_bytes, activation_bytes)) is not None:
            return room
        seed_all(0)
        return _check(workload, workload.build_model(), draws, activation_bytes)


def repeated_blocks(recording: Recording) -> tuple[str, ...]:
    """Return the blocks that a comparison leaves out where it takes long: all but the first of alike ones."""
    step = recording.step
    if parameter_bytes(recording) <= _LARGE_BYTES and _draw_flops(recording) <= _LARGE_FLOPS:
        return ()
    forward = step.ops.phase == Phase.FORWARD
    seen: set[tuple[str, bytes]] = set()
    found = []
    for i, name in enumerate(step.blocks):
        # Blocks of one class may differ by their settings: the ops that run show which couple samples alike.
        sort = name.rpartition(".")[0], np.unique(step.ops.name[forward & (step.ops.block == i)]).tobytes()
        if sort in seen:
            found.append(name)
        seen.add(sort)
    return tuple(found)


def affordable_draws(recording: Recording, without: Collection[str], *, for_trials: bool = True) -> int:
    """Return how many batches, at most two, there is time to compare gradients of: less without trials."""
    most_flops = _MOST_FLOPS if for_trials else _MOST_FLOPS_OF_PLAN
    return min(int(most_flops / max(_draw_flops(recording, without), 1.0)), 2)


def _draw_flops(recording: Recording, without: Collection[str] = ()) -> float:
    """Return FLOPs of a batch and its halves."""
    step = recording.step
    return (
        2
        * SAMPLES
        * float(step.ops.flops[_is_compared(step, without)[step.ops.block]].sum())
        / recording.small
    )


def activation_bytes(recording: Recording, without: Collection[str]) -> int:
    """Return the bytes that a comparison allocates in addition to parameters and gradients."""
    step = recording.step
    saved = np.unique(step.saves.storage[_is_compared(step, without)[step.saves.block]])
    saved = saved[step.storages.producer[saved] >= 0]
    return int(step.storages.bytes[saved].sum() * _ACTIVATION_COPIES * SAMPLES / recording.small)


def _is_compared(step: Step, without: Collection[str]) -> NDArray[np.bool_]:
    """Return which blocks are compared, by number; the last entry is for ops outside of the blocks."""
    return np.array([*(name not in without for name in step.blocks), True])


def coupled_samples(recording: Recording) -> Reason | None:
    """Return why the micro-batch must not change, by the names of the recorded ops alone."""
    found = next((name for name in recording.step.names if "batch_norm" in name), None)
    return None if found is None else Reason(f"{found} normalizes over the samples of a micro-batch")


def parameter_bytes(recording: Recording) -> int:
    """Return bytes of all parameters on the device, each storage once."""
    storages = recording.step.storages
    return int(storages.bytes[(storages.kind == Kind.PARAMETER) & (storages.producer < 0)].sum())


def _no_room(parameter_bytes: int, activation_bytes: int) -> Reason | None:
    needed, free = _COPIES * parameter_bytes + activation_bytes, available_bytes()
    if free is None or needed <= free:
        return None
    room = f"that takes {format_bytes(needed)} of host memory, {format_bytes(free)} are free"
    return _not_compared(room)


def _check(workload: Workload, model: nn.Module, draws_count: int, activation_bytes: int) -> Reason | None:
    model.train()
    if (room := _no_room(sum(each.nbytes for each in model.parameters()), activation_bytes)) is not None:
        return room
    draws = []
    for seed in range(draws_count):
        seed_all(seed)
        batch = workload.make_batch(SAMPLES)
        halves = split_batch(batch, 2, SAMPLES)
        if isinstance(halves, str):
            return _not_compared(halves)
        draws.append((batch, halves))
    return _compare(model, workload.loss, draws)


def _short_model(workload: Workload, without: Sequence[str]) -> nn.Module:
    """Return the user's model without the blocks of `without`, with parameters drawn here."""
    with _parameters_on_meta():
        model = workload.build_model()
    children = defaultdict(set)
    for name in without:
        parent, _, child = name.rpartition(".")
        children[parent].add(child)
    for parent, names in children.items():
        container = model.get_submodule(parent)
        if isinstance(container, nn.ModuleList | nn.Sequential):
            places = [i for i, (name, _) in enumerate(container.named_children()) if name in names]
            # From the end: a deletion renumbers those after it.
            for place in reversed(places):
                del container[place]
    seed_all(0)
    # A tied parameter is drawn once, and stays one object.
    memo: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                if id(parameter) not in memo:
                    memo[id(parameter)] = _drawn(parameter)
                module._parameters[name] = memo[id(parameter)]
    return model


def _drawn(parameter: nn.Parameter) -> nn.Parameter:
    """Return a real parameter like `parameter`: scales of norms near 1, all else near 0."""
    center = 1.0 if parameter.ndim == 1 else 0.0
    values = torch.normal(center, _SPREAD, parameter.shape).to(parameter.dtype)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when it is registered, so that initial values cost nothing."""
    register = nn.Module.register_parameter
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the original, whose id stays taken then

    def without_values(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            if id(parameter) not in moved:
                empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                moved[id(parameter)] = (parameter, empty)
            parameter = moved[id(parameter)][1]
        register(module, name, parameter)

    with replaced(nn.Module, register_parameter=without_values):
        yield


def _not_compared(why: str) -> Reason:
    return Reason(f"gradients of micro-batches could not be compared: {why}")


def _compare(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], draws: list[tuple[Any, list[Any]]]
) -> Reason | None:
    """Return the first verdict against batches and their halves."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    dtype = next((each.dtype for each in parameters if each.is_floating_point()), torch.float32)
    tensors = [*model.parameters(), *model.buffers()]
    own = [each.dtype for each in tensors]
    for attempt in dict.fromkeys((torch.float64, dtype)):
        for tensor, narrow in zip(tensors, own, strict=True):
            tensor.data = tensor.data.to(_wide(narrow) if attempt is torch.float64 else narrow)
        cast = _caster(attempt, dtype)
        unit = max(torch.finfo(attempt).eps, _loss_of_digits(attempt, dtype))
        try:
            for batch, halves in draws:
                # Warnings of the user's code appeared while it was recorded for its device. Here they would
                # be untrue: on the CPU, autocast to CUDA says that it does nothing.
                with warnings.catch_warnings(action="ignore"), _restored_buffers(model):
                    whole, drew = _gradients(model, loss, map_tensors(batch, cast))
                    left = {name: each.clone() for name, each in model.named_buffers()}
                try:
                    with warnings.catch_warnings(action="ignore"), _restored_buffers(model):
                        parts = [_gradients(model, loss, map_tensors(half, cast))[0] for half in halves]
                        written = _differing_buffer(left, dict(model.named_buffers()), unit)
                except Exception as error:  # user code may raise anything on a batch cut by its dimensions
                    model.zero_grad(set_to_none=True)
                    return _not_compared(f"loss() fails on half of a batch: {summary(error, 120)}")
                if (reason := _verdict(whole, parts, drew, unit)) is not None:
                    return reason
                if written:
                    return Reason(f"forward writes {written}: after a batch it differs from after its halves")
        except (MemtuneError, RuntimeError, TypeError, NotImplementedError):
            if attempt is dtype:
                raise
            continue  # user code that names a narrower dtype fails in float64; use the model's own dtype
        return None
    raise AssertionError("unreachable: the last attempt returns or raises")


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _caster(attempt: torch.dtype, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a cast for batch tensors of a comparison in `attempt`."""
    # In float64 those of the model's dtype, float32 or complex64 are widened; all others keep their dtype.
    cast = {dtype, torch.float32, torch.complex64} if attempt is torch.float64 else set()
    return lambda tensor: tensor.to(_wide(tensor.dtype)) if tensor.dtype in cast else tensor


def _loss_of_digits(attempt: torch.dtype, dtype: torch.dtype) -> float:
    """Return one rounding of the narrowest dtype that user code may use, as in `.float()` before the loss."""
    return (
        float(torch.finfo(torch.float32).eps) if attempt is torch.float64 else float(torch.finfo(dtype).eps)
    )


def _verdict(whole: Gradients, parts: list[Gradients], drew: bool, unit: float) -> Reason | None:
    tolerance = math.sqrt(unit)
    off = scale = against_sum = 0.0
    for every, *each in zip(whole, *parts, strict=True):
        zero = next((g for g in (every, *each) if g is not None), None)
        if zero is None:
            continue
        mean = sum(
            (g.double() for g in each if g is not None), torch.zeros_like(zero, dtype=torch.float64)
        ) / len(parts)
        full = torch.zeros_like(mean) if every is None else every.double()
        off += float((full - mean).square().sum())
        against_sum += float((full - len(parts) * mean).square().sum())
        scale += float(full.square().sum())
    relative = math.sqrt(off / scale) if scale else 0.0 if off == 0 else math.inf
    if relative <= tolerance:
        return None
    text = (
        f"gradients of a batch differ by {relative:.1%} from the mean of its halves (tolerance"
        f" {tolerance:.1g})"
    )
    if scale and math.sqrt(against_sum / scale) <= tolerance:
        return Reason(f"{text}: the loss is a sum over samples", "return a mean, as in  loss.mean()")
    cause = (
        "the step draws random numbers outside dropout"
        if drew
        else "common causes are BatchNorm, a contrastive loss and a mean over tokens"
    )
    return Reason(f"{text}: {cause}")


@contextmanager
def _restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers when the context ends: those of one batch must not reach the next comparison."""
    buffers = [(each, each.clone()) for each in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _differing_buffer(left: dict[str, Tensor], now: dict[str, Tensor], unit: float) -> str:
    """Return the name of a buffer whose values differ, such as an average over forwards; '' for none."""
    for name, one in left.items():
        other = now.get(name)
        if other is None or one.shape != other.shape or torch.equal(one, other):
            continue  # a cache of the batch's own size says nothing
        if not one.is_floating_point():
            return name
        largest = max(float(one.abs().max()), float(other.abs().max()))
        if not float((one - other).abs().max()) <= math.sqrt(unit) * largest:
            return name
    return ""


def _real(gradient: Tensor | None) -> Tensor | None:
    """Return `gradient`, a complex one as pairs of real numbers."""
    return torch.view_as_real(gradient) if gradient is not None and gradient.is_complex() else gradient


def _gradients(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any
) -> tuple[Gradients, bool]:
    """Return gradients of one batch, and whether random numbers were drawn; restore gradients."""
    seed_all(1)
    before, in_python = torch.random.get_rng_state(), PythonRandomState.now()
    with no_dropout(model):
        loss(model, batch).backward()
    found = [_real(each.grad) for each in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found, not (torch.equal(before, torch.random.get_rng_state()) and in_python.is_now())
