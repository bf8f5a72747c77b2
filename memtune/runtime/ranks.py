"""What must be true of the ranks before a model is divided or replicated over them."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.parts import same_part
from memtune.runtime.tree import local


def require_ranks(context: Context, what: str) -> None:
    """Check that this process is one of several that hold the same weights, or the same part of them.

    Args:
        context: The model whose weights are compared.
        what: What needs the ranks, for the message: `sharding`.

    Raises:
        ApplyError: There is no process group, no other rank holds the same part, or the ranks' weights differ.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ApplyError(
            f"{what} needs several processes, but this one is alone.",
            fix="torchrun --nproc-per-node 2 your_script.py",
            code="MT320",
        )
    if context.parts > 1 and context.copies == 1:
        raise ApplyError(
            f"all {context.ranks} ranks share layers: {what} has no copies of a part to work on.",
            fix="sharding.parallel of a smaller degree, or sharding.states: {kind: none}", code="MT321",
        )  # fmt: skip
    if are_there(context.model):
        require_backend(context.device)
    _require_same_weights(context)


def require_groups(context: Context, size: int, what: str) -> None:
    """Check that the ranks make equal groups of `size`, two or more; `what` these are is for the message.

    Raises:
        ApplyError: They do not.
    """
    if size < 2 or context.ranks % size:
        raise ApplyError(
            f"{context.ranks} ranks cannot be put into equal {what} of {size}.",
            fix="a degree that divides the number of ranks", code="MT321",
        )  # fmt: skip


def are_there(model: nn.Module) -> bool:
    """Whether there are other ranks that what this one sends reaches: not alone, nor in a dry run."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return several and dist.get_backend() != "fake" and not any(isinstance(p, FakeTensor) for p in model.parameters())


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
            fix="move the model to its device before memtune.apply, or init_process_group('cpu:gloo,cuda:nccl')", code="MT378",
        )  # fmt: skip


def require_plain(model: nn.Module) -> None:
    """Check that nobody has divided or replicated the model yet.

    Raises:
        ApplyError: It, or a part of it, is in a wrapper of torch's.
    """
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            kind = "fully_shard" if isinstance(module, FSDPModule) else type(module).__name__
            raise ApplyError(
                f"{name or 'The model'} is wrapped by {kind} already.",
                fix="give memtune.apply the plain module: the config wraps it", code="MT376",
            )  # fmt: skip


def require_whole_parameters(context: Context, what: str, *, ahead: bool = False) -> None:
    """Check, when states have been divided, that all parameters are there while the model runs.

    Args:
        context: Model and what was applied to it.
        what: Needs them, for the message: `recompute: {kind: dtr}`.
        ahead: `what` hides the model's graph until backward, so that nobody can look through it for unused parameters.

    Raises:
        ApplyError: Parameters or gradients come and go block by block, ranks have parts of the model, or the graph would be
            looked through.
    """
    require_whole_layers(context, what)
    if any(isinstance(module, FSDPModule) for module in context.model.modules()):
        raise ApplyError(
            f"{what} does not work where parameters are divided over ranks.",
            evidence="It runs ops of all blocks, and FSDP2 gathers a block's parameters for its own calls alone.",
            fix="recompute: {kind: planned}, or sharding: {states: {kind: zero1}}", code="MT315",
        )  # fmt: skip
    if context.follows_calls:
        raise ApplyError(
            f"{what} does not work beside what this config has under offload.states.",
            evidence="It runs ops of all blocks, and parameters or gradients of a block are moved with its own calls alone.",
            fix="memtune search  or  memtune trial --config  makes a plan for each block", code="MT315",
        )  # fmt: skip
    if any(region.move for region in context.activations.regions):
        raise ApplyError(
            f"{what} does not work beside what this config has under offload.activations.",
            evidence="It runs ops of all blocks, and what a block keeps is moved with its own calls alone.",
            fix="memtune search  or  memtune trial --config  makes a plan for each block", code="MT315",
        )  # fmt: skip
    runner = context.runner
    if ahead and isinstance(runner, DistributedDataParallel) and runner.find_unused_parameters:
        raise ApplyError(
            f"{what} does not work beside find_unused_parameters: true.",
            evidence="DDP looks for them in the graph, which is there in backward alone.",
            fix="online: false, or find_unused_parameters: false", code="MT315",
        )  # fmt: skip


def require_whole_layers(context: Context, what: str) -> None:
    """Refuse what runs modules' ops itself, by a schedule made for whole layers, where ranks have parts of them.

    Raises:
        ApplyError: Ranks have parts of the model.
    """
    if context.parts > 1 or context.pipeline is not None:
        raise ApplyError(
            f"{what} does not work where ranks have parts of the model.",
            evidence="Its schedules are for whole layers.", fix="recompute: {kind: planned}", code="MT315",
        )  # fmt: skip


def require_same_config(said: str, device: torch.device) -> None:
    """Compare what every rank is about to do, before anything else is sent.

    Args:
        said: Whatever must be equal, a line each: settings, plans' hashes, the model's fingerprint.
        device: Where the model is.

    Raises:
        ApplyError: The ranks differ; the same on all of them.
    """
    everyone = said_by_all(said, device)
    ranks = len(everyone)
    differing = [rank for rank, each in enumerate(everyone) if each != everyone[0]]
    if differing:
        lines = zip_longest(everyone[0].splitlines(), everyone[differing[0]].splitlines(), fillvalue="nothing")
        zero, other = next(((a, b) for a, b in lines if a != b), ("", ""))
        raise ApplyError(
            f"{len(differing)} of {ranks} ranks have another config or model than rank 0.",
            evidence=f"Rank 0: {zero}; rank {differing[0]}: {other}.",
            fix="give all ranks one config file and one model", code="MT379",
        )  # fmt: skip


def said_by_all(said: Any, device: torch.device) -> list[Any]:
    """What every rank says, plain data, by rank; all of them call it, with the device of their models."""
    everyone: list[Any] = [None] * dist.get_world_size()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        dist.all_gather_object(everyone, said)
    return everyone


def _require_same_weights(context: Context) -> None:
    """Sums of the weights' bits are equal where ranks hold the same ones; nothing is overwritten, so failures can be undone."""
    parts = ((name, local(p.detach())) for name, p in context.model.named_parameters())
    named = [(name, part) for name, part in parts if not part.is_meta and not isinstance(part, FakeTensor)]
    if not named:
        return
    with torch.no_grad():
        sums = torch.stack([part.view(_INTEGER[part.element_size()]).sum(dtype=torch.int64) for _, part in named])
    low, high = sums.to(context.device), sums.to(context.device, copy=True)
    group = same_part(context)
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    differing = [name for (name, _), same in zip(named, (low == high).tolist(), strict=True) if not same]
    if differing:
        raise ApplyError(
            f"{len(differing)} parameters differ between the {context.copies} ranks; they must start from one model.",
            evidence=f"First: {differing[0]}.",
            fix="torch.manual_seed(0) on every rank before the model is built, or load one checkpoint on all",
            code="MT323",
        )


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
