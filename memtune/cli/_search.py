"""The commands `memtune search` and `memtune plan`."""

from __future__ import annotations

import contextlib
import gc
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from memtune.cli import _options
from memtune.cli._crash_report import report_crashes
from memtune.cli._output import emit, results, say
from memtune.errors import Interrupted
from memtune.garbage import no_collections
from memtune.progress import Progress, columns, shown

if TYPE_CHECKING:
    from memtune.autotune.search import Control, SearchOutcome, StudyFolder
    from memtune.autotune.space import SearchOptions


_FILE_COLUMNS = 160
"""Width of a table that is written to a file or a pipe."""


def search(given: dict[str, Any]) -> int:
    """Run the search with its screen, or with one line per trial; return its exit code."""
    # The model and the device first: a wrong path is the more likely mistake than a file that exists.
    common = _options.common(given, for_trials=not given["dry_run"])
    only = _options.search_only(given)
    quiet, screen = given["quiet"], _wants_screen(given)
    progress = Progress(_options.header(given, common))
    if not quiet:
        say(f"memtune search {progress.heading}")
        progress.phase("loading torch")

    def load() -> tuple[SearchOptions, StudyFolder]:
        with loading():
            from memtune.autotune.search import study_folder
            from memtune.autotune.space import SearchOptions
        options = SearchOptions(**common, **only)
        folder = study_folder(options)
        return replace(options, study=str(folder.path)), folder

    with _showing(progress, quiet):
        options, folder = load()
    from memtune.autotune.search import Control, search as run_search

    control = Control()

    def work() -> SearchOutcome:
        return run_search(options, control, say=progress.phase)

    with report_crashes(given["model"], given["as_json"]), _interruptible(control), results() as stream:
        if quiet or options.dry_run:
            with control.catch_signals(), _showing(progress, quiet):
                outcome = work()
        elif screen:
            from memtune.autotune.ui import with_tui

            outcome = with_tui(work, folder.events, control, progress)
        else:
            from memtune.autotune.ui import LinePrinter, with_lines

            printer = LinePrinter(progress=progress, verbose=given["verbose"])
            outcome = with_lines(work, folder.events, control, printer)
        if given["as_json"]:
            emit(outcome.to_dict(), stream)
        elif options.dry_run:
            for trial in outcome.trials:
                print(f"{trial['role']:<7} {trial['name']:<10} {trial['summary']}", file=stream)
        elif outcome.out is not None:
            print(outcome.out, file=stream)
    if not (quiet or given["as_json"] or options.dry_run) and (outcome.out or outcome.status != "done"):
        _summary(folder, given, outcome.out or "")
    elif not quiet:
        say(outcome.message)
    return outcome.exit_code


@contextlib.contextmanager
def _interruptible(control: Control) -> Iterator[None]:
    """Turn a KeyboardInterrupt inside into one message with the exit code of its signal."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            "stopped at once; --resume goes on." if control.begun else "stopped before the first trial.",
            control.exit_code or 130,
        ) from None


def _resuming(given: dict[str, Any], folder: StudyFolder) -> str:
    """Return the command line that resumes this search."""
    command = ["memtune", *(given["context"].obj or ("search", given["model"]))]
    study = [] if given["study"] is not None else ["--study", folder.name]
    return shlex.join([*command, *study, *([] if given["resume"] else ["--resume"])])


@contextlib.contextmanager
def _showing(progress: Progress, quiet: bool) -> Iterator[None]:
    """Show the phases on stderr, unless only the result is wanted."""
    if quiet:
        yield
        return
    with shown(progress, sys.stderr):
        yield


def _wants_screen(given: dict[str, Any]) -> bool:
    return not (given["no_tui"] or given["as_json"]) and all(
        each.isatty() for each in (sys.stdin, sys.stdout, sys.stderr)
    )


def _summary(folder: StudyFolder, given: dict[str, Any], out: str) -> None:
    from memtune.autotune.search import read_events
    from memtune.autotune.ui import SearchView, summary_lines, use_color

    view = SearchView()
    for event in read_events(folder.events):
        view.apply(event)
    color, why = use_color(sys.stderr), f"memtune explain {os.path.relpath(out)}" if out else ""
    width = columns(sys.stderr) if sys.stderr.isatty() else None
    report = shlex.join(["memtune", "report", given["study"] or folder.name])
    for line in summary_lines(
        view, see_why=why, color=color, go_on=_resuming(given, folder), pictures=report, width=width
    ):
        say(line)


def plan(given: dict[str, Any]) -> int:
    """Print the ranking, or one config's prediction; return 1 if nothing is predicted to fit."""
    common = _options.common(given, for_trials=False)
    if given["config"] is not None:
        _options.config_file(given["config"])
    only = _options.plan_only(given)
    _options.check_predictable(given["gpu_type"], common["device"])
    from memtune.executors import probing

    progress = Progress(_options.header(given, common))
    say(f"memtune plan {progress.heading}")
    progress.phase("loading torch")
    # The child process that probes the workload imports torch while this process does the same.
    with (
        report_crashes(given["model"], given["as_json"]),
        results() as stream,
        probing(given["model"]) as begun,
    ):
        with loading(), shown(progress, sys.stderr):
            from memtune.autotune.search import plan as make_plan
            from memtune.autotune.space import PlanOptions

        if given["config"] is not None:
            _options.config(given["config"])  # a typo ends the command before the workload is recorded
        options = PlanOptions(**common, **only)
        with shown(progress, sys.stderr):
            report = make_plan(options, say=progress.phase, begun=begun)
        if given["as_json"]:
            emit(report.to_dict(), stream)
        else:
            from rich.console import Console

            from memtune.autotune.ui import render

            command = ["memtune", *(given["context"].obj or ("plan", given["model"]))]
            drawn = render(report, command=command, why=given["why"], verbose=given["verbose"])
            Console(file=stream, width=None if stream.isatty() else _FILE_COLUMNS, highlight=False).print(
                drawn
            )
    return 0 if report.feasible else 1


_NEVER_SPIN: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
"""Variables without which threads of numpy and torch spin between the small ops of a search."""


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import modules without garbage collection, and exempt their objects from later collections.

    Imports leave hardly any garbage, but each collection traverses all objects of torch: a quarter of the
    import time. Libraries read `_NEVER_SPIN` while they load, unless the user's environment has other values.
    """
    ours = _NEVER_SPIN.keys() - os.environ.keys()
    os.environ.update({name: _NEVER_SPIN[name] for name in ours})
    try:
        with no_collections():
            yield
            gc.freeze()
    finally:
        for name in ours:
            del os.environ[name]  # trials inherit the environment, and run as training does
