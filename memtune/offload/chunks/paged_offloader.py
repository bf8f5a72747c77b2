"""Parameter offload by pages, to permanent frames of the device (Angel-PTM).

Frames are allocated once, so training allocates nothing for weights. A parameter is contiguous in host memory
and in frames (`offload.core.parameter_layout`); a page that is loaded evicts the page that was in its frame.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from memtune.offload.core import (
    Chunks,
    GatheredBlocks,
    OffloadedParameter,
    Pages,
    Piece,
    adopt_together,
    host_values,
    place_in,
    put_back,
    runs,
    set_data,
)
from memtune.offload.parameters import HostCopies, ParameterOffloader
from memtune.program import Residency
from memtune.runtime import HOST, SSD, Context, mark, memory_of, page_locked, tier, tier_of, transfer


class PagedOffloader(ParameterOffloader):
    """Offloads the blocks' parameters of `context` page by page, in frames whose memory is never freed.

    Args:
        context: Its model; hooks are registered on its blocks and their parameters.
        residency: Pages to load at each moment.
        optimizer: Holds the host copies, and updates them at its step.
        pages: Layout of the parameters.
        resident: Parameters of blocks that are not offloaded.

    Raises:
        ApplyError: As `ParameterOffloader` does.
    """

    def __init__(
        self,
        context: Context,
        residency: Residency,
        optimizer: HostCopies,
        pages: Pages,
        resident: Collection[nn.Parameter] = (),
    ) -> None:
        self._in_frame: dict[int, int] = {}  # by frame, the page that was loaded last
        self._spare: InFrames | None = None
        self._written: set[OffloadedParameter] = set()  # by the user, since the last `swap`
        modules = [context.model.get_submodule(name) for name in context.blocks]
        members = [[each for each in module.parameters() if each not in resident] for module in modules]
        super().__init__(context, residency, optimizer, chunks=pages, early=False, members=members)

    @property
    def hosts(self) -> dict[nn.Parameter, Tensor]:
        """The place of each parameter in the host's pages."""
        return self._hosts

    def _host_values(self, context: Context, mine: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        held_for = context.placement.optimizer_params
        on_host = {p: held for p in mine if (held := held_for.get(p)) is not None and tier_of(held) != SSD}
        return {p: on_host[p].detach() if p in on_host else host_values(context, p) for p in mine}

    def _apply_layout(
        self, context: Context, mine: list[nn.Parameter], chunks: Chunks | Pages
    ) -> list[list[Piece]]:
        assert isinstance(chunks, Pages)
        pages = [[span.page for span in chunks.spans(index)] for index in range(len(mine))]
        self._take(in_frames(context, mine, self._hosts, chunks, self._gathered))
        self._owners = {each: OffloadedParameter(each, self._hosts[each]) for each in mine}
        for each in self._owners.values():
            each.free()
        self._on_page = [
            [self._owners[each] for each, on in zip(mine, pages, strict=True) if page in on]
            for page in range(chunks.count)
        ]
        return []  # no unit is resident; pages are copied in runs, not as pieces of their own

    def _offloaded(self) -> Iterator[OffloadedParameter]:
        return iter(self._owners.values())

    def _adopt(self, parameters: Iterable[OffloadedParameter]) -> None:
        self._written.update(adopt_together(parameters))

    def _take(self, found: InFrames) -> None:
        self._in_frames, self._hosts = found, found.hosts

    def double(self) -> dict[nn.Parameter, Tensor]:
        """Add a second host memory; return each trained parameter's place in it, by its host copy."""
        self._spare = self._in_frames.twin()
        return {held: self._spare.hosts[parameter] for parameter, held in self._trained.items()}

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the two host memories: later loads copy from the other one."""
        # The frames hold old weights now, so every page is loaded again.
        self._free_units(list(self._resident))
        assert self._spare is not None
        spare, self._spare = self._spare, self._in_frames
        self._adopt(self._offloaded())
        for parameter, each in self._owners.items():
            # A sweep writes all trained weights to the other memory, but not frozen ones.
            if each in self._written and parameter not in self._trained:
                spare.hosts[parameter].copy_(each.host)
            each.move_host(spare.hosts[parameter])
        self._written.clear()
        self._take(spare)

    @torch.no_grad()
    def _load_units(self, units: Iterable[int]) -> None:
        missing = [unit for unit in units if unit not in self._resident]
        for page in missing:
            self._adopt(self._on_page[page])
            frame = self._in_frames.pages.frame[page]
            self._evict(self._in_frame.get(frame, page))
            self._in_frame[frame] = page
        if missing and self._gathered is not None:
            # FSDP2's gather may still read the pages that are overwritten.
            self._gathered.wait_for_reads()
        # Of all missing pages at once: adjacent ones are one copy.
        self._load_pieces(self._in_frames.pieces(missing))
        self._resident.update(missing)

    def _evict(self, page: int) -> None:
        self._resident.discard(page)
        for each in self._on_page[page]:
            each.free()

    def _load_block(self, block: int) -> None:
        super()._load_block(block)
        for parameter in self._blocks[block]:
            self._owners[parameter].restore()

    def _load_before_gathers(self, gathered: GatheredBlocks, index: int) -> None:
        # Frames are never freed, so the allocator needs no record of the gather's stream.
        gathered.before_gathers(index, lambda: self._load_block(index), lambda: [])

    def _free_units(self, units: Any) -> None:
        for unit in list(units):
            self._evict(unit)

    def _load_all(self) -> None:
        """Load nothing: frames cannot hold all pages; undoing `in_frames` restores the parameters."""


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

    def twin(self) -> InFrames:
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
