"""Point-to-point messages between hosts of ranks that multiplex stages.

Devices of a commodity server cannot reach each other, so messages go through host memory, where a stage's
arguments wait for backward anyway.

Rule 1. The D2H copy of a tensor starts when it is ready. When the next copy starts, or the use ends, it is
  finished: the device tensor is freed and the message is sent.
Rule 2. Receives are posted when a use begins.
Rule 3. The sender holds the messages of one use until the end of its next use. By then all have been
  received, because what this rank ran next depends on them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.device import accelerator
from memtune.runtime import HOST, count_collective, mark, page_locked, tier, transfer


class HostMessages:
    """Sends and receives of one rank.

    Args:
        group: Process group whose backend sends host memory.
        count: Called with the bytes of each message.
    """

    def __init__(self, group: dist.ProcessGroup, count: Callable[[int], None]) -> None:
        self._group, self._count = group, count
        self._in_flight: tuple[Tensor, Tensor, int, int] | None = None
        """(device tensor, host tensor, destination rank, tag) of the D2H copy in flight."""
        self._sent: list[tuple[dist.Work | None, Tensor]] = []
        self._sent_before: list[tuple[dist.Work | None, Tensor]] = []
        self._posted: dict[int, tuple[dist.Work | None, Tensor]] = {}

    def post(self, like: Tensor, rank: int, tag: int) -> None:
        """Post a receive of a tensor like `like` from `rank`."""
        with tier(HOST):
            host = page_locked(
                lambda locked: torch.empty(like.shape, dtype=like.dtype, pin_memory=locked),
                # Pinned, so that the H2D copy that follows is asynchronous.
                wanted=accelerator.is_present(),
            )
        self._posted[tag] = dist.irecv(host, group=self._group, group_src=rank, tag=tag), host

    def received(self, tag: int) -> Tensor:
        """Wait for the message `tag` and return it, in host memory."""
        work, host = self._posted.pop(tag)
        if work is not None:
            work.wait()
        return host

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Start sending `tensor`, on the device, to `rank`."""
        self.finish_copy()
        host = torch.ops.memtune.to_host(tensor)
        mark(host, HOST)
        self._in_flight = tensor, host, rank, tag

    def finish_copy(self) -> None:
        """Finish the D2H copy in flight and send it."""
        if self._in_flight is None:
            return
        (_, host, rank, tag), self._in_flight = self._in_flight, None
        transfer.finish(host)
        self._count(host.nbytes)
        count_collective(self._group, host.nbytes)
        # Sends keep their host memory in this list; freed earlier, the message would be overwritten.
        self._sent.append((dist.isend(host, group=self._group, group_dst=rank, tag=tag), host))

    def end_use(self) -> None:
        """Finish a use: wait for the messages of the use before it."""
        self.finish_copy()
        _wait(self._sent_before)
        self._sent_before, self._sent = self._sent, []

    def end_step(self) -> None:
        """Wait for all messages."""
        _wait(self._sent_before)
        _wait(self._sent)
        self._sent_before, self._sent = [], []

    def abandon(self) -> None:
        """Forget all messages, after a step failed on any rank."""
        self._in_flight, self._sent, self._sent_before, self._posted = None, [], [], {}


def _wait(sent: list[tuple[dist.Work | None, Tensor]]) -> None:
    for work, _ in sent:
        if work is not None:
            work.wait()
