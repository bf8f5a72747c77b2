"""A simulated step over time, for pictures: bytes by kind, and which resource runs which phase when.

The simulator returns times along the critical path only. Those of transfers and collectives off the path
follow from causality: if one takes so long that it ends last, nothing before it changes, and the critical
path ends with it. Compute ops off the path are placed in order, between the known ones.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memtune import _native
from memtune.autotune.predict.breakdown import kind_of
from memtune.autotune.predict.python_work import PythonWork
from memtune.autotune.predict.simulation import scheduled, step_columns
from memtune.hardware import Hardware, op_costs
from memtune.program import F64, Phase, Program, Resource, Step, Tier

_MOST_SIMULATIONS = 200
"""Simulations for the times of transfers and collectives off the critical path."""
_POINTS = 400
"""Points of the curve of bytes, and least distance of two spans in parts of the step."""


@dataclass(frozen=True)
class Curve:
    """Bytes of one memory over time."""

    time_s: list[float]
    """Times from 0; each holds until the next."""
    bytes_by_kind: dict[str, list[int]]
    """Bytes at each time."""

    @property
    def peak_bytes(self) -> int:
        """Return the largest total."""
        return max((sum(each) for each in zip(*self.bytes_by_kind.values(), strict=True)), default=0)


@dataclass(frozen=True)
class StepTimeline:
    """One micro-batch and the optimizer update of the first rank class, simulated."""

    device: Curve
    host: Curve
    ssd: Curve
    streams: dict[str, list[tuple[str, float, float]]]
    """By resource: phase, start and stop in seconds of the spans in which it works."""

    def document(self) -> dict[str, Any]:
        """Return plain data with rounded times."""
        found = asdict(self)
        for curve in (found["device"], found["host"], found["ssd"]):
            curve["time_s"] = [float(f"{each:.5g}") for each in curve["time_s"]]
        found["streams"] = {
            name: [(phase, float(f"{start:.5g}"), float(f"{stop:.5g}")) for phase, start, stop in spans]
            for name, spans in self.streams.items()
        }
        return found


def step_timeline(program: Program, hardware: Hardware, python: PythonWork) -> StepTimeline:
    """Simulate one micro-batch and the update, and return the first rank class over time."""
    steps = [each.step for each in program.rank_classes]
    columns = [step_columns(each, hardware, program.ranks, python=python) for each in steps]
    first = scheduled(columns, program, hardware, 1)
    step = steps[0]
    start, stop = _op_times(first, columns, program, hardware, python)
    stream = first.classes[0].storage_stream
    device, host, ssd = (_curve(step, stream, start, tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.SSD))
    return StepTimeline(device, host, ssd, _streams(step, start, stop))


def _op_times(
    first: _native.Timeline,
    columns: list[_native.StepColumns],
    program: Program,
    hardware: Hardware,
    python: PythonWork,
) -> tuple[F64, F64]:
    """Return (ops,) start and stop of each op of the first rank class."""
    step = program.step
    op_s = op_costs(step, hardware, ranks=program.ranks).op_s
    start, stop = np.full(step.ops.n, np.nan), np.full(step.ops.n, np.nan)
    issued = np.zeros(step.ops.n)
    _fill(first, start, stop, issued)
    is_copy = (op_s > 0) & (step.ops.resource != Resource.NOTHING) & (step.ops.resource != Resource.COMPUTE)
    for _ in range(_MOST_SIMULATIONS):
        left = np.flatnonzero(is_copy & np.isnan(start))
        if not len(left):
            break
        # The last one: the path that ends with it contains most of the others before it.
        op = int(left[-1])
        more_s = np.zeros(step.ops.n)
        # Longer than anything else, so that the step ends with this op.
        more_s[op] = 10 * first.step_s
        longer = step_columns(step, hardware, program.ranks, python=python, more_s=more_s)
        _fill(scheduled([longer, *columns[1:]], program, hardware, 1), start, stop, issued, last=op)
        # Its start is right, its end was made longer.
        stop[op] = start[op] + op_s[op]
        is_copy[op] = False
    _fill_in_order(step, op_s, np.maximum.accumulate(issued), start, stop)
    return start, stop


def _fill(timeline: _native.Timeline, start: F64, stop: F64, issued: F64, last: int = -1) -> None:
    """Write the times along a critical path of the first rank class, up to the op `last`."""
    rank_class, op, by_host, start_s, stop_s = timeline.critical_path
    host = (rank_class == 0) & (by_host == 1)
    # Of an op that waits for the host the path has the time to issue it, at whose end it is issued.
    np.maximum.at(issued, op[host], np.minimum(stop_s[host], timeline.step_s))
    on_rank = (rank_class == 0) & (by_host == 0)
    if last >= 0 and (ends := np.flatnonzero(on_rank & (op == last))).size:
        on_rank[ends[0] + 1 :] = False
    known = op[on_rank]
    new = np.isnan(start[known])
    start[known[new]], stop[known[new]] = start_s[on_rank][new], stop_s[on_rank][new]


def _fill_in_order(step: Step, op_s: F64, issued: F64, start: F64, stop: F64) -> None:
    """Write the times of the ops left: once issued, with inputs, in order, before the next known one."""
    n = step.ops.n
    uses = np.searchsorted(step.uses.op, np.arange(n + 1))
    producers = step.storages.producer
    # Compute first: copies wait for what it makes.
    for resource in (Resource.COMPUTE, *(each for each in Resource if each != Resource.COMPUTE)):
        if resource == Resource.NOTHING:
            continue
        ops = np.flatnonzero(step.ops.resource == resource)
        limit, at = np.inf, 0.0
        next_start = np.full(len(ops), np.inf)
        # From the end: an op without a time ends before the next one of its queue that has one.
        for i in range(len(ops) - 1, -1, -1):
            next_start[i] = limit
            limit = limit if np.isnan(start[ops[i]]) else float(start[ops[i]])
        for op, before in zip(ops.tolist(), next_start.tolist(), strict=True):
            if np.isnan(start[op]):
                inputs = producers[step.uses.storage[uses[op] : uses[op + 1]]]
                inputs = inputs[inputs >= 0]
                known = np.nanmax(stop[inputs], initial=0.0) if len(inputs) else 0.0
                start[op] = min(max(at, float(issued[op]), float(known)), before)
                stop[op] = min(start[op] + op_s[op], before)
            at = max(at, float(stop[op]))


def _curve(step: Step, stream: np.ndarray[Any, Any], start: F64, tier: Tier) -> Curve:
    """Return the bytes of each kind in a tier over time."""
    # An allocation happens when its op starts. A free has no time of its own: it follows the event before it.
    storage = np.abs(stream) - 1
    in_tier = step.storages.tier[storage] == tier
    storage, sign = storage[in_tier], np.where(stream[in_tier] > 0, 1, -1)
    producer = step.storages.producer[storage]
    # Device memory is allocated in the order of compute ops; elsewhere copies and host updates allocate too.
    counts = (step.ops.resource == Resource.COMPUTE) | (tier != Tier.DEVICE)
    runs = np.maximum.accumulate(np.where(counts, np.nan_to_num(start), 0.0))
    at = np.where((sign > 0) & (producer >= 0), runs[np.maximum(producer, 0)], 0.0)
    at = np.maximum.accumulate(at)
    kept = step.kept_for_backward()
    names = [kind_of(step, int(each), bool(kept[each])) for each in storage]
    kinds = sorted(set(names))
    change = np.zeros((len(kinds), len(storage)), np.int64)
    change[[kinds.index(each) for each in names], np.arange(len(storage))] = (
        sign * step.storages.bytes[storage]
    )
    live = change.cumsum(1)
    kept = _highest(at, live.sum(0))
    return Curve(at[kept].tolist(), {kind: live[row, kept].tolist() for row, kind in enumerate(kinds)})


def _highest(at: F64, total: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the indices of the largest total in each of `_POINTS` parts of the time, and of the end."""
    if not len(at):
        return np.zeros(0, np.int64)
    part = np.minimum(at / (at[-1] or 1.0) * _POINTS, _POINTS - 1).astype(np.int64)
    order = np.lexsort((-total, part))
    first = np.unique(part[order], return_index=True)[1]
    return np.unique([*order[first].tolist(), len(at) - 1])


def _streams(step: Step, start: F64, stop: F64) -> dict[str, list[tuple[str, float, float]]]:
    """Return the spans of each resource; spans of one phase that almost touch are one."""
    found: dict[str, list[tuple[str, float, float]]] = {}
    least = np.nanmax(stop, initial=0.0) / _POINTS
    for resource in Resource:
        ops = np.flatnonzero((step.ops.resource == resource) & (stop > start))
        for op in ops[np.argsort(start[ops], kind="stable")].tolist():
            phase = Phase(int(step.ops.phase[op])).name.lower()
            spans = found.setdefault(resource.name.lower(), [])
            if spans and spans[-1][0] == phase and start[op] - spans[-1][2] < least:
                spans[-1] = (phase, spans[-1][1], max(spans[-1][2], float(stop[op])))
            else:
                spans.append((phase, float(start[op]), float(stop[op])))
    return found
