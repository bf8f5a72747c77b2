"""Pass of micro-tensors (`activations.tiling.tiled_region`): modules over parts that each keep a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memtune.activations.tiling.position_wise_pattern import PositionWise
from memtune.activations.tiling.tiled_region_pass import Parts
from memtune.program import Edit, NewOps, Phase, Step


def split_regions(step: Step, regions: Sequence[PositionWise], chunks: Sequence[int]) -> Step:
    """Return `step` with `regions` run over parts of their rows; each part saves its own tensors."""
    # No op runs twice. The parts' saves are separate rows, so a pass that offloads saved tensors
    # offloads each separately.
    edit = Edit(step)
    gone, saves = np.zeros(step.ops.n, bool), np.zeros(step.saves.n, bool)
    for region in regions:
        gone[[*region.forward, *region.backward]] = True
        saves[list(region.saves)] = True
    edit.drop_ops(gone)
    edit.drop_saves(saves)
    for region, parts in zip(regions, chunks, strict=True):
        _Split(step, edit, region, parts).insert()
    return edit.done()


class _Split(Parts):
    """Ops of parts that keep their graphs, in their order."""

    def insert(self) -> None:
        """Insert forward and backward where the module's own ops were."""
        made: list[dict[int, int]] = []
        packed: list[dict[int, int]] = []
        forward = self._forward(made, packed)
        region = self.region
        forward.insert(
            after=region.forward[-1], phase=Phase.FORWARD, module=region.module_id, call=region.call
        )
        backward = NewOps(self.edit, self.edit.n_ops)
        lasts = self._backward(backward, made)
        backward.insert(
            before=region.backward[0], phase=Phase.BACKWARD, module=region.module_id, call=region.call
        )
        for each in zip(made, packed, lasts, strict=True):
            self._save(*each)
        for gradient in region.gradients:
            if self.step.storages.grad_ready_after[gradient] >= 0:
                self.edit.storages.grad_ready_after[gradient] = backward.last

    def _forward(self, made: list[dict[int, int]], packed: list[dict[int, int]]) -> NewOps:
        """Return forward's ops; add each part's storages to `made`, and the rows of its ops to `packed`."""
        region, edit = self.region, self.edit
        ops = NewOps(edit, edit.n_ops)
        for number, part in enumerate(self.parts):
            mine: dict[int, int] = {}
            lasts: dict[int, int] = {}
            self.run(ops, region.forward, part, mine, lasts)
            lasts[region.forward[-1] + 1] = ops.last + 1
            y = mine[region.y]
            if number == 0:
                edit.storages.producer[region.y] = ops.run("aten.new_empty.default", y)
            ops.run("aten.copy_.default", region.y, y, writes=region.y)
            made.append(mine)
            packed.append(lasts)
        ops.hold(region.x, ops.last)
        return ops

    def _backward(self, ops: NewOps, made: list[dict[int, int]]) -> list[dict[int, int]]:
        """Return the rows of each part's backward ops."""
        region, found = self.region, list[dict[int, int]]()
        if region.dx >= 0:
            self.edit.storages.producer[region.dx] = ops.run("aten.new_empty.default", region.dy)
        for part, mine in reversed(list(zip(self.parts, made, strict=True))):
            lasts: dict[int, int] = {}
            self.run(ops, region.backward, part, mine, lasts, first=not found)
            self.collect(ops, mine, region.dx, first=not found)
            found.append(lasts)
        ops.hold(region.dy, ops.last)
        return found[::-1]

    def _save(self, made: dict[int, int], packed: dict[int, int], lasts: dict[int, int]) -> None:
        """Add a part's saves: those of the module, at the part's own ops."""
        step, rows = self.step, np.asarray(self.region.saves, np.int32)
        end = lasts[self.region.backward[-1]]

        def inside(ops: np.ndarray, none: int) -> np.ndarray:
            return np.asarray([lasts.get(op, none) for op in ops.tolist()], np.int32)

        self.edit.add_saves(
            np.asarray([made.get(s, s) for s in step.saves.storage[rows].tolist()], np.int32),
            packed_before=np.asarray(
                [packed[op] for op in step.saves.packed_before[rows].tolist()], np.int32
            ),
            held_until=inside(step.saves.held_until[rows], end),
            used_until=inside(step.saves.used_until[rows], end),
            call=step.saves.call[rows],
            unpacked_before=np.where(
                step.saves.unpacked_before[rows] < 0, -1, inside(step.saves.unpacked_before[rows], end)
            ).astype(np.int32),
            unpack_order=step.saves.unpack_order[rows],
            is_output=step.saves.is_output[rows],
        )
