"""Chains of elementwise ops and norms between products become one kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.synthetic_steps import make_step

from memtune.autotune.record.compiled import CompiledRecordings
from memtune.autotune.translate import inductor_fusion
from memtune.autotune.translate.translation import translate
from memtune.compile import Compiling
from memtune.hardware.spec import find
from memtune.program.step import COMPLEX, UNALIGNED, Phase, Precision, Recording, Resource, Step
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


NAMES = (
    "aten.mm.default",
    "aten.exp.default",
    "aten.mul.Tensor",
    "aten.full.default",
    "aten.scatter.value",
    "aten.amax.default",
)
OPS = (0, 1, 0, 2, 2, 0, 0, 3, 4, 2, 0)
READS = {1: [0], 2: [0], 3: [1], 4: [1, 2], 5: [3], 6: [4], 8: [7], 9: [8, 0], 10: [9]}
"""Op → what it reads; op n makes storage n. Ops 3 and 4 read the exponential of a product, the latter in a
kernel of its own, because it waits for another product; op 8 scatters a constant into a constant.
"""


def fused_step(names: tuple[str, ...] = NAMES, **columns: Any) -> Step:
    uses = [(op, storage) for op, storages in READS.items() for storage in storages]
    step = make_step(
        len(OPS),
        len(OPS),
        names=names,
        modules=("", "model"),
        ops_name=OPS,
        ops_module=[1] * len(OPS),
        ops_call=[0] * len(OPS),
        storages_bytes=[100, 200, 100, 50, 50, 10, 10, 400, 400, 50, 10],
        storages_producer=range(len(OPS)),
        uses_op=[op for op, _ in uses],
        uses_storage=[storage for _, storage in uses],
        **columns,
    )
    return inductor_fusion._fused(step, whole_model=True)


def test_elementwise_results_are_computed_again_instead_of_written() -> None:
    step = fused_step()
    assert step.storages.bytes[1] == 0
    assert step.ops.traffic_bytes[[3, 4]].tolist() == [100 + 50, 100 + 100 + 50]
    reduced = fused_step(tuple(name.replace("exp", "amax") for name in NAMES))
    assert reduced.storages.bytes[1] == 200
    assert reduced.ops.traffic_bytes[4] == 200 + 100 + 50


def test_ops_on_complex_numbers_are_kernels_of_their_own() -> None:
    step = fused_step(ops_precision=[COMPLEX if op == 4 else 0 for op in range(len(OPS))])
    assert step.storages.bytes[1] == 200  # the complex op reads the exponential from memory
    assert step.ops.traffic_bytes[3] == 100 + 200 + 50


def test_constants_scattered_into_constants_are_generated_code() -> None:
    step = fused_step()
    assert step.storages.bytes[[7, 8]].tolist() == [0, 0]
    assert (step.ops.resource[[7, 8]] == Resource.NOTHING).all()
    assert step.ops.traffic_bytes[9] == 100 + 50
    other = fused_step(tuple(name.replace("full", "rand") for name in NAMES))
    assert other.storages.bytes[[7, 8]].tolist() == [400, 400]


def test_products_of_unaligned_rows_read_a_padded_copy_of_their_largest_input() -> None:
    aligned = fused_step(ops_precision=[Precision.BFLOAT16] * len(OPS))
    padded = fused_step(ops_precision=[Precision.BFLOAT16 | UNALIGNED] * len(OPS))
    assert (padded.ops.precision == Precision.BFLOAT16).all()
    more = padded.ops.traffic_bytes - aligned.ops.traffic_bytes
    assert more.tolist() == [0, 0, 2 * 100, 0, 0, 2 * 50, 2 * 50, 0, 0, 0, 2 * 50]
