"""The pass of `runtime.kept_parts`: modules that treat tokens alike run over parts of them, which save their own tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memtune.edit import Edit
from memtune.passes.new_ops import NewOps
from memtune.passes.position_wise import PositionWise
from memtune.passes.tiled_region import Parts
from memtune.program import Phase, Step


def split_regions(step: Step, regions: Sequence[PositionWise], chunks: Sequence[int]) -> Step:
    """`step` with each of `regions` run over so many parts of its rows, forward and backward, each part saving its own tensors.

    Nothing runs twice. The parts' saves are rows of their own in the result, so a pass that moves saved tensors moves each by
    itself.
    """
    edit = Edit(step)
    gone, saves = np.zeros(step.n_ops, bool), np.zeros(len(step.save_storage), bool)
    for region in regions:
        gone[[*region.forward, *region.backward]] = True
        saves[list(region.saves)] = True
    edit.drop_ops(gone)
    edit.drop_saves(saves)
    for region, parts in zip(regions, chunks, strict=True):
        _Split(step, edit, region, parts).insert()
    return edit.done()


class _Split(Parts):
    """The ops of `runtime.kept_parts`, in their order."""

    def insert(self) -> None:
        """Both halves, where the module's own ops were."""
        made: list[dict[int, int]] = []
        packed: list[dict[int, int]] = []
        forward = self._forward(made, packed)
        region = self.region
        forward.insert(after=region.forward[-1], phase=Phase.FORWARD, module=region.module_id, call=region.call)
        backward = NewOps(self.edit, self.edit.n_ops)
        lasts = self._backward(backward, made)
        backward.insert(before=region.backward[0], phase=Phase.BACKWARD, module=region.module_id, call=region.call)
        for each in zip(made, packed, lasts, strict=True):
            self._save(*each)
        for gradient in region.gradients:
            if self.step.ready_after[gradient] >= 0:
                self.edit.ready_after[gradient] = backward.last

    def _forward(self, made: list[dict[int, int]], packed: list[dict[int, int]]) -> NewOps:
        """Each part's storages in `made`, and where each op of it went in `packed`, with the op after the last one."""
        region, edit = self.region, self.edit
        ops = NewOps(edit, edit.n_ops)
        for number, part in enumerate(self.parts):
            mine: dict[int, int] = {}
            lasts: dict[int, int] = {}
            self.run(ops, region.forward, part, mine, lasts)
            lasts[region.forward[-1] + 1] = ops.last + 1
            y = mine[region.y]
            if number == 0:
                edit.producer[region.y] = ops.run("aten.new_empty.default", y)
            ops.run("aten.copy_.default", region.y, y, writes=region.y)
            made.append(mine)
            packed.append(lasts)
        ops.hold(region.x, ops.last)
        return ops

    def _backward(self, ops: NewOps, made: list[dict[int, int]]) -> list[dict[int, int]]:
        """Where each op of each part's backward went."""
        region, found = self.region, list[dict[int, int]]()
        if region.dx >= 0:
            self.edit.producer[region.dx] = ops.run("aten.new_empty.default", region.given)
        for part, mine in reversed(list(zip(self.parts, made, strict=True))):
            lasts: dict[int, int] = {}
            self.run(ops, region.backward, part, mine, lasts, first=not found)
            self.collect(ops, mine, region.dx, first=not found)
            found.append(lasts)
        ops.hold(region.given, ops.last)
        return found[::-1]

    def _save(self, made: dict[int, int], packed: dict[int, int], lasts: dict[int, int]) -> None:
        """A part saves what the module did, where the part's own ops run."""
        step, rows = self.step, np.asarray(self.region.saves, np.int32)
        end = lasts[self.region.backward[-1]]

        def inside(ops: np.ndarray, none: int) -> np.ndarray:
            return np.asarray([lasts.get(op, none) for op in ops.tolist()], np.int32)

        self.edit.add_saves(
            np.asarray([made.get(s, s) for s in step.save_storage[rows].tolist()], np.int32),
            before=np.asarray([packed[op] for op in step.save_before[rows].tolist()], np.int32),
            until=inside(step.save_until[rows], end),
            used_until=inside(step.save_used_until[rows], end),
            call=step.save_call[rows],
            asked=np.where(step.save_asked[rows] < 0, -1, inside(step.save_asked[rows], end)).astype(np.int32),
            turn=step.save_turn[rows],
            is_output=step.save_is_output[rows],
        )
