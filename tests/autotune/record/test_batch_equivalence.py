from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import zoo_paths

from memtune.autotune.record.batch_equivalence import batch_is_lossless
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


def test_batch_is_lossless_preserves_generator_state(tmp_path: Path):
    before = torch.random.get_rng_state()
    verdict(tmp_path, MLP.format(inner="nn.Tanh()") + MEAN)
    assert torch.equal(before, torch.random.get_rng_state())


def test_model_larger_than_host_memory_is_not_tried(tmp_path: Path):
    path = tmp_path / "model.py"
    path.write_text(HEAD + "def model(): raise RuntimeError('built')\n" + MEAN)
    assert "host memory" in str(batch_is_lossless(Workload.load(path), parameter_bytes=2**50))
