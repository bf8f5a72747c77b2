"""Insert the rows of skipped blocks into a step that was recorded without them.

A block's *period* in forward or backward is its rows from its first op to the next block's first op. Four
consecutive blocks are recorded, 0 to 3; the skipped ones belong between 2 and 3. Rows of each table (ops,
storages, uses, saves, …) are numbered in the order in which they were recorded, so:

1. A reference from a block's rows into its own or a neighbour's period is an offset from the start of its own
   period; any other reference is the same for all blocks. A copy of block 2 has the offsets of block 2,
   applied to the copy's start.
2. In forward the copies follow block 2, in backward they precede it.
3. Blocks 1 and 2 must have equal rows in this form, or `BlocksDiffer` is raised. The neighbours of block 1
   are 0 and 2, those of block 2 are 1 and 3: this is the induction step from a block to the next that
   justifies the copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.autotune.record.step_builder import Mark
from memtune.program import FOREVER, I64, Call, Calls, Parameter, Phase, Step, Storages, Table, Uses

# Above every row number and `FOREVER`, and far from the end of int64, so that offsets from it do not
# overflow.
_NEVER = 2**40
# Boundaries of a phase in which a table has no rows: periods of length 0 that no row is near.
_NOWHERE = (_NEVER,) * 5


class BlocksDiffer(Exception):
    """Blocks that should have equal rows do not; the message names the difference."""


@dataclass(frozen=True, eq=False)
class PartialRecording:
    """Forward and backward of a model without some blocks; the last op represents the optimizer."""

    step: Step
    calls: tuple[Call, ...]
    signatures: tuple[str, ...]
    entered: tuple[Mark, ...]
    """Position of the recording when each block began."""
    n_state: int
    """Number of storages that existed before the step; their rows are equal in all recordings."""
    owned: Mapping[str, Sequence[int]]
    """By block name, skipped blocks included: rows of the state that only this block refers to."""
    gradients: tuple[Any, ...] = field(default=())
    """Specification of each parameter's gradient."""


class _Gather(NamedTuple):
    """Source row and block of each new row.

    Blocks: 0 for block 2, 1 … copies, copies + 1 for block 3, -1 for all others.
    """

    row: I64
    copy: I64


@dataclass(frozen=True)
class _RowSpace:
    """Row numbers of one table: start of block 2 in forward and in backward, and the period lengths."""

    forward_start: int
    forward_size: int
    backward_start: int
    backward_size: int
    copies: int
    forward_span: tuple[int, int]
    """First and last + 1 forward row of the four blocks."""
    backward_span: tuple[int, int]
    """First and last + 1 backward row of the four blocks."""

    @staticmethod
    def of(forward: Sequence[int], backward: Sequence[int], copies: int, what: str) -> _RowSpace:
        """Build the space from the boundaries of blocks.

        `forward`: starts of blocks 0, 1, 2, 3 and the end of 3; `backward`: starts of 3, 2, 1, 0 and the end
        of 0.
        """
        (_, one, two, three, _), (_, last, middle, first, _) = forward, backward
        # Block 0 and block 3 may differ (embedding before, head after); only 1 and 2 must be equal.
        if three - two != two - one or last - middle != middle - first or two < one or middle < last:
            raise BlocksDiffer(f"blocks have different numbers of {what}")
        ends = (forward[0], forward[-1]), (backward[0], backward[-1])
        return _RowSpace(two, three - two, last, middle - last, copies, *ends)

    def renumbered(self, rows: I64) -> I64:
        """Return the new numbers of rows that are not in a copy."""
        # Rows behind block 2 move by its copies; those of backward by the copies of both phases.
        more = np.where(rows >= self.forward_start + self.forward_size, self.copies * self.forward_size, 0)
        return rows + more + np.where(rows >= self.backward_start, self.copies * self.backward_size, 0)

    def references(self, rows: I64, copy: I64) -> I64:
        """Return the new references of rows of `copy` that referred to `rows` (rule 1)."""
        # Offsets count from the period that holds the row: block 3's is one after block 2's in forward, one
        # before it in backward.
        last = copy == self.copies + 1
        forward = self.forward_start + last * self.forward_size
        backward = self.backward_start - last * self.backward_size
        in_forward, in_backward = rows - forward, rows - backward
        near, near_back = self._near(rows, in_forward, in_backward)
        near, near_back = near & (copy >= 0), near_back & (copy >= 0)
        # "None" and `FOREVER` are no row numbers.
        found = np.where((rows < 0) | (rows >= FOREVER), rows, self.renumbered(rows))
        found = np.where(near, self.forward_start + copy * self.forward_size + in_forward, found)
        # In backward the copies run in reverse order, and all forward copies precede them.
        inserted = self.copies * (self.forward_size + self.backward_size)
        start = self.backward_start + inserted - copy * self.backward_size
        return np.where(near_back, start + in_backward, found)

    def _near(
        self, rows: I64, in_forward: I64, in_backward: I64
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which rows are in a block's own or a neighbouring period, in forward and backward."""
        near = (
            (in_forward >= -self.forward_size)
            & (in_forward < 2 * self.forward_size)
            # The period before block 0 and the one after block 3 hold embedding and head: one row for all
            # blocks.
            & (rows >= self.forward_span[0])
            & (rows < self.forward_span[1])
        )
        near_back = (
            (in_backward >= -self.backward_size)
            & (in_backward < 2 * self.backward_size)
            & (rows >= self.backward_span[0])
            & (rows < self.backward_span[1])
        )
        return near, near_back

    def relative(self, rows: I64, block: int) -> I64:
        """Return (n, 2) references of block 1 or 2 in comparable form."""
        # The first column is 1 for a forward period, 2 for a backward period, 0 for any other row;
        # the second is the offset from the start of the block's period, or the row itself.
        in_forward = rows - (self.forward_start - (2 - block) * self.forward_size)
        in_backward = rows - (self.backward_start + (2 - block) * self.backward_size)
        near, near_back = self._near(rows, in_forward, in_backward)
        where = np.where(near_back, 2, np.where(near, 1, 0))
        return np.stack([where, np.where(near_back, in_backward, np.where(near, in_forward, rows))], axis=1)

    def own(self, block: int) -> I64:
        """Return the rows of block 1 or 2."""
        forward = self.forward_start - (2 - block) * self.forward_size
        backward = self.backward_start + (2 - block) * self.backward_size
        return np.concatenate(
            [
                np.arange(forward, forward + self.forward_size),
                np.arange(backward, backward + self.backward_size),
            ]
        )

    def gather(self, n: int) -> _Gather:
        """Return the source of all new rows in order (rule 2), for `n` old rows."""
        end, back = self.forward_start + self.forward_size, min(self.backward_start, n)
        between, copies = np.arange(end, back), np.arange(1, self.copies + 1)
        own, own_back = np.arange(self.forward_start, end), np.arange(back, back + self.backward_size)
        # Between the copies: forward of block 3, then head and loss, then backward of block 3.
        is_last = (between < self.forward_span[1]) | (between >= self.backward_span[0])
        rows = [
            np.arange(end),
            np.tile(own, self.copies),
            between,
            np.tile(own_back, self.copies),
            np.arange(back, n),
        ]
        copy = [
            np.full(self.forward_start, -1),
            np.zeros(self.forward_size),
            np.repeat(copies, self.forward_size),
            np.where(is_last, self.copies + 1, -1),
            np.repeat(copies[::-1], self.backward_size),
            np.zeros(self.backward_size),
            np.full(n - back - self.backward_size, -1),
        ]
        return _Gather(np.concatenate(rows), np.concatenate(copy).astype(np.int64))


class BlockExpansion:
    """Inserts copies of a block into a partial recording; `expanded` returns the result."""

    def __init__(self, partial: PartialRecording, block: int, names: Sequence[str]) -> None:
        """Prepare copies `names` after the block with index `block`, which is block 2 of the four."""
        self._partial, self._step, self._at, self._names = partial, partial.step, block, names
        step, at, copies = partial.step, block, len(names)
        if (step.ops.phase == Phase.RECOMPUTE).any():
            raise BlocksDiffer("blocks are recomputed in backward")
        if len(step.calls.block) != len(step.blocks):
            raise BlocksDiffer("a block runs more than once per step")
        if len({len(partial.owned[name]) for name in (*step.blocks[at - 1 : at + 1], *names)}) > 1:
            raise BlocksDiffer("blocks have different numbers of parameters, buffers and optimizer state")
        forward = [*step.forward_starts[at - 2 : at + 2].tolist(), int(step.forward_ends[at + 1]) + 1]
        backward = [_backward_range(step, block)[0] for block in (at + 1, at, at - 1, at - 2)] + [
            _backward_range(step, at - 2)[1]
        ]
        self._ops = _RowSpace.of(forward, backward, copies, "ops")
        self._storages = self._space(self._birth(), forward, backward, "storages")
        self._uses = self._space(step.uses.op, forward, backward, "uses")
        marks = partial.entered[at - 2 : at + 2]
        # Saved tensors and autograd nodes are made in forward only.
        saves = [*(each.saves for each in marks), int(np.searchsorted(step.saves.packed_before, forward[-1]))]
        self._saves = _RowSpace.of(saves, _NOWHERE, copies, "saved tensors")
        self._nodes = _RowSpace.of(
            [*(each.nodes for each in marks), _NEVER], _NOWHERE, copies, "autograd nodes"
        )
        # Only tensors that backward asks for have a place in the order of unpacking.
        asked = np.sort(step.saves.unpacked_before[step.saves.unpack_order >= 0])
        self._unpack_order = self._space(asked, None, backward, "saved tensors that are used")
        self._grads = self._space(
            step.storages.grad_ready_after[step.grad_order], None, backward, "gradients"
        )
        # One row per block, so that its "period" is one row.
        blocks = [*range(at - 2, at + 3)]
        self._inputs = self._space(step.calls.input_block, blocks, None, "inputs")
        self._blocks = _RowSpace.of(blocks, _NOWHERE, copies, "blocks")
        firsts = np.asarray([call.ops[0] for call in partial.calls], np.int64)
        self._calls = self._space(firsts, forward, None, "calls")
        self._modules, self._module_names = self._module_space()

    def _space(
        self,
        where: npt.NDArray[Any],
        forward: Sequence[int] | None,
        backward: Sequence[int] | None,
        what: str,
    ) -> _RowSpace:
        """Return the row space of a table sorted by `where`; None means no rows in that phase."""
        in_forward = [0] * 5 if forward is None else np.searchsorted(where, forward).tolist()
        in_backward = _NOWHERE if backward is None else np.searchsorted(where, backward).tolist()
        return _RowSpace.of(in_forward, in_backward, len(self._names), what)

    def _birth(self) -> I64:
        """Return (m,) op at which each storage first appears, -1 for state.

        Ascending, as storages are numbered.
        """
        step, n_state = self._step, self._partial.n_state
        birth = step.storages.producer.astype(np.int64)
        # A storage that no op makes, such as the batch, appears with its first use.
        seen = np.full(step.storages.n, _NEVER)
        np.minimum.at(seen, step.uses.storage, step.uses.op)
        birth = np.where(birth < 0, seen, birth)
        birth[:n_state] = -1
        if (np.diff(birth) < 0).any() or (birth == _NEVER).any():
            raise BlocksDiffer("blocks use a tensor that was created outside of the step")
        return birth

    def _module_space(self) -> tuple[_RowSpace, list[str]]:
        modules, at, blocks = self._step.modules, self._at, self._step.blocks
        first = []
        for name in blocks[at - 1 : at + 1]:
            rows = [i for i, each in enumerate(modules) if _inside(each, name)]
            # Modules are numbered at their first call, so those of a block follow one another.
            if not rows or rows != list(range(rows[0], rows[-1] + 1)):
                raise BlocksDiffer("modules of blocks run in different orders")
            first += [rows[0], rows[-1] + 1]
        space = _RowSpace.of(
            [0, first[0], first[2], first[3], len(modules)], _NOWHERE, len(self._names), "modules"
        )
        own = modules[first[2] : first[3]]
        if [each[len(blocks[at]) :] for each in own] != [
            each[len(blocks[at - 1]) :] for each in modules[first[0] : first[1]]
        ]:
            raise BlocksDiffer("blocks have different modules")
        copies = [name + each[len(blocks[at]) :] for name in self._names for each in own]
        return space, [*modules[: first[3]], *copies, *modules[first[3] :]]

    # -- the copies ------------------------------------------------------------------------------------------

    def expanded(self) -> PartialRecording:
        """Return the recording with the copies inserted.

        Raises:
            BlocksDiffer: The recorded blocks are not equal (rule 3).
        """
        self._check()
        step, at = self._step, self._at
        blocks = (*step.blocks[: at + 1], *self._names, *step.blocks[at + 1 :])
        gather = self._blocks.gather(len(step.blocks) + 1)
        row_of = self._gather("storages").row
        inputs = replace(step.calls.inputs, **self._expanded_columns("inputs"))
        new = replace(
            step,
            modules=tuple(self._module_names),
            blocks=blocks,
            parameters=tuple(self._expanded_parameters(blocks)),
            ops=replace(step.ops, **self._expanded_columns("ops")),
            storages=replace(step.storages, **self._expanded_columns("storages")),
            uses=replace(step.uses, **self._expanded_columns("uses")),
            saves=replace(step.saves, **self._expanded_columns("saves")),
            calls=Calls(
                np.arange(len(blocks), dtype=np.int32), step.calls.grad_enabled[gather.row[:-1]], inputs
            ),
            block_outputs=tuple(step.block_outputs[row] for row in gather.row[:-1].tolist()),
            forward_starts=self._ops.references(
                step.forward_starts[gather.row].astype(np.int64), gather.copy
            ).astype(np.int32),
            forward_ends=self._ops.references(
                step.forward_ends[gather.row].astype(np.int64), gather.copy
            ).astype(np.int32),
            grad_order=self._expanded_columns("grads")["grad_order"],
            returned=np.sort(self._storages.renumbered(step.returned.astype(np.int64))).astype(np.int32),
            partly_written=np.flatnonzero(np.isin(row_of, step.partly_written)).astype(np.int32),
            read_by_host=np.flatnonzero(np.isin(row_of, step.read_by_host)).astype(np.int32),
        )
        ops = self._gather("ops")
        marks = [self._partial.entered[row] for row in gather.row[:-1]]
        saves = self._saves.references(np.asarray([each.saves for each in marks]), gather.copy[:-1]).tolist()
        nodes = self._nodes.references(np.asarray([each.nodes for each in marks]), gather.copy[:-1]).tolist()
        return replace(
            self._partial,
            step=new,
            calls=tuple(self._expanded_calls()),
            signatures=tuple(self._partial.signatures[row] for row in ops.row),
            entered=tuple(
                Mark(int(new.forward_starts[i]), node, save)
                for i, (node, save) in enumerate(zip(nodes, saves, strict=True))
            ),
        )

    def _tables(self) -> dict[str, tuple[_RowSpace, dict[str, tuple[npt.NDArray[Any], _RowSpace | None]]]]:
        """Return each table's row space, its columns, and the row space that a column refers to (or None)."""
        step, ops, storages, blocks = self._step, self._ops, self._storages, self._blocks
        refer: dict[str, tuple[_RowSpace, Table, dict[str, _RowSpace]]] = {
            "ops": (ops, step.ops, {"module": self._modules, "call": blocks, "sequence_nr": self._nodes}),
            "storages": (
                storages,
                step.storages,
                dict.fromkeys(("producer", "held_until", "grad_ready_after"), ops),
            ),
            "uses": (self._uses, step.uses, {"op": ops, "storage": storages}),
            "saves": (
                self._saves,
                step.saves,
                dict.fromkeys(("packed_before", "held_until", "used_until", "unpacked_before"), ops)
                | {"storage": storages, "unpack_order": self._unpack_order, "call": blocks},
            ),
            "inputs": (self._inputs, step.calls.inputs, {"call": blocks, "storage": storages}),
        }
        tables: dict[str, tuple[_RowSpace, dict[str, tuple[npt.NDArray[Any], _RowSpace | None]]]] = {
            name: (space, {column: (values, of.get(column)) for column, values in table.columns().items()})
            for name, (space, table, of) in refer.items()
        }
        return tables | {"grads": (self._grads, {"grad_order": (step.grad_order, storages)})}

    def _gather(self, table: str) -> _Gather:
        space, columns = self._tables()[table]
        return space.gather(len(next(iter(columns.values()))[0]))

    def _expanded_columns(self, table: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        gather = self._gather(table)
        for name, (old, space) in self._tables()[table][1].items():
            made[name] = old[gather.row]
            if space is not None:
                rows = space.references(made[name].astype(np.int64), gather.copy)
                made[name] = (self._own_state(rows, gather.copy) if space is self._storages else rows).astype(
                    old.dtype
                )
        return made

    def _own_state(self, rows: I64, copy: I64) -> I64:
        """Return `rows` of storages with block 2's own state replaced by that of each copy."""
        mine = np.asarray(self._partial.owned[self._step.blocks[self._at]], np.int64)
        place = np.full(self._partial.n_state + 1, -1, np.int64)
        place[mine] = np.arange(len(mine))
        theirs = np.asarray(
            [self._partial.owned[name] for name in (self._step.blocks[self._at], *self._names)], np.int64
        )
        # The last entry of `place` represents all storages that are no state.
        at = place[np.minimum(rows, self._partial.n_state)]
        copied = (at >= 0) & (copy >= 1) & (copy <= len(self._names))
        return (
            np.where(copied, theirs[np.where(copied, copy, 0), np.where(copied, at, 0)], rows)
            if len(mine)
            else rows
        )

    def _expanded_parameters(self, blocks: Sequence[str]) -> list[Parameter]:
        step, at = self._step, self._at
        number = {name: i for i, name in enumerate(blocks)}
        gradients = {
            each.name[len(blocks[at]) :]: each.gradient
            for each in step.parameters
            if _inside(each.name, blocks[at])
        }
        found, copies = [], []
        for each in step.parameters:
            # Parameters of skipped blocks were there while recording, but no op ran that would have made
            # their gradient.
            skipped = next(
                (
                    name
                    for name in _ancestors(each.name)
                    if at < number.get(name, -1) <= at + len(self._names)
                ),
                None,
            )
            if skipped is not None:
                each = each._replace(
                    gradient=gradients.get(each.name[len(skipped) :], -1), block=number[skipped]
                )
            elif each.block >= 0:
                each = each._replace(block=number[step.blocks[each.block]])
            found.append(each)
            # A gradient's number is that of its copy; those of other parameters only move.
            copies.append(each.block - at if at <= each.block <= at + len(self._names) else -1)
        seen = self._storages.references(
            np.asarray([each.gradient for each in found], np.int64), np.asarray(copies, np.int64)
        )
        return [each._replace(gradient=gradient) for each, gradient in zip(found, seen.tolist(), strict=True)]

    def _expanded_calls(self) -> list[Call]:
        gather = self._calls.gather(len(self._partial.calls))
        made = []
        for row, copy in zip(gather.row.tolist(), gather.copy.tolist(), strict=True):
            call = self._partial.calls[row]
            storages = self._references(self._storages, (*call.inputs, call.output), copy)
            made.append(
                replace(
                    call,
                    ops=self._references(self._ops, call.ops, copy),
                    nodes=self._references(self._nodes, call.nodes, copy),
                    saves=self._references(self._saves, call.saves, copy),
                    inputs=storages[:-1],
                    output=storages[-1],
                )
            )
        return made

    def _references(self, space: _RowSpace, rows: Sequence[int], copy: int) -> Any:
        copies = np.full(len(rows), copy)
        seen = space.references(np.asarray(rows, np.int64), copies)
        return tuple((self._own_state(seen, copies) if space is self._storages else seen).tolist())

    # -- the check -------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise `BlocksDiffer` if the rows of blocks 1 and 2 are not equal (rule 3)."""
        step, at = self._step, self._at
        state = [self._state_index(step.blocks[block]) for block in (at - 1, at)]
        for table, (space, columns) in self._tables().items():
            rows = [space.own(block) for block in (1, 2)]
            for name, (column, refers) in columns.items():
                values = [column[each] for each in rows]
                if refers is not None:
                    values = [
                        refers.relative(value.astype(np.int64), block)
                        for block, value in zip((1, 2), values, strict=True)
                    ]
                if refers is self._storages:
                    values = [
                        _with_state_index(value, place) for value, place in zip(values, state, strict=True)
                    ]
                # The owner is set from names afterwards (`with_optimizer`).
                if name != "owner" and not np.array_equal(values[0], values[1]):
                    raise BlocksDiffer(f"blocks differ in {table}.{name}")
        rows = [self._ops.own(block).tolist() for block in (1, 2)]
        if [self._partial.signatures[row] for row in rows[0]] != [
            self._partial.signatures[row] for row in rows[1]
        ]:
            raise BlocksDiffer("ops of blocks have different arguments")
        calls = [[self._partial.calls[row] for row in self._calls.own(block)] for block in (1, 2)]
        what = [[(each.kind, each.shapes, each.dtype, dict(each.options)) for each in some] for some in calls]
        if what[0] != what[1]:
            raise BlocksDiffer("blocks call attention or dropout with different arguments")

    def _state_index(self, block: str) -> I64:
        place = np.full(self._partial.n_state + 1, -1, np.int64)
        owned = list(self._partial.owned[block])
        place[owned] = np.arange(len(owned))
        return place


def _with_state_index(relative: I64, place: I64) -> I64:
    """Return references to storages, with a block's own state by index to make blocks comparable."""
    at = np.where(relative[:, 0] == 0, place[np.clip(relative[:, 1], 0, len(place) - 1)], -1)
    return np.where((at >= 0)[:, None], np.stack([np.full(len(at), 3), at], axis=1), relative)


def _backward_range(step: Step, block: int) -> tuple[int, int]:
    """Return first and last + 1 op of a block's backward."""
    rows = np.flatnonzero((step.ops.block == block) & (step.ops.phase == Phase.BACKWARD))
    if not len(rows):
        raise BlocksDiffer("they have no backward")
    return int(rows[0]), int(rows[-1]) + 1


def _ancestors(name: str) -> list[str]:
    """Return the names of the modules that contain a parameter, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _inside(name: str, block: str) -> bool:
    return name == block or name.startswith(block + ".")


def _owners(partial: PartialRecording, full: Step, made: int) -> npt.NDArray[np.int32]:
    """Return the parameters that own the storages of `partial` and those of `full` from row `made` on."""
    step = partial.step
    unowned = np.full(step.storages.n - partial.n_state, -1)
    owner = np.concatenate(
        [full.storages.owner[: partial.n_state], unowned, full.storages.owner[made:]]
    ).astype(np.int32)
    for i, parameter in enumerate(step.parameters):
        if parameter.gradient >= 0:
            owner[parameter.gradient] = i
    return owner


def with_optimizer(partial: PartialRecording, full: Step) -> Step:
    """Return the step of `partial` with the optimizer phase of `full` instead of its last op.

    `full` is a full recording of the same session.

    Raises:
        BlocksDiffer: The optimizer reads tensors of forward or backward other than gradients.
    """
    step, n = partial.step, partial.step.ops.n - 1
    first = int(np.searchsorted(full.ops.phase == Phase.OPTIMIZER, True))
    # Storages are numbered by first appearance, so the optimizer's are a suffix.
    made = int(np.searchsorted(np.maximum.accumulate(full.storages.producer), first))
    # The full recording has another number of ops before its optimizer.
    later = first - n
    storage = np.full(full.storages.n, -1)
    storage[: partial.n_state] = np.arange(partial.n_state)
    for mine, theirs in zip(step.parameters, full.parameters, strict=True):
        storage[theirs.gradient] = mine.gradient if theirs.gradient >= 0 else storage[theirs.gradient]
    # -1 remains for what forward and backward make, gradients excepted.
    storage[made:] = np.arange(full.storages.n - made) + step.storages.n
    uses = full.uses.op >= first
    if (storage[full.uses.storage[uses]] < 0).any():
        raise BlocksDiffer("the optimizer reads tensors other than gradients")
    n_ops = n + full.ops.n - first
    names = [
        *(step.names[i] for i in step.ops.name[:n].tolist()),
        *(full.names[i] for i in full.ops.name[first:].tolist()),
    ]
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}

    # Held "until the last op" means until the end of the step, which is now later.
    def until(rows: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        return np.where(rows == n, n_ops - 1, rows).astype(np.int32)

    def shifted(rows: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        return np.where((rows < 0) | (rows == FOREVER), rows, rows - later).astype(np.int32)

    held = np.concatenate([until(step.storages.held_until), shifted(full.storages.held_until[made:])])
    ops: dict[str, Any] = {
        name: np.concatenate([column[:n], getattr(full.ops, name)[first:]])
        for name, column in step.ops.columns().items()
    }
    ops["name"] = np.asarray([number[name] for name in names], np.int32)
    storages: dict[str, Any] = {
        name: np.concatenate([column, getattr(full.storages, name)[made:]])
        for name, column in step.storages.columns().items()
    }
    storages["producer"] = np.concatenate([step.storages.producer, shifted(full.storages.producer[made:])])
    storages["held_until"] = held
    storages["owner"] = _owners(partial, full, made)
    new = replace(
        step,
        names=tuple(number),
        ops=replace(step.ops, **ops),
        storages=Storages(**storages),
        uses=Uses(
            op=np.concatenate([step.uses.op, shifted(full.uses.op[uses])]),
            storage=np.concatenate([step.uses.storage, storage[full.uses.storage[uses]].astype(np.int32)]),
            mode=np.concatenate([step.uses.mode, full.uses.mode[uses]]),
        ),
        saves=replace(
            step.saves, held_until=until(step.saves.held_until), used_until=until(step.saves.used_until)
        ),
    )
    new.validate()
    return new
