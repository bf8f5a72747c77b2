"""Published measurements of a paper on sharded training, with hardware and settings: plain data, recorded
before the first comparison.
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
    """One setting of a paper: the faster and the slower technique, and the ratio."""

    name: str
    shape: Shape
    nodes: int
    micro_batch: int
    """Samples per micro-batch."""
    accumulate: int
    fast: Sharding
    slow: Sharding
    published: tuple[float, float]
    """Throughput of `fast` over that of `slow`: the smallest and the largest published."""
    source: str
    recompute: bool = True
    """True if blocks are recomputed in full."""


@dataclass(frozen=True)
class Paper:
    """Hardware with the source of each constant, and claims."""

    name: str
    hardware: Hardware
    """`inter_link_bytes_per_s` is a GPU's share of its node's network cards."""
    sources: Mapping[str, str]
    """Source of each field of `hardware` that is not the table's. (fm): from memory of the paper, not looked
    up.
    """
    claims: tuple[Claim, ...]
    other_networks_gbit_per_s: tuple[int, ...] = field(default=())
    """Node networks that are simulated in addition, if the paper's network is uncertain."""
