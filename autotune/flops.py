"""Floating-point operations of one ATen call: torch's own formulas for matrix products, one per element for the rest."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


def count(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """FLOPs of calling `func`; a multiply and an add count as two."""
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out))
    return float(sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)))
