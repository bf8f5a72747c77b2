"""Models of which a rank has a part: what divides or replicates their states does so among the ranks that hold the same part.

Four rules:

1. Ranks are a grid of copies × parts: `parts` consecutive ranks hold one copy of the model together (`runtime.tensor`), and the
   ranks with the same place among them hold the same. States are divided over the latter alone.
2. What FSDP2 divides is the part, a plain tensor. What the optimizer, norms over all parameters and checkpoints see is a DTensor
   of the whole parameter's shape over both dims: the parts first, each of them divided by rows. What every part has whole is
   a replica along the parts, so that a norm counts it once.
3. A parameter whose gradient is another one on each rank of the parts (of which each has seen a share of the positions) gets the
   sum of them (`runtime.positions`). That is once a step, on what is left of the gradient after states are divided.
4. Whoever averages gradients between the copies says so (`Context.averaged`); where nobody does, the technique of the parts does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import _disable_current_modes

from memtune.runtime.context import Context
from memtune.runtime.tree import local

PARTS = "parts"
"""The dim of a mesh along which ranks hold parts of a model; it comes first."""


@dataclass(frozen=True, eq=False)
class Divided:
    """The ranks among which a part's states are divided."""

    copies: DeviceMesh | None
    """The ranks that hold the same shard of the same part; None: this one alone."""
    sharers: DeviceMesh
    """The ranks that divide the part."""
    both: DeviceMesh
    """All ranks that hold one copy of the model: the parts, then those that divide each of them."""


@cache
def _divided(device_type: str, parts: int, degree: int, group: int) -> Divided:
    ranks = dist.get_world_size()
    copies = ranks // parts // degree
    # The slowest index of a rank is the copy, the fastest the part; as dims of a mesh parts come first, as they divide first.
    where = torch.arange(ranks).view(copies, degree, parts).permute(2, 0, 1)
    if copies == 1:
        mesh = DeviceMesh(device_type, where.reshape(parts, degree), mesh_dim_names=(PARTS, "shard"))
        return Divided(None, mesh["shard"], mesh)
    mesh = DeviceMesh(device_type, where.contiguous(), mesh_dim_names=(PARTS, "copies", "shard"))
    return Divided(mesh["copies"], mesh["shard"], mesh[PARTS, "shard"])


def divided(context: Context, degree: int) -> Divided:
    """The ranks among which `degree` of those that hold the same part as this one divide it; made once per process group."""
    with _disable_current_modes():
        return _divided(context.device.type, context.parts, degree, id(dist.distributed_c10d._get_default_group()))


def same_part(context: Context) -> dist.ProcessGroup:
    """The ranks that hold the same part of the model as this one: all, where each has all of it."""
    if context.parts == 1:
        return dist.distributed_c10d._get_default_group()
    return divided(context, context.copies).sharers.get_group()


def forget_meshes() -> None:
    """Call when the process group is gone: the next one may have its address."""
    _divided.cache_clear()


# -- rule 2 ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """What a parameter is a part of."""

    placement: Placement
    """How the parts divide it."""
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> Whole:
        """`parameter` as the technique of the parts has left it: a DTensor over the parts, or a plain tensor, which all have."""
        placement = parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()
        return cls(placement, parameter.shape, parameter.stride())

    def rows(self, mine: Tensor, mesh: DeviceMesh) -> DTensor:
        """`mine`, this rank's rows of its part, as a tensor of the whole's shape over `mesh`: parts, then who divides rows."""
        placements = [self.placement, *[Shard(0)] * (mesh.ndim - 1)]
        return DTensor.from_local(mine, mesh, placements, run_check=False, shape=self.shape, stride=self.stride)

    def spec(self, mesh: DeviceMesh, dtype: torch.dtype) -> DTensorSpec:
        """How `rows` is laid out."""
        return DTensorSpec(mesh, (self.placement, Shard(0)), tensor_meta=TensorMeta(self.shape, self.stride, dtype))


Wholes = dict[tuple[nn.Module, str], Whole]
"""By module and its own name for the parameter."""


def leave_plain(model: nn.Module) -> Wholes:
    """Put plain parameters of the parts in the place of DTensors; returns what every parameter of the model is a part of."""
    wholes: Wholes = {}
    plain: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            wholes[module, name] = Whole.of(parameter)
            if isinstance(parameter, DTensor):
                if parameter not in plain:
                    plain[parameter] = nn.Parameter(local(parameter.detach()), requires_grad=parameter.requires_grad)
                module._parameters[name] = plain[parameter]
    return wholes


def see_whole(unit: Any, wholes: Wholes, both: DeviceMesh) -> None:
    """Have the parameters of an FSDP2 unit be seen as parts of what is whole (rule 2).

    Args:
        unit: FSDP2's group of parameters.
        wholes: What each parameter was a part of, before it was sharded.
        both: The parts, and the ranks that divide each.
    """
    for each in unit.fsdp_params:
        whole = wholes[each._module_info.module, each._module_info.param_name]
        sharded = each.sharded_param
        each._sharding_spec = whole.spec(both, sharded.dtype)
        mine = nn.Parameter(each.to_sharded_dtensor(local(sharded.detach())), requires_grad=sharded.requires_grad)
        each.sharded_param = mine
        each._setattr_on_modules(mine)


def part_of(mine: Tensor, like: DTensor) -> DTensor:
    """Of `mine`, all that this rank had of a tensor, the rows that `like` leaves it, in memory of their own."""
    rows = mine.detach()
    for dim in range(1, like.device_mesh.ndim):
        each = -(-rows.shape[0] // like.device_mesh.size(dim))
        first = min(each * like.device_mesh.get_local_rank(dim), rows.shape[0])
        rows = rows.narrow(0, first, min(each, rows.shape[0] - first))
    kept = rows.clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(kept, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
