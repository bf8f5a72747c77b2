"""The null technique: a full model without reductions of gradients, so it trains on one rank."""

from __future__ import annotations

from typing import ClassVar, Literal

from memtune.program import Program
from memtune.search_spaces import active
from memtune.technique import NullTechnique, Reason, Target


class Alone(NullTechnique):
    """Runs the plain model on one rank; without a collective several would train different models."""

    kind: Literal["none"] = "none"
    title: ClassVar[str] = "Whole model on one rank"
    clause: ClassVar[str] = "runs the whole model on one rank"
    source: ClassVar[str] = "PyTorch eager execution"

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require one rank, or several whose gradients another technique reduces, as in model parallelism."""
        if target.ranks == 1:
            return None
        parallel, states = active(target, "sharding.parallel"), active(target, "offload.states")
        if parallel is not None or (states is not None and states.effects.averages == "all"):
            return None  # the other technique averages gradients between copies of a part
        return Reason(
            f"{target.ranks} ranks would each train a model of their own", "choose ddp, zero1 or fsdp"
        )
