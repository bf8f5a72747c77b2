"""The data of a study that a report shows, read as untrusted: wrong types are errors, and no code runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from memtune.autotune.search import TIMELINES, read_events
from memtune.autotune.ui import SearchView
from memtune.errors import EnvironmentFault


class CurveData(BaseModel):
    """`Curve` as written."""

    model_config = ConfigDict(extra="ignore")

    time_s: list[float] = Field(min_length=1)
    bytes_by_kind: dict[str, list[int]]

    @model_validator(mode="after")
    def _has_equal_lengths(self) -> CurveData:
        if any(len(each) != len(self.time_s) for each in self.bytes_by_kind.values()):
            raise ValueError("each kind needs one value per time")
        return self


class TimelineData(BaseModel):
    """`StepTimeline.document` of one setting."""

    model_config = ConfigDict(extra="ignore")

    device: CurveData
    streams: dict[str, list[tuple[str, float, float]]]


class WaterfallData(BaseModel):
    """`WaterfallStep` as written."""

    model_config = ConfigDict(extra="ignore")

    setting: str
    step_s: float | None = None
    peak_bytes: int | None = None
    unfit: str = ""


class Timelines(BaseModel):
    """`timelines.json` of a study."""

    model_config = ConfigDict(extra="ignore")

    summaries: dict[str, str] = {}
    timelines: dict[str, TimelineData] = {}
    waterfall: list[WaterfallData] = []


@dataclass(frozen=True)
class StudyData:
    """A study: its events, accumulated, and its timelines; empty ones if the search wrote no config."""

    name: str
    view: SearchView
    timelines: Timelines


def read_study(log: Path) -> StudyData:
    """Return the data of the study with the event log `log`.

    Raises:
        EnvironmentFault: The log holds no search, or the timelines are damaged.
    """
    view = SearchView()
    for event in read_events(log):
        view.apply(event)
    if view.started is None:
        raise EnvironmentFault(
            f"{log} holds no search.", fix="give the name of a study below .memtune/", code="MT404"
        )
    path = log.parent / TIMELINES
    try:
        timelines = Timelines.model_validate_json(path.read_bytes()) if path.is_file() else Timelines()
    except ValidationError as error:
        raise EnvironmentFault(
            f"{path} is damaged.",
            evidence=f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}",
            fix="remove it; the report then has no timelines",
            code="MT403",
        ) from error
    return StudyData(log.parent.name, view, timelines)
