"""Nodes of a job: their ranks, the process groups inside and between them, the slowest link of a group.

A node is `ranks_per_node` consecutive ranks. On gloo, where all ranks may be on one machine, a config
declares it; bytes are counted accordingly.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from memtune.runtime.transfer import COUNTERS

_declared: int | None = None


def declare(ranks_per_node: int | None) -> None:
    """Declare the number of consecutive ranks per node; None resets it."""
    global _declared
    _declared = ranks_per_node


def ranks_per_node() -> int:
    """Return ranks per node: as declared, else of the launcher (`LOCAL_WORLD_SIZE`), else all of them."""
    ranks = dist.get_world_size()
    return min(ranks, _declared or int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def count_collective(group: dist.ProcessGroup, n_bytes: int) -> None:
    """Count bytes that this rank receives in `group`: in total, and on the slowest link that it uses."""
    # A ring moves every byte over each of its links, so one link between nodes makes the whole
    # collective one between nodes.
    node = ranks_per_node()
    members = dist.get_process_group_ranks(group)
    COUNTERS.add("collective", n_bytes)
    COUNTERS.add("intra_link" if members[0] // node == members[-1] // node else "inter_link", n_bytes)


def is_between_nodes(group: dist.ProcessGroup) -> bool:
    """Return True if no two ranks of `group` share a node, on nodes of several ranks."""
    size = ranks_per_node()
    if size == 1:
        return False
    nodes = [rank // size for rank in dist.get_process_group_ranks(group)]
    return len(nodes) > 1 and len(set(nodes)) == len(nodes)


@dataclass(frozen=True, eq=False)
class Nodes:
    """Ranks that share a copy of the model state, as nodes × ranks of a node; groups of this rank."""

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
    """Return this rank's groups among `degree` ranks with stride `parts`, `local` of them on each node."""
    # Made once per process group.
    # A recorder that is active now must not see the tensors with which a mesh is made.
    with _disable_current_modes():
        return _nodes(device_type, degree, local, parts, id(dist.distributed_c10d._get_default_group()))


@cache
def _nodes(device_type: str, degree: int, local: int, parts: int, group: int) -> Nodes:
    # `group` is only a part of the key: groups of a process group that was destroyed are of no use.
    copies = dist.get_world_size() // (degree * parts)
    shape, names = (copies, degree // local, local, parts), ("copies", "nodes", "places", "parts")
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return Nodes(mesh["places"].get_group(), mesh["nodes"].get_group(), degree // local, local)


def forget() -> None:
    """Clear the cache when the process group is destroyed: the next one may have the same `id`."""
    _nodes.cache_clear()
