"""Several replacements of the forwards of a model's modules, of which each call of the model chooses one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from memtune.runtime.training_hooks import ForwardWrapper
from memtune.workload import tensors_of

Shapes = Sequence[tuple[int, ...]]


class ForwardSwitch:
    """Sets of forwards, one per length bucket; the model's forward chooses by the shapes of its tensors.

    Only forwards are switched: what a forward saves holds what backward needs, so a micro-batch runs backward
    as its forward began, whichever set was chosen since.

    Args:
        model: The model. Replacements of its modules' forwards from now on are collected by `take`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._before = model, _own_forwards(model)
        self._sets: list[dict[nn.Module, Callable[..., Any]]] = []
        self._chosen = 0
        self.calls: Counter[int] = Counter()
        """Forwards of the model in training, by set."""

    def take(self) -> None:
        """Add the present forwards as the next set, and restore those from before."""
        now = _own_forwards(self._model)
        changed = {each: forward for each, forward in now.items() if forward is not self._before.get(each)}
        self._sets.append(changed)
        for module in changed:
            if module in self._before:
                module.forward = self._before[module]
            else:
                del module.forward

    def install(self, choose: Callable[[Shapes], int]) -> None:
        """Switch the forwards of all modules that differ in some set.

        Args:
            choose: From the shapes of the tensors that the model's forward gets, in order, to the set.
        """
        # The model itself comes last; its forward chooses the set that the others read.
        modules = dict.fromkeys(each for one in self._sets for each in one if each is not self._model)
        for module in modules:
            forwards = [one.get(module, module.forward) for one in self._sets]
            module.forward = SwitchedForward(partial(self._run, forwards), forwards)
        # The last one to be replaced: its own forward may be a default of the sets.
        forwards = [one.get(self._model, self._model.forward) for one in self._sets]
        self._model.forward = SwitchedForward(partial(self._run_model, choose, forwards), forwards)

    def _run(self, forwards: Sequence[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
        return forwards[self._chosen](*args, **kwargs)

    def _run_model(
        self,
        choose: Callable[[Shapes], int],
        forwards: Sequence[Callable[..., Any]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._chosen = choose([tuple(each.shape) for each in tensors_of((args, kwargs))])
        # Evaluations are not counted: the audit compares with training steps.
        self.calls[self._chosen] += self._model.training
        return forwards[self._chosen](*args, **kwargs)


class SwitchedForward(ForwardWrapper):
    """A module's forward that runs one of several; copies of the module get the last one.

    Args:
        call: Function that runs one of them.
        forwards: The forwards.
    """

    def __init__(self, call: Callable[..., Any], forwards: Sequence[Callable[..., Any]]) -> None:
        super().__init__(call, forwards[-1])
        self.alternatives = tuple(forwards)


def _own_forwards(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """Return the forwards that modules hold themselves, instead of their class's."""
    return {each: vars(each)["forward"] for each in model.modules() if "forward" in vars(each)}
