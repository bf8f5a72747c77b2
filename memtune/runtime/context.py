"""The live training during `apply`, and its restoration if `apply` fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from memtune.program import OFFLOAD, OpAddress, SavedTensorPolicy
from memtune.runtime.events import Events
from memtune.runtime.placement import Placement
from memtune.runtime.training_loop import TrainingLoop

Check = Callable[[], dict[str, Any]]
T = TypeVar("T")


class ClaimedBlock(Protocol):
    """A block, and the claims of techniques on its saved activations."""

    name: str
    module: nn.Module
    index: int
    move: float
    """Fraction of the claimable bytes that is packed."""

    @property
    def recompute(self) -> bool:
        """True if its forward runs again in backward."""


class Traffic(Protocol):
    """Counts of recomputation and offload since the claims were installed."""

    forwards: set[str]
    """Names of the claimed blocks that ran."""
    recomputed_regions: set[str]
    moved_bytes: int


class Activations(Protocol):
    """Claims on the blocks' activations: one table, installed after all slots have claimed."""

    ssd_spill: Any
    """Host copies spilled to SSD (`activations.offload.ssd_spill`)."""
    prefetcher: Any
    """Host copies prefetched to the device (`activations.offload.prefetch`)."""
    slots: Any
    """Host copies under a pipeline's schedule (`activations.offload.pipeline_slots.Slots`), or None."""
    out_at_once: int
    """Maximal number of copies to the host in flight."""
    stages: list[int]
    """The pipeline stage of each block; empty without a pipeline."""

    @property
    def regions(self) -> Sequence[ClaimedBlock]:
        """The blocks, in forward order."""

    @property
    def traffic(self) -> Traffic:
        """Counts of recomputation and offload so far, for the audit."""

    def claim_recompute(self, index: int, keep: Any = None) -> None:
        """Recompute block `index` in backward, except the outputs that `keep` selects."""

    def claim_move(
        self,
        index: int,
        fraction: float,
        min_bytes: int,
        only: frozenset[OpAddress] | None = None,
        policy: SavedTensorPolicy = OFFLOAD,
    ) -> None:
        """Pack `fraction` of the claimable bytes of block `index` as `policy` says."""

    def install(self) -> None:
        """Install the claims in the blocks' forwards."""

    def remove(self) -> None:
        """Restore the blocks' own forwards."""


@dataclass
class Context:
    """The live model and optimizer while techniques are applied, in the order of `apply`."""

    model: nn.Module
    """The user's module; sharding and recompute change it in place."""
    optimizer: Optimizer
    """The user's optimizer object, rebound in place when its parameters are replaced."""
    blocks: list[str]
    """Qualified names of the repeated blocks, on a stage those of this rank once the stages are known."""
    device: torch.device
    """Device on which the model computes."""
    activations: Activations
    """The table of claims on the blocks' activations; a pipeline replaces it by one of its own blocks."""
    events: Events = field(default_factory=Events)
    """Notifications from one mechanism to others."""
    placement: Placement = field(default_factory=Placement)
    """Ranks and tiers that hold, update and average each parameter."""
    loop: TrainingLoop = field(default_factory=TrainingLoop)
    """Settings by which `Tuned.step` runs micro-batches."""
    checks: dict[str, Check] = field(default_factory=dict)
    """By slot, written by its technique: returns facts or raises ApplyError. Run by every audit."""
    undo: ExitStack = field(default_factory=ExitStack)
    """Closed when `apply` fails: undoes changes to tensors, which `Snapshot` does not record."""
    all_blocks: tuple[str, ...] = ()
    """Qualified names of the blocks of the whole model, for which techniques plan."""

    def __post_init__(self) -> None:
        self.all_blocks = self.all_blocks or tuple(self.blocks)

    def of_own_blocks(self, planned: Sequence[T]) -> list[T]:
        """Return those of `planned`, one for each block of the model, that are for this rank's `blocks`."""
        of_block = dict(zip(self.all_blocks, planned, strict=True))
        return [of_block[name] for name in self.blocks]

    def off_device(self) -> set[str]:
        """Return the names of the parameters that `offload.states` keeps off the device between uses."""
        if self.placement.offload.parameters_on == "device":
            return set()
        blocks = [self.model.get_submodule(name) for name in self.blocks]
        # By identity: a tied weight has names inside and outside of the blocks, and one memory.
        inside = {id(each) for block in blocks for each in block.parameters()}
        return {name for name, each in self.model.named_parameters() if id(each) in inside}


class Snapshot:
    """References to all state of model and optimizer that `apply` may change, to restore it after a failure.

    Holds references, not copies, of tensors: techniques replace tensors, they do not overwrite the user's.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        # The class too: sharding and rotation change a module's class in place, as FSDP2 does.
        self._modules = [(module, type(module), _held(vars(module))) for module in model.modules()]
        self._optimizer, self._attributes = optimizer, _held(vars(optimizer))
        # A group is refilled, not replaced: schedulers hold the dictionaries.
        self._groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        self._state = [(state, dict(state)) for state in optimizer.state.values()]
        # A model may come with gradients, of an accumulation that the user has begun.
        self._grads = [(parameter, parameter.grad) for parameter in model.parameters()]

    def restore(self) -> None:
        """Restore the recorded state."""
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
    """Return each attribute, with copies of the dictionaries of hooks, parameters and children."""
    return {
        name: (value, dict(value) if isinstance(value, dict) else None) for name, value in attributes.items()
    }


def _put_back(attributes: dict[str, Any], held: dict[str, tuple[Any, dict[Any, Any] | None]]) -> None:
    """Restore attributes."""
    # Dictionaries are refilled, not replaced, because handles of the user's hooks reference them.
    # First: attributes that `apply` has added must go as well.
    attributes.clear()
    for name, (value, content) in held.items():
        if content is not None:
            value.clear()
            value.update(content)
        attributes[name] = value
