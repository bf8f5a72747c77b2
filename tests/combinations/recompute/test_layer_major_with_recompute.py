"""Packs of Harmony and stages of Mobius whose blocks are recomputed: bits, every op and byte, links, ranks,
refusals.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import MODELS
from support.suites.block_offload_suite import total
from support.suites.layer_major_suite import CHAIN, in_place, step_under

from memtune.activations.recompute import user_checkpoint
from memtune.api import apply
from memtune.autotune.search.dry_runs import dry_run
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.config.tuned_config import TunedConfig
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.program.step import Phase, Resource, Step, Tier
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces import find
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.offload.states.harmony import Harmony
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.search_spaces.offload.states.mobius import Mobius
from memtune.technique import Reason, Technique
from memtune.testing import differences
from memtune.testing.drift_check import compare, recording_of, target_of
from memtune.testing.training import build, settings_of, train_under
from memtune.workload.workload import Workload

PAIRS = Harmony(kind="harmony", backward=2)
UNEVEN = Harmony(kind="harmony", backward=2, forward=3, packing="greedy", boundaries="host", prefetch=True)
GROUPS = Harmony(kind="harmony", backward=2, group=2)
WHOLE = Harmony(kind="harmony", backward=6)
LAYERS = L2L(kind="l2l", order="layer_major")
STAGES = Mobius(kind="mobius", stages=3)
LAYER_MAJOR = Mobius(kind="mobius", stages=4)
PIPELINE = Harmony(kind="harmony", parallelism="pipeline", backward=2)
MICRO_BATCHES = 3
ON_RANKS = MODELS / "chain.py"
"""Models whose blocks return one tensor, which can be sent."""


def recompute(kind: str, **knobs: Any) -> Technique:
    return find("recompute", kind)(kind=kind, **knobs)


FULL, SELECTIVE, EVERY_NTH = recompute("full"), recompute("selective"), recompute("every_nth", n=2)
BY_BLOCK = (FULL, SELECTIVE, EVERY_NTH, recompute("attention_output"), recompute("balanced"))
ALL = [(packs, again) for packs in (PAIRS, UNEVEN, GROUPS, WHOLE, STAGES, LAYERS) for again in BY_BLOCK]
QUICK = [(STAGES, FULL), (PAIRS, SELECTIVE)]


def named(each: Any) -> str:
    return str(each.kind)


def rewritten(
    packs: Technique, *others: Technique, ranks: int = 1, budget: int | None = None
) -> Candidate | Reason:
    techniques = {each.slot: each for each in (packs, *others)}
    target = replace(target_of(packs, *others), ranks=ranks, budget_bytes=budget)
    return Rewriter(recording_of(model_for(ranks)), target).candidate(
        Choice.of(Execution(micro_batch=2, accumulate=MICRO_BATCHES), techniques)
    )


def model_for(ranks: int) -> Path:
    return CHAIN if ranks == 1 else ON_RANKS


@cache
def planned(packs: Technique, *others: Technique, ranks: int = 1) -> Candidate:
    found = rewritten(packs, *others, ranks=ranks)
    assert isinstance(found, Candidate), found
    return found


def config(packs: Technique, *others: Technique, ranks: int = 1) -> dict[str, Any]:
    found = planned(packs, *others, ranks=ranks)
    return TunedConfig(settings=found.choice, plan=dict(found.plans)).document()


def check_bits(packs: Technique, again: Technique) -> None:
    """Raise AssertionError if three steps differ in a bit from one micro-batch after the other without
    recompute.
    """
    run = train_under(CHAIN, config(packs, again), steps=3, micro_batches=MICRO_BATCHES)
    run.gradients.clear()
    assert not differences(run, in_place(MICRO_BATCHES, 3))


def check_ops(packs: Technique, again: Technique, ranks: int = 1) -> None:
    """Raise AssertionError if the pass has another op, or another byte on a tier at an op, than the
    runtime.
    """
    candidate = planned(packs, again, ranks=ranks)
    real = dry_run(Workload.load(model_for(ranks)), candidate, replace(target_of(packs, again), ranks=ranks))
    assert isinstance(real, Step), real
    assert not compare(candidate.program.step, real)


@pytest.mark.usefixtures("one_thread")
class TestOneRank:
    @pytest.mark.parametrize(("packs", "again"), QUICK, ids=named)
    def test_layer_major_with_recompute_is_bitwise_and_runs_the_predicted_ops(
        self, packs: Technique, again: Technique
    ) -> None:
        check_bits(packs, again)
        check_ops(packs, again)

    @pytest.mark.slow
    @pytest.mark.parametrize(("packs", "again"), [each for each in ALL if each not in QUICK], ids=named)
    def test_techniques_are_exact_under_layer_major_order(self, packs: Technique, again: Technique) -> None:
        check_bits(packs, again)
        check_ops(packs, again)

    def test_links_carry_what_they_do_without(self) -> None:
        for packs in (PAIRS, UNEVEN, STAGES):
            for again in BY_BLOCK:
                for link in (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST):
                    assert total(planned(packs, again).program.step, link) == total(
                        planned(packs).program.step, link
                    )

    @pytest.mark.native_ledger
    @pytest.mark.parametrize("again", [FULL], ids=named)
    def test_recompute_meets_budget_that_packs_alone_exceed(self, again: Technique) -> None:
        """The purpose of recompute here: peak as predicted, bytes on links as counted, gradients clipped,
        nothing leaked.
        """
        candidate = planned(PAIRS, again)
        step, alone = candidate.program.step, planned(PAIRS).program.step.peak_bytes()
        predicted = step.peak_bytes()
        assert predicted < 0.95 * alone
        gc.collect()
        empty = Ledger.open("cpu").live_bytes()
        workload, model, optimizer = build(CHAIN)
        tuned = apply(model, optimizer, config(PAIRS, again), loss=workload.loss, strict=False)
        gc.collect()
        with Ledger.open("cpu", budget_bytes=empty + (predicted + alone) // 2) as ledger:
            seen = [step_under(workload, tuned, ledger, MICRO_BATCHES) for _ in range(4)]
            COUNTERS.take()
            step_under(workload, tuned, ledger, MICRO_BATCHES)
        counted = COUNTERS.take()
        assert max(peak for peak, *_ in seen[2:]) - empty == pytest.approx(predicted, rel=0.02)
        assert seen[2][1:] == seen[3][1:]
        assert counted["host_to_device"] == total(step, Resource.HOST_TO_DEVICE)
        assert counted["device_to_host"] == total(step, Resource.DEVICE_TO_HOST)

    def test_blocks_of_a_forward_pack_claim_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The mechanism: without it, inputs of recomputed blocks are held until the pack has run forward."""
        again = planned(WHOLE, FULL).program.step
        recomputed = (again.ops.phase == Phase.RECOMPUTE) & (again.ops.call >= 0)
        assert recomputed.any()
        workload, model, optimizer = build(CHAIN)
        tuned = apply(model, optimizer, config(PAIRS, FULL), loss=workload.loss, strict=False)
        table, begun = tuned._context.activations, list[int]()
        monkeypatch.setattr(
            type(table), "_call_ends", lambda self, region, number: begun.append(region.index)
        )
        tuned.step([workload.make_batch(2) for _ in range(MICRO_BATCHES)])
        assert sorted(begun) == sorted(
            [*range(6)] * MICRO_BATCHES
        )  # once each: in the turn, or in a backward pack
        monkeypatch.setattr(user_checkpoint, "_OTHERS", ("torch.utils.checkpoint",))
        begun.clear()
        tuned.step([workload.make_batch(2) for _ in range(MICRO_BATCHES)])
        assert len(begun) > 6 * MICRO_BATCHES

    def test_recompute_allows_fewer_packs_within_a_budget(self) -> None:
        """A pack's blocks save less, so packs may be larger, and what the last one holds is not offloaded."""
        free = Harmony(kind="harmony")
        budget = planned(Harmony(kind="harmony", backward=3), FULL).program.step.peak_bytes()
        plain, again = rewritten(free, budget=budget), rewritten(free, FULL, budget=budget)
        assert isinstance(plain, Candidate)
        assert isinstance(again, Candidate)
        moved = [each.plans["offload.states"].swapped_bytes for each in (plain, again)]
        assert again.program.step.peak_bytes() <= budget
        assert moved[1] < moved[0]

    @pytest.mark.parametrize(
        ("other", "why"),
        [
            (recompute("dtr", ratio=0.6, online=True), "at its own calls only"),
            (recompute("attention_boundary"), "do not hold for packs"),
            (recompute("planned", share=0.5), "do not hold for packs"),
            (find("offload.activations", "copy_out")(kind="copy_out", min_bytes=0), "used at once"),
        ],
        ids=lambda each: getattr(each, "kind", ""),
    )
    @pytest.mark.parametrize("packs", [PAIRS, STAGES], ids=named)
    def test_fits_and_apply_refuse_other_techniques_by_name(
        self, packs: Technique, other: Technique, why: str
    ) -> None:
        """By `fits`, and by `apply` of a config that names them anyway."""
        assert why in str(rewritten(packs, other))
        alone = rewritten(recompute("none"), other)
        assert isinstance(alone, Candidate)
        plans = planned(packs).plans | alone.plans
        document = {
            "settings": settings_of(packs, other),
            "plan": {slot: plan.document() for slot, plan in plans.items()},
        }
        workload, model, optimizer = build(CHAIN)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ApplyError, match=why):
            apply(model, optimizer, document, loss=workload.loss, strict=False)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- on ranks ------------------------------------------------------------------------------------------------


def on_rank(documents: list[dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Return losses, weights, counted bytes and peaks of three steps of each of `documents`; one rank alone
    takes all samples.
    """
    torch.set_num_threads(1)
    return [_trained(document, ranks) for document in documents]


def _trained(document: dict[str, Any], ranks: int) -> dict[str, Any]:
    gc.collect()
    ledger = Ledger.open("cpu") if cpu_allocator.available() is None else None
    empty = (ledger.live_bytes(), ledger.live_bytes(HOST)) if ledger else (0, 0)
    workload, model, optimizer = build(ON_RANKS)
    tuned = apply(model, optimizer, document, loss=workload.loss, strict=False)
    rank, losses, peaks = dist.get_rank() if dist.is_initialized() else 0, [], (0, 0)
    for step in range(3):
        torch.manual_seed(step)
        with tier(HOST):
            batches = [workload.make_batch(2) for _ in range(ranks * MICRO_BATCHES)]
        mine = batches[rank * MICRO_BATCHES :][:MICRO_BATCHES]
        del batches
        if ledger:
            ledger.reset_peak()
        COUNTERS.take()
        losses.append(float(tuned.step(mine)))
        if ledger:
            peaks = ledger.peak_allocated_bytes() - empty[0], ledger.peak_allocated_bytes(HOST) - empty[1]
    counted = COUNTERS.take()
    weights = {name: value.clone() for name, value in tuned.state_dict()["model"].items()}
    return {"losses": losses, "weights": weights, "counted": counted, "peaks": peaks}


def check_on_ranks(packs: Technique, ways: tuple[Technique, ...]) -> None:
    """Raise AssertionError if a bit differs from a run without recompute, or bytes or a peak from the
    prediction.
    """
    found = [planned(packs, ranks=2), *(planned(packs, each, ranks=2) for each in ways)]
    documents = [config(packs, ranks=2), *(config(packs, each, ranks=2) for each in ways)]
    for plain, *others in run_ranks(on_rank, 2, documents, 2, deadline_s=250):
        others_batches = _beyond(found[0], plain)
        for candidate, run in zip(found[1:], others, strict=True):
            assert run["losses"] == plain["losses"]
            assert all(torch.equal(value, plain["weights"][name]) for name, value in run["weights"].items())
            assert _beyond(candidate, run) == others_batches
            if cpu_allocator.available() is None:
                step = _its_step(candidate, run)
                assert run["peaks"][0] == pytest.approx(step.peak_bytes(), rel=0.02)
                host = step.peak_bytes(Tier.HOST)
                assert run["peaks"][1] == pytest.approx(host, rel=0.02)


def _its_step(candidate: Candidate, run: dict[str, Any]) -> Step:
    """Return the step of the rank of `run`."""
    down = run["counted"]["device_to_host"]
    steps = [each.step for each in candidate.program.rank_classes]
    return min(
        steps,
        key=lambda step: (
            total(step, Resource.DEVICE_TO_HOST) != down,
            abs(step.peak_bytes() - run["peaks"][0]),
        ),
    )


def _beyond(candidate: Candidate, run: dict[str, Any]) -> tuple[int, int]:
    """Return predicted D2H and H2D bytes that were not counted: uploads of other ranks' results are not this
    rank's.
    """
    step, counted = _its_step(candidate, run), run["counted"]
    up, down = total(step, Resource.HOST_TO_DEVICE), total(step, Resource.DEVICE_TO_HOST)
    return up - counted["host_to_device"], down - counted["device_to_host"]


@pytest.mark.slow
@pytest.mark.parametrize("packs", [LAYER_MAJOR, PIPELINE, PAIRS], ids=["mobius", "pipeline", "data"])
def test_techniques_are_exact_on_two_ranks(packs: Technique) -> None:
    """Each rank has its own samples."""
    check_on_ranks(packs, (FULL, SELECTIVE, EVERY_NTH))


@pytest.mark.slow
def test_pass_equals_the_step_of_a_rank() -> None:
    check_ops(PAIRS, SELECTIVE, ranks=2)


def test_stages_on_ranks_need_less() -> None:
    for packs in (LAYER_MAJOR, PIPELINE):
        peaks = [
            max(step.step.peak_bytes() for step in planned(*each, ranks=2).program.rank_classes)
            for each in ((packs, FULL), (packs,))
        ]
        assert peaks[0] < 0.9 * peaks[1]
