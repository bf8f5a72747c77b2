import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("textual")
pexpect = pytest.importorskip("pexpect")
pyte = pytest.importorskip("pyte")

from support.search import event_stream as stream  # noqa: E402

from memtune.autotune.search.control import Control  # noqa: E402
from memtune.autotune.search.search_events import EventLog, TrialProgress, TrialStarted  # noqa: E402
from memtune.autotune.ui import tui_panels  # noqa: E402
from memtune.autotune.ui.machine_line import gpu_parts, link_bytes, memory_part  # noqa: E402
from memtune.autotune.ui.tui import SearchApp, with_tui  # noqa: E402
from memtune.autotune.ui.view import SearchView  # noqa: E402
from memtune.config import load_config  # noqa: E402

PROGRAM = Path(stream.__file__)
MIB = 2**20
SIZES = [(100, 30), (60, 24)]


def screen_text(app) -> list[str]:
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]


def show(tmp_path, events, size, keys=(), control=None, is_alive=None) -> list[str]:
    """The screen after `keys`, in a headless app over a log of `events`."""
    with EventLog(tmp_path / "log") as log:
        for event in events:
            log.write(event)

    async def drive():
        app = SearchApp(tmp_path / "log", control, is_alive=is_alive)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
            app.tick()
            await pilot.pause()
            return screen_text(app)

    return asyncio.run(drive())


def running_search():
    return [
        *stream.opening(),
        *(event for row in stream.TRIALS[:6] for event in stream.trial_events(row)),
        TrialStarted(number=6, summary="recompute selective · optimizer_cpu"),
        TrialProgress(number=6, stage="step 1/4", device_bytes=300 * MIB),
    ]


@pytest.mark.parametrize("size", SIZES)
def test_screen_shows_counts_best_baselines_and_trials(tmp_path, size):
    lines = show(tmp_path, running_search(), size, control=Control())
    whole = "\n".join(lines)
    assert len(lines) == size[1]
    assert {len(line) for line in lines} == {size[0]}
    assert "examples/gpt.py" in lines[0]
    assert "/ 5:00" in lines[0]
    assert "6/10 done · 1 running · 2 pruned · 3 o" in whole
    assert "#4 18.9 samples/s (+56 %" in whole
    assert "plain: out of memory" in whole
    assert "of predicted peaks 3.1 %, of step times 6.8 %" in whole
    bar = next(line for line in lines if line.startswith(" #6"))
    assert bar.count("█") == (10 if size[0] == 100 else 5)  # 300 of 600 MiB
    assert "step 1/4" in bar
    assert any("★ 18.9" in line and " 571 MiB" in line for line in lines)
    assert ("◆ baseline" in whole) == (size[0] == 100)
    assert ("▄" in bar) == (size[0] == 100)  # bytes of the running trial


def test_screen_shows_the_whole_setting_of_the_trial_under_the_cursor(tmp_path):
    shown = show(tmp_path, stream.all_events(), (80, 30), keys=["k", "k"])
    first = next(index for index, line in enumerate(shown) if line.strip().startswith("#7"))
    text = " ".join(line.strip() for line in shown[first : first + 2])
    assert text.startswith("#7  rank 1: RuntimeError: shapes differ – recomputes one block in 2 in backward")
    assert "divides weights, gradients and optimizer" in text
    assert text.endswith("…")


def test_screen_counts_repeats_separately(tmp_path):
    fewer = [
        each.model_copy(update={"role": "repeat"}) if getattr(each, "number", 0) == 4 else each
        for each in running_search()
    ]
    assert "   5/10 done · 1 repeat · 1 running" in "\n".join(show(tmp_path, fewer, SIZES[0]))


@pytest.mark.parametrize("size", SIZES)
def test_screen_shows_empty_log(tmp_path, size):
    assert "waiting for it to start" in "\n".join(show(tmp_path, [], size))


def test_screen_of_a_search_whose_process_is_gone_shows_no_running_trial(tmp_path):
    alive = "\n".join(show(tmp_path / "alive", running_search(), SIZES[0], is_alive=lambda: True))
    gone = "\n".join(show(tmp_path / "gone", running_search(), SIZES[0], is_alive=lambda: False))
    assert "1 running" in alive
    assert "0 running" in gone
    assert "ended without a result" in gone
    assert "the same command with --resume goes on" in gone


def test_scatter_starts_at_zero_and_shows_numbers_front_and_limit(tmp_path):
    lines = show(tmp_path, running_search(), (60, 26), keys=["g"])
    top = next(line for line in lines if line.startswith(" 18.9 │"))
    baseline = next(line for line in lines if "◆1" in line)
    assert any(line.startswith(" 0.00 │") for line in lines)
    assert "0 B" in lines[-6]
    assert top.index("★4") < top.index("┊")
    assert baseline.index("◆1") < top.index("★4")
    assert "·●3" in baseline  # the front goes on from the baseline to the next trial


def test_screen_orders_filters_and_compares_trials(tmp_path):
    def numbers(keys):
        lines = show(tmp_path / "-".join(keys), running_search(), (100, 30), keys=keys)
        return [line.split()[0] for line in lines[10:17] if line.split() and line.split()[0].isdigit()]

    assert numbers([]) == ["0", "1", "2", "3", "4", "5", "6"]
    assert numbers(["o"])[:3] == ["4", "3", "1"]
    assert numbers(["o", "o"])[:3] == ["1", "3", "4"]
    assert numbers(["slash", "a", "u", "d", "i"]) == ["5"]
    compared = "\n".join(
        show(tmp_path / "compared", running_search(), (100, 30), keys=["k", "k", "space", "k", "c"])
    )
    assert "trials 4 and 3" in compared or "trials 4 and 5" in compared
    assert "predicted" in compared


def test_copied_command_runs_the_settings_of_a_trial(tmp_path):
    view = SearchView()
    for event in running_search():
        view.apply(event)
    command = tui_panels.command_of(view.trials[4], "my model.py")
    assert command.endswith("> trial-4.yaml && memtune trial 'my model.py' --config trial-4.yaml")
    written = subprocess.run(
        ["bash", "-c", command.partition(" && ")[0]], cwd=tmp_path, check=True, capture_output=True
    )
    assert written.returncode == 0
    expected = load_config({"settings": view.trials[4].settings})
    assert load_config(tmp_path / "trial-4.yaml") == expected


def test_gain_within_the_noise_is_not_shown():
    view = SearchView()
    for event in running_search():
        view.apply(event)
    assert "+56 %" in tui_panels.header(view, 1.0, 120).plain
    best = view.trials[4]
    slow = best.result.model_copy(update={"samples_per_s": best.result.samples_per_s / 2})
    view.trials[99] = replace(best, number=99, result=slow)  # a repeat of the best, half as fast
    assert "+56 %" not in tui_panels.header(view, 1.0, 120).plain


def test_machine_line_reads_what_is_there():
    assert (
        memory_part("MemTotal: 2048 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\n") == "host 1.00 MiB/2.00 MiB"
    )
    assert memory_part("") is None
    pcie = "# gpu  rxpci  txpci\n# Idx   MB/s   MB/s\n    0   1288     12\n    1      -      -\n"
    assert list(gpu_parts("97, 40960, 81559, 61\n[N/A], 1, 2, 3\n", pcie)) == [
        "gpu0 97% 40.0 GiB/79.6 GiB PCIe in 1.20 GiB/s out 11.4 MiB/s 61 °C",
        "gpu1 1.00 MiB/2.00 MiB 3 °C",
    ]
    assert list(gpu_parts("[N/A], [N/A], [N/A], [N/A]\n")) == []


def test_machine_line_counts_bytes_of_links():
    interfaces = "Inter-| Receive\n face |bytes packets\n    lo: 1000 4 0\n  eth0: 500 2 0\n"
    disks = " 259 0 nvme0n1 1 0 10 0 1 0 20 0 0 0 0\n 259 1 nvme0n1p1 1 0 10 0 1 0 20 0 0 0 0\n"
    assert link_bytes(interfaces, disks, {"nvme0n1"}) == {
        "network": 1500,
        "drives read": 5120,
        "drives write": 10240,
    }
    assert link_bytes("", "", set()) == {}


def test_trial_view_shows_settings_reason_and_memory(tmp_path):
    opened = "\n".join(show(tmp_path, running_search(), (100, 30), keys=["k", "k", "enter"]))
    assert "trial 4" in opened
    assert "recompute: {kind: every_nth, n: 2}" in opened
    assert "+3.0 %" in opened
    assert "activations" in opened
    reason = "\n".join(show(tmp_path, [], (100, 30), keys=["k", "enter"]))
    assert "aten::addmm asked for 24 MiB" in reason


def test_trial_view_scrolls_to_crash_log(tmp_path):
    events = [*stream.opening(), *stream.trial_events(stream.TRIALS[7])]
    before = "\n".join(show(tmp_path, events, (100, 30), keys=["enter"]))
    after = "\n".join(show(tmp_path, [], (100, 30), keys=["enter", *["j"] * 40]))
    assert "shapes differ" in before
    assert "log line 39" not in before
    assert "log line 39" in after


def test_screen_lists_pruned_candidates_with_reason(tmp_path):
    listed = "\n".join(show(tmp_path, running_search(), (100, 30), keys=["n"]))
    assert "2 candidates cannot fit" in listed
    assert "at least 850 MiB, predicted 900 MiB" in listed
    assert "4 candidates refused" in listed


@pytest.mark.parametrize(
    ("keys", "wish"),
    [
        (["p"], lambda c: c.paused),
        (["p", "p"], lambda c: not c.paused and not c.stopping),
        (["s"], lambda c: c.stopping and not c.interrupted),
        (["q", "n"], lambda c: not c.stopping),
        (["q", "y"], lambda c: c.stopping and not c.interrupted),
        (["x"], lambda c: c.take_kills() == [6]),
        (["k", "x"], lambda c: c.take_kills() == []),
        (["ctrl+c"], lambda c: c.exit_code == 130 and c.stopping),
    ],
)
def test_keys_control_search(tmp_path, keys, wish):
    control = Control()
    show(tmp_path, running_search(), (100, 30), keys, control)
    assert wish(control)


def test_display_that_ends_draws_nothing_more(tmp_path):
    show(tmp_path, running_search(), (100, 30))

    async def drive():
        app = SearchApp(tmp_path / "log")
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.pause()
        # A busy machine runs the timer and messages of the table after the screens are gone.
        app.action_order()
        app.on_data_table_row_highlighted()

    asyncio.run(drive())


class Terminal:
    """A real program on a pseudo-terminal, its screen kept by a terminal emulator."""

    def __init__(self, log: Path, pause_s: float, size=(100, 30)) -> None:
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(size[0]), "LINES": str(size[1])}
        self.screen = pyte.Screen(*size)
        self.bytes = b""
        self._stream = pyte.ByteStream(self.screen)
        args = [str(PROGRAM), "tui", str(log), str(pause_s)]
        self.child = pexpect.spawn(sys.executable, args, dimensions=(size[1], size[0]), env=env)

    def until(self, seen, timeout_s=60.0) -> None:
        """Read until `seen` (a text on the screen, or None for the end of the program)."""
        end_s = time.monotonic() + timeout_s
        while seen is None or not any(seen in line for line in self.screen.display):
            assert time.monotonic() < end_s, "\n".join(self.screen.display)
            try:
                data = self.child.read_nonblocking(65536, 0.2)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert seen is None, self.bytes[-2000:]
                break
            self.bytes += data
            self._stream.feed(data)
        if seen is None:
            self.child.close()

    def assert_restored(self) -> None:
        """The alternate screen, the hidden cursor and the captured mouse are all restored."""
        for on, off in ((b"?1049h", b"?1049l"), (b"?25l", b"?25h"), (b"?1000h", b"?1000l")):
            assert on in self.bytes
            assert self.bytes.rindex(off) > self.bytes.rindex(on)


@pytest.fixture
def terminal(tmp_path):
    started = []

    def start(pause_s):
        started.append(Terminal(tmp_path / "log", pause_s))
        return started[-1]

    yield start
    for each in started:
        each.child.close(force=True)


def test_keys_on_a_real_terminal_pause_open_and_stop(terminal):
    shown = terminal(0.1)
    shown.until("12.1 samples/s")
    shown.child.send("p")
    shown.until("p resume")
    shown.until("paused")
    shown.child.send("\x1b[A")
    shown.child.send("\r")
    shown.until("predicted against measured")
    shown.child.send("\r")
    shown.until("★ best ◆ baseline")  # was behind the page
    shown.child.send("s")
    shown.until(None)
    assert b"result: stopped" in shown.bytes
    assert shown.child.exitstatus == 0
    shown.assert_restored()


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("how", "exit_code"), [("SIGTERM", 143), ("SIGINT", 130), ("ctrl-c", 130)])
def test_signals_stop_search_and_restore_terminal(terminal, how, exit_code):
    shown = terminal(0.1)
    shown.until("12.1 samples/s")
    if how == "ctrl-c":
        shown.child.send("\x03")
    else:
        shown.child.kill(getattr(signal, how))
    shown.until(None)
    assert b"result: stopped" in shown.bytes
    assert shown.child.exitstatus == exit_code
    shown.assert_restored()


def test_display_ends_with_search(terminal):
    shown = terminal(0.02)
    shown.until(None)
    assert b"result: done" in shown.bytes
    shown.assert_restored()


def test_refused_search_shows_no_display(tmp_path):
    def refuse():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        with_tui(refuse, tmp_path / "log", Control())
