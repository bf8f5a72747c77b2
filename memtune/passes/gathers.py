"""All-gathers of units of parameters in a step: how far ahead of their use they stand, and the buffers they fill."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtune.edit import Edit
from memtune.passes.shares import add_storages
from memtune.passes.units import Ragged, column
from memtune.program import I32, I64, Kind, Phase, Resource


@dataclass(frozen=True, eq=False)
class Gathered:
    """What an all-gather of some units made: (units,) buffers, gathers and copying ops, and the whole parameters by unit."""

    buffer: I32
    gather: I32
    copy: I32
    whole: I32


@dataclass(frozen=True, eq=False)
class When:
    """When units are gathered: (units,) places in the order in which compute comes to them, and (places,) the op of each."""

    issued: I64
    """At which place the gather is put …"""
    used: I64
    """… and at which the unit is copied out."""
    op: I32

    def starts(self, count: I64) -> tuple[I64, I64]:
        """(units,) where the two rows of each gather and the `count` + 1 of each copy begin.

        A gather that runs ahead is put after the copy of the unit in whose place it stands.
        """
        units, early = np.arange(len(count)), self.issued < self.used
        keys = (np.concatenate([units, units]), np.concatenate([2 * early, np.ones_like(units)]))
        order = np.lexsort((*keys, np.concatenate([self.issued, self.used])))
        size = np.concatenate([np.full(len(count), 2), count + 1])
        start = np.empty_like(size)
        start[order] = np.cumsum(size[order]) - size[order]
        return start[: len(count)], start[len(count) :]


def gather_units(edit: Edit, whole: Ragged, when: When, phase: Phase, group: int | I64, *, ahead: int, stream: int) -> Gathered:
    """Gather units from `group` ranks each and copy them out into whole parameters.

    Args:
        edit: Of the step.
        whole: Bytes of the parameters of each unit; its ops: a buffer, the all-gather; an allocation a parameter, the copy.
        when: Where gathers and copies go.
        phase: In which all this is.
        group: Ranks that hold a part each.
        ahead: How far a gather runs ahead of compute on the link's own stream (`Step.op_prefetch`).
        stream: On which it runs.
    """
    sums, before, copied_before = whole.sums(), when.op[when.issued], when.op[when.used]
    make, first = when.starts(whole.count)
    gather, allocate, copy = make + 1, whole.places(first), first + whole.count
    n_ops = len(whole.values) + 3 * len(sums)
    rows = edit.add_ops(
        column(
            n_ops, np.int32,
            (make, edit.name_id("aten.empty.memory_format")), (gather, edit.name_id("memtune.all_gather_into_.default")),
            (allocate, edit.name_id("memtune.allocate")), (copy, edit.name_id("fsdp.split_with_sizes_copy.default")),
        ),
        before=column(
            n_ops, np.int32, (make, before), (gather, before), (allocate, copied_before[whole.part]), (copy, copied_before)
        ),
        phase=phase,
        resource=column(
            n_ops, np.uint8, (make, Resource.NOTHING), (gather, Resource.INTRA_LINK), (allocate, Resource.NOTHING), (copy, 0)
        ),
        traffic_bytes=column(n_ops, np.int64, (gather, sums), (copy, 2 * sums)),
        group=column(n_ops, np.int32, (gather, group)),
        stream=column(n_ops, np.uint8, (gather, stream)),
        prefetch=column(n_ops, np.uint8, (gather, ahead)),
    )  # fmt: skip
    # Storages of a unit: its buffer, the whole parameters.
    buffer = whole.starts + np.arange(len(make))
    inside = whole.places(buffer + 1)
    storages = add_storages(
        edit, [(buffer, rows[make], sums, Kind.COMMUNICATION), (inside, rows[allocate], whole.values, Kind.COMMUNICATION)]
    )
    made = Gathered(storages[buffer], rows[gather], rows[copy], storages[inside])
    edit.add_uses(rows[gather], made.buffer)
    edit.add_uses(rows[gather], made.buffer, mutates=True)
    edit.add_uses(made.copy, made.buffer)
    edit.add_uses(made.copy[whole.part], made.whole, mutates=True)
    return made
