"""`memtune search` and `memtune plan`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from memtune.cli import _options
from memtune.cli._tools import emit


def say(text: str) -> None:
    """One line of progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def search(given: dict[str, Any]) -> int:
    """Run the search under the screen, or with one line per trial; returns its exit code."""
    only = _options.search_only(given)
    common = _options.common(given, for_trials=not given["dry_run"])

    from memtune.autotune.control import Control
    from memtune.autotune.options import SearchOptions
    from memtune.autotune.study import search as run_search
    from memtune.autotune.study import study_folder

    options = SearchOptions(**common, **only)
    folder = study_folder(options)
    options = replace(options, study=str(Path(folder.path)))
    control = Control()
    quiet, as_json = given["quiet"], given["as_json"]
    tell = (lambda text: None) if quiet else say
    if options.dry_run:
        outcome = run_search(options, control, say=tell)
        if as_json:
            emit(outcome.to_dict())
        else:
            for trial in outcome.trials:
                print(f"{trial['role']:<7} {trial['name']:<10} {trial['summary']}")
            say(outcome.message)
        return outcome.exit_code
    work = lambda: run_search(options, control, say=tell)  # noqa: E731
    if quiet:
        with control.catch_signals():
            outcome = work()
    elif _wants_screen(given):
        from memtune.autotune.tui import with_tui

        outcome = with_tui(work, folder.events, control)
    else:
        from memtune.autotune.lines import with_lines

        outcome = with_lines(work, folder.events, control)
    if as_json:
        emit(outcome.to_dict())
    elif outcome.out is not None:
        if not quiet:
            _summary(folder.events, outcome.out)
        print(outcome.out)
    else:
        say(outcome.message)
    return outcome.exit_code


def _wants_screen(given: dict[str, Any]) -> bool:
    return not given["no_tui"] and not given["as_json"] and sys.stdout.isatty() and sys.stdin.isatty()


def _summary(log: Path, out: str) -> None:
    from memtune.autotune.events import read_events
    from memtune.autotune.lines import summary_lines, use_color
    from memtune.autotune.view import SearchView

    view = SearchView()
    for event in read_events(log):
        view.apply(event)
    for line in summary_lines(view, see_why=f"memtune explain {out}", color=use_color(sys.stderr)):
        say(line)


def plan(given: dict[str, Any]) -> int:
    """Print the ranking, or one config's prediction."""
    common = _options.common(given, for_trials=False)

    from memtune.autotune.options import PlanOptions
    from memtune.autotune.planning import plan as make_plan

    report = make_plan(
        PlanOptions(**common, config=given["config"], micro_batch=given["micro_batch"], top=given["top"]), say=say
    )
    if given["as_json"]:
        emit(report.to_dict())
    else:
        from rich.console import Console

        Console().print(report.render())
    return 0
