"""Precision of matrix products: torch's TF32 settings and the alignment of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memtune.autotune.record.precision import precision_of
from memtune.autotune.record.recorder import record
from memtune.hardware.roofline import op_costs
from memtune.hardware.spec import find
from memtune.program.step import CHANNELS_FIRST, COMPLEX, UNALIGNED, Precision
from memtune.workload.workload import Workload

MODEL = """
import torch
from torch import nn
def model(): return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(2)))
def batch(size): return torch.randn(size * 512, 1024)
def loss(model, batch): return model(batch).square().mean()
"""
IMAGES = """
import torch
from torch import nn
FORMAT = torch.{layout}
def model(): return nn.Sequential(*(nn.Conv2d(64, 64, 3) for _ in range(2))).to(memory_format=FORMAT)
def batch(size): return torch.randn(size, 64, 32, 32).to(memory_format=FORMAT)
def loss(model, batch): return model(batch).square().mean()
"""


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_products_use_tf32_on_request_and_convolutions_by_default() -> None:
    matrix = torch.empty(8, 8)
    assert precision_of("aten.mm.default", [matrix, matrix], [matrix]) == Precision.FLOAT32
    assert precision_of("aten.convolution.default", [matrix], [matrix]) == Precision.TF32
    torch.set_float32_matmul_precision("high")
    assert precision_of("aten.mm.default", [matrix, matrix], [matrix]) == Precision.TF32


def test_ops_that_read_or_write_complex_numbers_are_marked() -> None:
    real = torch.empty(4, 2)
    turned = torch.view_as_complex(real)
    assert precision_of("aten.mul.Tensor", [turned, turned], [turned]) == COMPLEX
    assert precision_of("aten.polar.default", [real, real], [turned]) == COMPLEX
    assert precision_of("aten.mul.Tensor", [real, real], [real]) == Precision.FLOAT32


@pytest.mark.parametrize(("columns", "flag"), [(50304, 0), (50257, UNALIGNED)])
def test_rows_of_16_bit_products_are_aligned_to_16_bytes(columns: int, flag: int) -> None:
    shapes = ((32, 64), (64, columns), (32, columns))
    left, right, out = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    assert precision_of("aten.mm.default", [left, right], [out]) == Precision.BFLOAT16 | flag


def test_plan_depends_on_tf32(tmp_path: Path) -> None:
    path, gpu = tmp_path / "model.py", find("a100-80g")
    seconds = []
    for setting in ("highest", "high"):
        path.write_text(f"{MODEL}\ntorch.set_float32_matmul_precision({setting!r})\n")
        step = record(Workload.load(path), target="cuda").at(64)
        products = [step.names[name] == "aten.addmm.default" for name in step.ops.name]
        seconds.append(op_costs(step, gpu).op_s[products].sum())
    assert seconds[0] > 4 * seconds[1]  # the data sheet's rates are 8 times apart


@pytest.mark.parametrize(
    ("layout", "groups", "flag"),
    [
        (torch.contiguous_format, 1, CHANNELS_FIRST),
        (torch.channels_last, 1, 0),
        (torch.contiguous_format, 8, 0),
    ],
)
def test_convolutions_of_channels_first_are_transposed(
    layout: torch.memory_format, groups: int, flag: int
) -> None:
    image = torch.empty(2, 8, 4, 4, dtype=torch.float16, device="meta").to(memory_format=layout)
    weight = torch.empty(16, 8 // groups, 3, 3, dtype=torch.float16, device="meta")
    found = precision_of("aten.convolution.default", [image, weight], [image])
    assert found == Precision.FLOAT16 | flag


@pytest.mark.parametrize(("gpu", "transposes"), [("a100-80g", True), ("v100", False)])
def test_tensor_cores_need_channels_last(tmp_path: Path, gpu: str, transposes: bool) -> None:
    path = tmp_path / "model.py"
    seconds = []
    for layout in ("contiguous_format", "channels_last"):
        path.write_text(IMAGES.format(layout=layout))
        step = record(Workload.load(path), target="cuda").at(64)
        products = [step.names[name] == "aten.convolution.default" for name in step.ops.name]
        seconds.append(op_costs(step, find(gpu)).op_s[products].sum())
    assert bool(seconds[0] > 1.5 * seconds[1]) == transposes  # float32: TF32 on A100, no tensor cores on V100
