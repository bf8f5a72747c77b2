"""What gradients may flow into a model's outputs: which of them, and in which layout.

A schedule is for the ops of one backward, and those depend on it: a product with a gradient that is not contiguous begins with a
copy, an output that the loss leaves out has no backward. When a region is captured forward has not run yet, so the first guess
whose ops are the schedule's is taken. A wrong one costs time, as each capture does; what flows in is looked at when it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, islice

import torch
from torch import Tensor

from memtune.errors import ApplyError
from memtune.runtime.tape import GradientLike, Outside, Slot, Tape

MOST = 24
"""Guesses for one region."""
_MOST_OUTPUTS = 4
"""Outputs of which every set is tried; of more, all, each alone, and all but one."""
_Layout = tuple[int, ...] | str


def guesses(tape: Tape) -> Iterator[dict[int, GradientLike]]:
    """Gradients by output, likeliest first, without those that `tape` was captured with."""
    seen = [{i: _like(tape, i, _strides_given(tape, i)) for i in tape.asked}]
    for guess in islice(_all(tape), 4 * MOST):
        if guess not in seen:
            seen.append(guess)
            yield guess
        if len(seen) > MOST:
            return


def _all(tape: Tape) -> Iterator[dict[int, GradientLike]]:
    outputs = tape.differentiable
    most_dims = max(len(_slot(tape, i).size) for i in outputs)
    for layout in _layouts(most_dims):
        for asked in _sets(outputs):
            yield {i: _like(tape, i, _strides(_slot(tape, i), layout)) for i in asked}


def _sets(outputs: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Of outputs that the loss may use; all of them first, then the first alone."""
    sizes = range(1, len(outputs)) if len(outputs) <= _MOST_OUTPUTS else (1, len(outputs) - 1)
    yield outputs
    for size in sizes:
        yield from combinations(outputs, size)


def _layouts(n_dims: int) -> Iterator[_Layout]:
    """Orders of dims in memory; `own` is the output's, `one value` has no strides."""
    yield tuple(range(n_dims))
    yield "own"
    if n_dims > 1:
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


def make_alike(tape: Tape, gradients: dict[int, Tensor], device: torch.device) -> None:
    """Give `gradients` the outputs and strides that `tape` was captured with."""
    unplanned = sorted(set(gradients) - set(tape.asked))
    if unplanned:
        raise ApplyError(
            f"A gradient flows into output {unplanned[0]} of the model, which was not so when its schedule was made.",
            fix="use the same outputs in the loss in each step, or choose recompute: {kind: full}",
            code="MT328",
        )
    for i in tape.asked:
        slot = tape.given[Outside("gradient", i)]
        if i not in gradients:
            gradients[i] = torch.zeros(slot.size, dtype=slot.dtype, device=device)
        elif gradients[i].stride() != slot.stride:
            gradients[i] = torch.empty_strided(slot.size, slot.stride, dtype=slot.dtype, device=device).copy_(gradients[i])
