"""Attention as one rank computes it: what ways to divide it are held to."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SAMPLES, HEADS, SHARED, LENGTH, HEAD = 2, 8, 2, 32, 4


def made() -> list[Tensor]:
    """Query, key, value and a gradient of the output, the same on every rank."""
    torch.manual_seed(0)
    return [torch.randn(SAMPLES, n, LENGTH, HEAD) for n in (HEADS, SHARED, SHARED, HEADS)]


def one_rank(causal: bool) -> list[Tensor]:
    """Output and gradients."""
    *given, gradient = made()
    given = [each.requires_grad_() for each in given]
    out = F.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=True)
    out.backward(gradient)
    return [out.detach(), *(each.grad for each in given if each.grad is not None)]
