"""The Triton kernels of compressed activations compile for GPUs, which takes none (`make test-triton`)."""

from __future__ import annotations

import importlib.util
import os

import pytest
from support.triton_compiler import compiled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
        reason="make test-triton",
    ),
]


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(("bits", "group", "seed"), [(8, 256, "i32"), (4, 2, "i64"), (4, 4096, "i32")])
def test_compression_kernels_are_compiled_without_fused_products(
    architecture: int, bits: int, group: int, seed: str
) -> None:
    """A product that is fused with a sum is rounded once, and has other bits than the native code's."""
    from memtune.activations.offload import compression_triton as kernels

    types = {"values": "*bf16", "packed": "*u8", "header": "*i32", "numel": "i64", "seed": seed}
    width, tile, _ = kernels._tiles(1 << 20, group)
    sizes = {"WIDTH": width, "TILE": tile, "BITS": bits}
    for made in (
        compiled(kernels._compress, architecture, types, {**sizes, "RANDOM": seed == "i64"}),
        compiled(kernels._decompress, architecture, types, sizes),
    ):
        assert made["cubin"]
        assert "fma.rn" not in made["ptx"]
