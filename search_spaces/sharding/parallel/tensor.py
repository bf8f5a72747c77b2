"""Attention heads and MLP features divided over ranks, which share a micro-batch (Megatron-LM)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from memtune.parallel.model import cut
from memtune.runtime import Context
from memtune.search_spaces.sharding.parallel._sharded_layers import CutLayers
from memtune.technique import Target
from memtune.units import format_ranks
from memtune.workload import Pair


class TensorParallel(CutLayers):
    """Trades two all-reduces of a layer's activations in forward and two in backward for 1/degree of weights
    and their state.

    Query, key, value and output layers are divided by heads, MLPs by features; norms, embeddings and all else
    between the pairs are replicated. A group of ranks computes one micro-batch at a time: each rank provides
    its own, by micro-batch rotation (`Tuned.step`), so that a step has the same samples and `degree` times as
    many, smaller micro-batches per rank. Groups beyond the first are replicas, whose gradients are averaged
    after backward.

    Reordered: a row layer's output is the sum of `degree` partial sums of in/degree products each, so an
    element differs from the plain one by at most (in + degree)·eps·Σ|wᵢxᵢ|, as any other order of summation
    may.
    """

    kind: Literal["tensor"] = "tensor"
    title: ClassVar[str] = "Heads and features divided over ranks"
    source: ClassVar[str] = "Shoeybi et al. 2019, Megatron-LM, arXiv:1909.08053, section 3"
    paper: ClassVar[str] = "Megatron-LM"

    layers: Literal["all", "mlp"] = "all"
    """All pairs, or those of MLPs only (if attention layers cannot be divided)."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        layers = "heads and features of every layer" if self.layers == "all" else "features of every MLP"
        return f"divides {layers} over {format_ranks(self.degree)}"

    def sharding_kind(self, target: Target) -> str:
        """Return the value of `layers`."""
        return self.layers

    def cut_live(self, context: Context, pairs: Sequence[Pair], degree: int) -> None:
        """Divide `pairs`; norms and other replicated modules see all positions."""
        cut(context, pairs, degree)

    def record(self, target: Target) -> dict[str, Any]:
        return {"parallel.tensor": {"degree": self.degree or target.ranks, "layers": self.layers}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"layers": ("all", "mlp")}
