"""The native machine against the slow one on random programs, and cases worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from reference.machine import Deadlock, Machine, Ranks, uncovered
from support.synthetic_steps import columns_of, drawn_storages, make_step

from memtune import _native, hardware
from memtune.autotune.predict.breakdown import time_lines
from memtune.autotune.predict.simulation import places, simulate
from memtune.program.step import FOREVER, Kind, Phase, Program, RankClass, Resource, Step, Tier
from memtune.units import format_seconds

COMPUTE, TO_DEVICE, TO_HOST, LINK = (
    Resource.COMPUTE,
    Resource.HOST_TO_DEVICE,
    Resource.DEVICE_TO_HOST,
    Resource.INTRA_LINK,
)


@dataclass
class Case:
    """Columns of a schedule."""

    classes: list[Ranks]
    times: int = 1
    host_computes: bool = False
    slowdown: int = 0
    shares_cores: bool = False

    def run(self) -> _native.Timeline:
        columns = [columns_of(each.step, each.op_s, each.issue_s) for each in self.classes]
        places = [(each.root, each.ranks_on_root) for each in self.classes]
        return _native.schedule(
            columns,
            places,
            self.times,
            self.host_computes,
            float(self.slowdown),
            shares_cores=self.shares_cores,
        )

    def least_s(self) -> list[float]:
        columns = [columns_of(each.step, each.op_s, each.issue_s) for each in self.classes]
        places = [(each.root, each.ranks_on_root) for each in self.classes]
        return _native.least_s(columns, places, self.times, self.host_computes, self.shares_cores)

    def reference(self) -> Machine:
        return Machine(
            self.classes, self.times, self.host_computes, Fraction(self.slowdown), self.shares_cores
        )


@st.composite
def steps(draw: st.DrawFn, matches: int, resources: list[int]) -> Step:
    """Prologue ops first, optimizer ops last, between them boundary ops too, as DDP has them."""
    n, m = draw(st.integers(1, 9)), draw(st.integers(1, 6))

    def column(values: list[int]) -> list[int]:
        return draw(st.lists(st.sampled_from(values), min_size=n, max_size=n))

    first, last = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    body = column([1, 1, 2, 3, 3, 4])
    phases = [0 if i < first else 5 if i >= n - last else body[i] for i in range(n)]
    numbers = iter(range(1, matches + 1))
    matched = [draw(st.sampled_from([0, 0, 1])) and next(numbers, 0) for _ in range(n)]
    return make_step(
        n,
        m,
        ops_phase=phases,
        ops_resource=column(resources),
        ops_match=matched,
        ops_stream=column([0, 0, 0, 1, 2, 3]),
        ops_prefetch=column([0, 0, 1, 2]),
        **drawn_storages(draw, n, m, most_bytes=30, tiers=[0, 0, 1], uses=14, saves=3),
    )


@st.composite
def cases(draw: st.DrawFn, *, max_classes: int = 2, resources: list[int] | None = None) -> Case:
    host_computes, count = draw(st.booleans()), draw(st.integers(1, max_classes))
    # With one resource next to compute the shares of the cores are halves, which a float represents exactly.
    overlapped = draw(st.sampled_from([0, TO_DEVICE, TO_HOST, Resource.HOST_THREADS]))
    some = [0, 0, 0, overlapped, overlapped, 3, 3, 8] if overlapped else [0, 0, 0, 1, 1, 2, 2, 3, 3, 7, 8]
    classes = []
    on_root, one_root = draw(st.sampled_from([1, 2])), draw(st.booleans())
    for number in range(count):
        step = draw(steps(3 if count > 1 else 0, resources or some))
        seconds = draw(st.lists(st.integers(0, 6), min_size=step.ops.n, max_size=step.ops.n))
        issue = draw(
            st.lists(st.integers(0, 0 if host_computes else 2), min_size=step.ops.n, max_size=step.ops.n)
        )
        classes.append(Ranks(step, seconds, issue, 0 if one_root else number, on_root))
    return Case(
        classes, draw(st.integers(1, 3)), host_computes, draw(st.sampled_from([0, 0, 1])), bool(overlapped)
    )


@given(cases())
@settings(max_examples=150, deadline=None)
def test_native_machine_equals_reference_machine(case: Case) -> None:
    slow = case.reference()
    try:
        step_s = slow.run()
    except Deadlock:
        with pytest.raises(ValueError, match="waits forever"):
            case.run()
        return
    found = case.run()
    assert found.step_s == step_s
    for number, (ranks, mine) in enumerate(zip(case.classes, found.classes, strict=True)):
        assert mine.finish_s == slow.finish_s(ranks)
        compute = slow.intervals(ranks, COMPUTE)
        for resource in range(10):
            busy = [] if resource == Resource.NOTHING else slow.intervals(ranks, resource)
            assert mine.busy_s[resource] == sum(b - a for a, b in busy)
            assert mine.exposed_s[resource] == uncovered(busy, [] if resource == COMPUTE else compute)
        by_op = mine.op_exposed_s
        for op in range(ranks.step.ops.n):
            runs = [(t.start, t.stop) for t in ranks.tasks if t.op == op]
            outside = ranks.step.ops.resource[op] not in (COMPUTE, Resource.NOTHING)
            assert by_op[op] == (uncovered(runs, compute) if outside else 0)
        for tier in (Tier.DEVICE, Tier.HOST):
            issues = slow.bytes_at_issues(number, tier)
            peak = max(each for _, each in issues)
            assert (mine.peak_bytes[tier], mine.peak_op[tier]) == (
                peak,
                next(op for op, each in issues if each == peak),
            )
        assert sum(mine.bytes_by_kind) == mine.peak_bytes[Tier.DEVICE]
    check_path(case, found, slow)


def check_path(case: Case, found: _native.Timeline, slow: Machine) -> None:
    """The critical path covers the step without gaps, and each part of it really ran then."""
    at = 0.0
    for number, op, host, start, stop in zip(*found.critical_path, strict=True):
        tasks = [t for t in case.classes[number].tasks if t.op == op]
        assert (start, stop) in [(t.came, t.issued) if host else (t.start, t.stop) for t in tasks]
        assert start == at < stop
        at = stop
    assert at == found.step_s


@given(cases(max_classes=3))
@settings(max_examples=100, deadline=None)
def test_step_is_at_least_as_long_as_busiest_resource(case: Case) -> None:
    try:
        found = case.run()
    except ValueError:
        return
    _, _, _, start, stop = found.critical_path
    assert found.step_s >= sum(stop - start) >= max(max(each.busy_s) for each in found.classes)


@given(cases(max_classes=3), st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_step_is_at_least_as_long_as_its_dependencies(case: Case, times: int) -> None:
    case.times = times
    try:
        found = case.run()
    except ValueError:
        return
    least = case.least_s()
    assert all(bound <= each.finish_s * (1 + 1e-9) for bound, each in zip(least, found.classes, strict=True))
    one_stream_each = all((each.step.ops.stream == 0).all() for each in case.classes)
    if (
        len(case.classes) == 1
        and one_stream_each
        and times <= 4
        and not case.slowdown
        and not case.shares_cores
    ):
        assert least[0] >= found.step_s * (1 - 1e-9)  # nothing shares anything


@given(cases(max_classes=1, resources=[COMPUTE]), st.data())
@settings(max_examples=60, deadline=None)
def test_faster_resource_never_slows_fifo_schedule(case: Case, data: st.DataObject) -> None:
    step = case.classes[0].step
    plain = step.with_ops(stream=np.zeros(step.ops.n, np.uint8))
    slow = Case([replace(case.classes[0], step=plain)], case.times, case.host_computes)
    faster = data.draw(st.lists(st.integers(0, 2), min_size=step.ops.n, max_size=step.ops.n))
    op_s = [max(0, seconds - less) for seconds, less in zip(case.classes[0].op_s, faster, strict=True)]
    fast = Case([replace(slow.classes[0], op_s=op_s)], case.times, case.host_computes)
    assert fast.run().step_s <= slow.run().step_s


@given(cases(max_classes=1, resources=[COMPUTE, Resource.NOTHING]))
@settings(max_examples=60, deadline=None)
def test_live_bytes_follow_program_without_transfers(case: Case) -> None:
    case.times, step = 1, case.classes[0].step
    plain = step.with_ops(stream=np.zeros(step.ops.n, np.uint8))
    case.classes[0].step = plain
    live = _native.live(columns_of(plain, case.classes[0].op_s, case.classes[0].issue_s))
    mine = case.run().classes[0]
    assert list(mine.peak_bytes) == list(live.peak_bytes)
    assert list(mine.peak_op) == list(live.peak_op)
    assert list(mine.bytes_by_kind) == list(live.bytes_by_kind)
    assert list(mine.pool_peak_bytes) == list(live.pool_peak_bytes)


def chain(*ops: tuple[int, int], **columns: Any) -> Ranks:
    """Ops of (resource, seconds) without data, issued at once."""
    step = make_step(len(ops), columns.pop("storages", 0), ops_resource=[op for op, _ in ops], **columns)
    return Ranks(step, [seconds for _, seconds in ops], [0] * len(ops))


def test_copies_of_two_devices_share_root() -> None:
    one = chain((TO_DEVICE, 4))
    assert Case([replace(one, ranks_on_root=2)]).run().step_s == 8
    assert Case([one, replace(one, root=1)]).run().step_s == 4
    assert Case([one, chain((TO_DEVICE, 4))]).run().step_s == 8
    # The shorter copy ends after 2 · 1 s; then the longer one has the link for itself.
    found = Case([one, chain((TO_DEVICE, 1))]).run()
    assert [each.finish_s for each in found.classes] == [5, 2]
    assert Case([one, chain((TO_HOST, 4))]).run().step_s == 4  # the other direction


def test_sequential_copies_have_root_to_themselves() -> None:
    """First come first served: one is through in its own time, the other as late as when they share."""
    one, two = chain((TO_HOST, 4)), chain((TO_HOST, 4), (TO_HOST, 2))

    def finishes(*classes: Ranks, roots: tuple[int, int] = (0, 0), sequential: bool = True) -> list[float]:
        columns = [columns_of(each.step, each.op_s, each.issue_s) for each in classes]
        places = [(root, 1) for root in roots]
        found = _native.schedule(columns, places, 1, host_computes=False, copies_in_turn=sequential)
        return [each.finish_s for each in found.classes]

    assert finishes(one, one, sequential=False) == pytest.approx([8, 8])
    assert finishes(one, one) == pytest.approx([4, 8])
    assert finishes(two, one) == pytest.approx([10, 8])  # its second copy comes last
    assert finishes(one, one, roots=(0, 1)) == pytest.approx([4, 4])
    assert finishes(one, chain((TO_DEVICE, 4))) == pytest.approx([4, 4])  # the other direction


def test_collective_slows_overlapped_compute() -> None:
    found = Case([chain((LINK, 4), (COMPUTE, 4))], slowdown=1).run()
    assert found.step_s == 6  # 2 of its 4 s done after 4 s, the rest at full speed
    assert found.classes[0].busy_s[COMPUTE] == 6
    assert found.classes[0].busy_s[LINK] == 4


def test_receive_waits_for_send_and_both_end_together() -> None:
    sender, receiver = (
        chain((COMPUTE, 3), (LINK, 2), ops_match=[0, 7]),
        chain((LINK, 1), (COMPUTE, 5), ops_match=[7, 0]),
    )
    sender.step = sender.step.with_ops(prefetch=np.array([0, 1], np.uint8))  # not before its place
    found = Case([sender, receiver]).run()
    assert [each.finish_s for each in found.classes] == [5, 5]
    assert found.classes[1].busy_s[LINK] == 2  # waiting is not busy
    _, op, _, start, _ = found.critical_path
    assert (list(op), list(start)) == ([0, 1], [0, 3])


def test_mismatched_collective_order_is_named() -> None:
    one, other = chain((LINK, 1), (LINK, 1), ops_match=[1, 2]), chain((LINK, 1), (LINK, 1), ops_match=[2, 1])
    with pytest.raises(ValueError, match="op 0 of rank class 0 waits forever"):
        Case([one, other]).run()


def test_side_stream_is_served_first() -> None:
    ops = [(LINK, 4), (LINK, 2), (LINK, 1), (COMPUTE, 1)]
    read = {"uses_op": [2, 3], "uses_storage": [0, 0], "storages_producer": [2], "storages": 1}
    assert Case([chain(*ops, **read)]).run().step_s == 4 + 2 + 1 + 1
    first = Case([chain(*ops, ops_stream=[0, 0, 2, 0], **read)]).run()
    assert first.step_s == 1 + 4 + 2
    assert first.classes[0].op_exposed_s.tolist() == [
        3,
        2,
        1,
        0,
    ]  # compute overlaps the second link op to start


@pytest.mark.parametrize(
    ("depth", "step_s"),
    [
        (0, 10 + 3 + 3),  # both arrive during the first op
        (1, 10 + (4 + 3) + (4 + 3)),  # each when compute has come to it
        (2, 10 + 4 + 3),  # the second one when compute has come to the first one, which nothing holds back
    ],
)
def test_prefetch_distance_limits_fetch(depth: int, step_s: int) -> None:
    ops = [(COMPUTE, 10), (TO_DEVICE, 4), (COMPUTE, 3), (TO_DEVICE, 4), (COMPUTE, 3)]
    fetched = {"storages_producer": [1, 3], "storages": 2, "uses_op": [2, 4], "uses_storage": [0, 1]}
    assert Case([chain(*ops, ops_prefetch=[0, depth, 0, depth, 0], **fetched)]).run().step_s == step_s


def test_delayed_transfer_keeps_source_alive() -> None:
    """Storage 0 is copied to the host slowly; no op waits for the copy, so the storage is still resident for
    later ones.
    """
    copy = {
        "storages_producer": [0, 3],
        "storages": 2,
        "storages_bytes": [100, 10],
        "uses_op": [1],
        "uses_storage": [0],
    }
    ops = [(COMPUTE, 1), (TO_HOST, 9), (COMPUTE, 1), (COMPUTE, 1)]
    late = Case([chain(*ops, **copy)]).run()
    assert late.classes[0].peak_bytes[Tier.DEVICE] == 110
    assert late.step_s == 10
    in_time = Case(
        [chain((COMPUTE, 1), (TO_HOST, 1), (COMPUTE, 1), (COMPUTE, 1), **copy)], host_computes=True
    ).run()
    assert in_time.classes[0].peak_bytes[Tier.DEVICE] == 100
    # Held until op 2, it is freed there, and compute first waits for the copy.
    waited = Case([chain(*ops, storages_held_until=[2, -1], **copy)]).run()
    assert waited.step_s == 11
    assert waited.classes[0].peak_bytes[Tier.DEVICE] == 100


def test_storage_events_equal_allocator_events() -> None:
    case = Case(
        [
            chain(
                (COMPUTE, 1),
                (COMPUTE, 1),
                storages_producer=[-1, 0],
                storages=2,
                storages_bytes=[5, 7],
                storages_held_until=[FOREVER, -1],
                uses_op=[1],
                uses_storage=[1],
            )
        ],
        times=2,
    )
    assert case.run().classes[0].storage_stream.tolist() == [1, 2, -2, 2, -2]


@pytest.mark.parametrize("host_computes", [False, True])
def test_machine_accepts_single_ops_and_empty_programs(host_computes: bool) -> None:
    empty = Case(
        [Ranks(make_step(0, 1, storages_producer=[-1], storages_held_until=[FOREVER]), [], [])],
        host_computes=host_computes,
    ).run()
    assert (empty.step_s, empty.classes[0].peak_op[0], len(empty.critical_path[0])) == (0, -1, 0)
    zero = Case(
        [
            chain(
                (COMPUTE, 5),
                storages_producer=[0],
                storages=1,
                storages_bytes=[0],
                storages_kind=[Kind.TEMPORARY],
            )
        ],
        host_computes=host_computes,
    )
    assert (zero.run().step_s, zero.run().classes[0].peak_bytes[0], zero.run().classes[0].peak_op[0]) == (
        5,
        0,
        0,
    )
    assert Case([]).run().step_s == 0


def test_machine_repeats_body_but_not_boundary_ops() -> None:
    phases = [Phase.PROLOGUE, Phase.FORWARD, Phase.BOUNDARY, Phase.BACKWARD, Phase.OPTIMIZER]
    case = Case([chain(*[(COMPUTE, s) for s in (1, 2, 4, 8, 16)], ops_phase=phases)], times=3)
    assert case.run().step_s == 1 + 3 * (2 + 8) + 4 + 16


def test_machine_refuses_invalid_columns() -> None:
    columns = [columns_of(chain((COMPUTE, 1)).step, [1], [0])]
    with pytest.raises(ValueError, match="accumulate"):
        _native.schedule(columns, [(0, 1)], 0)
    with pytest.raises(ValueError, match="place"):
        _native.schedule(columns, [])
    with pytest.raises(ValueError, match="link_slowdown"):
        _native.schedule(columns, [(0, 1)], link_slowdown=-0.5)
    twice = chain((LINK, 1), (LINK, 1), ops_match=[3, 3])
    with pytest.raises(ValueError, match="op_match 3 stands twice in rank class 0"):
        Case([twice]).run()


def test_prediction_lists_ops_that_compute_waits_for() -> None:
    step = make_step(
        3,
        1,
        names=("aten.mm.default", "memtune.to_device.default"),
        ops_name=[0, 1, 0],
        modules=("", "layer"),
        ops_module=[0, 1, 0],
        ops_resource=[COMPUTE, TO_DEVICE, COMPUTE],
        ops_stream=[0, 1, 0],
        ops_flops=[1e12, 0, 1e12],
        ops_traffic_bytes=[0, 10**9, 0],
        storages_producer=[1],
        uses_op=[2],
        uses_storage=[0],
    )
    gpu = hardware.find("h100-80g")
    found = simulate(Program((RankClass(1, step),), micro_batch=1), gpu, level="events")
    (waits,) = found.exposed_by_op
    copy_s = 1e9 / gpu.host_to_device_bytes_per_s + gpu.launch_s
    assert (waits.op, waits.module, waits.resource) == (
        "memtune.to_device.default",
        "layer",
        "host_to_device",
    )
    assert waits.seconds == pytest.approx(copy_s)
    assert sum(found.critical_s.values()) == pytest.approx(found.step_s)
    assert found.critical_path[0].op == "aten.mm.default"
    lines = time_lines(found.to_dict())
    assert lines[0].startswith("critical path: compute ")
    assert (
        lines[1]
        == f"not hidden: {format_seconds(copy_s)} of memtune.to_device.default in layer (host_to_device)"
    )
    assert time_lines(simulate(Program((RankClass(1, step),), micro_batch=1), gpu).to_dict()) == []


def test_prediction_includes_communicators_and_shared_roots() -> None:
    gpu = replace(hardware.find("a100-80g"), gpus_per_pcie_root=2)
    step = make_step(
        3, 0, ops_resource=[LINK, LINK, TO_HOST], ops_group=[8, 8, 0], ops_traffic_bytes=[10, 10, 10**9]
    )
    program = Program((RankClass(8, step),), micro_batch=1)
    for level in ("coarse", "events"):
        found = simulate(program, gpu, level=level)  # type: ignore[arg-type]
        assert found.communicator_bytes == gpu.communicator_bytes > 0  # one group, however often it talks
        assert found.busy_s["device_to_host"] == pytest.approx(
            2 * (1e9 / gpu.device_to_host_bytes_per_s + gpu.launch_s)
        )


def test_places_assigns_rank_classes_to_roots() -> None:
    step = make_step(1, 0)
    gpu = replace(hardware.find("a100-80g"), gpus_per_pcie_root=2)
    assert places(Program((RankClass(1, step), RankClass(1, step), RankClass(5, step)), 1), gpu) == [
        (0, 1),
        (0, 1),
        (1, 2),
    ]
    assert places(Program((RankClass(1, step), RankClass(2, step)), 1), gpu) == [(0, 1), (0, 1)]


def test_places_uses_listed_ranks_of_classes() -> None:
    """Four ranks, two behind each root: 2 and 3 share one, wherever their classes stand."""
    step, gpu = make_step(1, 0), replace(hardware.find("a100-80g"), gpus_per_pcie_root=2)
    by_peak = [RankClass(1, step, (rank,)) for rank in (2, 0, 3, 1)]
    assert places(Program(tuple(by_peak), 1), gpu) == [(1, 1), (0, 1), (1, 1), (0, 1)]
    of_copies = [RankClass(4, step, (1, 2, 5, 6)), RankClass(2, step, (0, 4)), RankClass(2, step, (3, 7))]
    assert places(Program(tuple(of_copies), 1), gpu) == [(0, 1), (0, 1), (1, 1)]
    assert places(Program((RankClass(5, step, (1, 2, 3, 4, 7)),), 1), gpu) == [(1, 2)]


def test_places_follows_cross_mapping_of_roots() -> None:
    """Ranks 0 and 1, behind one root, copy at the same time: twice as long as ranks 0 and 2 do, though
    classes go by peak.
    """
    gpu = replace(
        hardware.find("a100-80g"),
        gpus_per_pcie_root=2,
        launch_s=0.0,
        hook_s=0.0,
        host_to_device_bytes_per_s=1e9,
        device_to_host_bytes_per_s=1e9,
    )
    copies = make_step(1, 0, ops_resource=[TO_HOST], ops_traffic_bytes=[10**9])
    rests = make_step(1, 0, ops_resource=[TO_HOST], ops_traffic_bytes=[0])

    def step_s(*copying: int) -> float:
        order = (*copying, *({0, 1, 2, 3} - set(copying)))
        program = Program(
            tuple(RankClass(1, copies if rank in copying else rests, (rank,)) for rank in order), 1
        )
        return simulate(program, gpu, level="events").step_s

    assert (step_s(0, 1), step_s(0, 2)) == pytest.approx((2.0, 1.0))


def test_cpu_compute_does_not_overlap_work_on_its_cores() -> None:
    """Three seconds each of compute, a copy and a host update, all started at once, have a third of the cores
    each.
    """
    ops = [(TO_HOST, 3), (Resource.HOST_THREADS, 3), (LINK, 3), (COMPUTE, 3)]
    apart, together = Case([chain(*ops)]).run(), Case([chain(*ops)], shares_cores=True).run()
    assert (apart.step_s, together.step_s) == (3, pytest.approx(9))
    assert list(together.classes[0].busy_s) == pytest.approx([9, 0, 9, 3, 0, 0, 0, 9, 0, 0])


def test_collectives_through_host_slow_copies_behind_root() -> None:
    """A gather of device memory crosses the root, in both directions; a message between hosts does not."""
    gpu = replace(
        hardware.find("a100-80g"),
        gpus_per_pcie_root=2,
        link_slowdown=0.0,
        launch_s=0.0,
        hook_s=0.0,
        intra_link_latency_s=0.0,
        host_to_device_bytes_per_s=1e9,
        device_to_host_bytes_per_s=1e9,
        intra_link_bytes_per_s=1e9,
    )
    for tier, slower in ((Tier.DEVICE, 2.0), (Tier.HOST, 1.0)):
        step = make_step(
            2,
            1,
            names=("c10d.send.default",),
            ops_resource=[TO_HOST, LINK],
            ops_group=[0, 2],
            ops_traffic_bytes=[10**9, 10**9],
            storages_producer=[-1],
            uses_op=[1],
            uses_storage=[0],
            storages_tier=[tier],
        )
        program = Program((RankClass(2, step),), micro_batch=1)
        for level, alone, through in (("coarse", 2.0, 2.0 * slower), ("events", 2.0, 2.0 * slower)):
            found = [
                simulate(program, replace(gpu, links_through_host=each), level=level).step_s  # type: ignore[arg-type]
                for each in (False, True)
            ]
            assert found == pytest.approx([alone, through]), (tier, level)
