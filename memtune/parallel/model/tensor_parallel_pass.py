"""The pass for ranks that share layers, apart from the sharded layers: micro-batches broadcast, gradients
averaged (`parallel.model.tensor_parallel`, `parallel.ranks.micro_batch_rotation`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtune.program import APART, Edit, Mask, Phase, Resource, Step, columns_of

_UPLOAD = "memtune.to_device.default"


@dataclass(frozen=True)
class Sharing:
    """Groups of ranks that share layers, and their links."""

    ranks: int
    """Ranks of a group; a group runs one micro-batch at a time."""
    copies: int
    """Number of groups, between which gradients are averaged."""
    between: Resource
    """The link that the averages cross."""
    accumulate: int
    """Micro-batches that a group runs in one step."""
    summed: frozenset[str] = frozenset()
    """Parameters whose gradients are averaged inside a group as well."""
    inside: Resource = Resource.INTRA_LINK
    """The link that those averages cross."""


def share(step: Step, sharing: Sharing) -> Step:
    """Return `step` of sharded layers with batches broadcast, and gradients averaged at the end."""
    edit = Edit(step)
    _send(edit, step, sharing)
    if sharing.summed:
        summed = np.isin(columns_of(step.parameters).names, list(sharing.summed))
        average(edit, step, summed, sharing.ranks, sharing.inside, sharing.accumulate)
    if sharing.copies > 1:
        # `APART` encodes the stride of the group, by which the simulator finds the links that it crosses.
        average(
            edit,
            step,
            np.True_,
            sharing.copies + APART * (sharing.ranks - 1),
            sharing.between,
            sharing.accumulate,
        )
    return edit.done()


def _send(edit: Edit, step: Step, sharing: Sharing) -> None:
    """Insert a broadcast of each uploaded batch inside the group."""
    name = step.names.index(_UPLOAD) if _UPLOAD in step.names else -1
    batches = np.flatnonzero(
        (step.storages.producer >= 0) & (step.ops.name[step.storages.producer] == name)
    ).astype(np.int32)
    if len(batches):
        # Each upload is broadcast: the group's ranks must run on one batch, whatever their loaders gave them.
        edit.add_ops(
            "c10d.broadcast_.default",
            after=step.storages.producer[batches],
            phase=Phase.FORWARD,
            resource=Resource.INTRA_LINK,
            traffic_bytes=step.storages.bytes[batches],
            group=sharing.ranks,
            writes=batches,
        )


def average(
    edit: Edit, step: Step, which: Mask | np.bool_, group: int, link: Resource, accumulate: int
) -> None:
    """Average the gradients of `which`, one message each, over groups of ranks after the last backward."""
    end = np.flatnonzero(step.ops.phase == Phase.BACKWARD)
    if len(end):
        # With accumulation the average runs once per step, so its phase is the boundary, though in backward.
        phase = Phase.BACKWARD if accumulate == 1 else Phase.BOUNDARY
        _average_after(edit, step, int(end[-1]), phase, which, group, link)


def sum_shards(step: Step, sharing: Sharing) -> Step:
    """Return `step` of sharded states with gradient shards of `sharing.summed` averaged inside a group."""
    edit, before = Edit(step), np.flatnonzero(step.ops.phase < Phase.OPTIMIZER)
    which = np.isin(columns_of(step.parameters).names, list(sharing.summed))
    _average_after(edit, step, int(before[-1]), Phase.BOUNDARY, which, sharing.ranks, sharing.inside)
    return edit.done()


def _average_after(
    edit: Edit, step: Step, op: int, phase: Phase, which: Mask | np.bool_, ranks: int, link: Resource
) -> None:
    columns = columns_of(step.parameters)
    mine = np.flatnonzero(columns.trainable & (columns.gradient >= 0) & which)
    if not len(mine):
        return
    gradients = columns.gradient[mine]
    edit.add_ops(
        "memtune.all_reduce_.default",
        after=np.full(len(gradients), op, np.int32),
        phase=phase,
        resource=link,
        # Of this rank's part: recorded parameters are those of one rank already.
        traffic_bytes=columns.n_bytes[mine],
        group=ranks,
        writes=gradients,
    )
