"""Tensors between the host memories of ranks that take stages in turn.

Devices of a commodity server cannot reach each other, so what passes from stage to stage goes by way of the
host, where what a stage starts from waits for backward anyway. Three rules:

Rule 1. A tensor goes down as soon as it is there; when the next one goes down, or the stage's use ends, it
has arrived: the
        device lets go of it, and it is sent.
Rule 2. What a use receives, receives have been posted for when it begins.
Rule 3. The sender holds what it sent in one use until the end of its next one, by which all of it has been
received: what the
        rank runs next follows from it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.runtime import HOST, count_collective, mark, page_locked, tier, transfer


class Messages:
    """What one rank sends and receives.

    Args:
        group: Whose backend sends what is in host memory.
        count: Told the bytes of each message.
    """

    def __init__(self, group: dist.ProcessGroup, count: Callable[[int], None]) -> None:
        self._group, self._count = group, count
        self._leaving: tuple[Tensor, Tensor, int, int] | None = None
        """On the device, the host memory that it is on the way to, the rank that it is for, and its tag."""
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._sent_before: list[tuple[dist.Work | None, Tensor]] = []
        self._posted: dict[int, tuple[dist.Work | None, Tensor]] = {}

    def post(self, like: Tensor, rank: int, tag: int) -> None:
        """Rule 2: something like `like` will come from `rank`."""
        with tier(HOST):
            host = page_locked(
                lambda locked: torch.empty(like.shape, dtype=like.dtype, pin_memory=locked),
                wanted=torch.cuda.is_available(),
            )
        self._posted[tag] = dist.irecv(host, group=self._group, group_src=rank, tag=tag), host

    def received(self, tag: int) -> Tensor:
        """What was posted under `tag`, in host memory, once it is there."""
        work, host = self._posted.pop(tag)
        if work is not None:
            work.wait()
        return host

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Rule 1: `tensor`, on the device, goes to `rank`."""
        self.arrive()
        host = torch.ops.memtune.to_host(tensor)
        mark(host, HOST)
        self._leaving = tensor, host, rank, tag

    def arrive(self) -> None:
        """Rule 1: what is on its way to the host has arrived, and is sent."""
        if self._leaving is None:
            return
        (_, host, rank, tag), self._leaving = self._leaving, None
        transfer.finish(host)
        self._count(host.nbytes)
        count_collective(self._group, host.nbytes)
        self._sent.append((dist.isend(host, group=self._group, group_dst=rank, tag=tag), host))

    def use_ends(self) -> None:
        """Rule 3."""
        self.arrive()
        _wait(self._sent_before)
        self._sent_before, self._sent = self._sent, []

    def step_ends(self) -> None:
        """Nothing is on its way any more."""
        _wait(self._sent_before)
        _wait(self._sent)
        self._sent_before, self._sent = [], []

    def abandon(self) -> None:
        """The step has failed, here or elsewhere: nobody waits for anything."""
        self._leaving, self._sent, self._sent_before, self._posted = None, [], [], {}


def _wait(sent: list[tuple[dist.Work | None, Tensor]]) -> None:
    for work, _ in sent:
        if work is not None:
            work.wait()
