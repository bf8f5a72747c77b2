"""Recording: the rung, the blocks, sizes as functions of the micro-batch, and bytes equal to a real run's."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.zoo_paths import BAD, ZOO
from torch import nn

from memtune import hardware
from memtune.activations.schedules.region_pass import Region, depends_on_data, region_of
from memtune.autotune.record import recording_session
from memtune.autotune.record.recorder import check, record
from memtune.autotune.record.recording_session import SEED, start_session
from memtune.autotune.space.candidates import Rewriter
from memtune.autotune.space.search_space import build_space
from memtune.config import fingerprint
from memtune.errors import WorkloadError
from memtune.hardware.cpu_cores import cpu_threads
from memtune.memory import cpu_allocator
from memtune.memory.dispatch_ledger import ModeLedger
from memtune.memory.workspace import WorkspaceTable
from memtune.program.step import Kind, Recording
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.training_step import prepare_model, train_step
from memtune.technique import Target
from memtune.testing.drift_check import recording_of
from memtune.workload.workload import Workload, tensors_of

CPU = torch.device("cpu")
RUNGS = {"moe": "real-step", "tobf16": "real-init"}
WHY = {"moe": ("nonzero", "nonzero", "nonzero"), "tobf16": ("_local_scalar_dense", "item()")}
N_BLOCKS = {
    "autocast": 3,
    "cnn_bn": 4,
    "gpt": 4,
    "hf_llama": 3,
    "inplace_views": 3,
    "lora": 4,
    "lstm": 3,
    "moe": 2,
    "tied": 3,
    "tobf16": 4,
}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("model", ZOO)
def test_record_uses_lowest_working_rung_and_notes_reasons(model: str) -> None:
    recording = recording_of(ZOO[model])
    assert recording.rung == RUNGS.get(model, "fake")
    failed = [note for note in recording.notes if note.startswith("rung ")]
    assert len(failed) == len(WHY.get(model, ()))
    for note, reason in zip(failed, WHY.get(model, ()), strict=True):
        assert reason in note


@pytest.mark.parametrize("model", ZOO)
def test_record_notes_the_model_that_training_has(model: str) -> None:
    trained = Workload.load(ZOO[model]).build_model()
    facts = recording_of(ZOO[model]).model
    assert facts.fingerprint == fingerprint(trained)
    assert facts.parameters == sum(each.numel() for each in trained.parameters())


@pytest.mark.parametrize("model", ZOO)
def test_record_assigns_ops_to_blocks(model: str) -> None:
    step = recording_of(ZOO[model]).step
    assert len(step.blocks) == N_BLOCKS[model]
    assert set(step.ops.block[step.ops.phase == 1]) >= set(range(len(step.blocks)))


# moe: routing follows the data; lstm: oneDNN rounds the reserve of its kernel up in steps.
@pytest.mark.drawn(4)
@pytest.mark.parametrize("model", [name for name in ZOO if name not in ("moe", "lstm")])
def test_affine_sizes_hold_at_third_micro_batch(model: str) -> None:
    recording = recording_of(ZOO[model])
    session = start_session(Workload.load(ZOO[model]), recording.rung)
    session.warm_up(6)
    real, affine = session.trace(6), recording.at(6)
    assert np.array_equal(real.storages.bytes, affine.storages.bytes)
    assert np.array_equal(real.live_bytes(), affine.live_bytes())
    assert np.allclose(real.ops.flops, affine.ops.flops)
    assert np.array_equal(real.ops.traffic_bytes, affine.ops.traffic_bytes)


@pytest.mark.parametrize("model", ["moe", "lstm"])
def test_record_records_used_sizes_that_are_not_affine(model: str) -> None:
    recording = recording_of(ZOO[model])
    session = start_session(Workload.load(ZOO[model]), recording.rung)
    session.warm_up(6)
    checked = check(recording, session, 6)
    assert 6 in checked.checked
    assert checked.at(6) is checked.exact[6]
    assert not np.array_equal(checked.at(6).storages.bytes, recording.at(6).storages.bytes)
    assert any("micro-batch 6 was recorded by itself" in note for note in checked.notes)
    assert check(checked, session, 6) is checked


def test_record_leaves_out_one_sample_where_batch_norm_refuses_it(tmp_path: Path) -> None:
    path = tmp_path / "normed.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def model(): return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))\n"
        "def batch(size): return torch.randn(size, 8)\n"
        "def loss(model, batch): return model(batch).square().mean()\n"
    )
    workload = Workload.load(path)
    recording = record(workload, sizes={4, 1}, between={4, 2, 1})
    assert recording.failing == {1}
    assert any("micro-batch 1 is left out" in note for note in recording.notes)
    space = build_space(Rewriter(recording, Target(hardware.detect("cpu"))), 4)
    assert [each.micro_batch for each in space.executions] == [4, 2]
    with pytest.raises(WorkloadError, match="more than 1 value per channel") as caught:
        record(workload, sizes={1})
    assert caught.value.fix == "a larger global batch, or fewer ranks, so that each has 2 samples"


def test_record_of_models_that_keep_the_last_batch_is_of_the_steady_step(tmp_path: Path) -> None:
    """Another size recreates the memory of Transformer-XL; a step of the same size reads the last one."""
    path = tmp_path / "model.py"
    path.write_text(
        """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.memory = nn.Linear(8, 8), None

    def forward(self, x):
        if self.memory is None or self.memory.shape != x.shape:
            self.memory = torch.zeros_like(x)
        out = self.first(x + self.memory)
        self.memory = out.detach().clone()
        return out


def model():
    return Model()


def batch(size):
    return torch.ones(size, 8)


def loss(model, batch):
    return model(batch).mean()


def optimizer(params):
    return torch.optim.SGD(params, 0.1)
"""
    )
    workload = Workload.load(path)
    recorded = record(workload, sizes=[16])
    steady = start_session(workload, recorded.rung)
    steady.warm_up(16)
    assert recorded.at(16).peak_bytes() == steady.trace(16).peak_bytes()
    assert recorded.checked >= {2, 4}


def test_record_notes_data_dependent_sizes() -> None:
    assert any("depend on the data" in note for note in recording_of(ZOO["moe"]).notes)
    assert any("masks like those recorded with" in note for note in recording_of(ZOO["hf_llama"]).notes)


SELECTING = """
import torch
from torch import nn
from torch.nn import functional as F

class Selecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)

    def forward(self, tokens, labels):
        if not (tokens == 0).any():  # decides by looking at the batch
            raise AssertionError("no padding")
        hidden = torch.tanh(self.embedding(tokens))
        mine = labels != -100
        rows, columns = torch.nonzero(tokens > 20, as_tuple=True)
        distinct = tokens.unique()
        repeated = torch.repeat_interleave(hidden[0], tokens[0] % 3, dim=0)
        extra = hidden[rows, columns].pow(2).mean() + self.embedding(distinct).pow(2).mean()
        extra = extra + repeated.pow(2).mean() + hidden.masked_select(mine.unsqueeze(-1)).pow(2).mean()
        extra = extra + hidden[torch.arange(len(hidden)), :, 3:5][mine].exp().mean()
        lengths = (labels != -100).sum(-1).clamp(max=9)
        paths = hidden.log_softmax(-1).transpose(0, 1)
        extra = extra + F.ctc_loss(paths, tokens[:, :9] % 15 + 1, torch.full_like(lengths, 24), lengths)
        return extra + F.cross_entropy(self.head(hidden[mine]), labels[mine])

def model():
    return Selecting()

def batch(size):
    tokens = torch.randint(1, 40, (size, 24))
    tokens[:, -2:] = 0
    return tokens, torch.where(torch.rand(size, 24) < 0.3, tokens, -100)

def loss(model, batch):
    return model(*batch)
"""


def test_record_sizes_selections_by_values_of_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ops whose output size depends on known values are recorded without data, as a real step would be."""
    path = tmp_path / "selecting.py"
    path.write_text(SELECTING)
    fake = record(Workload.load(path), sizes=(7,))
    assert fake.rung == "fake"
    assert any("depend on the data" in note for note in fake.notes)
    monkeypatch.setattr(recording_session, "RUNGS", {"real-step": recording_session.RUNGS["real-step"]})
    real = record(Workload.load(path), sizes=(7,))
    for size in (2, 4):
        assert fake.at(size).peak_bytes() == real.at(size).peak_bytes()
        assert np.array_equal(fake.at(size).storages.bytes, real.at(size).storages.bytes)
    assert fake.at(7).peak_bytes() == pytest.approx(real.at(7).peak_bytes(), rel=0.2)  # extrapolated there


PACKED = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 64)
        self.layers = nn.{kind}

    def forward(self, tokens, lengths):
        hidden = self.embedding(tokens)
        first = self.layers.batch_first
        hidden = hidden if first else hidden.transpose(0, 1)
        packed = pack_padded_sequence(hidden, lengths, batch_first=first, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.layers(packed)[0], batch_first=first, total_length={total})
        return out

def model():
    return Reader()

def batch(size):
    return torch.randint(40, (size, 14)), 12 - 2 * (torch.arange(size) % 5)

def loss(model, batch):
    return model(*batch).pow(2).mean()
"""


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "kind",
    ["LSTM(64, 96, 2, batch_first=True)", "GRU(64, 48, 2, bidirectional=True, dropout=0.1)", "RNN(64, 128)"],
)
def test_record_runs_recurrent_layers_on_packed_sequences(
    kind: str, tmp_path: Path, table: WorkspaceTable
) -> None:
    """Torch reads their lengths in C++; each size runs other ops and is recorded by itself."""
    path = tmp_path / "reader.py"
    path.write_text(PACKED.format(kind=kind, total=14 if "GRU" in kind else None))
    recording = record(Workload.load(path), sizes=(9,), workspace=table)
    assert recording.rung == "fake"
    cpu_allocator.install()
    gc.collect()
    base = cpu_allocator.live_bytes()
    real = Real(path)
    real.step(9)
    cpu_allocator.reset_peak()
    real.step(9)
    assert recording.at(9).peak_bytes() == pytest.approx(cpu_allocator.peak_bytes() - base, rel=0.005)


ACTING = """
import torch
from torch import nn
from torch.distributions import Categorical, Dirichlet, Normal

class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.log_std = nn.Linear(8, 36), nn.Parameter(torch.zeros(4))

    def forward(self, seen):
        choice, mean, share = torch.tanh(self.body(seen)).split((16, 4, 16), -1)
        return Categorical(logits=choice), Normal(mean, self.log_std.exp()), Dirichlet(share.exp())

def model():
    return Policy()

def batch(size):
    return torch.randn(size, 8), torch.randint(16, (size,)), torch.randn(size, 4)

def loss(model, batch):
    seen, chosen, moved = batch
    choice, move, share = model(seen)
    gain = choice.log_prob(chosen) + move.log_prob(moved).sum(-1) + share.entropy()
    return -(gain + move.rsample().sum(-1)).mean()
"""


def test_record_of_distributions_that_validate_needs_no_real_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "acting.py"
    path.write_text(ACTING)
    # torch's compiler turns the checks off for the rest of the process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    fake = record(Workload.load(path))
    assert fake.rung == "fake"
    assert "assumed that the arguments of torch.distributions are valid" in fake.notes
    monkeypatch.setattr(recording_session, "RUNGS", {"real-step": recording_session.RUNGS["real-step"]})
    real = record(Workload.load(path))
    assert fake.at(4).peak_bytes() == real.at(4).peak_bytes()
    assert np.array_equal(fake.at(4).storages.bytes, real.at(4).storages.bytes)


CHOOSING = """
import torch
from torch import nn

EXPERTS = 4

class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.router, self.head = nn.Linear(8, 16), nn.Linear(16, EXPERTS), nn.Linear(16, 8)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(EXPERTS))

    def forward(self, points):
        hidden = self.stem(points).flatten(0, 1)
        weight, chosen = self.router(hidden).softmax(-1).topk(2, dim=-1)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        mixed = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            if counts[index] == 0:
                raise AssertionError("an expert without tokens")
            slot, row = torch.where((chosen == index).T)
            mixed.index_add_(0, row, expert(hidden[row]) * weight[row, slot, None])
        first = hidden[self.router(hidden).argmax(0)]
        order = torch.argsort(hidden, dim=0, descending=True)[:, 0]
        return self.head(mixed + first.mean(0) + hidden[order])

def model():
    return Choosing()

def batch(size):
    return torch.randn(size, 32, 8)

def loss(model, points):
    error = model.head.bias
    masked = torch.rand(points.shape[:2]) < 0.5
    if torch.isnan(error).any() or not torch.isfinite(error).all():
        raise AssertionError("not finite")
    while points.sub(model.head.bias).norm().item() < 0:  # reads a computed number
        pass
    order = model.head.bias.detach().numpy().argsort()  # leaves torch, as scipy's assignment
    points = torch.cat([points[..., i : i + 1] for i in order], -1)
    error = (model(points) - points.flatten(0, 1)).pow(2)
    return error[masked.flatten()].sum() / int(masked.sum())
"""


def test_record_assumes_even_choices_of_models_too_large_for_a_real_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of an expert, and rows under a mask that is drawn, are known without data."""
    path = tmp_path / "choosing.py"
    path.write_text(CHOOSING)
    assert record(Workload.load(path)).rung == "real-step"  # a small model
    monkeypatch.setattr(recording_session, "_SHORT_FLOPS", 0)
    fake = record(Workload.load(path))
    assert fake.rung == "fake"
    assert any("spread evenly" in note for note in fake.notes)
    monkeypatch.setattr(recording_session, "RUNGS", {"real-step": recording_session.RUNGS["real-step"]})
    real = record(Workload.load(path))
    assert [fake.step.names[i] for i in fake.step.ops.name] == [
        real.step.names[i] for i in real.step.ops.name
    ]
    # In a real step the experts have unequal shares, whose sum is the same.
    for size in (2, 4):
        assert fake.at(size).peak_bytes() == pytest.approx(real.at(size).peak_bytes(), rel=0.1)
    counts = fake.step.storages.bytes[fake.step.storages.producer >= 0]
    assert (counts == 2 * 32 * 2 // 4 * 16 * 4).sum() >= 4  # a quarter of the choices for each expert


CONSTANTS = """
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.2, 2)]
        self.scale = sum(rates)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.masked = nn.Parameter(torch.randn(16))
        self.register_buffer("mask", torch.full((12, 12), float("-inf")).triu(1))

    def forward(self, points):
        points = points.clone()
        points[:, torch.tensor([i % 3 == 0 for i in range(12)])] = self.masked
        if torch.rand([]) < 0.1:  # drops the layer
            return points * self.scale
        return self.encoder(points, mask=MASK) * self.scale  # compares it with a causal mask

def model():
    return Encoder()

def batch(size):
    return torch.randn(size, 12, 16)

def loss(model, points):
    return model(points).pow(2).mean()
"""


@pytest.mark.parametrize("mask", ["self.mask", "nn.Transformer.generate_square_subsequent_mask(12)"])
def test_record_knows_floating_point_constants_of_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: str
) -> None:
    """`nn.TransformerEncoder` decides by the values of its mask; depth rates are read in `__init__`."""
    path = tmp_path / "constants.py"
    path.write_text(CONSTANTS.replace("MASK", mask))
    fake = record(Workload.load(path))
    assert fake.rung == "fake"
    monkeypatch.setattr(recording_session, "RUNGS", {"real-step": recording_session.RUNGS["real-step"]})
    real = record(Workload.load(path))
    assert [fake.step.names[i] for i in fake.step.ops.name] == [
        real.step.names[i] for i in real.step.ops.name
    ]
    assert fake.at(4).peak_bytes() == real.at(4).peak_bytes()


def test_record_refuses_sparse_gradients_of_models_too_large_for_a_real_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sparse.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "def model(): return nn.EmbeddingBag(50, 8, sparse=True)\n"
        "def batch(size): return torch.randint(50, (size, 3))\n"
        "def loss(model, batch): return model(batch).mean()\n"
        "def optimizer(params): return torch.optim.SGD(params, lr=0.1)\n"
    )
    monkeypatch.setattr(recording_session, "available_bytes", lambda: 0)
    with pytest.raises(WorkloadError, match="sparse tensors"):
        record(Workload.load(path))


def test_record_is_deterministic_and_preserves_generator_state() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one = record(Workload.load(ZOO["moe"]))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    other = record(Workload.load(ZOO["moe"]))
    assert np.array_equal(one.step.storages.bytes, other.step.storages.bytes)


def test_record_notes_missing_workspaces_without_table() -> None:
    assert any("workspaces were not measured" in note for note in recording_of(ZOO["gpt"]).notes)
    assert not (recording_of(ZOO["gpt"]).step.storages.kind == Kind.WORKSPACE).any()


def test_record_notes_op_and_line_that_ruled_out_lower_rungs() -> None:
    *failed, used = recording_of(ZOO["moe"]).notes[:4]
    for note in failed:
        assert "aten.nonzero.default (moe.py, line " in note
    assert used == "so the step was recorded with a real step on CPU"


DEEP_COPIES = """
import copy
import torch
from torch import nn

def model():
    layer = nn.Linear(64, 64)
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(3)))

def batch(size):
    return torch.randn(size, 64)

def loss(model, batch):
    return model(batch).mean()
"""


def test_views_of_deep_copied_weights_share_storage(tmp_path: Path) -> None:
    path = tmp_path / "copies.py"
    path.write_text(DEEP_COPIES)
    step = record(Workload.load(path)).step
    weights = 3 * (64 * 64 + 64) * 4
    assert (
        step.storages.bytes[(step.storages.kind == Kind.PARAMETER) & (step.storages.producer < 0)].sum()
        == weights
    )
    assert "aten.t.default" not in step.names


CONTRASTIVE = """
import torch
from torch import nn

def model():
    return nn.Linear(16, 16)

def batch(size):
    return torch.randn(size * 16, 16)

def loss(model, batch):
    codes = model(batch)
    return (codes @ codes.T).logsumexp(1).mean()
"""


def test_record_records_between_sizes_only_if_largest_is_not_affine(tmp_path: Path) -> None:
    path = tmp_path / "contrastive.py"
    path.write_text(CONTRASTIVE)
    recording = record(Workload.load(path), sizes={16}, between={8})
    assert set(recording.exact) == {8, 16}
    session = start_session(Workload.load(path), recording.rung)
    session.warm_up(8)
    assert recording.at(8).peak_bytes() == session.trace(8).peak_bytes()
    assert set(record(Workload.load(ZOO["gpt"]), sizes={16}, between={8}).exact) == {16}


def test_record_raises_users_error_if_no_rung_works() -> None:
    logged = logging.getLogger("torch._subclasses.fake_tensor")
    records: list[logging.LogRecord] = []
    logged.addFilter(lambda each: bool(records.append(each)))
    try:
        with pytest.raises(WorkloadError, match="cannot be multiplied"):
            record(Workload.load(BAD["shapes"]))
    finally:
        logged.filters.pop()
    assert not records
    assert not logged.disabled


@pytest.mark.parametrize(("copies", "refused"), [(3.9, True), (4.1, False)])
def test_record_refuses_real_steps_that_memory_does_not_hold(
    copies: float, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = Workload.load(ZOO["moe"])
    weights_bytes = sum(each.nbytes for each in workload.build_model().parameters())
    monkeypatch.setattr(
        "memtune.autotune.record.recording_session.available_bytes", lambda: int(copies * weights_bytes)
    )
    if not refused:
        assert record(workload).rung == "real-step"
        return
    with pytest.raises(WorkloadError, match="failed on tensors without data") as caught:
        record(workload)
    assert "rung fake" in caught.value.evidence


def test_record_makes_fake_outputs_of_products_in_groups_of_float32(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(GROUPED)
    recording = record(Workload.load(file))
    assert recording.rung == "fake"
    step = recording.at(4)
    rows = np.flatnonzero(step.ops.name == step.names.index("aten._grouped_mm.default"))
    assert (
        step.ops.flops[rows].tolist() == [2 * 4 * 8 * 8 * 16] * 2
    )  # forward, and the gradient of the weights
    made = np.flatnonzero(np.isin(step.storages.producer, rows))
    assert sorted(step.storages.bytes[made].tolist()) == [4 * 2 * 8 * 16, 4 * 4 * 8 * 16]


GROUPED = """
import torch
from torch import nn
import torch.nn.functional as F

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 16))

    def forward(self, x):
        ends = torch.full((2,), x.shape[0] // 2, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x, self.weight, offs=ends)

def model():
    return Experts()

def batch(size):
    return torch.randn(size * 8, 8)

def loss(model, batch):
    return model(batch).pow(2).mean()
"""


def test_record_reports_batch_that_ignores_its_size() -> None:
    with pytest.raises(WorkloadError, match="ignores its size"):
        record(Workload.load(BAD["batch_ignores_size"]))


class Real:
    """The step that `record` recorded at micro-batch 2, for real: one step to warm up, one that is
    measured.
    """

    def __init__(self, path: Path) -> None:
        self.workload = Workload.load(path)
        torch.manual_seed(SEED)
        self.model: nn.Module = prepare_model(self.workload.build_model()).train()
        self.optimizer = self.workload.make_optimizer(self.model)

    def step(self, size: int = 2) -> None:
        torch.manual_seed(SEED)
        with tier(HOST):
            batch = self.workload.make_batch(size)
        train_step(self.model, self.optimizer, self.workload.loss, [batch], CPU)


@pytest.mark.parametrize("model", ZOO)
def test_recorded_tensor_bytes_equal_real_run(model: str) -> None:
    real, ledger = Real(ZOO[model]), ModeLedger()
    ledger.track(real.model, real.optimizer)
    with ledger:
        real.step()
        ledger.reset_peak()
        real.step()
    under_a_mode = recording_of(ZOO[model]).at(2).without_donations()
    assert under_a_mode.peak_bytes() == ledger.peak_bytes(), ledger.peak_op()
    ledger.close()


@pytest.fixture(scope="module")
def table() -> WorkspaceTable:
    if cpu_allocator.available() is not None:
        pytest.skip(f"no native ledger here: {cpu_allocator.available()}")
    with cpu_threads(1):
        return WorkspaceTable.cached()


def with_workspaces(path: Path, table: WorkspaceTable) -> Recording:
    return record(Workload.load(path), workspace=table)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("model", ZOO)
def test_recorded_peak_with_workspaces_equals_ledger(model: str, table: WorkspaceTable) -> None:
    recording = with_workspaces(ZOO[model], table)
    step = recording.at(2)
    cpu_allocator.install()
    gc.collect()
    base = cpu_allocator.live_bytes()
    real = Real(ZOO[model])
    real.step()
    cpu_allocator.reset_peak()
    real.step()
    native = cpu_allocator.peak_bytes() - base
    rows = np.flatnonzero(step.storages.kind == Kind.WORKSPACE)
    named = "\n".join(
        f"{step.storages.bytes[row]:>9} {step.names[step.ops.name[step.storages.producer[row]]]}"
        for row in rows
    )
    assert abs(step.peak_bytes() - native) <= 0.005 * native, (
        f"predicted {step.peak_bytes()}, native {native}:\n{named}"
    )


def test_convolution_workspaces_occur_again_in_recompute(table: WorkspaceTable) -> None:
    from memtune.activations.recompute.recompute_pass import recompute_blocks

    step = with_workspaces(ZOO["cnn_bn"], table).at(2)
    scratch = np.flatnonzero(step.storages.kind == Kind.WORKSPACE)
    assert {"aten.convolution_backward.default"} <= {
        step.names[step.ops.name[op]] for op in step.storages.producer[scratch]
    }
    assert (step.freed_after[scratch] == step.storages.producer[scratch]).all()
    again = recompute_blocks(step, list(range(4)))
    assert (again.storages.kind == Kind.WORKSPACE).sum() > len(scratch)


def test_complete_workspace_table_is_not_measured_again(
    table: WorkspaceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_workspaces(ZOO["tied"], table)
    monkeypatch.setattr(WorkspaceTable, "fill_in_child", lambda *_: pytest.fail("measured again"))
    started = time.monotonic()
    assert with_workspaces(ZOO["tied"], table).record_s <= time.monotonic() - started


def test_scratch_of_all_sizes_is_measured_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[str]] = []

    def fill(table: WorkspaceTable, keys: Iterable[str]) -> None:
        asked.append(set(keys))
        table.unknown |= dict.fromkeys(keys, "not measured")

    monkeypatch.setattr(WorkspaceTable, "fill_in_child", fill)
    monkeypatch.setattr(WorkspaceTable, "save", lambda _: None)
    recording = record(Workload.load(ZOO["tied"]), sizes={3, 6}, workspace=WorkspaceTable())
    assert recording.checked == {2, 3, 4, 6}
    assert len(asked) == 1
    assert len(asked[0]) > len({key for key in recording.hints[2].signatures if key})


PER_ROW = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.table = nn.Embedding(4, 8, sparse={sparse})

    def forward(self, x):
        rows = [row[row[:, 0] > -9] for row in self.table(x) * self.scale]  # as many ops as there are samples
        return torch.stack([row.sum() for row in rows])

def model(): return Model()
def batch(size): return torch.zeros(size, 16, dtype=torch.long)
def loss(model, batch): return model(batch).mean()
def optimizer(params): return torch.optim.SGD(params, lr=1e-3)
"""


def test_record_records_used_sizes_if_ops_differ_by_size(
    tmp_path: Path,
) -> None:
    (tmp_path / "model.py").write_text(PER_ROW.format(sparse=False))
    recording = record(Workload.load(tmp_path / "model.py"), sizes={3, 6})
    assert recording.rung == "real-step"
    assert {3, 6} <= recording.checked
    ops, peaks = zip(*((step.ops.n, step.peak_bytes()) for step in map(recording.at, (2, 3, 6))), strict=True)
    assert ops[0] < ops[1] < ops[2]
    assert peaks[0] < peaks[1] < peaks[2]


def test_record_refuses_sparse_gradients_with_fix(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(PER_ROW.format(sparse=True))
    with pytest.raises(WorkloadError, match="sparse=False"):
        record(Workload.load(tmp_path / "model.py"))


REFUSES = """
import torch
from torch import nn

@torch.library.custom_op("memtune_test::refuses", mutates_args=())
def refuses(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@refuses.register_fake
def _(x):
    raise RuntimeError("only on real ones")

refuses.register_autograd(lambda ctx, gradient: gradient * 2)

def model(): return nn.Linear(4, 4)
def batch(size): return torch.randn(size, 4)
def loss(model, x): return refuses(model(x)).sum()
"""


def test_record_names_op_that_fails_on_fake_tensors(tmp_path: Path) -> None:
    path = tmp_path / "refuses.py"
    path.write_text(REFUSES)
    recording = record(Workload.load(path))
    assert recording.rung == "real-step"
    assert any(
        "memtune_test.refuses.default" in note and "only on real ones" in note for note in recording.notes
    )


BERT = """
import torch
from transformers import BertConfig, BertForMaskedLM

def model():
    return BertForMaskedLM(BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))

def batch(size):
    ids = torch.randint(50, (size, 8))
    mask = torch.ones_like(ids)
    mask[0, 8 - {padded}:] = 0
    return {{"input_ids": ids, "labels": ids}} | ({{"attention_mask": mask}} if {masked} else {{}})

def loss(model, batch):
    return model(**batch).loss
"""


@pytest.mark.slow
def test_record_drops_empty_attention_mask_as_in_training(tmp_path: Path) -> None:
    """transformers looks at the mask; it is known while the batch is fake, and that it was looked at
    is seen.
    """
    pytest.importorskip("transformers")
    step = {}
    for name, masked, padded in (("none", False, 0), ("ones", True, 0), ("padded", True, 3)):
        path = tmp_path / f"{name}.py"
        path.write_text(BERT.format(masked=masked, padded=padded))
        recording = record(Workload.load(path))
        assert recording.rung == "fake"
        assert any("masks like those" in note for note in recording.notes) == masked
        step[name] = recording.step
    assert step["ones"].saved_bytes(0) == step["none"].saved_bytes(0) < step["padded"].saved_bytes(0)
    region = region_of(step["ones"])
    assert isinstance(region, Region)
    assert depends_on_data(step["ones"], region) == "aten.all.default"


TORCH_FUNC = """
import torch
from torch import nn
from torch.func import jacrev, vmap

def model(): return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
def batch(size): return torch.randn(size, 4)
def loss(model, x): return vmap(jacrev(lambda v: model(v).squeeze(-1)))(x).pow(2).mean()
"""


def test_torch_func_in_loss_is_recorded_without_hooks_on_saved_tensors(tmp_path: Path) -> None:
    (tmp_path / "func.py").write_text(TORCH_FUNC)
    found = record(Workload.load(tmp_path / "func.py"))
    assert found.rung == "fake"
    assert any("torch.func" in note for note in found.notes)
    assert not len(found.step.saves.storage)
    found.step.validate()
    assert found.step.peak_bytes() > 2 * 64 * 4 * 2  # the hidden layer's outputs, of two samples


VARYING = """
import torch
from torch import nn

def model(): return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
def batch(size): return torch.randn(size * int(torch.randint(4, 40, ())), 16)
def loss(model, batch): return model(batch).square().mean()
"""


def test_largest_of_varying_batches_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "varying.py").write_text(VARYING)
    workload = Workload.load(tmp_path / "varying.py")
    found = record(workload)
    note = next(note for note in found.notes if note.startswith("batches vary in size"))
    torch.manual_seed(0)
    drawn = sorted(sum(each.nbytes for each in tensors_of(workload.make_batch(4))) for _ in range(20))
    recorded = int(found.at(4).storages.bytes[found.at(4).storages.kind == Kind.BATCH].max())
    assert recorded >= drawn[12]
    assert f"{recorded} bytes of 4 samples" in note


def test_declared_worst_batch_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "varying.py").write_text(
        VARYING + "\ndef worst_batch(size): return torch.zeros(size * 39, 16)\n"
    )
    found = record(Workload.load(tmp_path / "varying.py"))
    step = found.at(4)
    assert int(step.storages.bytes[step.storages.kind == Kind.BATCH].max()) == 4 * 39 * 16 * 4
    assert not any("vary" in note for note in found.notes)


def test_model_that_converts_its_weights_is_recorded_on_fake_tensors(tmp_path: Path) -> None:
    """`model.bfloat16()` swaps tensors, which torch refuses for those that something refers to weakly."""
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "class Scale(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.weight = nn.Parameter(torch.ones(8))\n\n"
        "    def forward(self, x):\n        return x * self.weight\n\n\n"
        "def model():\n    return nn.Sequential(Scale(), nn.Linear(8, 8)).bfloat16()\n\n\n"
        "def batch(size):\n    return torch.randn(size, 8, dtype=torch.bfloat16)\n\n\n"
        "def loss(model, batch):\n    return model(batch).float().square().mean()\n"
    )
    assert record(Workload.load(path)).rung == "fake"
