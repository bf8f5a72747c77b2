"""Which ops do the expensive work of a forward: matrix products, convolutions and attention."""

from __future__ import annotations

from typing import Any

MATMULS = frozenset(
    f"aten.{name}"
    for name in (
        "mm.default", "addmm.default", "bmm.default", "baddbmm.default", "_scaled_mm.default", "linear.default",
        "convolution.default", "_convolution.default", "mkldnn_rnn_layer.default", "_cudnn_rnn.default", "_grouped_mm.default",
    )
)  # fmt: skip

_ATTENTION = (
    "aten._scaled_dot_product_", "aten._flash_attention_forward", "aten._efficient_attention_forward", "aten._cudnn_attention",
)  # fmt: skip


def is_matmul_or_attention(op: Any) -> bool:
    """Whether `op` (an op, or its name) is a matrix product, a convolution, a recurrent layer or an attention forward."""
    name = str(op)
    return name in MATMULS or (name.startswith(_ATTENTION) and "backward" not in name)
