"""Tiles of weights that FSDP2 shards: each is gathered from all ranks, and its gradient reduce-scattered."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from memtune.offload.tiles.tile_ops_pass import OpSequences, TileOps
from memtune.offload.tiles.tiled_weights_pass import (
    OffloadedWeights,
    TiledLayer,
    is_linear,
    large_ones,
    products_of,
    run_layers_in_tiles,
    without_whole_weights,
)
from memtune.program import (
    I32,
    READS,
    Edit,
    Kind,
    Phase,
    Resource,
    Step,
    columns_of,
    gathers_of,
    members_of_units,
)

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
    def of(cls, step: Step) -> _WholeTensors:
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
    """Return the `tileable` weights of a step that FSDP2 shards evenly over `ranks` ranks.

    Each block keeps a trained parameter that FSDP2 gathers and reduces.
    """
    columns, whole_tensors, product = columns_of(step.parameters), _WholeTensors.of(step), products_of(step)
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
    edit, whole_tensors, of = Edit(step), _WholeTensors.of(step), OffloadedWeights(step, weights)
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
        op = self.like(self.name_of(like), like, part)
        columns = self.storage(op, n_bytes, Kind.TEMPORARY, owned=False)
        self.uses(op, (tile,))
        self.uses(self._copy("aten.copy_.default", n_bytes), (columns,), (out,))

    def _copy(self, name: str, n_bytes: int) -> int:
        return self.op(name, Resource.COMPUTE, traffic=2 * n_bytes)

    def _given(self, like: int, part: float) -> int:
        """Return a copy of the tile's columns of the output's gradient, which `like` reads."""
        n_bytes = int(part * self._given_bytes)
        op = self._copy("aten.clone.default", n_bytes)
        self.uses(op, self.reads(like))
        return self.storage(op, n_bytes, Kind.TEMPORARY, owned=False)

    def back(self, like: int, part: float, tile: int, *, is_first: bool) -> None:
        """Add the tile's part of the input's gradient, from columns in the order of the tile's rows."""
        self._columns = self._given(like, part)
        super().back(like, part, tile, is_first=is_first)
        self.uses(len(self.ops) - 1, (self._columns,))

    def gradient(self, like: int, part: float, n_bytes: int, storage: int | None) -> int:
        """Compute the tile's gradient and reduce-scatter it."""
        # Backward of the input has cloned these columns already, unless the input needs no gradient.
        columns, self._columns = self._columns or self._given(like, part), 0
        op = self.like("aten.mm.default", like, part)
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
                self.run(user, source_of[int(gather)], self.product if back else -1, None)
        if not is_read:
            self.run(-1, -1, self.product, None)
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
