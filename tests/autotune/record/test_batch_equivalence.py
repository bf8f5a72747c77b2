from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import zoo_paths

from memtune.autotune.record import batch_equivalence
from memtune.autotune.record.batch_equivalence import batch_is_lossless
from memtune.memory.dispatch_ledger import ModeLedger
from memtune.testing.drift_check import recording_of
from memtune.workload.batches import map_tensors
from memtune.workload.workload import Workload

HEAD = """
import torch, torch.nn.functional as F
from torch import nn
def batch(size):
    x = torch.randn(size, 6)
    return x, torch.randint(5, (size, 4))
"""
MLP = "def model(): return nn.Sequential(nn.Linear(6, 8), {inner}, nn.Linear(8, 5))\n"


def verdict(tmp_path: Path, body: str) -> str:
    path = tmp_path / "model.py"
    path.write_text(HEAD + body)
    return str(batch_is_lossless(Workload.load(path)) or "")


MEAN = "def loss(m, b): return F.cross_entropy(m(b[0]), b[1][:, 0])\n"


@pytest.mark.parametrize("name", ["gpt", "lstm", "autocast", "tobf16", "tied", "lora"])
def test_batch_is_lossless_for_mean_over_samples_with_dropout(name: str):
    assert batch_is_lossless(Workload.load(zoo_paths.ZOO[name])) is None


@pytest.mark.parametrize("inner", ["nn.Dropout(0.5)", "nn.LayerNorm(8)", "nn.ReLU()"])
def test_batch_is_lossless_for_layers_on_single_samples(tmp_path: Path, inner: str):
    assert verdict(tmp_path, MLP.format(inner=inner) + MEAN) == ""


def test_batch_is_lossless_with_functional_and_attention_dropout(tmp_path: Path):
    body = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 5)
    def forward(self, x):
        h = F.dropout(self.a(x), 0.3, self.training)[:, None, None]
        h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.3)
        return self.b(h[:, 0, 0])
def model(): return M()
"""
    assert verdict(tmp_path, body + MEAN) == ""


def test_batch_is_lossless_with_dropout_between_recurrent_layers(tmp_path: Path):
    body = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(8, 5)
    def forward(self, x):
        return self.head(self.rnn(x[:, None])[0][:, -1])
def model(): return M()
"""
    assert verdict(tmp_path, body + MEAN) == ""


def test_batch_norm_is_not_lossless(tmp_path: Path):
    assert "BatchNorm" in verdict(tmp_path, MLP.format(inner="nn.BatchNorm1d(8)") + MEAN)


def test_contrastive_loss_is_not_lossless(tmp_path: Path):
    body = """
def loss(m, b):
    z = F.normalize(m(b[0]), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))
"""
    assert "contrastive" in verdict(tmp_path, MLP.format(inner="nn.Tanh()") + body)


def test_mean_over_tokens_is_not_lossless(tmp_path: Path):
    body = """
def batch(size):
    y = torch.randint(5, (size, 4))
    for i in range(size):
        y[i, : i % 4] = -100
    return torch.randn(size, 6), y
def model(): return nn.Linear(6, 20)
def loss(m, b): return F.cross_entropy(m(b[0]).view(-1, 5), b[1].view(-1), ignore_index=-100)
"""
    assert "tokens" in verdict(tmp_path, body)


def test_mean_over_selected_tokens_whose_halves_select_equally_many_once_is_not_lossless(tmp_path: Path):
    body = MLP.format(inner="nn.Tanh()") + (
        "drawn = []\n"
        "def batch(size):\n"
        "    drawn.append(size)\n"
        "    keep = torch.ones(size, dtype=torch.bool)\n"
        "    keep[0] = len(drawn) == 1\n"
        "    return torch.randn(size, 6), keep\n"
        "def loss(model, batch): return model(batch[0])[batch[1]].square().mean()\n"
    )
    assert "differ" in verdict(tmp_path, body)


def test_sum_over_samples_is_named_as_cause(tmp_path: Path):
    text = verdict(
        tmp_path,
        MLP.format(inner="nn.Tanh()")
        + "def loss(m, b): return F.cross_entropy(m(b[0]), b[1][:, 0], reduction='sum')\n",
    )
    assert "is a sum" in text
    assert "loss.mean()" in text


def test_random_numbers_outside_dropout_are_named_as_cause(tmp_path: Path):
    body = "def loss(m, b): return (m(b[0] + torch.randn_like(b[0]))**2).mean()\n"
    assert "random numbers" in verdict(tmp_path, MLP.format(inner="nn.Tanh()") + body)


def test_batch_that_cannot_be_split_is_a_reason(tmp_path: Path):
    body = """
def batch(size): return torch.randn(3, 6 * size)
def model(): return nn.Linear(24, 2)
def loss(m, b): return m(b).mean()
"""
    assert "could not be compared" in verdict(tmp_path, body)


def test_loss_that_fails_on_half_of_a_batch_is_a_reason(tmp_path: Path):
    """A batch of graphs has as many nodes as fit them: its first dimensions do not divide it."""
    body = """
def batch(size):
    return torch.randn(3 * size, 6), torch.arange(size).repeat_interleave(3), torch.randn(size, 5), size
def model(): return nn.Linear(6, 5)
def loss(m, b):
    points, graph, target, graphs = b
    return F.mse_loss(torch.zeros(graphs, 5, dtype=points.dtype).index_add(0, graph, m(points)), target)
"""
    text = verdict(tmp_path, body)
    assert "could not be compared" in text
    assert "fails on half of a batch" in text


def test_activations_larger_than_host_memory_are_not_computed(tmp_path: Path):
    path = tmp_path / "model.py"
    path.write_text(HEAD + MLP.format(inner="nn.Tanh()") + "def loss(m, b): raise RuntimeError('ran')\n")
    assert "host memory" in str(batch_is_lossless(Workload.load(path), activation_bytes=2**50))


@pytest.mark.parametrize("name", ["gpt", "cnn_bn"])
def test_activation_bytes_exceed_what_a_comparison_allocates(name: str):
    workload = Workload.load(zoo_paths.ZOO[name])
    model = workload.build_model().double()
    batch = map_tensors(
        workload.make_batch(batch_equivalence.SAMPLES),
        lambda each: each.double() if each.is_floating_point() else each,
    )
    with ModeLedger() as ledger:
        workload.loss(model, batch).backward()
    needed = batch_equivalence.activation_bytes(recording_of(zoo_paths.ZOO[name]), ())
    gradients = sum(each.nbytes for each in model.parameters())
    assert ledger.peak_bytes() - gradients <= needed <= 4 * ledger.peak_bytes()


def test_batch_is_lossless_preserves_generator_state(tmp_path: Path):
    before = torch.random.get_rng_state()
    verdict(tmp_path, MLP.format(inner="nn.Tanh()") + MEAN)
    assert torch.equal(before, torch.random.get_rng_state())


def test_model_larger_than_host_memory_is_not_tried(tmp_path: Path):
    path = tmp_path / "model.py"
    path.write_text(HEAD + "def model(): raise RuntimeError('built')\n" + MEAN)
    assert "host memory" in str(batch_is_lossless(Workload.load(path), parameter_bytes=2**50))


BLOCKS = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), {norm}
        self.register_buffer("shift", torch.arange(8.0))
    def forward(self, x): return x + self.norm(torch.tanh(self.up(x) + self.shift))
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.again = nn.Linear(8, 5)
        self.again.weight = self.head.weight
        self.blocks = nn.ModuleList(Block() for _ in range(5))
    def forward(self, x):
        x = self.embed(x)
        for block in {order}: x = block(x)
        return self.head(x) + self.again(x)
def model(): return M()
"""
NAMES = [f"blocks.{i}" for i in range(5)]


def large(tmp_path: Path, norm: str, order: str = "self.blocks") -> Workload:
    path = tmp_path / "model.py"
    path.write_text(HEAD + BLOCKS.format(norm=norm, order=order) + MEAN)
    return Workload.load(path)


def test_short_model_has_the_blocks_that_are_compared(tmp_path: Path):
    short = batch_equivalence._short_model(large(tmp_path, "nn.LayerNorm(8)"), NAMES[2:])
    assert len(short.blocks) == 2
    assert short.again.weight is short.head.weight
    assert not any(each.is_meta for each in short.parameters())
    assert torch.equal(short.blocks[0].shift, torch.arange(8.0))


@pytest.mark.parametrize("order", ["self.blocks", "[self.blocks[i] for i in range(5)]"])
@pytest.mark.parametrize(("norm", "adds_up"), [("nn.LayerNorm(8)", True), ("nn.BatchNorm1d(8)", False)])
def test_short_model_gets_the_verdict_of_all_blocks(tmp_path: Path, norm: str, adds_up: bool, order: str):
    found = batch_is_lossless(large(tmp_path, norm, order), parameter_bytes=1, without=NAMES[2:])
    assert (found is None) is adds_up


def test_short_model_needs_no_memory_for_all_blocks(tmp_path: Path):
    workload = large(tmp_path, "nn.LayerNorm(8)")
    assert batch_is_lossless(workload, parameter_bytes=2**50, without=NAMES[2:]) is None


@pytest.mark.parametrize(
    ("norm", "skipped"),
    [
        ("nn.LayerNorm(8)", NAMES[1:]),
        (
            "nn.BatchNorm1d(8) if made.append(0) or len(made) % 5 == 4 else nn.LayerNorm(8)",
            NAMES[1:3] + NAMES[4:],
        ),
    ],
)
def test_repeated_blocks_are_those_that_run_the_ops_of_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: str, skipped: list[str]
):
    """One of five blocks of a class has batch norm, so it is compared."""
    (tmp_path / "model.py").write_text(
        "made = []\n" + HEAD + BLOCKS.format(norm=norm, order="self.blocks") + MEAN
    )
    recording = recording_of(tmp_path / "model.py")
    assert batch_equivalence.repeated_blocks(recording) == ()
    monkeypatch.setattr(batch_equivalence, "_LARGE_FLOPS", 0.0)
    assert batch_equivalence.repeated_blocks(recording) == tuple(skipped)


@pytest.mark.parametrize(("dim", "layers", "draws"), [(8, 4, 2), (4096, 2, 0), (1024, 400, 1)])
def test_affordable_draws_follow_the_flops_of_one_block(dim: int, layers: int, draws: int):
    """By 2048 tokens a sample: one block of 4096 takes too long, one of 400 of 1024 does not."""
    flops = 6.0 * 12 * dim**2 * 2048
    blocks = tuple(f"blocks.{i}" for i in range(layers))
    step = SimpleNamespace(
        blocks=blocks,
        ops=SimpleNamespace(block=np.arange(-1, layers), flops=np.full(layers + 1, flops)),
    )
    recording: Any = SimpleNamespace(step=step, small=1)
    assert batch_equivalence.affordable_draws(recording, blocks[1:]) == draws
    of_plan = batch_equivalence.affordable_draws(recording, blocks[1:], for_trials=False)
    assert of_plan == (draws if dim == 8 else 0)  # a plan compares what takes seconds


def test_batch_is_lossless_shows_no_warnings_of_the_loss(tmp_path: Path):
    """Here, on a CPU, autocast to CUDA warns that it does nothing; the recording applies it."""
    body = """
def model(): return nn.Linear(6, 5)
def loss(m, b):
    with torch.autocast("cuda", torch.bfloat16):
        return m(b[0]).square().mean()
"""
    with warnings.catch_warnings(action="error"):
        assert verdict(tmp_path, body) == ""


@pytest.mark.parametrize(("name", "couples"), [("cnn_bn", True), ("gpt", False)])
def test_coupled_samples_names_batch_norm(name: str, couples: bool):
    found = batch_equivalence.coupled_samples(recording_of(zoo_paths.ZOO[name]))
    assert (found is not None and "batch_norm" in str(found)) is couples


@pytest.mark.parametrize("own", ["", "x = x.to(torch.float32)"])
def test_batch_is_lossless_for_complex_parameters(tmp_path: Path, own: str):
    """The comparison widens complex numbers to complex128, and where it must not, keeps their dtype."""
    body = f"""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4, dtype=torch.cfloat))
    def forward(self, x):
        {own}
        return torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=6)
def model(): return M()
def loss(m, b): return m(b[0]).square().mean()
"""
    assert verdict(tmp_path, body) == ""
    assert "sum over samples" in verdict(tmp_path, body.replace("mean()", "sum()"))


@pytest.mark.parametrize(
    ("write", "why"), [("lerp_(y.mean(0), 0.1)", "forward writes average"), ("zero_()", "")]
)
def test_buffer_that_averages_over_forwards_is_not_lossless(tmp_path: Path, write: str, why: str):
    """As the codebook of a VQ-VAE: two micro-batches of a step would move it twice."""
    body = f"""
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("average", torch.zeros(5))
    def forward(self, x):
        y = self.linear(x)
        with torch.no_grad():
            self.average.{write}
        return y
def model(): return M()
"""
    found = verdict(tmp_path, body + MEAN)
    assert found.startswith(why)
    assert bool(found) == bool(why)
