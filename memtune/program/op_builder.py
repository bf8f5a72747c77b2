"""A sequence of new ops for an Edit, with the storages they read, write and make."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memtune.program.edit import Edit
from memtune.program.step import DONATES, READS, WRITES, Phase


@dataclass
class NewOps:
    """A sequence of new ops; `insert` adds all of it to the edit at one place."""

    edit: Edit
    first: int
    names: list[int] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    traffic: list[int] = field(default_factory=list)
    uses: list[tuple[int, int, int]] = field(default_factory=list)  # op, storage, mode
    made: list[tuple[int, int]] = field(default_factory=list)  # bytes, producer
    held: list[tuple[int, int]] = field(default_factory=list)
    _first_storage: int = 0

    def __post_init__(self) -> None:
        self._first_storage = self.edit.n_storages

    @property
    def last(self) -> int:
        """Row of the op that was appended last."""
        return self.first + len(self.names) - 1

    def run(
        self, name: str, *reads: int, writes: int = -1, donates: int = -1, like: int = -1, share: float = 1.0
    ) -> int:
        """Append an op; return its row.

        Args:
            name: Op name.
            reads: Storages that it reads.
            writes: Storage that it writes to, -1 for none.
            donates: Storage that it donates to its output, -1 for none.
            like: Op of the step from which it takes `share` of FLOPs and traffic; -1: it costs nothing.
            share: Fraction of the cost of `like`.
        """
        step = self.edit._step
        self.names.append(self.edit.name_id(name))
        self.flops.append(float(step.ops.flops[like]) * share if like >= 0 else 0.0)
        self.traffic.append(int(step.ops.traffic_bytes[like] * share) if like >= 0 else 0)
        self.uses += [(self.last, each, READS) for each in dict.fromkeys(reads)]
        if writes >= 0:
            self.uses += [(self.last, writes, WRITES)]
        if donates >= 0:
            self.uses += [(self.last, donates, DONATES)]
        return self.last

    def add_output(self, n_bytes: int) -> int:
        """Add an output of `n_bytes` to the last op; return the storage's row."""
        self.made.append((n_bytes, self.last))
        return self._first_storage + len(self.made) - 1

    def hold(self, storage: int, op: int) -> None:
        """Hold `storage` at least until `op`, one of these ops, has run."""
        self.held.append((storage, op))

    def insert(
        self,
        *,
        after: int | None = None,
        before: int | None = None,
        phase: Phase,
        module: int,
        call: int = -1,
    ) -> None:
        """Insert all ops into the edit, after op `after` or before op `before`."""
        anchor = np.full(len(self.names), before if after is None else after, np.int32)
        self.edit.add_ops(
            np.asarray(self.names, np.int32),
            after=None if after is None else anchor,
            before=anchor if after is None else None,
            phase=phase,
            call=call,
            flops=np.asarray(self.flops),
            traffic_bytes=np.asarray(self.traffic, np.int64),
            module=module,
        )
        if self.made:
            n_bytes, producer = (np.asarray(column) for column in zip(*self.made, strict=True))
            self.edit.add_storages(n_bytes.astype(np.int64), producer=producer.astype(np.int32))
        for mode in (READS, WRITES, DONATES):
            pairs = [(op, storage) for op, storage, used in self.uses if used == mode]
            if pairs:
                ops, storages = (np.asarray(column, np.int32) for column in zip(*pairs, strict=True))
                self.edit.add_uses(ops, storages, mode=mode)
        if self.held:
            storages, ops = (np.asarray(column, np.int32) for column in zip(*self.held, strict=True))
            self.edit.hold_through(storages, ops)
