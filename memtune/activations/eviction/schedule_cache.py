"""Turns decisions of the evicting region into a schedule after a few equal runs in a row.

A schedule needs no dispatch mode.

Rule 1. Runs are equal if the same ops are called in the same order with the same shapes and other arguments.
Each case (arguments of the module, existing gradients and optimizer state) is counted on its own.
Rule 2. The latest decisions are frozen: the order of first runs and replays. The schedule frees every value
after its last reader, so it never holds more than the policy did.
Rule 3. A schedule that is invalid for the captured ops (`schedule.wrong_with`) is not used. Before each run
the guards are checked (`activations.capture.guards`); a difference ends the schedule, with one message.
Rule 4. A forward that begins while another waits for its backward was never decided: it ends the schedule and
preempts the waiting one (`activations.eviction.preemption`).
Rule 5. A schedule is for gradients of the outputs that had one when it was decided; a gradient of another
output ends it (`activations.eviction.preemption`).
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memtune.activations.capture import CaptureLock, GradientLike, Tape
from memtune.activations.eviction.evictable_tensor import ReplayRecord
from memtune.activations.eviction.op_metadata import Key, OpMetadata, key_of
from memtune.activations.eviction.preemption import (
    OutputsRun,
    PreemptibleRun,
    WaitingForwards,
    why_outputs_differ,
)
from memtune.activations.schedules import FrozenRegion
from memtune.program import Action, Do, Schedule, scheduled, wrong_with

_MOST_CASES = 64
"""Most cases that are remembered; further ones stay online."""


@dataclass(frozen=True, eq=False)
class Decided:
    """The decisions of one forward and backward."""

    ran: list[OpMetadata]
    """Every op, in the order of first runs."""
    n_forward: int
    replays: list[ReplayRecord]
    """Second runs, in order."""
    gradients: dict[int, GradientLike]
    """Incoming gradients, by output of forward."""

    def same_ops(self, other: Decided) -> bool:
        """Return whether the same ops ran on the same shapes."""
        same = self.n_forward == other.n_forward and self.gradients.keys() == other.gradients.keys()
        return same and self.ran == other.ran


@dataclass
class Case:
    """One way in which the module is called."""

    decided: Decided | None = None
    times: int = 0
    """Number of equal runs in a row."""
    frozen: _CachedRegion | None = None
    ended: bool = False
    """It stays online from now on."""


class ScheduleCache(WaitingForwards):
    """Counts equal runs, and freezes their decisions.

    Args:
        module: The module that runs.
        forward: The module's own forward.
        online: Runs it under the policy: with the case, positional and keyword arguments.
        freeze_after: Number of equal runs until a schedule is used; 0: never.
        device: Device of the module.
        lock: The module's capture lock.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        online: Callable[[Any, Any, Any], Any],
        freeze_after: int,
        device: torch.device,
        lock: CaptureLock,
    ) -> None:
        self._module, self._forward, self._online = module, forward, online
        self._freeze_after, self._device, self._lock = freeze_after, device, lock
        self.cases: dict[Any, Case] = {}
        self._retired = weakref.WeakSet[_CachedRegion]()
        """Regions of ended cases: a forward under one of them may still wait for its backward."""
        self._warned, self._ended_steps = False, 0
        self.why_online = ""
        """Reason why the last run was decided online although a schedule was due."""

    def ready(self, key: Any, *, alone: bool) -> FrozenRegion | None:
        """Return the region with the schedule of this case, None without one.

        Also None while a forward waits for its backward: that ends the schedule.
        """
        case = self.cases.get(key)
        if case is None or case.frozen is None:
            return None
        if not alone or self.waiting_bytes():
            self.end(key, "a forward begins before the backward of the one before it")
            self.give_way()
            return None
        return case.frozen

    def _all(self) -> list[_CachedRegion]:
        return [*(case.frozen for case in self.cases.values() if case.frozen is not None), *self._retired]

    @property
    def frozen_steps(self) -> int:
        """Return the number of runs of schedules so far."""
        return self._ended_steps + sum(
            case.frozen.runs.frozen for case in self.cases.values() if case.frozen is not None
        )

    def note(self, key: Any, decided: Decided | None) -> None:
        """Count a forward and its backward under the mode; None: other forwards ran in between."""
        if (
            not self._freeze_after
            or key is None
            or (key not in self.cases and len(self.cases) >= _MOST_CASES)
        ):
            return
        case = self.cases.setdefault(key, Case())
        if case.ended:
            return
        before, case.decided = case.decided, decided
        again = decided is not None and before is not None and before.same_ops(decided)
        case.times = case.times + 1 if again else int(decided is not None)
        if case.frozen is None and case.times >= self._freeze_after and decided is not None:
            case.frozen = _CachedRegion(self, key, decided)

    def end(self, key: Any, why: str) -> None:
        """Decide this case online from now on; warn once if a schedule had run."""
        case = self.cases[key]
        ran = 0
        if case.frozen is not None:
            ran = case.frozen.runs.frozen
            self._retired.add(case.frozen)
        self._ended_steps += ran
        case.ended, case.frozen, case.decided, self.why_online = True, None, None, why
        if ran and not self._warned:
            self._warned = True
            warnings.warn(
                f"memtune decides again while the model runs what to recompute, which is slower: {why}",
                stacklevel=4,
            )

    def instead(self, key: Any, why: str, tries_again: bool, args: Any, kwargs: Any) -> Any:
        """Run online because a schedule cannot run, this time or ever."""
        if not tries_again:
            self.end(key, why)
        return self._online(key, args, kwargs)

    @property
    def region(self) -> tuple[nn.Module, Callable[..., Any], torch.device, CaptureLock]:
        """Return the module, its own forward, its device, and its capture lock."""
        return self._module, self._forward, self._device, self._lock


class _CachedRegion(FrozenRegion):
    """A region under a schedule, which is made from decisions when the ops are captured."""

    _most_alike = 1  # what differs ends the schedule

    def __init__(self, warm_up: ScheduleCache, key: Any, decided: Decided) -> None:
        module, forward, device, lock = warm_up.region
        super().__init__(module, Schedule("", (), ()), device, self._back, lock)
        self._original, self._warm_up, self._key, self._decided = forward, warm_up, key, decided

    def _back(self, *args: Any, **kwargs: Any) -> Any:
        return self._warm_up.instead(self._key, self.runs.why_plain, self.tries_again, args, kwargs)

    def _run(self, captured: Any, args: Any, kwargs: Any) -> PreemptibleRun:
        run = OutputsRun(self, captured)
        run.called_with(args, kwargs, self._warm_up.again)
        run.tells(partial(self._warm_up.end, self._key))
        return run

    def _wanted(self) -> tuple[dict[int, GradientLike], ...]:
        return (self._decided.gradients,)

    def give_way(self) -> None:
        """See `WaitingForwards.give_way`."""
        for each in self._runs():
            if isinstance(each, PreemptibleRun):
                each.give_way()

    def _differs(self, tape: Tape) -> str:
        found = why_outputs_differ(tape) or schedule_of(tape, self._decided)
        if isinstance(found, str):
            return found
        self.schedule = found
        return super()._differs(tape)


def schedule_of(tape: Tape, decided: Decided) -> Schedule | str:
    """Return the schedule that repeats the decisions, or why there is none.

    Ops that are not on the tape are skipped: autograd's handling of gradients.
    """
    found = places_of(tape, decided.ran, decided.n_forward)
    if isinstance(found, str):
        return found
    op_at = {at: op for op, at in enumerate(found)}  # number among what ran → op of the tape
    again: defaultdict[int, list[Do]] = defaultdict(list)
    for each in decided.replays:
        if each.which in op_at:
            along = tuple(sorted(op_at[at] for at in each.along))
            again[each.before].append(Do(Action.COMPUTE, op_at[each.which], along, each.parts))
    parts: tuple[list[int | Do], list[int | Do]] = ([], [])
    for at in range(len(decided.ran)):
        part = parts[at >= decided.n_forward]
        part += again[at]
        if at in op_at:
            part.append(op_at[at])
    schedule = scheduled(tape.graph, *parts, made_by="what was decided online")
    return wrong_with(tape.graph, schedule) or schedule


# Which of the ops that ran are the ops of a tape.
def places_of(tape: Tape, ran: Sequence[OpMetadata], n_forward: int) -> list[int] | str:
    """Return for each op of the tape its number among the ops that ran, or why there is none.

    Ops that are not on the tape are skipped: autograd's handling of gradients.

    Args:
        tape: The captured region.
        ran: Every op of one forward and backward, in order.
        n_forward: Number of them in forward.
    """
    found: list[int] = []
    at, end = 0, len(ran)
    for op, call in enumerate(tape.calls):
        wanted = _alike(key_of(call.func, call.args, call.kwargs))
        while at < end and (ran[at].about.func is not call.func or _alike(ran[at].key) != wanted):
            at += 1
        if at == end or (at < n_forward) != (op < tape.graph.n_forward):
            return f"{call.func} did not run where it does now"
        found.append(at)
        at += 1
    return found


def _alike(key: Key) -> Key:
    """Return the part of a key that is equal on fake tensors.

    Dtypes and the sizes of kernels' own saves may differ.
    """
    return tuple(
        each[0] if isinstance(each, tuple) and each and isinstance(each[-1], torch.dtype) else each
        for each in key[:4]
    )
