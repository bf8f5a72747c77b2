"""Heads and features divided over ranks, and what is between them by positions (Megatron-LM's sequence
parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from memtune.parallel.model import divide
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.sharding.parallel._sharded_layers import CutLayers, PairsPlan
from memtune.technique import Target
from memtune.workload import Pair, whole_in_blocks


class SequenceParallel(CutLayers):
    """As `tensor`, and norms, dropout and the residual stream of the blocks hold 1/degree of the positions on
    each rank.

    The two all-reduces of a pair become an all-gather where it is entered and a reduce-scatter where it is
    left, forward and backward: the same bytes. What a column layer was given is kept as a share and gathered
    again in backward, so all that the blocks save is divided by the degree, for one more all-gather a pair.
    Gradients of whole weights in the blocks are summed over the group once a step. Embeddings, the last norm
    and the head see all positions.

    Reordered, within the bounds of `tensor`; a whole weight's gradient is a sum of `degree` partial sums over
    the positions.

    Distinguishing test: a rank saves 1/degree of what a block's norms save, and every pair sends its input's
    bytes once in forward and one and a half times in backward, in all-gathers and reduce-scatters.
    """

    kind: Literal["sequence_parallel"] = "sequence_parallel"
    title: ClassVar[str] = "Heads, features and positions divided over ranks"
    source: ClassVar[str] = "Korthikanti et al. 2023, arXiv:2205.05198, section 4.2"

    def asked(self, target: Target) -> str:
        """Attention and MLPs, and positions between them."""
        return "sequence"

    def cut_live(self, context: Context, pairs: Sequence[Pair], degree: int) -> None:
        """Cut `pairs` and divide the positions between them."""
        divide(context, pairs, degree)

    def summed(self, program: Program, plan: PairsPlan) -> frozenset[str]:
        """Trainable parameters of the blocks that are not cut."""
        step = program.step
        trainable = (p.name for p in step.parameters if p.trainable)
        return frozenset(whole_in_blocks(trainable, plan.pairs, step.blocks))

    def explain(self, plan: PairsPlan) -> tuple[str, ...]:
        """As of `tensor`, and that positions are divided."""
        lines = super().explain(plan)
        return (*lines, "between them each rank holds its share of every sequence") if lines else ()

    def record(self, target: Target) -> dict[str, Any]:
        """Over how many ranks."""
        return {"parallel.sequence": {"degree": self.degree or target.ranks}}
