"""Blocks that come in while updates of some of them, which the last step has left (`late_updates`), are still under way.

Three rules, which `beside_store` and `pack_store` share:

Rule 1. Nobody reads a block's weights on the host, to the device, a state dict or anywhere, before its own update is over.
Rule 2. Memory of a block that is to come in ahead of its use is taken at once. Where its update is under way, its weights follow
        when somebody looks and finds it over, at the latest when the block is used.
Rule 3. What is owed to a block that is let go is owed no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memtune.runtime.chunks import Piece
from memtune.runtime.context import Context
from memtune.runtime.host_optimizer import HostOptimizer
from memtune.runtime.host_parameters import HostParameters
from memtune.runtime.late_updates import LateUpdates


class LateBlocks(HostParameters):
    """Host parameters, a block each unit, of which some are updated late; `_leave` is called before anything comes in."""

    _late: LateUpdates
    _owed: dict[int, list[Piece]]
    """By block: what has memory, and no values yet."""

    def _leave(self, context: Context, updates: HostOptimizer, blocks: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """Leave the updates of `blocks` to the next step; none: nothing is ever late."""
        self._updates, self._owed = updates, {}
        self._late = (
            updates.leave_late(context, {block: list(each) for block, each in blocks.items()}) if blocks else LateUpdates({})
        )

    def start_late(self) -> None:
        """Begin what the last step has left, where it did not begin by itself."""
        self._updates.start_late()

    def pay_what_is_over(self) -> None:
        """Rule 2, without waiting."""
        for unit in [each for each in self._owed if self._late.is_over(each)]:
            self._pay(unit)

    def _bring_ahead(self, units: Iterable[int]) -> None:
        """Rule 2."""
        self.pay_what_is_over()
        for unit in units:
            if unit in self._there or self._late.is_over(unit):
                self._fetch(unit)
            else:
                self._promise([unit])

    def _promise(self, units: Iterable[int]) -> None:
        for unit in units:
            if unit in self._there:
                continue
            self._there.add(unit)
            self._owed[unit] = list(self._units[unit])
            for piece in self._owed[unit]:
                piece.take()

    def _fetch(self, index: int) -> None:
        """Rule 1."""
        if index in self._owed:
            self._pay(index)
            return
        if index not in self._there:
            self._late.finish(index)
        super()._fetch(index)

    @torch.no_grad()
    def _pay(self, unit: int, pieces: int | None = None) -> None:
        """Values of the first `pieces` of what is owed to `unit`; none given: all."""
        self._late.finish(unit)
        owed = self._owed[unit]
        count = len(owed) if pieces is None else pieces
        self._bring_pieces(owed[:count])
        del owed[:count]
        if not owed:
            del self._owed[unit]

    def _release(self, units: Any) -> None:
        """Rule 3."""
        units = list(units)
        for unit in units:
            self._owed.pop(unit, None)
        super()._release(units)

    def _into_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        self.start_late()
        self._late.finish_all()
        super()._into_state_dict(module, state, prefix, metadata)

    def _late_facts(self) -> dict[str, Any]:
        """For the audit: how many blocks are late, and how much was left to the next step at most."""
        return {"late_blocks": self._late.blocks, "late_bytes": self._late.most_left_bytes}
