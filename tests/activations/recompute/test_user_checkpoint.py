"""Blocks that the model checkpoints itself: nothing of them is claimed, and their bytes are predicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from memtune.activations.recompute.user_checkpoint import autograd_saves
from memtune.autotune.record.recorder import record
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.selective import Selective
from memtune.technique import Technique
from memtune.testing import differences, drift, train
from memtune.testing.training import plain
from memtune.workload.workload import Workload

_MODEL = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.blocks = nn.Linear(16, 16), nn.ModuleList(Block() for _ in range(5))

    def forward(self, x):
        a, b, c, d, e = self.blocks
        x = checkpoint(lambda x: b(a(x)), self.into(x), use_reentrant=False)
        x = checkpoint(d, c(x), use_reentrant=True)
        return e(x)

def model(): return Model()
def batch(size): return torch.randn(size, 8, 16)
def loss(model, batch): return model(batch).square().mean()
"""  # noqa: E501
_STATE_BYTES = torch.get_rng_state().nbytes
ALL = CopyOut(kind="copy_out", min_bytes=0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(_MODEL)
    return file


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "technique", [Full(kind="full"), Selective(kind="selective"), ALL], ids=lambda each: each.kind
)
def test_user_checkpoint_trains_bitwise_and_is_predicted(technique: Technique, path: Path) -> None:
    assert drift(path, technique) == ""
    assert not differences(train(path, technique), plain(path))


_INSIDE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, *inputs):
        ctx.run, ctx.inputs = run, inputs  # held by Python, unlike tensors that are saved for backward
        with torch.no_grad():
            return run(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [each.detach().requires_grad_(each.requires_grad) for each in ctx.inputs]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        torch.autograd.backward(out, grad)
        return None, *(each.grad for each in inputs)

def again(run, *inputs):
    return CHECKPOINT

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def cross(self, x, context):
        return torch.tanh(self.query(x)) * torch.tanh(self.key(context))

    def forward(self, x, context):
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return x + again(self.cross, x, context)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, context):
        for block in self.blocks:
            x = block(x, context)
        return x

def model(): return Model()
def batch(size): return torch.randn(size, 8, 16), torch.randn(size, 8, 16)
def loss(model, batch): return model(*batch).square().mean()
"""


@pytest.mark.drawn(3)
@pytest.mark.parametrize("own", [False, True], ids=["torch's", "own"])
@pytest.mark.parametrize(
    "techniques",
    [(Full(kind="full"),), (ALL,), (Full(kind="full"), ALL)],
    ids=lambda each: "+".join(technique.kind for technique in each),
)
def test_user_checkpoint_inside_blocks_reads_an_input_that_all_of_them_offload(
    techniques: tuple[Technique, ...], own: bool, tmp_path: Path
) -> None:
    """The checkpoint runs again on the tensors that Python holds, before any block reloads its inputs."""
    path = tmp_path / "inside.py"
    ours = "Again.apply(run, *inputs)" if own else "checkpoint(run, *inputs, use_reentrant=True)"
    path.write_text(_INSIDE.replace("CHECKPOINT", ours))
    assert drift(path, *techniques) == ""
    assert not differences(train(path, *techniques), plain(path))


def test_generator_states_of_a_checkpoint_count_on_cpu_only(path: Path) -> None:
    on_cpu, on_cuda = (record(Workload.load(path), target=target).step for target in ("cpu", "cuda"))
    allocated = on_cpu.ops.name == on_cpu.names.index("memtune.allocate")
    assert (
        on_cpu.storages.bytes[np.isin(on_cpu.storages.producer, np.flatnonzero(allocated))].tolist()
        == [_STATE_BYTES] * 4
    )
    assert "memtune.allocate" not in on_cuda.names


def test_checkpoint_hides_its_ops_from_autograd() -> None:
    seen: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(autograd_saves())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    for reentrant in (False, True):
        torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=reentrant).exp().sum().backward()
    assert seen == [False] * 4
    forward(x)
    assert seen[-1]
