"""Experts of mixture-of-experts models on the host or SSD behind a cache (MoESys)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memtune._door import open_door

if TYPE_CHECKING:
    from memtune.offload.experts.expert_offload import ExpertOptimizer, ExpertStore
    from memtune.offload.experts.expert_offload_pass import How, experts_on_ssd, only_experts, used_in
else:
    __getattr__ = open_door(__name__)

__all__ = ["ExpertOptimizer", "ExpertStore", "How", "experts_on_ssd", "only_experts", "used_in"]
