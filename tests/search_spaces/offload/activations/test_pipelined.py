"""Activations offloaded in the slots of a pipeline: copies, resident bytes of each stage, and unchanged
training.

Distinguishing test: distinguishing test (`test_copies_keep_to_the_slots_of_the_schedule`): every tensor is on
the host a slot after its forward and reloaded in the slot before its backward, each stage sends m·r·A, and
the peak is the formula's; without slots it is not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fixed_cpu import CPU, NO_HOST_COSTS
from hypothesis import given, strategies as st
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import MODELS, SIZE, rewriter, settings
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.activations.offload.pipeline_slots import Slots
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Candidate, Choice
from memtune.errors import UsageError
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.program.pipeline_order import StageAction, slots_between, stage_actions
from memtune.program.step import Kind, Program, Step, Tier
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.activations import _block_shares, _pipeline_ratio
from memtune.search_spaces.offload.activations.pipelined import Pipelined
from memtune.search_spaces.recompute.full import Full
from memtune.technique import Technique
from memtune.testing import TechniqueSuite, differences, drift, rewritten, train
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import build, plain

CHAIN = MODELS / "chain.py"
ALL, HALF = Pipelined(ratio=1.0, min_bytes=0), Pipelined(ratio=0.5, min_bytes=0)
STEPS = 3


class TestPipelined(TechniqueSuite):
    """Without a pipeline: slots are layers."""

    technique = Pipelined
    models: ClassVar = {name: ZOO[name] for name in ("tied", "gpt", "lstm", "inplace_views")}
    quick = ("tied",)
    variants = (ALL, HALF)

    @classmethod
    def default(cls) -> Technique:
        return HALF

    @pytest.mark.drawn(1)
    @pytest.mark.parametrize("model", ZOO)
    def test_composes_with_recompute(self, model: str) -> None:
        assert drift(ZOO[model], Full(kind="full"), HALF) == ""

    def test_trains_with_recompute(self) -> None:
        assert not differences(train(ZOO["gpt"], Full(kind="full"), HALF), plain(ZOO["gpt"]))

    def test_plan_has_the_smallest_ratio_within_the_budget(self) -> None:
        """Equal to a search through all eighths."""
        program = plain_program(ZOO["gpt"])
        peaks = [rewritten(ZOO["gpt"]).peak_bytes()]
        peaks += [
            rewritten(ZOO["gpt"], Pipelined(ratio=n / 8, min_bytes=0)).peak_bytes() for n in range(1, 9)
        ]
        for budget in sorted({(min(peaks) + each) // 2 for each in peaks}):
            found = Pipelined(budget_bytes=budget, min_bytes=0).plan(program, target_of(ALL)).document()
            wanted = next(n for n, peak in enumerate(peaks) if peak <= budget)
            assert found["ratios"] == [wanted / 8]
            assert found["predicted"]["peak_bytes"] == peaks[wanted]

    def test_fits_refuses_with_a_reason(self) -> None:
        program, target = plain_program(ZOO["gpt"]), target_of(ALL)
        assert "no budget to plan for" in str(Pipelined(min_bytes=0).fits(program, target))
        assert "everything fits" in str(Pipelined(budget_bytes=1 << 40, min_bytes=0).fits(program, target))
        assert "no ratio stays within" in str(Pipelined(budget_bytes=1, min_bytes=0).fits(program, target))
        assert "1048576" in str(Pipelined(ratio=1.0).fits(program, target))

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            ({}, "needs a plan"),
            ({"ratios": [2.0], "shares": [[[0.5, 4]]]}, r"ratios\.0: expected less than or equal to 1"),
            ({"ratios": [0.5], "shares": [[[1.5, 4]]]}, r"shares\.0\.0\.0: expected less than or equal to 1"),
            ({"ratios": [0.5], "shares": [[[0.5, 3]]]}, "needs a plan"),
            ({"ratios": [0.5, 0.5], "shares": [[[0.5, 4]], [[0.5, 4]]]}, "needs a plan"),
        ],
    )
    def test_apply_refuses_a_config_without_a_plan_of_this_model(
        self, plan: dict[str, Any], message: str
    ) -> None:
        workload, model, optimizer = build(ZOO["gpt"])
        plan = plan and {**plan, "prefetch": 1, "predicted": {"offloaded_bytes": [1]}}
        document = {
            "settings": {"offload": {"activations": {"kind": "pipelined"}}},
            "plan": {"offload.activations": plan},
        }
        with pytest.raises(UsageError, match=message):
            apply(model, optimizer, document, loss=workload.loss, strict=False)


@pytest.mark.parametrize(
    ("ratio", "parts"), [(0.25, [34, 33, 33, 0]), (0.75, [100] * 3 + [0]), (1.0, [100] * 4)]
)
def test_blocks_have_equal_shares_without_a_pipeline(ratio: float, parts: list[int]) -> None:
    assert _block_shares.spread_bytes(ratio, [100] * 4) == parts
    assert _block_shares.spread_bytes(ratio, [100]) == [100 * ratio]


@pytest.mark.parametrize("how", [_block_shares.leading_bytes, _block_shares.spread_bytes])
@given(sizes=st.lists(st.integers(0, 10**12), min_size=1, max_size=9), ratio=st.floats(0, 1))
def test_shares_give_the_ratio_to_the_byte(how: Any, sizes: list[int], ratio: float) -> None:
    parts = how(ratio, sizes)
    assert sum(parts) == round(ratio * sum(sizes))
    assert all(0 <= part <= size for part, size in zip(parts, sizes, strict=True))
    assert [round(part / size * size) for part, size in zip(parts, sizes, strict=True) if size] == [
        part for part, size in zip(parts, sizes, strict=True) if size
    ]


def test_equal_shares_expose_less_than_undivided_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies of three tenths of a step, less is exposed if all blocks but the last share them than if
    the first blocks send all.
    """
    program, here = (
        plain_program(ZOO["gpt"]),
        replace(CPU, device="cuda", launch_s=0.0, hook_s=0.0, **NO_HOST_COSTS),
    )
    plain_s = simulate(program, here, level="events").step_s

    def lost() -> float:
        shares = _pipeline_ratio.shares(program, [0.5], 0)
        n_bytes = _pipeline_ratio.bytes_by_stage(program, shares, 0)[0]
        link = {
            f"{way}_bytes_per_s": n_bytes / (0.3 * plain_s) for way in ("host_to_device", "device_to_host")
        }
        return (
            simulate(
                _pipeline_ratio.offloaded(
                    program, shares, 0, _pipeline_ratio.most_tensors_of_a_block(program.step, 0)
                ),
                replace(here, **link),
                level="events",
            ).step_s
            / plain_s
            - 1
        )

    alike = lost()
    monkeypatch.setattr(_pipeline_ratio, "spread_bytes", _block_shares.leading_bytes)
    assert alike < 0.8 * lost()


# -- what the pass says of the stages of a pipeline ----------------------------------------------------------


@cache
def found(
    ranks: int,
    accumulate: int = 2,
    other_slots: str = "none",
    knobs: tuple[tuple[str, Any], ...] = (),
    **moves: Any,
) -> Any:
    moving = {"offload": {"activations": dict(moves)}} if moves else {}
    document = {
        **settings("pipeline", accumulate=accumulate, **dict(knobs)),
        "recompute": {"kind": other_slots},
        **moving,
    }
    return document, rewriter(CHAIN, ranks).candidate(Choice.from_document(document))


def candidate(ranks: int, **how: Any) -> Candidate:
    made = found(ranks, **how)[1]
    assert isinstance(made, Candidate), made
    return made


def config(ranks: int, **how: Any) -> dict[str, Any]:
    plans = candidate(ranks, **how).plans
    return {
        "settings": found(ranks, **how)[0],
        "plan": {slot: plan.document() for slot, plan in plans.items()},
    }


PIPELINED: dict[str, Any] = {"kind": "pipelined", "min_bytes": 0}


def activation_bytes(step: Step, blocks: range) -> int:
    """Return A: the saved bytes of a stage's blocks for one micro-batch."""
    made = np.where(step.storages.producer >= 0, step.ops.block[step.storages.producer], -1)
    rows = (
        np.isin(step.saves.block, blocks)
        & np.isin(made[step.saves.storage], blocks)
        & (step.storages.kind[step.saves.storage] != Kind.PARAMETER)
    )
    storages = np.unique(step.saves.storage[rows])
    return int(step.storages.bytes[storages].sum())


def test_device_bytes_follow_the_formula() -> None:
    """(1 - r)·(p - i)·A + 2·r·A: of p - i micro-batches two have their offloaded part on the device; r·A to
    the byte.

    While part of a tensor is in flight, its rest is allocated twice.
    """
    step = rewriter(CHAIN, 4).recording.at(SIZE)
    plainly = candidate(4).program
    for ratio in (0.3, 0.5, 1.0):
        made = candidate(4, ratio=ratio, **PIPELINED)
        a_bytes = activation_bytes(step, range(2))
        moved, *others = made.plans["offload.activations"].predicted.offloaded_bytes
        assert moved == round(ratio * a_bytes)
        assert others[1:] == [0, 0]  # nothing waits for two slots on the last two stages
        assert made.program.step.peak_bytes() == plainly.step.peak_bytes() - (4 - 2) * moved + rest_bytes(
            made.program.step
        )


def test_peak_is_affine_in_the_ratio() -> None:
    """The paper's figure: R² of at least 0.99, and a slope within 5 % of the counted bytes."""
    ratios, without = np.arange(9) / 8, candidate(4).program.step
    offloads = [candidate(4, ratio=ratio, **PIPELINED) for ratio in ratios[1:]]
    peaks = [without.peak_bytes(), *(each.program.step.peak_bytes() for each in offloads)]
    slope, _ = np.polyfit(ratios, peaks, 1)
    # Of the first rank's four micro-batches two have their offloaded part on the device.
    counted = (4 - 2) * offloads[-1].plans["offload.activations"].predicted.offloaded_bytes[0]
    assert np.corrcoef(ratios, peaks)[0, 1] ** 2 >= 0.99
    assert -slope == pytest.approx(counted, rel=0.05)


def test_peak_without_a_pipeline_falls_by_the_offloaded_bytes() -> None:
    """Until only the blocks around the copies hold their tensors."""
    peaks = [
        rewritten(ZOO["gpt"], *moves, micro_batch=16).peak_bytes()
        for moves in ([], *([Pipelined(ratio=n / 8, min_bytes=0)] for n in (1, 2, 3)))
    ]
    plan = Pipelined(ratio=1 / 8, min_bytes=0).plan(plain_program(ZOO["gpt"], 16), target_of(ALL))
    (moved,) = plan.predicted.offloaded_bytes
    assert -np.diff(peaks) == pytest.approx(moved, rel=0.05)


def rest_bytes(step: Step) -> int:
    """Return the bytes of the resident rest of cut tensors; the first rank cuts at most one tensor of a
    micro-batch.
    """
    cut_copy = (
        step.names.index("memtune.to_device_with_tail.default")
        if "memtune.to_device_with_tail.default" in step.names
        else -1
    )
    cut = np.isin(step.uses.op, np.flatnonzero(step.ops.name == cut_copy)) & (
        step.storages.tier[step.uses.storage] == Tier.DEVICE
    )
    return int(step.storages.bytes[step.uses.storage[cut]].max(initial=0))


def test_ranks_have_the_smallest_ratio_that_fits() -> None:
    """Equal to trying all ratios; the first rank holds more micro-batches than the second, so it offloads
    more.
    """
    peaks = [by_rank(candidate(4).program)]
    peaks += [by_rank(candidate(4, ratio=n / 8, **PIPELINED).program) for n in range(1, 9)]
    for budget in (peaks[8][0], (peaks[0][0] + peaks[8][0]) // 2, peaks[0][1]):
        made = candidate(4, budget_bytes=budget, **PIPELINED)
        ratios = list(made.plans["offload.activations"].ratios)
        assert ratios == [
            *(next(n for n in range(9) if peaks[n][rank] <= budget) / 8 for rank in (0, 1)),
            0,
            0,
        ]
        assert ratios[0] > ratios[1]
        assert made.program.step.peak_bytes() <= budget
    assert "no ratio stays within" in str(found(4, budget_bytes=peaks[8][0] - 1, **PIPELINED)[1])


def by_rank(program: Program) -> list[int]:
    """Return peaks in the order of the ranks, given that equal stages hold more the earlier they are."""
    return sorted(
        (each.step.peak_bytes() for each in program.rank_classes for _ in range(each.count)), reverse=True
    )


def test_fits_refuses_pipelines_without_slots() -> None:
    pair = ("degree", 2)
    assert "no micro-batch waits for two slots" in str(found(4, ratio=1.0, knobs=(pair,), **PIPELINED)[1])
    interleaved = pair, ("schedule", "interleaved_1f1b")
    assert isinstance(found(4, ratio=1.0, knobs=interleaved, **PIPELINED)[1], Candidate)
    on_ssd = str(found(4, kind="copy_out", min_bytes=0, target="ssd")[1])
    assert "not built" in on_ssd or "no directory" in on_ssd
    assert "planned for a rank that has all blocks" in str(found(4, kind="tsplit", share=0.5)[1])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("micro_batches", [1, 2, 6, 12])
def test_least_wait_of_a_micro_batch_follows_1f1b(ranks: int, micro_batches: int) -> None:
    """The one that waits least has p - i - 1 others between its forward and its backward."""
    for rank in range(ranks):
        between = slots_between(stage_actions("1f1b", rank, ranks, 1, micro_batches))
        assert between == {rank: min(ranks - rank, micro_batches) - 1}
    program = candidate(4).program
    assert program.stages is None  # put into stages


def test_copies_are_exposed_above_a_forward_and_a_backward_of_time() -> None:
    """The pipeline waits for copies as soon as r·A is more than the link moves in t_F + t_B, and hardly
    before that.
    """
    base, moves = candidate(4, accumulate=4).program, candidate(4, accumulate=4, ratio=1.0, **PIPELINED)
    # on a CPU copies need the cores that compute; and messages between stages are to take no time
    here = replace(
        hardware.find("h100-80g"),
        launch_s=0.0,
        hook_s=0.0,
        **NO_HOST_COSTS,
        intra_link_bytes_per_s=1e15,
        intra_link_latency_s=0.0,
        tf32_flops_per_s=1e9,
        fp32_flops_per_s=1e9,
        link_slowdown=0.0,
    )
    n_bytes = moves.plans["offload.activations"].predicted.offloaded_bytes[0]
    plain_s = simulate(base, here, level="events").step_s
    slots_s = simulate(base, here).busy_s["compute"] / base.unrolled / base.accumulate

    def slower(share: float) -> float:
        link = {
            f"{way}_bytes_per_s": n_bytes / (slots_s * share) for way in ("host_to_device", "device_to_host")
        }
        return simulate(moves.program, replace(here, **link), level="events").step_s / plain_s

    assert slower(0.25) < 1.05
    assert slower(4.0) > 1.5


# -- on gloo ranks -------------------------------------------------------------------------------------------


def _reload_at_first_use(self: Slots, action: StageAction) -> None:
    self._now, self._slot = action, self._slot + 1


def _keep_in_flight(self: Slots) -> None:
    return None


DEFECTS: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "reloads at first use": lambda: patch.object(Slots, "begins", _reload_at_first_use),
    "keeps sources": lambda: patch.object(Slots, "ends", _keep_in_flight),
}


def trained(config: dict[str, Any], accumulate: int) -> dict[str, Any]:
    """Return losses, weights and state of a few steps, and peak, bytes and trace of the last one."""
    gc.collect()
    ledger = Ledger.open("cpu") if cpu_allocator.available() is None else None
    empty = ledger.live_bytes() if ledger else 0
    workload, model, optimizer = build(CHAIN)
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    losses, peak = [], 0
    for step in range(STEPS):
        with tier(HOST):
            torch.manual_seed(100 * step + dist.get_rank())
            batches = [workload.make_batch(SIZE) for _ in range(accumulate)]
        if ledger:
            ledger.reset_peak()
        COUNTERS.take()
        losses.append(float(tuned.step(batches)))
        peak = ledger.peak_allocated_bytes() - empty if ledger else 0
    slots, moved = tuned._context.activations.slots, COUNTERS.take()
    state = tuned.state_dict()
    gc.collect()
    return {
        "losses": losses,
        "peak": peak,
        "moved": moved,
        "trace": slots.trace if slots else [],
        "model": state["model"],
        "optimizer": state["optimizer"]["state"],
        "audit": tuned.audit(),
    }


def both(
    plainly: dict[str, Any], config: dict[str, Any], accumulate: int, defect: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    torch.set_num_threads(1)
    wanted = trained(plainly, accumulate)
    with DEFECTS[defect]():
        return wanted, trained(config, accumulate)


def check(ranks: int, defect: str = "", accumulate: int = 2, **how: Any) -> None:
    """Check that training is bitwise that of the pipeline alone, with predicted peaks, bytes by formula,
    copies in slots.
    """
    other = {name: value for name, value in how.items() if name in ("other_slots", "knobs")}
    arguments = (
        config(ranks, accumulate=accumulate, **other),
        config(ranks, accumulate=accumulate, **how),
        accumulate,
        defect,
    )
    runs = run_ranks(both, ranks, *arguments, deadline_s=200)
    made = candidate(ranks, accumulate=accumulate, **how)
    told = made.plans["offload.activations"].predicted.offloaded_bytes if how["kind"] == "pipelined" else None
    knobs = dict(how.get("knobs", ()))
    for rank, (wanted, got) in enumerate(runs):
        for what in ("losses", "model", "optimizer"):
            torch.testing.assert_close(got[what], wanted[what], rtol=0, atol=0)
        if told is not None:
            uploads = wanted["moved"].get("host_to_device", 0)
            sent = accumulate * ranks * sum(told[rank::ranks])
            assert (
                got["moved"].get("device_to_host", 0)
                == got["moved"].get("host_to_device", 0) - uploads
                == sent
            )
            per_rank = len(told) // ranks
            actions = stage_actions(knobs.get("schedule", "1f1b"), rank, ranks, per_rank, accumulate * ranks)
            assert_in_slots(
                got["trace"], actions, {stage: told[stage] for stage in range(rank, len(told), ranks)}
            )
    if cpu_allocator.available() is None:
        peaks = sorted(got["peak"] for _, got in runs)
        steps = [each.step for each in made.program.rank_classes]
        assert peaks[-1] == pytest.approx(steps[0].peak_bytes(), rel=0.02)
        for step in steps:
            assert any(peak == pytest.approx(step.peak_bytes(), rel=0.02) for peak in peaks), (
                step.peak_bytes(),
                peaks,
            )


def assert_in_slots(trace: list[Any], actions: list[StageAction], n_bytes: dict[int, int]) -> None:
    """Assert that copies start in the forward's slot, end a slot later, and reload in the slot before the
    backward.
    """
    at = {action: n for n, action in enumerate(actions)}
    seen: dict[tuple[int, int, str], int] = {}
    for each in trace:
        forward, backward = (at[StageAction(each.stage, each.micro_batch, way)] for way in (False, True))
        wanted = {"leaves": (forward,), "arrived": (forward, forward + 1), "comes": (backward - 1,)}[
            each.what
        ]
        assert each.slot in wanted, each
        key = each.stage, each.micro_batch, each.what
        seen[key] = seen.get(key, 0) + each.n_bytes
    moving = [action for action in actions if n_bytes[action.stage] and not action.backward]
    wanted_bytes = {
        (a.stage, a.micro_batch, what): n_bytes[a.stage]
        for a in moving
        for what in ("leaves", "arrived", "comes")
    }
    assert seen == wanted_bytes


def test_copies_keep_to_the_slots_of_the_schedule() -> None:
    """The mechanism: event order by slots, bytes and peaks; `test_slots_fail_without_their_mechanism`
    switches it off.
    """
    check(4, ratio=1.0, **PIPELINED)


@pytest.mark.slow
@pytest.mark.parametrize("defect", [each for each in DEFECTS if each])
def test_slots_fail_without_their_mechanism(defect: str) -> None:
    with pytest.raises(AssertionError):
        check(3, defect, ratio=1.0, **PIPELINED)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("other_slots", ["none", "full", "selective"])
@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_slots_of_four_stages(ratio: float, other_slots: str, accumulate: int) -> None:
    check(4, accumulate=accumulate, other_slots=other_slots, ratio=ratio, **PIPELINED)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "gpipe"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_slots_of_other_schedules(ranks: int, schedule: str) -> None:
    check(ranks, knobs=(("schedule", schedule),), ratio=1.0, **PIPELINED)


@pytest.mark.slow
@pytest.mark.parametrize("other_slots", ["none", "full", "selective"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "gpipe"])
def test_copy_out_on_the_stages_of_a_pipeline(schedule: str, other_slots: str) -> None:
    check(
        2, knobs=(("schedule", schedule),), other_slots=other_slots, kind="copy_out", ratio=0.75, min_bytes=0
    )


@pytest.mark.slow
def test_training_within_a_budget_that_the_pipeline_alone_exceeds() -> None:
    budget = (
        candidate(4).program.step.peak_bytes()
        + candidate(4, ratio=1.0, **PIPELINED).program.step.peak_bytes()
    ) // 2
    check(4, budget_bytes=budget, **PIPELINED)
