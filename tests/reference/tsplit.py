"""TSPLIT's greedy planner in plain numpy: slow, and independent of the native one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memtune.activations.offload.tsplit_planner import Problem, _Link
from memtune.program.step import F64, I64

_ALL = 1 << 62


def greedy_by_hand(problem: Problem, budget_bytes: int, *, beyond: bool) -> list[int]:
    """Return the same as `memtune.activations.offload.tsplit_planner.greedy`."""
    state = _State(problem)
    while True:
        moment = int(state.live.argmax())
        excess = int(state.live[moment]) - budget_bytes
        action = -1 if excess <= 0 else state.cheapest(moment, _ALL if beyond else excess)
        if action < 0:
            return state.choice
        state.take(action)


@dataclass(eq=False)
class _State:
    """The timeline under the actions chosen so far."""

    problem: Problem
    choice: list[int] = field(default_factory=list)
    live: I64 = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        columns = self.problem.columns
        self.choice, self.live = [0] * len(self.problem.tensors), self.problem.live_bytes.copy()
        self._taken = np.zeros(len(columns.tensor), bool)
        # Actions that were replaced; they are never chosen again, so that the search ends.
        self._given_up = np.zeros(len(columns.tensor), bool)

    def cheapest(self, moment: int, excess_bytes: int) -> int:
        """Return the action with the least added time per byte freed in `moment`, -1 for none.

        At most `excess_bytes` of the freed bytes count.
        """
        columns, n_actions = self.problem.columns, len(self._taken)
        here = (columns.first <= moment) & (moment < columns.stop)
        freed = np.bincount(columns.free_action[here], columns.n_bytes[here], n_actions).astype(np.float64)
        seconds = self._seconds()
        gain, cost = freed - self._now(freed), seconds - self._now(seconds)
        usable = (gain > 0) & ~self._taken & ~self._given_up & ~self._decided()
        rows = np.flatnonzero(usable)
        if not len(rows):
            return -1
        per_byte = np.maximum(cost[rows], 0.0) / np.minimum(gain[rows], excess_bytes)
        return int(rows[np.lexsort((rows, -gain[rows], per_byte))[0]])

    def take(self, action: int) -> None:
        """Choose `action`, instead of the actions of its tensor or of the tensor's parts."""
        columns = self.problem.columns
        tensor = int(columns.tensor[action])
        for other in np.flatnonzero(self._taken & self._replaced(tensor)).tolist():
            self._change(other, 1)
            self._taken[other], self._given_up[other] = False, True
            self.choice[columns.tensor[other]] = 0
        self._change(action, -1)
        self._taken[action] = True
        self.choice[tensor] = int(columns.number[action])

    def _replaced(self, tensor: int) -> npt.NDArray[np.bool_]:
        columns = self.problem.columns
        found: npt.NDArray[np.bool_] = (columns.tensor == tensor) | (
            columns.part_of[columns.tensor] == tensor
        )
        return found

    def _change(self, action: int, sign: int) -> None:
        columns = self.problem.columns
        for row in np.flatnonzero(columns.free_action == action).tolist():
            self.live[columns.first[row] : columns.stop[row]] += sign * columns.n_bytes[row]

    def _now(self, values: F64) -> F64:
        """Return (a,) the sum of `values` of the chosen actions that each action would replace."""
        columns, n_tensors = self.problem.columns, len(self.choice)
        mine = np.zeros(n_tensors)
        mine[columns.tensor[self._taken]] = values[self._taken]  # one action per tensor
        parts = np.flatnonzero(columns.part_of >= 0)
        np.add.at(mine, columns.part_of[parts], mine[parts])
        found: F64 = mine[columns.tensor]
        return found

    def _decided(self) -> npt.NDArray[np.bool_]:
        """Return (a,) True for actions on parts of a tensor for which an action is chosen."""
        columns = self.problem.columns
        whole = columns.part_of[columns.tensor]
        found: npt.NDArray[np.bool_] = (whole >= 0) & (np.append(self.choice, 0)[whole] > 0)
        return found

    def _seconds(self) -> F64:
        """Return (a,) the time that each action adds to the chosen ones; for those, their current time."""
        columns = self.problem.columns
        found: F64 = columns.more_s.copy()
        for link in columns.links:
            found += _link_waits(link, self._taken, len(found))
        return found


def _link_waits(link: _Link, taken: npt.NDArray[np.bool_], actions: int) -> F64:
    """Return (actions,) seconds that compute waits for each, in addition to those `taken`; for these, the
    wait now.
    """
    mine = taken[link.action]
    order = np.argsort(link.start_s[mine], kind="stable")
    starts, ends, took = (column[mine][order] for column in (link.start_s, link.end_s, link.copy_s))
    after = np.searchsorted(starts, link.start_s, side="right")
    following = np.append(starts, np.inf)[after]
    own = _waits(link.copy_s, link.start_s, np.minimum(link.end_s, following))
    if len(starts):  # the copy before must finish earlier
        before = np.maximum(after - 1, 0)
        until = np.minimum(ends[before], np.append(starts[1:], np.inf)[before])
        earlier = np.minimum(until, link.start_s)
        later = _waits(took[before], starts[before], earlier) - _waits(took[before], starts[before], until)
        own += np.where((after > 0) & ~mine, later, 0.0)
    found: F64 = np.bincount(link.action, own, actions).astype(np.float64)
    return found


def _waits(seconds: F64, start_s: F64, end_s: F64) -> F64:
    found: F64 = np.maximum(seconds - np.maximum(end_s - start_s, 0.0), 0.0)
    return found
