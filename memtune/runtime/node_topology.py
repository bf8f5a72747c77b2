"""Process groups inside a node and between nodes (see `runtime.link_classes` for the ranks of a node)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True, eq=False)
class Nodes:
    """Ranks that share a copy of the model state, as nodes × ranks of a node; groups are those of this
    rank.
    """

    inside: dist.ProcessGroup
    """Ranks of this node."""
    between: dist.ProcessGroup
    """Ranks at the same place in their nodes, one of every node."""
    nodes: int
    local: int

    @property
    def place(self) -> int:
        """Index of this rank in its node."""
        return dist.get_rank(self.inside)

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return dist.get_rank(self.between)


def nodes_of(device_type: str, degree: int, local: int, parts: int = 1) -> Nodes:
    """Return the groups of this rank among `degree` ranks with stride `parts`, on nodes that have `local` of
    them each.

    Made once per process group.
    """
    with _disable_current_modes():
        return _nodes(device_type, degree, local, parts, id(dist.distributed_c10d._get_default_group()))


@cache
def _nodes(device_type: str, degree: int, local: int, parts: int, group: int) -> Nodes:
    copies = dist.get_world_size() // (degree * parts)
    shape, names = (copies, degree // local, local, parts), ("copies", "nodes", "places", "parts")
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return Nodes(mesh["places"].get_group(), mesh["nodes"].get_group(), degree // local, local)


def forget() -> None:
    """Clear the cache; call it when the process group is destroyed, since the next one may have the same
    `id`.
    """
    _nodes.cache_clear()
