"""The pass of `offload.multiplexed.multiplexed_stages`: the step of each rank, which takes its own stages in
turn over all micro-batches.

The rows are those of a pipeline's stages (`parallel.pipeline.pipeline_pass`), in another order and with a
stage's forward written twice; weights and gradients of blocks are there by use. Comments name the rules of
`offload.multiplexed.multiplexed_stages` and `offload.multiplexed.host_p2p`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from memtune.activations.recompute import STATE_BYTES
from memtune.offload.core import PendingUpdates, waiting_room
from memtune.offload.layer_major import OnRanks, Use, Where, in_parts
from memtune.offload.parameters import native_update_bytes, whole_state
from memtune.parallel.pipeline import Parts, PipelineSettings, chain_of, declare, other_batches, upload
from memtune.program import (
    FOREVER,
    I32,
    READS,
    WRITES,
    Key,
    Kind,
    Phase,
    Resource,
    StageAction,
    Step,
    Tier,
    UnrolledRows,
    columns_of,
)

_ALLOCATE, _IN = "memtune.allocate", "memtune.copy_to_device_.default"
_DOWN, _UP = "memtune.to_host.default", "memtune.to_device.default"
_SEND, _RECEIVE = "c10d.send.default", "c10d.recv_.default"
_ADD, _REDUCE, _UPDATE = "aten.add_.Tensor", "memtune.all_reduce_.default", "memtune.host_update_.default"


def in_turn(
    step: Step,
    layout: OnRanks,
    micro_batches: int,
    link: Resource = Resource.INTRA_LINK,
    boundaries: Where = "host",
) -> list[Step]:
    """The step of each rank, but for the optimizer of what is in no block, from that of one rank that has
    all.

    Args:
        step: That of a later micro-batch.
        layout: Which stage is where.
        micro_batches: Of all ranks.
        link: Between the ranks' hosts.
        boundaries: Where what stages start from waits for backward.

    Raises:
        ValueError: The blocks are no chain that can be cut there.
    """
    chain, starts = chain_of(step), tuple(first for first, _ in layout.stages)
    if isinstance(chain, str) or set(starts[1:]) - set(chain.cuts):
        raise ValueError(chain if isinstance(chain, str) else chain.obstacle)
    ranks = max(layout.ranks) + 1
    parts = Parts.of(step, chain, PipelineSettings(starts, ranks, "1f1b", micro_batches, link=link))
    return [_Rank(parts, layout, rank, micro_batches, link, boundaries).done() for rank in range(ranks)]


class _Rank:
    """Follows `offload.multiplexed.multiplexed_stages.StagesInTurn`, method by method."""

    def __init__(
        self, parts: Parts, layout: OnRanks, rank: int, count: int, link: Resource, boundaries: Where
    ) -> None:
        self._parts, self._step, self._layout, self._rank = parts, parts.step, layout, rank
        self._count, self._link, self._columns = count, link, columns_of(parts.step.parameters)
        self._waits_on_host = boundaries == "host"
        self._held = parts.owners()[list(layout.mine(rank))].max(0)
        self._rows = UnrolledRows(self._step, self._held)
        self._rows.sums(parts.sums.part, parts.sums.total)
        self._n_bytes = self._columns.numel * self._columns.itemsize
        self._inside = self._held & (self._columns.block >= 0)
        self._waiting: PendingUpdates[list[int]] = PendingUpdates(waiting_room(self._step, self._held))
        self._hosts = self._to_host()
        self._there: dict[int, list[int]] = {}
        """By stage: its weights on the device."""
        self._coming: list[list[tuple[int, int]]] = []
        """Parts of what comes in ahead, the last one first: parameter and number."""
        self._given: dict[Key, int] = {}
        """What a stage starts from, where it waits."""
        self._leaving: tuple[int, Phase] | None = None
        self._leave_at_once = True
        self._on_the_way: PendingUpdates[int] = PendingUpdates(self._room_bytes())
        """Gradients, the oldest first."""
        self._staying: list[tuple[int, int]] = []
        """Gradients of the last stage, which leave beside the next one: parameter and number."""
        self._going: list[list[tuple[int, int]]] = []
        """Parts of these, the last one first."""
        self._gone: dict[int, int] = {}
        """Of those that have left, by parameter: the number on the host."""
        self._sent: list[int] = []
        self._sent_before: list[int] = []
        self._adds = self._landing()
        self._late = self._inside & np.isin(self._columns.block, layout.late)

    def _room_bytes(self) -> int:
        """Of gradients that are on their way at once: where stages come in ahead, a stage's."""
        if not self._layout.prefetch:
            return 0
        columns, mine = self._columns, self._inside & (self._columns.gradient >= 0)
        stages = [
            mine & np.isin(columns.block, list(self._layout.blocks(stage)))
            for stage in self._layout.mine(self._rank)
        ]
        return max(int(self._n_bytes[each].sum()) for each in stages)

    def _to_host(self) -> dict[int, int]:
        """Blocks' weights and state are on the host from before the step."""
        mine, columns, rows = np.flatnonzero(self._inside), self._columns, self._rows
        gradients = columns.gradient[mine]
        rows.changed(columns.storage[mine], "bytes", 0)
        rows.changed(gradients[(gradients >= 0) & (self._step.storages.producer[gradients] < 0)], "bytes", 0)
        state = np.flatnonzero(
            (self._step.storages.kind == Kind.OPTIMIZER)
            & (self._step.storages.producer < 0)
            & np.isin(self._step.storages.owner, mine)
        )
        rows.changed(state.astype(np.int32), "tier", Tier.HOST)
        return {
            row: rows.new(int(self._n_bytes[row]), Tier.HOST, Kind.PARAMETER, row, forever=True)
            for row in mine.tolist()
        }

    def _landing(self) -> dict[int, int]:
        """The op that adds to each block parameter's sum → the parameter."""
        step, of = (
            self._step,
            {int(self._columns.gradient[row]): row for row in np.flatnonzero(self._inside).tolist()},
        )
        adder = np.zeros(step.ops.n, bool)
        adder[self._parts.sums.adder] = True
        rows = np.flatnonzero(
            (step.uses.mode == WRITES) & adder[step.uses.op] & np.isin(step.uses.storage, list(of))
        )
        return {int(step.uses.op[row]): of[int(step.uses.storage[row])] for row in rows}

    def done(self) -> Step:
        """The rank's step."""
        rows, parts = self._rows, self._parts
        self._update_late()
        other_batches(self._parts, self._rows, self._count // (max(self._layout.ranks) + 1))
        generator = rows.new(STATE_BYTES, Tier.HOST, Kind.WORKSPACE)
        upload(parts, rows)
        for stage in self._layout.mine(self._rank):
            declare(parts, rows, stage)
            rows.declare(("forward", stage), self._made_forward(stage))
        uses = self._layout.uses(self._rank)
        for number, use in enumerate(uses):
            self._use(use, uses[number + 1] if number + 1 < len(uses) else None)
        for number in (*self._sent_before, *self._sent):
            rows.hold_number(number, rows.n_ops - 1)
        for index in range(self._count):
            rows.hold_all(("upload", index), rows.n_ops - 1)
        rows.hold_number(generator, rows.n_ops - 1)
        self._add_tied()
        end = rows.n_ops
        rows.take_rest(self._held & ~self._inside)
        self._let_go(self._waiting.rest(), min(end, rows.n_ops - 1))  # what else comes down has by then
        step = rows.done()
        columns = columns_of(step.parameters)
        used = np.where(columns.block >= 0, -1, columns.gradient).astype(np.int32)
        return replace(step, parameters=replace(columns, gradient=used))

    def _update_late(self) -> None:
        """Rule 6 of `offload.layer_major.pack_offloader`: what the last step has left."""
        columns = self._columns
        for block in np.unique(columns.block[self._late]).tolist():
            mine = np.flatnonzero(self._late & (columns.block == block) & (columns.gradient >= 0)).tolist()
            gradients = [
                self._rows.new(int(self._n_bytes[row]), Tier.HOST, Kind.GRADIENT, row, left=True)
                for row in mine
            ]
            for row, gradient in zip(mine, gradients, strict=True):
                used = gradients if row == mine[-1] else [gradient]  # those of a block are let go together
                self._update_one(row, used, Phase.PROLOGUE)

    def _update_one(self, parameter: int, gradients: list[int], phase: Phase) -> None:
        rows, step = self._rows, self._step
        state = whole_state(step)
        mine = [rows.once(each) for each in state[step.storages.owner[state] == parameter].tolist()]
        rows.add(
            _UPDATE,
            phase,
            resource=Resource.HOST_THREADS,
            traffic_bytes=int(native_update_bytes(step)[parameter]),
            uses=[
                *((each, READS) for each in gradients),
                *((each, WRITES) for each in (self._hosts[parameter], *mine)),
            ],
        )

    def _made_forward(self, stage: int) -> I32:
        step = self._step
        here = (self._parts.stage == stage) | self._parts.shared
        made = (
            (step.storages.producer >= 0)
            & here[step.storages.producer]
            & (step.ops.phase[step.storages.producer] == Phase.FORWARD)
        )
        return np.flatnonzero(made).astype(np.int32)

    # -- a use -----------------------------------------------------------------------------------------------

    def _use(self, use: Use, following: Use | None) -> None:
        rows, backward = self._rows, use.kind != "forward"
        phase = Phase.BACKWARD if use.kind == "backward" else Phase.FORWARD
        posted = self._posts(use, phase)
        self._begin(use.stage, phase, ahead=False)
        if following is not None and self._layout.prefetch:
            self._begin(following.stage, phase, ahead=True)
        if self._staying:
            parts = in_parts([int(self._n_bytes[row]) for row, _ in self._staying], self._count)
            self._going = [[self._staying[n] for n in part] for part in reversed(parts)]
            self._staying = []
        self._leave_at_once = following is None or not self._layout.prefetch
        if backward:
            self._sums_begin(use.stage)
        down: dict[int, int] = {}
        for index in range(self._count):
            if backward:
                self._backward(use, index, posted, down if index == self._count - 1 else None)
            else:
                self._forward(use.stage, index, posted)
        self._arrive()
        for number in self._sent_before:
            rows.hold_number(number, rows.n_ops - 1)
        self._sent_before, self._sent = self._sent, []
        if following is None or following.stage != use.stage:
            for number in self._there.pop(use.stage):
                rows.hold_number(number, rows.n_ops - 1)
        gone, self._gone = self._gone, {}
        for each in (gone, down):
            self._update(each)

    def _posts(self, use: Use, phase: Phase) -> list[int]:
        """Rule 2 of messages: the host memory that is received into."""
        if use.kind != "backward" and use.stage == 0:
            return []
        rows, n_bytes, found = self._rows, self._parts.chain.passed_bytes, []
        for _ in range(self._count):
            found.append(rows.new(n_bytes, Tier.HOST, Kind.COMMUNICATION))
            rows.add(_ALLOCATE, phase, resource=Resource.NOTHING, uses=[])
        return found

    def _begin(self, stage: int, phase: Phase, *, ahead: bool) -> None:
        """Rule 4; what comes in ahead does so in parts (`_go_on`)."""
        if stage in self._there:
            return
        rows, columns, numbers = self._rows, self._columns, []
        inside = np.flatnonzero(
            self._inside & np.isin(columns.block, list(self._layout.blocks(stage)))
        ).tolist()
        for row in inside:
            number = rows.new(int(self._n_bytes[row]), Tier.DEVICE, Kind.COMMUNICATION, row)
            rows.add(_ALLOCATE, phase, resource=Resource.NOTHING, uses=[])
            if not ahead:
                self._bring(row, number, phase, ahead=False)
            rows.stands_for(int(columns.storage[row]), number)
            numbers.append(number)
        self._there[stage] = numbers
        if ahead:
            pieces = list(zip(inside, numbers, strict=True))
            parts = in_parts([int(self._n_bytes[row]) for row in inside], self._count)
            self._coming = [[pieces[n] for n in part] for part in reversed(parts)]

    def _bring(self, row: int, number: int, phase: Phase, *, ahead: bool) -> None:
        self._rows.add(
            _IN,
            phase,
            resource=Resource.HOST_TO_DEVICE,
            traffic_bytes=int(self._n_bytes[row]),
            uses=[(self._hosts[row], READS), (number, WRITES)],
            stream=0 if ahead else 1,
            prefetch=1 if ahead else 0,
        )

    def _go_on(self, phase: Phase) -> None:
        """Rules 1 and 2 of `offload.layer_major.pack_offloader`: a part of the next stage comes in, one of
        the last stage's gradients leaves.
        """
        for row, number in self._coming.pop() if self._coming else ():
            self._bring(row, number, phase, ahead=True)
        for row, number in self._going.pop() if self._going else ():
            self._gone[row] = self._leave(row, number)

    def _sums_begin(self, stage: int) -> None:
        """The first micro-batch's gradients become the sums, on the device for as long as the stage is."""
        columns, blocks = self._columns, list(self._layout.blocks(stage))
        for row in np.flatnonzero(
            self._inside & np.isin(columns.block, blocks) & (columns.gradient >= 0)
        ).tolist():
            number = self._rows.new(
                int(self._step.storages.bytes[columns.gradient[row]]), Tier.DEVICE, Kind.GRADIENT, row
            )
            self._rows.stands_for(int(columns.gradient[row]), number)

    def _start(self, use: Use, index: int, key: Key, posted: list[int]) -> int | None:
        """Rule 3: what the stage starts from comes to the device."""
        if use.stage == 0:
            return None
        rows, storage, n_bytes = self._rows, self._parts.given(use.stage), self._parts.chain.passed_bytes
        backward = use.kind == "backward"
        if backward and not self._waits_on_host:
            rows.put(key, storage, self._given[use.stage, index])
            return self._given[use.stage, index]
        if not backward:
            self._receive(posted[index], Phase.FORWARD)
        host = self._given[use.stage, index] if backward else posted[index]
        number = rows.received(key, storage)
        phase = Phase.BACKWARD if backward else Phase.FORWARD
        rows.add(
            _UP,
            phase,
            resource=Resource.HOST_TO_DEVICE,
            traffic_bytes=n_bytes,
            uses=[(host, READS)],
            stream=1,
        )
        self._given[use.stage, index] = host if self._waits_on_host else number
        return number

    def _receive(self, host: int, phase: Phase) -> None:
        n_bytes = self._parts.chain.passed_bytes
        self._rows.add(
            _RECEIVE, phase, resource=self._link, traffic_bytes=n_bytes, group=2, uses=[(host, WRITES)]
        )

    def _ops(self, stage: int, *, backward: bool) -> I32:
        step, parts = self._step, self._parts
        within = (parts.stage == stage) & ((step.ops.phase > Phase.FORWARD) == backward)
        within |= parts.shared & (not backward)
        within[[each.adder for each in parts.tied]] = False
        return np.flatnonzero(within).astype(np.int32)

    def _forward(self, stage: int, index: int, posted: list[int]) -> None:
        """Rule 2."""
        rows, key = self._rows, (("forward", stage), index)
        given = self._start(Use(stage, "forward"), index, key, posted)
        self._go_on(Phase.FORWARD)
        rows.take(self._ops(stage, backward=False), key)
        output = rows.of(key, self._parts.given(stage + 1))
        self._send(output, Phase.FORWARD)
        if given is not None:
            rows.hold_number(given, rows.n_ops - 1)

    def _backward(self, use: Use, index: int, posted: list[int], down: dict[int, int] | None) -> None:
        """Rule 2; `down` gets the host's gradients in the last micro-batch."""
        rows, parts, key = self._rows, self._parts, (use.stage, index)
        held = [self._start(use, index, key, posted)]
        self._go_on(Phase.BACKWARD if use.kind == "backward" else Phase.FORWARD)
        rows.take(self._ops(use.stage, backward=False), key)
        if use.kind == "backward":
            self._receive(posted[index], Phase.BACKWARD)
            held.append(rows.received(key, parts.gradient[use.stage + 1]))
            rows.add(
                _UP,
                Phase.BACKWARD,
                resource=Resource.HOST_TO_DEVICE,
                traffic_bytes=parts.chain.passed_bytes,
                uses=[(posted[index], READS)],
                stream=1,
            )
            held.append(rows.of(key, parts.given(use.stage + 1)))
        ops = self._ops(use.stage, backward=True)
        if index == 0:
            ops = ops[~np.isin(ops, parts.sums.adder)]
        self._take_backward(ops, StageAction(use.stage, index, True), down)
        if use.stage > 0:
            self._send(rows.of(key, parts.gradient[use.stage]), Phase.BACKWARD)
        for number in held:
            if number is not None:
                rows.hold_number(number, rows.n_ops - 1)

    def _take_backward(self, ops: I32, action: StageAction, down: dict[int, int] | None) -> None:
        """Rows of backward; the head's part of a tied weight is added up at once, and gradients leave as they
        land.
        """
        rows, step, key = self._rows, self._step, (action.stage, action.micro_batch)
        tied = {
            int(step.storages.producer[each.part]): each for each in self._parts.tied if action.micro_batch
        }
        stops = sorted({op for op in ops.tolist() if op in tied or (down is not None and op in self._adds)})
        for op in stops:
            rows.take(ops[ops <= op], key, backward=True)
            ops = ops[ops > op]
            if op in tied:
                each = tied[op]
                uses = [(rows.of(key, each.part), READS), (rows.of(key, each.sum), WRITES)]
                rows.add(
                    _ADD, Phase.BACKWARD, traffic_bytes=3 * int(step.storages.bytes[each.sum]), uses=uses
                )
            if down is not None and op in self._adds:
                self._lands(self._adds[op], down)
        rows.take(ops, key, backward=True)

    # -- on the way ------------------------------------------------------------------------------------------

    def _lands(self, parameter: int, down: dict[int, int]) -> None:
        number = self._rows.once(int(self._columns.gradient[parameter]))
        if self._leave_at_once:
            down[parameter] = self._leave(parameter, number)
        else:
            self._staying.append((parameter, number))

    def _leave(self, parameter: int, number: int) -> int:
        """A gradient leaves; the device lets go of those for which there is no room. Returns what is on the
        host.
        """
        n_bytes = int(self._n_bytes[parameter])
        for before in self._on_the_way.let_go(n_bytes):
            self._rows.hold_number(before, self._rows.n_ops - 1)
        self._on_the_way.put(number, n_bytes)
        return self._down(number, Phase.BACKWARD, n_bytes, Kind.GRADIENT, parameter)

    def _send(self, number: int, phase: Phase) -> None:
        """Rule 1 of messages."""
        self._arrive()
        self._sent.append(self._down(number, phase, self._parts.chain.passed_bytes, Kind.COMMUNICATION, -1))
        self._leaving = number, phase

    def _down(self, number: int, phase: Phase, n_bytes: int, kind: Kind, owner: int) -> int:
        """A copy to the host starts; the number of what it makes."""
        host = self._rows.new(n_bytes, Tier.HOST, kind, owner)
        down = Resource.DEVICE_TO_HOST
        self._rows.add(_DOWN, phase, resource=down, traffic_bytes=n_bytes, uses=[(number, READS)], prefetch=1)
        return host

    def _arrive(self) -> None:
        if self._leaving is None:
            return
        (number, phase), self._leaving = self._leaving, None
        self._rows.hold_number(number, self._rows.n_ops - 1)
        n_bytes, uses = self._parts.chain.passed_bytes, [(self._sent[-1], READS)]
        self._rows.add(_SEND, phase, resource=self._link, traffic_bytes=n_bytes, group=2, uses=uses)

    def _update(self, down: dict[int, int]) -> None:
        """Rule 4: what has come down is used, but for what is left to the next step."""
        rows = self._rows
        for number in self._on_the_way.rest():
            rows.hold_number(number, rows.n_ops - 1)
        for parameter in [each for each in down if self._late[each]]:
            rows.hold_number(down.pop(parameter), int(FOREVER))
        used = sum(int(self._n_bytes[parameter]) for parameter in down)
        self._let_go(self._waiting.let_go(used), rows.n_ops - 1)
        for parameter in sorted(down):
            self._update_one(parameter, [down[parameter]], Phase.BOUNDARY)
        self._waiting.put(list(down.values()), used)

    def _let_go(self, turns: Iterable[list[int]], op: int) -> None:
        """With op `op` done, the gradients of `turns` have been used up."""
        for host in (each for turn in turns for each in turn):
            self._rows.hold_number(host, op)

    def _add_tied(self) -> None:
        """Rule 6."""
        if self._rank not in (self._layout.ranks[0], self._layout.ranks[-1]):
            return
        for total in sorted({each.sum for each in self._parts.tied}):
            self._rows.add(
                _REDUCE,
                Phase.BOUNDARY,
                resource=self._link,
                traffic_bytes=int(self._step.storages.bytes[total]),
                group=2,
                uses=[(self._rows.once(total), WRITES)],
            )
