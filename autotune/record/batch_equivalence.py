"""Check that the mean gradient of micro-batches is that of the whole batch; otherwise the search may not
trade micro-batch against accumulation.

The gradients of one batch are compared with the mean over its two halves. Dropout is off, because it draws
other numbers for a half; everything else is in training mode, so that BatchNorm takes effect. The check runs
in float64 if the model allows it. The tolerance is half of the digits of its dtype: a sum of n terms in
another order differs by about √n roundings, which reaches half of the digits only at n = 1/u terms (u: one
rounding).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memtune.errors import MemtuneError
from memtune.hardware import cpu_threads
from memtune.offload.optimizer import available_bytes
from memtune.runtime import no_dropout
from memtune.technique import Reason
from memtune.units import format_bytes
from memtune.workload import Workload, map_tensors, split_batch

SAMPLES = 4
_COPIES = 6  # parameters and three gradients, in a dtype up to twice as wide, at the least

Gradients = list[Tensor | None]


def batch_is_lossless(
    workload: Workload, *, parameter_bytes: int = 0, threads: int | None = None
) -> Reason | None:
    """Compare real gradients on the CPU; return None, or why the micro-batch must not change.

    Args:
        workload: The user's model, batch and loss.
        parameter_bytes: Of the model, to check first whether the comparison fits into host memory; 0 skips
            that.
        threads: CPU threads to use; None for torch's number. On a busy machine, many threads wait for each
            other.
    """
    needed, free = _COPIES * parameter_bytes, available_bytes()
    if free is not None and needed > free:
        room = f"that takes {format_bytes(needed)} of host memory, {format_bytes(free)} are free"
        return _not_compared(room)
    with torch.random.fork_rng(devices=[]), cpu_threads(threads):
        torch.manual_seed(0)
        model = workload.build_model().train()
        batch = workload.make_batch(SAMPLES)
        halves = split_batch(batch, 2, SAMPLES)
        if isinstance(halves, str):
            return _not_compared(halves)
        return _compare(model, workload.loss, batch, halves)


def _not_compared(why: str) -> Reason:
    return Reason(f"gradients of micro-batches could not be compared: {why}")


def _compare(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, halves: list[Any]
) -> Reason | None:
    parameters = [each for each in model.parameters() if each.requires_grad]
    dtype = next((each.dtype for each in parameters if each.is_floating_point()), torch.float32)
    for attempt in dict.fromkeys((torch.float64, dtype)):
        if attempt is torch.float64:
            model.double()
        else:
            model.to(dtype)
        cast = _caster(attempt, dtype)
        try:
            whole, drew = _gradients(model, loss, map_tensors(batch, cast))
            parts = [_gradients(model, loss, map_tensors(half, cast))[0] for half in halves]
        except (MemtuneError, RuntimeError, TypeError, NotImplementedError):
            if attempt is dtype:
                raise
            continue  # user code that names a narrower dtype fails in float64; use the model's own dtype
        return _verdict(whole, parts, drew, max(torch.finfo(attempt).eps, _loss_of_digits(attempt, dtype)))
    raise AssertionError("unreachable: the last attempt returns or raises")


def _caster(attempt: torch.dtype, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a cast for batch tensors: in a float64 comparison those of the model's dtype or float32 become
    float64, all others keep their dtype.
    """
    return lambda tensor: (
        tensor.to(attempt) if tensor.dtype in (dtype, torch.float32) and attempt is torch.float64 else tensor
    )


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


def _gradients(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any
) -> tuple[Gradients, bool]:
    """Return gradients of one batch, and whether random numbers were drawn; restore buffers and gradients."""
    buffers = [(each, each.clone()) for each in model.buffers()]
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    with no_dropout(model):
        loss(model, batch).backward()
    found = [each.grad for each in model.parameters()]
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    return found, not torch.equal(before, torch.random.get_rng_state())
