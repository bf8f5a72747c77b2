"""The calls of a model's blocks, numbered as they begin: what a block runs several times in a step has a number each time."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from memtune.program import I32, U8
from memtune.runtime.own_checkpoint import autograd_sees


class _Begun(NamedTuple):
    block: int
    node: int
    """Autograd's next sequence number."""
    grad: bool
    """Whether autograd looked on, and no checkpoint of the model's own took what it saved."""


class Numbered(NamedTuple):
    """The calls as a Step has them."""

    block: I32  # (c,)
    grad: U8  # (c,)
    number: I32
    """(calls + 1,) number of each call that was noted; the last entry serves -1."""


class BlockCalls:
    """Notes the calls of blocks 0 to `n_blocks` - 1 as they begin."""

    def __init__(self, n_blocks: int) -> None:
        self._n_blocks = n_blocks
        self._calls: list[_Begun] = []

    def enter(self, block: int) -> int:
        """The call of `block` that begins now: a new one, or in backward the last that began before the node at work."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._calls.append(_Begun(block, torch._C._autograd._get_sequence_nr(), autograd_sees()))
            return len(self._calls) - 1
        before = [i for i, call in enumerate(self._calls) if call.block == block and call.node <= node._sequence_nr()]
        return before[-1] if before else -1

    def numbered(self) -> Numbered:
        """All calls: in forward order, or where no block ran twice, in the order of the blocks, of which each has one."""
        ran = {call.block for call in self._calls}
        calls = [*self._calls, *(_Begun(block, 0, True) for block in range(self._n_blocks) if block not in ran)]
        order = list(range(len(calls)))
        if len(calls) == self._n_blocks:
            order.sort(key=lambda call: calls[call].block)
        number = np.full(len(calls) + 1, -1, np.int32)
        number[order] = np.arange(len(calls), dtype=np.int32)
        block = np.asarray([calls[i].block for i in order], np.int32)
        return Numbered(block, np.asarray([calls[i].grad for i in order], np.uint8), number)
