"""The blocks' parameters in pages: side by side in host memory, and in frames on the device that pages come to in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from memtune.pages import Pages, runs
from memtune.runtime.chunks import Piece, place_in
from memtune.runtime.context import Context
from memtune.runtime.gathered_rows import GatheredBlocks
from memtune.runtime.page_locked import page_locked
from memtune.runtime.tiers import HOST, SSD, mark, tier, tier_of
from memtune.runtime.tree import local


class InFrames(NamedTuple):
    """Parameters whose pages come to frames."""

    pages: Pages
    frames: Tensor
    memory: Tensor
    """All pages, on the host."""
    hosts: dict[nn.Parameter, Tensor]
    """Each parameter's place there."""

    def pieces(self, wanted: list[int]) -> list[Piece]:
        """What `wanted` pages are copied from and to; those that lie side by side in both go at once."""
        frame, filled, size = self.pages.frame, self.pages.filled, self.pages.page_bytes
        found = []
        for first, last in zip(*(each.tolist() for each in runs(self.pages, np.sort(np.asarray(wanted, np.int32)))), strict=True):
            n_bytes = (last - first) * size + filled[last]
            there, host = frame[first] * size, first * size
            found.append(Piece(self.frames[there : there + n_bytes], self.memory[host : host + n_bytes], in_frame=True))
        return found

    def twin(self) -> InFrames:
        """The same with other host memory, of the same values."""
        with tier(HOST):
            made = page_locked(lambda locked: torch.empty_like(self.memory, pin_memory=locked), wanted=self.frames.is_cuda)
            memory = made.copy_(self.memory)
        mark(memory, HOST)
        hosts = {p: place_in(memory, host, int(host.storage_offset()) * host.element_size()) for p, host in self.hosts.items()}
        return self._replace(memory=memory, hosts=hosts)


@torch.no_grad()
def in_frames(
    context: Context,
    parameters: Sequence[nn.Parameter],
    hosts: dict[nn.Parameter, Tensor],
    pages: Pages,
    gathered: GatheredBlocks | None = None,
) -> InFrames:
    """Move `parameters` into frames, and their host copies into pages; both stay the same objects.

    Args:
        context: Whose `undo` takes it back.
        parameters: In the order of `pages`.
        hosts: Their host copies.
        pages: Where each one goes.
        gathered: Where they are divided; it is their rows that go there.
    """
    like = parameters[0]
    with tier(HOST):
        n_bytes = pages.count * pages.page_bytes
        memory = page_locked(
            lambda locked: torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=locked), wanted=like.is_cuda
        )
    mark(memory, HOST)
    if gathered is not None:
        memory.zero_()  # what rows are padded with
    in_pages = dict(hosts)  # also where only some have been moved
    context.undo.callback(_apart, parameters, in_pages, gathered)
    for parameter, page, at in zip(parameters, pages.first, pages.offset, strict=True):
        place = place_in(memory, local(parameter.detach()), page * pages.page_bytes + at)
        place.copy_(hosts[parameter])
        in_pages[parameter] = place
        held = context.represented.get(parameter)
        if held is not None and tier_of(held) != SSD:
            held.data = place
    rows = {} if gathered is None else {p: torch.empty_like(gathered.rows_of(p), device="meta") for p in parameters}
    for parameter in parameters:  # their memory first, or both would be there at once
        if gathered is None:
            parameter.data = parameter.detach().new_empty(0)
        else:
            gathered.rows_of(parameter).untyped_storage().resize_(0)
    frames = torch.zeros(pages.frame_bytes, dtype=torch.uint8, device=like.device)
    for parameter, page, at in zip(parameters, pages.first, pages.offset, strict=True):
        there = pages.frame[page] * pages.page_bytes + at
        if gathered is None:
            parameter.data = place_in(frames, in_pages[parameter], there)
        else:
            gathered.put_rows(parameter, place_in(frames, rows[parameter], there))
    return InFrames(pages, frames, memory, in_pages)


def _apart(parameters: Sequence[nn.Parameter], hosts: dict[nn.Parameter, Tensor], gathered: GatheredBlocks | None) -> None:
    """Each parameter has memory of its own again, with what the host has."""
    for parameter in parameters:
        if gathered is None:
            parameter.data = torch.empty_like(hosts[parameter], device=parameter.device).copy_(hosts[parameter])
        else:
            gathered.put_rows(parameter, torch.zeros_like(gathered.rows_of(parameter)))
            local(parameter.detach()).copy_(hosts[parameter])
