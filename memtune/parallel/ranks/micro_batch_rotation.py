"""Micro-batch rotation: ranks that hold one model together run each rank's micro-batches, one at a time.

A rank's data, the micro-batch and the global batch thus mean the same with any number of such ranks: a config
divides the same samples, and a loader that gives every rank other samples stays correct.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memtune.device import accelerator
from memtune.errors import ApplyError
from memtune.runtime import HOST, seed_generators, tier, upload
from memtune.workload import map_leaves, map_tensors, to_device


class _TensorMeta:
    """Shape and dtype of another rank's tensor; no dataclass, which would count as a container."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Return uninitialized memory for the tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class RotatedBatch:
    """One micro-batch of one rank of the group."""

    owner: int
    """Rank in the group."""
    seed: int
    """Seed of the random numbers drawn while it runs."""
    batch: Any
    """With tensors on the owner, with `_TensorMeta` instead of tensors on other ranks."""


class MicroBatchRotation:
    """Distributes the micro-batches of the ranks of `group`.

    Args:
        group: The ranks that share layers.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, batches: Iterable[Any]) -> list[RotatedBatch]:
        """Return the micro-batches of all ranks, in one order on every rank; collective.

        Raises:
            ApplyError: The ranks provide different numbers of micro-batches.
        """
        mine = list(batches)
        # One seed per micro-batch: ranks that compute one together must draw the same dropout masks.
        seeds = torch.randint(2**62, (len(mine),)).tolist()
        like = [map_tensors(batch, _TensorMeta) for batch in mine]
        # `all_gather_object` pickles into CPU tensors, which the device ledger must not count.
        descriptions: list[Any] = [None] * self._group.size()
        with tier(HOST):
            dist.all_gather_object(descriptions, (seeds, like), group=self._group)
        counts = [len(theirs) for theirs, _ in descriptions]
        if len(set(counts)) > 1:
            raise ApplyError(
                "ranks that share layers provide different numbers of micro-batches for one step.",
                evidence=f"By rank: {', '.join(map(str, counts))}.",
                fix="the same number on every rank",
                code="MT391",
            )
        here = self._group.rank()
        return [
            RotatedBatch(owner, theirs[index], mine[index] if owner == here else batches_like[index])
            for index in range(len(mine))
            for owner, (theirs, batches_like) in enumerate(descriptions)
        ]

    def upload(self, rotated: RotatedBatch, device: torch.device) -> Any:
        """Return the micro-batch on `device`, broadcast by its owner, and seed the generators; collective."""
        # On every rank: all compute this micro-batch, with the same random numbers.
        seed_generators(rotated.seed)
        if rotated.owner == self._group.rank():
            here = upload(rotated.batch, device)
        else:
            empty = map_leaves(
                rotated.batch, lambda leaf: leaf.empty(device) if isinstance(leaf, _TensorMeta) else leaf
            )
            here = to_device(empty, device)
        map_tensors(here, lambda tensor: self._send(tensor, rotated.owner))
        return here

    def _send(self, tensor: Tensor, owner: int) -> None:
        if tensor.numel():
            dist.broadcast(
                tensor if tensor.is_contiguous() else tensor.contiguous(), group=self._group, group_src=owner
            )

    @contextmanager
    def own_numbers(self, device: torch.device) -> Iterator[None]:
        """Draw from the micro-batches' seeds inside; restore this rank's own generator state afterwards."""
        with ExitStack() as numbers:
            with tier(HOST):  # the generator's state is a host tensor, which the device ledger must not count
                numbers.enter_context(accelerator.fork_rng(device))
            yield
