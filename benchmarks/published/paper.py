"""What a paper of sharded training says it measured, and on what: plain data, written down before anything is
compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memtune.hardware.spec import Hardware

Sharding = Mapping[str, Mapping[str, Any]]
"""`states` and `communication` of a config."""


@dataclass(frozen=True)
class Shape:
    """A decoder of equal blocks; the MLP is four times as wide as the model."""

    layers: int
    dim: int
    heads: int
    seq: int
    vocab: int
    source: str


@dataclass(frozen=True)
class Claim:
    """One setting of the paper: what is faster than what, and by how much."""

    name: str
    shape: Shape
    nodes: int
    micro_batch: int
    """Samples."""
    accumulate: int
    fast: Sharding
    slow: Sharding
    published: tuple[float, float]
    """Throughput of `fast` over that of `slow`: the least and the largest that are published."""
    source: str
    recompute: bool = True
    """Whether blocks are recomputed as a whole."""


@dataclass(frozen=True)
class Paper:
    """Hardware with the source of each constant, and claims."""

    name: str
    hardware: Hardware
    """`inter_link_bytes_per_s` is a GPU's share of its node's network cards."""
    sources: Mapping[str, str]
    """By field of `hardware` that is not the table's: where it comes from. (fm): from memory of the paper,
    not looked up.
    """
    claims: tuple[Claim, ...]
    other_networks_gbit_per_s: tuple[int, ...] = field(default=())
    """Networks of a node that are simulated as well, where it is not known for sure which one the paper had.
    """
