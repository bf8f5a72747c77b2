"""The native caching allocator against a slow and obvious one on random programs, and against cases worked
out by hand.
"""

from __future__ import annotations

from dataclasses import replace as changed
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from reference import allocator as reference
from support.synthetic_steps import make_step

from memtune.autotune.predict.caching_allocator import (
    Action,
    AllocatorEvents,
    AllocatorResult,
    AllocatorSettings,
    event_stream,
    replay,
)
from memtune.program.step import FOREVER, WRITES, Kind, Resource, Step

KIB, MIB = 2**10, 2**20
SIZES = (
    1,
    512,
    513,
    300 * KIB,
    MIB,
    MIB + 1,
    3 * MIB,
    9 * MIB,
    10 * MIB,
    11 * MIB - 5,
    19 * MIB,
    20 * MIB,
    21 * MIB,
    30 * MIB,
    45 * MIB,
)
Row = tuple[int, int, int, int, int, int]


def stream_of(rows: list[Row], step: list[int] | None = None) -> AllocatorEvents:
    columns = list(zip(*rows, strict=True)) if rows else [()] * 6
    kinds = (np.uint8, np.int32, np.int64, np.int32, np.int64, np.int64)
    return AllocatorEvents(
        *(np.array(c, k) for c, k in zip(columns, kinds, strict=True)), np.array(step or [0], np.int64)
    )


def program(*does: Any) -> AllocatorEvents:
    """Bytes as positive numbers allocate storages 0, 1, …; ~i frees storage i; None empties the cache."""
    rows: list[Row] = []
    allocated = 0
    for op, what in enumerate(does):
        if what is None:
            rows.append((Action.EMPTY_CACHE, 0, 0, 0, op, -1))
        elif what < 0:
            rows.append((Action.FREE, ~what, 0, 0, op, -1))
        else:
            rows.append((Action.ALLOC, allocated, what, 0, op, -1))
            allocated += 1
    return stream_of(rows)


def run(events: AllocatorEvents, text: str = "", capacity_bytes: int | None = None) -> AllocatorResult:
    return replay(events, AllocatorSettings.parse(text), capacity_bytes, timeline=True)


# Random programs


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Row], list[int]]:
    sizes = st.sampled_from(
        draw(st.lists(st.sampled_from(SIZES) | st.integers(0, 50 * MIB), min_size=1, max_size=6))
    )
    streams = draw(st.integers(1, 3))
    rows: list[Row] = []
    live: list[int] = []
    op = made = 0
    for _ in range(draw(st.integers(1, 60))):
        op += draw(st.integers(0, 2))
        choice = draw(st.integers(0, 20))
        if choice == 0:
            rows.append((Action.EMPTY_CACHE, 0, 0, 0, op, -1))
        elif choice < 10 and live:
            late = draw(st.sampled_from((-1, -1, -1, 1, 4, 50)))
            storage = live.pop(draw(st.integers(0, len(live) - 1)))
            rows.append((Action.FREE, storage, 0, 0, op, op + late))
        else:
            rows.append((Action.ALLOC, made, draw(sizes), draw(st.integers(0, streams - 1)), op, -1))
            live.append(made)
            made += 1
    return rows, [
        0,
        *sorted(
            draw(
                st.lists(st.integers(1, len(rows) - 1), max_size=2, unique=True)
                if len(rows) > 1
                else st.just([])
            )
        ),
    ]


@st.composite
def all_settings(draw: st.DrawFn) -> AllocatorSettings:
    segment = draw(st.sampled_from((20, 20, 20, 11, 33)))
    divisions = st.just((0,) * 16) | st.lists(
        st.sampled_from((0, 1, 2, 4, 8, 32)), min_size=16, max_size=16
    ).map(tuple)
    return AllocatorSettings(
        max_split_size_mb=draw(st.sampled_from((None, None, segment, segment + 5, 40))),
        max_non_split_rounding_mb=draw(st.sampled_from((None, None, 35))),
        large_segment_size_mb=segment,
        roundup_power2_divisions=draw(divisions),
        garbage_collection_threshold=draw(st.sampled_from((None, 0.2, 0.5, 0.9))),
        expandable_segments=draw(st.booleans()),
        per_process_memory_fraction=draw(st.sampled_from((None, 0.4, 0.8, 1.0))),
    )


CAPACITIES = st.sampled_from((None, 2 * MIB, 44 * MIB, 90 * MIB, 200 * MIB, 10**9))


@settings(max_examples=400, deadline=None)
@given(programs(), all_settings(), CAPACITIES)
def test_replay_equals_reference_allocator(
    made: tuple[list[Row], list[int]], chosen: AllocatorSettings, capacity: int | None
) -> None:
    rows, steps = made
    found = replay(stream_of(rows, steps), chosen, capacity, timeline=True).native
    expected = reference.replay(
        rows, steps, **chosen.native(), capacity_bytes=capacity, allowed_bytes=chosen.limit_bytes(capacity)
    )
    oom = found.first_oom
    assert found.address.tolist() == expected.address
    assert found.allocated_bytes.tolist() == expected.allocated_bytes
    assert found.reserved_bytes.tolist() == expected.reserved_bytes
    assert found.step_reserved_bytes.tolist() == expected.step_reserved_bytes
    assert found.step_allocated_bytes.tolist() == expected.step_allocated_bytes
    assert expected.first_oom == (
        oom.event,
        oom.requested_bytes,
        oom.allocated_bytes,
        oom.reserved_bytes,
        oom.largest_free_bytes,
    )
    for name in ("peak_reserved_bytes", "peak_allocated_bytes", "peak_event", "allocated_at_peak_bytes"):
        assert getattr(found, name) == getattr(expected, name), name
    for name in ("device_allocs", "device_frees", "retries", "ooms"):
        assert getattr(found, name) == getattr(expected, name), name


@settings(max_examples=150, deadline=None)
@given(programs(), all_settings(), CAPACITIES, st.sampled_from(("native", "cudaMallocAsync")))
def test_replay_keeps_live_bytes_within_reserved_and_capacity(
    made: tuple[list[Row], list[int]], chosen: AllocatorSettings, capacity: int | None, backend: str
) -> None:
    rows, steps = made
    chosen = changed(chosen, backend=backend)
    live: set[int] = set()
    for action, storage, *_ in rows:
        if action != Action.EMPTY_CACHE:
            live ^= {storage}
    last = rows[-1][4]
    rows = [
        *rows,
        *((int(Action.FREE), storage, 0, 0, last, -1) for storage in sorted(live)),
        (2, 0, 0, 0, last, -1),
    ]
    found = replay(stream_of(rows, steps), chosen, capacity, timeline=True).native
    blocks: dict[int, tuple[int, int]] = {}
    allocated_before = 0
    for row, address, allocated, reserved in zip(
        rows, found.address, found.allocated_bytes, found.reserved_bytes, strict=True
    ):
        assert reserved >= allocated >= 0
        assert capacity is None or reserved <= capacity
        if row[0] == Action.FREE:
            blocks.pop(row[1], None)
        if address >= 0:
            size = allocated - allocated_before
            assert size >= row[2]
            assert all(
                address + size <= other or other + other_size <= address
                for other, other_size in blocks.values()
            )
            blocks[row[1]] = (address, size)
        allocated_before = allocated
    assert found.end_reserved_bytes == found.end_allocated_bytes == 0
    assert found.peak_reserved_bytes == max(found.step_reserved_bytes)


# By hand, from c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch 2.13

CASES: list[tuple[str, AllocatorEvents, str, int | None, list[int]]] = [
    # get_allocation_size: up to 1 MiB a segment of 2 MiB, below 10 MiB one of 20 MiB, above a multiple of 2
    # MiB.
    ("small requests share 2 MiB", program(1, MIB), "", None, [2, 2]),
    ("1 MiB and a byte opens 20 MiB", program(MIB + 1, 9 * MIB), "", None, [20, 20]),
    ("10 MiB are rounded to 2 MiB", program(10 * MIB, 11 * MIB), "", None, [10, 22]),
    ("large_segment_size_mb", program(9 * MIB), "large_segment_size_mb:12", None, [12]),
    # should_split: a large block is cut only where more than 1 MiB is left, a small one from 512 bytes on.
    ("1 MiB is not cut off", program(9 * MIB, 10 * MIB, MIB + 1), "", None, [20, 20, 40]),
    ("more than 1 MiB is", program(9 * MIB, 9 * MIB, MIB + 1), "", None, [20, 20, 20]),
    (
        "512 bytes are cut off a small block",
        program(*[512 * KIB] * 3, 512 * KIB - 512, 512),
        "",
        None,
        [2] * 5,
    ),
    # get_free_block: the smallest that fits, the lowest of those.
    ("best fit", program(12 * MIB, 30 * MIB, ~0, ~1, 11 * MIB, 29 * MIB), "", None, [12, 42, 42, 42, 42, 42]),
    # Blocks are kept: what does not fit into a cached one needs a new segment, and a free neighbour is
    # merged.
    ("fragments", program(10 * MIB, 10 * MIB, ~0, ~1, 20 * MIB), "", None, [10, 20, 20, 20, 40]),
    ("neighbours are one again", program(5 * MIB, 5 * MIB, 5 * MIB, ~0, ~1, 10 * MIB), "", None, [20] * 6),
    # max_split_size: 30 MiB are not cut for 12 MiB, and not given to 5 MiB less than 20 MiB below.
    ("not cut", program(40 * MIB, ~0, 30 * MIB), "max_split_size_mb:25", None, [40, 40, 40]),
    ("not lent to smaller ones", program(40 * MIB, ~0, 12 * MIB), "max_split_size_mb:25", None, [40, 40, 52]),
    (
        "not lent where 20 MiB would be lost",
        program(46 * MIB, ~0, 26 * MIB),
        "max_split_size_mb:25",
        None,
        [46, 46, 72],
    ),
    (
        "max_non_split_rounding_mb",
        program(46 * MIB, ~0, 26 * MIB),
        "max_split_size_mb:25,max_non_split_rounding_mb:21",
        None,
        [46, 46, 46],
    ),
    # release_cached_blocks: the driver refuses, everything unused goes back, then it has enough.
    ("retry", program(30 * MIB, ~0, 40 * MIB), "", 60 * MIB, [30, 30, 40]),
    # … but a segment of which a part is in use stays.
    ("a part in use", program(9 * MIB, 9 * MIB, ~0, 50 * MIB), "", 60 * MIB, [20, 20, 20, 20]),
    # release_available_cached_blocks: the smallest oversize block that is enough, the other one stays.
    (
        "oversize first",
        program(30 * MIB, 60 * MIB, ~0, ~1, 28 * MIB),
        "max_split_size_mb:29",
        100 * MIB,
        [30, 90, 90, 90, 88],
    ),
    # garbage_collection_threshold: 70 are above 50 of 100 MiB, so the block that has not been used for longer
    # goes back.
    (
        "collected",
        program(30 * MIB, 40 * MIB, ~0, ~1, 35 * MIB, ~2, 50 * MIB),
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5",
        200 * MIB,
        [30, 70, 70, 70, 70, 70, 90],
    ),
    # Expandable segments: pages of 20 MiB (2 MiB for small ones) at the end of one range, cut from 512 bytes
    # on.
    ("pages", program(9 * MIB, 9 * MIB, 9 * MIB, 1), "expandable_segments:True", None, [20, 20, 40, 42]),
    (
        "freed parts rejoin",
        program(10 * MIB, 10 * MIB, ~0, ~1, 20 * MIB),
        "expandable_segments:True",
        None,
        [20] * 5,
    ),
    (
        "grows at its end",
        program(10 * MIB, 8 * MIB, ~1, 25 * MIB),
        "expandable_segments:True",
        None,
        [20, 20, 20, 40],
    ),
    # unmap on retry: of the free 30 MiB behind 10 MiB in use, only the second page lies in them entirely.
    (
        "pages go back",
        program(10 * MIB, 30 * MIB, 1, ~1, None),
        "expandable_segments:True",
        None,
        [20, 40, 42, 42, 22],
    ),
    (
        "and are mapped again",
        program(10 * MIB, 30 * MIB, ~1, None, 30 * MIB),
        "expandable_segments:True",
        None,
        [20, 40, 40, 20, 40],
    ),
    # The driver's own pool: live bytes, in pages of 32 MiB.
    (
        "cudaMallocAsync",
        program(30 * MIB, 10 * MIB, ~0, 20 * MIB, None),
        "backend:cudaMallocAsync",
        None,
        [32, 64, 64, 64, 32],
    ),
]


@pytest.mark.parametrize(
    ("name", "events", "text", "capacity", "reserved_mib"), CASES, ids=[case[0] for case in CASES]
)
def test_reserved_bytes_equal_hand_calculation(
    name: str, events: AllocatorEvents, text: str, capacity: int | None, reserved_mib: list[int]
) -> None:
    found = run(events, text, capacity).native.reserved_bytes
    assert [each / MIB for each in found] == reserved_mib


@pytest.mark.parametrize(
    ("asked", "text", "allocated"),
    [
        (1, "", 512),
        (512, "", 512),
        (513, "", 1024),
        # The example of torch's own comment on roundup_power2_next_division, times 512 so that 4 divisions
        # apply: 1200 → 1280.
        (1200 * 512, "roundup_power2_divisions:4", 1280 * 512),
        (1024 * 512, "roundup_power2_divisions:4", 1024 * 512),
        (1200, "roundup_power2_divisions:4", 1536),  # not above 512 × 4: multiples of 512
        (12 * MIB, "roundup_power2_divisions:[16:2,>:1]", 12 * MIB),  # 8 MiB: as the first size
        (25 * MIB, "roundup_power2_divisions:[16:1,32:2,>:1]", 25 * MIB),
        (33 * MIB, "roundup_power2_divisions:[16:1,32:2,>:1]", 48 * MIB),
        (65 * MIB, "roundup_power2_divisions:[16:1,32:2,>:1]", 65 * MIB),
        (65 * MIB, "roundup_power2_divisions:[16:1,32:2,>:4]", 80 * MIB),
    ],
)
def test_rounding_equals_hand_calculation(asked: int, text: str, allocated: int) -> None:
    # A large segment may be a little larger than its block: the rest up to 1 MiB is not cut off and counts as
    # allocated.
    found = run(program(asked), f"{text},expandable_segments:True" if text else "expandable_segments:True")
    assert found.peak_allocated_bytes == allocated


def test_unsplit_block_counts_in_full() -> None:
    assert (
        run(program(11 * MIB)).peak_allocated_bytes == 12 * MIB
    )  # of 12 MiB reserved 1 MiB is left, which is not cut off


def test_blocks_of_other_streams_are_not_reused() -> None:
    rows: list[Row] = [
        (0, 0, 30 * MIB, 0, 0, -1),
        (1, 0, 0, 0, 1, -1),
        (0, 1, 30 * MIB, 1, 2, -1),
        (0, 2, 30 * MIB, 0, 3, -1),
    ]
    assert [each / MIB for each in run(stream_of(rows)).native.reserved_bytes] == [30, 30, 60, 60]


def test_free_waits_for_other_streams_except_on_retry() -> None:
    rows: list[Row] = [
        (0, 0, 30 * MIB, 0, 0, -1),
        (1, 0, 0, 0, 1, 5),
        (0, 1, 30 * MIB, 0, 4, -1),
        (0, 2, 30 * MIB, 0, 5, -1),
    ]
    found = run(stream_of(rows)).native
    assert [each / MIB for each in found.reserved_bytes] == [30, 30, 60, 60]
    assert [each / MIB for each in found.allocated_bytes] == [30, 0, 30, 60]
    pressed = run(stream_of(rows), capacity_bytes=59 * MIB).native
    assert [each / MIB for each in pressed.reserved_bytes] == [30, 30, 30, 30]
    assert (pressed.retries, pressed.ooms) == (2, 1)


def test_replay_returns_out_of_memory_with_reason() -> None:
    found = run(program(30 * MIB, 9 * MIB, 40 * MIB, ~2, ~0, 25 * MIB), "", 64 * MIB)
    assert (found.native.ooms, found.native.retries, found.oom_step, found.oom_op) == (1, 1, 0, 2)
    assert (
        found.oom == "40.0 MiB asked for, 39.0 MiB allocated, 50.0 MiB reserved, largest free block 11.0 MiB"
    )
    assert run(program(MIB)).oom == ""


def test_replay_reports_peaks_by_step_and_fragmentation() -> None:
    events = changed(program(40 * MIB, ~0, 22 * MIB, 30 * MIB, ~1, ~2), step=np.array([0, 2, 4], np.int64))
    found = run(events)
    assert [each / MIB for each in found.step_reserved_bytes] == [40, 70, 70]
    assert [each / MIB for each in found.step_allocated_bytes] == [40, 52, 52]
    assert found.fragmentation == pytest.approx(1 - 52 / 70)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 0, 5, 0, 0, -1), (0, 0, 5, 0, 0, -1)], "event 1: storage 0 is allocated already"),
        ([(1, 3, 0, 0, 0, -1)], "event 0: storage 3 is freed but not allocated"),
        ([(7, 0, 5, 0, 0, -1)], "event 0: there is no action 7"),
        ([(0, -1, 5, 0, 0, -1)], "storage is negative"),
        ([(0, 0, -5, 0, 0, -1)], "bytes must lie in"),
        ([(0, 0, 2**60, 0, 0, -1)], "bytes must lie in"),
        ([(0, 0, 5, -1, 0, -1)], "stream must lie in"),
        ([(0, 0, 5, 0, 4, -1), (1, 0, 5, 0, 3, -1)], "op falls"),
    ],
)
def test_replay_refuses_malformed_events(rows: list[Row], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(stream_of(rows))


def test_replay_of_no_events() -> None:
    found = run(stream_of([]))
    assert (found.peak_reserved_bytes, found.fragmentation, found.oom, found.native.peak_event) == (
        0,
        0.0,
        "",
        -1,
    )
    assert run(program(0, ~0)).peak_reserved_bytes == 0


# Steps as streams of events

TRAINING = make_step(
    # forward, backward, the optimizer's two ops
    4,
    6,
    ops_phase=[1, 3, 5, 5],
    storages_bytes=[
        100,
        10,
        7,
        40,
        50,
        0,
    ],  # parameter, optimizer state, batch, activation, gradient, nothing
    storages_kind=[0, 2, 4, 5, 1, 5],
    storages_producer=[-1, -1, -1, 0, 1, 0],
    storages_held_until=[int(FOREVER), int(FOREVER), 0, -1, 3, -1],
    uses_op=[0, 1, 2, 3, 3],
    uses_storage=[0, 3, 4, 1, 4],
)


def signed_bytes(events: AllocatorEvents) -> list[tuple[str, int, int]]:
    """(+ or -, bytes of the storage, op) by event."""
    n_bytes = {
        int(s): int(b)
        for a, s, b in zip(events.action, events.storage, events.bytes, strict=True)
        if a == Action.ALLOC
    }
    return [
        ("+" if a == Action.ALLOC else "-", n_bytes[int(s)], int(op))
        for a, s, op in zip(events.action, events.storage, events.op, strict=True)
    ]


def test_event_stream_allocates_optimizer_state_in_first_step() -> None:
    first = [
        ("+", 100, 0),
        ("+", 7, 0),
        ("+", 40, 0),
        ("-", 7, 0),
        ("+", 50, 1),
        ("-", 40, 1),
        ("+", 10, 3),
        ("-", 50, 3),
    ]
    later = [("+", 7, 4), ("+", 40, 4), ("-", 7, 4), ("+", 50, 5), ("-", 40, 5), ("-", 50, 7)]
    events = event_stream(TRAINING, 2)
    assert signed_bytes(events) == [*first, *later]
    assert events.step.tolist() == [0, len(first)]
    assert [len(event_stream(TRAINING, n)) for n in (0, 1)] == [0, len(first)]


def test_event_stream_frees_leftovers_in_next_step() -> None:
    kept = TRAINING.with_storages(held_until=np.array([FOREVER, FOREVER, 0, -1, FOREVER, -1], np.int32))
    steady = signed_bytes(event_stream(kept, 3))[-6:]
    assert steady == [("+", 7, 8), ("+", 40, 8), ("-", 7, 8), ("+", 50, 9), ("-", 50, 9), ("-", 40, 9)]
    assert replay(event_stream(kept, 3), AllocatorSettings(), None).native.end_allocated_bytes == 3 * 512


def test_event_stream_omits_host_tiers() -> None:
    moved = TRAINING.with_storages(tier=np.array([0, 1, 0, 0, 2, 0], np.uint8))
    assert {n_bytes for _, n_bytes, _ in signed_bytes(event_stream(moved, 1))} == {100, 7, 40}


def test_event_stream_assigns_streams_and_delays_frees() -> None:
    """Op 0 gathers storage 0 on a stream of its own, ops 1 and 2 use it; storage 1 of op 1 is sent by
    op 2.
    """
    step = make_step(
        3,
        2,
        storages_bytes=[10, 20],
        storages_producer=[0, 1],
        ops_resource=[int(Resource.INTRA_LINK), 0, int(Resource.DEVICE_TO_HOST)],
        uses_op=[1, 2],
        uses_storage=[0, 1],
    )
    events = event_stream(step, 1)
    assert events.stream.tolist() == [1, 0, 1, 0]
    assert all(events.ready_op <= events.op)


def test_event_stream_live_bytes_equal_step_live_bytes() -> None:
    """The stream and the step agree on what is live while each op runs, on steps made at random."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        n, m = 15, 40
        producer = rng.integers(-1, n, m)
        step = make_step(
            n,
            m,
            storages_producer=producer,
            storages_bytes=512 * rng.integers(0, 5, m),
            storages_kind=np.full(m, int(Kind.TEMPORARY)),
            storages_held_until=np.where(rng.random(m) < 0.2, int(FOREVER), rng.integers(-1, n, m)),
        )
        events = event_stream(step, 1)
        allocated = replay(
            events, AllocatorSettings(expandable_segments=True), None, timeline=True
        ).native.allocated_bytes
        peaks = [allocated[: np.searchsorted(events.op, op, side="right")].max(initial=0) for op in range(n)]
        assert max(peaks) == step.peak_bytes()
        assert np.maximum.accumulate(step.live_bytes()).tolist() == peaks


def test_event_stream_allocates_buffers_of_fsdp2_on_its_streams() -> None:
    """A gather's output, its copy, the packed gradients, and the shard that their reduction writes."""
    names = (
        "aten.empty.memory_format",
        "memtune.all_gather_into_.default",
        "fsdp.split_with_sizes_copy.default",
    )
    none, link = Resource.NOTHING, Resource.INTRA_LINK
    step = make_step(
        7,
        4,
        names=(*names, "fsdp.chunk_cat.default", "memtune.reduce_scatter_into_.default"),
        ops_name=[0, 1, 2, 3, 0, 4, 2],
        ops_resource=[int(each) for each in (none, link, 0, 0, none, link, 0)],
        storages_bytes=[80, 70, 60, 15],
        storages_producer=[0, 2, 3, 4],
        uses_op=[1, 2, 3, 5, 5, 6],
        uses_storage=[0, 0, 1, 2, 3, 3],
        uses_mode=[int(WRITES), 0, 0, 0, int(WRITES), 0],
    )

    def streams(step: Step) -> dict[int, int]:
        events = event_stream(step, 1)
        made = events.action == Action.ALLOC
        return dict(zip(events.bytes[made].tolist(), events.stream[made].tolist(), strict=True))

    assert streams(step) == {80: 2, 70: 0, 60: 0, 15: 3}
    other = tuple(name.replace("fsdp.", "aten.") for name in step.names)
    assert streams(changed(step, names=other)) == {80: 0, 70: 0, 60: 0, 15: 0}
