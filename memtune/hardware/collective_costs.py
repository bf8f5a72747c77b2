"""Time of a collective by its algorithm, from the bytes on each class of link and the latency of every step.

There are n ranks, g of them on one node, k nodes, and S bytes: the whole message, as the recorder counts it.
The terms are those of Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), section 4.

- ring: (n - 1)/n · S / bandwidth + (n - 1) · latency, all-reduce twice that; over nodes as slow as its
  slowest link, where every node sends through all of its network cards at once;
- hierarchical: a ring of k over the network on S/g, then a ring of g inside the node on S;
- all-to-all: each pair exchanges S/n, pairs of a node overlapped with those between nodes;
- send: S once.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.hardware.spec import Hardware
from memtune.program import F64, Resource


class Algorithm(IntEnum):
    """Algorithm of a collective."""

    RING = 0
    HIERARCHICAL = 1
    ALL_TO_ALL = 2
    SEND = 3


_PARTS = (
    (Algorithm.ALL_TO_ALL, ("all_to_all", "alltoall")),
    (Algorithm.HIERARCHICAL, ("hierarchical",)),
    (Algorithm.SEND, (".send.", ".recv.", "send_next", "shift_into")),
)


def algorithm(name: str) -> Algorithm:
    """Return the algorithm of a collective of this name; a ring by default."""
    return next((found for found, parts in _PARTS if any(part in name for part in parts)), Algorithm.RING)


@functools.lru_cache(maxsize=256)
def _by_name(names: tuple[str, ...]) -> tuple[npt.NDArray[np.int64], F64]:
    """Return by name id: the algorithm, and the number of times a ring is run (2 for all-reduce)."""
    rounds = [2.0 if "all_reduce" in name or "allreduce" in name else 1.0 for name in names]
    return np.array([algorithm(name) for name in names], np.int64), np.array(rounds)


def collective_s(
    names: tuple[str, ...],
    name: npt.NDArray[np.int32],  # (c,) index into names
    resource: npt.NDArray[np.uint8],  # (c,) Resource
    ranks: F64,  # (c,) in the group
    n_bytes: F64,  # (c,)
    hardware: Hardware,
    *,
    apart: npt.NDArray[np.int32] | int = 1,  # (c,) ranks from one member of the group to the next
) -> F64:
    """Return (c,) seconds of each collective."""
    algorithms, rounds = (column[name] for column in _by_name(names))
    steps = np.maximum(ranks - 1, 0.0)
    bytes_per_s, latency_s = _ring_link(
        resource, ranks, np.maximum(hardware.gpus_per_node // apart, 1), hardware
    )
    seconds = rounds * (steps / ranks * n_bytes / bytes_per_s + steps * latency_s)
    if algorithms.any():
        local = np.minimum(ranks, hardware.gpus_per_node) if hardware.device == "cuda" else ranks
        local = np.where(resource == Resource.INTER_LINK, 1.0, local)  # no two of its ranks share a node
        other = np.select(
            [algorithms == Algorithm.HIERARCHICAL, algorithms == Algorithm.ALL_TO_ALL],
            [
                rounds * _hierarchical_s(n_bytes, ranks, local, hardware),
                _all_to_all_s(n_bytes, ranks, local, hardware),
            ],
            n_bytes / bytes_per_s + latency_s,
        )
        seconds = np.where(algorithms == Algorithm.RING, seconds, other)
    return seconds


def _ring_link(
    resource: npt.NDArray[np.uint8], ranks: F64, local: npt.NDArray[Any] | int, hardware: Hardware
) -> tuple[F64, F64]:
    """Return (c,) rate and latency of a ring's slowest link; `local` members per node have a card each."""
    inter = resource == Resource.INTER_LINK
    bytes_per_s = np.where(inter, hardware.inter_link_bytes_per_s, hardware.intra_link_bytes_per_s)
    latency_s = np.where(inter, hardware.inter_link_latency_s, hardware.intra_link_latency_s)
    if hardware.device == "cuda":
        across = ~inter & (ranks > local)
        network = np.minimum(hardware.intra_link_bytes_per_s, hardware.inter_link_bytes_per_s * local)
        bytes_per_s = np.where(across, network, bytes_per_s)
        latency_s[across] = hardware.inter_link_latency_s
    return bytes_per_s, latency_s


def _hierarchical_s(n_bytes: F64, ranks: F64, local: F64, hardware: Hardware) -> F64:
    nodes = np.ceil(ranks / local)
    network_s = (nodes - 1) * (
        n_bytes / local / nodes / hardware.inter_link_bytes_per_s + hardware.inter_link_latency_s
    )
    inside_s: F64 = (local - 1) * (
        n_bytes / local / hardware.intra_link_bytes_per_s + hardware.intra_link_latency_s
    )
    return network_s + inside_s


def _all_to_all_s(n_bytes: F64, ranks: F64, local: F64, hardware: Hardware) -> F64:
    each, far = n_bytes / ranks, ranks - local
    inside_s = (local - 1) * (each / hardware.intra_link_bytes_per_s + hardware.intra_link_latency_s)
    network_s = far * (each / hardware.inter_link_bytes_per_s + hardware.inter_link_latency_s)
    return np.maximum(inside_s, network_s)
