"""Let the compiler decide what backward recomputes: min-cut of the joint graph, under a byte budget."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.compile import LEAST_BUDGET
from memtune.effects import Effects
from memtune.program import Program
from memtune.runtime import Context
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique


class MemoryBudget(Technique):
    """Recomputes ops inside compiled graphs so that the graphs save fewer bytes; a knapsack solver chooses
    the ops.

    The budget is a fraction, not bytes: 1 is what the partitioner saves by default (it already recomputes
    cheap ops), 0 is only the graph's inputs. Every graph has its own budget, so under `compile: blocks` each
    block saves its fraction. The program is recorded from the graphs of this budget. Matmuls may run again,
    random ops do not.
    """

    kind: Literal["memory_budget"] = "memory_budget"
    title: ClassVar[str] = "Recompute inside compiled graphs"
    source: ClassVar[str] = (
        "PyTorch, torch._functorch.partitioners, activation_memory_budget (pytorch/pytorch#126320)"
    )
    paper: ClassVar[str] = "PyTorch"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="graph")

    budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Fraction of the bytes that the graphs would save; less frees more and recomputes more."""
    solver: Literal["dp", "greedy", "ilp"] = "dp"
    """Solver of the knapsack: `dp` exact over rounded sizes, `ilp` exact (needs SciPy), `greedy` by bytes per
    FLOP.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return f"recomputes ops inside compiled graphs, which then save {self.budget:.0%} of the bytes"

    def refuses(self, facts: Facts) -> Reason | None:
        return (
            None
            if facts.compiled
            else Reason("only compiled graphs have a partitioner", "execution: {compile: blocks}")
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse code that is not compiled, and a budget of 1."""
        if (reason := self.refuses(Facts.of(program, target))) is not None:
            return reason
        if self.budget == 1:
            return Reason("a budget of 1 is what compiled graphs save by default", "recompute: {kind: none}")
        return None

    def partitioning(self) -> dict[str, Any]:
        # FLOPs as the measure of time are equal on every machine and rank.
        return {
            "activation_memory_budget": max(self.budget, LEAST_BUDGET),
            "activation_memory_budget_solver": self.solver,
            "activation_memory_budget_runtime_estimator": "flops",
        }

    def apply(self, context: Context, plan: Plan) -> None:
        """Set the partitioner's options; it decides when graphs are compiled."""
        assert context.loop.compiled is not None, "`refuses` checked that the model is compiled"
        context.loop.compiled.partitioning.update(self.partitioning())

    def record(self, target: Target) -> dict[str, Any]:
        return {"compile.partitioning": self.partitioning()}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # The solvers differ little, so only the first is tried.
        return {"budget": (0.5, 0.25, 0.0)}
