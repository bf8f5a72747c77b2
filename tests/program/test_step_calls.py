"""Views of a step with one block per call."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from support.zoo_paths import ZOO

from memtune.autotune.record.recorder import record
from memtune.program.step import Phase, Step, join_calls, split_calls
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.recompute.balanced import Balanced
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.selective import Selective
from memtune.technique import Technique
from memtune.testing.drift_check import drift, plain_program
from memtune.workload.workload import Workload

SHARED = """
import torch
from torch import nn

class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
        return x

def model():
    return Shared()

def batch(size):
    return torch.randn(size, 8)

def loss(model, batch):
    return model(batch).mean()
"""


DISCRIMINATOR = """
import torch
import torch.nn.functional as F
from torch import nn

class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 64))
        first = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 32))
        self.judge = nn.Sequential(first, nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, z, real):
        fake = self.make(z)
        with torch.no_grad():
            before = self.judge(real)
        fooled, fake = self.judge(fake).view(-1), self.judge(fake.detach()).view(-1)
        return fooled, fake, self.judge(real.view(-1, 64)).view(-1) - before.view(-1)

def model():
    return Gan()

def batch(size):
    return torch.randn(size * 8, 8), torch.randn(size * 8, 64)

def loss(model, batch):
    fooled, fake, real = model(*batch)
    return F.softplus(-fooled).mean() + F.softplus(fake).mean() + F.softplus(-real).mean()

def blocks(model):
    return [model.make, model.judge]
"""
"""Three calls of a block under autograd, with only views between them, and one without autograd.

Each call advances the buffers of the spectral norm.
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("calls")
    for name, text in {"shared": SHARED, "discriminator": DISCRIMINATOR}.items():
        (folder / f"{name}.py").write_text(text)
    return {name: folder / f"{name}.py" for name in ("shared", "discriminator")}


@pytest.fixture(scope="module")
def shared(written: dict[str, Path]) -> Step:
    return record(Workload.load(written["shared"])).step


@pytest.mark.parametrize("model", ZOO)
def test_split_calls_keeps_step_without_repeated_calls(model: str) -> None:
    step = plain_program(ZOO[model]).step
    assert split_calls(step) is step
    assert step.calls.block.tolist() == list(range(len(step.blocks)))


def test_split_calls_separates_ops_saves_and_inputs(shared: Step) -> None:
    calls = split_calls(shared)
    assert calls.blocks == ("blocks.0", "blocks.1") * 3
    for call in range(6):
        forward, backward = (
            np.flatnonzero((calls.ops.block == call) & (calls.ops.phase == phase)) for phase in (1, 3)
        )
        assert len(forward) == 2
        assert len(backward) >= 2
        saved = calls.storages.producer[calls.saves.storage[calls.saves.block == call]]
        assert set(saved[saved >= forward[0]]) <= set(forward)
        (storage,) = calls.calls.inputs.storage[calls.calls.input_block == call]
        assert calls.storages.producer[storage] == forward[0] - 1
    backward_at = [
        np.flatnonzero((calls.ops.block == call) & (calls.ops.phase == Phase.BACKWARD)).min()
        for call in range(6)
    ]
    assert backward_at == sorted(backward_at, reverse=True)


def test_split_calls_separates_calls_with_only_views_between(written: dict[str, Path]) -> None:
    step = record(Workload.load(written["discriminator"])).step
    assert [step.blocks[block] for block in step.calls.block] == ["make", "judge", "judge", "judge", "judge"]
    assert step.calls.grad_enabled.tolist() == [1, 0, 1, 1, 1]
    counts = [
        np.count_nonzero((step.ops.call == call) & (step.ops.phase == Phase.FORWARD)) for call in range(1, 5)
    ]
    assert len(set(counts)) == 1
    assert not (step.saves.call == 1).any()


def test_join_calls_inverts_split_calls(shared: Step) -> None:
    again = join_calls(split_calls(shared), shared)
    assert again.blocks == shared.blocks
    for column in ("ops.block", "saves.block", "calls.input_block", "calls.block"):
        assert np.array_equal(attrgetter(column)(again), attrgetter(column)(shared))


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    "techniques",
    [
        (Full(),),
        (Selective(),),
        (Balanced(),),
        (CopyOut(ratio=1.0, min_bytes=1),),
        (CopyOut(ratio=0.5, min_bytes=1),),
        (Full(), CopyOut(min_bytes=1)),
    ],
    ids=lambda each: "+".join(technique.kind for technique in each),
)
@pytest.mark.parametrize("model", ["shared", "discriminator"])
def test_apply_per_call_equals_prediction(
    model: str, techniques: tuple[Technique, ...], written: dict[str, Path]
) -> None:
    assert drift(written[model], *techniques) == ""
