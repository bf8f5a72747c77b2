"""Parameters, gradients and optimizer state sharded over all ranks (ZeRO stage 3): FSDP2's older name."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.search_spaces.sharding.states._fsdp_technique import _FsdpUnits
from memtune.technique import Target


class Zero3(_FsdpUnits):
    """Trades an all-gather of every unit in forward and in backward and a reduce-scatter for 1/N of the model
    state.

    It equals `fsdp` over all ranks: the two have one record, are one candidate and are measured once.
    DeepSpeed's buckets have no counterpart: a unit is gathered and reduced as one message.

    Reordered: as `fsdp`, at most (N + 1)·eps·Σ|gᵣ|/N in addition to the rounding of the per-sample sums.
    """

    kind: Literal["zero3"] = "zero3"
    title: ClassVar[str] = "All model state divided over all ranks"
    clause: ClassVar[str] = "divides weights, gradients and optimizer state over all ranks"
    source: ClassVar[str] = "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 5.3"
    paper: ClassVar[str] = "ZeRO-3"

    def record(self, target: Target) -> dict[str, Any]:
        return self._settings(target.ranks, target.ranks)
