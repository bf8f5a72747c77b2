"""Shared checks of block offload on several ranks: each rank has its own samples, one rank alone has them
all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.suites.layer_major_suite import CHAIN
from support.suites.sharded_suite import SPARE_BYTES, peaks

from memtune import hardware
from memtune.api import Tuned, apply
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.program.step import Kind, Phase, Resource, Step, Tier
from memtune.runtime.shown_grad import spent_as_none
from memtune.runtime.transfer import COUNTERS
from memtune.ssd import offload_dir
from memtune.technique import Target, Technique
from memtune.testing.drift_check import recording_of
from memtune.testing.training import build, settings_of

STEPS = 3
LINKS = {
    "host_to_device": Resource.HOST_TO_DEVICE,
    "device_to_host": Resource.DEVICE_TO_HOST,
    "intra_link": Resource.INTRA_LINK,
    "ssd_read": Resource.SSD_READ,
    "ssd_write": Resource.SSD_WRITE,
}
Config = dict[str, Any]
Weights = dict[str, torch.Tensor]


class Case(NamedTuple):
    """A way to train on ranks."""

    config: Config
    reference: Config
    """Config with the same state sharding and the same update, with resident weights."""
    parts: int
    """Micro-batches per step of a rank."""


def candidate(
    techniques: Sequence[Technique], parts: int, ranks: int, budget_bytes: int | None = None
) -> Candidate:
    """Return the candidate of the chain under `techniques` on `ranks` ranks, in micro-batches of two
    samples.
    """
    rewriter = Rewriter(recording_of(CHAIN), Target(hardware.detect("cpu"), ranks, budget_bytes))
    execution = {"micro_batch": 2, "accumulate": parts}
    found = rewriter.candidate(Choice.from_document({**settings_of(*techniques), "execution": execution}))
    assert isinstance(found, Candidate), found
    return found


def config_of(found: Candidate, techniques: Sequence[Technique]) -> Config:
    """Return the config for training."""
    return {
        "settings": settings_of(*techniques),
        "plan": {slot: plan.document() for slot, plan in found.plans.items()},
    }


def started(config: Config) -> tuple[Any, Tuned]:
    """Apply `config` to the chain; SGD, since Adam turns rounding errors of zero gradients into updates."""
    workload, model, _ = build(CHAIN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    return workload, apply(model, optimizer, config, loss=workload.loss, strict=False)


def share_of(workload: Any, step: int, parts: int, ranks: int) -> list[Any]:
    """Return this rank's micro-batches in `step`; those of all `ranks` in a single process."""
    torch.manual_seed(1000 + step)
    batches = [workload.make_batch(2) for _ in range(parts * ranks)]
    if not dist.is_initialized():
        return batches
    return batches[dist.get_rank() * parts : (dist.get_rank() + 1) * parts]


def weights_of(tuned: Tuned) -> Weights:
    return {name: value.clone() for name, value in tuned.state_dict()["model"].items()}


def trained(config: Config, parts: int, ranks: int) -> tuple[Weights, dict[str, int], Tuned]:
    """Return weights after five steps, traffic of the last one, and the trained model."""
    workload, tuned = started(config)
    for step in range(STEPS):
        mine = share_of(workload, step, parts, ranks)
        COUNTERS.take()
        tuned.step(mine)
    moved = COUNTERS.take()  # before what is on SSD is verified
    return weights_of(tuned), moved, tuned


def on_rank(cases: dict[str, Case], folder: str, ledger: bool) -> dict[str, dict[str, Any]]:
    """Return everything that is checked of each case on this rank."""
    ranks, found = dist.get_world_size(), {}
    os.environ[offload_dir.VARIABLE] = folder
    for name, (config, reference, parts) in cases.items():
        weights, moved, tuned = trained(config, parts, ranks)
        wanted, _, _ = trained(reference, parts, ranks)
        audit = tuned.audit()["offload.states"]
        checkpoint = went_on(config, tuned, Path(folder, name), parts, ranks)
        found[name] = {
            "weights": weights,
            "wanted": wanted,
            "moved": moved,
            "audit": audit,
            "went_on": checkpoint,
        }
        found[name]["clipping"] = clipped(config, ranks)
        if ledger:
            found[name]["peaks"] = peaks(str(CHAIN), {"": config["settings"]}, parts, {"": config["plan"]})[
                ""
            ][1]
    return found


def went_on(config: Config, tuned: Tuned, folder: Path, parts: int, ranks: int) -> tuple[Weights, Weights]:
    """Return weights a step later: of the saved run, and of another run that loaded its state."""
    tuned.save(folder)
    workload, other = started(config)
    other.load(folder)
    for each in (tuned, other):
        each.step(share_of(workload, STEPS, parts, ranks))
    return weights_of(tuned), weights_of(other)


def clipped(config: Config, ranks: int) -> tuple[bool, str]:
    """Return whether backward has updated blocks, and the error of a loop that clips the gradients left."""
    workload, tuned = started(config)
    with tuned.micro_batch(last=True):
        workload.loss(tuned.model, share_of(workload, 0, 1, ranks)[0]).backward()
    with spent_as_none():
        left = [each for each in tuned.model.parameters() if each.grad is not None]
    are_used = len(left) < sum(each.requires_grad for each in tuned.model.parameters())
    torch.nn.utils.clip_grad_norm_(left, 1e-3)
    try:
        tuned.optimizer.step()
    except ApplyError as refused:
        return are_used, str(refused)
    return are_used, ""


@cache
def alone(parts: int) -> Weights:
    """Return the result of one rank that takes all micro-batches."""
    return trained({"settings": {}}, parts, 1)[0]


def link_bytes(step: Step, parts: int, ranks: int) -> dict[str, int]:
    """Return the bytes that a rank moves on each link per step; for messages, those received in a ring:
    averages go round twice.
    """
    traffic = step.ops.traffic_bytes * np.where(step.ops.phase < Phase.BOUNDARY, parts, 1)
    found = {name: int(traffic[step.ops.resource == resource].sum()) for name, resource in LINKS.items()}
    if found[
        "ssd_write"
    ]:  # momentum alone, where the recorded AdamW has two moments; the first micro-batch reads no sum
        moment = (
            int(
                step.storages.bytes[
                    (step.storages.kind == Kind.OPTIMIZER) & (step.storages.tier == Tier.SSD)
                ].sum()
            )
            // 2
        )
        sums = np.isin(
            np.arange(step.ops.n), step.uses.op[step.storages.kind[step.uses.storage] == Kind.GRADIENT]
        )
        sums &= (step.ops.resource == Resource.SSD_READ) & (step.ops.phase < Phase.BOUNDARY)
        found["ssd_write"] -= moment
        found["ssd_read"] -= moment + int(step.ops.traffic_bytes[sums].sum())
    averages = [
        number for number, name in enumerate(step.names) if "all_reduce" in name or "allreduce" in name
    ]
    messages = step.ops.resource == Resource.INTRA_LINK
    twice = int(traffic[messages & np.isin(step.ops.name, averages)].sum())
    return found | {"intra_link": (found["intra_link"] + twice) * (ranks - 1) // ranks}


def check_on_ranks(
    techniques: dict[str, tuple[Technique, Technique, Technique]],
    folder: Path,
    *,
    ranks: int = 2,
    parts: int = 1,
    bitwise: bool = True,
    other_slots: Sequence[Technique] = (),
    budget_bytes: int | None = None,
) -> dict[str, Step]:
    """Raise AssertionError if training on ranks differs from one rank, from the reference, or from the
    prediction.

    Args:
        techniques: By name: the state sharding, the technique under test, and the same update with resident
            weights.
        folder: For checkpoints.
        ranks: Number of ranks.
        parts: Micro-batches per step of a rank.
        bitwise: The reference's weights are compared bitwise; else to 1e-6.
        other_slots: Techniques of other slots, which the reference does not have.
        budget_bytes: Budget of the plans.

    Returns:
        The predicted step of each.
    """
    found = {
        name: candidate((*each[:2], *other_slots), parts, ranks, budget_bytes)
        for name, each in techniques.items()
    }
    cases = {
        name: Case(
            config_of(found[name], (states, mine, *other_slots)),
            {"settings": settings_of(states, other)},
            parts,
        )
        for name, (states, mine, other) in techniques.items()
    }
    on_ranks = run_ranks(
        on_rank, ranks, cases, str(folder), cpu_allocator.available() is None, deadline_s=300
    )
    for name, each in found.items():
        for rank in on_ranks:
            _check(rank[name], on_ranks[0][name]["weights"], each.program.step, parts, ranks, bitwise)
    return {name: each.program.step for name, each in found.items()}


def _check(run: dict[str, Any], first: Weights, step: Step, parts: int, ranks: int, bitwise: bool) -> None:
    is_first = run["weights"] is first
    _same(run["weights"], first, 0)
    _same(run["weights"], run["wanted"], 0 if bitwise else 1e-6)
    _same(run["weights"], alone(parts * ranks), 1e-6)
    _same(
        run["went_on"][1], run["went_on"][0], 0 if bitwise else 1e-6
    )  # a new DDP fills its buckets in another order
    are_used, said = run["clipping"]
    assert ("clipping by norm" in said) == are_used
    assert run["audit"].get("resident_parameters") or run["audit"]["blocks_on_host"] == len(step.blocks)
    moved, predicted = {link: run["moved"].get(link, 0) for link in LINKS}, link_bytes(step, parts, ranks)
    if is_first:
        assert moved == pytest.approx(
            predicted, rel=1e-4
        )  # what three ranks are sent is rounded, message by message
    else:  # the first rank has the largest rows
        assert all(0.9 * n <= moved[link] <= n for link, n in predicted.items()), (moved, predicted)
    if "peaks" in run:
        wanted = (
            step.peak_bytes()
        )  # of the last step: what `apply` has left in cycles may live through the first ones
        assert run["peaks"][-1] == pytest.approx(wanted, rel=0.02, abs=SPARE_BYTES), (run["peaks"], wanted)


def _same(found: Weights, wanted: Weights, tolerance: float) -> None:
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=0, atol=tolerance), name
