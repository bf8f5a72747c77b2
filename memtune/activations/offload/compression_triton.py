"""Compressed activations on GPU: Triton kernels with the bits of `csrc/quant/groups.inl`.

Imported only where tensors are on a GPU; torch's CUDA builds bring Triton along.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

# Triton reads the kernels' source, in which an annotation says what is known of a parameter at compile time.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""Values that one program takes: whole groups."""


def compress_(packed: Tensor, values: Tensor, bits: int, group: int, seed: int) -> None:
    """Implement `torch.ops.memtune.compress` on GPU; a negative seed rounds to the nearest."""
    width, tile, grid = _tiles(values.numel(), group)
    header = packed.view(torch.int32)
    codes_at = 8 * triton.cdiv(values.numel(), group)
    _compress[grid](
        *(values, packed, header, values.numel(), group, codes_at, seed),
        WIDTH=width,
        TILE=tile,
        BITS=bits,
        RANDOM=seed >= 0,
        enable_fp_fusion=False,
    )


def decompress_(values: Tensor, packed: Tensor, bits: int, group: int) -> None:
    """Implement `torch.ops.memtune.decompress` on GPU."""
    width, tile, grid = _tiles(values.numel(), group)
    codes_at = 8 * triton.cdiv(values.numel(), group)
    _decompress[grid](
        *(values, packed, packed.view(torch.int32), values.numel(), group, codes_at),
        WIDTH=width,
        TILE=tile,
        BITS=bits,
        enable_fp_fusion=False,
    )


def _tiles(numel: int, group: int) -> tuple[int, int, tuple[int]]:
    """Return the group width rounded up to a power of two, groups per program, and the number of programs."""
    width: int = triton.next_power_of_2(group)
    tile = max(1, _TILE // width)
    return width, tile, (triton.cdiv(triton.cdiv(numel, group), tile),)


@triton.jit
def _compress(
    values,
    packed,
    header,
    numel,
    group,
    codes_at,
    seed,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    RANDOM: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)  # (TILE,) groups
    place = tl.arange(0, WIDTH)[None, :]  # (1, WIDTH) values of a group
    at = number[:, None] * group + place
    there = (place < group) & (at < numel)
    x = tl.load(values + at, there, other=0.0).to(tl.float32)
    large = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7E800000  # 2^126
    used = there & (large == 0)
    least = tl.min(tl.where(used, x, float("inf")), 1)
    largest = tl.max(tl.where(used, x, float("-inf")), 1)
    no_value = tl.max(used.to(tl.int32), 1) == 0
    has_large = tl.max(large.to(tl.int32), 1) > 0
    top = tl.where(has_large, (1 << BITS) - 4.0, (1 << BITS) - 1.0)
    least = tl.where(no_value | (least == 0.0), 0.0, least)  # a zero is positive
    largest = tl.where(no_value, 0.0, largest)
    step = tl.div_rn(largest, top) - tl.div_rn(least, top)
    is_wide = step >= 1.504632769052528e-36  # 2^-119
    inverse = tl.where(
        is_wide, tl.div_rn(tl.full([TILE], 1.0, tl.float32), tl.where(is_wide, step, 1.0)), 0.0
    )
    step = tl.where(is_wide, step, 0.0)
    bits = step.to(tl.int32, bitcast=True)
    inside = number * group < numel
    tl.store(header + 2 * number, least.to(tl.int32, bitcast=True), inside)
    tl.store(header + 2 * number + 1, tl.where(has_large, bits | -2147483648, bits), inside)
    t = tl.where(large, 0.0, x - least[:, None]) * inverse[:, None]
    t = tl.minimum(t, top[:, None])
    if RANDOM:
        hashed = t.to(tl.uint32, bitcast=True) ^ (at * 0x9E3779B9 + seed).to(tl.uint32)
        hashed = (hashed ^ (hashed >> 16)) * 0x85EBCA6B
        hashed = (hashed ^ (hashed >> 13)) * 0xC2B2AE35
        drawn = ((hashed ^ (hashed >> 16)) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    else:
        drawn = tl.full([TILE, WIDTH], 0.5, tl.float32)
    last = top.to(tl.int32)[:, None]
    code = tl.minimum((t + drawn).to(tl.int32), last)
    special = last + tl.where(x != x, 3, tl.where(x > 0.0, 2, 1))
    code = tl.where(there, tl.where(large, special, code), 0)
    if BITS == 8:
        tl.store(packed + codes_at + at, code.to(tl.uint8), there)
    else:
        low, high = tl.split(tl.reshape(code, (TILE, WIDTH // 2, 2)))
        pair = tl.arange(0, WIDTH // 2)[None, :]
        first = number[:, None] * group + 2 * pair
        tl.store(
            packed + codes_at + first // 2,
            (low | (high << 4)).to(tl.uint8),
            (2 * pair < group) & (first < numel),
        )


@triton.jit
def _decompress(
    values,
    packed,
    header,
    numel,
    group,
    codes_at,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, WIDTH)[None, :]
    at = number[:, None] * group + place
    there = (place < group) & (at < numel)
    inside = number * group < numel
    least = tl.load(header + 2 * number, inside, other=0).to(tl.float32, bitcast=True)
    bits = tl.load(header + 2 * number + 1, inside, other=0)
    # A set sign marks a group with infinities or NaN, for which its three highest codes stand.
    step = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    if BITS == 8:
        code = tl.load(packed + codes_at + at, there, other=0).to(tl.int32)
    else:
        # Two codes in a byte, the even one in its lower half.
        code = (tl.load(packed + codes_at + at // 2, there, other=0).to(tl.int32) >> (4 * (at % 2))) & 15
    x = least[:, None] + code.to(tl.float32) * step[:, None]
    over = tl.where(bits[:, None] < 0, code - ((1 << BITS) - 4), 0)
    x = tl.where(over == 1, float("-inf"), tl.where(over == 2, float("inf"), x))
    x = tl.where(over == 3, float("nan"), x)
    tl.store(values + at, x.to(values.dtype.element_ty), there)
