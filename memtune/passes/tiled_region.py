"""The pass of `runtime.tiled_region`: modules that treat tokens alike run over parts of them, and again in backward."""

from __future__ import annotations

import numpy as np

from memtune.edit import Edit
from memtune.passes.new_ops import NewOps
from memtune.passes.position_wise import PositionWise, made_by
from memtune.program import HANDS_OVER, READS, WRITES, Phase, Step


def tile_regions(step: Step, regions: tuple[tuple[PositionWise, int], ...]) -> Step:
    """`step` with each of `regions`, none inside another, run over so many parts of its rows.

    Forward makes no more of the inner tensors than one part's at a time, and saves the input alone; backward runs each part's
    forward again just before its backward, and adds up the gradients of the parameters.
    """
    edit = Edit(step)
    gone, saves = np.zeros(step.n_ops, bool), np.zeros(len(step.save_storage), bool)
    for region, _ in regions:
        gone[[*region.forward, *region.backward]] = True
        saves[[i for i in region.saves if i != region.save]] = True
    edit.drop_ops(gone)
    edit.drop_saves(saves)
    edit.save_before, edit.save_asked = step.save_before.copy(), step.save_asked.copy()
    edit.save_until, edit.save_used_until = step.save_until.copy(), step.save_used_until.copy()
    edit.save_is_output, edit.save_storage = step.save_is_output.copy(), step.save_storage.copy()
    for region, chunks in regions:
        _Tiled(step, edit, region, chunks).insert()
    return edit.done()


def rows_of_parts(rows: int, chunks: int) -> list[int]:
    """Rows of each part that the mechanisms cut `rows` into; there may be fewer parts than `chunks`."""
    size = -(-rows // chunks)
    return [min(size, rows - start) for start in range(0, rows, size)]


class Parts:
    """Builds ops that are copies of a module's own, over parts of its rows."""

    def __init__(self, step: Step, edit: Edit, region: PositionWise, chunks: int) -> None:
        self.step, self.edit, self.region = step, edit, region
        self.parts = rows_of_parts(region.rows, chunks)
        inside = [*region.forward, *region.backward]
        uses = np.searchsorted(step.use_op, [(op, op + 1) for op in inside]).tolist()
        columns = (step.use_storage, step.use_mutates)
        self.uses = {op: [each[start:stop].tolist() for each in columns] for op, (start, stop) in zip(inside, uses, strict=True)}
        self.made: dict[int, list[int]] = {op: [] for op in inside}
        for storage in [*made_by(step, region.forward), *made_by(step, region.backward)]:
            self.made[int(step.producer[storage])].append(storage)
        self.by_use = {op: _by_use(*used) for op, used in self.uses.items()}
        self.sums = self._sums_over_rows()

    def run(
        self, ops: NewOps, rows: tuple[int, ...], part: int, made: dict[int, int], lasts: dict[int, int], *, first: bool = False
    ) -> None:
        """One part of the module's own ops `rows`; `made` maps storages to the part's, `lasts` ops to new ones."""
        step, region = self.step, self.region
        share = part / region.rows
        held: list[tuple[int, int]] = []
        for op in rows:
            if op == region.join:  # the whole is added once all parts are there
                mine = next(made[s] for s in self.uses[op][0] if s != region.residual)
                made.update(dict.fromkeys(self.made[op], mine))
                lasts[op] = ops.last
            else:
                lasts[op] = self._run_op(ops, op, share, made)
            for storage in self.made[op]:
                if op == region.join:
                    pass
                elif storage in region.gradients:
                    if first:
                        self.edit.producer[storage] = ops.last
                    made[storage] = storage if first else ops.makes(int(step.bytes[storage]))
                elif storage in self.sums:
                    made[storage] = ops.makes(int(step.bytes[storage]))
                else:
                    made[storage] = ops.makes(int(step.bytes[storage]) * part // region.rows)
                until = int(step.held_until[storage])
                if rows[0] <= until <= rows[-1]:
                    held.append((made[storage], until))
        for storage, until in held:
            ops.hold(storage, lasts[until])

    def collect(self, ops: NewOps, made: dict[int, int], dx: int, *, first: bool) -> None:
        """A part's backward is over: its gradients go into those of the whole module, the input's into `dx`."""
        region = self.region
        got = [made[each] for each in region.gradients if each in made]
        if region.dx >= 0:
            ops.run("aten.copy_.default", dx, made[region.dx], writes=dx)
        if not first:
            for gradient in region.gradients:
                ops.run("aten.add_.Tensor", gradient, made[gradient], writes=gradient)
        for each in got:
            ops.hold(each, ops.last)

    def _sums_over_rows(self) -> set[int]:
        """Parameters' gradients and what casts make them from: as large for one part as for all rows."""
        sums, step = set(self.region.gradients), self.step
        for op in reversed(self.region.backward):
            if step.names[step.op_name[op]] == "aten._to_copy.default" and sums.intersection(self.made[op]):
                sums.update(self.uses[op][0])
        return sums

    def _run_op(self, ops: NewOps, op: int, share: float, made: dict[int, int]) -> int:
        """One of the module's own ops, using what is `made` as the op used the whole."""
        reads, writes, hands_over = self.by_use[op]
        name = self.step.names[self.step.op_name[op]]
        writes, hands_over = made.get(writes, writes), made.get(hands_over, hands_over)
        return ops.run(name, *[made.get(s, s) for s in reads], writes=writes, hands_over=hands_over, like=op, share=share)


class _Tiled(Parts):
    """The ops of `runtime.tiled_region`, in their order."""

    def insert(self) -> None:
        """Both halves, where the module's own ops were."""
        region, edit = self.region, self.edit
        forward = NewOps(edit, edit.n_ops)
        for number, part in enumerate(self.parts):
            made: dict[int, int] = {}
            self.run(forward, region.forward, part, made, {})
            y = made[region.y]
            if number == 0:
                edit.producer[region.y] = forward.run("aten.new_empty.default", y)
            forward.run("aten.copy_.default", region.y, y, writes=region.y)
        forward.hold(region.x, forward.last)
        forward.insert(after=region.forward[-1], phase=Phase.FORWARD, module=region.module_id, call=region.call)
        self._insert_backward()
        edit.save_storage[region.save] = region.x
        edit.save_before[region.save] = region.forward[-1] + 1
        edit.save_is_output[region.save] = 0

    def _insert_backward(self) -> None:
        region, edit = self.region, self.edit
        ops = NewOps(edit, edit.n_ops)
        dx = self._whole_dx(ops)
        for number, part in enumerate(self.parts):
            made: dict[int, int] = {}
            lasts: dict[int, int] = {}
            self.run(ops, region.forward, part, made, lasts)
            self.run(ops, region.backward, part, made, lasts, first=number == 0)
            self._hold_saved(ops, made, lasts)
            end = lasts[region.backward[-1]]
            ops.hold(made[region.y], end)
            self.collect(ops, made, dx, first=number == 0)
        last = ops.last
        for outer in (region.given, region.residual):  # held inside the region: by what is said here alone
            if outer >= 0 and region.backward[0] <= edit.held_until[outer] <= region.backward[-1]:
                edit.held_until[outer] = region.backward[0] - 1
        ops.hold(region.given, last)  # the input is held by its save, which a recompute pass may move
        if region.residual >= 0:
            storages, how = self.uses[region.join]
            handed = how[storages.index(region.residual)] == HANDS_OVER
            names = {"hands_over": region.residual} if handed else {}
            reads = [dx] if handed else [dx, region.residual]
            edit.producer[region.dx] = ops.run("aten.add.Tensor", *reads, like=region.join, **names)
        ops.insert(before=region.backward[0], phase=Phase.BACKWARD, module=region.module_id, call=region.call)
        edit.save_asked[region.save] = ops.first
        edit.save_until[region.save] = edit.save_used_until[region.save] = last
        for gradient in region.gradients:
            if self.step.ready_after[gradient] >= 0:
                edit.ready_after[gradient] = last

    def _whole_dx(self, ops: NewOps) -> int:
        """The tensor that takes the parts of the input's gradient; -1 where none is wanted."""
        region = self.region
        if region.dx < 0:
            return -1
        op = ops.run("aten.empty_like.default", region.x)
        if region.residual >= 0:
            return ops.makes(int(self.step.bytes[region.x]))
        self.edit.producer[region.dx] = op
        return region.dx

    def _hold_saved(self, ops: NewOps, made: dict[int, int], lasts: dict[int, int]) -> None:
        for row in self.region.saves:
            storage, until = int(self.step.save_storage[row]), int(self.step.save_until[row])
            if storage in made and until in lasts:
                ops.hold(made[storage], lasts[until])


def _by_use(storages: list[int], how: list[int]) -> tuple[list[int], int, int]:
    """What an op reads, and the storage that it writes and the one that is handed over to it, -1 for none."""
    reads, written, handed = (
        [s for s, used in zip(storages, how, strict=True) if used == each] for each in (READS, WRITES, HANDS_OVER)
    )
    return reads, next(iter(written), -1), next(iter(handed), -1)
