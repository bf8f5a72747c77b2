"""Groups of ranks for models of which each rank holds a part: states are sharded or replicated among the
ranks that hold the same part.

Four rules:

1. Ranks are a grid of copies × parts: `parts` consecutive ranks hold one copy of the model together
  (`parallel.model.tensor_parallel`), and the ranks at the same place in their copies hold the same part.
  States are sharded over the latter alone.
2. FSDP2 shards the part, a plain tensor. The optimizer, norms over all parameters and checkpoints see a
  DTensor of the full parameter's shape over both dims: the parts first, each of them sharded by rows. A
  parameter that every part holds in full is replicated along the parts, so that a norm counts it once.
3. A parameter whose gradient differs between the ranks of a copy (each has seen a share of the positions)
  gets their sum (`parallel.model.sequence_sharding`), once per step, on the gradient's shard after states are
  sharded.
4. A mechanism that averages gradients between the copies sets `Placement.states_average_grads`; if none does,
  the technique of the parts averages them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import _disable_current_modes

from memtune.runtime import Context, local

PARTS = "parts"
"""The dim of a mesh along which ranks hold parts of a model; it comes first."""


@dataclass(frozen=True, eq=False)
class ShardMeshes:
    """Meshes of the ranks that shard a part's states."""

    copies: DeviceMesh | None
    """The ranks that hold the same shard of the same part; None: this one alone."""
    sharers: DeviceMesh
    """The ranks that shard the part."""
    both: DeviceMesh
    """All ranks that hold one copy of the model: the parts, then the ranks that shard each of them."""


@cache
def _shard_meshes(device_type: str, parts: int, degree: int, group: int) -> ShardMeshes:
    ranks = dist.get_world_size()
    copies = ranks // parts // degree
    # The slowest index of a rank is the copy, the fastest the part; as dims of a mesh parts come first, as
    # they divide first.
    where = torch.arange(ranks).view(copies, degree, parts).permute(2, 0, 1)
    if copies == 1:
        mesh = DeviceMesh(device_type, where.reshape(parts, degree), mesh_dim_names=(PARTS, "shard"))
        return ShardMeshes(None, mesh["shard"], mesh)
    mesh = DeviceMesh(device_type, where.contiguous(), mesh_dim_names=(PARTS, "copies", "shard"))
    return ShardMeshes(mesh["copies"], mesh["shard"], mesh[PARTS, "shard"])


def shard_meshes(context: Context, degree: int) -> ShardMeshes:
    """Return meshes in which `degree` of the ranks with this part shard it; cached per process group."""
    # Making a mesh runs tensor ops of its own, which a recorder must not see.
    with _disable_current_modes():
        default = dist.distributed_c10d._get_default_group()
        return _shard_meshes(context.device.type, context.placement.model_parallel_size, degree, id(default))


def same_part_group(context: Context) -> dist.ProcessGroup:
    """Return the ranks that hold this rank's part of the model; all if each has the whole model."""
    if context.placement.model_parallel_size == 1:
        return dist.distributed_c10d._get_default_group()
    return shard_meshes(context, context.placement.data_parallel_size).sharers.get_group()


def forget_meshes() -> None:
    """Clear the cache when the process group is destroyed: the next one may have the same `id`."""
    _shard_meshes.cache_clear()


# -- rule 2 --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FullParameter:
    """Layout of the full parameter of which a rank holds a part."""

    placement: Placement
    """Placement of the parts."""
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def from_parameter(cls, parameter: Tensor) -> FullParameter:
        """Return the layout of `parameter`: a DTensor over the parts, or a tensor that all parts hold."""
        placement = parameter.placements[0] if isinstance(parameter, DTensor) else Replicate()
        return cls(placement, parameter.shape, parameter.stride())

    def rows(self, mine: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return `mine`, this rank's rows of its part, as a DTensor over `mesh`: parts, then row shards."""
        placements = [self.placement, *[Shard(0)] * (mesh.ndim - 1)]
        return DTensor.from_local(
            mine, mesh, placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def spec(self, mesh: DeviceMesh, dtype: torch.dtype) -> DTensorSpec:
        """Return the DTensor spec of `rows`."""
        return DTensorSpec(
            mesh, (self.placement, Shard(0)), tensor_meta=TensorMeta(self.shape, self.stride, dtype)
        )


FullParameters = dict[tuple[nn.Module, str], FullParameter]
"""By module and the parameter's name in it."""


def unwrap_dtensors(model: nn.Module) -> FullParameters:
    """Replace DTensor parameters by plain ones of the local part; return each one's full layout."""
    wholes: FullParameters = {}
    plain: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            wholes[module, name] = FullParameter.from_parameter(parameter)
            if isinstance(parameter, DTensor):
                # Tied parameters stay tied.
                if parameter not in plain:
                    plain[parameter] = nn.Parameter(
                        local(parameter.detach()), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = plain[parameter]
    return wholes


def set_full_specs(unit: Any, wholes: FullParameters, both: DeviceMesh) -> None:
    """Give the parameters of an FSDP2 unit the DTensor spec of the full parameter (rule 2).

    Args:
        unit: FSDP2's group of parameters.
        wholes: Full layout of each parameter before it was sharded.
        both: The parts, and the ranks that shard each.
    """
    for each in unit.fsdp_params:
        whole = wholes[each._module_info.module, each._module_info.param_name]
        sharded = each.sharded_param
        each._sharding_spec = whole.spec(both, sharded.dtype)
        mine = nn.Parameter(
            each.to_sharded_dtensor(local(sharded.detach())), requires_grad=sharded.requires_grad
        )
        each.sharded_param = mine
        each._setattr_on_modules(mine)


def rows_like(mine: Tensor, like: DTensor) -> DTensor:
    """Return `mine`, this rank's rows, as a DTensor that is divided like `like`; nothing is sent."""
    return DTensor.from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_like(mine: Tensor, like: DTensor) -> DTensor:
    """Return a copy of the rows of `mine`, a tensor of the part, that `like` assigns to this rank."""
    rows = mine.detach()
    for dim in range(1, like.device_mesh.ndim):
        # Rounded up, as `Shard(0)` does: the last ranks may have fewer rows, or none.
        each = -(-rows.shape[0] // like.device_mesh.size(dim))
        first = min(each * like.device_mesh.get_local_rank(dim), rows.shape[0])
        rows = rows.narrow(0, first, min(each, rows.shape[0] - first))
    # A view would keep the memory of the whole part.
    return rows_like(rows.clone(memory_format=torch.contiguous_format), like)


def allow_nested_collectives(mesh: DeviceMesh) -> None:
    """Silence torch's warning that collectives over several dims of `mesh` run dim by dim, as intended."""
    warned: set[tuple[int, tuple[int, ...], str]] | None = getattr(
        _redistribute, "_warned_flatten_issues", None
    )
    if warned is None:  # torch 2.11 does not warn
        return
    for count in range(2, mesh.ndim + 1):
        warned.update(
            (hash(mesh), dims, "no_flattened_mesh") for dims in combinations(range(mesh.ndim), count)
        )
