"""Rows of experts on SSD under FSDP2: weights, bytes on links, peaks; replicas are refused."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.ranks.block_offload_on_ranks import config_of, share_of, weights_of
from support.ranks.optimizer_offload_on_ranks import host_peak
from support.suites.sharded_suite import SPARE_BYTES, peaks
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import Tuned, apply
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.offload.experts.host_cache import expert_traffic
from memtune.program.step import Phase, Resource, Step, Tier
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.search_spaces.offload.states.moesys import Moesys
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.selective import Selective
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.search_spaces.sharding.states.zero1 import Zero1
from memtune.search_spaces.sharding.states.zero3 import Zero3
from memtune.ssd import offload_dir
from memtune.technique import Target, Technique
from memtune.testing.drift_check import plain_program, recording_of, target_of
from memtune.testing.training import build, settings_of

RANKS, STEPS, DIVIDED = 2, 3, Fsdp(kind="fsdp")
FEW = Moesys(kind="moesys", cache=6, on_device=1)
SSD = {"ssd_read": Resource.SSD_READ, "ssd_write": Resource.SSD_WRITE}
HASHED = ZOO["moe"].parent / "experts" / "hashed.py"
LINKS = {
    "host_to_device": Resource.HOST_TO_DEVICE,
    "device_to_host": Resource.DEVICE_TO_HOST,
    "intra_link": Resource.INTRA_LINK,
}
pytestmark = [pytest.mark.usefixtures("one_thread", "ssd")]


def started(path: str, config: dict[str, Any]) -> tuple[Any, Tuned]:
    """Return the model under `config` with SGD, since Adam updates near-zero weights by rounding noise."""
    workload, model, _ = build(Path(path))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return workload, apply(model, optimizer, config, loss=workload.loss, strict=False)


def trained(directory: str, path: str, config: dict[str, Any], parts: int, ranks: int) -> dict[str, Any]:
    """Return weights after five steps and the bytes of the last one."""
    os.environ[offload_dir.VARIABLE] = directory
    workload, tuned = started(path, config)
    for step in range(STEPS):
        mine = share_of(workload, step, parts, ranks)
        COUNTERS.take()
        tuned.step(mine)
    moved = COUNTERS.take()
    return {
        "moved": {link: moved.get(link, 0) for link in LINKS | SSD},
        "weights": weights_of(tuned),
        "audit": tuned.audit().get("offload.states", {}) if dist.is_initialized() else {},
    }


def on_rank(
    directory: str, path: str, config: dict[str, Any], reference: dict[str, Any], parts: int, ledger: bool
) -> dict[str, Any]:
    """Run the checks of this rank."""
    found = trained(directory, path, config, parts, dist.get_world_size())
    found["wanted"] = trained(directory, path, reference, parts, dist.get_world_size())["weights"]
    if ledger:
        found["peaks"] = peaks(path, {"": config["settings"]}, parts, {"": config["plan"]})[""][1]
        found["host_peak"] = host_peak(Path(path), config, parts)
    return found


def candidate(
    path: Path, directory: Path, parts: int, techniques: tuple[Technique, ...] = (DIVIDED, FEW)
) -> Candidate:
    rewriter = Rewriter(recording_of(path), Target(hardware.detect("cpu"), RANKS, offload_dir=str(directory)))
    execution = {"micro_batch": 2, "accumulate": parts}
    found = rewriter.candidate(Choice.from_document({**settings_of(*techniques), "execution": execution}))
    assert isinstance(found, Candidate), found
    return found


def check(
    path: Path,
    directory: Path,
    parts: int,
    states: Technique = DIVIDED,
    other_slots: tuple[Technique, ...] = (),
    experts: Moesys = FEW,
) -> list[dict[str, Any]]:
    """Assert that ranks train as one rank does, and move and hold the predicted bytes.

    Args:
        path: The model.
        directory: Directory for tensors on SSD.
        parts: Micro-batches of a rank's step.
        states: Sharding of states; weights are bitwise those of the sharding alone.
        other_slots: Techniques of other slots.
        experts: Expert offload.
    """
    techniques = (states, experts, *other_slots)
    found = candidate(path, directory, parts, techniques)
    config, ledger = config_of(found, techniques), cpu_allocator.available() is None
    reference = {"settings": settings_of(states)}
    ranks = run_ranks(
        on_rank, RANKS, str(directory), str(path), config, reference, parts, ledger, deadline_s=300
    )
    alone = trained(str(directory), str(path), {"settings": {}}, parts, RANKS)["weights"]
    step = found.program.step
    times = np_times(step.ops.phase, parts)
    predicted = {
        link: int((times * step.ops.traffic_bytes)[step.ops.resource == each].sum())
        for link, each in (LINKS | SSD).items()
    }
    for link in SSD:  # of the weight and one moment of SGD, where Adam has two
        predicted[link] = predicted[link] * 2 // 3
    kept = (step.ops.resource == Resource.DEVICE_TO_HOST) & (step.ops.phase == Phase.OPTIMIZER)
    predicted["device_to_host"] -= int(step.ops.traffic_bytes[kept].sum()) // 3
    for rank in ranks:
        for name, weight in alone.items():
            assert torch.equal(rank["weights"][name], ranks[0]["weights"][name]), name
            assert torch.allclose(rank["weights"][name], weight, rtol=0, atol=1e-6), name
            assert torch.equal(rank["weights"][name], rank["wanted"][name]), name
        moved = gathered_by_one(rank["moved"])
        assert all(moved[link] == predicted[link] for link in LINKS), (moved, predicted)
        for link in SSD:
            # Of several micro-batches only the last one changes experts, so that is an upper end.
            exact = moved[link] == predicted[link] if parts == 1 else 0 < moved[link] <= predicted[link]
            assert exact, (moved, predicted)
        if ledger:
            wanted = step.peak_bytes()
            assert max(rank["peaks"]) == pytest.approx(wanted, rel=0.02, abs=SPARE_BYTES), (
                rank["peaks"],
                wanted,
            )
            assert rank["host_peak"] == pytest.approx(step.peak_bytes(Tier.HOST), rel=0.02)
    return ranks


def gathered_by_one(moved: dict[str, int]) -> dict[str, int]:
    """Return gathered and scattered bytes of a rank: all but its own part."""
    return moved | {"intra_link": moved["intra_link"] * RANKS // (RANKS - 1)}


def np_times(phase: Any, parts: int) -> Any:
    """Return how often each op runs in a step."""
    return 1 + (parts - 1) * (phase < Phase.BOUNDARY)


def test_sharded_experts_train_as_fsdp(ssd: Path) -> None:
    """The mechanism: a rank reads, updates and writes its rows of each expert, and their gradients are never
    resident.
    """
    ranks = check(ZOO["moe"], ssd, 1)
    step = candidate(ZOO["moe"], ssd, 1).program.step
    expert = 12 * (48 * 96 + 96 + 96 * 48 + 48)  # weight and two moments of two linear layers
    moved = expert_traffic(
        [0] * 4 + [1] * 4, 2, FEW.cache, FEW.eviction, FEW.read_prefetch, FEW.on_device, gathered=True
    )
    assert on_link(step, Resource.SSD_READ) == sum(len(each.read) for each in moved) * expert // RANKS
    assert on_link(step, Resource.SSD_WRITE) == sum(len(each.written) for each in moved) * expert // RANKS > 0
    assert on_link(step, Resource.DEVICE_TO_HOST) == 8 * (expert // 3) // RANKS
    assert RANKS * step.peak_bytes(Tier.SSD) == 8 * expert
    assert 3 * ranks[0]["audit"]["ssd_bytes"] == 2 * step.peak_bytes(Tier.SSD)  # trained with SGD


def on_link(step: Step, link: Resource) -> int:
    return int(step.ops.traffic_bytes[step.ops.resource == link].sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("states", "parts", "other_slots"),
    [(DIVIDED, 3, ()), (Zero3(kind="zero3"), 1, ()), (DIVIDED, 1, (Full(),)), (DIVIDED, 1, (Selective(),))],
    ids=["accumulation", "zero3", "full", "selective"],
)
def test_sharded_experts_in_other_steps(
    ssd: Path, states: Technique, parts: int, other_slots: tuple[Technique, ...]
) -> None:
    check(ZOO["moe"], ssd, parts, states, other_slots)


@pytest.mark.slow
def test_sharded_experts_without_tokens(ssd: Path) -> None:
    """They are gathered as well, and get zeros from all ranks as under FSDP2 alone."""
    check(HASHED, ssd, 3)


REFUSED = {
    "whole on each, or gathered from all": Zero1(kind="zero1"),
    "each replica would have all experts on SSD": Ddp(kind="ddp"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_fits_refuses_by_name(ssd: Path, why: str) -> None:
    target = replace(target_of(REFUSED[why]), ranks=RANKS, offload_dir=str(ssd))
    assert why in str(FEW.fits(plain_program(ZOO["moe"]), target))


def test_fits_refuses_blocks_of_replicas_that_lack_gradients(ssd: Path) -> None:
    asks = replace(target_of(Ddp(kind="ddp", find_unused_parameters=True)), ranks=RANKS, offload_dir=str(ssd))
    assert "block by block when they are ready" in str(L2L(kind="l2l").fits(plain_program(ZOO["moe"]), asks))


def refusal(directory: str, path: str, config: dict[str, Any]) -> str:
    os.environ[offload_dir.VARIABLE] = directory
    try:
        started(path, config)
    except ApplyError as refused:
        return str(refused)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("why", REFUSED)
def test_apply_refuses_by_name(ssd: Path, why: str) -> None:
    config = {"settings": settings_of(REFUSED[why], FEW)}
    assert all(why in said for said in run_ranks(refusal, RANKS, str(ssd), str(ZOO["moe"]), config))
