"""Compiled graphs run their ops in an order under which fewer bytes are live at once."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.errors import ApplyError
from memtune.program import Program
from memtune.runtime.context import Context
from memtune.runtime.partitioner import LOW_PEAK
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class Roam(Technique):
    """Trades nothing but planning time, once per graph, for a lower peak inside compiled graphs: same ops, same bits.

    Forward and backward graphs are ordered apart, as the paper's independent segments are: program order with ops moved up that
    let go of more than they make, and windows around the peak ordered exactly. A graph keeps program order where none is better.
    Random ops and whatever has effects keep their order among themselves, writes theirs with all that touches the same memory.
    The program is recorded from the graphs so ordered. Its layout half is `allocator: {kind: planned_layout}`.

    Distinguishing test: graphs of up to twelve ops reach the peak of the best of all orders.
    """

    kind: Literal["roam"] = "roam"
    slot: ClassVar[str] = "execution.order"
    title: ClassVar[str] = "Ops in a low-peak order"
    source: ClassVar[str] = "Shu et al. 2023, ROAM: memory-efficient large DNN training via operator ordering, arXiv:2310.19295"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs graphs that run op by op, in the order in which they are."""
        if not target.compiled:
            return Reason("eager code runs in program order", "execution: {compile: blocks, compile_backend: aot_eager}")
        if target.compile_backend == "inductor":
            return Reason("inductor orders its kernels itself", "execution: {compile_backend: aot_eager}")
        return None

    def partitioning(self) -> dict[str, Any]:
        """Both graphs that the partitioner makes are ordered."""
        return {LOW_PEAK: True}

    def apply(self, context: Context, plan: Plan) -> None:
        """Have graphs ordered when they are made."""
        compiled = context.compiled
        if compiled is None or compiled.backend == "inductor":
            raise ApplyError(
                "execution: {order: {kind: roam}} orders compiled graphs that run op by op, and there are none.",
                evidence="Nothing is compiled." if compiled is None else "Inductor orders its kernels itself.",
                fix="execution: {compile: blocks, compile_backend: aot_eager}", code="MT315",
            )  # fmt: skip
        compiled.partitioning.update(self.partitioning())
        context.checks[self.slot] = compiled.check_orders

    def record(self, target: Target) -> dict[str, Any]:
        """What is done to graphs when they are made."""
        return {"compile.partitioning": self.partitioning()}
