"""Policies of saved tensors: the form in which a tensor that autograd saves waits for backward.

A policy declares its hops: the operators of the seam that pack and unpack a storage, the resources that they
use, and tier and bytes of the packed form. The activation table calls the operators, and the pass
(`activations.offload.activation_offload_pass`) is derived from the declaration. Two policies have no hops:
one keeps a tensor, the other drops it and runs the region's forward again
(`activations.recompute.recompute_pass`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from memtune.program.step import I64, U8, Resource, Tier

HEADER_BYTES: Final = 8
"""Least value and step of a compressed group, float32 each."""
ALIGNMENT_BYTES: Final = 16
_STATISTICS: Final = 8
"""Tensors of at most this part of a region's largest input are statistics: means, norms, log-sum-exps."""


@dataclass(frozen=True)
class Hop:
    """One conversion or copy of a storage, and the one that reverses it."""

    pack: str
    """Operator of the seam, as in `Step.names`."""
    unpack: str
    pack_on: Resource
    unpack_on: Resource
    tier: Tier
    """Memory of the packed form."""
    is_copy: bool = True
    """It runs on a stream of its own and holds its source until it is complete. False: in compute's order."""

    def packed_bytes(self, n_bytes: I64, float_bytes: U8) -> I64:
        """Return (k,) bytes of the packed form of storages."""
        return n_bytes

    def pack_traffic(self, n_bytes: I64, packed: I64) -> I64:
        """Return (k,) bytes that `pack` and `unpack` move: over the link, or read and written."""
        return n_bytes if self.is_copy else n_bytes + packed

    def accepts(self, float_bytes: U8) -> npt.NDArray[np.bool_]:
        """Return (k,) whether it packs storages of this `Storages.float_bytes`."""
        return np.ones(len(float_bytes), bool)

    def least_bytes(self, min_bytes: int, largest_input: int) -> int:
        """Return the smallest storage that it packs in a region with inputs up to `largest_input` bytes."""
        return max(min_bytes, 1)  # empty tensors have nothing to copy


@dataclass(frozen=True)
class Compression(Hop):
    """Groups of integers between the least and the largest value of each (`csrc/quant/groups.inl`)."""

    pack: str = "memtune.compress.default"
    unpack: str = "memtune.decompress.default"
    pack_on: Resource = Resource.COMPUTE
    unpack_on: Resource = Resource.COMPUTE
    tier: Tier = Tier.DEVICE
    is_copy: bool = False
    bits: int = 8
    group: int = 256
    at_random: bool = True
    """Round at random, so that the mean over seeds is the value; else to the nearest."""

    def packed_bytes(self, n_bytes: I64, float_bytes: U8) -> I64:
        """Return header and integers of all groups."""
        numel = n_bytes // float_bytes
        codes = numel if self.bits == 8 else (numel + 1) // 2
        whole: I64 = HEADER_BYTES * ((numel + self.group - 1) // self.group) + codes
        return (whole + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    def accepts(self, float_bytes: U8) -> npt.NDArray[np.bool_]:
        """Return True for floating-point numbers of 16 and 32 bits: indices, masks and float64 stay exact."""
        return float_bytes > 0

    def least_bytes(self, min_bytes: int, largest_input: int) -> int:
        """Exclude statistics: they have few bytes, and an error in one changes a whole row."""
        return max(min_bytes, largest_input // _STATISTICS + 1)


@dataclass(frozen=True)
class SavedTensorPolicy:
    """Form of a saved tensor between forward and backward."""

    name: str
    hops: tuple[Hop, ...] = ()
    """In the order of forward; backward reverses them."""
    runs_again: bool = False
    """Nothing is packed: the region's forward runs again."""
    is_exact: bool = True

    @cached_property
    def spills(self) -> bool:
        """True if a storage leaves host memory for SSD."""
        return any(hop.tier is Tier.SSD for hop in self.hops)


TO_HOST: Final = Hop(
    "memtune.to_host.default",
    "memtune.to_device.default",
    Resource.DEVICE_TO_HOST,
    Resource.HOST_TO_DEVICE,
    Tier.HOST,
)
TO_SSD: Final = Hop(
    "memtune.to_ssd.default", "memtune.from_ssd.default", Resource.SSD_WRITE, Resource.SSD_READ, Tier.SSD
)
KEEP: Final = SavedTensorPolicy("keep")
RECOMPUTE: Final = SavedTensorPolicy("recompute", runs_again=True)
OFFLOAD: Final = SavedTensorPolicy("offload", (TO_HOST,))
SPILL: Final = SavedTensorPolicy("spill", (TO_HOST, TO_SSD))


def compress(bits: int, group: int, *, at_random: bool) -> SavedTensorPolicy:
    """Return the policy that compresses floating-point storages on the device."""
    hop = Compression(bits=bits, group=group, at_random=at_random)
    return SavedTensorPolicy("compress", (hop,), is_exact=False)
