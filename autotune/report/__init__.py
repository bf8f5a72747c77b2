"""Pictures of a search or a plan, and the report: one offline page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.report.page import write_report
    from memtune.autotune.report.pictures import Point, Ran, front, settings_of, technique
    from memtune.autotune.report.svg import Picture
else:
    __getattr__ = open_door(__name__)

__all__ = ["Picture", "Point", "Ran", "front", "settings_of", "technique", "write_report"]
