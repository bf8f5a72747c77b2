"""A ring of ranks round which shards go, each used while the next is on its way.

A round gives this rank every rank's shard, its own among them; sums travel beside it. `exchange` sends further than to the next
rank. On CUDA hops have a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from memtune.runtime.deferred import Piece

_OPS = torch.ops.memtune


@dataclass(eq=False)
class Ring:
    """The ranks that a weight goes round, in the order of its shards."""

    group: str
    ranks: int
    rank: int
    in_place: bool
    mesh: DeviceMesh | None = None
    """None where weights stay plain tensors: while a step is recorded."""
    _stream: torch.cuda.Stream | None = field(default=None, repr=False)

    @property
    def piece(self) -> Piece:
        """This rank's shard of a weight."""
        return Piece(0, self.ranks, self.rank)

    def send(self, shard: Tensor) -> Hop:
        """Begin to pass `shard` on and to receive the one of the rank before."""
        arriving = torch.empty_like(shard)
        return self._beside(shard, arriving, lambda: _OPS.send_next_into_(arriving, shard, self.group, self.ranks))

    def exchange(self, sent: Tensor | None, arriving: Tensor | None, distance: int) -> Hop:
        """Begin to pass `sent` to the rank `distance` on, and to receive from the one as far before into `arriving`.

        Either may be None: nothing goes that way.
        """
        return self._beside(
            sent, arriving, lambda: _OPS.shift_into_(arriving, sent, self.group, distance % self.ranks, self.ranks)
        )  # fmt: skip

    def _beside(self, sent: Tensor | None, arriving: Tensor | None, pass_on: Callable[[], None]) -> Hop:
        here = arriving if sent is None else sent
        if here is None:
            return Hop(None, None, None)
        if here.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(here.device)
            self._stream.wait_stream(torch.cuda.current_stream(here.device))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            pass_on()
            done = None if self._stream is None else self._stream.record_event()
        return Hop(sent, arriving, done)


@dataclass(frozen=True, eq=False)
class Hop:
    """Something on its way; what is sent is held until it has left."""

    sent: Tensor | None
    arriving: Tensor | None
    done: torch.cuda.Event | None

    def arrived(self) -> Tensor:
        """What another rank has sent; this one was to receive something."""
        self.wait()
        assert self.arriving is not None
        return self.arriving

    def wait(self) -> None:
        """Until all has left and arrived."""
        if self.done is not None:
            self.done.wait()


class Round:
    """The shards of one weight in the order in which they pass this rank, each given out while the next is on its way.

    Args:
        ring: Whom they pass.
        home: The own shard; in place it is what every shard is written into.
        ahead: Begin with the one of the rank before and end with the own (rule 2), instead of beginning with the own.
    """

    def __init__(self, ring: Ring, home: Tensor, *, ahead: bool) -> None:
        self._ring, self._home, self._hop = ring, home, None
        self._left = ring.ranks if ring.in_place else ring.ranks - 1
        if ahead:
            self.next()

    def next(self) -> Tensor:
        """The next shard; the caller lets go of the one before first."""
        held = self._arrived()
        if self._left:
            self._left -= 1
            self._hop = self._ring.send(held)
        return held

    def finish(self) -> None:
        """In place, bring the own shard home."""
        self._arrived()

    _hop: Hop | None

    def _arrived(self) -> Tensor:
        hop, self._hop = self._hop, None
        if hop is None:
            return self._home
        if not self._ring.in_place:
            return hop.arrived()
        self._home.data.copy_(hop.arrived())  # unseen by autograd, which has saved it: it is home again when that is used
        return self._home


class Sums:
    """The sums of a shard's gradient as they pass this rank (rule 2).

    Args:
        ring: Whom they pass.
        mean: Divide what comes home by the ranks.
    """

    def __init__(self, ring: Ring, *, mean: bool = True) -> None:
        self._ring, self._left, self._mean = ring, ring.ranks, mean
        self._hop: Hop | None = None

    def next(self) -> Tensor | None:
        """The sum that has come for the shard at hand; None where this rank begins it."""
        hop, self._hop = self._hop, None
        return None if hop is None else hop.arrived()

    def add(self, sums: Tensor) -> Tensor:
        """Pass `sums` on, to which this rank has added its part; the last is the own shard's, and stays."""
        self._left -= 1
        if self._left:
            self._hop = self._ring.send(sums)
        elif self._mean:
            sums.div_(self._ring.ranks)
        return sums
