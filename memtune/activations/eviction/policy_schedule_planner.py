"""Planner that turns an eviction policy into a static schedule: plays it on recorded ops and keeps the order
of runs.

The rematerializer (`activations.eviction.policy`) receives what a running model would give it: ops one by one
with their reads and outputs, and the references that the program drops. A value changed in place becomes a
new version in the same memory; values held outside the region remain. The schedule frees every value right
after its last reader, so it never holds more than the policy did.

The copies of a value that the policy swaps begin after its last use, and its reload ends before the next one.
Both directions of the link carry one copy at a time. The value is freed as soon as its copy has ended, at the
latest where the policy evicts it. Its reload begins as early as hides it behind other ops, if the memory of
these ops allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from memtune.activations.eviction.policy import (
    ALONG,
    RELOAD,
    REPLAY,
    RUN,
    SWAP,
    HostLink,
    Policy,
    Replay,
    Trace,
    TraceWriter,
    replay,
)
from memtune.activations.schedules import Region
from memtune.program import (
    F64,
    I64,
    Action,
    OpGraph,
    Schedule,
    ScheduleStep,
    build_schedule,
    find_schedule_error,
)

_TRIES = 16
"""Maximal number of budgets tried until the whole step's peak is within the user's."""
COST_LIMIT = 6.0
"""Ratio of all runs' costs to the first runs' above which a policy counts as thrashing."""
_WORK_LIMIT, _LEAST_WORK = 200_000_000, 20_000_000
"""Work (`Replay.work`) of all options and tries together, some 2 s: a search asks for thousands of settings,
and one that takes longer thrashes. Each try may take half of the work that is left, and always
`_LEAST_WORK`.
"""


@dataclass(frozen=True)
class PolicySchedule:
    """Decisions of a policy for one region, as a schedule."""

    schedule: Schedule
    peak_bytes: int
    """Peak of the whole step under the schedule."""
    recompute_s: float
    """Seconds of the second and later runs, and of waiting for copies."""
    policy: Policy
    """The option that decided."""


def region_trace(
    region: Region,
    op_s: F64,
    is_cheap: Callable[[str], bool],
    elements: Sequence[int],
    *,
    keep_written: bool = False,
    online: bool = False,
) -> Trace:
    """Return the ops of `region` as a trace for the policy.

    Args:
        region: The model's forward and backward.
        op_s: (n,) seconds of each op of the region, its costs.
        is_cheap: Predicate on op names: outputs are cheap (see `Trace.tensor_cheap`).
        elements: (n,) elements of elementwise ops (`activations.schedules.schedule_pass.elements_of`).
        keep_written: Values that are changed in place are never evicted.
        online: Values of backward are never evicted: autograd's engine holds them.
    """
    graph, trace = region.graph, TraceWriter()
    last_read = _last_reads(graph)
    now: dict[int, int] = {}  # value -> tensor of its latest version
    for op, name in enumerate(graph.names):
        written = graph.writes[op]
        made = graph.makes[op]
        held = any(region.outside_until[value] >= 0 for value in (*made, *written))
        once = held or op in graph.once or len(written) > 1 or bool(written and made)
        # Set online only: a schedule of generated code owns the values of backward as well.
        once |= online and op >= graph.n_forward
        once |= keep_written and bool(written or any(value in graph.writers for value in made))
        outs = [(int(region.bytes[value]), -1) for value in (*written, *made)]
        tensors = trace.call(
            float(op_s[op]),
            [now[value] for value in graph.reads[op]],
            outs,
            cheap=is_cheap(name),
            takes_over=now[written[0]] if written else -1,
            again=not once,
            elements=0 if online and op >= graph.n_forward else elements[op],
        )
        for value in written:
            trace.release(now[value])
        # Later reads get the new version; the old one is released, its memory taken over.
        now.update(zip((*written, *made), tensors, strict=True))
        for value in sorted({*graph.reads[op], *made}):
            if last_read.get(value, graph.maker[value]) == op:
                trace.release(now[value])
    return trace.done()


def least_bytes(region: Region) -> int:
    """Return a lower bound of any schedule's peak: values held outside, and an op's reads and outputs."""
    graph = region.graph
    held = np.zeros(graph.n_ops + 1, np.int64)
    outside = region.outside_until
    for value, maker in enumerate(graph.maker):
        if outside[value] >= maker:
            held[maker] += region.bytes[value]
            held[min(int(outside[value]) + 1, graph.n_ops)] -= region.bytes[value]
    # No schedule frees values that are held outside of the region.
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
    options: Sequence[Policy],
    budget_bytes: int,
    peak_of: Callable[[Schedule], int],
    accepts: Callable[[Policy], bool] = lambda policy: True,
    below_s: float = math.inf,
    link: HostLink | None = None,
) -> PolicySchedule | None:
    """Return the cheapest schedule of `options` whose step stays within `budget_bytes`; None if none is
    found.

    Args:
        region: The model's forward and backward.
        traces: Alternatives from `region_trace`, each tried if those before yield no valid schedule.
        options: Eviction policies; `in_place` is set, because the ops are in place. The first one wins a tie.
        budget_bytes: Budget of the whole step.
        peak_of: Peak bytes of the whole step under a schedule.
        accepts: Whether the option can be used; others decide only if none can.
        below_s: Seconds of recomputation that a schedule must stay below.
        link: The link to the host; None: policies do not swap.
    """
    # A policy accounts the region's values alone. Its budget is what the rest of the step leaves, reduced
    # until the whole step's peak fits. An option is played only until it costs more than the best before it.
    allowed = budget_bytes - int((region.background_bytes + region.scratch_bytes).min())
    limits = _Limits(_with_holes(allowed, options), _WORK_LIMIT, below_s, link)
    rejected: PolicySchedule | None = None
    accepted: PolicySchedule | None = None
    for policy in options:
        found = _freeze_one(region, traces, policy, limits, budget_bytes, peak_of)
        if found is None:
            continue
        if accepts(policy):
            accepted = found
            # Later options stop as soon as they cost more.
            limits.recompute_s = found.recompute_s
            if found.recompute_s <= 0:
                break
        elif rejected is None or found.recompute_s < rejected.recompute_s:
            rejected = found
    return accepted or rejected


@dataclass
class _Limits:
    """Limits of the options that are still to be played."""

    allowed_bytes: int
    """Bytes of values with which an option begins."""
    work: int
    """Work left for all of them."""
    recompute_s: float
    """Seconds that an option must stay below."""
    link: HostLink | None = None


def _freeze_one(
    region: Region,
    traces: Sequence[Callable[[], Trace]],
    policy: Policy,
    limits: _Limits,
    budget_bytes: int,
    peak_of: Callable[[Schedule], int],
) -> PolicySchedule | None:
    """Return the schedule of one option, which begins with the allowed bytes of values."""
    played, allowed = replace(policy, in_place=True, forget=True), limits.allowed_bytes
    if limits.link is None:
        played = replace(played, swap="never")
    else:
        played = replace(played, link=limits.link)
    for _ in range(_TRIES):
        found = _frozen(region, traces, played, (allowed, budget_bytes), limits)
        if found is None:
            break
        schedule, done, seconds = found
        peak = peak_of(schedule)
        if peak <= budget_bytes:
            return PolicySchedule(schedule, peak, seconds, policy)
        # Room above the values' own peak changes nothing. At least 4 % less: the same overshoot may repeat
        # for many steps otherwise.
        allowed = min(allowed, _with_holes(done.peak_bytes, (policy,)))
        allowed -= max(peak - budget_bytes, allowed // 24)
        if not done.evictions:
            limits.allowed_bytes = allowed  # no other option evicts with more either
    return None


def _with_holes(n_bytes: int, options: Sequence[Policy]) -> int:
    """Return the bytes of an arena for values of `n_bytes`."""
    # Holes between addresses count for a policy that has addresses, but not for the step.
    return n_bytes + n_bytes // 4 if any(policy.addressed for policy in options) else n_bytes


def _frozen(
    region: Region,
    traces: Sequence[Callable[[], Trace]],
    policy: Policy,
    budgets: tuple[int, int],
    limits: _Limits,
) -> tuple[Schedule, Replay, float] | None:
    """Return a schedule, the play that made it, and its seconds, within `limits`.

    `budgets` are bytes of values, within which the policy is played, and of the whole step.
    """
    for trace in (each() for each in traces):
        if limits.work <= 0:
            break
        plain_s = float(trace.op_cost.sum())
        done = replay(
            trace,
            policy,
            budgets[0],
            cost_limit=min(COST_LIMIT * plain_s, plain_s + limits.recompute_s),
            work_limit=max(limits.work // 2, _LEAST_WORK),
            journal=True,
        )
        limits.work -= done.work
        if done.outcome != "done" or done.replay_cost >= limits.recompute_s:
            continue
        schedule = _schedule(region, done, policy, trace.op_cost, budgets[1], limits.link)
        seconds = done.replay_cost
        if done.swaps and limits.link is not None:
            seconds = added_seconds(region.graph, region.bytes, schedule, trace.op_cost, limits.link)
        if seconds < limits.recompute_s and not find_schedule_error(region.graph, schedule):
            return schedule, done, seconds
    return None


def _schedule(
    region: Region, done: Replay, policy: Policy, op_s: F64, budget_bytes: int, link: HostLink | None
) -> Schedule:
    graph, runs, middle = region.graph, list[ScheduleStep](), 0
    along: list[int] = []
    swaps, leaves, last_use = list[Swap](), dict[int, tuple[int, int]](), dict[int, int]()
    # Of each storage of the trace, in the order in which `region_trace` makes them.
    first, values = list[int](), list[int]()
    for written, made in zip(graph.writes, graph.makes, strict=True):
        first.append(len(values))
        values += (*written, *made)
    for act, op in done.journal:
        if act == ALONG:
            along.append(op)
        elif act == SWAP:
            leaves[op] = last_use[values[op]], len(runs)
        elif act == RELOAD:
            swaps.append(Swap(values[op], *leaves.pop(op), len(runs)))
        elif act in (RUN, REPLAY):
            runs.append(ScheduleStep(Action.COMPUTE, op, tuple(along), policy.parts if along else 1))
            along = []
            last_use.update(
                dict.fromkeys((*runs[-1].reads(graph), *graph.makes[op], *graph.writes[op]), len(runs) - 1)
            )
            # Made again although it was on the host: the copy is never read.
            for storage in range(first[op], first[op] + len(graph.writes[op]) + len(graph.makes[op])):
                leaves.pop(storage, None)
            # Replays after the last op of forward belong to backward.
            if (act, op) == (RUN, graph.n_forward - 1):
                middle = len(runs)
    if swaps and link is not None:
        return place_copies(region, runs, middle, swaps, op_s, link, budget_bytes, policy.rule)
    return build_schedule(graph, runs[:middle], runs[middle:], made_by=policy.rule)


def _last_reads(graph: OpGraph) -> dict[int, int]:
    """Return the last op that reads each value, in the plain order."""
    return {value: op for op, values in enumerate(graph.reads) for value in values}


class Swap(NamedTuple):
    """A value that is on the host for a time; positions are those of runs."""

    value: int
    after: int
    """Its last use."""
    gone: int
    """The run that needs its memory."""
    back: int
    """The run that reads it next."""


def place_copies(
    region: Region,
    runs: Sequence[ScheduleStep],
    middle: int,
    swaps: Sequence[Swap],
    op_s: F64,
    link: HostLink,
    budget_bytes: int,
    made_by: str,
) -> Schedule:
    """Return the schedule of `runs`, of which the first `middle` are forward, with the copies of `swaps`.

    Args:
        region: The model's forward and backward.
        runs: COMPUTE steps in order.
        middle: Number of runs of forward.
        swaps: Values to copy, in the order of their reloads.
        op_s: (n,) seconds of each op.
        link: Its rates.
        budget_bytes: Budget of the whole step, within which reloads begin early.
        made_by: Name of the planner.
    """
    start_s = np.concatenate([[0.0], np.cumsum([_run_s(step, op_s) for step in runs])])
    gone = _freed_at(region.bytes, start_s, middle, swaps, link)
    delayed = _with_copies(region.graph, runs, middle, swaps, gone, [each.back for each in swaps], made_by)
    if not link.hides_copies:
        return delayed
    room = _room(region, delayed, budget_bytes)
    back = _begin_early(region.bytes, start_s, middle, swaps, gone, room, link)
    return _with_copies(region.graph, runs, middle, swaps, gone, back, made_by)


def added_seconds(graph: OpGraph, n_bytes: I64, schedule: Schedule, op_s: F64, link: HostLink) -> float:
    """Return the seconds of recomputation and of waiting for copies under `schedule`."""
    now = out_free = in_free = 0.0
    leaves, comes = dict[int, float](), dict[int, float]()
    for step in schedule.steps:
        if step.action == Action.COMPUTE:
            now = max([now, *(comes.pop(value) for value in step.reads(graph) if value in comes)])
            now += _run_s(step, op_s)
        elif step.action == Action.TO_HOST:
            out_free = max(now, out_free) + link.to_host(float(n_bytes[step.target]))
            leaves[step.target] = out_free
        elif step.action == Action.FREE:
            now = max(now, leaves.get(step.target, 0.0))
        else:
            in_free = max(now, in_free, leaves.pop(step.target)) + link.from_host(float(n_bytes[step.target]))
            comes[step.target] = in_free
        if not link.hides_copies:
            now = max(now, out_free, in_free)
    return max(now - float(op_s.sum()), 0.0)


def _run_s(step: ScheduleStep, op_s: F64) -> float:
    return float(op_s[[*step.along, step.target]].sum())


def _freed_at(n_bytes: I64, start_s: F64, middle: int, swaps: Sequence[Swap], link: HostLink) -> list[int]:
    """Return for each swap the run before which its value is freed: the first after its copy has ended."""
    found, free_s = [0] * len(swaps), 0.0
    # In the order in which the link carries the copies.
    for number in sorted(range(len(swaps)), key=lambda each: swaps[each].after):
        swap = swaps[number]
        free_s = max(free_s, start_s[swap.after + 1]) + link.to_host(float(n_bytes[swap.value]))
        end = max(int(np.searchsorted(start_s, free_s)), swap.after + 1)
        # Not while the loss runs: what forward hands over to backward is complete.
        last = min(swap.gone, middle) if swap.after < middle else swap.gone
        found[number] = min(end, last)
    return found


def _room(region: Region, schedule: Schedule, budget_bytes: int) -> I64:
    """Return the bytes left for values during each run of `schedule`."""
    left, live, latest = list[int](), dict[int, int](), 0
    for step in schedule.steps:
        if step.action == Action.COMPUTE:
            live.update((value, int(region.bytes[value])) for value in region.graph.makes[step.target])
            latest = max(latest, step.target)
            outside = int(region.background_bytes[latest] + region.scratch_bytes[step.target])
            left.append(budget_bytes - outside - sum(live.values()))
        elif step.action == Action.FREE:
            del live[step.target]
        elif step.action == Action.FROM_HOST:
            live[step.target] = int(region.bytes[step.target])
    return np.asarray(left, np.int64)


def _begin_early(
    n_bytes: I64,
    start_s: F64,
    middle: int,
    swaps: Sequence[Swap],
    gone: Sequence[int],
    room: I64,
    link: HostLink,
) -> list[int]:
    """Return for each swap the run before which its reload begins, so that it ends when it is read."""
    found, next_s = [0] * len(swaps), float("inf")
    # From the last one on: a reload ends before the next one has to begin.
    for number in sorted(range(len(swaps)), key=lambda each: -swaps[each].back):
        swap, size = swaps[number], int(n_bytes[swaps[number].value])
        begin_s = min(float(start_s[swap.back]), next_s) - link.from_host(size)
        at, first = swap.back, max(gone[number], middle if swap.back >= middle else 0)
        while at > first and start_s[at] > begin_s and room[at - 1] >= size:
            at -= 1
        # Taken from the reloads that are placed after this one, all of which are read earlier.
        room[at : swap.back] -= size
        found[number], next_s = at, float(start_s[at])
    return found


def _with_copies(
    graph: OpGraph,
    runs: Sequence[ScheduleStep],
    middle: int,
    swaps: Sequence[Swap],
    gone: Sequence[int],
    back: Sequence[int],
    made_by: str,
) -> Schedule:
    # A run frees what has been copied before the copies begin that follow it.
    frees, copies, reloads = ([list[ScheduleStep]() for _ in runs] for _ in range(3))
    for swap, freed in zip(swaps, gone, strict=True):
        copies[swap.after].append(ScheduleStep(Action.TO_HOST, swap.value))
        (copies if freed == swap.after + 1 else frees)[freed - 1].append(graph.frees[swap.value])
    for swap, begun in sorted(zip(swaps, back, strict=True), key=lambda each: each[0].back):
        reloads[begun].append(ScheduleStep(Action.FROM_HOST, swap.value))
    steps = [
        [*each, run, *free, *copy] for each, run, free, copy in zip(reloads, runs, frees, copies, strict=True)
    ]
    forward, backward = chain.from_iterable(steps[:middle]), chain.from_iterable(steps[middle:])
    return build_schedule(graph, forward, backward, made_by=made_by)
