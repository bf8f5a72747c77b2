"""Pass of `activations.tiling.tiled_loss`: runs head and cross-entropy over parts of the rows, with gradients
in forward.
"""

from __future__ import annotations

import numpy as np

from memtune.activations.tiling.cross_entropy_pattern import CAST, LossPattern, Operand, OperandGradient
from memtune.program import DONATES, READS, WRITES, Edit, NewOps, Phase, Step


def tile_loss(pattern: LossPattern, chunks: int) -> Step:
    """Return the step of `pattern` with its loss computed over `chunks` parts of the rows."""
    step = _with_sums(pattern)
    edit = Edit(step)
    gone = np.zeros(step.ops.n, bool)
    gone[pattern.ops] = True
    edit.drop_ops(gone)
    edit.drop_saves(gone[step.saves.used_until] & np.isin(step.saves.storage, _saved_by(pattern)))
    chunked = _Chunks(step, pattern, NewOps(edit, edit.n_ops))
    total, sums = chunked.run(chunks)
    end = chunked.ops.last
    # References of the user's code to the logits now hold the hidden states (`Logits.rows`).
    held = [int(step.storages.held_until[each]) for each in pattern.made[:-1]]
    for storage in {
        pattern.x.plain,
        pattern.target,
        *(s for s in _saved_by(pattern) if step.storages.held_until[s] >= pattern.forward[-1]),
    }:
        if step.storages.producer[storage] >= 0 and storage not in _dropped(pattern):
            chunked.ops.hold(storage, end)
    if pattern.uncut >= 0:
        chunked.ops.hold(pattern.uncut, end)
    chunked.ops.insert(after=pattern.forward[-1], phase=Phase.FORWARD, module=0)
    if max(held) > pattern.forward[-1]:
        edit.hold_through(np.asarray([pattern.x.plain], np.int32), np.asarray([max(held)], np.int32))
    edit.storages.producer[pattern.made[-1]] = total
    _backward_ops(edit, pattern, chunked, sums)
    return edit.done()


def _with_sums(pattern: LossPattern) -> Step:
    """Return the step of `pattern` with gradients summed in place, as the tiled loss does."""
    # It returns the weight's gradient itself, where a plain product returns a view of it, and the rows'
    # gradient as a view of (N, D) even if autocast has a cast make it. A gradient that a slice's backward
    # pads is new.
    step, flags, held = pattern.step, pattern.step.uses.mode.copy(), pattern.step.storages.held_until.copy()
    is_sum = np.asarray([name == "aten.add.Tensor" for name in step.names], bool)[step.ops.name[step.uses.op]]
    is_sum &= step.use_phase == Phase.BACKWARD

    def used(storages: list[int], how: int) -> None:
        rows = np.flatnonzero(is_sum & np.isin(step.uses.storage, storages) & (flags != WRITES))
        flags[rows] = how
        engines = rows[(how == DONATES) & (held[step.uses.storage[rows]] == step.uses.op[rows])]
        held[step.uses.storage[engines]] -= 1  # the engine held it as an operand of an out-of-place sum

    used([each.storage for each in (pattern.dweight, pattern.dbias) if each is not None], DONATES)
    if pattern.dx is not None and pattern.uncut >= 0:
        readers = step.uses.op[step.uses.storage == pattern.dx.storage]
        used(np.flatnonzero(np.isin(step.storages.producer, readers)).tolist(), DONATES)
    elif pattern.dx is not None and pattern.dx.cast >= 0:
        used([pattern.dx.storage], READS)
    return step.with_uses(mode=flags).with_storages(held_until=held)


def _saved_by(pattern: LossPattern) -> list[int]:
    """Return the storages that the replaced ops saved for backward."""
    return [pattern.x.used, pattern.weight.used, *pattern.made, pattern.weight_sum, pattern.target]


def _dropped(pattern: LossPattern) -> set[int]:
    casts = [
        each.used for each in (pattern.x, pattern.weight, pattern.bias) if each is not None and each.cast >= 0
    ]
    return {*casts, *pattern.made, pattern.weight_sum}


class _Chunks:
    """Ops of `activations.tiling.tiled_loss._Loss.forward`, in its order."""

    def __init__(self, step: Step, pattern: LossPattern, ops: NewOps) -> None:
        self.step, self.pattern, self.ops = step, pattern, ops
        self.dx = -1
        """Gradient of the hidden states in the step; -1 if it is not needed. `dweight`, `dbias` likewise."""
        self.dweight = self.dbias = -1

    def run(self, chunks: int) -> tuple[int, int]:
        """Insert all parts; return the op that computes the loss, and the storage of the denominator."""
        pattern, ops, edit = self.pattern, self.ops, self.ops.edit
        if pattern.dx is not None:
            self.dx = pattern.dx.storage
            edit.storages.producer[self.dx] = ops.run("aten.empty_like.default", pattern.x.plain)
        used = [self._cast(each) for each in (pattern.x, pattern.weight, pattern.bias) if each is not None]
        size = -(-pattern.rows // chunks)
        total = -1
        for start in range(0, pattern.rows, size):
            total = self._chunk(used, min(size, pattern.rows - start), total)
        ops.run("aten.ne.Scalar", pattern.target)
        # One byte a row: a mask of the rows that the loss does not ignore.
        valid = ops.add_output(pattern.rows)
        ops.run("aten.sum.default", valid)
        sums = ops.add_output(8)
        loss = ops.run("aten.div.Tensor", total, sums)
        if pattern.half:
            mean = ops.add_output(4)
            loss = ops.run(CAST, mean)
        for storage, operand in zip(used, (pattern.x, pattern.weight, pattern.bias), strict=False):
            if operand is not None and operand.cast >= 0:
                ops.hold(storage, ops.last)
        return loss, sums

    def _cast(self, operand: Operand) -> int:
        if operand.cast < 0:
            return operand.used
        self.ops.run(CAST, operand.plain, like=operand.cast)
        return self.ops.add_output(int(self.step.storages.bytes[operand.used]))

    def _chunk(self, used: list[int], rows: int, total: int) -> int:
        """Insert the ops of one chunk of `rows`; return the sum of losses so far."""
        step, pattern, ops = self.step, self.pattern, self.ops
        share = rows / pattern.rows

        def part(storage: int) -> int:
            return ops.add_output(int(step.storages.bytes[storage]) * rows // pattern.rows)

        inputs = tuple(used[2:] + used[:2])
        chain: list[int] = []
        for op, storage in zip(pattern.forward[:-1], pattern.made[:-1], strict=True):
            ops.run(
                step.names[step.ops.name[op]], *(inputs if not chain else (chain[-1],)), like=op, share=share
            )
            chain.append(part(storage))
        ops.run(
            step.names[step.ops.name[pattern.forward[-1]]],
            chain[-1],
            pattern.target,
            like=pattern.forward[-1],
            share=share,
        )
        loss = ops.add_output(int(step.storages.bytes[pattern.made[-1]]))
        weight_sum = ops.add_output(int(step.storages.bytes[pattern.weight_sum]))
        ops.hold(chain[-2], ops.last)  # the argument of the loss, which its caller holds
        addend = loss
        if pattern.half:
            ops.run(CAST, loss)
            addend = ops.add_output(4)
        if total >= 0:
            ops.run("aten.add_.Tensor", total, addend, writes=total)
        if pattern.half:
            ops.hold(addend, ops.last)
        ops.run("aten.ones_like.default", loss)
        gradient = ops.add_output(
            int(step.storages.bytes[loss])
            if loss < step.storages.n
            else int(step.storages.bytes[pattern.made[-1]])
        )
        one, probabilities = gradient, chain[-1]
        for i, (op, storage) in enumerate(zip(pattern.backward, pattern.gradients, strict=True)):
            reads = (
                (one, probabilities, pattern.target, weight_sum)
                if i == 0
                else (gradient, *self._reread(i, chain))
            )
            ops.run(step.names[step.ops.name[op]], *reads, like=op, share=share)
            gradient = part(storage)
        for storage in (chain[0], loss, one, addend):
            ops.hold(storage, ops.last)
        self._add(gradient, used, share)
        ops.hold(gradient, ops.last)
        return total if total >= 0 else addend

    def _reread(self, i: int, chain: list[int]) -> list[int]:
        """Return the outputs of forward that the i-th op of backward reads."""
        reads = self.step.uses.storage[self.step.uses.op == self.pattern.backward[i]].tolist()
        return [made for made, plain in zip(chain, self.pattern.made, strict=False) if plain in reads]

    def _add(self, gradient: int, used: list[int], share: float) -> None:
        """Add the ops of `_Gradients.add`."""
        step, pattern, ops = self.step, self.pattern, self.ops
        x, weight = used[:2]
        if pattern.dx is not None:
            if pattern.dx.cast < 0:
                ops.run(
                    "aten.mm.out", gradient, weight, self.dx, writes=self.dx, like=pattern.dx.op, share=share
                )
            else:
                ops.run("aten.mm.default", gradient, weight, like=pattern.dx.op, share=share)
                made = ops.add_output(round(int(step.storages.bytes[pattern.x.used]) * share))
                ops.run(
                    "aten.copy_.default", self.dx, made, writes=self.dx, like=pattern.dx.cast, share=share
                )
        if pattern.dweight is not None:
            self.dweight = self._sum(
                "aten.mm.default", (gradient, x), pattern.dweight, pattern.weight, self.dweight, share
            )
        if pattern.dbias is not None:
            assert pattern.bias is not None
            self.dbias = self._sum(
                "aten.sum.dim_IntList", (gradient,), pattern.dbias, pattern.bias, self.dbias, share
            )

    def _sum(
        self,
        name: str,
        reads: tuple[int, ...],
        wanted: OperandGradient,
        operand: Operand,
        so_far: int,
        share: float,
    ) -> int:
        """Add one part to a gradient; the first part makes it."""
        step, ops = self.step, self.ops
        if so_far >= 0 and wanted.cast < 0 and name == "aten.mm.default":
            ops.run("aten.addmm_.default", so_far, *reads, writes=so_far, like=wanted.op, share=share)
            return so_far
        made_by = ops.run(name, *reads, like=wanted.op, share=share)
        if wanted.cast < 0 and so_far < 0:
            ops.edit.storages.producer[wanted.storage] = made_by
            return wanted.storage
        part = ops.add_output(int(step.storages.bytes[operand.used]))
        if so_far < 0:
            ops.edit.storages.producer[wanted.storage] = ops.run(CAST, part, like=wanted.cast)
            so_far = wanted.storage
        else:
            ops.run("aten.add_.Tensor", so_far, part, writes=so_far, like=wanted.cast)
        if name != "aten.mm.default":
            ops.hold(part, ops.last)
        return so_far


def _backward_ops(edit: Edit, pattern: LossPattern, chunked: _Chunks, sums: int) -> None:
    """Add the ops of `activations.tiling.tiled_loss._Loss.backward`."""
    step = chunked.step
    ops = NewOps(edit, edit.n_ops)
    given = pattern.given
    if pattern.half:
        ops.run(CAST, *given)
        given = (ops.add_output(4),)
    ops.run("aten.div.Tensor", *given, sums)
    scale = ops.add_output(4)
    wanted = [each for each in (pattern.dx, pattern.dweight, pattern.dbias) if each is not None]
    for each in wanted:
        ops.run("aten.mul_.Tensor", each.storage, scale, writes=each.storage)
        # In place: reads and writes the gradient, whatever op it is like.
        ops.traffic[-1] = 2 * int(step.storages.bytes[each.storage])
    ops.insert(before=pattern.backward[0], phase=Phase.BACKWARD, module=pattern.module)
    for each in wanted:
        if step.storages.grad_ready_after[each.storage] >= 0:
            edit.storages.grad_ready_after[each.storage] = ops.last
        if step.storages.held_until[each.storage] <= step.uses.op[step.uses.storage == each.storage].max(
            initial=-1
        ):
            edit.storages.held_until[
                each.storage
            ] = -1  # freed after its last use: Python holds only the loss
