"""Pools by lifetime: parameters, gradients, tensors kept for backward and transient ones are apart."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.memory import ArenaSettings
from memtune.search_spaces.allocator._own_allocator import OwnAllocator
from memtune.technique import Target


class LifetimePools(OwnAllocator):
    """Avoids holes between long-lived tensors by a pool for each lifetime, at the cost of room that pools do
    not share.

    ZeRO-R copies gradients and checkpoints into separate buffers. Here nothing is copied: one step is
    observed, and from then on each request comes from the pool of tensors that lived as long: parameters and
    optimizer state, gradients (which outlive the optimizer's step), tensors kept for backward, the rest.
    Requests that are not recognized, or live longer or shorter than expected, are served as well. Buffers of
    constant size, the rest of ZeRO-R, are `bucket_cap_mb` of `sharding.states`.
    """

    kind: Literal["lifetime_pools"] = "lifetime_pools"
    title: ClassVar[str] = "Pools by lifetime"
    clause: ClassVar[str] = "allocates from one pool per lifetime of tensors"
    source: ClassVar[str] = (
        "Rajbhandari et al. 2020, ZeRO, SC 2020, section 6.3 (memory defragmentation), arXiv:1910.02054"
    )
    paper: ClassVar[str] = "ZeRO-R"

    transient_within: Annotated[int, Field(ge=1)] = 64
    """Memory freed within this many requests and frees is transient. A small value counts tensors that are
    freed soon, but inside a long op, as kept.
    """
    relearn_after: Annotated[int, Field(ge=1)] = 64
    """Requests without a counterpart in the observed step before another step is observed; doubles each time.
    """

    def record(self, target: Target) -> dict[str, Any]:
        return {"allocator": {"pools": dict(self.knobs())}}

    def settings(self) -> ArenaSettings:
        """Return the knobs as the allocator takes them."""
        return ArenaSettings(
            kind=self.kind,
            pools=True,
            transient_within=self.transient_within,
            replan_after=self.relearn_after,
        )
