"""The pass of `offload.layer_major.layer_major_order` and `offload.layer_major.pack_offloader`: each pack of
blocks over all micro-batches before the next one.

The step at hand is that of one micro-batch; what comes out has the ops of all of them in their new order. So
the step is written anew, from front to back: ranges of rows of the old one, once per micro-batch and for
forward packs once more, with storages of their own. What is outside of the blocks is left to
`offload.optimizer.host_optimizer_pass`, which runs next.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Literal

import numpy as np

from memtune.offload.layer_major.pack_offload_pass import Gradients, Weights, first_adds
from memtune.offload.layer_major.packs import Packs, Span
from memtune.offload.layer_major.tied_weights_pass import Tied, ready_after, shared_weights, two_parts
from memtune.parallel.pipeline import batch_on_host
from memtune.program import (
    I32,
    Kind,
    NewOp,
    Phase,
    Replay,
    Resource,
    RowIndex,
    RowMask,
    Step,
    Tier,
    Turn,
    settle,
)

Where = Literal["device", "host"]
_LEAVE = NewOp("memtune.to_host.default", Phase.FORWARD, Resource.DEVICE_TO_HOST, prefetch=1)
_BACK = NewOp("memtune.to_device.default", Phase.FORWARD, Resource.HOST_TO_DEVICE, stream=1)
_SCALE = NewOp("aten.div.Tensor", Phase.FORWARD, Resource.COMPUTE)
_SCALE_BACK = NewOp("aten.div.Tensor", Phase.BACKWARD, Resource.COMPUTE)
_SUM = NewOp("aten.add.Tensor", Phase.FORWARD, Resource.COMPUTE)
_BEFORE = -1
_EMPTY = np.empty(0, np.int32)


class Parts:
    """Where the rows of a step belong: before the blocks, to a block, after them; forward and back."""

    def __init__(self, step: Step) -> None:
        n_blocks, after = len(step.blocks), int(step.forward_ends[len(step.blocks) - 1])
        body = np.flatnonzero(step.ops.phase < Phase.BOUNDARY)
        forward, backward = (
            body[(step.ops.phase[body] == Phase.FORWARD) == is_forward] for is_forward in (True, False)
        )
        enter = step.forward_starts[:n_blocks].tolist()
        block = step.ops.block[backward]
        first = [int(backward[block == i][0]) for i in range(n_blocks)]
        end = int(backward[block == 0][-1]) + 1
        self.before, self.after = forward[forward < enter[0]], forward[forward > after]
        self.back_after, self.back_before = backward[backward < first[-1]], backward[backward >= end]
        self.forward = [_within(forward, begin, stop) for begin, stop in pairwise([*enter, after + 1])]
        self.backward = [
            _within(backward, begin, stop) for begin, stop in zip(first, [end, *first[:-1]], strict=True)
        ]
        self.tail = np.flatnonzero(step.ops.phase >= Phase.BOUNDARY)
        self.is_scaled = len(self.after) > 0 and "ones_like" in step.names[step.ops.name[self.after[-1]]]
        self.region = np.full(step.ops.n, n_blocks, np.int32)
        self.region[self.before] = _BEFORE
        for index, rows in enumerate(self.forward):
            self.region[rows] = index

    def forward_of(self, pack: Span) -> RowIndex:
        """Rows of forward of a pack."""
        return np.concatenate(self.forward[pack[0] : pack[1]])

    def backward_of(self, pack: Span) -> RowIndex:
        """Rows of backward of a pack."""
        return np.concatenate(self.backward[pack[0] : pack[1]][::-1])


def _within(rows: RowIndex, begin: int, end: int) -> RowIndex:
    return rows[(rows >= begin) & (rows < end)]


parts_of = functools.lru_cache(maxsize=8)(Parts)


class _Boundaries:
    """What packs start from (Rule 2 of `offload.layer_major.layer_major_order`)."""

    def __init__(self, new: Replay, step: Step, to_host: bool) -> None:
        self._new, self._step, self._to_host = new, step, to_host
        given = [
            np.unique(step.calls.inputs.storage[step.calls.inputs.call == i]) for i in range(len(step.blocks))
        ]
        given = [each[step.storages.producer[each] >= 0] for each in given]
        later = np.unique(np.concatenate(given[1:]))
        self.shared = np.intersect1d(given[0], later)
        self._of = [np.setdiff1d(each, self.shared) for each in given]
        self._hosts: dict[tuple[int, int], list[int]] = {}
        self._leaving = -1

    def keep(self, block: int, index: int, made: I32) -> None:
        """What `block` starts from is kept."""
        if not self._to_host:
            return
        hosts = self._hosts[block, index] = []
        for storage in self._of[block].tolist():
            self.arrive()
            n_bytes, self._leaving = int(self._step.storages.bytes[storage]), int(made[storage])
            hosts.append(
                self._new.new_op(
                    _LEAVE, n_bytes, reads=(self._leaving,), makes=(n_bytes, Tier.HOST, Kind.TEMPORARY, -1)
                )
            )

    def arrive(self) -> None:
        """What is on its way to the host is let go on the device."""
        if self._leaving >= 0:
            self._new.hold(self._leaving, self._new.n_ops - 1)
            self._leaving = -1

    def start(self, block: int, index: int, made: I32) -> None:
        """What `block` starts from is on the device."""
        if not self._to_host:
            return
        for storage, host in zip(self._of[block].tolist(), self._hosts[block, index], strict=True):
            n_bytes = int(self._step.storages.bytes[storage])
            made[storage] = self._new.new_op(
                _BACK, n_bytes, reads=(host,), makes=(n_bytes, Tier.DEVICE, Kind.TEMPORARY, -1)
            )

    def started(self, block: int, made: I32, at: int) -> None:
        """`block` has returned with op `at`: nobody but autograd holds what it started from."""
        self._new.hold(made[self._of[block]], at)


def layer_major(
    step: Step, packs: Packs, micro_batches: int, boundaries: Where = "device", ranks: int = 1
) -> Step:
    """All micro-batches of a step in layer-major order, with the blocks' parameters on the host.

    Args:
        step: That of one micro-batch, or where there are several that of a later one
            (`edit.accumulate_gradients`); one that `not_a_chain` has nothing to say about.
        packs: Which blocks run together.
        micro_batches: In one step.
        boundaries: Where what packs start from is kept.
        ranks: That do the same, and average their gradients.
    """
    return _Writer(step, packs, micro_batches, boundaries, ranks).done()


class _Writer:
    """Follows `offload.layer_major.layer_major_order.LayerMajor`, method by method."""

    def __init__(self, step: Step, packs: Packs, micro_batches: int, boundaries: Where, ranks: int) -> None:
        self._step, self._packs, self._count = step, packs, micro_batches
        self._parts, self._new = parts_of(step), Replay(step)
        self._weights, self._gradients = (
            Weights(self._new, step),
            Gradients(self._new, step, ranks, packs.late),
        )
        self._boundaries = _Boundaries(self._new, step, boundaries == "host")
        # By micro-batch: numbers of what forward packs made, and of all else; where forward ran; what the
        # turn made, and its end.
        self._forward_made, self._made = (self._table(step.storages.n) for _ in range(2))
        self._first_run, self._turns = self._table(step.ops.n), [Turn() for _ in range(micro_batches)]
        self._turn_ends = [(0, 0)] * micro_batches
        region = np.append(self._parts.region, np.int32(len(step.blocks)))
        self._made_in = region[step.storages.producer]  # its last entry serves -1
        self._saved_in = np.where(
            step.saves.block >= 0, step.saves.block, region[step.saves.packed_before - step.saves.is_output]
        )
        self._nothing: RowMask = np.zeros(step.storages.n, bool)
        self._ignore = self._gradients.storages.copy()
        self._total = -1
        self._tied = self._two_parts()
        """What is a part of a tied weight's gradient → the weight."""
        self._other_batches()
        self._gradients.update_late(self._weights.hosts)
        if micro_batches > 1 and self._parts.is_scaled:
            self._ignore[list(self._loss_and_seed())] = True

    def _two_parts(self) -> dict[int, int]:
        """Where the turn does not go back to the start, a tied weight's parts are added to its sum one by
        one.
        """
        parts, step, found = self._parts, self._step, list[Tied]()
        if self._packs.turn[0]:
            both = (two_parts(step, each) for each in shared_weights(step, parts.before, parts.after))
            found = [each for each in both if each is not None]
        self._adders = [each.adder for each in found] + [
            int(self._gradients.adds[each.parameter]) for each in found
        ]
        of = {part: each.parameter for each in found for part in (each.after, each.before)}
        self._ignore[list(of)] = True
        return of

    def _other_batches(self) -> None:
        """Micro-batches wait in host memory; the step at hand has one."""
        step = self._step
        batch = batch_on_host(step, self._parts.before)
        for _ in range(1, self._count):
            self._new.add_storages(
                step.storages.bytes[batch],
                Tier.HOST,
                step.storages.kind[batch],
                -1,
                -1,
                step.storages.held_until[batch],
            )

    def _table(self, width: int) -> list[I32]:
        return [np.full(width, -1, np.int32) for _ in range(self._count)]

    def done(self) -> Step:
        """The new step."""
        new, tail, last = self._new, Turn(), self._made[-1]
        for group in self._packs.groups(self._count):
            self._group(group)
        self._gradients.average_outside()
        self._gradients.put_into(last)
        new.run(tail, self._parts.tail, last, last, self._nothing)
        settle(new, tail, (_EMPTY, _EMPTY), self._step.ops.n, new.n_ops - 1, ignore=self._nothing)
        self._gradients.hold_outside(self._parts.tail, tail.positions[0])
        updates = self._step.ops.phase[self._parts.tail] == Phase.OPTIMIZER
        self._gradients.all_used(int(tail.positions[0][updates.argmax()]))  # what else comes down has by then
        if self._total >= 0:
            new.hold(self._total, new.n_ops - 1)
        return new.done(*self._gradients.columns())

    def _group(self, group: range) -> None:
        packs, total = self._packs, self._total
        if packs.forward:
            for index in group:
                self._before_blocks(index)
        for number, pack in enumerate(packs.uses):
            ahead = packs.uses[number + 1] if packs.prefetch and number + 1 < len(packs.uses) else None
            turn = len(packs.forward)
            self._weights.begin(pack, ahead, Phase.FORWARD if number <= turn else Phase.BACKWARD)
            for index in group:
                if number < turn:
                    self._forward(pack, index)
                elif number == turn:
                    self._turn(index, group)
                else:
                    self._backward(pack, index, group)
            self._boundaries.arrive()
            self._gradients.arrive()
            self._weights.end(pack)
            if number >= turn and group.stop == self._count:
                self._gradients.update(pack, self._weights.hosts)
        for index in group:
            self._back_to_the_start(index, group)
        if total >= 0:
            self._new.hold(total, self._new.n_ops - 1)

    # -- what runs of a micro-batch --------------------------------------------------------------------------

    def _before_blocks(self, index: int) -> None:
        self._forward_rows(self._parts.before, index)
        self._boundaries.keep(0, index, self._forward_made[index])

    def _forward(self, pack: Span, index: int) -> None:
        made, starts = self._forward_made[index], [first for first, _ in self._packs.backward]
        for first, last in pairwise(
            [pack[0], *(each for each in starts if pack[0] < each < pack[1]), pack[1]]
        ):
            self._boundaries.start(first, index, made)
            begun = self._new.n_ops
            self._forward_rows(self._parts.forward_of((first, last)), index)
            self._boundaries.started(first, made, begun + len(self._parts.forward[first]) - 1)
            self._boundaries.keep(last, index, made)

    def _forward_rows(self, rows: RowIndex, index: int) -> None:
        """Rows of forward of which nothing is saved."""
        turn, made = Turn(), self._forward_made[index]
        self._new.run(turn, rows, made, made, self._nothing)
        self._first_run[index][rows] = turn.positions[0]
        settle(self._new, turn, (_EMPTY, _EMPTY), int(rows[-1]), self._new.n_ops - 1, ignore=self._ignore)

    def _turn(self, index: int, group: range) -> None:
        parts, turn, (first, last) = self._parts, self._turns[index], self._packs.turn
        made, kept, elsewhere = (
            self._made[index],
            self._forward_made[index],
            self._elsewhere(self._packs.turn),
        )
        self._new.run(turn, parts.before, made, kept, elsewhere, again=self._first_run[index])
        if first:
            before = self._new.n_ops
            self._boundaries.start(first, index, kept)
            if self._new.n_ops > before:  # the user's code still holds what the first block is given
                self._boundaries.started(0, made, self._new.n_ops - 1)
        begun = self._new.n_ops
        self._new.run(turn, parts.forward_of((first, last)), made, kept, elsewhere)
        if first:
            self._boundaries.started(first, kept, begun + len(parts.forward[first]) - 1)
        seed = self._loss(turn, index, elsewhere)
        rows = np.concatenate(
            [parts.back_after, parts.backward_of((first, last)), *([] if first else [parts.back_before])]
        )
        self._back(turn, rows, index, group, elsewhere)
        self._new.hold(seed, self._new.n_ops - 1)
        self._add_losses(index)
        self._turn_ends[index] = int(rows[-1]), self._new.n_ops - 1

    def _loss_and_seed(self) -> tuple[int, int]:
        """Storages of the loss and of the gradient that backward starts from."""
        row = self._parts.after[-1]
        step = self._step
        return int(step.uses.storage[step.uses.op == row][0]), int(
            np.flatnonzero(step.storages.producer == row)[0]
        )

    def _loss(self, turn: Turn, index: int, elsewhere: RowMask) -> list[int]:
        """What comes after the blocks; with several micro-batches the loss and its gradient are divided by
        their number.

        Returns:
            What backward holds to its end beyond that.
        """
        rows, made, kept = self._parts.after, self._made[index], self._forward_made[index]
        if self._count == 1 or not self._parts.is_scaled:
            self._new.run(turn, rows, made, kept, elsewhere)
            return []
        self._new.run(turn, rows[:-1], made, kept, elsewhere)
        loss, seed = self._loss_and_seed()
        for op, storage, row in ((_SCALE, loss, None), (_SCALE_BACK, seed, rows[-1:])):
            if row is not None:
                self._new.run(turn, row, made, kept, elsewhere)
            n_bytes, before = int(self._step.storages.bytes[storage]), int(made[storage])
            made[storage] = self._new.new_op(
                op, 2 * n_bytes, reads=(before,), makes=(n_bytes, Tier.DEVICE, Kind.TEMPORARY, -1)
            )
        return [before]

    def _add_losses(self, index: int) -> None:
        if not self._parts.is_scaled:
            return
        loss, _ = self._loss_and_seed()
        mine, n_bytes = int(self._made[index][loss]), int(self._step.storages.bytes[loss])
        if self._total < 0:
            self._total = mine
            return
        self._new.hold(self._total, self._new.n_ops)
        self._total = self._new.new_op(
            _SUM, 3 * n_bytes, reads=(self._total, mine), makes=(n_bytes, Tier.DEVICE, Kind.TEMPORARY, -1)
        )

    def _backward(self, pack: Span, index: int, group: range) -> None:
        turn, made, kept = Turn(), self._made[index], self._forward_made[index]
        elsewhere, forward = self._elsewhere(pack), self._parts.forward_of(pack)
        self._boundaries.start(pack[0], index, kept)
        begun = self._new.n_ops
        self._new.run(turn, forward, made, kept, elsewhere, again=self._first_run[index])
        self._boundaries.started(pack[0], kept, begun + len(self._parts.forward[pack[0]]) - 1)
        returned = self._new.n_ops - 1
        self._back(turn, self._parts.backward_of(pack), index, group, elsewhere)
        saved = self._saved((self._saved_in >= pack[0]) & (self._saved_in < pack[1]), index, elsewhere)
        settle(self._new, turn, saved, int(forward[-1]), returned, ignore=self._ignore)

    def _back_to_the_start(self, index: int, group: range) -> None:
        first, turn = self._packs.turn[0], self._turns[index]
        elsewhere = self._elsewhere(self._packs.turn)
        if first:
            self._new.hold(self._forward_made[index][self._boundaries.shared], self._new.n_ops - 1)
            self._back(turn, self._parts.back_before, index, group, elsewhere)
        saved = self._saved((self._saved_in == _BEFORE) | (self._saved_in >= first), index, elsewhere)
        settle(self._new, turn, saved, *self._turn_ends[index], ignore=self._ignore)

    # -- what these have in common ---------------------------------------------------------------------------

    def _elsewhere(self, pack: Span) -> RowMask:
        """(m,) what a forward pack made and `pack` does not make again; the turn makes again what comes
        before the blocks.
        """
        before = self._packs.turn[0] > pack[0]
        others = (self._made_in >= 0) & (self._made_in < len(self._step.blocks))
        others &= (self._made_in < pack[0]) | (self._made_in >= pack[1])
        found: RowMask = others | ((self._made_in == _BEFORE) & before)
        return found

    def _saved(self, rows: RowMask, index: int, elsewhere: RowMask) -> tuple[I32, I32]:
        """Numbers of what autograd saved in these rows of the saves, and when it lets go."""
        step = self._step
        numbers = self._new.number(
            step.saves.storage[rows], self._made[index], self._forward_made[index], elsewhere
        )
        return numbers, step.saves.held_until[rows]

    def _back(self, turn: Turn, rows: RowIndex, index: int, group: range, elsewhere: RowMask) -> None:
        """Rows of backward; gradients of blocks leave as they land in the last micro-batch of a group."""
        gradients, made, kept = self._gradients, self._made[index], self._forward_made[index]
        given = self._given(rows, made)
        stops: list[
            tuple[int, int, bool]
        ] = []  # after which row, which parameter or part of a tied one's gradient
        for parameter in gradients.landing_in(rows):
            begins = index == 0 if gradients.is_outside[parameter] else index == group[0]
            if parameter not in self._tied.values() and (begins or self._leaves(parameter, index, group)):
                stops.append((gradients.row_of(parameter), parameter, False))
        stops += [
            (ready_after(self._step, part), part, True)
            for part in self._tied
            if self._step.storages.producer[part] in rows
        ]
        rows = rows[~np.isin(rows, [*first_adds(gradients, index, group), *self._adders])]
        done = 0
        for row, what, is_part in sorted(stops, key=lambda each: each[0]):
            end = max(done, int(np.searchsorted(rows, row, side="right")))
            self._new.run(turn, rows[done:end], made, kept, elsewhere)
            done = end
            if is_part:
                gradients.adds_part(self._tied[what], int(made[what]))
                continue
            if index == 0 if gradients.is_outside[what] else index == group[0]:
                gradients.begins(what, int(made[gradients.raw(what)]))
            if self._leaves(what, index, group):
                gradients.leaves(what)
        self._new.run(turn, rows[done:], made, kept, elsewhere)
        self._new.hold(given, self._new.n_ops - 1)

    def _leaves(self, parameter: int, index: int, group: range) -> bool:
        return not self._gradients.is_outside[parameter] and index == group[-1]

    def _given(self, rows: RowIndex, made: I32) -> I32:
        """Numbers of the gradients that `rows` start from, which other rows of backward made: whoever calls
        holds them.
        """
        step, inside = self._step, np.zeros(self._step.ops.n + 1, bool)
        inside[rows] = True
        used = step.uses.storage[inside[step.uses.op]]
        producer = step.storages.producer[used]
        from_others = (producer >= 0) & ~inside[producer] & (step.ops.phase[producer] == Phase.BACKWARD)
        numbers: I32 = made[np.unique(used[from_others & ~self._ignore[used]])]
        return numbers
