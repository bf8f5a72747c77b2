"""Replicas behind one link to the host bring weights up in a coordinated way: different layers each, or one copy at a time.

The weights of some blocks come and go (`runtime.store`); their gradients are DDP's, in buckets on the device, and go down with
all others in the optimizer's step. Who swaps what and when is decided here: by this rank's place behind the link.
"""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.residency import window
from memtune.runtime.context import Context
from memtune.runtime.host_optimizer import HostOptimizer
from memtune.runtime.link_token import LinkToken
from memtune.runtime.nodes import ranks_per_node
from memtune.runtime.ranks import are_there
from memtune.runtime.store import ParameterStore


def swapped_blocks(blocks: int, stride: int, place: int) -> tuple[int, ...]:
    """The blocks that a rank swaps whose place behind the link is `place`: one in `stride`.

    The first rank has the last of every `stride`, so where they do not divide the blocks it has the fewest, and the largest peak.
    """
    return tuple(range((stride - 1 - place) % stride, blocks, stride))


def place_of(rank: int, node_ranks: int, group: int) -> int:
    """A rank's place among the `group` neighbours on its node that share a link."""
    return rank % node_ranks % group


class Orchestrated:
    """Makes some blocks' weights come and go, on every rank of `context` as its place says.

    Args:
        context: Its model, DDP's by now; its optimizer moves to the host.
        group: Ranks behind one link.
        stride: One block in so many is swapped.
        slots: Blocks of the window, the one that comes in counted.
        disjoint: Ranks of a group swap different blocks.
        slot_bytes: With these, a rank holds the link's token while it copies a piece of so many bytes; 0: no token.
    """

    def __init__(
        self, context: Context, *, group: int, stride: int, slots: int, disjoint: bool, slot_bytes: int
    ) -> None:  # fmt: skip
        place = place_of(context.rank, ranks_per_node(), group) if disjoint else 0
        self.blocks = swapped_blocks(len(context.blocks), stride, place)
        self._slot_bytes = slot_bytes
        self._token = _token(context, group) if slot_bytes and are_there(context.model) else None
        if self._token is not None:
            context.undo.callback(self._token.close)
        self._device = context.device
        self._store = ParameterStore(
            context, window(len(context.blocks), slots), HostOptimizer(context), early=False, only=frozenset(self.blocks),
            landing=False, copy=self._copy if slot_bytes else None,
        )  # fmt: skip

    def _copy(self, there: Tensor, host: Tensor) -> None:
        """In pieces, each while this rank holds the token; `host` is complete, so the link is all that is waited for."""
        there, host = there.view(-1), host.view(-1)
        step = max(self._slot_bytes // host.element_size(), 1)
        for start in range(0, host.numel(), step):
            with nullcontext() if self._token is None else self._token.turn():
                torch.ops.memtune.copy_to_device_(there[start : start + step], host[start : start + step])
                if there.is_cuda and self._token is not None:  # it is over when the token goes on
                    torch.cuda.current_stream(self._device).synchronize()

    def check(self) -> dict[str, Any]:
        """What is swapped, and how long the token was waited for.

        Raises:
            ApplyError: Weights are on the device between two steps, or state of the optimizer is.
        """
        token = {} if self._token is None else {"turns": self._token.turns, "waited_s": round(self._token.waited_s, 6)}
        return self._store.check() | {"swapped_blocks": list(self.blocks)} | token


def _token(context: Context, group: int) -> LinkToken:
    """The token of this rank's link, made by the first rank behind it."""
    node = ranks_per_node()
    place, ranks = place_of(context.rank, node, group), context.ranks
    first = context.rank - place
    places = min(group, node - first % node, ranks - first)
    path = LinkToken.create(places) if place == 0 else None
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, (socket.gethostname(), None if path is None else str(path)))
    host, name = found[first]
    try:
        if host != socket.gethostname() or name is None or not os.path.exists(name):
            raise ApplyError(
                f"Ranks {first} and {context.rank} do not share memory, so they cannot share a token.",
                evidence=f"They run on {host} and {socket.gethostname()}.",
                fix="a smaller group, or offload: {states: {kind: orchestrated, mode: disjoint}}", code="MT364",
            )  # fmt: skip
        return LinkToken(Path(name), place, places)
    finally:
        dist.barrier()
        if path is not None:
            path.unlink(missing_ok=True)  # all that share it have it open
