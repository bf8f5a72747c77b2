"""Which ranks share a node, and so over which class of link the members of a group talk."""

from __future__ import annotations

import os

import torch.distributed as dist

from memtune.runtime.transfer import COUNTERS


def ranks_per_node() -> int:
    """Ranks on one node, as the starter of the processes says (`LOCAL_WORLD_SIZE`); all of them where it says nothing."""
    ranks = dist.get_world_size()
    return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def count_collective(group: dist.ProcessGroup, n_bytes: int) -> None:
    """Count bytes that this rank receives in `group`: in all, and on the slowest link that the group needs.

    Counters: `collective`, and `intra_link` where all members share a node, else `inter_link`. A ring moves every byte over
    each of its links, so that one link between nodes makes the whole collective one between nodes.
    """
    node = ranks_per_node()
    members = dist.get_process_group_ranks(group)
    COUNTERS.add("collective", n_bytes)
    COUNTERS.add("intra_link" if members[0] // node == members[-1] // node else "inter_link", n_bytes)
