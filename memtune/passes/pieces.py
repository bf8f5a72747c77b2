"""What of the blocks' parameters comes and goes as one, and when, as `passes.stream` writes it into a Step."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from memtune.chunks import Chunks
from memtune.edit import Edit
from memtune.pages import Pages, runs
from memtune.parameters import columns_of
from memtune.passes.gathered_rows import gathers_of
from memtune.program import FOREVER, I32, I64, Kind, Step, Tier
from memtune.residency import Residency, Units, order_of_use


def in_blocks(step: Step) -> I32:
    """Parameters of blocks, in the order in which the blocks are used."""
    block = columns_of(step.parameters).block
    mine = np.flatnonzero(block >= 0)
    found: I32 = mine[np.argsort(block[mine], kind="stable")].astype(np.int32)
    return found


class Pieces(NamedTuple):
    """Memory that comes and goes."""

    of_parameter: I32
    """(parameters + 1,) the piece of each parameter, of several the first; -1 for none, as in the last row."""
    n_bytes: I64
    unit: I32
    owner: I32
    of_unit: tuple[tuple[int, ...], ...]
    used: tuple[Units, ...]
    """The units that each moment uses."""
    again: I32
    """As `of_parameter`, in backward."""

    @classmethod
    def of(cls, step: Step, chunks: Chunks | None) -> Pieces:
        """The chunks, or where there are none each parameter of a block."""
        columns, mine = columns_of(step.parameters), in_blocks(step)
        if chunks is None:
            return cls.of_parameters(step, mine)
        of_parameter = np.full(len(columns.block) + 1, -1, np.int32)
        of_parameter[mine] = chunks.chunk
        each = np.arange(chunks.count, dtype=np.int32)
        n_bytes = np.full(chunks.count, chunks.chunk_bytes, np.int64)
        nobody, of_unit = np.full(chunks.count, -1, np.int32), tuple((i,) for i in range(chunks.count))
        return cls(of_parameter, n_bytes, each, nobody, of_unit, chunks.uses(), of_parameter)

    @classmethod
    def of_parameters(cls, step: Step, mine: I32) -> Pieces:
        """Each of the parameters `mine`, which are in the order of use, is a piece of its block."""
        columns = columns_of(step.parameters)
        of_parameter = np.full(len(columns.block) + 1, -1, np.int32)
        of_parameter[mine] = np.arange(len(mine), dtype=np.int32)
        rows = np.split(np.arange(len(mine)), np.searchsorted(columns.block[mine], np.arange(1, len(step.blocks))))
        of_unit = tuple(tuple(part.tolist()) for part in rows)
        order = order_of_use(len(step.blocks), gathered=gathers_of(step) is not None)
        used = tuple((unit,) if unit >= 0 else () for unit in order)
        n_bytes = (columns.numel * columns.itemsize)[mine]
        return cls(of_parameter, n_bytes, columns.block[mine], mine, of_unit, used, of_parameter)


class Frames(NamedTuple):
    """What frames, which stay, change about it."""

    n_bytes: int
    host_bytes: int
    waits: tuple[Units, ...]
    """The pieces that hold what each moment uses."""


def copies_of_pages(step: Step, pages: Pages, residency: Residency) -> tuple[Pieces, Residency, Frames]:
    """A piece for each copy: pages that come in at once and lie side by side; and which of them comes when."""
    copies, mine = _copies(pages, residency), in_blocks(step)
    of_parameter, again = (np.full(len(step.parameters) + 1, -1, np.int32) for _ in range(2))
    of_parameter[mine], again[mine] = copies.of_parameter, copies.again
    each = np.arange(len(copies.n_bytes), dtype=np.int32)
    of_unit = tuple((i,) for i in range(len(each)))
    pieces = Pieces(of_parameter, copies.n_bytes, each, np.full(len(each), -1, np.int32), of_unit, copies.late, again)
    there = Residency(((),) * len(copies.late) + (tuple(range(len(each))),), (*copies.comes, ()))
    return pieces, there, Frames(pages.frame_bytes, pages.count * pages.page_bytes, copies.waits)


class _Copies(NamedTuple):
    """Of all moments of a step."""

    n_bytes: I64
    of_parameter: I32
    """(parameters of blocks,) the copy of the page on which each begins; `again`: in backward."""
    again: I32
    late: tuple[Units, ...]
    """(moments,) copies of what the moment uses itself, of all that it brings in, and of all that it uses."""
    comes: tuple[Units, ...]
    waits: tuple[Units, ...]


@functools.lru_cache(maxsize=64)
def _copies(pages: Pages, residency: Residency) -> _Copies:
    n_blocks, uses = len(pages.of_block), pages.uses()
    order = order_of_use(n_blocks, gathered=pages.gathered)
    of_page, filled = np.full(pages.count, -1, np.int32), np.asarray(pages.filled, np.int64)
    first, block = np.asarray(pages.first, np.int32), np.asarray(pages.block, np.int32)
    of_parameter, again = (np.full(len(first), -1, np.int32) for _ in range(2))
    sizes: list[I64] = []
    late, comes, waits = [], [], []
    count = 0
    for moment, (loads, used) in enumerate(zip(residency.loads, uses, strict=False)):
        page, start = np.asarray(loads, np.int32), count
        needed = (page >= used[0]) & (page <= used[-1]) if used else np.zeros(len(page), bool)  # pages of a block are neighbours
        ends = []
        for part in (page[needed], page[~needed]):
            one, last = runs(pages, part)
            of_page[part] = count + np.searchsorted(one, part, side="right") - 1
            sizes.append((last - one) * np.int64(pages.page_bytes) + filled[last])
            count += len(one)
            ends.append(count)
        late.append(tuple(range(start, ends[0])))
        comes.append(tuple(range(start, count)))
        waits.append(tuple(dict.fromkeys(of_page[list(used)].tolist())))
        here = block == order[moment]
        (of_parameter if moment < n_blocks else again)[here] = of_page[first[here]]
    again = np.where(again < 0, of_parameter, again)  # rows that are gathered for backward while they are there
    return _Copies(np.concatenate(sizes), of_parameter, again, tuple(late), tuple(comes), tuple(waits))


def host_memory(edit: Edit, pieces: Pieces, frames: Frames | None, tier: Tier = Tier.HOST) -> I32:
    """The host's storage of each piece, or that on SSD."""
    n_bytes = pieces.n_bytes if frames is None else np.full(1, frames.host_bytes, np.int64)
    nowhere, forever = np.full(len(n_bytes), -1, np.int32), np.full(len(n_bytes), FOREVER, np.int32)
    owner = pieces.owner if frames is None else nowhere
    rows = edit.add_storages(n_bytes, producer=nowhere, tier=tier, kind=Kind.PARAMETER, held_until=forever, owner=owner)
    return rows if frames is None else np.repeat(rows, len(pieces.n_bytes))
