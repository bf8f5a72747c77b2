"""Spans of a step in which FSDP2 has a unit unsharded: one per call of its blocks.

FSDP2 (torch 2.13) unshards a unit in each call and reshards it after each, in forward and in backward. The
root unit stays unsharded from its first backward to the end, as no gradient of the batch tells its end.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.program import I32, I64, WRITES, FsdpUnits, Mask, Phase, Step, columns_of, units_of


@dataclass(frozen=True, eq=False)
class UnitVisits:
    """Spans of ops that use FSDP units, in their order in time; a unit has one per call of its blocks.

    Columns are (visits,).
    """

    unit: I64
    """Index into `FsdpUnits`."""
    first: I32
    """Op before which the unit is unsharded."""
    last: I32
    """Op after which it is resharded."""
    model_call: I64
    """Call of the whole model that the visit is in, in order of forward."""

    @cached_property
    def is_first(self) -> Mask:
        """(visits,) True for the first one of its unit."""
        found = np.zeros(len(self.unit), bool)
        found[np.unique(self.unit, return_index=True)[1]] = True
        return found

    @cached_property
    def is_last(self) -> Mask:
        """(visits,) True for the last one of its unit."""
        found = np.zeros(len(self.unit), bool)
        found[len(found) - 1 - np.unique(self.unit[::-1], return_index=True)[1]] = True
        return found

    @cached_property
    def model_call_begins(self) -> I64:
        """(visits,) the first visit of the run of visits in the same call of the model."""
        changes = np.append(True, self.model_call[1:] != self.model_call[:-1])[: len(self.unit)]
        begins: I64 = np.maximum.accumulate(np.where(changes, np.arange(len(self.unit)), 0))
        return begins

    def picked(self, rows: npt.NDArray[Any]) -> UnitVisits:
        """Return the given visits in the given order."""
        return UnitVisits(self.unit[rows], self.first[rows], self.last[rows], self.model_call[rows])


@functools.lru_cache(maxsize=8)
def forward_visits(step: Step, blocks_per_unit: int) -> UnitVisits:
    """Return the visits of forward; the root unit has one per call of the model."""
    units = units_of(step, blocks_per_unit)
    if _runs_once(step):
        # Blocks are in the order of the model's lists, in which they need not run.
        nth = np.argsort(units.first_forward, kind="stable")
        return UnitVisits(nth, units.first_forward[nth], units.last_forward[nth], np.zeros_like(nth))
    unit, model_call, first, last = _of_calls(step, units, blocks_per_unit, (Phase.FORWARD,))
    # Ops that an earlier pass inserted around a block's first and last forward run inside FSDP2's hooks.
    found = UnitVisits(unit, first, last, model_call)
    first[found.is_first] = units.first_forward[unit[found.is_first]]
    last[found.is_last] = units.last_forward[unit[found.is_last]]
    if not units.has_root:
        return found
    starts, ends = np.append(step.forward_starts[-1:], _model_starts(step)), model_ends(step)
    return _in_time(UnitVisits(np.zeros(len(ends), np.int64), starts, ends, np.arange(len(ends))), found)


@functools.lru_cache(maxsize=8)
def backward_visits(step: Step, blocks_per_unit: int) -> UnitVisits:
    """Return the visits of backward."""
    # The root unit, whose inputs have no gradient, stays unsharded from its first one to the end; it
    # has one per call of the model.
    units = units_of(step, blocks_per_unit)
    if _runs_once(step):
        order = np.arange(len(units))[::-1]
        # Blocks that share weights with a later one have their backward out of order.
        # The reverse of forward by default; stable, so that units without a backward keep their place.
        order = order[np.argsort(units.first_backward[order], kind="stable")]
        if units.has_root:  # its backward begins where the model's does
            order = np.concatenate([[0], order[order != 0]])
        order = order[units.last_backward[order] >= 0]
        first, last = units.first_backward[order], units.last_backward[order]
        return UnitVisits(order, first, last, np.zeros(len(order), np.int64))
    unit, model_call, first, last = _of_calls(step, units, blocks_per_unit, (Phase.BACKWARD, Phase.RECOMPUTE))
    found = _without_returns(step, units, blocks_per_unit, UnitVisits(unit, first, last, model_call))
    if not units.has_root:
        return found
    # Calls without gradients have no backward.
    calls = np.unique(found.model_call)[::-1] if len(found.unit) else np.zeros(1, np.int64)
    starts = [int(units.first_backward[0])]
    for call, following in itertools.pairwise(calls):
        begin = int(found.last[found.model_call == call].max()) + 1
        end = int(found.first[found.model_call == following].min())
        # Between the two is the backward of the user's loss.
        outside = begin + np.flatnonzero(step.ops.module[begin:end] == 0)
        starts.append(int(outside[-1]) + 1 if len(outside) else end)
    ends = np.repeat(units.last_backward[:1], len(starts))
    of_root = UnitVisits(np.zeros(len(starts), np.int64), np.asarray(starts, np.int32), ends, calls)
    return _in_time(of_root, found)


@functools.lru_cache(maxsize=8)
def mistargeted_prefetches(step: Step, blocks_per_unit: int) -> tuple[I64, I64]:
    """Return backward visits whose unit prefetches one without a backward, and that unit, once each.

    By default FSDP2 prefetches in backward the unit whose forward ended before (torch's post-forward order),
    also if that one ran under no_grad. It drops the result when backward ends.
    """
    units, backward = units_of(step, blocks_per_unit), backward_visits(step, blocks_per_unit)
    if (units.last_backward >= 0).all():
        return np.empty(0, np.int64), np.empty(0, np.int64)
    forward = forward_visits(step, blocks_per_unit)
    # The root's forward ends after that of the last block.
    ended = forward.picked(np.lexsort((units.has_root & (forward.unit == 0), forward.last)))
    visits, targets, taken = [], [], set[int]()
    for visit, (unit, call) in enumerate(zip(backward.unit, backward.model_call, strict=True)):
        places = np.flatnonzero((ended.unit == unit) & (ended.model_call == call))
        if not len(places) or places[-1] == 0:
            continue
        target = int(ended.unit[places[-1] - 1])
        if units.last_backward[target] < 0 and target not in taken:
            taken.add(target)
            visits.append(visit)
            targets.append(target)
    return np.asarray(visits, np.int64), np.asarray(targets, np.int64)


def _runs_once(step: Step) -> bool:
    """Return whether each block, and the model, has one call at most."""
    return step.model_calls <= 1 and len(step.calls.block) <= len(step.blocks)


def _in_time(root: UnitVisits, others: UnitVisits) -> UnitVisits:
    """Return the visits of both in the order of their first ops, those of the root before others."""
    both = UnitVisits(
        np.concatenate([root.unit, others.unit]),
        np.concatenate([root.first, others.first]),
        np.concatenate([root.last, others.last]),
        np.concatenate([root.model_call, others.model_call]),
    )
    return both.picked(np.argsort(both.first, kind="stable"))


def _of_calls(
    step: Step, units: FsdpUnits, blocks_per_unit: int, phases: tuple[Phase, ...]
) -> tuple[I64, I64, I32, I32]:
    """Return the visits of blocks in `phases`, by first op: units, calls of the model, first and last ops."""
    n_units = 1 + -(-len(step.blocks) // blocks_per_unit)
    block, repeat = step.calls.block, _repeats(step.calls.block)
    visit = repeat * n_units + 1 + block // blocks_per_unit  # (calls,) one number per unit and repetition
    ops = np.flatnonzero(np.isin(step.ops.phase, phases) & (step.ops.call >= 0))
    number = visit[step.ops.call[ops]]
    numbers, first = np.unique(number, return_index=True)
    last = len(ops) - 1 - np.unique(number[::-1], return_index=True)[1]
    row = np.full(n_units, -1, np.int64)
    row[units.number] = np.arange(len(units))
    of_unit = row[numbers % n_units]
    kept = np.flatnonzero(of_unit >= 0)
    kept = kept[np.argsort(first[kept], kind="stable")]
    of_call = np.zeros(int(visit.max(initial=0)) + 1, np.int64)
    of_call[visit] = _model_call(step)
    return (
        of_unit[kept],
        of_call[numbers[kept]],
        ops[first[kept]].astype(np.int32),
        ops[last[kept]].astype(np.int32),
    )


def _without_returns(step: Step, units: FsdpUnits, blocks_per_unit: int, visits: UnitVisits) -> UnitVisits:
    """Join visits of a unit to the one before from which FSDP2 does not return."""
    # It reshards a unit when the gradients of its inputs are there, and without such gradients when the whole
    # backward ends.
    resident = np.zeros(len(units), bool)
    reached = _reached_by_parameters(step)
    for call in range(len(step.calls.block)):
        inputs = step.calls.inputs.storage[step.calls.inputs.call == call]
        if not reached[inputs].any():
            unit = np.flatnonzero(units.number == 1 + step.calls.block[call] // blocks_per_unit)
            resident[unit] = True
    if not resident.any():
        return visits
    kept = visits.is_first | ~resident[visits.unit]
    last = visits.last.copy()
    for row in np.flatnonzero(visits.is_first & resident[visits.unit]).tolist():
        last[row] = visits.last[visits.unit == visits.unit[row]].max()
    return UnitVisits(visits.unit, visits.first, last, visits.model_call).picked(np.flatnonzero(kept))


def _reached_by_parameters(step: Step) -> Mask:
    """Return (storages,) True for those that forward computes from a trained parameter."""
    trained = np.append(columns_of(step.parameters).gradient >= 0, False)  # the last entry serves "none"
    reached: Mask = trained[step.parameter_of]
    made: dict[int, list[int]] = {}
    for storage, op in enumerate(step.storages.producer.tolist()):
        made.setdefault(op, []).append(storage)
    rows = np.flatnonzero(step.use_phase == Phase.FORWARD)
    for group in np.split(rows, np.flatnonzero(np.diff(step.uses.op[rows])) + 1) if len(rows) else []:
        if reached[step.uses.storage[group]].any():
            reached[made.get(int(step.uses.op[group[0]]), [])] = True
            reached[step.uses.storage[group[step.uses.mode[group] == WRITES]]] = True
    return reached


def _repeats(block: I32) -> I64:
    """Return (calls,) how many calls of the same block came before."""
    order = np.argsort(block, kind="stable")
    count = np.bincount(block) if len(block) else np.empty(0, np.int64)
    found = np.empty(len(block), np.int64)
    found[order] = np.arange(len(block)) - np.repeat(np.cumsum(count) - count, count)
    return found


@functools.lru_cache(maxsize=8)
def _model_call(step: Step) -> I64:
    """Return (calls,) the call of the model that each call of a block is in: as many each, or one."""
    n = len(step.calls.block)
    found = np.arange(n) // max(n // max(step.model_calls, 1), 1)
    in_forward = step.ops.call[(step.ops.phase == Phase.FORWARD) & (step.ops.call >= 0)]
    even = n % max(step.model_calls, 1) == 0 and len(np.unique(found[in_forward])) == step.model_calls
    return found if even else np.zeros(n, np.int64)


@functools.lru_cache(maxsize=8)
def _between_model_calls(step: Step) -> list[tuple[int, int]]:
    """Return the last op of each call of the model but the last, and the first op of the call after it."""
    of_call = _model_call(step)
    forward = np.flatnonzero(step.ops.phase == Phase.FORWARD)
    inside = forward[step.ops.call[forward] >= 0]
    of_op, found = of_call[step.ops.call[inside]], []
    for call in range(int(of_call.max(initial=0))):
        begin, end = int(inside[of_op == call][-1]) + 1, int(inside[of_op == call + 1][0])
        # The user's loss runs between the two.
        outside = begin + np.flatnonzero(step.ops.module[begin:end] == 0)
        found.append((int(outside[0]) - 1, int(outside[-1]) + 1) if len(outside) else (end - 1, end))
    return found


def model_ends(step: Step) -> I32:
    """Return (model calls,) the op after which each call of the whole model returned."""
    return np.append([end for end, _ in _between_model_calls(step)], step.forward_ends[-1:]).astype(np.int32)


def _model_starts(step: Step) -> I32:
    """Return the op before which each call of the whole model but the first began."""
    return np.asarray([start for _, start in _between_model_calls(step)], np.int32)
