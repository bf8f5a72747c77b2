"""Planner of TSPLIT: offloads saved tensors, in full or in parts, to stay below a budget.

The plan is made on the step's memory timeline. At the peak, the action with the least added time per byte
freed there is taken, the timeline is updated, and the new peak is found, until it is below the budget (Nie et
al., ICDE 2022, algorithm 2). A copy adds its exposed time. A link carries one copy at a time, so a copy must
also be over when the next one begins.

Finally, actions that later ones have made superfluous are undone. This is no proof of the least time: on
random steps of up to eight tensors most plans are optimal, those in
`tests/activations/offload/test_tsplit_planner.py` cost at most three times the optimum, and of 600 others one
cost six times.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from memtune import _native
from memtune.program import F64, I32, I64

_EXHAUSTIVE = 1 << 13
"""If the greedy algorithm fails and there are at most this many choices, all are evaluated."""


class Copy(NamedTuple):
    """Transfer over one direction of the link, on the clock of the plain step's compute."""

    start_s: float
    """Earliest start; a reload also does not start before the previous reload was waited for."""
    until_s: float
    """Time at which compute waits for its end; for a copy to the host, the next copy waits as well."""
    seconds: float


class Action(NamedTuple):
    """Alternative to keeping a tensor on the device."""

    frees: tuple[tuple[int, int, int], ...]
    """(first, stop, bytes): device bytes freed in the moments first to stop - 1; negative: needed."""
    out: tuple[Copy, ...] = ()
    """Copies to the host, in order."""
    back: tuple[Copy, ...] = ()
    more_s: float = 0.0
    """Seconds added by running its ops in parts."""


@dataclass(frozen=True)
class Tensor:
    """One decision: 0 keeps the tensor, i takes the i-th action."""

    actions: tuple[Action, ...]
    part_of: int = -1
    """Tensor whose action, once taken, decides on this one as well: a split module saves both."""


@dataclass(frozen=True, eq=False)
class Problem:
    """A step's timeline and its decisions."""

    live_bytes: I64
    """(moments,) live bytes without any action."""
    tensors: tuple[Tensor, ...]

    def live_under(self, choice: Sequence[int]) -> I64:
        """Return (moments,) bytes on the device."""
        change = np.zeros(len(self.live_bytes) + 1, np.int64)
        for action in self.actions_of(choice):
            for first, stop, n_bytes in action.frees:
                change[first] -= n_bytes
                change[stop] += n_bytes
        found: I64 = self.live_bytes + np.cumsum(change[:-1])
        return found

    def added_s(self, choice: Sequence[int]) -> float:
        """Return the seconds added to the plain step."""
        return _added_s(self.actions_of(choice))

    def actions_of(self, choice: Sequence[int]) -> list[Action]:
        """Return the actions of a choice."""
        return [tensor.actions[i - 1] for tensor, i in zip(self.tensors, choice, strict=True) if i]

    def is_possible(self, choice: Sequence[int]) -> bool:
        """Return whether no tensor is decided twice."""
        return not any(
            i and self._decided(tensor, choice) for tensor, i in zip(self.tensors, choice, strict=True)
        )

    def _decided(self, tensor: Tensor, choice: Sequence[int]) -> bool:
        return tensor.part_of >= 0 and choice[tensor.part_of] > 0

    @cached_property
    def floor_bytes(self) -> int:
        """Lower bound of all choices' peaks: each tensor frees its most over all of its actions' moments."""
        freed = np.zeros(len(self.live_bytes) + 1, np.int64)
        for tensor in self.tensors:
            most = max((sum(max(n, 0) for _, _, n in action.frees) for action in tensor.actions), default=0)
            rows = [(first, stop) for action in tensor.actions for first, stop, _ in action.frees]
            if rows:
                # Over the union of moments, because the best action may differ by moment: still a lower
                # bound.
                freed[min(first for first, _ in rows)] += most
                freed[max(stop for _, stop in rows)] -= most
        return int((self.live_bytes - np.cumsum(freed[:-1])).max(initial=0))

    @cached_property
    def columns(self) -> _Columns:
        """The actions as arrays."""
        return _Columns.of(self)


@dataclass(frozen=True)
class PlanResult:
    """A solution of the planner."""

    choice: tuple[int, ...]
    peak_bytes: int
    added_s: float
    is_within: bool
    """The peak is at most the budget; if not, the greedy algorithm found no action that frees more."""


def solve(problem: Problem, budget_bytes: int) -> PlanResult:
    """Return a choice whose peak is at most `budget_bytes`, or one with a smaller peak if there is none."""
    # Bytes freed beyond the budget may count or not. Each rule is better on some steps, so both are tried.
    found = [_followed(problem, budget_bytes, beyond=each) for each in (False, True)]
    within = [each for each in found if each.is_within]
    if not within:
        return _exhaustive(problem, budget_bytes) or min(found, key=lambda each: each.peak_bytes)
    return min(within, key=lambda each: each.added_s)


def _followed(problem: Problem, budget_bytes: int, *, beyond: bool) -> PlanResult:
    choice = greedy(problem, budget_bytes, beyond=beyond)
    if int(problem.live_under(choice).max(initial=0)) <= budget_bytes:
        choice = _undo_superfluous(problem, choice, budget_bytes)
    return _result(problem, choice, budget_bytes)


def greedy(problem: Problem, budget_bytes: int, *, beyond: bool) -> list[int]:
    """Take actions until the peak is within the budget or none frees bytes at it.

    The implementation is native, `csrc/tsplit/greedy.h`.
    """
    columns = problem.columns
    out, back = ((link.action, link.start_s, link.end_s, link.copy_s) for link in columns.links)
    found: list[int] = _native.tsplit_greedy(
        problem.live_bytes,
        columns.tensor,
        columns.number,
        columns.part_of,
        columns.more_s,
        columns.free_action,
        columns.first,
        columns.stop,
        columns.n_bytes,
        out,
        back,
        budget_bytes,
        beyond,
    ).tolist()
    return found


def _result(problem: Problem, choice: Sequence[int], budget_bytes: int) -> PlanResult:
    peak = int(problem.live_under(choice).max(initial=0))
    return PlanResult(tuple(choice), peak, problem.added_s(choice), peak <= budget_bytes)


def _undo_superfluous(problem: Problem, choice: list[int], budget_bytes: int) -> list[int]:
    """Return `choice` without actions that later ones have made superfluous, most expensive first."""
    live = problem.live_under(choice)
    taken = [i for i, each in enumerate(choice) if each]
    alone = {i: _added_s([problem.tensors[i].actions[choice[i] - 1]]) for i in taken}
    for i in sorted(taken, key=lambda each: (-alone[each], each)):
        frees = problem.tensors[i].actions[choice[i] - 1].frees
        if all(
            live[first:stop].max(initial=0) + n_bytes <= budget_bytes
            for first, stop, n_bytes in frees
            if n_bytes > 0
        ):
            # Only rising moments can exceed the budget; a negative entry frees bytes when its action is
            # undone.
            for first, stop, n_bytes in frees:
                live[first:stop] += n_bytes
            # Later iterations see the memory that this one takes back, so each undo is checked against all
            # before.
            choice[i] = 0
    return choice


def choices(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield all possible choices."""
    every = itertools.product(*(range(len(tensor.actions) + 1) for tensor in problem.tensors))
    return (choice for choice in every if problem.is_possible(choice))


def _exhaustive(problem: Problem, budget_bytes: int) -> PlanResult | None:
    """Return the fastest choice within the budget, if there are few enough to evaluate all."""
    count = 1
    for tensor in problem.tensors:
        count *= len(tensor.actions) + 1
        if count > _EXHAUSTIVE:
            return None
    found = (_result(problem, choice, budget_bytes) for choice in choices(problem))
    return min(
        (each for each in found if each.is_within),
        key=lambda each: (each.added_s, each.peak_bytes),
        default=None,
    )


def _added_s(taken: Sequence[Action]) -> float:
    out = [copy for each in taken for copy in each.out]
    # On the reversed clock a reload is late where a copy to the host would be, so one rule serves both.
    back = [_on_reversed_clock(copy) for each in taken for copy in each.back]
    return sum(each.more_s for each in taken) + _stalls(out) + _stalls(back)


def _on_reversed_clock(copy: Copy) -> Copy:
    """Return a reload on the reversed clock: it starts when needed and may last until it can begin."""
    return Copy(-copy.until_s, -copy.start_s, copy.seconds)


def _stalls(copies: list[Copy]) -> float:
    """Return the seconds that compute waits for `copies` on one link."""
    copies = sorted(copies, key=lambda each: (each.start_s, each.until_s))
    # A link is serial: a copy that is still running when the next starts delays compute, like a late one.
    ends = [min(one.until_s, other.start_s) for one, other in itertools.pairwise(copies)]
    ends += [copies[-1].until_s] if copies else []
    return sum(
        max(0.0, each.seconds - max(0.0, end - each.start_s)) for each, end in zip(copies, ends, strict=True)
    )


@dataclass(frozen=True, eq=False)
class _Columns:
    """All actions as arrays. Legend: a = actions of all tensors, f = ranges that they free."""

    tensor: I32  # (a,)
    number: I32  # (a,) 1, 2, ... within its tensor
    part_of: I32  # (tensors,)
    more_s: F64  # (a,)
    free_action: I32  # (f,)
    first: I32  # (f,)
    stop: I32  # (f,)
    n_bytes: I64  # (f,)
    links: tuple[_Link, _Link]
    """Copies to the host; reloads, on the reversed clock."""

    @classmethod
    def of(cls, problem: Problem) -> _Columns:
        every = [
            (t, n, action)
            for t, each in enumerate(problem.tensors)
            for n, action in enumerate(each.actions, 1)
        ]
        frees = [(i, *each) for i, (_, _, action) in enumerate(every) for each in action.frees]
        tensor, number = (np.asarray([each[k] for each in every], np.int32) for k in (0, 1))
        action, first, stop, n_bytes = (np.asarray(column, np.int64) for column in _columns(frees))
        return cls(
            tensor,
            number,
            np.asarray([each.part_of for each in problem.tensors], np.int32),
            np.asarray([each.more_s for _, _, each in every], np.float64),
            action.astype(np.int32),
            first.astype(np.int32),
            stop.astype(np.int32),
            n_bytes,
            (
                _Link.of([each.out for _, _, each in every]),
                _Link.of([tuple(map(_on_reversed_clock, each.back)) for _, _, each in every]),
            ),
        )


@dataclass(frozen=True, eq=False)
class _Link:
    """Copies of all actions in one direction, one row each."""

    action: I32
    start_s: F64
    end_s: F64
    """Time at which it must be over, as far as its own action determines it."""
    copy_s: F64

    @classmethod
    def of(cls, ways: Sequence[tuple[Copy, ...]]) -> _Link:
        rows = []
        for i, way in enumerate(ways):
            copies = sorted(way, key=lambda each: each.start_s)
            # The copies of one action follow each other on the link, before other actions are considered.
            following = (*copies[1:], Copy(np.inf, 0.0, 0.0))
            rows += [
                (i, a.start_s, min(a.until_s, b.start_s), a.seconds)
                for a, b in zip(copies, following, strict=False)
            ]
        action, start, end, seconds = (np.asarray(column, np.float64) for column in _columns(rows))
        return cls(action.astype(np.int32), start, end, seconds)


def _columns(rows: Sequence[tuple[float, ...]]) -> list[list[float]]:
    # Not `zip(*rows)`, which has no columns where there are no rows.
    return [[row[k] for row in rows] for k in range(4)]
