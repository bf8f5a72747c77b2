"""The interactive display of a search.

It reads the event log four times a second and writes only requests to `Control`.

The search runs in a thread, the display in the main thread; a search without a display runs the same way.
"""

from __future__ import annotations

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
from textual.widgets import DataTable, Static

from memtune.autotune.search import Control, LogTail
from memtune.autotune.ui import formatting, tui_panels
from memtune.autotune.ui import tui_panels as tui_details
from memtune.autotune.ui.line_printer import with_lines
from memtune.autotune.ui.tui_panels import DIM, NARROW
from memtune.autotune.ui.view import STATUS_TEXT, SearchView, TrialView

T = TypeVar("T")
REDRAW_S = 0.25
_COLUMNS = (("#", 3), ("samples/s", 13), ("step", 8), ("peak", 8))
_NARROW_COLUMNS = (("#", 3), ("samples/s", 13), ("peak", 8))
_SCATTER_WIDTH = 36
HELP = """\
p        pause: running trials go on, no new one starts; p again resumes
s        stop: end the running trials, keep the best so far and write it
k, up    move up in the trials      j, down  move down
enter    open the trial under the cursor; esc, q or enter closes it
x        end the trial under the cursor, when it runs
n        the candidates that were not run, and why
g        trials or graph, where the screen is too narrow for both
q        the same as s, after a question
ctrl+c   stop with the best so far, exit code 130; twice: at once

★ best so far   ◆ baseline: what the best has to beat   ● trial   ┊ limit
pruned: even the low end of the predicted peak exceeds the limit"""


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
        self.query_one("#page-text", Static).update(self._draw(self.size.width - 8))

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
        Binding("question_mark", "help", show=False),
    ]

    def __init__(
        self, log_path: str | Path, control: Control | None = None, over: Callable[[], bool] | None = None
    ) -> None:
        super().__init__()
        self.view = SearchView()
        self._tail, self._control, self._over = LogTail(log_path), control, over
        self._drawn: tuple[object, ...] = ()
        self._parts: dict[str, Text] = {}
        self._rows: dict[str, tuple[str, ...]] = {}
        self._summary_width = 0
        self.forced = False
        """True if a second Ctrl-C ended it before the search did."""

    def compose(self) -> ComposeResult:
        """Compose the parts of the screen from top to bottom."""
        yield Static(id="header")
        yield Static(id="running")
        with Horizontal(id="body"):
            yield DataTable[Text](id="table", cursor_type="row", zebra_stripes=False, cell_padding=1)
            yield Static(id="scatter")
        yield Static(id="note")
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Draw at once and then four times a second."""
        self.query_one("#table", DataTable).focus()
        self.tick()
        self.set_interval(REDRAW_S, self.tick)

    def on_resize(self, event: events.Resize) -> None:
        """Choose the form for the new width."""
        self.screen_stack[0].set_class(event.size.width < NARROW, "narrow")
        self._drawn = ()
        self.call_after_refresh(self.tick)

    def tick(self) -> None:
        """Read new events of the log and draw the changes."""
        over = self._over is not None and self._over()
        for event in self._tail.poll():
            self.view.apply(event)
        stopping = self._control is not None and self._control.stopping
        state = (self.view.changes, int(self.view.now_s()), stopping, self.size)
        if state != self._drawn:
            self._drawn = state
            self._draw(stopping)
        if over:
            self.exit()

    def _draw(self, stopping: bool) -> None:
        width = self.size.width - 2
        self._put("header", tui_panels.header(self.view, self.view.now_s(), width, stopping))
        self._put("running", tui_panels.running(self.view, width))
        graph_size = self.screen_stack[0].query_one("#scatter", Static).size
        self._put("scatter", tui_panels.scatter(self.view, graph_size.width, graph_size.height))
        note = self.view.notes[-1] if self.view.notes else None
        line = Text(
            note.text if note else "", "yellow" if note and note.level == "warning" else "", no_wrap=True
        )
        line.truncate(width, overflow="ellipsis")
        self._put("note", line)
        self._put("keys", self._keys())
        self._draw_table(self.screen_stack[0].query_one("#table", DataTable))

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
            else [("j k", "move"), ("enter", "open"), ("n", "not run")]
        )
        line = Text(no_wrap=True)
        for key, word in [*keys, ("?", "help")]:
            line.append(key, "bold").append(f" {word}   ", DIM)
        study = f"study {self.view.started.study}" if self.view.started else ""
        room = self.size.width - 2 - line.cell_len - len(study)
        return line.append(" " * room + study, DIM) if room > 0 else line

    def _draw_table(self, table: DataTable[Text]) -> None:
        narrow = self.size.width < NARROW
        columns = _NARROW_COLUMNS if narrow else _COLUMNS
        used = sum(width + 2 for _, width in columns) + 3  # a space on each side of a cell, and the scrollbar
        summary_width = max(8, self.size.width - used - (0 if narrow else _SCATTER_WIDTH))
        if summary_width != self._summary_width:
            self._summary_width, self._rows = summary_width, {}
            table.clear(columns=True)
            for name, width in columns:
                table.add_column(Text(name, justify="right"), width=width, key=name)
            table.add_column("settings", width=summary_width, key="settings")
        follow = table.cursor_row >= table.row_count - 1
        for key, row in self._table_rows(columns):
            cells = tuple(cell.plain for cell in row)
            if key not in self._rows:
                table.add_row(*row, key=key)
            elif self._rows[key] != cells:
                for (name, _), cell in zip([*columns, ("settings", 0)], row, strict=True):
                    table.update_cell(key, name, cell)
            self._rows[key] = cells
        if follow and table.row_count:
            table.move_cursor(row=table.row_count - 1)

    def _table_rows(self, columns: tuple[tuple[str, int], ...]) -> list[tuple[str, list[Text]]]:
        rows = []
        for trial in self.view.trials.values():
            cells = _cells(trial, best=trial.number == self.view.best_number)
            settings = Text(f"{trial.label}  " if trial.label else "", "cyan").append(trial.summary, DIM)
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
        """Request an orderly stop on the first Ctrl-C, after which the caller exits with 130.

        End at once on the second.
        """
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

    def action_not_run(self) -> None:
        """List the pruned candidates."""
        self.push_screen(Page("not run", lambda width: tui_details.not_run(self.view, width)))

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Page("help", lambda width: Text(HELP)))


def _cells(trial: TrialView, best: bool) -> dict[str, Text]:
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
        "peak": Text(formatting.maybe_bytes(peak), style, justify="right"),
    }


def run_tui(
    log_path: str | Path, control: Control | None = None, over: Callable[[], bool] | None = None
) -> bool:
    """Show the log in the terminal until the search is over; return whether a second Ctrl-C ended it earlier.

    Call it from the main thread; the terminal is restored in every case.
    """
    app = SearchApp(log_path, control, over)
    app.run()
    return app.forced


def with_tui(search: Callable[[], T], log_path: str | Path, control: Control) -> T:
    """Run `search` in a thread and its display in this one; return or raise as `search` does.

    The first Ctrl-C or SIGTERM asks `control` for an orderly end, the second raises KeyboardInterrupt here at
    once: the search's thread then ends with the process.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(search())
        except BaseException as error:  # carried to the main thread, SystemExit of user code included
            errors.append(error)

    thread = threading.Thread(target=run, name="memtune-search", daemon=True)
    with control.catch_signals():
        thread.start()
        # A search that is refused at once (bad file, study in use) should not flash a display.
        thread.join(timeout=REDRAW_S)
        if thread.is_alive() and run_tui(log_path, control, over=lambda: not thread.is_alive()):
            raise KeyboardInterrupt
        if thread.is_alive():
            # The display broke or lost its terminal; hours of search must not go with it.
            with_lines(thread.join, log_path, control)
    if errors:
        raise errors[0]
    return results[0]
