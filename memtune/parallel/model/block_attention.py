"""Attention of some queries to some keys, with results that can be merged: the fused kernels with their
log-sum-exp.

Legend: B samples, H heads, G heads of key and value (H is a multiple), Q queries, K keys, D head size.

The softmax over all keys follows from those over blocks of them (Milakov & Gimelshein 2018, arXiv:1805.02867;
Dao et al. 2022, arXiv:2205.14135, section 3.1): outputs are averaged with weights exp(lse). A block's
backward is the kernel's own, given the output and log-sum-exp of *all* keys (Liu et al. 2023, Ring Attention,
arXiv:2310.01889).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from memtune.device import accelerator

_aten = torch.ops.aten


class Attended(NamedTuple):
    """Attention to some keys."""

    out: Tensor
    """(B, H, Q, D), with the layout of the queries."""
    lse: Tensor
    """(B, H, Q) in fp32 at least: log of the sum of exp of the scaled scores."""


class WeightMask(NamedTuple):
    """Dropout of attention's weights; applied before they are normalized, so that results can be merged."""

    pairs: Tensor
    """(B, H, Q, K): True for each weight that is kept."""
    scale: float
    """Factor of the weights that are kept."""

    def part(self, rows: slice, columns: slice) -> WeightMask:
        """Return the dropout of some queries and keys."""
        return WeightMask(self.pairs[:, :, rows, columns], self.scale)

    def apply_(self, weights: Tensor) -> Tensor:
        """Drop in place."""
        return weights.mul_(self.pairs).mul_(self.scale)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    scale: float | None,
    kept: WeightMask | None = None,
) -> Attended:
    """Return attention of `query` (B, H, Q, D) to (B, G, K, D); `causal` has Q and K at equal positions."""
    # Fused kernels draw numbers of their own, if they drop at all.
    kernel = _kernel(query) if kept is None else "plain"
    if kernel == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return Attended(out, lse)
    if kernel == "flash":
        found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return Attended(found[0], found[1])
    # The kernels above serve heads that share keys; those below do not.
    key, value = _of_every_head(query, key), _of_every_head(query, value)
    if kernel == "efficient":
        out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        # The kernel pads the rows of the log-sum-exp to a multiple of 32.
        return Attended(out, lse[:, :, : query.shape[2]])
    # No fused kernel returns a log-sum-exp here (old GPUs, odd head sizes, float64), or some weights are
    # dropped: the scores exist in full.
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    out = (weights if kept is None else kept.apply_(weights)) @ value.to(scores.dtype)
    # In the layout of the queries, as the kernels have it.
    return Attended(torch.empty_like(query).copy_(out), lse)


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    all_keys: Attended,
    *,
    causal: bool,
    scale: float | None,
    kept: WeightMask | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the contributions of these keys to the gradients of `query`, `key` and `value`.

    Args:
        gradient: Gradient of the output, like `query`.
        query: (B, H, Q, D).
        key: (B, G, K, D); some of the keys.
        value: Like `key`.
        all_keys: Attention of these queries to all keys.
        causal: As in `attend`.
        scale: As in `attend`.
        kept: As in `attend`.
    """
    out, lse = all_keys
    kernel = _kernel(query) if kept is None else "plain"
    if kernel == "cpu":
        backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return tuple(backward(gradient, query, key, value, out, lse, 0.0, causal, scale=scale))
    if kernel == "flash":
        unused = torch.empty(2, dtype=torch.uint64, device=query.device)  # the random state: nothing drops
        backward, lengths = _aten._scaled_dot_product_flash_attention_backward, (query.shape[2], key.shape[2])
        return tuple(
            backward(
                gradient,
                query,
                key,
                value,
                out,
                lse.contiguous(),
                None,
                None,
                *lengths,
                0.0,
                causal,
                unused,
                unused[0],
                scale=scale,
            )
        )
    heads = key.shape[1]
    key, value = _of_every_head(query, key), _of_every_head(query, value)
    if kernel == "efficient":
        found = _efficient_backward(gradient, query, key, value, all_keys, causal, scale)
    else:
        found = _plain_backward(gradient, query, key, value, all_keys, causal, scale, kept)
    return found[0], _of_shared_heads(found[1], heads), _of_shared_heads(found[2], heads)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which results of several blocks are summed."""
    return torch.promote_types(dtype, torch.float32)


def merge(total: Attended, more: Attended) -> None:
    """Merge attention to other keys into `total`, in place."""
    # Both weights are exp of a difference that is at most 0, so nothing overflows.
    lse = torch.logaddexp(total.lse, more.lse)
    total.out.mul_((total.lse - lse).exp_().unsqueeze(-1)).add_(
        more.out * (more.lse - lse).exp_().unsqueeze(-1)
    )
    total.lse.copy_(lse)


def _kernel(query: Tensor) -> str:
    """Return the kernel for `query`: CPU's, flash attention's, the memory-efficient one, plain products."""
    if query.device.type == "cpu":
        return "cpu"
    capability = accelerator.compute_capability(query.device)
    if (
        capability is not None
        and capability >= (8, 0)
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
    ):
        return "flash"
    return (
        "efficient"
        if capability is not None and query.dtype == torch.float32 and query.shape[-1] % 4 == 0
        else "plain"
    )


def _of_every_head(query: Tensor, shared: Tensor) -> Tensor:
    times = query.shape[1] // shared.shape[1]
    return shared if times == 1 else shared.repeat_interleave(times, 1)


def _of_shared_heads(gradient: Tensor, heads: int) -> Tensor:
    # Each query head that shares a head of keys has a part of its gradient.
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float | None) -> Tensor:
    dtype = accumulation_dtype(query.dtype)
    scores = (query.to(dtype) @ key.to(dtype).transpose(-1, -2)).mul_(_scale(query, scale))
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores.masked_fill_(later, -math.inf)
    return scores


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _efficient_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    all_keys: Attended,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = -(-query.shape[2] // 32) * 32  # what the kernel reads of the log-sum-exp
    # exp(score - inf) is 0: padded rows contribute nothing.
    lse = all_keys.lse.new_full((*all_keys.lse.shape[:2], rows), math.inf)
    lse[:, :, : query.shape[2]] = all_keys.lse
    # Philox seed and offset: the kernel wants them, and without dropout never reads them.
    unused = torch.zeros((), dtype=torch.int64, device="cpu")
    found = _aten._scaled_dot_product_efficient_attention_backward(
        gradient,
        query,
        key,
        value,
        None,
        all_keys.out,
        lse,
        unused,
        unused,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    return found[0], found[1], found[2]


def _plain_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    all_keys: Attended,
    causal: bool,
    scale: float | None,
    kept: WeightMask | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dao et al. 2022, appendix B.2 and B.4: dS = P ∘ (Z ∘ dP - rowsum(dO ∘ O)), Z the dropout."""
    weights = _scores(query, key, causal, scale).sub_(all_keys.lse.unsqueeze(-1)).exp_()
    dtype = weights.dtype
    gradient = gradient.to(dtype)
    dropped = weights if kept is None else kept.apply_(weights.clone())
    to_value = dropped.transpose(-1, -2) @ gradient
    del dropped
    of_weights = gradient @ value.to(dtype).transpose(-1, -2)
    if kept is not None:
        kept.apply_(of_weights)
    delta = (gradient * all_keys.out.to(dtype)).sum(-1, keepdim=True)
    of_scores = of_weights.sub_(delta).mul_(weights).mul_(_scale(query, scale))
    to_query, to_key = of_scores @ key.to(dtype), of_scores.transpose(-1, -2) @ query.to(dtype)
    return to_query.to(query.dtype), to_key.to(key.dtype), to_value.to(value.dtype)
