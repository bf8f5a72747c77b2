"""The Triton kernels of quantized messages compile for GPUs, which takes none (`make test-triton`)."""

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
@pytest.mark.parametrize(
    ("bits", "block", "values", "ones"),
    [(8, 256, "*bf16", {}), (4, 2, "*fp32", {"nodes": 1, "local": 1}), (4, 2048, "*fp16", {"nodes": 1})],
)
def test_quantization_kernels_are_compiled_without_fused_products(
    architecture: int, bits: int, block: int, values: str, ones: dict[str, int]
) -> None:
    """A product that is fused with a sum is rounded once, and has other bits than the native code's."""
    from memtune.parallel.collectives import quantization_triton as kernels

    types = {"values": values, "error": "*fp32", "packed": "*u8", "scales": "*fp32", "factor": "fp32"}
    width, tile, _ = kernels._tiles(1 << 20, block, 4)
    sizes = {"WIDTH": width, "TILE": tile, "BITS": bits}
    for made in (
        compiled(kernels._pack, architecture, types, {**ones, **sizes, "FEEDBACK": bool(ones)}),
        compiled(kernels._unpack, architecture, types, {**sizes, "SOURCES": 2}),
    ):
        assert made["cubin"]
        assert "fma.rn" not in made["ptx"]
