"""Deferred initialization: bitwise equal to plain construction, in memory for a rank's shards and a layer."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gloo import run_ranks
from support.ranks import model_parallel_runs
from support.zoo_paths import ZOO
from torch import Tensor, nn

import memtune
from memtune.api import apply
from memtune.deferred_init.deferred_init import construction_of, fill
from memtune.errors import ApplyError
from memtune.memory.ledger import Ledger
from memtune.parallel.sharding.fsdp_sharding import rebind
from memtune.runtime.memory_tiers import HOST, tier
from memtune.workload.workload import Workload


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class PlacedTensors(dict[str, Tensor]):
    """Copies of the tensors that a construction passes to `place`."""

    def place(self, name: str, whole: Tensor) -> None:
        self[name] = whole.clone()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", [name for name in ZOO if name != "tobf16"])
def test_deferred_values_and_generator_equal_plain_construction(name: str) -> None:
    workload = Workload.load(ZOO[name])
    torch.manual_seed(3)
    wanted, after = tensors(workload.build_model()), torch.rand(2)
    torch.manual_seed(3)
    model, kept = memtune.deferred(workload.build_model), PlacedTensors()
    construction = construction_of(model)
    assert construction is not None
    construction.run(kept.place)
    assert torch.equal(torch.rand(2), after)
    kept.update((key, each) for key, each in tensors(model).items() if not each.is_meta)
    assert kept.keys() == wanted.keys()
    assert all(torch.equal(kept[key], each) for key, each in wanted.items())


class Refilled(nn.Module):
    """A model that initializes its layers' weights again, as transformers does, with rows, views and
    `.item()`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.embed = nn.Embedding(16, 64, padding_idx=3)
        self.position = nn.Parameter(torch.zeros(1, 5, 64))
        self.rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        self.register_buffer("inverse", 1.0 / 100.0 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
        self.apply(self._fill)
        nn.init.trunc_normal_(self.position)
        nn.init.orthogonal_(self.layers[0].weight)  # type: ignore[arg-type]
        with torch.no_grad():
            self.layers[1].weight[:2].mul_(3)  # type: ignore[index, operator]

    @staticmethod
    def _fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


def test_run_keeps_only_tensors_in_use() -> None:
    torch.manual_seed(0)
    wanted = tensors(Refilled())
    ledger, kept = Ledger.open("cpu"), PlacedTensors()
    torch.manual_seed(0)
    model = memtune.deferred(Refilled)
    construction = construction_of(model)
    assert construction is not None
    gc.collect()
    before = ledger.live_bytes(HOST)
    ledger.reset_peak()
    highest = 0

    def place(name: str, whole: Tensor) -> None:
        nonlocal highest
        highest = max(highest, ledger.peak_allocated_bytes(HOST) - before)

    construction.run(place)
    # orthogonal_ also holds its factors; the model has nine such layers.
    assert 64 * 64 * 4 <= highest <= 6 * 64 * 64 * 4
    torch.manual_seed(0)
    construction.run(kept.place)
    assert all(torch.equal(kept[key], each) for key, each in wanted.items())


def converted() -> nn.Module:
    model = nn.Sequential(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False),
        nn.Linear(8, 8),
    )
    model.add_module("tied", nn.Linear(8, 8))
    model.get_submodule("tied").weight = model.get_submodule("1").weight
    model.mask = torch.tril(torch.ones(4, 4))  # type: ignore[assignment]
    own = torch.Generator().manual_seed(5)
    model.drawn = nn.Parameter(torch.randn(4, generator=own))
    model.get_submodule("1").load_state_dict({"weight": torch.ones(8, 8), "bias": torch.arange(8.0)})
    return model.to(torch.bfloat16)


def test_deferred_supports_copies_casts_ties_attributes_files_and_generators() -> None:
    torch.manual_seed(0)
    plain, after = converted(), torch.rand(1)
    torch.manual_seed(0)
    model = memtune.deferred(converted)
    apply(model, torch.optim.SGD(model.parameters(), lr=1.0), {"settings": {}})
    assert torch.equal(torch.rand(1), after)
    wanted, found = plain.state_dict(), model.state_dict()
    assert list(found) == list(wanted)
    assert all(
        torch.equal(found[key], each) and found[key].dtype == each.dtype for key, each in wanted.items()
    )
    assert torch.equal(model.mask, plain.mask)  # type: ignore[arg-type]
    assert model.get_submodule("tied").weight is model.get_submodule("1").weight


def test_deferred_copies_real_tensors_at_recording() -> None:
    def build() -> nn.Module:
        model, row, page = nn.Linear(3, 3), torch.tensor([1.0, 2.0, 3.0]), np.zeros(3, np.float32)
        with torch.no_grad():
            for index in range(3):
                page[:] = index
                model.weight[index].copy_(row + torch.from_numpy(page))
                row.mul_(10)
        return model

    wanted, kept = tensors(build()), PlacedTensors()
    construction = construction_of(memtune.deferred(build))
    assert construction is not None
    construction.run(kept.place)
    assert torch.equal(kept["weight"], wanted["weight"])


def test_fill_moves_parameters_and_buffers_only() -> None:
    """Like `model.to(device)`; the device is the meta device, which every machine has."""
    torch.manual_seed(0)
    plain = converted()
    torch.manual_seed(0)
    model = memtune.deferred(converted, "meta")
    model.made_since = torch.ones(2)  # type: ignore[assignment]
    fill(model, torch.optim.SGD(model.parameters(), lr=1.0), rebind)
    assert all(each.is_meta for each in model.state_dict().values())
    assert torch.equal(model.mask, plain.mask)  # type: ignore[arg-type]
    assert torch.equal(model.made_since, torch.ones(2))  # type: ignore[arg-type]


def test_run_keeps_draws_made_since() -> None:
    torch.manual_seed(0)
    model = memtune.deferred(lambda: nn.Linear(2, 2))
    drawn = torch.rand(1)
    before = torch.get_rng_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tuned = apply(model, optimizer, {"settings": {}})
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    assert torch.equal(tuned.model.weight, nn.Linear(2, 2).weight)  # type: ignore[arg-type]
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), drawn)
    assert optimizer.param_groups[0]["params"][0] is tuned.model.weight


def looks() -> nn.Module:
    layer = nn.Linear(2, 2)
    assert layer.weight.abs().max().item() < 1
    return layer


def lists() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.tolist()
    return layer


def arrays() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.weight.detach().numpy()[:] = 1
    return layer


def of_values() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.bias = nn.Parameter(torch.tensor([1.0, 2.0]))
    nn.init.normal_(layer.bias)
    return layer


def picks() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_buffer("found", layer.weight.detach().nonzero())
    return layer


@pytest.mark.parametrize(
    ("construct", "reason"),
    [
        (looks, r"a value that aten\.uniform_\.default has drawn"),
        (lists, r"a value that aten\.uniform_\.default has drawn"),
        (arrays, r"it fails on fake tensors: \.numpy\(\)"),
        (of_values, r"aten\.normal_\.default draws into a tensor with real values"),
        (picks, r"aten\.nonzero\.default needs values"),
    ],
)
def test_deferred_rejects_construction_with_op(construct: Any, reason: str) -> None:
    with pytest.raises(ApplyError, match=reason):
        memtune.deferred(construct)


def test_apply_rejects_changed_or_unknown_meta_models() -> None:
    model = memtune.deferred(lambda: nn.Linear(2, 2)).to(torch.bfloat16)
    with pytest.raises(ApplyError, match=r"weight was changed after memtune\.deferred"):
        apply(model, torch.optim.SGD(model.parameters(), lr=1.0), {"settings": {}})
    bare = nn.Linear(2, 2, device="meta")
    with pytest.raises(ApplyError, match="weight is on the meta device, and its values are unknown"):
        apply(bare, torch.optim.SGD(bare.parameters(), lr=1.0), {"settings": {}})


# -- on gloo ranks -------------------------------------------------------------------------------------------

STATES: dict[str, dict[str, Any]] = {
    "zero3": {"states": {"kind": "zero3"}},
    "fsdp": {"states": {"kind": "fsdp", "keep_root": False, "reshard_after_forward": False}},
    "mics": {"states": {"kind": "mics", "group": 2}},
    "IIG": {"states": {"kind": "paro", "strategy": "IIG", "group": 2}},
    "zeropp": {"states": {"kind": "fsdp"}, "communication": {"kind": "zeropp", "ranks_per_node": 2}},
    "zero1": {"states": {"kind": "zero1"}},
    "none": {"states": {"kind": "ddp"}},
}


Document = dict[str, Any]


def steps(path: Path, document: Document, put_off: bool) -> dict[str, Any]:
    """Return weights and losses of three steps, and peak and final device bytes of building and applying."""
    workload, ledger = Workload.load(path), Ledger.open("cpu")
    gc.collect()
    before = ledger.live_bytes()
    ledger.reset_peak()
    torch.manual_seed(7)
    model = memtune.deferred(workload.build_model) if put_off else workload.build_model()
    whole = sum(each.nbytes for each in model.parameters())
    optimizer = workload.make_optimizer(model)
    tuned = apply(model, optimizer, document, loss=workload.loss, strict=False)
    peak, left = ledger.peak_allocated_bytes() - before, ledger.live_bytes() - before
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        with tier(HOST):
            batch = workload.make_batch(2)
        losses.append(float(tuned.step([batch])))
    tuned.audit()
    return {
        "losses": losses,
        "weights": tuned.state_dict()["model"],
        "peak": peak,
        "left": left,
        "whole": whole,
    }


def both(path: Path, documents: list[Document]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(steps(path, each, put_off=True), steps(path, each, put_off=False)) for each in documents]


def assert_alike(path: Path, ranks: int, documents: dict[str, Document]) -> None:
    for rank in run_ranks(both, ranks, path, list(documents.values()), deadline_s=250):
        for name, (ours, plain) in zip(documents, rank, strict=True):
            assert ours["losses"] == plain["losses"], name
            assert ours["weights"].keys() == plain["weights"].keys()
            assert all(torch.equal(each, plain["weights"][key]) for key, each in ours["weights"].items()), (
                name
            )
            if name not in ("zero1", "none"):
                assert ours["peak"] <= 1.05 * ours["left"] < 0.75 * ours["whole"], (name, ours)
                assert plain["peak"] > plain["whole"]


def test_fill_shards_on_two_ranks_trains_bitwise_equal() -> None:
    assert_alike(ZOO["gpt"], 2, {"zero3": {"settings": {"sharding": STATES["zero3"]}}})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "tied", "lstm", "lora"])
def test_deferred_with_each_sharded_state(name: str) -> None:
    assert_alike(ZOO[name], 4, {states: {"settings": {"sharding": each}} for states, each in STATES.items()})


def shared(kind: str, ranks: int, states: str = "", **knobs: Any) -> Document:
    together_with = (
        {"sharding": {"parallel": {"kind": kind, **knobs}, "states": {"kind": states}}} if states else None
    )
    return model_parallel_runs.config(kind, ranks, together_with, **knobs)


def test_keep_only_on_two_ranks_trains_bitwise_equal() -> None:
    """Includes a weight that two layers share."""
    assert_alike(model_parallel_runs.SEPARATE, 2, {"rtp": shared("rtp", 2)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "sequence_parallel", "rtp", "head_context"])
def test_keep_only_with_sharded_pieces(kind: str) -> None:
    alone = (
        {kind: shared(kind, 4)} if kind == "rtp" else {}
    )  # the others replicate the embedding, half of this model
    divided = {f"{states} {kind}": shared(kind, 4, states, degree=2) for states in ("zero3", "fsdp")}
    assert_alike(model_parallel_runs.SEPARATE, 4, alone | divided)


@pytest.mark.slow
def test_keep_only_with_divided_experts() -> None:
    path = model_parallel_runs.MODELS / "stacked_experts.py"
    assert_alike(path, 4, {"experts": model_parallel_runs.config("expert_parallel", 4, path=path)})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_deferred_with_pipeline_stages(ranks: int) -> None:
    chain = model_parallel_runs.MODELS / "chain.py"
    assert_alike(chain, ranks, {"pipeline": model_parallel_runs.config("pipeline", ranks, path=chain)})


@pytest.mark.slow
@pytest.mark.parametrize("states", ["zero3", "fsdp"])
def test_deferred_with_sharded_pipeline_stages(states: str) -> None:
    """The placeholder of other stages' weights is no FSDP2 shard, and remains a parameter."""
    chain, knobs = model_parallel_runs.MODELS / "chain.py", {"degree": 2}
    divided = {"sharding": {"parallel": {"kind": "pipeline", **knobs}, "states": {"kind": states}}}
    assert_alike(
        chain,
        4,
        {f"{states} pipeline": model_parallel_runs.config("pipeline", 4, divided, path=chain, **knobs)},
    )


def refused(path: Path) -> str:
    torch.manual_seed(torch.distributed.get_rank())
    workload = Workload.load(path)
    model = memtune.deferred(workload.build_model)
    optimizer = workload.make_optimizer(model)
    with pytest.raises(ApplyError) as error:
        apply(model, optimizer, {"settings": {"sharding": STATES["zero3"]}}, strict=False)
    return str(error.value)


def test_apply_rejects_different_generator_states() -> None:
    for said in run_ranks(refused, 2, ZOO["gpt"]):
        assert "random numbers at the model's construction" in said
