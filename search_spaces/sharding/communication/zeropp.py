"""Fewer bytes between nodes: quantized weight gathers, a copy of the weights in every node, quantized
gradients (ZeRO++).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from memtune.parallel.collectives import Bits, Communication, Form
from memtune.program import Program, Step, columns_of
from memtune.search_spaces.sharding.communication import _node_groups
from memtune.search_spaces.sharding.communication._custom_collectives import _CustomCollectives
from memtune.technique import Exactness, Reason, Target


class ZeroPp(_CustomCollectives):
    """Trades memory (hpZ) or exactness (qwZ, qgZ) for bytes on the link between nodes; each part has its own
    switch.

    hpZ: every node keeps the weights gathered in forward, 1/k of them on each of its k ranks, until the
    unit's backward gathers them inside the node; bitwise. qwZ: weights are gathered as integers relative to
    the largest of each block, M bytes in bfloat16 become M/2 with 8 bits; all ranks compute with the same
    rounded weights, masters are exact; lossy. qgZ: gradients are exchanged as integers in two hops of
    all-to-all, inside the node and then between nodes, and summed in float32 after each; M becomes M/4 with 4
    bits; lossy.

    The error of a quantized element is at most half a step, the largest of its block over 254 (8 bits) or 14
    (4 bits).
    """

    kind: Literal["zeropp"] = "zeropp"
    title: ClassVar[str] = "Fewer bytes between nodes"
    source: ClassVar[str] = (
        "Wang et al. 2023, ZeRO++, arXiv:2306.10209, sections 3.1 (qwZ), 3.2 (hpZ) and 3.3 (qgZ)"
    )
    paper: ClassVar[str] = "ZeRO++"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    hpz: bool = True
    """Backward gathers inside the node, from a copy of 1/k of the model's bytes on each of its k ranks."""
    qwz: bool = False
    """Weights are gathered in `weight_bits`."""
    qgz: bool = False
    """Gradients are exchanged in `gradient_bits`, in two hops."""
    weight_bits: Bits = 8
    """Bits of a weight on the link; 4 is half the bytes and eighteen times the step between two values."""
    gradient_bits: Bits = 4
    """Bits of a gradient on the link; 8 is twice the bytes and an eighteenth of the step."""
    error_feedback: bool = False
    """With qgz: the quantization error of a rank's gradients is added to its next ones, for 4 bytes per
    element of an unsharded gradient.
    """
    block: Annotated[int, Field(ge=16, le=4096, multiple_of=2)] = 256
    """Values that share a scale of 4 bytes; small blocks are more exact and carry more scales."""
    exact_below: Annotated[int, Field(ge=0)] = 65536
    """Parameters with fewer elements (norms, biases, routers) travel in float32: few bytes, and the most
    sensitive ones.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        parts = ["gathers weights inside the node in backward"] if self.hpz else []
        parts += [f"sends weights in {self.weight_bits} bits"] if self.qwz else []
        parts += [f"sends gradients in {self.gradient_bits} bits"] if self.qgz else []
        return ", ".join(parts) or "sends weights and gradients as they are"

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not (self.hpz or self.qwz or self.qgz):
            raise ValueError("with hpz, qwz and qgz off it is sharding.communication: none")
        if self.error_feedback and not self.qgz:
            raise ValueError("error_feedback corrects the gradients that qgz quantizes")
        return self

    def exactly(self) -> Exactness:
        # hpZ gathers the same shards from a nearer place.
        return Exactness.LOSSY if self.qwz or self.qgz else Exactness.BITWISE

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require parameters that FSDP2 shards, several nodes for hpZ and qgZ, one float type to quantize."""
        return (
            (_node_groups.one_node(target, self.ranks_per_node) if self.hpz or self.qgz else None)
            or (_cannot_quantize(program.step) if self.qwz or self.qgz else None)
            or _node_groups.unsharded(self, target)
            or (self._no_copy_to_keep(target) if self.hpz else None)
            or (
                _node_groups.uneven_nodes(_node_groups.ranks_of(target, self.ranks_per_node))
                if self.hpz or self.qgz
                else None
            )
        )

    def _no_copy_to_keep(self, target: Target) -> Reason | None:
        if not _node_groups.gathers_again(target):
            return Reason(
                "nothing is gathered again in backward", "reshard_after_forward: true, or hpz: false"
            )
        return None

    def _communication(self, ranks_per_node: int) -> Communication:
        weights = Form(self.weight_bits, self.block, self.exact_below) if self.qwz else None
        gradients = Form(self.gradient_bits, self.block, self.exact_below) if self.qgz else None
        return Communication(ranks_per_node, weights, self.hpz, gradients, feedback=self.error_feedback)

    def choices(self) -> dict[str, tuple[Any, ...]]:
        # Lossy parts are proposed only if the user allows them.
        return {
            "hpz": (True, False),
            "qwz": (False, True),
            "qgz": (False, True),
            "error_feedback": (False, True),
        }


def _cannot_quantize(step: Step) -> Reason | None:
    """Return why a unit's parameters do not travel as one array of floats."""
    sizes = set(columns_of(step.parameters).itemsize.tolist())
    if len(sizes) > 1:
        return Reason("parameters of several types travel as plain bytes", "one dtype for all parameters")
    return (
        None
        if sizes <= {2, 4}
        else Reason("only float32, bfloat16 and float16 are quantized", "sharding.communication: none")
    )
