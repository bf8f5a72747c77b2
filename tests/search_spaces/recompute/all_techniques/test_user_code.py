"""User code inside blocks: custom autograd functions, the user's own checkpoints, views changed in place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memtune.program.step import Phase, Resource
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.recompute._block_planner import measured_options
from memtune.search_spaces.recompute.dtr import Dtr
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.planned import Planned
from memtune.search_spaces.recompute.selective import Selective
from memtune.technique import Technique
from memtune.testing.drift_check import drift, plain_program, rewritten, target_of
from memtune.testing.training import differences, plain, train

MODEL = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clamp(min=0)
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return 2 * y * gradient

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 32))

    def forward(self, x):
        y = self.down(Squared.apply(self.up(self.norm(x))))
        left, right = y.chunk(2, dim=-1)
        y = torch.cat([left.mul(2), right.tanh()], dim=-1)
        y[:, ::2] *= 0.5
        return x + checkpoint(self.inner, y, use_reentrant=False)

def model():
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 8))

def batch(size):
    return torch.randn(size, 16, 32)

def loss(model, batch):
    return model(batch).square().mean()
"""
BY_BLOCKS: dict[str, Technique] = {
    "full": Full(),
    "selective": Selective(),
    "planned": Planned(share=0.4, by_schedule=False),
}
BY_OPS: dict[str, Technique] = {"schedule": Dtr(ratio=0.6), "online": Dtr(ratio=0.9, online=True)}


@pytest.mark.parametrize("name", [*BY_BLOCKS, *BY_OPS])
def test_trains_as_without(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    # One file for all, so that it is recorded once; by ops, a checkpoint of the user's own is refused.
    path = tmp_path_factory.getbasetemp() / f"users_code_{name in BY_OPS}.py"
    path.write_text(
        MODEL.replace("checkpoint(self.inner, y, use_reentrant=False)", "self.inner(y)")
        if name in BY_OPS
        else MODEL
    )
    technique = BY_BLOCKS.get(name) or BY_OPS[name]
    assert technique.fits(plain_program(path), target_of(technique)) is None
    assert differences(train(path, technique), plain(path)) == []


def test_user_checkpoint_is_refused_by_schedules(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "users_code_False.py"
    path.write_text(MODEL)
    for technique in BY_OPS.values():
        assert "the model recomputes parts of itself already" in str(
            technique.fits(plain_program(path), target_of(technique))
        )


PENALTY = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(nn.functional.softplus(self.up(self.norm(x))))

def model():
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 1))

def batch(size):
    return torch.randn(size * 64, 64)

def loss(model, batch):
    x = batch.detach().requires_grad_()
    y = model(x)
    gradient, = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.mean() + (gradient.norm(2, dim=1) - 1).square().mean()
"""


SECOND_ORDER = {
    "full": BY_BLOCKS["full"],
    "selective": BY_BLOCKS["selective"],
    "copy_out": CopyOut(min_bytes=1),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", SECOND_ORDER)
def test_gradient_penalty_asks_for_products_twice(name: str, tmp_path: Path) -> None:
    """Blocks run a third time for values freed after the first backward; reloaded tensors are resident for
    both.
    """
    path = tmp_path / "penalty.py"
    path.write_text(PENALTY)
    technique = SECOND_ORDER[name]
    assert drift(path, technique) == ""
    step = rewritten(path, technique)
    products = [
        op
        for op in np.flatnonzero(step.ops.copy_of >= 0)
        if step.names[step.ops.name[op]] == "aten.softplus.default"
    ]
    assert len(products) == (0 if name == "copy_out" else 2 * len(step.blocks))


DROPS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        y = self.down(torch.tanh(self.up(self.norm(x))))
        y = y * y.new_empty(len(y), 1, 1).bernoulli_(0.9)  # drops whole samples
        return x + nn.functional.dropout(y, 0.1)

def model():
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(32, 8))

def batch(size):
    return torch.randn(size, 256, 32)

def loss(model, batch):
    return model(batch).square().mean()
"""


def test_mask_is_drawn_again_without_the_tensor_of_its_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_options, "claims_s", lambda *_: 0.0)  # tensors alone decide
    path = tmp_path / "drops.py"
    path.write_text(DROPS)
    technique = Planned(share=0.3, offload=False, by_schedule=False)
    step = rewritten(path, technique)
    assert drift(path, technique) == ""
    again = [step.names[i] for i in step.ops.name[step.ops.phase == Phase.RECOMPUTE]]
    assert "aten.bernoulli_.float" in again
    products = {
        i for i in np.flatnonzero(step.ops.phase == Phase.FORWARD) if "addmm" in step.names[step.ops.name[i]]
    }
    down = sorted(products)[1:8:2]
    assert (
        step.freed_after[np.isin(step.storages.producer, down)] <= step.forward_ends[-1]
    ).all()  # it is not kept, nor made again
    assert not set(down) & set(
        step.ops.copy_of[(step.ops.phase == Phase.RECOMPUTE) & (step.ops.resource != Resource.NOTHING)]
    )
    assert differences(train(path, technique), plain(path)) == []
