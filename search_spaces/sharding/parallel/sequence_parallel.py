"""Heads and features over ranks, positions divided between pairs (Megatron-LM's sequence parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from memtune.parallel.model import divide
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.sharding.parallel._sharded_layers import CutLayers, PairsPlan
from memtune.technique import Target
from memtune.units import format_ranks
from memtune.workload import Pair, unsharded_in_blocks


class SequenceParallel(CutLayers):
    """Divides layers as `tensor` does, and keeps 1/degree of the positions of norms, dropout and residuals on
    each rank.

    The two all-reduces of a pair become an all-gather at its entry and a reduce-scatter at its exit, in
    forward and backward: the same bytes. The input of a column layer is saved as a shard and gathered again
    in backward, so all saved tensors of the blocks are divided by the degree, for one more all-gather a pair.
    Gradients of replicated weights in the blocks are summed over the group once a step. Embeddings, the last
    norm and the head see all positions.

    Reordered, within the bounds of `tensor`; a replicated weight's gradient is a sum of `degree` partial sums
    over the positions.
    """

    kind: Literal["sequence_parallel"] = "sequence_parallel"
    title: ClassVar[str] = "Heads, features and positions divided over ranks"
    source: ClassVar[str] = "Korthikanti et al. 2023, arXiv:2205.05198, section 4.2"
    paper: ClassVar[str] = "Korthikanti et al. 2023"

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return f"divides every layer, and the positions between layers, over {format_ranks(self.degree)}"

    def sharding_kind(self, target: Target) -> str:
        """Return the division of attention, MLPs, and the positions between them."""
        return "sequence"

    def cut_live(self, context: Context, pairs: Sequence[Pair], degree: int) -> None:
        """Divide `pairs`, and the positions between them."""
        divide(context, pairs, degree)

    def summed(self, program: Program, plan: PairsPlan) -> frozenset[str]:
        """Return the trainable parameters of the blocks that are replicated."""
        step = program.step
        trainable = (p.name for p in step.parameters if p.trainable)
        return frozenset(unsharded_in_blocks(trainable, plan.pairs, step.blocks))

    def explain(self, plan: PairsPlan) -> tuple[str, ...]:
        lines = super().explain(plan)
        return (*lines, "between pairs each rank holds its share of every sequence") if lines else ()

    def record(self, target: Target) -> dict[str, Any]:
        return {"parallel.sequence": {"degree": self.degree or target.ranks}}
