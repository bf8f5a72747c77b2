"""Compressed activations: equal bits of all kernels, bounded error, random rounding without a generator."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memtune import _native
from memtune.activations.offload import compression
from memtune.activations.offload.compression import NEAREST
from memtune.program.saved_tensor_policy import Compression

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def values(n: int, dtype: torch.dtype) -> Tensor:
    """Of many sizes, with a zero, infinities, NaN, tiny and huge ones."""
    torch.manual_seed(n)
    x = torch.randn(n) * torch.logspace(-4, 4, n)
    x[: n // 8] *= 1e-31  # steps below 2^-119; no subnormal numbers, which Triton's interpreter flushes
    for part, special in ((2, 0.0), (3, torch.inf), (4, torch.nan), (5, -torch.inf), (6, 3e38)):
        x[n // part] = special
    return x.to(dtype)


def packed(x: Tensor, bits: int, group: int, seed: int) -> Tensor:
    out = torch.zeros(compression.packed_bytes(x, bits, group), dtype=torch.uint8)
    compression.plain_compress_(out, x, bits, group, seed)
    return out


def back(x: Tensor, bits: int = 8, group: int = 256, seed: int = NEAREST) -> Tensor:
    data = torch.ops.memtune.compress(x, bits, group, seed)
    found: Tensor = torch.ops.memtune.decompress(data, x.numel(), x.dtype, bits, group)
    return found


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_native_compression_is_bitwise_equal_to_reference(bits: int, dtype: torch.dtype) -> None:
    for n, group, seed in ((7, 2, 3), (1000, 48, 2**32 - 1), (20001, 256, 0), (5000, 4096, NEAREST)):
        x = values(n, dtype)
        wanted, drawn = packed(x, bits, group, seed), None if seed == NEAREST else seed
        out = torch.empty_like(x)
        compression.plain_decompress_(out, wanted, bits, group)
        for isa in ("base", "avx2", "avx512"):
            got, values_back = torch.zeros_like(wanted), torch.empty_like(x)
            try:
                _native.compress(got, x, bits, group, drawn, 3, isa)
            except ValueError:
                continue  # this machine lacks the instruction set
            assert torch.equal(got, wanted)
            _native.decompress(values_back, wanted, bits, group, 3, isa)
            assert same(values_back, out)


@pytest.mark.parametrize("bits", [4, 8])
def test_plain_compression_in_parts_is_bitwise_equal(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(5001, torch.float32)
    for seed in (NEAREST, 3):
        whole = packed(x, bits, 48, seed)
        with monkeypatch.context() as patched:
            patched.setattr(compression, "_PART_VALUES", 100)
            assert torch.equal(packed(x, bits, 48, seed), whole)
            out = torch.empty_like(x)
            compression.plain_decompress_(out, whole, bits, 48)
        back_whole = torch.empty_like(x)
        compression.plain_decompress_(back_whole, whole, bits, 48)
        assert same(out, back_whole)


def test_plain_compression_has_bounded_temporaries() -> None:
    hop = Compression()
    small, large, larger = (compression.plain_scratch_bytes(n, 4, hop) for n in (2**12, 2**20, 2**26))
    assert 0 < small[0] < large[0] == larger[0] < 64 * 2**20
    assert 0 < small[1] < large[1] == larger[1] < large[0]


@pytest.mark.parametrize(("bits", "levels"), [(4, 15), (8, 255)])
def test_compression_error_is_at_most_half_a_step_to_the_nearest(bits: int, levels: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4096) * 3 + 1
    step = (x.view(-1, 256).amax(1) - x.view(-1, 256).amin(1)) / levels
    # Rounding in float32: three operations on values of at most the largest one.
    slack = 3 * torch.finfo(torch.float32).eps * x.abs().max()
    error = (back(x, bits) - x).view(-1, 256).abs().amax(1)
    assert (error <= step / 2 + slack).all()
    assert ((back(x, bits, seed=5) - x).view(-1, 256).abs().amax(1) <= step + slack).all()


@pytest.mark.parametrize(("bits", "levels"), [(4, 15), (8, 255)])
def test_random_rounding_is_unbiased_over_seeds(bits: int, levels: int) -> None:
    """The standard deviation of a rounded value is at most half a step."""
    torch.manual_seed(1)
    x, seeds = torch.randn(512), 400
    step = (x.view(-1, 256).amax(1) - x.view(-1, 256).amin(1)).repeat_interleave(256) / levels
    errors = torch.stack([(back(x, bits, seed=seed * 7919) - x) / step for seed in range(seeds)])
    of_a_mean = 0.5 / seeds**0.5
    assert errors.mean(0).abs().max() < 5 * of_a_mean
    # Over all values the mean is closer still: neighbours round independently.
    assert errors.mean().abs() < 5 * of_a_mean / 512**0.5
    assert errors.std() > 0.25  # of uniformly spread values: sqrt(1/6)


def test_compression_keeps_infinities_nan_constants_and_zeros() -> None:
    x = torch.rand(1024)
    x[3], x[4], x[5] = torch.inf, -torch.inf, torch.nan
    x[256:512], x[512:520] = 0.1, 0.0
    found = back(x, seed=9)
    assert found[3] == torch.inf
    assert found[4] == -torch.inf
    assert found[5].isnan()
    assert (found[6:256] - x[6:256]).abs().max() <= 1 / 250
    assert torch.equal(found[256:512], x[256:512])
    assert torch.equal(found[512:520], x[512:520])


def test_seed_follows_torch_and_advances_no_generator() -> None:
    x, hop = torch.randn(1000), Compression()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, other = (back(x, seed=compression.seed_of(hop)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, other)
    torch.manual_seed(4)
    assert not torch.equal(back(x, seed=compression.seed_of(hop)), one)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_bytes_are_header_and_codes(bits: int) -> None:
    x = torch.randn(1001)
    data = torch.ops.memtune.compress(x, bits, 100, 0)
    assert data.nbytes == -(-(8 * 11 + (1001 if bits == 8 else 501)) // 16) * 16


def test_triton_kernels_use_supported_names() -> None:
    """Triton compiles a kernel at its first launch, and takes neither globals nor imports but its own."""
    tree = ast.parse((Path(compression.__file__).parent / "compression_triton.py").read_text())
    kernels = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.decorator_list]
    assert len(kernels) == 2
    for kernel in kernels:
        names = [each for each in ast.walk(kernel) if isinstance(each, ast.Name)]
        own = {each.arg for each in kernel.args.args}
        own |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
        assert {each.id for each in names} - own <= {"tl", "triton", "float"}


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="make test-triton")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_interpreted_triton_kernels_are_bitwise_equal_to_reference(bits: int, dtype: torch.dtype) -> None:
    """Triton's interpreter runs the kernels on the CPU."""
    from memtune.activations.offload import compression_triton as kernels

    for n, group, seed in ((7, 2, 3), (1000, 48, 2**32 - 1), (5001, 256, 1), (5000, 2048, NEAREST)):
        x = values(n, dtype)
        wanted = packed(x, bits, group, seed)
        got = torch.zeros_like(wanted)
        kernels.compress_(got, x, bits, group, seed)
        assert torch.equal(got, wanted)
        # The interpreter truncates to bfloat16, where a GPU rounds to the nearest.
        exact = torch.float32 if dtype == torch.bfloat16 else dtype
        mine, theirs = torch.empty(n, dtype=exact), torch.empty(n, dtype=exact)
        kernels.decompress_(mine, wanted, bits, group)
        compression.plain_decompress_(theirs, wanted, bits, group)
        assert same(mine, theirs)


@pytest.mark.gpu
def test_triton_kernels_are_bitwise_equal_to_reference(device: str) -> None:
    """On the simulated accelerator the plain ones run on a device."""
    if device == "cpu":
        pytest.skip("an accelerator is needed")
    for dtype in TYPES:
        for bits in (4, 8):
            for n, group, seed in ((7, 2, 3), (1000, 48, 2**32 - 1), (5001, 256, 1), (5000, 2048, NEAREST)):
                x = values(n, dtype)
                wanted = packed(x, bits, group, seed)
                got = torch.ops.memtune.compress(x.to(device), bits, group, seed)
                used = 8 * -(-n // group) + (n if bits == 8 else -(-n // 2))  # the rest is unwritten
                assert torch.equal(got.cpu()[:used], wanted[:used])
                out = torch.empty_like(x)
                compression.plain_decompress_(out, wanted, bits, group)
                mine = torch.ops.memtune.decompress(got, n, dtype, bits, group)
                assert same(mine.cpu(), out)
