"""Experts on SSD with a cache in host memory: only used ones are copied, and lazy updates have the bits of
dense ones.

Distinguishing test: bytes read and written are those of the used experts outside the cache, and none of the
others'; with the cache off, or without the replay of missed updates, bytes or bits differ.
"""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from support.budget_runs import trains_where_the_plain_model_is_out_of_memory
from support.state_dict_verification import verified_and_read
from support.suites.block_offload_suite import without_gradients
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import Tuned, apply
from memtune.autotune.predict.simulation import simulate
from memtune.device import platform_of
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.offload.experts.expert_offload import ExpertOptimizer
from memtune.offload.experts.expert_offload_pass import used_in
from memtune.offload.parameters.offloader import ParameterOffloader
from memtune.program.parameter_columns import columns_of
from memtune.program.step import Kind, Resource, Step, Tier
from memtune.runtime.memory_tiers import DEVICE, HOST, mark, tier
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.offload.states.moesys import Moesys
from memtune.search_spaces.recompute.full import Full
from memtune.ssd import offload_dir
from memtune.technique import Technique
from memtune.testing import TechniqueSuite
from memtune.testing.drift_check import peak_allocated_bytes, plain_program, planned, target_of
from memtune.testing.training import (
    SEED,
    build,
    config_of,
    device_under_test,
    differences,
    one_step,
    plain,
    settings_of,
    train,
)
from memtune.workload.expert_modules import experts_in

HASHED = ZOO["moe"].parent / "experts" / "hashed.py"
EXPERT = 4 * (32 * 128 + 128 + 128 * 32 + 32)
"""Bytes of the weights of one expert."""
LAYERS = 3
FEW = Moesys(kind="moesys", cache=6, on_device=1)
ALL = Moesys(kind="moesys")
LINKS = {
    "host_to_device": Resource.HOST_TO_DEVICE,
    "device_to_host": Resource.DEVICE_TO_HOST,
    "ssd_read": Resource.SSD_READ,
    "ssd_write": Resource.SSD_WRITE,
}


def total(step: Step, resource: Resource) -> int:
    return int(step.ops.traffic_bytes[step.ops.resource == resource].sum())


def tuned_with(technique: Technique, path: Path = HASHED) -> tuple[Any, Any, Any, Tuned]:
    workload, net, optimizer = build(path)
    return (
        workload,
        net,
        optimizer,
        apply(net, optimizer, config_of(path, technique), loss=workload.loss, strict=False),
    )


def of_task(task: int, size: int = 2) -> Any:
    with tier(HOST):
        tokens = task * 16 + torch.randint(16, (size, 17))
    return tokens[:, :-1], tokens[:, 1:]


def counted(tuned: Tuned, batches: list[Any]) -> dict[str, int]:
    """Return the bytes on the links in a step, without the batches'."""
    COUNTERS.take()
    tuned.step(batches)
    found = COUNTERS.take()
    found["host_to_device"] -= sum(each.nbytes for batch in batches for each in batch)
    return {name: found.get(name, 0) for name in LINKS}


def own_loop(technique: Moesys | None) -> list[torch.Tensor]:
    workload, net, optimizer = build(HASHED)
    if technique is not None:
        apply(net, optimizer, config_of(HASHED, technique), strict=False)
    for step in range(4):
        torch.manual_seed(step)
        losses = [workload.loss(net, workload.make_batch(2)) for _ in range(2)]
        for loss in reversed(losses):
            loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()
    return [value.clone() for value in net.state_dict().values()]


@pytest.mark.usefixtures("ssd")
class TestMoesys(TechniqueSuite):
    technique = Moesys
    models: ClassVar = {"moe": ZOO["moe"]}
    variants = (FEW,)
    quick = ("moe",)
    tolerance = 1e-5
    # Routing follows the data, so nothing is recorded on fake tensors: a step is held against a real one, by
    # its bytes on every link and its peak, in which one op does not show.
    not_shown = ("rewrite frees a tensor one op too late", "rewrite loses an op")

    def sabotage(self, tuned: Tuned) -> bool:
        mark(next(state["exp_avg"] for state in tuned.optimizer.state.values() if "exp_avg" in state), DEVICE)
        mark(tuned.optimizer.param_groups[0]["params"][-3], DEVICE)
        return True

    def check_training(self, model: str, variant: Technique) -> None:
        found, wanted = (
            without_gradients(each)
            for each in (train(self.models[model], variant), plain(self.models[model]))
        )
        assert not (bad := differences(found, wanted, self.tolerance)), bad[:5]

    def check_drift(self, model: str, variant: Technique) -> None:
        """Compare a step that uses all experts with the native ledger, or an accelerator's allocator: bytes
        on links, peaks of device and host within 2 %.
        """
        device = device_under_test()
        program, _ = planned(self.models[model], variant, device=device.type)
        ledger = Ledger.open(device)
        gc.collect()
        empty, empty_host = ledger.live_bytes(), ledger.live_bytes(HOST)
        workload, net, _, tuned = tuned_with(variant, self.models[model])
        with tier(HOST):
            batch = workload.make_batch(2)
        for _ in range(4):
            ledger.reset_peak()
            found = counted(tuned, [batch])
        found["host_to_device"] += sum(each.nbytes for each in batch)
        assert found == {name: total(program.step, resource) for name, resource in LINKS.items()}
        on_device = (program.step.storages.tier == Tier.DEVICE) & (
            program.step.storages.kind == Kind.OPTIMIZER
        )
        held = sum(
            each.nbytes
            for state in tuned.optimizer.state.values()
            for each in state.values()
            if _is_on_device(each)
        )
        assert int(program.step.storages.bytes[on_device].sum()) == held
        assert tuned.audit()["offload.states"]["ssd_bytes"] == program.step.peak_bytes(Tier.SSD)
        if not platform_of(device).is_host:
            predicted = peak_allocated_bytes(program.step, device.type)
            assert ledger.peak_allocated_bytes() - empty == pytest.approx(predicted, rel=0.02)
        elif cpu_allocator.available() is None:
            predicted = simulate(program, hardware.detect("cpu")).peak_allocated_bytes
            assert ledger.peak_allocated_bytes() - empty == pytest.approx(predicted, rel=0.02)
            assert ledger.peak_allocated_bytes(HOST) - empty_host == pytest.approx(
                program.step.peak_bytes(Tier.HOST), rel=0.02
            )
        tuned.finish()
        del net

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "knobs",
        [
            {"on_device": 2},
            {"cache": 3, "read_prefetch": 0},
            {"cache": 8},
            {"eviction": "belady", "cache": 3},
            {"eviction": "lru", "cache": 3},
            {"cache": 1},
        ],
    )
    def test_bytes_follow_the_trace_of_the_cache(self, knobs: dict[str, Any]) -> None:
        self.check_drift("moe", FEW.model_copy(update=knobs))

    @pytest.mark.parametrize("micro_batches", [1, 3])
    def test_five_steps_are_bitwise_those_of_the_plain_run(self, micro_batches: int) -> None:
        """The mechanism: an expert's missed updates are replayed. Without that, weights differ."""
        wanted = without_gradients(train(HASHED, steps=5, micro_batches=micro_batches))
        found = without_gradients(train(HASHED, FEW, steps=5, micro_batches=micro_batches))
        assert not differences(found, wanted)
        with patch.object(ExpertOptimizer, "note_zero_gradient", lambda *_: None):
            assert differences(
                without_gradients(train(HASHED, FEW, steps=5, micro_batches=micro_batches)), wanted
            )

    def test_only_used_experts_are_copied(self) -> None:
        """The mechanism, by bytes: a step of one task copies one expert of each layer, and none from the
        cache. If experts called without tokens were loaded like all others, it would copy all four of each
        layer.
        """
        *_, tuned = tuned_with(ALL.model_copy(update={"on_device": 1}))
        up_and_down = {"host_to_device": (2 * LAYERS - 1) * EXPERT, "device_to_host": LAYERS * EXPERT}
        first = counted(tuned, [of_task(0)])
        assert first == {**up_and_down, "ssd_read": LAYERS * 3 * EXPERT, "ssd_write": 0}
        assert counted(tuned, [of_task(0)]) == {**up_and_down, "ssd_read": 0, "ssd_write": 0}
        assert counted(tuned, [of_task(1)])["ssd_read"] == LAYERS * 3 * EXPERT
        again = counted(tuned, [of_task(0)])
        assert (again["ssd_read"], again["ssd_write"]) == (0, 0)
        facts = tuned.audit()["offload.states"]
        assert (facts["experts"], facts["cached_bytes"]) == (4 * LAYERS, 2 * LAYERS * 3 * EXPERT)
        assert facts["caught_up"] == LAYERS * 4 * (
            2 + 1
        )  # four parameters; task 1 was two steps late, then task 0 one

    def test_experts_of_the_current_block_are_resident(self) -> None:
        """The mechanism, by residency: at most `on_device` blocks' experts, and the next block's are resident
        when it begins.
        """
        most: list[int] = []
        begin = ParameterOffloader._begin_moment

        def watched(self: ParameterOffloader, moment: int) -> None:
            begin(self, moment)
            units: Any = self.units
            most.append(len({units.experts[each].block for each in units.on_device}))

        for on_device in (1, 2):
            *_, tuned = tuned_with(FEW.model_copy(update={"on_device": on_device}))
            tuned.step([of_task(2)])
            most.clear()
            with patch.object(ParameterOffloader, "_begin_moment", watched):
                tuned.step([of_task(2)])
            assert max(most) == on_device

    @pytest.mark.parametrize("variant", [FEW, ALL], ids=["few", "all"])
    def test_step_with_one_expert_per_layer_is_predicted(self, variant: Moesys) -> None:
        """The recorded batch shows the used experts: bytes on every link, device and host are theirs."""
        program, plans = planned(HASHED, variant)
        ledger = Ledger.open("cpu")
        gc.collect()
        empty, empty_host = ledger.live_bytes(), ledger.live_bytes(HOST)
        *_, tuned = tuned_with(variant)
        batch = of_task(0)
        for _ in range(3):
            ledger.reset_peak()
            moved = counted(tuned, [batch])
        moved["host_to_device"] += sum(each.nbytes for each in batch)
        assert moved == {name: total(program.step, resource) for name, resource in LINKS.items()}
        if cpu_allocator.available() is None:
            assert ledger.peak_allocated_bytes() - empty == pytest.approx(program.step.peak_bytes(), rel=0.02)
            assert ledger.peak_allocated_bytes(HOST) - empty_host == pytest.approx(
                program.step.peak_bytes(Tier.HOST), rel=0.02
            )
        plan = plans["offload.states"]
        assert (plan.used, plan.experts) == (LAYERS, 4 * LAYERS)
        assert plan.max_peak_bytes > 1.3 * program.step.peak_bytes()
        assert "up to" in variant.explain(plan)[0]

    def test_all_experts_are_predicted_if_routing_may_be_an_accident(self) -> None:
        """With few tokens an unused expert proves nothing, and other micro-batches may use others. Reported
        as an upper bound.
        """
        program = plain_program(HASHED)
        experts = experts_in(program.step)
        assert len(used_in(program.step, experts)) == LAYERS
        few_rows = program.step.with_ops(flops=program.step.ops.flops / 8)
        assert used_in(few_rows, experts) == experts
        two = ALL.plan(replace(program, accumulate=2), target_of())
        assert two.document() == {"experts": 4 * LAYERS, "used": 4 * LAYERS}
        assert "all 12 experts" in ALL.explain(two)[0]

    @pytest.mark.slow
    @pytest.mark.native_ledger
    def test_trains_where_the_plain_model_is_out_of_memory(self) -> None:
        trains_where_the_plain_model_is_out_of_memory(ZOO["moe"], FEW)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "other", [Full(kind="full"), CopyOut(kind="copy_out", min_bytes=0)], ids=lambda each: each.kind
    )
    def test_training_with_recompute_or_offloaded_activations_is_bitwise(self, other: Technique) -> None:
        assert other.fits(plain_program(HASHED), target_of(FEW, other)) is None
        wanted = without_gradients(train(HASHED, steps=4))
        assert not differences(without_gradients(train(HASHED, FEW, other, steps=4)), wanted)

    @pytest.mark.slow
    def test_state_dict_is_complete_and_can_be_loaded(self) -> None:
        """Missed updates of experts are replayed first."""
        workload, net, optimizer, tuned = tuned_with(FEW)
        plain_workload, plain_net, plain_optimizer = build(HASHED)
        for step in range(3):
            one_step(workload, net, optimizer, tuned, seed=SEED + step)
            one_step(plain_workload, plain_net, plain_optimizer, None, seed=SEED + step)
        saved = copy.deepcopy(tuned.state_dict())
        assert all(torch.equal(value, saved["model"][name]) for name, value in plain_net.state_dict().items())
        for index, state in plain_optimizer.state_dict()["state"].items():
            assert all(
                torch.equal(value, saved["optimizer"]["state"][index][name]) for name, value in state.items()
            )
        wanted = one_step(workload, net, optimizer, tuned, seed=SEED + 9)
        after = copy.deepcopy(tuned.state_dict()["model"])
        workload, net, optimizer, tuned = tuned_with(FEW)
        tuned.load_state_dict(saved)
        got = one_step(workload, net, optimizer, tuned, seed=SEED + 9)
        assert torch.equal(got[0], wanted[0])
        assert all(torch.equal(after[name], value) for name, value in tuned.state_dict()["model"].items())
        tuned.finish()

    def test_verify_and_state_dict_write_the_cache_first(self) -> None:
        """Changed experts in the cache are written first; verification without that would check old data."""
        workload, net, optimizer, tuned = tuned_with(FEW)
        one_step(workload, net, optimizer, tuned, seed=SEED)
        seen = verified_and_read(tuned.optimizer)
        assert len(seen) == 4 * 4 * LAYERS
        assert all(torch.equal(then, now) for then, now in seen)
        tuned.finish()

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "knobs",
        [
            {"on_device": 3, "read_prefetch": 0},
            {"cache": 1, "read_prefetch": 3},
            {"cache": 12, "eviction": "belady"},
            {"cache": 2, "eviction": "lru", "on_device": 2},
        ],
    )
    def test_knobs_change_no_bit(self, knobs: dict[str, Any]) -> None:
        wanted = without_gradients(train(HASHED, steps=5, micro_batches=3))
        assert not differences(
            without_gradients(train(HASHED, FEW.model_copy(update=knobs), steps=5, micro_batches=3)), wanted
        )

    @pytest.mark.slow
    def test_user_loop_with_two_forwards_and_a_learning_rate_schedule(self) -> None:
        """Missed updates are replayed with the learning rate of their step."""
        assert all(map(torch.equal, own_loop(FEW), own_loop(None)))

    @pytest.mark.slow
    def test_evaluation_between_steps(self) -> None:
        workload, net, optimizer, tuned = tuned_with(FEW)
        plain_workload, plain_net, plain_optimizer = build(HASHED)
        for step in range(2):
            one_step(workload, net, optimizer, tuned, seed=SEED + step)
            one_step(plain_workload, plain_net, plain_optimizer, None, seed=SEED + step)
            for task in range(4):
                tokens, _ = of_task(task)
                with torch.no_grad():
                    assert torch.equal(net(tokens), plain_net(tokens))

    @pytest.mark.slow
    def test_fits_refuses_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program = plain_program(ZOO["moe"])
        assert "no experts" in str(ALL.fits(plain_program(ZOO["gpt"]), target_of()))
        assert "whole on each" in str(ALL.fits(program, replace(target_of(), ranks=2)))
        assert "keep offloaded parameters" in str(ALL.fits(program, replace(target_of(), compiled="blocks")))
        _, net, optimizer = build(ZOO["gpt"])
        with pytest.raises(ApplyError, match="no experts"):
            apply(net, optimizer, {"settings": settings_of(ALL)}, strict=False)
        monkeypatch.delenv(offload_dir.VARIABLE)
        assert "no directory" in str(ALL.fits(program, target_of()))


def _is_on_device(value: Any) -> bool:
    from memtune.runtime.memory_tiers import tier_of

    # An accelerator's optimizer has its step counters on the CPU.
    is_there = isinstance(value, torch.Tensor) and value.device.type == device_under_test().type
    return is_there and tier_of(value) == DEVICE


def test_fits_names_experts_with_a_frozen_parameter() -> None:
    program = plain_program(HASHED)
    columns = columns_of(program.step.parameters)
    frozen = [index for each in experts_in(program.step) for index in each.parameters[-1:]]
    gradient = columns.gradient.copy()
    gradient[frozen] = -1
    step = replace(program.step, parameters=replace(columns, gradient=gradient))
    reason = str(ALL.fits(program.with_step(step), target_of()))
    assert f"{columns.names[frozen[0]]} gets no gradient" in reason
    assert "has no experts" not in reason
