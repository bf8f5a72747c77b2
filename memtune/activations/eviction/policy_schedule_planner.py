"""Turns an eviction policy into a static schedule.

Plays the policy on a region's recorded ops and keeps the order of its runs.

The rematerializer (`activations.eviction.policy`) gets what a running model would give it: ops one by one
with their reads and outputs, and the references that the program drops. A value changed in place becomes a
new version in the same memory; values held outside the region stay. The order in which ops ran, first and
again, is a schedule, which frees every value right after its last reader and so never holds more than the
policy did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memtune.activations.eviction.policy import ALONG, REPLAY, RUN, Policy, Replay, Trace, TraceWriter, replay
from memtune.activations.schedules import Region
from memtune.program import F64, Action, Do, OpGraph, Schedule, scheduled, wrong_with

_TRIES = 16
"""Most budgets tried until the whole step's peak is within the user's."""
COST_LIMIT = 6.0
"""Sum of all runs' costs over that of the first ones above which a policy counts as thrashing."""


@dataclass(frozen=True)
class Frozen:
    """A policy's decisions for one region."""

    schedule: Schedule
    peak_bytes: int
    """Of the whole step under the schedule."""
    replay_s: float
    """Seconds of the runs beyond the first ones."""


def region_trace(
    region: Region,
    op_s: F64,
    is_cheap: Callable[[str], bool],
    elements: Sequence[int],
    *,
    keep_written: bool = False,
    online: bool = False,
    between_bytes: int = 0,
) -> Trace:
    """Return the ops of `region` as a trace for the policy.

    Args:
        region: The model's forward and backward.
        op_s: (n,) seconds of each op of the region, its costs.
        is_cheap: Predicate on op names: outputs are cheap (see `Trace.tensor_cheap`).
        elements: (n,) elements of elementwise ops (`activations.schedules.partial_ops_pass.elements_of`).
        keep_written: Values that are changed in place are never evicted.
        online: Values of backward are never evicted: autograd's engine holds them.
        between_bytes: Bytes that another component needs between forward and backward and then frees: one
            more op there.
    """
    graph, trace = region.graph, TraceWriter()
    last_read = _last_reads(graph)
    now: dict[int, int] = {}  # value -> tensor of its latest version
    for op, name in enumerate(graph.names):
        if op == graph.n_forward and between_bytes:
            (other,) = trace.call(0.0, [], [(between_bytes, -1)], again=False)
            trace.release(other)
        written = graph.writes[op]
        made = graph.makes[op]
        held = any(region.outside_until[value] >= 0 for value in (*made, *written))
        stays = held or op in graph.once or len(written) > 1 or bool(written and made)
        stays |= online and op >= graph.n_forward
        stays |= keep_written and bool(written or any(value in graph.writers for value in made))
        outs = [(int(region.bytes[value]), -1) for value in (*written, *made)]
        tensors = trace.call(
            float(op_s[op]),
            [now[value] for value in graph.reads[op]],
            outs,
            cheap=is_cheap(name),
            takes_over=now[written[0]] if written else -1,
            again=not stays,
            elements=0 if online and op >= graph.n_forward else elements[op],
        )
        for value in written:
            trace.release(now[value])
        now.update(zip((*written, *made), tensors, strict=True))
        for value in sorted({*graph.reads[op], *made}):
            if last_read.get(value, graph.maker[value]) == op:
                trace.release(now[value])
    return trace.done()


def least_bytes(region: Region) -> int:
    """Return a lower bound of the peak of any schedule of `region`.

    It counts values held outside, and each op's reads and outputs.
    """
    graph = region.graph
    held = np.zeros(graph.n_ops + 1, np.int64)
    outside = region.outside_until
    for value, maker in enumerate(graph.maker):
        if outside[value] >= maker:
            held[maker] += region.bytes[value]
            held[min(int(outside[value]) + 1, graph.n_ops)] -= region.bytes[value]
    least = np.cumsum(held[:-1]) + region.background_bytes + region.scratch_bytes
    for op in range(graph.n_ops):
        mine = (
            value
            for value in {*graph.reads[op], *graph.makes[op]}
            if not graph.maker[value] <= op <= outside[value]
        )
        least[op] += sum(int(region.bytes[value]) for value in mine)
    return max(int(least.max()), region.after_bytes)


def freeze(
    region: Region,
    traces: Sequence[Callable[[], Trace]],
    policy: Policy,
    budget_bytes: int,
    peak_of: Callable[[Schedule], int],
) -> Frozen | None:
    """Return the schedule of `policy` whose step stays within `budget_bytes`; None if none is found.

    The policy accounts the region's values alone. It gets what the rest of the step leaves at its peak, and
    less if that was too much.

    Args:
        region: The model's forward and backward.
        traces: Alternatives from `region_trace`; each is made if the ones before yield no valid schedule.
        policy: The eviction policy; `in_place` is set, as the ops are.
        budget_bytes: For the whole step.
        peak_of: Peak bytes of the whole step under a schedule.
    """
    policy = replace(policy, in_place=True, forget=True)
    rest = region.background_bytes + region.scratch_bytes
    allowed = budget_bytes - int(rest.min())
    if policy.addressed:
        allowed += allowed // 4  # holes are no bytes of the step
    for _ in range(_TRIES):
        found = _frozen(region, traces, policy, allowed)
        if found is None:
            break
        schedule, replay_s = found
        peak = peak_of(schedule)
        if peak <= budget_bytes:
            return Frozen(schedule, peak, replay_s)
        allowed -= max(peak - budget_bytes, allowed // 24)
    return None


def freeze_between(
    region: Region, traces: Sequence[Callable[[], Trace]], policy: Policy, budget_bytes: int
) -> Schedule | None:
    """Return the schedule of `policy` within `budget_bytes` of values.

    The `between_bytes` of `traces` are left free between forward and backward.
    """
    found = _frozen(region, traces, replace(policy, in_place=True, forget=True), budget_bytes, between=True)
    return found[0] if found is not None else None


def _frozen(
    region: Region,
    traces: Sequence[Callable[[], Trace]],
    policy: Policy,
    budget_bytes: int,
    *,
    between: bool = False,
) -> tuple[Schedule, float] | None:
    """Return a schedule and its replay seconds, within `budget_bytes` of values."""
    for trace in (each() for each in traces):
        done = replay(
            trace, policy, budget_bytes, cost_limit=COST_LIMIT * float(trace.op_cost.sum()), journal=True
        )
        if done.outcome != "done":
            continue
        schedule = _schedule(region.graph, done, policy, between=between)
        if not wrong_with(region.graph, schedule):
            return schedule, done.replay_cost
    return None


def _schedule(graph: OpGraph, done: Replay, policy: Policy, *, between: bool) -> Schedule:
    runs, middle = [], 0
    along: list[int] = []
    for act, number in done.journal:
        if between and number == graph.n_forward:
            continue
        op = number - (between and number > graph.n_forward)
        if act == ALONG:
            along.append(op)
        elif act in (RUN, REPLAY):
            runs.append(Do(Action.COMPUTE, op, tuple(along), policy.parts if along else 1))
            along = []
            if (act, op) == (RUN, graph.n_forward - 1):
                middle = len(runs)
    return scheduled(graph, runs[:middle], runs[middle:], made_by=policy.rule)


def _last_reads(graph: OpGraph) -> dict[int, int]:
    """Return the last op that reads each value, in the plain order."""
    return {value: op for op, values in enumerate(graph.reads) for value in values}
