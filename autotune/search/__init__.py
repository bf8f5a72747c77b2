"""The search: trials, verdicts, the study on disk and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.search.bucket_plans import plan_buckets as plan_buckets
    from memtune.autotune.search.control import Control as Control
    from memtune.autotune.search.dry_runs import traced_under as traced_under
    from memtune.autotune.search.outcome import SearchOutcome as SearchOutcome
    from memtune.autotune.search.plan_report import (
        Absence as Absence,
        PlanReport as PlanReport,
        PlanRow as PlanRow,
        plan as plan,
    )
    from memtune.autotune.search.preparation import prepare as prepare
    from memtune.autotune.search.search_events import (
        BestChanged as BestChanged,
        Calibrated as Calibrated,
        CandidatesScored as CandidatesScored,
        Event as Event,
        LogOpened as LogOpened,
        LogTail as LogTail,
        Note as Note,
        Paused as Paused,
        Recorded as Recorded,
        Resumed as Resumed,
        Role as Role,
        SearchFinished as SearchFinished,
        SearchStarted as SearchStarted,
        TrialCancelled as TrialCancelled,
        TrialFinished as TrialFinished,
        TrialProgress as TrialProgress,
        TrialPruned as TrialPruned,
        TrialStarted as TrialStarted,
        Unknown as Unknown,
        read_events as read_events,
    )
    from memtune.autotune.search.study import search as search, study_folder as study_folder
    from memtune.autotune.search.study_store import (
        TIMELINES as TIMELINES,
        StudyFolder as StudyFolder,
        check_writable as check_writable,
        has_owner as has_owner,
        named_study as named_study,
    )
    from memtune.autotune.search.trials import run_trial as run_trial
else:
    __getattr__ = open_door(__name__)
