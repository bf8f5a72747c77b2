"""Priced actions of TSPLIT's planner on a step's saved tensors: offload one, or tile its module and offload
the parts or recompute them.

A *decision* is one of the planner's tensors: the saved outputs of one call of a block's op, or a module of a
block that computes each token or sample alone and can be tiled. The clock is that of the step's compute.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memtune.activations.offload import Action, Copy, Problem, Tensor, claimable_rows, copy_end_ops
from memtune.activations.tiling import (
    PositionWise,
    Tiling,
    by_sample,
    made_by,
    position_wise,
    rows_of_parts,
)
from memtune.hardware import Hardware
from memtune.program import F64, FOREVER, I32, I64, OpAddress, Phase, Resource, Step, calls_of
from memtune.search_spaces.recompute._block_planner.measured_options import op_seconds


@dataclass(frozen=True)
class CallOutputs:
    """The saved outputs of one call, which may be offloaded."""

    block: int
    op: int
    """Row of the step, -1 for the block's inputs."""


@dataclass(frozen=True)
class TiledModule:
    """A module that may be tiled, with how each of its actions does."""

    region: PositionWise
    tilings: tuple[Tiling, ...]


@dataclass(frozen=True, eq=False)
class Decisions:
    """Tensors of the planner's problem, without the timeline, and the call or module of each."""

    tensors: tuple[Tensor, ...]
    of: tuple[CallOutputs | TiledModule, ...]

    def problem(self, live_bytes: I64) -> Problem:
        """Return the planner's problem on a timeline of one entry per op."""
        return Problem(live_bytes, self.tensors)


@functools.lru_cache(maxsize=8)
def decisions(
    step: Step,
    hardware: Hardware,
    ranks: int,
    samples: int,
    min_bytes: int,
    parts: tuple[int, ...],
    *,
    prefetch: bool,
    again: bool,
) -> Decisions:
    """Return the planner's options for `step` of `samples` samples, in which each block runs once, before any
    split or offload.
    """
    prices = _Prices(step, hardware, ranks, min_bytes, prefetch=prefetch, again=again)
    return prices.options(parts, samples)


def tileable(step: Step, samples: int) -> tuple[PositionWise, ...]:
    """Return the modules that can run in parts, of their tokens or of `samples` samples."""
    return (*position_wise(step), *by_sample(step, samples))


class _LiveInside:
    """Live bytes while modules of one step run, computed once for all numbers of parts."""

    def __init__(self, step: Step) -> None:
        self._step, self._known = step, dict[str, tuple[I64, I64, I64]]()

    def of(self, region: PositionWise) -> tuple[I64, I64, I64]:
        """Return bytes by op of the module: of forward, and of backward without
        parameters' gradients, and those.

        The output and the gradient of the input are left out.
        """
        if (known := self._known.get(region.module)) is not None:
            return known
        forward, backward, but = region.forward, region.backward, {region.y}
        inner = self._bytes(forward, but, backward)
        outputs = set(made_by(self._step, backward)) - set(region.gradients)  # of its backward
        known = self._known[region.module] = (
            self._bytes(forward, but, forward),
            inner + self._bytes(backward, {region.dx, *region.gradients}, backward),
            self._bytes(backward, outputs, backward),
        )
        return known

    def _bytes(self, ops: tuple[int, ...], but: set[int], at: tuple[int, ...]) -> I64:
        """Return (at,) bytes of outputs of `ops`, without `but`, that are live at each of the ops `at`."""
        made = np.asarray([s for s in made_by(self._step, ops) if s not in but], np.int32)
        moments = np.asarray(at)[:, None]
        alive = (self._step.storages.producer[made] <= moments) & (self._step.freed_after[made] >= moments)
        found: I64 = (alive * self._step.storages.bytes[made]).sum(1)
        return found


_live_inside = functools.lru_cache(maxsize=8)(_LiveInside)


class _Prices:
    """Priced actions of one step."""

    def __init__(
        self, step: Step, hardware: Hardware, ranks: int, min_bytes: int, *, prefetch: bool, again: bool
    ) -> None:
        self.step, self.hardware, self.min_bytes, self.prefetch = step, hardware, min_bytes, prefetch
        self.again, self.live = again, _live_inside(step)
        computes = step.ops.resource == Resource.COMPUTE
        self.op_s: F64 = np.where(computes, op_seconds(step, hardware, ranks), 0.0)
        self.clock: F64 = np.append(0.0, np.cumsum(self.op_s))  # when each op begins
        self.copy_ends = copy_end_ops(step)
        rows = claimable_rows(step)
        rows = rows[step.storages.bytes[step.saves.storage[rows]] >= min_bytes]
        self.save: dict[int, int] = {}  # storage -> the first row that claims it
        for row, storage in zip(rows.tolist(), step.saves.storage[rows].tolist(), strict=True):
            self.save.setdefault(storage, row)
        self.first_read, self.last_use = _first_backward_read(step), _last_forward_use(step)

    def options(self, parts: tuple[int, ...], samples: int) -> Decisions:
        """Return the modules first, then the outputs of each call."""
        found: list[tuple[Tensor, CallOutputs | TiledModule]] = []
        inside: dict[int, int] = {}
        for region in tileable(self.step, samples) if parts else ():
            usable = dict(self._tilings(region, parts))
            if usable:
                inside |= dict.fromkeys(region.forward, len(found))
                found.append((Tensor(tuple(usable.values())), TiledModule(region, tuple(usable))))
        for (block, op), storages in self._by_call().items():
            frees = [each for each in map(self._offload_of, storages) if each is not None]
            if frees:
                out, back = ([getattr(each, way)[0] for each in frees] for way in ("out", "back"))
                action = Action(tuple(each.frees[0] for each in frees), tuple(out), tuple(back))
                found.append((Tensor((action,), inside.get(op, -1)), CallOutputs(block, op)))
        return Decisions(tuple(each for each, _ in found), tuple(each for _, each in found))

    def _by_call(self) -> dict[tuple[int, int], list[int]]:
        """Return (block, op or -1 for its inputs) → the storages that the call saves."""
        step, found = self.step, dict[tuple[int, int], list[int]]()
        entered = set(zip(step.calls.input_block.tolist(), step.calls.inputs.storage.tolist(), strict=True))
        for storage, row in self.save.items():
            block, producer = int(step.saves.block[row]), int(step.storages.producer[storage])
            if (
                producer >= 0
                and step.ops.block[producer] == block
                and step.ops.phase[producer] == Phase.FORWARD
            ):
                found.setdefault((block, producer), []).append(storage)
            elif (block, storage) in entered:
                found.setdefault((block, -1), []).append(storage)
        return found

    def _offload_of(self, storage: int) -> Action | None:
        """Return the action that offloads `storage` until backward; None if backward needs it immediately."""
        step, row = self.step, self.save[storage]
        # The device memory is free only after the copy has ended and the last op of forward has read it.
        first = max(int(self.copy_ends[step.saves.block[row]]), int(self.last_use[storage])) + 1
        stop = int(self.first_read[storage])
        if first >= stop:
            return None
        n_bytes, save = int(step.storages.bytes[storage]), int(step.saves.packed_before[row])
        out = Copy(float(self.clock[save]), float(self.clock[first]), self._out_s(n_bytes))
        return Action(
            ((first, stop, n_bytes),), (out,), (self._reload_copy(float(self.clock[stop]), n_bytes),)
        )

    def _reload_copy(self, at_s: float, n_bytes: float) -> Copy:
        """Return the H2D copy, started by prefetch as soon as the link is free, else by the op that waits."""
        seconds = n_bytes / self.hardware.host_to_device_bytes_per_s + self.hardware.launch_s
        return Copy(0.0 if self.prefetch else at_s, at_s, seconds)

    def _out_s(self, n_bytes: float) -> float:
        return n_bytes / self.hardware.device_to_host_bytes_per_s + self.hardware.launch_s

    def _tilings(self, region: PositionWise, parts: tuple[int, ...]) -> Iterator[tuple[Tiling, Action]]:
        """Yield the actions that run `region` in parts, or at once, and those parts again."""
        for count in (1, *parts):
            if count > region.rows // max(region.part_samples, 1):
                continue
            # Equal parts of samples divide any number of rows per sample alike.
            by_sample = region.part_samples > 0
            if by_sample and region.rows % count:
                continue
            # `split_regions` cannot cut the gradient of a residual branch that is added inside the module.
            kept = self._tiling_of(region, count) if count > 1 and region.residual < 0 else None
            if kept is not None:
                yield Tiling(count, again=False, by_sample=by_sample), kept
            if self.again and region.inner_bytes > 0:
                yield Tiling(count, again=True, by_sample=by_sample), self._again(region, count)

    def _again(self, region: PositionWise, parts: int) -> Action:
        """Return the action that runs `region` in `parts`, saves its input alone, and runs them again."""
        between = (region.forward[-1] + 1, region.backward[0], region.inner_bytes)
        again_s = float(self.op_s[list(region.forward)].sum())
        frees = (*self._while_running(region, parts, 0), between)
        return Action(frees, more_s=again_s + self._added_s(region, parts))

    def _tiling_of(self, region: PositionWise, parts: int) -> Action | None:
        """Return the action that runs `region` in `parts` and offloads their tensors, unless too small."""
        mine = [s for s in made_by(self.step, region.forward) if s in self.save and s != region.y]
        moved = [s for s in mine if self.step.storages.bytes[s] // parts >= self.min_bytes]
        offloads = [each for each in map(self._offload_of, moved) if each is not None]
        if not offloads:
            return None
        begin, end = float(self.clock[region.forward[0]]), float(self.clock[region.forward[-1] + 1])
        again_s, over_s = float(self.clock[region.backward[0]]), float(self.clock[region.backward[-1] + 1])
        out, back = [], []
        for part in range(parts):
            for storage, action in zip(moved, offloads, strict=True):
                n_bytes = int(self.step.storages.bytes[storage]) / parts
                start = begin + (part * (end - begin) + action.out[0].start_s - begin) / parts
                out.append(Copy(start, action.out[0].until_s, self._out_s(n_bytes)))
                read_s = max(action.back[0].until_s - again_s, 0.0)
                back.append(
                    self._reload_copy(again_s + (part * (over_s - again_s) + read_s) / parts, n_bytes)
                )
        most = max(int(self.step.storages.bytes[s]) for s in moved) // parts  # in flight to the host
        frees = [*self._while_running(region, parts, most), *self._between(region, offloads)]
        return Action(tuple(frees), tuple(out), tuple(back), self._added_s(region, parts))

    def _between(self, region: PositionWise, offloads: list[Action]) -> list[tuple[int, int, int]]:
        """Return the bytes freed between forward and backward of the module."""
        # All offloaded tensors are freed, those of the last part only when its copies have ended.
        first, stop = region.forward[-1] + 1, region.backward[0]
        copied = max(each.frees[0][0] for each in offloads)
        offloaded_bytes = sum(each.frees[0][2] for each in offloads)
        return [
            (first, stop, offloaded_bytes),
            (first, min(copied, stop), -max(each.frees[0][2] for each in offloads)),
        ]

    def _while_running(
        self, region: PositionWise, parts: int, in_flight_bytes: int
    ) -> list[tuple[int, int, int]]:
        """Return (op, op + 1, bytes) that parts need less than the module at once, negative if more."""
        forward, backward, gradients = self.live.of(region)
        # Both y and dx are allocated throughout.
        y, dx = (int(self.step.storages.bytes[s]) if s >= 0 else 0 for s in (region.y, region.dx))
        in_parts = int(forward.max()) // parts + in_flight_bytes + y
        again = int(backward.max()) // parts + 2 * int(gradients.max(initial=0)) + dx
        return [
            *((op, op + 1, n - in_parts) for op, n in zip(region.forward, forward.tolist(), strict=True)),
            *(
                (op, op + 1, n - again)
                for op, n in zip(region.backward, (backward + gradients).tolist(), strict=True)
            ),
        ]

    def _added_s(self, region: PositionWise, parts: int) -> float:
        """Return the seconds of ops too small to fill the device, of joins of y and dx, and of additions."""
        ops = self.op_s[[*region.forward, *region.backward]]
        slower = float(np.maximum(parts * self.hardware.launch_s - ops, 0.0).sum())
        joined = sum(2 * int(self.step.storages.bytes[s]) for s in (region.y, region.dx) if s >= 0)
        added = 3 * (parts - 1) * sum(int(self.step.storages.bytes[s]) for s in region.gradients)
        return slower + (joined + added) / self.hardware.memory_bytes_per_s


def _first_backward_read(step: Step) -> I32:
    """Return (m,) op before which backward first reads each storage; the number of ops if it never does."""
    found = np.full(step.storages.n, step.ops.n, np.int32)
    rows = np.flatnonzero(step.saves.unpacked_before >= 0)
    np.minimum.at(found, step.saves.storage[rows], step.saves.unpacked_before[rows])
    return found


def _last_forward_use(step: Step) -> I32:
    """Return (m,) last op of forward that reads each storage, or until which Python holds it."""
    found = np.where(step.storages.held_until == FOREVER, -1, step.storages.held_until).astype(np.int32)
    forward = step.ops.phase[step.uses.op] == Phase.FORWARD
    np.maximum.at(found, step.uses.storage[forward], step.uses.op[forward])
    return found


def calls_in_parts(
    step: Step, block: int, regions: dict[int, tuple[PositionWise, int]]
) -> dict[int, frozenset[OpAddress]]:
    """Return op of `block` → its call addresses once the modules of `regions` run in parts."""
    # The ops that join the parts take occurrence numbers as well.
    ops = np.flatnonzero((step.ops.block == block) & (step.ops.phase == Phase.FORWARD)).astype(np.int32)
    if not regions:
        return {op: frozenset([call]) for op, _, call in calls_of(step, ops)}
    seen: dict[str, int] = {}
    found: dict[int, set[OpAddress]] = {}

    def count(name: str, op: int = -1) -> None:
        seen[name] = seen.get(name, -1) + 1
        found.setdefault(op, set()).add((name, seen[name]))

    inside = {op for region, _ in regions.values() for op in region.forward}
    for op in ops.tolist():
        if op not in inside:
            count(step.names[step.ops.name[op]], op)
            continue
        region, parts = regions.get(op, (None, 0))
        if region is None:  # a later op of a tiled module, counted with its first op
            continue
        for part in range(len(rows_of_parts(region.rows, parts))):
            for each in region.forward:
                count(step.names[step.ops.name[each]], each)
            if part == 0:
                count("aten.new_empty.default")
            count("aten.copy_.default")
    return {op: frozenset(calls) for op, calls in found.items()}
