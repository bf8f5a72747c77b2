"""Link classes: the ranks of each node, and so the slowest link between members of a group.

A node is `ranks_per_node` consecutive ranks. On gloo, where all ranks may be on one machine, a config
declares it; bytes are counted accordingly.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from memtune.runtime.transfer import COUNTERS

_declared: int | None = None


def declare(ranks_per_node: int | None) -> None:
    """Declare the number of consecutive ranks per node; None resets it."""
    global _declared
    _declared = ranks_per_node


def ranks_per_node() -> int:
    """Return ranks per node: as declared, else as the launcher sets it (`LOCAL_WORLD_SIZE`), else all of
    them.
    """
    ranks = dist.get_world_size()
    return min(ranks, _declared or int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def count_collective(group: dist.ProcessGroup, n_bytes: int) -> None:
    """Count bytes that this rank receives in `group`: in total, and on the slowest link that the group uses.

    Counters: `collective`, and `intra_link` if all members share a node, else `inter_link`. A ring moves
    every byte over each of its links, so one link between nodes makes the whole collective one between nodes.
    """
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
