"""One layer at a time on the device, each updated on the host as soon as its gradient is whole (L2L,
Pudipeddi et al. 2020).
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from memtune.effects import Effects
from memtune.offload.layer_major import Packs, Span, spans
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common import (
    EAGER_ONLY,
    apply_layers,
    apply_packs,
    cannot_run_on_ranks,
    in_layers,
    in_packs,
    not_in_packs,
    window_of,
)
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class L2L(Technique):
    """Trades one copy of the blocks' weights up per pass for all but one block's weights, gradients and state
    on the device.

    A block's weights come in when it is called and when its backward begins, and go before the next one's
    come in. Its gradients leave as they land; once they are whole, one native pass updates the block, beside
    the device's work on the block before it. What is in no block (embeddings, head) stays on the device and
    is updated on the host at the end of the step. Device memory for the blocks' states does not grow with
    depth.

    `micro_batches: together` is the paper's order: each layer runs all micro-batches before the next one
    begins, forward and back, so its weights come in once a pass and its gradients leave once, whatever the
    number of micro-batches. Backward runs a layer forward again from what it started from, which waits on the
    device, or with `stash: host` on the host, where device memory does not grow with depth at all. That needs
    a chain of blocks without random numbers, and `Tuned.step`, which has all micro-batches. `one_by_one`
    needs neither; each micro-batch brings the weights up again.

    Distinguishing test: at every op at most one block's weights are on the device, and each block is updated
    before the backward of the block before it begins to compute; together, bytes of weights and gradients on
    the link do not grow with the number of micro-batches.
    """

    kind: Literal["l2l"] = "l2l"
    slot: ClassVar[str] = "offload.states"
    title: ClassVar[str] = "One layer's weights at a time on the device"
    source: ClassVar[str] = (
        "Pudipeddi et al. 2020, Training Large Neural Networks with Constant Memory, arXiv:2002.05645"
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    micro_batches: Literal["one_by_one", "together"] = "one_by_one"
    """`together`: each layer runs all of a step's before the next one; for chains of blocks, and `Tuned.step`
    alone.
    """
    stash: Literal["device", "host"] = "device"
    """Where what layers start from waits for backward, of all micro-batches that run together."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.stash == "host" and not self._together:
            raise ValueError(
                "nothing waits for micro-batches that run one by one: set micro_batches: together, or leave"
                " out stash"
            )
        return self

    @property
    def _together(self) -> bool:
        return self.micro_batches == "together"

    @property
    def effects(self) -> Effects:
        """Together in packs of one block; one by one in a window of one."""
        if self._together:
            return Effects(
                averages="all",
                calls="block_hooks",
                packs=_single_blocks,
                moves="block",
                eager_only=EAGER_ONLY,
                host_share=1.0,
            )
        return Effects(
            averages="blocks", calls="block_hooks", moves="block", eager_only=EAGER_ONLY, host_share=1.0
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs blocks that run one after the other and share nothing, in float32; several ranks: replicas,
        or `fsdp`.

        Together: a chain without random numbers and statistics, ranks that do not divide or replicate.
        """
        return (
            not_in_packs(self, program, target, alone=False)
            if self._together
            else cannot_run_on_ranks(self, program, target)
        )

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Every block in a window of one, or a pack of its own."""
        if self._together:
            return in_packs(program, _of_one_block(len(program.step.blocks)), self.stash)
        return in_layers(program, window_of(program, 1))

    def apply(self, context: Context, plan: Plan) -> None:
        """Blocks' weights to the host, hooks that bring them in; together, `Tuned.step` runs layer by
        layer.
        """
        if self._together:
            apply_packs(context, _of_one_block(len(context.blocks)), self.stash, self.kind)
        else:
            apply_layers(context, self.kind, 1)

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of parameters and optimizer, and when each block is updated; together, as packs of one block
        have it.
        """
        how: dict[str, Any] = {"parameters": "host", "optimizer": "host", "trigger": "in_backward"}
        if not self._together:
            return {"states.offload": {**how, "slots": 1}}
        packs = {
            "packing": "balanced",
            "backward": 1,
            "forward": None,
            "group": None,
            "boundaries": self.stash,
            "prefetch": False,
        }
        return {"states.offload": {**how, "packs": packs | ({"across": "data"} if target.ranks > 1 else {})}}


def _single_blocks(plan: Plan, blocks: int) -> tuple[Span, ...]:
    return spans([1] * blocks)


def _of_one_block(blocks: int) -> Packs:
    return Packs(spans([1] * (blocks - 1)), spans([1] * blocks))
