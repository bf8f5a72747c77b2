"""Places the copies of values that a policy swaps: each begins after the value's last use, and the reload
ends before the next one.

Both directions of the link carry one copy at a time. A value is freed as soon as its copy has ended, at the
latest where the policy evicts it. Its reload begins as early as hides it behind other ops, if the memory of
these ops allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from memtune.activations.eviction.policy import HostLink
from memtune.activations.schedules import Region
from memtune.program import F64, I64, Action, OpGraph, Schedule, ScheduleStep, build_schedule


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
    delayed = _schedule(region.graph, runs, middle, swaps, gone, [each.back for each in swaps], made_by)
    if not link.hides_copies:
        return delayed
    room = _room(region, delayed, budget_bytes)
    back = _begin_early(region.bytes, start_s, middle, swaps, gone, room, link)
    return _schedule(region.graph, runs, middle, swaps, gone, back, made_by)


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


def _schedule(
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
