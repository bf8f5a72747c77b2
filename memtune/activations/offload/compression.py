"""Compression of saved activations: groups of 8- or 4-bit integers between their least and largest value.

Chen et al. 2021, ActNN, arXiv:2104.14129, section 3, per-group quantization with stochastic rounding. Native
on CPU (`csrc/quant/groups.inl` has the rules), Triton on GPUs, and plain torch, which is the reference and
serves devices without Triton; all three give the same bits.

The error of a value is at most half a step of its group, (largest - least)/levels, when rounded to the
nearest, and less than a step when rounded at random; levels is 255 or 15. The random numbers are a hash of
torch's seed, of the value's place and of the value: no generator is advanced, and a resumed run rounds alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from memtune import _native
from memtune.device import accelerator
from memtune.memory import ModeLedger
from memtune.program import HEADER_BYTES, Compression, Hop, Resource, SavedTensorPolicy
from memtune.runtime import SeamOp, register

NEAREST = -1
"""Seed that means rounding to the nearest."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LARGE = 253 << 23
"""Bits of 2^126: values of this size and above are kept as infinity."""
_LEAST_STEP = 2.0**-119
_BLOCK_BYTES = 512
"""Granularity of the caching allocators of torch's accelerators."""
_PART_VALUES = 1 << 20
"""Values that plain torch converts at once: each has temporaries of 60 bytes or less."""
_WORD = 0xFFFFFFFF


def float_bytes(tensor: Tensor) -> int:
    """Return `Storages.float_bytes` of a storage of the type of `tensor`."""
    return tensor.element_size() if tensor.dtype in _FLOATS else 0


def accepts(policy: SavedTensorPolicy, tensor: Tensor) -> bool:
    """Return whether `policy` packs the storage of `tensor`."""
    if policy.is_exact:
        return True
    # Bytes that were never written could be of any size, and would widen the range of their neighbours.
    base = tensor if tensor._base is None else tensor._base
    covered = base.nbytes >= tensor.untyped_storage().nbytes()
    return covered and _accepts(policy.hops[0], float_bytes(tensor))


def is_cast_weight(tensor: Tensor, shapes: frozenset[torch.Size]) -> bool:
    """Return whether `tensor` is autocast's cast of a parameter; `shapes` are those of the region's."""
    # The cast of a frozen parameter, or in a compiled graph, has no node that tells, but its shape.
    base = tensor if tensor._base is None else tensor._base
    node = base.grad_fn
    if node is None:
        is_cast = not base.requires_grad and base.dtype in _FLOATS[1:]
        return is_cast and (base.shape in shapes or base.shape[::-1] in shapes)
    following = [each for each, _ in node.next_functions if each is not None]
    return node.name() == "ToCopyBackward0" and all(
        isinstance(getattr(each, "variable", None), nn.Parameter) for each in following
    )


@functools.cache
def _accepts(hop: Hop, width: int) -> bool:
    return bool(hop.accepts(np.asarray([width], np.uint8))[0])


def seed_of(hop: Compression) -> int:
    """Return the seed of the rounding: of torch's default generator, which is not advanced."""
    if not hop.at_random:
        return NEAREST
    seed = torch.initial_seed()
    return (seed ^ (seed >> 32)) & _WORD


def packed_bytes(tensor: Tensor, bits: int, group: int) -> int:
    """Return the bytes of `tensor` compressed."""
    return _packed_bytes(tensor.nbytes, tensor.element_size(), bits, group)


@functools.lru_cache(maxsize=256)
def _packed_bytes(n_bytes: int, width: int, bits: int, group: int) -> int:
    sizes = np.asarray([n_bytes], np.int64), np.asarray([width], np.uint8)
    return int(Compression(bits=bits, group=group).packed_bytes(*sizes)[0])


def _compress(values: Tensor, bits: int, group: int, seed: int) -> Tensor:
    """Implement `torch.ops.memtune.compress`: flat `values` into bytes, rounded at random or `NEAREST`."""
    packed = _compress_fake(values, bits, group, seed)
    if accelerator.runs_triton(values.device):
        from memtune.activations.offload import compression_triton

        # Triton launches on the current device, which need not be that of the tensors.
        with accelerator.selected(values.device):
            compression_triton.compress_(packed, values, bits, group, seed)
    elif values.is_cpu:
        drawn = None if seed == NEAREST else seed
        _native.compress(packed, values, bits, group, drawn, torch.get_num_threads())
    else:
        plain_compress_(packed, values, bits, group, seed)
    return packed


def _compress_fake(values: Tensor, bits: int, group: int, seed: int) -> Tensor:
    return values.new_empty(packed_bytes(values, bits, group), dtype=torch.uint8)


def _decompress(packed: Tensor, numel: int, dtype: torch.dtype, bits: int, group: int) -> Tensor:
    """Implement `torch.ops.memtune.decompress`: bytes into (numel,) values of `dtype`."""
    values = _decompress_fake(packed, numel, dtype, bits, group)
    if accelerator.runs_triton(values.device):
        from memtune.activations.offload import compression_triton

        with accelerator.selected(values.device):
            compression_triton.decompress_(values, packed, bits, group)
    elif values.is_cpu:
        _native.decompress(values, packed, bits, group, torch.get_num_threads())
    else:
        plain_decompress_(values, packed, bits, group)
    return values


def _decompress_fake(packed: Tensor, numel: int, dtype: torch.dtype, bits: int, group: int) -> Tensor:
    return packed.new_empty(numel, dtype=dtype)


def plain_compress_(packed: Tensor, values: Tensor, bits: int, group: int, seed: int) -> None:
    """Compress as `torch.ops.memtune.compress` does, in plain torch: the reference."""
    header, codes = _header_and_codes(packed, values.numel(), group)
    for begin, end in _parts(values.numel(), group):
        first, last = begin // group, -(-end // group)
        mine = codes[begin:end] if bits == 8 else codes[begin // 2 : (end + 1) // 2]
        _compress_part_(header[first:last], mine, values[begin:end], bits, group, seed, begin)


def plain_decompress_(values: Tensor, packed: Tensor, bits: int, group: int) -> None:
    """Decompress as `torch.ops.memtune.decompress` does, in plain torch: the reference."""
    header, codes = _header_and_codes(packed, values.numel(), group)
    for begin, end in _parts(values.numel(), group):
        first, last = begin // group, -(-end // group)
        mine = codes[begin:end] if bits == 8 else codes[begin // 2 : (end + 1) // 2]
        _decompress_part_(values[begin:end], header[first:last], mine, bits, group)


@functools.cache
def plain_scratch_bytes(numel: int, width: int, hop: Compression) -> tuple[int, int]:
    """Return the bytes of the temporaries of `plain_compress_` and `plain_decompress_`, for `numel` values of
    `width` bytes.
    """
    numel, found = min(numel, _PART_VALUES // hop.group * hop.group), list[int]()
    values = torch.empty(numel, dtype=torch.float32 if width == 4 else torch.bfloat16, device="meta")
    packed = _compress_fake(values, hop.bits, hop.group, NEAREST)
    seed = 0 if hop.at_random else NEAREST
    ends_bytes = sum(-(-each.nbytes // _BLOCK_BYTES) * _BLOCK_BYTES for each in (values, packed))
    runs: tuple[Callable[[], None], ...] = (
        lambda: plain_compress_(packed, values, hop.bits, hop.group, seed),
        lambda: plain_decompress_(values, packed, hop.bits, hop.group),
    )
    for run in runs:
        with ModeLedger("meta", block_bytes=_BLOCK_BYTES) as ledger:
            run()
            found.append(ledger.peak_bytes() - ends_bytes)
    return found[0], found[1]


def _parts(numel: int, group: int) -> Iterator[tuple[int, int]]:
    """Return begin and end of parts of whole groups, whose temporaries are small."""
    size = _PART_VALUES // group * group
    return ((begin, min(begin + size, numel)) for begin in range(0, numel, size))


def _header_and_codes(packed: Tensor, numel: int, group: int) -> tuple[Tensor, Tensor]:
    """Return views: (groups, 2) least value and step, and the bytes of the integers."""
    end = HEADER_BYTES * -(-numel // group)
    return packed[:end].view(torch.float32).view(-1, 2), packed[end:]


def _compress_part_(
    header: Tensor, packed: Tensor, values: Tensor, bits: int, group: int, seed: int, begin: int
) -> None:
    levels, numel = 2**bits - 1, values.numel()
    x = torch.nn.functional.pad(values.float(), (0, -numel % group)).view(-1, group)
    there = torch.arange(x.numel(), device=x.device).view(x.shape) < numel
    # By bits: infinities, NaN and floats whose range might overflow are all above the limit.
    is_large = (x.view(torch.int32) & 0x7FFFFFFF) >= _LARGE
    used = there & ~is_large
    least = torch.where(used, x, torch.inf).amin(1)
    largest = torch.where(used, x, -torch.inf).amax(1)
    has_large = is_large.any(1)
    # The three largest codes then represent -infinity, infinity and NaN.
    top = torch.where(has_large, levels - 3.0, float(levels))
    any_used = used.any(1)
    # The sum makes a negative zero positive, so that all implementations store the same bits.
    least = torch.where(any_used, least, 0.0) + 0.0
    largest = torch.where(any_used, largest, 0.0)
    # In this order, and with a reciprocal below: as the native and the Triton kernel round.
    step = largest / top - least / top
    # The reciprocal of a smaller step would overflow; all values of the group are then the least one.
    step = torch.where(step < _LEAST_STEP, 0.0, step)
    inverse = torch.where(step > 0, torch.ones_like(step) / step, 0.0)
    t = torch.where(is_large, 0.0, x - least[:, None]) * inverse[:, None]
    t = torch.minimum(t, top[:, None])
    codes = torch.minimum((t + _rounding_offset(t, seed, begin)).floor(), top[:, None])
    special = top[:, None] + torch.where(x.isnan(), 3.0, torch.where(x > 0, 2.0, 1.0))
    whole = torch.where(is_large, special, codes).to(torch.uint8).view(-1)[: numel + numel % 2]
    # The sign of the step tells `_decompress_part_` that the group has special codes.
    header.copy_(torch.stack([least, torch.where(has_large, -step, step)], 1))
    if bits == 8:
        packed.copy_(whole[:numel])
    else:
        if numel % 2:
            whole[numel:] = 0
        packed.copy_(whole[::2] | (whole[1::2] << 4))


def _rounding_offset(t: Tensor, seed: int, begin: int) -> Tensor | float:
    """Return what is added to `t` before it is rounded down: a half, or random numbers from 0 to 1."""
    if seed == NEAREST:
        return 0.5
    # By place and value, not from a generator: parts, devices and resumed runs round alike.
    place = torch.arange(begin, begin + t.numel(), device=t.device).view(t.shape)
    hashed = (t.view(torch.int32).long() & _WORD) ^ ((seed + place * 0x9E3779B9) & _WORD)
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _WORD
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _WORD
    # 24 bits: as many as the significand of a float32 has.
    return ((hashed ^ (hashed >> 16)) >> 8).float() * 2.0**-24


def _decompress_part_(values: Tensor, header: Tensor, codes: Tensor, bits: int, group: int) -> None:
    numel = values.numel()
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)
    codes = torch.nn.functional.pad(codes[:numel], (0, -numel % group)).view(-1, group).float()
    x = header[:, :1] + codes * header[:, 1:].abs()
    over = torch.where(header[:, 1:].signbit(), codes - (2.0**bits - 4), 0.0)
    for code, value in ((1, -torch.inf), (2, torch.inf), (3, torch.nan)):
        x = torch.where(over == code, value, x)
    values.copy_(x.view(-1)[:numel])


register(
    "compress(Tensor x, int bits, int group, int seed) -> Tensor",
    SeamOp(Resource.COMPUTE),
    _compress,
    _compress_fake,
)
register(
    "decompress(Tensor packed, int numel, ScalarType dtype, int bits, int group) -> Tensor",
    SeamOp(Resource.COMPUTE),
    _decompress,
    _decompress_fake,
)
