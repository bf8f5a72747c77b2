"""Let the compiler decide what backward computes again: min-cut over the joint graph, under a budget for what
is saved.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.compile import LEAST_BUDGET
from memtune.effects import Effects
from memtune.program import Program
from memtune.runtime import Context
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique


class MemoryBudget(Technique):
    """Trades ops that run again inside compiled graphs for what the graphs save; a knapsack chooses which.

    The budget is a share, not bytes: 1 is what the partitioner saves anyway (it recomputes cheap ops that way
    already), 0 is nothing but the graph's inputs. Every graph has its own, so under `compile: blocks` each
    block saves its share. The program is recorded from the graphs of this very budget. Matmuls may run again,
    random ops do not.

    Distinguishing test: saved bytes fall with the budget, down to the blocks' inputs, and backward graphs
    hold forward's ops.
    """

    kind: Literal["memory_budget"] = "memory_budget"
    slot: ClassVar[str] = "recompute"
    title: ClassVar[str] = "Recompute inside compiled graphs"
    source: ClassVar[str] = (
        "PyTorch, torch._functorch.partitioners, activation_memory_budget (pytorch/pytorch#126320)"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    effects: ClassVar[Effects] = Effects(activations="graph")

    budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of what the graphs would save; less frees more and recomputes more."""
    solver: Literal["dp", "greedy", "ilp"] = "dp"
    """Who solves the knapsack: `dp` exactly over rounded sizes, `ilp` exactly (needs SciPy), `greedy` by
    bytes per FLOP.
    """

    def refuses(self, facts: Facts) -> Reason | None:
        """Needs compiled graphs."""
        return (
            None
            if facts.compiled
            else Reason("only compiled graphs have a partitioner", "execution: {compile: blocks}")
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs compiled graphs, and a budget that is one."""
        if (reason := self.refuses(Facts.of(program, target))) is not None:
            return reason
        if self.budget == 1:
            return Reason("a budget of 1 is what compiled graphs save anyway", "recompute: {kind: none}")
        return None

    def partitioning(self) -> dict[str, Any]:
        """The budget, the solver, and FLOPs as the measure of time: it is the same on every machine
        and rank.
        """
        return {
            "activation_memory_budget": max(self.budget, LEAST_BUDGET),
            "activation_memory_budget_solver": self.solver,
            "activation_memory_budget_runtime_estimator": "flops",
        }

    def apply(self, context: Context, plan: Plan) -> None:
        """Tell the partitioner, which decides when graphs are made."""
        assert context.loop.compiled is not None, "`refuses` was asked"
        context.loop.compiled.partitioning.update(self.partitioning())

    def record(self, target: Target) -> dict[str, Any]:
        """What the partitioner is told."""
        return {"compile.partitioning": self.partitioning()}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Budgets from half down to nothing; the solvers differ little, so the first is tried alone."""
        return {"budget": (0.5, 0.25, 0.0)}
