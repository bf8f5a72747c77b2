"""A trace recorded by the reference allocator says, replayed, what the program it was recorded from says."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from support.memory_snapshots import Row, record

from memtune.autotune.predict.caching_allocator import Action, AllocatorEvents, AllocatorSettings, replay
from memtune.autotune.predict.snapshot import Trace, read_trace
from memtune.errors import UsageError

MIB = 2**20
SIZES = st.sampled_from((1, 600, 300 * 2**10, MIB, 3 * MIB, 9 * MIB, 12 * MIB, 21 * MIB, 45 * MIB))


def read(tmp_path: Path, snapshot: Any, **asked: Any) -> Trace:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    return read_trace(path, **asked)


def events_of(rows: list[Row]) -> AllocatorEvents:
    return AllocatorEvents.from_columns(np.array(rows, np.int64).reshape(-1, 6).T, np.zeros(1, np.int64))


@st.composite
def programs(draw: st.DrawFn, *, empties: bool = False) -> list[Row]:
    rows: list[Row] = []
    live: list[int] = []
    made = 0
    for op in range(draw(st.integers(1, 40))):
        choice = draw(st.integers(0, 20))
        if choice == 0 and empties and made:
            rows.append((Action.EMPTY_CACHE, 0, 0, 0, op, -1))
        elif choice < 10 and live:
            late = draw(st.sampled_from((-1, -1, 1, 4, 50)))
            rows.append((Action.FREE, live.pop(draw(st.integers(0, len(live) - 1))), 0, 0, op, op + late))
        else:
            rows.append((Action.ALLOC, made, draw(SIZES), draw(st.integers(0, 1)), op, -1))
            live.append(made)
            made += 1
    return rows


TEXTS = st.sampled_from(
    ("", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:4")
)
AGAIN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@AGAIN
@given(programs(), TEXTS, TEXTS)
def test_read_trace_replays_as_program_would(tmp_path: Path, rows: list[Row], ran: str, other: str) -> None:
    snapshot, allocator = record(rows, ran, **AllocatorSettings.parse(ran).native())
    trace = read(tmp_path, snapshot)
    assert trace.recorded.settings == ran
    assert trace.recorded.peak_reserved_bytes == allocator.highest_ever
    assert trace.recorded.device_allocs == allocator.device_allocs
    assert trace.storages_before == 0
    for text in (ran, other):
        chosen = AllocatorSettings.parse(text)
        found, expected = (replay(each, chosen, None) for each in (trace.events, events_of(rows)))
        assert found.to_dict() == expected.to_dict()


@AGAIN
@given(programs(empties=True), TEXTS)
def test_read_trace_detects_empty_cache(tmp_path: Path, rows: list[Row], ran: str) -> None:
    chosen = AllocatorSettings.parse(ran)
    trace = read(tmp_path, record(rows, ran, **chosen.native())[0])
    found, expected = (replay(each, chosen, None).native for each in (trace.events, events_of(rows)))
    assert found.peak_reserved_bytes == expected.peak_reserved_bytes == trace.recorded.peak_reserved_bytes
    assert found.device_frees == expected.device_frees


@AGAIN
@given(programs(), st.integers(1, 40))
def test_read_trace_recovers_storages_from_before(tmp_path: Path, rows: list[Row], last: int) -> None:
    snapshot, allocator = record(rows, last=last)
    trace = read(tmp_path, snapshot)
    found = replay(trace.events, AllocatorSettings(), None)
    in_use = sum(piece.size for segment in allocator.segments for piece in segment.pieces if piece.used)
    waiting = sum(piece.size for _, _, piece in allocator.waiting)
    cut = len(allocator.entries) > last
    assert (trace.storages_before > 0) <= cut
    # Blocks that are not cut down to size may be other ones in the new layout.
    assert found.native.end_allocated_bytes == pytest.approx(in_use - waiting, abs=MIB * 40)
    assert trace.recorded.peak_reserved_bytes <= allocator.highest_ever
    assert trace.recorded.peak_reserved_bytes >= allocator.reserved


@AGAIN
@given(programs(empties=True), st.integers(2, 20), st.sampled_from(("", "roundup_power2_divisions:4")))
def test_replay_of_a_warm_trace_starts_from_its_segments(
    tmp_path: Path, rows: list[Row], part: int, ran: str
) -> None:
    """Of a trace that lacks its first entries, reserved bytes are those of the run, at the peak and at the
    end.
    """
    chosen = AllocatorSettings.parse(ran)
    whole = len(record(rows, ran, **chosen.native())[0]["device_traces"][0])
    snapshot, allocator = record(rows, ran, last=max(whole * part // 20, 1), **chosen.native())
    trace = read(tmp_path, snapshot)
    found = replay(trace.events, chosen, None)
    assert found.peak_reserved_bytes == trace.recorded.peak_reserved_bytes
    assert found.native.end_reserved_bytes == allocator.reserved
    assert found.native.end_allocated_bytes == sum(
        piece.size for segment in allocator.segments for piece in segment.pieces if piece.used
    ) - sum(piece.size for _, _, piece in allocator.waiting)


def test_replay_of_a_warm_trace_of_expandable_segments(tmp_path: Path) -> None:
    """Free pages between blocks that stay are held, too, and are used before new ones are mapped."""
    rows: list[Row] = [(0, number, 30 * MIB, 0, number, -1) for number in range(4)]
    rows += [(1, 0, 0, 0, 4, -1), (1, 2, 0, 0, 5, -1), (0, 4, 25 * MIB, 0, 6, -1), (0, 5, 45 * MIB, 0, 7, -1)]
    chosen = AllocatorSettings(expandable_segments=True)
    snapshot, allocator = record(rows, "expandable_segments:True", last=4, **chosen.native())
    trace = read(tmp_path, snapshot)
    assert trace.events.held is not None
    assert trace.events.held.expandable
    found = replay(trace.events, chosen, None)
    assert found.peak_reserved_bytes == trace.recorded.peak_reserved_bytes == allocator.highest_ever
    # Plain segments cannot be those of the snapshot: the storages are placed again.
    plain, cold = (
        replay(each, AllocatorSettings(), None) for each in (trace.events, replace(trace.events, held=None))
    )
    assert plain.to_dict() == cold.to_dict()


def test_read_trace_places_storages_again_if_segments_contradict_the_trace(tmp_path: Path) -> None:
    snapshot, _ = record(HOLES[:5], last=3)
    assert read(tmp_path, snapshot).events.held is not None
    snapshot["device_traces"][0].insert(
        0, {"action": "segment_free", "addr": 10 * MIB, "size": 30 * MIB, "stream": 0}
    )
    assert read(tmp_path, snapshot).events.held is None


HOLES: list[Row] = [
    (0, 0, 30 * MIB, 0, 0, -1),
    (0, 1, 30 * MIB, 0, 1, -1),
    (1, 0, 0, 0, 2, -1),
    (1, 1, 0, 0, 3, -1),
    (0, 2, 50 * MIB, 0, 4, -1),
    (0, 3, 60 * MIB, 0, 5, -1),
]


def test_read_trace_reports_recorded_statistics(tmp_path: Path) -> None:
    trace = read(tmp_path, record(HOLES[:5])[0])
    assert trace.entries == 2 * 4 + 2
    assert trace.recorded.peak_reserved_bytes == 110 * MIB
    assert trace.recorded.peak_allocated_bytes == 60 * MIB
    assert trace.recorded.fragmentation == pytest.approx(1 - 50 / 110)
    assert (
        replay(trace.events, AllocatorSettings(expandable_segments=True), None).peak_reserved_bytes
        == 60 * MIB
    )


def test_read_trace_distinguishes_retry_from_empty_cache_by_capacity(tmp_path: Path) -> None:
    snapshot, _ = record(HOLES[:5], capacity_bytes=100 * MIB)
    assert [each["action"] for each in snapshot["device_traces"][0]].count("segment_free") == 2
    blind, told = read(tmp_path, snapshot), read(tmp_path, snapshot, capacity_bytes=100 * MIB)
    assert list(blind.events.action).count(Action.EMPTY_CACHE) == 1
    assert list(told.events.action).count(Action.EMPTY_CACHE) == 0
    assert replay(told.events, AllocatorSettings(), 100 * MIB).native.retries == 1
    assert replay(told.events, AllocatorSettings(expandable_segments=True), 100 * MIB).native.retries == 0


def test_read_trace_requests_failed_allocations_again(tmp_path: Path) -> None:
    trace = read(tmp_path, record(HOLES, capacity_bytes=100 * MIB)[0], capacity_bytes=100 * MIB)
    assert trace.recorded.ooms == 1
    assert trace.recorded.peak_reserved_bytes == 60 * MIB
    assert replay(trace.events, AllocatorSettings(), None).peak_reserved_bytes == (60 + 50 + 60) * MIB
    assert replay(trace.events, AllocatorSettings(), 100 * MIB).native.ooms == 1


def test_read_trace_separates_private_pools(tmp_path: Path) -> None:
    entries = [
        {"action": "alloc", "addr": 1, "size": 30 * MIB, "stream": 0, "pool_id": (0, 1)},
        {"action": "free_requested", "addr": 1, "size": 30 * MIB, "stream": 0, "pool_id": (0, 1)},
        {"action": "free_completed", "addr": 1, "size": 30 * MIB, "stream": 0, "pool_id": (0, 1)},
        {"action": "alloc", "addr": 2, "size": 30 * MIB, "stream": 0, "pool_id": (0, 0)},
        {"action": "user_defined", "addr": 0, "size": 0, "stream": 0},
    ]
    trace = read(tmp_path, {"segments": [], "device_traces": [entries]})
    assert replay(trace.events, AllocatorSettings(), None).peak_reserved_bytes == 60 * MIB
    assert any("private pools" in note for note in trace.notes)
    assert "1 entries 'user_defined' ignored" in trace.notes


def test_read_trace_takes_longest_trace(tmp_path: Path) -> None:
    one, more = (
        [{"action": "alloc", "addr": i, "size": 512, "stream": 0} for i in range(count)] for count in (1, 3)
    )
    snapshot = {"segments": [], "device_traces": [one, [], more]}
    assert (read(tmp_path, snapshot).device, read(tmp_path, snapshot).entries) == (2, 3)
    assert read(tmp_path, snapshot, device=0).entries == 1
    assert "device 2 of 0, 2" in read(tmp_path, snapshot).notes
    for device in (1, 9):
        with pytest.raises(UsageError, match=f"no trace of device {device}") as error:
            read(tmp_path, snapshot, device=device)
        assert (error.value.code, error.value.evidence) == ("MT144", "it has: 0, 2")


@pytest.mark.parametrize(
    ("snapshot", "code", "says"),
    [
        ([{"address": 1}], "MT143", "torch 1.x"),
        ("text", "MT143", "it holds a str"),
        ({"segments": []}, "MT143", "no list 'device_traces' but segments"),
        ({}, "MT143", "but nothing"),
        ({"segments": [], "device_traces": [1]}, "MT143", "not one list a device"),
        ({"segments": [], "device_traces": []}, "MT144", "nothing was being recorded"),
        ({"segments": [], "device_traces": [[], []]}, "MT144", "nothing was being recorded"),
        ({"segments": [], "device_traces": [[7]]}, "MT143", "entry 0 of device 0 has no action"),
        (
            {"segments": [], "device_traces": [[{"action": "alloc", "size": 5}]]},
            "MT143",
            "entry 0 of device 0 has no 'addr'",
        ),
        (
            {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": -5}]]},
            "MT143",
            "has no 'size' but -5",
        ),
        (
            {"segments": [], "device_traces": [[{"action": "alloc", "addr": 1, "size": 2**60}]]},
            "MT143",
            "has no 'size'",
        ),
        ({"segments": [3], "device_traces": [[{"action": "snapshot"}]]}, "MT143", "segment 0"),
        (
            {"segments": [], "device_traces": [[{"action": "new"}, {"action": "new"}]]},
            "MT143",
            "none of its 2 entries",
        ),
    ],
)
def test_read_trace_refuses_other_files(tmp_path: Path, snapshot: Any, code: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        read(tmp_path, snapshot)
    assert error.value.code == code
    assert says in error.value.evidence


def test_read_trace_reports_missing_file() -> None:
    with pytest.raises(UsageError, match="no file"):
        read_trace(Path("nowhere.pickle"))
