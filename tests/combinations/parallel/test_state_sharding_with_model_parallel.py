"""States sharded among ranks with the same part of a model: gloo ranks train as one, peaks and bytes as
predicted.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.ranks import model_parallel_runs
from support.ranks.model_parallel_runs import (
    MODELS,
    SIZE,
    Reason,
    assert_trained_as_one,
    candidate,
    rewriter,
    settings,
    trained,
)

from memtune import hardware
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Candidate, Choice
from memtune.errors import MemtuneError
from memtune.hardware.roofline import op_costs
from memtune.memory import cpu_allocator
from memtune.program.step import APART, Program, RankClass, Resource, Step
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces._pass_pipeline import on_every_rank, on_replicas
from memtune.search_spaces.sharding.states.zero3 import Zero3
from memtune.technique import NO_PLAN, Target
from memtune.testing.training import build

PATH = MODELS / "momentum.py"
RANKS, PARTS, COPIES = 4, 2, 2
HIDDEN = SIZE * 16 * 32 * 4
"""Bytes of a block's input."""
FROZEN = "h.0.mlp.0.weight"
Case = tuple[str, dict[str, Any], int, bool]
"""Kind of parallelism, sharding of states, accumulation, clipping."""

STATES = {
    "ddp": {"kind": "ddp"},
    "zero1": {"kind": "zero1"},
    "zero2": {"kind": "zero2"},
    "zero3": {"kind": "zero3"},
    "kept": {"kind": "fsdp", "reshard_after_forward": False, "blocks_per_unit": 2},
}
IN_PLACE = "rtp, in place"


def document(kind: str, states: dict[str, Any], accumulate: int = 1) -> dict[str, Any]:
    knobs = {"in_place": True} if kind == IN_PLACE else {}
    found = settings(_kind(kind), accumulate, degree=PARTS, **knobs)
    found["sharding"]["states"] = states
    return found


def _kind(name: str) -> str:
    return name.partition(",")[0]


def predicted(kind: str, states: dict[str, Any], accumulate: int = 1) -> Candidate:
    found = rewriter(PATH, RANKS).candidate(Choice.from_document(document(kind, states, accumulate)))
    assert isinstance(found, Candidate), found
    return found


def config(kind: str, states: dict[str, Any], accumulate: int) -> dict[str, Any]:
    plans = predicted(kind, states, accumulate).plans
    return {
        "settings": document(kind, states, accumulate),
        "plan": {slot: plan.document() for slot, plan in plans.items()},
    }


# -- what fits -----------------------------------------------------------------------------------------------


def refused(kind: str, states: dict[str, Any], **knobs: Any) -> str:
    asked = settings(kind, **knobs)
    asked["sharding"]["states"] = states
    found = rewriter(PATH, RANKS).candidate(Choice.from_document(asked))
    assert isinstance(found, Reason), found
    return str(found)


def test_refusals_name_what_is_in_the_way() -> None:
    assert "has no copies of a part" in refused("tensor", {"kind": "fsdp"})
    assert "has no copies of a part" in refused("rtp", {"kind": "fsdp"})
    assert "all 2 ranks are in one group" in refused("tensor", {"kind": "paro", "group": 2}, degree=2)
    kept = {"kind": "fsdp", "reshard_after_forward": 2}
    assert "neighbouring ranks, which share layers" in refused("tensor", kept, degree=2)
    assert "degree=4 is more than the 2 ranks" in refused("tensor", {"kind": "fsdp", "degree": 4}, degree=2)


# -- the rank's step -----------------------------------------------------------------------------------------


def collectives(step: Step, name: str) -> list[int]:
    return [op for op in range(step.ops.n) if name in step.names[step.ops.name[op]]]


def test_rank_has_its_rows_of_its_part() -> None:
    step = predicted("tensor", STATES["zero3"]).program.step
    shapes = {p.name: p.shape for p in step.parameters}
    assert shapes["h.1.attn.q_proj.weight"] == (8, 32)
    assert shapes["h.1.attn.out_proj.weight"] == (16, 16)
    assert shapes["h.1.ln_1.weight"] == (16,)


@pytest.mark.parametrize(
    ("parts", "copies", "link", "rate"),
    [(2, 4, Resource.INTRA_LINK, 1.0), (2, 16, Resource.INTRA_LINK, 4.0), (8, 4, Resource.INTER_LINK, 1.0)],
)
def test_copies_use_the_links_between_them(parts: int, copies: int, link: Resource, rate: float) -> None:
    """On nodes of 8: four copies of a part share a node, or one; a ring over nodes has the cards of its own
    ranks only.
    """
    here = hardware.find("h100-80g")
    before = Program((RankClass(parts * copies, rewriter(PATH, RANKS).recording.at(SIZE)),), SIZE)
    seen = Target(here, parts * copies).among_copies(parts)
    assert (seen.ranks, seen.hardware.gpus_per_node) == (copies, max(8 // parts, 1))
    after = on_every_rank(Zero3().rewrite(on_replicas(before, parts), NO_PLAN, seen), parts, here)
    step = after.step
    gathers = collectives(step, "all_gather_into_")
    assert gathers
    assert {int(step.ops.group[op]) for op in gathers} == {copies + APART * (parts - 1)}
    assert {int(step.ops.resource[op]) for op in gathers} == {link}
    assert after.ranks == parts * copies
    op = max(gathers, key=lambda each: step.ops.traffic_bytes[each])
    across = parts * copies > 8
    bytes_per_s = here.inter_link_bytes_per_s * rate if across else here.intra_link_bytes_per_s
    latency_s = here.inter_link_latency_s if across else here.intra_link_latency_s
    each_s = (
        float(step.ops.traffic_bytes[op]) / copies / min(bytes_per_s, here.intra_link_bytes_per_s) + latency_s
    )
    assert op_costs(step, here, ranks=after.ranks).op_s[op] == pytest.approx((copies - 1) * each_s)


# -- on gloo ranks -------------------------------------------------------------------------------------------


def on_rank(cases: list[tuple[dict[str, Any], int, bool]], folder: str) -> list[dict[str, Any]]:
    """Run five steps of each config; return the ledger's peak, and a step's received bytes inside a node of
    `PARTS` ranks and between nodes.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(PARTS)
    found = []
    for number, (asked, accumulate, clip) in enumerate(cases):
        run = trained(RANKS, asked, clip, accumulate, path=PATH)
        model_parallel_runs.SEPARATE = PATH  # the model that `peak` builds
        gc.collect()  # the model before is in cycles
        run["peak"] = model_parallel_runs.peak(asked) if cpu_allocator.available() is None else 0
        workload, model, optimizer = build(PATH)
        tuned = apply(model, optimizer, asked, loss=workload.loss, strict=False)
        torch.manual_seed(torch.distributed.get_rank())
        for _ in range(2):
            COUNTERS.take()
            tuned.step([workload.make_batch(SIZE) for _ in range(accumulate)])
        run["sent"] = COUNTERS.take()
        tuned.save(f"{folder}/{number}")
        run["saved"] = tuned.state_dict()
        found.append(run)
    return found


def between_copies(kind: str, states: str, accumulate: int) -> int:
    """Return the bytes that a rank receives from the other copies of its part in a step.

    These are the formulas of `memtune.parallel.sharding.factors`, with padding.
    """
    parts = kind != "head_context"
    ranks = COPIES if parts else RANKS
    step = (
        candidate(_kind(kind), PATH, RANKS, degree=PARTS).program.step
        if parts
        else rewriter(PATH, RANKS).recording.step
    )
    turns = accumulate * (1 if _kind(kind) == "rtp" else PARTS)
    rows = {p.name: (p.shape[0] + ranks - 1) // ranks * ranks * 4 for p in step.parameters}
    whole = {p.name: rows[p.name] * (p.shape[1] if len(p.shape) > 1 else 1) for p in step.parameters}
    blocks = sum(n_bytes for name, n_bytes in whole.items() if name.startswith("h."))
    every, trained_bytes = sum(whole.values()), sum(whole.values()) - whole[FROZEN]
    if states == "ddp":
        return 2 * trained_bytes * (ranks - 1) // ranks
    if states in ("zero1", "zero2"):  # the messages have a flag for every parameter
        reduced = trained_bytes + 4 * ranks * (len(whole) - 1)
        return (reduced * (1 if states == "zero1" else turns) + trained_bytes) * (ranks - 1) // ranks
    gathered = every + (blocks if states == "zero3" else 0)
    return turns * (gathered + trained_bytes) * (ranks - 1) // ranks


def check(cases: list[tuple[str, str, int, bool]], folder: Path) -> None:
    """Check training against one rank, peaks within 2 %, bytes by formula, and checkpoints that the plain
    model loads.
    """
    asked = [
        (config(kind, STATES[states], accumulate), accumulate, clip)
        for kind, states, accumulate, clip in cases
    ]
    found = run_ranks(on_rank, RANKS, asked, str(folder), deadline_s=280)
    wanted = {
        key: trained(RANKS, None, key[1], key[0], path=PATH) for key in {(each[2], each[3]) for each in cases}
    }
    for number, (kind, states, accumulate, clip) in enumerate(cases):
        runs = [each[number] for each in found]
        assert_trained_as_one(runs, wanted[accumulate, clip])
        program = predicted(kind, STATES[states], accumulate).program
        bytes_predicted = simulate(program, hardware.detect("cpu")).peak_allocated_bytes
        for run in runs:
            assert (
                cpu_allocator.available() is not None
                or abs(run["peak"] - bytes_predicted) <= 0.02 * bytes_predicted
            ), run["peak"]
            assert run["sent"].get("inter_link", 0) == between_copies(kind, states, accumulate), cases[number]
        loaded_plain(folder / str(number), runs[0]["saved"])


def loaded_plain(folder: Path, saved: dict[str, Any]) -> None:
    """Return the checkpoint loaded in one process without sharding."""
    workload, model, optimizer = build(PATH)
    tuned = apply(model, optimizer, {"settings": {}}, loss=workload.loss, strict=False)
    tuned.load(folder)
    state = tuned.state_dict()
    torch.testing.assert_close(state["model"], saved["model"], rtol=0, atol=0)
    torch.testing.assert_close(state["optimizer"]["state"], saved["optimizer"]["state"], rtol=0, atol=0)


def refusals(documents: list[dict[str, Any]]) -> list[str]:
    found = []
    for each in documents:
        workload, model, optimizer = build(PATH)
        before = [(name, type(module)) for name, module in model.named_modules()]
        try:
            apply(model, optimizer, each, loss=workload.loss, strict=False)
            found.append("no error")
        except MemtuneError as error:
            found.append(str(error))
        assert [(name, type(module)) for name, module in model.named_modules()] == before
    return found


@pytest.mark.slow
def test_edited_configs_are_refused() -> None:
    two, four = (
        model_parallel_runs.config("rtp", RANKS, path=PATH, degree=degree) for degree in (PARTS, RANKS)
    )
    by_node = {"kind": "hierarchical", "ranks_per_node": 2}
    cases = {
        "All 4 ranks share layers: zero1 has no copies": (four, {"sharding": {"states": {"kind": "zero1"}}}),
        "offload.states: optimizer_cpu does not work on layers that ranks share": (
            two,
            {"offload": {"states": {"kind": "optimizer_cpu"}}},
        ),
        "The 2 ranks are no multiple of optimizer=4": (
            two,
            {"sharding": {"states": {"kind": "amsp", "parameters": 1, "gradients": 2, "optimizer": 4}}},
        ),
        "Every node has one of the ranks that share a copy": (
            two,
            {"sharding": {"states": {"kind": "fsdp"}, "communication": by_node}},
        ),
        "groups of 2 ranks, which share layers, are no whole nodes of 3": (
            two,
            {"sharding": {"states": {"kind": "fsdp"}, "communication": {**by_node, "ranks_per_node": 3}}},
        ),
    }
    documents = []
    for config_, more in cases.values():
        settings_ = {**config_["settings"], **more}
        settings_["sharding"] = {**config_["settings"]["sharding"], **more.get("sharding", {})}
        documents.append({"settings": settings_, "plan": config_["plan"]})
    for rank in run_ranks(refusals, RANKS, documents):
        for said, error in zip(cases, rank, strict=True):
            assert said in error


def test_four_ranks_train_as_one_and_save(tmp_path: Path) -> None:
    check(
        [("sequence_parallel", "zero3", 2, True), ("tensor", "ddp", 1, False), (IN_PLACE, "zero3", 1, True)],
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "sequence_parallel", "head_context", "rtp", IN_PLACE])
@pytest.mark.parametrize("states", list(STATES))
def test_state_sharding_trains_as_one_rank(kind: str, states: str, tmp_path: Path) -> None:
    one_is_zero1 = states == "zero2" and _kind(kind) == "rtp"  # its ranks take no turns
    times = (4,) if one_is_zero1 else (1, 4)
    check([(kind, states, accumulate, clip) for accumulate in times for clip in (False, True)], tmp_path)
