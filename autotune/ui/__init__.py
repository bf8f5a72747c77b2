"""The display of a search: lines, panels, details."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.ui.line_printer import LinePrinter, summary_lines, use_color, with_lines
    from memtune.autotune.ui.plan_text import render
    from memtune.autotune.ui.tui import run_tui, with_tui
    from memtune.autotune.ui.view import SearchView
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "LinePrinter",
    "SearchView",
    "render",
    "run_tui",
    "summary_lines",
    "use_color",
    "with_lines",
    "with_tui",
]
