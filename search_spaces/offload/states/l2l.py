"""One layer at a time on the device, each updated on the host when its gradient is complete (L2L)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from memtune.effects import Effects
from memtune.offload.layer_major import Packs, spans
from memtune.offload.parameters import window_of
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.offload.states._common.layer_apply import apply_layers
from memtune.search_spaces.offload.states._common.layer_offload import in_layers
from memtune.search_spaces.offload.states._common.layer_rules import (
    EAGER_ONLY,
    cannot_run_on_ranks,
    other_gathers,
)
from memtune.search_spaces.offload.states._common.pack_technique import (
    apply_packs,
    cannot_run_packs,
    in_packs,
)
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique


class L2L(Technique):
    """Trades one H2D copy of the blocks' weights per pass for the bytes of all but one block's weights,
    gradients and state.

    A block's weights are loaded when it is called and when its backward begins, and freed before the next
    block's are loaded. Its gradients are offloaded when they are ready; once they are complete, one native
    pass updates the block, overlapped with backward of the block before it. Parameters in no block
    (embeddings, head) are resident and updated on the host at the end of the step. Device memory for the
    blocks' states does not grow with depth.

    `order: layer_major` is the paper's order: each layer runs all micro-batches before the next one begins,
    forward and backward, so its weights are loaded once a pass and its gradients offloaded once, for any
    number of micro-batches. Backward runs a layer's forward again from its input, which is kept on the
    device, or with `stash: host` on the host, so that device memory does not grow with depth at all. This
    needs a chain of blocks without random numbers, and `Tuned.step`, which has all micro-batches.
    `micro_batch_major` needs neither, but loads the weights for each micro-batch.
    """

    kind: Literal["l2l"] = "l2l"
    title: ClassVar[str] = "One layer's weights at a time on the device"
    source: ClassVar[str] = (
        "Pudipeddi et al. 2020, Training Large Neural Networks with Constant Memory, arXiv:2002.05645"
    )
    paper: ClassVar[str] = "L2L"
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    order: Literal["micro_batch_major", "layer_major"] = "micro_batch_major"
    """`layer_major`: each layer runs all micro-batches of a step before the next layer; for chains of blocks,
    and `Tuned.step` alone.
    """
    stash: Literal["device", "host"] = "device"
    """Tier of the layers' inputs until backward, with `order: layer_major`."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        order = ", each block runs all micro-batches" if self.order == "layer_major" else ""
        return f"keeps the blocks in host memory, with one block's weights at a time on the device{order}"

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.stash == "host" and not self._is_layer_major:
            raise ValueError(
                "layer inputs are stashed with order: layer_major only: set it, or leave out stash"
            )
        return self

    @property
    def _is_layer_major(self) -> bool:
        return self.order == "layer_major"

    @property
    def effects(self) -> Effects:
        # Layer-major it is Harmony with packs of one block, else a window of one.
        if self._is_layer_major:
            return Effects(
                averages="all",
                calls="block_hooks",
                layer_major=True,
                moves="block",
                parameters_on="host",
                eager_only=EAGER_ONLY,
                host_share=1.0,
            )
        return Effects(
            averages="blocks",
            calls="block_hooks",
            moves="block",
            parameters_on="host",
            eager_only=EAGER_ONLY,
            host_share=1.0,
        )

    def refuses(self, facts: Facts) -> Reason | None:
        return None if self._is_layer_major else other_gathers(facts)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require blocks that run one after the other and share no parameter, in float32; on several ranks
        replicas, or `fsdp`.

        Layer-major: a chain without random numbers and statistics, and ranks that neither shard nor
        replicate.
        """
        return (
            cannot_run_packs(self, program, target, alone=False)
            if self._is_layer_major
            else cannot_run_on_ranks(self, program, target)
        )

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Load every block in a window of one, or in a pack of its own."""
        if self._is_layer_major:
            return in_packs(program, _of_one_block(len(program.step.blocks)), self.stash)
        return in_layers(program, window_of(program, 1))

    def apply(self, context: Context, plan: Plan) -> None:
        """Move blocks' weights to the host and add hooks that load them, or run layer by layer."""
        if self._is_layer_major:
            apply_packs(context, _of_one_block(len(context.blocks)), self.stash, self.kind)
        else:
            apply_layers(context, 1)

    def record(self, target: Target) -> dict[str, Any]:
        knobs: dict[str, Any] = {"parameters": "host", "optimizer": "host", "trigger": "in_backward"}
        if not self._is_layer_major:
            return {"states.offload": {**knobs, "slots": 1}}
        packs = {
            "packing": "balanced",
            "backward": 1,
            "forward": None,
            "group": None,
            "joined": 1,
            "boundaries": self.stash,
            "prefetch": False,
        }
        return {
            "states.offload": {
                **knobs,
                "packs": packs | ({"parallelism": "data"} if target.ranks > 1 else {}),
            }
        }


def _of_one_block(blocks: int) -> Packs:
    return Packs(spans([1] * (blocks - 1)), spans([1] * blocks))
