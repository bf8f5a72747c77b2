"""Batch norms of a CPU recording translated to CUDA: the ops, saves and graph of the model written with
cuDNN's own ops.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.graph_equality import assert_same_graph

from memtune.autotune.record.recorder import record
from memtune.autotune.translate import translation_table as table
from memtune.autotune.translate.translation import translate
from memtune.hardware.spec import find
from memtune.program.step import Recording
from memtune.workload.workload import Workload

MODEL = """
import torch, torch.nn.functional as F
from torch import nn
DTYPE = torch.{dtype}

class Norm(nn.BatchNorm2d):
    def forward(self, x):
        if not {cuda}:
            return super().forward(x)
        if self.training:
            self.num_batches_tracked.add_(1)
        given = self.weight, self.bias, self.running_mean, self.running_var, self.training
        return torch.ops.aten.cudnn_batch_norm(x, *given, 0.1, self.eps)[0]

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False, dtype=DTYPE), Norm(8{arguments})
        self.second, self.other = nn.Conv2d(8, 8, 3, padding=1, bias=False, dtype=DTYPE), Norm(8{arguments})
        self.head = nn.Linear(8, 4, dtype=DTYPE)
        self.train()
    def train(self, mode=True):
        super().train(mode)
        self.other.train(mode and not {frozen})
        return self
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.first(x)), inplace=True), 2)
        x = F.relu(x + self.other(self.second(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))

def model(): return Net()
def batch(size): return torch.randn(size, 3, 16, 16, dtype=DTYPE)
def loss(model, batch): return model(batch).float().square().mean()
def optimizer(params): return torch.optim.SGD(params, lr=1e-3)
"""
SAVES = ("packed_before", "is_output", "call", "held_until", "used_until", "unpacked_before")
CASES = {"training": False, "frozen statistics": True}


def written(
    folder: Path, dtype: str = "float32", *, cuda: bool, frozen: bool = False, arguments: str = ""
) -> Path:
    path = folder / f"model_{cuda}.py"
    path.write_text(MODEL.format(dtype=dtype, frozen=frozen, cuda=cuda, arguments=arguments))
    return path


def recorded(path: Path) -> Recording:
    return record(Workload.load(path), target="cuda")


@pytest.mark.parametrize("name", CASES)
def test_translated_batch_norms_save_tensors_of_cudnn_ops(tmp_path: Path, name: str) -> None:
    ours = translate(recorded(written(tmp_path, cuda=False, frozen=CASES[name])), find("a100"))
    path = written(tmp_path, cuda=True, frozen=CASES[name])
    truth = recorded(path)
    for size in (2, 5):
        mine, wanted = ours.at(size), truth.at(size)
        rows = [[each.names[number] for number in each.ops.name] for each in (mine, wanted)]
        assert (
            rows[0][: len(rows[1]) // 2] == rows[1][: len(rows[1]) // 2]
        )  # but the optimizer's, which has foreach kernels
        assert {row for row in rows[0] if "batch_norm" in row} == {
            row for row in rows[1] if "batch_norm" in row
        }
        assert mine.saved_bytes() == wanted.saved_bytes()
        for column in SAVES:
            assert np.array_equal(getattr(mine.saves, column), getattr(wanted.saves, column)), column
        assert np.array_equal(
            mine.storages.bytes[mine.saves.storage], wanted.storages.bytes[wanted.saves.storage]
        )
    assert any("cudnn batch norm × 2" in note for note in ours.notes)
    assert_same_graph(ours.step, path)


@pytest.mark.parametrize(
    ("dtype", "arguments", "gpu"),
    [("bfloat16", ", dtype=DTYPE", "a100"), ("float32", ", affine=False", "a100"), ("float32", "", "mi300x")],
)
def test_batch_norms_unsupported_by_cudnn_remain_native(
    tmp_path: Path, dtype: str, arguments: str, gpu: str
) -> None:
    step = translate(recorded(written(tmp_path, dtype, cuda=False, arguments=arguments)), find(gpu)).step
    assert not any("cudnn_batch_norm" in name for name in step.names)
    made = np.flatnonzero(
        step.storages.producer
        == int(np.flatnonzero(step.ops.name == step.names.index(table.BATCH_NORM[0]))[0])
    )
    assert step.storages.bytes[made[1:]].tolist() == [32, 32]  # of eight channels, in float32


def test_batch_norm_kernel_choice() -> None:
    x, weight = ("float32", (2, 8, 4, 4), (128, 16, 4, 1)), ("float32", (8,), (1,))

    def chosen(x: table.Shaped, weight: table.Shaped | None = weight, *, training: bool = True) -> bool:
        return table.runs_on_cudnn(x, weight, weight, ("float32", (8,), (1,)), training=training)

    assert chosen(x)
    assert chosen(("float32", (2, 8, 4, 4), (128, 1, 32, 8)))  # channels last
    assert not chosen(("float32", (2, 8, 4, 4), (128, 16, 1, 4)))  # is copied before
    assert not chosen(("float32", (2, 8), (8, 1)))
    assert chosen(("float16", *x[1:]))
    assert not chosen(("float16", *x[1:]), ("float16", (8,), (1,)))
    assert not chosen(("bfloat16", *x[1:]))
    assert chosen(("float32", (70000, 8, 1), (8, 1, 1)))
    assert not chosen(("float32", (70000, 8, 1), (8, 1, 1)), training=False)
    assert not chosen(x, None)
