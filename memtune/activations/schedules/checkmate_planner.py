"""Checkmate: the rematerialization schedule of a graph with the least cost within a memory budget.

Jain et al. 2020, Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys, sections 4
and 5: the mixed-integer program over stages (node t runs for the first time in stage t) and its two-phase
rounding. If every rounded schedule exceeds the budget, the program itself is asked for any schedule within
it, so one is found wherever one exists and the time limit suffices. Two differences: a FREE variable is
bounded by each of its hazards separately, so that it need not be integer and the relaxation is tighter than
with the paper's sum; and the model includes workspace of nodes and other live bytes of stages.

HiGHS (through scipy, which only the search needs) solves both programs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]

THRESHOLDS = (0.05, 0.15, 0.25, 0.35, 0.5, 0.65, 0.75, 0.85, 0.95)
"""Thresholds on the relaxed S above which a node is kept; the cheapest schedule in the budget wins."""
EPSILONS = (0.0, 0.1)
"""Fractions of the budget that the relaxation leaves free for the rounding."""

_INFEASIBLE = 2
"""Status of HiGHS if it has proven that there is no solution."""
_STARTS, _TRIES = 3, 400
"""Number of rounded schedules that are improved, and of changes tried on each."""


@dataclass(frozen=True)
class Problem:
    """A graph in topological order, which is also the order of first runs."""

    cost_s: tuple[float, ...]
    """(n,) seconds of each node."""
    bytes: tuple[int, ...]
    """(n,) output bytes of each node."""
    reads: tuple[tuple[int, ...], ...]
    """(n,) nodes that each reads, all before it."""
    budget_bytes: tuple[int, ...]
    """(n,) budget of each stage, minus other live bytes."""
    scratch_bytes: tuple[int, ...] = ()
    """(n,) workspace of each node; () for none."""
    once: frozenset[int] = frozenset()
    """Nodes that must not run again."""

    @property
    def n(self) -> int:
        """Number of nodes, and of stages."""
        return len(self.cost_s)

    def scratch(self, node: int) -> int:
        """Return the workspace bytes of `node`."""
        return self.scratch_bytes[node] if self.scratch_bytes else 0

    def users(self) -> list[list[int]]:
        """Return (n,) the nodes that read each node."""
        found: list[list[int]] = [[] for _ in range(self.n)]
        for node, reads in enumerate(self.reads):
            for each in reads:
                found[each].append(node)
        return found


@dataclass(frozen=True)
class Solution:
    """A schedule: the nodes that run in each stage, and those kept between stages."""

    computes: tuple[tuple[int, ...], ...]
    """(n,) nodes that run in each stage, ascending; the last one runs for the first time."""
    kept: tuple[tuple[int, ...], ...]
    """(n,) nodes kept from the stage before."""
    cost_s: float
    over_bytes: int
    """The largest excess over a stage's budget; 0 or less if it is within all."""
    proven: bool = False
    """No cheaper schedule exists in the paper's space, where a stage runs every node at most once, in graph
    order.

    Another order within a stage can be cheaper still, if one node's inputs can be freed before another runs.
    """

    def order(self) -> list[int]:
        """Return the nodes in the order in which they run."""
        return [node for stage in self.computes for node in stage]


def live_bytes(
    problem: Problem, computes: Sequence[Sequence[int]], kept: Sequence[Iterable[int]]
) -> list[list[int]]:
    """Return the bytes live while each node of each stage runs; outputs exist before inputs are freed."""
    n, found = problem.n, []
    for stage, running in enumerate(computes):
        kept_next = set(kept[stage + 1]) if stage + 1 < n else set()
        last: dict[int, int] = {}
        for at, node in enumerate(running):
            last.update(dict.fromkeys((*problem.reads[node], node), at))
        there = set(kept[stage])
        now = sum(problem.bytes[node] for node in there)
        peaks = []
        for at, node in enumerate(running):
            now += 0 if node in there else problem.bytes[node]
            there.add(node)
            peaks.append(now + problem.scratch(node))
            for each in (*problem.reads[node], node):
                if last[each] == at and each not in kept_next and each in there:
                    there.discard(each)
                    now -= problem.bytes[each]
        found.append(peaks)
    return found


def over_budget(problem: Problem, computes: Sequence[Sequence[int]], kept: Sequence[Iterable[int]]) -> int:
    """Return the largest excess of `live_bytes` over the budget of a stage."""
    live = live_bytes(problem, computes, kept)
    return max(max(peaks) - budget for peaks, budget in zip(live, problem.budget_bytes, strict=True))


def completed(problem: Problem, kept: Flags, *, proven: bool = False) -> Solution:
    """Return the cheapest schedule that keeps at least `kept`, (stages, nodes): the second phase."""
    # A stage runs its own node, the nodes that the next stage keeps and this one has not kept, and
    # their missing inputs. Nodes that must not run again are kept from their first run on.
    n = problem.n
    # The paper's S is strictly lower triangular: a stage keeps nodes that ran in an earlier one.
    keep = np.tril(kept, -1)
    users = problem.users()
    for node in problem.once:
        keep[node + 1 : max(users[node], default=node) + 1, node] = True
    computes = []
    for stage in range(n):
        run = np.zeros(n, bool)
        run[stage] = True
        if stage + 1 < n:
            run[: stage + 1] |= keep[stage + 1, : stage + 1] & ~keep[stage, : stage + 1]
        # From readers to inputs: a missing input is itself run, and then needs its own inputs.
        for node in range(stage, -1, -1):
            if not run[node]:
                continue
            for each in problem.reads[node]:
                if each in problem.once:
                    # It cannot run here, so it is kept from its first run up to this stage.
                    keep[each + 1 : stage + 1, each] = True
                run[each] |= not keep[stage, each]
        computes.append(tuple(np.flatnonzero(run).tolist()))
    # A node kept into a stage that neither uses nor keeps it only occupies memory.
    rows = [set(np.flatnonzero(row).tolist()) for row in keep]
    for stage in range(n - 1, -1, -1):
        used = {each for node in computes[stage] for each in problem.reads[node]}
        rows[stage] &= used | (rows[stage + 1] if stage + 1 < n else set())
    needed = tuple(tuple(sorted(row)) for row in rows)
    cost = sum(problem.cost_s[node] for stage in computes for node in stage)
    return Solution(tuple(computes), needed, cost, over_budget(problem, computes, needed), proven)


def keep_all(problem: Problem) -> Flags:
    """Return (n, n) the nodes that the plain order keeps: every node until its last reader."""
    kept = np.zeros((problem.n, problem.n), bool)
    for node, users in enumerate(problem.users()):
        kept[node + 1 : max(users, default=node) + 1, node] = True
    return kept


def _every_nth(problem: Problem, n: int) -> Flags:
    """Keep every n-th node until its last reader."""
    kept = keep_all(problem)
    kept[:, np.arange(problem.n) % n != 0] = False
    return kept


def solve_exactly(problem: Problem, *, time_limit_s: float = 60.0) -> Solution | None:
    """Return the cheapest schedule within the budget; None if there is none or none was found in time.

    Args:
        problem: Up to some 30 nodes in seconds, 60 in minutes.
        time_limit_s: Time after which the best found schedule is returned, not proven.
    """
    model = _Model(problem)
    result = _solved(model, 0.0, integer=True, time_limit_s=time_limit_s)
    if result.x is None:
        return None
    found = completed(problem, model.kept(result.x) > 0.5, proven=result.status == 0)
    return found if found.over_bytes <= 0 else None


def solve_rounded(problem: Problem, *, time_limit_s: float = 10.0) -> Solution:
    """Return a schedule by two-phase rounding: the cheapest within the budget, else the one that exceeds it
    least.

    Args:
        problem: Up to some 100 nodes in seconds.
        time_limit_s: Time limit of the integer program. Relaxations, of at most a second, are solved to their
            end: a busy machine finds the same schedule.
    """
    # If rounding meets the budget nowhere and the relaxation does, the first schedule that the integer
    # program finds is the start.
    candidates = [
        completed(problem, keep_all(problem), proven=True),
        # Keeps nothing: known without the solver, and the least memory if it runs out of time.
        completed(problem, np.zeros((problem.n, problem.n), bool)),
    ]
    # Nothing to solve: every node runs once, the least cost possible.
    if candidates[0].over_bytes <= 0:
        return candidates[0]  # the plain order fits
    candidates += [completed(problem, _every_nth(problem, n)) for n in range(2, min(problem.n, 8))]
    model, is_impossible = _Model(problem), False
    # Section 5.3: a rounded schedule may exceed the relaxation's memory, so part of the budget is kept back.
    for epsilon in EPSILONS:
        result = _solved(model, epsilon, integer=False)
        # Without a solution of the relaxation there is none of the integer program.
        is_impossible |= epsilon == 0 and result.status == _INFEASIBLE
        if result.x is not None:
            kept = model.kept(result.x)
            # A relaxation that is nearly integer rounds alike at most thresholds.
            rounded = {mask.tobytes(): mask for mask in (kept >= each for each in THRESHOLDS)}
            candidates += [completed(problem, mask) for mask in rounded.values()]
    starts = sorted({each.computes: each for each in candidates}.values(), key=_rank)
    if starts[0].over_bytes > 0:
        found = None if is_impossible else _first_within(model, time_limit_s)
        if found is None:
            return starts[0]
        # Any integer schedule is a start; `_improved` makes it cheaper.
        starts = [found]
    return min((_improved(problem, start) for start in starts[:_STARTS] if start.over_bytes <= 0), key=_rank)


def _first_within(model: _Model, time_limit_s: float) -> Solution | None:
    """Return any schedule within the budget; None if there is none or none was found in time."""
    # With any gap allowed, HiGHS ends with the first integer solution.
    result = _solved(model, 0.0, integer=True, time_limit_s=time_limit_s, gap=math.inf)
    if result.x is None:
        return None
    found = completed(model.problem, model.kept(result.x) > 0.5)
    return found if found.over_bytes <= 0 else None


def _rank(solution: Solution) -> tuple[float, float]:
    return (max(solution.over_bytes, 0), solution.cost_s)


def _improved(problem: Problem, best: Solution) -> Solution:
    """Keep more nodes, most expensive repetition first, while the budget allows it and the cost falls."""
    tried: set[tuple[int, int, int]] = set()
    tries = _TRIES
    while tries:
        kept = np.zeros((problem.n, problem.n), bool)
        for stage, row in enumerate(best.kept):
            kept[stage, list(row)] = True
        moves = [move for move in _repetitions(problem, best) if move[1:] not in tried]
        if not moves:
            return best
        for _, since, stage, node in moves:
            tried.add((since, stage, node))
            more = kept.copy()
            # Kept from the run before to this stage, so that it does not run again here.
            more[since + 1 : stage + 1, node] = True
            found = completed(problem, more)
            tries -= 1
            if _rank(found) < _rank(best):
                best = found
                break
            if not tries:
                break
    return best


def _repetitions(problem: Problem, solution: Solution) -> list[tuple[float, int, int, int]]:
    """Return (cost, stage of the run before, stage, node) of each repetition, most expensive stage first."""
    ran: dict[int, int] = {}
    found = []
    for stage, nodes in enumerate(solution.computes):
        again = sum(problem.cost_s[node] for node in nodes if node in ran)
        for node in nodes:
            if node in ran:
                found.append((again + problem.cost_s[node], ran[node], stage, node))
            ran[node] = stage
    return sorted(found, reverse=True)


# -- the integer program -------------------------------------------------------------------------------------


class _Structure:
    """Variables R[t, i], S[t, i], FREE[t, i, k], U[t, k] in one vector, and budget-free constraints."""

    def __init__(self, problem: Problem) -> None:
        self._problem, n = problem, problem.n
        self._at: dict[tuple[Any, ...], int] = {}
        self._columns: list[int] = []
        self._factors: list[int] = []
        self._in_bytes: list[bool] = []
        self._sizes: list[int] = []
        self.upper: list[float] = []
        self.lower: list[float] = []
        self.stage_of: dict[int, int] = {}
        """Stage by row that bounds its memory: only these bounds depend on the budget."""
        for stage in range(n):
            for node in range(stage + 1):
                self._variable("R", stage, node)
                if node < stage:
                    self._variable("S", stage, node)
        self.n_integer = len(self._at)
        self._users = problem.users()
        for stage in range(n):
            self._stage(stage)
        # Relative costs: seconds near 1e-6 would vanish in the solver's optimality tolerance.
        self.cost, self.low, self.high = (np.full(len(self._at), each) for each in (0.0, 0.0, 1.0))
        largest = max(problem.cost_s) or 1.0
        for key, at in self._at.items():
            if key[0] == "R":
                _, stage, node = key
                self.cost[at] = problem.cost_s[node] / largest
                # Stage t runs node t for the first time; a node that must not repeat runs in no other stage.
                self.low[at] = stage == node
                self.high[at] = stage == node or node not in problem.once
            elif key[0] == "U":
                self.high[at] = np.inf
        self.kept_at = [(key[1:], at) for key, at in self._at.items() if key[0] == "S"]
        self.places = np.repeat(np.arange(len(self._sizes)), self._sizes), np.asarray(self._columns, np.int64)
        self._values = np.asarray(self._factors, np.float64), np.asarray(self._in_bytes, bool)

    def values(self, unit: int) -> F64:
        """Return the entries of the matrix, with bytes in `unit`s."""
        factors, in_bytes = self._values
        found: F64 = np.where(in_bytes, factors / unit, factors)
        return found

    def _variable(self, *key: Any) -> int:
        return self._at.setdefault(key, len(self._at))

    def _row(self, flags: _Terms, lower: float, upper: float, *, n_bytes: _Terms = ()) -> None:
        """Add a row of terms in flags and in bytes, without variables that do not exist."""
        known = [(self._at[key], each, False) for key, each in flags if key in self._at]
        known += [(self._at[key], each, True) for key, each in n_bytes if key in self._at]
        for at, factor, in_bytes in known:
            self._columns.append(at)
            self._factors.append(factor)
            self._in_bytes.append(in_bytes)
        self._sizes.append(len(known))
        self.lower.append(lower)
        self.upper.append(upper)

    def _stage(self, t: int) -> None:
        """Add the constraints of stage `t`: on inputs, and on the memory after each node."""
        problem, inf = self._problem, math.inf
        for i in range(t + 1):
            for j in problem.reads[i]:  # a node's inputs are computed or kept
                self._row([(("R", t, i), 1), (("R", t, j), -1), (("S", t, j), -1)], -inf, 0)
            if t + 1 < problem.n:  # a kept node was kept before or is computed
                self._row([(("S", t + 1, i), 1), (("S", t, i), -1), (("R", t, i), -1)], -inf, 0)
            # Not in the paper: kept and run in one stage is never useful, and forbidding it tightens the
            # relaxation.
            if i < t:
                self._row([(("S", t, i), 1), (("R", t, i), 1)], -inf, 1)
        before: _Terms = ()
        freed: _Terms = [(("S", t, i), -problem.bytes[i]) for i in range(t)]
        for k in range(t + 1):
            self._variable("U", t, k)
            # The paper's recurrence of U: memory after the previous node, plus this output.
            made = (("R", t, k), -problem.bytes[k])
            self._row([(("U", t, k), 1), *before], 0, 0, n_bytes=[*freed, made])
            self.stage_of[len(self._sizes)] = t
            self._row([(("U", t, k), 1)], -inf, inf, n_bytes=[(("R", t, k), problem.scratch(k))])
            before, freed = [(("U", t, k), -1)], []
            for i in (*problem.reads[k], k):
                free = ("FREE", t, i, k)
                self._variable(*free)
                self._row([(free, 1), (("R", t, k), -1)], -inf, 0)
                if t + 1 < problem.n:
                    # Hazards of freeing i after k: the next stage keeps it, or a later node of this stage
                    # reads it.
                    self._row([(free, 1), (("S", t + 1, i), 1)], -inf, 1)
                for j in self._users[i]:
                    if k < j <= t:
                        self._row([(free, 1), (("R", t, j), 1)], -inf, 1)
                freed.append((free, problem.bytes[i]))


_Terms: TypeAlias = Sequence[tuple[tuple[Any, ...], int]]


@functools.lru_cache(maxsize=4)
def _structure_of(graph: Problem) -> _Structure:
    """Return the part of the program equal for the budgets that one search tries; `graph` has none."""
    return _Structure(graph)


class _Model:
    """The integer program of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.structure = problem, _structure_of(replace(problem, budget_bytes=()))
        # HiGHS' tolerances are absolute: bytes of 1e10 in a row with flags of 1 would lose digits.
        scale = math.gcd(*problem.bytes, *problem.scratch_bytes, *problem.budget_bytes) or 1
        self._unit = max(scale, max(problem.budget_bytes, default=1) // 10**6, 1)

    def kept(self, x: F64) -> F64:
        """Return (n, n) the values of S."""
        found = np.zeros((self.problem.n, self.problem.n))
        for place, at in self.structure.kept_at:
            found[place] = x[at]
        return found

    def upper(self, epsilon: float) -> list[float]:
        """Return the upper bounds of rows if `epsilon` of the budget is left free."""
        found = list(self.structure.upper)
        for row, stage in self.structure.stage_of.items():
            found[row] = self.problem.budget_bytes[stage] * (1 - epsilon) / self._unit
        return found

    @functools.cached_property
    def matrix(self) -> Any:
        """The constraints' coefficients."""
        from scipy.sparse import csr_array

        structure = self.structure
        shape = len(structure.lower), len(structure.cost)
        return csr_array((structure.values(self._unit), structure.places), shape=shape)


def _solved(
    model: _Model, epsilon: float, *, integer: bool, time_limit_s: float = math.inf, gap: float = 0.0
) -> Any:
    """Return the result of HiGHS, which stops within the relative `gap` of the optimum."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    structure = model.structure
    integrality = np.zeros(len(structure.cost))
    # Only R and S: FREE takes its bound, 0 or 1, once they are integer.
    integrality[: structure.n_integer] = integer
    constraint = LinearConstraint(model.matrix, structure.lower, model.upper(epsilon))
    options = {"time_limit": time_limit_s, "mip_rel_gap": gap}
    bounds = Bounds(structure.low, structure.high)
    return milp(
        structure.cost, integrality=integrality, bounds=bounds, constraints=constraint, options=options
    )
