"""The rows of a message on GPU: Triton kernels with the bits of `csrc/quant`, one launch for each stretch of
a row.

Imported only where tensors are on a GPU; torch's CUDA builds bring Triton along.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

# Triton reads the kernels' source, in which an annotation says what is known of a parameter at compile time.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from memtune.parallel.collectives.message_layout import Row
from memtune.parallel.collectives.quantization import in_order, stretches

_TILE = 2048
"""Values that one program takes: whole blocks."""


def quantise_(packed: Tensor, values: Tensor, error: Tensor | None, row: Row, nodes: int) -> None:
    """Implement `quantization.quantise_` on GPU."""
    out, rows = packed.view(-1, row.n_bytes), values.numel() // row.numel
    for part in stretches(row):
        if not part.quantised:
            mine = in_order(values, row.numel, nodes)[..., part.begin : part.begin + part.count]
            kept = out[:, part.at : part.at + 4 * part.count].view(torch.float32)
            kept.copy_(mine.reshape(rows, part.count))
            continue
        width, tile, grid = _tiles(part.count, row.block, rows)
        _pack[grid](
            values,
            values if error is None else error,
            out,
            out.view(torch.float32),
            row.numel,
            row.n_bytes,
            part.begin,
            part.count,
            part.at // 4,
            part.codes,
            rows // nodes,
            nodes,
            row.block,
            WIDTH=width,
            TILE=tile,
            BITS=row.bits,
            FEEDBACK=error is not None,
            enable_fp_fusion=False,
        )


def dequantise_(values: Tensor, packed: Tensor, row: Row, sources: int, factor: float) -> None:
    """Implement `quantization.dequantise_` on GPU."""
    out = values.view(-1, row.numel)
    factor = torch.tensor(factor, dtype=torch.float32).item()  # rounded once, as everywhere
    rows, data = len(out), packed.view(sources, len(out), row.n_bytes)
    for part in stretches(row):
        if not part.quantised:
            total = torch.zeros(rows, part.count, device=values.device)
            for source in data:
                total += source[:, part.at : part.at + 4 * part.count].view(torch.float32)
            out[:, part.begin : part.begin + part.count] = total * factor
            continue
        width, tile, grid = _tiles(part.count, row.block, rows)
        _unpack[grid](
            values,
            data,
            data.view(torch.float32),
            row.numel,
            row.n_bytes,
            part.begin,
            part.count,
            part.at // 4,
            part.codes,
            rows,
            row.block,
            factor,
            SOURCES=sources,
            WIDTH=width,
            TILE=tile,
            BITS=row.bits,
            enable_fp_fusion=False,
        )


def _tiles(count: int, block: int, rows: int) -> tuple[int, int, tuple[int, int]]:
    """Return the block width rounded up to a power of two, blocks per program, and the number of programs."""
    width: int = triton.next_power_of_2(block)
    tile = max(1, _TILE // width)
    return width, tile, (triton.cdiv(triton.cdiv(count, block), tile), rows)


@triton.jit
def _signed(code, BITS: tl.constexpr):
    """Return the signed integer in the low bits."""
    if BITS == 8:
        return (((code & 255) ^ 128) - 128).to(tl.float32)
    return (((code & 15) ^ 8) - 8).to(tl.float32)


@triton.jit
def _pack(
    values,
    error,
    packed,
    scales,
    numel,
    row_bytes,
    begin,
    count,
    scale_at,
    codes_at,
    local,
    nodes,
    block,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    source = (row % nodes) * local + row // nodes
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)  # (TILE,) blocks
    place = tl.arange(0, WIDTH)[None, :]  # (1, WIDTH) values of a block
    at = number[:, None] * block + place
    there = (place < block) & (at < count)
    x = tl.load(values + source * numel + begin + at, there, other=0.0).to(tl.float32)
    if FEEDBACK:
        x += tl.load(error + source * numel + begin + at, there, other=0.0)
    # Sizes of floats are ordered as their bits are; those of NaN are the largest.
    size = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = size < 0x7F800000
    used = finite & (size >= 0x04000000)  # 2^-119
    largest = tl.where(used, size, 0x3F800000).to(tl.float32, bitcast=True)
    levels = tl.full([TILE], 127.0 if BITS == 8 else 7.0, tl.float32)
    scale = tl.where(used, tl.div_rn(largest, levels), tl.where(finite, 0.0, float("nan")))
    inverse = tl.where(used, tl.div_rn(levels, largest), 0.0)
    tl.store(scales + row * (row_bytes // 4) + scale_at + number, scale, number * block < count)
    # The low bits of a sum with 1.5 * 2^23 are the integer nearest to the other summand.
    code = tl.where(used[:, None], (x * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True), 0)
    if FEEDBACK:
        lost = tl.where(finite[:, None], x - _signed(code, BITS) * scale[:, None], 0.0)  # NaN is not fed back
        tl.store(error + source * numel + begin + at, lost, there)
    out = packed + row * row_bytes + codes_at
    if BITS == 8:
        tl.store(out + at, (code & 255).to(tl.uint8), there)
    else:
        low, high = tl.split(tl.reshape(code & 15, (TILE, WIDTH // 2, 2)))
        pair = tl.arange(0, WIDTH // 2)[None, :]
        first = number[:, None] * block + 2 * pair
        tl.store(out + first // 2, (low | (high << 4)).to(tl.uint8), (2 * pair < block) & (first < count))


@triton.jit
def _unpack(
    values,
    packed,
    scales,
    numel,
    row_bytes,
    begin,
    count,
    scale_at,
    codes_at,
    rows,
    block,
    factor,
    SOURCES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    place = tl.arange(0, WIDTH)[None, :]
    at = number[:, None] * block + place
    there = (place < block) & (at < count)
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for source in range(SOURCES):
        mine = (source * rows + row) * row_bytes
        scale = tl.load(scales + mine // 4 + scale_at + number, number * block < count, other=0.0)
        if BITS == 8:
            code = tl.load(packed + mine + codes_at + at, there, other=0).to(tl.int32)
        else:
            # Two codes in a byte, the even one in its lower half.
            code = tl.load(packed + mine + codes_at + at // 2, there, other=0).to(tl.int32) >> (4 * (at % 2))
        total += _signed(code, BITS) * scale[:, None]
    total *= factor
    tl.store(values + row * numel + begin + at, total.to(values.dtype.element_ty), there)
