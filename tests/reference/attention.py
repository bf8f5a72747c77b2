"""Attention on one rank: the reference for sharded attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLES, HEADS, SHARED, LENGTH, HEAD = 2, 8, 2, 32, 4


def made() -> list[Tensor]:
    """Return query, key, value and a gradient of the output, equal on all ranks."""
    torch.manual_seed(0)
    return [torch.randn(SAMPLES, n, LENGTH, HEAD) for n in (HEADS, SHARED, SHARED, HEADS)]


def one_rank(causal: bool, dropout_p: float = 0.0) -> list[Tensor]:
    """Return output and gradients; what is dropped is drawn from seed 1."""
    *given, gradient = made()
    given = [each.requires_grad_() for each in given]
    torch.manual_seed(1)
    out = F.scaled_dot_product_attention(*given, dropout_p=dropout_p, is_causal=causal, enable_gqa=True)
    out.backward(gradient)
    return [out.detach(), *(each.grad for each in given if each.grad is not None)]
