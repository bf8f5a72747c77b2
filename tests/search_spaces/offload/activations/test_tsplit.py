"""TSPLIT: as few tensors are offloaded as the budget needs, each by its own action, large ones part by
part.

Distinguishing test: distinguishing test (`test_tensors_have_their_own_actions` and
`test_large_tensors_are_offloaded_in_parts`): at one budget fewer bytes cross the link than with one action
for all tensors, and with undivided tensors only the smallest budget cannot be met.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.gloo import run_ranks
from support.ranks.sharded_step import sharded_step
from support.suites.sharded_suite import peaks
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.autotune.search.dry_runs import dry_run
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.errors import UsageError
from memtune.memory.ledger import Ledger
from memtune.program.step import Phase, Resource, Step
from memtune.runtime.memory_tiers import HOST, tier
from memtune.search_spaces.offload.activations import _tsplit_plan
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.offload.activations.tsplit import TSplit
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.selective import Selective
from memtune.technique import Target, Technique
from memtune.testing import TechniqueSuite, differences, drift, rewritten, train
from memtune.testing.drift_check import compare, plain_program, recording_of, target_of
from memtune.testing.training import build, config_of, settings_of
from memtune.workload.workload import Workload

WIDE = Path(__file__).parents[3] / "support" / "models" / "tiling" / "language_models.py:wide_mlp"
LARGE = WIDE.with_name("language_models.py:large")
ATTENTION, CONVOLUTIONS = (
    WIDE.with_name(f"wide_attention.py:{name}") for name in ("attention", "convolutions")
)
WHOLE = TSplit(share=0.0, parts=1, min_bytes=64)
PARTS = TSplit(share=0.0, parts=4, min_bytes=64)


def modules_in(step: Step, names: Collection[str]) -> list[int]:
    return [n for n, name in enumerate(step.modules) if name.startswith(tuple(names))]


def down_bytes(step: Step) -> int:
    return int(step.ops.traffic_bytes[step.ops.resource == Resource.DEVICE_TO_HOST].sum())


class TestTSplit(TechniqueSuite):
    technique = TSplit
    models: ClassVar = {
        "wide": WIDE,
        "gpt": ZOO["gpt"],
        "cnn_bn": ZOO["cnn_bn"],
        "attention": ATTENTION,
        "convolutions": CONVOLUTIONS,
    }
    variants = (WHOLE, PARTS, TSplit(share=0.5, parts=8, min_bytes=1024))
    quick = ("wide", "convolutions")
    tolerance = 1e-5  # sums of four to eight parts in float32, over three steps

    @classmethod
    def default(cls) -> Technique:
        return PARTS

    def test_tensors_have_their_own_actions(self) -> None:
        """The mechanism: with one action for all (`copy_out`) at the smallest ratio for the same budget, more
        bytes are copied.
        """
        program, mine = plain_program(WIDE), TSplit(share=0.5, parts=1, min_bytes=64)
        found = rewritten(WIDE, mine)
        alike = [rewritten(WIDE, CopyOut(ratio=each / 20, min_bytes=64)) for each in range(1, 21)]
        smallest = min(down_bytes(each) for each in alike if each.peak_bytes() <= found.peak_bytes())
        assert 0 < down_bytes(found) < smallest
        told = mine.plan(program, target_of(mine)).predicted
        assert told.offloaded_bytes == down_bytes(found)

    def test_large_tensors_are_offloaded_in_parts(self) -> None:
        """The mechanism: with undivided tensors the smallest budget that parts reach cannot be met."""
        program, step = plain_program(WIDE), rewritten(WIDE, PARTS)
        budget = PARTS.plan(program, target_of(PARTS)).predicted.peak_bytes
        assert step.peak_bytes() <= budget < rewritten(WIDE, WHOLE).peak_bytes() * 0.95
        whole = TSplit(budget_bytes=budget, headroom=0.0, parts=1, min_bytes=64)
        assert "no plan stays within" in str(whole.fits(program, target_of(whole)))
        assert (
            TSplit(budget_bytes=budget, headroom=0.0, parts=4, min_bytes=64).fits(program, target_of())
            is None
        )
        plan = PARTS.plan(program, target_of(PARTS))
        assert set(plan.split) > set(plan.again)

    def test_attention_is_recomputed_instead_of_offloaded(self) -> None:
        """The mechanism: recomputation is one of the actions, which here needs less than copies do."""
        program, step = plain_program(ATTENTION), rewritten(ATTENTION, PARTS)
        plan = PARTS.plan(program, target_of(PARTS))
        assert set(plan.again) <= set(plan.by_sample) == {*plan.split}
        assert plan.again
        assert step.peak_bytes() < rewritten(ATTENTION, WHOLE).peak_bytes()
        assert down_bytes(step) < down_bytes(rewritten(ATTENTION, WHOLE))
        inside = np.isin(program.step.ops.module, modules_in(program.step, plan.again))
        forward = inside & (program.step.ops.phase == Phase.FORWARD)
        more = step.ops.flops.sum() - program.step.ops.flops.sum()
        assert more == pytest.approx(program.step.ops.flops[forward].sum(), rel=1e-6)
        assert "of them again in backward" in PARTS.explain(plan)[1]

    def test_convolutions_run_in_parts_of_their_samples(self) -> None:
        """The mechanism: parts of samples meet a budget that undivided tensors do not."""
        program, step = plain_program(CONVOLUTIONS), rewritten(CONVOLUTIONS, PARTS)
        plan = PARTS.plan(program, target_of(PARTS))
        assert 2 in plan.split.values()
        assert set(plan.split) == set(plan.by_sample) > set(plan.again)
        assert step.peak_bytes() < rewritten(CONVOLUTIONS, WHOLE).peak_bytes() * 0.97

    @pytest.mark.drawn(2)
    @pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
    @pytest.mark.parametrize("parts", [1, 8])
    def test_peak_is_within_the_budget_and_a_larger_one_adds_less_time(
        self, share: float, parts: int
    ) -> None:
        program = plain_program(WIDE)
        low, high = rewritten(WIDE, PARTS if parts > 1 else WHOLE).peak_bytes(), program.step.peak_bytes()
        budget = int(low + share * (high - low))
        mine = TSplit(budget_bytes=budget, headroom=0.0, parts=parts, min_bytes=64)
        assert mine.fits(program, target_of(mine)) is None
        step = rewritten(WIDE, mine)
        assert step.peak_bytes() <= budget
        least = TSplit(share=0.0, parts=parts, min_bytes=64)
        least_plan, plan = (each.plan(program, target_of(each)).predicted for each in (least, mine))
        assert plan.added_s <= least_plan.added_s

    @pytest.mark.drawn(1)
    @pytest.mark.parametrize("recompute", [Full(), Selective()], ids=lambda each: each.kind)
    def test_kept_tensors_of_recomputed_blocks_are_offloaded_and_none_is_split(
        self, recompute: Technique
    ) -> None:
        assert drift(WIDE, recompute, PARTS) == ""
        assert not differences(train(WIDE, recompute, PARTS, steps=1), train(WIDE, recompute, steps=1))

    def test_plan_is_exact_to_the_byte_with_sharding(self) -> None:
        target = Target(hardware.detect("cpu"), 2)
        rewriter = Rewriter(recording_of(WIDE), target)
        sharded = {"execution": {"micro_batch": 2}, "sharding": {"states": {"kind": "fsdp"}}}
        before = rewriter.candidate(Choice.from_document(sharded))
        assert isinstance(before, Candidate)
        budget = int(before.program.step.peak_bytes() * 0.85)
        mine = {"kind": "tsplit", "budget_bytes": budget, "headroom": 0.0, "min_bytes": 64}
        after = rewriter.candidate(Choice.from_document({**sharded, "offload": {"activations": mine}}))
        assert isinstance(after, Candidate), after
        assert after.program.step.peak_bytes() <= budget
        step = dry_run(Workload.load(WIDE), after, target)
        assert isinstance(step, Step), step
        assert compare(after.program.step, step) == ""

    def test_fits_refuses_with_a_reason(self) -> None:
        program, cnn = plain_program(WIDE), plain_program(ZOO["cnn_bn"])
        assert "no budget" in str(TSplit().fits(program, target_of()))
        assert "both set the budget" in str(TSplit(share=0.5, budget_bytes=1).fits(program, target_of()))
        assert "as it is" in str(TSplit(budget_bytes=1 << 40).fits(program, target_of()))
        reason = str(TSplit(budget_bytes=1).fits(cnn, target_of()))
        assert "nothing can be split" in reason
        assert "batch_norm" in reason

    def test_plan_says_why_nothing_is_split(self) -> None:
        for path, others, why in ((LARGE, (), "no submodule of the blocks"), (WIDE, (Full(),), "recomputed")):
            program, target = plain_program(path), target_of(*others)
            (line,) = PARTS.unmet(PARTS.plan(program, target))
            assert line.startswith("tsplit splits nothing: ")
            assert why in line
            assert line in PARTS.explain(PARTS.plan(program, target))
            assert WHOLE.unmet(WHOLE.plan(program, target)) == ()
        assert PARTS.unmet(PARTS.plan(plain_program(WIDE), target_of())) == ()

    @pytest.mark.parametrize(
        "plan",
        [
            {},
            {"offloaded": [{}], "blocks": [0], "split": {}, "prefetch": 1},
            {"offloaded": 3},
            {"offloaded": [], "blocks": [0], "split": {}, "prefetch": 1},
        ],
    )
    def test_apply_refuses_a_plan_of_another_model(self, plan: dict[str, object]) -> None:
        _, model, optimizer = build(WIDE)
        settings = settings_of(TSplit(share=0.0))
        with pytest.raises(UsageError) as caught:
            apply(
                model, optimizer, {"settings": settings, "plan": {"offload.activations": plan}}, strict=False
            )
        assert caught.value.code == "MT316"
        assert "forward" not in vars(model.layers[0])


def within(path: str, config: dict[str, Any] | None, budget_bytes: int) -> list[float] | str:
    """Return the losses of five steps on a device of `budget_bytes` besides bytes allocated before, or the
    out-of-memory text.
    """
    ledger = Ledger.open("cpu")
    empty = ledger.live_bytes()
    ledger.close()
    with Ledger.open("cpu", budget_bytes=empty + budget_bytes):
        workload, model, optimizer = build(Path(path))
        tuned = apply(model, optimizer, config or {"settings": {}}, loss=workload.loss, strict=False)
        losses = []
        try:
            for step in range(5):
                torch.manual_seed(step)
                with tier(HOST):
                    batches = [workload.make_batch(2)]
                losses.append(float(tuned.step(batches)))
        except torch.OutOfMemoryError:
            return "out of memory"
        return losses


@pytest.mark.slow
@pytest.mark.parametrize("mine", [WHOLE, PARTS], ids=["whole", "parts"])
def test_real_steps_have_the_predicted_peak_and_fit_where_the_plain_model_does_not(mine: TSplit) -> None:
    config, wanted = config_of(WIDE, mine), rewritten(WIDE, mine).peak_bytes()
    ((_, measured),) = run_ranks(peaks, 0, str(WIDE), {"": config["settings"]}, 1, {"": config["plan"]})[
        0
    ].values()
    assert all(wanted * 0.98 <= each <= wanted * 1.02 for each in measured), (measured, wanted)
    room = int(wanted * 1.02)
    (plain,), (tuned,), (roomy,) = (
        run_ranks(within, 0, str(WIDE), *each) for each in ((None, room), (config, room), (None, 1 << 30))
    )
    assert plain == "out of memory"
    assert tuned == (roomy if mine is WHOLE else pytest.approx(roomy, rel=1e-5))


@pytest.mark.slow
def test_two_sharded_ranks_train_as_the_plain_model_does() -> None:
    wanted = sharded_step(str(WIDE), None)["after"]
    for rank in run_ranks(sharded_step, 2, str(WIDE), PARTS):
        split = rank["audit"]["offload.activations"]
        assert split["modules"] == split["runs_in_parts"] > 0
        assert rank["audit"]["activations"]["moved_bytes"] > 0
        for name, weight in wanted.items():
            assert float((rank["after"][name] - weight).abs().max()) <= 1e-5 * max(
                1.0, float(weight.abs().max())
            )


def test_fits_refuses_too_many_tensors_without_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtune.search_spaces.offload.activations.tsplit._MOST", 3)
    reason = TSplit(kind="tsplit", share=0.5).fits(plain_program(ZOO["gpt"]), target_of())
    assert "is made for up to 3" in str(reason)


def test_fits_refuses_a_budget_below_any_plan_without_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("memtune.search_spaces.offload.activations._tsplit_plan.solve")
    technique = TSplit(kind="tsplit", budget_bytes=1000)
    assert "any needs at least" in str(technique.fits(plain_program(ZOO["gpt"]), target_of(technique)))


def test_fits_prices_actions_once_for_a_budget_below_any_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    _tsplit_plan.solve_tsplit.cache_clear()
    priced = Mock(side_effect=_tsplit_plan.decisions)
    monkeypatch.setattr(_tsplit_plan, "decisions", priced)
    technique = TSplit(kind="tsplit", budget_bytes=1001)
    assert technique.fits(plain_program(ZOO["gpt"]), target_of(technique)) is not None
    assert priced.call_count == 1  # plans of fewer actions free no more
