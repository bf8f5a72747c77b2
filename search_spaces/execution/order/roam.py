"""Ops run in an order under which fewer bytes are live at once: any op of compiled graphs, the updates of
eager programs.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.compile import LOW_PEAK
from memtune.offload.optimizer import FusedBackward, no_sentinel, not_at_gradients, updates_at_gradients
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces._support import conflict
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique

_PLAIN = "execution: {order: {kind: program}}"


class Roam(Technique):
    """Trades planning time, once per graph, for a lower peak inside compiled graphs; in eager code launches
    for gradients.

    Compiled (`aot_eager`): forward and backward graphs are ordered apart, as the paper's independent segments
    are: program order with ops moved up that let go of more than they make, and windows around the peak
    ordered exactly. A graph keeps program order where none is better. Random ops and whatever has effects
    keep their order among themselves, writes theirs with all that touches the same memory. The program is
    recorded from the graphs so ordered.

    Eager code runs in program order, but the optimizer's updates may run early: each parameter is updated in
    the backward of the last micro-batch as soon as its gradient is complete, which is then let go. Foreach
    kernels run once per parameter. `Tuned.step` says which micro-batch is the last one, `with
    tuned.micro_batch(last=...)` does in a loop of one's own; where neither is used nothing is updated early,
    no memory is saved, and one message says so. Clipping by norm is refused.

    Same ops on the same values, same bits. Its layout half is `allocator: {kind: planned_layout}`.

    Distinguishing test: graphs of up to twelve ops reach the peak of the best of all orders; in eager code no
    two gradients of updated parameters are there at once that need not be.
    """

    kind: Literal["roam"] = "roam"
    slot: ClassVar[str] = "execution.order"
    title: ClassVar[str] = "Ops in a low-peak order"
    source: ClassVar[str] = (
        "Shu et al. 2023, ROAM: memory-efficient large DNN training via operator ordering, arXiv:2310.19295"
    )
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def refuses(self, facts: Facts) -> Reason | None:
        """Compiled graphs of fused kernels."""
        if facts.compiled and facts.compile_backend == "inductor":
            return Reason("inductor orders its kernels itself", "execution: {compile_backend: aot_eager}")
        return None

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs graphs that run op by op, in the order in which they are; or one rank's optimizer that
        updates one by one.
        """
        if target.compiled:
            return self.refuses(Facts.of(program, target))
        if program.ranks > 1 or target.ranks > 1:
            return Reason(
                "updates at the gradient are for one rank: gradients of several are summed first", _PLAIN
            )
        if (why := not_at_gradients(program.step)) != "":
            return Reason(why, _PLAIN)
        if target.optimizer is not None and target.optimizer.not_one_by_one:
            return Reason(target.optimizer.not_one_by_one, _PLAIN)
        if no_sentinel(program.step):
            return Reason(
                "the smallest parameter gets no gradient, so clipping by norm could not be noticed", _PLAIN
            )
        return conflict(self, target, "recompute", "offload.states")

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Eager: updates into backward. Compiled: nothing, the graphs were recorded in their order."""
        if target.compiled:
            return program
        return program.with_step(updates_at_gradients(program.step, program.accumulate))

    def partitioning(self) -> dict[str, Any]:
        """Both graphs that the partitioner makes are ordered."""
        return {LOW_PEAK: True}

    def apply(self, context: Context, plan: Plan) -> None:
        """Have graphs ordered when they are made, or parameters updated when their gradients land."""
        compiled = context.loop.compiled
        if compiled is None:
            context.checks[self.slot] = FusedBackward(context).check
            return
        compiled.partitioning.update(self.partitioning())
        context.checks[self.slot] = compiled.check_orders

    def record(self, target: Target) -> dict[str, Any]:
        """What is done to graphs when they are made, or when updates run."""
        if target.compiled:
            return {"compile.partitioning": self.partitioning()}
        return {"optimizer.updates": "at gradient"}
