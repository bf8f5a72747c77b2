"""Preconditions of a model that is sharded or replicated over ranks: process group, weights, config."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune import refusals
from memtune.device import accelerator, backends_of
from memtune.errors import ApplyError
from memtune.parallel.ranks.replica_groups import same_part_group
from memtune.runtime import Context, local


def require_ranks(context: Context, what: str) -> None:
    """Check that this process is one of several that hold the same weights, or the same part of them.

    Args:
        context: The model whose weights are compared.
        what: The mechanism that needs the ranks, for the message: `sharding`.

    Raises:
        ApplyError: There is no process group, no other rank holds the same part, or the ranks' weights
            differ.
    """
    placement = context.placement
    if not (dist.is_available() and dist.is_initialized()):
        raise ApplyError(
            f"{what} needs several processes, but this one is alone.",
            fix="torchrun --nproc-per-node 2 your_script.py",
            code="MT320",
        )
    if placement.model_parallel_size > 1 and placement.data_parallel_size == 1:
        raise refusals.error_of(refusals.no_copies(placement.world_size, what))
    # In a dry run the group is fake, and sends nothing.
    if has_real_peers(context.model):
        require_backend(context.device)
        _require_reducible(context)
    _require_same_weights(context)


def _require_reducible(context: Context) -> None:
    """Refuse layers whose statistics or gradients torch cannot reduce over these ranks."""
    for name, module in context.model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and context.device.type == "cpu":
            raise ApplyError(
                f"{name} is a SyncBatchNorm, which torch runs on accelerators only.",
                evidence="The ranks train on CPU.",
                fix="BatchNorm, GroupNorm or LayerNorm; or ranks on GPUs",
                code="MT329",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ApplyError(
                f"The gradient of {name}.weight is sparse; memtune reduces dense gradients over ranks.",
                evidence=f"It is an nn.{type(module).__name__} with sparse=True.",
                fix=f"nn.{type(module).__name__}(…, sparse=False) and a dense optimizer",
                code="MT329",
            )


def require_groups(context: Context, degree: int) -> None:
    """Require that the ranks make equal groups of `degree`, two or more.

    Raises:
        ApplyError: They do not.
    """
    if (uneven := refusals.uneven_groups("degree", degree, context.placement.world_size)) is not None:
        raise refusals.error_of(uneven)


def has_real_peers(model: nn.Module) -> bool:
    """Return True if collectives reach other ranks: not with one process, nor in a dry run."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return (
        several
        and dist.get_backend() != "fake"
        and not any(isinstance(p, FakeTensor) for p in model.parameters())
    )


def require_backend(device: torch.device) -> None:
    """Check that the process group can send what is on `device`.

    Raises:
        ApplyError: It was made for other devices.
    """
    config = dist.get_backend_config()
    if device.type not in dist.distributed_c10d.BackendConfig(dist.Backend(config)).get_device_backend_map():
        raise ApplyError(
            f"The ranks' process group cannot send what is on {device.type}, where the model is.",
            evidence=f"It was made for {config}.",
            fix=(
                "move the model to its device before memtune.apply, or"
                f" init_process_group('{backends_of(device.type)}')"
            ),
            code="MT378",
        )


def require_plain(model: nn.Module) -> None:
    """Check that no wrapper has sharded or replicated the model yet.

    Raises:
        ApplyError: The model, or a part of it, is in a wrapper of torch's.
    """
    # Each one: a user may have wrapped a part, such as a frozen backbone.
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            kind = "fully_shard" if isinstance(module, FSDPModule) else type(module).__name__
            raise ApplyError(
                f"{name or 'The model'} is wrapped by {kind} already.",
                fix="give memtune.apply the plain module: the config wraps it",
                code="MT376",
            )


def require_whole_parameters(context: Context, what: str, *, hides_graph: bool = False) -> None:
    """Check, when states have been sharded, that all parameters are unsharded and on the device while the
    model runs.

    Args:
        context: Model and the techniques applied to it.
        what: The mechanism that needs them, for the message: `recompute: {kind: dtr}`.
        hides_graph: `what` hides the model's graph until backward, so that DDP cannot search it for unused
            parameters.

    Raises:
        ApplyError: Parameters or gradients are unsharded or loaded block by block, ranks have parts of the
            model, or DDP would search the graph.
    """
    require_whole_layers(context, what)
    # Asked of the model, not of the config: the user's own `fully_shard` counts as well.
    if any(isinstance(module, FSDPModule) for module in context.model.modules()):
        raise ApplyError(
            f"{what} does not work with parameters sharded over ranks.",
            evidence=(
                "It runs ops of all blocks at once, and FSDP2 unshards a block's parameters only for the"
                " block's own calls."
            ),
            fix="recompute: {kind: planned, by_schedule: false}, or sharding: {states: {kind: zero1}}",
            code="MT315",
        )
    if context.placement.offload.follows_calls:
        raise _moved_by_blocks(what, "offload.states", "parameters or gradients move")
    if any(region.move for region in context.activations.regions):
        raise _moved_by_blocks(what, "offload.activations", "saved tensors are offloaded")
    runner = context.loop.runner
    if hides_graph and isinstance(runner, DistributedDataParallel) and runner.find_unused_parameters:
        raise refusals.error_of(refusals.hidden_graph(what))


def _moved_by_blocks(what: str, slot: str, moved: str) -> ApplyError:
    return ApplyError(
        f"{what} does not work with this config's technique under {slot}.",
        evidence=f"It runs ops of all blocks at once, and a block's {moved} at its own calls only.",
        fix="memtune search  or  memtune trial --config  plans each block separately",
        code="MT315",
    )


def require_whole_layers(context: Context, what: str) -> None:
    """Refuse mechanisms that run modules' ops by a schedule for whole layers, if ranks have parts of layers.

    Raises:
        ApplyError: Ranks have parts of the model.
    """
    if context.placement.model_parallel_size > 1 or context.loop.pipeline is not None:
        raise ApplyError(
            f"{what} does not work where ranks have parts of the model.",
            evidence="Its schedules are for whole layers.",
            fix="recompute: {kind: planned, by_schedule: false}",
            code="MT315",
        )


def require_same_config(description: str, device: torch.device) -> None:
    """Compare config and model of all ranks, before any other collective.

    Args:
        description: Lines that must be equal on all ranks: settings, hashes of plans, the model's
            fingerprint.
        device: Device of the model.

    Raises:
        ApplyError: The ranks differ; raised on all of them.
    """
    # Ranks with different configs would call different collectives later, and wait for each other forever.
    everyone = gather_descriptions(description, device)
    ranks = len(everyone)
    differing = [rank for rank, each in enumerate(everyone) if each != everyone[0]]
    if differing:
        lines = zip_longest(
            everyone[0].splitlines(), everyone[differing[0]].splitlines(), fillvalue="nothing"
        )
        zero, other = next(((a, b) for a, b in lines if a != b), ("", ""))
        raise ApplyError(
            f"{len(differing)} of {ranks} ranks have another config or model than rank 0.",
            evidence=f"Rank 0: {zero}; rank {differing[0]}: {other}.",
            fix="give all ranks one config file and one model",
            code="MT379",
        )


def gather_descriptions(description: Any, device: torch.device) -> list[Any]:
    """Return every rank's description (plain data), by rank; collective, on the rank's model's device."""
    everyone: list[Any] = [None] * dist.get_world_size()
    # NCCL sends objects from the current device, which need not be the model's.
    with accelerator.selected(device):
        dist.all_gather_object(everyone, description)
    return everyone


def _require_same_weights(context: Context) -> None:
    """Compare sums of the weights' bits between ranks that hold the same."""
    # Nothing is overwritten, so failures can be undone.
    # Weights of deferred construction, and of a recording, have no bits to compare.
    parts = ((name, local(p.detach())) for name, p in context.model.named_parameters())
    named = [(name, part) for name, part in parts if not part.is_meta and not isinstance(part, FakeTensor)]
    if not named:
        return
    with torch.no_grad():
        sums = torch.stack(
            # Integers of the bits: exact in any order, and NaNs compare equal.
            [_bits_of(part).sum(dtype=torch.int64).to(context.device) for _, part in named]
        )
    low, high = sums, sums.clone()
    group = same_part_group(context)
    # Equal everywhere if and only if minimum and maximum are: two reductions, no gather.
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    differing = [name for (name, _), same in zip(named, (low == high).tolist(), strict=True) if not same]
    if differing:
        raise ApplyError(
            f"{len(differing)} parameters differ between the {group.size()} ranks; they must start from one"
            " model.",
            evidence=f"First: {differing[0]}.",
            fix="torch.manual_seed(0) on every rank before the model is built, or load one checkpoint on all",
            code="MT323",
        )


def _bits_of(part: torch.Tensor) -> torch.Tensor:
    return part.view(_INTEGER[part.element_size()])


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
