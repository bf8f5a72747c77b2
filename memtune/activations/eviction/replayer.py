"""Repeats logged runs of the evicting region op by op without a dispatch mode.

Rule 1. The first run of a new kind uses the mode and is logged (`activations.eviction.decision_log`). From
the second one on its ops (`activations.capture.tape`) run one after the other. The logged calls are replayed
on the rematerializer; they do not depend on the ops' outputs, so several ops may be decided in one go. The
decisions are applied between ops: evictions and replays. So decisions and accounted bytes equal those under
the mode.
Rule 2. Before each run the guards are checked (`activations.capture.guards`). A call that differs takes
another logged path, or the mode with a log.
Rule 3. Only the run's value list references each value, so that an eviction frees it. If the caller holds an
output for longer than in the logged run, it is held in the rematerializer as long.
Rule 4. A forward that begins while another waits for its backward uses the mode, as does its kind from then
on. The waiting run is preempted (`activations.eviction.preemption`), or evicted down to half of the budget if
it cannot be; the new forward has the bytes that it does not hold.
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
from memtune.activations.schedules import FrozenRegion, FrozenRun, held_bytes
from memtune.program import Schedule
from memtune.runtime import RandomState

_MOST_KINDS = 64
_MOST_PATHS = 4
"""Of one kind of call; kinds with ever new paths use the mode."""
_NOT_ALONE = "a forward begins before the backward of the one before it"


class Opened(NamedTuple):
    """A rematerializer for one forward and its backward."""

    opened: Callable[[], _native.Rematerializer]
    """Makes one, the same each time."""
    budget_bytes: int
    """For the values alone."""
    background_bytes: int


class Replayer(WaitingForwards):
    """The logged paths, by kind of call.

    Args:
        module: The module that runs.
        forward: The module's own forward.
        device: Device of the module.
        parts: Number of parts of an op that runs in parts.
        online: Runs it under the mode: with the kind, positional and keyword arguments.
        opened: Makes rematerializers for these arguments.
        through: Called at the end of each run: kind, log, run.
        locks: A lock held while a forward runs; and the module's capture lock.
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
        self.turn, self.lock = locks
        self._regions: dict[Any, list[_ReplayedRegion]] = {}
        self._retired = weakref.WeakSet[_ReplayedRegion]()
        """Regions of kinds that now use the mode: a forward along one of them may still wait for its
        backward.
        """
        self.why_not: dict[Any, str] = {}
        """Reason why a kind of call permanently uses the mode."""

    def forward(self, key: Any, args: Any, kwargs: Any) -> Any:
        """Run the module's forward along a path, or under the mode."""
        regions = self._regions.get(key)
        if not regions:
            return self._online(key, args, kwargs)
        if self.waiting_bytes():
            self.never(key, _NOT_ALONE)
            return self._online(key, args, kwargs)
        return regions[0].forward(*args, **kwargs)

    def wants(self, key: Any) -> bool:
        """Return whether a run of this kind should be logged."""
        known = self._regions.get(key)
        if key is None or key in self.why_not:
            return False
        return len(self._regions) < _MOST_KINDS if known is None else len(known) < _MOST_PATHS

    def note(self, key: Any, noted: LoggedRun | None) -> None:
        """Add the log of a run of this kind under the mode; None: other forwards ran in between."""
        if noted is None or noted.notes.why_not:
            self.never(
                key,
                "a forward begins before the backward of the one before it"
                if noted is None
                else noted.notes.why_not,
            )
            return
        regions = self._regions.setdefault(key, [])
        regions.append(_ReplayedRegion(self, key, noted, partial(self._instead, key, len(regions))))

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
        self._retired.update(self._regions.pop(key, ()))


class _ReplayedRegion(FrozenRegion):
    """A region along one path."""

    _most_alike = 1  # what differs takes another path

    def __init__(self, followers: Replayer, key: Any, noted: LoggedRun, instead: Callable[..., Any]) -> None:
        super().__init__(followers.module, Schedule("", (), ()), followers.device, instead, followers.lock)
        self._original, self._followers, self._key, self._noted = followers.original, followers, key, noted

    @property
    def is_captured(self) -> bool:
        """Return whether there is a tape to replay."""
        return any(hasattr(each, "tape") for known in self._captured.values() for each in known)

    def waiting_bytes(self) -> int:
        """Return the bytes held by forwards that wait for their backward."""
        called = [each for run in self._runs() if isinstance(run, PreemptibleRun) for each in run.called()]
        return sum(each.used_bytes() for each in self._waiting()) + held_bytes(called)

    def give_way(self) -> None:
        """See `WaitingForwards.give_way`."""
        for run in self._runs():
            if isinstance(run, PreemptibleRun):
                run.give_way()
        for each in self._waiting():
            each.give_way()

    def _run(self, captured: Any, args: Any, kwargs: Any) -> FrozenRun:
        run = OutputsRun(self, captured)
        run.called_with(args, kwargs, self._followers.again)
        run.tells(partial(self._followers.never, self._key))
        return run

    def _waiting(self) -> list[ReplayRun]:
        return [run.saved[0][0] for run in self._runs() if run.saved]

    def _wanted(self) -> tuple[dict[int, GradientLike], ...]:
        return (self._noted.gradients,)

    def _differs(self, tape: Tape) -> str:
        path = path_of(tape, self._noted)
        if isinstance(path, str):
            return path
        return why_outputs_differ(tape)

    def _coded(self, tape: Tape) -> Any:
        path = path_of(tape, self._noted)
        if isinstance(path, str):  # with gradients of other strides: those are made alike
            return next(iter(self._captured.values()))[0].first  # type: ignore[union-attr]
        random_state = partial(RandomState.capture, self.module)
        return _ReplayedCode(
            self, Route(tape, path, self._noted, self._followers.parts, random_state, self._device)
        )

    def begin(self, route: Route, state: Sequence[Tensor], inputs: Sequence[Any]) -> ReplayRun:
        """Return a run with its own rematerializer, whose background includes other waiting forwards."""
        with self._followers.turn:
            opened = self._followers.opened(inputs)
        return ReplayRun(route, *opened, state, inputs)

    def taken(self, saved: list[Any]) -> ReplayRun:
        """Return the run whose backward begins: a forward in another thread cannot preempt it any more."""
        with self._followers.turn:
            run: ReplayRun = saved.pop()[0]
        return run

    def through(self, run: ReplayRun) -> None:
        """Report that the backward of `run` has ended."""
        self._followers.through(self._key, self._noted, run)


class _ReplayedCode:
    """Forward and backward of one tape, as `FrozenRegion` calls them."""

    def __init__(self, region: _ReplayedRegion, route: Route) -> None:
        self.tape, self.lands, self._region, self._route = route.tape, route.lands, region, route

    def forward(
        self, state: Sequence[Tensor], inputs: Sequence[Any]
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """Return the outputs, and the values that backward needs."""
        run = self._region.begin(self._route, state, inputs)
        return run.forward(), (run, *(inputs[number] for number in self._route.inputs_of_backward))

    def backward(
        self, _: Sequence[Tensor], saved: list[Any], gradients: list[Any], landed: list[Tensor]
    ) -> Generator[int, None, list[Tensor]]:
        """Run backward; see `codegen.Code.backward`."""
        run = self._region.taken(saved)
        found = yield from run.backward(self._route, gradients, landed)
        self._region.through(run)
        return found
