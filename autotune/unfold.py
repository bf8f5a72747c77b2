"""A step that was recorded without some of its equal blocks, with the rows of those blocks written in.

A *period* is what belongs to one block: in forward from its first op to the next block's, in backward likewise. Four blocks in a
row are recorded, 0 to 3; those that were left out stood between 2 and 3. Rows of every sort (ops, storages, uses, saves, …) are
numbered as they come, so:

1. What a block's rows say of its own and its neighbours' periods is a distance from where its own period begins. What they say of
   anything else is the same for all blocks. The copies of block 2 say what it says, from where they begin.
2. In forward copies come after block 2, in backward before it.
3. Blocks 1 and 2 must say the same (`Unlike` is raised where they do not). As the neighbours of block 1 are 0 and 2, those of
   block 2 are 1 and 3, this is the step from one block to the next on which the copies rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.autotune.rows import Mark
from memtune.program import FOREVER, I64, Call, Parameter, Phase, Step

_NEVER = 2**40
_NOWHERE = (_NEVER,) * 5


class Unlike(Exception):
    """Blocks that should be the same are not; the message says in what."""


@dataclass(frozen=True, eq=False)
class Short:
    """Forward and backward of a model without some of its blocks; the last op stands for the optimizer's phase."""

    step: Step
    calls: tuple[Call, ...]
    signatures: tuple[str, ...]
    entered: tuple[Mark, ...]
    """How far the recording had come when each block began."""
    n_state: int
    """Storages that were there before the step; their rows are the same in every recording of a session."""
    owned: Mapping[str, Sequence[int]]
    """Rows of the state that each block holds alone, by the block's name, those that were left out too."""
    gradients: tuple[Any, ...] = field(default=())
    """What the optimizer sees of each parameter's gradient."""


class _Gather(NamedTuple):
    """Where each new row comes from, and whose it is: 0 block 2, 1 … copies, copies + 1 block 3, -1 all others."""

    row: I64
    copy: I64


@dataclass(frozen=True)
class _Space:
    """How rows of one sort are numbered: where block 2 has its own, in forward and in backward, and how many."""

    forward: int
    size: int
    backward: int
    back: int
    copies: int
    ahead: tuple[int, int]
    """From where to where the four blocks have rows in forward …"""
    behind: tuple[int, int]
    """… and in backward."""

    @staticmethod
    def of(forward: Sequence[int], backward: Sequence[int], copies: int, what: str) -> _Space:
        """From where blocks 0, 1, 2, 3 begin in forward and 3 ends, and where 3, 2, 1, 0 begin in backward and 0 ends."""
        (_, one, two, three, _), (_, last, middle, first, _) = forward, backward
        if three - two != two - one or last - middle != middle - first or two < one or middle < last:
            raise Unlike(f"they have other numbers of {what}")
        ends = (forward[0], forward[-1]), (backward[0], backward[-1])
        return _Space(two, three - two, last, middle - last, copies, *ends)

    def moved(self, rows: I64) -> I64:
        """Where rows are that are no copies."""
        more = np.where(rows >= self.forward + self.size, self.copies * self.size, 0)
        return rows + more + np.where(rows >= self.backward, self.copies * self.back, 0)

    def seen(self, rows: I64, copy: I64) -> I64:
        """What rows of `copy` refer to by `rows` (rule 1)."""
        last = copy == self.copies + 1
        forward, backward = self.forward + last * self.size, self.backward - last * self.back
        ahead, behind = rows - forward, rows - backward
        near, near_back = self._near(rows, ahead, behind)
        near, near_back = near & (copy >= 0), near_back & (copy >= 0)
        found = np.where((rows < 0) | (rows >= FOREVER), rows, self.moved(rows))
        found = np.where(near, self.forward + copy * self.size + ahead, found)
        there = self.backward + self.copies * (self.size + self.back) - copy * self.back + behind
        return np.where(near_back, there, found)

    def _near(self, rows: I64, ahead: I64, behind: I64) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which rows are in a period next to a block or its own, forward and backward, by how far they are from its own."""
        near = (ahead >= -self.size) & (ahead < 2 * self.size) & (rows >= self.ahead[0]) & (rows < self.ahead[1])
        near_back = (behind >= -self.back) & (behind < 2 * self.back) & (rows >= self.behind[0]) & (rows < self.behind[1])
        return near, near_back

    def said(self, rows: I64, block: int) -> I64:
        """(n, 2) what block 1 or 2 says by `rows`: of which period, and the distance."""
        ahead = rows - (self.forward - (2 - block) * self.size)
        behind = rows - (self.backward + (2 - block) * self.back)
        near, near_back = self._near(rows, ahead, behind)
        where = np.where(near_back, 2, np.where(near, 1, 0))
        return np.stack([where, np.where(near_back, behind, np.where(near, ahead, rows))], axis=1)

    def own(self, block: int) -> I64:
        """Rows of block 1 or 2."""
        forward, backward = self.forward - (2 - block) * self.size, self.backward + (2 - block) * self.back
        return np.concatenate([np.arange(forward, forward + self.size), np.arange(backward, backward + self.back)])

    def gather(self, n: int) -> _Gather:
        """All new rows in order (rule 2), from `n` rows."""
        end, back = self.forward + self.size, min(self.backward, n)
        between, copies = np.arange(end, back), np.arange(1, self.copies + 1)
        own, own_back = np.arange(self.forward, end), np.arange(back, back + self.back)
        is_last = (between < self.ahead[1]) | (between >= self.behind[0])
        rows = [
            np.arange(end), np.tile(own, self.copies), between, np.tile(own_back, self.copies), np.arange(back, n),
        ]  # fmt: skip
        whose = [
            np.full(self.forward, -1), np.zeros(self.size), np.repeat(copies, self.size),
            np.where(is_last, self.copies + 1, -1), np.repeat(copies[::-1], self.back), np.zeros(self.back),
            np.full(n - back - self.back, -1),
        ]  # fmt: skip
        return _Gather(np.concatenate(rows), np.concatenate(whose).astype(np.int64))


class Unfolding:
    """Writes copies of a block into a short recording; `done` has the result."""

    def __init__(self, short: Short, before: int, names: Sequence[str]) -> None:
        """Prepare to write `names` behind the block of number `before`, which is block 2 of four."""
        self._short, self._step, self._at, self._names = short, short.step, before, names
        step, at, copies = short.step, before, len(names)
        if (step.op_phase == Phase.RECOMPUTE).any():
            raise Unlike("something runs again in backward")
        if len(step.call_block) != len(step.blocks):
            raise Unlike("a block runs more than once")
        if len({len(short.owned[name]) for name in (*step.blocks[at - 1 : at + 1], *names)}) > 1:
            raise Unlike("they do not hold the same state")
        forward = [*step.enter[at - 2 : at + 2].tolist(), int(step.leave[at + 1]) + 1]
        backward = [_backward(step, block)[0] for block in (at + 1, at, at - 1, at - 2)] + [_backward(step, at - 2)[1]]
        self._ops = _Space.of(forward, backward, copies, "ops")
        self._storages = self._by(self._birth(), forward, backward, "storages")
        self._uses = self._by(step.use_op, forward, backward, "uses")
        marks = short.entered[at - 2 : at + 2]
        saves = [*(each.saves for each in marks), int(np.searchsorted(step.save_before, forward[-1]))]
        self._saves = _Space.of(saves, _NOWHERE, copies, "saved tensors")
        self._nodes = _Space.of([*(each.nodes for each in marks), _NEVER], _NOWHERE, copies, "autograd nodes")
        asked = np.sort(step.save_asked[step.save_turn >= 0])
        self._turns = self._by(asked, None, backward, "saved tensors that are used")
        self._landing = self._by(step.ready_after[step.landing], None, backward, "gradients")
        blocks = [*range(at - 2, at + 3)]
        self._inputs = self._by(step.input_block, blocks, None, "inputs")
        self._blocks = _Space.of(blocks, _NOWHERE, copies, "blocks")
        firsts = np.asarray([call.ops[0] for call in short.calls], np.int64)
        self._calls = self._by(firsts, forward, None, "calls")
        self._modules, self._module_names = self._module_space()

    def _by(self, where: npt.NDArray[Any], forward: Sequence[int] | None, backward: Sequence[int] | None, what: str) -> _Space:
        """The space of rows that are sorted by `where`."""
        ahead = [0] * 5 if forward is None else np.searchsorted(where, forward).tolist()
        behind = _NOWHERE if backward is None else np.searchsorted(where, backward).tolist()
        return _Space.of(ahead, behind, len(self._names), what)

    def _birth(self) -> I64:
        """(m,) op at which each storage is first seen, -1 for the state; as they are numbered."""
        step, n_state = self._step, self._short.n_state
        birth = step.producer.astype(np.int64)
        seen = np.full(step.n_storages, _NEVER)
        np.minimum.at(seen, step.use_storage, step.use_op)
        birth = np.where(birth < 0, seen, birth)
        birth[:n_state] = -1
        if (np.diff(birth) < 0).any() or (birth == _NEVER).any():
            raise Unlike("a tensor from outside of the step is in their way")
        return birth

    def _module_space(self) -> tuple[_Space, list[str]]:
        modules, at, blocks = self._step.modules, self._at, self._step.blocks
        first = []
        for name in blocks[at - 1 : at + 1]:
            rows = [i for i, each in enumerate(modules) if _inside(each, name)]
            if not rows or rows != list(range(rows[0], rows[-1] + 1)):
                raise Unlike("their modules run in another order")
            first += [rows[0], rows[-1] + 1]
        space = _Space.of([0, first[0], first[2], first[3], len(modules)], _NOWHERE, len(self._names), "modules")
        own = modules[first[2] : first[3]]
        if [each[len(blocks[at]) :] for each in own] != [each[len(blocks[at - 1]) :] for each in modules[first[0] : first[1]]]:
            raise Unlike("they have other modules")
        copies = [name + each[len(blocks[at]) :] for name in self._names for each in own]
        return space, [*modules[: first[3]], *copies, *modules[first[3] :]]

    # -- the copies --------------------------------------------------------------------------------------------------

    def done(self) -> Short:
        """The recording with the copies in it.

        Raises:
            Unlike: The blocks that were recorded are not the same (rule 3).
        """
        self._check()
        step, at = self._step, self._at
        blocks = (*step.blocks[: at + 1], *self._names, *step.blocks[at + 1 :])
        whose = self._blocks.gather(len(step.blocks) + 1)
        columns: dict[str, Any] = self._columns()
        row_of = self._gather("storages").row
        new = replace(
            step,
            modules=tuple(self._module_names),
            blocks=blocks,
            call_block=np.arange(len(blocks), dtype=np.int32),
            call_grad=step.call_grad[whose.row[:-1]],
            parameters=tuple(self._parameters(blocks)),
            block_outputs=tuple(step.block_outputs[row] for row in whose.row[:-1].tolist()),
            enter=self._ops.seen(step.enter[whose.row].astype(np.int64), whose.copy).astype(np.int32),
            leave=self._ops.seen(step.leave[whose.row].astype(np.int64), whose.copy).astype(np.int32),
            returned=np.sort(self._storages.moved(step.returned.astype(np.int64))).astype(np.int32),
            written_parts=np.flatnonzero(np.isin(row_of, step.written_parts)).astype(np.int32),
            looked_at=np.flatnonzero(np.isin(row_of, step.looked_at)).astype(np.int32),
            **columns,
        )
        ops = self._gather("ops")
        marks = [self._short.entered[row] for row in whose.row[:-1]]
        saves = self._saves.seen(np.asarray([each.saves for each in marks]), whose.copy[:-1]).tolist()
        nodes = self._nodes.seen(np.asarray([each.nodes for each in marks]), whose.copy[:-1]).tolist()
        return replace(
            self._short,
            step=new,
            calls=tuple(self._written_calls()),
            signatures=tuple(self._short.signatures[row] for row in ops.row),
            entered=tuple(Mark(int(new.enter[i]), node, save) for i, (node, save) in enumerate(zip(nodes, saves, strict=True))),
        )

    def _tables(self) -> dict[str, tuple[_Space, dict[str, _Space | None]]]:
        """Which columns are rows of which space, and what their values refer to."""
        ops, storages, blocks = self._ops, self._storages, self._blocks
        plain = ["name", "phase", "resource", "flops", "traffic_bytes", "rng", "group", "copy_of", "stream", "prefetch", "match"]
        plain.append("by_element")
        own = dict.fromkeys(f"op_{name}" for name in plain)
        return {
            "ops": (ops, {**own, "op_module": self._modules, "op_call": blocks, "op_node": self._nodes}),
            "storages": (
                storages,
                dict.fromkeys(("bytes", "tier", "kind", "owner")) | dict.fromkeys(("producer", "held_until", "ready_after"), ops),
            ),
            "uses": (self._uses, {"use_op": ops, "use_storage": storages, "use_mutates": None}),
            "saves": (
                self._saves,
                {
                    "save_storage": storages, "save_before": ops, "save_until": ops, "save_used_until": ops,
                    "save_asked": ops, "save_turn": self._turns, "save_is_output": None, "save_call": blocks,
                },
            ),
            "landing": (self._landing, {"landing": storages}),
            "inputs": (self._inputs, {"input_call": blocks, "input_storage": storages}),
        }  # fmt: skip

    def _gather(self, table: str) -> _Gather:
        space, columns = self._tables()[table]
        return space.gather(len(getattr(self._step, next(iter(columns)))))

    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        made = {}
        for table, (_, columns) in self._tables().items():
            gather = self._gather(table)
            for name, space in columns.items():
                old = getattr(self._step, name)
                made[name] = old[gather.row]
                if space is not None:
                    rows = space.seen(made[name].astype(np.int64), gather.copy)
                    made[name] = (self._state(rows, gather.copy) if space is self._storages else rows).astype(old.dtype)
        return made

    def _state(self, rows: I64, copy: I64) -> I64:
        """`rows` of storages, with what is block 2's own state made the copies'."""
        mine = np.asarray(self._short.owned[self._step.blocks[self._at]], np.int64)
        place = np.full(self._short.n_state + 1, -1, np.int64)
        place[mine] = np.arange(len(mine))
        theirs = np.asarray([self._short.owned[name] for name in (self._step.blocks[self._at], *self._names)], np.int64)
        at = place[np.minimum(rows, self._short.n_state)]
        copied = (at >= 0) & (copy >= 1) & (copy <= len(self._names))
        return np.where(copied, theirs[np.where(copied, copy, 0), np.where(copied, at, 0)], rows) if len(mine) else rows

    def _parameters(self, blocks: Sequence[str]) -> list[Parameter]:
        step, at = self._step, self._at
        number = {name: i for i, name in enumerate(blocks)}
        gradients = {each.name[len(blocks[at]) :]: each.gradient for each in step.parameters if _inside(each.name, blocks[at])}
        found, copies = [], []
        for each in step.parameters:
            left_out = next((name for name in _above(each.name) if at < number.get(name, -1) <= at + len(self._names)), None)
            if left_out is not None:
                each = each._replace(gradient=gradients.get(each.name[len(left_out) :], -1), block=number[left_out])
            elif each.block >= 0:
                each = each._replace(block=number[step.blocks[each.block]])
            found.append(each)
            copies.append(each.block - at if at <= each.block <= at + len(self._names) else -1)
        seen = self._storages.seen(np.asarray([each.gradient for each in found], np.int64), np.asarray(copies, np.int64))
        return [each._replace(gradient=gradient) for each, gradient in zip(found, seen.tolist(), strict=True)]

    def _written_calls(self) -> list[Call]:
        gather = self._calls.gather(len(self._short.calls))
        made = []
        for row, whose in zip(gather.row.tolist(), gather.copy.tolist(), strict=True):
            call = self._short.calls[row]
            storages = self._of(self._storages, (*call.inputs, call.output), whose)
            made.append(
                replace(
                    call,
                    ops=self._of(self._ops, call.ops, whose),
                    nodes=self._of(self._nodes, call.nodes, whose),
                    saves=self._of(self._saves, call.saves, whose),
                    inputs=storages[:-1],
                    output=storages[-1],
                )
            )
        return made

    def _of(self, space: _Space, rows: Sequence[int], copy: int) -> Any:
        copies = np.full(len(rows), copy)
        seen = space.seen(np.asarray(rows, np.int64), copies)
        return tuple((self._state(seen, copies) if space is self._storages else seen).tolist())

    # -- the check ---------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise where blocks 1 and 2 do not say the same."""
        step, at = self._step, self._at
        state = [self._numbered(step.blocks[block]) for block in (at - 1, at)]
        for space, columns in self._tables().values():
            rows = [space.own(block) for block in (1, 2)]
            for name, refers in columns.items():
                values = [getattr(step, name)[each] for each in rows]
                if refers is not None:
                    values = [refers.said(value.astype(np.int64), block) for block, value in zip((1, 2), values, strict=True)]
                if refers is self._storages:
                    values = [_named(value, place) for value, place in zip(values, state, strict=True)]
                if name != "owner" and not np.array_equal(values[0], values[1]):
                    raise Unlike(f"they differ in {name}")
        rows = [self._ops.own(block).tolist() for block in (1, 2)]
        if [self._short.signatures[row] for row in rows[0]] != [self._short.signatures[row] for row in rows[1]]:
            raise Unlike("their ops have other arguments")
        calls = [[self._short.calls[row] for row in self._calls.own(block)] for block in (1, 2)]
        what = [[(each.kind, each.shapes, each.dtype, dict(each.options)) for each in some] for some in calls]
        if what[0] != what[1]:
            raise Unlike("they call attention or dropout otherwise")

    def _numbered(self, block: str) -> I64:
        place = np.full(self._short.n_state + 1, -1, np.int64)
        owned = list(self._short.owned[block])
        place[owned] = np.arange(len(owned))
        return place


def _named(said: I64, place: I64) -> I64:
    """`said` of storages, with a block's own state by its place."""
    at = np.where(said[:, 0] == 0, place[np.clip(said[:, 1], 0, len(place) - 1)], -1)
    return np.where((at >= 0)[:, None], np.stack([np.full(len(at), 3), at], axis=1), said)


def _backward(step: Step, block: int) -> tuple[int, int]:
    """Where a block's backward begins and ends."""
    rows = np.flatnonzero((step.op_block == block) & (step.op_phase == Phase.BACKWARD))
    if not len(rows):
        raise Unlike("they have no backward")
    return int(rows[0]), int(rows[-1]) + 1


def _above(name: str) -> list[str]:
    """Names of the modules that hold a parameter, outermost first."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _inside(name: str, block: str) -> bool:
    return name == block or name.startswith(block + ".")


def with_optimizer(short: Short, whole: Step) -> Step:
    """`short` with the optimizer's phase of `whole`, a recording of the same session, in place of its last op.

    Raises:
        Unlike: The optimizer reads what forward or backward made and is no gradient.
    """
    step, n = short.step, short.step.n_ops - 1
    first = int(np.searchsorted(whole.op_phase == Phase.OPTIMIZER, True))
    made = int(np.searchsorted(np.maximum.accumulate(whole.producer), first))
    later = first - n
    storage = np.full(whole.n_storages, -1)
    storage[: short.n_state] = np.arange(short.n_state)
    for mine, theirs in zip(step.parameters, whole.parameters, strict=True):
        storage[theirs.gradient] = mine.gradient if theirs.gradient >= 0 else storage[theirs.gradient]
    storage[made:] = np.arange(whole.n_storages - made) + step.n_storages
    uses = whole.use_op >= first
    if (storage[whole.use_storage[uses]] < 0).any():
        raise Unlike("the optimizer reads more than gradients")
    n_ops = n + whole.n_ops - first
    names = [*(step.names[i] for i in step.op_name[:n].tolist()), *(whole.names[i] for i in whole.op_name[first:].tolist())]
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}

    def until(rows: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        return np.where(rows == n, n_ops - 1, rows).astype(np.int32)

    def shifted(rows: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        return np.where((rows < 0) | (rows == FOREVER), rows, rows - later).astype(np.int32)

    held = np.concatenate([until(step.held_until), shifted(whole.held_until[made:])])
    ops = [each.name for each in fields(Step) if each.name.startswith("op_") and each.name != "op_name"]
    joined: dict[str, Any] = {name: np.concatenate([getattr(step, name)[:n], getattr(whole, name)[first:]]) for name in ops}
    joined |= {name: np.concatenate([getattr(step, name), getattr(whole, name)[made:]]) for name in ("bytes", "tier", "kind")}
    owner = np.concatenate([whole.owner[: short.n_state], np.full(step.n_storages - short.n_state, -1), whole.owner[made:]])
    for i, parameter in enumerate(step.parameters):
        if parameter.gradient >= 0:
            owner[parameter.gradient] = i
    new = replace(
        step,
        names=tuple(number),
        op_name=np.asarray([number[name] for name in names], np.int32),
        producer=np.concatenate([step.producer, shifted(whole.producer[made:])]),
        held_until=held,
        ready_after=np.concatenate([step.ready_after, whole.ready_after[made:]]),
        owner=owner.astype(np.int32),
        use_op=np.concatenate([step.use_op, shifted(whole.use_op[uses])]),
        use_storage=np.concatenate([step.use_storage, storage[whole.use_storage[uses]].astype(np.int32)]),
        use_mutates=np.concatenate([step.use_mutates, whole.use_mutates[uses]]),
        save_until=until(step.save_until),
        save_used_until=until(step.save_used_until),
        **joined,
    )
    new.validate()
    return new
