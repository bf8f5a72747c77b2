"""Blocks' parameters that come and go in pages, to frames of the device that stay (Angel-PTM)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memtune.chunks import Chunks
from memtune.pages import Pages
from memtune.residency import Residency
from memtune.runtime.chunks import Piece
from memtune.runtime.context import Context
from memtune.runtime.gathered_rows import GatheredBlocks
from memtune.runtime.host_parameters import HostCopies, copy_of
from memtune.runtime.let_go import are_back, let_go, require_own_memory
from memtune.runtime.pages import InFrames, in_frames
from memtune.runtime.store import ParameterStore
from memtune.runtime.tiers import SSD, tier_of
from memtune.runtime.tree import local


class PagedStore(ParameterStore):
    """Makes the blocks' parameters of `context` come and go, page by page; the frames' memory is never given back.

    Args:
        context: Its model; hooks are put on its blocks and their parameters.
        residency: Which page is there when.
        optimizer: Holds the host copies, and updates them at its step.
        pages: Where the parameters lie.
        stays: Parameters of blocks that neither come nor go.

    Raises:
        ApplyError: As `ParameterStore` does.
    """

    def __init__(
        self, context: Context, residency: Residency, optimizer: HostCopies, pages: Pages, stays: Collection[nn.Parameter] = ()
    ) -> None:
        self._in_frame: dict[int, int] = {}  # the page that came last to each frame
        self._spare: InFrames | None = None
        modules = [context.model.get_submodule(name) for name in context.blocks]
        members = [[each for each in module.parameters() if each not in stays] for module in modules]
        super().__init__(context, residency, optimizer, chunks=pages, early=False, members=members)

    @property
    def hosts(self) -> dict[nn.Parameter, Tensor]:
        """Each parameter's place in the pages."""
        return self._hosts

    def _kept(self, context: Context, mine: list[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        on_host = {p: held for p in mine if (held := context.represented.get(p)) is not None and tier_of(held) != SSD}
        return {p: on_host[p].detach() if p in on_host else copy_of(p) for p in mine}

    def _put_into(self, context: Context, mine: list[nn.Parameter], chunks: Chunks | Pages) -> list[list[Piece]]:
        assert isinstance(chunks, Pages)
        pages = [[span.page for span in chunks.spans(index)] for index in range(len(mine))]
        self._on_page = [[each for each, on in zip(mine, pages, strict=True) if page in on] for page in range(chunks.count)]
        self._take(in_frames(context, mine, self._hosts, chunks, self._gathered))
        return []  # none is there, and none is anything by itself

    def _take(self, found: InFrames) -> None:
        self._in_frames, self._hosts = found, found.hosts

    def double(self) -> dict[nn.Parameter, Tensor]:
        """Second host memory for the pages, which `swap` changes over: each trained parameter's place there, by its host copy."""
        self._spare = self._in_frames.twin()
        return {held: self._spare.hosts[parameter] for parameter, held in self._trained.items()}

    def swap(self) -> None:
        """From now on pages come from the other memory."""
        self._there.clear()
        assert self._spare is not None
        spare, self._spare = self._spare, self._in_frames
        self._take(spare)

    @torch.no_grad()
    def _fetch_units(self, units: Iterable[int]) -> None:
        missing = [unit for unit in units if unit not in self._there]
        for page in missing:
            frame = self._in_frames.pages.frame[page]
            self._gives_way(self._in_frame.get(frame, page))
            self._in_frame[frame] = page
        if missing and self._gathered is not None:
            self._gathered.wait_for_reads()
        self._bring_pieces(self._in_frames.pieces(missing))
        self._there.update(missing)

    def _gives_way(self, page: int) -> None:
        self._there.discard(page)
        let_go(self._on_page[page])

    def _fetch_block(self, block: int) -> None:
        require_own_memory(self._blocks[block], self._in_frames.frames)
        super()._fetch_block(block)
        are_back(self._blocks[block])

    def _bring_for_gathers(self, gathered: GatheredBlocks, index: int) -> None:
        gathered.before_gathers(index, lambda: self._fetch_block(index), lambda: [])  # frames are never given back

    @torch.no_grad()
    def _keep(self, loaded: list[nn.Parameter]) -> None:
        super()._keep(loaded)
        spare = {} if self._spare is None else self._spare.hosts
        for parameter in loaded:
            if parameter in spare and parameter not in self._trained:  # nobody writes it there later
                spare[parameter].copy_(self._hosts[parameter])

    def _release(self, units: Any) -> None:
        for unit in list(units):
            self._gives_way(unit)

    def _bring_all(self) -> None:
        """Of pages nothing: frames are not enough for all, and `in_frames` takes back what it did."""
        are_back(each for block in self._blocks for each in block)

    def _left_bytes(self) -> int:
        frames = self._in_frames.frames.untyped_storage()._cdata
        here = {p: local(p.detach()) for p in self._hosts}
        return sum(p.nbytes for p in here.values() if p.untyped_storage()._cdata != frames)
