"""Ops of a Step that replace a product with a whole weight: loads of tiles, products with them, and copies of
their gradients. Equal sequences of several weights are built once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from memtune.program import I32, WRITES, Edit, Kind, Resource, Step

PRODUCTS = ("aten.addmm.default", "aten.mm.default")
OUT = {"aten.addmm.default": "aten.addmm.out", "aten.mm.default": "aten.mm.out"}


class TileOps:
    """Consecutive ops for a weight that is whole on the host, so that its tiles are some of its rows.

    Storages are the step's, or new ones by negative numbers.
    """

    def __init__(self, sequences: OpSequences, ranks: int = 1) -> None:
        self._sequences, self._step, self._ranks = sequences, sequences.step, ranks
        self.ops: list[tuple[str, Resource, float, int, bool, int, int, int]] = []
        self.new: list[tuple[int, int, bool, Kind]] = []  # op, bytes, whether it is the weight's, kind
        self.producers: list[tuple[int, int]] = []  # storage of the step, op
        self.used: list[tuple[int, int, bool]] = []  # op, storage, mutates
        self.releases: list[tuple[int, int]] = []  # storage, op
        self.last = self.last_but_one = 0
        """The gradients of these tiles, if any."""

    # -- ops and storages ------------------------------------------------------------------------------------

    def op(
        self,
        name: str,
        resource: Resource,
        flops: float = 0,
        traffic: int = 0,
        in_module: bool = False,
        side: str = "",
        group: int = 0,
    ) -> int:
        """Add an op; `side`: compute waits for its stream ("now"), or it for compute ("prefetch")."""
        self.ops.append(
            (name, resource, flops, traffic, in_module, group, int(side == "now"), int(side == "prefetch"))
        )
        return len(self.ops) - 1

    def storage(self, op: int, n_bytes: int, kind: Kind, *, owned: bool = True) -> int:
        """Add a storage that the op produces; `owned`: it belongs to the weight."""
        self.new.append((op, n_bytes, owned, kind))
        return -len(self.new)

    def uses(self, op: int, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> None:
        """Add the op's uses."""
        self.used += [(op, each, False) for each in reads] + [(op, each, True) for each in writes]

    def add_part_of(self, name: str, like: int, part: float) -> int:
        """Add a part of the step's op `like` with its reads, except of the weight."""
        step = self._step
        op = self.op(
            name,
            Resource.COMPUTE,
            part * step.ops.flops[like],
            int(part * step.ops.traffic_bytes[like]),
            True,
        )
        self.uses(op, self.reads(like))
        return op

    def reads(self, op: int) -> tuple[int, ...]:
        """Return the storages that the step's op reads, without offloaded weights."""
        return self._sequences.reads(op)

    def name_of(self, op: int) -> str:
        """Return the name of an op of the step."""
        return self._step.names[int(self._step.ops.name[op])]

    # -- loads, products and copies of tiles -----------------------------------------------------------------

    def allocate(self, storage: int, name: str = "aten.new_empty.default") -> None:
        """Let a storage of the step be produced here."""
        self.producers.append((storage, self.op(name, Resource.NOTHING)))

    def load(self, n_bytes: int, source: int, *, prefetch: bool) -> int:
        """Load a tile."""
        there = self.storage(
            self.op("aten.empty.memory_format", Resource.NOTHING), n_bytes, Kind.COMMUNICATION
        )
        copy = self.op(
            "memtune.copy_to_device_.default",
            Resource.HOST_TO_DEVICE,
            traffic=n_bytes,
            side="prefetch" if prefetch else "now",
        )
        # One source for all tiles: host memory is freed with the last one.
        self.uses(copy, (source,), (there,))
        return there

    def forward(self, like: int, part: float, tile: int) -> None:
        """Compute the tile's columns of the output of `like`."""
        op = self.add_part_of(OUT[self.name_of(like)], like, part)
        self.uses(op, (tile,), (self._sequences.made_by(like),))

    def add_input_gradient(self, like: int, part: float, tile: int, *, is_first: bool) -> None:
        """Add the tile's part of the input's gradient, the output of `like`."""
        op = self.add_part_of("aten.mm.out" if is_first else "aten.addmm.out", like, part)
        self.uses(op, (tile,), (self._sequences.made_by(like),))

    def gradient(self, like: int, part: float, n_bytes: int, storage: int | None) -> int:
        """Compute the tile's gradient, part of the output of `like`, and average it; return its storage."""
        op = self.add_part_of("aten.mm.default", like, part)
        if storage is None:
            storage = self.storage(op, n_bytes, Kind.TEMPORARY)
        else:
            self.producers.append((storage, op))
        # In place, on the tile: the whole gradient never exists.
        if self._ranks > 1:
            average = self.op(
                "memtune.all_reduce_.default", Resource.INTRA_LINK, traffic=n_bytes, group=self._ranks
            )
            self.uses(average, writes=(storage,))
        return storage

    def send(self, gradient: int, host: int, n_bytes: int, before: int | None) -> None:
        """Start the D2H copy of a tile's gradient into `host`; free the gradient `before`."""
        op = self.op(
            "memtune.copy_to_host_.default", Resource.DEVICE_TO_HOST, traffic=n_bytes, side="prefetch"
        )
        self.uses(op, (gradient,), (host,))
        if before is not None:
            self.releases.append((before, op))


class TileGroup:
    """Equal op sequences of several weights; the storages of each in the step are its slots."""

    def __init__(self, tile_ops: TileOps, slots: Sequence[int]) -> None:
        self.tile_ops = tile_ops
        # Reversed: the first slot of a storage that occurs twice wins.
        self._place = {each: i for i, each in reversed(list(enumerate(slots)))}
        self._anchors: list[int] = []
        self._owners: list[int] = []
        self._slots: list[Sequence[int]] = []
        self._made = np.empty((0, 0), np.int32)  # (members, new storages)

    def join(self, anchor: int, owner: int, slots: Sequence[int]) -> int:
        """Add one more sequence before the op `anchor`; return its number."""
        self._anchors.append(anchor)
        self._owners.append(owner)
        self._slots.append(slots)
        return len(self._anchors) - 1

    def step_storage(self, member: int, storage: int) -> int:
        """Return the storage of the step for `storage` of the sequence."""
        return (
            int(self._made[member, -storage - 1])
            if storage < 0
            else self._slots[member][self._place[storage]]
        )

    def insert(self, step: Step, edit: Edit) -> None:
        """Add all sequences to the step."""
        count, anchors = len(self._anchors), np.asarray(self._anchors, np.int32)
        names, resource, flops, traffic, in_module, group, stream, prefetch = zip(
            *self.tile_ops.ops, strict=True
        )
        size, ids = len(names), {each: edit.name_id(each) for each in dict.fromkeys(names)}

        def of_all(column: Sequence[float], dtype: type) -> Any:
            return np.tile(np.asarray(column, dtype), count)

        # Members differ in their anchor and in their storages only.
        rows = edit.add_ops(
            of_all([ids[each] for each in names], np.int32),
            before=np.repeat(anchors, size),
            phase=np.repeat(step.ops.phase[anchors], size),
            resource=of_all(resource, np.uint8),
            flops=of_all(flops, np.float64),
            traffic_bytes=of_all(traffic, np.int64),
            module=np.where(of_all(in_module, np.bool_), np.repeat(step.ops.module[anchors], size), 0).astype(
                np.int32
            ),
            call=np.repeat(step.ops.call[anchors], size),
            group=of_all(group, np.int32),
            stream=of_all(stream, np.uint8),
            prefetch=of_all(prefetch, np.uint8),
        ).reshape(count, size)
        if self.tile_ops.new:
            by, n_bytes, owned, kind = zip(*self.tile_ops.new, strict=True)
            owners = np.repeat(np.asarray(self._owners, np.int32), len(by))
            self._made = edit.add_storages(
                of_all(n_bytes, np.int64),
                producer=rows[:, by].ravel(),
                kind=of_all(kind, np.uint8),
                owner=np.where(of_all(owned, np.bool_), owners, np.int32(-1)),
            ).reshape(count, len(by))
        self._uses(edit, rows)

    def _uses(self, edit: Edit, rows: I32) -> None:
        slots = np.asarray(self._slots, np.int32)

        def step_storage(storages: Sequence[int]) -> I32:
            return np.stack(
                [self._made[:, -each - 1] if each < 0 else slots[:, self._place[each]] for each in storages],
                axis=1,
            )

        for storage, op in self.tile_ops.producers:
            edit.storages.producer[slots[:, self._place[storage]]] = rows[:, op]
        for mutates in (False, True):
            uses = [(op, storage) for op, storage, writes in self.tile_ops.used if writes == mutates]
            if uses:
                ops, storages = zip(*uses, strict=True)
                edit.add_uses(rows[:, ops].ravel(), step_storage(storages).ravel(), mode=mutates)
        if self.tile_ops.releases:
            storages, ops = zip(*self.tile_ops.releases, strict=True)
            edit.release_before(step_storage(storages).ravel(), rows[:, ops].ravel())


class OpSequences:
    """Op sequences that are added to a step together; equal ones are built once."""

    def __init__(self, step: Step, edit: Edit) -> None:
        self.step, self.edit = step, edit
        self._groups: dict[Hashable, TileGroup] = {}
        one_of = np.full(step.ops.n, -1, np.int32)
        there = np.flatnonzero(step.storages.producer >= 0)
        one_of[step.storages.producer[there]] = there
        # Lists, because single elements of numpy arrays are slow to read.
        self._one_of: list[int] = one_of.tolist()
        self._starts: list[int] = np.searchsorted(step.uses.op, np.arange(step.ops.n + 1)).tolist()
        self._used: list[int] = step.uses.storage.tolist()
        self._writes: list[bool] = (step.uses.mode == WRITES).tolist()
        self._comes: list[bool] = (step.storages.kind == Kind.COMMUNICATION).tolist()
        self._costs = step.ops.name.tolist(), step.ops.flops.tolist(), step.ops.traffic_bytes.tolist()

    def used_by(self, op: int) -> list[int]:
        """Return the storages that `op` reads or writes."""
        return self._used[self._starts[op] : self._starts[op + 1]]

    def written_by(self, op: int) -> list[int]:
        """Return the storages that `op` writes."""
        return [self._used[row] for row in range(self._starts[op], self._starts[op + 1]) if self._writes[row]]

    def made_by(self, op: int) -> int:
        """Return the one storage that `op` produces."""
        return self._one_of[op]

    def reads(self, op: int) -> tuple[int, ...]:
        """Return the storages that the product `op` reads, without offloaded weights."""
        return tuple(each for each in self.used_by(op) if not self._comes[each])

    def join(
        self,
        kind: Hashable,
        ops: Sequence[int],
        owner: int,
        slots: Sequence[int],
        build: Callable[[], TileOps],
    ) -> tuple[TileGroup, int]:
        """Add a sequence before the first of `ops`, which it replaces.

        Args:
            kind: Sequences of one kind are equal if their ops and slots are.
            ops: Products of the step.
            owner: The weight.
            slots: Storages of the step in it.
            build: Builds the first of its kind.

        Returns:
            Its group and its number in the group.
        """
        # Names, flops and bytes of the replaced products, and which slots are the same storage.
        key = (
            kind,
            tuple(column[op] for op in ops for column in self._costs),
            tuple(slots.index(each) for each in slots),
        )
        if key not in self._groups:
            self._groups[key] = TileGroup(build(), slots)
        group = self._groups[key]
        return group, group.join(ops[0], owner, slots)

    def done(self) -> None:
        """Add all groups to the step."""
        for group in self._groups.values():
            group.insert(self.step, self.edit)


@functools.lru_cache(maxsize=256)
def split_rows(count: int, parts: int) -> tuple[slice, ...]:
    """Return `count` rows in at most `parts` consecutive runs, whose lengths differ by one at most."""
    parts = min(parts, count)
    # The first runs are the longer ones, as `torch.tensor_split` divides.
    least, more = divmod(count, parts)
    starts = [i * least + min(i, more) for i in range(parts + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(starts))
