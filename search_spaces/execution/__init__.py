"""How a step is executed: samples per micro-batch, micro-batches per step, their order, compiled or not.

The first pass: everything else works on the step that this one describes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Order(BaseModel):
    """In which order micro-batches and layers run."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["program"] = "program"
    """`program`: micro-batch after micro-batch, as the user's code does it."""


class Execution(BaseModel):
    """Micro-batch × accumulation under a fixed global batch: the same samples per step, in more and smaller parts."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    micro_batch: int | None = Field(default=None, ge=1)
    """Samples per forward on each rank; None leaves it to the training script. Smaller: fewer activations, more launches."""
    accumulate: int = Field(default=1, ge=1)
    """Micro-batches per optimizer step; larger: the same step from smaller parts."""
    order: Order = Order()
    compile: bool = False
    """Run the model through torch.compile."""

    def summary(self) -> str:
        """`mb 4×2, compiled`: what differs from the plain step, for people; empty when nothing does."""
        accumulate = f"×{self.accumulate}" if self.accumulate > 1 else ""
        size = f"mb {self.micro_batch}{accumulate}" if self.micro_batch else f"mb {accumulate}" if accumulate else ""
        return " ".join(part for part in (size, "compiled" if self.compile else "") if part)
