"""Attention in blocks of keys: their results add up to attention over all keys, and so do their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memtune.parallel.model import block_attention
from memtune.parallel.model.block_attention import Attended, attend, attend_backward, merge

SAMPLES, HEADS, LENGTH, HEAD = 2, 4, 12, 8


def made(shared: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value and a gradient of the output."""
    torch.manual_seed(0)
    heads = (HEADS, shared, shared, HEADS)
    return [
        torch.randn(SAMPLES, n, LENGTH, HEAD).to(device, dtype).requires_grad_(i < 3)
        for i, n in enumerate(heads)
    ]


def in_blocks(
    tensors: list[torch.Tensor], causal: bool, scale: float | None, blocks: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and gradients; causal blocks are those on the diagonal, and earlier ones whole."""
    query, key, value, gradient = (each.detach() for each in tensors)
    wide = torch.promote_types(query.dtype, torch.float32)
    size = LENGTH // blocks
    parts = [slice(start, start + size) for start in range(0, LENGTH, size)]
    pairs = [(q, k, causal and q == k) for q in range(blocks) for k in range(blocks) if not causal or k <= q]
    out = torch.zeros_like(query, dtype=wide)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=wide)
    for q, k, diagonal in pairs:
        rows, columns = parts[q], parts[k]
        more = attend(
            query[:, :, rows], key[:, :, columns], value[:, :, columns], causal=diagonal, scale=scale
        )
        merge(Attended(out[:, :, rows], lse[:, :, rows]), more)
    total = Attended(out.to(query.dtype), lse)
    found = [torch.zeros_like(each, dtype=wide) for each in (query, key, value)]
    for q, k, diagonal in pairs:
        rows, columns = parts[q], parts[k]
        added = attend_backward(
            gradient[:, :, rows],
            query[:, :, rows],
            key[:, :, columns],
            value[:, :, columns],
            Attended(total.out[:, :, rows], lse[:, :, rows]),
            causal=diagonal,
            scale=scale,
        )
        for to, part, where in zip(found, added, (rows, columns, columns), strict=True):
            to[:, :, where] += part
    return total.out, found


def check(
    tensors: list[torch.Tensor], causal: bool, scale: float | None, blocks: int, tolerance: float = 1e-5
) -> None:
    """Against torch's attention in fp32 over all keys at once."""
    plain = [each.detach().float().requires_grad_(each.requires_grad) for each in tensors]
    wanted = F.scaled_dot_product_attention(*plain[:3], is_causal=causal, scale=scale, enable_gqa=True)
    wanted.backward(plain[3])
    out, gradients = in_blocks(tensors, causal, scale, blocks)
    torch.testing.assert_close(out.float(), wanted.detach(), rtol=tolerance, atol=tolerance)
    for found, each in zip(gradients, plain, strict=False):
        torch.testing.assert_close(found.float(), each.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", ["cpu", "plain"])
@pytest.mark.parametrize(("shared", "causal", "scale"), [(4, True, None), (2, True, 0.3), (1, False, None)])
def test_merged_block_attention_equals_full_attention(
    kernel: str, shared: int, causal: bool, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "_kernel", lambda query: kernel)
    for blocks in (1, 2, 3):
        check(made(shared), causal, scale, blocks)


@pytest.mark.parametrize("kernel", ["cpu", "plain"])
def test_block_attention_outputs_have_layout_of_torch(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next op of a block (`transpose(1, 2).flatten(2)`) returns a view of it, or a copy, as without."""
    monkeypatch.setattr(block_attention, "_kernel", lambda query: kernel)
    query, key, value, _ = (each.detach() for each in made(4))
    for mine in (query, query.transpose(1, 2).contiguous().transpose(1, 2)):
        wanted = F.scaled_dot_product_attention(mine, key, value)
        assert attend(mine, key, value, causal=False, scale=None).out.stride() == wanted.stride()


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
@pytest.mark.parametrize("shared", [4, 2])
def test_kernels_of_gpus_take_these_arguments(
    dtype: torch.dtype, kernel: str, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without memory have all that torch checks of a call: names, types and sizes."""
    monkeypatch.setattr(block_attention, "_kernel", lambda query: kernel)
    query, key, value, gradient = (each.detach() for each in made(shared, "meta", dtype))
    found = attend(query, key, value, causal=True, scale=None)
    assert (found.out.shape, found.out.dtype) == (query.shape, dtype)
    assert (found.lse.shape, found.lse.dtype) == (query.shape[:3], torch.float32)
    gradients = attend_backward(gradient, query, key, value, found, causal=True, scale=0.5)
    assert [(each.shape, each.dtype) for each in gradients] == [
        (each.shape, dtype) for each in (query, key, value)
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient"), (torch.float64, "plain")]
)
@pytest.mark.parametrize(("shared", "causal"), [(4, True), (2, True), (2, False)])
def test_merged_block_attention_equals_full_attention_on_gpu(
    dtype: torch.dtype, kernel: str, shared: int, causal: bool
) -> None:
    tensors: Any = made(shared, "cuda", dtype)
    assert block_attention._kernel(tensors[0]) == kernel
    check(tensors, causal, None, 3, 3e-2 if dtype == torch.bfloat16 else 1e-4)
