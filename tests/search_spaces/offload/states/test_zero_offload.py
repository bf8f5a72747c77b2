"""Gradients are offloaded in buckets during backward; delayed, weights are one step stale.

Distinguishing test: the copies of all buckets but the last begin before backward has ended, each holding
`bucket_mib`, and the device holds at most two; delayed, a step's update comes before the forward of the next
one and weights are one step stale.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.suites.block_offload_suite import NATIVE, LayersSuite, total, without_gradients
from support.zoo_paths import ZOO

from memtune.api import Tuned, apply
from memtune.autotune.space.search_space import variants
from memtune.errors import ApplyError
from memtune.offload.optimizer.native_update import Moments
from memtune.program.step import Kind, Phase, Resource, Step, Tier
from memtune.runtime.training_step import accumulate
from memtune.search_spaces.offload.states._common.state_ratio import ratio_of
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.zero_offload import ZeroOffload
from memtune.search_spaces.recompute.planned import Planned
from memtune.technique import NO_PLAN, Exactness, Technique
from memtune.testing import differences, rewritten, train
from memtune.testing.drift_check import drift, plain_program, target_of
from memtune.testing.training import SEED, Run, build, config_of, one_step, settings_of

BUCKET = 5242
SMALL = ZeroOffload(kind="zero_offload", bucket_mib=0.005)
DELAYED = SMALL.model_copy(update={"delayed": True, "delay_after": 0})
EARLY = tuple(
    OptimizerCpu(kind="optimizer_cpu", update="native", trigger=each)
    for each in ("per_gradient", "per_layer")
)


@cache
def accumulated(micro_batches: int) -> Run:
    return without_gradients(train(ZOO["tied"], NATIVE, micro_batches=micro_batches))


def ops(step: Step, name: str) -> np.ndarray[Any, Any]:
    return np.flatnonzero(step.ops.name == step.names.index(f"memtune.{name}.default"))


def tuned_with(
    technique: Technique, model: str = "tied"
) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer, Tuned]:
    workload, net, optimizer = build(ZOO[model])
    return workload, net, optimizer, apply(net, optimizer, config_of(ZOO[model], technique), strict=False)


class TestZeroOffload(LayersSuite):
    technique = ZeroOffload
    drawn_defects = 3  # among them those that no other suite draws
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "tied")}
    variants = (SMALL, ZeroOffload(kind="zero_offload"))
    quick = ("tied",)

    def sabotage(self, tuned: Tuned) -> bool:
        parameter = next(p for p in tuned.model.parameters() if p.numel() > 1000)
        parameter.grad = torch.zeros_like(parameter)
        return True

    def test_buckets_are_offloaded_during_backward(self) -> None:
        """The mechanism: event order and bytes per step. End-of-step copies all start after the last op of
        backward.
        """
        plain, step = rewritten(ZOO["tied"]), rewritten(ZOO["tied"], SMALL)
        computes = np.flatnonzero(
            (step.ops.phase == Phase.BACKWARD) & (step.ops.resource == Resource.COMPUTE)
        )
        copies = ops(step, "to_host")
        early = copies[copies < computes[-1]]
        sizes = step.ops.traffic_bytes[early]
        assert len(early) > len(copies) / 2
        gaps = np.add.reduceat(step.ops.resource == Resource.COMPUTE, early)[:-1] > 0
        buckets = np.split(sizes, np.flatnonzero(gaps) + 1)
        assert len(buckets) > 3
        assert all(bucket.sum() >= BUCKET > bucket[:-1].sum() for bucket in buckets[:-1])
        numel = sum(int(plain.storages.bytes[p.gradient]) for p in plain.parameters if p.gradient >= 0)
        assert total(step, Resource.DEVICE_TO_HOST) == numel
        assert total(step, Resource.HOST_TO_DEVICE) - total(plain, Resource.HOST_TO_DEVICE) == numel
        at_end = rewritten(ZOO["tied"], NATIVE)
        assert not (ops(at_end, "to_host") < np.flatnonzero(at_end.ops.phase == Phase.BACKWARD)[-1]).any()

    def test_device_holds_two_buckets_at_most(self) -> None:
        step = rewritten(ZOO["tied"], SMALL)
        largest = max(int(step.storages.bytes[p.storage]) for p in step.parameters)
        end = step.freed_after
        copied = {int(s) for op in ops(step, "to_host") for s in step.uses.storage[step.uses.op == op]}
        held = [
            sum(int(step.storages.bytes[s]) for s in copied if step.storages.producer[s] <= op <= end[s])
            for op in range(step.ops.n)
        ]
        assert max(held) <= 2 * BUCKET + 2 * largest
        assert not (step.storages.kind[step.storages.tier == 0] == Kind.OPTIMIZER).any()

    @pytest.mark.parametrize("technique", EARLY, ids=lambda each: each.trigger)
    def test_updates_overlap_with_backward(self, technique: OptimizerCpu) -> None:
        """The host updates before backward has ended, with the bits of an update at the end of the step."""
        self.check_drift("tied", technique)
        step = rewritten(ZOO["tied"], technique)
        computes = np.flatnonzero(
            (step.ops.phase == Phase.BACKWARD) & (step.ops.resource == Resource.COMPUTE)
        )
        updates = ops(step, "host_update_")
        assert (updates < computes[-1]).sum() >= len(updates) / (
            2 if technique.trigger == "per_gradient" else 3
        )
        for micro_batches in (1, 4):
            found = train(ZOO["tied"], technique, micro_batches=micro_batches)
            assert not differences(without_gradients(found), accumulated(micro_batches))

    def test_updates_wait_for_the_step_if_the_last_micro_batch_is_unknown(self) -> None:
        workload, model, optimizer, _ = tuned_with(EARLY[0])
        torch.manual_seed(SEED)
        accumulate(model, workload.loss, [workload.make_batch(2) for _ in range(2)], torch.device("cpu"))
        optimizer.step()
        other = tuned_with(NATIVE)
        one_step(*other, seed=SEED)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other[1].parameters(), strict=True))

    def test_delayed_weights_are_one_step_stale(self) -> None:
        """The mechanism of `delayed`: bitwise a loop that delays gradients by a step; a state dict waits for
        the update.
        """
        self.check_drift("tied", DELAYED)
        step = rewritten(ZOO["tied"], DELAYED)
        assert (ops(step, "host_update_") < np.flatnonzero(step.ops.phase == Phase.FORWARD)[0]).all()
        workload, model, optimizer, tuned = tuned_with(DELAYED.model_copy(update={"delay_after": 1}))
        late_workload, reference, by_hand, _ = tuned_with(NATIVE)
        kept: dict[str, torch.Tensor] = {}
        for number in range(4):
            one_step(workload, model, optimizer, tuned, seed=SEED + number)
            torch.manual_seed(SEED + number)
            accumulate(
                reference,
                late_workload.loss,
                [late_workload.make_batch(2) for _ in range(2)],
                torch.device("cpu"),
            )
            mine = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
            for name, parameter in reference.named_parameters():
                parameter.grad = mine.get(name) if number == 0 else kept.get(name)
            if number != 1:
                by_hand.step()
            kept = mine if number else {}
            by_hand.zero_grad(set_to_none=True)
            assert all(
                torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True)
            ), number
        state = tuned.state_dict()["model"]
        for name, parameter in reference.named_parameters():
            parameter.grad = kept.get(name)
        by_hand.step()
        assert all(torch.equal(state[name], parameter) for name, parameter in reference.named_parameters())

    @pytest.mark.parametrize("mine", EARLY, ids=lambda each: each.trigger)
    def test_clipping_after_early_updates_is_refused(self, mine: Technique) -> None:
        workload, model, _, tuned = tuned_with(mine)
        torch.manual_seed(SEED)
        sync = tuned._context.loop.sync
        assert sync is not None
        accumulate(model, workload.loss, [workload.make_batch(2)], torch.device("cpu"), sync=sync)
        with pytest.raises(ApplyError, match="MT364 clipping cannot change gradients that have been used"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    @pytest.mark.parametrize("moments", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
    def test_masters_with_each_trigger(self, moments: Moments) -> None:
        """With masters the host memory of a gradient receives the new weight, at any time of the update."""
        at_end = without_gradients(
            train(ZOO["tobf16"], NATIVE.model_copy(update={"update": "master", "moments": moments}))
        )
        for technique in (EARLY[1], SMALL):
            master = technique.model_copy(update={"update": "master", "moments": moments})
            assert not drift(ZOO["tobf16"], master)
            assert not differences(without_gradients(train(ZOO["tobf16"], master)), at_end)

    @pytest.mark.parametrize("delayed", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_ratio_keeps_a_part_of_the_state_on_the_device(self, delayed: bool) -> None:
        """The mechanism of `ratio`: parameters used first cross the link neither way, and their state is
        resident.
        """
        half = SMALL.model_copy(update={"ratio": 0.5, "delayed": delayed, "delay_after": 0})
        self.check_drift("tied", half)
        plain, step = rewritten(ZOO["tied"]), rewritten(ZOO["tied"], half)
        sizes = [int(plain.storages.bytes[p.gradient]) for p in plain.parameters]
        resident = int(np.flatnonzero(np.cumsum(sizes) <= sum(sizes) / 2)[-1]) + 1
        assert 0 < resident < len(sizes)
        assert total(step, Resource.DEVICE_TO_HOST) == sum(sizes[resident:])
        assert total(step, Resource.HOST_TO_DEVICE) - total(plain, Resource.HOST_TO_DEVICE) == sum(
            sizes[resident:]
        )
        state = (step.storages.kind == Kind.OPTIMIZER) & (step.storages.bytes > 64)
        assert int(step.storages.bytes[state & (step.storages.tier == Tier.DEVICE)].sum()) == 2 * sum(
            sizes[:resident]
        )
        assert int(step.storages.bytes[state & (step.storages.tier == Tier.HOST)].sum()) == 2 * sum(
            sizes[resident:]
        )
        if not delayed:
            found = without_gradients(train(ZOO["tied"], half, micro_batches=3))
            assert not differences(found, without_gradients(train(ZOO["tied"], micro_batches=3)), 1e-5)

    def test_solved_ratio_is_the_smallest_that_fits(self) -> None:
        """Equal to trying every number of parameters with the pass; training uses the plan."""
        program, target, solved = (
            plain_program(ZOO["tied"]),
            target_of(),
            SMALL.model_copy(update={"ratio": None}),
        )
        sizes = [int(program.step.storages.bytes[each.gradient]) for each in program.step.parameters]
        given = [SMALL.model_copy(update={"ratio": ratio_of(sizes, count)}) for count in range(len(sizes))]
        peaks = [each.rewrite(program, NO_PLAN, target).step.peak_bytes() for each in given]
        assert peaks == sorted(peaks)
        for budget in (peaks[1], peaks[4] - 1, peaks[-4], peaks[-1]):
            within = replace(target, budget_bytes=budget)
            assert solved.fits(program, within) is None
            plan = solved.plan(program, within)
            assert plan.resident_parameters == max(
                count for count, peak in enumerate(peaks) if peak <= budget
            )
            assert solved.rewrite(program, plan, within).step.peak_bytes() == peaks[plan.resident_parameters]
        workload, model, optimizer = build(ZOO["tied"])
        config = {"settings": settings_of(solved), "plan": {"offload.states": plan.document()}}
        tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
        assert tuned.audit()["offload.states"] == tuned_with(given[-1])[3].audit()["offload.states"]
        with pytest.raises(ApplyError, match="has no ratio"):
            apply(*build(ZOO["tied"])[1:], {"settings": settings_of(solved)}, strict=False)

    def test_ratio_is_solved_only_if_no_simpler_setting_is_equal(self) -> None:
        program, solved = plain_program(ZOO["tied"]), SMALL.model_copy(update={"ratio": None})
        peaks = [each.rewrite(program, NO_PLAN, target_of()).step.peak_bytes() for each in (SMALL,)] + [
            program.step.peak_bytes()
        ]
        for budget, why in (
            (None, "no budget to solve"),
            (peaks[0] - 1, "no optimizer state fits"),
            (peaks[0], "no parameter's optimizer state fits"),
            (peaks[1], "everything fits"),
        ):
            assert why in str(solved.fits(program, replace(target_of(), budget_bytes=budget)))
        planned = replace(target_of(Planned(share=0.5)), budget_bytes=peaks[1] - 1)
        assert "planned plans for the same budget" in str(solved.fits(program, planned))
        assert len(variants(ZeroOffload, target_of())) == 3

    def test_fits_refuses_by_name(self) -> None:
        program, default = plain_program(ZOO["gpt"]), self.default()
        assert "under none" in str(default.fits(program, replace(target_of(), ranks=2)))
        assert "compiled" in str(default.fits(program, replace(target_of(), compiled="blocks")))
        with pytest.raises(ValidationError, match="masters are on the host"):
            ZeroOffload(kind="zero_offload", ratio=0.5, update="master")
        for knob in ({"trigger": "per_layer"}, {"moments": "int8"}):
            with pytest.raises(ValidationError, match="own update"):
                OptimizerCpu(kind="optimizer_cpu", **knob)
        step = program.step
        smallest = min(step.parameters, key=lambda p: int(step.storages.bytes[p.storage]))
        unused = tuple(p._replace(gradient=-1) if p is smallest else p for p in step.parameters)
        assert "clipping" in str(
            default.fits(program.with_step(replace(step, parameters=unused)), target_of())
        )

    def test_exactness_reports_lossy_knobs(self) -> None:
        assert SMALL.exactly() is Exactness.REORDERED
        assert DELAYED.exactly() is Exactness.LOSSY
        assert EARLY[0].exactly() is Exactness.REORDERED
