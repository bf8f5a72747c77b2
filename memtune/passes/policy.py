"""What a dynamic policy does on a region, frozen into a schedule: the policy is played on the recorded ops, its runs are kept.

The machine of `memtune.remat` sees what a running model would show it: ops one by one with what they read and make, and what
the program refers to no longer. A value that an op changes in place is a new version of it, which takes over its place; what
others hold outside the region stays. The order in which ops ran, again and again, is then a schedule, which frees every value
right after its last reader and so never holds more than the policy did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memtune.passes.region import Region
from memtune.program import F64
from memtune.remat import ALONG, REPLAY, RUN, Policy, Replay, Trace, TraceWriter, replay
from memtune.schedule import Action, Do, OpGraph, Schedule, scheduled, wrong_with

_TRIES = 16
"""Budgets given to the policy, at most, until the whole step's peak is within the user's."""
COST_LIMIT = 6.0
"""Sum of all runs' costs over that of the first ones at which a policy is given up as thrashing."""


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
    """The ops of `region` as a policy meets them.

    Args:
        region: The model's forward and backward.
        op_s: (n,) seconds of each op of the region, its costs.
        is_cheap: Whether the outputs of an op of this name are cheap (see `Trace.tensor_cheap`).
        elements: (n,) that each op makes one by one (`passes.in_parts.elements_of`).
        keep_written: Values that are changed in place never go.
        online: Values of backward never go: autograd's engine holds them.
        between_bytes: What something else makes between forward and backward and lets go at once: an op more, there.
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
            float(op_s[op]), [now[value] for value in graph.reads[op]], outs,
            cheap=is_cheap(name), takes_over=now[written[0]] if written else -1, again=not stays,
            elements=0 if online and op >= graph.n_forward else elements[op],
        )  # fmt: skip
        for value in written:
            trace.release(now[value])
        now.update(zip((*written, *made), tensors, strict=True))
        for value in sorted({*graph.reads[op], *made}):
            if last_read.get(value, graph.maker[value]) == op:
                trace.release(now[value])
    return trace.done()


def least_bytes(region: Region) -> int:
    """A peak that no schedule of `region` gets below: what others hold, and what each op reads and makes while it runs."""
    graph = region.graph
    held = np.zeros(graph.n_ops + 1, np.int64)
    outside = region.outside_until
    for value, maker in enumerate(graph.maker):
        if outside[value] >= maker:
            held[maker] += region.bytes[value]
            held[min(int(outside[value]) + 1, graph.n_ops)] -= region.bytes[value]
    least = np.cumsum(held[:-1]) + region.background_bytes + region.scratch_bytes
    for op in range(graph.n_ops):
        mine = (value for value in {*graph.reads[op], *graph.makes[op]} if not graph.maker[value] <= op <= outside[value])
        least[op] += sum(int(region.bytes[value]) for value in mine)
    return max(int(least.max()), region.after_bytes)


def freeze(
    region: Region,
    traces: Sequence[Callable[[], Trace]],
    policy: Policy,
    budget_bytes: int,
    peak_of: Callable[[Schedule], int],
) -> Frozen | None:
    """The schedule of `policy` whose step stays within `budget_bytes`; None where it finds none.

    The policy knows of the region's values alone. So it is given what the rest of the step leaves at its peak, and less where
    that was too much.

    Args:
        region: The model's forward and backward.
        traces: What `region_trace` makes of it; each is asked for where the ones before make no right schedule.
        policy: Who is evicted; with `in_place`, which is what the ops do.
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


def freeze_between(region: Region, traces: Sequence[Callable[[], Trace]], policy: Policy, budget_bytes: int) -> Schedule | None:
    """What `policy` does within `budget_bytes` of values where others need room in between: `traces` have `between_bytes`."""
    found = _frozen(region, traces, replace(policy, in_place=True, forget=True), budget_bytes, between=True)
    return found[0] if found is not None else None


def _frozen(
    region: Region, traces: Sequence[Callable[[], Trace]], policy: Policy, budget_bytes: int, *, between: bool = False
) -> tuple[Schedule, float] | None:
    """What the policy does within `budget_bytes` of values."""
    for trace in (each() for each in traces):
        done = replay(trace, policy, budget_bytes, cost_limit=COST_LIMIT * float(trace.op_cost.sum()), journal=True)
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
    """Value → the last op that reads it, in the plain order."""
    return {value: op for op, values in enumerate(graph.reads) for value in values}
