"""Offload with recompute, on one rank and on two: bits, peaks, and refusals by name, for every way to shard
states.
"""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fixed_cpu import NO_HOST_COSTS
from support.budget_runs import trains_where_the_plain_model_is_out_of_memory
from support.gloo import run_ranks
from support.ranks.gloo_memory import freed_to
from support.suites.sharded_suite import SPARE_BYTES
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.runtime.memory_tiers import HOST, tier
from memtune.search_spaces import find
from memtune.ssd import offload_dir
from memtune.technique import Reason, Target, Technique
from memtune.testing.drift_check import plain_program, planned, recording_of, target_of
from memtune.testing.training import build, settings_of

MODEL, SAMPLES, STEPS = ZOO["gpt"], 6, 3
Weights, Config = dict[str, torch.Tensor], dict[str, Any]
Cell = tuple[str, str]
"""Offload and recompute."""
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("ssd")]


def made(slot: str, kind: str, **knobs: Any) -> Technique:
    return find(slot, kind)(kind=kind, **knobs)


def states(kind: str, **knobs: Any) -> Technique:
    return made("offload.states", kind, **knobs)


def activations(kind: str, **knobs: Any) -> Technique:
    return made("offload.activations", kind, **knobs)


NATIVE = states("optimizer_cpu", update="native")
OFFLOADS = {
    "optimizer_cpu": states("optimizer_cpu"),
    "per_layer": states("optimizer_cpu", update="native", trigger="per_layer"),
    "zero_offload": states("zero_offload", bucket_mib=0.005),
    "zero_offload, a part": states("zero_offload", bucket_mib=0.005, ratio=0.5),
    "l2l": states("l2l"),
    "stronghold": states("stronghold", window=2),
    "elixir": states("elixir"),
    "patrickstar": states("patrickstar"),
    "mobius": states("mobius", stages=2),
    "harmony": states("harmony"),
    "harmony, a pipeline": states("harmony", parallelism="pipeline"),
    "orchestrated": states("orchestrated", group=2),
    "zero_infinity": states("zero_infinity"),
    "zero_infinity, weights on the host": states("zero_infinity", parameters="host"),
    "zero_infinity, all on SSD": states("zero_infinity", parameters="ssd", gradients="ssd"),
    "angel_ptm": states("angel_ptm", page_mib=0.02),
    "angel_ptm, optimizer on SSD": states("angel_ptm", page_mib=0.02, optimizer="ssd"),
    "smart_infinity": states("smart_infinity", sub_group_mib=0.1),
    "lohan": states("lohan", bucket_mib=0.005),
    "copy_out": activations("copy_out", min_bytes=0),
    "copy_out, half to SSD": activations("copy_out", min_bytes=0, ratio=0.5, target="ssd"),
    "pipelined": activations("pipelined", ratio=0.5, min_bytes=0),
    "tsplit": activations("tsplit", share=0.5, parts=1, min_bytes=64),
}
RECOMPUTES = {
    kind: made("recompute", kind, **({"share": 0.5} if kind == "planned" else {}))
    for kind in ("full", "selective", "planned", "every_nth")
}
CHECKMATE = made("recompute", "checkmate", share=0.5)
AROUND = made("recompute", "planned", share=0.5, offload=False)
"""Techniques that plan for the offload of another one."""
DIVISIONS = ("one rank", "ddp", "zero2", "fsdp", "zero3")
STORES = (
    "l2l",
    "stronghold",
    "elixir",
    "patrickstar",
    "zero_infinity, weights on the host",
    "zero_infinity, all on SSD",
    "angel_ptm",
    "angel_ptm, optimizer on SSD",
)
PACKS = ("mobius", "harmony", "harmony, a pipeline")
ACTIVATIONS = ("copy_out", "copy_out, half to SSD", "pipelined", "tsplit")
IN_PACKS = ("full", "selective", "every_nth")
RANKS = ("ddp", "zero2", "fsdp", "zero3")
REFUSED: list[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = [
    ("everything fits into the budget as it is", ("tsplit",), ("zero2",), ("full",)),
    ("draws random numbers, and their order would change", PACKS, ("one rank",), IN_PACKS),
    ("packs average their gradients themselves", PACKS, RANKS, IN_PACKS),
    ("do not hold for packs", PACKS, DIVISIONS, ("planned",)),
    ("whole on each, or gathered from all", STORES, ("zero2",), tuple(RECOMPUTES)),
    ("one rank has the link to itself", ("orchestrated",), ("one rank",), tuple(RECOMPUTES)),
    (
        "it needs replicas: sharded weights are unsharded and resharded by hooks of their own",
        ("orchestrated",),
        RANKS[1:],
        tuple(RECOMPUTES),
    ),
]
"""Reason, offload techniques, sharding of states, recompute techniques. The first matching reason is the one
given.
"""
BRIEFLY = {
    "one rank": [("stronghold", "planned"), ("pipelined", "planned")],
    "fsdp": [("zero_infinity, all on SSD", "planned")],
}
"""Cells that a short run trains."""
REFERENCES = {
    "none": (),
    "own": (OFFLOADS["optimizer_cpu"],),
    "native": (NATIVE,),
    "a part": (OFFLOADS["zero_offload, a part"],),
}
"""Technique with the same update but no recompute."""


def reference_of(row: str) -> str:
    """Return the one of `REFERENCES`: the user's optimizer, the native update, or another one for each part
    of the state.
    """
    own = ("optimizer_cpu", "elixir", "patrickstar", "orchestrated", "angel_ptm")
    return {
        **dict.fromkeys(ACTIVATIONS, "none"),
        **dict.fromkeys(own, "own"),
        "zero_offload, a part": "a part",
    }.get(row, "native")


def dividing(division: str) -> list[Technique]:
    return [made("sharding.states", division)] if division != "one rank" else []


def techniques(row: str, division: str, recompute: str) -> list[Technique]:
    around = recompute == "planned" and row in ACTIVATIONS
    return [OFFLOADS[row], AROUND if around else RECOMPUTES[recompute], *dividing(division)]


def parts_of(division: str) -> int:
    """Return the micro-batches: sums of replicas' averages have another order, and with one there is no
    ZeRO-2.
    """
    return 1 if division == "ddp" else 2


def candidate(row: str, division: str, recompute: str) -> Candidate | Reason:
    """Return the candidate after its passes."""
    settings = settings_of(*techniques(row, division, recompute))
    execution = {"micro_batch": SAMPLES, "accumulate": parts_of(division)}
    return rewriter(division).candidate(Choice.from_document({**settings, "execution": execution}))


@cache
def rewriter(division: str) -> Rewriter:
    return Rewriter(
        recording_of(MODEL),
        Target(hardware.detect("cpu"), 1 if division == "one rank" else 2),
        validate=False,
    )


def why_refused(row: str, division: str, recompute: str) -> str:
    """Return the listed reason, "" for cells that must train."""
    for why, rows, divisions, recomputes in REFUSED:
        if row in rows and division in divisions and recompute in recomputes:
            return why
    return ""


# -- on each rank --------------------------------------------------------------------------------------------


def trained(config: dict[str, Any], parts: int, ledger: Ledger | None, held_bytes: int = 0) -> dict[str, Any]:
    """Return losses and weights of a few steps in which each rank has its own samples, and the peak of the
    last one; `held_bytes` are live while no model is.
    """
    empty = freed_to(ledger, held_bytes) if ledger else 0
    workload, model, optimizer = build(MODEL)
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    rank, losses = dist.get_rank() if dist.is_initialized() else 0, []
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        with tier(HOST):
            batches = [workload.make_batch(SAMPLES) for _ in range(parts)]
        if ledger:
            ledger.reset_peak()
        losses.append(float(tuned.step(batches)))
    peak = ledger.peak_allocated_bytes() - empty if ledger else 0
    tuned.audit()
    weights: Weights = {name: value.clone() for name, value in tuned.state_dict()["model"].items()}
    return {"losses": losses, "weights": weights, "peak": peak}


def on_rank(
    drive: str, division: str, cells: dict[Cell, Config], ledger: bool
) -> dict[Cell, tuple[float, bool, int]]:
    """Return, for each of `cells`, the distance of weights from its reference, equality of losses, and the
    peak.
    """
    os.environ[offload_dir.VARIABLE] = drive
    counts = Ledger.open("cpu") if ledger else None
    gc.freeze()  # what is imported need not be looked at by every collection
    parts, held_bytes = parts_of(division), counts.live_bytes() if counts else 0
    known: dict[str, dict[str, Any]] = {}
    for name in sorted({reference_of(row) for row, _ in cells}):
        settings = settings_of(*REFERENCES[name], *dividing(division))
        known[name] = trained({"settings": settings}, parts, counts, held_bytes)
        held_bytes += sum(-(-each.nbytes // 64) * 64 for each in known[name]["weights"].values())
    found = {}
    for (row, recompute), config in cells.items():
        run, other = trained(config, parts, counts, held_bytes), known[reference_of(row)]
        off = max(
            float((run["weights"][name] - value).abs().max()) for name, value in other["weights"].items()
        )
        found[row, recompute] = (off, run["losses"] == other["losses"], run["peak"])
    return found


# -- what is checked -----------------------------------------------------------------------------------------


def check(drive: Path, division: str, cells: list[Cell]) -> None:
    """Raise AssertionError for cells that differ from their reference in a bit, or from the
    predicted peak.
    """
    found = {(row, recompute): candidate(row, division, recompute) for row, recompute in cells}
    assert not (
        wrong := {cell: str(each) for cell, each in found.items() if not isinstance(each, Candidate)}
    ), wrong
    made = {cell: each for cell, each in found.items() if isinstance(each, Candidate)}
    configs = {
        cell: {
            "settings": settings_of(*techniques(cell[0], division, cell[1])),
            "plan": {slot: plan.document() for slot, plan in each.plans.items()},
        }
        for cell, each in made.items()
    }
    ledger, ranks = cpu_allocator.available() is None, 0 if division == "one rank" else 2
    runs = run_ranks(on_rank, ranks, str(drive), division, configs, ledger, deadline_s=900)
    for rank, run in enumerate(runs):
        for cell, (off, same_losses, peak) in run.items():
            assert off == 0, (division, cell, off)
            assert same_losses, (division, cell)
            classes = made[cell].program.rank_classes
            wanted = classes[rank if len(classes) > 1 else 0].step.peak_bytes()
            assert not ledger or peak == pytest.approx(wanted, rel=0.02, abs=SPARE_BYTES), (
                division,
                cell,
                peak,
                wanted,
            )


@pytest.mark.drawn(1)
@pytest.mark.parametrize("division", BRIEFLY)
def test_offload_with_recompute_is_exact(tmp_path: Path, division: str) -> None:
    check(tmp_path, division, BRIEFLY[division])


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_pairs_that_fit_are_exact(tmp_path: Path, division: str) -> None:
    """Equal, to the bit, to the same sharding without offload and recompute, with the predicted peak."""
    check(
        tmp_path, division, [(r, c) for r in OFFLOADS for c in RECOMPUTES if not why_refused(r, division, c)]
    )


@pytest.mark.parametrize("division", [pytest.param(each, marks=pytest.mark.slow) for each in DIVISIONS])
def test_fits_refuses_other_techniques_by_name(division: str) -> None:
    for row in OFFLOADS:
        for recompute in RECOMPUTES:
            if why := why_refused(row, division, recompute):
                assert why in str(candidate(row, division, recompute)), (division, row, recompute)


@pytest.mark.slow
@pytest.mark.native_ledger
@pytest.mark.parametrize(
    ("row", "recompute"),
    [
        ("stronghold", RECOMPUTES["planned"]),
        ("copy_out, half to SSD", AROUND),
    ],
    ids=lambda each: each if isinstance(each, str) else each.kind,
)
def test_together_under_a_budget_that_the_plain_step_exceeds(row: str, recompute: Technique) -> None:
    trains_where_the_plain_model_is_out_of_memory(MODEL, OFFLOADS[row], recompute)


def test_plans_price_offloaded_blocks() -> None:
    """Planned peaks are those after the offload, within the budget, however much of a block is offloaded by
    then.
    """
    plain = plain_program(MODEL, SAMPLES)
    for mover in (activations("copy_out", min_bytes=0, ratio=0.5), OFFLOADS["tsplit"]):
        for share in (0.2, 0.5, 0.8):
            mine = made("recompute", "planned", share=share, offload=False)
            target = target_of(mine, mover)
            target = replace(target, hardware=replace(target.hardware, **NO_HOST_COSTS))
            assert mine.fits(plain, target) is None
            plan = mine.plan(plain, target)
            after = mine.rewrite(plain, plan, target)
            peak = mover.rewrite(after, mover.plan(after, target), target).step.peak_bytes()
            low, high, budget = (plan.document()[f"{name}_bytes"] for name in ("smallest", "plain", "budget"))
            assert peak == plan.peak_bytes
            assert budget - (high - low) // 6 < peak <= budget


@pytest.mark.parametrize("row", ["stronghold", "zero_offload", "angel_ptm"])
def test_schedule_of_the_whole_model_is_refused_by_apply(row: str) -> None:
    """By `fits`; by `apply` for a config that names both anyway."""
    why = f"{OFFLOADS[row].kind} moves a block's parameters or gradients at its own calls only"
    target = target_of(CHECKMATE, OFFLOADS[row])
    assert why in str(CHECKMATE.fits(plain_program(MODEL, SAMPLES), target))
    plans = planned(MODEL, CHECKMATE)[1] | planned(MODEL, OFFLOADS[row])[1]
    settings, plan = (
        settings_of(CHECKMATE, OFFLOADS[row]),
        {slot: each.document() for slot, each in plans.items()},
    )
    workload, model, optimizer = build(MODEL)
    with pytest.raises(ApplyError, match=why):
        apply(model, optimizer, {"settings": settings, "plan": plan}, loss=workload.loss, strict=False)


def test_fits_and_apply_refuse_tiled_weights_with_schedules() -> None:
    """By `fits`, before any schedule is searched, and by `apply`."""
    whole = states("zero_infinity", parameters="host")
    tiled = whole.model_copy(update={"tiles": 2})
    assert "tiled weights" in str(CHECKMATE.fits(plain_program(MODEL, SAMPLES), target_of(CHECKMATE, tiled)))
    plans = planned(MODEL, CHECKMATE)[1] | planned(MODEL, whole)[1]
    plan = {slot: each.document() for slot, each in plans.items()} | {"offload.states": {"tiled": []}}
    workload, model, optimizer = build(MODEL)
    with pytest.raises(ApplyError, match="tiled weights"):
        apply(
            model,
            optimizer,
            {"settings": settings_of(CHECKMATE, tiled), "plan": plan},
            loss=workload.loss,
            strict=False,
        )


def test_online_is_refused_with_grad_offload_per_call() -> None:
    online = made("recompute", "dtr", ratio=0.6, online=True)
    message = str(online.fits(plain_program(MODEL, SAMPLES), target_of(online, OFFLOADS["l2l"])))
    assert "l2l moves a block's parameters or gradients at its own calls only" in message
