"""What takes the place of a product with a whole weight: the weight's tiles come in, one after the other, and are multiplied."""

from __future__ import annotations

import numpy as np

from memtune.edit import Edit
from memtune.program import I32, Kind, Phase, Resource, Step

PRODUCTS = ("aten.addmm.default", "aten.mm.default")
OUT = {"aten.addmm.default": "aten.addmm.out", "aten.mm.default": "aten.mm.out"}


def used_by(step: Step, op: int) -> I32:
    """The storages that `op` reads or writes."""
    start, stop = np.searchsorted(step.use_op, (op, op + 1))
    return step.use_storage[start:stop]


def made_by(step: Step, op: int) -> int:
    """The one storage that `op` makes."""
    return int(np.flatnonzero(step.producer == op)[0].item())


class Turn:
    """Ops in a row before the op `anchor`, of a weight that is whole on the host, so that its tiles are some of its rows.

    Storages are the step's, or new ones by negative numbers until `done`.
    """

    def __init__(self, step: Step, edit: Edit, anchor: int, ranks: int = 1) -> None:
        self._step, self._edit, self._anchor, self._ranks = step, edit, anchor, ranks
        self._ops: list[tuple[str, Resource, float, int, int, int, int, int]] = []
        self._new: list[tuple[int, int, int, Kind]] = []  # op, bytes, owner, kind
        self._producers: list[tuple[int, int]] = []  # storage of the step, op
        self._uses: list[tuple[int, int, bool]] = []  # op, storage, mutates
        self._releases: list[tuple[int, int]] = []  # storage, op

    # -- what a turn is made of ------------------------------------------------------------------------------------------

    def op(
        self, name: str, resource: Resource, flops: float = 0, traffic: int = 0, module: int = 0, side: str = "", group: int = 0
    ) -> int:
        """One more op; on a `side` that compute waits for ("now"), or that waits for compute ("ahead")."""
        self._ops.append((name, resource, flops, traffic, module, group, int(side == "now"), int(side == "ahead")))
        return len(self._ops) - 1

    def storage(self, op: int, n_bytes: int, owner: int, kind: Kind) -> int:
        """What the op makes, a new one."""
        self._new.append((op, n_bytes, owner, kind))
        return -len(self._new)

    def uses(self, op: int, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> None:
        """The op's storages."""
        self._uses += [(op, each, False) for each in reads] + [(op, each, True) for each in writes]

    def like(self, name: str, like: int, part: float) -> int:
        """Part of the step's op `like`, with what that reads; another kind of memory takes the weight's place."""
        step = self._step
        op = self.op(
            name, Resource.COMPUTE, part * step.op_flops[like], int(part * step.op_traffic_bytes[like]), int(step.op_module[like])
        )
        reads = used_by(step, like)
        self.uses(op, tuple(reads[step.kind[reads] != Kind.COMMUNICATION].tolist()))
        return op

    def name_of(self, op: int) -> str:
        """Of an op of the step."""
        return self._step.names[int(self._step.op_name[op])]

    # -- what tiles are for ----------------------------------------------------------------------------------------------

    def allocate(self, storage: int, name: str = "aten.new_empty.default") -> None:
        """A storage of the step is there from here on."""
        self._producers.append((storage, self.op(name, Resource.NOTHING)))

    def bring(self, n_bytes: int, source: int, owner: int, *, ahead: bool) -> int:
        """A tile comes to the device."""
        there = self.storage(self.op("aten.empty.memory_format", Resource.NOTHING), n_bytes, owner, Kind.COMMUNICATION)
        load = self.op(
            "memtune.copy_to_device_.default", Resource.HOST_TO_DEVICE, traffic=n_bytes, side="ahead" if ahead else "now"
        )
        self.uses(load, (source,), (there,))
        return there

    def forward(self, like: int, part: float, tile: int) -> None:
        """The tile's columns of what `like` made."""
        op = self.like(OUT[self.name_of(like)], like, part)
        self.uses(op, (tile,), (made_by(self._step, like),))

    def back(self, like: int, part: float, tile: int, *, is_first: bool) -> None:
        """The tile's part of the input's gradient, which `like` made."""
        op = self.like("aten.mm.out" if is_first else "aten.addmm.out", like, part)
        self.uses(op, (tile,), (made_by(self._step, like),))

    def gradient(self, like: int, part: float, n_bytes: int, storage: int | None) -> int:
        """The tile's gradient, part of what `like` made, averaged over replicas: a storage of the step or a new one."""
        op = self.like("aten.mm.default", like, part)
        if storage is None:
            storage = self.storage(op, n_bytes, int(self._step.owner[made_by(self._step, like)]), Kind.TEMPORARY)
        else:
            self._producers.append((storage, op))
        if self._ranks > 1:
            average = self.op("memtune.all_reduce_.default", Resource.INTRA_LINK, traffic=n_bytes, group=self._ranks)
            self.uses(average, writes=(storage,))
        return storage

    def send(self, gradient: int, host: int, n_bytes: int, before: int | None) -> None:
        """A tile's gradient starts down into `host`; the one `before` is let go."""
        op = self.op("memtune.copy_to_host_.default", Resource.DEVICE_TO_HOST, traffic=n_bytes, side="ahead")
        self.uses(op, (gradient,), (host,))
        if before is not None:
            self._releases.append((before, op))

    def done(self) -> I32:
        """Put them into the step; returns the new storages, in the order of their negative numbers."""
        step, edit, anchor = self._step, self._edit, self._anchor
        names, resource, flops, traffic, module, group, stream, prefetch = zip(*self._ops, strict=True)
        ids = {each: edit.name_id(each) for each in set(names)}
        rows = edit.add_ops(
            np.asarray([ids[each] for each in names], np.int32), before=np.full(len(names), anchor, np.int32),
            phase=Phase(int(step.op_phase[anchor])), resource=np.asarray(resource, np.uint8), flops=np.asarray(flops, np.float64),
            traffic_bytes=np.asarray(traffic, np.int64), module=np.asarray(module, np.int32), call=int(step.op_call[anchor]),
            group=np.asarray(group, np.int32), stream=np.asarray(stream, np.uint8), prefetch=np.asarray(prefetch, np.uint8),
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
