"""Digests of gradients, to compare two runs without two models or any full gradient in memory.

A rank digests the pieces of gradients that it holds, each when it is used: full ones, its shards, or those of
its stage. The digest of a gradient is the sum of the digests of its disjoint pieces, so one all-reduce of a
fixed size per step is all that ranks exchange, whichever of them hold which gradients. Of each gradient:

- a *hash*, which shows bitwise equality: two sums of the gradient's words times pseudo-random numbers of
  their positions, modulo 2^64 (multilinear hashing: Carter & Wegman 1979, JCSS 18; it detects accidents, not
  forgery);
- its norm;
- a *sketch*, a random projection to `BUCKETS` numbers that is the same in every run. The squared distance of
  two sketches equals that of the gradients on average, and is within a factor of two of it (Charikar et al.
  2002, count sketch, ICALP).

A file of all gradients would be exact, but as large as the model for each step.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from memtune.executors.gradient_record import BUCKETS, GradientRecord
from memtune.offload.core import OptimizerParameter
from memtune.runtime import Context, local, spent_as_none

_BLOCK = 1 << 16
"""Numbers, a multiple of BUCKETS, that are digested at a time."""
_WORDS: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16}
"""Words of gradients with fewer than four bytes per number; others are hashed as words of four bytes."""


@dataclass(frozen=True)
class Region:
    """Place of a piece in its full gradient: a box."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    """Shape of the full gradient."""

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield the contiguous runs of the piece in the flat full gradient as (first, length)."""
        dims = len(self.shape)
        # The innermost dimension that is cut: from there on inward the piece is contiguous.
        split = next((dim for dim in reversed(range(dims)) if self.shape[dim] != self.whole[dim]), 0)
        strides = [math.prod(self.whole[dim + 1 :]) for dim in range(dims)]
        first = sum(offset * stride for offset, stride in zip(self.offset, strides, strict=True))
        length = math.prod(self.shape[split:])
        for index in product(*(range(n) for n in self.shape[:split])):
            yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), length


class GradientSums:
    """Sums over pieces of one gradient."""

    def __init__(self) -> None:
        self.hash, self.digested = np.zeros(2, np.uint64), 0
        self.square, self.sketch = 0.0, np.zeros(BUCKETS)

    def add(self, data: Tensor, region: Region, *, sketch: bool = True) -> None:
        """Add a contiguous piece on the CPU; `sketch`: also to norm and sketch."""
        self.digested += data.numel()
        if data.is_complex():
            data = torch.view_as_real(data)
            region = Region((*region.offset, 0), (*region.shape, 2), (*region.whole, 2))
        flat, per = data.reshape(-1), max(data.itemsize // 4, 1)
        words = flat.view(torch.uint8).numpy().view(_WORDS.get(data.itemsize, np.uint32))
        at = 0
        for first, length in region.runs():
            while length:
                # By position in the full gradient, so that pieces of any cut add up to one hash.
                block, start = divmod(first, _BLOCK)
                n = min(length, _BLOCK - start)
                each = words[at * per : (at + n) * per].astype(np.uint64)
                factors = _factors(per)[:, start * per : (start + n) * per]
                with np.errstate(over="ignore"):
                    # An odd factor per block is invertible modulo 2^64, so no difference is lost.
                    self.hash += np.einsum("ij,j->i", factors, each) * np.uint64(_mixed(block) | 1)
                if sketch:
                    self._project(flat[at : at + n].double().numpy(), block, start)
                first, length, at = first + n, length - n, at + n

    def _project(self, values: npt.NDArray[np.float64], block: int, start: int) -> None:
        row, column = divmod(start, BUCKETS)
        rows = np.zeros((-(-(column + len(values)) // BUCKETS), BUCKETS))
        rows.reshape(-1)[column : column + len(values)] = values
        self.square += float(np.einsum("i,i->", values, values))
        sign = 1.0 if _mixed(block) & 2 else -1.0
        self.sketch += sign * (_signs()[row : row + len(rows)] @ rows)

    def record(self, shape: tuple[int, ...]) -> GradientRecord:
        """Return the digest of the gradient of shape `shape`, given all of its pieces."""
        return GradientRecord(
            sha256=hashlib.sha256(f"{shape}{self.hash.tolist()}".encode()).hexdigest(),
            elements=math.prod(shape),
            digested=self.digested,
            norm=math.sqrt(self.square),
            sketch=base64.b64encode(self.sketch.astype("<f8").tobytes()).decode(),
        )


@cache
def _factors(per: int) -> npt.NDArray[np.uint64]:
    """Return (2, _BLOCK × `per`) the factors of a block's words."""
    return np.random.default_rng(per).integers(0, 1 << 64, (2, _BLOCK * per), np.uint64)


@cache
def _signs() -> npt.NDArray[np.float64]:
    """Return (_BLOCK / BUCKETS,) the signs of a block's rows of BUCKETS numbers."""
    return np.random.default_rng(0).choice(np.array([-1.0, 1.0]), _BLOCK // BUCKETS)


def _mixed(number: int) -> int:
    """Return 64 pseudo-random bits of `number` (Steele et al. 2014, SplitMix, OOPSLA)."""
    mask = (1 << 64) - 1
    bits = (number + 1) * 0x9E3779B97F4A7C15 & mask
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
    return bits ^ bits >> 31


class GradientDigests:
    """Digests of the gradients of one step.

    Args:
        context: Context of the trained model; all ranks have parameters of the same names.
        shapes: Full shape of each parameter, by its name without DDP's prefix.
        sketches: Norms and sketches are computed, otherwise they are zero.
    """

    def __init__(
        self, context: Context, shapes: Mapping[str, Sequence[int]], *, sketches: bool = True
    ) -> None:
        self._named = {name.removeprefix("module."): p for name, p in context.model.named_parameters()}
        self._names = {parameter: name for name, parameter in self._named.items()}
        self._shapes = {name: tuple(shapes[name]) for name in self._named}
        self._placement, self._sketches = context.placement, sketches
        self._sums: dict[str, GradientSums] = {}

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Digest the gradient of the model's `parameter`, or this rank's shard of it."""
        name = self._names[parameter]
        if isinstance(gradient, DTensor) and any(each.is_partial() for each in gradient.placements):
            gradient = gradient.full_tensor()  # a collective: partial sums are so on all ranks
        data, whole = local(gradient).detach(), self._shapes[name]
        if data.is_sparse:
            data = data.to_dense()
        layout = self._layout(parameter, gradient)
        sums = self._sums.setdefault(name, GradientSums())
        if self._is_first(name, layout) and (region := _region(layout, whole)).shape == data.shape:
            sums.add(data.cpu().contiguous(), region, sketch=self._sketches)

    @spent_as_none()
    def add_rest(self) -> None:
        """Digest the gradients that are left for the step."""
        for name, parameter in self._named.items():
            chain = self._placement.param_chain(parameter)
            # The optimizer's own first: the model's parameter may show zeros for a gradient on the host.
            held = [*(each for each in chain if isinstance(each, OptimizerParameter)), *chain]
            gradient = next((each.grad for each in held if each.grad is not None), None)
            if gradient is not None and name not in self._sums and name not in self._placement.absent:
                self.add(parameter, gradient)

    def records(self, device: torch.device) -> dict[str, GradientRecord]:
        """Return the digest of every gradient, by name; all ranks must call it."""
        sums = [self._sums.get(name, GradientSums()) for name in self._named]
        if self._placement.world_size > 1:
            sums = _all_reduced(sums, device)
        named = zip(self._named, sums, strict=True)
        return {name: each.record(self._shapes[name]) for name, each in named if each.digested}

    def _layout(self, parameter: nn.Parameter, gradient: Tensor) -> DTensor | None:
        """Return the DTensor that is sharded as `gradient` is; None if it is full."""
        if isinstance(gradient, DTensor):
            return gradient
        sharded = [each for each in self._placement.param_chain(parameter) if isinstance(each, DTensor)]
        return next((each for each in reversed(sharded) if local(each).shape == gradient.shape), None)

    def _is_first(self, name: str, layout: DTensor | None) -> bool:
        """Return True if no earlier rank holds the same piece."""
        placement = self._placement
        remote, rank, parts = placement.remote_parameters, placement.rank, placement.model_parallel_size
        # A tied weight is on two stages; its owner digests it.
        if remote is not None and not remote.owns(name):
            return False
        if layout is None:
            return rank == 0 if remote is None else parts == 1 or rank < parts
        mesh = layout.device_mesh
        places = zip(mesh.get_coordinate() or (), layout.placements, strict=True)
        return rank % parts in mesh.mesh and not any(at for at, each in places if each.is_replicate())


def _region(layout: DTensor | None, whole: tuple[int, ...]) -> Region:
    """Return the place of this rank's piece of a gradient that is sharded as `layout`; None: it is full."""
    if layout is None:
        return Region((0,) * len(whole), whole, whole)
    shape, offset = compute_local_shape_and_global_offset(whole, layout.device_mesh, layout.placements)
    return Region(offset, shape, whole)


def _all_reduced(mine: Sequence[GradientSums], device: torch.device) -> list[GradientSums]:
    """Return the sums over all ranks."""
    exact = torch.tensor(
        [[*each.hash.view(np.int64).tolist(), each.digested] for each in mine], device=device
    )
    inexact = torch.tensor(
        np.array([[each.square, *each.sketch] for each in mine]), dtype=torch.float64, device=device
    )
    for each in (exact, inexact):
        dist.all_reduce(each)  # integers wrap modulo 2^64, as the hash does
    found = []
    for numbers, real in zip(exact.cpu().numpy(), inexact.cpu().numpy(), strict=True):
        sums = GradientSums()
        sums.hash, sums.digested = numbers[:2].view(np.uint64), int(numbers[2])
        sums.square, sums.sketch = float(real[0]), real[1:]
        found.append(sums)
    return found
