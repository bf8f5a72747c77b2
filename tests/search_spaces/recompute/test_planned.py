"""Each saved tensor kept or recomputed, so that an exact byte budget is met in the least time.

Distinguishing test: the measured peak is the planned one, within the budget and at most one tensor below it;
no other recompute technique is faster at the same peak.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fixed_cpu import CPU, NO_HOST_COSTS
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.autotune.record.recording_session import Trace, start_session
from memtune.autotune.search.dry_runs import traced_under
from memtune.config.tuned_config import Settings, TunedConfig
from memtune.errors import ApplyError
from memtune.hardware.mechanism_costs import defaults
from memtune.hardware.roofline import op_costs
from memtune.program.op_addresses import OpAddresses
from memtune.program.step import Program, Resource, Step
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.recompute._block_planner.budget import Solution, _solve_budget, solve_budget
from memtune.search_spaces.recompute._block_planner.measured_options import (
    apply_options as measured_rewrite,
    levels,
)
from memtune.search_spaces.recompute.attention_output import AttentionOutput
from memtune.search_spaces.recompute.balanced import Balanced
from memtune.search_spaces.recompute.checkmate import Checkmate
from memtune.search_spaces.recompute.coop import Coop
from memtune.search_spaces.recompute.dtr import Dtr
from memtune.search_spaces.recompute.every_nth import EveryNth
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.megtaichi import Megtaichi
from memtune.search_spaces.recompute.planned import Planned
from memtune.search_spaces.recompute.selective import Selective
from memtune.technique import NO_PLAN, Reason, Target, Technique
from memtune.testing import TechniqueSuite, drift
from memtune.testing.drift_check import (
    compare,
    fresh_program,
    plain_program,
    recording_of,
    target_of as costly_target_of,
)
from memtune.testing.training import build, config_of, settings_of
from memtune.units import format_bytes
from memtune.workload.workload import Workload

OTHERS = (
    Full(),
    EveryNth(),
    EveryNth(n=3),
    Selective(),
    Selective(scope="core_attention"),
    Balanced(),
    AttentionOutput(),
)


class TestPlanned(TechniqueSuite):
    technique = Planned
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "hf_llama", "cnn_bn", "lora")}
    variants = (
        Planned(share=0.3, by_schedule=False),
        Planned(share=0.0, offload=False, by_schedule=False),
        Planned(share=0.2, by_schedule=True),
        Planned(share=0.3),
    )
    quick = ("cnn_bn",)  # on an accelerator too the peak is one of activations, not the optimizer's

    @classmethod
    def default(cls) -> Planned:
        return Planned(share=0.5, by_schedule=False)

    @pytest.mark.parametrize("model", ["gpt", "hf_llama", "lora", "cnn_bn"])
    def test_plan_meets_and_uses_up_the_budget(self, model: str) -> None:
        program = plain_program(self.models[model])
        ends = self.solved(program, Planned(share=0.0)), self.solved(program, Planned(share=1.0))
        low, high = ends[0].peak_bytes, ends[1].peak_bytes
        assert low < high == program.step.peak_bytes()
        before = None
        for budget in range(low, high + 1, max((high - low) // 5, 1)):
            found = self.solved(program, Planned(budget_bytes=budget, headroom=0.0))
            step = rewritten_by(program, Planned(budget_bytes=budget, headroom=0.0))
            assert step.peak_bytes() == found.peak_bytes <= budget
            if before is not None:
                assert found.seconds <= before.seconds
                assert found.peak_bytes >= before.peak_bytes
            before = found

    @pytest.mark.parametrize("model", ["gpt", "lora", "cnn_bn"])
    def test_planned_is_the_fastest_at_its_peak(self, model: str) -> None:
        program, target = plain_program(self.models[model]), target_of()
        for other in OTHERS:
            if other.fits(program, target) is not None:
                continue
            step = other.rewrite(program, other.plan(program, target), target).step
            mine = rewritten_by(program, Planned(budget_bytes=step.peak_bytes(), headroom=0.0))
            assert mine.peak_bytes() <= step.peak_bytes()
            assert op_costs(mine, target.hardware).op_s.sum() <= op_costs(
                step, target.hardware
            ).op_s.sum() * (1 + 1e-9), other

    def test_options_include_decisions_of_other_techniques(self) -> None:
        program, target = plain_program(ZOO["gpt"]), target_of()
        found = levels(program.step, target.hardware, 1, False)
        balanced, full, every_second = (found.others[i] for i in (2, 4, 5))
        for choice, other in ((balanced, Balanced()), (full, Full()), (every_second, EveryNth())):
            mine = measured_rewrite(program.step, found.chosen(choice))
            theirs = other.rewrite(program, other.plan(program, target), target).step
            assert mine.ops.name.tolist() == theirs.ops.name.tolist()
            assert mine.peak_bytes() == theirs.peak_bytes()

    def test_first_forward_without_gradients_hides_nothing(self, tmp_path: Path) -> None:
        """Targets of a teacher that is the model itself, before the forwards that train."""
        path, source = (
            tmp_path / "teacher.py",
            Path(__file__).parents[2] / "support" / "models" / "recompute" / "several_forwards.py",
        )
        loss = (
            "    with torch.no_grad():\n        target = model(one)\n    return (model(one) - model(other) -"
            " target)"
        )
        path.write_text(source.read_text().replace("    return (model(one) - model(other))", loss))
        program, full = plain_program(path), Full()
        all_again = full.rewrite(program, full.plan(program, target_of()), target_of())
        found = self.solved(program, Planned(share=0.0))
        assert found.peak_bytes <= all_again.step.peak_bytes() < found.plain_bytes

    def test_gradients_of_gradients_are_planned_as_well_as_others_do(self) -> None:
        """A backward inside of forward is in no block's windows, so prices are far too low, and true peaks
        decide.
        """
        program, full = (
            plain_program(
                Path(__file__).parents[2] / "support" / "models" / "recompute" / "gradient_penalty.py"
            ),
            Full(),
        )
        n_bytes = full.rewrite(program, full.plan(program, target_of()), target_of()).step.peak_bytes()
        assert n_bytes < program.step.peak_bytes()
        met, missed = (
            self.solved(program, Planned(budget_bytes=budget, headroom=0.0))
            for budget in (n_bytes, n_bytes // 2)
        )
        assert met.is_within
        assert not missed.is_within
        assert missed.peak_bytes == missed.smallest_bytes <= n_bytes

    def test_hooks_and_modes_are_part_of_the_price(self) -> None:
        """So blocks run again as a whole, and no plan of another technique costs less."""
        program, target = plain_program(ZOO["gpt"]), costly_target_of()
        free = self.solved(program, Planned(share=0.6, offload=False))
        priced = self.solved(
            program, Planned(budget_bytes=free.budget_bytes, headroom=0.0, offload=False), target
        )
        assert priced.has_costly_claims
        assert not free.has_costly_claims

        def observed(found: Solution) -> int:
            chosen = found.levels.chosen(found.choice)
            return sum(each.calls not in (None, OpAddresses()) for each in chosen)

        assert observed(priced) < observed(free)
        of_others = (priced.levels.seconds[range(4), each].sum() for each in priced.levels.others)
        assert priced.seconds <= min(each for each in of_others if each)

    @pytest.mark.parametrize(
        ("chosen", "knobs", "by_schedule"),
        [((), {}, True), ((), {"by_schedule": False}, False), ((CopyOut(),), {"offload": False}, False)],
    )
    def test_schedule_replaces_costly_hooks_by_default(
        self, chosen: tuple[Technique, ...], knobs: dict[str, Any], by_schedule: bool
    ) -> None:
        program, target = plain_program(ZOO["gpt"]), costly_target_of(*chosen)
        mine = Planned(share=0.3, **knobs)
        assert mine.fits(program, target) is None
        assert ("schedule" in mine.plan(program, target).document()) == by_schedule
        gpu = replace(target, hardware=replace(target.hardware, device="cuda", launch_s=1e-9))
        assert "schedule" not in mine.plan(program, gpu).document()  # the host runs ahead of the device

    def test_equal_blocks_share_an_option(self) -> None:
        plan = Planned(share=0.0).plan(plain_program(ZOO["gpt"]), target_of()).document()
        assert len(plan["options"]) < len(plan["blocks"]) == 4

    def test_sharding_and_offload_are_counted(self) -> None:
        program, host = plain_program(ZOO["gpt"]), OptimizerCpu()
        alone = self.solved(program, Planned(share=0.5), target_of())
        offloaded = self.solved(program, Planned(share=0.5), target_of(host))
        assert offloaded.plain_bytes < alone.plain_bytes
        after = host.rewrite(
            program.with_step(rewritten_by(program, Planned(share=0.5), target_of(host))),
            NO_PLAN,
            target_of(host),
        )
        assert after.step.peak_bytes() == offloaded.peak_bytes <= offloaded.budget_bytes

    @pytest.mark.drawn(2)
    @pytest.mark.parametrize(
        ("calls", "moved", "blocks"),
        [
            (None, {"aten.gelu.default": [0]}, [1, 0, 1, 0]),
            (None, {"aten.gelu.default": [0], "inputs": [0]}, [0, 0, 0, 0]),
            (OpAddresses().to_plain(), {"inputs": [0]}, [1, 0, 1, 0]),
            (OpAddresses().to_plain(), {"aten.gelu.default": [0]}, [0, 0, 0, 0]),
            (
                {"kept": {"aten.gelu.default": [0]}, "skipped": {}},
                {"aten.gelu.default": [0], "inputs": [0]},
                [0, 0, 1, 0],
            ),
        ],
    )
    def test_just_the_named_tensors_move(
        self, calls: Any, moved: dict[str, list[int]], blocks: list[int]
    ) -> None:
        priced = {"recomputed": {}, "held_bytes": 0, "plain_bytes": 0, "seconds": 0.0}
        options = [{"calls": calls, "offloaded": moved, **priced}, {"calls": None, "offloaded": {}, **priced}]
        totals = dict.fromkeys(("budget_bytes", "peak_bytes", "smallest_bytes", "plain_bytes"), 0)
        plan = Planned.plan_from({"options": options, "blocks": blocks, **totals})
        program = plain_program(ZOO["gpt"])
        predicted = self.default().rewrite(program, plan, target_of()).step
        session = start_session(Workload.load(ZOO["gpt"]), recording_of(ZOO["gpt"]).rung)
        settings = Settings.of(Execution(), {"recompute": self.default()})
        trace = traced_under(session, TunedConfig(settings=settings, plan={"recompute": plan}), 2)
        assert isinstance(trace, Trace)
        assert compare(predicted, trace.step) == ""
        runs_again = calls == OpAddresses().to_plain()  # then no gelu is saved that could move
        assert (predicted.ops.resource == Resource.DEVICE_TO_HOST).any() == (
            not runs_again or "inputs" in moved
        )

    def test_plan_offloads_expensive_tensors(self) -> None:
        plan = Planned(share=0.3).plan(plain_program(ZOO["gpt"]), target_of()).document()
        assert any(option["offloaded"] for option in plan["options"])
        plan = Planned(share=0.3, offload=False).plan(plain_program(ZOO["gpt"]), target_of()).document()
        assert not any(option["offloaded"] for option in plan["options"])

    @pytest.mark.drawn(4)
    @pytest.mark.parametrize("other", [Dtr(), Coop(), Megtaichi(), Checkmate()], ids=lambda each: each.kind)
    @pytest.mark.parametrize("model", ["gpt", "cnn_bn"])
    def test_schedule_replaces_plan_where_it_is_faster(self, model: str, other: Technique) -> None:
        program, target = plain_program(self.models[model]), target_of()
        low, high = (self.solved(program, Planned(share=end)).peak_bytes for end in (0.0, 1.0))
        budget = (low + 3 * high) // 4
        other = other.model_copy(update={"budget_bytes": budget})
        if other.fits(program, target) is not None:
            pytest.skip("not within the budget")
        step = other.rewrite(program, other.plan(program, target), target).step
        mine = Planned(budget_bytes=step.peak_bytes(), headroom=0.0, by_schedule=True)
        best = rewritten_by(program, mine)
        assert best.peak_bytes() <= step.peak_bytes()
        assert seconds(best, target) <= seconds(step, target) * (1 + 1e-9)
        assert (mine.fits(program, target) is None) == ("schedule" in mine.plan(program, target).document())

    def test_schedule_meets_budgets_that_blocks_cannot(self) -> None:
        program, target = plain_program(ZOO["cnn_bn"]), target_of()
        below = self.solved(program, Planned(share=0.0)).peak_bytes - 1
        assert "no plan stays within" in str(Planned(budget_bytes=below, headroom=0.0).fits(program, target))
        hopeless = Planned(budget_bytes=1000, headroom=0.0, by_schedule=True).fits(program, target)
        assert isinstance(hopeless, Reason)
        enough = int(hopeless.fix.removeprefix("budget_bytes: "))
        assert enough <= below
        assert f"{format_bytes(enough)} are enough" in hopeless.text
        assert Planned(budget_bytes=enough, headroom=0.0, by_schedule=True).fits(program, target) is None
        mine = Planned(budget_bytes=below, headroom=0.0, by_schedule=True)
        assert mine.fits(program, target) is None
        assert rewritten_by(program, mine).peak_bytes() <= below
        assert "by a schedule of" in mine.explain(mine.plan(program, target))[0]

    def test_explained_block_by_block(self) -> None:
        machine = replace(
            CPU,
            **NO_HOST_COSTS,
            fp32_flops_per_s=1e11,
            memory_bytes_per_s=2e10,
            device_to_host_bytes_per_s=1e10,
        )
        plan = Planned(share=0.3).plan(plain_program(ZOO["gpt"]), replace(target_of(), hardware=machine))
        lines = Planned(share=0.3).explain(plan)
        assert len(lines) > 1
        assert all(line.startswith("block") for line in lines[1:])
        assert lines[0].startswith("peak 3.8")
        assert any(re.search(r"offloads .*\bgelu\b", line) for line in lines)

    @pytest.mark.parametrize("by_schedule", [False, True])
    def test_budget_met_without_recompute_is_not_solved(self, by_schedule: bool) -> None:
        program = fresh_program(ZOO["gpt"])
        plain = self.solved(program, Planned(share=0.0)).plain_bytes
        solved = _solve_budget.cache_info().misses
        exactly = Planned(budget_bytes=plain, headroom=0.0, by_schedule=by_schedule)
        assert "everything fits" in str(exactly.fits(program, target_of()))
        assert _solve_budget.cache_info().misses == solved
        less = Planned(budget_bytes=plain - 1, headroom=0.0)
        assert less.fits(program, target_of()) is None
        assert _solve_budget.cache_info().misses == solved + 1

    def test_fits_refuses_budgets_that_cannot_be_planned(self) -> None:
        program = plain_program(ZOO["gpt"])
        smallest = self.solved(program, Planned(share=0.0)).peak_bytes
        assert "there is no budget" in str(Planned().fits(program, target_of()))
        assert "everything fits" in str(Planned(budget_bytes=10**9, headroom=0.0).fits(program, target_of()))
        assert "give one of them" in str(Planned(budget_bytes=10**9, share=0.5).fits(program, target_of()))
        assert f"the smallest needs {format_bytes(smallest)}" in str(
            Planned(budget_bytes=smallest - 1, headroom=0.0).fits(program, target_of())
        )
        assert Planned(budget_bytes=smallest, headroom=0.0).fits(program, target_of()) is None
        assert Planned(headroom=0.0).fits(program, replace(target_of(), budget_bytes=smallest)) is None
        assert "0.01 of the budget is headroom" in str(
            Planned().fits(program, replace(target_of(), budget_bytes=smallest))
        )
        assert Planned().fits(program, replace(target_of(), budget_bytes=smallest * 100 // 98)) is None
        assert "moves tensors that the plan may move itself" in str(
            Planned(share=0.5).fits(program, target_of(CopyOut()))
        )

    def test_apply_refuses_a_missing_plan_or_one_for_another_model(self) -> None:
        for config in ({"settings": settings_of(self.default())}, config_of(ZOO["hf_llama"], self.default())):
            _, model, optimizer = build(ZOO["gpt"])
            with pytest.raises(ApplyError, match="needs a plan") as caught:
                apply(model, optimizer, config, strict=False)
            assert caught.value.code == "MT316"

    def solved(self, program: Program, planned: Planned, target: Target | None = None) -> Solution:
        target = target or target_of()
        budget = planned._budget(target)
        assert budget is not None
        return solve_budget(program, budget, target)


def target_of(*chosen: Technique) -> Target:
    """Return the target on which claims cost the host nothing, so that tensors alone decide."""
    target = costly_target_of(*chosen)
    return replace(target, hardware=replace(target.hardware, **dict.fromkeys(defaults(0.0), 0.0)))


def rewritten_by(program: Program, planned: Planned, target: Target | None = None) -> Step:
    target = target or target_of()
    return planned.rewrite(program, planned.plan(program, target), target).step


def seconds(step: Step, target: Target) -> float:
    costs = op_costs(step, target.hardware)
    return float(costs.op_s.clip(min=costs.issue_s).sum())


@pytest.mark.slow
def test_memory_bank_and_average_of_the_encoder_are_predicted_to_the_byte() -> None:
    path = Path(__file__).parents[2] / "support" / "models" / "recompute" / "moco.py"
    assert drift(path, Planned(share=0.0)) == ""
