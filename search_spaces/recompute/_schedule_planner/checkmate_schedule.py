"""Checkmate's schedule for a program and a byte budget: solved on a few nodes, evaluated op by op on the
rewritten program.

A node is a stretch of forward or of backward. Forward is cut where many bytes are saved for backward: of two
neighbours, the pair whose smaller share of saved bytes is least becomes one node, until few enough are left.
Backward is cut where it begins to read an earlier node of forward. The loss, which is the user's code between
them, is a node in the middle.

Values that others hold beyond forward (outputs, casts of weights in autocast's cache) are made once and live
until their last reader: a node runs again without the op that made them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from memtune.activations.schedules import Problem, Region, Solution, region_of, solve_exactly, solve_rounded
from memtune.hardware import op_costs
from memtune.program import F64, OpGraph, Schedule, build_schedule, find_schedule_error, plain_schedule
from memtune.search_spaces.recompute._schedule_planner.region_placement import Placement


@dataclass(frozen=True, eq=False)
class Stages:
    """The nodes of one region."""

    nodes: tuple[tuple[int, ...], ...]
    """Ops of each node; the loss has none."""
    loss: int
    """Index of the loss."""
    region: Region
    op_s: F64
    """(n,) seconds of each op."""
    cost_s: tuple[float, ...]
    bytes: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    scratch_bytes: tuple[int, ...]
    background_bytes: tuple[int, ...]
    """Live bytes other than the nodes' values while each node runs for the first time."""
    once: frozenset[int]
    """Nodes that run once."""
    made_once: frozenset[int]
    """Ops that a node skips when it runs again."""

    def problem(self, budget_bytes: int) -> Problem:
        """Return Checkmate's problem for `budget_bytes` of live memory."""
        budgets = tuple(budget_bytes - each for each in self.background_bytes)
        return Problem(self.cost_s, self.bytes, self.reads, budgets, self.scratch_bytes, self.once)

    def schedule(self, solution: Solution) -> Schedule:
        """Return the ops in the order of `solution`, without repeated ops whose outputs nothing reads."""
        sequence: list[tuple[int, bool]] = []
        ran: set[int] = set()
        at_loss = 0
        for node in solution.order():
            if node == self.loss:
                at_loss = len(sequence)
            again = node in ran
            sequence += [(op, again) for op in self.nodes[node] if not again or op not in self.made_once]
            ran.add(node)
        wanted = _wanted(self.region.graph, sequence)
        forward, backward = (
            [op for (op, _), keep in part if keep] for part in _parted(sequence, wanted, at_loss)
        )
        return build_schedule(self.region.graph, forward, backward, made_by="checkmate")

    def recompute_s(self, schedule: Schedule) -> float:
        """Return the seconds that `schedule` recomputes."""
        computes = schedule.computes()
        return float(self.op_s[computes].sum() - self.op_s.sum())


def _parted(
    sequence: list[tuple[int, bool]], wanted: list[bool], at: int
) -> tuple[Iterable[tuple[tuple[int, bool], bool]], Iterable[tuple[tuple[int, bool], bool]]]:
    pairs = list(zip(sequence, wanted, strict=True))
    return pairs[:at], pairs[at:]


def _wanted(graph: OpGraph, sequence: list[tuple[int, bool]]) -> list[bool]:
    """Return which runs are first runs, or make a value that is read before it is made again."""
    needed: set[int] = set()
    found = [True] * len(sequence)
    # Backwards, so that all later reads of a value are known when its op is reached.
    for at in range(len(sequence) - 1, -1, -1):
        op, again = sequence[at]
        if again and not needed.intersection(graph.makes[op]) and not needed.intersection(graph.writes[op]):
            found[at] = False
            continue
        # Satisfied by this run; an earlier run need not make them for those readers.
        needed.difference_update(graph.makes[op])
        needed.update(graph.reads[op])
    return found


def stages_of(region: Region, op_s: F64, n_nodes: int) -> Stages:
    """Return the nodes of `region`, at most `n_nodes` of forward and backward besides the loss.

    Args:
        region: The model's ops.
        op_s: (n,) seconds of each.
        n_nodes: Number for forward and backward together.
    """
    graph = region.graph
    forward = _forward_nodes(region, op_s, max(n_nodes // 2, 1))
    node_of = {op: number for number, ops in enumerate(forward) for op in ops}
    backward = _backward_nodes(graph, node_of, len(forward))
    nodes = (*forward, (), *backward)
    loss = len(forward)
    for number, ops in enumerate(nodes):
        node_of.update(dict.fromkeys(ops, number))
    last = _last_readers(graph, node_of)
    external = {v for v in range(len(region.bytes)) if region.outside_until[v] >= 0}
    fixed = _fixed(graph, external)
    once = {
        number
        for number, ops in enumerate(nodes)
        # No backward op runs again; in forward, nodes with an op that must not.
        if number >= loss or any(graph.makes[op] for op in graph.once.intersection(ops))
    }
    # A value that is held outside exists already: made again, there would be two of it.
    once |= {node_of[graph.maker[value]] for value in external - fixed}
    retained = external | fixed
    made = [
        sum(int(region.bytes[v]) for v in _outputs_read_later(graph, ops, number, last) if v not in retained)
        for number, ops in enumerate(nodes)
    ]
    return Stages(
        nodes=tuple(tuple(ops) for ops in nodes),
        loss=loss,
        region=region,
        op_s=op_s,
        cost_s=tuple(float(op_s[list(ops)].sum()) for ops in nodes),
        bytes=tuple(made),
        reads=tuple(_read_nodes(graph, ops, number, node_of, fixed) for number, ops in enumerate(nodes)),
        scratch_bytes=tuple(
            _inner_peak(region, ops, number, last, retained) for number, ops in enumerate(nodes)
        ),
        background_bytes=_background(region, nodes, loss, node_of, {v: last.get(v, -1) for v in fixed}),
        once=frozenset(once),
        made_once=graph.once | {graph.maker[value] for value in fixed},
    )


def _fixed(graph: OpGraph, external: set[int]) -> set[int]:
    """Return values of forward ops that make `external` ones and are not written: live from then on."""
    ops = {op for op in map(graph.maker.__getitem__, external) if op < graph.n_forward}
    return {
        v
        for op in ops
        for v in graph.makes[op]
        if not any(graph.writers.get(each) for each in graph.makes[op])
    }


def _forward_nodes(region: Region, op_s: F64, most: int) -> list[list[int]]:
    """Return stretches of forward; in-place ops share the stretch of the op that made their value."""
    graph = region.graph
    n = graph.n_forward
    saved = np.zeros(n)
    for value in {v for reads in graph.reads[n:] for v in reads if graph.maker[v] < n}:
        saved[graph.maker[value]] += int(region.bytes[value])
    joined = np.zeros(n, bool)  # in one node with the op before
    for value, writers in graph.writers.items():
        inside = [op for op in writers if op < n]
        if graph.maker[value] < n and inside:
            # A node between a value's maker and its in-place writer would read or keep another version.
            joined[graph.maker[value] + 1 : max(inside) + 1] = True
    starts = np.flatnonzero(~joined)
    bytes_of, cost_of = np.add.reduceat(saved, starts), np.add.reduceat(op_s[:n], starts)
    while len(starts) > most:
        smaller, cost = np.minimum(bytes_of[1:], bytes_of[:-1]), cost_of[1:] + cost_of[:-1]
        # Joining hides the cut with the fewer saved bytes; among equals the cheaper node results.
        at = int(np.lexsort((cost, smaller))[0])
        for column in (bytes_of, cost_of):
            column[at] += column[at + 1]
        starts, bytes_of, cost_of = (np.delete(column, at + 1) for column in (starts, bytes_of, cost_of))
    ends = [*starts[1:].tolist(), n]
    return [list(range(start, end)) for start, end in zip(starts.tolist(), ends, strict=True)]


def _backward_nodes(graph: OpGraph, node_of: dict[int, int], n_forward_nodes: int) -> list[list[int]]:
    found: list[list[int]] = [[]]
    lowest = n_forward_nodes
    for op in range(graph.n_forward, graph.n_ops):
        read = min(
            (node_of[graph.maker[v]] for v in graph.reads[op] if graph.maker[v] < graph.n_forward),
            default=lowest,
        )
        # Backward reads forward's nodes in reverse; the first reader of an earlier one opens a stage.
        if read < lowest:
            lowest = read
            if found[-1]:
                found.append([])
        found[-1].append(op)
    return found


def _last_readers(graph: OpGraph, node_of: dict[int, int]) -> dict[int, int]:
    """Return value → last node that reads it."""
    last: dict[int, int] = {}
    for op, reads in enumerate(graph.reads):
        for value in reads:
            last[value] = max(last.get(value, -1), node_of[op])
    return last


def _outputs_read_later(graph: OpGraph, ops: Iterable[int], number: int, last: dict[int, int]) -> list[int]:
    """Return the values made by `ops` that other nodes read."""
    return [value for op in ops for value in graph.makes[op] if last.get(value, -1) > number]


def _read_nodes(
    graph: OpGraph, ops: Iterable[int], number: int, node_of: dict[int, int], fixed: set[int]
) -> tuple[int, ...]:
    found = {node_of[graph.maker[value]] for op in ops for value in graph.reads[op] if value not in fixed}
    return tuple(sorted(found - {number}))


def _inner_peak(
    region: Region, ops: Sequence[int], number: int, last: dict[int, int], retained: set[int]
) -> int:
    """Return the bytes that a node takes while it runs, beyond its outputs and the `retained` values."""
    graph, n_bytes = region.graph, region.bytes
    until: dict[int, int] = {}
    for op in ops:
        until.update(
            {value: op for value in (*graph.makes[op], *graph.reads[op]) if last.get(value, -1) <= number}
        )
    live = peak = 0
    for op in ops:
        inner = [v for v in graph.makes[op] if v in until and v not in retained]
        live += sum(int(n_bytes[v]) for v in inner)
        peak = max(peak, live + int(region.scratch_bytes[op]))
        freed = [
            v for v in (*graph.makes[op], *graph.reads[op]) if until.get(v) == op and graph.maker[v] in ops
        ]
        live -= sum(int(n_bytes[v]) for v in freed if v not in retained)
    return peak


def _background(
    region: Region, nodes: Sequence[Sequence[int]], loss: int, node_of: dict[int, int], fixed: dict[int, int]
) -> tuple[int, ...]:
    """Return bytes outside the region, of externally held values, and of `fixed` ones up to a node."""
    background = [int(region.background_bytes[list(ops)].max(initial=0)) for ops in nodes]
    background[loss] = region.between_bytes
    for value, until in enumerate(region.outside_until.tolist()):
        if until >= 0 or value in fixed:
            if until >= region.graph.n_ops:
                stop = len(nodes) - 1
            elif until == region.graph.n_forward - 1:
                stop = loss
            else:
                stop = node_of.get(until, -1)
            for number in range(node_of[region.graph.maker[value]], max(stop, fixed.get(value, -1)) + 1):
                background[number] += int(region.bytes[value])
    return tuple(background)


_TRIES = 5
"""Budgets tried on the coarse nodes, until the peak of the ops is just within the real budget."""


@dataclass(frozen=True)
class CheckmateSchedule:
    """A schedule with its peak and time."""

    schedule: Schedule
    peak_bytes: int
    """Peak of the rewritten program."""
    recompute_s: float
    """Seconds of recomputation."""
    budget_bytes: int
    plain_bytes: int
    """Peak without the schedule."""
    n_nodes: int

    @property
    def is_within(self) -> bool:
        """True if the budget is met."""
        return self.peak_bytes <= self.budget_bytes


@lru_cache(maxsize=128)
def schedule_for(
    place: Placement, budget_bytes: int | None, share: float, nodes: int, exact_s: float
) -> CheckmateSchedule | str:
    """Return the cheapest schedule found with a peak within the budget, else the one with the smallest peak,
    or why there is none.

    Args:
        place: The program without recompute, and the later passes.
        budget_bytes: Largest peak of the whole step; None: given by `share`.
        share: Position of the budget between the smallest peak found (0) and the plain one (1).
        nodes: Number of nodes that the ops are joined to.
        exact_s: Time limit of the integer program in seconds; 0: the relaxation alone.
    """
    region = region_of(place.step)
    if isinstance(region, str):
        return region
    plain = plain_schedule(region.graph)
    wrong = find_schedule_error(region.graph, plain)
    if wrong:
        return f"the recorded step cannot be repeated: {wrong}"
    stages = stages_of(
        place.region_after_passes, op_costs(place.step, place.hardware).op_s[region.rows], nodes
    )
    plain_bytes = place.peak_bytes(plain)
    if budget_bytes is None:
        smallest = _evaluate(place, stages, 0, plain_bytes, exact_s=0.0)
        budget_bytes = int(smallest.peak_bytes + share * (plain_bytes - smallest.peak_bytes))
    if plain_bytes <= budget_bytes:
        return CheckmateSchedule(plain, plain_bytes, 0.0, budget_bytes, plain_bytes, len(stages.nodes))
    return _best(place, stages, budget_bytes, plain_bytes, exact_s)


def _best(
    place: Placement, stages: Stages, budget_bytes: int, plain_bytes: int, exact_s: float
) -> CheckmateSchedule:
    """Return the best schedule over budgets corrected by the last peak's distance from the budget."""
    given, best = budget_bytes, None
    enough, too_much = 0, 0  # largest node budget that met the budget, smallest that did not
    for _ in range(_TRIES):
        found = _evaluate(place, stages, given, plain_bytes, exact_s, budget_bytes)
        if best is None or _rank(found) < _rank(best):
            best = found
        spare = budget_bytes - found.peak_bytes
        # Stop when nothing is recomputed, or within 0.5 % of the budget.
        if found.recompute_s == 0 or 0 <= spare <= budget_bytes // 200:
            break
        if spare >= 0:
            enough = max(enough, given)
        else:
            too_much = min(too_much or given, given)
        # Bisection once the budget is enclosed; before that the last error is the correction.
        given = (enough + too_much) // 2 if enough and too_much else given + spare
    assert best is not None
    return best


def _rank(found: CheckmateSchedule) -> tuple[int, float]:
    return max(found.peak_bytes - found.budget_bytes, 0), found.recompute_s


def _evaluate(
    place: Placement,
    stages: Stages,
    given_bytes: int,
    plain_bytes: int,
    exact_s: float,
    budget_bytes: int | None = None,
) -> CheckmateSchedule:
    problem = stages.problem(given_bytes)
    solution = solve_rounded(problem)
    if exact_s and not solution.proven:
        exact = solve_exactly(problem, time_limit_s=exact_s)
        if exact is not None and (solution.over_bytes > 0 or exact.cost_s < solution.cost_s):
            solution = exact
    schedule = stages.schedule(solution)
    wrong = find_schedule_error(place.region.graph, schedule)
    assert not wrong, wrong
    peak = place.peak_bytes(schedule)
    budget = given_bytes if budget_bytes is None else budget_bytes
    return CheckmateSchedule(
        schedule, peak, stages.recompute_s(schedule), budget, plain_bytes, len(stages.nodes)
    )
