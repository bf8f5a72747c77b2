"""Progress of phases, and the line that shows it."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest

from memtune import progress as module
from memtune.progress import Progress, StatusLine, advance, prints_kept_apart, reported_to, shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_phase_has_its_work_and_the_time_left(clock: list[float]):
    progress = Progress()
    progress.phase("scoring settings")
    with reported_to(progress):
        advance(250, "settings", 1000)
    clock[0] += 5
    assert progress.detail() == " · 250 of 1,000 settings · 5 s, about 15 s left"
    progress.phase("starting")
    assert progress.finished == ["scoring settings · 250 of 1,000 settings · 5.0 s"]
    assert progress.detail() == " · 0 s"


@pytest.mark.parametrize(("done", "total"), [(1, 0), (1, 1)])
def test_detail_of_one_piece_of_work_is_singular(done: int, total: int, clock: list[float]):
    progress = Progress()
    progress.phase("scoring settings")
    progress.advance(done, "settings simulated op by op", total)
    assert progress.detail().endswith(" setting simulated op by op · 0 s")


def test_time_left_follows_the_pace_of_the_present_work(clock: list[float]):
    progress = Progress()
    progress.phase("scoring settings")
    for second, done, total in ((2, 1000, 1000), (0, 1000, 1100), (5, 1050, 1100)):
        clock[0] += second
        progress.advance(done, "settings", total)
    assert progress.detail().endswith("7 s, about 5.0 s left")
    clock[0] += 30
    assert progress.detail().endswith("37 s, about 35 s left")
    progress.advance(1099, "settings", 1100)
    clock[0] += 20
    assert progress.detail().endswith("57 s, about 20 s left")


def test_work_without_a_listener_reports_nothing():
    progress = Progress()
    progress.phase("recording")
    advance(250, "ops")
    assert progress.done == 0


def test_log_gets_one_line_per_subject_and_a_sign_of_life_every_two_seconds(clock: list[float]):
    out = io.StringIO()
    status = StatusLine(out)
    for second in (0.0, 1.0, 1.0, 1.0):
        clock[0] += second
        status.show("recording", f" · {clock[0] - 100:.0f} s")
    status.finish("recording · 3 s")
    status.print("done")
    assert out.getvalue() == "recording · 2 s · 3 s\ndone\n"


def test_log_gets_new_details_each_time_that_twice_as_long_has_passed_and_dots_between(clock: list[float]):
    out = io.StringIO()
    status = StatusLine(out)
    for stage in (*["starting"] * 4, *["step 1"] * 3, "step 2", "step 3 · 2 MiB", "step 3 · 2 MiB"):
        status.show("#3", f" · {stage}")
        clock[0] += 2
    status.print("done")
    assert out.getvalue() == "#3 · starting.. · step 1... · step 3 · 2 MiB.\ndone\n"


def test_terminal_gets_one_line_that_is_redrawn_without_escapes():
    out = Terminal()
    status = StatusLine(out)
    status.show("recording", " · 1 s")
    status.show("recording", " · 2 s")
    status.print("done")
    drawn = out.getvalue()
    assert drawn.count("\r") == 4
    assert drawn.endswith("\rdone\n")
    assert "\x1b" not in drawn


def test_shown_progress_ends_with_the_work():
    out, progress = io.StringIO(), Progress()
    with contextlib.suppress(ValueError), shown(progress, out):
        progress.phase("recording")
        advance(3, "ops")
        raise ValueError("wrong")
    assert out.getvalue().startswith("recording · 3 ops · ")
    assert out.getvalue().count("\n") == 1


def test_prints_of_user_code_are_kept_apart_and_written_once(capsys: pytest.CaptureFixture[str]):
    status = io.StringIO()
    line = StatusLine(status)
    line.show("recording", "")
    with prints_kept_apart(line):
        for _ in range(3):
            print("parameters:", 3)
        print("unended", end="")
    line.show("recording", "")
    assert capsys.readouterr().out == "parameters: 3\nunended\n"
    assert status.getvalue() == "recording\nrecording"  # not `recordingparameters: 3`


def test_prints_kept_apart_have_the_attributes_of_stdout(capfd: pytest.CaptureFixture[str]):
    with prints_kept_apart(StatusLine(io.StringIO())):
        assert sys.stdout.writable()
        sys.stdout.buffer.write(b"bytes\n")
        sys.stdout.buffer.flush()
    assert capfd.readouterr().out == "bytes\n"
