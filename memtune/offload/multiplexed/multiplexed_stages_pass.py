"""The pass of `offload.multiplexed.multiplexed_stages`: the step of each rank.

The rows are those of pipeline stages (`parallel.pipeline.pipeline_pass`) in another order, with each stage's
forward written twice; weights and gradients of blocks are resident by use. Comments refer to the rules of
`offload.multiplexed.multiplexed_stages`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from memtune.activations.recompute import STATE_BYTES
from memtune.offload.core import PendingUpdates, waiting_room
from memtune.offload.layer_major import BoundaryTier, StageLayout, StageUse, in_parts
from memtune.offload.parameters import native_update_bytes
from memtune.parallel.pipeline import Parts, PipelineSettings, chain_of, declare, hold_batches_on_host, upload
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
    moments_of_parameters,
)

_ALLOCATE, _COPY_IN = "memtune.allocate", "memtune.copy_to_device_.default"
_TO_HOST, _TO_DEVICE = "memtune.to_host.default", "memtune.to_device.default"
_SEND, _RECEIVE = "c10d.send.default", "c10d.recv_.default"
_REDUCE, _UPDATE = "memtune.all_reduce_.default", "memtune.host_update_.default"


def multiplexed_steps(
    step: Step,
    layout: StageLayout,
    micro_batches: int,
    link: Resource = Resource.INTRA_LINK,
    boundaries: BoundaryTier = "host",
) -> list[Step]:
    """Return the step of each rank, from the step of one rank that has all blocks.

    The optimizer of parameters outside of the blocks is left to a later pass.

    Args:
        step: Step of a later micro-batch.
        layout: The stages and their ranks.
        micro_batches: Of all ranks.
        link: Link between the ranks' hosts.
        boundaries: Tier of a stage's arguments until its backward.

    Raises:
        ValueError: The blocks do not form a chain that can be cut at the stages.
    """
    chain, starts = chain_of(step), tuple(first for first, _ in layout.stages)
    if isinstance(chain, str) or set(starts[1:]) - set(chain.cuts):
        raise ValueError(chain if isinstance(chain, str) else chain.obstacle)
    ranks = max(layout.ranks) + 1
    parts = Parts.from_step(step, chain, PipelineSettings(starts, ranks, "1f1b", micro_batches, link=link))
    return [_RankWriter(parts, layout, rank, micro_batches, link, boundaries).done() for rank in range(ranks)]


class _RankWriter:
    """Writes one rank's step; follows `multiplexed_stages.MultiplexedStages` method by method."""

    def __init__(
        self,
        parts: Parts,
        layout: StageLayout,
        rank: int,
        count: int,
        link: Resource,
        boundaries: BoundaryTier,
    ) -> None:
        self._parts, self._step, self._layout, self._rank = parts, parts.step, layout, rank
        self._count, self._link, self._columns = count, link, columns_of(parts.step.parameters)
        self._waits_on_host = boundaries == "host"
        # A rank holds the parameters of all of its stages.
        self._held = parts.owners()[list(layout.stages_of(rank))].max(0)
        self._rows = UnrolledRows(self._step, self._held)
        self._rows.declare_sums(parts.sums.part, parts.sums.total)
        self._n_bytes = self._columns.n_bytes
        self._inside = self._held & (self._columns.block >= 0)
        self._waiting: PendingUpdates[list[int]] = PendingUpdates(waiting_room(self._step, self._held))
        self._hosts = self._to_host()
        self._resident: dict[int, list[int]] = {}
        """By stage: its weights on the device."""
        self._load_parts: list[list[tuple[int, int]]] = []
        """Parts of a prefetch, last part first: parameter and number."""
        self._saved_starts: dict[Key, int] = {}
        """Arguments of stages, by stage and micro-batch."""
        self._in_flight: tuple[int, Phase] | None = None
        self._offload_now = True
        self._gradients_in_flight: PendingUpdates[int] = PendingUpdates(self._room_bytes())
        """Gradients in D2H copies, the oldest first."""
        self._kept_gradients: list[tuple[int, int]] = []
        """Gradients of the last stage that are offloaded during the next one: parameter and number."""
        self._gradient_parts: list[list[tuple[int, int]]] = []
        """Parts of these, last part first."""
        self._offloaded: dict[int, int] = {}
        """Host gradients of these, by parameter."""
        self._sent: list[int] = []
        self._sent_before: list[int] = []
        self._adds = self._adders()
        self._deferred = self._inside & np.isin(self._columns.block, layout.deferred)

    def _room_bytes(self) -> int:
        """Return the bound of gradients in D2H copies: with prefetch, the bytes of a stage."""
        # A gradient is freed when the next one's copy starts.
        if not self._layout.prefetch:
            return 0
        columns, owned = self._columns, self._inside & (self._columns.gradient >= 0)
        stages = [
            owned & np.isin(columns.block, list(self._layout.blocks(stage)))
            for stage in self._layout.stages_of(self._rank)
        ]
        return max(int(self._n_bytes[each].sum()) for each in stages)

    def _to_host(self) -> dict[int, int]:
        """Move the blocks' weights and state to the host from before the step; return the host weights."""
        owned, columns, rows = np.flatnonzero(self._inside), self._columns, self._rows
        gradients = columns.gradient[owned]
        # The device copy of a weight exists from a use's begin to its end; before the step it has no memory.
        rows.set_initial(columns.storage[owned], "bytes", 0)
        rows.set_initial(
            gradients[(gradients >= 0) & (self._step.storages.producer[gradients] < 0)], "bytes", 0
        )
        state = np.flatnonzero(
            (self._step.storages.kind == Kind.OPTIMIZER)
            & (self._step.storages.producer < 0)
            & np.isin(self._step.storages.owner, owned)
        )
        rows.set_initial(state.astype(np.int32), "tier", Tier.HOST)
        return {
            row: rows.add_storage(int(self._n_bytes[row]), Tier.HOST, Kind.PARAMETER, row, forever=True)
            for row in owned.tolist()
        }

    def _adders(self) -> dict[int, int]:
        """Return the block parameter of each op that adds to its gradient sum."""
        step = self._step
        of = {int(self._columns.gradient[row]): row for row in np.flatnonzero(self._inside).tolist()}
        adder = np.zeros(step.ops.n, bool)
        adder[self._parts.sums.adder] = True
        rows = np.flatnonzero(
            (step.uses.mode == WRITES) & adder[step.uses.op] & np.isin(step.uses.storage, list(of))
        )
        return {int(step.uses.op[row]): of[int(step.uses.storage[row])] for row in rows}

    def done(self) -> Step:
        """Return the rank's step."""
        rows, parts = self._rows, self._parts
        self._update_deferred()
        hold_batches_on_host(self._parts, self._rows, self._count // (max(self._layout.ranks) + 1))
        generator = rows.add_storage(STATE_BYTES, Tier.HOST, Kind.WORKSPACE)
        upload(parts, rows)
        for stage in self._layout.stages_of(self._rank):
            declare(parts, rows, stage)
            # A run of its own: the forward without saves has other storages than the one before backward.
            rows.declare(("forward", stage), self._made_forward(stage))
        uses = self._layout.uses(self._rank)
        for number, use in enumerate(uses):
            self._use(use, uses[number + 1] if number + 1 < len(uses) else None)
        for number in (*self._sent_before, *self._sent):
            rows.hold_number(number, rows.n_ops - 1)
        for index in range(self._count):
            # The run lists the micro-batches on the device until the step ends.
            rows.hold_all(("upload", index), rows.n_ops - 1)
        rows.hold_number(generator, rows.n_ops - 1)
        self._add_tied()
        end = rows.n_ops
        rows.append_remaining(self._held & ~self._inside)
        # All copies have finished when the optimizer of the other parameters begins.
        self._free_updated(self._waiting.drain(), min(end, rows.n_ops - 1))
        step = rows.done()
        columns = columns_of(step.parameters)
        used = np.where(columns.block >= 0, -1, columns.gradient).astype(np.int32)
        return replace(step, parameters=replace(columns, gradient=used))

    def _update_deferred(self) -> None:
        """Add the last step's deferred updates, as `offload.layer_major.pack_offloader` runs them."""
        columns = self._columns
        for block in np.unique(columns.block[self._deferred]).tolist():
            owned = np.flatnonzero(
                self._deferred & (columns.block == block) & (columns.gradient >= 0)
            ).tolist()
            gradients = [
                self._rows.add_storage(int(self._n_bytes[row]), Tier.HOST, Kind.GRADIENT, row, left=True)
                for row in owned
            ]
            for row, gradient in zip(owned, gradients, strict=True):
                used = (
                    gradients if row == owned[-1] else [gradient]
                )  # gradients of a block are freed together
                self._update_one(row, used, Phase.PROLOGUE)

    def _update_one(self, parameter: int, gradients: list[int], phase: Phase) -> None:
        rows, step = self._rows, self._step
        moments, _ = moments_of_parameters(step, np.asarray([parameter]))
        state = [rows.single_number(each) for each in moments.tolist()]
        rows.add(
            _UPDATE,
            phase,
            resource=Resource.HOST_THREADS,
            traffic_bytes=int(native_update_bytes(step)[parameter]),
            uses=[
                *((each, READS) for each in gradients),
                *((each, WRITES) for each in (self._hosts[parameter], *state)),
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

    def _use(self, use: StageUse, following: StageUse | None) -> None:
        """Insert one use of a stage: its weights, its messages, and the loads and copies that overlap with
        it.
        """
        rows, backward = self._rows, use.kind != "forward"
        phase = Phase.BACKWARD if use.kind == "backward" else Phase.FORWARD
        posted = self._posts(use, phase)
        # It is resident already if the use before prefetched it, or was of the same stage.
        self._begin(use.stage, phase, prefetch=False)
        if following is not None and self._layout.prefetch:
            self._begin(following.stage, phase, prefetch=True)
        if self._kept_gradients:
            parts = in_parts([int(self._n_bytes[row]) for row, _ in self._kept_gradients], self._count)
            self._gradient_parts = [[self._kept_gradients[n] for n in part] for part in reversed(parts)]
            self._kept_gradients = []
        # With prefetch the H2D and D2H copies of a stage overlap with the next stage; after the last one
        # nothing follows.
        self._offload_now = following is None or not self._layout.prefetch
        if backward:
            self._start_sums(use.stage)
        on_host: dict[int, int] = {}
        for index in range(self._count):
            if backward:
                # A sum of gradients is complete in the last micro-batch.
                self._backward(use, index, posted, on_host if index == self._count - 1 else None)
            else:
                self._forward(use.stage, index, posted)
        self._finish_copy()
        for number in self._sent_before:
            rows.hold_number(number, rows.n_ops - 1)
        self._sent_before, self._sent = self._sent, []
        # The turnaround's neighbour on one rank may be the same stage, which remains resident.
        if following is None or following.stage != use.stage:
            for number in self._resident.pop(use.stage):
                rows.hold_number(number, rows.n_ops - 1)
        gone, self._offloaded = self._offloaded, {}
        for each in (gone, on_host):
            self._update(each)

    def _posts(self, use: StageUse, phase: Phase) -> list[int]:
        """Allocate the host memory of receives."""
        # The first stage reads the batch, which no rank sends.
        if use.kind != "backward" and use.stage == 0:
            return []
        rows, n_bytes, found = self._rows, self._parts.chain.passed_bytes, []
        for _ in range(self._count):
            # One for each micro-batch: all receives of a use are posted when it begins.
            found.append(rows.add_storage(n_bytes, Tier.HOST, Kind.COMMUNICATION))
            rows.add(_ALLOCATE, phase, resource=Resource.NOTHING, uses=[])
        return found

    def _begin(self, stage: int, phase: Phase, *, prefetch: bool) -> None:
        """Load or prefetch a stage; a prefetch only allocates, and `_next_micro_batch` copies parts."""
        if stage in self._resident:
            return
        rows, columns, numbers = self._rows, self._columns, []
        inside = np.flatnonzero(
            self._inside & np.isin(columns.block, list(self._layout.blocks(stage)))
        ).tolist()
        for row in inside:
            number = rows.add_storage(int(self._n_bytes[row]), Tier.DEVICE, Kind.COMMUNICATION, row)
            rows.add(_ALLOCATE, phase, resource=Resource.NOTHING, uses=[])
            if not prefetch:
                self._load(row, number, phase, prefetch=False)
            # Stages that begin later read this copy; those before keep the number they were given.
            rows.replace_from_now(int(columns.storage[row]), number)
            numbers.append(number)
        self._resident[stage] = numbers
        if prefetch:
            pieces = list(zip(inside, numbers, strict=True))
            parts = in_parts([int(self._n_bytes[row]) for row in inside], self._count)
            self._load_parts = [[pieces[n] for n in part] for part in reversed(parts)]

    def _load(self, row: int, number: int, phase: Phase, *, prefetch: bool) -> None:
        self._rows.add(
            _COPY_IN,
            phase,
            resource=Resource.HOST_TO_DEVICE,
            traffic_bytes=int(self._n_bytes[row]),
            uses=[(self._hosts[row], READS), (number, WRITES)],
            stream=0 if prefetch else 1,
            prefetch=1 if prefetch else 0,
        )

    def _next_micro_batch(self, phase: Phase) -> None:
        """Copy a part of the next stage to the device and of the last stage's gradients to the host."""
        for row, number in self._load_parts.pop() if self._load_parts else ():
            self._load(row, number, phase, prefetch=True)
        for row, number in self._gradient_parts.pop() if self._gradient_parts else ():
            self._offloaded[row] = self._offload_gradient(row, number)

    def _start_sums(self, stage: int) -> None:
        """Let the first micro-batch's gradients become the sums, resident as long as the stage."""
        columns, blocks = self._columns, list(self._layout.blocks(stage))
        for row in np.flatnonzero(
            self._inside & np.isin(columns.block, blocks) & (columns.gradient >= 0)
        ).tolist():
            number = self._rows.add_storage(
                int(self._step.storages.bytes[columns.gradient[row]]), Tier.DEVICE, Kind.GRADIENT, row
            )
            self._rows.replace_from_now(int(columns.gradient[row]), number)

    def _start(self, use: StageUse, index: int, key: Key, posted: list[int]) -> int | None:
        """Copy the stage's arguments to the device (Rule 3)."""
        if use.stage == 0:
            return None
        rows, storage = self._rows, self._parts.input_of(use.stage)
        backward = use.kind == "backward"
        if backward and not self._waits_on_host:
            rows.set_number(key, storage, self._saved_starts[use.stage, index])
            return self._saved_starts[use.stage, index]
        if not backward:
            self._receive(posted[index], Phase.FORWARD)
        host = self._saved_starts[use.stage, index] if backward else posted[index]
        number = rows.add_received(key, storage)
        self._copy_to_device(host, Phase.BACKWARD if backward else Phase.FORWARD)
        self._saved_starts[use.stage, index] = host if self._waits_on_host else number
        return number

    def _receive(self, host: int, phase: Phase) -> None:
        n_bytes = self._parts.chain.passed_bytes
        self._rows.add(
            _RECEIVE, phase, resource=self._link, traffic_bytes=n_bytes, group=2, uses=[(host, WRITES)]
        )

    def _copy_to_device(self, host: int, phase: Phase) -> None:
        """Add the H2D copy of a message, for which the next op waits."""
        self._rows.add(
            _TO_DEVICE,
            phase,
            resource=Resource.HOST_TO_DEVICE,
            traffic_bytes=self._parts.chain.passed_bytes,
            uses=[(host, READS)],
            stream=1,
        )

    def _ops(self, stage: int, *, backward: bool) -> I32:
        return np.flatnonzero(self._parts.ops_of(stage, backward=backward)).astype(np.int32)

    def _forward(self, stage: int, index: int, posted: list[int]) -> None:
        """Add a forward run of a stage (Rule 2)."""
        rows, key = self._rows, (("forward", stage), index)
        stage_input = self._start(StageUse(stage, "forward"), index, key, posted)
        self._next_micro_batch(Phase.FORWARD)
        rows.append_ops(self._ops(stage, backward=False), key)
        output = rows.number_of(key, self._parts.input_of(stage + 1))
        self._send(output, Phase.FORWARD)
        if stage_input is not None:
            rows.hold_number(stage_input, rows.n_ops - 1)

    def _backward(self, use: StageUse, index: int, posted: list[int], on_host: dict[int, int] | None) -> None:
        """Add a backward run of a stage (Rule 2); `on_host` gets the last micro-batch's host gradients."""
        rows, parts, key = self._rows, self._parts, (use.stage, index)
        held = [self._start(use, index, key, posted)]
        self._next_micro_batch(Phase.BACKWARD if use.kind == "backward" else Phase.FORWARD)
        rows.append_ops(self._ops(use.stage, backward=False), key)
        if use.kind == "backward":
            self._receive(posted[index], Phase.BACKWARD)
            held.append(rows.add_received(key, parts.gradient[use.stage + 1]))
            self._copy_to_device(posted[index], Phase.BACKWARD)
            held.append(rows.number_of(key, parts.input_of(use.stage + 1)))
        ops = self._ops(use.stage, backward=True)
        if index == 0:
            # The first micro-batch's gradient is the sum, so nothing is added.
            ops = ops[~np.isin(ops, parts.sums.adder)]
        self._run_backward(ops, StageAction(use.stage, index, True), on_host)
        if use.stage > 0:
            self._send(rows.number_of(key, parts.gradient[use.stage]), Phase.BACKWARD)
        for number in held:
            if number is not None:
                rows.hold_number(number, rows.n_ops - 1)

    def _run_backward(self, ops: I32, action: StageAction, on_host: dict[int, int] | None) -> None:
        """Add backward rows: a tied head's part is added at once, ready gradients are offloaded."""
        rows, step, key = self._rows, self._step, (action.stage, action.micro_batch)
        tied = {
            int(step.storages.producer[each.part]): each for each in self._parts.tied if action.micro_batch
        }
        stops = sorted(
            {op for op in ops.tolist() if op in tied or (on_host is not None and op in self._adds)}
        )
        for op in stops:
            # Up to the op that makes the gradient ready, so that its copy starts right after it.
            rows.append_ops(ops[ops <= op], key, backward=True)
            ops = ops[ops > op]
            if op in tied:
                self._parts.add_tied_part(rows, key, tied[op])
            if on_host is not None and op in self._adds:
                self._on_grad_ready(self._adds[op], on_host)
        rows.append_ops(ops, key, backward=True)

    # -- D2H copies ------------------------------------------------------------------------------------------

    def _on_grad_ready(self, parameter: int, on_host: dict[int, int]) -> None:
        number = self._rows.single_number(int(self._columns.gradient[parameter]))
        if self._offload_now:
            on_host[parameter] = self._offload_gradient(parameter, number)
        else:
            self._kept_gradients.append((parameter, number))

    def _offload_gradient(self, parameter: int, number: int) -> int:
        """Start the D2H copy of a gradient; free those beyond the bound. Return the host gradient."""
        n_bytes = int(self._n_bytes[parameter])
        for before in self._gradients_in_flight.make_room(n_bytes):
            self._rows.hold_number(before, self._rows.n_ops - 1)
        self._gradients_in_flight.add(number, n_bytes)
        return self._copy_to_host(number, Phase.BACKWARD, n_bytes, Kind.GRADIENT, parameter)

    def _send(self, number: int, phase: Phase) -> None:
        """Start the D2H copy of a message; send the one before it."""
        self._finish_copy()
        self._sent.append(
            self._copy_to_host(number, phase, self._parts.chain.passed_bytes, Kind.COMMUNICATION, -1)
        )
        self._in_flight = number, phase

    def _copy_to_host(self, number: int, phase: Phase, n_bytes: int, kind: Kind, owner: int) -> int:
        """Add a D2H copy; return the number of the host storage."""
        host = self._rows.add_storage(n_bytes, Tier.HOST, kind, owner)
        copy_engine = Resource.DEVICE_TO_HOST
        self._rows.add(
            _TO_HOST, phase, resource=copy_engine, traffic_bytes=n_bytes, uses=[(number, READS)], prefetch=1
        )
        return host

    def _finish_copy(self) -> None:
        if self._in_flight is None:
            return
        (number, phase), self._in_flight = self._in_flight, None
        self._rows.hold_number(number, self._rows.n_ops - 1)
        n_bytes, uses = self._parts.chain.passed_bytes, [(self._sent[-1], READS)]
        self._rows.add(_SEND, phase, resource=self._link, traffic_bytes=n_bytes, group=2, uses=uses)

    def _update(self, on_host: dict[int, int]) -> None:
        """Update the parameters of `on_host`, but for deferred ones (Rule 4)."""
        rows = self._rows
        for number in self._gradients_in_flight.drain():
            rows.hold_number(number, rows.n_ops - 1)
        for parameter in [each for each in on_host if self._deferred[each]]:
            rows.hold_number(on_host.pop(parameter), int(FOREVER))
        used = sum(int(self._n_bytes[parameter]) for parameter in on_host)
        self._free_updated(self._waiting.make_room(used), rows.n_ops - 1)
        for parameter in sorted(on_host):
            self._update_one(parameter, [on_host[parameter]], Phase.BOUNDARY)
        self._waiting.add(list(on_host.values()), used)

    def _free_updated(self, updated: Iterable[list[int]], op: int) -> None:
        """Free the gradients `updated`, whose updates end with op `op`."""
        for host in (each for hosts in updated for each in hosts):
            self._rows.hold_number(host, op)

    def _add_tied(self) -> None:
        """Add the all-reduce of tied weights (Rule 6)."""
        # Only the first and the last stage hold a tied weight.
        if self._rank not in (self._layout.ranks[0], self._layout.ranks[-1]):
            return
        for total in sorted({each.sum for each in self._parts.tied}):
            self._rows.add(
                _REDUCE,
                Phase.BOUNDARY,
                resource=self._link,
                traffic_bytes=int(self._step.storages.bytes[total]),
                group=2,
                uses=[(self._rows.single_number(total), WRITES)],
            )
