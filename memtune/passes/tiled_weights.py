"""The pass of `runtime.tiled_weights`: weights of linear layers that come in row by row, on what `passes.stream` has made."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.block_landings import adding
from memtune.passes.shares import raw_gradients
from memtune.passes.tile_turns import PRODUCTS, Group, Turn, Turns
from memtune.program import I32, WRITES, Kind, Phase, Resource, Step, Tier
from memtune.tiles import split_rows

BACKWARD = np.uint8(Phase.BACKWARD)
_OF_THE_HOST = (int(Resource.HOST_THREADS), int(Resource.SSD_WRITE), int(Resource.SSD_READ))
_LARGE = 2
"""Weights of at least one part in so many of the largest one's bytes come in tiles; smaller ones decide no peak."""


@functools.lru_cache(maxsize=8)
def tileable(step: Step, tiles: int) -> tuple[int, ...]:
    """Parameters of `step` that can come in `tiles` tiles and are worth it: large weights of blocks' linear layers.

    Only products of matrices read one, in forward one of its own module, and one makes its gradient: a weight that is cast,
    shared or frozen stays whole.
    """
    columns, raw = columns_of(step.parameters), raw_gradients(step)
    two = np.asarray([len(shape) == 2 and shape[0] >= tiles for shape in columns.shapes], bool)
    mine = np.flatnonzero(two & (columns.block >= 0) & (raw >= 0) & (columns.gradient >= 0))
    product = products_of(step)
    body = step.use_phase < Phase.BOUNDARY
    bad = np.zeros(step.n_storages, bool)
    bad[step.use_storage[body & ~product[step.use_op]]] = True
    found = [
        p for p in mine.tolist()
        if not bad[columns.storage[p]] and product[step.producer[raw[p]]]
        and is_linear(step, p, step.use_op[body & (step.use_storage == columns.storage[p])], raw[p], columns.shapes[p])
    ]  # fmt: skip
    return large_ones(step, found)


def products_of(step: Step) -> npt.NDArray[np.bool_]:
    """(n,) which ops are products of matrices."""
    return np.isin(step.op_name, [i for i, name in enumerate(step.names) if name in PRODUCTS])


def large_ones(step: Step, found: Sequence[int]) -> tuple[int, ...]:
    """The parameters `found` that decide a peak."""
    columns = columns_of(step.parameters)
    n_bytes = columns.numel * columns.itemsize
    largest = max((int(n_bytes[p]) for p in found), default=0)
    return tuple(p for p in found if _LARGE * int(n_bytes[p]) >= largest)


def is_linear(step: Step, p: int, readers: I32, raw: int, shape: tuple[int, ...]) -> bool:
    """Read once in forward, by its module, whose output has a column for each row of the weight; once in backward, if at all.

    Args:
        step: Any.
        p: The parameter.
        readers: Ops that read it.
        raw: Its gradient.
        shape: Of the whole weight, rows and columns.
    """
    columns = columns_of(step.parameters)
    forward, back = readers[step.op_phase[readers] == Phase.FORWARD], readers[step.op_phase[readers] == Phase.BACKWARD]
    owner, _, own = columns.names[p].rpartition(".")
    if len(forward) != 1 or len(back) > 1 or own != "weight" or step.modules[step.op_module[forward[0]]] != owner:
        return False
    wide, deep = shape
    made = step.bytes[step.producer == forward[0]]
    tokens = int(step.op_flops[forward[0]] / max(2 * int(wide) * int(deep), 1))
    if len(made) != 1 or int(made[0]) != tokens * int(wide) * int(columns.itemsize[p]):
        return False
    return not len(back) or 0 < step.producer[raw] - back[0] <= 1


def weights_before_biases(step: Step, weights: tuple[int, ...]) -> Step:
    """`step` as if gradients of `weights` landed before those of their biases: their last tile starts down within their node."""
    columns = columns_of(step.parameters)
    index = {name: i for i, name in enumerate(columns.names)}
    adds = adding(step)
    landing, use_op = step.landing.copy(), step.use_op.copy()
    at = {each: i for i, each in enumerate(step.landing.tolist())}
    for p in weights:
        bias = index.get(columns.names[p].removesuffix("weight") + "bias", -1)
        if bias < 0 or columns.gradient[bias] < 0:
            continue
        one, other = at.get(int(columns.gradient[bias]), -1), at.get(int(columns.gradient[p]), -1)
        if one >= 0 and other == one + 1:
            landing[[one, other]] = step.landing[[other, one]]
            first, second = adds[columns.gradient[bias]], adds[columns.gradient[p]]
            if first >= 0 and second >= 0:
                use_op[step.use_op == first], use_op[step.use_op == second] = second, first
    order = np.argsort(use_op, kind="stable")
    return replace(
        step, landing=landing, use_op=use_op[order], use_storage=step.use_storage[order], use_mutates=step.use_mutates[order]
    )


def tile_weights(step: Step, weights: tuple[int, ...], tiles: int, ranks: int = 1) -> Step:
    """`step`, made by `passes.stream`, with these parameters in `tiles` tiles.

    Args:
        step: In which the weights come and go whole, of `weights_before_biases`.
        weights: What `tileable` found.
        tiles: At least 2.
        ranks: That have all weights, and average each tile's gradient before it leaves.
    """
    edit, of = Edit(step), Whereabouts(step, weights)
    turns = Turns(step, edit)
    layers = [Layer(turns, of, p, tiles, ranks) for p in weights]
    run_in_tiles(turns, layers)
    return without_wholes(edit, layers)


class Whereabouts:
    """Of some weights that come and go whole, in what `passes.stream` made; by parameter."""

    def __init__(self, step: Step, weights: Sequence[int]) -> None:
        wanted = np.zeros(len(step.parameters) + 1, bool)  # the last one serves -1
        wanted[list(weights)] = True
        mine = wanted[step.owner]
        self.there: dict[int, list[int]] = {p: [] for p in weights}
        """Its storages on the device, and …"""
        self.users: dict[int, list[int]] = {}
        """… of each, the ops that use it; the first one fills it."""
        there = np.flatnonzero(mine & (step.kind == Kind.COMMUNICATION) & (step.tier == Tier.DEVICE))
        for each, p in zip(there.tolist(), step.owner[there].tolist(), strict=True):
            self.there[p].append(each)
            self.users[each] = []
        is_there = np.zeros(step.n_storages, bool)
        is_there[there] = True
        uses = np.flatnonzero(is_there[step.use_storage])
        for each, op in zip(step.use_storage[uses].tolist(), step.use_op[uses].tolist(), strict=True):
            self.users[each].append(op)
        lands = step.names.index("memtune.to_host.default")
        down = np.flatnonzero(mine & (step.kind == Kind.GRADIENT) & (step.tier == Tier.HOST) & (step.producer >= 0))
        down = down[step.op_name[step.producer[down]] == lands]
        self.on_host: dict[int, int] = dict(zip(step.owner[down].tolist(), down.tolist(), strict=True))
        """Its gradient there, in this micro-batch."""
        sent = np.flatnonzero((step.op_resource[step.use_op] == Resource.INTRA_LINK) & (step.use_mutates == WRITES))
        self.averaged: dict[int, int] = dict(zip(step.use_storage[sent].tolist(), step.use_op[sent].tolist(), strict=True))
        """By storage, the op that averages it."""


def run_in_tiles(turns: Turns, layers: Sequence[Layer]) -> I32:
    """Have these layers do so; returns the ops by which the last tiles' gradients go down."""
    for layer in layers:
        layer.runs_in_tiles()
    turns.done()
    step, edit = turns.step, turns.edit
    down, at = (np.asarray([getattr(each, name) for each in layers], np.int32) for name in ("down", "lands_at"))
    copies = edit.add_ops(
        "memtune.copy_to_host_.default", before=None if layers[0].lands_after else at,
        after=at if layers[0].lands_after else None, phase=Phase.BACKWARD, resource=Resource.DEVICE_TO_HOST,
        traffic_bytes=np.asarray([each.bytes_of(each.rows[-1]) for each in layers], np.int64), call=step.op_call[down],
        prefetch=1,
    )  # fmt: skip
    edit.add_uses(copies, np.asarray([each.last for each in layers], np.int32))
    edit.add_uses(copies, np.asarray([each.sum for each in layers], np.int32), mutates=True)
    gone = np.asarray([each.gone_at for each in layers], np.int32)
    edit.let_go_before(np.asarray([each.last_but_one for each in layers], np.int32), np.where(gone < 0, copies, gone))
    until = np.asarray([each.reads_sum for each in layers], np.int32)
    inputs = [turns.used_by(each.product) for each in layers]  # its node still has them
    until = np.where(until < 0, copies, until).repeat([len(each) for each in inputs])
    edit.hold_through(np.asarray([x for each in inputs for x in each], np.int32), until.astype(np.int32))
    return copies


def without_wholes(edit: Edit, layers: Sequence[Layer]) -> Step:
    """What came of `edit`, in which these layers run in tiles."""
    step = layers[0].step
    dropped, whole = np.zeros(step.n_ops, bool), np.zeros(step.n_storages, bool)
    dropped[[op for layer in layers for op in layer.replaced]] = True
    whole[[each for layer in layers for each in layer.whole]] = True
    edit.drop_ops(dropped)
    edit.drop_uses(whole[step.use_storage])
    return edit.done()


class Layer:
    """One weight W (N, K) in tiles, all of which is on this rank's host; M = tokens."""

    lands_after: ClassVar[bool] = False
    """Whether the last tile's gradient goes down after the op `lands_at`; else before."""

    def __init__(self, turns: Turns, of: Whereabouts, parameter: int, tiles: int, ranks: int = 1) -> None:
        step = turns.step
        columns = columns_of(step.parameters)
        wide, deep = columns.shapes[parameter]
        self.turns, self.step, self.edit, self.owner, self.ranks = turns, step, turns.edit, parameter, ranks
        self.row_bytes = deep * int(columns.itemsize[parameter])
        self.rows = split_rows(wide, tiles)
        self._wide, self._of = wide, of
        self.there = of.there[parameter]
        self.sum = of.on_host[parameter]
        self.down = int(step.producer[self.sum])
        """The op that brought the whole gradient to the host."""
        self.raw = turns.used_by(self.down)[0]
        self.product = int(step.producer[self.raw])
        self.lands_at, self.gone_at, self.reads_sum = self.down, -1, -1
        self._made: tuple[Group, int] | None = None
        self.replaced: list[int] = []
        """Ops of the step that others take the place of."""
        self.whole: list[int] = list(self.there)
        """Storages that nobody uses any more."""

    @property
    def last(self) -> int:
        """The last tile's gradient."""
        assert self._made is not None
        group, member = self._made
        return group.real(member, group.turn.last)

    @property
    def last_but_one(self) -> int:
        """The gradient of the tile before."""
        assert self._made is not None
        group, member = self._made
        return group.real(member, group.turn.last_but_one)

    def turn(self) -> Turn:
        """An empty one."""
        return Turn(self.turns, self.ranks)

    def kind(self) -> tuple[int, ...]:
        """What its turns follow from, beside products and their storages."""
        return self.row_bytes, self._wide, len(self.rows)

    def runs_in_tiles(self) -> None:
        """Forward, what runs again, and backward."""
        step, is_read = self.step, False
        for there in self.there:
            source, users = self.let_go(there)
            for user in users:
                back = bool(step.op_phase[user] == BACKWARD)
                is_read |= back
                self.run(user, source, self.product if back else -1, self.raw)
        if not is_read:
            self.run(-1, -1, self.product, self.raw)
        self.replaced += [self.product, self.down]
        if self.ranks > 1:
            self.replaced.append(self._of.averaged[self.raw])
        self.edit.bytes[self.raw] = self.bytes_of(self.rows[-1])
        self.gone_at = self._first_arrival()
        if step.names[step.op_name[self.down + 1]] == "memtune.from_ssd.default":
            self.reads_sum = self.down + 1

    def let_go(self, there: int) -> tuple[int, list[int]]:
        """The whole weight does not come in. Returns where it comes from, which is held as long as it was, and who uses it."""
        step = self.step
        load, *users = self._of.users[there]
        source = next(each for each in self.turns.used_by(load) if each != there)
        if step.producer[source] >= 0:
            self.edit.held_until[source] = max(int(self.edit.held_until[source]), int(step.held_until[there]))
        self.replaced += [int(step.producer[there]), load]
        return source, users

    def bytes_of(self, rows: slice) -> int:
        """Of those on this rank."""
        return int(rows.stop - rows.start) * self.row_bytes

    def _first_arrival(self) -> int:
        """What the host does with gradients that came before this one's copy begins, -1 for nothing."""
        op, resource = self.down, self.step.op_resource
        while resource[op - 1] in _OF_THE_HOST:
            op -= 1
        return op if op < self.down else -1

    def run(self, user: int, source: int, product: int, gradient: int | None) -> None:
        """In the place of `user` (-1: nobody reads W here) and of `product`, which makes the gradient of W (-1: not here).

        `gradient`: the step's storage that the last tile's is; None: a new one.
        """
        turns, ops = self.turns, [op for op in (user, product) if op >= 0]
        slots = [source, turns.made_by(user)] if user >= 0 else []
        slots += [self.sum, *([] if gradient is None else [gradient])] if product >= 0 else []
        slots += [each for op in ops for each in turns.reads(op)]
        kind = (user >= 0, product >= 0, *self.kind())
        made = turns.join(kind, ops, self.owner, slots, lambda: self._turn(user, source, product, gradient))
        if user >= 0:
            self.replaced.append(user)
        if product >= 0:
            self._made = made

    def _turn(self, user: int, source: int, product: int, gradient: int | None) -> Turn:
        """As in `run`."""
        turn = self.turn()
        if user >= 0:
            turn.allocate(self.turns.made_by(user))
            tile = turn.bring(self.bytes_of(self.rows[0]), source, ahead=False)
        sent: int | None = None
        for i, rows in enumerate(self.rows):
            part, is_last = (rows.stop - rows.start) / self._wide, i + 1 == len(self.rows)
            if user >= 0:
                coming = -1 if is_last else turn.bring(self.bytes_of(self.rows[i + 1]), source, ahead=True)
                if product >= 0:
                    turn.back(user, part, tile, is_first=i == 0)
                else:
                    turn.forward(user, part, tile)
                tile = coming
            if product >= 0:
                turn.last = turn.gradient(product, part, self.bytes_of(rows), gradient if is_last else None)
            if product >= 0 and not is_last:  # it starts down, when the one before has come there and is let go
                if i == 0:
                    turn.allocate(self.sum, "aten.empty_strided.default")
                turn.send(turn.last, self.sum, self.bytes_of(rows), sent)
                sent = turn.last_but_one = turn.last
        return turn
