"""Forward without the mode that is preempted when another forward needs its memory.

A preempted run frees its saved values and repeats its forward online when its backward begins, so that both
forwards stay within the budget. It keeps its arguments, and the generators' state if it draws.

Concurrency: a run cannot be preempted once its backward has begun; a lock of the run separates the two.
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
    is_accumulated,
    is_hooked,
    is_watched,
    no_autocast,
)
from memtune.activations.eviction.evictable_tensor import written_since
from memtune.activations.schedules import ScheduledRun
from memtune.program import BATCH_NORMS
from memtune.runtime import RandomState, autocast_now

Online = Callable[[Any, Any], Any]
"""Runs the module within the budget, given positional and keyword arguments."""


class PreemptibleRun(ScheduledRun):
    """One forward under a schedule and its backward; it can be preempted in between."""

    _called: tuple[list[Any], Any] | None = None
    """Its arguments, detached from their graph; None once backward has begun."""
    _preempted = False

    def called_with(self, args: Any, kwargs: Any, online: Online) -> None:
        """Set the arguments before the run starts; `online` runs it again."""
        leaves, spec = tree_flatten((args, kwargs))
        # By identity: an argument that is passed twice must remain one tensor in the second run.
        twins = {
            id(leaf): leaf.detach().requires_grad_(leaf.requires_grad)
            for leaf in leaves
            if isinstance(leaf, Tensor)
        }
        self._lock = threading.Lock()  # guards `_called` and `_preempted`; no op runs while it is held
        self._called, self._online = ([twins.get(id(leaf), leaf) for leaf in leaves], spec), online
        self._autocast = autocast_now()
        self._training = [(each, each.training) for each in self.region.module.modules()]
        self._drawn = RandomState.capture(self.region.module) if self._captured.tape.graph.random else None
        # Version counters only grow, so an equal sum means that none has changed.
        self._before = self._sum_of_all(self._called[0])

    def preempt(self) -> bool:
        """Free the values that backward needs if they can be recomputed; return whether they were freed."""
        with self._lock:
            if self._called is None or not self.saved or not self._may_run_again() or self.is_written():
                return False
            freed, self._preempted, self.saved = self.saved, True, []
        del freed  # outside the lock: destructors of freed values may take other locks
        return True

    def called(self) -> list[Any]:
        """Return its arguments between forward and backward."""
        called = self._called
        return called[0] if called is not None and (self.saved or self._preempted) else []

    def waiting(self) -> list[Any]:
        """Return the values that it holds for its backward."""
        return [*super().waiting(), *self.called()]

    def _may_run_again(self) -> bool:
        """Return whether a second forward would be equal, and its gradients are not needed one by one.

        It is not equal if the forward writes into buffers or updates a norm's statistics. Hooks may need
        gradients one by one (`grad_layouts.is_watched`), while the second run computes them all at once.
        """
        graph = self._captured.tape.graph
        n = graph.n_forward
        writes = any(op < n for op in graph.once) or any(name in BATCH_NORMS for name in graph.names[:n])
        return (
            not writes
            and not self.in_pieces
            and not is_watched(self._state[number] for number in self._numbers)
        )

    def all_gradients(self, node: Any) -> list[Tensor | None]:
        """Return `ScheduledRun.all_gradients`, from a second run if this one was preempted.

        Raises:
            ApplyError: A tensor that forward read was written since.
        """
        self._require_first_order()
        with self._lock:
            # From here on the run cannot be preempted: `preempt` finds no arguments.
            called, self._called = self._called, None
            was_preempted, self._preempted = self._preempted, False
        if not was_preempted:
            del called
            return super().all_gradients(node)
        assert called is not None
        leaves, spec = called
        # A second forward would compute other values from what was written.
        if self._sum_of_all(leaves) != self._before:
            raise written_since("a tensor that forward has read and must read again")
        parameters = [self._state[number] for number in self._numbers]
        # The second run repeats the first in the modules' training flags and autocast of that time. If
        # anything else changed, or a parameter got hooks, the captured ops run under their schedule instead.
        with _in_modes(self._training):
            if not any(map(is_hooked, parameters)) and self.region.is_as_captured(
                self._captured, self._state
            ):
                # `backward` accumulates into leaves; anything else on the way to a parameter must get the
                # gradient returned.
                edges = [edge for edge, _ in node.next_functions][: len(parameters)]
                accumulates = all(map(is_accumulated, edges)) and all(each.is_leaf for each in parameters)
                del called
                return self._again(leaves, spec, parameters, accumulates=accumulates)
        self.inputs = leaves
        # Arguments that nothing else holds are freed while the forward runs.
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
        torch.autograd.backward(roots, given)  # the engine accumulates each gradient as soon as it is ready
        return [*(None for _ in parameters), *(each.grad for each in flow)]

    def _draw_again(self, stack: ExitStack) -> None:
        if self._drawn is not None:
            stack.enter_context(self._drawn.restored())

    def _sum_of_all(self, leaves: list[Any]) -> int:
        read = [*self._state, *(each for each in leaves if isinstance(each, Tensor))]
        return sum(each._version for each in read if not each.is_inference())


@contextmanager
def _in_modes(training: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Set the modules' training flags as in `training` in this context."""
    others = [(each, each.training) for each, flag in training if each.training is not flag]
    try:
        for each, flag in others:
            each.training = not flag
        yield
    finally:
        for each, flag in others:
            each.training = flag


_NO_GRADIENT = "one of its outputs got no gradient, but may get one in another step"


def why_outputs_differ(tape: Tape) -> str:
    """Return why `tape` needs the mode: an output without a gradient that may get one; '' if there is none.

    If all outputs with a gradient are scalars, the model returns its own loss, and other outputs are assumed
    to have none.
    """
    outputs = (tape.outputs[at] for at in tape.asked)
    has_own_loss = all(isinstance(each, Slot) and each.size == () for each in outputs)
    return "" if tape.asked == tape.differentiable or has_own_loss else _NO_GRADIENT


class OutputsRun(PreemptibleRun):
    """Forward without the mode that runs again online if another output gets a gradient than it was made for.

    A run that cannot be repeated (`PreemptibleRun`) raises instead, as under any schedule.
    """

    _notify: Callable[[str], None]

    def notify_with(self, notify: Callable[[str], None]) -> None:
        """Set the function that receives the reason if it runs again; call this before it starts."""
        self._notify = notify

    def all_gradients(self, node: Any) -> list[Tensor | None]:
        """Return `PreemptibleRun.all_gradients`, whichever output got a gradient."""
        new = sorted(set(self.gradients) - set(self._captured.tape.asked))
        if new and self.preempt():
            self._notify(f"output {new[0]} gets a gradient, which it did not get before")
        return super().all_gradients(node)


class _Region(Protocol):
    def waiting_bytes(self) -> int: ...

    def preempt(self) -> None: ...


class WaitingForwards(ABC):
    """Base of `Replayer` and `ScheduleCache`: forwards of all regions of one module that wait for their
    backward.
    """

    _online: Callable[[Any, Any, Any], Any]

    def waiting_bytes(self) -> int:
        """Return the bytes held by forwards that wait for their backward."""
        return sum(each.waiting_bytes() for each in self._all())

    def preempt(self) -> None:
        """Preempt the waiting forwards, because another forward begins."""
        for each in self._all():
            each.preempt()

    def again(self, args: Any, kwargs: Any) -> Any:
        """Run a preempted forward again."""
        return self._online(None, args, kwargs)

    @abstractmethod
    def _all(self) -> Iterable[_Region]:
        """Return all regions, including retired ones."""
