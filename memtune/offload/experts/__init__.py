"""Expert offload: experts of mixture-of-experts models on SSD, behind a cache in host memory (MoESys)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.experts.expert_offload import (
        ExpertOptimizer as ExpertOptimizer,
        ExpertUnits as ExpertUnits,
        blocks_of_experts as blocks_of_experts,
    )
    from memtune.offload.experts.expert_offload_pass import (
        ExpertOffloadSpec as ExpertOffloadSpec,
        experts_on_ssd as experts_on_ssd,
        hide_dense_parameters as hide_dense_parameters,
        used_in as used_in,
    )
else:
    __getattr__ = open_door(__name__)
