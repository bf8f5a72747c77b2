"""What takes the place of a product with a whole weight: the weight's tiles come in, one after the other, and are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from memtune.edit import Edit
from memtune.program import I32, WRITES, Kind, Resource, Step

PRODUCTS = ("aten.addmm.default", "aten.mm.default")
OUT = {"aten.addmm.default": "aten.addmm.out", "aten.mm.default": "aten.mm.out"}


class Turn:
    """Ops in a row, of a weight that is whole on the host, so that its tiles are some of its rows.

    Storages are the step's, or new ones by negative numbers.
    """

    def __init__(self, turns: Turns, ranks: int = 1) -> None:
        self._turns, self._step, self._ranks = turns, turns.step, ranks
        self.ops: list[tuple[str, Resource, float, int, bool, int, int, int]] = []
        self.new: list[tuple[int, int, bool, Kind]] = []  # op, bytes, whether it is the weight's, kind
        self.producers: list[tuple[int, int]] = []  # storage of the step, op
        self.used: list[tuple[int, int, bool]] = []  # op, storage, mutates
        self.releases: list[tuple[int, int]] = []  # storage, op
        self.last = self.last_but_one = 0
        """The gradients of these tiles, where it makes any."""

    # -- what a turn is made of ------------------------------------------------------------------------------------------

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
        """One more op; on a `side` that compute waits for ("now"), or that waits for compute ("ahead")."""
        self.ops.append((name, resource, flops, traffic, in_module, group, int(side == "now"), int(side == "ahead")))
        return len(self.ops) - 1

    def storage(self, op: int, n_bytes: int, kind: Kind, *, owned: bool = True) -> int:
        """What the op makes, a new one; `owned`: it is of the weight."""
        self.new.append((op, n_bytes, owned, kind))
        return -len(self.new)

    def uses(self, op: int, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> None:
        """The op's storages."""
        self.used += [(op, each, False) for each in reads] + [(op, each, True) for each in writes]

    def like(self, name: str, like: int, part: float) -> int:
        """Part of the step's op `like`, with what that reads; another kind of memory takes the weight's place."""
        step = self._step
        op = self.op(name, Resource.COMPUTE, part * step.op_flops[like], int(part * step.op_traffic_bytes[like]), True)
        self.uses(op, self.reads(like))
        return op

    def reads(self, op: int) -> tuple[int, ...]:
        """What the step's op reads beside weights that come and go."""
        return self._turns.reads(op)

    def name_of(self, op: int) -> str:
        """Of an op of the step."""
        return self._step.names[int(self._step.op_name[op])]

    # -- what tiles are for ----------------------------------------------------------------------------------------------

    def allocate(self, storage: int, name: str = "aten.new_empty.default") -> None:
        """A storage of the step is there from here on."""
        self.producers.append((storage, self.op(name, Resource.NOTHING)))

    def bring(self, n_bytes: int, source: int, *, ahead: bool) -> int:
        """A tile comes to the device."""
        there = self.storage(self.op("aten.empty.memory_format", Resource.NOTHING), n_bytes, Kind.COMMUNICATION)
        load = self.op(
            "memtune.copy_to_device_.default", Resource.HOST_TO_DEVICE, traffic=n_bytes, side="ahead" if ahead else "now"
        )
        self.uses(load, (source,), (there,))
        return there

    def forward(self, like: int, part: float, tile: int) -> None:
        """The tile's columns of what `like` made."""
        op = self.like(OUT[self.name_of(like)], like, part)
        self.uses(op, (tile,), (self._turns.made_by(like),))

    def back(self, like: int, part: float, tile: int, *, is_first: bool) -> None:
        """The tile's part of the input's gradient, which `like` made."""
        op = self.like("aten.mm.out" if is_first else "aten.addmm.out", like, part)
        self.uses(op, (tile,), (self._turns.made_by(like),))

    def gradient(self, like: int, part: float, n_bytes: int, storage: int | None) -> int:
        """The tile's gradient, part of what `like` made, averaged over replicas: a storage of the step or a new one."""
        op = self.like("aten.mm.default", like, part)
        if storage is None:
            storage = self.storage(op, n_bytes, Kind.TEMPORARY)
        else:
            self.producers.append((storage, op))
        if self._ranks > 1:
            average = self.op("memtune.all_reduce_.default", Resource.INTRA_LINK, traffic=n_bytes, group=self._ranks)
            self.uses(average, writes=(storage,))
        return storage

    def send(self, gradient: int, host: int, n_bytes: int, before: int | None) -> None:
        """A tile's gradient starts down into `host`; the one `before` is let go."""
        op = self.op("memtune.copy_to_host_.default", Resource.DEVICE_TO_HOST, traffic=n_bytes, side="ahead")
        self.uses(op, (gradient,), (host,))
        if before is not None:
            self.releases.append((before, op))


class Group:
    """Equal turns of several weights; what one of them has of the step are its slots."""

    def __init__(self, turn: Turn, slots: Sequence[int]) -> None:
        self.turn = turn
        self._place = {each: i for i, each in reversed(list(enumerate(slots)))}
        self._anchors: list[int] = []
        self._owners: list[int] = []
        self._slots: list[Sequence[int]] = []
        self._made = np.empty((0, 0), np.int32)  # (members, new storages)

    def join(self, anchor: int, owner: int, slots: Sequence[int]) -> int:
        """One more turn, before the op `anchor`; returns its number."""
        self._anchors.append(anchor)
        self._owners.append(owner)
        self._slots.append(slots)
        return len(self._anchors) - 1

    def real(self, member: int, storage: int) -> int:
        """What `storage` of the turn is in the step."""
        return int(self._made[member, -storage - 1]) if storage < 0 else self._slots[member][self._place[storage]]

    def put(self, step: Step, edit: Edit) -> None:
        """Have them all in the step."""
        count, anchors = len(self._anchors), np.asarray(self._anchors, np.int32)
        names, resource, flops, traffic, in_module, group, stream, prefetch = zip(*self.turn.ops, strict=True)
        size, ids = len(names), {each: edit.name_id(each) for each in set(names)}

        def of_all(column: Sequence[float], dtype: type) -> Any:
            return np.tile(np.asarray(column, dtype), count)

        rows = edit.add_ops(
            of_all([ids[each] for each in names], np.int32), before=np.repeat(anchors, size),
            phase=np.repeat(step.op_phase[anchors], size), resource=of_all(resource, np.uint8), flops=of_all(flops, np.float64),
            traffic_bytes=of_all(traffic, np.int64),
            module=np.where(of_all(in_module, np.bool_), np.repeat(step.op_module[anchors], size), 0).astype(np.int32),
            call=np.repeat(step.op_call[anchors], size), group=of_all(group, np.int32), stream=of_all(stream, np.uint8),
            prefetch=of_all(prefetch, np.uint8),
        ).reshape(count, size)  # fmt: skip
        if self.turn.new:
            by, n_bytes, owned, kind = zip(*self.turn.new, strict=True)
            owners = np.repeat(np.asarray(self._owners, np.int32), len(by))
            self._made = edit.add_storages(
                of_all(n_bytes, np.int64), producer=rows[:, by].ravel(), kind=of_all(kind, np.uint8),
                owner=np.where(of_all(owned, np.bool_), owners, np.int32(-1)),
            ).reshape(count, len(by))  # fmt: skip
        self._uses(edit, rows)

    def _uses(self, edit: Edit, rows: I32) -> None:
        slots = np.asarray(self._slots, np.int32)

        def real(storages: Sequence[int]) -> I32:
            return np.stack([self._made[:, -each - 1] if each < 0 else slots[:, self._place[each]] for each in storages], axis=1)

        for storage, op in self.turn.producers:
            edit.producer[slots[:, self._place[storage]]] = rows[:, op]
        for mutates in (False, True):
            uses = [(op, storage) for op, storage, writes in self.turn.used if writes == mutates]
            if uses:
                ops, storages = zip(*uses, strict=True)
                edit.add_uses(rows[:, ops].ravel(), real(storages).ravel(), mutates=mutates)
        if self.turn.releases:
            storages, ops = zip(*self.turn.releases, strict=True)
            edit.let_go_before(real(storages).ravel(), rows[:, ops].ravel())


class Turns:
    """Turns that are put into a step together: equal ones are made once."""

    def __init__(self, step: Step, edit: Edit) -> None:
        self.step, self.edit = step, edit
        self._groups: dict[Hashable, Group] = {}
        one_of = np.full(step.n_ops, -1, np.int32)
        there = np.flatnonzero(step.producer >= 0)
        one_of[step.producer[there]] = there
        # Lists: what is asked of them is asked one by one.
        self._one_of: list[int] = one_of.tolist()
        self._starts: list[int] = np.searchsorted(step.use_op, np.arange(step.n_ops + 1)).tolist()
        self._used: list[int] = step.use_storage.tolist()
        self._writes: list[bool] = (step.use_mutates == WRITES).tolist()
        self._comes: list[bool] = (step.kind == Kind.COMMUNICATION).tolist()
        self._costs = step.op_name.tolist(), step.op_flops.tolist(), step.op_traffic_bytes.tolist()

    def used_by(self, op: int) -> list[int]:
        """The storages that `op` reads or writes."""
        return self._used[self._starts[op] : self._starts[op + 1]]

    def written_by(self, op: int) -> list[int]:
        """Those that it writes."""
        return [self._used[row] for row in range(self._starts[op], self._starts[op + 1]) if self._writes[row]]

    def made_by(self, op: int) -> int:
        """The one storage that `op` makes."""
        return self._one_of[op]

    def reads(self, op: int) -> tuple[int, ...]:
        """What `op`, a product, reads beside weights that come and go."""
        return tuple(each for each in self.used_by(op) if not self._comes[each])

    def join(
        self, kind: Hashable, ops: Sequence[int], owner: int, slots: Sequence[int], build: Callable[[], Turn]
    ) -> tuple[Group, int]:
        """A turn before the first of `ops`, in whose place it is.

        Args:
            kind: Turns of one kind are equal where ops and slots are.
            ops: Products of the step.
            owner: Whose weight it is.
            slots: Storages of the step in it.
            build: Makes it, where it is the first of its sort.

        Returns:
            Its group and its number in there.
        """
        key = (kind, tuple(column[op] for op in ops for column in self._costs), tuple(slots.index(each) for each in slots))
        if key not in self._groups:
            self._groups[key] = Group(build(), slots)
        group = self._groups[key]
        return group, group.join(ops[0], owner, slots)

    def done(self) -> None:
        """Put them into the step."""
        for group in self._groups.values():
            group.put(self.step, self.edit)
