"""Weights on the device that somebody else has written since the optimizer did: `p.mul_()`, `p.copy_()`, `p.data = ...`.

Their masters on the host or on SSD would bring the old values back. Writes are known by the memory's version and address; a write
through `p.data`, which has a version of its own, leaves neither changed and is not noticed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memtune.runtime.context import Context
from memtune.runtime.tree import local


class OwnWrites:
    """Of the weights of one optimizer that are the model's own parameters: rows of one are written by whoever gathers them.

    Args:
        context: Of the model.
        weights: What is on the device.
    """

    def __init__(self, context: Context, weights: Iterable[nn.Parameter]) -> None:
        model = set(context.model.parameters())
        mine = [each for each in weights if each in model and not isinstance(local(each.detach()), FakeTensor)]
        self._seen = {each: _seen(each) for each in mine}

    def wrote(self, weight: nn.Parameter) -> None:
        """The optimizer, or who loads a state, has written it."""
        if weight in self._seen:
            self._seen[weight] = _seen(weight)

    def by_others(self, but: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Weights that somebody else has written; each is told of once.

        Args:
            but: Those that come and go.
        """
        found = [each for each, seen in self._seen.items() if each not in but and _seen(each) != seen]
        for each in found:
            self.wrote(each)
        return found


def _seen(weight: nn.Parameter) -> tuple[int, int]:
    here: Tensor = getattr(weight, "_local_tensor", weight)
    return here._version, here.data_ptr()
