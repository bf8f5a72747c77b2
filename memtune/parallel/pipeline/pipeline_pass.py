"""The pass of `parallel.pipeline.pipeline_parallel`: the step of each rank, with all micro-batches of a
pipeline.

It runs after all other passes, whose changes to a block are independent of the block's stage. Five rules:

1. A rank's step is its stages' ops, forwards and backwards in the order of the schedule
   (`memtune.program.pipeline_order`), once per micro-batch with separate storages. Weights, sums of gradients
   and optimizer state exist once. Values that depend on no weight are computed in each stage.
2. A stage receives its input before its forward, and its output's gradient before its backward; it sends its
   output and its input's gradient as soon as they are ready. Waiting for neighbours is no row of the step but
   `Program.idle`.
3. Sent outputs and received inputs are held until their backward; other references of torch's schedules are
   in the `lists` of `_run`.
4. All micro-batches are uploaded and broadcast before the first forward; each is freed after its last forward
   on the rank. Only the first micro-batches are unrolled, as many as change the live bytes; storages of the
   others that live to the end of the step are added (`PipelineSettings.waiting`).
5. A weight of both first and last stage has a sum of gradients on each of the two, added at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memtune.activations.offload import SlotMoves, StageSpill
from memtune.parallel.pipeline.stage_cuts_pattern import SHARED, Chain, batch_on_host, chain_of, uploads
from memtune.parallel.pipeline.stage_view_pass import Divide, RankStep, Stage, rank_step
from memtune.program import (
    APART,
    I32,
    READS,
    WRITES,
    Key,
    Kind,
    Mask,
    Phase,
    PipelineSchedule,
    Program,
    Resource,
    StageAction,
    Step,
    Tier,
    UnrolledRows,
    columns_of,
    stage_actions,
)

if TYPE_CHECKING:
    from memtune.hardware import Hardware

_SEND, _RECEIVE, _BROADCAST = "c10d.send.default", "c10d.recv_.default", "c10d.broadcast_.default"
_ADD, _REDUCE, _NORMS = "aten.add_.Tensor", "memtune.all_reduce_.default", "aten._foreach_norm.Scalar"
_UPLOAD = "upload"
Lists = dict[tuple[int, str], tuple[tuple[int, int], int]]
"""(stage, list) → the storage that the list refers to: its owner and number."""
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class PipelineSettings:
    """Division of the blocks into stages."""

    starts: tuple[int, ...]
    """The first block of each stage."""
    ranks: int
    """Ranks of a pipeline; stage s is on rank s % ranks."""
    schedule: PipelineSchedule
    micro_batches: int
    """Micro-batches that a pipeline runs in one step."""
    copies: int = 1
    """Parallel pipelines, between which gradients are averaged."""
    link: Resource = Resource.INTRA_LINK
    """Link between neighbouring stages."""
    between: Resource = Resource.INTER_LINK
    """Link between pipelines."""
    waiting: int = 0
    """Micro-batches of the step beyond `micro_batches`, which are not unrolled."""
    in_slots: bool = False
    """Copies of saved activations follow the schedule's slots."""

    @property
    def stages_per_rank(self) -> int:
        """Number of stages per rank (V in the papers)."""
        return len(self.starts) // self.ranks


def piped(program: Program, hardware: Hardware) -> tuple[PipelineSettings, int]:
    """Return the division of the step, which still has all stages, and how often its rows run."""
    stages, count, node = program.stages, program.accumulate, hardware.local_ranks(program.ranks)
    assert stages is not None
    # Neighbouring stages are neighbouring ranks, so on one node wherever it has several.
    link = Resource.INTER_LINK if node == 1 else Resource.INTRA_LINK
    # Pipelines that fill whole nodes have their copies on other nodes.
    between = Resource.INTER_LINK if stages.ranks % node == 0 else Resource.INTRA_LINK
    # Further micro-batches repeat the live bytes of the earlier ones, so their rows run several times.
    repeats = stages.repeats(count)
    written, copies = count // repeats, program.ranks // stages.ranks
    waiting = count - written
    return PipelineSettings(
        starts=stages.starts,
        ranks=stages.ranks,
        schedule=stages.schedule,
        micro_batches=written,
        copies=copies,
        link=link,
        between=between,
        waiting=waiting,
        in_slots=stages.in_slots,
    ), repeats


def pipelined(
    step: Step,
    settings: PipelineSettings,
    ranks: Sequence[int] | None = None,
    divide: Divide | None = None,
    *,
    kept: bool = False,
) -> list[Step]:
    """Return the step of each of `ranks` of a pipeline (None: of all), from that of one rank with all stages;
    `step` is a later micro-batch's.

    Args:
        step: Step of all stages.
        settings: Division into stages.
        ranks: Ranks to return.
        divide: Shards the states of a rank's step of one micro-batch, for techniques that reduce or gather in
            each micro-batch.
        kept: Parameters that `divide` gathers in a forward are held to the end of the step.

    Raises:
        ValueError: The blocks are no chain that can be cut there.
    """
    chain = chain_of(step)
    if isinstance(chain, str) or set(settings.starts[1:]) - set(chain.cuts):
        raise ValueError(chain if isinstance(chain, str) else chain.obstacle)
    parts = Parts.from_step(step, chain, settings)
    wanted = range(settings.ranks) if ranks is None else ranks
    # Sharded states are written per rank: its collectives stand between ops of its own stages only.
    if divide is None:
        return [_rank(parts, rank, parts.held_by(rank)) for rank in wanted]
    return [_rank(*_divided(parts, rank, divide, kept=kept)) for rank in wanted]


def _divided(parts: Parts, rank: int, divide: Divide, *, kept: bool) -> tuple[Parts, int, Mask]:
    """Return the one stage of `rank` with its states sharded, in the same parts as all stages."""
    settings, step, stage = parts.settings, parts.step, rank
    last, mine = len(settings.starts) - 1, parts.stage == stage
    backward = step.ops.phase > Phase.FORWARD
    rows = (
        np.unique(step.storages.producer[parts.uploaded]).astype(np.int32),
        np.flatnonzero((mine | parts.shared) & ~backward).astype(np.int32),
        np.flatnonzero(mine & backward).astype(np.int32),
    )
    made = np.flatnonzero(
        (step.storages.producer >= 0) & (mine | parts.shared)[step.storages.producer]
    ).astype(np.int32)
    # The first stage receives no input and the last one sends no output: -1 marks what does not exist.
    stage_input, input_grad = (parts.input_of(stage), parts.gradient[stage]) if stage else (-1, -1)
    stage_output, output_grad = (
        (parts.input_of(stage + 1), parts.gradient[stage + 1]) if stage < last else (-1, -1)
    )
    here = Stage(stage, rows, made, parts.uploaded, stage_input, stage_output, input_grad, output_grad)
    found: RankStep = rank_step(step, here, parts.held_by(rank), divide, kept=kept)
    boundary = {settings.starts[stage]: found.stage_input}
    gradient = {stage: found.input_grad}
    if stage < last:
        boundary[settings.starts[stage + 1]], gradient[stage + 1] = found.stage_output, found.output_grad
    divided = Parts(
        step=found.step,
        chain=replace(parts.chain, boundary=boundary),
        settings=settings,
        stage=found.stage,
        shared=np.zeros(found.step.ops.n, bool),
        uploaded=found.uploaded,
        gradient=gradient,
        tied=(),
        sums=_sums(found.step, ()),
        once=found.once,
    )
    return divided, rank, np.ones(len(columns_of(found.step.parameters)), bool)


@dataclass(frozen=True, eq=False)
class Parts:
    """A step divided by stage."""

    step: Step
    chain: Chain
    settings: PipelineSettings
    stage: I32  # (n,) of each op of forward and backward, -1 for all others and for what every stage runs
    shared: Mask  # (n,)
    uploaded: I32
    gradient: dict[int, int]
    """Stage → the gradient of its input."""
    tied: tuple[_Tied, ...]
    sums: _Sums
    once: I32 = field(default_factory=lambda: _NONE)
    """Rows of a forward that run for the first micro-batch alone; all micro-batches use their outputs."""

    @classmethod
    def from_step(cls, step: Step, chain: Chain, settings: PipelineSettings) -> Parts:
        """Return the parts of `step` by the stages of `settings`."""
        # Places are 1 before the blocks, 2 i + 2 in block i, 2 i + 3 behind it: ops between two blocks belong
        # to the later one.
        blocks = np.maximum(np.minimum((chain.place - 1) // 2, len(step.blocks) - 1), 0)
        stage = (np.searchsorted(np.asarray(settings.starts), blocks, side="right") - 1).astype(np.int32)
        stage[chain.place < 0] = -1
        shared = chain.place == SHARED
        stage[shared] = -1
        uploaded = uploads(step)
        # Uploads have rows of their own, once per micro-batch.
        shared[step.storages.producer[uploaded]] = False
        gradient, foreign = _crossing_back(step, chain, stage)
        tied = tuple(_tied(step, foreign))
        held = step.storages.held_until.copy()
        # Autograd waits for no other part: each end of the pipeline has its own.
        held[[part for each in tied for part in (each.part, each.other)]] = -1
        step = step.with_storages(held_until=held)
        return cls(step, chain, settings, stage, shared, uploaded, gradient, tied, _sums(step, tied))

    def input_of(self, stage: int) -> int:
        """Return the storage that the stage before sends."""
        return self.chain.boundary[self.settings.starts[stage]]

    def ops_of(self, stage: int, *, backward: bool) -> Mask:
        """Return (n,) the ops of a stage in forward or backward."""
        within: Mask = (self.stage == stage) & ((self.step.ops.phase > Phase.FORWARD) == backward)
        # Ops that all stages need (masks, positions) are computed again by each.
        within |= self.shared & (not backward)
        within[[each.adder for each in self.tied]] = False
        return within

    def add_tied_part(self, rows: UnrolledRows, key: Key, tied: _Tied) -> None:
        """Add the last stage's part of a tied weight's gradient to its sum, the first micro-batch's."""
        uses = [(rows.number_of(key, tied.part), READS), (rows.number_of(key, tied.sum), WRITES)]
        rows.add(_ADD, Phase.BACKWARD, traffic_bytes=3 * int(self.step.storages.bytes[tied.sum]), uses=uses)

    def owners(self) -> Mask:
        """Return (stages, parameters) True for parameters that the stage holds."""
        columns, step = columns_of(self.step.parameters), self.step
        held = np.zeros((len(self.settings.starts), len(columns)), bool)
        inside = columns.block >= 0
        of = np.searchsorted(np.asarray(self.settings.starts), columns.block[inside], side="right") - 1
        held[of, np.flatnonzero(inside)] = True
        first, last = (np.isin(columns.names, names) for names in (self.chain.first, self.chain.last))
        held[0] |= ~inside & (first | ~last)
        # A tied weight is in both lists, and each end holds a copy.
        held[-1] |= ~inside & last
        assert step.ops.n
        return held

    def held_by(self, rank: int) -> Mask:
        """Return (parameters,) True for parameters of the stages of `rank`."""
        found: Mask = self.owners()[rank :: self.settings.ranks].max(0)
        return found

    @cached_property
    def kept(self) -> I32:
        """Return the storages that the rows `once` create."""
        made = np.flatnonzero(self.step.storages.producer >= 0)
        return made[np.isin(self.step.storages.producer[made], self.once)].astype(np.int32)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Gradients of a micro-batch, and the sums to which each is added from the second one on."""

    part: I32
    total: I32
    adder: I32


def _sums(step: Step, tied: Sequence[_Tied]) -> _Sums:
    """Return the sums that `edit.accumulate_gradients` has added."""
    mutated = (step.uses.mode == WRITES) & (step.ops.phase[step.uses.op] == Phase.BACKWARD)
    rows = np.flatnonzero(mutated & np.isin(step.uses.storage, step.grad_order))
    of = {int(step.uses.op[row]): int(step.uses.storage[row]) for row in rows}
    found = [
        (storage, of[op], op)
        for op, storage in zip(step.uses.op.tolist(), step.uses.storage.tolist(), strict=True)
        if op in of and storage != of[op]
    ]
    found += [(each.part, each.sum, -1) for each in tied] + [
        (each.other, each.sum, -1) for each in tied if each.added >= 0
    ]
    part, total, adder = (
        (np.array(column, np.int32) for column in zip(*found, strict=True)) if found else ((_NONE,) * 3)
    )
    return _Sums(part, total, adder[adder >= 0])


@dataclass(frozen=True)
class _Tied:
    """A tied weight's gradient in two parts (rule 5)."""

    part: int
    """Gradient computed by the last stage."""
    sum: int
    """Its sum over the micro-batches."""
    adder: int
    """The op that added the two parts."""
    added: int
    """The output of that op, -1 if it wrote into the other part."""
    other: int
    """The other part."""


def _crossing_back(step: Step, chain: Chain, stage: I32) -> tuple[dict[int, int], list[int]]:
    """Return stage → the gradient of its input, and uses of others that cross a cut in backward."""
    made = np.where(step.storages.producer >= 0, step.storages.producer, 0)
    from_ = np.where(
        (step.storages.producer >= 0) & (step.ops.phase[made] >= Phase.RECOMPUTE), stage[made], -1
    )
    to = stage[step.uses.op]
    crossing = np.flatnonzero(
        (step.ops.phase[step.uses.op] >= Phase.RECOMPUTE) & (to >= 0) & (from_[step.uses.storage] > to)
    )
    gradient: dict[int, int] = {}
    for use in crossing.tolist():
        storage = int(step.uses.storage[use])
        # Of the candidates the last one made: earlier ones are parts of its sum.
        if from_[storage] == to[use] + 1 and step.storages.bytes[storage] == chain.passed_bytes:
            known = gradient.get(int(from_[storage]), storage)
            gradient[int(from_[storage])] = max(
                known, storage, key=lambda each: int(step.storages.producer[each])
            )
    return gradient, [
        use for use in crossing.tolist() if int(step.uses.storage[use]) not in gradient.values()
    ]


def _tied(step: Step, foreign: Sequence[int]) -> list[_Tied]:
    """Return the tied weights, in the order in which their parts are made."""
    found = []
    for use in foreign:
        adder, part = int(step.uses.op[use]), int(step.uses.storage[use])
        outputs = np.flatnonzero(step.storages.producer == adder)
        others = [int(each) for each in step.uses.storage[step.uses.op == adder] if each != part]
        # Autograd adds the two parts of a tied weight's gradient in one op; any other reader is the user's
        # code.
        if len(outputs) > 1 or len(others) != 1:
            name, module = step.names[step.ops.name[adder]], step.modules[step.ops.module[adder]]
            raise ValueError(
                f"{name} in backward of {module or 'the model'} reads what a later stage computes"
            )
        added = int(outputs[0]) if len(outputs) else others[0]
        takers = step.uses.op[(step.uses.storage == added) & (step.uses.op > adder)]
        sums = [
            int(storage)
            for op in takers.tolist()
            for storage, settings in zip(
                step.uses.storage[step.uses.op == op], step.uses.mode[step.uses.op == op], strict=True
            )
            if settings == WRITES and step.storages.kind[storage] == Kind.GRADIENT
        ]
        # It must reach the weight's own gradient, where the other stage's part is added.
        if len(sums) != 1:
            raise ValueError("a weight that two stages use has no gradient of its own")
        found.append(_Tied(part, sums[0], adder, int(outputs[0]) if len(outputs) else -1, others[0]))
    return sorted(found, key=lambda each: int(step.storages.producer[each.part]))


def _rank(parts: Parts, rank: int, held: Mask) -> Step:
    """Return the step of one rank, which holds the parameters `held`."""
    settings = parts.settings
    # Stages are dealt round-robin, as in the interleaved schedule.
    stages = [s for s in range(len(settings.starts)) if s % settings.ranks == rank]
    rows = UnrolledRows(parts.step, held)
    rows.declare_sums(parts.sums.part, parts.sums.total)
    upload(parts, rows)
    hold_batches_on_host(parts, rows, (settings.micro_batches + settings.waiting) // settings.ranks)
    for stage in stages:
        declare(parts, rows, stage)
    held_lists: Lists = {}
    actions = stage_actions(
        settings.schedule, rank, settings.ranks, settings.stages_per_rank, settings.micro_batches
    )
    moves = SlotMoves(parts.step, parts.stage, actions) if settings.in_slots else None
    spill = StageSpill(parts.step)
    for action in actions:
        spill.ends(rows, action, _run(parts, rows, action, held_lists, moves))
        # Later stages of this rank still read the micro-batch.
        if not action.backward and action.stage == stages[-1]:
            rows.hold_all((_UPLOAD, action.micro_batch), rows.n_ops - 1)
    for key, storage in held_lists.values():
        rows.hold(key, storage, rows.n_ops - 1)
    _keep_to_end(parts, rows, stages[0])
    if settings.waiting:
        rows.add_batch(settings.waiting * _kept_bytes(parts, stages), rows.n_ops - 1)
    _finish(parts, rows, stages, held)
    return rows.done()


def _keep_to_end(parts: Parts, rows: UnrolledRows, stage: int) -> None:
    """Hold parameters that are gathered once until their backward in the last micro-batch."""
    first = np.flatnonzero((parts.stage == stage) & (parts.step.ops.phase > Phase.FORWARD))
    if len(first) and len(parts.once):
        weights = parts.kept[parts.step.storages.held_until[parts.kept] >= first[0]]
        rows.hold_like((stage, 0), weights, (stage, parts.settings.micro_batches - 1))


def _kept_bytes(parts: Parts, stages: Sequence[int]) -> int:
    """Return the bytes per micro-batch that a rank holds to the end: batches, `interleaved` outputs."""
    kept = int(parts.step.storages.bytes[parts.uploaded].sum())
    if parts.settings.schedule == "1f1b":
        return kept
    last = len(parts.settings.starts) - 1
    return kept + parts.chain.passed_bytes * sum((stage > 0) + (stage < last) for stage in stages)


def upload(parts: Parts, rows: UnrolledRows) -> None:
    """Upload and broadcast all micro-batches (rule 4)."""
    ops = np.unique(parts.step.storages.producer[parts.uploaded]).astype(np.int32)
    rows.declare(_UPLOAD, parts.uploaded)
    for micro_batch in range(parts.settings.micro_batches):
        key = _UPLOAD, micro_batch
        rows.append_ops(ops, key)
        for storage in parts.uploaded.tolist():
            rows.add(
                _BROADCAST,
                Phase.FORWARD,
                resource=parts.settings.link,
                traffic_bytes=int(parts.step.storages.bytes[storage]),
                group=parts.settings.ranks,
                uses=[(rows.number_of(key, storage), WRITES)],
            )


def hold_batches_on_host(parts: Parts, rows: UnrolledRows, own: int) -> None:
    """Hold the rank's `own` micro-batches in host memory to the end of the step; the current step has one."""
    batch = batch_on_host(
        parts.step, np.unique(parts.step.storages.producer[parts.uploaded]).astype(np.int32)
    )
    n_bytes = int(parts.step.storages.bytes[batch].sum())
    if own > 1 and n_bytes:
        rows.add_storage((own - 1) * n_bytes, Tier.HOST, Kind.BATCH, forever=True)


def declare(parts: Parts, rows: UnrolledRows, stage: int) -> None:
    """Declare the storages of a stage under their names in the rank's step."""
    step = parts.step
    made = (step.storages.producer >= 0) & ((parts.stage == stage) | parts.shared)[step.storages.producer]
    # The op that added the two parts does not run: they are on two ranks.
    made[[each.added for each in parts.tied if each.added >= 0]] = False
    rows.declare(stage, np.flatnonzero(made).astype(np.int32))
    if len(parts.once):
        rows.share_with_later(stage, parts.kept)
    for each in parts.tied:
        if parts.stage[each.adder] == stage and each.added >= 0:
            rows.alias(stage, each.added, each.other)


def _run(parts: Parts, rows: UnrolledRows, action: StageAction, lists: Lists, moves: SlotMoves | None) -> I32:
    """Insert one forward or backward with its messages, free what ends with it (rule 3); return its ops."""
    stage, key = action.stage, (action.stage, action.micro_batch)
    backward, last = action.backward, len(parts.settings.starts) - 1
    stage_input = None if stage == 0 else parts.input_of(stage)
    stage_output = None if stage == last else parts.input_of(stage + 1)
    if backward and stage_output is not None:
        _receive(parts, rows, action, parts.gradient[stage + 1], lists)
    if not backward and stage_input is not None:
        _receive(parts, rows, action, stage_input, lists)
    within = parts.ops_of(stage, backward=backward)
    if action.micro_batch == 0:
        # The first micro-batch's gradient is the sum itself.
        within[parts.sums.adder] = False
    else:
        within[parts.once] = False
    ops = np.flatnonzero(within).astype(np.int32)
    if moves is not None:
        moves.begins(rows, action)
        ops = moves.without_reloads(ops)
    begins = rows.n_ops
    _take(parts, rows, ops, action)
    if moves is not None:
        moves.ends(rows, action, ops, begins)
    if not backward:
        if stage_output is not None:
            _message(parts, rows, _SEND, action, (rows.number_of(key, stage_output), READS))
        return ops
    now = rows.n_ops - 1
    for storage in (stage_input, stage_output, None if stage_output is None else parts.gradient[stage + 1]):
        if storage is not None:
            # torch's stage drops its caches after the micro-batch's backward.
            rows.hold(key, storage, now)
    # Micro-batches that the stage has in flight in 1F1B's steady state.
    in_flight = min(parts.settings.micro_batches, last + 1 - stage)
    if (
        stage_output is not None
        and parts.settings.schedule == "1f1b"
        and in_flight > 1
        and action.micro_batch == parts.settings.micro_batches - in_flight
    ):
        rows.hold((stage, in_flight - 2), stage_output, now)  # the last send that was waited for by itself
    if stage_output is not None and parts.settings.schedule == "interleaved_1f1b":
        lists[stage, f"passed {action.micro_batch}"] = key, stage_output
    if stage_input is not None:
        gradient = parts.gradient[stage]
        # torch's 1F1B keeps the last gradient in a local variable until the next one replaces it.
        before = lists.pop((stage, "returned"), None)
        if before is not None:
            rows.hold(*before, now)
        name = "returned" if parts.settings.schedule == "1f1b" else f"returned {action.micro_batch}"
        lists[stage, name] = key, gradient
        _message(parts, rows, _SEND, action, (rows.number_of(key, gradient), READS))
    return ops


def _take(parts: Parts, rows: UnrolledRows, ops: I32, action: StageAction) -> None:
    """Insert the ops of a forward or backward."""
    # The last stage's part of a tied weight's gradient is accumulated as soon as it is ready.
    step, key = parts.step, (action.stage, action.micro_batch)
    for each in parts.tied if action.backward and action.micro_batch else ():
        made = step.storages.producer[each.part]
        if parts.stage[made] == action.stage:
            before, ops = ops[ops <= made], ops[ops > made]
            rows.append_ops(before, key, backward=True)
            parts.add_tied_part(rows, key, each)
    rows.append_ops(ops, key, backward=action.backward)


def _receive(parts: Parts, rows: UnrolledRows, action: StageAction, storage: int, lists: Lists) -> None:
    key = action.stage, action.micro_batch
    number = rows.add_received(key, storage)
    at = _message(parts, rows, _RECEIVE, action, (number, WRITES))
    if parts.settings.schedule != "1f1b":
        return
    name = "received gradient" if action.backward else "received"
    # torch's 1F1B receives into a local variable, which holds the last message until the next one.
    before = lists.get((action.stage, name))
    if before is not None:
        rows.hold(*before, at)
    lists[action.stage, name] = key, storage


def _message(parts: Parts, rows: UnrolledRows, name: str, action: StageAction, use: tuple[int, int]) -> int:
    phase = Phase.BACKWARD if action.backward else Phase.FORWARD
    return rows.add(
        name, phase, resource=parts.settings.link, traffic_bytes=parts.chain.passed_bytes, group=2, uses=[use]
    )


def _finish(parts: Parts, rows: UnrolledRows, stages: Sequence[int], held: Mask) -> None:
    """Insert the reductions between stages and pipelines, the norms, and the optimizer."""
    settings, columns = parts.settings, columns_of(parts.step.parameters)
    mine = np.flatnonzero(held & columns.trainable & (columns.gradient >= 0))
    gradients = columns.gradient[mine].tolist()
    sums = {each.sum for each in parts.tied} if {0, len(settings.starts) - 1} & set(stages) else set()
    for gradient in gradients:
        n_bytes = int(parts.step.storages.bytes[gradient])
        # Sums over stages first, so that pipelines average complete gradients.
        ways = [(settings.link, 2)] * (gradient in sums) + [
            (settings.between, settings.copies + APART * (settings.ranks - 1))
        ] * (settings.copies > 1)
        for resource, group in ways:
            rows.add(
                _REDUCE,
                Phase.BOUNDARY,
                resource=resource,
                traffic_bytes=n_bytes,
                group=group,
                uses=[(rows.single_number(gradient), WRITES)],
            )
    total = int(parts.step.storages.bytes[gradients].sum()) if gradients else 0
    rows.add(
        _NORMS,
        Phase.BOUNDARY,
        traffic_bytes=total,
        uses=[(rows.single_number(each), READS) for each in gradients],
    )
    rows.add(
        # Two float32 per parameter: its norm, and whether the rank has its gradient.
        _REDUCE,
        Phase.BOUNDARY,
        resource=settings.link,
        traffic_bytes=8 * len(columns),
        group=settings.ranks,
        uses=[],
    )
    rows.append_remaining()
