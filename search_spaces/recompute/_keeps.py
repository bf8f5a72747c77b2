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
    "flash_attn._flash_attn_forward", "flash_attn._flash_attn_varlen_forward",  # as the flash-attn package registers them
)  # fmt: skip


def is_matmul_or_attention(op: Any) -> bool:
    """Whether `op` (an op, or its name) is a matrix product, a convolution, a recurrent layer or an attention forward."""
    return str(op) in MATMULS or is_attention(op)


def is_attention(op: Any) -> bool:
    """Whether `op` (an op, or its name) is the forward of a fused attention kernel."""
    name = str(op)
    return name.startswith(_ATTENTION) and "backward" not in name
