"""Keep saved activations of the blocks as 8- or 4-bit integers until backward (ActNN, GACT)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune import refusals
from memtune.activations.offload import OffloadClaim, add_plain_scratch, move_activations
from memtune.device import Capability
from memtune.effects import Effects
from memtune.program import Compression, Program, SavedTensorPolicy, compress
from memtune.runtime import Context
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class Compressed(Technique):
    """Trades exact gradients, and a pass over each saved tensor in forward and in backward, for 3/4 (8 bits)
    or 7/8 (4 bits) of the bytes of float32 activations, half of that of 16-bit ones.

    Every `group` of values is stored as integers between its least and its largest value, which take 8 bytes
    (ActNN). Forward is exact; backward reads values with an error of less than a step, the group's range over
    255 or 15, whose mean is zero under stochastic rounding. Storages are compressed once, for all views.
    Parameters and autocast's casts of them, buffers, indices, masks, float64 and statistics (at most an
    eighth of the block's largest input: means, norms, log-sum-exps) stay as they are. Infinities and NaN
    survive. A positive ReLU output below a step may become zero, which masks its gradient: models of ReLU and
    BatchNorm lose most. It combines with recompute: then the blocks' inputs and kept outputs are compressed.

    The bits are the same for all tensors; GACT's choice of bits per tensor by its effect on the gradient is
    not made.
    """

    kind: Literal["compressed"] = "compressed"
    title: ClassVar[str] = "Saved activations in 8 or 4 bits"
    source: ClassVar[str] = (
        "Chen et al. 2021, ActNN, arXiv:2104.14129; Liu et al. 2022, GACT, arXiv:2206.11357"
    )
    paper: ClassVar[str] = "ActNN"
    exactness: ClassVar[Exactness] = Exactness.LOSSY
    effects: ClassVar[Effects] = Effects(activations="uniform")

    bits: Literal[4, 8] = 8
    """Bits of a value; 4 is half the bytes and seventeen times the step between two values."""
    group: Annotated[int, Field(ge=16, le=4096, multiple_of=2)] = 256
    """Values that share their range; small groups are more exact and take more bytes, 8 each."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """`stochastic` has the value as its mean over seeds, `nearest` half the largest error."""
    min_bytes: Annotated[int, Field(ge=0)] = 4096
    """Smaller tensors stay as they are: a kernel has a fixed cost."""

    def sentence(self) -> str:
        """Return the setting as one clause."""
        return f"keeps the blocks' saved activations in {self.bits} bits until backward"

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require blocks, eager mode or compiled blocks, and a large enough saved tensor of floats."""
        step = program.step
        if not step.blocks:
            return refusals.no_blocks_to_offload()
        if target.compiled == "model":
            return refusals.one_graph()
        saved = step.saves.storage[step.saves.block >= 0]
        if not (step.storages.bytes[saved][step.storages.float_bytes[saved] > 0] >= self.min_bytes).any():
            return refusals.no_large_activation(self.min_bytes)
        return None

    @property
    def _policy(self) -> SavedTensorPolicy:
        return compress(self.bits, self.group, at_random=self.rounding == "stochastic")

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Add the compression at each save and the decompression before each first use."""
        claims = [
            OffloadClaim(block, 1.0, self.min_bytes, policy=self._policy)
            for block in range(len(program.step.blocks))
        ]
        step = move_activations(program.step, claims, stages=program.stages)
        platform, (hop,) = target.hardware.platform, self._policy.hops
        in_torch = not platform.is_host and Capability.TRITON not in platform.capabilities
        if in_torch and isinstance(hop, Compression):
            from memtune.activations.offload import plain_scratch_bytes  # imports torch

            step = add_plain_scratch(step, hop, plain_scratch_bytes)
        return program.with_step(step)

    def apply(self, context: Context, plan: Plan) -> None:
        """Claim all blocks in the activation table."""
        for region in context.activations.regions:
            context.activations.claim_move(region.index, 1.0, self.min_bytes, policy=self._policy)

    def record(self, target: Target) -> dict[str, Any]:
        return {"activations.compress": dict(self.knobs())}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        return {"bits": (8, 4)}
