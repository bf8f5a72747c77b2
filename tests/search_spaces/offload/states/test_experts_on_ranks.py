"""Experts on replicas: each rank uses others, and all train as one rank with all samples does; bytes on links, and peaks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from sharded_suite import SPARE_BYTES, peaks
from ssd_ranks import host_peak
from stores_on_ranks import config_of, share_of, weights_of
from zoo_paths import ZOO

from memtune import hardware
from memtune._apply import Tuned, apply
from memtune.autotune.candidates import Candidate, Choice, Rewriter
from memtune.errors import ApplyError
from memtune.program import Phase, Resource, Tier
from memtune.runtime import offload_dir, shim
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.states.moesys import Moesys
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.technique import Target
from memtune.testing.drift import plain_program, recording_of, target_of
from memtune.testing.training import build, settings_of

RANKS, STEPS, REPLICAS = 2, 5, Ddp(kind="ddp")
FEW = Moesys(kind="moesys", cache=6, on_device=1)
HASHED = ZOO["moe"].parent / "experts" / "hashed.py"
LINKS = {
    "host_to_device": Resource.HOST_TO_DEVICE, "device_to_host": Resource.DEVICE_TO_HOST, "intra_link": Resource.INTRA_LINK,
}  # fmt: skip
pytestmark = [pytest.mark.usefixtures("one_thread", "ssd")]


def started(path: str, config: dict[str, Any]) -> tuple[Any, Tuned]:
    """The model under `config`; SGD, since Adam makes updates of what is zero but for rounding."""
    workload, model, _ = build(Path(path))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return workload, apply(model, optimizer, config, loss=workload.loss, strict=False)


def trained(directory: str, path: str, config: dict[str, Any], parts: int, ranks: int) -> dict[str, Any]:
    """Weights after five steps and what the last one moved."""
    os.environ[offload_dir.VARIABLE] = directory
    workload, tuned = started(path, config)
    for step in range(STEPS):
        mine = share_of(workload, step, parts, ranks)
        COUNTERS.take()
        tuned.step(mine)
    moved = COUNTERS.take()
    return {
        "moved": moved,
        "weights": weights_of(tuned),
        "audit": tuned.audit()["offload.states"] if dist.is_initialized() else {},
    }


def on_rank(directory: str, path: str, config: dict[str, Any], parts: int, ledger: bool) -> dict[str, Any]:
    """What is checked on this rank."""
    found = trained(directory, path, config, parts, dist.get_world_size())
    if ledger:
        found["peaks"] = peaks(path, {"": config["settings"]}, parts, {"": config["plan"]})[""][1]
        found["host_peak"] = host_peak(Path(path), config, parts)
    return found


def candidate(path: Path, directory: Path, parts: int) -> Candidate:
    rewriter = Rewriter(recording_of(path), Target(hardware.detect("cpu"), RANKS, offload_dir=str(directory)))
    execution = {"micro_batch": 2, "accumulate": parts}
    found = rewriter.candidate(Choice.from_document({**settings_of(REPLICAS, FEW), "execution": execution}))
    assert isinstance(found, Candidate), found
    return found


def check(path: Path, directory: Path, parts: int) -> list[dict[str, Any]]:
    """Raise AssertionError where ranks do not train as one rank does, or move or hold other bytes than predicted."""
    found = candidate(path, directory, parts)
    config, ledger = config_of(found, (REPLICAS, FEW)), shim.available() is None
    ranks = run_ranks(on_rank, RANKS, str(directory), str(path), config, parts, ledger, deadline_s=300)
    alone = trained(str(directory), str(path), {"settings": {}}, parts, RANKS)["weights"]
    step = found.program.step
    times = np_times(step.op_phase, parts)
    predicted = {link: int((times * step.op_traffic_bytes)[step.op_resource == each].sum()) for link, each in LINKS.items()}
    for rank in ranks:
        for name, weight in alone.items():
            assert torch.equal(rank["weights"][name], ranks[0]["weights"][name]), name
            assert torch.allclose(rank["weights"][name], weight, rtol=0, atol=1e-6), name
        if path == ZOO["moe"]:  # all experts are used, as in the step that is predicted
            assert {link: rank["moved"][link] for link in LINKS} == predicted
            if ledger:
                wanted = step.peak_bytes()
                assert max(rank["peaks"]) == pytest.approx(wanted, rel=0.02, abs=SPARE_BYTES), (rank["peaks"], wanted)
                assert rank["host_peak"] == pytest.approx(step.peak_bytes(Tier.HOST), rel=0.02)
    return ranks


def np_times(phase: Any, parts: int) -> Any:
    """How often each op runs in a step."""
    return 1 + (parts - 1) * (phase < Phase.BOUNDARY)


def test_replicas_train_as_one_rank(ssd: Path) -> None:
    """The mechanism: an expert's gradients are averaged, whoever used it, before each rank updates its copy of it."""
    check(ZOO["moe"], ssd, 1)


@pytest.mark.slow
def test_replicas_that_use_other_experts(ssd: Path) -> None:
    """With the averages off, or without the zeros of ranks that did not use an expert, weights differ from rank to rank."""
    for rank in check(HASHED, ssd, 3):
        assert rank["audit"]["made_up"] > 0


def test_what_it_cannot_do_is_refused(ssd: Path) -> None:
    program = plain_program(ZOO["moe"])
    why = FEW.fits(program, replace(target_of(Fsdp(kind="fsdp")), ranks=RANKS, offload_dir=str(ssd)))
    assert "replicas" in str(why)


def refusal(directory: str, path: str, config: dict[str, Any]) -> str:
    os.environ[offload_dir.VARIABLE] = directory
    try:
        started(path, config)
    except ApplyError as refused:
        return str(refused)
    return ""


@pytest.mark.slow
def test_apply_refuses_it_too(ssd: Path) -> None:
    config = {"settings": settings_of(Fsdp(kind="fsdp"), FEW)}
    assert all("replicas" in said for said in run_ranks(refusal, RANKS, str(ssd), str(ZOO["moe"]), config))
