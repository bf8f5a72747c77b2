"""Run ops in an order with fewer live bytes: all of compiled graphs, updates of eager programs."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune import refusals
from memtune.compile import LOW_PEAK
from memtune.offload.optimizer import FusedBackward, no_sentinel, not_at_gradients, updates_at_gradients
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces._support import conflict
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique

_PLAIN = "execution: {order: {kind: program}}"


class Roam(Technique):
    """Lowers the peak by reordering ops: inside compiled graphs for planning time, once per graph; in eager
    code for one optimizer launch per gradient.

    Compiled (`aot_eager`): forward and backward graphs are ordered separately, as the paper's independent
    segments are. Ops that free more than they allocate move up, and windows around the peak are ordered
    exactly. A graph keeps program order if no better one is found. Random ops and ops with side effects keep
    their order among themselves; writes keep theirs with all ops that touch the same memory. The program is
    recorded from the reordered graphs.

    Eager code runs in program order, but the optimizer's updates may run early: each parameter is updated in
    the backward of the last micro-batch as soon as its gradient is complete, and the gradient is then freed.
    Foreach kernels run once per parameter. `Tuned.step` knows the last micro-batch; a custom loop marks it by
    `with tuned.micro_batch(last=...)`. Without either, nothing is updated early, no memory is saved, and one
    message reports it. Clipping by norm is refused. Under a frozen schedule (`recompute`) the planner counts
    each gradient to its update, so it meets budgets that no schedule in program order does; a schedule that
    reads a weight after its update is refused, and raises if a config by hand has one.

    Same ops on the same values, same bits. Its layout half is `allocator: {kind: planned_layout}`.
    """

    kind: Literal["roam"] = "roam"
    title: ClassVar[str] = "Ops in a low-peak order"
    clause: ClassVar[str] = (
        "updates each weight as soon as its gradient is ready; orders compiled graphs for a low peak"
    )
    source: ClassVar[str] = (
        "Shu et al. 2023, ROAM: memory-efficient large DNN training via operator ordering, arXiv:2310.19295"
    )
    paper: ClassVar[str] = "ROAM"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def refuses(self, facts: Facts) -> Reason | None:
        if facts.compiled and facts.compile_backend == "inductor":
            return Reason("inductor orders its kernels itself", "execution: {compile_backend: aot_eager}")
        return None

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse graphs that do not run op by op; in eager code several ranks, and optimizers that cannot
        update one parameter at a time.
        """
        if target.compiled:
            return self.refuses(Facts.of(program, target))
        if program.ranks > 1 or target.ranks > 1:
            return Reason("updates at the gradient need one rank: several ranks sum gradients first", _PLAIN)
        if (why := not_at_gradients(program.step)) != "":
            return Reason(why, _PLAIN)
        if target.optimizer is not None and target.optimizer.not_one_by_one:
            return Reason(target.optimizer.not_one_by_one, _PLAIN)
        if no_sentinel(program.step):
            return refusals.clipping_unnoticed_in_step(_PLAIN)
        return conflict(self, target, "offload.states")

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Return the program, if eager with updates in backward; compiled graphs are recorded in order."""
        if target.compiled:
            return program
        return program.with_step(updates_at_gradients(program.step, program.accumulate))

    def partitioning(self) -> dict[str, Any]:
        return {LOW_PEAK: True}

    def apply(self, context: Context, plan: Plan) -> None:
        """Order graphs when they are compiled, or update parameters when their gradients are ready."""
        compiled = context.loop.compiled
        if compiled is None:
            context.checks[self.slot] = FusedBackward(context).check
            return
        compiled.partitioning.update(self.partitioning())
        context.checks[self.slot] = compiled.check_orders

    def record(self, target: Target) -> dict[str, Any]:
        if target.compiled:
            return {"compile.partitioning": self.partitioning()}
        return {"optimizer.updates": "at gradient"}
