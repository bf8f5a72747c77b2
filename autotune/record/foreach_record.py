"""Record the optimizer phase as CUDA runs it: with foreach kernels, torch's default there.

On CPU torch's optimizers update one parameter at a time. The phase is recorded from torch's own foreach code
on the same fake parameters, so temporaries and their lifetimes are those of the installed version of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memtune.autotune.record.tracer import Tracer
from memtune.autotune.translate import FOREACH_OPTIMIZERS
from memtune.program import Kind, Phase, Step


def foreach_phase(model: nn.Module, optimizer: Optimizer, blocks: list[str]) -> Step | None:
    """Record the optimizer's step with foreach kernels; return None where CUDA would not use them.

    Call it after backward, when gradients exist; parameters and state are unchanged afterwards. Storages are
    numbered as in the surrounding recording: parameters, buffers and state in the same order, then gradients.
    """
    if (
        type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]
        or type(optimizer).__name__ not in FOREACH_OPTIMIZERS
    ):
        return None
    groups = optimizer.param_groups
    if any(
        group.get("foreach") is not None or group.get("fused") or group.get("differentiable")
        for group in groups
    ):
        return None
    if any(isinstance(group.get("lr"), Tensor) for group in groups):
        # torch has no foreach kernels for a learning rate that is a tensor, unless the step is captured
        return None
    tracer = Tracer(model, optimizer, blocks, placeholders=False)
    for group in groups:
        group["foreach"] = True
    try:
        with _restored(model, optimizer), tracer.recording():
            for parameter in model.parameters():
                if isinstance(parameter.grad, Tensor):
                    tracer.adopt(parameter.grad, Kind.GRADIENT)
            tracer.note_gradients()
            tracer.phase = Phase.OPTIMIZER
            optimizer.step()
    finally:
        for group in groups:
            group["foreach"] = None
    return tracer.step()


@contextmanager
def _restored(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Restore the values that a step inside has changed; fake tensors have none."""
    held = [
        each
        for each in tree_leaves((list(model.parameters()), list(optimizer.state.values())))
        if isinstance(each, Tensor)
    ]
    before = (
        [] if isinstance(next(iter(held), None), FakeTensor) else [each.detach().clone() for each in held]
    )
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(held, before, strict=False):
                tensor.copy_(value)


def step_counters(tracer: Tracer, optimizer: Optimizer) -> tuple[int, ...]:
    """Return the rows of step counters, which torch keeps on the host for parameters on CUDA."""
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
        return ()
    moved = [
        group for group in optimizer.param_groups if not group.get("capturable") and not group.get("fused")
    ]
    states = [optimizer.state.get(parameter, {}) for group in moved for parameter in group["params"]]
    return tuple(
        tracer.storage_of(state["step"]) for state in states if isinstance(state.get("step"), Tensor)
    )
