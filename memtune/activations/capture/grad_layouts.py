"""Guesses of the outputs of a model that get a gradient, and of the gradients' memory layout.

A schedule is for the ops of one backward, which depend on both: a product with a non-contiguous gradient
begins with a copy, and an output that the loss does not use has no backward. A region is captured before its
forward runs, so the first guess whose ops are the schedule's is taken. A wrong guess costs the time of a
capture; the real gradients are checked when they arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memtune.activations.capture.tape import GradientLike, Outside, Slot, Tape
from memtune.errors import ApplyError

MOST = 24
"""Maximal number of guesses for one region."""
_MOST_OUTPUTS = 4
"""Up to this number of outputs every subset is tried; with more: all, each alone, and all but one."""
_Layout = tuple[int, ...] | str


def guess_layouts(tape: Tape) -> Iterator[dict[int, GradientLike]]:
    """Yield gradient layouts by output, likeliest first, except those that `tape` was captured with."""
    seen = [{i: _like(tape, i, _strides_given(tape, i)) for i in tape.with_gradient}]
    # Many layouts of one shape are equal (dims of size 1), so more are drawn than returned.
    for guess in islice(_all(tape), 4 * MOST):
        if guess not in seen:
            seen.append(guess)
            yield guess
        if len(seen) > MOST:
            return


def _all(tape: Tape) -> Iterator[dict[int, GradientLike]]:
    outputs = tape.differentiable
    most_dims = max(len(_slot(tape, i).size) for i in outputs)
    # Layouts outside, outputs inside: most losses use all outputs and return contiguous gradients.
    for layout in _layouts(most_dims):
        for asked in _sets(outputs):
            yield {i: _like(tape, i, _strides(_slot(tape, i), layout)) for i in asked}


def _sets(outputs: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield sets of outputs that the loss may use: all of them first, then the first alone."""
    sizes = range(1, len(outputs)) if len(outputs) <= _MOST_OUTPUTS else (1, len(outputs) - 1)
    yield outputs
    for size in sizes:
        yield from combinations(outputs, size)


def _layouts(n_dims: int) -> Iterator[_Layout]:
    """Yield orders of dims in memory; `own` is the output's, `one value` has zero strides."""
    yield tuple(range(n_dims))
    yield "own"
    if n_dims > 1:
        # As after `logits.transpose(1, 2)` before a cross-entropy.
        yield (0, *range(2, n_dims), 1)  # classes are the second dim for torch's losses
        yield (0, n_dims - 1, *range(1, n_dims - 1))
    yield "one value"
    for one, other in combinations(range(n_dims), 2):
        order = list(range(n_dims))
        order[one], order[other] = other, one
        yield tuple(order)


def _strides(out: Slot, layout: _Layout) -> tuple[int, ...]:
    if layout == "own":
        return out.stride
    if layout == "one value":
        return (0,) * len(out.size)
    order = [dim for dim in layout if isinstance(dim, int) and dim < len(out.size)]
    strides, step = [0] * len(out.size), 1
    for dim in reversed(order):
        strides[dim], step = step, step * max(out.size[dim], 1)
    return tuple(strides)


def _slot(tape: Tape, i: int) -> Slot:
    slot: Slot = tape.outputs[i]
    return slot


def _like(tape: Tape, i: int, stride: tuple[int, ...]) -> GradientLike:
    return GradientLike(_slot(tape, i).size, stride, _slot(tape, i).dtype)


def _strides_given(tape: Tape, i: int) -> tuple[int, ...]:
    return tuple(torch._prims_common.make_contiguous_strides_for(_slot(tape, i).size))


def match_layouts(tape: Tape, gradients: dict[int, Tensor], device: torch.device) -> None:
    """Give `gradients` the outputs and strides that `tape` was captured with.

    Raises:
        ApplyError: A gradient arrives for an output that had none in the capture.
    """
    unplanned = sorted(set(gradients) - set(tape.with_gradient))
    if unplanned:
        raise ApplyError(
            f"Output {unplanned[0]} of the model gets a gradient, which it did not get when its schedule was"
            " made.",
            fix="use the same outputs in the loss in each step, or choose recompute: {kind: full}",
            code="MT328",
        )
    for i in tape.with_gradient:
        slot = tape.given[Outside("gradient", i)]
        # The captured backward runs ops on this gradient, so one that does not arrive is zeros.
        if i not in gradients:
            gradients[i] = torch.zeros(slot.size, dtype=slot.dtype, device=device)
        elif gradients[i].stride() != slot.stride:
            gradients[i] = torch.empty_strided(slot.size, slot.stride, dtype=slot.dtype, device=device).copy_(
                gradients[i]
            )


def is_watched(parameters: Iterable[Tensor]) -> bool:
    """Return whether hooks may need gradients one by one."""
    # DDP's own C++ hooks are invisible, so several ranks count.
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return True
    return any(map(is_hooked, parameters))


def is_hooked(parameter: Tensor) -> bool:
    """Return whether autograd calls hooks with the parameter's gradient, or after it is accumulated."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def is_accumulated(edge: Any) -> bool:
    """Return whether the engine runs this parameter's own node, which accumulates into `parameter.grad`."""
    try:
        return bool(torch._C._will_engine_execute_node(edge))
    except RuntimeError:  # the call is `autograd.grad`, which returns this gradient to the caller
        return False


def accumulate_grad(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulate `gradient` as autograd's own node does; a parameter that requires none is skipped."""
    if not parameter.requires_grad:
        return
    # As AccumulateGrad without create_graph: the first gradient is taken over, later ones are added in place.
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
