"""Pass of the evicting region: plays `activations.eviction.evicting_region` on a recorded Step to predict the
peak.

It makes the runtime's calls on the runtime's own rematerializer (`_native.Rematerializer`), op by op, from
the Step's record of Python's and the engine's references (`held_until`), of saves (`save_*`) and of incoming
gradients. So it knows that a local variable of a module, or autocast's cached cast of a weight, cannot be
evicted although only backward reads it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from memtune import _native
from memtune.activations.eviction.policy import Policy
from memtune.activations.schedules import Region, added_gradients, elements_of
from memtune.program import BATCH_NORMS, F64, I32, I64, READS, WRITES, Edit, Kind, Step, Tier


@dataclass(frozen=True)
class RuntimeCosts:
    """Inputs of the runtime in addition to policy and budget."""

    cost_s: F64
    """(n,) cost of each op of the region, in seconds."""
    reserve_bytes: int
    """Bytes reserved between forward and backward."""
    scratch_bytes: I64
    """(n,) kernel workspace of each op."""


def online_policy(policy: Policy) -> Policy:
    """Return `policy` as at run time: bytes decide if a request fits, addresses only select victims."""
    return replace(policy, in_place=True, forget=True, compacts=True)


def peak_within(
    step: Step, region: Region, policy: Policy, budget_bytes: int, costs: RuntimeCosts
) -> int | None:
    """Return the peak bytes of one forward and backward under the runtime; None if a request does not fit.

    Args:
        step: The recorded step.
        region: The model's forward and backward in it.
        policy: The eviction policy, from `online_policy`.
        budget_bytes: Budget of the device while the region runs.
        costs: Costs, reserve and workspace.
    """
    # The first step has no optimizer state, and a step's first micro-batch has no gradients: there the
    # runtime keeps more values and evicts others. All of these cases must fit.
    peak_bytes = 0
    gradients = _added_to(step)
    sums_bytes, state_bytes = int(step.storages.bytes[gradients].sum()), _state_bytes(step, region)
    for first_batch, first_step in product(
        *((False, True) if each else (False,) for each in (sums_bytes, state_bytes))
    ):
        background_bytes = (
            int(region.background_bytes[0]) - sums_bytes * first_batch - state_bytes * first_step
        )
        if budget_bytes <= background_bytes:
            return None
        player = _RuntimeSimulation(
            step, region, policy.settings(budget_bytes - background_bytes), costs, first_batch=first_batch
        )
        try:
            player.simulate()
        except RuntimeError:  # the native rematerializer has nothing left to evict
            return None
        peak_bytes = max(peak_bytes, background_bytes + player.peak_bytes)
    return peak_bytes


def _added_to(step: Step) -> I32:
    """Return the gradients that exist from earlier micro-batches."""
    added = np.isin(step.uses.op, np.flatnonzero(added_gradients(step))) & (step.uses.mode == WRITES)
    there = step.uses.storage[added & (step.storages.tier[step.uses.storage] == Tier.DEVICE)]
    return np.unique(there[step.storages.producer[there] < 0]).astype(np.int32)


def _state_bytes(step: Step, region: Region) -> int:
    """Return the bytes of optimizer state on the device while the region runs."""
    state = (
        (step.storages.kind == Kind.OPTIMIZER)
        & (step.storages.producer < 0)
        & (step.storages.tier == Tier.DEVICE)
    )
    return int(step.storages.bytes[state & (step.freed_after >= region.rows[-1])].sum())


def with_peak(step: Step, peak_bytes: int) -> Step:
    """Return `step` with the runtime's extra bytes at its peak in forward and backward."""
    # The runtime evicts as late as it can, a schedule frees as early as it can, so the runtime's peak
    # is higher.
    live = step.live_bytes()[: step.backward_end + 1]
    more = peak_bytes - int(live.max(initial=0))
    if more <= 0:
        return step
    edit, at = Edit(step), np.asarray([live.argmax()], np.int32)
    edit.add_storages(np.asarray([more], np.int64), producer=at, held_until=at)
    return edit.done()


def least_budget_bytes(
    step: Step, region: Region, policy: Policy, too_little_bytes: int, costs: RuntimeCosts
) -> int | None:
    """Return a budget that the runtime meets, within 0.1 % of one that it does not, if it has any."""
    # A policy may fail above a budget that it meets, so bisection finds one such budget, not the least.
    high = step.peak_bytes()
    if high <= too_little_bytes or peak_within(step, region, policy, high, costs) is None:
        return None
    while high - too_little_bytes > max(high // 1000, 1):
        middle = (too_little_bytes + high) // 2
        if peak_within(step, region, policy, middle, costs) is None:
            too_little_bytes = middle
        else:
            high = middle
    return high


class _RuntimeSimulation:
    """Player that calls the rematerializer as `activations.eviction.eviction_table.OnlineTable` does."""

    def __init__(
        self,
        step: Step,
        region: Region,
        settings: dict[str, object],
        costs: RuntimeCosts,
        *,
        first_batch: bool,
    ) -> None:
        # A donated buffer would end earlier than the table, which holds it, lets it end.
        self._step, self._region, self._costs = step.without_donations(region.rows), region, costs
        self._remat = _native.Rematerializer(settings)
        self._elements = elements_of(step, region)
        self._rows: list[int] = region.rows.tolist()
        self._number: dict[int, int] = {}  # storage → number of its current version in the rematerializer
        self._again: set[int] = set()  # storages whose value can be recomputed
        self._held: dict[int, int] = {}  # storage of a value held outside → row after which it is released
        self._watched: dict[int, int] = {}  # number of a storage held outside only → row after which it ends
        self._given: set[int] = set()  # storages from outside that ops have read
        self._kept: defaultdict[int, list[int]] = defaultdict(
            list
        )  # row after which autograd releases → numbers
        self._settled = self._rows[0] - 1
        self._persistent = np.zeros(step.storages.n, bool)
        """First gradients: later micro-batches accumulate into them, so they remain resident."""
        if first_batch:
            self._persistent[
                step.uses.storage[np.isin(step.uses.op, np.flatnonzero(added_gradients(step)))]
            ] = True
        self._read_uses_and_saves()

    def _read_uses_and_saves(self) -> None:
        step = self._step
        self._fresh: defaultdict[int, list[int]] = defaultdict(list)  # row → storages
        self._reads: defaultdict[int, list[int]] = defaultdict(list)
        self._writes: defaultdict[int, list[int]] = defaultdict(list)
        self._packs: defaultdict[int, list[int]] = defaultdict(list)  # row → saves
        self._asks: defaultdict[int, list[int]] = defaultdict(list)
        for storage in np.flatnonzero(
            (step.storages.producer >= 0) & (step.storages.kind != Kind.WORKSPACE)
        ).tolist():
            self._fresh[int(step.storages.producer[storage])].append(storage)
        by = {int(READS): self._reads, int(WRITES): self._writes}
        for op, storage, how in zip(
            step.uses.op.tolist(), step.uses.storage.tolist(), step.uses.mode.tolist(), strict=True
        ):
            by.get(how, self._reads)[op].append(storage)
        ended = self._rows[self._region.graph.n_forward - 1] + 1
        self._released_after = np.maximum(step.storages.held_until, step.storages.producer)
        # In forward an op's caller holds arguments until the op returns; in backward the engine has freed
        # them.
        read = step.uses.op < ended  # an op's caller holds its arguments, or views of them
        np.maximum.at(self._released_after, step.uses.storage[read], step.uses.op[read])
        for save in range(step.saves.n):
            before = int(step.saves.packed_before[save])
            if before < ended or (before == ended and step.saves.is_output[save]):
                self._packs[before].append(save)
            else:  # the loss saves the model's outputs: its references are outside the table
                storage = int(step.saves.storage[save])
                self._released_after[storage] = max(
                    self._released_after[storage], step.saves.held_until[save]
                )
        # Backward unpacks in this order, and each unpack may evict what the one before has restored.
        for save in np.argsort(step.saves.unpack_order, kind="stable").tolist():
            self._asks[int(step.saves.unpacked_before[save])].append(save)

    def simulate(self) -> None:
        """Play one forward and its backward.

        Raises:
            RuntimeError: A request does not fit.
        """
        n_forward = self._region.graph.n_forward
        for op, row in enumerate(self._rows[:n_forward]):
            # Before the row's op, as in the run: a value that autograd retains is still evictable, but not
            # forgotten.
            self._pack(row)
            self._settle(row)
            self._forward(op, row)
        # Outputs that autograd saves after the last op of forward.
        self._pack(row + 1)
        self._leave_room(row)
        self._flow_in(row + 1, self._rows[n_forward])
        for op, row in enumerate(self._rows[n_forward:], n_forward):
            self._unpack(row)
            self._settle(row)
            fresh = self._fresh[row]
            self._remat.make_room(self._needs_bytes(op, fresh))
            for storage in fresh:
                self._track(storage)

    @property
    def peak_bytes(self) -> int:
        """Peak of accounted bytes."""
        return int(self._remat.counted()["peak_bytes"])

    def _needs_bytes(self, op: int, fresh: list[int]) -> int:
        return sum(int(self._step.storages.bytes[each]) for each in fresh) + int(
            self._costs.scratch_bytes[op]
        )

    def _name(self, row: int) -> str:
        return self._step.names[int(self._step.ops.name[row])]

    # -- forward ---------------------------------------------------------------------------------------------

    def _forward(self, op: int, row: int) -> None:
        fresh, reads, writes = self._fresh[row], self._reads[row], self._writes[row]
        again, over = self._repeatable(op, row, reads, writes)
        self._remat.make_room(self._needs_bytes(op, fresh))
        # No replay makes these results, so they are constants, which are not evicted.
        if not again or (over is not None and fresh):
            if over is not None:
                self._pin_inputs_of_writes([over])
            for storage in fresh:
                number = self._remat.constant(int(self._step.storages.bytes[storage]))
                self._remat.hold(number)
                self._enter(storage, number)
        elif fresh or over is not None:
            numbers = [self._number[each] for each in reads if each in self._number]
            sizes = [int(self._step.storages.bytes[each]) for each in (fresh if over is None else [over])]
            cost_s, scratch = float(self._costs.cost_s[op]), int(self._costs.scratch_bytes[op])
            old = -1 if over is None else self._number[over]
            if over is not None:
                self._remat.let_go(old)
            elements = self._elements[op] if over is None else 0
            made = self._remat.call(cost_s, numbers, sizes, old, scratch, elements)
            if over is not None:
                self._remat.release(old)
            for storage, number in zip(fresh if over is None else [over], made, strict=True):
                self._enter(storage, number)
                self._again.add(storage)

    def _repeatable(self, op: int, row: int, reads: list[int], writes: list[int]) -> tuple[bool, int | None]:
        """Return whether the op could run again, and the storage of the value that it overwrites."""
        mine = [each for each in writes if each in self._number]
        outside = [each for each in writes if each not in self._number]
        norm = self._name(row) in BATCH_NORMS
        for storage in outside:
            if storage in self._given and self._step.storages.kind[storage] != Kind.PARAMETER:
                self._given.remove(storage)
                # The table copies an outside tensor before its first write, for ops that have read it.
                self._remat.constant(int(self._step.storages.bytes[storage]))
        over = self._number[mine[0]] if mine and not outside else None
        alone = op in self._region.graph.once or (bool(outside) and not norm) or len(mine) > 1
        if alone or (over is not None and mine[0] not in self._again):
            self._pin_inputs_of_writes(mine)
            return False, None
        self._given.update(each for each in reads if each not in self._number)
        return True, None if over is None else mine[0]

    def _pin_inputs_of_writes(self, written: list[int]) -> None:
        for storage in written:
            if storage in self._again:
                self._again.remove(storage)
                self._remat.hold(self._number[storage])

    def _enter(self, storage: int, number: int) -> None:
        self._number[storage], self._held[storage] = number, int(self._released_after[storage])

    # -- between forward and backward ------------------------------------------------------------------------

    def _leave_room(self, last: int) -> None:
        """Reserve bytes for the loss after autocast's cache is freed, maybe at the end of forward."""
        for storage in self._held:
            if self._released_after[storage] == last and self._is_cast_of_parameter(storage):
                self._held[storage] = last + 1
        self._settle(last + 1)
        # The loss runs outside of the table and needs these bytes without asking.
        self._remat.make_room(self._costs.reserve_bytes)

    def _is_cast_of_parameter(self, storage: int) -> bool:
        row, step = int(self._step.storages.producer[storage]), self._step
        return self._name(row) == "aten._to_copy.default" and any(
            step.storages.kind[each] == Kind.PARAMETER for each in self._reads[row]
        )

    def _flow_in(self, first: int, first_back: int) -> None:
        """Account the gradients of the model's outputs."""
        reads = {
            storage for row in self._rows[self._region.graph.n_forward :] for storage in self._reads[row]
        }
        for row in range(first, first_back):
            for storage in self._fresh[row]:
                if storage in reads:
                    self._track(storage)

    # -- outside references ----------------------------------------------------------------------------------

    def _track(self, storage: int) -> None:
        until = self._step.ops.n if self._persistent[storage] else int(self._step.freed_after[storage])
        self._watched[self._remat.constant(int(self._step.storages.bytes[storage]))] = until

    def _settle(self, row: int) -> None:
        """Release the references that ended before this row's op."""
        for number in [number for number, until in self._watched.items() if until < row]:
            del self._watched[number]
            self._remat.release(number)
        for storage in [storage for storage, until in self._held.items() if until < row]:
            del self._held[storage]
            self._remat.give_back(self._number[storage])
        while self._settled < row - 1:
            self._settled += 1
            for number in self._kept.pop(self._settled, ()):
                self._remat.release(number)

    def _pack(self, row: int) -> None:
        """Retain the values that autograd saves just before this row's op."""
        for save in self._packs[row]:
            number = self._number.get(int(self._step.saves.storage[save]))
            if number is not None:
                self._remat.retain(number)
                self._kept[int(self._step.saves.held_until[save])].append(number)

    def _unpack(self, row: int) -> None:
        """Make the values resident that backward unpacks just before this row's op."""
        for save in self._asks[row]:
            storage = int(self._step.saves.storage[save])
            number = self._number.get(storage)
            if number is None:
                continue
            self._settle(row)
            self._remat.bring(number)
            if storage not in self._held:
                self._remat.take(number)
            self._held[storage] = max(self._held.get(storage, -1), int(self._step.saves.used_until[save]))
