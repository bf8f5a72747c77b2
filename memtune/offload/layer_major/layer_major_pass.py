"""The pass of `offload.layer_major.layer_major_order` and `offload.layer_major.pack_offloader`.

The input Step is that of one micro-batch; the output has the ops of all micro-batches in layer-major order.
The pass builds it from front to back: it replays ranges of the input's rows, once per micro-batch and once
more for forward packs, each time with storages of their own. `offload.optimizer.host_optimizer_pass` runs
next and handles parameters outside of the blocks. The gradient of a tied weight, used before and after the
blocks, has two parts, which layer-major order adds separately.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.offload.layer_major.pack_offload_pass import Gradients, Weights, skipped_adds
from memtune.offload.layer_major.packs import BoundaryTier, Packs, Span, joins
from memtune.parallel.pipeline import batch_on_host
from memtune.program import (
    I32,
    WRITES,
    Kind,
    NewOp,
    Phase,
    Resource,
    RowIndex,
    RowMask,
    RowReplay,
    RowRun,
    Step,
    Stop,
    Tier,
    batched_rows,
    columns_of,
    raw_gradients,
    set_lifetimes,
)

_OFFLOAD = NewOp("memtune.to_host.default", Phase.FORWARD, Resource.DEVICE_TO_HOST, prefetch=1)
_RELOAD = NewOp("memtune.to_device.default", Phase.FORWARD, Resource.HOST_TO_DEVICE, stream=1)
_SCALE = NewOp("aten.div.Tensor", Phase.FORWARD, Resource.COMPUTE)
_SCALE_BACK = NewOp("aten.div.Tensor", Phase.BACKWARD, Resource.COMPUTE)
_SUM = NewOp("aten.add.Tensor", Phase.FORWARD, Resource.COMPUTE)
_JOIN = NewOp("aten.cat.default", Phase.FORWARD, Resource.COMPUTE)
_PART = NewOp("aten.clone.default", Phase.FORWARD, Resource.COMPUTE)
_BEFORE = -1
_EMPTY = np.empty(0, np.int32)


@dataclass(frozen=True)
class TiedGradient:
    """The gradient of one tied weight."""

    parameter: int
    after: int
    """Storage of the part from its use after the blocks."""
    before: int
    """Storage of the part from its use before the blocks."""
    adder: int
    """The op that adds the two."""


def shared_weights(step: Step, before: npt.NDArray[Any], after: npt.NDArray[Any]) -> list[int]:
    """Return the trained parameters that forward rows `before` the blocks and `after` them use."""
    columns = columns_of(step.parameters)
    used = columns.trainable.copy()
    for rows in (before, after):
        inside = np.zeros(step.ops.n, bool)
        inside[rows] = True
        used &= np.isin(columns.storage, step.uses.storage[inside[step.uses.op]])
    found: list[int] = np.flatnonzero(used).tolist()
    return found


@functools.lru_cache(maxsize=8)
def summed_parts(step: Step, parameter: int) -> TiedGradient | None:
    """Return the parts of the gradient of `parameter`; None unless it is one sum of two."""
    raw = int(raw_gradients(step)[parameter])
    adder = int(step.storages.producer[raw]) if raw >= 0 else -1
    if adder < 0 or step.names[step.ops.name[adder]] != "aten.add.Tensor":
        return None
    parts = step.uses.storage[step.uses.op == adder].tolist()
    made = [int(step.storages.producer[each]) for each in parts]
    if len(parts) != 2 or min(made) < 0 or any(step.ops.phase[each] != Phase.BACKWARD for each in made):
        return None
    # Backward reaches the later use first.
    after, before = sorted(parts, key=lambda each: int(step.storages.producer[each]))
    return TiedGradient(parameter, after, before, adder)


def ready_after(step: Step, part: int) -> int:
    """Return the op after which `part` is ready: the last one of the backward function that makes it."""
    made = int(step.storages.producer[part])
    together = (step.ops.sequence_nr == step.ops.sequence_nr[made]) & (step.ops.phase == Phase.BACKWARD)
    return int(np.flatnonzero(together)[-1]) if step.ops.sequence_nr[made] >= 0 else made


class Parts:
    """The rows of a step by region: before the blocks, each block, after them; forward and backward."""

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
        # Backward runs blocks in reverse: before the last block's ops come those of the loss, after the first
        # block's those of the embedding.
        self.backward_after, self.backward_before = backward[backward < first[-1]], backward[backward >= end]
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
        """Return the forward rows of a pack."""
        return np.concatenate(self.forward[pack[0] : pack[1]])

    def backward_of(self, pack: Span) -> RowIndex:
        """Return the backward rows of a pack."""
        return np.concatenate(self.backward[pack[0] : pack[1]][::-1])

    def turnaround_of(self, pack: Span) -> RowIndex:
        """Return the backward rows that follow the forward of the last pack."""
        before = [] if pack[0] else [self.backward_before]
        return np.concatenate([self.backward_after, self.backward_of(pack), *before])


def _within(rows: RowIndex, begin: int, end: int) -> RowIndex:
    return rows[(rows >= begin) & (rows < end)]


parts_of = functools.lru_cache(maxsize=8)(Parts)


@functools.lru_cache(maxsize=8)
def _needs_gradient(step: Step) -> RowMask:
    """Return (m,) the trained parameters, and all that forward computes from them."""
    columns = columns_of(step.parameters)
    found: RowMask = np.zeros(step.storages.n, bool)
    found[columns.storage[columns.gradient >= 0]] = True
    forward = np.flatnonzero(step.ops.phase == Phase.FORWARD)
    starts = np.searchsorted(step.uses.op, [forward, forward + 1])
    made = np.argsort(step.storages.producer, kind="stable")
    made_starts = np.searchsorted(step.storages.producer[made], [forward, forward + 1])
    for begin, end, first, last in np.concatenate([starts, made_starts]).T.tolist():
        if found[step.uses.storage[begin:end]].any():
            found[made[first:last]] = True
            found[step.uses.storage[begin:end][step.uses.mode[begin:end] == WRITES]] = True
    return found


class _Boundaries:
    """The saved arguments of packs; predicts `boundary_activations.BoundaryActivations`."""

    def __init__(self, new: RowReplay, step: Step, to_host: bool) -> None:
        self._new, self._step, self._to_host = new, step, to_host
        given = [
            np.unique(step.calls.inputs.storage[step.calls.inputs.call == i]) for i in range(len(step.blocks))
        ]
        given = [each[step.storages.producer[each] >= 0] for each in given]
        # A mask or a position tensor that several blocks get is one storage: it is neither copied nor freed
        # with a pack.
        later = np.unique(np.concatenate(given[1:]))
        self.shared = np.intersect1d(given[0], later)
        self._own = [np.setdiff1d(each, self.shared) for each in given]
        # Arguments that need no gradient, such as the batch itself, stay on the device.
        needs_gradient = _needs_gradient(step)
        self._copied = [each[needs_gradient[each]] for each in self._own]
        self._hosts: dict[tuple[int, int], list[int]] = {}
        self._in_flight = -1

    def save(self, block: int, index: int, made: I32) -> None:
        """Add the D2H copies of the arguments of `block`, if they are saved on the host."""
        if not self._to_host:
            return
        hosts = self._hosts[block, index] = []
        for storage in self._copied[block].tolist():
            # One copy in flight bounds the sources that are held for copies to one argument.
            self.wait()
            n_bytes, self._in_flight = int(self._step.storages.bytes[storage]), int(made[storage])
            hosts.append(
                self._new.new_op(
                    _OFFLOAD,
                    n_bytes,
                    reads=(self._in_flight,),
                    makes=(n_bytes, Tier.HOST, Kind.TEMPORARY, -1),
                )
            )

    def wait(self) -> None:
        """Free the source of the D2H copy in flight."""
        if self._in_flight >= 0:
            self._new.hold(self._in_flight, self._new.n_ops - 1)
            self._in_flight = -1

    def advance(self, count: int) -> None:
        """Continue after `count` copies of the last iteration (`RowReplay.repeat`)."""
        self._in_flight = self._new.counterpart(self._in_flight, count)

    def start(self, block: int, index: int, made: I32) -> None:
        """Add the H2D copies of the arguments of `block`."""
        if not self._to_host:
            return
        for storage, host in zip(self._copied[block].tolist(), self._hosts[block, index], strict=True):
            n_bytes = int(self._step.storages.bytes[storage])
            made[storage] = self._new.new_op(
                _RELOAD, n_bytes, reads=(host,), makes=(n_bytes, Tier.DEVICE, Kind.TEMPORARY, -1)
            )

    def joined(self, block: int, made: Sequence[I32]) -> I32:
        """Add the ops that join the arguments of `block` of several micro-batches; return the numbers."""
        found, batched = made[-1].copy(), batched_rows(self._step).storages
        for storage in (*self.shared.tolist(), *self._own[block].tolist()):
            if batched[storage]:
                sources = [int(each[storage]) for each in made]
                found[storage] = self._copy(_JOIN, sources, storage, len(made))
        return found

    def part(self, block: int, joined: I32, made: I32) -> None:
        """Add the ops that copy the arguments of `block` of one micro-batch out of joined ones."""
        for storage in self._own[block].tolist():
            made[storage] = self._copy(_PART, [int(joined[storage])], storage, 1)

    def _copy(self, op: NewOp, sources: Sequence[int], storage: int, count: int) -> int:
        n_bytes = int(self._step.storages.bytes[storage]) * count
        return self._new.new_op(
            op, 2 * n_bytes, reads=sources, makes=(n_bytes, Tier.DEVICE, Kind.TEMPORARY, -1)
        )

    def end_use(self, block: int, made: I32, at: int) -> None:
        """Let only autograd hold the arguments of `block` after op `at`, the last one of its forward."""
        self._new.hold(made[self._own[block]], at)


def layer_major(
    step: Step, packs: Packs, micro_batches: int, boundaries: BoundaryTier = "device", ranks: int = 1
) -> Step:
    """Return the step with all micro-batches in layer-major order and the blocks' parameters on the host.

    Args:
        step: Step of one micro-batch; with several, that of a later one (`edit.accumulate_gradients`). Its
            blocks form a chain (`not_a_chain`).
        packs: The packs of blocks, and their order.
        micro_batches: Number of micro-batches of a step.
        boundaries: Tier of saved boundary activations.
        ranks: Number of replicas, which average their gradients.
    """
    return _StepWriter(step, packs, micro_batches, boundaries, ranks).done()


class _PackRows(NamedTuple):
    """Rows of the old step that belong to a pack."""

    forward: RowIndex
    backward: RowIndex
    from_forward: RowMask
    """(m,) Storages that it reads from a forward run."""
    saves: RowIndex
    """Rows of `saves`: tensors that autograd saves in it."""


class _Cut(NamedTuple):
    """Backward rows of a pack as a micro-batch replays them."""

    rows: RowIndex
    stops: list[tuple[int, int, bool]]
    """After as many rows a parameter is ready and offloaded, or (True) a part of a tied weight's gradient."""
    starts: set[int]
    """Parameters whose sums start with this micro-batch."""
    offloaded: set[int]
    given: I32
    """Gradients that the rows start from."""


class _Tables(dict[int, I32]):
    """A table of numbers by micro-batch, -1 for none, made on first use (`_run_each`)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def __missing__(self, index: int) -> I32:
        made = self[index] = np.full(self._width, -1, np.int32)
        return made


class _StepWriter:
    """Writes the new step; follows `layer_major_order.LayerMajor` method by method."""

    def __init__(
        self, step: Step, packs: Packs, micro_batches: int, boundaries: BoundaryTier, ranks: int
    ) -> None:
        self._step, self._packs, self._count = step, packs, micro_batches
        self._parts, self._new = parts_of(step), RowReplay(step)
        self._weights = Weights(self._new, step)
        self._gradients = Gradients(self._new, step, ranks, packs.deferred)
        self._boundaries = _Boundaries(self._new, step, boundaries == "host")
        # By micro-batch: new storages of forward packs, and of all other runs; new positions of the first
        # forward; the rows of the turnaround, and its end (row of the old step, op of the new one).
        self._forward_made, self._made = (_Tables(step.storages.n) for _ in range(2))
        self._first_run = _Tables(step.ops.n)
        self._turnaround_runs = [RowRun() for _ in range(micro_batches)]
        self._turnaround_ends = [(0, 0)] * micro_batches
        region = np.append(self._parts.region, np.int32(len(step.blocks)))
        self._made_in = region[step.storages.producer]  # producer -1 (none) reads the appended last entry
        self._saved_in = np.where(
            step.saves.block >= 0, step.saves.block, region[step.saves.packed_before - step.saves.is_output]
        )
        self._nothing: RowMask = np.zeros(step.storages.n, bool)
        self._ignore = self._gradients.storages.copy()
        self._total = -1
        self._rows_of: dict[Span, _PackRows] = {}
        self._cuts: dict[tuple[bytes, bool, bool, bool], _Cut] = {}
        self._given: dict[bytes, I32] = {}
        self._tied = self._tied_parts()
        """Tied weight by each part of its gradient."""
        self._hold_batches_on_host()
        # First of all ops: deferred updates overlap with the forward that follows.
        self._gradients.update_deferred(self._weights.hosts)
        if micro_batches > 1 and self._parts.is_scaled:
            # The scaled loss and seed replace these two; `_loss` and `_add_losses` set the lifetimes.
            self._ignore[list(self._loss_and_seed())] = True

    def _tied_parts(self) -> dict[int, int]:
        """Return the parts of tied weights' gradients."""
        # If skipped blocks cut the turnaround's graph, the two parts are ready in separate backwards, and
        # each is added to the sum when it is ready.
        parts, step, found = self._parts, self._step, list[TiedGradient]()
        if self._packs.turnaround[0]:
            both = (summed_parts(step, each) for each in shared_weights(step, parts.before, parts.after))
            found = [each for each in both if each is not None]
        self._adders = [each.adder for each in found] + [
            int(self._gradients.adds[each.parameter]) for each in found
        ]
        of = {part: each.parameter for each in found for part in (each.after, each.before)}
        self._ignore[list(of)] = True
        return of

    def _hold_batches_on_host(self) -> None:
        """Add the host storages of all micro-batches but one, which the input step has."""
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

    def done(self) -> Step:
        """Write and return the new step."""
        # The gradients of the last micro-batch become the sums, so its storages serve the optimizer's rows.
        new, tail, last = self._new, RowRun(), self._made[self._count - 1]
        for group in self._packs.groups(self._count):
            self._group(group)
        self._gradients.average_outside()
        self._gradients.replace_gradients(last)
        new.append_rows(tail, self._parts.tail, last, last, self._nothing)
        set_lifetimes(new, tail, (_EMPTY, _EMPTY), self._step.ops.n, new.n_ops - 1, ignore=self._nothing)
        self._gradients.hold_outside(self._parts.tail, tail.positions[0])
        updates = self._step.ops.phase[self._parts.tail] == Phase.OPTIMIZER
        # The optimizer waits for all copies of gradients.
        self._gradients.wait_updates(int(tail.positions[0][updates.argmax()]))
        if self._total >= 0:
            new.hold(self._total, new.n_ops - 1)
        return new.done(*self._gradients.columns())

    def _group(self, group: range) -> None:
        """Run every pack over the micro-batches of `group`, forward, then backward."""
        packs, total = self._packs, self._total
        if packs.forward:
            self._run_each(group, self._prologue)
        for number, pack in enumerate(packs.uses):
            following = packs.uses[number + 1] if packs.prefetch and number + 1 < len(packs.uses) else None
            turnaround = len(packs.forward)
            # The turnaround pack runs backward right after its forward, so its weights are loaded once.
            self._weights.begin(pack, following, Phase.FORWARD if number <= turnaround else Phase.BACKWARD)
            if number < turnaround and packs.joined > 1:
                for together in joins(group, packs.joined):
                    if len(together) > 1:
                        self._forward_joined(pack, together)
                    else:
                        self._forward(pack, together[0])
            elif number < turnaround:
                self._run_each(group, functools.partial(self._forward, pack))
            elif number == turnaround:
                self._run_each(group, functools.partial(self._turnaround, group))
            else:
                self._run_each(group, functools.partial(self._backward, pack, group))
            self._boundaries.wait()
            self._gradients.wait()
            self._weights.end(pack)
            # Gradients are complete only after the last group of micro-batches.
            if number >= turnaround and group.stop == self._count:
                self._gradients.update(pack, self._weights.hosts)
        self._run_each(group, functools.partial(self._prologue_backward, group))
        if total >= 0:
            self._new.hold(total, self._new.n_ops - 1)

    def _run_each(self, group: range, run: Callable[[int], None]) -> None:
        """Call `run` for each micro-batch of `group`; those in the middle, which are alike, become copies."""
        # The first starts sums and the last ends them. The third is copied; the second, its equal, shows
        # which numbers advance. Tables of copied micro-batches stay empty: every stage copies the same ones.
        copied = len(group) - 4
        # Joined micro-batches are not alike: the first of them has their storages.
        if copied <= 0 or self._packs.joined > 1:
            for index in group:
                run(index)
            return
        run(group[0])
        first = self._new.mark()
        run(group[1])
        second = self._new.mark()
        run(group[2])
        self._new.repeat(first, second, copied)
        self._boundaries.advance(copied)
        self._total = self._new.counterpart(self._total, copied)
        run(group[-1])

    # -- runs of one micro-batch -----------------------------------------------------------------------------

    def _prologue(self, index: int) -> None:
        self._forward_rows(self._parts.before, index)
        self._boundaries.save(0, index, self._forward_made[index])

    def _forward(self, pack: Span, index: int) -> None:
        made, starts = self._forward_made[index], [first for first, _ in self._packs.backward]
        for first, last in pairwise(
            [pack[0], *(each for each in starts if pack[0] < each < pack[1]), pack[1]]
        ):
            self._boundaries.start(first, index, made)
            begun = self._new.n_ops
            self._forward_rows(self._rows((first, last)).forward, index)
            # The caller's frame drops the argument when the first block of the pack returns.
            self._boundaries.end_use(first, made, begun + len(self._parts.forward[first]) - 1)
            self._boundaries.save(last, index, made)

    def _forward_joined(self, pack: Span, together: range) -> None:
        starts = [first for first, _ in self._packs.backward]
        tables = [self._forward_made[index] for index in together]
        for first, last in pairwise(
            [pack[0], *(each for each in starts if pack[0] < each < pack[1]), pack[1]]
        ):
            for index in together:
                self._boundaries.start(first, index, self._forward_made[index])
            joined = self._boundaries.joined(first, tables)
            for made in tables:
                self._boundaries.end_use(first, made, self._new.n_ops - 1)
            begun = self._new.n_ops
            self._forward_rows(self._rows((first, last)).forward, together[0], joined, len(together))
            self._boundaries.end_use(first, joined, begun + len(self._parts.forward[first]) - 1)
            for index in together:
                self._first_run[index][:] = self._first_run[together[0]]
                self._boundaries.part(last, joined, self._forward_made[index])
                self._boundaries.save(last, index, self._forward_made[index])

    def _forward_rows(self, rows: RowIndex, index: int, made: I32 | None = None, joined: int = 1) -> None:
        """Replay forward rows whose saved tensors are dropped."""
        run, made = RowRun(), self._forward_made[index] if made is None else made
        self._new.append_rows(run, rows, made, made, self._nothing, joined=joined)
        self._first_run[index][rows] = run.positions[0]
        set_lifetimes(
            self._new, run, (_EMPTY, _EMPTY), int(rows[-1]), self._new.n_ops - 1, ignore=self._ignore
        )

    def _turnaround(self, group: range, index: int) -> None:
        parts, run, (first, last) = self._parts, self._turnaround_runs[index], self._packs.turnaround
        made = self._made[index]
        forward_made = self._forward_made[index]
        from_forward = self._rows(self._packs.turnaround).from_forward
        self._new.append_rows(
            run, parts.before, made, forward_made, from_forward, again=self._first_run[index]
        )
        if first:
            before = self._new.n_ops
            self._boundaries.start(first, index, forward_made)
            if self._new.n_ops > before:  # the user's code holds the first block's arguments until it returns
                self._boundaries.end_use(0, made, self._new.n_ops - 1)
        begun = self._new.n_ops
        self._new.append_rows(run, parts.forward_of((first, last)), made, forward_made, from_forward)
        if first:
            self._boundaries.end_use(first, forward_made, begun + len(parts.forward[first]) - 1)
        seed = self._loss(run, index, from_forward)
        rows = parts.turnaround_of((first, last))
        self._run_backward(run, rows, index, group, from_forward)
        self._new.hold(seed, self._new.n_ops - 1)
        self._add_losses(index)
        self._turnaround_ends[index] = int(rows[-1]), self._new.n_ops - 1

    def _loss_and_seed(self) -> tuple[int, int]:
        """Return the storages of the loss and of the gradient that backward starts from."""
        row = self._parts.after[-1]
        step = self._step
        return int(step.uses.storage[step.uses.op == row][0]), int(
            np.flatnonzero(step.storages.producer == row)[0]
        )

    def _loss(self, run: RowRun, index: int, from_forward: RowMask) -> list[int]:
        """Replay the code after the blocks; scale loss and seed if there are several micro-batches.

        Returns:
            Storages that backward also holds until its end.
        """
        rows, made, forward_made = self._parts.after, self._made[index], self._forward_made[index]
        if self._count == 1 or not self._parts.is_scaled:
            self._new.append_rows(run, rows, made, forward_made, from_forward)
            return []
        self._new.append_rows(run, rows[:-1], made, forward_made, from_forward)
        loss, seed = self._loss_and_seed()
        # The recorded step has one micro-batch, so no scaling: the loss is divided before the row that makes
        # the seed, the seed after it.
        for op, storage, row in ((_SCALE, loss, None), (_SCALE_BACK, seed, rows[-1:])):
            if row is not None:
                self._new.append_rows(run, row, made, forward_made, from_forward)
            n_bytes, before = int(self._step.storages.bytes[storage]), int(made[storage])
            made[storage] = self._new.new_op(
                op, 2 * n_bytes, reads=(before,), makes=(n_bytes, Tier.DEVICE, Kind.TEMPORARY, -1)
            )
        return [before]

    def _add_losses(self, index: int) -> None:
        """Add the loss of a micro-batch to the total."""
        if not self._parts.is_scaled:
            return
        loss, _ = self._loss_and_seed()
        number, n_bytes = int(self._made[index][loss]), int(self._step.storages.bytes[loss])
        if self._total < 0:
            self._total = number
            return
        self._new.hold(self._total, self._new.n_ops)
        self._total = self._new.new_op(
            _SUM, 3 * n_bytes, reads=(self._total, number), makes=(n_bytes, Tier.DEVICE, Kind.TEMPORARY, -1)
        )

    def _backward(self, pack: Span, group: range, index: int) -> None:
        run, made, forward_made = RowRun(), self._made[index], self._forward_made[index]
        forward, backward, from_forward, saves = self._rows(pack)
        self._boundaries.start(pack[0], index, forward_made)
        begun = self._new.n_ops
        self._new.append_rows(run, forward, made, forward_made, from_forward, again=self._first_run[index])
        self._boundaries.end_use(pack[0], forward_made, begun + len(self._parts.forward[pack[0]]) - 1)
        returned = self._new.n_ops - 1
        self._run_backward(run, backward, index, group, from_forward)
        saved = self._saved(saves, index, from_forward)
        set_lifetimes(self._new, run, saved, int(forward[-1]), returned, ignore=self._ignore)

    def _prologue_backward(self, group: range, index: int) -> None:
        first, run = self._packs.turnaround[0], self._turnaround_runs[index]
        from_forward = self._rows(self._packs.turnaround).from_forward
        if first:
            self._new.hold(self._forward_made[index][self._boundaries.shared], self._new.n_ops - 1)
            self._run_backward(run, self._parts.backward_before, index, group, from_forward)
        saves = np.flatnonzero((self._saved_in == _BEFORE) | (self._saved_in >= first))
        saved = self._saved(saves, index, from_forward)
        set_lifetimes(self._new, run, saved, *self._turnaround_ends[index], ignore=self._ignore)

    # -- parts of these runs ---------------------------------------------------------------------------------

    def _rows(self, pack: Span) -> _PackRows:
        """Return what every micro-batch replays of `pack`."""
        known = self._rows_of.get(pack)
        if known is None:
            parts, inside = self._parts, (self._saved_in >= pack[0]) & (self._saved_in < pack[1])
            known = self._rows_of[pack] = _PackRows(
                parts.forward_of(pack),
                parts.backward_of(pack),
                self._from_forward(pack),
                np.flatnonzero(inside),
            )
        return known

    def _from_forward(self, pack: Span) -> RowMask:
        """Return (m,) storages that `pack` reads from a forward run, because it does not recompute them."""
        # The turnaround recomputes the prologue; other packs do not.
        before = self._packs.turnaround[0] > pack[0]
        others = (self._made_in >= 0) & (self._made_in < len(self._step.blocks))
        others &= (self._made_in < pack[0]) | (self._made_in >= pack[1])
        found: RowMask = others | ((self._made_in == _BEFORE) & before)
        return found

    def _saved(self, rows: RowIndex, index: int, from_forward: RowMask) -> tuple[I32, I32]:
        """Return the new storages of the saves `rows`, and the op after which autograd frees each."""
        step = self._step
        numbers = self._new.number(
            step.saves.storage[rows], self._made[index], self._forward_made[index], from_forward
        )
        return numbers, step.saves.held_until[rows]

    def _run_backward(
        self, run: RowRun, rows: RowIndex, index: int, group: range, from_forward: RowMask
    ) -> None:
        """Replay backward rows."""
        # In the last micro-batch of a group the blocks' gradients are offloaded when ready.
        gradients, made, forward_made = self._gradients, self._made[index], self._forward_made[index]
        cut = self._cut(rows, index, group)
        given = made[cut.given]

        def start_sum(parameter: int) -> None:
            gradients.start_sum(parameter, int(made[gradients.raw(parameter)]))

        def add_part(part: int) -> None:
            gradients.add_part(self._tied[part], int(made[part]))

        def offload(parameter: int) -> None:
            if parameter in cut.starts:
                start_sum(parameter)
            gradients.offload(parameter)

        stops = [
            Stop(end, functools.partial(add_part if is_part else offload, key))
            for end, key, is_part in cut.stops
        ]
        self._new.append_rows(run, cut.rows, made, forward_made, from_forward, stops=stops)
        for parameter in cut.starts - cut.offloaded:
            start_sum(parameter)
        # The caller of backward holds the gradients that it starts from.
        self._new.hold(given, self._new.n_ops - 1)

    def _cut(self, rows: RowIndex, index: int, group: range) -> _Cut:
        """Return how micro-batch `index` replays backward `rows`; those in the middle of a group do alike."""
        place = rows.tobytes(), index == 0, index == group[0], index == group[-1]
        if (known := self._cuts.get(place)) is not None:
            return known
        if place[0] not in self._given:
            self._given[place[0]] = self._starting_gradients(rows)
        gradients, tied = self._gradients, set(self._tied.values())
        ready = [each for each in gradients.ready_in(rows) if each not in tied]
        is_outside = gradients.is_outside
        offloaded = [each for each in ready if index == group[-1] and not is_outside[each]]
        after = [(gradients.ready_row(each), each, False) for each in offloaded]
        after += [
            (ready_after(self._step, part), part, True)
            for part in self._tied
            if self._step.storages.producer[part] in rows
        ]
        after.sort(key=lambda each: each[0])
        # The first micro-batch has no sum to add to, and `add_part` replaces the adders of tied weights.
        skipped = np.zeros(self._step.ops.n, bool)
        skipped[skipped_adds(gradients, index, group)] = skipped[self._adders] = True
        kept = rows[~skipped[rows]]
        ends = np.searchsorted(kept, [row for row, _, _ in after], side="right").tolist()
        found = self._cuts[place] = _Cut(
            kept,
            [(end, key, is_part) for end, (_, key, is_part) in zip(ends, after, strict=True)],
            {each for each in ready if index == (0 if is_outside[each] else group[0])},
            set(offloaded),
            self._given[place[0]],
        )
        return found

    def _starting_gradients(self, rows: RowIndex) -> I32:
        """Return the gradients that `rows` start from, made by other backward rows: the caller holds them."""
        step, inside = self._step, np.zeros(self._step.ops.n + 1, bool)
        inside[rows] = True
        used = step.uses.storage[inside[step.uses.op]]
        producer = step.storages.producer[used]
        from_others = (producer >= 0) & ~inside[producer] & (step.ops.phase[producer] == Phase.BACKWARD)
        found: I32 = np.unique(used[from_others & ~self._ignore[used]])
        return found
