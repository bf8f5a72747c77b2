"""Placement of each parameter: the ranks, shards and host or SSD copies that hold, update and average it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from memtune.effects import NO_EFFECTS, Effects


class RemoteParameters(Protocol):
    """Parameters of the plain model that only other ranks hold, by their names in its state dict."""

    @property
    def absent(self) -> Mapping[str, torch.Size]:
        """Full shapes of the parameters that are not on this rank."""

    def owns(self, name: str) -> bool:
        """Return True if this rank sends the value of `name` to the others."""

    def full_value(self, name: str, here: Any) -> Any:
        """Return the value of `name` from the rank that holds it; collective, in one order on all ranks."""

    def optimizer_state(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the optimizer state of `name` from the rank that holds it; collective."""


@dataclass
class Placement:
    """Location of the model state; written while techniques are applied, in the order of `apply`."""

    model_parallel_size: int = 1
    """Number of consecutive ranks that hold one copy of the model together, each a part of it; 1 if each has
    a full copy.

    Written by `sharding.parallel`; read by mechanisms that shard states, average gradients or form groups of
    ranks.
    """
    states_average_grads: bool = False
    """True if `sharding.states` (DDP, ZeRO, FSDP2) averages gradients over the ranks that hold the same part.

    Written by `sharding.states`; read by `sharding.parallel` at `events.states_sharded`, which otherwise
    averages them itself.
    """

    offload: Effects = NO_EFFECTS
    """Effects of the technique under `offload.states`: the gradients it averages, the calls it acts on.

    Written by `apply` before `sharding.parallel` is applied; read by mechanisms that replicate or shard
    states and by schedules.
    """
    remote_parameters: RemoteParameters | None = None
    """Parameters that only other ranks hold; None if this rank has all, or a shard of each.

    Written by pipelines and multiplexed stages; read by state dicts, checkpoints and mechanisms that shard or
    average over data-parallel ranks.
    """
    optimizer_params: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    """Parameter → the one that the optimizer holds instead: this rank's shard of it, or its master on host or
    SSD.

    A chain if both apply: the model's parameter → its shard → the shard's master; see `optimizer_param`.
    Written by ZeRO's shards first, then by `offload.states`; read by mechanisms that look up gradients, state
    or masters of a model's parameter. FSDP2's shards are the model's own parameters and are no keys.
    """
    at_rest: set[nn.Parameter] = field(default_factory=set)
    """Parameters that show memory of the host or SSD until the technique of `offload.states` takes them over.

    Written when a model is materialized or moved; see `offload.core.at_rest`.
    """
    all_gather_weights: Callable[[], None] | None = None
    """All-gather the shards that other ranks have updated into the full weights; collective. None if no
    weight is kept both full and sharded.

    Written by ZeRO's shards; called by resuming, after which `events.weights_gathered` is emitted.
    """

    @property
    def absent(self) -> Mapping[str, torch.Size]:
        """Full shapes of the parameters that only other ranks hold, by name in the plain state dict."""
        return {} if self.remote_parameters is None else self.remote_parameters.absent

    @property
    def world_size(self) -> int:
        """Number of processes that train together."""
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks with the same part of the model: states are sharded or replicated over them."""
        return self.world_size // self.model_parallel_size

    @property
    def rank(self) -> int:
        """This process among `world_size`."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def param_chain(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        """Return the model's `parameter` and its chain of replacements; the optimizer holds the last."""
        chain = [parameter]
        while (held := self.optimizer_params.get(chain[-1])) is not None:
            chain.append(held)
        return chain

    def optimizer_param(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the parameter that the optimizer updates for the model's: the end of its chain."""
        return self.param_chain(parameter)[-1]
