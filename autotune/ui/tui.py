"""The interactive display of a search.

It reads the event log four times a second and writes only requests to `Control`.

The search runs in a thread, the display in the main thread; a search without a display runs the same way.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Input, Static

from memtune.autotune.search import Control, LogTail
from memtune.autotune.ui import formatting, tui_panels, tui_panels as tui_details
from memtune.autotune.ui.line_printer import with_lines
from memtune.autotune.ui.machine_line import MachineLine
from memtune.autotune.ui.tui_panels import DIM, NARROW
from memtune.autotune.ui.view import STATUS_TEXT, SearchView, TrialView
from memtune.progress import Progress, reported_to

T = TypeVar("T")
_UNWIND_S = 5.0
"""Seconds that a search gets to end after Ctrl-C; a native call is not interrupted."""
REDRAW_S = 0.25
_COLUMNS = (("#", 3), ("samples/s", 13), ("batch", 5), ("step", 8), ("peak", 8))
_WIDE_COLUMNS = (("#", 3), ("samples/s", 13), ("batch", 5), ("step", 8), ("predicted", 9), ("peak", 17))
_NARROW_COLUMNS = (("#", 3), ("samples/s", 13), ("batch", 5), ("peak", 8))
_WIDE = 140
_LEAST_SCATTER, _SCATTER_SHARE = 36, 0.36
_PEAK_BAR = 8
_ORDERS = ("number", "samples/s", "peak")
HELP = """\
p        pause: running trials go on, no new one starts; p again resumes
s        stop: end the running trials, keep the best so far and write it
k, up    move up in the trials      j, down  move down
enter    open the trial under the cursor; esc, q or enter closes it
o        order by number, samples/s or peak
/        show only trials whose text contains a word; esc shows all
space    mark the trial under the cursor; c compares it with another
y        copy the command that runs the trial under the cursor
x        end the trial under the cursor, when it runs
n        the settings that were not run, in groups of one reason
g        trials or graph, where the screen is too narrow for both
q        the same as s, after a question
ctrl+c   stop with the best so far, exit code 130; twice: at once

★ best so far   ◆ baseline: what the best has to beat   ● trial   ┊ limit   · none is both faster and smaller

micro-batch      samples of one forward and backward on one rank; 4×2: two of four samples
recompute        run part of forward again in backward instead of keeping its tensors
offload          keep tensors in host memory or on SSD while they are not needed
optimizer state  the numbers that Adam keeps for each weight
peak             the largest number of bytes in use at once
limit            the device memory that each rank may use
plain            your own setting, unchanged
pruned           not run: even the low end of the predicted peak exceeds the limit
refused          not run: a technique does not work with this model, machine or setting
repeat           the best settings again, in alternation, to tell a gain from noise
audit            a pruned setting that is run anyway, to check the predictions
confirm          the best once more in a fresh process"""


class Page(ModalScreen[None]):
    """Scrollable text over the display; redrawn while the trial that it shows changes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter,question_mark", "dismiss", show=False),
        Binding("j,down", "scroll(1)", show=False),
        Binding("k,up", "scroll(-1)", show=False),
    ]

    def __init__(self, heading: str, draw: Callable[[int], Text]) -> None:
        super().__init__()
        self._heading, self._draw = heading, draw

    def compose(self) -> ComposeResult:
        """Compose a box with the text."""
        with VerticalScroll(id="page") as box:
            box.border_title, box.border_subtitle = self._heading, "esc closes · j k scroll"
            yield Static(id="page-text")

    def on_mount(self) -> None:
        """Draw, and again once a second."""
        self.redraw()
        self.set_interval(1.0, self.redraw)

    def on_resize(self) -> None:
        """Draw for the new width."""
        self.redraw()

    def redraw(self) -> None:
        """Draw the text for the current width."""
        self.query_one("#page-text", Static).update(self._draw(self.size.width - 10))

    def action_scroll(self, lines: int) -> None:
        """Scroll by `lines`."""
        self.query_one("#page", VerticalScroll).scroll_relative(y=lines, animate=False)


class Question(ModalScreen[bool]):
    """A yes-or-no question."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y,enter", "answer(True)", show=False),
        Binding("n,escape,q", "answer(False)", show=False),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """Compose a box with the question."""
        yield Static(
            Text.assemble(self._question, ("   y", "bold"), "es  ", ("n", "bold"), "o"), id="question"
        )

    def action_answer(self, answer: bool) -> None:
        """Close with the answer."""
        self.dismiss(answer)


class SearchApp(App[None]):
    """The display. It ends when the search has finished, or at once if there is no search to control.

    Args:
        log_path: The event log.
        control: Requests to the search; None shows a log without a running search.
        over: Returns whether the search function has returned; the display then draws once more and ends.
        progress: Of phases without events: before the first trial and after the last.
        is_alive: Returns whether a search works on the study; None if it is this process.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; background: $background; }
    #header { height: auto; padding: 0 1; }
    #running { height: auto; margin: 0 1; border-top: solid $panel-lighten-2; border-bottom: solid $panel-lighten-2; }
    #body { height: 1fr; }
    #table { width: 1fr; height: 100%; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; background: $background; }
    #table:focus { background-tint: $foreground 0%; }
    #table > .datatable--header { background: $background; color: $text-muted; text-style: none; }
    #scatter { width: 39; height: 100%; padding: 0 1; }
    #selected { height: 2; padding: 0 1; }
    #machine { height: 1; padding: 0 1; color: $text-muted; }
    #filter { display: none; height: 1; border: none; padding: 0 1; }
    #note { height: 1; padding: 0 1; color: $text-muted; }
    #keys { height: 1; padding: 0 1; background: $panel; }
    .narrow #scatter { display: none; }
    .narrow.graph #scatter { display: block; width: 1fr; }
    .narrow.graph #table { display: none; }
    Page, Question { align: center middle; background: $background 60%; }
    #page { scrollbar-size-vertical: 1; width: 96%; height: 92%; border: round $primary; background: $surface; padding: 0 1; }
    #question { width: auto; height: auto; border: round $warning; background: $surface; padding: 1 3; }
    """  # noqa: E501
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", show=False),
        Binding("s", "stop", show=False),
        Binding("q", "ask_quit", show=False),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("j", "move(1)", show=False),
        Binding("k", "move(-1)", show=False),
        Binding("x", "end_trial", show=False),
        Binding("g", "graph", show=False),
        Binding("n", "not_run", show=False),
        Binding("o", "order", show=False),
        Binding("slash", "filter", show=False),
        Binding("escape", "unfilter", show=False),
        Binding("space", "mark", show=False),
        Binding("c", "compare", show=False),
        Binding("y", "copy", show=False),
        Binding("question_mark", "help", show=False),
    ]

    def __init__(
        self,
        log_path: str | Path,
        control: Control | None = None,
        over: Callable[[], bool] | None = None,
        progress: Progress | None = None,
        is_alive: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__()
        self._is_alive = is_alive
        self._progress = progress
        self.view = SearchView(
            heading=progress.heading if progress is not None else "",
            writer=os.getpid() if over is not None else 0,
        )
        self._tail, self._control, self._over = LogTail(log_path), control, over
        self._drawn: tuple[object, ...] = ()
        self._parts: dict[str, Text] = {}
        self._rows: dict[str, tuple[str, ...]] = {}
        self._layout: tuple[object, ...] = ()
        self._summary_width = 0
        self._order, self._word, self._marked = _ORDERS[0], "", -1
        self._message = ""
        self._machine = MachineLine()
        self.forced = False
        """True if a second Ctrl-C ended it before the search did."""

    def compose(self) -> ComposeResult:
        """Compose the parts of the screen from top to bottom."""
        yield Static(id="header")
        yield Static(id="running")
        with Horizontal(id="body"):
            yield DataTable[Text](id="table", cursor_type="row", zebra_stripes=False, cell_padding=1)
            yield Static(id="scatter")
        yield Static(id="selected")
        yield Input(placeholder="show only trials with this word", id="filter")
        yield Static(id="machine")
        yield Static(id="note")
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Draw at once and then four times a second."""
        self.query_one("#table", DataTable).focus()
        if self._control is not None or self._over is not None:  # a watched search may run elsewhere
            self._machine.start()
        self.tick()
        self.set_interval(REDRAW_S, self.tick)

    def on_resize(self, event: events.Resize) -> None:
        """Choose the form for the new width."""
        self.screen_stack[0].set_class(event.size.width < NARROW, "narrow")
        for graph in self.screen_stack[0].query("#scatter"):  # none while the screen is being made
            graph.styles.width = self._scatter_width() if event.size.width >= NARROW else "1fr"
        self._drawn = ()
        self.call_after_refresh(self.tick)

    def tick(self) -> None:
        """Read new events of the log and draw the changes."""
        if not self.is_running:  # the timer also fires while the screens are removed
            return
        over = self._over is not None and self._over()
        # Before the events are read: a search writes its last one while it is alive.
        is_gone = self._is_alive is not None and not self._is_alive()
        for event in self._tail.poll():
            self.view.apply(event)
        if is_gone and self.view.finished is None and not self.view.abandoned:
            self.view.abandon()
        stopping = self._control is not None and self._control.stopping
        state = (self.view.changes, int(self.view.now_s()), stopping, self.size, self._machine.text)
        if state != self._drawn:
            self._drawn = state
            self._draw(stopping)
        if over:
            self.exit()

    def _draw(self, stopping: bool) -> None:
        width = self.size.width - 2
        self._put("header", tui_panels.header(self.view, self.view.now_s(), width, stopping))
        progress = self._progress
        phase = f"{progress.text}{progress.detail()}" if progress is not None and progress.text else ""
        self._put("running", tui_panels.running(self.view, width, phase=phase))
        graph_size = self.screen_stack[0].query_one("#scatter", Static).size
        self._put("scatter", tui_panels.scatter(self.view, graph_size.width, graph_size.height))
        self._draw_table(self.screen_stack[0].query_one("#table", DataTable))
        self._put("selected", tui_panels.selected(self.view, self._selected(), width))
        self._put("machine", Text(formatting.clip(self._machine.text, width), DIM, no_wrap=True))
        shown = [each for each in self.view.notes if each.level != "detail"]
        text, is_warning = (shown[-1].text, shown[-1].level == "warning") if shown else ("", False)
        if self.view.finished is not None and self.view.finished.out:
            text, is_warning = f"the config is in {formatting.short_path(self.view.finished.out)}", False
        line = Text(self._message or text, "yellow" if is_warning and not self._message else "", no_wrap=True)
        line.truncate(width, overflow="ellipsis")
        self._put("note", line)
        self._put("keys", self._keys())

    def _put(self, part: str, drawn: Text) -> None:
        # Most ticks change one line of one part: what is equal is not sent again, and the layout only moves
        # with the lines.
        before = self._parts.get(part)
        if before != drawn:
            self._parts[part] = drawn
            moved = before is None or before.plain.count("\n") != drawn.plain.count("\n")
            self.screen_stack[0].query_one(f"#{part}", Static).update(drawn, layout=moved)

    def _keys(self) -> Text:
        narrow = self.size.width < NARROW
        pause = "resume" if self._control and self._control.paused else "pause"
        keys = (
            [("p", pause), ("s", "stop" if narrow else "stop, keep best")]
            if self._control
            else [("q", "quit")]
        )
        keys += (
            [("enter", "open"), ("g", "graph")]
            if narrow
            else [
                ("enter", "open"),
                ("o", f"by {self._order}"),
                ("/", "filter"),
                ("c", "compare"),
                ("n", "not run"),
            ]
        )
        line = Text(no_wrap=True)
        for key, word in [*keys, ("?", "help")]:
            line.append(key, "bold").append(f" {word}   ", DIM)
        study = f"study {self.view.started.study}" if self.view.started else ""
        room = self.size.width - 2 - line.cell_len - len(study)
        return line.append(" " * room + study, DIM) if room > 0 else line

    def _draw_table(self, table: DataTable[Text]) -> None:
        narrow = self.size.width < NARROW
        wide = self.size.width >= _WIDE
        columns = _NARROW_COLUMNS if narrow else _WIDE_COLUMNS if wide else _COLUMNS
        used = sum(width + 2 for _, width in columns) + 3  # a space on each side of a cell, and the scrollbar
        summary_width = max(8, self.size.width - used - (0 if narrow else self._scatter_width()))
        trials = self._listed()
        layout = (summary_width, columns, self._order, self._word, self._ranks(trials))
        if layout != self._layout:
            self._layout, self._summary_width, self._rows = layout, summary_width, {}
            table.clear(columns=True)
            for name, width in columns:
                table.add_column(Text(name, justify="right"), width=width, key=name)
            table.add_column("settings", width=summary_width, key="settings")
        follow = table.cursor_row >= table.row_count - 1
        for key, row in self._table_rows(columns, trials):
            cells = tuple(cell.plain for cell in row)
            if key not in self._rows:
                table.add_row(*row, key=key)
            elif self._rows[key] != cells:
                for (name, _), cell in zip([*columns, ("settings", 0)], row, strict=True):
                    table.update_cell(key, name, cell)
            self._rows[key] = cells
        if follow and table.row_count:
            table.move_cursor(row=table.row_count - 1)

    def _scatter_width(self) -> int:
        return max(_LEAST_SCATTER, int(self.size.width * _SCATTER_SHARE))

    def _listed(self) -> list[TrialView]:
        """Return the trials that the filter lets through, in order."""
        trials = [
            each
            for each in self.view.trials.values()
            if self._word.lower() in f"{each.number} {each.label} {each.status} {each.sentence}".lower()
        ]
        if self._order == "samples/s":
            trials.sort(key=lambda each: -((each.result and each.result.samples_per_s) or 0.0))
        elif self._order == "peak":
            trials.sort(key=lambda each: (each.result and each.result.peak_allocated_bytes) or 1 << 62)
        return trials

    def _ranks(self, trials: list[TrialView]) -> tuple[int, ...]:
        """Return the numbers whose order a change of the table depends on; by number rows are only added."""
        return () if self._order == "number" else tuple(each.number for each in trials)

    def _table_rows(
        self, columns: tuple[tuple[str, int], ...], trials: list[TrialView]
    ) -> list[tuple[str, list[Text]]]:
        rows = []
        for trial in trials:
            cells = _cells(trial, trial.number == self.view.best_number, self.view.budget_bytes)
            mark = "▸ " if trial.number == self._marked else ""
            settings = Text(f"{mark}{trial.label}  " if mark or trial.label else "", "cyan")
            settings.append(self.view.setting(trial), DIM)
            settings.truncate(self._summary_width, overflow="ellipsis")
            rows.append((f"trial-{trial.number}", [*(cells[name] for name, _ in columns), settings]))
        return rows

    def _selected(self) -> TrialView | None:
        table = self.screen_stack[0].query_one("#table", DataTable)
        if not table.row_count:
            return None
        key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value or ""
        return self.view.trials.get(int(key.removeprefix("trial-")))

    def on_data_table_row_selected(self) -> None:
        """Open the trial under the cursor."""
        trial = self._selected()
        if trial is not None:
            number = trial.number
            draw = lambda width: tui_details.details(self.view, self.view.trials[number], width)  # noqa: E731
            self.push_screen(Page(f"trial {number}", draw))

    def on_data_table_row_highlighted(self) -> None:
        """Show the whole setting of the trial under the cursor."""
        if self.is_running:
            self._put("selected", tui_panels.selected(self.view, self._selected(), self.size.width - 2))

    def action_move(self, rows: int) -> None:
        """Move the cursor in the table."""
        table = self.screen_stack[0].query_one("#table", DataTable)
        if table.row_count:
            table.move_cursor(row=min(max(0, table.cursor_row + rows), table.row_count - 1))

    def action_pause(self) -> None:
        """Pause or resume the search."""
        if self._control is not None:
            self._control.pause(not self._control.paused)
            self._drawn = ()

    def action_stop(self) -> None:
        """End the search with the best so far."""
        if self._control is not None:
            self._control.stop()

    def action_ask_quit(self) -> None:
        """Stop after a question; without a search behind the log, just end."""
        if self._control is None:
            self.exit()
        else:
            self.push_screen(
                Question("Stop the search and keep the best so far?"),
                lambda yes: self.action_stop() if yes else None,
            )

    def action_interrupt(self) -> None:
        """Request an orderly stop on the first Ctrl-C, end at once on the second or before any trial."""
        if self._control is None or not self._control.interrupt():
            self.forced = self._control is not None
            self.exit()

    def action_end_trial(self) -> None:
        """End the trial under the cursor if it runs."""
        trial = self._selected()
        if self._control is not None and trial is not None and trial.status == "running":
            self._control.kill(trial.number)

    def action_graph(self) -> None:
        """On a narrow screen, toggle between graph and table."""
        self.screen_stack[0].toggle_class("graph")
        self._drawn = ()
        self.call_after_refresh(self.tick)

    def action_order(self) -> None:
        """Order the trials by the next of number, samples/s and peak."""
        self._order = _ORDERS[(_ORDERS.index(self._order) + 1) % len(_ORDERS)]
        self._redraw()

    def action_filter(self) -> None:
        """Ask for a word."""
        field = self.screen_stack[0].query_one("#filter", Input)
        field.styles.display = "block"
        field.focus()

    def action_unfilter(self) -> None:
        """Show all trials."""
        self.screen_stack[0].query_one("#filter", Input).value = ""
        self._filtered("")

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show the trials with the word so far."""
        self._word = event.value
        self._redraw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Return to the trials."""
        self._filtered(event.value)

    def _filtered(self, word: str) -> None:
        field = self.screen_stack[0].query_one("#filter", Input)
        field.styles.display = "block" if word else "none"
        self.screen_stack[0].query_one("#table", DataTable).focus()
        self._word, self._message = word, ""
        self._redraw()

    def action_mark(self) -> None:
        """Mark the trial under the cursor for a comparison."""
        trial = self._selected()
        if trial is not None:
            self._marked = -1 if trial.number == self._marked else trial.number
            self._layout = ()
            self._redraw()

    def action_compare(self) -> None:
        """Compare the marked trial, else the best one, with the one under the cursor."""
        one, two = self.view.trials.get(self._marked) or self.view.best, self._selected()
        if one is None or two is None or one.number == two.number:
            self._message = "space marks a trial, c on another one compares the two"
            self._redraw()
            return
        numbers = (one.number, two.number)
        self.push_screen(
            Page(
                f"trials {numbers[0]} and {numbers[1]}",
                lambda width: tui_details.comparison([self.view.trials[each] for each in numbers], width),
            )
        )

    def action_copy(self) -> None:
        """Copy the command that runs the trial under the cursor."""
        trial, started = self._selected(), self.view.started
        if trial is not None:
            model = started.workload if started else "model.py"
            self.copy_to_clipboard(tui_details.command_of(trial, model))
            self._message = f"copied the command that runs trial {trial.number}"
            self._redraw()

    def _redraw(self) -> None:
        self._drawn = ()
        self.tick()

    def on_unmount(self) -> None:
        """Stop reading the machine."""
        self._machine.stop()

    def action_not_run(self) -> None:
        """List what was not run."""
        self.push_screen(Page("not run", lambda width: tui_details.not_run(self.view, width)))

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Page("help", lambda width: Text(HELP)))


def _cells(trial: TrialView, best: bool, budget_bytes: int | None) -> dict[str, Text]:
    result = trial.result
    peak = result.peak_allocated_bytes if result else trial.device_bytes
    if trial.status == "ok":
        word = ("★ " if best else "") + formatting.rate(result.samples_per_s if result else None)
    else:
        word = formatting.clip(trial.stage if trial.status == "running" else STATUS_TEXT[trial.status], 13)
    style = "bold green" if best else ""
    return {
        "#": Text(str(trial.number), style or DIM, justify="right"),
        "samples/s": Text(
            word,
            style or ("" if trial.status == "ok" else formatting.STATUS_COLOR[trial.status]),
            justify="right",
        ),
        "step": Text(formatting.maybe_seconds(result.step_s if result else None), style, justify="right"),
        "predicted": Text(formatting.maybe_seconds(trial.predicted_step_s), DIM, justify="right"),
        "batch": Text(trial.micro_batches, style or DIM, justify="right"),
        "peak": _peak(peak, budget_bytes, style),
    }


def _peak(peak: int | None, budget_bytes: int | None, style: str) -> Text:
    """Return the peak, and its bar against the limit at the left, which a narrow column cuts off."""
    text = Text(f"{formatting.maybe_bytes(peak):>8}", style)
    if peak is None or not budget_bytes:
        return text
    share = peak / budget_bytes
    return text.append(" ").append(formatting.bar(share, _PEAK_BAR), "green" if share <= 1 else "red")


def run_tui(
    log_path: str | Path,
    control: Control | None = None,
    over: Callable[[], bool] | None = None,
    progress: Progress | None = None,
    is_alive: Callable[[], bool] | None = None,
) -> bool:
    """Show the log in the terminal until the search is over; return whether a second Ctrl-C ended it earlier.

    Call it from the main thread; the terminal is restored in every case.
    """
    app = SearchApp(log_path, control, over, progress, is_alive)
    app.run()
    return app.forced


def _interrupt(thread: threading.Thread) -> None:
    """Raise KeyboardInterrupt in `thread` and join it."""
    # Its native threads must be joined: the process would abort otherwise.
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
    )
    thread.join(_UNWIND_S)


def with_tui(
    search: Callable[[], T], log_path: str | Path, control: Control, progress: Progress | None = None
) -> T:
    """Run `search` in a thread and its display in this one; return or raise as `search` does.

    The first Ctrl-C or SIGTERM asks `control` for an orderly end, the second raises KeyboardInterrupt in the
    search's thread and here.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with reported_to(progress or Progress()):
                results.append(search())
        except BaseException as error:  # carried to the main thread, SystemExit of user code included
            errors.append(error)

    thread = threading.Thread(target=run, name="memtune-search", daemon=True)
    with control.catch_signals():
        thread.start()
        # A search that is refused at once (bad file, study in use) should not flash a display.
        thread.join(timeout=REDRAW_S)
        if thread.is_alive() and run_tui(
            log_path, control, over=lambda: not thread.is_alive(), progress=progress
        ):
            _interrupt(thread)
            raise KeyboardInterrupt
        if thread.is_alive():
            # The display broke or lost its terminal; hours of search must not go with it.
            with_lines(thread.join, log_path, control)
    if errors:
        raise errors[0]
    return results[0]
