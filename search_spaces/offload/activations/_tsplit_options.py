"""What TSPLIT's planner may do with the saved tensors of a step, priced: move one whole, or run its module in
parts that move.

Legend: a *decision* is one of the planner's tensors: what one call of a block's op made and autograd saved,
or a module of a block that treats every token alike, which can be split. The clock is that of the step's
compute.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from memtune.activations.offload import Action, Copy, Problem, Tensor, claimable_rows, copy_end_ops
from memtune.activations.tiling import PositionWise, made_by, position_wise, rows_of_parts
from memtune.hardware import Hardware
from memtune.program import F64, FOREVER, I32, I64, OpAddress, Phase, Resource, Step, calls_of
from memtune.search_spaces.recompute._block_planner import op_seconds


@dataclass(frozen=True)
class Whole:
    """One call, whose saved outputs may move."""

    block: int
    op: int
    """Row of the step, -1 for what the block was called with."""


@dataclass(frozen=True)
class Split:
    """A module that may run in parts, with how many parts each of its actions makes."""

    region: PositionWise
    parts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Decisions:
    """The planner's problem, but for the timeline, and what its tensors are."""

    tensors: tuple[Tensor, ...]
    of: tuple[Whole | Split, ...]

    def problem(self, live_bytes: I64) -> Problem:
        """On a timeline of one entry per op."""
        return Problem(live_bytes, self.tensors)


@functools.lru_cache(maxsize=8)
def decisions(
    step: Step, hardware: Hardware, ranks: int, min_bytes: int, parts: tuple[int, ...], *, ahead: bool
) -> Decisions:
    """What can be decided of `step`, whose blocks run once each.

    Args:
        step: Before anything is split or moved.
        hardware: Whose links carry what moves.
        ranks: That it runs on.
        min_bytes: Smaller tensors, and parts, stay.
        parts: Into how many parts modules may be split; empty: nothing is.
        ahead: Tensors come back while those before them are used, not when they are asked for.
    """
    return _Prices(step, hardware, ranks, min_bytes, ahead=ahead).all(parts)


class _Prices:
    """Actions of one step."""

    def __init__(self, step: Step, hardware: Hardware, ranks: int, min_bytes: int, *, ahead: bool) -> None:
        self.step, self.hardware, self.min_bytes, self.ahead = step, hardware, min_bytes, ahead
        computes = step.ops.resource == Resource.COMPUTE
        self.op_s: F64 = np.where(computes, op_seconds(step, hardware, ranks), 0.0)
        self.clock: F64 = np.append(0.0, np.cumsum(self.op_s))  # when each op begins
        self.lands = copy_end_ops(step)
        rows = claimable_rows(step)
        rows = rows[step.storages.bytes[step.saves.storage[rows]] >= min_bytes]
        self.save: dict[int, int] = {}  # storage -> the first row that claims it
        for row, storage in zip(rows.tolist(), step.saves.storage[rows].tolist(), strict=True):
            self.save.setdefault(storage, row)
        self.asked, self.used = _first_asked(step), _last_forward_use(step)

    def all(self, parts: tuple[int, ...]) -> Decisions:
        """The modules first, then what each call made."""
        # Gradients that come around a module and are added inside it are not cut by `split_regions`.
        regions = [each for each in position_wise(self.step) if each.residual < 0] if parts else []
        found: list[tuple[Tensor, Whole | Split]] = []
        inside: dict[int, int] = {}
        for region in regions:
            counts = tuple(each for each in parts if 1 < each <= region.rows)
            actions = [(each, self._split(region, each)) for each in counts]
            usable = [(each, action) for each, action in actions if action is not None]
            if usable:
                inside |= dict.fromkeys(region.forward, len(found))
                tensor = Tensor(tuple(action for _, action in usable))
                found.append((tensor, Split(region, tuple(each for each, _ in usable))))
        for (block, op), storages in self._by_call().items():
            frees = [each for each in map(self._away, storages) if each is not None]
            if frees:
                out, back = ([getattr(each, way)[0] for each in frees] for way in ("out", "back"))
                action = Action(tuple(each.frees[0] for each in frees), tuple(out), tuple(back))
                found.append((Tensor((action,), inside.get(op, -1)), Whole(block, op)))
        return Decisions(tuple(each for each, _ in found), tuple(each for _, each in found))

    def _by_call(self) -> dict[tuple[int, int], list[int]]:
        """(block, op or -1 for its inputs) → the storages that its call saves."""
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

    def _away(self, storage: int) -> Action | None:
        """`storage` on the host from when its copy lands until backward asks for it; None if it is not gone
        in between.
        """
        step, row = self.step, self.save[storage]
        first, stop = (
            max(int(self.lands[step.saves.block[row]]), int(self.used[storage])) + 1,
            int(self.asked[storage]),
        )
        if first >= stop:
            return None
        n_bytes, save = int(step.storages.bytes[storage]), int(step.saves.packed_before[row])
        out = Copy(float(self.clock[save]), float(self.clock[first]), self._out_s(n_bytes))
        return Action(((first, stop, n_bytes),), (out,), (self._back(float(self.clock[stop]), n_bytes),))

    def _back(self, at_s: float, n_bytes: float) -> Copy:
        """Asked for by the op that waits for it, or begun when the one before it was."""
        seconds = n_bytes / self.hardware.host_to_device_bytes_per_s + self.hardware.launch_s
        return Copy(0.0 if self.ahead else at_s, at_s, seconds)

    def _out_s(self, n_bytes: float) -> float:
        return n_bytes / self.hardware.device_to_host_bytes_per_s + self.hardware.launch_s

    def _split(self, region: PositionWise, parts: int) -> Action | None:
        """`region` in `parts` parts, whose saved tensors move; None where they are too small for it."""
        mine = [s for s in made_by(self.step, region.forward) if s in self.save and s != region.y]
        moved = [s for s in mine if self.step.storages.bytes[s] // parts >= self.min_bytes]
        away = [each for each in map(self._away, moved) if each is not None]
        if not away:
            return None
        begin, end = float(self.clock[region.forward[0]]), float(self.clock[region.forward[-1] + 1])
        again_s, over_s = float(self.clock[region.backward[0]]), float(self.clock[region.backward[-1] + 1])
        out, back = [], []
        for part in range(parts):
            for storage, whole in zip(moved, away, strict=True):
                n_bytes = int(self.step.storages.bytes[storage]) / parts
                start = begin + (part * (end - begin) + whole.out[0].start_s - begin) / parts
                out.append(Copy(start, whole.out[0].until_s, self._out_s(n_bytes)))
                asked_s = max(whole.back[0].until_s - again_s, 0.0)
                back.append(self._back(again_s + (part * (over_s - again_s) + asked_s) / parts, n_bytes))
        most = max(int(self.step.storages.bytes[s]) for s in moved) // parts  # on its way to the host
        frees = [*self._while_running(region, parts, most), *self._between(region, away)]
        return Action(tuple(frees), tuple(out), tuple(back), self._more_s(region, parts))

    def _between(self, region: PositionWise, away: list[Action]) -> list[tuple[int, int, int]]:
        """Between forward and backward of the module the moved tensors are gone, but for the last part's
        until it has landed.
        """
        first, stop = region.forward[-1] + 1, region.backward[0]
        landed = max(each.frees[0][0] for each in away)
        gone = sum(each.frees[0][2] for each in away)
        return [(first, stop, gone), (first, min(landed, stop), -max(each.frees[0][2] for each in away))]

    def _while_running(
        self, region: PositionWise, parts: int, in_flight_bytes: int
    ) -> list[tuple[int, int, int]]:
        """(op, op + 1, bytes) that parts need less than the whole, negative where more: both of y and dx are
        there throughout.
        """
        forward = self._made_bytes(region.forward, {region.y}, region.forward)
        y = int(self.step.storages.bytes[region.y])
        inner = self._made_bytes(region.forward, {region.y}, region.backward)
        backward = inner + self._made_bytes(region.backward, {region.dx, *region.gradients}, region.backward)
        gradients = self._made_bytes(region.backward, set(self._others(region)), region.backward)
        dx = int(self.step.storages.bytes[region.dx]) if region.dx >= 0 else 0
        in_parts = int(forward.max()) // parts + in_flight_bytes + y
        again = int(backward.max()) // parts + 2 * int(gradients.max(initial=0)) + dx
        less = [(op, int(now) - in_parts) for op, now in zip(region.forward, forward, strict=True)]
        now_back = backward + gradients
        return [
            *((op, op + 1, each) for op, each in less),
            *((op, op + 1, int(each) - again) for op, each in zip(region.backward, now_back, strict=True)),
        ]

    def _others(self, region: PositionWise) -> set[int]:
        """What its backward makes besides gradients of parameters."""
        return set(made_by(self.step, region.backward)) - set(region.gradients)

    def _made_bytes(self, ops: tuple[int, ...], but: set[int], at: tuple[int, ...]) -> I64:
        """(at,) bytes of what `ops` made, but for some, that live at each of the ops `at`."""
        made = np.asarray([s for s in made_by(self.step, ops) if s not in but], np.int32)
        moments = np.asarray(at)[:, None]
        alive = (self.step.storages.producer[made] <= moments) & (self.step.freed_after[made] >= moments)
        found: I64 = (alive * self.step.storages.bytes[made]).sum(1)
        return found

    def _more_s(self, region: PositionWise, parts: int) -> float:
        """Ops that get too small to fill the device, y and dx put together, and gradients added up."""
        ops = self.op_s[[*region.forward, *region.backward]]
        slower = float(np.maximum(parts * self.hardware.launch_s - ops, 0.0).sum())
        put = sum(2 * int(self.step.storages.bytes[s]) for s in (region.y, region.dx) if s >= 0)
        added = 3 * (parts - 1) * sum(int(self.step.storages.bytes[s]) for s in region.gradients)
        return slower + (put + added) / self.hardware.memory_bytes_per_s


def _first_asked(step: Step) -> I32:
    """(m,) op before which backward first asks for each storage; what outlasts the step where it never
    does.
    """
    found = np.full(step.storages.n, step.ops.n, np.int32)
    rows = np.flatnonzero(step.saves.unpacked_before >= 0)
    np.minimum.at(found, step.saves.storage[rows], step.saves.unpacked_before[rows])
    return found


def _last_forward_use(step: Step) -> I32:
    """(m,) last op of the forward that reads each storage, or until which Python holds it."""
    found = np.where(step.storages.held_until == FOREVER, -1, step.storages.held_until).astype(np.int32)
    forward = step.ops.phase[step.uses.op] == Phase.FORWARD
    np.maximum.at(found, step.uses.storage[forward], step.uses.op[forward])
    return found


def calls_in_parts(
    step: Step, block: int, regions: dict[int, tuple[PositionWise, int]]
) -> dict[int, frozenset[OpAddress]]:
    """Op of `block` → its calls once some modules run in parts; the ops that put parts together take numbers
    as well.

    Args:
        step: Before the split.
        block: Row of `step.blocks`.
        regions: First op of its forward → a module that is split, and into how many parts.
    """
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
        if region is None:
            continue
        for part in range(len(rows_of_parts(region.rows, parts))):
            for each in region.forward:
                count(step.names[step.ops.name[each]], each)
            if part == 0:
                count("aten.new_empty.default")
            count("aten.copy_.default")
    return {op: frozenset(calls) for op, calls in found.items()}
