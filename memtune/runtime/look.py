"""What a saved tensor looks like: two runs of the same code save tensors that look the same, made by the same ops.

A `Trail` is told of the tensors one after the other and reads off autograd's graph what ran since: the nodes behind a tensor that
are younger than the run and behind none before it. So an op between two saved tensors is seen although it saves nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_LEAF = "torch::autograd::AccumulateGrad"
"""Its number is none of the order; what a region is called with is one in the second run."""
_CAST = "ToCopyBackward0"
"""May be in one run only: autocast casts a weight once and keeps it."""
_NOT_THE_USERS = ("torch.", "memtune.")
"""Functions in Python of these packages may be in one run only: FSDP2 has some."""


class Look(NamedTuple):
    """What a saved tensor is known by in both runs."""

    made_by: tuple[str, ...]
    """Names of the autograd nodes that led to it since the tensor before, the last one first."""
    size: torch.Size
    dtype: torch.dtype


class Trail:
    """Looks at the saved tensors of one run, in order."""

    def __init__(self) -> None:
        self._start = _now()
        self._seen: set[int] = set()

    def look(self, tensor: Tensor) -> Look:
        """What `tensor`, the next one, is known by."""
        return Look(tuple(self._new(tensor.grad_fn)), tensor.shape, tensor.dtype)

    def _new(self, node: Any) -> Iterator[str]:
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is None:
                continue
            number, name = node._sequence_nr(), node.name()
            if number < self._start or number in self._seen or name == _LEAF:
                continue
            self._seen.add(number)
            if name != _CAST and not _is_ours(node):
                yield name
            waiting += [each for each, _ in node.next_functions]


def difference(before: Look, now: Look) -> tuple[str, str]:
    """The first op that differs: as it was and as it is, '' where there was none, or none differs."""
    pairs = zip_longest(reversed(before.made_by), reversed(now.made_by), fillvalue="")
    return next(((one, two) for one, two in pairs if one != two), ("", ""))


def _is_ours(node: Any) -> bool:
    if not isinstance(node, BackwardCFunction):
        return False
    function = getattr(node, "_forward_cls", type(node))
    return bool(function.__module__.startswith(_NOT_THE_USERS))


def _now() -> int:
    """The number of the next node that this thread makes."""
    number: int = getattr(torch.autograd, "_get_sequence_nr")()  # noqa: B009 - the stubs do not name it
    return number
