"""Chains of elementwise ops and norms between products become one kernel."""

from __future__ import annotations

from pathlib import Path

from memtune.autotune.record.compiled import CompiledRecordings
from memtune.autotune.translate.translation import translate
from memtune.compile import Compiling
from memtune.hardware.spec import find
from memtune.program.step import Phase, Recording, Resource
from memtune.workload.workload import Workload

MODEL = """
import torch
from torch import nn
def model(): return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))
def batch(size): return torch.randn(size, 16, 32)
def loss(model, batch):
    with torch.autocast(batch.device.type, torch.bfloat16): return model(batch).float().square().mean()
"""


def test_ops_between_two_products_run_as_one_kernel_without_intermediates(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    gpu = find("a100-80g")
    make = CompiledRecordings(
        Workload.load(path), target="cuda", translate=lambda recording: translate(recording, gpu)
    )
    found, eager = make(Compiling("model", "inductor")), make(Compiling("model", "aot_eager"))
    assert isinstance(found, Recording)
    assert isinstance(eager, Recording)
    step = found.at(4)
    step.validate()
    runs = (step.ops.resource == Resource.COMPUTE) & (step.ops.phase == Phase.FORWARD) & (step.ops.module > 0)
    names = [step.names[name] for name in step.ops.name[runs]]
    products = [place for place, name in enumerate(names) if name == "aten.addmm.default"]
    assert products[1] - products[0] == 4  # casts of weight and bias, and one kernel for GELU and norm
    assert step.peak_bytes() < eager.at(4).peak_bytes()
    small = found.at(2)
    assert small.ops.traffic_bytes[runs].sum() < step.ops.traffic_bytes[runs].sum()
