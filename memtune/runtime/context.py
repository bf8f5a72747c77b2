"""What techniques see of the live training: model, optimizer, ranks, the activation table, and a way back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from memtune.runtime.activations import ActivationTable
from memtune.runtime.compiled import CompiledModel
from memtune.runtime.turns import Turns

Check = Callable[[], dict[str, Any]]


@dataclass
class Context:
    """The live model and optimizer while techniques are applied, in the order of `_apply`.

    Attributes:
        model: The user's module; sharding and recompute change it in place.
        optimizer: The user's optimizer object, rebound in place when its parameters are replaced.
        blocks: Qualified names of the repeated blocks.
        device: Where the model computes.
        activations: The table of claims on the blocks' activations.
        checks: Run after `apply` and by every audit; each returns facts or raises ApplyError.
        sync: From "last micro-batch?" to the context in which it runs; set by techniques that reduce gradients.
        turns: Hands micro-batches round among ranks that work on one at a time; set by techniques that cut layers.
        runner: The module to call in place of `model` (DDP's wrapper).
        represented: Parameter of the model → what the optimizer holds in its place: a host copy, or this rank's rows of it.
        compiled: What runs through torch.compile, if anything does.
        before_use: Called with each parameter whose gradient is about to be used and let go inside backward.
        reloaded: Called when weights and optimizer state have been loaded, by whoever keeps copies of them.
        resumed_steps: Optimizer steps that an earlier run did, from whose end this one goes on.
        finish: Takes away what is kept for resuming.
        undo: Closed when `apply` fails: takes back what is done to tensors, which `Snapshot` does not look into.
    """

    model: nn.Module
    optimizer: Optimizer
    blocks: list[str]
    device: torch.device
    activations: ActivationTable
    checks: dict[str, Check] = field(default_factory=dict)
    sync: Callable[[bool], AbstractContextManager[Any]] | None = None
    turns: Turns | None = None
    runner: nn.Module | None = None
    represented: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    before_use: list[Callable[[nn.Parameter], None]] = field(default_factory=list)
    reloaded: list[Callable[[], None]] = field(default_factory=list)
    resumed_steps: int = 0
    finish: Callable[[], None] | None = None
    undo: ExitStack = field(default_factory=ExitStack)
    compiled: CompiledModel | None = None

    @property
    def ranks(self) -> int:
        """Number of processes that train together."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """This process among them."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Snapshot:
    """Everything `apply` may change in a model and an optimizer, so that a failure leaves them as they were.

    Holds references, not copies, of tensors: techniques replace tensors, they do not overwrite the user's.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._modules = [(module, type(module), _copied(vars(module))) for module in model.modules()]
        self._optimizer = optimizer
        self._vars = _copied(vars(optimizer))
        self._groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        self._state = {parameter: dict(state) for parameter, state in optimizer.state.items()}
        self._grads = [(parameter, parameter.grad) for parameter in model.parameters()]

    def restore(self) -> None:
        """Put everything back."""
        for module, kind, attributes in self._modules:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
        vars(self._optimizer).update(self._vars)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(saved)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for parameter, gradient in self._grads:
            parameter.grad = gradient


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """A copy one level deeper for the dictionaries of hooks, parameters and children."""
    return {name: value.copy() if isinstance(value, dict) else value for name, value in attributes.items()}
