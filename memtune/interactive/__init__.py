"""memtune from Python: `memtune.search` and `memtune.plan`, with the command line's names and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.interactive.calls import plan as plan, search as search
    from memtune.interactive.objects import load_functions as load_functions
    from memtune.interactive.results import PlanResult as PlanResult, SearchResult as SearchResult
else:
    __getattr__ = open_door(__name__)
