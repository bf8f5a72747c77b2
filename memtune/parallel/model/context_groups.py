"""Grid of the ranks that share a sequence: heads × contexts, the rings of the contexts, and each rank's
positions.

Implements rules 1, 3 and 4 of `parallel.model.context_parallel`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from memtune.parallel.model.sequence_sharding import SequenceLayout
from memtune.parallel.ranks import Ring
from memtune.parallel.sharding import grid


@dataclass(frozen=True)
class Split:
    """Division of a sequence over ranks."""

    heads: int
    """Ranks of a context, over which attention's heads are divided."""
    contexts: int
    inner: int
    """Contexts of an inner ring; equal to `contexts`: one ring."""
    context_first: bool
    """True if consecutive ranks are of different contexts."""
    zigzag: bool
    work_sharing: bool = False
    """Contexts are contiguous; ranks that have seen all keys attend for others (`balanced_attention`)."""

    @property
    def ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.heads * self.contexts

    @property
    def units(self) -> int:
        """Pieces of equal length that a sequence must consist of."""
        return 2 * self.ranks if self.zigzag else self.ranks

    def document(self) -> dict[str, Any]:
        """Return the division as plain data."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Split:
        """Return the division from plain data, also of older versions; KeyError for damaged data."""
        # Configs written before work sharing existed lack that field.
        named = {name: document[name] for name in cls.__dataclass_fields__ if name != "work_sharing"}
        return cls(**named, work_sharing=bool(document.get("work_sharing", False)))

    @property
    def name(self) -> str:
        """Name that contains all fields."""
        return json.dumps(self.document())

    @classmethod
    def named(cls, name: str) -> Split:
        """Return the division of that name."""
        return cls.from_document(json.loads(name))

    def place(self, rank: int) -> tuple[int, int]:
        """Return the context of `rank`, and its place in it."""
        return (
            (rank % self.contexts, rank // self.contexts) if self.context_first else divmod(rank, self.heads)
        )

    def rank(self, context: int, head: int) -> int:
        """Return the rank at this place."""
        return head * self.contexts + context if self.context_first else context * self.heads + head

    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Return dimensions of the ranks' grid, the last one of consecutive ranks."""
        # A mesh's last dim has consecutive ranks, whose link is the fastest: that of heads, or of contexts if
        # these come first.
        rings = (("outer", self.contexts // self.inner), ("inner", self.inner))
        return (("heads", self.heads), *rings) if self.context_first else (*rings, ("heads", self.heads))

    def positions_of(self, tensor: Tensor, context: int, dim: int) -> Tensor:
        """Return a context's positions of `tensor`, which has all of them in `dim`; a view if it can be."""
        order, runs = self.order(), list[tuple[int, int]]()
        for first, number in (
            piece for head in range(self.heads) for piece in order[self.rank(context, head)]
        ):
            if runs and sum(runs[-1]) == first:
                runs[-1] = (runs[-1][0], runs[-1][1] + number)
            else:
                runs.append((first, number))
        unit = tensor.shape[dim] // self.units
        parts = [tensor.narrow(dim, first * unit, number * unit) for first, number in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def order(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the units of each rank, in the form of `SequenceLayout.order` (rule 4)."""
        found: list[tuple[tuple[int, int], ...]] = []
        for context, head in map(self.place, range(self.ranks)):
            if not self.zigzag:
                found.append(((context * self.heads + head, 1),))
                continue
            # One piece from the front and its mirror image from the back: their work under a causal mask adds
            # up to the same for all contexts.
            fronts = range(context * self.heads, (context + 1) * self.heads)
            backs = range(
                (2 * self.contexts - 1 - context) * self.heads, (2 * self.contexts - context) * self.heads
            )
            # The ranks of a context divide its pieces in order; where the two are adjacent, they are one run.
            first, second = [*fronts, *backs][2 * head : 2 * head + 2]
            found.append(((first, 2),) if second == first + 1 else ((first, 1), (second, 1)))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Grid:
    """This rank in the grid of those that share a sequence."""

    split: Split
    layout: SequenceLayout
    heads: str
    """The group of its context."""
    inner: Ring
    outer: Ring

    @property
    def context(self) -> int:
        """Number of this rank's context."""
        return self.outer.rank * self.inner.ranks + self.inner.rank

    @property
    def head(self) -> int:
        """Number of this rank among those of its context, which divide attention's heads."""
        return self.split.place(self.layout.rank)[1]

    def source(self, round_: int, step: int) -> int:
        """Return the context whose keys and values this rank has in `step` of an inner ring, in `round_`."""
        return (self.outer.rank - round_) % self.outer.ranks * self.inner.ranks + (
            self.inner.rank - step
        ) % self.inner.ranks

    def visible_slices(self, source: int, length: int, causal: bool) -> tuple[slice, slice, bool] | None:
        """Return the slices of both positions that attend to each other, and True for a causal mask."""
        every, half = slice(0, length), length // 2
        if not causal or source == self.context:
            return every, every, causal
        # Of another context a rank sees either the front halves only, or its own back half sees all: the
        # pieces are mirrored.
        if self.split.zigzag:
            return (
                (every, slice(0, half), False)
                if source < self.context
                else (slice(half, length), every, False)
            )
        return (every, every, False) if source < self.context else None

    def by_heads(self, *tensors: Tensor) -> Tensor:
        """Exchange (B, H, positions of a rank, D) into (number, B, H/heads, positions of the context, D)."""
        ranks = self.split.heads
        if ranks == 1:
            return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)
        # One all-to-all for keys and values together. The rank's dim comes first, as `all_to_all_single`
        # divides.
        sent = torch.stack([each.unflatten(1, (ranks, -1)).movedim(1, 0) for each in tensors], 1)
        return self._exchanged(sent).movedim(0, 3).flatten(3, 4)

    def by_positions(self, tensors: Tensor) -> Tensor:
        """Reverse `by_heads`, with the last dims laid out as (positions, H, D)."""
        ranks = self.split.heads
        if ranks == 1:
            return tensors
        sent = tensors.unflatten(3, (ranks, -1)).movedim(3, 0).contiguous()
        return self._exchanged(sent).permute(1, 2, 4, 0, 3, 5).flatten(3, 4).transpose(2, 3)

    def _exchanged(self, sent: Tensor) -> Tensor:
        received = torch.empty_like(sent)
        torch.ops.memtune.all_to_all_into_(received, sent, self.heads, self.split.heads)
        return received


def grid_of(split: Split, device_type: str, group: str, copies: int, rank: int) -> Grid:
    """Return the grid of the ranks of `group`, with this one as number `rank`; one of `copies` groups."""
    mesh = grid(device_type, (("copies", copies), *split.sizes()))
    context, _ = split.place(rank)
    outer, inner = divmod(context, split.inner)
    rings = [
        Ring(mesh[name].get_group().group_name, dict(split.sizes())[name], place, in_place=False)
        for name, place in (("inner", inner), ("outer", outer))
    ]
    return Grid(
        split,
        SequenceLayout(group, rank, split.units, split.order()),
        mesh["heads"].get_group().group_name,
        *rings,
    )
