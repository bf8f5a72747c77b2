"""Parameters, gradients and optimizer state divided over ranks, by FSDP2, with the user's optimizer rebound to the shards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from memtune.errors import ApplyError
from memtune.runtime.collectives import SeamAllGather, SeamAllReduce, SeamReduceScatter
from memtune.runtime.context import Context
from memtune.runtime.copies import OncePerStep
from memtune.runtime.ranks import require_ranks


@cache
def _meshes(device_type: str, replicas: int, degree: int, group: int) -> tuple[DeviceMesh | None, DeviceMesh]:
    if replicas == 1:
        return None, init_device_mesh(device_type, (degree,), mesh_dim_names=("shard",))
    whole = init_device_mesh(device_type, (replicas, degree), mesh_dim_names=("copies", "shard"))
    return whole["copies"], whole["shard"]


def meshes(device_type: str, degree: int) -> tuple[DeviceMesh | None, DeviceMesh]:
    """The ranks that hold the same shard as this one, None for one copy, and the `degree` ranks that share its copy.

    Made once per process group, in a dry run too of real tensors.
    """
    default = dist.distributed_c10d._get_default_group()
    with _disable_current_modes():
        return _meshes(device_type, dist.get_world_size() // degree, degree, id(default))


def forget_meshes() -> None:
    """Call when the process group is gone: the next one may have its address."""
    _meshes.cache_clear()


def shard(
    context: Context,
    *,
    degree: int,
    reshard_after_forward: bool,
    blocks_per_unit: int,
    two_hop: bool = False,
    kind: str = "fsdp",
    sharers: DeviceMesh | None = None,
) -> None:
    """Shard the model of `context` over `degree` ranks (replicated over the others) and rebind its optimizer.

    Args:
        context: Model and optimizer, changed in place.
        degree: Ranks that share one copy of the model state; divides the number of ranks.
        reshard_after_forward: Free a unit's parameters between forward and backward.
        blocks_per_unit: Blocks gathered together; what is in no block is the root unit, gathered once per step.
        two_hop: Average gradients between the copies in the last micro-batch alone, not in each.
        kind: Of the technique, for messages.
        sharers: The `degree` ranks that share parameters where other states are divided further: the caller averages between
            copies and rebinds the optimizer.

    Raises:
        ApplyError: There is no process group, its size is no multiple of `degree`, or the ranks' weights differ.
    """
    require_ranks(context, kind)
    if context.ranks % degree:
        raise ApplyError(
            f"{context.ranks} ranks cannot be put into equal groups of {degree}, as {kind} is asked to.",
            fix=f"groups of {_divisor(context.ranks, degree)}",
            code="MT321",
        )
    before = dict(context.model.named_parameters())
    copies, mesh = meshes(context.device.type, degree) if sharers is None else (None, sharers)
    arguments: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard_after_forward}
    units = [context.blocks[i : i + blocks_per_unit] for i in range(0, len(context.blocks), blocks_per_unit)]
    for names in units:
        modules = [context.model.get_submodule(name) for name in names]
        fully_shard(modules if len(modules) > 1 else modules[0], **arguments)
    # The root's parameters are needed again at the start of backward: freeing them in between only costs a gather.
    fully_shard(context.model, **{**arguments, "reshard_after_forward": False})
    for module in context.model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(SeamAllGather())
            module.set_custom_reduce_scatter(SeamReduceScatter())
    if copies is not None:
        _average_copies(context, copies, two_hop)
    if sharers is None:
        rebind(context.optimizer, before, dict(context.model.named_parameters()))
    context.checks["sharding.states"] = lambda: _check(context, degree)


def _average_copies(context: Context, copies: DeviceMesh, two_hop: bool) -> None:
    """By hooks: FSDP2's own all-reduce of two-dimensional meshes does not go through the seam."""
    once = OncePerStep(copies.get_group())
    for module, unit in units_of(context.model):
        module.set_all_reduce_hook(once.hook(unit) if two_hop else SeamAllReduce(copies.get_group()))
    if two_hop:
        context.sync = once.sync


def units_of(model: nn.Module) -> Iterator[tuple[FSDPModule, tuple[nn.Parameter, ...]]]:
    """FSDP2's modules, each with the sharded parameters that are gathered and reduced with it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            yield module, tuple(each.sharded_param for each in group.fsdp_params) if group is not None else ()


def rebind(optimizer: Optimizer, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
    """Make the same optimizer object update `after` in place of `before`, with its state sharded alike."""
    new_of = {old: after[name] for name, old in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [new_of.get(parameter, parameter) for parameter in group["params"]]
    for old, new in new_of.items():
        state = optimizer.state.pop(old, None)
        if state is not None:
            optimizer.state[new] = {name: _sharded_like(value, old, new) for name, value in state.items()}


def _sharded_like(value: Any, old: nn.Parameter, new: nn.Parameter) -> Any:
    if isinstance(value, Tensor) and value.shape == old.shape and isinstance(new, DTensor) and value.dim() > 0:
        return distribute_tensor(value, new.device_mesh, new.placements)
    return value


def _check(context: Context, degree: int) -> dict[str, Any]:
    parameters = dict(context.model.named_parameters())
    plain = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
    if plain:
        raise ApplyError(f"{len(plain)} parameters are not sharded.", evidence=f"First: {plain[0]}.", code="MT322")
    units = [name for name, module in context.model.named_modules() if isinstance(module, FSDPModule)]
    shards = sum(p.to_local().nbytes for p in parameters.values())  # type: ignore[attr-defined]
    return {"degree": degree, "units": len(units), "shard_bytes": shards}


def _divisor(ranks: int, wanted: int) -> int:
    return min((d for d in range(1, ranks + 1) if ranks % d == 0), key=lambda d: abs(d - wanted))
