"""The pass of `runtime.tiled_weights`: weights of linear layers that come in row by row, on what `passes.stream` has made."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.shares import raw_gradients
from memtune.passes.stream import adding
from memtune.passes.tile_turns import PRODUCTS, Turn, made_by, used_by
from memtune.program import I32, WRITES, Kind, Phase, Resource, Step, Tier
from memtune.tiles import split_rows

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
    edit = Edit(step)
    layers = [Layer(step, edit, p, tiles, ranks) for p in weights]
    for layer in layers:
        layer.runs_in_tiles()
    return without_wholes(step, edit, layers)


def without_wholes(step: Step, edit: Edit, layers: Sequence[Layer]) -> Step:
    """What came of `edit`, in which these layers run in tiles."""
    dropped, whole = np.zeros(step.n_ops, bool), np.zeros(step.n_storages, bool)
    for layer in layers:
        dropped[layer.replaced] = True
        whole[layer.whole] = True
    edit.drop_ops(dropped)
    edit.drop_uses(whole[step.use_storage])
    return edit.done()


class Layer:
    """One weight W (N, K) in tiles, all of which is on this rank's host; M = tokens."""

    def __init__(self, step: Step, edit: Edit, parameter: int, tiles: int, ranks: int = 1) -> None:
        columns = columns_of(step.parameters)
        wide, deep = columns.shapes[parameter]
        self.step, self.edit, self.owner, self._ranks = step, edit, parameter, ranks
        self.row_bytes = deep * int(columns.itemsize[parameter])
        self.rows = split_rows(wide, tiles)
        self._wide = wide
        mine = step.owner == parameter
        self.there = np.flatnonzero(mine & (step.kind == Kind.COMMUNICATION) & (step.tier == Tier.DEVICE))
        on_host = np.flatnonzero(mine & (step.kind == Kind.GRADIENT) & (step.tier == Tier.HOST) & (step.producer >= 0))
        lands = step.names.index("memtune.to_host.default")
        self._sum = int(on_host[step.op_name[step.producer[on_host]] == lands][0])
        self.down = int(step.producer[self._sum])
        """The op that brought the whole gradient to the host."""
        self.last = self._last_but_one = -1  # the gradients of these tiles
        self.replaced: list[int] = []
        """Ops of the step that others take the place of."""
        self.whole: list[int] = self.there.tolist()
        """Storages that nobody uses any more."""

    def turn(self, anchor: int) -> Turn:
        """Of ops before the op `anchor`."""
        return Turn(self.step, self.edit, anchor, self._ranks)

    def runs_in_tiles(self) -> None:
        """Forward, what runs again, and backward."""
        step = self.step
        gradient = int(used_by(step, self.down)[0])
        product, is_read = int(step.producer[gradient]), False
        for there in self.there.tolist():
            source, users = self.let_go(there)
            for user in users:
                back = step.op_phase[user] == Phase.BACKWARD
                is_read |= back
                self.run(user, source, product if back else -1, gradient)
        if not is_read:
            self.run(-1, -1, product, gradient)
        self.replaced += [product, self.down, *self._averages(gradient)]
        self.edit.bytes[gradient] = self.bytes_of(self.rows[-1])
        self.last_down(product, before=np.asarray([self.down], np.int32))

    def _averages(self, gradient: int) -> list[int]:
        """Of the whole gradient among replicas."""
        step = self.step
        if self._ranks == 1:
            return []
        writes = step.use_op[(step.use_storage == gradient) & (step.use_mutates == WRITES)]
        return [int(op) for op in writes if step.op_resource[op] == Resource.INTRA_LINK]

    def let_go(self, there: int) -> tuple[int, list[int]]:
        """The whole weight does not come in. Returns where it comes from, which is held as long as it was, and who uses it."""
        step = self.step
        uses = np.flatnonzero(step.use_storage == there)
        load = int(step.use_op[uses[step.use_mutates[uses] == WRITES][0]])
        source = next(int(each) for each in used_by(step, load) if each != there)
        if step.producer[source] >= 0:
            self.edit.held_until[source] = max(int(self.edit.held_until[source]), int(step.held_until[there]))
        self.replaced += [int(step.producer[there]), load]
        return source, [int(op) for op in step.use_op[uses] if op != load]

    def bytes_of(self, rows: slice) -> int:
        """Of those on this rank."""
        return int(rows.stop - rows.start) * self.row_bytes

    def last_down(self, product: int, *, before: I32 | None = None, after: I32 | None = None) -> I32:
        """The last tile's gradient goes down in the place of all when the one before is there; its node still has its inputs."""
        step, edit, n_bytes = self.step, self.edit, self.bytes_of(self.rows[-1])
        copy = edit.add_ops(
            "memtune.copy_to_host_.default", before=before, after=after, phase=Phase.BACKWARD, resource=Resource.DEVICE_TO_HOST,
            traffic_bytes=n_bytes, call=int(step.op_call[self.down]), prefetch=1,
        )  # fmt: skip
        edit.add_uses(copy, np.asarray([self.last], np.int32))
        edit.add_uses(copy, np.asarray([self._sum], np.int32), mutates=True)
        first = self.down if before is None else self._first_arrival()
        gone = copy if first == self.down else np.asarray([first], np.int32)
        edit.let_go_before(np.asarray([self._last_but_one], np.int32), gone)
        inputs, after_copy = used_by(step, product), self.down + 1
        reads_sum = before is not None and step.names[step.op_name[after_copy]] == "memtune.from_ssd.default"
        edit.hold_through(inputs, np.repeat(np.int32(after_copy) if reads_sum else copy, len(inputs)))
        return copy

    def _first_arrival(self) -> int:
        """What the host does with gradients that came before this one's copy begins."""
        op, resource = self.down, self.step.op_resource
        while resource[op - 1] in (Resource.HOST_THREADS, Resource.SSD_WRITE, Resource.SSD_READ):
            op -= 1
        return op

    def run(self, user: int, source: int, product: int, gradient: int | None) -> None:
        """In the place of `user` (-1: nobody reads W here) and of `product`, which makes the gradient of W (-1: not here).

        `gradient`: the step's storage that the last tile's is; None: a new one.
        """
        turn = self.turn(user if user >= 0 else product)
        if user >= 0:
            self.replaced.append(user)
            turn.allocate(made_by(self.step, user))
            tile = turn.bring(self.bytes_of(self.rows[0]), source, self.owner, ahead=False)
        sent: int | None = None
        for i, rows in enumerate(self.rows):
            part, is_last = (rows.stop - rows.start) / self._wide, i + 1 == len(self.rows)
            if user >= 0:
                coming = -1 if is_last else turn.bring(self.bytes_of(self.rows[i + 1]), source, self.owner, ahead=True)
                if product >= 0:
                    turn.back(user, part, tile, is_first=i == 0)
                else:
                    turn.forward(user, part, tile)
                tile = coming
            if product >= 0:
                made = turn.gradient(product, part, self.bytes_of(rows), gradient if is_last else None)
            if product >= 0 and not is_last:  # it starts down, when the one before has come there and is let go
                if i == 0:
                    turn.allocate(self._sum, "aten.empty_strided.default")
                turn.send(made, self._sum, self.bytes_of(rows), sent)
                sent = made
        new = turn.done()
        if product >= 0 and sent is not None:
            self.last = made if made >= 0 else int(new[-made - 1])
            self._last_but_one = int(new[-sent - 1])
