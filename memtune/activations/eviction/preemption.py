"""A forward that runs without the mode, and is preempted when another one needs its memory.

Rule 1. A preempted run frees what it saved and repeats its forward online when its backward comes, so that
both forwards stay within the budget. It keeps its arguments, and the generators' state if it draws.
Rule 2. A run keeps its memory if a second forward would differ: it writes into buffers or updates a norm's
statistics. So it does where hooks may need gradients one by one (`grad_layouts.is_watched`): the second run
computes them all at once.
Rule 3. The second run repeats the first whatever state the module is in: autocast and the modules' training
flags are set as they were. If anything else has changed, or a parameter has got hooks, the captured ops run
under their schedule instead of the module's own code.
Rule 4. Once backward has begun, a run cannot be preempted; a lock of the run separates the two.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from memtune.activations.capture import (
    Slot,
    Tape,
    autocast_state,
    is_accumulated,
    is_hooked,
    is_watched,
    no_autocast,
)
from memtune.activations.eviction.evictable_tensor import written_since
from memtune.activations.schedules import FrozenRun
from memtune.program import BATCH_NORMS
from memtune.runtime import RandomState

Online = Callable[[Any, Any], Any]
"""Runs the module within the budget, given positional and keyword arguments."""


class PreemptibleRun(FrozenRun):
    """One forward under a schedule and its backward; it can be preempted in between."""

    _called: tuple[list[Any], Any] | None = None
    """Its arguments, detached from their graph; None once backward has begun."""
    _gave_way = False

    def called_with(self, args: Any, kwargs: Any, online: Online) -> None:
        """Set the arguments before the run starts; `online` runs it again."""
        leaves, spec = tree_flatten((args, kwargs))
        twins = {
            id(leaf): leaf.detach().requires_grad_(leaf.requires_grad)
            for leaf in leaves
            if isinstance(leaf, Tensor)
        }
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
        """Return its arguments between forward and backward."""
        called = self._called
        return called[0] if called is not None and (self.saved or self._gave_way) else []

    def waiting(self) -> list[Any]:
        """Return the values that it holds for its backward."""
        return [*super().waiting(), *self.called()]

    def _may_run_again(self) -> bool:
        graph = self._captured.tape.graph
        n = graph.n_forward
        writes = any(op < n for op in graph.once) or any(name in BATCH_NORMS for name in graph.names[:n])
        return (
            not writes
            and not self.in_pieces
            and not is_watched(self._state[number] for number in self._numbers)
        )

    def all_gradients(self, node: Any) -> list[Tensor | None]:
        """Return `FrozenRun.all_gradients`; of a second run if it was preempted.

        Raises:
            ApplyError: A tensor that forward read was written since.
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
            if not any(map(is_hooked, parameters)) and self.region.is_as_captured(
                self._captured, self._state
            ):
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

    def _again(
        self, leaves: list[Any], spec: Any, parameters: list[Tensor], *, accumulates: bool
    ) -> list[Tensor | None]:
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
    """Set the modules' training flags as in `training` inside."""
    others = [(each, each.training) for each, flag in training if each.training is not flag]
    try:
        for each, flag in others:
            each.training = not flag
        yield
    finally:
        for each, flag in others:
            each.training = flag


# A run that was made for gradients into some outputs of a model, when others get one: see `OutputsRun`.
_NO_GRADIENT = "no gradient flowed into one of its outputs, which may be another time"


def why_outputs_differ(tape: Tape) -> str:
    """Return why `tape` is not run without the mode: outputs without a gradient that may have one; else ''.

    If all outputs with a gradient are scalars, the model returns its own loss, and other outputs are taken to
    have none.
    """
    outputs = (tape.outputs[at] for at in tape.asked)
    has_own_loss = all(isinstance(each, Slot) and each.size == () for each in outputs)
    return "" if tape.asked == tape.differentiable or has_own_loss else _NO_GRADIENT


class OutputsRun(PreemptibleRun):
    """A forward without the mode; where another output gets a gradient than it was made for, it runs again
    online.

    What cannot run again (`PreemptibleRun`) is an error then, as it is under any schedule.
    """

    _told: Callable[[str], None]

    def tells(self, told: Callable[[str], None]) -> None:
        """Told before it starts; `told` hears that it ran again, and why."""
        self._told = told

    def all_gradients(self, node: Any) -> list[Tensor | None]:
        """`PreemptibleRun.all_gradients`, whatever output gets one."""
        new = sorted(set(self.gradients) - set(self._captured.tape.asked))
        if new and self.give_way():
            self._told(f"a gradient flows into output {new[0]}, which was not so before")
        return super().all_gradients(node)


# Forwards without the mode that wait for their backward, of all regions that one module has: their bytes, and
# giving way.
class _Region(Protocol):
    def waiting_bytes(self) -> int: ...

    def give_way(self) -> None: ...


class WaitingForwards(ABC):
    """Base of `Followers` and `WarmUp`: the waiting forwards of their regions."""

    _online: Callable[[Any, Any, Any], Any]

    def waiting_bytes(self) -> int:
        """Return the bytes held by forwards that wait for their backward."""
        return sum(each.waiting_bytes() for each in self._all())

    def give_way(self) -> None:
        """Another forward begins: those that wait for their backward let go of what may run again."""
        for each in self._all():
            each.give_way()

    def again(self, args: Any, kwargs: Any) -> Any:
        """Run a preempted forward again."""
        return self._online(None, args, kwargs)

    @abstractmethod
    def _all(self) -> Iterable[_Region]:
        """Return all regions, including retired ones."""
