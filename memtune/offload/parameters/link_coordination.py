"""Replicas behind one link to the host coordinate H2D copies: different blocks, or one at a time.

The weights of some blocks are offloaded (`offload.parameters.offloader`). Their gradients are DDP's, in
buckets on the device, and are offloaded with all others in the optimizer's step. The rank's place behind the
link decides what it swaps and when.
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

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune.device import accelerator, streams
from memtune.errors import ApplyError
from memtune.offload.optimizer import HostOptimizer
from memtune.offload.parameters.block_gradients import BlockGradients
from memtune.offload.parameters.block_units import BlockUnits, OffloadedBlocks
from memtune.offload.parameters.link_token import LinkToken
from memtune.offload.parameters.offloader import ParameterOffloader
from memtune.parallel.ranks import has_real_peers
from memtune.program import window_residency
from memtune.runtime import Context, ranks_per_node


def swapped_blocks(blocks: int, stride: int, place: int) -> tuple[int, ...]:
    """Return the blocks that the rank at `place` behind the link swaps: one in `stride`."""
    # The first rank has the last block of every `stride`, so where `stride` does not divide the number
    # of blocks it has the fewest, and the largest peak.
    return tuple(range((stride - 1 - place) % stride, blocks, stride))


def place_of(rank: int, node_ranks: int, group: int) -> int:
    """Return a rank's place among the `group` neighbours on its node that share a link."""
    return rank % node_ranks % group


class Orchestrated:
    """Offloads the weights of some blocks on every rank of `context`, chosen by the rank's place.

    Args:
        context: Its model is wrapped by DDP already; its optimizer moves to the host.
        group: Number of ranks behind one link.
        stride: One block in `stride` is swapped.
        slots: Blocks of the window, including the one that is loaded.
        disjoint: Ranks of a group swap different blocks.
        slot_bytes: Size of a piece of a copy, during which a rank holds the link's token; 0: no token.
    """

    def __init__(
        self, context: Context, *, group: int, stride: int, slots: int, disjoint: bool, slot_bytes: int
    ) -> None:
        # Otherwise all ranks swap the same blocks, and the token alone keeps their copies apart.
        place = place_of(context.placement.rank, ranks_per_node(), group) if disjoint else 0
        self.blocks = swapped_blocks(len(context.blocks), stride, place)
        self._slot_bytes = slot_bytes
        self._token = _token(context, group) if slot_bytes and has_real_peers(context.model) else None
        if self._token is not None:
            context.undo.callback(self._token.close)
        self._device = context.device
        modules = [context.model.get_submodule(name) for name in context.blocks]
        optimizer = HostOptimizer(context)
        members = [list(each.parameters()) if i in self.blocks else [] for i, each in enumerate(modules)]
        blocks = OffloadedBlocks(context, optimizer, members)
        # DDP reduces the gradients, and would not know the accumulators of exchanged parameters.
        units = BlockUnits(context, blocks, copy=self._copy if slot_bytes else None, keeps=True)
        gradients = BlockGradients(context, blocks, when_ready=False)
        residency = window_residency(len(context.blocks), slots)
        self._store = ParameterOffloader(context, residency, blocks, units, gradients, None, optimizer.check)

    def _copy(self, there: Tensor, host: Tensor) -> None:
        """Copy in pieces, each while this rank holds the token; `host` must be complete."""
        there, host = there.view(-1), host.view(-1)
        step = max(self._slot_bytes // host.element_size(), 1)
        for start in range(0, host.numel(), step):
            with nullcontext() if self._token is None else self._token.exclusive():
                torch.ops.memtune.copy_to_device_(there[start : start + step], host[start : start + step])
                if accelerator.has_streams(there.device) and self._token is not None:
                    # Copies are asynchronous; this one must have ended before the token is released.
                    streams.current(self._device).synchronize()

    def check(self) -> dict[str, Any]:
        """Return the swapped blocks and the time spent waiting for the token.

        Raises:
            ApplyError: Weights of swapped blocks are on the device between two steps, or the optimizer's
                state is.
        """
        token = (
            {}
            if self._token is None
            else {"times_held": self._token.times_held, "waited_s": round(self._token.waited_s, 6)}
        )
        return self._store.check() | {"swapped_blocks": list(self.blocks)} | token


def _token(context: Context, group: int) -> LinkToken:
    """Return the token of this rank's link; the first rank behind it creates the file."""
    placement = context.placement
    node = ranks_per_node()
    place, ranks = place_of(placement.rank, node, group), placement.world_size
    first = placement.rank - place
    places = min(group, node - first % node, ranks - first)
    path = LinkToken.create(places) if place == 0 else None
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, (socket.gethostname(), None if path is None else str(path)))
    # Ranks behind one link are on one node; a wrong `LOCAL_WORLD_SIZE` would pair ranks of two.
    host, name = found[first]
    try:
        if host != socket.gethostname() or name is None or not os.path.exists(name):
            raise ApplyError(
                f"Ranks {first} and {placement.rank} do not share memory, so they cannot share a token.",
                evidence=f"They run on {host} and {socket.gethostname()}.",
                fix="a smaller group, or offload: {states: {kind: orchestrated, mode: disjoint}}",
                code="MT364",
            )
        return LinkToken(Path(name), place, places)
    finally:
        # Also after an error: the first rank may remove the file only when all have tried to open it.
        dist.barrier()
        if path is not None:
            path.unlink(missing_ok=True)  # all that share it have it open
