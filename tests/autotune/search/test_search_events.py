import itertools
import json
import math
import os
import time

import pytest
from hypothesis import given, strategies as st

from memtune.autotune.search import search_events
from memtune.autotune.search.search_events import (
    EventLog,
    LogOpened,
    LogTail,
    Note,
    TrialFinished,
    Unknown,
    parse_event,
    read_events,
)
from memtune.errors import EnvironmentFault
from memtune.executors.base import TrialResult


def finished(number: int, **fields) -> TrialFinished:
    return TrialFinished(
        number=number, summary="é · fsdp", result=TrialResult(number=number, status="ok", **fields)
    )


def test_event_log_round_trip_sets_time(tmp_path):
    path = tmp_path / "deep" / "events.jsonl"
    with EventLog(path) as log:
        written = [log.write(Note(text="a\nb")), log.write(finished(3, losses=[1.5], step_s=0.25))]
    opened, *rest = read_events(path)
    assert isinstance(opened, LogOpened)
    assert opened.schema_version == search_events.SCHEMA_VERSION
    assert opened.pid == os.getpid()
    assert [e.model_dump(exclude={"t", "elapsed_s"}) for e in rest] == [
        e.model_dump(exclude={"t", "elapsed_s"}) for e in written
    ]
    assert rest[0].t > 1e9
    assert rest[1].elapsed_s >= rest[0].elapsed_s


def test_event_log_elapsed_time_includes_time_before_log(tmp_path):
    with EventLog(tmp_path / "log", time.monotonic() - 100) as log:
        log.write(Note(text="first"))
    with EventLog(
        tmp_path / "log", time.monotonic() - 100
    ) as log:  # gone on with: only what passes from now on is added
        again = log.write(Note(text="second"))
    assert 200 <= again.elapsed_s < 290
    assert list(read_events(tmp_path / "log"))[1].elapsed_s >= 100


def test_event_log_keeps_nan_loss_in_strict_json(tmp_path):
    with EventLog(tmp_path / "log") as log:
        log.write(finished(0, losses=[1.0, math.nan, math.inf]))
    for line in (tmp_path / "log").read_text().splitlines():
        json.loads(line, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    losses = list(read_events(tmp_path / "log"))[-1].result.losses
    assert losses[0] == 1.0
    assert math.isnan(losses[1])
    assert losses[2] == math.inf


def test_event_log_truncated_in_last_record_loses_only_that_record(tmp_path):
    whole = tmp_path / "whole"
    with EventLog(whole) as log:
        log.write(Note(text="kept"))
        log.write(finished(1, log_tail="größer\n"))
    content = whole.read_bytes()
    start = content.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(start, len(content)):
        torn = tmp_path / "torn"
        torn.write_bytes(content[:cut])
        assert [e.event for e in read_events(torn)] == ["log_opened", "note"]
        with EventLog(torn) as log:
            log.write(Note(text="after"))
        assert [e.event for e in read_events(torn)] == ["log_opened", "note", "log_opened", "note"]
        assert torn.read_bytes().endswith(b"\n")  # nothing of the torn record is left behind the new ones


def test_changed_lines_of_a_log_are_not_used(tmp_path):
    with EventLog(tmp_path / "log") as log:
        log.write(Note(text="step 1 took 25 ms"))
    *_, line = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    for at in range(len(line) - 1):
        flipped = line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]
        found = parse_event(flipped)
        assert isinstance(found, Unknown) or found == parse_event(line), flipped


def test_event_log_truncated_in_first_line_is_restarted(tmp_path):
    for cut in range(len(b'{"event":"log_opened","t":1795235119.7')):
        (tmp_path / "log").write_bytes(b'{"event":"log_opened","t":1795235119.7'[:cut])
        EventLog(tmp_path / "log").close()
        assert [e.event for e in read_events(tmp_path / "log")] == ["log_opened"]


def test_event_log_refuses_other_file_unchanged(tmp_path):
    (tmp_path / "model.py").write_text("def model():")
    with pytest.raises(EnvironmentFault, match="not an event log"):
        EventLog(tmp_path / "model.py")
    assert (tmp_path / "model.py").read_text() == "def model():"


def test_event_log_reports_unwritable_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        EventLog(tmp_path / "file" / "log")


def test_event_log_separates_partial_line_after_full_disk(tmp_path, monkeypatch):
    log, write = EventLog(tmp_path / "log"), os.write

    def full(file, data):
        if len(data) > 20:
            return write(file, data[:20])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(search_events.os, "write", full)
    with pytest.raises(EnvironmentFault, match="cannot be written") as caught:
        log.write(Note(text="x" * 25))
    assert "No space left" in caught.value.evidence
    assert (tmp_path / "log").read_bytes().count(b"\n") == 1
    assert (tmp_path / "log").read_bytes().endswith(b"\n")
    monkeypatch.setattr(search_events.os, "write", write)
    log.write(Note(text="room again"))
    assert [e.event for e in read_events(tmp_path / "log")] == ["log_opened", "note"]


def test_event_log_continues_elapsed_time(tmp_path, monkeypatch):
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(search_events.time, "monotonic", lambda: next(clock))
    for _ in range(2):
        with EventLog(tmp_path / "log") as log:
            log.write(Note(text="n"))
    elapsed = [e.elapsed_s for e in read_events(tmp_path / "log")]
    assert elapsed == [10.0, 20.0, 30.0, 40.0]


def test_event_log_reader_tolerates_newer_kinds_and_fields():
    unknown = parse_event(b'{"event":"power_sampled","watts":300}')
    assert unknown == Unknown(event="power_sampled", raw='{"event":"power_sampled","watts":300}')
    assert parse_event(b'{"event":"note","text":"a","colour":"red"}') == Note(text="a")
    newer = json.loads(finished(1).model_dump_json())
    newer["result"]["joules"] = 5
    assert parse_event(json.dumps(newer).encode()) == finished(1)
    assert isinstance(parse_event(b'{"event":"note"}'), Unknown)


@given(st.binary(max_size=60))
def test_event_log_reader_survives_any_line(line):
    assert parse_event(line).event


def test_tail_yields_each_complete_line_once(tmp_path):
    tail = LogTail(tmp_path / "log")
    assert tail.poll() == []
    with EventLog(tmp_path / "log") as log:
        assert [e.event for e in tail.poll()] == ["log_opened"]
        log.write(Note(text="a"))
        with (tmp_path / "log").open("ab") as file:
            file.write(b'{"event":"no')
            file.flush()
            assert [e.event for e in tail.poll()] == ["note"]
            file.write(b'te","text":"b"}\n')
        assert [e.text for e in tail.poll()] == ["b"]
    assert tail.poll() == []
