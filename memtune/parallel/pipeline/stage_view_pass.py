"""A pipeline rank's part as a step of its own, of one micro-batch, for passes that reduce or gather in every
micro-batch.

A rank of a pipeline shards its states over the copies of its stage: in each forward and backward of a stage,
not once for the whole model. Three steps:

1. `alone` extracts the stage's rows of a later micro-batch from the step of all stages: its input is
  received; weights, sums and state are its own.
2. The technique's pass runs on that step as on any other.
3. `parallel.pipeline.pipeline_pass` unrolls the result for every micro-batch: rows that the pass inserted
  into a forward or backward belong to the stage, and parameters that stay gathered over the whole step
  (`kept`) are gathered in the first forward alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from memtune.program import I32, READS, WRITES, Mask, Phase, Resource, Step, UnrolledRows, columns_of

Divide = Callable[[Step], Step]
"""The pass of a technique that shards or replicates states, on a rank's step of one micro-batch."""
MINE, MESSAGE, UPLOAD = 1, 2, 3
"""Marks in `ops.match` of rows of the stage and of added rows: of a stage, a message, an upload."""
_GATHER = "memtune.all_gather_into_.default"


@dataclass(frozen=True, eq=False)
class RankStep:
    """A rank's own step, sharded, with that step's storage numbers."""

    step: Step
    stage: I32
    """(n,) the stage of each op of forward and backward, -1 for all others and for messages."""
    stage_input: int
    """The received input, -1: none."""
    stage_output: int
    """The output to send, -1: none."""
    input_grad: int
    """The gradient of the input, -1: none."""
    output_grad: int
    """The gradient of the output, -1: none."""
    uploaded: I32
    once: I32
    """Rows that run only in the first forward of a step."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage's rows and storages in the step of all stages."""

    index: int
    rows: tuple[I32, I32, I32]
    """Uploads, forward, backward."""
    made: I32
    """Storages that the stage makes."""
    uploaded: I32
    stage_input: int
    stage_output: int
    input_grad: int
    output_grad: int


def rank_step(step: Step, stage: Stage, held: Mask, divide: Divide, *, kept: bool) -> RankStep:
    """Return the step of a rank with `stage` and parameters `held`, after `divide`."""
    # As `returned`, the storages of messages are renumbered along by every pass.
    before, ids = alone(step, stage, held)
    after = divide(replace(before, returned=np.array(ids, np.int32)))
    marks = after.ops.match
    # Rows that the pass has inserted carry no mark (0); of these only forward and backward are the stage's.
    inside = (
        (after.ops.phase == Phase.FORWARD)
        | (after.ops.phase == Phase.BACKWARD)
        | (after.ops.phase == Phase.RECOMPUTE)
    )
    of = np.where(inside & ((marks == MINE) | (marks == 0)), stage.index, -1).astype(np.int32)
    once = np.empty(0, np.int32)
    if kept:  # all that such a pass adds to a forward are gathers
        once = np.flatnonzero((marks == 0) & (after.ops.phase == Phase.FORWARD)).astype(np.int32)
    stage_input, stage_output, input_grad, output_grad, *uploaded = after.returned.tolist()
    clean = replace(after, returned=np.empty(0, np.int32)).with_ops(match=np.zeros_like(marks))
    return RankStep(
        clean, of, stage_input, stage_output, input_grad, output_grad, np.array(uploaded, np.int32), once
    )


def alone(step: Step, stage: Stage, held: Mask) -> tuple[Step, list[int]]:
    """Extract `stage` for a later micro-batch, with the storages it receives, sends, returns, uploads."""
    # Micro-batch 1, not 0: a later one, which adds to the sums.
    rows, key = UnrolledRows(step, held), (stage.index, 1)
    uploads, forward, backward = stage.rows
    rows.declare("upload", stage.uploaded)
    rows.declare(stage.index, stage.made)
    rows.append_ops(uploads, ("upload", 1))
    marks = [(UPLOAD, len(uploads)), (MESSAGE, _receive(rows, key, stage.stage_input, Phase.FORWARD))]
    rows.append_ops(forward, key)
    marks += [(MINE, len(forward)), (MESSAGE, _receive(rows, key, stage.output_grad, Phase.BACKWARD))]
    rows.append_ops(backward, key, backward=True)
    marks.append((MINE, len(backward)))
    if stage.input_grad >= 0:
        uses = [(rows.number_of(key, stage.input_grad), READS)]
        rows.add("c10d.send.default", Phase.BACKWARD, resource=Resource.NOTHING, uses=uses)
        marks.append((MESSAGE, 1))
    # The optimizer: as the passes expect a whole step.
    rows.append_remaining()
    marks.append((MINE, rows.n_ops - sum(count for _, count in marks)))
    made = rows.done()
    ids = [
        rows.number_of(key, each) if each >= 0 else -1
        for each in (stage.stage_input, stage.stage_output, stage.input_grad, stage.output_grad)
    ]
    ids += [rows.number_of(("upload", 1), each) for each in stage.uploaded.tolist()]
    kinds = np.repeat(*np.array(marks, np.int32).T).astype(np.int32)
    enter, leave = _entered(made, kinds)
    gradient = columns_of(made.parameters).gradient
    grad_order = np.unique(gradient[gradient >= 0]).astype(np.int32)
    return replace(made, forward_starts=enter, forward_ends=leave, grad_order=grad_order).with_ops(
        match=kinds
    ).with_storages(grad_ready_after=_ready_after(made)), ids


def _receive(rows: UnrolledRows, key: tuple[int, int], storage: int, phase: Phase) -> int:
    """Insert a receive of `storage`, if there is one; return the number of rows."""
    if storage < 0:
        return 0
    rows.add(
        "c10d.recv_.default",
        phase,
        resource=Resource.NOTHING,
        uses=[(rows.add_received(key, storage), WRITES)],
    )
    return 1


def _entered(step: Step, kinds: I32) -> tuple[I32, I32]:
    """Return the first and last op of the forward of each block, and of the model, in this step."""
    n_blocks = len(step.blocks)
    forward = np.flatnonzero((step.ops.phase == Phase.FORWARD) & (kinds == MINE)).astype(np.int32)
    enter, leave = np.full(n_blocks + 1, step.ops.n, np.int32), np.full(n_blocks + 1, -1, np.int32)
    block = step.ops.block[forward]
    np.minimum.at(enter, block[block >= 0], forward[block >= 0])
    np.maximum.at(leave, block[block >= 0], forward[block >= 0])
    enter[-1], leave[-1] = forward[0], forward[-1]
    return enter, leave


def _ready_after(step: Step) -> I32:
    """Return (storages,) the op after which autograd has accumulated this micro-batch's gradient."""
    found = np.full(step.storages.n, -1, np.int32)
    gradient = columns_of(step.parameters).gradient
    mine = gradient[(gradient >= 0) & (step.storages.producer[gradient] >= 0)]
    found[mine] = step.storages.producer[mine]
    return found
