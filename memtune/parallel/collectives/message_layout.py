"""Layout of a quantized message: the rows, blocks and bytes, in plain numbers.

A message is made of rows, one for each rank that sends or receives. Values of large parameters become
integers of `bits` bits relative to the largest of each `block`; those of small ones (norms, biases, routers)
are sent in float32. The format of a row is that of `csrc/quant/quantise.h`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Bits = Literal[4, 8]
Gathering = Literal["flat", "hierarchical", "ho_ring"]
ALIGNMENT_BYTES = 16
SCALE_BYTES = 4
"""A float32 per block."""
KEPT_BYTES = 4
"""Values that are not quantized are sent in float32."""
LEVELS: dict[int, int] = {4: 7, 8: 127}
"""The largest integer of a code."""


@dataclass(frozen=True)
class Form:
    """Number format of values in a message."""

    bits: Bits
    block: int
    """Values that share a scale; even, so that no byte of 4-bit integers holds values of two blocks."""
    exact_below: int
    """Parameters with fewer elements are not quantized."""

    def row(self, numel: Sequence[int], kept: Sequence[bool]) -> Row:
        """Return the message row of `numel[i]` values of the i-th parameter, quantized unless `kept[i]`."""
        lengths: list[int] = []  # an even number of them: the next one is quantised
        for count, is_kept in zip(numel, kept, strict=True):
            if is_kept and lengths and len(lengths) % 2 == 0:
                lengths[-1] += count
                continue
            if is_kept != (len(lengths) % 2 == 1):  # the blocks of every parameter are its own
                lengths.append(0)
            lengths.append(count)
        return Row(tuple(lengths), self.bits, self.block)


@dataclass(frozen=True)
class Row:
    """Stretches of values, alternately quantized and kept."""

    lengths: tuple[int, ...]
    bits: Bits
    block: int

    @property
    def numel(self) -> int:
        """Number of values."""
        return sum(self.lengths)

    @property
    def n_bytes(self) -> int:
        """Bytes in a message: scales, kept values and codes, rounded up to 16."""
        quantised, kept = self.lengths[::2], sum(self.lengths[1::2])
        scales = sum(-(-count // self.block) for count in quantised)
        codes = sum(count if self.bits == 8 else -(-count // 2) for count in quantised)
        whole = SCALE_BYTES * scales + KEPT_BYTES * kept + codes
        return -(-whole // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Communication:
    """Collectives of sharded weights and gradients over nodes of `ranks_per_node` consecutive ranks."""

    ranks_per_node: int
    weights: Form | None = None
    """Format of gathered weights (ZeRO++ qwZ); None: unquantized."""
    secondary: bool = False
    """Every node keeps the weights gathered in forward, sharded over its ranks, for backward (hpZ)."""
    gradients: Form | None = None
    """Format of gradients, exchanged inside the node, then between nodes (qgZ); None: reduce-scatter."""
    gather: Gathering = "flat"
    """All ranks in one ring; between nodes, then inside them (MiCS); or both at once (PaRO's HO-Ring)."""
    ring_reductions: bool = False
    """Sum gradients inside each node and at the same time in rings over nodes (HO-Ring reversed)."""
    feedback: bool = False
    """True if the first hop's quantization error is added to the next gradients, in float32 memory."""

    @property
    def by_node(self) -> bool:
        """True if the collectives depend on the ranks of a node."""
        return self.secondary or self.gradients is not None or self.gather != "flat" or self.ring_reductions

    @property
    def changes_reductions(self) -> bool:
        """True if gradients are reduced otherwise than by one reduce-scatter."""
        return self.gradients is not None or self.ring_reductions

    @property
    def changes_gathers(self) -> bool:
        """True if parameters are gathered otherwise than by one all-gather."""
        return self.weights is not None or self.secondary or self.gather != "flat"
