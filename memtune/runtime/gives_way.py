"""A forward that ran without the mode, by what was decided before, and gives its memory back where another forward needs it.

Rule 1. What it saved is let go, and its forward runs again when its backward comes: online, beside whoever waits then, so that
        both stay within the budget. It keeps what it was called with, and the state of the generators where it draws.
Rule 2. Where a second run would not do the same it keeps what it has: forwards that write into buffers or update a norm's
        statistics. So it does where somebody waits for gradients one by one (`parameter_gradients.is_watched`): the second run
        has them all at once.
Rule 3. The second run does what the first one did, whatever the module is like by then: autocast and the modules' training
        flags are set as they were. Where something else has changed, or a parameter has got hooks, the module's own code does
        not run: the captured ops do, under their schedule.
Rule 4. Backward has begun once nobody can ask for the memory any more: the two are told apart under a lock of the run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from memtune.calls import BATCH_NORMS
from memtune.runtime.capture import autocast_state, no_autocast
from memtune.runtime.frozen import FrozenRun
from memtune.runtime.online_values import written_since
from memtune.runtime.parameter_gradients import is_accumulated, is_hooked, is_watched
from memtune.runtime.random_state import RandomState

Online = Callable[[Any, Any], Any]
"""Runs the module within the budget: with the arguments by position and those by name."""


class GivingRun(FrozenRun):
    """One forward under a schedule and the backward that follows it, which may give way in between."""

    _called: tuple[list[Any], Any] | None = None
    """What it was called with, apart from what that was made of; None once backward has begun."""
    _gave_way = False

    def called_with(self, args: Any, kwargs: Any, online: Online) -> None:
        """Told before it starts; `online` runs it again."""
        leaves, spec = tree_flatten((args, kwargs))
        twins = {id(leaf): leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves if isinstance(leaf, Tensor)}
        self._lock = threading.Lock()  # of what says whether backward has begun: no op runs under it
        self._called, self._online = ([twins.get(id(leaf), leaf) for leaf in leaves], spec), online
        self._autocast = autocast_state()
        self._training = [(each, each.training) for each in self.region.module.modules()]
        self._drawn = RandomState.capture(self.region.module) if self._captured.tape.graph.random else None
        self._before = self._sum_of_all(self._called[0])

    def give_way(self) -> bool:
        """Let go of what backward needs, if it can be had again; whether it was."""
        with self._lock:
            if self._called is None or not self.saved or not self._may_run_again() or self.is_written():
                return False
            let_go, self._gave_way, self.saved = self.saved, True, []
        del let_go  # out of the lock: what goes may call others
        return True

    def called(self) -> list[Any]:
        """What it was called with, between forward and backward."""
        called = self._called
        return called[0] if called is not None and (self.saved or self._gave_way) else []

    def waiting(self) -> list[Any]:
        """What it holds for its backward."""
        return [*super().waiting(), *self.called()]

    def _may_run_again(self) -> bool:
        graph = self._captured.tape.graph
        n = graph.n_forward
        writes = any(op < n for op in graph.once) or any(name in BATCH_NORMS for name in graph.names[:n])
        return not writes and not self.in_pieces and not is_watched(self._state[number] for number in self._numbers)

    def all_gradients(self, node: Any) -> list[Tensor | None]:
        """`FrozenRun.all_gradients`; of a second run where it gave way.

        Raises:
            ApplyError: What forward has read was written since.
        """
        self._require_first_order()
        with self._lock:
            called, self._called = self._called, None
            gave_way, self._gave_way = self._gave_way, False
        if not gave_way:
            del called
            return super().all_gradients(node)
        assert called is not None
        leaves, spec = called
        if self._sum_of_all(leaves) != self._before:
            raise written_since("a tensor that forward has read and must read again")
        parameters = [self._state[number] for number in self._numbers]
        with _in_modes(self._training):
            if not any(map(is_hooked, parameters)) and self.region.is_as_captured(self._captured, self._state):
                edges = [edge for edge, _ in node.next_functions][: len(parameters)]
                accumulates = all(map(is_accumulated, edges)) and all(each.is_leaf for each in parameters)
                del called
                return self._again(leaves, spec, parameters, accumulates=accumulates)
        self.inputs = leaves
        del called, leaves
        with ExitStack() as stack:
            self._draw_again(stack)
            self.forward()
        self.outputs = ()
        return super().all_gradients(node)

    def _again(self, leaves: list[Any], spec: Any, parameters: list[Tensor], *, accumulates: bool) -> list[Tensor | None]:
        flow = [leaves[number] for number, _ in self._captured.tape.input_gradients]
        args, kwargs = tree_unflatten(leaves, spec)
        with torch.enable_grad(), ExitStack() as stack:
            for context in (no_autocast, *self._autocast):
                stack.enter_context(context())
            self._draw_again(stack)
            out = tree_leaves(self._online(args, kwargs))
        del leaves, args, kwargs
        roots, given, self.gradients = [out[at] for at in self.gradients], list(self.gradients.values()), {}
        del out
        if not accumulates:
            return list(torch.autograd.grad(roots, [*parameters, *flow], given, allow_unused=True))
        torch.autograd.backward(roots, given)  # each gradient is added up as soon as it is there
        return [*(None for _ in parameters), *(each.grad for each in flow)]

    def _draw_again(self, stack: ExitStack) -> None:
        if self._drawn is not None:
            stack.enter_context(self._drawn.restored())

    def _sum_of_all(self, leaves: list[Any]) -> int:
        read = [*self._state, *(each for each in leaves if isinstance(each, Tensor))]
        return sum(each._version for each in read if not each.is_inference())


@contextmanager
def _in_modes(training: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Inside, the modules are in training or not, as in `training`."""
    others = [(each, each.training) for each, flag in training if each.training is not flag]
    try:
        for each, flag in others:
            each.training = not flag
        yield
    finally:
        for each, flag in others:
            each.training = flag
