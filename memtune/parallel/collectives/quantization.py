"""Quantization of values into the rows of a message and back: native on CPU (`csrc/quant`), Triton on GPUs,
and the plain torch reference.

All three give the same bits for float32 and bfloat16. float16 on CPU and a device without Triton use the
plain one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from memtune import _native
from memtune.device import accelerator
from memtune.parallel.collectives.message_layout import LEVELS, Row
from memtune.program import Resource
from memtune.runtime import SeamOp, register

_NATIVE = (torch.float32, torch.bfloat16)
_SMALLEST = 2.0**-119
"""A block whose largest value is smaller is zero: levels/largest must not overflow."""


def quantise_(
    packed: Tensor,
    values: Tensor,
    error: Tensor | None,
    lengths: list[int],
    bits: int,
    block: int,
    nodes: int,
) -> None:
    """Implement `torch.ops.memtune.quantise_`: values (rows, numel) into `packed` (rows, bytes of a row).

    Args:
        packed: Bytes, written.
        values: float32, bfloat16 or float16.
        error: float32, like `values`, or None: value + error is quantized, and the quantization error becomes
            the new `error`.
        lengths: Stretches of a row, alternately quantized and kept.
        bits: 4 or 8.
        block: Values that share a scale.
        nodes: The rows are (nodes, rows/nodes) in `values` and are written as (rows/nodes, nodes).
    """
    if accelerator.runs_triton(values.device):
        from memtune.parallel.collectives import quantization_triton

        # Triton launches on the current device, which need not be that of the tensors.
        with accelerator.selected(values.device):
            quantization_triton.quantise_(packed, values, error, _row(lengths, bits, block), nodes)
    elif values.is_cpu and values.dtype in _NATIVE:
        _native.quantise(packed, values, error, lengths, bits, block, nodes, torch.get_num_threads())
    else:
        plain_quantise_(packed, values, error, lengths, bits, block, nodes)


def dequantise_(
    values: Tensor, packed: Tensor, lengths: list[int], bits: int, block: int, sources: int, factor: float
) -> None:
    """Implement `torch.ops.memtune.dequantise_`: `factor` times the sum over `sources`, into `values`."""
    if accelerator.runs_triton(values.device):
        from memtune.parallel.collectives import quantization_triton

        with accelerator.selected(values.device):
            quantization_triton.dequantise_(values, packed, _row(lengths, bits, block), sources, factor)
    elif values.is_cpu and values.dtype in _NATIVE:
        _native.dequantise(values, packed, lengths, bits, block, sources, factor, torch.get_num_threads())
    else:
        plain_dequantise_(values, packed, lengths, bits, block, sources, factor)


@dataclass(frozen=True)
class Stretch:
    """Some values of a row, and their place in its bytes."""

    begin: int
    count: int
    quantised: bool
    at: int
    """First byte of the scales, or of the kept values."""
    codes: int
    """First byte of the codes."""


def stretches(row: Row) -> Iterator[Stretch]:
    """Yield the non-empty stretches of `row`, in order."""
    blocks = [-(-count // row.block) for count in row.lengths[::2]]
    kept = 4 * sum(blocks)
    # In a row all scales come first, then kept values, then codes: 4-byte values need no alignment of their
    # own.
    codes, scales, begin = kept + 4 * sum(row.lengths[1::2]), 0, 0
    for index, count in enumerate(row.lengths):
        if count and index % 2 == 0:
            yield Stretch(begin, count, True, scales, codes)
            scales += 4 * blocks[index // 2]
            codes += count if row.bits == 8 else -(-count // 2)
        elif count:
            yield Stretch(begin, count, False, kept, codes)
            kept += 4 * count
        begin += count


def in_order(values: Tensor, numel: int, nodes: int) -> Tensor:
    """Return (rows, numel) `values` in the order in which rows are written."""
    rows = values.numel() // numel
    return values.view(nodes, rows // nodes, numel).transpose(0, 1)


def plain_quantise_(
    packed: Tensor,
    values: Tensor,
    error: Tensor | None,
    lengths: list[int],
    bits: int,
    block: int,
    nodes: int,
) -> None:
    """Quantize as `quantise_` does, in plain torch: the reference."""
    row = _row(lengths, bits, block)
    out = packed.view(-1, row.n_bytes)
    # In float32, as the native kernel and Triton compute: all three give the same bits.
    x = in_order(values, row.numel, nodes).reshape(len(out), row.numel).float()
    lost = None if error is None else in_order(error, row.numel, nodes)
    for part in stretches(row):
        mine = x[:, part.begin : part.begin + part.count]
        if not part.quantised:
            out[:, part.at : part.at + 4 * part.count] = mine.contiguous().view(torch.uint8)
            continue
        if lost is not None:
            mine = mine + lost[..., part.begin : part.begin + part.count].reshape(mine.shape)
        scale, codes = _coded(mine, row)
        out[:, part.at : part.at + 4 * scale.shape[1]] = scale.contiguous().view(torch.uint8)
        whole = codes[:, : part.count]
        if lost is not None:
            back = (codes.float().view(len(out), -1, block) * scale[..., None]).view(len(out), -1)[
                :, : part.count
            ]
            # A block with infinity or NaN decodes to NaN, whose error must not stay for all later steps.
            lost[..., part.begin : part.begin + part.count] = torch.where(
                back.isnan(), 0.0, mine - back
            ).view(-1, nodes, part.count)
        data = whole.view(torch.uint8) if bits == 8 else _pairs(codes, part.count)
        out[:, part.codes : part.codes + data.shape[1]] = data


def _coded(x: Tensor, row: Row) -> tuple[Tensor, Tensor]:
    """Return (rows, blocks) scales and (rows, blocks · block) codes of x (rows, count), padded by zeros."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % row.block)).view(len(x), -1, row.block)
    largest = blocks.abs().amax(2)
    # A tensor: torch divides by a number by multiplying with its inverse, which rounds twice.
    levels = torch.full_like(largest, LEVELS[row.bits])
    # Otherwise the scale is 0, or NaN where a value is not finite, so that the receiver sees it as such.
    used = largest.isfinite() & (largest >= _SMALLEST)
    scale = torch.where(used, largest / levels, torch.where(largest.isfinite(), 0.0, torch.nan))
    inverse = torch.where(used, levels / largest, 0.0)
    codes = torch.where(used[..., None], blocks * inverse[..., None], 0.0).round().to(torch.int8)
    return scale, codes.view(len(x), -1)


def _pairs(codes: Tensor, count: int) -> Tensor:
    """Pack two 4-bit integers per byte, the first one low: (rows, ceil(count/2))."""
    # Low four bits in two's complement; `_decoded` extends the sign.
    even = codes[:, : count + count % 2].view(torch.uint8) & 15
    return even[:, ::2] | (even[:, 1::2] << 4)


def plain_dequantise_(
    values: Tensor, packed: Tensor, lengths: list[int], bits: int, block: int, sources: int, factor: float
) -> None:
    """Dequantize as `dequantise_` does, in plain torch: the reference."""
    row = _row(lengths, bits, block)
    out = values.view(-1, row.numel)
    total = torch.zeros(out.shape, dtype=torch.float32, device=values.device)
    for source in packed.view(sources, len(out), row.n_bytes):
        for part in stretches(row):
            total[:, part.begin : part.begin + part.count] += _decoded(source, part, row)
    out.copy_(total * torch.tensor(factor, dtype=torch.float32))


def _decoded(rows: Tensor, part: Stretch, row: Row) -> Tensor:
    """Return (rows, count) the values of a stretch."""
    if not part.quantised:
        return rows[:, part.at : part.at + 4 * part.count].contiguous().view(torch.float32)
    blocks = -(-part.count // row.block)
    scale = rows[:, part.at : part.at + 4 * blocks].contiguous().view(torch.float32)
    if row.bits == 8:
        codes = rows[:, part.codes : part.codes + part.count].view(torch.int8)
    else:
        data = rows[:, part.codes : part.codes + -(-part.count // 2)]
        codes = torch.stack([data & 15, data >> 4], 2).view(len(rows), -1)[:, : part.count].view(torch.int8)
        # Sign extension of four bits.
        codes = (codes ^ 8) - 8
    return codes.float() * scale.repeat_interleave(row.block, 1)[:, : part.count]


def _row(lengths: list[int], bits: int, block: int) -> Row:
    return Row(tuple(lengths), 8 if bits == 8 else 4, block)


register(
    "quantise_(Tensor(a!) packed, Tensor x, Tensor(b!)? error, int[] lengths, int bits, int block, int nodes)"
    " -> ()",
    SeamOp(Resource.COMPUTE),
    quantise_,
)
register(
    "dequantise_(Tensor(a!) out, Tensor packed, int[] lengths, int bits, int block, int sources, float"
    " factor) -> ()",
    SeamOp(Resource.COMPUTE),
    dequantise_,
)
