"""The simulated rematerializer: a slow reference implementation checks its journal."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from memtune.activations.eviction.policy import (
    ALONG,
    CALL,
    CONSTANT,
    EVICT,
    OVERWRITE,
    RELOAD,
    REPLAY,
    RUN,
    SWAP,
    HostLink,
    Policy,
    Trace,
    TraceWriter,
    replay,
)

DTR = Policy()
MEGTAICHI = Policy(rule="megtaichi", addressed=True, best_fit=True, replay_base=1.0001, epsilon=0.01)
COOP = Policy(rule="coop", addressed=True, in_place=True)
POLICIES = {
    "classes": DTR,
    "closure": replace(DTR, neighbours="closure"),
    "own": replace(DTR, neighbours="own"),
    "lru": replace(DTR, neighbours="nothing", by_size=False),
    "size": replace(DTR, neighbours="nothing", by_staleness=False),
    "msps": replace(DTR, neighbours="ancestors", by_staleness=False),
    "random": replace(DTR, random=True, seed=3),
    "sampled": replace(DTR, sample=True, ignore_small=0.5),
    "ignore": replace(DTR, release="ignore"),
    "banish": replace(DTR, release="banish"),
    "until_used": replace(DTR, keep_replayed=False, in_place=True),
    "forgets": replace(DTR, forget=True, keep_replayed=False),
    "forgets_coop": replace(COOP, forget=True),
    "parts": replace(DTR, parts=2, forget=True, in_place=True),
    "parts_arena": replace(MEGTAICHI, parts=3),
    "arena": replace(DTR, addressed=True),
    "megtaichi": MEGTAICHI,
    "foresight": replace(MEGTAICHI, foresight=True),
    "coop": COOP,
    "swaps": replace(MEGTAICHI, swap="exposed"),
    "swaps_at_a_cost": replace(MEGTAICHI, forget=True, swap="exposed", link=HostLink(0.5, 0.25, 0.5)),
    "swaps_and_banishes": replace(DTR, release="banish", swap="hidden", link=HostLink(0.5, 9.0)),
    "groups": replace(COOP, groups=2, small_bytes=2, small_share=0.2),
}


def chain(length: int) -> Trace:
    """Return a trace of `length` layers of one unit each, forward and backward.

    Backward of a layer reads the layer's input.
    """
    trace = TraceWriter()
    saved = [trace.constant(1)]
    for _ in range(length):
        saved += trace.call(1, [saved[-1]], [(1, -1)])
    gradient = saved[-1]
    for layer in reversed(range(length)):
        (before,) = trace.call(1, [gradient, saved[layer]], [(1, -1)])
        trace.release(gradient)
        gradient = before
    return trace.done()


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Small programs with views, several outputs, in-place ops, ops that must not run again, and references
    dropped.
    """
    trace, alive = TraceWriter(), []
    for _ in range(draw(st.integers(1, 3))):
        alive.append(trace.constant(draw(st.integers(0, 4))))
    for _ in range(draw(st.integers(1, 24))):
        args = draw(st.lists(st.sampled_from(alive), min_size=1, max_size=3))
        what = draw(
            st.sampled_from(["make", "make", "make", "view", "write", "once", "elements", "elements"])
        )
        cost = draw(st.integers(0, 5))
        if what == "view":
            outs, takes_over = [(0, args[0])], -1
        elif what == "write":
            takes_over = -1 if trace.is_view(args[0]) else args[0]
            outs = [(trace.storage_bytes(args[0]), -1)]
        elif what == "elements" and not any(
            trace.is_view(each) or trace.storage_bytes(each) not in (4, 8) for each in args
        ):
            alive += trace.call(cost, args, [(draw(st.sampled_from([4, 8])), -1)], elements=4)
            continue
        else:
            takes_over = -1
            outs = [(n_bytes, -1) for n_bytes in draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))]
        alive += trace.call(cost, args, outs, takes_over=takes_over, cheap=cost < 3, again=what != "once")
        if what == "write":
            alive.remove(args[0])
            trace.release(args[0])
        for tensor in draw(st.lists(st.sampled_from(alive), unique=True, max_size=2)):
            if len(alive) > 1:
                alive.remove(tensor)
                trace.release(tensor)
    return trace.done()


class Machine:
    """Executes a journal; asserts every rule."""

    def __init__(self, trace: Trace, budget_bytes: int, extra_bytes: int) -> None:
        self.trace, self.limit_bytes = trace, budget_bytes + extra_bytes
        self.storage: list[int] = []
        self.outs: list[list[int]] = []
        self.present: set[int] = set()  # tensors
        self.resident: set[int] = set()  # storages
        self.on_host: dict[int, set[int]] = {}  # storage -> tensors
        self.live_bytes, self.runs = 0, [0] * len(trace.op_cost)

    def make(self) -> int:
        tensor, base = len(self.storage), int(self.trace.tensor_base[len(self.storage)])
        self.storage.append(self.storage[base] if base >= 0 else 1 + max(self.storage, default=-1))
        return tensor

    def grow(self, tensor: int) -> None:
        self.present.add(tensor)
        if self.trace.tensor_base[tensor] < 0 and self.storage[tensor] not in self.resident:
            self.resident.add(self.storage[tensor])
            self.live_bytes += int(self.trace.tensor_bytes[tensor])

    def evict(self, storage: int) -> None:
        assert storage in self.resident
        self.resident.remove(storage)
        self.live_bytes -= int(self.trace.tensor_bytes[self.storage.index(storage)])
        self.present -= {tensor for tensor in self.present if self.storage[tensor] == storage}

    def swap(self, storage: int) -> None:
        self.on_host[storage] = {tensor for tensor in self.present if self.storage[tensor] == storage}
        self.evict(storage)

    def reload(self, storage: int) -> None:
        assert storage not in self.resident
        self.resident.add(storage)
        self.live_bytes += int(self.trace.tensor_bytes[self.storage.index(storage)])
        assert self.live_bytes <= self.limit_bytes
        self.present |= self.on_host.pop(storage)

    def run(self, op: int, over: bool) -> None:
        trace = self.trace
        args = trace.op_args[trace.op_args_at[op] : trace.op_args_at[op + 1]].tolist()
        assert set(args) <= self.present, f"op {op} reads what is not there"
        second = sum(
            int(trace.tensor_bytes[out]) for out in self.outs[op] if self.storage[out] in self.resident
        )
        if over:
            self.evict(self.storage[int(trace.op_takes_over[op])])
        for out in self.outs[op]:
            self.grow(out)
            self.on_host.pop(self.storage[out], None)
        assert self.live_bytes + second <= self.limit_bytes
        self.runs[op] += 1

    def run_in_parts(self, op: int, along: list[int], parts: int) -> None:
        """Run ops in parts: those along read resident values or outputs along before; their own outputs are
        not resident.
        """
        trace, made, left_bytes = self.trace, set(), 0
        for each in (*along, op):
            args = set(trace.op_args[trace.op_args_at[each] : trace.op_args_at[each + 1]].tolist())
            assert args <= self.present | made, f"op {each} reads what is not there"
            assert (trace.op_elements[each], len(self.outs[each])) == (4, 1)
            (out,) = self.outs[each]
            made.add(out)
            left_bytes += int(trace.tensor_bytes[out]) // 4 * -(-4 // parts)
            self.runs[each] += 1
        assert not made & self.present
        self.grow(self.outs[op][0])
        assert self.live_bytes + left_bytes <= self.limit_bytes


def check(trace: Trace, policy: Policy, budget_bytes: int) -> bool:
    """Return whether the trace can be played under the budget; check the journal in any case."""
    done = replay(trace, policy, budget_bytes, settle=True, journal=True)
    assert done.peak_bytes <= budget_bytes
    machine, journal, over = Machine(trace, budget_bytes, 0), iter(done.journal), False
    calls, along = 0, []
    for kind, _ in zip(trace.event_kind.tolist(), range(done.events_done + 1), strict=False):
        if kind == CALL:
            machine.outs.append([machine.make() for _ in range(int(trace.op_outs[calls]))])
            calls += 1
        elif kind == CONSTANT:
            machine.outs.append([machine.make()])
            machine.outs.pop()
    machine.live_bytes = 0
    for tensor in range(len(machine.storage)):
        if tensor not in {out for outs in machine.outs for out in outs}:
            machine.grow(tensor)
    for act, index in journal:
        if act == EVICT:
            machine.evict(index)
        elif act == SWAP:
            machine.swap(index)
        elif act == RELOAD:
            machine.reload(index)
        elif act == OVERWRITE:
            over = True
        elif act == ALONG:
            assert trace.op_again[index]
            assert machine.runs[index]
            along.append(index)
        elif along:
            assert (act == RUN) == (machine.runs[index] == 0)
            machine.run_in_parts(index, along, policy.parts)
            along = []
        else:
            assert (act == RUN) == (machine.runs[index] == 0)
            assert act != REPLAY or trace.op_again[index]
            machine.run(index, over)
            over = False
    ran = sum(count * cost for count, cost in zip(machine.runs, trace.op_cost.tolist(), strict=True))
    copied = done.swaps * 2 * policy.link.copy_cost + done.swapped_bytes * (
        policy.link.to_host_per_byte + policy.link.from_host_per_byte
    )
    assert ran <= done.first_cost + done.replay_cost <= ran + copied
    if done.outcome == "done":
        assert all(machine.runs)
        references = [0] * len(machine.storage)
        for outs in machine.outs:
            for out in outs:
                references[out] += 1
        released = trace.event_id[trace.event_kind == 2].tolist()
        assert {
            out for out, count in enumerate(references) if count and out not in released
        } <= machine.present
    return done.outcome == "done"


@pytest.mark.drawn(12)
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None)
@given(trace=traces(), tight=st.floats(0.3, 1.0))
def test_journal_is_executable(name: str, trace: Trace, tight: float) -> None:
    """Arguments are resident, bytes stay within the budget, costs are those of the runs, referenced values
    exist at the end.
    """
    whole = sum(trace.tensor_bytes.tolist())
    needed = replay(trace, POLICIES[name], settle=True).peak_bytes
    assert check(trace, POLICIES[name], 2 * whole + 8)
    check(trace, POLICIES[name], max(1, math.ceil(tight * needed)))


@pytest.mark.parametrize("length", [64, 256, 1024])
def test_dtr_trains_a_chain_in_square_root_memory(length: int) -> None:
    """Kirisame et al. 2021, section 3, with exact neighbourhoods and 2 sqrt N bytes.

    A few runs of each op, not sqrt N.
    """
    done = replay(chain(length), replace(DTR, neighbours="closure"), 2 * math.ceil(math.sqrt(length)) + 2)
    assert done.outcome == "done"
    assert done.replays <= 4 * length


def test_replay_of_a_long_chain_does_not_recurse() -> None:
    trace = TraceWriter()
    tensors = [trace.constant(1)]
    for _ in range(20_000):
        tensors += trace.call(1, [tensors[-1]], [(1, -1)])
        trace.release(tensors[-2])
    trace.retain(tensors[1])
    trace.require(tensors[10_000])
    assert replay(trace.done(), DTR, 4).replays == 10_000


def test_infeasible_budget_reports_held_bytes() -> None:
    trace = TraceWriter()
    one, two = trace.constant(3), trace.constant(4)
    trace.call(1, [one, two], [(5, -1)])
    done = replay(trace.done(), DTR, 11)
    assert (done.outcome, done.wanted_bytes, done.held_bytes) == ("infeasible", 5, 7)


@pytest.mark.parametrize(
    "policy", [DTR, replace(DTR, addressed=True), COOP], ids=["counter", "arena", "coop"]
)
def test_cost_limit_ends_a_replay(policy: Policy) -> None:
    done = replay(chain(100), policy, 5, cost_limit=400)
    assert done.outcome == "thrashing"
    spare = 400 - float(chain(100).op_cost.sum())
    # At once: the first runs that are left will cost the rest.
    assert spare < done.replay_cost <= spare + 1


def test_work_limit_ends_a_replay() -> None:
    trace = chain(256)
    done = replay(trace, POLICIES["closure"], 24)
    assert done.outcome == "done"
    assert done.work > done.looked_at > 0
    assert replay(trace, POLICIES["closure"], 24, work_limit=done.work).outcome == "done"
    ended = replay(trace, POLICIES["closure"], 24, work_limit=done.work // 4)
    assert ended.outcome == "thrashing"
    assert ended.work < done.work // 2


def test_banished_tensor_is_recomputed_only_for_the_requesting_call() -> None:
    trace = TraceWriter()
    start = trace.constant(1)
    (middle,) = trace.call(1, [start], [(1, -1)])
    (end,) = trace.call(1, [middle], [(1, -1)])
    trace.release(middle)
    other = trace.call(1, [start], [(4, -1)])  # end must be evicted
    trace.release(other[0])
    trace.call(1, [end], [(1, -1)])
    for keep, left in ((True, 1), (False, 0)):
        done = replay(trace.done(), replace(DTR, keep_replayed=keep), 5, journal=True)
        assert done.outcome == "done"
        assert [index for act, index in done.journal if act == REPLAY] == [0, 1]
        last = [index for act, index in done.journal if act == EVICT].count(1)
        assert last == 2 - left


def test_coop_evicts_adjacent_pieces() -> None:
    """Four pieces of one unit; two units are requested.

    Scores alone choose the two cheapest, which are not side by side.
    """
    trace = TraceWriter()
    start = trace.constant(1)
    for cost in (1, 9, 2, 3):
        trace.call(cost, [start], [(1, -1)])
    trace.call(1, [start], [(2, -1)])
    flat = {"neighbours": "own", "by_staleness": False, "addressed": True}
    scores = replay(trace.done(), Policy(**flat), 5, journal=True)
    window = replay(trace.done(), Policy(rule="coop", **flat), 5, journal=True)
    assert [index for act, index in scores.journal if act == EVICT] == [1, 3, 4]
    assert [index for act, index in window.journal if act == EVICT] == [3, 4]


def test_megtaichi_score_prefers_large_holes() -> None:
    trace = TraceWriter()
    start = trace.constant(1)
    made = [trace.call(cost, [start], [(2, -1)])[0] for cost in (5, 5, 4)]
    trace.release(made[0])  # the hole is adjacent to the first of the other two
    trace.call(1, [start], [(4, -1)])
    flat = Policy(neighbours="own", by_staleness=False, addressed=True)
    plain = replay(trace.done(), flat, 7, journal=True)
    aware = replay(trace.done(), replace(flat, rule="megtaichi", time_power=0), 7, journal=True)
    assert [index for act, index in plain.journal if act == EVICT] == [1, 3, 2]
    assert [index for act, index in aware.journal if act == EVICT] == [1, 2]


def test_foresight_evicts_the_tensor_used_last() -> None:
    trace = TraceWriter()
    start = trace.constant(1)
    soon, late = (trace.call(1, [start], [(2, -1)])[0] for _ in range(2))
    big = trace.call(1, [start], [(2, -1)])[0]
    trace.release(big)
    trace.call(1, [soon], [(1, -1)])
    trace.call(1, [late], [(1, -1)])
    base = Policy(rule="megtaichi", neighbours="own", addressed=True, epsilon=0.01)
    first = {}
    for foresight in (False, True):
        done = replay(trace.done(), replace(base, foresight=foresight), 6, journal=True)
        first[foresight] = next(index for act, index in done.journal if act == EVICT)
    assert first == {False: 1, True: 2}


@pytest.mark.parametrize(("per_byte", "copied"), [(0.5, [SWAP, RELOAD]), (50.0, []), (0.0, [SWAP, RELOAD])])
def test_megtaichi_swaps_where_that_costs_less_than_to_recompute(per_byte: float, copied: list[int]) -> None:
    trace = TraceWriter()
    start = trace.constant(1)
    (saved,) = trace.call(10, [start], [(4, -1)])
    (other,) = trace.call(3, [start], [(4, -1)])
    trace.release(other)
    trace.call(1, [saved], [(1, -1)])
    link = HostLink(per_byte, per_byte)
    policy = Policy(rule="megtaichi", neighbours="closure", addressed=True, swap="exposed", link=link)
    done = replay(trace.done(), policy, 6, journal=True)
    assert [act for act, _ in done.journal if act in (SWAP, RELOAD)] == copied
    # The copy to the host waits, since the value is needed until it is evicted; so does the reload.
    assert done.replay_cost == (8 * per_byte if copied else 10)
    assert replay(trace.done(), replace(policy, swap="never"), 6).replay_cost == 10


def test_copy_to_the_host_is_hidden_behind_ops_since_the_last_use() -> None:
    trace = TraceWriter()
    start = trace.constant(1)
    (saved,) = trace.call(10, [start], [(4, -1)])
    trace.call(5, [start], [(1, -1)])
    (other,) = trace.call(3, [start], [(4, -1)])
    trace.release(other)
    trace.call(1, [saved], [(1, -1)])
    link = HostLink(1.0, 0.5)
    policy = Policy(rule="megtaichi", neighbours="closure", addressed=True, swap="exposed", link=link)
    assert replay(trace.done(), policy, 7).replay_cost == 2
    shared = replace(policy, link=replace(link, hides_copies=False))
    assert replay(trace.done(), shared, 7).replay_cost == 6


def test_policy_refuses_unknown_names() -> None:
    with pytest.raises(ValueError, match="rule must be"):
        replay(chain(1), replace(DTR, rule="fifo"))  # type: ignore[arg-type]


def test_missing_inputs_are_recomputed_in_parts_with_their_reader() -> None:
    """Under memory pressure the first of two elementwise values never exists in full; without parts, or
    pressure, it does.
    """
    trace = TraceWriter()
    x, y = (trace.call(9, [], [(400, -1)])[0] for _ in range(2))
    (v,) = trace.call(1, [x], [(400, -1)], elements=100)
    (big,) = trace.call(1, [], [(600, -1)])
    trace.release(big)
    (out,) = trace.call(1, [v, y], [(400, -1)], elements=100)
    trace.release(out)
    (end,) = trace.call(1, [x, y], [(400, -1)])
    for tensor in (x, y, v, end):
        trace.release(tensor)
    done = trace.done()
    policy = replace(DTR, neighbours="own", by_staleness=False, parts=4)
    roomy, tight = (replay(done, policy, budget, journal=True) for budget in (2400, 1400))
    assert ALONG not in {act for act, _ in roomy.journal}
    assert tight.journal[tight.journal.index((ALONG, 2)) + 1] == (RUN, 4)
    assert tight.replay_cost == 1
    assert replay(done, replace(policy, parts=1), 1400).replay_cost >= 9  # x or y was evicted and recomputed
