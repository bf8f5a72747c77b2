"""The full model on every rank, with gradients averaged during backward (PyTorch DistributedDataParallel)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune import refusals
from memtune.effects import NO_EFFECTS, Effects
from memtune.parallel.replicas import BUCKET_CAP_MB, AllReduceGrads, Buckets, Replicas, Replication, replicate
from memtune.program import Program
from memtune.runtime import Context
from memtune.technique import Exactness, Plan, Reason, Target, Technique
from memtune.workload import experts_in


class Ddp(Technique):
    """Trades one copy of model, gradients and optimizer state per rank for the least communication: one
    all-reduce a step.

    Gradients live in buckets that are never freed. With accumulation the sums of the earlier micro-batches
    are allocated in addition to the buckets, until the last micro-batch copies them in.

    Reordered: the gradient of the union batch is the mean over N ranks of the means over their samples. Each
    rank rounds its own sum and the ring adds N of them, so an element differs from the plain one by at most
    (N + 1)·eps·Σ|gᵣ|/N in addition to the rounding of the per-sample sums, which both have.
    """

    kind: Literal["ddp"] = "ddp"
    title: ClassVar[str] = "Replicas that average their gradients"
    source: ClassVar[str] = "Li et al. 2020, PyTorch Distributed, arXiv:2006.15704"
    paper: ClassVar[str] = "DDP"
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    bucket_cap_mb: Annotated[int, Field(ge=1)] = BUCKET_CAP_MB
    """MiB of gradients averaged at once; small buckets start earlier, large ones pay the latency less often.
    """
    find_unused_parameters: bool = False
    """Search every step for parameters without gradient; needed if the graph changes, slower otherwise."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        buckets = "" if self.bucket_cap_mb == BUCKET_CAP_MB else f" in buckets of {self.bucket_cap_mb} MiB"
        return f"keeps the whole model on every rank, averages gradients{buckets}"

    @property
    def effects(self) -> Effects:
        return Effects(
            among_copies=True, shards="replicas", reduces="ready", finds_unused=self.find_unused_parameters
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require two ranks, and `find_unused_parameters` exactly if parameters may lack gradients."""
        if target.ranks < 2:
            return refusals.one_rank()
        unused = [p.name for p in program.step.parameters if p.trainable and p.gradient < 0]
        if unused and not self.find_unused_parameters:
            return Reason(
                f"{len(unused)} trainable parameters get no gradient, {unused[0]} first",
                "find_unused_parameters: true",
            )
        # The search costs a pass over the graph in each step. Experts may lack gradients with other batches.
        if self.find_unused_parameters and not unused and not experts_in(program.step):
            return Reason("every trainable parameter gets a gradient", "find_unused_parameters: false")
        return None

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Pack ready gradients into buckets, with an all-reduce after each full bucket."""
        offload = target.chosen.get("offload.states")
        effects = NO_EFFECTS if offload is None else offload.effects
        # Gradients that the offload technique averages itself are in no bucket.
        of_blocks = effects.averages != "blocks"
        bucket_bytes, at_end = self.bucket_cap_mb << 20, program.unrolled > 1
        per_gradient = effects.calls == "grad_hooks"
        replication = Replication(
            program.ranks,
            bucket_bytes,
            program.accumulate,
            self.find_unused_parameters,
            of_blocks,
            at_end,
            per_gradient,
        )
        return program.with_step(replicate(program.step, replication))

    def apply(self, context: Context, plan: Plan) -> None:
        """Wrap the model in DistributedDataParallel, or average each part among the ranks that have it.

        If gradients are offloaded when they are ready, each is averaged by itself, without a wrapper and
        buckets.
        """
        if context.placement.offload.calls == "grad_hooks":
            AllReduceGrads(context)
            return
        kind = Replicas if context.placement.model_parallel_size == 1 else Buckets
        kind(context, bucket_cap_mb=self.bucket_cap_mb, find_unused_parameters=self.find_unused_parameters)

    def record(self, target: Target) -> dict[str, Any]:
        factors = {"parameters": 1, "gradients": 1, "optimizer": 1}
        buckets = {"bytes": self.bucket_cap_mb << 20, "find_unused": self.find_unused_parameters}
        return {"states.shard": factors, "states.buckets": buckets}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # Torch's own bucket size and a large one; `fits` decides on the search for unused parameters.
        return {"bucket_cap_mb": (BUCKET_CAP_MB, 100), "find_unused_parameters": (False, True)}
