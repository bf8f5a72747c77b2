"""Ranks that work on one micro-batch at a time: each brings its own, and they take turns.

So a rank's data, the micro-batch and the global batch mean what they mean without such ranks, whatever their number: a config
divides the same samples, and a loader that gives every rank other samples stays right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from memtune.batches import map_leaves, map_tensors, to_device
from memtune.errors import ApplyError
from memtune.runtime.loop import upload
from memtune.runtime.tiers import HOST, tier


class _Like:
    """A tensor that another rank has; no dataclass, which would count as a container."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Turn:
    """One micro-batch of one rank of the group."""

    owner: int
    """Rank in the group."""
    seed: int
    """Of what is drawn while it runs."""
    batch: Any
    """With tensors on the owner, with `_Like` in their place elsewhere."""


class Turns:
    """Hands the micro-batches of the ranks of `group` round.

    Args:
        group: The ranks that share layers.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def of(self, batches: Iterable[Any]) -> list[Turn]:
        """The micro-batches of all ranks, in one order on every rank.

        Raises:
            ApplyError: The ranks bring different numbers of micro-batches.
        """
        mine = list(batches)
        seeds = torch.randint(2**62, (len(mine),)).tolist()
        like = [map_tensors(batch, _Like) for batch in mine]
        said: list[Any] = [None] * self._group.size()
        with tier(HOST):
            dist.all_gather_object(said, (seeds, like), group=self._group)
        counts = [len(theirs) for theirs, _ in said]
        if len(set(counts)) > 1:
            raise ApplyError(
                "ranks that share layers bring different numbers of micro-batches to one step.",
                evidence=f"By rank: {', '.join(map(str, counts))}.", fix="the same number on every rank", code="MT391",
            )  # fmt: skip
        here = self._group.rank()
        return [
            Turn(owner, theirs[index], mine[index] if owner == here else batches_like[index])
            for index in range(len(mine))
            for owner, (theirs, batches_like) in enumerate(said)
        ]

    def upload(self, turn: Turn, device: torch.device) -> Any:
        """The micro-batch on `device`, sent by its owner; what is drawn from here on follows from its seed."""
        torch.manual_seed(turn.seed)
        if turn.owner == self._group.rank():
            here = upload(turn.batch, device)
        else:
            empty = map_leaves(turn.batch, lambda leaf: leaf.empty(device) if isinstance(leaf, _Like) else leaf)
            here = to_device(empty, device)
        map_tensors(here, lambda tensor: self._send(tensor, turn.owner))
        return here

    def _send(self, tensor: Tensor, owner: int) -> None:
        if tensor.numel():
            dist.broadcast(tensor if tensor.is_contiguous() else tensor.contiguous(), group=self._group, group_src=owner)

    @contextmanager
    def own_numbers(self, device: torch.device) -> Iterator[None]:
        """Inside, draws follow the turns; after it, this rank's own numbers go on where they were."""
        with ExitStack() as numbers:
            with tier(HOST):  # the state of the generator is no tensor of the device's
                numbers.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
            yield
