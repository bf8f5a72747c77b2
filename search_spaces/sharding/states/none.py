"""Every rank holds the whole model and nobody brings the gradients together: training on one rank."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.program import Program
from memtune.search_spaces._support import active
from memtune.technique import Exactness, Reason, Target, Technique


class Alone(Technique):
    """The plain model: no wrapper, no collective. Replicas on several ranks would drift apart, so it fits one
    alone.
    """

    kind: Literal["none"] = "none"
    slot: ClassVar[str] = "sharding.states"
    title: ClassVar[str] = "Whole model on one rank"
    source: ClassVar[str] = "PyTorch eager execution"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def fits(self, program: Program, target: Target) -> Reason | None:
        """One rank, or several whose gradients another technique brings together, as one that cuts the model
        over them does.
        """
        if target.ranks == 1:
            return None
        parallel, states = active(target, "sharding.parallel"), active(target, "offload.states")
        if parallel is not None or (states is not None and states.effects.averages == "all"):
            return None  # it averages what there is to average
        return Reason(
            f"{target.ranks} ranks would each train a model of their own", "choose ddp, zero1 or fsdp"
        )

    def record(self, target: Target) -> dict[str, Any]:
        """No mechanism is used."""
        return {}
