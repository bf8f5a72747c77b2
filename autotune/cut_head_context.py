"""Recordings of a model whose positions are divided, with attention over heads and contexts.

The user's code in the blocks was written for all positions. Whether it is right for a share of them is seen without any ring: the
blocks run on the first rank's share, attention included, and every op is compared with the plain step's (`cut_positions`).
Then the real thing is recorded, of the rank with the most to do: the last context's, which attends to all others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from memtune.autotune.record import Session
from memtune.runtime.contexts import Split, grid_of
from memtune.runtime.head_context import divide_fake, divided_attention, require_plain_attention
from memtune.runtime.positions import Layout, dropouts
from memtune.runtime.sharding import meshes
from memtune.technique import Reason


class _Copied(Layout):
    """Of which every share is a storage of its own, so that what was not divided is told from what was."""

    def seen(self, whole: Tensor, dim: int) -> Tensor:
        """As `own`."""
        return self.own(whole, dim)


@dataclass
class Seen:
    """What attention was called with."""

    heads: set[int] = field(default_factory=set)
    """Of queries."""
    causal: bool = False
    """Whether any call masks later positions."""
    drops: set[str] = field(default_factory=set)
    """Names of the dropouts, which draw for all positions."""


def alone_session(session: Session, *, ranks: int, seen: Seen) -> None:
    """Make the blocks of the model of `session` work on one of `ranks` shares, which attends to itself.

    Args:
        session: Changed in place.
        ranks: Shares.
        seen: Gets what attention is called with.
    """
    attend = F.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        require_plain_attention(query, key, value, attn_mask, dropout_p, enable_gqa)
        seen.heads.add(query.shape[1])
        seen.causal |= is_causal
        return attend(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

    seen.drops.update(dropouts(session.model, session.blocks))
    group = meshes("cpu", ranks)[1].get_group().group_name
    with session.entered():
        divide_fake(session.model, session.blocks, _Copied.contiguous(group, ranks, 0), attention)


def divided_session(session: Session, *, split: Split, copies: int) -> None:
    """Divide the positions of the model of `session` as the last context's last rank does."""
    group = meshes("cpu", split.ranks)[1].get_group().group_name
    grid = grid_of(split, "cpu", group, copies, split.rank(split.contexts - 1, split.heads - 1))
    with session.entered():
        divide_fake(session.model, session.blocks, grid.layout, divided_attention(grid))


def unfit(seen: Seen, split: Split) -> Reason | None:
    """Why attention cannot be divided as `split` says."""
    uneven = sorted(each for each in seen.heads if each % split.heads)
    if uneven:
        return Reason(
            f"{split.heads} ranks do not divide the {uneven[0]} heads of attention", "a head_degree that divides the heads"
        )  # fmt: skip
    if not seen.heads:
        return Reason(
            "no block calls F.scaled_dot_product_attention: how positions meet is not known", "parallel: {kind: none}"
        )  # fmt: skip
    if (split.zigzag or split.helpers) and not seen.causal:
        return Reason("attention masks no later positions: contexts have equal work", "balance: none")
    return None


def document(seen: Seen, split: Split) -> dict[str, Any]:
    """What the plan says."""
    return {"degree": split.ranks, "split": split.document(), "attention_heads": sorted(seen.heads)}
