"""Parameter offload by pages, to permanent frames of the device (Angel-PTM).

Frames are allocated once, so training allocates nothing for weights. A parameter is contiguous in host memory
and in frames (`offload.core.parameter_layout`); a page that is loaded evicts the page that was in its frame.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from memtune.offload.core import (
    GatheredBlocks,
    OffloadedParameter,
    Pages,
    Piece,
    adopt_together,
    place_in,
    put_back,
    restore_together,
    runs,
    set_data,
)
from memtune.offload.parameters import OffloadedBlocks, Prefetched, copy_together
from memtune.runtime import HOST, SSD, Context, mark, memory_of, page_locked, tier, tier_of, transfer


class PagedUnits:
    """Pages of the parameters `blocks`, in frames whose memory is never freed.

    Args:
        context: `undo` gives each parameter its own memory again.
        blocks: The parameters.
        pages: Their layout.

    Attributes:
        prefetched: Pages in copies.
        moment: The moment of the step that runs, or that ran last.
    """

    def __init__(self, context: Context, blocks: OffloadedBlocks, pages: Pages) -> None:
        self._blocks, self.of_block, self.moment = blocks, pages.of_block, -1
        self.prefetched = Prefetched(context.device)
        mine = blocks.parameters
        self._in_frames = in_frames(context, mine, blocks.hosts, pages, blocks.gathered)
        blocks.hosts = self._in_frames.hosts
        self._owners = {each: OffloadedParameter(each, blocks.hosts[each]) for each in mine}
        for each in self._owners.values():
            each.free()
        self._of_block = [[self._owners[each] for each in block] for block in blocks.of_block]
        on = [[span.page for span in pages.spans(index)] for index in range(len(mine))]
        self._on_page = [
            [self._owners[each] for each, its in zip(mine, on, strict=True) if page in its]
            for page in range(pages.count)
        ]
        self.resident: set[int] = set()
        self._in_frame: dict[int, int] = {}  # by frame, the page that was loaded last
        self._spare: InFrames | None = None
        self._written: set[OffloadedParameter] = set()  # by the user, since the last `swap`
        self.loaded_bytes = 0
        # Frames are never freed, so the allocator needs no record of the gather's stream.
        blocks.load_before_gathers(self.load_block, lambda block: [])

    def load_block(self, block: int) -> None:
        """Make the pages of `block` resident for the compute stream."""
        pages = self.of_block[block]
        self.prefetched.wait_for(pages, self.resident)
        self.prefetch(pages)
        restore_together(self._of_block[block])

    @torch.no_grad()
    def prefetch(self, units: Iterable[int]) -> None:
        """Load those of the pages `units` that are in no frame."""
        missing = [unit for unit in units if unit not in self.resident]
        if not missing:
            return
        for page in missing:
            self._adopt(self._on_page[page])
            frame = self._in_frames.pages.frame[page]
            self._evict(self._in_frame.get(frame, page))
            self._in_frame[frame] = page
        if self._blocks.gathered is not None:
            # FSDP2's gather may still read the pages that are overwritten.
            self._blocks.gathered.wait_for_reads()
        # Of all missing pages at once: adjacent ones are one copy.
        pieces = self._in_frames.pieces(missing)
        copy_together(pieces)
        self.loaded_bytes += sum([piece.host.nbytes for piece in pieces])
        self.resident.update(missing)

    def free(self, units: Iterable[int]) -> None:
        """Have the parameters on the pages `units` show their host copies."""
        for page in list(units):
            self._evict(page)

    def _evict(self, page: int) -> None:
        self.resident.discard(page)
        for each in self._on_page[page]:
            each.free()

    def read_ahead(self) -> None:
        """Do nothing: all pages are in host memory."""

    def step_begins(self) -> None:
        """Free all pages, and take what the user has written, before the optimizer changes the weights."""
        self.free(self.resident)
        self._adopt(self._owners.values())

    def _adopt(self, parameters: Iterable[OffloadedParameter]) -> None:
        self._written.update(adopt_together(parameters))

    # -- two host memories (`offload.optimizer.async_updates`) -----------------------------------------------

    @property
    def hosts(self) -> dict[nn.Parameter, Tensor]:
        """The place of each parameter in the host's pages."""
        return self._blocks.hosts

    def double(self) -> dict[nn.Parameter, Tensor]:
        """Add a second host memory; return each trained parameter's place in it, by its host copy."""
        self._spare = self._in_frames.with_other_host_memory()
        return {held: self._spare.hosts[parameter] for parameter, held in self._blocks.trained.items()}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the two host memories: later loads copy from the other one."""
        # The frames hold old weights now, so every page is loaded again.
        self.step_begins()
        assert self._spare is not None
        spare, self._spare = self._spare, self._in_frames
        for parameter, each in self._owners.items():
            # A sweep writes all trained weights to the other memory, but not frozen ones.
            if each in self._written and parameter not in self._blocks.trained:
                spare.hosts[parameter].copy_(each.host)
            each.move_host(spare.hosts[parameter])
        self._written.clear()
        self._in_frames, self._blocks.hosts = spare, spare.hosts

    def resident_bytes(self) -> int:
        """Return 0: frames are permanent."""
        return 0


class InFrames(NamedTuple):
    """Parameters on pages, host memory and frames."""

    pages: Pages
    frames: Tensor
    memory: Tensor
    """All pages, on the host."""
    hosts: dict[nn.Parameter, Tensor]
    """The place of each parameter in `memory`."""

    def pieces(self, wanted: list[int]) -> list[Piece]:
        """Return the copies for `wanted` pages; pages adjacent on both sides are one copy."""
        frame, filled, size = self.pages.frame, self.pages.filled, self.pages.page_bytes
        found = []
        for first, last in zip(
            *(each.tolist() for each in runs(self.pages, np.sort(np.asarray(wanted, np.int32)))), strict=True
        ):
            n_bytes = (last - first) * size + filled[last]
            there, host = frame[first] * size, first * size
            found.append(
                Piece(self.frames[there : there + n_bytes], self.memory[host : host + n_bytes], in_frame=True)
            )
        return found

    def with_other_host_memory(self) -> InFrames:
        """Return the same with other host memory, of the same values."""
        with tier(HOST):
            made = page_locked(
                lambda locked: torch.empty_like(self.memory, pin_memory=locked),
                wanted=transfer.pins(self.frames.device),
            )
            memory = made.copy_(self.memory)
        mark(memory, HOST)
        hosts = {
            p: place_in(memory, host, int(host.storage_offset()) * host.element_size())
            for p, host in self.hosts.items()
        }
        return self._replace(memory=memory, hosts=hosts)


@torch.no_grad()
def in_frames(
    context: Context,
    parameters: Sequence[nn.Parameter],
    hosts: dict[nn.Parameter, Tensor],
    pages: Pages,
    gathered: GatheredBlocks | None = None,
) -> InFrames:
    """Move `parameters` into frames, and their host copies into pages; both stay the same Python objects.

    Args:
        context: `undo` gets the reverse.
        parameters: In the order of `pages`.
        hosts: Their host copies.
        pages: Place of each one.
        gathered: Given where FSDP2 shards them; their rows are moved then.
    """
    with tier(HOST):
        n_bytes = pages.count * pages.page_bytes
        memory = page_locked(
            lambda locked: torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=locked),
            wanted=transfer.pins(context.device),
        )
    mark(memory, HOST)
    if gathered is not None:
        memory.zero_()  # FSDP2 pads rows with zeros
    in_pages = dict(hosts)  # complete from the start: undo reads it even if a copy below raises
    at_rest = context.placement.at_rest.intersection(parameters)
    own = {} if gathered is not None else {p: p.detach() for p in parameters if p not in at_rest}
    context.undo.callback(_separate, parameters, in_pages, own, gathered)
    for parameter, page, at in zip(parameters, pages.first, pages.offset, strict=True):
        place = place_in(memory, memory_of(parameter), page * pages.page_bytes + at)
        # The earlier host memory is freed at once.
        place.copy_(hosts.pop(parameter))
        in_pages[parameter] = place
        if parameter in at_rest and gathered is None:
            set_data(parameter, place)
        held = context.placement.optimizer_params.get(parameter)
        if held is not None and tier_of(held) != SSD:
            held.data = place
    rows = (
        {}
        if gathered is None
        else {p: torch.empty_like(gathered.rows_of(p), device="meta") for p in parameters}
    )
    # Free all parameters before frames are allocated, so that the device never holds both.
    for parameter in parameters:
        if gathered is None:
            set_data(parameter, parameter.detach().new_empty(0))
            if parameter in own:
                own[parameter].untyped_storage().resize_(0)
        else:
            gathered.rows_of(parameter).untyped_storage().resize_(0)
    context.placement.at_rest -= at_rest
    # Zeros: FSDP2 gathers padded rows, and pads with zeros.
    frames = torch.zeros(pages.frame_bytes, dtype=torch.uint8, device=context.device)
    for parameter, page, at in zip(parameters, pages.first, pages.offset, strict=True):
        there = pages.frame[page] * pages.page_bytes + at
        if gathered is None:
            set_data(parameter, place_in(frames, in_pages[parameter], there))
        else:
            gathered.put_rows(parameter, place_in(frames, rows[parameter], there))
    return InFrames(pages, frames, memory, in_pages)


def _separate(
    parameters: Sequence[nn.Parameter],
    hosts: dict[nn.Parameter, Tensor],
    own: dict[nn.Parameter, Tensor],
    gathered: GatheredBlocks | None,
) -> None:
    """Give each parameter its own memory again, with the host's values."""
    for parameter in parameters:
        if gathered is None and parameter in own:
            put_back(parameter, own[parameter], hosts[parameter])
        elif gathered is None:
            set_data(parameter, hosts[parameter])
        else:
            gathered.put_rows(parameter, torch.zeros_like(gathered.rows_of(parameter)))
            memory_of(parameter).copy_(hosts[parameter])
