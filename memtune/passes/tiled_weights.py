"""The pass of `runtime.tiled_weights`: weights of linear layers that come in row by row, on what `passes.stream` has made."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memtune.edit import Edit
from memtune.parameters import columns_of
from memtune.passes.block_landings import adding
from memtune.passes.shares import raw_gradients
from memtune.program import I32, WRITES, Kind, Phase, Resource, Step, Tier
from memtune.tiles import split_rows

_PRODUCTS = ("aten.addmm.default", "aten.mm.default")
_OUT = {"aten.addmm.default": "aten.addmm.out", "aten.mm.default": "aten.mm.out"}
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
    product = np.isin(step.op_name, [i for i, name in enumerate(step.names) if name in _PRODUCTS])
    body = step.use_phase < Phase.BOUNDARY
    bad = np.zeros(step.n_storages, bool)
    bad[step.use_storage[body & ~product[step.use_op]]] = True
    found = [
        p for p in mine.tolist()
        if not bad[columns.storage[p]] and product[step.producer[raw[p]]] and _is_linear(step, p, raw[p], body)
    ]  # fmt: skip
    n_bytes = columns.numel * columns.itemsize
    largest = max((int(n_bytes[p]) for p in found), default=0)
    return tuple(p for p in found if _LARGE * int(n_bytes[p]) >= largest)


def _is_linear(step: Step, p: int, raw: int, body: npt.NDArray[np.bool_]) -> bool:
    """Read once in forward, by its module, whose output has a column for each row of the weight; once in backward, if at all."""
    columns = columns_of(step.parameters)
    storage = columns.storage[p]
    readers = step.use_op[body & (step.use_storage == storage)]
    forward, back = readers[step.op_phase[readers] == Phase.FORWARD], readers[step.op_phase[readers] == Phase.BACKWARD]
    owner, _, own = columns.names[p].rpartition(".")
    if len(forward) != 1 or len(back) > 1 or own != "weight" or step.modules[step.op_module[forward[0]]] != owner:
        return False
    wide, deep = columns.shapes[p]
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


def tile_weights(step: Step, weights: tuple[int, ...], tiles: int) -> Step:
    """`step`, made by `passes.stream`, with these parameters in `tiles` tiles.

    Args:
        step: In which the weights come and go whole, of `weights_before_biases`.
        weights: What `tileable` found.
        tiles: At least 2.
    """
    edit, dropped, whole = Edit(step), np.zeros(step.n_ops, bool), np.zeros(step.n_storages, bool)
    edit.producer, edit.bytes = step.producer.copy(), step.bytes.copy()
    for p in weights:
        layer = _Layer(step, edit, p, tiles)
        layer.runs_in_tiles()
        dropped[layer.replaced] = True
        whole[layer.there] = True
    edit.drop_ops(dropped)
    edit.drop_uses(whole[step.use_storage])
    return edit.done()


class _Layer:
    """One weight W (N, K) in tiles; M = tokens."""

    def __init__(self, step: Step, edit: Edit, parameter: int, tiles: int) -> None:
        columns = columns_of(step.parameters)
        wide, deep = columns.shapes[parameter]
        self._step, self._edit, self._owner = step, edit, parameter
        self._row_bytes = deep * int(columns.itemsize[parameter])
        self._rows = split_rows(wide, tiles)
        self._wide = wide
        mine = step.owner == parameter
        self.there = np.flatnonzero(mine & (step.kind == Kind.COMMUNICATION) & (step.tier == Tier.DEVICE))
        self._sum = int(np.flatnonzero(mine & (step.kind == Kind.GRADIENT) & (step.tier == Tier.HOST) & (step.producer >= 0))[0])
        self._last_but_one = -1  # the gradient of that tile
        self.replaced: list[int] = []
        """Ops of the step that others take the place of."""

    def runs_in_tiles(self) -> None:
        """Forward, what runs again, and backward."""
        step = self._step
        down = int(step.producer[self._sum])
        gradient = int(_used_by(step, down)[0])
        product, is_read = int(step.producer[gradient]), False
        for there in self.there.tolist():
            source, users = self._let_go(there)
            for user in users:
                back = step.op_phase[user] == Phase.BACKWARD
                is_read |= back
                self._run(user, source, product if back else -1, gradient)
        if not is_read:
            self._run(-1, -1, product, gradient)
        self.replaced += [product, down]
        self._last_down(down, gradient, product)

    def _let_go(self, there: int) -> tuple[int, list[int]]:
        """The whole weight does not come in. Returns where it comes from, which is held as long as it was, and who uses it."""
        step = self._step
        uses = np.flatnonzero(step.use_storage == there)
        load = int(step.use_op[uses[step.use_mutates[uses] == WRITES][0]])
        source = next(int(each) for each in _used_by(step, load) if each != there)
        if step.producer[source] >= 0:
            self._edit.held_until[source] = max(int(self._edit.held_until[source]), int(step.held_until[there]))
        self.replaced += [int(step.producer[there]), load]
        return source, [int(op) for op in step.use_op[uses] if op != load]

    def _bytes(self, rows: slice) -> int:
        return int(rows.stop - rows.start) * self._row_bytes

    def _last_down(self, down: int, gradient: int, product: int) -> None:
        """The last tile's gradient goes down in the place of all when the one before is there; its node still has its inputs."""
        edit, anchor, n_bytes = self._edit, np.asarray([down], np.int32), self._bytes(self._rows[-1])
        copy = edit.add_ops(
            "memtune.copy_to_host_.default", before=anchor, phase=Phase.BACKWARD, resource=Resource.DEVICE_TO_HOST,
            traffic_bytes=n_bytes, call=int(self._step.op_call[down]), prefetch=1,
        )  # fmt: skip
        edit.add_uses(copy, np.asarray([gradient], np.int32))
        edit.add_uses(copy, np.asarray([self._sum], np.int32), mutates=True)
        edit.bytes[gradient] = n_bytes
        edit.let_go_before(np.asarray([self._last_but_one], np.int32), copy)
        inputs = _used_by(self._step, product)
        edit.hold_through(inputs, np.repeat(copy, len(inputs)))

    def _run(self, user: int, source: int, product: int, gradient: int) -> None:
        """In the place of `user` (-1: nobody reads W here) and of `product`, which makes the gradient of W (-1: not here)."""
        anchor = user if user >= 0 else product
        turn = _Turn(self._step, self._edit, anchor)
        if user >= 0:
            self.replaced.append(user)
            turn.allocate(_made_by(self._step, user))
            tile = turn.bring(self._bytes(self._rows[0]), source, self._owner, ahead=False)
        before: int | None = None
        for i, rows in enumerate(self._rows):
            part, is_last = (rows.stop - rows.start) / self._wide, i + 1 == len(self._rows)
            if user >= 0:
                coming = -1 if is_last else turn.bring(self._bytes(self._rows[i + 1]), source, self._owner, ahead=True)
                name = "aten.mm.out" if product >= 0 and i == 0 else _OUT[self._step.names[self._step.op_name[user]]]
                turn.compute("aten.addmm.out" if product >= 0 and i else name, user, part, tile)
                tile = coming
            if product >= 0:
                made = turn.make("aten.mm.default", product, part, None if not is_last else gradient, self._bytes(rows))
                before = self._down(turn, i, rows, made, before) if not is_last else before
        made_here = turn.done()
        if before is not None:
            self._last_but_one = int(made_here[-before - 1])

    def _down(self, turn: _Turn, i: int, rows: slice, gradient: int, before: int | None) -> int:
        """A tile's gradient but the last starts down, when the one before has come there and is let go."""
        if i == 0:
            turn.allocate(self._sum, "aten.empty_strided.default")
        turn.send(gradient, self._sum, self._bytes(rows), before)
        return gradient


def _used_by(step: Step, op: int) -> I32:
    start, stop = np.searchsorted(step.use_op, (op, op + 1))
    return step.use_storage[start:stop]


def _made_by(step: Step, op: int) -> int:
    return int(np.flatnonzero(step.producer == op)[0].item())


class _Turn:
    """Ops in a row before the op `anchor`; storages are the step's, or new ones by negative numbers until `done`."""

    def __init__(self, step: Step, edit: Edit, anchor: int) -> None:
        self._step, self._edit, self._anchor = step, edit, anchor
        self._ops: list[tuple[str, Resource, float, int, int, int, int]] = []
        self._new: list[tuple[int, int, int, Kind]] = []  # op, bytes, owner, kind
        self._producers: list[tuple[int, int]] = []  # storage of the step, op
        self._uses: list[tuple[int, int, bool]] = []  # op, storage, mutates
        self._releases: list[tuple[int, int]] = []  # storage, op

    def _op(self, name: str, resource: Resource, flops: float = 0, traffic: int = 0, module: int = 0, side: str = "") -> int:
        self._ops.append((name, resource, flops, traffic, module, int(side == "now"), int(side == "ahead")))
        return len(self._ops) - 1

    def _storage(self, op: int, n_bytes: int, owner: int, kind: Kind) -> int:
        self._new.append((op, n_bytes, owner, kind))
        return -len(self._new)

    def allocate(self, storage: int, name: str = "aten.new_empty.default") -> None:
        """A storage of the step is there from here on."""
        self._producers.append((storage, self._op(name, Resource.NOTHING)))

    def bring(self, n_bytes: int, source: int, owner: int, *, ahead: bool) -> int:
        """A tile comes to the device."""
        tile = self._storage(self._op("aten.empty.memory_format", Resource.NOTHING), n_bytes, owner, Kind.COMMUNICATION)
        side = "ahead" if ahead else "now"
        load = self._op("memtune.copy_to_device_.default", Resource.HOST_TO_DEVICE, traffic=n_bytes, side=side)
        self._uses += [(load, source, False), (load, tile, True)]
        return tile

    def compute(self, name: str, like: int, part: float, tile: int) -> None:
        """Part of the op `like`, with a tile for what is left out of its uses, into what it made."""
        op = self._like(name, like, part)
        self._uses += [(op, tile, False), (op, _made_by(self._step, like), True)]

    def make(self, name: str, like: int, part: float, storage: int | None, n_bytes: int) -> int:
        """Part of the op `like`, into memory of its own: a storage of the step or a new one."""
        op = self._like(name, like, part)
        if storage is None:
            return self._storage(op, n_bytes, int(self._step.owner[_made_by(self._step, like)]), Kind.TEMPORARY)
        self._producers.append((storage, op))
        return storage

    def _like(self, name: str, like: int, part: float) -> int:
        step = self._step
        op = self._op(
            name, Resource.COMPUTE, part * step.op_flops[like], int(part * step.op_traffic_bytes[like]), int(step.op_module[like])
        )
        reads = _used_by(step, like)
        self._uses += [(op, each, False) for each in reads[step.kind[reads] != Kind.COMMUNICATION].tolist()]
        return op

    def send(self, gradient: int, host: int, n_bytes: int, before: int | None) -> None:
        """A tile's gradient starts down into `host`; the one `before` is let go."""
        op = self._op("memtune.copy_to_host_.default", Resource.DEVICE_TO_HOST, traffic=n_bytes, side="ahead")
        self._uses += [(op, gradient, False), (op, host, True)]
        if before is not None:
            self._releases.append((before, op))

    def done(self) -> I32:
        """Put them into the step; returns the new storages, in the order of their negative numbers."""
        step, edit, anchor = self._step, self._edit, self._anchor
        names, resource, flops, traffic, module, stream, prefetch = zip(*self._ops, strict=True)
        ids = {each: edit.name_id(each) for each in set(names)}
        rows = edit.add_ops(
            np.asarray([ids[each] for each in names], np.int32), before=np.full(len(names), anchor, np.int32),
            phase=Phase(int(step.op_phase[anchor])), resource=np.asarray(resource, np.uint8), flops=np.asarray(flops, np.float64),
            traffic_bytes=np.asarray(traffic, np.int64), module=np.asarray(module, np.int32), call=int(step.op_call[anchor]),
            stream=np.asarray(stream, np.uint8), prefetch=np.asarray(prefetch, np.uint8),
        )  # fmt: skip
        made = np.empty(0, np.int32)
        if self._new:
            by, n_bytes, owner, kind = (np.asarray(each) for each in zip(*self._new, strict=True))
            made = edit.add_storages(
                n_bytes.astype(np.int64), producer=rows[by], kind=kind.astype(np.uint8), owner=owner.astype(np.int32)
            )

        def real(storages: tuple[int, ...]) -> I32:
            return np.asarray([made[-each - 1] if each < 0 else each for each in storages], np.int32)

        for storage, op in self._producers:
            edit.producer[storage] = rows[op]
        for mutates in (False, True):
            uses = [(op, storage) for op, storage, writes in self._uses if writes == mutates]
            if uses:
                ops, storages = zip(*uses, strict=True)
                edit.add_uses(rows[list(ops)], real(storages), mutates=mutates)
        if self._releases:
            storages, ops = zip(*self._releases, strict=True)
            edit.let_go_before(real(storages), rows[list(ops)])
        return made
