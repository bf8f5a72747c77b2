"""Pass of `activations.tiling.tiled_region`: runs token-wise modules over parts, and again in backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtune.activations.tiling.position_wise_pattern import PositionWise
from memtune.activations.tiling.step_rows import made_by
from memtune.program import DONATES, READS, WRITES, Edit, NewOps, Phase, Step


@dataclass(frozen=True)
class Tiling:
    """Division of a module into parts."""

    parts: int
    again: bool = True
    """Parts run again in backward; False: they keep their graphs, and the claims of their blocks may offload
    what these save.
    """
    by_sample: bool = False
    """Parts are of the samples, the first dim of the input; False: of the tokens, all dims but the last."""


def tile_regions(step: Step, regions: tuple[tuple[PositionWise, int], ...]) -> Step:
    """Return `step` with each of `regions`, none inside another, run over parts of its rows.

    Forward makes the inner tensors of one part at a time and saves only the input; backward runs each part's
    forward again just before its backward, and sums the gradients of the parameters.
    """
    # Sums over micro-batches follow the region, in the order of the plain step. Autograd's order may be
    # another, but before and after them the same bytes are live.
    edit = Edit(step)
    gone, saves = np.zeros(step.ops.n, bool), np.zeros(step.saves.n, bool)
    for region, _ in regions:
        gone[[*region.forward, *region.backward]] = True
        saves[[i for i in region.saves if i != region.save]] = True
    edit.drop_ops(gone)
    edit.drop_saves(saves)
    edit.set_saves(**{name: column.copy() for name, column in step.saves.columns().items()})
    for region, chunks in regions:
        _Tiled(step, edit, region, chunks).insert()
    return edit.done()


def rows_of_parts(rows: int, chunks: int) -> list[int]:
    """Return the rows of each part of `rows`; there may be fewer parts than `chunks`."""
    size = -(-rows // chunks)
    return [min(size, rows - start) for start in range(0, rows, size)]


class Parts:
    """Copies of a module's own ops over parts of its rows."""

    def __init__(self, step: Step, edit: Edit, region: PositionWise, chunks: int) -> None:
        self.step, self.edit, self.region = step, edit, region
        self.parts = rows_of_parts(region.rows, chunks)
        inside = [*region.forward, *region.backward]
        uses = np.searchsorted(step.uses.op, [(op, op + 1) for op in inside]).tolist()
        columns = (step.uses.storage, step.uses.mode)
        self.uses = {
            op: [each[start:stop].tolist() for each in columns]
            for op, (start, stop) in zip(inside, uses, strict=True)
        }
        self.made: dict[int, list[int]] = {op: [] for op in inside}
        for storage in [*made_by(step, region.forward), *made_by(step, region.backward)]:
            self.made[int(step.storages.producer[storage])].append(storage)
        self.by_use = {op: _by_use(*used) for op, used in self.uses.items()}
        self.sums = self._sums_over_rows()

    def run(
        self,
        ops: NewOps,
        rows: tuple[int, ...],
        part: int,
        made: dict[int, int],
        lasts: dict[int, int],
        *,
        first: bool = False,
    ) -> None:
        """Add one part of the module's ops `rows`; `made` maps storages, `lasts` ops to the part's."""
        step, region = self.step, self.region
        share = part / region.rows
        held: list[tuple[int, int]] = []
        for op in rows:
            if op == region.join:  # added once to the full gradient, after all parts
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
                        self.edit.storages.producer[storage] = ops.last
                    made[storage] = storage if first else ops.add_output(int(step.storages.bytes[storage]))
                elif storage in self.sums:
                    made[storage] = ops.add_output(int(step.storages.bytes[storage]))
                else:
                    made[storage] = ops.add_output(int(step.storages.bytes[storage]) * part // region.rows)
                until = int(step.storages.held_until[storage])
                if rows[0] <= until <= rows[-1]:
                    held.append((made[storage], until))
        for storage, until in held:
            ops.hold(storage, lasts[until])

    def collect(self, ops: NewOps, made: dict[int, int], dx: int, *, first: bool) -> None:
        """Add a part's gradients to those of the whole module, and copy the input's gradient into `dx`."""
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
        """Return parameters' gradients and inputs of their casts, as large for one part as for all rows."""
        sums, step = set(self.region.gradients), self.step
        for op in reversed(self.region.backward):
            if step.names[step.ops.name[op]] == "aten._to_copy.default" and sums.intersection(self.made[op]):
                sums.update(self.uses[op][0])
        return sums

    def _run_op(self, ops: NewOps, op: int, share: float, made: dict[int, int]) -> int:
        """Add one of the module's own ops, with storages replaced by those in `made`."""
        reads, writes, donates = self.by_use[op]
        name = self.step.names[self.step.ops.name[op]]
        writes, donates = made.get(writes, writes), made.get(donates, donates)
        return ops.run(
            name, *[made.get(s, s) for s in reads], writes=writes, donates=donates, like=op, share=share
        )


class _Tiled(Parts):
    """The ops of `activations.tiling.tiled_region`, in their order."""

    def insert(self) -> None:
        """Insert forward and backward where the module's own ops were."""
        region, edit = self.region, self.edit
        forward = NewOps(edit, edit.n_ops)
        for number, part in enumerate(self.parts):
            made: dict[int, int] = {}
            self.run(forward, region.forward, part, made, {})
            y = made[region.y]
            if number == 0:
                edit.storages.producer[region.y] = forward.run("aten.new_empty.default", y)
            forward.run("aten.copy_.default", region.y, y, writes=region.y)
        forward.hold(region.x, forward.last)
        forward.insert(
            after=region.forward[-1], phase=Phase.FORWARD, module=region.module_id, call=region.call
        )
        self._insert_backward()
        # The one save that remains: the input, packed once all parts have run.
        edit.saves.storage[region.save] = region.x
        edit.saves.packed_before[region.save] = region.forward[-1] + 1
        edit.saves.is_output[region.save] = 0

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
        # Inside the region only the holds that this pass adds count, not those of the plain ops.
        for outer in (region.dy, region.residual):
            if outer >= 0 and region.backward[0] <= edit.storages.held_until[outer] <= region.backward[-1]:
                edit.storages.held_until[outer] = region.backward[0] - 1
        ops.hold(region.dy, last)  # the input is held by its save, which a recompute pass may move
        if region.residual >= 0:
            storages, how = self.uses[region.join]
            handed = how[storages.index(region.residual)] == DONATES
            names = {"donates": region.residual} if handed else {}
            reads = [dx] if handed else [dx, region.residual]
            edit.storages.producer[region.dx] = ops.run("aten.add.Tensor", *reads, like=region.join, **names)
        ops.insert(before=region.backward[0], phase=Phase.BACKWARD, module=region.module_id, call=region.call)
        edit.saves.unpacked_before[region.save] = ops.first
        edit.saves.held_until[region.save] = edit.saves.used_until[region.save] = last
        for gradient in region.gradients:
            if self.step.storages.grad_ready_after[gradient] >= 0:
                edit.storages.grad_ready_after[gradient] = last

    def _whole_dx(self, ops: NewOps) -> int:
        """Return the tensor for the parts of the input's gradient; -1 if none is needed."""
        region = self.region
        if region.dx < 0:
            return -1
        op = ops.run("aten.empty_like.default", region.x)
        if region.residual >= 0:
            return ops.add_output(int(self.step.storages.bytes[region.x]))
        self.edit.storages.producer[region.dx] = op
        return region.dx

    def _hold_saved(self, ops: NewOps, made: dict[int, int], lasts: dict[int, int]) -> None:
        for row in self.region.saves:
            storage, until = int(self.step.saves.storage[row]), int(self.step.saves.held_until[row])
            if storage in made and until in lasts:
                ops.hold(made[storage], lasts[until])


def _by_use(storages: list[int], how: list[int]) -> tuple[list[int], int, int]:
    """Return the storages that an op reads, the written one, and the donated one; -1 for none."""
    reads, written, handed = (
        [s for s, used in zip(storages, how, strict=True) if used == each]
        for each in (READS, WRITES, DONATES)
    )
    return reads, next(iter(written), -1), next(iter(handed), -1)
