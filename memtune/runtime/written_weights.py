"""Weights on the device that the user has set since the optimizer did, and that are kept elsewhere too.

Their masters on the host or on SSD would bring the old values back. Two ways:

Rule 1. `load_state_dict` of the model itself, or of a part of it, is heard of by hooks of the modules that hold the weights, so
        a load of any module above them is. A copy of the model, or one that has been pickled, has no such hooks.
Rule 2. `p.mul_()`, `p.copy_()`, `p.data = ...` are known by the memory's version and address, writes through `p.data` by its own
        (`runtime.shown_data`). Of a weight whose rows ranks update the whole one is looked at, and taken up again each time that
        they have gathered it. What is written past torch (`p.numpy()[:] = ...`) leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memtune.runtime.context import Context
from memtune.runtime.held_parameter import held_chain
from memtune.runtime.hooks import StaysBehind
from memtune.runtime.shown_data import hide, show, version_of_data
from memtune.runtime.tree import local


def watch_loads(
    context: Context,
    kept: set[nn.Parameter],
    loaded: Callable[[list[nn.Parameter]], None],
    before: Callable[[], None] | None = None,
) -> None:
    """Rule 1: have `loaded` called with those of `kept` whose module has got new weights.

    Args:
        context: Its model's modules are watched, and with a parameter what is held in its place (this rank's rows).
        kept: What is kept elsewhere.
        loaded: Called after each module's load, children before parents.
        before: Called before it.
    """
    for module in context.model.modules():
        chains = (held_chain(context, each) for each in module._parameters.values() if each is not None)
        mine = [held for chain in chains for held in [each for each in chain if each in kept][:1]]
        if not mine:
            continue
        if before is not None:
            module.register_load_state_dict_pre_hook(StaysBehind(before))
        module.register_load_state_dict_post_hook(StaysBehind(lambda mine=mine: loaded(mine)))  # type: ignore[misc]


class WrittenWeights:
    """Rule 2, of the weights of one optimizer that are the model's own parameters, or rows of them.

    Args:
        context: Of the model; its parameters' `data` is looked at from here on, and what `gathered` tells is heard.
        weights: What is on the device.
    """

    def __init__(self, context: Context, weights: Iterable[nn.Parameter]) -> None:
        model = set(context.model.parameters())
        whole = {rows: each for each, rows in context.represented.items() if each in model}
        mine = {each: each if each in model else whole.get(each) for each in weights}
        real = {each: of for each, of in mine.items() if of is not None and not isinstance(local(of.detach()), FakeTensor)}
        for of in real.values():
            show(of)
            context.undo.callback(hide, of)
        self._of = real
        self._seen = {each: _seen(of) for each, of in real.items()}
        context.gathered.append(self._gathered)

    def _gathered(self) -> None:
        for each, of in self._of.items():
            if each is not of:
                self.wrote(each)

    def wrote(self, weight: nn.Parameter) -> None:
        """The optimizer, or who loads a state, has written it."""
        if weight in self._seen:
            self._seen[weight] = _seen(self._of[weight])

    def by_others(self, but: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Weights that somebody else has written; each is told of once.

        Args:
            but: Those that come and go.
        """
        found = [each for each, seen in self._seen.items() if each not in but and _seen(self._of[each]) != seen]
        for each in found:
            self.wrote(each)
        return found


def _seen(weight: nn.Parameter) -> tuple[int, ...]:
    here: Tensor = getattr(weight, "_local_tensor", weight)
    return weight._version, here._version, here.data_ptr(), version_of_data(weight)
