"""The search: trials, verdicts, the study on disk and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.search.bucket_plans import plan_buckets
    from memtune.autotune.search.control import Control
    from memtune.autotune.search.dry_runs import traced_under
    from memtune.autotune.search.outcome import SearchOutcome
    from memtune.autotune.search.plan_report import Absence, PlanReport, PlanRow, plan
    from memtune.autotune.search.preparation import prepare
    from memtune.autotune.search.search_events import (
        BestChanged,
        Calibrated,
        CandidatesScored,
        Event,
        LogOpened,
        LogTail,
        Note,
        Paused,
        Recorded,
        Resumed,
        Role,
        SearchFinished,
        SearchStarted,
        TrialCancelled,
        TrialFinished,
        TrialProgress,
        TrialPruned,
        TrialStarted,
        Unknown,
        read_events,
    )
    from memtune.autotune.search.study import search, study_folder
    from memtune.autotune.search.study_store import (
        TIMELINES,
        StudyFolder,
        check_writable,
        has_owner,
        named_study,
    )
    from memtune.autotune.search.trials import run_trial
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "TIMELINES",
    "Absence",
    "BestChanged",
    "Calibrated",
    "CandidatesScored",
    "Control",
    "Event",
    "LogOpened",
    "LogTail",
    "Note",
    "Paused",
    "PlanReport",
    "PlanRow",
    "Recorded",
    "Resumed",
    "Role",
    "SearchFinished",
    "SearchOutcome",
    "SearchStarted",
    "StudyFolder",
    "TrialCancelled",
    "TrialFinished",
    "TrialProgress",
    "TrialPruned",
    "TrialStarted",
    "Unknown",
    "check_writable",
    "has_owner",
    "named_study",
    "plan",
    "plan_buckets",
    "prepare",
    "read_events",
    "run_trial",
    "search",
    "study_folder",
    "traced_under",
]
