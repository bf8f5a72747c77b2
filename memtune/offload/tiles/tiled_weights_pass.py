"""Pass of `offload.tiles.tiled_weights`, applied to a result of `parameter_offload_pass`.

`tileable` and `tile_weights` serve weights that are whole on this host; `tileable_rows` and `tile_rows` serve
those that FSDP2 shards: each tile is gathered from all ranks, and its gradient reduce-scattered.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from memtune.offload.tiles.tile_ops_pass import PRODUCTS, OpSequences, TileGroup, TileOps, split_rows
from memtune.program import (
    I32,
    READS,
    WRITES,
    Edit,
    Kind,
    Mask,
    Phase,
    Resource,
    Step,
    Tier,
    adding_ops,
    columns_of,
    gathers_of,
    members_of_units,
    raw_gradients,
)

_OF_THE_HOST = (int(Resource.HOST_THREADS), int(Resource.SSD_WRITE), int(Resource.SSD_READ))
_LARGE = 2
"""Weights of at least 1/this of the largest one's bytes are tiled; smaller ones decide no peak."""


@functools.lru_cache(maxsize=8)
def tileable(step: Step, tiles: int) -> tuple[int, ...]:
    """Return the parameters of `step` to load in `tiles` tiles: large weights of blocks' linear layers."""
    # Only matrix products read such a weight, in forward one of its own module, and one product makes
    # its gradient. A weight that is cast, shared or frozen is not tiled.
    columns, raw = columns_of(step.parameters), raw_gradients(step)
    two = np.asarray([len(shape) == 2 and shape[0] >= tiles for shape in columns.shapes], bool)
    mine = np.flatnonzero(two & (columns.block >= 0) & (raw >= 0) & (columns.gradient >= 0))
    product = products_of(step)
    body = step.use_phase < Phase.BOUNDARY
    bad = np.zeros(step.storages.n, bool)
    # A cast or a norm of the whole weight would need it on the device.
    bad[step.uses.storage[body & ~product[step.uses.op]]] = True
    found = [
        p
        for p in mine.tolist()
        if not bad[columns.storage[p]]
        and product[step.storages.producer[raw[p]]]
        and is_linear(
            step, p, step.uses.op[body & (step.uses.storage == columns.storage[p])], raw[p], columns.shapes[p]
        )
    ]
    return large_ones(step, found)


def products_of(step: Step) -> Mask:
    """Return (n,) True for matrix products."""
    return np.isin(step.ops.name, [i for i, name in enumerate(step.names) if name in PRODUCTS])


def large_ones(step: Step, found: Sequence[int]) -> tuple[int, ...]:
    """Return those of the parameters `found` that decide a peak."""
    columns = columns_of(step.parameters)
    n_bytes = columns.n_bytes
    largest = max((int(n_bytes[p]) for p in found), default=0)
    return tuple(p for p in found if _LARGE * int(n_bytes[p]) >= largest)


def is_linear(step: Step, p: int, readers: I32, raw: int, shape: tuple[int, ...]) -> bool:
    """Return whether the weight is read once in forward, by its module, and at most once in backward."""
    # The module's output has a column for each row of the weight.
    columns = columns_of(step.parameters)
    forward = readers[step.ops.phase[readers] == Phase.FORWARD]
    back = readers[step.ops.phase[readers] == Phase.BACKWARD]
    owner, _, own = columns.names[p].rpartition(".")
    if (
        len(forward) != 1
        or len(back) > 1
        or own != "weight"
        or owner in step.blocks  # whose forward may be that of recompute
        or step.modules[step.ops.module[forward[0]]] != owner
    ):
        return False
    wide, deep = shape
    made = step.storages.bytes[step.storages.producer == forward[0]]
    # A product has 2·M·N·K operations; its output tells whether rows of the weight are columns of it.
    tokens = int(step.ops.flops[forward[0]] / max(2 * int(wide) * int(deep), 1))
    if len(made) != 1 or int(made[0]) != tokens * int(wide) * int(columns.itemsize[p]):
        return False
    # The product for the input and that for the weight are neighbours in backward, so one loop runs both.
    return not len(back) or 0 < step.storages.producer[raw] - back[0] <= 1


def weights_before_biases(step: Step, weights: tuple[int, ...]) -> Step:
    """Return `step` as if gradients of `weights` were ready before those of their biases."""
    # The D2H copy of their last tile starts within their node.
    columns = columns_of(step.parameters)
    index = {name: i for i, name in enumerate(columns.names)}
    adds = adding_ops(step)
    grad_order, use_op = step.grad_order.copy(), step.uses.op.copy()
    at = {each: i for i, each in enumerate(step.grad_order.tolist())}
    for p in weights:
        bias = index.get(columns.names[p].removesuffix("weight") + "bias", -1)
        if bias < 0 or columns.gradient[bias] < 0:
            continue
        one, other = at.get(int(columns.gradient[bias]), -1), at.get(int(columns.gradient[p]), -1)
        if one >= 0 and other == one + 1:
            # Autograd returns a bias's gradient first; the tiled node copies the weight's within itself.
            grad_order[[one, other]] = step.grad_order[[other, one]]
            first, second = adds[columns.gradient[bias]], adds[columns.gradient[p]]
            if first >= 0 and second >= 0:
                use_op[step.uses.op == first], use_op[step.uses.op == second] = second, first
    order = np.argsort(use_op, kind="stable")
    return replace(step, grad_order=grad_order).with_uses(
        op=use_op[order], storage=step.uses.storage[order], mode=step.uses.mode[order]
    )


def tile_weights(step: Step, weights: tuple[int, ...], tiles: int, ranks: int = 1) -> Step:
    """Return `step` with these parameters in `tiles` tiles.

    Args:
        step: A result of `offload.parameters.parameter_offload_pass` with whole weights, of
            `weights_before_biases`.
        weights: A result of `tileable`.
        tiles: At least 2.
        ranks: Number of replicas, which average each tile's gradient before it is offloaded.
    """
    edit, of = Edit(step), OffloadedWeights(step, weights)
    # Layers of one shape have equal ops: built once, inserted for all with one call.
    sequences = OpSequences(step, edit)
    layers = [TiledLayer(sequences, of, p, tiles, ranks) for p in weights]
    run_layers_in_tiles(sequences, layers)
    return without_whole_weights(edit, layers)


class OffloadedWeights:
    """Ops and storages of some offloaded weights in a result of `parameter_offload_pass`, by parameter."""

    def __init__(self, step: Step, weights: Sequence[int]) -> None:
        wanted = np.zeros(len(step.parameters) + 1, bool)  # the last one serves -1
        wanted[list(weights)] = True
        mine = wanted[step.storages.owner]
        self.on_device: dict[int, list[int]] = {p: [] for p in weights}
        """The storages of each weight on the device."""
        self.users: dict[int, list[int]] = {}
        """The ops that use each of these storages; the first one fills it."""
        there = np.flatnonzero(
            mine & (step.storages.kind == Kind.COMMUNICATION) & (step.storages.tier == Tier.DEVICE)
        )
        for each, p in zip(there.tolist(), step.storages.owner[there].tolist(), strict=True):
            self.on_device[p].append(each)
            self.users[each] = []
        is_there = np.zeros(step.storages.n, bool)
        is_there[there] = True
        uses = np.flatnonzero(is_there[step.uses.storage])
        for each, op in zip(step.uses.storage[uses].tolist(), step.uses.op[uses].tolist(), strict=True):
            self.users[each].append(op)
        to_host = step.names.index("memtune.to_host.default")
        down = np.flatnonzero(
            mine
            & (step.storages.kind == Kind.GRADIENT)
            & (step.storages.tier == Tier.HOST)
            & (step.storages.producer >= 0)
        )
        down = down[step.ops.name[step.storages.producer[down]] == to_host]
        self.on_host: dict[int, int] = dict(
            zip(step.storages.owner[down].tolist(), down.tolist(), strict=True)
        )
        """The weight's gradient on the host, in this micro-batch."""
        sent = np.flatnonzero(
            (step.ops.resource[step.uses.op] == Resource.INTRA_LINK) & (step.uses.mode == WRITES)
        )
        self.averaged: dict[int, int] = dict(
            zip(step.uses.storage[sent].tolist(), step.uses.op[sent].tolist(), strict=True)
        )
        """By storage, the op that averages it."""


def run_layers_in_tiles(sequences: OpSequences, layers: Sequence[TiledLayer]) -> I32:
    """Run these layers in tiles; return the D2H copies of their last tiles' gradients."""
    for layer in layers:
        layer.run_in_tiles()
    # All tiles before the last copies: the copies refer to storages that exist from here on.
    sequences.done()
    step, edit = sequences.step, sequences.edit
    down, at = (
        np.asarray([getattr(each, name) for each in layers], np.int32) for name in ("down", "copy_anchor")
    )
    copies = edit.add_ops(
        "memtune.copy_to_host_.default",
        before=None if layers[0].copy_is_after else at,
        after=at if layers[0].copy_is_after else None,
        phase=Phase.BACKWARD,
        resource=Resource.DEVICE_TO_HOST,
        traffic_bytes=np.asarray([each.bytes_of(each.rows[-1]) for each in layers], np.int64),
        call=step.ops.call[down],
        prefetch=1,
        reads=np.asarray([each.last for each in layers], np.int32),
        writes=np.asarray([each.sum for each in layers], np.int32),
    )
    gone = np.asarray([each.freed_at for each in layers], np.int32)
    edit.release_before(
        np.asarray([each.last_but_one for each in layers], np.int32), np.where(gone < 0, copies, gone)
    )
    until = np.asarray([each.reads_sum for each in layers], np.int32)
    # The autograd node references its inputs until it ends, after the last tile's copy has started.
    inputs = [sequences.used_by(each.product) for each in layers]
    until = np.where(until < 0, copies, until).repeat([len(each) for each in inputs])
    edit.hold_through(np.asarray([x for each in inputs for x in each], np.int32), until.astype(np.int32))
    return copies


def without_whole_weights(edit: Edit, layers: Sequence[TiledLayer]) -> Step:
    """Return the edited step, without the whole weights of these layers."""
    step = layers[0].step
    edit.drop_ops(np.asarray([op for layer in layers for op in layer.replaced], np.int32))
    whole = np.zeros(step.storages.n, bool)
    whole[[each for layer in layers for each in layer.unused]] = True
    edit.drop_uses(whole[step.uses.storage])
    return edit.done()


class TiledLayer:
    """One weight W (N, K) in tiles, whole on this rank's host; M = tokens."""

    copy_is_after: ClassVar[bool] = False
    """True if the D2H copy of the last tile's gradient follows the op `copy_anchor`; else it precedes it."""

    def __init__(
        self, sequences: OpSequences, of: OffloadedWeights, parameter: int, tiles: int, ranks: int = 1
    ) -> None:
        step = sequences.step
        columns = columns_of(step.parameters)
        wide, deep = columns.shapes[parameter]
        self.sequences, self.step, self.edit = sequences, step, sequences.edit
        self.owner, self.ranks = parameter, ranks
        self.row_bytes = deep * int(columns.itemsize[parameter])
        self.rows = split_rows(wide, tiles)
        self._wide, self._of = wide, of
        self.on_device = of.on_device[parameter]
        self.sum = of.on_host[parameter]
        self.down = int(step.storages.producer[self.sum])
        """The op that copied the whole gradient to the host."""
        self.raw = sequences.used_by(self.down)[0]
        # Found from the gradient backwards: D2H copy, its source, the product that makes it.
        self.product = int(step.storages.producer[self.raw])
        self.copy_anchor, self.freed_at, self.reads_sum = self.down, -1, -1
        self._made: tuple[TileGroup, int] | None = None
        self.replaced: list[int] = []
        """Ops of the step that are replaced."""
        self.unused: list[int] = list(self.on_device)
        """Storages without uses in the result."""

    @property
    def last(self) -> int:
        """The last tile's gradient."""
        assert self._made is not None
        group, member = self._made
        return group.step_storage(member, group.tile_ops.last)

    @property
    def last_but_one(self) -> int:
        """The gradient of the tile before the last."""
        assert self._made is not None
        group, member = self._made
        return group.step_storage(member, group.tile_ops.last_but_one)

    def new_tile_ops(self) -> TileOps:
        """Return an empty sequence for one pass over the tiles."""
        return TileOps(self.sequences, self.ranks)

    def kind(self) -> tuple[int, ...]:
        """Return the key of everything, except products and their storages, that determines its ops."""
        return self.row_bytes, self._wide, len(self.rows)

    def run_in_tiles(self) -> None:
        """Replace forward, recompute and backward."""
        step, is_read = self.step, False
        for there in self.on_device:
            source, users = self.drop_load(there)
            for user in users:
                back = bool(step.ops.phase[user] == Phase.BACKWARD)
                is_read |= back
                self.replace_uses(user, source, self.product if back else -1, self.raw)
        if not is_read:
            self.replace_uses(-1, -1, self.product, self.raw)
        self.replaced += [self.product, self.down]
        if self.ranks > 1:
            self.replaced.append(self._of.averaged[self.raw])
        # The step's own gradient storage becomes the last tile's; earlier tiles get new ones.
        self.edit.storages.bytes[self.raw] = self.bytes_of(self.rows[-1])
        self.freed_at = self._first_arrival()
        if step.names[step.ops.name[self.down + 1]] == "memtune.from_ssd.default":
            self.reads_sum = self.down + 1

    def drop_load(self, there: int) -> tuple[int, list[int]]:
        """Drop the load of the whole weight; return its source and the ops that use the weight."""
        # The source is held as long as the weight was.
        step = self.step
        load, *users = self._of.users[there]
        source = next(each for each in self.sequences.used_by(load) if each != there)
        if step.storages.producer[source] >= 0:
            self.edit.storages.held_until[source] = max(
                int(self.edit.storages.held_until[source]), int(step.storages.held_until[there])
            )
        self.replaced += [int(step.storages.producer[there]), load]
        return source, users

    def bytes_of(self, rows: slice) -> int:
        """Return the bytes of those rows on this rank."""
        return int(rows.stop - rows.start) * self.row_bytes

    def _first_arrival(self) -> int:
        """Return the first host op on earlier gradients that precedes this one's copy, -1 for none."""
        op, resource = self.down, self.step.ops.resource
        # Host ops right before the copy belong to earlier gradients, which this one's grad-ready hook
        # finishes first.
        while resource[op - 1] in _OF_THE_HOST:
            op -= 1
        return op if op < self.down else -1

    def replace_uses(self, user: int, source: int, product: int, gradient: int | None) -> None:
        """Replace `user`, which reads W, and `product`, which makes W's gradient; -1: no such op here.

        `gradient`: the step's storage for the last tile's gradient; None: a new one.
        """
        sequences, ops = self.sequences, [op for op in (user, product) if op >= 0]
        slots = [source, sequences.made_by(user)] if user >= 0 else []
        slots += [self.sum, *([] if gradient is None else [gradient])] if product >= 0 else []
        slots += [each for op in ops for each in sequences.reads(op)]
        kind = (user >= 0, product >= 0, *self.kind())
        made = sequences.join(
            kind, ops, self.owner, slots, lambda: self._build(user, source, product, gradient)
        )
        if user >= 0:
            self.replaced.append(user)
        if product >= 0:
            self._made = made

    def _build(self, user: int, source: int, product: int, gradient: int | None) -> TileOps:
        """Return the sequence that `run` adds."""
        tile_ops = self.new_tile_ops()
        if user >= 0:
            tile_ops.allocate(self.sequences.made_by(user))
            tile = tile_ops.load(self.bytes_of(self.rows[0]), source, prefetch=False)
        sent: int | None = None
        for i, rows in enumerate(self.rows):
            part, is_last = (rows.stop - rows.start) / self._wide, i + 1 == len(self.rows)
            if user >= 0:
                # The next tile is loaded while this one is multiplied, so at most two are on the device.
                coming = (
                    -1 if is_last else tile_ops.load(self.bytes_of(self.rows[i + 1]), source, prefetch=True)
                )
                if product >= 0:
                    tile_ops.add_input_gradient(user, part, tile, is_first=i == 0)
                else:
                    tile_ops.forward(user, part, tile)
                tile = coming
            if product >= 0:
                tile_ops.last = tile_ops.gradient(
                    product, part, self.bytes_of(rows), gradient if is_last else None
                )
            # Its D2H copy starts when the previous tile's has ended, which frees that tile's gradient.
            if product >= 0 and not is_last:
                if i == 0:
                    tile_ops.allocate(self.sum, "aten.empty_strided.default")
                tile_ops.send(tile_ops.last, self.sum, self.bytes_of(rows), sent)
                sent = tile_ops.last_but_one = tile_ops.last
        return tile_ops


# -- weights that FSDP2 shards -------------------------------------------------------------------------------

_PACK = "fsdp.chunk_cat.default"
_REDUCES_AFTER = 2
"""Rows from the op that packs a unit's gradients to the op that reduces them (`parallel.sharding.fsdp_pass`).
"""


@dataclass(frozen=True, eq=False)
class _WholeTensors:
    """Whole parameters and gradients that FSDP2 gathers and reduces; (parameters,) each, -1 for none."""

    forward: I32
    """The whole parameter in forward."""
    backward: I32
    raw: I32
    """The whole gradient that this micro-batch produces."""
    pack: I32
    """The op that packs it."""
    bias: I32
    """The whole gradient of the bias of the same layer."""

    @classmethod
    def from_step(cls, step: Step) -> _WholeTensors:
        """Return those of the blocks of `step`."""
        gathers, count = gathers_of(step), len(step.parameters)
        assert gathers is not None
        one_of = np.full(step.ops.n, -1, np.int32)
        there = np.flatnonzero(step.storages.producer >= 0)
        one_of[step.storages.producer[there]] = there
        forward, backward, raw, pack = (np.full(count, -1, np.int32) for _ in range(4))
        n_blocks = len(step.blocks)
        for block, members in enumerate(members_of_units(step)):
            # FSDP2 allocates each parameter right before the op that copies all out of the gather's buffer.
            places = np.arange(-len(members), 0)
            forward[members] = one_of[gathers.copies[block] + places]
            backward[members] = one_of[gathers.copies[2 * n_blocks - 1 - block] + places]
        if _PACK in step.names:
            packed = (step.ops.name[step.uses.op] == step.names.index(_PACK)) & (step.uses.mode == READS)
            rows = np.flatnonzero(packed & (step.storages.owner[step.uses.storage] >= 0))
            owner = step.storages.owner[step.uses.storage[rows]]
            raw[owner], pack[owner] = step.uses.storage[rows], step.uses.op[rows]
        bias = _biases(columns_of(step.parameters).names)
        return cls(forward, backward, raw, pack, np.where(bias >= 0, raw[bias], -1).astype(np.int32))


@functools.lru_cache(maxsize=8)
def _biases(names: tuple[str, ...]) -> I32:
    """Return (parameters,) the bias of each weight's layer, -1 for none."""
    index = {name: i for i, name in enumerate(names)}
    return np.asarray([index.get(f"{name.removesuffix('weight')}bias", -1) for name in names], np.int32)


@functools.lru_cache(maxsize=8)
def tileable_rows(step: Step, tiles: int, ranks: int) -> tuple[int, ...]:
    """Return the `tileable` weights of a step that FSDP2 shards evenly over `ranks` ranks."""
    # Each block keeps a trained parameter that FSDP2 gathers and reduces.
    columns = columns_of(step.parameters)
    whole_tensors = _WholeTensors.from_step(step)
    product = products_of(step)
    two = np.asarray([len(shape) == 2 and shape[0] >= tiles for shape in columns.shapes], bool)
    mine = np.flatnonzero(two & (columns.block >= 0) & (whole_tensors.raw >= 0) & (columns.gradient >= 0))
    readers = _readers(
        step,
        np.concatenate([whole_tensors.forward[mine], whole_tensors.backward[mine], whole_tensors.raw[mine]]),
    )
    found = []
    for p in mine.tolist():
        raw, (rows, deep) = int(whole_tensors.raw[p]), columns.shapes[p]
        uses = np.concatenate(
            [readers[int(each)] for each in (whole_tensors.forward[p], whole_tensors.backward[p])]
        )
        # FSDP2 pads rows that the ranks do not divide; a tile would then mix padding with rows.
        even = int(step.storages.bytes[raw]) == ranks * rows * deep * int(columns.itemsize[p])
        if (
            even
            and product[uses].all()
            and product[step.storages.producer[raw]]
            # Another reader of the whole gradient, such as a hook's, needs it untiled.
            and len(readers[raw]) == 1
            and columns.names[p].rpartition(".")[0] not in step.blocks
            and is_linear(step, p, uses, raw, (ranks * rows, deep))
        ):
            found.append(p)
    large = large_ones(step, found)
    kept = np.zeros(len(step.blocks), bool)
    rest = np.setdiff1d(np.flatnonzero(whole_tensors.raw >= 0), large)
    kept[columns.block[rest[columns.block[rest] >= 0]]] = True
    return tuple(p for p in large if kept[columns.block[p]])


def _readers(step: Step, storages: I32) -> dict[int, I32]:
    """Return by storage the ops that read it, in order; FSDP2's op that fills it writes."""
    wanted = np.zeros(step.storages.n + 1, bool)
    wanted[storages] = True
    rows = np.flatnonzero(wanted[step.uses.storage] & (step.uses.mode == READS))
    rows = rows[np.argsort(step.uses.storage[rows], kind="stable")]
    start = np.searchsorted(step.uses.storage[rows], storages)
    stop = np.searchsorted(step.uses.storage[rows], storages, side="right")
    return {
        each: step.uses.op[rows[i:j]]
        for each, i, j in zip(storages.tolist(), start.tolist(), stop.tolist(), strict=True)
    }


def tile_rows(step: Step, weights: tuple[int, ...], tiles: int, ranks: int) -> Step:
    """Return `step` with these parameters in `tiles` tiles, each a share of every rank's rows.

    Args:
        step: A result of `offload.parameters.parameter_offload_pass` in which FSDP2 gathers the weights with
            their blocks.
        weights: A result of `tileable_rows`.
        tiles: At least 2.
        ranks: Over which the weights are sharded.
    """
    edit, whole_tensors, of = Edit(step), _WholeTensors.from_step(step), OffloadedWeights(step, weights)
    edit.set_ops(traffic_bytes=step.ops.traffic_bytes.copy())
    some = list(weights)
    readers = _readers(step, np.concatenate([whole_tensors.forward[some], whole_tensors.backward[some]]))
    sequences = OpSequences(step, edit)
    layers = [_ShardedLayer(sequences, of, p, tiles, ranks, whole_tensors, readers) for p in weights]
    layers.sort(key=lambda layer: layer.product)
    copies = run_layers_in_tiles(sequences, layers)
    # The last tile's gradient is freed when the next gradient is offloaded: the next weight's, or that of the
    # rest of the block.
    pack, after = np.asarray([(each.pack, each.reduce + 1) for each in layers], np.int32).T
    follows = np.append(pack[1:] == pack[:-1], False)
    edit.release_before(
        np.asarray([each.last for each in layers], np.int32),
        np.where(follows, np.append(copies[1:], -1), after),
    )
    read = [(each.source, each.reduce) for each in layers if step.storages.producer[each.source] >= 0]
    if read:
        # Held until the next block's moment begins, as an untiled load's source is.
        edit.hold_through(*np.asarray(read, np.int32).T)
    return without_whole_weights(edit, layers)


class _GatheredTileOps(TileOps):
    """Ops of tiles gathered from R ranks; bytes are of this rank's share, a part of the weight."""

    def __init__(
        self, sequences: OpSequences, ranks: int, *, waited: bool, staged: bool, given_bytes: int
    ) -> None:
        super().__init__(sequences, ranks)
        self._waited, self._staged, self._given_bytes = waited, staged, given_bytes
        self._columns = 0

    def load(self, n_bytes: int, source: int, *, prefetch: bool) -> int:
        """Load this rank's share and all-gather the tile."""
        # The share must be on the device before the gather starts.
        mine = super().load(n_bytes, source, prefetch=prefetch)
        tile = self.storage(
            self.op("aten.new_empty.default", Resource.NOTHING), self._ranks * n_bytes, Kind.COMMUNICATION
        )
        self._message(
            "memtune.all_gather_into_.default", mine, tile, n_bytes, waited=self._waited or not prefetch
        )
        return tile

    def _message(self, name: str, given: int, taken: int, n_bytes: int, *, waited: bool) -> int:
        op = self.op(
            name,
            Resource.INTRA_LINK,
            traffic=self._ranks * n_bytes,
            side="now" if waited else "",
            group=self._ranks,
        )
        self.uses(op, (given,), (taken,))
        return op

    def forward(self, like: int, part: float, tile: int) -> None:
        """Multiply, and copy the result to the tile's columns of the output, which are not adjacent."""
        out = self._sequences.made_by(like)
        n_bytes = int(part * self._step.storages.bytes[out])
        op = self.add_part_of(self.name_of(like), like, part)
        columns = self.storage(op, n_bytes, Kind.TEMPORARY, owned=False)
        self.uses(op, (tile,))
        self.uses(self._copy("aten.copy_.default", n_bytes), (columns,), (out,))

    def _copy(self, name: str, n_bytes: int) -> int:
        return self.op(name, Resource.COMPUTE, traffic=2 * n_bytes)

    def _tile_columns(self, like: int, part: float) -> int:
        """Return a copy of the tile's columns of the output's gradient, which `like` reads."""
        n_bytes = int(part * self._given_bytes)
        op = self._copy("aten.clone.default", n_bytes)
        self.uses(op, self.reads(like))
        return self.storage(op, n_bytes, Kind.TEMPORARY, owned=False)

    def add_input_gradient(self, like: int, part: float, tile: int, *, is_first: bool) -> None:
        """Add the tile's part of the input's gradient, from columns in the order of the tile's rows."""
        self._columns = self._tile_columns(like, part)
        super().add_input_gradient(like, part, tile, is_first=is_first)
        self.uses(len(self.ops) - 1, (self._columns,))

    def gradient(self, like: int, part: float, n_bytes: int, storage: int | None) -> int:
        """Compute the tile's gradient and reduce-scatter it."""
        # Backward of the input has cloned these columns already, unless the input needs no gradient.
        columns, self._columns = self._columns or self._tile_columns(like, part), 0
        op = self.add_part_of("aten.mm.default", like, part)
        self.uses(op, (columns,))
        tile = self.storage(op, self._ranks * n_bytes, Kind.TEMPORARY)
        mine = self.storage(self.op("aten.new_empty.default", Resource.NOTHING), n_bytes, Kind.TEMPORARY)
        reduce = self._message("memtune.reduce_scatter_into_.default", tile, mine, n_bytes, waited=True)
        # Gloo reduces a copy of its input (`runtime.seam`); NCCL reduces from the input itself.
        if self._staged:
            self.storage(reduce, self._ranks * n_bytes, Kind.WORKSPACE, owned=False)
        return mine


class _ShardedLayer(TiledLayer):
    """One weight of which this rank has C rows."""

    copy_is_after = True

    def __init__(
        self,
        sequences: OpSequences,
        of: OffloadedWeights,
        parameter: int,
        tiles: int,
        ranks: int,
        whole_tensors: _WholeTensors,
        readers: dict[int, I32],
    ) -> None:
        super().__init__(sequences, of, parameter, tiles, ranks)
        self._whole_tensors, self._readers = whole_tensors, readers
        self.raw, self.pack = int(whole_tensors.raw[parameter]), int(whole_tensors.pack[parameter])
        self.product, self.reduce = int(self.step.storages.producer[self.raw]), self.pack + _REDUCES_AFTER
        self._waited = int(self.step.ops.stream[self.reduce]) == 1
        self.source = -1
        """The host storage of its tiles in backward."""
        bias = int(whole_tensors.bias[parameter])
        # Autograd may produce the bias' gradient after the weight's.
        self.copy_anchor = max(self.product, int(self.step.storages.producer[bias]) if bias >= 0 else -1)

    def new_tile_ops(self) -> TileOps:
        """Return an empty sequence for one pass over the tiles."""
        step, itemsize = self.step, int(columns_of(self.step.parameters).itemsize[self.owner])
        deep, (waited, staged) = self.row_bytes // itemsize, self._modes()
        given_bytes = round(step.ops.flops[self.product] / (2 * deep) * itemsize)
        return _GatheredTileOps(
            self.sequences, self.ranks, waited=waited, staged=staged, given_bytes=given_bytes
        )

    def kind(self) -> tuple[int, ...]:
        """Return the key of `TiledLayer.kind` with the modes of messages."""
        return *super().kind(), *map(int, self._modes())

    def _modes(self) -> tuple[bool, bool]:
        """Return whether compute waits for messages, and whether reductions copy first."""
        return self._waited, self.sequences.made_by(self.reduce) >= 0

    def run_in_tiles(self) -> None:
        """Replace forward, recompute and backward; FSDP2 gathers and reduces the rest of the block."""
        step, gathers, is_read = self.step, gathers_of(self.step), False
        assert gathers is not None
        source_of: dict[int, int] = {}
        for there in self.on_device:
            source, users = self.drop_load(there)
            source_of |= dict.fromkeys(users, source)
        block, n_blocks = int(columns_of(step.parameters).block[self.owner]), len(step.blocks)
        for gather, copy, whole in (
            (gathers.forward[block], gathers.copies[block], self._whole_tensors.forward[self.owner]),
            (
                gathers.backward[block],
                gathers.copies[2 * n_blocks - 1 - block],
                self._whole_tensors.backward[self.owner],
            ),
        ):
            self._not_gathered(int(gather), int(copy), int(whole))
            for user in self._readers[int(whole)].tolist():
                back = bool(step.ops.phase[user] == Phase.BACKWARD)
                is_read |= back
                self.replace_uses(user, source_of[int(gather)], self.product if back else -1, None)
        if not is_read:
            self.replace_uses(-1, -1, self.product, None)
        self._not_reduced()
        self.replaced += [self.product, self.down]
        self.source = source_of[int(gathers.backward[block])]

    def _not_gathered(self, gather: int, copy: int, whole: int) -> None:
        step, edit, n_bytes = self.step, self.edit, int(self.step.storages.bytes[whole])
        edit.storages.bytes[self.sequences.written_by(gather)] -= n_bytes
        edit.ops.traffic_bytes[gather] -= n_bytes
        edit.ops.traffic_bytes[copy] -= 2 * n_bytes
        self.replaced.append(int(step.storages.producer[whole]))
        self.unused.append(whole)

    def _not_reduced(self) -> None:
        edit, n_bytes = self.edit, int(self.step.storages.bytes[self.raw])
        edit.storages.bytes[self.sequences.written_by(self.pack)] -= n_bytes
        edit.storages.bytes[self.sequences.written_by(self.reduce)] -= n_bytes // self.ranks
        edit.ops.traffic_bytes[self.pack] -= 2 * n_bytes
        edit.ops.traffic_bytes[self.reduce] -= n_bytes
        if (staging := self.sequences.made_by(self.reduce)) >= 0:
            edit.storages.bytes[staging] -= n_bytes
        self.unused.append(self.raw)
