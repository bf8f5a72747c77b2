"""Pictures of a search or a plan, and the report: one offline page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.report.page import write_report as write_report
    from memtune.autotune.report.pictures import (
        Point as Point,
        Ran as Ran,
        front as front,
        settings_of as settings_of,
        technique as technique,
    )
    from memtune.autotune.report.svg import Picture as Picture
else:
    __getattr__ = open_door(__name__)
