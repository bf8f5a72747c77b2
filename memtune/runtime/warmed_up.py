"""What an online policy decided becomes a schedule, without a dispatch mode, once the same ops have run a few times in a row.

Rule 1. Ops are the same if each is called with the same shapes and all else equal, in the same order. What is looked at is how
        the module is called, and which gradients and optimizer state are there: each such case warms up by itself.
Rule 2. The latest decisions are frozen: in which order ops ran, and ran again, between which others. The schedule lets go of
        every value after its last reader, so it never holds more than the policy did.
Rule 3. The schedule is right for the captured ops (`schedule.wrong_with`), or it is not used. Before each run all that the
        capture took for granted is compared (`runtime.guards`); what differs ends the schedule, with one message.
Rule 4. A forward that begins while another one waits for its backward was never decided on: it ends the schedule, too, and the
        one that waits gives its memory back (`runtime.gives_way`).
Rule 5. A schedule is for gradients into the outputs that had one when it was decided; another one ends it
        (`runtime.other_outputs`).
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memtune.runtime.capture_lock import CaptureLock
from memtune.runtime.frozen import FrozenRegion
from memtune.runtime.gives_way import GivingRun
from memtune.runtime.online_values import Again
from memtune.runtime.op_facts import Facts
from memtune.runtime.other_outputs import OutputsRun, left_out
from memtune.runtime.same_ops import places_of
from memtune.runtime.tape import GradientLike, Tape
from memtune.runtime.waiting_forwards import WaitingForwards
from memtune.schedule import Action, Do, Schedule, scheduled, wrong_with

_MOST_CASES = 64
"""Ways of being called that are remembered; ever new ones stay online."""


@dataclass(frozen=True, eq=False)
class Decided:
    """What was decided in one forward and backward."""

    ran: list[Facts]
    """Every op, in the order of first runs."""
    n_forward: int
    replays: list[Again]
    """What ran again, in order."""
    gradients: dict[int, GradientLike]
    """What flowed in, by output of forward."""

    def same_ops(self, other: Decided) -> bool:
        """Whether the same ops ran on the same shapes."""
        same = self.n_forward == other.n_forward and self.gradients.keys() == other.gradients.keys()
        return same and self.ran == other.ran


@dataclass
class Case:
    """One way in which the module is called."""

    decided: Decided | None = None
    times: int = 0
    """How often in a row the same ops ran."""
    frozen: _Warmed | None = None
    ended: bool = False
    """It stays online from now on."""


class WarmUp(WaitingForwards):
    """Counts runs of the same ops, and freezes what was decided.

    Args:
        module: Whose forward and backward it is.
        forward: The module's own forward.
        online: Runs it under the policy: with the case, the arguments by position and those by name.
        freeze_after: Runs of the same ops until a schedule takes over; 0: never.
        device: Where the module computes.
        lock: Of all that captures the module.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], online: Callable[[Any, Any, Any], Any], freeze_after: int,
        device: torch.device, lock: CaptureLock,
    ) -> None:  # fmt: skip
        self._module, self._forward, self._online = module, forward, online
        self._freeze_after, self._device, self._lock = freeze_after, device, lock
        self.cases: dict[Any, Case] = {}
        self._retired = weakref.WeakSet[_Warmed]()
        """Of cases that have ended: a forward under one of them may still wait for its backward."""
        self._warned, self._ended_steps = False, 0
        self.why_online = ""
        """Why it was decided online the last time that a schedule should have run."""

    def ready(self, key: Any, *, alone: bool) -> FrozenRegion | None:
        """What runs the schedule of this case, if there is one and no forward waits for its backward."""
        case = self.cases.get(key)
        if case is None or case.frozen is None:
            return None
        if not alone or self.waiting_bytes():
            self.end(key, "a forward begins before the backward of the one before it")
            self.give_way()
            return None
        return case.frozen

    def _all(self) -> list[_Warmed]:
        return [*(case.frozen for case in self.cases.values() if case.frozen is not None), *self._retired]

    @property
    def frozen_steps(self) -> int:
        """Runs of schedules so far."""
        return self._ended_steps + sum(case.frozen.runs.frozen for case in self.cases.values() if case.frozen is not None)

    def note(self, key: Any, decided: Decided | None) -> None:
        """A forward and its backward are through; None: others ran in between."""
        if not self._freeze_after or key is None or (key not in self.cases and len(self.cases) >= _MOST_CASES):
            return
        case = self.cases.setdefault(key, Case())
        if case.ended:
            return
        before, case.decided = case.decided, decided
        again = decided is not None and before is not None and before.same_ops(decided)
        case.times = case.times + 1 if again else int(decided is not None)
        if case.frozen is None and case.times >= self._freeze_after and decided is not None:
            case.frozen = _Warmed(self, key, decided)

    def end(self, key: Any, why: str) -> None:
        """This case is decided online from now on; says so once, if a schedule had run."""
        case = self.cases[key]
        ran = 0
        if case.frozen is not None:
            ran = case.frozen.runs.frozen
            self._retired.add(case.frozen)
        self._ended_steps += ran
        case.ended, case.frozen, case.decided, self.why_online = True, None, None, why
        if ran and not self._warned:
            self._warned = True
            warnings.warn(f"memtune decides again while the model runs what to recompute, which is slower: {why}", stacklevel=4)

    def instead(self, key: Any, why: str, tries_again: bool, args: Any, kwargs: Any) -> Any:
        """A schedule cannot run, this time or ever."""
        if not tries_again:
            self.end(key, why)
        return self._online(key, args, kwargs)

    @property
    def region(self) -> tuple[nn.Module, Callable[..., Any], torch.device, CaptureLock]:
        """Module, its own forward, its device, and the lock of all that captures it."""
        return self._module, self._forward, self._device, self._lock


class _Warmed(FrozenRegion):
    """A region under a schedule that is made of decisions, when the ops are captured."""

    _most_alike = 1  # what differs ends the schedule

    def __init__(self, warm_up: WarmUp, key: Any, decided: Decided) -> None:
        module, forward, device, lock = warm_up.region
        super().__init__(module, Schedule("", (), ()), device, self._back, lock)
        self._original, self._warm_up, self._key, self._decided = forward, warm_up, key, decided

    def _back(self, *args: Any, **kwargs: Any) -> Any:
        return self._warm_up.instead(self._key, self.runs.why_plain, self.tries_again, args, kwargs)

    def _run(self, captured: Any, args: Any, kwargs: Any) -> GivingRun:
        run = OutputsRun(self, captured)
        run.called_with(args, kwargs, self._warm_up.again)
        run.tells(partial(self._warm_up.end, self._key))
        return run

    def _wanted(self) -> tuple[dict[int, GradientLike], ...]:
        return (self._decided.gradients,)

    def give_way(self) -> None:
        """See `WaitingForwards.give_way`."""
        for each in self._runs():
            if isinstance(each, GivingRun):
                each.give_way()

    def _differs(self, tape: Tape) -> str:
        found = left_out(tape) or schedule_of(tape, self._decided)
        if isinstance(found, str):
            return found
        self.schedule = found
        return super()._differs(tape)


def schedule_of(tape: Tape, decided: Decided) -> Schedule | str:
    """The schedule that does what was decided, or why there is none.

    Ops that the tape does not have are left out: what autograd does with gradients when they are there.
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
