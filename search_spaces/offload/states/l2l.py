"""One layer at a time on the device, each updated on the host as soon as its gradient is whole (L2L, Pudipeddi et al. 2020)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from memtune.program import Program
from memtune.runtime.context import Context
from memtune.search_spaces.offload.states._layers import EAGER_ONLY, apply_layers, cannot_run_on_ranks, in_layers, window_of
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class L2L(Technique):
    """Trades one copy of the blocks' weights up per pass for all but one block's weights, gradients and state on the device.

    A block's weights come in when it is called and when its backward begins, and go before the next one's come in. Its gradients
    leave as they land; once they are whole, one native pass updates the block, beside the device's work on the block before it.
    What is in no block (embeddings, head) stays on the device and is updated on the host at the end of the step. Device memory
    for the blocks' states does not grow with depth. Micro-batches take turns: each brings the weights up again (L2L proper runs
    all micro-batches through a layer before the next one, which is an order of execution).

    Distinguishing test: at every op at most one block's weights are on the device, and each block is updated before the backward
    of the block before it begins to compute.
    """

    kind: Literal["l2l"] = "l2l"
    slot: ClassVar[str] = "offload.states"
    title: ClassVar[str] = "One layer's weights at a time on the device"
    source: ClassVar[str] = "Pudipeddi et al. 2020, Training Large Neural Networks with Constant Memory, arXiv:2002.05645"
    exactness: ClassVar[Exactness] = Exactness.REORDERED
    eager_only: ClassVar[str] = EAGER_ONLY
    averages_blocks: ClassVar[bool] = True

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks that run one after the other and share nothing, in float32; several ranks: replicas, or `fsdp`."""
        return cannot_run_on_ranks(program, target)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Every block in a window of one."""
        return in_layers(program, window_of(program, 1))

    def apply(self, context: Context, plan: Plan) -> None:
        """Blocks' weights to the host, hooks that bring them in."""
        apply_layers(context, self.kind, 1)

    def least_share_on_host(self) -> float:
        """All of it."""
        return 1.0

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of parameters and optimizer, and when each block is updated."""
        return {"states.offload": {"parameters": "host", "optimizer": "host", "trigger": "in_backward", "slots": 1}}
