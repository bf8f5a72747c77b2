"""The pass of `runtime.pipeline`: the step of each rank, with all micro-batches of a pipeline on their way through its stages.

It comes after all other passes: what they do to a block they do wherever the block is. Five rules:

1. A rank's step is its stages' ops, forwards and backwards in the order of the schedule (`memtune.pipeline_order`), once per
   micro-batch, with storages of their own; weights, gradients' sums and optimizer state are there once. What no weight goes into
   is computed in each stage.
2. A stage receives what it is given before its forward, and the gradient of what it passed on before its backward; it sends each
   as soon as it is there. How long it waits for its neighbours is no row here but `Program.idle`.
3. What was passed on, and what was received, stays until its backward; what else torch's schedules hold on to is in the
   `lists` of `_run`.
4. All micro-batches are uploaded and sent round before the first forward, each is let go after its last forward on the rank.
   Of many only some are written down, after which nothing new is held; what the others keep to the end is (`Piped.waiting`).
5. A weight of first and last stage has its sum on each of the two, added up at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memtune.hardware import Hardware
from memtune.parameters import columns_of
from memtune.passes.own_states import Divide, Own, Stage, own
from memtune.passes.stage_moves import SlotMoves
from memtune.passes.stage_shelf import StageShelf
from memtune.passes.stages import SHARED, Chain, batch_on_host, chain_of, uploads
from memtune.passes.unroll import Rows
from memtune.pipeline_order import Action, Schedule, order
from memtune.program import APART, I32, READS, WRITES, Kind, Phase, Program, Resource, Step, Tier

_SEND, _RECEIVE, _BROADCAST = "c10d.send.default", "c10d.recv_.default", "c10d.broadcast_.default"
_ADD, _REDUCE, _NORMS = "aten.add_.Tensor", "memtune.all_reduce_.default", "aten._foreach_norm.Scalar"
_UPLOAD = "upload"
Lists = dict[tuple[int, str], tuple[tuple[int, int], int]]
"""Stage and list → whose storage it refers to, and which."""
_NONE = np.empty(0, np.int32)


@dataclass(frozen=True)
class Piped:
    """How the blocks are divided."""

    starts: tuple[int, ...]
    """The first block of each stage."""
    ranks: int
    """Of a pipeline; stage s is on rank s % ranks."""
    schedule: Schedule
    micro_batches: int
    """That a pipeline works through in one step."""
    copies: int = 1
    """Pipelines, between which gradients are averaged."""
    link: Resource = Resource.INTRA_LINK
    """Between neighbours."""
    between: Resource = Resource.INTER_LINK
    """Between pipelines."""
    waiting: int = 0
    """Micro-batches of the step beyond `micro_batches`, which the rows of those stand for."""
    in_slots: bool = False
    """Copies of saved activations follow the schedule's slots."""

    @property
    def stages_per_rank(self) -> int:
        """V."""
        return len(self.starts) // self.ranks


def piped(program: Program, hardware: Hardware) -> tuple[Piped, int]:
    """How the step of `program`, which still has all stages, is divided, and how often its written rows are run."""
    stages, count, node = program.stages, program.accumulate, hardware.local_ranks(program.ranks)
    assert stages is not None
    link = Resource.INTER_LINK if node == 1 else Resource.INTRA_LINK
    between = Resource.INTER_LINK if stages.ranks % node == 0 else Resource.INTRA_LINK
    times = stages.times(count)
    written, copies = count // times, program.ranks // stages.ranks
    waiting = count - written
    return Piped(stages.starts, stages.ranks, stages.schedule, written, copies, link, between, waiting, stages.in_slots), times


def pipelined(
    step: Step, how: Piped, ranks: Sequence[int] | None = None, divide: Divide | None = None, *, kept: bool = False
) -> list[Step]:
    """The step of `ranks` of a pipeline (None: of each), from that of one rank that has all; `step` is a later micro-batch's.

    Args:
        step: That of all stages.
        how: How they are divided.
        ranks: Whose steps are wanted.
        divide: Divides the states of a rank's step of one micro-batch, where something is reduced or gathered in each of them.
        kept: What that gathers in a forward stays to the end of the step.

    Raises:
        ValueError: The blocks are no chain that can be cut there.
    """
    chain = chain_of(step)
    if isinstance(chain, str) or set(how.starts[1:]) - set(chain.cuts):
        raise ValueError(chain if isinstance(chain, str) else chain.obstacle)
    parts = Parts.of(step, chain, how)
    wanted = range(how.ranks) if ranks is None else ranks
    if divide is None:
        return [_rank(parts, rank, parts.held_by(rank)) for rank in wanted]
    return [_rank(*_divided(parts, rank, divide, kept=kept)) for rank in wanted]


def _divided(parts: Parts, rank: int, divide: Divide, *, kept: bool) -> tuple[Parts, int, npt.NDArray[np.bool_]]:
    """The one stage of `rank` with its states divided, taken apart as all stages are (`passes.own_states`)."""
    how, step, stage = parts.how, parts.step, rank
    last, mine = len(how.starts) - 1, parts.stage == stage
    backward = step.op_phase > Phase.FORWARD
    rows = (
        np.unique(step.producer[parts.uploaded]).astype(np.int32),
        np.flatnonzero((mine | parts.shared) & ~backward).astype(np.int32),
        np.flatnonzero(mine & backward).astype(np.int32),
    )
    made = np.flatnonzero((step.producer >= 0) & (mine | parts.shared)[step.producer]).astype(np.int32)
    given, returned = (parts.given(stage), parts.gradient[stage]) if stage else (-1, -1)
    passed, received = (parts.given(stage + 1), parts.gradient[stage + 1]) if stage < last else (-1, -1)
    here = Stage(stage, rows, made, parts.uploaded, given, passed, returned, received)
    found: Own = own(step, here, parts.held_by(rank), divide, kept=kept)
    boundary = {how.starts[stage]: found.given}
    gradient = {stage: found.returned}
    if stage < last:
        boundary[how.starts[stage + 1]], gradient[stage + 1] = found.passed, found.received
    divided = Parts(
        found.step, replace(parts.chain, boundary=boundary), how, found.stage, np.zeros(found.step.n_ops, bool), found.uploaded,
        gradient, (), _sums(found.step, ()), found.once,
    )  # fmt: skip
    return divided, rank, np.ones(len(columns_of(found.step.parameters)), bool)


@dataclass(frozen=True, eq=False)
class Parts:
    """A step taken apart by stage."""

    step: Step
    chain: Chain
    how: Piped
    stage: I32  # (n,) of each op of forward and backward, -1 for all others and for what every stage runs
    shared: npt.NDArray[np.bool_]  # (n,)
    uploaded: I32
    gradient: dict[int, int]
    """Stage → the gradient of what it is given."""
    tied: tuple[_Tied, ...]
    sums: _Sums
    once: I32 = field(default_factory=lambda: _NONE)
    """Rows of a forward that run for the first micro-batch alone; what they make serves all."""

    @classmethod
    def of(cls, step: Step, chain: Chain, how: Piped) -> Parts:
        """`step` in the stages that `how` names."""
        blocks = np.maximum(np.minimum((chain.place - 1) // 2, len(step.blocks) - 1), 0)
        stage = (np.searchsorted(np.asarray(how.starts), blocks, side="right") - 1).astype(np.int32)
        stage[chain.place < 0] = -1
        shared = chain.place == SHARED
        stage[shared] = -1
        uploaded = uploads(step)
        shared[step.producer[uploaded]] = False
        gradient, foreign = _crossing_back(step, chain, stage)
        tied = tuple(_tied(step, stage, foreign))
        held = step.held_until.copy()
        held[[part for each in tied for part in (each.part, each.other)]] = -1  # autograd waits for no other part
        step = replace(step, held_until=held)
        return cls(step, chain, how, stage, shared, uploaded, gradient, tied, _sums(step, tied))

    def given(self, stage: int) -> int:
        """The storage that the stage before passes on."""
        return self.chain.boundary[self.how.starts[stage]]

    def owners(self) -> npt.NDArray[np.bool_]:
        """(stages, parameters) which stage holds which parameter."""
        columns, step = columns_of(self.step.parameters), self.step
        held = np.zeros((len(self.how.starts), len(columns)), bool)
        inside = columns.block >= 0
        of = np.searchsorted(np.asarray(self.how.starts), columns.block[inside], side="right") - 1
        held[of, np.flatnonzero(inside)] = True
        first, last = (np.isin(columns.names, names) for names in (self.chain.first, self.chain.last))
        held[0] |= ~inside & (first | ~last)
        held[-1] |= ~inside & last
        assert step.n_ops
        return held

    def held_by(self, rank: int) -> npt.NDArray[np.bool_]:
        """(parameters,) what the stages of `rank` hold."""
        found: npt.NDArray[np.bool_] = self.owners()[rank :: self.how.ranks].max(0)
        return found

    @cached_property
    def kept(self) -> I32:
        """Storages that the rows `once` make."""
        made = np.flatnonzero(self.step.producer >= 0)
        return made[np.isin(self.step.producer[made], self.once)].astype(np.int32)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Gradients of a micro-batch, and what each is added to from the second one on."""

    part: I32
    total: I32
    adder: I32


def _sums(step: Step, tied: Sequence[_Tied]) -> _Sums:
    """What `edit.accumulate_gradients` has added."""
    mutated = (step.use_mutates == WRITES) & (step.op_phase[step.use_op] == Phase.BACKWARD)
    rows = np.flatnonzero(mutated & np.isin(step.use_storage, step.landing))
    of = {int(step.use_op[row]): int(step.use_storage[row]) for row in rows}
    found = [
        (storage, of[op], op)
        for op, storage in zip(step.use_op.tolist(), step.use_storage.tolist(), strict=True)
        if op in of and storage != of[op]
    ]
    found += [(each.part, each.sum, -1) for each in tied] + [(each.other, each.sum, -1) for each in tied if each.added >= 0]
    part, total, adder = (np.array(column, np.int32) for column in zip(*found, strict=True)) if found else ((_NONE,) * 3)
    return _Sums(part, total, adder[adder >= 0])


@dataclass(frozen=True)
class _Tied:
    """A weight's gradient in two parts (rule 5)."""

    part: int
    """What the last stage made of it."""
    sum: int
    """Where it is added up over the micro-batches."""
    adder: int
    """The op that added the two parts."""
    added: int
    """What it made, -1 where it wrote into the other part."""
    other: int
    """The other part."""


def _crossing_back(step: Step, chain: Chain, stage: I32) -> tuple[dict[int, int], list[int]]:
    """Stage → the gradient of what it is given; and uses of all else that crosses in backward."""
    made = np.where(step.producer >= 0, step.producer, 0)
    from_ = np.where((step.producer >= 0) & (step.op_phase[made] >= Phase.RECOMPUTE), stage[made], -1)
    to = stage[step.use_op]
    crossing = np.flatnonzero((step.op_phase[step.use_op] >= Phase.RECOMPUTE) & (to >= 0) & (from_[step.use_storage] > to))
    gradient: dict[int, int] = {}
    for use in crossing.tolist():
        storage = int(step.use_storage[use])
        if from_[storage] == to[use] + 1 and step.bytes[storage] == chain.passed_bytes:
            known = gradient.get(int(from_[storage]), storage)
            gradient[int(from_[storage])] = max(known, storage, key=lambda each: int(step.producer[each]))
    return gradient, [use for use in crossing.tolist() if int(step.use_storage[use]) not in gradient.values()]


def _tied(step: Step, stage: I32, foreign: Sequence[int]) -> list[_Tied]:
    """In the order in which their parts are made."""
    found = []
    for use in foreign:
        adder, part = int(step.use_op[use]), int(step.use_storage[use])
        outputs = np.flatnonzero(step.producer == adder)
        others = [int(each) for each in step.use_storage[step.use_op == adder] if each != part]
        if len(outputs) > 1 or len(others) != 1:
            name, module = step.names[step.op_name[adder]], step.modules[step.op_module[adder]]
            raise ValueError(f"{name} in backward of {module or 'the model'} reads what a later stage computes")
        added = int(outputs[0]) if len(outputs) else others[0]
        takers = step.use_op[(step.use_storage == added) & (step.use_op > adder)]
        sums = [
            int(storage)
            for op in takers.tolist()
            for storage, how in zip(step.use_storage[step.use_op == op], step.use_mutates[step.use_op == op], strict=True)
            if how == WRITES and step.kind[storage] == Kind.GRADIENT
        ]
        if len(sums) != 1:
            raise ValueError("a weight that two stages use has no gradient of its own")
        found.append(_Tied(part, sums[0], adder, int(outputs[0]) if len(outputs) else -1, others[0]))
    return sorted(found, key=lambda each: int(step.producer[each.part]))


def _rank(parts: Parts, rank: int, held: npt.NDArray[np.bool_]) -> Step:
    """The step of one rank, which holds the parameters `held`."""
    how = parts.how
    stages = [s for s in range(len(how.starts)) if s % how.ranks == rank]
    rows = Rows(parts.step, held)
    rows.sums(parts.sums.part, parts.sums.total)
    upload(parts, rows)
    other_batches(parts, rows, (how.micro_batches + how.waiting) // how.ranks)
    for stage in stages:
        declare(parts, rows, stage)
    held_lists: Lists = {}
    actions = order(how.schedule, rank, how.ranks, how.stages_per_rank, how.micro_batches)
    moves = SlotMoves(parts.step, parts.stage, actions) if how.in_slots else None
    shelf = StageShelf(parts.step)
    for action in actions:
        shelf.ends(rows, action, _run(parts, rows, action, held_lists, moves))
        if not action.backward and action.stage == stages[-1]:
            rows.hold_all((_UPLOAD, action.micro_batch), rows.n_ops - 1)
    for key, storage in held_lists.values():
        rows.hold(key, storage, rows.n_ops - 1)
    _keep_to_the_end(parts, rows, stages[0])
    if how.waiting:
        rows.there(how.waiting * _kept_bytes(parts, stages), rows.n_ops - 1)
    _finish(parts, rows, stages, held)
    return rows.done()


def _keep_to_the_end(parts: Parts, rows: Rows, stage: int) -> None:
    """What is gathered once, and not only to be copied out, is there until its backward in the last micro-batch."""
    first = np.flatnonzero((parts.stage == stage) & (parts.step.op_phase > Phase.FORWARD))
    if len(first) and len(parts.once):
        weights = parts.kept[parts.step.held_until[parts.kept] >= first[0]]
        rows.hold_as((stage, 0), weights, (stage, parts.how.micro_batches - 1))


def _kept_bytes(parts: Parts, stages: Sequence[int]) -> int:
    """What a rank holds to the end of the step for a micro-batch: its tensors, at first; and under `interleaved` all it sent."""
    kept = int(parts.step.bytes[parts.uploaded].sum())
    if parts.how.schedule == "1f1b":
        return kept
    last = len(parts.how.starts) - 1
    return kept + parts.chain.passed_bytes * sum((stage > 0) + (stage < last) for stage in stages)


def upload(parts: Parts, rows: Rows) -> None:
    """Rule 4: all micro-batches come and are sent round."""
    ops = np.unique(parts.step.producer[parts.uploaded]).astype(np.int32)
    rows.declare(_UPLOAD, parts.uploaded)
    for micro_batch in range(parts.how.micro_batches):
        key = _UPLOAD, micro_batch
        rows.take(ops, key)
        for storage in parts.uploaded.tolist():
            rows.add(
                _BROADCAST, Phase.FORWARD, resource=parts.how.link, traffic_bytes=int(parts.step.bytes[storage]),
                group=parts.how.ranks, uses=[(rows.of(key, storage), WRITES)],
            )  # fmt: skip


def other_batches(parts: Parts, rows: Rows, own: int) -> None:
    """The rank's `own` micro-batches wait in host memory for the step to end; the step at hand has one."""
    batch = batch_on_host(parts.step, np.unique(parts.step.producer[parts.uploaded]).astype(np.int32))
    n_bytes = int(parts.step.bytes[batch].sum())
    if own > 1 and n_bytes:
        rows.new((own - 1) * n_bytes, Tier.HOST, Kind.BATCH, forever=True)


def declare(parts: Parts, rows: Rows, stage: int) -> None:
    """What the storages of a stage are called while it runs."""
    step = parts.step
    made = (step.producer >= 0) & ((parts.stage == stage) | parts.shared)[step.producer]
    made[[each.added for each in parts.tied if each.added >= 0]] = False
    rows.declare(stage, np.flatnonzero(made).astype(np.int32))
    if len(parts.once):
        rows.keep(stage, parts.kept)
    for each in parts.tied:
        if parts.stage[each.adder] == stage and each.added >= 0:
            rows.alias(stage, each.added, each.other)


def _run(parts: Parts, rows: Rows, action: Action, lists: Lists, moves: SlotMoves | None) -> I32:
    """One forward or backward, with what comes before and after it, and what it lets go of (rule 3); returns its ops.

    Args:
        parts: What it is taken from.
        rows: Gets the rows.
        action: Which one.
        lists: What torch's schedule still refers to, by stage and the list that does.
        moves: Copies of saved activations that follow the schedule.
    """
    step, stage, key = parts.step, action.stage, (action.stage, action.micro_batch)
    backward, last = action.backward, len(parts.how.starts) - 1
    given = None if stage == 0 else parts.given(stage)
    passed = None if stage == last else parts.given(stage + 1)
    if backward and passed is not None:
        _receive(parts, rows, action, parts.gradient[stage + 1], lists)
    if not backward and given is not None:
        _receive(parts, rows, action, given, lists)
    within = (parts.stage == stage) & ((step.op_phase > Phase.FORWARD) == backward)
    within |= parts.shared & (not backward)
    within[[each.adder for each in parts.tied]] = False
    if action.micro_batch == 0:
        within[parts.sums.adder] = False
    else:
        within[parts.once] = False
    ops = np.flatnonzero(within).astype(np.int32)
    if moves is not None:
        moves.begins(rows, action)
        ops = moves.without(ops)
    begins = rows.n_ops
    _take(parts, rows, ops, action)
    if moves is not None:
        moves.ends(rows, action, ops, begins)
    if not backward:
        if passed is not None:
            _message(parts, rows, _SEND, action, (rows.of(key, passed), READS))
        return ops
    now = rows.n_ops - 1
    for storage in (given, passed, None if passed is None else parts.gradient[stage + 1]):
        if storage is not None:
            rows.hold(key, storage, now)
    ahead = min(parts.how.micro_batches, last + 1 - stage)
    if (
        passed is not None
        and parts.how.schedule == "1f1b"
        and ahead > 1
        and action.micro_batch == parts.how.micro_batches - ahead
    ):
        rows.hold((stage, ahead - 2), passed, now)  # the last send that was waited for by itself
    if passed is not None and parts.how.schedule == "interleaved_1f1b":
        lists[stage, f"passed {action.micro_batch}"] = key, passed
    if given is not None:
        gradient = parts.gradient[stage]
        before = lists.pop((stage, "returned"), None)
        if before is not None:
            rows.hold(*before, now)
        name = "returned" if parts.how.schedule == "1f1b" else f"returned {action.micro_batch}"
        lists[stage, name] = key, gradient
        _message(parts, rows, _SEND, action, (rows.of(key, gradient), READS))
    return ops


def _take(parts: Parts, rows: Rows, ops: I32, action: Action) -> None:
    """The ops of a forward or backward; the last stage's part of a tied weight's gradient is added up as soon as it is there."""
    step, key = parts.step, (action.stage, action.micro_batch)
    for each in parts.tied if action.backward and action.micro_batch else ():
        made = step.producer[each.part]
        if parts.stage[made] == action.stage:
            before, ops = ops[ops <= made], ops[ops > made]
            rows.take(before, key, backward=True)
            uses = [(rows.of(key, each.part), READS), (rows.of(key, each.sum), WRITES)]
            rows.add(_ADD, Phase.BACKWARD, traffic_bytes=3 * int(step.bytes[each.sum]), uses=uses)
    rows.take(ops, key, backward=action.backward)


def _receive(parts: Parts, rows: Rows, action: Action, storage: int, lists: Lists) -> None:
    key = action.stage, action.micro_batch
    number = rows.received(key, storage)
    at = _message(parts, rows, _RECEIVE, action, (number, WRITES))
    if parts.how.schedule != "1f1b":
        return
    name = "received gradient" if action.backward else "received"
    before = lists.get((action.stage, name))
    if before is not None:
        rows.hold(*before, at)
    lists[action.stage, name] = key, storage


def _message(parts: Parts, rows: Rows, name: str, action: Action, use: tuple[int, int]) -> int:
    phase = Phase.BACKWARD if action.backward else Phase.FORWARD
    return rows.add(name, phase, resource=parts.how.link, traffic_bytes=parts.chain.passed_bytes, group=2, uses=[use])


def _finish(parts: Parts, rows: Rows, stages: Sequence[int], held: npt.NDArray[np.bool_]) -> None:
    """Gradients added up between stages and pipelines, their norms, and the optimizer."""
    how, columns = parts.how, columns_of(parts.step.parameters)
    mine = np.flatnonzero(held & columns.trainable & (columns.gradient >= 0))
    gradients = columns.gradient[mine].tolist()
    sums = {each.sum for each in parts.tied} if {0, len(how.starts) - 1} & set(stages) else set()
    for gradient in gradients:
        n_bytes = int(parts.step.bytes[gradient])
        ways = [(how.link, 2)] * (gradient in sums) + [(how.between, how.copies + APART * (how.ranks - 1))] * (how.copies > 1)
        for resource, group in ways:
            rows.add(
                _REDUCE, Phase.BOUNDARY, resource=resource, traffic_bytes=n_bytes, group=group,
                uses=[(rows.once(gradient), WRITES)],
            )  # fmt: skip
    total = int(parts.step.bytes[gradients].sum()) if gradients else 0
    rows.add(_NORMS, Phase.BOUNDARY, traffic_bytes=total, uses=[(rows.once(each), READS) for each in gradients])
    rows.add(_REDUCE, Phase.BOUNDARY, resource=how.link, traffic_bytes=8 * len(columns), group=how.ranks, uses=[])
    rows.take_rest()
