"""Update shards as plain tensors: the optimizer's ops see this rank's rows, users see DTensors.

An op on DTensors works out its sharding in Python, which for a model of small tensors costs more than the
update. An optimizer that treats every element alone gives the same numbers on local tensors, so they replace
parameters, gradients and state while its `step` runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from memtune.runtime import is_own_step, replace_step, with_hooks

_ELEMENTWISE: Final = frozenset(
    {Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD}
)
"""Optimizers none of whose elements depends on another one; subclasses may differ."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` treats every element alone."""
    return type(optimizer) in _ELEMENTWISE


def update_locally(optimizer: Optimizer) -> None:
    """Make `optimizer.step()` work on the local tensors of its DTensors, if it treats elements alone.

    Its hooks see DTensors. A step that the user has replaced is not changed.
    """
    update = getattr(type(optimizer).step, "__wrapped__", None)  # below the wrapper that runs the hooks
    if is_elementwise(optimizer) and update is not None and is_own_step(optimizer):
        replace_step(optimizer, with_hooks(optimizer, partial(_update, optimizer, update)))


def _update(optimizer: Optimizer, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _local_tensors(optimizer):
        return update(optimizer, *args, **kwargs)


@contextmanager
def _local_tensors(optimizer: Optimizer) -> Iterator[None]:
    """Replace the DTensors in parameter groups and state by their local tensors."""
    groups, state = optimizer.param_groups, optimizer.state
    whole = [group["params"] for group in groups]
    rows = [[_local(each) for each in parameters] for parameters in whole]
    pairs = [pair for each in zip(whole, rows, strict=True) for pair in zip(*each, strict=True)]
    if not all(_is_alike(each) for each, _ in pairs):
        yield
        return
    inside = defaultdict[Any, Any](dict)
    for each, mine in pairs:
        values = state.get(each)
        if values is not None:
            inside[mine] = values if mine is each else {name: _local(v) for name, v in values.items()}
        if mine is not each:
            mine.grad = _local(each.grad)
    optimizer.state = inside
    for group, parameters in zip(groups, rows, strict=True):
        group["params"] = parameters
    try:
        yield
    finally:
        optimizer.state = state
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters
        for each, mine in pairs:
            if isinstance(each, DTensor):
                mine.grad = None
            if mine in inside:
                _keep(state[each], inside[mine], mine, each)


def _is_alike(parameter: Tensor) -> bool:
    """Return True unless a DTensor's gradient is divided in another way than itself."""
    gradient = parameter.grad
    if gradient is None or not isinstance(parameter, DTensor):
        return True
    return isinstance(gradient, DTensor) and gradient.placements == parameter.placements


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _keep(state: dict[str, Any], values: dict[str, Any], rows: Tensor, shard: Tensor) -> None:
    """Write the values that a step has made or replaced into the state, as DTensors where they are rows."""
    for name, value in values.items():
        if _local(state.get(name)) is not value or name not in state:
            is_rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape == rows.shape
            state[name] = _like(value, shard) if is_rows and isinstance(shard, DTensor) else value


def _like(rows: Tensor, shard: DTensor) -> DTensor:
    """Return `rows` as a DTensor that is divided like `shard`."""
    if rows.dtype == shard.dtype:
        return DTensor(rows, shard._spec, requires_grad=False)
    shape, stride = shard.shape, shard.stride()
    return DTensor.from_local(
        rows, shard.device_mesh, shard.placements, run_check=False, shape=shape, stride=stride
    )
