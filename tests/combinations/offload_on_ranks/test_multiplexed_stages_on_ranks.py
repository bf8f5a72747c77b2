"""Stages of Mobius and packs of Harmony-PP on several ranks: trained as on one, bytes by formula, peaks as
predicted.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fixed_cpu import CPU
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import MODELS, SIZE, rewriter
from support.ranks.pipeline_runs import chain_returning
from support.suites.block_offload_suite import block_bytes

from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.errors import ApplyError, UsageError
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.offload.layer_major.pack_offloader import PackOffloader
from memtune.offload.layer_major.packs import StageLayout
from memtune.offload.multiplexed.stage_placement_planner import step_s
from memtune.program.edit import accumulate_gradients
from memtune.program.step import Kind, Phase, Program, RankClass, Resource, Tier
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.states._common.multiplexed_technique import on_ranks, partitions
from memtune.search_spaces.offload.states.harmony import Harmony
from memtune.testing.training import build

CHAIN = MODELS / "chain.py"
PASSED = SIZE * 8 * 16 * 4
"""Bytes of a block's output in `CHAIN`."""
STEPS = 3
MOBIUS: dict[str, Any] = {"kind": "mobius", "stages": 4}
HARMONY: dict[str, Any] = {"kind": "harmony", "parallelism": "pipeline", "backward": 2}


def settings(accumulate: int, states: dict[str, Any]) -> dict[str, Any]:
    alone = {"sharding": {"states": {"kind": "none"}}}
    return {
        "execution": {"micro_batch": SIZE, "accumulate": accumulate},
        **alone,
        "offload": {"states": states},
    }


@cache
def _found(path: Path, ranks: int, accumulate: int, states: tuple[tuple[str, Any], ...]) -> Any:
    return rewriter(path, ranks).candidate(Choice.from_document(settings(accumulate, dict(states))))


def candidate(ranks: int, accumulate: int = 2, path: Path = CHAIN, **states: Any) -> Candidate:
    made = _found(path, ranks, accumulate, tuple(states.items()))
    assert isinstance(made, Candidate), made
    return made


def config(ranks: int, accumulate: int = 2, path: Path = CHAIN, **states: Any) -> dict[str, Any]:
    plans = candidate(ranks, accumulate, path, **states).plans
    return {
        "settings": settings(accumulate, states),
        "plan": {slot: plan.document() for slot, plan in plans.items()},
    }


# -- on gloo ranks -------------------------------------------------------------------------------------------


def _never_resident(
    self: PackOffloader, pack: Any, *, update: bool, resident: bool = False, end: Any = PackOffloader.end
) -> None:
    end(self, pack, update=update)


def _all_resident(
    self: PackOffloader, pack: Any, *, update: bool, resident: bool = False, end: Any = PackOffloader.end
) -> None:
    end(self, pack, update=update, resident=True)


DEFECTS: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "no stage is resident": lambda: patch.object(PackOffloader, "end", _never_resident),
    "all stages are resident": lambda: patch.object(PackOffloader, "end", _all_resident),
}


def trained(
    path: Path, ranks: int, config: dict[str, Any], accumulate: int, defect: str = ""
) -> dict[str, Any]:
    """Run a few steps; each rank provides its own samples, and one rank alone all of them in the order of
    rotation.
    """
    torch.set_num_threads(1)
    gc.collect()
    with DEFECTS[defect]():
        ledger = Ledger.open("cpu") if cpu_allocator.available() is None else None
        empty = (ledger.live_bytes(), ledger.live_bytes(HOST)) if ledger else (0, 0)
        workload, model, optimizer = build(path)
        tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
        alone, losses = not dist.is_initialized(), []
        rank, peaks, counted = 0 if alone else dist.get_rank(), (0, 0), {}
        for step in range(STEPS):
            with tier(HOST):
                torch.manual_seed(step)
                batches = [workload.make_batch(SIZE) for _ in range(ranks * accumulate)]
            turns = [batches[each * accumulate + n] for n in range(accumulate) for each in range(ranks)]
            mine = turns if alone else batches[rank * accumulate :][:accumulate]
            del batches, turns  # a rank holds its own alone
            if ledger:
                ledger.reset_peak()
            COUNTERS.take()
            losses.append(float(tuned.step(mine)))
            counted = COUNTERS.take()
            peaks = (
                (ledger.peak_allocated_bytes() - empty[0], ledger.peak_allocated_bytes(HOST) - empty[1])
                if ledger
                else (0, 0)
            )
        state, pipeline = tuned.state_dict(), tuned._context.loop.pipeline
        return {
            "losses": losses,
            "model": state["model"],
            "optimizer": state["optimizer"]["state"],
            "counted": counted,
            "peaks": peaks,
            "order": getattr(pipeline, "order", []),
            "audit": tuned.audit(),
            "here": sum(p.nbytes for p in tuned._context.placement.optimizer_params.values()),
        }


def draws_later(config: dict[str, Any]) -> str:
    """Return the error of a step whose blocks draw in Python; the one before drew nothing."""
    workload, model, optimizer = build(CHAIN)
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    batches = [workload.make_batch(SIZE) for _ in range(2)]
    tuned.step(batches)
    for block in map(model.get_submodule, workload.find_blocks(model)):
        own = block.forward
        block.forward = lambda *args, own=own, **kwargs: own(*args, **kwargs) * random.uniform(1, 2)
    with pytest.raises(ApplyError) as caught:
        tuned.step(batches)
    with pytest.raises(ApplyError, match="draws random numbers in Python"):
        tuned.step(batches)  # before any message, which could be one of the refused step
    return str(caught.value)


@pytest.mark.parametrize("states", [MOBIUS, HARMONY], ids=["mobius", "harmony"])
def test_draws_in_python_that_begin_in_a_later_step_are_refused_then(states: dict[str, Any]) -> None:
    for error in run_ranks(draws_later, 2, config(2, **states)):
        assert "draws random numbers in Python" in error


def check(
    ranks: int, accumulate: int = 2, path: Path = CHAIN, defect: str = "", bitwise: bool = True, **states: Any
) -> list[Any]:
    made, found = candidate(ranks, accumulate, path, **states), config(ranks, accumulate, path, **states)
    runs: list[Any] = run_ranks(trained, ranks, path, ranks, found, accumulate, defect, deadline_s=200)
    alone = {"settings": {"offload": {"states": {"kind": "optimizer_cpu", "update": "native"}}}}
    wanted = trained(path, ranks, alone, accumulate)
    close = {"rtol": 0.0, "atol": 0.0} if bitwise else {"rtol": 1e-5, "atol": 2e-6}
    for run in runs:
        for what in ("losses", "model", "optimizer"):
            torch.testing.assert_close(run[what], wanted[what], **close)
    if cpu_allocator.available() is None:
        peaks = [
            (each.step.peak_bytes(), each.step.peak_bytes(Tier.HOST)) for each in made.program.rank_classes
        ]
        for run in runs:  # ranks of one device peak may differ on the host
            nearest = min(
                peaks, key=lambda each: abs(each[0] - run["peaks"][0]) + abs(each[1] - run["peaks"][1])
            )
            assert run["peaks"] == pytest.approx(nearest, rel=0.02)
        assert max(run["peaks"][0] for run in runs) == pytest.approx(made.program.step.peak_bytes(), rel=0.02)
    return runs


def layout(ranks: int, **states: Any) -> StageLayout:
    told = candidate(ranks, **states).plans["offload.states"].document()
    return StageLayout(tuple(map(tuple, told["spans"])), tuple(told["ranks"]))


def assert_bytes(ranks: int, runs: list[Any], **states: Any) -> None:
    """Assert weights twice H2D, except for each rank's last stage; gradients once D2H; boundaries through the
    hosts.
    """
    step, where, count = rewriter(CHAIN, ranks).recording.at(SIZE), layout(ranks, **states), 2 * ranks
    sizes, last = block_bytes(step), len(where.stages) - 1
    outside = {p.name: 4 * int(np.prod(p.shape)) for p in step.parameters if p.block < 0}
    batch = int(
        step.ops.traffic_bytes[
            (step.ops.resource == Resource.HOST_TO_DEVICE) & (step.ops.phase == Phase.FORWARD)
        ].sum()
    )
    first, ends = (where.ranks[0], where.ranks[-1])
    before = sum(n_bytes for name, n_bytes in outside.items() if name.startswith("w"))
    moved = 0
    for rank, run in enumerate(runs):
        mine = where.stages_of(rank)
        own = {stage: sum(sizes[slice(*where.stages[stage])]) for stage in mine}
        outside_bytes = before * (rank == first) + (sum(outside.values()) - before) * (rank == ends)
        weights = 2 * sum(own.values()) - own[mine[-1]]
        again = states["kind"] == "mobius" or states.get("boundaries") == "host"
        given = sum(
            (stage > 0) * (1 + again * (stage < last)) + (stage < last) for stage in mine
        )  # forward, again, gradient
        passed = sum((stage < last) + (stage > 0) for stage in mine)
        assert (
            run["counted"]["host_to_device"] == weights + outside_bytes + given * count * PASSED + 2 * batch
        )
        assert run["counted"]["device_to_host"] == sum(own.values()) + outside_bytes + passed * count * PASSED
        assert run["here"] < sum(sizes)  # nothing of another rank's stages
        moved += weights + sum(own.values())
    assert moved == candidate(ranks, **states).plans["offload.states"].moved_bytes


def test_mobius_on_two_ranks_trains_as_one_with_bytes_by_formula() -> None:
    """Updates of some blocks are deferred: the first, the last, and one inside a stage."""
    states = {**MOBIUS, "deferred": (0, 3, 7)}
    runs = check(2, **states)
    assert_bytes(2, runs, **states)
    where = layout(2, **states)
    late = [
        sum(block in states["deferred"] for stage in where.stages_of(rank) for block in where.blocks(stage))
        for rank in range(2)
    ]
    assert [run["audit"]["offload.states"]["deferred_blocks"] for run in runs] == late
    assert all(late)
    kinds = [list(dict.fromkeys((kind, stage) for kind, stage, _ in run["order"])) for run in runs]
    assert kinds[0] == [("forward", 0), ("forward", 2), ("backward", 2), ("backward", 0)]
    assert kinds[1] == [("forward", 1), ("turnaround", 3), ("backward", 1)]
    assert [index for kind, stage, index in runs[0]["order"] if (kind, stage) == ("backward", 2)] == [
        0,
        1,
        2,
        3,
    ]
    assert [run["audit"]["offload.states"]["own_stages"] for run in runs] == [[0, 2], [1, 3]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "states", [{**MOBIUS, "stages": 8}, {"kind": "mobius", "stages": 4}, HARMONY], ids=lambda s: s["kind"]
)
def test_training_on_four_ranks(states: dict[str, Any]) -> None:
    assert_bytes(4, check(4, **states), **states)


@pytest.mark.slow
@pytest.mark.parametrize(
    "states",
    [
        HARMONY,
        {**HARMONY, "prefetch": True, "backward": 1},
        {**HARMONY, "boundaries": "host"},
        {**MOBIUS, "stages": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_training_on_two_ranks(states: dict[str, Any], accumulate: int) -> None:
    runs = check(2, accumulate, **states)
    if accumulate == 2:
        assert_bytes(2, runs, **states)


@pytest.mark.slow
def test_tied_head_gets_the_sum_of_both_stages(tmp_path: Path) -> None:
    path, head = (
        tmp_path / "tied.py",
        "        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)\n",
    )
    assert head in CHAIN.read_text()
    path.write_text(CHAIN.read_text().replace(head, f"{head}        self.head.weight = self.wte.weight\n"))
    check(2, path=path, bitwise=False, **MOBIUS)


@pytest.mark.slow
@pytest.mark.parametrize("defect", [each for each in DEFECTS if each])
def test_bytes_and_peaks_detect_resident_stages(defect: str) -> None:
    with pytest.raises(AssertionError):
        assert_bytes(2, check(2, defect=defect, **MOBIUS), **MOBIUS)


# -- what the pass and the plan say --------------------------------------------------------------------------


def test_all_ranks_together_copy_the_bytes_of_one() -> None:
    """Harmony-PP: 3|W| over all ranks, less the last pack of each; Harmony-DP: that on every rank."""
    step = rewriter(CHAIN, 4).recording.at(SIZE)
    sizes = block_bytes(step)
    pp = candidate(4, **HARMONY).plans["offload.states"].moved_bytes
    assert pp == 3 * sum(sizes) - 4 * 2 * sizes[0]
    dp = candidate(4, **{**HARMONY, "parallelism": "data"}).plans["offload.states"].swapped_bytes
    assert dp == 3 * sum(sizes) - 2 * sizes[0]
    assert 4 * dp > 3 * pp


def test_ranks_hold_their_stages_only() -> None:
    made = candidate(4, **{**MOBIUS, "stages": 8})
    program, where = made.program, made.plans["offload.states"].ranks
    assert (len(program.rank_classes), program.unrolled, program.sharers, program.samples) == (
        4,
        8,
        4,
        4 * 2 * SIZE,
    )
    names = [p.name for each in program.rank_classes for p in each.step.parameters]
    plain = rewriter(CHAIN, 4).recording.at(SIZE)
    assert sorted(names) == sorted(p.name for p in plain.parameters)
    for each in program.rank_classes:  # sorted by peak
        assert {(where[int(p.name.split(".")[1])],) for p in each.step.parameters if p.block >= 0} == {
            each.ranks
        }
        device = sum(p.itemsize * int(np.prod(p.shape)) for p in each.step.parameters if p.block >= 0)
        assert each.step.peak_bytes(Tier.HOST) > 3 * device  # weights and two moments


def test_prefetch_of_stages_shortens_the_step() -> None:
    slow = replace(CPU, host_to_device_bytes_per_s=3e7)
    planner = Rewriter(rewriter(CHAIN, 2).recording, replace(rewriter(CHAIN, 2).target, hardware=slow))

    def step_of(prefetch: bool) -> float:
        packs = {"kind": "harmony", "parallelism": "pipeline", "backward": 1, "prefetch": prefetch}
        made = planner.candidate(Choice.from_document(settings(2, packs)))
        assert isinstance(made, Candidate), made
        return simulate(made.program, slow, level="events").step_s

    assert step_of(prefetch=True) < 0.98 * step_of(prefetch=False)


def test_weights_and_gradients_are_copied_in_parts_between_micro_batches() -> None:
    """A micro-batch's input never waits for all of the next stage's weights, nor for all gradients of the
    last one.
    """
    program, micro_batches = candidate(2, **{**MOBIUS, "stages": 8}).program, 4
    for step in (each.step for each in program.rank_classes):
        name = np.asarray(step.names)[step.ops.name]
        starts = np.flatnonzero(name == "memtune.to_device.default")
        gradients = np.unique(
            step.storages.producer[(step.storages.kind == Kind.GRADIENT) & (step.storages.tier == Tier.HOST)]
        )
        weights = np.flatnonzero((name == "memtune.copy_to_device_.default") & (step.ops.prefetch == 1))
        stages = len({parameter.block for parameter in step.parameters if parameter.block >= 0})
        for moved, times in ((weights, 2 * stages - 2), (gradients, stages - 1)):
            between = np.unique(np.searchsorted(starts, moved[step.ops.phase[moved] < Phase.OPTIMIZER]))
            assert len(between) > (micro_batches - 1) * (times - 1)


def test_plan_has_the_fewest_packs_that_fit() -> None:
    def packs(budget: int | None) -> tuple[int, int]:
        target = rewriter(CHAIN, 2).target
        choice = Choice.from_document(settings(2, {"kind": "harmony", "parallelism": "pipeline"}))
        made = Rewriter(rewriter(CHAIN, 2).recording, replace(target, budget_bytes=budget)).candidate(choice)
        assert isinstance(made, Candidate)
        return len(made.plans["offload.states"].spans), made.program.step.peak_bytes()

    count, whole = packs(None)
    assert count == 2
    more, less = packs(whole - 1)
    assert more > 2
    assert less < whole


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.85, 0.7])
def test_partition_is_the_fastest_within_the_budget(share: float) -> None:
    """All 64 partitions, each rewritten: the planner's is the fastest of those that keep every rank within
    the budget.
    """
    made, target = rewriter(CHAIN, 2), rewriter(CHAIN, 2).target
    slow = replace(CPU, host_to_device_bytes_per_s=2e7)
    program = Program((RankClass(2, accumulate_gradients(made.recording.at(SIZE))),), SIZE, 2)
    each = partitions(program, slow, prefetch=True, crossed=True)
    layouts = [
        each.layout(np.array([0, *inner, 8]))
        for count in (2, 4, 6, 8)
        for inner in combinations(range(1, 8), count - 1)
    ]
    peaks = [on_ranks(program, every, slow).step.peak_bytes() for every in layouts]
    budget = int(share * max(peaks))
    seconds = [step_s(each.costs, every, 4) for every in layouts]
    least = min(takes for takes, peak in zip(seconds, peaks, strict=True) if peak <= budget)
    choice = Choice.from_document(settings(2, {"kind": "mobius"}))
    found = Rewriter(made.recording, replace(target, hardware=slow, budget_bytes=budget)).candidate(choice)
    assert isinstance(found, Candidate), found
    told = found.plans["offload.states"].document()
    assert found.program.step.peak_bytes() <= budget
    chosen = StageLayout(tuple(map(tuple, told["spans"])), tuple(told["ranks"]))
    assert step_s(each.costs, chosen, 4) == pytest.approx(least)


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ({"kind": "mobius", "stages": 3}, "no multiple of 2 ranks"),
        ({"kind": "mobius", "stages": 10}, "8 blocks are fewer than 10 stages"),
        ({**MOBIUS, "deferred": (8,)}, "no block 8 to defer"),
        ({**HARMONY, "forward": 3}, "forward and backward alike"),
        ({**HARMONY, "group": 1}, "forward and backward alike"),
    ],
)
def test_multiplexed_stages_are_refused_by_reason(states: dict[str, Any], reason: str) -> None:
    assert reason in str(_found(CHAIN, 2, 2, tuple(states.items())))


def test_pack_inputs_are_kept_on_the_chosen_tier() -> None:
    count, programs = (
        4,
        [candidate(2, **{**HARMONY, "boundaries": where}).program for where in ("device", "host")],
    )
    steps = [[each.step for each in program.rank_classes] for program in programs]
    for tier_, sign in ((Tier.DEVICE, 1), (Tier.HOST, -1)):
        # On the host gradients that wait for updates come later, so that is not where its peak is.
        most = [
            sum(int(step.live_bytes(tier_)[step.ops.phase == Phase.FORWARD].max()) for step in each)
            for each in steps
        ]
        assert sign * (most[0] - most[1]) >= (count - 1) * PASSED
    ups = [sum(int((step.ops.resource == Resource.HOST_TO_DEVICE).sum()) for step in each) for each in steps]
    assert ups[1] - ups[0] == 2 * count  # of the two packs between the first and the last


def test_packing_follows_the_knob() -> None:
    """`balanced`: even in bytes; `greedy`: filled from the last block on, up to three, then split for equal
    numbers per rank.
    """
    spans = {
        packing: layout(2, kind="harmony", parallelism="pipeline", backward=3, packing=packing).stages
        for packing in ("balanced", "greedy")
    }
    assert spans == {"balanced": ((0, 2), (2, 4), (4, 6), (6, 8)), "greedy": ((0, 2), (2, 3), (3, 5), (5, 8))}


def test_across_is_no_setting_of_one_rank() -> None:
    target = rewriter(CHAIN, 2).target
    records = [
        [
            Harmony(kind="harmony", parallelism=each).record(replace(target, ranks=n))
            for each in ("data", "pipeline")
        ]
        for n in (1, 2)
    ]
    assert records[0][0] == records[0][1]
    assert records[1][0] != records[1][1]


def test_search_solves_stages_on_request_only() -> None:
    plain = Rewriter(rewriter(CHAIN, 2).recording, replace(rewriter(CHAIN, 2).target, sharded=None))
    found = [
        plain.candidate(Choice.from_document(settings(2, each))) for each in ({"kind": "mobius"}, MOBIUS)
    ]
    assert "on request only" in str(found[0])
    assert isinstance(found[1], Candidate)


def test_other_slots_are_refused() -> None:
    document = {**settings(2, MOBIUS), "sharding": {"states": {"kind": "fsdp"}}}
    assert "sharding.states: {kind: none}" in str(
        rewriter(CHAIN, 2).candidate(Choice.from_document(document))
    )


def wrong_plan(path: Path, config: dict[str, Any]) -> str:
    workload, model, optimizer = build(path)
    with pytest.raises(UsageError) as error:
        apply(model, optimizer, config, loss=workload.loss, strict=False)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("states", [MOBIUS, HARMONY], ids=lambda each: str(each["kind"]))
def test_blocks_that_return_a_tensor_among_constants(tmp_path: Path, states: dict[str, Any]) -> None:
    check(
        2,
        path=chain_returning(
            '{"kept": None, "passed": [{y}], "how": "plain"}', '{out}["passed"][0]', tmp_path
        ),
        **states,
    )


@pytest.mark.slow
def test_apply_refuses_a_plan_for_other_ranks() -> None:
    for told in run_ranks(wrong_plan, 2, CHAIN, config(4, **{**MOBIUS, "stages": 8})):
        assert "needs a plan for this model and its ranks" in told
    damaged = {**config(2, **MOBIUS), "plan": {"offload.states": {"spans": [[0, 8]]}}}
    for told in run_ranks(wrong_plan, 2, CHAIN, damaged):
        assert "plan.offload.states.ranks: Field required" in told
    for told in run_ranks(wrong_plan, 2, CHAIN, {**config(2, **MOBIUS), "plan": config(1, **MOBIUS)["plan"]}):
        assert "was made for one rank" in told
