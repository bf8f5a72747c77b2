"""Cache of schedules made from the evicting region's decisions after a few equal runs in a row; they need no
dispatch mode.

Runs are equal if the same ops are called in the same order with the same shapes and other arguments. Each
case (arguments of the module, existing gradients and optimizer state) is counted separately. A schedule has
the latest decisions: the order of first runs and replays. It frees every value after its last reader, so it
never holds more than the policy did.

Before each run the guards are checked (`activations.capture.guards`). A difference ends the schedule with one
warning, as does a forward that begins while another waits for its backward, whose values then count as memory
that cannot be evicted.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memtune.activations.capture import CaptureLock, GradientLike, Slot, Tape
from memtune.activations.eviction.evictable_tensor import ReplayRecord
from memtune.activations.eviction.op_metadata import Key, OpMetadata, key_of
from memtune.activations.schedules import ScheduledRegion
from memtune.program import Action, Schedule, ScheduleStep, build_schedule, find_schedule_error

_MOST_CASES = 64
"""Maximal number of remembered cases; further ones remain online."""


@dataclass(frozen=True, eq=False)
class Decided:
    """Decisions of one forward and backward."""

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
    """It remains online from now on."""


class ScheduleCache:
    """Counter of equal runs that turns their decisions into schedules.

    Args:
        module: The module that runs.
        forward: The module's own forward.
        online: Function that runs it under the policy, given case, positional and keyword arguments.
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
        """Regions of ended cases; a forward of theirs may still wait for its backward."""
        self._warned, self._ended_steps = False, 0
        self.why_online = ""
        """Reason why the last run was decided online although a schedule was due."""

    def ready(self, key: Any, *, alone: bool) -> ScheduledRegion | None:
        """Return the region with the schedule of this case, or None."""
        # A schedule was decided for one forward at a time, so a waiting forward ends it.
        case = self.cases.get(key)
        if case is None or case.frozen is None:
            return None
        if not alone or self.waiting_bytes():
            self.end(key, "a forward begins before the backward of the previous one")
            return None
        return case.frozen

    def waiting_bytes(self) -> int:
        """Return the bytes held by forwards that wait for their backward."""
        return sum(each.waiting_bytes() for each in self._all())

    def _all(self) -> list[_CachedRegion]:
        return [*(case.frozen for case in self.cases.values() if case.frozen is not None), *self._retired]

    @property
    def frozen_steps(self) -> int:
        """Number of runs of schedules so far."""
        return self._ended_steps + sum(
            case.frozen.runs.frozen for case in self.cases.values() if case.frozen is not None
        )

    def count_run(self, key: Any, decided: Decided | None) -> None:
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
        # `None` breaks the row: a run with other forwards in between had a smaller budget.
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
            # Weakly: it goes with the last graph that refers to its run.
            self._retired.add(case.frozen)
        self._ended_steps += ran
        case.ended, case.frozen, case.decided, self.why_online = True, None, None, why
        if ran and not self._warned:
            self._warned = True
            warnings.warn(
                f"memtune decides evictions while the model runs again, which is slower: {why}", stacklevel=4
            )

    def run_online(self, key: Any, why: str, tries_again: bool, args: Any, kwargs: Any) -> Any:
        """Run online because a schedule cannot run, this time or ever."""
        if not tries_again:
            self.end(key, why)
        return self._online(key, args, kwargs)

    @property
    def region(self) -> tuple[nn.Module, Callable[..., Any], torch.device, CaptureLock]:
        """The module, its own forward, its device, and its capture lock."""
        return self._module, self._forward, self._device, self._lock


class _CachedRegion(ScheduledRegion):
    """Region under a schedule, which is made from decisions when the ops are captured."""

    _most_alike = 1  # a difference ends the schedule instead of capturing again

    def __init__(self, schedule_cache: ScheduleCache, key: Any, decided: Decided) -> None:
        module, forward, device, lock = schedule_cache.region
        super().__init__(module, Schedule("", (), ()), device, self._back, lock)
        self._original, self._cache, self._key, self._decided = forward, schedule_cache, key, decided

    def _back(self, *args: Any, **kwargs: Any) -> Any:
        return self._cache.run_online(self._key, self.runs.why_plain, self.tries_again, args, kwargs)

    def _wanted(self) -> tuple[dict[int, GradientLike], ...]:
        return (self._decided.gradients,)

    def _differs(self, tape: Tape) -> str:
        # Before the base class' check, which compares the tape with the schedule made here.
        found = why_outputs_differ(tape) or schedule_of(tape, self._decided)
        if isinstance(found, str):
            return found
        self.schedule = found
        return super()._differs(tape)


_NO_GRADIENT = "one of its outputs got no gradient, but may get one in another step"


def why_outputs_differ(tape: Tape) -> str:
    """Return why `tape` needs the mode: an output without a gradient that may get one; '' if it does not."""
    # If all outputs with a gradient are scalars, the model returns its own loss: others are taken to
    # have none.
    outputs = (tape.outputs[at] for at in tape.with_gradient)
    has_own_loss = all(isinstance(each, Slot) and each.size == () for each in outputs)
    return "" if tape.with_gradient == tape.differentiable or has_own_loss else _NO_GRADIENT


def schedule_of(tape: Tape, decided: Decided) -> Schedule | str:
    """Return the schedule that repeats the decisions, or the reason why there is none."""
    # Ops that are not on the tape (autograd's handling of gradients) are skipped.
    found = places_of(tape, decided.ran, decided.n_forward)
    if isinstance(found, str):
        return found
    op_at = {at: op for op, at in enumerate(found)}  # number among what ran → op of the tape
    again: defaultdict[int, list[ScheduleStep]] = defaultdict(list)
    for each in decided.replays:
        if each.which in op_at:
            along = tuple(sorted(op_at[at] for at in each.along))
            again[each.before].append(ScheduleStep(Action.COMPUTE, op_at[each.which], along, each.parts))
    parts: tuple[list[int | ScheduleStep], list[int | ScheduleStep]] = ([], [])
    for at in range(len(decided.ran)):
        part = parts[at >= decided.n_forward]
        # Replays come right before the op that needed them.
        part += again[at]
        if at in op_at:
            part.append(op_at[at])
    schedule = build_schedule(tape.graph, *parts, made_by="online decisions")
    return find_schedule_error(tape.graph, schedule) or schedule


def places_of(tape: Tape, ran: Sequence[OpMetadata], n_forward: int) -> list[int] | str:
    """Return for each op of the tape its number among the ops that `ran`, or why there is none."""
    # Ops that are not on the tape (autograd's handling of gradients) are skipped.
    found: list[int] = []
    at, end = 0, len(ran)
    for op, call in enumerate(tape.calls):
        wanted = _key_on_fake_tensors(key_of(call.func, call.args, call.kwargs))
        while at < end and (
            ran[at].about.func is not call.func or _key_on_fake_tensors(ran[at].key) != wanted
        ):
            at += 1
        # An op of forward found in backward (or the reverse) belongs to another computation.
        if at == end or (at < n_forward) != (op < tape.graph.n_forward):
            return f"{call.func} ran in another place in the decided run"
        found.append(at)
        at += 1
    return found


def _key_on_fake_tensors(key: Key) -> Key:
    """Return the part of a key that fake tensors share; dtypes and sizes of kernels' own saves may differ."""
    return tuple(
        each[0] if isinstance(each, tuple) and each and isinstance(each[-1], torch.dtype) else each
        for each in key[:4]
    )
