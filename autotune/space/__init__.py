"""The search space: candidates, their scores, pruning, proposals and the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.autotune.space.ablation import (
        AblatedSetting as AblatedSetting,
        Ablation as Ablation,
        ablate as ablate,
        ablation_reason as ablation_reason,
        trade as trade,
        trade_text as trade_text,
    )
    from memtune.autotune.space.baseline_settings import (
        Baseline as Baseline,
        baselines as baselines,
        first_that_fits as first_that_fits,
    )
    from memtune.autotune.space.candidates import (
        Candidate as Candidate,
        Choice as Choice,
        Rewriter as Rewriter,
    )
    from memtune.autotune.space.lifecycle_peaks import Moment as Moment, moments as moments
    from memtune.autotune.space.pareto import (
        largest_micro_batch as largest_micro_batch,
        refined_front as refined_front,
    )
    from memtune.autotune.space.proposals import Proposer as Proposer
    from memtune.autotune.space.pruning import Pruner as Pruner, refusing_techniques as refusing_techniques
    from memtune.autotune.space.sampler import (
        DAMAGE as DAMAGE,
        Sampler as Sampler,
        StoredTrial as StoredTrial,
        is_unreached as is_unreached,
    )
    from memtune.autotune.space.scoring import (
        Goal as Goal,
        Scored as Scored,
        Scorer as Scorer,
        Scores as Scores,
        alike as alike,
        fits_budget as fits_budget,
        predict_again as predict_again,
        processes as processes,
        python_work as python_work,
        same_passes as same_passes,
        score_all as score_all,
    )
    from memtune.autotune.space.search_options import (
        PlanOptions as PlanOptions,
        SearchOptions as SearchOptions,
        TargetOptions as TargetOptions,
    )
    from memtune.autotune.space.search_space import (
        Space as Space,
        batch_sizes as batch_sizes,
        build_space as build_space,
        executions as executions,
        variants as variants,
    )
    from memtune.autotune.space.step_time_model import (
        Kind as Kind,
        Observed as Observed,
        StepTimeModel as StepTimeModel,
        kinds as kinds,
    )
    from memtune.autotune.space.suggestions import (
        Improvement as Improvement,
        Remedy as Remedy,
        describe as describe,
        improvements as improvements,
        more_host_memory as more_host_memory,
        more_memory as more_memory,
        remedies as remedies,
    )
else:
    __getattr__ = open_door(__name__)
