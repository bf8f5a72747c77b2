"""A ring of ranks in which shards rotate: each is used while the next one is in flight.

A round yields every rank's shard, this rank's own included; sums of gradients rotate with it. `exchange`
sends to any distance. On an accelerator hops run on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from memtune.deferred_init import Piece
from memtune.device import streams

_OPS = torch.ops.memtune


@dataclass(eq=False)
class Ring:
    """The ranks among which a weight rotates, in the order of its shards."""

    group: str
    ranks: int
    rank: int
    in_place: bool
    mesh: DeviceMesh | None = None
    """None if weights stay plain tensors, as while a step is recorded."""
    _stream: torch.Stream | None = field(default=None, repr=False)

    @property
    def piece(self) -> Piece:
        """Position of this rank's shard in a weight."""
        return Piece(0, self.ranks, self.rank)

    def owner(self, hop: int) -> int:
        """Return the rank whose shard this rank holds after `hop` hops of a round."""
        return (self.rank - hop) % self.ranks

    def send(self, shard: Tensor) -> Hop:
        """Start sending `shard` to the next rank and receiving the shard of the rank before."""
        # Allocated on the compute stream, which reads it later; the ring's stream waits for that stream
        # first.
        arriving = torch.empty_like(shard)
        return self._exchange(
            shard, arriving, lambda: _OPS.send_next_into_(arriving, shard, self.group, self.ranks)
        )

    def exchange(self, sent: Tensor | None, arriving: Tensor | None, distance: int) -> Hop:
        """Start sending `sent` to the rank at `distance`, and receiving from the rank as far before into
        `arriving`.

        Either may be None, if there is no message in that direction.
        """
        return self._exchange(
            sent,
            arriving,
            lambda: _OPS.shift_into_(arriving, sent, self.group, distance % self.ranks, self.ranks),
        )

    def _exchange(self, sent: Tensor | None, arriving: Tensor | None, pass_on: Callable[[], None]) -> Hop:
        here = arriving if sent is None else sent
        # No message in either direction in this round.
        if here is None:
            return Hop(None, None, None)
        # Made at the first hop: the device is that of its tensors.
        self._stream = self._stream or streams.new_stream(here.device)
        # The current stream has computed the sent tensor, and may still read the receive buffer's memory.
        streams.wait_current(self._stream, here.device)
        with streams.on(self._stream):
            pass_on()
        # The hop references both tensors: freed earlier, the allocator could give their memory to the compute
        # stream.
        return Hop(sent, arriving, streams.end_of(self._stream))


@dataclass(frozen=True, eq=False)
class Hop:
    """A message in flight; holds the sent tensor until the send is complete."""

    sent: Tensor | None
    arriving: Tensor | None
    done: torch.Event | None

    def arrived(self) -> Tensor:
        """Wait, and return the received tensor; this hop must receive one."""
        self.wait()
        assert self.arriving is not None
        return self.arriving

    def wait(self) -> None:
        """Wait until send and receive are complete."""
        if self.done is not None:
            streams.wait(self.done)


class RingRound:
    """The shards of one weight in the order in which they pass this rank, each returned while the next is in
    flight.

    Args:
        ring: The ring of ranks.
        home: This rank's own shard; in place, every shard is written into it.
        prefetch: Begin with the shard of the rank before and end with the own one (rule 2), instead of
            beginning with the own one.
    """

    def __init__(self, ring: Ring, home: Tensor, *, prefetch: bool) -> None:
        self._ring, self._home, self._hop = ring, home, None
        # In place the own shard is overwritten, so one more hop must return it.
        self._left = ring.ranks if ring.in_place else ring.ranks - 1
        if prefetch:
            self.next()

    def next(self) -> Tensor:
        """Return the next shard; the caller must first free the one before."""
        held = self._arrived()
        if self._left:
            self._left -= 1
            # Sent before it is used: the hop overlaps with this rank's own compute.
            self._hop = self._ring.send(held)
        return held

    def finish(self) -> None:
        """Restore the own shard if the ring is in place."""
        self._arrived()

    _hop: Hop | None

    def _arrived(self) -> Tensor:
        hop, self._hop = self._hop, None
        if hop is None:
            return self._home
        if not self._ring.in_place:
            return hop.arrived()
        # `.data` does not change the version counter: autograd has saved the tensor, whose value is restored
        # before backward uses it.
        self._home.data.copy_(hop.arrived())
        return self._home


class RingSums:
    """The sums of a shard's gradient as they pass this rank (rule 2).

    Args:
        ring: The ring of ranks.
        mean: Divide the sum of the own shard by the number of ranks.
    """

    def __init__(self, ring: Ring, *, mean: bool = True) -> None:
        self._ring, self._left, self._mean = ring, ring.ranks, mean
        self._hop: Hop | None = None

    def next(self) -> Tensor | None:
        """Return the received sum for the current shard; None if this rank starts it."""
        hop, self._hop = self._hop, None
        return None if hop is None else hop.arrived()

    def add(self, sums: Tensor) -> Tensor:
        """Send `sums`, with this rank's part, to the next rank; the last one is this rank's shard."""
        self._left -= 1
        if self._left:
            self._hop = self._ring.send(sums)
        elif self._mean:
            sums.div_(self._ring.ranks)
        return sums
