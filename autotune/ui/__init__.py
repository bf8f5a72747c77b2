"""The display of a search: lines, panels, details."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.ui.line_printer import (
        LinePrinter as LinePrinter,
        summary_lines as summary_lines,
        use_color as use_color,
        with_lines as with_lines,
    )
    from memtune.autotune.ui.plan_text import render as render
    from memtune.autotune.ui.tui import run_tui as run_tui, with_tui as with_tui
    from memtune.autotune.ui.view import SearchView as SearchView
else:
    __getattr__ = open_door(__name__)
