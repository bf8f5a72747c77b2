"""Collectives by node and in few bits on real gloo ranks, two to a node: against plain FSDP2, the formulas,
and when stale.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.gloo import run_ranks
from support.suites.sharded_suite import peaks
from support.zoo_paths import ZOO
from torch import Tensor, nn

from memtune.api import Tuned, apply
from memtune.errors import ApplyError
from memtune.parallel.collectives.fsdp_comm_hooks import Gather
from memtune.parallel.collectives.message_layout import Form
from memtune.runtime import node_topology
from memtune.runtime.transfer import COUNTERS

RANKS, LOCAL, DIM, WIDTH = 4, 2, 16, 24
BLOCK, EXACT_BELOW = 16, 100
LOSSY = {"block": BLOCK, "exact_below": EXACT_BELOW, "hpz": False}
EXACT = {"hpz": {"kind": "zeropp"}, "hierarchical": {"kind": "hierarchical"}, "ho_ring": {"kind": "ho_ring"}}
QUANTISED = {
    "quantised": {
        "kind": "zeropp",
        "qwz": True,
        "qgz": True,
        "gradient_bits": 8,
        "error_feedback": True,
        **LOSSY,
    }
}
SETTINGS: dict[str, dict[str, Any]] = {"plain": {"kind": "none"}, **EXACT, **QUANTISED}


class Net(nn.Module):
    """Two blocks whose rows four ranks do not divide, between a frozen layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, DIM).requires_grad_(False)
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, WIDTH + 1), nn.GELU(), nn.Linear(WIDTH + 1, DIM)) for _ in range(2)
        )
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.h:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x[:, :3])


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def tuned(communication: dict[str, Any], states: dict[str, Any] | None = None) -> Tuned:
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    if communication["kind"] != "none":
        communication = {**communication, "ranks_per_node": LOCAL}
    sharding = {"states": states or {"kind": "fsdp"}, "communication": communication}
    found = apply(model, optimizer, {"settings": {"sharding": sharding}}, loss=loss, strict=False)
    node_topology.declare(LOCAL)  # so that the plain collectives are counted by the same nodes
    return found


# -- what runs on each rank ----------------------------------------------------------------------------------


def trained(communication: dict[str, Any]) -> dict[str, Any]:
    """Two steps of two micro-batches; the bytes of one forward and of one backward afterwards."""
    found, rank = tuned(communication), dist.get_rank()
    losses = [float(found.step([batch(10 * s + m, rank) for m in range(2)])) for s in range(2)]
    weights = copy.deepcopy(found.state_dict()["model"])
    COUNTERS.take()
    value = loss(found.model, batch(7))
    forward = COUNTERS.take()
    value.backward()
    backward = COUNTERS.take()
    held = sum(gather._secondary is not None for gather in gathers(found.model))
    return {
        "losses": losses,
        "weights": weights,
        "forward": forward,
        "backward": backward,
        "audit": found.audit(),
        "held": held,
        "common": float(value.detach()),
        "gradients": [whole(p.grad) for p in found.model.parameters() if p.grad is not None],
    }


def gathers(model: nn.Module) -> list[Gather]:
    comms = [
        m._get_fsdp_state()._fsdp_param_group._all_gather_comm
        for m in model.modules()
        if hasattr(m, "unshard")
    ]  # type: ignore[operator]
    return [comm for comm in comms if isinstance(comm, Gather)]


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor()
    return full.detach().clone()


def overwritten(communication: dict[str, Any], *, between: bool, folder: str = "") -> list[Tensor]:
    """Gradients where every shard is written to after a step, or after a forward and before its backward.

    With a `folder` what is written comes from a checkpoint in it.
    """
    found = tuned(communication)
    found.step([batch(0)])
    if folder:
        name = f"{folder}/{communication['kind']}"
        found.save(name)
        found.step([batch(2)])
        if not between:
            found.load(name)
        value = loss(found.model, batch(1))
        if between:
            found.load(name)
        value.backward()
        return [whole(p.grad) for p in found.model.parameters() if p.grad is not None]
    state = {name: value + 0.25 for name, value in found.model.state_dict().items()}
    if not between:
        found.model.load_state_dict(state)
    value = loss(found.model, batch(1))
    if between:
        found.model.load_state_dict(state)
    value.backward()
    return [whole(p.grad) for p in found.model.parameters() if p.grad is not None]


def stale(folder: str) -> dict[str, dict[str, list[Tensor]]]:
    out = {
        f"{when}{how}": {
            kind: overwritten(SETTINGS[kind], between=between, folder=where) for kind in ("plain", "hpz")
        }
        for when, between in (("after a step", False), ("before backward", True))
        for how, where in (("", ""), (", loaded", f"{folder}/{when}"))
    }
    with patch.object(Gather, "_versions", lambda self: ()):  # the defect: the write is not detected
        out["defect"] = {"hpz": overwritten(SETTINGS["hpz"], between=True)}
    return out


def evaluated() -> int:
    """Copies that are held after a forward that has no backward."""
    found = tuned(SETTINGS["hpz"])
    with torch.no_grad():
        loss(found.model, batch(0))
    return sum(gather._secondary is not None for gather in gathers(found.model))


def refused(communication: dict[str, Any], states: dict[str, Any]) -> str:
    try:
        tuned(communication, states)
    except ApplyError as error:
        return str(error)
    return "no error"


def everything(folder: str) -> dict[str, Any]:
    out: dict[str, Any] = {name: trained(how) for name, how in SETTINGS.items()}
    out |= {"stale": stale(folder), "evaluated": evaluated()}
    out["two copies"] = trained_on_copies()
    out["ddp"] = refused(SETTINGS["hpz"], {"kind": "ddp"})
    return out


def trained_on_copies() -> dict[str, Any]:
    """Two copies of the model, each on one node: weights are still quantised."""
    found = tuned({"kind": "zeropp", "qwz": True, **LOSSY}, {"kind": "fsdp", "degree": 2})
    return {"loss": float(found.step([batch(0)])), "weights": copy.deepcopy(found.state_dict()["model"])}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(everything, RANKS, str(tmp_path_factory.mktemp("checkpoints")), deadline_s=900)


# -- what must be true ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_exact_collectives_are_bitwise_equal_to_fsdp2(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        got, wanted = rank[name], rank["plain"]
        assert got["losses"] == wanted["losses"]
        assert all(torch.equal(got["weights"][key], value) for key, value in wanted["weights"].items())
        assert all(torch.equal(a, b) for a, b in zip(got["gradients"], wanted["gradients"], strict=True))
        assert got["held"] == 0


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_collectives_are_close_and_equal_on_all_ranks(ranks: list[Any], name: str) -> None:
    first, wanted = ranks[0][name], ranks[0]["plain"]
    for rank in ranks:
        got = rank[name]
        assert (
            got["common"] == first["common"] != wanted["common"]
        )  # of the same samples, through gathered weights
        assert all(torch.equal(got["weights"][key], value) for key, value in first["weights"].items())
        assert got["losses"] == pytest.approx(rank["plain"]["losses"], rel=0.02)
    for got, exact in zip(first["gradients"], wanted["gradients"], strict=True):
        assert (got - exact).abs().max() <= 0.05 * float(exact.abs().max())


# Rows of each parameter over the ranks, padded: shards of the frozen layer and the head, and of a block.
ROOT = [(DIM // 4 * 5, DIM * 5), (DIM // 4, DIM), (DIM, 4 * DIM), (1, 4)]
BLOCKS = [(7 * DIM, 28 * DIM), (7, 28), (DIM // 4 * 25, DIM * 25), (DIM // 4, DIM)]
TRAINED = ROOT[2:]


def exact_bytes(unit: list[tuple[int, int]]) -> int:
    return sum(4 * shard for shard, _ in unit)


def quantised_bytes(unit: list[tuple[int, int]], bits: int) -> int:
    """Of one rank's part of a message, by the formula, not by the code: padded to 16."""
    total = 0
    for shard, numel in unit:
        total += 4 * shard if numel < EXACT_BELOW else -(-shard * bits // 8) + 4 * -(-shard // BLOCK)
    return -(-total // 16) * 16


def ring(n_bytes: int) -> dict[str, int]:
    """Received in a ring over all ranks, which is as slow as its links between nodes."""
    return {"inter_link": n_bytes}


def added(*parts: dict[str, int]) -> dict[str, int]:
    keys = {key for part in parts for key in part}
    return {key: sum(part.get(key, 0) for part in parts) for key in keys}


def links(counted: dict[str, int]) -> dict[str, int]:
    return {key: value for key, value in counted.items() if key in ("intra_link", "inter_link")}


def test_collectives_link_bytes_equal_formula(ranks: list[Any]) -> None:
    others, farther = RANKS - 1, RANKS // LOCAL - 1
    units, again = exact_bytes(ROOT) + 2 * exact_bytes(BLOCKS), 2 * exact_bytes(BLOCKS)
    coded, coded_again = (
        quantised_bytes(ROOT, 8) + 2 * quantised_bytes(BLOCKS, 8),
        2 * quantised_bytes(BLOCKS, 8),
    )
    exchanged = quantised_bytes(TRAINED, 8) + 2 * quantised_bytes(BLOCKS, 8)
    for found in ranks:
        bytes_of = {
            name: (links(found[name]["forward"]), links(found[name]["backward"])) for name in SETTINGS
        }
        reduced = ring(others * (exact_bytes(TRAINED) + 2 * exact_bytes(BLOCKS)))
        assert bytes_of["plain"] == (ring(others * units), added(ring(others * again), reduced))
        # hpZ: a node's two ranks hold half of the message each; nothing crosses nodes but the reductions.
        inside = {"intra_link": (LOCAL - 1) * RANKS // LOCAL * again}
        assert bytes_of["hpz"] == (ring(others * units), added(inside, reduced))
        # qwZ, and qgZ in two hops: a node's rows to each rank of it, then one row to each other node.
        hops = {"intra_link": (LOCAL - 1) * RANKS // LOCAL * exchanged, "inter_link": farther * exchanged}
        assert bytes_of["quantised"] == (ring(others * coded), added(ring(others * coded_again), hops))
        forward, backward = (
            {"inter_link": farther * shards, "intra_link": (LOCAL - 1) * RANKS // LOCAL * shards}
            for shards in (units, again)
        )
        assert bytes_of["hierarchical"] == bytes_of["ho_ring"] == (forward, added(backward, reduced))


@pytest.mark.parametrize(
    "when", [f"{when}{how}" for when in ("after a step", "before backward") for how in ("", ", loaded")]
)
def test_secondary_shards_are_not_used_after_a_write(ranks: list[Any], when: str) -> None:
    for rank in ranks:
        found = rank["stale"][when]
        assert all(torch.equal(a, b) for a, b in zip(found["hpz"], found["plain"], strict=True))


def test_undetected_write_would_change_results(ranks: list[Any]) -> None:
    for rank in ranks:
        wanted = rank["stale"]["before backward"]["plain"]
        assert not all(torch.equal(a, b) for a, b in zip(rank["stale"]["defect"]["hpz"], wanted, strict=True))


def test_forward_without_backward_keeps_no_secondary_shard(ranks: list[Any]) -> None:
    assert [rank["evaluated"] for rank in ranks] == [0] * RANKS


def test_secondary_shards_hold_equal_weights(ranks: list[Any]) -> None:
    first = ranks[0]["two copies"]
    for rank in ranks:
        assert rank["two copies"]["loss"] == first["loss"]
        assert all(
            torch.equal(rank["two copies"]["weights"][key], value) for key, value in first["weights"].items()
        )


def test_audit_detects_collectives_and_refuses_unsharded_model(ranks: list[Any]) -> None:
    said = ranks[0]["hpz"]["audit"]["sharding.communication"]
    assert said == {"units": 3, "ranks_per_node": LOCAL, "gathers": 3, "exchanges": 0}
    assert all("and sharding.states is ddp" in rank["ddp"] for rank in ranks)


# -- the peak, by the native ledger --------------------------------------------------------------------------

PEAKS = {
    "hpz": {"kind": "zeropp"},
    "all": {"kind": "zeropp", "qwz": True, "qgz": True, "exact_below": 1000},
    "hierarchical": {"kind": "hierarchical"},
    "ho_ring": {"kind": "ho_ring"},
}


@pytest.mark.slow
@pytest.mark.native_ledger
def test_collectives_ledger_peak_equals_prediction() -> None:
    from memtune.parallel.collectives.collectives_pass import rewrite_collectives
    from memtune.parallel.collectives.message_layout import Communication
    from memtune.parallel.sharding.fsdp_pass import Sharding, shard_states
    from memtune.testing.drift_check import recording_of

    sharded = shard_states(recording_of(ZOO["gpt"]).at(2), Sharding(RANKS, stages_messages=True))
    asked = {
        "hpz": Communication(LOCAL, secondary=True),
        "all": Communication(LOCAL, Form(8, 256, 1000), secondary=True, gradients=Form(4, 256, 1000)),
        "hierarchical": Communication(LOCAL, gather="hierarchical"),
        "ho_ring": Communication(LOCAL, gather="ho_ring"),
    }
    predicted = {
        name: rewrite_collectives(sharded, how, RANKS, stages_messages=True) for name, how in asked.items()
    }
    communication = {name: {**how, "ranks_per_node": LOCAL} for name, how in PEAKS.items()}
    settings = {
        name: {"sharding": {"states": {"kind": "fsdp"}, "communication": how}}
        for name, how in communication.items()
    }
    for rank in run_ranks(peaks, RANKS, str(ZOO["gpt"]), settings, deadline_s=900):
        for name, (_, measured) in rank.items():
            wanted = predicted[name].peak_bytes()
            assert all(0 <= peak - wanted <= 16 for peak in measured), (name, measured, wanted)


# -- what quantised training comes to ------------------------------------------------------------------------


def converged(path: str, steps: int) -> dict[str, float]:
    """The mean loss of the first and of the last 16 steps on the same few samples, exact and with all that is
    quantised.
    """
    from memtune.testing.training import build

    found = {}
    lossy = {"kind": "zeropp", "qwz": True, "qgz": True, "exact_below": 1000, "ranks_per_node": LOCAL}
    for name, how in (("exact", {"kind": "none"}), ("lossy", lossy)):
        workload, model, optimizer = build(Path(path))
        sharding = {"states": {"kind": "fsdp"}, "communication": how}
        made = apply(model, optimizer, {"settings": {"sharding": sharding}}, loss=workload.loss, strict=False)
        torch.manual_seed(dist.get_rank())
        batches = [workload.make_batch(2) for _ in range(16)]
        losses = torch.stack([made.step([batches[step % 16]]) for step in range(steps)])
        dist.all_reduce(losses)
        found |= {
            name: float(losses[-16:].mean()) / RANKS,
            f"{name} first": float(losses[:16].mean()) / RANKS,
        }
    return found


@pytest.mark.slow
def test_quantised_training_reaches_exact_loss_within_a_percent() -> None:
    found = run_ranks(converged, RANKS, str(ZOO["gpt"]), 200, deadline_s=900)[0]
    assert found["exact"] < 0.97 * found["exact first"]  # it does learn
    assert found["lossy"] == pytest.approx(found["exact"], rel=0.01)
