"""FSDP2: parameters, gradients and optimizer state sharded over ranks, with the user's optimizer rebound to
the shards, and its collectives through the seam, where a recorder sees them and every byte is counted.

Patches of FSDP2 serve models in which the used parameters depend on the samples, such as experts:
FSDP2 reduces the gradients that a rank has of a unit in one message: if ranks have gradients of different
parameters, it adds the gradient of one parameter to that of another, silently if shapes match. Two rules:

1. For experts, ranks exchange before each unit's reduction which gradients they have, and send zeros for
  those that only others have. A parameter without a gradient on any rank keeps none, as on one rank. Routing
  synchronizes with the device anyway: one more sync costs little.
2. For all other parameters ranks must have the same gradients. This is checked in the 1st, 2nd, 4th, 8th …
  backward, since it synchronizes with the device.

One file: sharding, the optimizer's step on local shards and the patches all read FSDP2's private states of
units, which a new version of torch may change.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import DTensor, distribute_tensor
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
from torch.utils._python_dispatch import _disable_current_modes

from memtune import refusals
from memtune.device import streams
from memtune.errors import ApplyError
from memtune.parallel.ranks import (
    PARTS,
    ShardMeshes,
    allow_nested_collectives,
    inconsistent_indices,
    missing_indices,
    require_ranks,
    rows_like,
    same_part_group,
    set_full_specs,
    shard_like,
    shard_meshes,
    unwrap_dtensors,
)
from memtune.runtime import (
    HOST,
    BackwardEnd,
    Context,
    UncopiedHook,
    all_gather_single,
    call_when_grad_ready,
    is_own_step,
    local,
    reduce_scatter_single,
    replace_step,
    tier,
    with_hooks,
)
from memtune.workload import experts_of

_OP_NAMES = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}


class SeamAllGather(AllGather):
    """All-gather of a unit's parameters as `torch.ops.memtune.all_gather_into_`."""

    is_one_message = True
    """It reads a rank's rows once, at its start: offloaded rows are loaded just before."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the buffer for the whole unit."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather `input_tensor` (numel) of all ranks into `output_tensor` (ranks × numel)."""
        if async_op:
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        torch.ops.memtune.all_gather_into_(output_tensor, input_tensor, group.group_name, group.size())
        return None


class SeamReduceScatter(ReduceScatter):
    """Reduce-scatter of a unit's gradients as `torch.ops.memtune.reduce_scatter_into_`."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the buffer for the unit's full gradient, or for this rank's shard of the sum."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` (ranks × numel) over the ranks into this rank's `output_tensor` (numel)."""
        name = next((name for known, name in _OP_NAMES.items() if op == known), None)
        if async_op or name is None:
            return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        torch.ops.memtune.reduce_scatter_into_(
            output_tensor, input_tensor, group.group_name, group.size(), name
        )
        return None


class SeamAllReduce:
    """Average of a unit's gradient shard over the copies of the model as `torch.ops.memtune.all_reduce_`.

    FSDP2 calls it as the all-reduce hook, after the reduce-scatter and on a stream of its own.

    Args:
        group: The ranks that hold the same shard, one of each copy.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, shard: Tensor) -> None:
        """Average `shard` in place."""
        torch.ops.memtune.all_reduce_(shard, self._group.group_name, self._group.size(), "avg")
        # The shard belongs to another stream, which would reuse its memory while the all-reduce still reads
        # it.
        streams.used_on(shard)


@cache
def _meshes(device_type: str, replicas: int, degree: int, group: int) -> tuple[DeviceMesh | None, DeviceMesh]:
    if replicas == 1:
        return None, init_device_mesh(device_type, (degree,), mesh_dim_names=("shard",))
    whole = init_device_mesh(device_type, (replicas, degree), mesh_dim_names=("copies", "shard"))
    return whole["copies"], whole["shard"]


def meshes(device_type: str, degree: int) -> tuple[DeviceMesh | None, DeviceMesh]:
    """Return the replicas' mesh (None for one copy) and the mesh of the `degree` ranks of this copy."""
    # Made once per process group, with real tensors also in a dry run.
    default = dist.distributed_c10d._get_default_group()
    with _disable_current_modes():
        return _meshes(device_type, dist.get_world_size() // degree, degree, id(default))


@cache
def _grid(device_type: str, sizes: tuple[tuple[str, int], ...], group: int) -> DeviceMesh:
    names, numbers = zip(*sizes, strict=True)
    return init_device_mesh(device_type, numbers, mesh_dim_names=names)


def grid(device_type: str, sizes: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """Return all ranks as a mesh of dimensions (name, size), the last of consecutive ranks; cached."""
    with _disable_current_modes():
        return _grid(device_type, sizes, id(dist.distributed_c10d._get_default_group()))


@cache
def _smaller_groups(device_type: str, replicas: int, degree: int, size: int, group: int) -> HSDPMeshInfo:
    names = ("copies", "groups", "sharers")
    mesh = init_device_mesh(device_type, (replicas, degree // size, size), mesh_dim_names=names)
    return HSDPMeshInfo(mesh["groups", "sharers"], shard_mesh_dim=1, replicate_mesh_dim=0)


def forget_meshes() -> None:
    """Clear the caches when the process group is destroyed: the next one may have the same `id`."""
    _meshes.cache_clear()
    _grid.cache_clear()
    _smaller_groups.cache_clear()


def shard(
    context: Context,
    *,
    degree: int,
    reshard_after_forward: bool | int,
    blocks_per_unit: int,
    keep_root: bool = True,
    prefetch: int | None = None,
    precision: MixedPrecisionPolicy | None = None,
    two_hop: bool = False,
    kind: str = "fsdp",
    sharers: ShardMeshes | None = None,
) -> None:
    """Shard the model of `context` over `degree` ranks (replicated over the others) and rebind its optimizer.

    Args:
        context: Model and optimizer, changed in place.
        degree: Ranks that share one copy of the model state; divides the number of ranks.
        reshard_after_forward: Free a unit's parameters between forward and backward; a number keeps a copy
            sharded over groups of that many consecutive ranks, which backward gathers.
        blocks_per_unit: Blocks gathered together; parameters in no block form the root unit, gathered once
            per step.
        keep_root: Keep the root unit gathered between forward and backward regardless of
            `reshard_after_forward`.
        prefetch: Units to prefetch; None: FSDP2's default.
        precision: Types of gathered parameters, reductions, inputs and outputs; None: those of the
            parameters.
        two_hop: Average gradients between replicas in the last micro-batch only.
        kind: Kind of the technique, for messages.
        sharers: The `degree` ranks that share parameters if other states are sharded further: the caller
            averages between replicas and rebinds the optimizer.

    Raises:
        ApplyError: There is no process group, its size is no multiple of `degree`, `degree` is no proper
            multiple of the number in `reshard_after_forward`, the ranks' weights differ, or the model is
            compiled as a whole.
    """
    placement = context.placement
    require_ranks(context, kind)
    require_real_weights(context, kind)
    _require_shardable(context, degree, reshard_after_forward, kind, alone=sharers is None)
    # The optimizer is rebound by name: `fully_shard` replaces every parameter object.
    before = dict(context.model.named_parameters())
    grid = sharers or (shard_meshes(context, degree) if placement.model_parallel_size > 1 else None)
    copies, mesh = meshes(context.device.type, degree) if grid is None else (grid.copies, grid.sharers)
    in_stages = placement.remote_parameters is not None
    wholes = unwrap_dtensors(context.model) if placement.model_parallel_size > 1 and not in_stages else {}
    units = [context.blocks[i : i + blocks_per_unit] for i in range(0, len(context.blocks), blocks_per_unit)]
    # The root's parameters are needed again at the start of backward: freeing them in between mostly costs a
    # gather. In a stage other micro-batches come in between.
    frees_root = bool(reshard_after_forward) and (in_stages or not keep_root)
    _shard_units(context, units, mesh, bool(reshard_after_forward), frees_root, precision)
    # A deferred model gets values now: a rank never has a full parameter. Shards that are divided further, or
    # are parts of layers, start on the device.
    is_whole = sharers is None and placement.model_parallel_size == 1
    context.events.parameters_sharded.emit(context.off_device() if is_whole else ())
    if grid is not None and placement.model_parallel_size > 1 and not in_stages:
        allow_nested_collectives(grid.both)
        for module in context.model.modules():
            if isinstance(module, FSDPModule) and _gathers(module):
                set_full_specs(module._get_fsdp_state()._fsdp_param_group, wholes, grid.both)
    if not isinstance(reshard_after_forward, bool):
        _reshard_to_groups(context, degree, reshard_after_forward)
    # In a stage FSDP2's default prefetch would follow all forwards whose backward is still to come, those of
    # other micro-batches included.
    if prefetch is not None or in_stages:
        depths = (prefetch, prefetch) if prefetch is not None else (0, 1)
        _prefetch(context.model, [context.model.get_submodule(names[0]) for names in units], *depths)
    _average_gradients(context, copies, two_hop)
    if in_stages:
        shard_stage(context, mesh.get_group(), keeps=not reshard_after_forward)
    else:
        go_on_after_errors(context)
        # Only where FSDP2's own reduction, in every micro-batch, is the last one.
        if sharers is None and grid is None and not (copies is not None and two_hop):
            context.events.grad_ready.emit_from(partial(_emit_grad_ready, context))
    if sharers is None:
        # With sharers the caller divides further and rebinds the optimizer to those shards.
        rebind(context.optimizer, before, dict(context.model.named_parameters()))
    context.checks["sharding.states"] = lambda: _check(context, degree)


def _average_gradients(context: Context, copies: DeviceMesh | None, two_hop: bool) -> None:
    """Let units reduce the same parameters on all ranks, and average between the copies of the model."""
    reduce_same_parameters(context, (module for module, _ in units_of(context.model)))
    context.placement.states_average_grads = True
    if copies is not None:
        _average_copies(context, copies, two_hop)


def _shard_units(
    context: Context,
    units: Sequence[Sequence[str]],
    mesh: DeviceMesh,
    reshard_after_forward: bool,
    frees_root: bool,
    precision: MixedPrecisionPolicy | None,
) -> None:
    """Call `fully_shard` for units of blocks and for the root, with collectives through the seam."""
    policy = precision or MixedPrecisionPolicy()
    inside = replace(policy, output_dtype=None)  # between blocks a cast would be undone at once
    for names in units:
        modules = [context.model.get_submodule(name) for name in names]
        # Blocks before the root: FSDP2 gives a module's parameters to the innermost unit.
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=inside,
        )
    fully_shard(
        context.model,
        mesh=mesh,
        reshard_after_forward=frees_root,
        mp_policy=policy,
        ignored_params=_absent(context),
    )
    for module in context.model.modules():
        if isinstance(module, FSDPModule):
            # Through the seam, or a recorder would not see FSDP2's collectives.
            module.set_custom_all_gather(SeamAllGather())
            module.set_custom_reduce_scatter(SeamReduceScatter())


def require_real_weights(context: Context, kind: str) -> None:
    """Refuse complex weights whose shards an optimizer would update as DTensors.

    Raises:
        ApplyError: There is one.
    """
    # Both update plain tensors.
    if context.placement.offload.host_share >= 1 or _is_elementwise(context.optimizer):
        return
    found = [name for name, p in context.model.named_parameters() if p.requires_grad and p.is_complex()]
    if found:
        raise ApplyError(
            f"{kind} and {type(context.optimizer).__name__} do not work with complex weights ({found[0]}).",
            evidence="torch's optimizers update real views of them, and a view of a DTensor may be a copy.",
            fix=(
                "a real parameter, used as torch.view_as_complex(parameter);"
                " or  sharding: {states: {kind: ddp}}"
            ),
            code="MT315",
        )


def _require_shardable(
    context: Context, degree: int, reshard_after_forward: bool | int, kind: str, *, alone: bool
) -> None:
    """Refuse ranks for which `fits` refuses the config, which may be written by hand."""
    placement = context.placement
    pipeline: Any = context.loop.pipeline
    if pipeline is not None:
        pipeline.require_divisible(kind)
    if placement.model_parallel_size > 1 and alone and not isinstance(reshard_after_forward, bool):
        raise refusals.error_of(
            refusals.reshard_among_sharers(kind),
            f"Ranks that share a part are {placement.model_parallel_size} apart.",
        )
    uneven = refusals.uneven_groups("degree", degree, placement.data_parallel_size)
    if uneven is None and not isinstance(reshard_after_forward, bool):
        uneven = refusals.uneven_reshard(reshard_after_forward, degree)
    if uneven is not None:
        raise refusals.error_of(uneven, f"sharding.states: {kind}")


def _reshard_to_groups(context: Context, degree: int, size: int) -> None:
    """Set what `fully_shard(reshard_after_forward=size)` sets, with one mesh made outside of modes."""
    default = dist.distributed_c10d._get_default_group()
    with _disable_current_modes():
        smaller = _smaller_groups(
            context.device.type, context.placement.world_size // degree, degree, size, id(default)
        )
    root: Any = context.model
    for module, parameters in units_of(context.model):
        group: Any = module._get_fsdp_state()._fsdp_param_group
        if not parameters or module is root:
            continue
        # FSDP2 makes one mesh per unit here, and a process group costs memory and time.
        group.post_forward_mesh_info = smaller
        for each in group.fsdp_params:
            each.post_forward_mesh_info = smaller
            each._init_sharded_post_forward_param_metadata(torch.empty(each._orig_size, device="meta"))
    # After a forward without a backward the group copies would remain in use, and an optimizer's step updates
    # the shards only.
    context.model.register_forward_hook(_drop_copies)


def _drop_copies(model: nn.Module, args: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        for module, _ in units_of(model):
            module.reshard()


def _absent(context: Context) -> set[nn.Parameter] | None:
    """Return the placeholders of other stages' parameters."""
    if context.placement.remote_parameters is None:
        return None
    return {p for name, p in context.model.named_parameters() if name in context.placement.absent}


def _prefetch(model: Any, blocks: list[nn.Module], forward: int, depth: int) -> None:
    """Make units, once gathered, prefetch the next `forward` or `depth` units of their pass."""
    units: list[FSDPModule] = [
        each for each in (model, *blocks) if isinstance(each, FSDPModule) and _gathers(each)
    ]
    root = int(units[0] is model)
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + forward])
        before = (
            # Backward reaches the units before this one; the root is gathered already.
            units[max(place - depth, root) : place]
            if place or not root
            else units[max(len(units) - depth, 1) :]
        )
        # An empty list means FSDP2's default; the unit itself is already gathered, so it prefetches nothing.
        unit.set_modules_to_backward_prefetch(before[::-1] or [unit])


def _gathers(module: FSDPModule) -> bool:
    return module._get_fsdp_state()._fsdp_param_group is not None


def _average_copies(context: Context, copies: DeviceMesh, two_hop: bool) -> None:
    """Add hooks that average between replicas: FSDP2's own all-reduce on 2-D meshes bypasses the seam."""
    once = OncePerStep(copies.get_group())
    for module, unit in units_of(context.model):
        module.set_all_reduce_hook(once.hook(unit) if two_hop else SeamAllReduce(copies.get_group()))
    # The stages of a rank end their last micro-batch at different times: average when the last backward ends.
    if two_hop and context.loop.pipeline is not None:
        context.loop.pipeline.reduce = once.at_end(unit for _, unit in units_of(context.model))  # type: ignore[attr-defined]
    elif two_hop:
        context.loop.sync = once.sync


def _emit_grad_ready(context: Context) -> None:
    """Emit `grad_ready` from FSDP2's hooks, which run when a shard's gradient is reduced and accumulated."""
    trained = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
    call_when_grad_ready(context, dict.fromkeys(trained, context.events.grad_ready.emit))


def units_of(model: nn.Module) -> Iterator[tuple[FSDPModule, tuple[nn.Parameter, ...]]]:
    """Yield FSDP2's modules, each with the sharded parameters that are gathered and reduced with it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            yield module, tuple(each.sharded_param for each in group.fsdp_params) if group is not None else ()


# The optimizer updates local tensors, and users see DTensors: an op on DTensors works out its sharding in
# Python, which for a model of small tensors costs more than the update. An optimizer that treats every
# element alone gives the same numbers on local tensors.
_ELEMENTWISE: Final = frozenset(
    {Adadelta, Adagrad, Adam, Adamax, AdamW, ASGD, NAdam, RAdam, RMSprop, Rprop, SGD}
)
"""Optimizers none of whose elements depends on another one; subclasses may differ."""


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether `optimizer` treats every element alone."""
    return type(optimizer) in _ELEMENTWISE


def _update_locally(optimizer: Optimizer) -> None:
    """Make `optimizer.step()` work on the local tensors of its DTensors, if it treats elements alone."""
    # Its hooks see DTensors. A step that the user has replaced is not changed.
    update = getattr(type(optimizer).step, "__wrapped__", None)  # below the wrapper that runs the hooks
    if _is_elementwise(optimizer) and update is not None and is_own_step(optimizer):
        replace_step(optimizer, with_hooks(optimizer, partial(_step_on_local_tensors, optimizer, update)))


def _step_on_local_tensors(
    optimizer: Optimizer, update: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with _local_tensors(optimizer):
        return update(optimizer, *args, **kwargs)


@contextmanager
def _local_tensors(optimizer: Optimizer) -> Iterator[None]:
    """Replace the DTensors in parameter groups and state by their local tensors."""
    groups, state = optimizer.param_groups, optimizer.state
    whole = [group["params"] for group in groups]
    sharded = [each for parameters in whole for each in parameters if isinstance(each, DTensor)]
    gradients: list[Any] = [each.grad for each in sharded]
    if not all(map(_has_own_placements, sharded, gradients)):
        # Rows of a gradient that is divided in another way belong to other rows of the parameter.
        yield
        return
    rows: list[Tensor] = [each._local_tensor for each in sharded]
    # These loops run for every shard in every step, so they look nothing up: to hash a tensor calls Python.
    inside = defaultdict[Any, Any](dict)
    for each, values in state.items():
        if isinstance(each, DTensor):
            inside[each._local_tensor] = {
                name: value._local_tensor if isinstance(value, DTensor) else value
                for name, value in values.items()
            }
        else:
            inside[each] = values
    given = _values_in(inside)
    for mine, gradient in zip(rows, gradients, strict=True):
        mine.grad = None if gradient is None else gradient._local_tensor
    optimizer.state = inside
    for group, parameters in zip(groups, whole, strict=True):
        group["params"] = [_local_tensor(each) for each in parameters]
    try:
        yield
    finally:
        optimizer.state = state
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters
        for mine in rows:
            mine.grad = None
        now = _values_in(inside)
        # Optimizers make state in their first step, and some replace tensors in later ones.
        if len(inside) != len(state) or len(now) != len(given) or not all(map(operator.is_, now, given)):
            _write_back(state, inside, sharded)


def _values_in(state: dict[Any, dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, state.values())))


def _has_own_placements(parameter: DTensor, gradient: Tensor | None) -> bool:
    """Return True unless a gradient is divided in another way than its parameter."""
    return gradient is None or (
        isinstance(gradient, DTensor)
        and (gradient._spec is parameter._spec or gradient._spec.placements == parameter._spec.placements)
    )


def _local_tensor(value: Any) -> Any:
    # Not `local`, whose result is a new object while autograd is on: these are compared by identity.
    return value._local_tensor if isinstance(value, DTensor) else value


def _write_back(state: dict[Any, Any], inside: dict[Any, Any], sharded: list[DTensor]) -> None:
    """Write the values that a step has made or replaced into the state, as DTensors where they are rows."""
    shard_of = {each._local_tensor: each for each in [*sharded, *state] if isinstance(each, DTensor)}
    for mine, values in inside.items():
        shard = shard_of.get(mine)
        if shard is None:
            state[mine] = values
            continue
        kept = state[shard]
        for name, value in values.items():
            if name not in kept or _local_tensor(kept[name]) is not value:
                is_rows = isinstance(value, Tensor) and value.dim() > 0 and value.shape == mine.shape
                kept[name] = _dtensor_like(value, shard) if is_rows else value


def _dtensor_like(rows: Tensor, shard: DTensor) -> DTensor:
    """Return `rows` as a DTensor that is divided like `shard`."""
    if rows.dtype == shard.dtype:
        return DTensor(rows, shard._spec, requires_grad=False)
    return rows_like(rows, shard)


def rebind(optimizer: Optimizer, before: dict[str, nn.Parameter], after: dict[str, nn.Parameter]) -> None:
    """Make the optimizer object update `after` instead of `before`, with its state sharded alike."""
    new_of = {old: after[name] for name, old in before.items()}
    for group in optimizer.param_groups:
        group["params"] = [new_of.get(parameter, parameter) for parameter in group["params"]]
    for old, new in new_of.items():
        state = optimizer.state.pop(old, None)
        if state is not None:
            optimizer.state[new] = {name: _sharded_like(value, old, new) for name, value in state.items()}
    if any(isinstance(each, DTensor) for each in after.values()):
        _update_locally(optimizer)


def _sharded_like(value: Any, old: nn.Parameter, new: nn.Parameter) -> Any:
    if (
        isinstance(value, Tensor)
        and value.shape == old.shape
        and isinstance(new, DTensor)
        and value.dim() > 0
    ):
        # The state of a part of a layer is this rank's already; only its rows are divided.
        if (new.device_mesh.mesh_dim_names or ())[:1] == (PARTS,):
            return shard_like(local(value), new)
        return distribute_tensor(value, new.device_mesh, new.placements)
    return value


def _check(context: Context, degree: int) -> dict[str, Any]:
    absent = context.placement.absent
    parameters = {name: p for name, p in context.model.named_parameters() if name not in absent}
    plain = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
    if plain:
        raise ApplyError(
            f"{len(plain)} parameters are not sharded.", evidence=f"First: {plain[0]}.", code="MT322"
        )
    units = [name for name, module in context.model.named_modules() if isinstance(module, FSDPModule)]
    # `_local_tensor`, because a view of a fake tensor would count memory again that an offloader has freed.
    shards = sum(p._local_tensor.nbytes for p in parameters.values() if isinstance(p, DTensor))
    return {"degree": degree, "units": len(units), "shard_bytes": shards}


def shard_stage(context: Context, sharers: dist.ProcessGroup, *, keeps: bool) -> None:
    """Adapt this rank's stage, whose units FSDP2 shards over `sharers`, to the pipeline's schedule."""
    # Units that are kept stay gathered after forward: only the last backward of a step frees them.
    pipeline: Any = context.loop.pipeline
    model: Any = context.model
    pipeline.divided_among(sharers)
    pipeline.run.ended = lambda output: _end_forward(model, output)
    if keeps:
        pipeline.before_backward = lambda last: _frees(model, last)


def _end_forward(model: Any, output: Tensor) -> Tensor:
    """Run FSDP2's post-forward of the root, which the stage's early end of the user's forward skips."""
    state = model._get_fsdp_state()
    found: Tensor = state._post_forward(model, (), output)
    return found


def _frees(model: Any, last: bool) -> None:
    """Let FSDP2 free the parameters after backward only in the `last` one of a step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Between the micro-batches of a stage the parameters are used again at once.
            module.set_reshard_after_backward(last, recurse=False)


def reduce_same_parameters(context: Context, units: Iterable[Any]) -> None:
    """Make every rank reduce gradients of the same parameters of `units`."""
    named = list(context.model.named_parameters())
    experts = {named[i][0] for expert in experts_of(context.model, context.blocks) for i in expert.parameters}
    names = {id(parameter): name for name, parameter in named}
    with tier(HOST):  # a mesh is no memory of the device's
        # All ranks that average this gradient, not only those that share its rows.
        ranks = same_part_group(context)
    for unit in units:
        group: Any = unit._get_fsdp_state()._fsdp_param_group
        if group is not None:
            trained = {
                names[id(each.sharded_param)]: each
                for each in group.fsdp_params
                if each.sharded_param.requires_grad
            }
            group.post_backward = _Reduction(group, trained, experts, ranks)


class _Reduction:
    """Replacement for FSDP2's post-backward of a unit; FSDP2 calls it after the unit's backward and again at
    the end of backward, when nothing is left to do.

    Args:
        group: FSDP2's parameter group of the unit.
        trained: Its trainable parameters, by name.
        experts: Names of all expert parameters, of this unit and others.
        ranks: Group that averages these gradients.
    """

    def __init__(
        self, group: Any, trained: dict[str, Any], experts: set[str], ranks: dist.ProcessGroup
    ) -> None:
        self._group, self._reduce, self._ranks = group, group.post_backward, ranks
        self._experts = [each for name, each in trained.items() if name in experts]
        self._others = {name: each for name, each in trained.items() if name not in experts}
        self._count = 0

    def __call__(self, *unused: Any) -> None:
        """Reduce the same parameters on all ranks.

        Raises:
            ApplyError: Ranks have gradients of different parameters (rule 2).
        """
        # PRE_BACKWARD: this unit's backward has just run. FSDP2 calls once more at the end of backward.
        if self._group.reduce_grads and self._group._training_state.name == "PRE_BACKWARD":
            self._count += 1
            # Powers of two: the check synchronizes with the device, and a wrong model shows early.
            if self._count & (self._count - 1) == 0:
                self._compare()
            self._fill_up()
        self._reduce(*unused)

    @torch.no_grad()
    def _fill_up(self) -> None:
        """Add zero gradients for expert parameters that only other ranks used (rule 1)."""
        if self._experts:
            for place in missing_indices(
                _has_grad(self._experts), self._ranks, self._experts[0].sharded_param
            ):
                parameter = self._experts[place].unsharded_param
                parameter.grad = torch.zeros_like(parameter)

    def _compare(self) -> None:
        # Weights in tiles have been taken out of the group.
        held = {name: each for name, each in self._others.items() if each in self._group.fsdp_params}
        if not held:
            return
        names, others = list(held), list(held.values())
        found = inconsistent_indices(_has_grad(others), self._ranks, others[0].sharded_param)
        if found:
            raise ApplyError(
                f"{names[found[0]]} got a gradient on some ranks and none on others.",
                evidence=(
                    "FSDP2 would average what each rank has of a block, one parameter's gradients with"
                    " another's."
                ),
                fix="sharding: {states: {kind: zero2}}, or {kind: ddp, find_unused_parameters: true}",
                code="MT346",
            )


def _has_grad(held: Sequence[Any]) -> list[bool]:
    return [
        each.unsharded_accumulated_grad is not None or each.unsharded_param.grad is not None for each in held
    ]


# The second hop of MiCS: sums of gradient shards averaged between the copies of the model, once a step.
Unit = tuple[nn.Parameter, ...]
"""Sharded parameters that are reduced together."""


class OncePerStep:
    """Averages gradient shards over the ranks that hold the same ones, in the last micro-batch of a step.

    Args:
        group: The ranks that hold the same shard, one of each copy.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._averages = True
        self._waiting: Unit = ()
        self._at_end = BackwardEnd(self._average, self._give_up)

    def hook(self, unit: Unit) -> Callable[[Tensor], None]:
        """Return the hook that FSDP2 calls when `unit` has been reduced."""
        # Averaged one unit late: FSDP2 adds the shard to the sum after this hook.
        return lambda shard: self._reduced(unit, shard)

    @contextmanager
    def sync(self, last: bool) -> Iterator[None]:
        """Return the context of a micro-batch: only the last one averages."""
        self._averages = last
        try:
            yield
        finally:
            self._averages = True

    def at_end(self, units: Iterable[Unit]) -> Callable[[], None]:
        """Turn off averaging by hooks; return a function that averages the sums of all `units`."""
        self._averages, all_units = False, tuple(units)

        def average() -> None:
            for unit in all_units:
                self._waiting = unit
                self._average()

        return average

    def _reduced(self, unit: Unit, shard: Tensor) -> None:
        # FSDP2 adds the shard to the sum on this stream; it belongs to that of the reduce-scatter.
        streams.used_on(shard)
        if not self._averages:
            return
        # Runs after FSDP2's callback for the end of backward, which was queued before any unit is reduced.
        self._at_end.expect()
        self._average()  # rule 2
        self._waiting = unit

    def _give_up(self) -> None:
        """Drop the waiting unit of a backward that raised."""
        self._waiting = ()

    @torch.no_grad()
    def _average(self) -> None:
        unit, self._waiting = self._waiting, ()
        for sums in _storages(unit):
            torch.ops.memtune.all_reduce_(sums, self._group.group_name, self._group.size(), "avg")
            # The sums belong to another stream, which would reuse their memory while the all-reduce reads
            # them.
            streams.used_on(sums)


def _storages(unit: Unit) -> list[Tensor]:
    """Return the storages of the unit's sums, each once and flat (rule 1)."""
    found: dict[int, Tensor] = {}
    for parameter in unit:
        if parameter.grad is not None:
            shard = local(parameter.grad)
            storage = shard.untyped_storage()
            found.setdefault(
                storage._cdata, shard.as_strided((storage.nbytes() // shard.element_size(),), (1,), 0)
            )
    return list(found.values())


def go_on_after_errors(context: Context) -> None:
    """Reset FSDP2's state after an exception."""
    # Forward raises ApplyError where torch cannot recover.
    model: Any = context.model

    def forward_begins() -> None:
        state = model._get_fsdp_state()._state_ctx
        raised = state.post_backward_final_callback_queued or state.iter_forward_root is not None
        # Inside a backward (recompute) the callback is queued rightly.
        if not raised or torch._C._current_graph_task_id() != -1:
            return
        if not hasattr(model, "reset_iter_state"):
            raise ApplyError(
                "A forward or a backward has raised, and FSDP2 of this torch cannot go on after it.",
                evidence=f"torch {torch.__version__} keeps what it was to do at the end of that backward.",
                fix="torch 2.13 or later; or begin again, from the last checkpoint",
                code="MT368",
            )
        for each in (each for one in state.all_states for each in _parameters(one)):
            if hasattr(each, "_unsharded_param"):
                # A gradient of the backward that raised would be added to the next one.
                each._unsharded_param.grad = None
        model.reset_iter_state()

    context.undo.callback(model.register_forward_pre_hook(UncopiedHook(forward_begins), prepend=True).remove)


def _parameters(state: Any) -> list[Any]:
    return [] if state._fsdp_param_group is None else state._fsdp_param_group.fsdp_params
