"""Replayer of logged runs of the evicting region, op by op and without a dispatch mode.

The first run of a kind uses the mode and is logged (`activations.eviction.decision_log`). From the second run
on, the ops of its tape (`activations.capture.tape`) run one after the other, and the logged calls are
replayed on the rematerializer. These do not depend on the ops' outputs, so several ops can be decided at
once. Evictions and replays are applied between ops, so decisions and accounted bytes equal those under the
mode.

Before each run the guards are checked (`activations.capture.guards`). A call that differs takes another
logged path, or the mode with a log.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memtune import _native
from memtune.activations.capture import CaptureLock, GradientLike, Tape
from memtune.activations.eviction.decision_log import LoggedRun
from memtune.activations.eviction.preemption import (
    OutputsRun,
    PreemptibleRun,
    WaitingForwards,
    why_outputs_differ,
)
from memtune.activations.eviction.replay_path import path_of
from memtune.activations.eviction.replay_run import ReplayRun, Route
from memtune.activations.schedules import ScheduledRegion, ScheduledRun, held_bytes
from memtune.program import Schedule
from memtune.runtime import RandomState

_MOST_KINDS = 64
_MOST_PATHS = 4
"""Maximal number of paths of one kind of call; a kind with ever new paths uses the mode."""
_NOT_ALONE = "a forward begins before the backward of the previous one"


class Opened(NamedTuple):
    """A rematerializer for one forward and its backward."""

    opened: Callable[[], _native.Rematerializer]
    """Function that makes a rematerializer, the same each time."""
    budget_bytes: int
    """Budget of the values alone."""
    background_bytes: int


class Replayer(WaitingForwards):
    """The logged paths, by kind of call.

    Args:
        module: The module that runs.
        forward: The module's own forward.
        device: Device of the module.
        parts: Number of parts of an op that runs in parts.
        online: Function that runs it under the mode, given kind, positional and keyword arguments.
        opened: Function that makes rematerializers for these arguments.
        through: Function called at the end of each run with kind, log and run.
        locks: A lock held while a forward runs, and the module's capture lock.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        device: torch.device,
        parts: int,
        online: Callable[[Any, Any, Any], Any],
        opened: Callable[[Sequence[Any]], Opened],
        through: Callable[[Any, LoggedRun, ReplayRun], None],
        locks: tuple[AbstractContextManager[Any], CaptureLock],
    ) -> None:
        self.module, self.original, self.device, self.parts = module, forward, device, parts
        self.opened, self.through, self._online = opened, through, online
        self.forward_lock, self.lock = locks
        self._regions: dict[Any, list[_ReplayedRegion]] = {}
        self._retired = weakref.WeakSet[_ReplayedRegion]()
        """Regions of kinds that now use the mode; a forward of theirs may still wait for its backward."""
        self.why_not: dict[Any, str] = {}
        """Reason why a kind of call permanently uses the mode."""

    def forward(self, key: Any, args: Any, kwargs: Any) -> Any:
        """Run the module's forward along a path, or under the mode."""
        regions = self._regions.get(key)
        if not regions:
            return self._online(key, args, kwargs)
        # A path was logged with the whole budget, and does not hold together with another forward's values.
        if self.waiting_bytes():
            # The mode preempts the waiting forward, or evicts it down to half of the budget.
            self.never(key, _NOT_ALONE)
            return self._online(key, args, kwargs)
        return regions[0].forward(*args, **kwargs)

    def wants(self, key: Any) -> bool:
        """Return whether a run of this kind should be logged."""
        known = self._regions.get(key)
        if key is None or key in self.why_not:
            return False
        return len(self._regions) < _MOST_KINDS if known is None else len(known) < _MOST_PATHS

    def note(self, key: Any, logged: LoggedRun | None) -> None:
        """Add the log of a run of this kind under the mode; None if other forwards ran in between."""
        if logged is None or logged.log.why_not:
            self.never(key, _NOT_ALONE if logged is None else logged.log.why_not)
            return
        regions = self._regions.setdefault(key, [])
        regions.append(_ReplayedRegion(self, key, logged, partial(self._instead, key, len(regions))))

    def _all(self) -> Iterator[_ReplayedRegion]:
        yield from self._retired
        for regions in self._regions.values():
            yield from regions

    def _instead(self, key: Any, at: int, *args: Any, **kwargs: Any) -> Any:
        regions = self._regions[key]
        if not regions[at].is_captured and not regions[at].tries_again:
            self.never(key, regions[at].runs.why_plain)
        elif at + 1 < len(regions):
            return regions[at + 1].forward(*args, **kwargs)
        return self._online(key, args, kwargs)

    def never(self, key: Any, why: str) -> None:
        """Use the mode for this kind from now on."""
        if key is not None and len(self.why_not) < _MOST_KINDS:
            self.why_not[key] = why
        # Kept weakly: a forward of theirs may still wait, and counts as memory until its backward has run.
        self._retired.update(self._regions.pop(key, ()))


class _ReplayedRegion(ScheduledRegion):
    """A region along one path."""

    _most_alike = 1  # a call that differs takes another path instead of another capture

    def __init__(self, replayer: Replayer, key: Any, logged: LoggedRun, instead: Callable[..., Any]) -> None:
        # No schedule: the rematerializer decides, and the region only captures and guards.
        super().__init__(replayer.module, Schedule("", (), ()), replayer.device, instead, replayer.lock)
        self._original, self._replayer, self._key, self._logged = replayer.original, replayer, key, logged

    @property
    def is_captured(self) -> bool:
        """Return whether there is a tape to replay."""
        return any(hasattr(each, "tape") for known in self._captured.values() for each in known)

    def waiting_bytes(self) -> int:
        """Return the bytes held by forwards that wait for their backward."""
        called = [each for run in self._runs() if isinstance(run, PreemptibleRun) for each in run.called()]
        return sum(each.used_bytes() for each in self._waiting()) + held_bytes(called)

    def preempt(self) -> None:
        """Preempt its waiting forwards; evict from those that cannot be preempted."""
        for run in self._runs():
            if isinstance(run, PreemptibleRun):
                run.preempt()
        for each in self._waiting():
            each.preempt()

    def _run(self, captured: Any, args: Any, kwargs: Any) -> ScheduledRun:
        run = OutputsRun(self, captured)
        run.called_with(args, kwargs, self._replayer.again)
        run.notify_with(partial(self._replayer.never, self._key))
        return run

    def _waiting(self) -> list[ReplayRun]:
        return [run.saved[0][0] for run in self._runs() if run.saved]

    def _wanted(self) -> tuple[dict[int, GradientLike], ...]:
        return (self._logged.gradients,)

    def _differs(self, tape: Tape) -> str:
        path = path_of(tape, self._logged)
        if isinstance(path, str):
            return path
        return why_outputs_differ(tape)

    def _coded(self, tape: Tape) -> Any:
        path = path_of(tape, self._logged)
        if isinstance(path, str):  # other gradient strides: convert the gradients to those of the first code
            return next(iter(self._captured.values()))[0].first  # type: ignore[union-attr]
        random_state = partial(RandomState.capture, self.module)
        return _ReplayedCode(
            self, Route(tape, path, self._logged, self._replayer.parts, random_state, self._device)
        )

    def begin(self, route: Route, state: Sequence[Tensor], inputs: Sequence[Any]) -> ReplayRun:
        """Return a run with its own rematerializer, whose background includes other waiting forwards."""
        with self._replayer.forward_lock:
            # Under the lock: the background counts other waiting forwards, which another thread may begin or
            # preempt.
            opened = self._replayer.opened(inputs)
        return ReplayRun(route, *opened, state, inputs)

    def taken(self, saved: list[Any]) -> ReplayRun:
        """Return the run whose backward begins, so that a forward in another thread cannot preempt it any
        more.
        """
        with self._replayer.forward_lock:
            # A run whose backward has begun must no longer be found by `preempt`.
            run: ReplayRun = saved.pop()[0]
        return run

    def through(self, run: ReplayRun) -> None:
        """Report that the backward of `run` has ended."""
        self._replayer.through(self._key, self._logged, run)


class _ReplayedCode:
    """Forward and backward of one tape, in the form that `ScheduledRegion` calls."""

    def __init__(self, region: _ReplayedRegion, route: Route) -> None:
        self.tape, self.ready_order, self._region, self._route = route.tape, route.ready_order, region, route
        # Not known before it runs; `refuses` of the techniques excludes memtune's own early updates.
        self.read_later: tuple[int, ...] = ()

    def forward(
        self, state: Sequence[Tensor], inputs: Sequence[Any]
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """Return the outputs, and the values that backward needs."""
        run = self._region.begin(self._route, state, inputs)
        return run.forward(), (run, *(inputs[number] for number in self._route.inputs_of_backward))

    def backward(
        self, _: Sequence[Tensor], saved: list[Any], gradients: list[Any], ready: list[Tensor]
    ) -> Generator[int, None, list[Tensor]]:
        """Run backward; see `codegen.Code.backward`."""
        run = self._region.taken(saved)
        found = yield from run.backward(self._route, gradients, ready)
        self._region.through(run)
        return found
