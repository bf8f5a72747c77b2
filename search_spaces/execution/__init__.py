"""Execution of a step: samples per micro-batch, micro-batches per step, torch.compile; `order/` has the order
of ops.

It comes before all passes: they work on the step that it describes.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from memtune.technique import CompileScope


class Execution(BaseModel):
    """Micro-batch × accumulation under a fixed global batch: the same samples in more, smaller parts."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )  # for the JSON Schema

    micro_batch: int | None = Field(default=None, ge=1, le=2**20)
    """Samples per forward on each rank; None leaves it to the training script. Smaller: fewer activations,
    more launches.
    """
    accumulate: int = Field(default=1, ge=1, le=2**20)
    """Micro-batches per optimizer step; larger: the same step from smaller parts."""
    compile: CompileScope = False
    """torch.compile: `blocks` compiles each block by itself, so that equal ones share a graph; `model` (or
    true) the whole model.
    """
    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """`inductor`: fused kernels, by Triton on CUDA and a C++ compiler on CPU; `aot_eager`: the same saved
    tensors, op by op.
    """

    autocast_cache: bool = True
    """False: under autocast each op makes its own cast of its weight; otherwise one cast of every weight is
    kept until the context ends. Equal results where one op uses a weight; blocks that recompute free the
    casts.
    """

    @field_validator("compile", mode="before")
    @classmethod
    def _true_is_model(cls, value: Any) -> Any:
        return "model" if value is True else value

    @model_validator(mode="after")
    def _backend_is_of_use(self) -> Execution:
        if self.compile is False and self.compile_backend != "inductor":
            raise ValueError("compile_backend without compile: set compile to blocks or model")
        return self

    def of_size(self, micro_batch: int | None, accumulate: int = 1) -> Execution:
        """Return the same eager execution with other micro-batches."""
        return Execution(micro_batch=micro_batch, accumulate=accumulate, autocast_cache=self.autocast_cache)

    def sentence(self) -> str:
        """Return the micro-batches and compilation as one plain clause; empty if the script decides them."""
        size = f"{self.micro_batch} sample{'s' * (self.micro_batch > 1)}" if self.micro_batch else ""
        batches = (
            f"{self.accumulate} micro-batches" if self.accumulate > 1 else "one micro-batch" if size else ""
        )
        parts = [f"runs {batches}{' of ' * bool(size)}{size} a step"] if batches else []
        parts += (
            ["compiles each block" if self.compile == "blocks" else "compiles the model"]
            if self.compile
            else []
        )
        backend = " (aot_eager)" if self.compile_backend != "inductor" else ""
        return ", ".join(parts) + backend

    def summary(self) -> str:
        """Return the differences from the plain step as text: `mb 4×2, compiled`; empty without any."""
        accumulate = f"×{self.accumulate}" if self.accumulate > 1 else ""
        size = f"mb {self.micro_batch or ''}{accumulate}" if self.micro_batch or accumulate else ""
        return " ".join(part for part in (size, self._compiled()) if part)

    def _compiled(self) -> str:
        if not self.compile:
            return ""
        return f"compiled({self.compile}" + (
            f", {self.compile_backend})" if self.compile_backend != "inductor" else ")"
        )
