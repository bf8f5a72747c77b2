import io
import signal
import threading

import pytest
from support.search import event_stream as stream

from memtune.autotune.search.control import Control
from memtune.autotune.search.search_events import (
    CandidatesScored,
    EventLog,
    LogOpened,
    Note,
    Paused,
    Resumed,
    SearchFinished,
    SearchStarted,
    TrialCancelled,
    TrialFinished,
    TrialProgress,
    TrialStarted,
    Unknown,
)
from memtune.autotune.ui import formatting, line_printer, tui_panels, tui_panels as tui_details
from memtune.autotune.ui.line_printer import LinePrinter, summary_lines, with_lines
from memtune.autotune.ui.view import SearchView
from memtune.executors.base import TrialResult
from memtune.progress import Progress

MIB = 2**20


def fold(events, step_s=0.0) -> SearchView:
    view = SearchView()
    for index, event in enumerate(events):
        view.apply(event.model_copy(update={"elapsed_s": index * step_s}))
    return view


def printed(events, color=False, **options) -> str:
    out = io.StringIO()
    printer = LinePrinter(out, color, **options)
    for event in events:
        printer.apply(event)
    printer.close()
    return out.getvalue()


def test_view_counts_trials_and_knows_best():
    view = fold(stream.all_events())
    assert len(view.done) == 10
    assert view.running == []
    assert (view.count("ok"), view.count("oom"), view.count("crash")) == (6, 3, 1)
    assert view.n_pruned == 2
    assert view.best.number == 4
    assert [formatting.outcome(baseline) for baseline in view.baselines] == [
        "out of memory",
        "12.1 samples/s",
        "out of memory",
    ]
    assert [(p.number, p.peak_bytes, p.samples_per_s) for p in view.points][:2] == [
        (1, 388 * MIB, 12.1),
        (3, 512 * MIB, 16.4),
    ]
    assert (view.peak_error, view.step_error) == (0.031, 0.068)
    assert view.finished.out == "tuned.yaml"


def test_view_has_one_point_per_setting_at_its_median_rate():
    number, _, name, status, peak, _, summary = stream.TRIALS[3]
    again = [
        event
        for other, rate in ((10, 15.0), (11, 10.0))
        for event in stream.trial_events((other, "repeat", name, status, peak, rate, summary))
    ]
    before, after = fold(stream.all_events()).points, fold([*stream.all_events(), *again]).points
    assert [each.number for each in after] == [each.number for each in before]
    assert {each.number: each.samples_per_s for each in after}[number] == 15.0  # of 16.4, 15 and 10


def test_view_has_a_baseline_that_ran_again_once():
    again = (10, *stream.TRIALS[1][1:5], 15.5, stream.TRIALS[1][6])
    view = fold([*stream.all_events(), *stream.trial_events(again)])
    assert [each.name for each in view.baselines] == ["plain", "full recompute", "plain fsdp"]
    assert formatting.outcome(view.baselines[1]) == "15.5 samples/s"


def test_own_setting_that_ran_again_is_not_compared_with_itself():
    rows = [
        (0, "baseline", "plain", "ok", 388, 12.1, "mb 8"),
        (1, "baseline", "plain", "ok", 388, 15.5, "mb 8"),
    ]
    trials = [event for row in rows for event in stream.trial_events(row)]
    end = SearchFinished(status="done", out="tuned.yaml", best_number=0, confirmed=True)
    view = fold([*stream.opening(), *trials, end])
    assert "(plain:" not in summary_lines(view)[0]
    assert tui_panels._gain(view, 140) == ""


def test_view_applies_progress_to_running_trial_only():
    view = fold(
        [
            TrialStarted(number=1),
            TrialStarted(number=2),
            TrialProgress(number=2, stage="step 1/3", device_bytes=7),
        ]
    )
    view.apply(TrialProgress(number=2, stage="step 2/3"))
    view.apply(TrialProgress(number=9, stage="never started"))
    assert [(t.stage, t.device_bytes) for t in view.running] == [("starting", None), ("step 2/3", 7)]


def test_view_errors_come_from_trials_until_calibration():
    def trial(number, predicted, measured):
        result = TrialResult(number=number, status="ok", peak_allocated_bytes=measured, step_s=2.0)
        return TrialFinished(
            number=number, predicted_peak_bytes=predicted, predicted_step_s=1.0, result=result
        )

    view = fold([trial(0, 110, 100), trial(1, 70, 100), trial(2, 80, 100)])
    assert view.peak_error == pytest.approx(0.2)
    assert view.trials[0].peak_error == pytest.approx(0.1)
    assert view.step_error == pytest.approx(0.5)
    assert fold([]).peak_error is None


def test_view_eta_uses_durations_and_time_limit():
    started = SearchStarted(study="s", workload="m.py", device="cpu", max_trials=10, time_limit_s=300.0)
    done = [
        event
        for row in stream.TRIALS[:2]
        for event in stream.trial_events(row)
        if event.event in ("trial_started", "trial_finished")
    ]
    view = fold([started, *done], step_s=10.0)
    assert view.eta_s(40.0) == pytest.approx(80.0)  # 8 trials of 10 s
    assert view.eta_s(290.0) == pytest.approx(10.0)  # the time limit comes first
    two = fold([started.model_copy(update={"slots": 2}), *done], step_s=10.0)
    assert two.eta_s(40.0) == pytest.approx(40.0)
    assert fold(stream.all_events()).eta_s() is None
    assert fold([]).eta_s() is None


def test_view_of_resumed_search_has_no_stale_running_trial():
    view = fold([*stream.opening(), TrialStarted(number=5), Paused()])
    assert view.paused
    view.apply(LogOpened(pid=7))
    assert view.running == []
    assert view.trials[5].status == "cancelled"
    assert not view.paused
    view.apply(TrialStarted(number=5))
    assert len(view.running) == 1


def test_printer_of_resumed_search_shows_the_trial_that_its_process_left():
    out = io.StringIO()
    printer = LinePrinter(out, False)
    printer.view.writer = 8
    for event in (LogOpened(pid=7), *stream.opening(), TrialStarted(number=5)):
        printer.apply(event)
    assert printer.view.running == []  # process 8 is still recording the step
    printer.apply(LogOpened(pid=8))
    assert out.getvalue().splitlines()[-1].split()[:3] == ["5", "search", "ended"]
    printer.apply(TrialStarted(number=6))
    assert [each.number for each in printer.view.running] == [6]


def test_view_ignores_unknown_events():
    view = SearchView()
    view.apply(Unknown(event="from the future", raw="{}"))
    assert view == SearchView()


def test_printer_prints_one_aligned_line_per_trial():
    out = printed(stream.all_events())
    lines = out.splitlines()
    trials = [line for line in lines if line[:6].strip().isdigit() and line.startswith(" ")]
    assert len(trials) == 10
    head = next(line for line in lines if "setting" in line and "batch" in line)
    column = head.index("setting")
    assert all(trial[column - 2 : column] == "  " and trial[column] != " " for trial in trials)
    assert (
        "   4  search           ok                8×2    1.69 s       18.9    571 MiB     +3.0 %  recomputes"
        " one block in 2 in backward (Chen et al. 2016)" in out
    )
    assert "   0  plain            out of memory" in out
    assert "aten::addmm asked for 24 MiB" in out
    assert lines[3] == "pruned 2 candidates: at least 850 MiB predicted, limit 600 MiB"
    assert "\x1b" not in out


@pytest.mark.parametrize("width", [80, 100, 130, 200])
def test_printer_wraps_no_line_of_a_terminal(width, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(line_printer, "columns", lambda stream: width)
    out = Terminal()
    printer = LinePrinter(out, color=False)
    for event in stream.all_events():
        printer.apply(event)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    fourth = next(index for index, line in enumerate(lines) if line.startswith("   4 "))
    setting = "recomputes one block in 2 in backward"
    assert setting in lines[fourth if width == 200 else fourth + 1]


def test_printer_prints_no_negative_zero():
    assert [formatting.percent(each, signed=True) for each in (-0.0004, 0.0, -0.0006, None)] == [
        "+0.0 %",
        "+0.0 %",
        "-0.1 %",
        "–",
    ]


def test_printer_prints_unused_techniques_by_slot():
    reasons = {
        "recompute: coop": "on CUDA",
        "allocator: async": "no effect on CPU",
        "recompute: dtr": "on CUDA",
    }
    lines = printed([CandidatesScored(n_candidates=3, not_used=reasons)], verbose=True).splitlines()
    assert len(printed([CandidatesScored(n_candidates=3, not_used=reasons)]).splitlines()) == 1
    assert lines[1:] == ["not used: recompute coop, dtr · allocator async (memtune plan --why)"]
    assert len(printed([CandidatesScored(n_candidates=3)]).splitlines()) == 1


def test_printer_uses_colour_only_on_terminals(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def coloured(stream_):
        printer = LinePrinter(stream_)
        printer.apply(Note(text="careful", level="warning"))
        return "\x1b[" in stream_.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert coloured(Terminal())
    assert not coloured(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not coloured(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured(Terminal())


def test_printer_heartbeat_at_most_once_a_minute():
    out = io.StringIO()
    printer = LinePrinter(out, color=False)
    printer.apply(TrialStarted(number=4))
    for second in range(200):
        printer.tick(float(second))
    beats = [line for line in out.getvalue().splitlines() if line.startswith("…")]
    assert [beat.split()[1] for beat in beats] == ["1:00", "2:00", "3:00"]
    assert "#4 starting" in beats[0]


def test_printer_has_no_heartbeat_while_a_phase_runs():
    out, progress = io.StringIO(), Progress()
    progress.phase("scoring settings")
    printer = LinePrinter(out, color=False, progress=progress)
    for second in range(100):
        printer.tick(float(second))
    assert "…" not in out.getvalue()


def test_printer_survives_closed_pipe():
    class Closed(io.StringIO):
        def write(self, *_):
            raise BrokenPipeError

    LinePrinter(Closed(), color=False).apply(Note(text="n"))


def test_printer_ends_with_result_against_plain_and_usage():
    lines = summary_lines(fold(stream.all_events()), see_why="memtune report gpt-7f3a")
    assert lines == [
        (
            "✔ tuned.yaml  18.9 samples/s (plain: out of memory) · peak 571 MiB of 600 MiB · checked in a"
            " fresh process"
        ),
        "  setting    runs 2 micro-batches of 8 samples a step; recomputes one block in 2 in backward (Chen"
        " et al. 2016); divides weights, gradients and optimizer state over 2 ranks (FSDP)",
        '  use it     model, optimizer = memtune.apply(model, optimizer, "tuned.yaml")',
        "  see why    memtune report gpt-7f3a",
    ]
    events = [
        each.model_copy(update={"parameter_bytes": 2**30}) if isinstance(each, SearchStarted) else each
        for each in stream.all_events()
    ]
    call = '(model, optimizer, "tuned.yaml", device="cpu")  # model: on the CPU, or memtune.deferred(build)'
    assert summary_lines(fold(events))[2].endswith(call)
    nothing = stream.SearchFinished(status="nothing_fits", message="nothing fits: short by 12 MiB")
    assert summary_lines(fold([*stream.opening(), nothing])) == ["✘ nothing fits: short by 12 MiB"]
    assert summary_lines(fold(stream.opening())) == []


def test_printer_shows_ssd_writes_of_best_and_trials():
    """Drives wear."""
    view = fold(stream.all_events())
    assert view.best is not None
    assert (
        "SSD"
        not in summary_lines(view)[0]
        + tui_panels._best(view, 200).plain
        + tui_details._comparison(view, view.best).plain
    )
    view.best.result = view.best.result.model_copy(update={"link_bytes": {"ssd_write": 3 * MIB}})
    wear = "3.00 MiB a step to SSD"
    assert wear in summary_lines(view)[0]
    assert wear in tui_panels._best(view, 200).plain
    assert wear in tui_details._comparison(view, view.best).plain


def test_best_has_the_rate_of_the_config_at_the_end():
    events = [each for each in stream.all_events() if not isinstance(each, SearchFinished)]
    end = SearchFinished(status="done", out="tuned.yaml", best_number=4, samples_per_s=12.5)
    assert "12.5 samples/s" not in tui_panels._best(fold(events), 200).plain
    assert "12.5 samples/s" in tui_panels._best(fold([*events, end]), 200).plain


def test_baselines_have_the_rates_of_all_their_runs_at_the_end():
    """A summary showed plain's last trial next to a gain over all its runs: 87 % apart where it said 35 %."""
    rows = [
        (0, "baseline", "plain", "ok", 388, 12.1, "mb 8"),
        (4, "search", "", "ok", 300, 18.9, "mb 8 · full"),
    ]
    trials = [event for row in rows for event in stream.trial_events(row)]
    end = SearchFinished(
        status="done", out="tuned.yaml", best_number=4, samples_per_s=18.9, baselines={"plain": 15.7}
    )
    before, after = fold([*stream.opening(), *trials]), fold([*stream.opening(), *trials, end])
    assert "18.9 samples/s (plain: 15.7 samples/s)" in summary_lines(after)[0]
    shown = [tui_panels.header(each, 0.0, 140).plain for each in (before, after)]
    assert ["plain: 12.1 samples/s" in each for each in shown] == [True, False]
    assert ["plain: 15.7 samples/s" in each for each in shown] == [False, True]
    assert tui_panels._gain(before, 140) == " (+56 % over plain)"
    assert tui_panels._gain(after, 140) == " (+20 % over plain)"


def test_follow_prints_log_and_returns_value(tmp_path):
    out = io.StringIO()
    value = with_lines(
        lambda: stream.search(tmp_path / "log", Control(), 0.0),
        tmp_path / "log",
        Control(),
        LinePrinter(out, False),
    )
    assert value == "done"
    assert "   9  confirm" in out.getvalue()


def test_follow_raises_error_of_search(tmp_path):
    def search():
        with EventLog(tmp_path / "log") as log:
            log.write(Note(text="said before"))
        raise ZeroDivisionError

    out = io.StringIO()
    with pytest.raises(ZeroDivisionError):
        with_lines(search, tmp_path / "log", Control(), LinePrinter(out, False))
    assert "said before" in out.getvalue()


def test_control_first_signal_asks_second_raises():
    control = Control()
    control.begin()
    before = signal.getsignal(signal.SIGINT)
    with control.catch_signals():
        signal.raise_signal(signal.SIGTERM)
        assert (control.stopping, control.interrupted, control.exit_code) == (True, True, 143)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert control.exit_code == 143
    assert signal.getsignal(signal.SIGINT) is before


def test_control_keeps_requests_and_stop_overrides_pause():
    control = Control()
    control.pause()
    assert control.paused
    control.stop()
    assert control.stopping
    assert not control.paused  # a paused search must see the stop
    assert not control.interrupted
    control.kill(3)
    assert (control.take_kills(), control.take_kills()) == ([3], [])
    with_signals = threading.Thread(target=lambda: control.catch_signals().__enter__())
    with_signals.start()
    with_signals.join()


def test_printer_reports_paused_and_ended_trials():
    out = printed(
        [
            TrialStarted(number=1, summary="fsdp"),
            Paused(),
            Resumed(),
            TrialCancelled(number=1, reason="you ended it"),
        ]
    )
    assert "paused: running trials go on" in out
    assert "resumed" in out
    assert "fsdp – you ended it" in out


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (0.5, "0.500"), (18.94, "18.9"), (15, "15.0"), (1240.4, "1,240")]
)
def test_rate_is_shown_with_three_digits_and_unit(value, shown):
    assert formatting.rate(value) == shown


@pytest.mark.parametrize(
    ("fraction", "shown"), [(0, "░░░░"), (0.5, "██░░"), (1, "████"), (3, "████"), (0.3, "█▏░░"), (-1, "░░░░")]
)
def test_bars_have_equal_width(fraction, shown):
    assert formatting.bar(fraction, 4) == shown


def test_printer_shows_the_phase_before_the_first_trial():
    out, progress = io.StringIO(), Progress()
    printer = LinePrinter(out, color=False, progress=progress)
    progress.phase("recording one training step")
    printer.tick(0.5)
    progress.phase("scoring settings")
    printer.tick(3.0)
    first, second = out.getvalue().splitlines()
    assert first.startswith("recording one training step · ")
    assert second == "scoring settings"


def test_interrupted_search_looks_interrupted():
    events = [each for each in stream.all_events() if each.event != "search_finished"]
    view = fold([*events, SearchFinished(status="interrupted", out="tuned.yaml", best_number=4)])
    lines = summary_lines(view, go_on="memtune search gpt.py --resume")
    assert lines[0] == (
        "◐ interrupted after 9 of 10 trials and 1 repeat, not confirmed in a fresh process: tuned.yaml is the"
        " best so far"
    )
    assert "  go on      memtune search gpt.py --resume" in lines
    assert summary_lines(view, pictures="memtune report s")[-1] == "  pictures   memtune report s"
    nothing = fold([SearchFinished(status="interrupted", message="stopped by you; nothing fitted yet")])
    assert summary_lines(nothing, go_on="again")[-1] == "  go on      again"
