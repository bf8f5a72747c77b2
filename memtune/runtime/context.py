"""What techniques see of the live training: model, optimizer, ranks, the activation table, and a way back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from memtune.runtime.activations import ActivationTable
from memtune.runtime.compiled import CompiledModel
from memtune.runtime.loop import LossFunction, Order
from memtune.runtime.turns import Turns

if TYPE_CHECKING:
    from memtune.runtime.elsewhere import Elsewhere

Check = Callable[[], dict[str, Any]]
Landed = Callable[[Tensor], None]


@dataclass
class Context:
    """The live model and optimizer while techniques are applied, in the order of `_apply`.

    Attributes:
        model: The user's module; sharding and recompute change it in place.
        optimizer: The user's optimizer object, rebound in place when its parameters are replaced.
        blocks: Qualified names of the repeated blocks.
        device: Where the model computes.
        activations: The table of claims on the blocks' activations.
        parts: Consecutive ranks that hold one copy of the model together, each a part of it; 1 where every rank has all.
        averaged: Whether what divides or replicates states averages gradients between the copies.
        averages_blocks: Whether what moves the blocks' parameters averages their gradients as they land; DDP leaves them out.
        averages_experts: The same of what moves experts, before it updates them.
        averages_landed: Whether replicas average each gradient as it lands, since what comes next takes it away.
        follows_calls: Whether what moves states acts when blocks are called and as their gradients land.
        by_schedules: Whether each block runs by a schedule of its own.
        later: Run when states have been divided, by techniques whose work depends on how.
        checks: Run after `apply` and by every audit; each returns facts or raises ApplyError.
        sync: From "last micro-batch?" to the context in which it runs; set by techniques that reduce gradients.
        order: Runs micro-batches in another order than one after the other; only `Tuned.step` has them all.
        turns: Hands micro-batches round among ranks that work on one at a time; set by techniques that cut layers.
        pipeline: Runs forward and backward of a step's micro-batches in place of the loop; set where ranks have other blocks.
        elsewhere: What of the model only other ranks hold.
        lands: Has what it is given called with each parameter of the model whose gradient is there and will not change in this
            micro-batch any more, reduced where ranks share it; None where autograd says so itself, or on several ranks nobody.
        runner: The module to call in place of `model` (DDP's wrapper).
        represented: Parameter of the model → what the optimizer holds in its place: a host copy, or this rank's rows of it.
        gather_rows: Brings in the rows of weights that other ranks hold for the optimizer; all ranks call it.
        gathered: Called when it has.
        compiled: What runs through torch.compile, if anything does.
        before_use: Called with each parameter whose gradient is about to be used, and let go, inside backward, and with that.
        cleared: Called with parameters of the model and what is held in their place whose gradients `zero_grad` has let go of.
        reloaded: Called when weights and optimizer state have been loaded, by whoever keeps copies of them.
        is_loading: The optimizer is given its state, and `reloaded` follows.
        resumed_steps: Optimizer steps that an earlier run did, from whose end this one goes on.
        finish: Takes away what is kept for resuming, or waits for updates under way.
        undo: Closed when `apply` fails: takes back what is done to tensors, which `Snapshot` does not look into.
    """

    model: nn.Module
    optimizer: Optimizer
    blocks: list[str]
    device: torch.device
    activations: ActivationTable
    parts: int = 1
    averaged: bool = False
    averages_blocks: bool = False
    averages_experts: bool = False
    averages_landed: bool = False
    follows_calls: bool = False
    by_schedules: bool = False
    later: list[Callable[[], None]] = field(default_factory=list)
    checks: dict[str, Check] = field(default_factory=dict)
    sync: Callable[[bool], AbstractContextManager[Any]] | None = None
    order: Order | None = None
    turns: Turns | None = None
    pipeline: Callable[[nn.Module, LossFunction, Iterable[Any]], Tensor] | None = None
    elsewhere: Elsewhere | None = None
    lands: Callable[[Landed], None] | None = None
    runner: nn.Module | None = None
    represented: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    gather_rows: Callable[[], None] | None = None
    gathered: list[Callable[[], None]] = field(default_factory=list)
    before_use: list[Callable[[nn.Parameter, Tensor], None]] = field(default_factory=list)
    cleared: list[Callable[[Iterable[nn.Parameter]], None]] = field(default_factory=list)
    reloaded: list[Callable[[], None]] = field(default_factory=list)
    is_loading: bool = False
    resumed_steps: int = 0
    finish: Callable[[], None] | None = None
    undo: ExitStack = field(default_factory=ExitStack)
    compiled: CompiledModel | None = None

    @property
    def ranks(self) -> int:
        """Number of processes that train together."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same part of the model: states are divided among these."""
        return self.ranks // self.parts

    @property
    def rank(self) -> int:
        """This process among them."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Snapshot:
    """Everything `apply` may change in a model and an optimizer, so that a failure leaves them as they were.

    Holds references, not copies, of tensors: techniques replace tensors, they do not overwrite the user's.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._modules = [(module, type(module), _held(vars(module))) for module in model.modules()]
        self._optimizer, self._attributes = optimizer, _held(vars(optimizer))
        self._groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        self._state = [(state, dict(state)) for state in optimizer.state.values()]
        self._grads = [(parameter, parameter.grad) for parameter in model.parameters()]

    def restore(self) -> None:
        """Put everything back."""
        for module, kind, attributes in self._modules:
            module.__class__ = kind
            _put_back(vars(module), attributes)
        _put_back(vars(self._optimizer), self._attributes)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(saved)
        for state, content in self._state:
            state.clear()
            state.update(content)
        for parameter, gradient in self._grads:
            parameter.grad = gradient


def _held(attributes: dict[str, Any]) -> dict[str, tuple[Any, dict[Any, Any] | None]]:
    """Each attribute with, for the dictionaries of hooks, parameters and children, what it holds."""
    return {name: (value, dict(value) if isinstance(value, dict) else None) for name, value in attributes.items()}


def _put_back(attributes: dict[str, Any], held: dict[str, tuple[Any, dict[Any, Any] | None]]) -> None:
    """Dictionaries stay the objects that they were: the handles of a user's hooks know them."""
    attributes.clear()
    for name, (value, content) in held.items():
        if content is not None:
            value.clear()
            value.update(content)
        attributes[name] = value
