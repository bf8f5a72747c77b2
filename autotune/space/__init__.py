"""The search space: candidates, their scores, pruning, proposals and the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.space.ablation import (
        AblatedSetting,
        Ablation,
        ablate,
        ablation_reason,
        trade,
        trade_text,
    )
    from memtune.autotune.space.baseline_settings import Baseline, baselines, first_that_fits
    from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
    from memtune.autotune.space.lifecycle_peaks import Moment, largest_batch, moments
    from memtune.autotune.space.pareto import largest_micro_batch, refined_front
    from memtune.autotune.space.proposals import Proposer
    from memtune.autotune.space.pruning import Pruner, refusing_techniques
    from memtune.autotune.space.sampler import DAMAGE, Sampler, StoredTrial
    from memtune.autotune.space.scoring import (
        Goal,
        Scored,
        Scorer,
        Scores,
        alike,
        fits_budget,
        predict_again,
        processes,
        python_work,
        same_passes,
        score_all,
    )
    from memtune.autotune.space.search_options import PlanOptions, SearchOptions, TargetOptions
    from memtune.autotune.space.search_space import Space, batch_sizes, build_space, executions, variants
    from memtune.autotune.space.step_time_model import Kind, Observed, StepTimeModel, kinds
    from memtune.autotune.space.suggestions import (
        Improvement,
        Remedy,
        describe,
        improvements,
        more_host_memory,
        more_memory,
        remedies,
    )
else:
    __getattr__ = open_door(__name__)

__all__ = [
    "DAMAGE",
    "AblatedSetting",
    "Ablation",
    "Baseline",
    "Candidate",
    "Choice",
    "Goal",
    "Improvement",
    "Kind",
    "Moment",
    "Observed",
    "PlanOptions",
    "Proposer",
    "Pruner",
    "Remedy",
    "Rewriter",
    "Sampler",
    "Scored",
    "Scorer",
    "Scores",
    "SearchOptions",
    "Space",
    "StepTimeModel",
    "StoredTrial",
    "TargetOptions",
    "ablate",
    "ablation_reason",
    "alike",
    "baselines",
    "batch_sizes",
    "build_space",
    "describe",
    "executions",
    "first_that_fits",
    "fits_budget",
    "improvements",
    "kinds",
    "largest_batch",
    "largest_micro_batch",
    "moments",
    "more_host_memory",
    "more_memory",
    "predict_again",
    "processes",
    "python_work",
    "refined_front",
    "refusing_techniques",
    "remedies",
    "same_passes",
    "score_all",
    "trade",
    "trade_text",
    "variants",
]
