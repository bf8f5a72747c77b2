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
from memtune.runtime.page_locked import page_locked
from memtune.runtime.tiers import HOST, SSD, mark, tier, tier_of


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
def in_frames(context: Context, parameters: Sequence[nn.Parameter], hosts: dict[nn.Parameter, Tensor], pages: Pages) -> InFrames:
    """Move `parameters` into frames, and their host copies into pages; both stay the same objects.

    Args:
        context: Whose `undo` takes it back.
        parameters: In the order of `pages`.
        hosts: Their host copies.
        pages: Where each one goes.
    """
    like = parameters[0]
    with tier(HOST):
        n_bytes = pages.count * pages.page_bytes
        memory = page_locked(
            lambda locked: torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=locked), wanted=like.is_cuda
        )
    mark(memory, HOST)
    in_pages = dict(hosts)  # also where only some have been moved
    context.undo.callback(_apart, parameters, in_pages)
    for parameter, page, at in zip(parameters, pages.first, pages.offset, strict=True):
        place = place_in(memory, parameter, page * pages.page_bytes + at)
        place.copy_(hosts[parameter])
        in_pages[parameter] = place
        held = context.represented.get(parameter)
        if held is not None and tier_of(held) != SSD:
            held.data = place
    for parameter in parameters:  # their memory first, or both would be there at once
        parameter.data = parameter.detach().new_empty(0)
    frames = like.detach().new_zeros(pages.frame_bytes, dtype=torch.uint8)
    for parameter, page, at in zip(parameters, pages.first, pages.offset, strict=True):
        parameter.data = place_in(frames, in_pages[parameter], pages.frame[page] * pages.page_bytes + at)
    return InFrames(pages, frames, memory, in_pages)


def _apart(parameters: Sequence[nn.Parameter], hosts: dict[nn.Parameter, Tensor]) -> None:
    """Each parameter has memory of its own again, with what the host has."""
    for parameter in parameters:
        parameter.data = torch.empty_like(hosts[parameter], device=parameter.device).copy_(hosts[parameter])
