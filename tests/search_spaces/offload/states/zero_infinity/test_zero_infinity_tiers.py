"""`zero_infinity` with its optimizer on the host, and parameters and gradients on any tier."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from support.ranks.block_offload_on_ranks import check_on_ranks
from support.suites.block_offload_suite import LayersSuite, block_bytes, total
from support.zoo_paths import ZOO

from memtune.api import Tuned, apply
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.autotune.space.search_space import variants
from memtune.errors import ApplyError
from memtune.program.residency import WRITES_IN_FLIGHT
from memtune.program.step import Resource, Step, Tier, traffic_bytes
from memtune.runtime.memory_tiers import HOST, tier_of
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.technique import Technique
from memtune.testing import differences, drift, rewritten, train
from memtune.testing.drift_check import plain_program, recording_of, target_of
from memtune.testing.training import SEED, build, config_of, one_step, settings_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("ssd")]
RESIDENT_PARAMETERS = ZeroInfinity(kind="zero_infinity", optimizer="host")
ON_HOST = RESIDENT_PARAMETERS.model_copy(update={"parameters": "host"})
ON_SSD = RESIDENT_PARAMETERS.model_copy(update={"parameters": "ssd"})
ALL_ON_SSD = ON_SSD.model_copy(update={"gradients": "ssd"})
WAYS = {
    "host": ON_HOST,
    "ssd": ON_SSD,
    "gradients": ON_HOST.model_copy(update={"gradients": "ssd"}),
    "all": ALL_ON_SSD,
    "no prefetch": ALL_ON_SSD.model_copy(
        update={"optimizer_prefetch": 0, "parameter_prefetch": 0, "on_device": 1}
    ),
}
ON_ANY_TIER = {
    **WAYS,
    "optimizer too": ON_SSD.model_copy(update={"optimizer": "ssd"}),
    "every state": ALL_ON_SSD.model_copy(update={"optimizer": "ssd"}),
}
NATIVE = OptimizerCpu(kind="optimizer_cpu", update="native")
LINKS = {
    "ssd_write": Resource.SSD_WRITE,
    "ssd_read": Resource.SSD_READ,
    "device_to_host": Resource.DEVICE_TO_HOST,
    "host_to_device": Resource.HOST_TO_DEVICE,
}


def started(technique: Technique) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer, Tuned]:
    workload, model, optimizer = build(ZOO["tied"])
    tuned = apply(model, optimizer, config_of(ZOO["tied"], technique), loss=workload.loss, strict=False)
    return workload, model, optimizer, tuned


def expected_on_ssd(technique: ZeroInfinity, plain: Step) -> tuple[int, int, int]:
    """Return bytes written and read in a step, and bytes stored."""
    sizes = block_bytes(plain)
    weights, gradients = (
        sum(sizes) if tier == "ssd" else 0 for tier in (technique.parameters, technique.gradients)
    )
    brought = 2 * sum(sizes) - sum(sizes[-technique.on_device :]) if weights else 0
    return weights + gradients, brought + gradients, weights + gradients


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("host", marks=pytest.mark.slow),
        pytest.param("no prefetch", marks=pytest.mark.slow),
        "all",
    ],
)
def test_optimizer_state_never_crosses_the_drive(name: str) -> None:
    """The mechanism: only the blocks' weights and gradients are on SSD; every op, byte and lifetime is as
    recorded.
    """
    technique = WAYS[name]
    assert drift(ZOO["tied"], technique) == ""
    plain, step = rewritten(ZOO["tied"]), rewritten(ZOO["tied"], technique)
    there = total(step, Resource.SSD_WRITE), total(step, Resource.SSD_READ), step.peak_bytes(Tier.SSD)
    assert there == expected_on_ssd(technique, plain)
    on_ssd = rewritten(ZOO["tied"], technique.model_copy(update={"optimizer": "ssd"}))
    assert step.peak_bytes() == on_ssd.peak_bytes()
    for link in (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST):
        assert total(step, link) == total(on_ssd, link)


@pytest.mark.slow
def test_host_memory_holds_the_state_once_and_a_few_gradients() -> None:
    """A float32 master in host memory is the offloaded weight itself."""
    plain, steps = rewritten(ZOO["gpt"]), {name: rewritten(ZOO["gpt"], each) for name, each in WAYS.items()}
    inside, batch = sum(block_bytes(plain)), plain.peak_bytes(Tier.HOST)
    trained = [int(plain.storages.bytes[each.gradient]) for each in plain.parameters]
    state, counters = 3 * sum(trained), 4 * len(trained)
    assert steps["host"].peak_bytes(Tier.HOST) - batch - counters == pytest.approx(
        state + inside, abs=2 * max(trained)
    )
    few = (WRITES_IN_FLIGHT + 2 + ALL_ON_SSD.optimizer_prefetch) * max(trained)
    assert state <= steps["gradients"].peak_bytes(Tier.HOST) - batch - counters <= state + few
    assert steps["ssd"].peak_bytes(Tier.HOST) >= steps["host"].peak_bytes(Tier.HOST)


@pytest.mark.parametrize("technique", [ZeroInfinity(kind="zero_infinity"), ON_HOST], ids=["ssd", "host"])
def test_loaded_state_is_on_its_tier_at_once(technique: ZeroInfinity) -> None:
    """Including the state of parameters without gradient; unsaved state starts again, with its steps counted
    from there.
    """
    finals = []
    for each in (technique, NATIVE):
        workload, model, optimizer, tuned = started(each)
        one_step(workload, model, optimizer, tuned, seed=SEED)
        saved = copy.deepcopy(optimizer.state_dict())
        for state in (saved, saved | {"state": {}}):
            optimizer.load_state_dict(copy.deepcopy(state))
            if each is technique:
                tuned.audit()
            for i in (1, 2):
                one_step(workload, model, optimizer, tuned, seed=SEED + i)
        assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
        finals.append({name: value.clone() for name, value in model.state_dict().items()})
    mine, wanted = finals
    assert all(torch.equal(mine[name], value) for name, value in wanted.items())


def test_full_load_writes_each_piece_once() -> None:
    workload, model, optimizer, tuned = started(ZeroInfinity(kind="zero_infinity"))
    one_step(workload, model, optimizer, tuned, seed=SEED)
    saved = tuned.state_dict()
    COUNTERS.take()
    tuned.load_state_dict(saved)
    moved = COUNTERS.take()
    assert moved["ssd_write"] == moved["ssd_read"] == 12 * sum(each.numel() for each in model.parameters())


def predicted(technique: ZeroInfinity, micro_batches: int) -> Step:
    rewriter = Rewriter(recording_of(ZOO["tied"]), target_of())
    execution = {"micro_batch": 2, "accumulate": micro_batches}
    found = rewriter.candidate(Choice.from_document({**settings_of(technique), "execution": execution}))
    assert isinstance(found, Candidate), found
    return found.program.step


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", WAYS)
def test_bytes_on_every_link_are_those_predicted(name: str, micro_batches: int) -> None:
    workload, _, _, tuned = started(WAYS[name])
    for _ in range(2):
        COUNTERS.take()
        tuned.step([workload.make_batch(2) for _ in range(micro_batches)])
    moved, step = COUNTERS.take(), predicted(WAYS[name], micro_batches)
    wanted = {
        link: int(traffic_bytes(step, micro_batches)[step.ops.resource == each].sum())
        for link, each in LINKS.items()
    }
    assert {link: moved.get(link, 0) for link in LINKS} == wanted


@pytest.mark.slow
class TestOptimizerOnHost(LayersSuite):
    technique = ZeroInfinity
    models: ClassVar = {name: ZOO[name] for name in ("tied", "gpt")}
    variants = tuple(WAYS.values())
    quick = ("tied",)

    @classmethod
    def default(cls) -> ZeroInfinity:
        return ALL_ON_SSD

    @pytest.mark.parametrize("name", ON_ANY_TIER)
    def test_float32_masters_of_bfloat16_parameters(self, name: str) -> None:
        master = ON_ANY_TIER[name].model_copy(update={"update": "master"})
        self.check_drift("tobf16", master)
        on_ssd = master.model_copy(update={"optimizer": "ssd"})
        assert not differences(train(ZOO["tobf16"], master), train(ZOO["tobf16"], on_ssd))

    @pytest.mark.parametrize("name", ["host", "ssd", "all"])
    def test_tiled_weights_train_as_with_state_on_ssd(self, name: str) -> None:
        tiled = WAYS[name].model_copy(update={"tiles": 4})
        self.check_drift("tied", tiled)
        on_ssd = tiled.model_copy(update={"optimizer": "ssd"})
        assert not differences(train(ZOO["tied"], tiled), train(ZOO["tied"], on_ssd))

    @pytest.mark.parametrize("name", WAYS)
    def test_state_dict_is_complete_and_can_be_loaded(self, name: str, tmp_path: Path) -> None:
        workload, model, optimizer, tuned = started(WAYS[name])
        one_step(workload, model, optimizer, tuned, seed=SEED)
        tuned.save(tmp_path)
        wanted = [one_step(workload, model, optimizer, tuned, seed=SEED + i)[0] for i in (1, 2)]
        workload, model, optimizer, tuned = started(WAYS[name])
        one_step(workload, model, optimizer, tuned, seed=SEED + 3)
        tuned.load(tmp_path)
        assert [one_step(workload, model, optimizer, tuned, seed=SEED + i)[0] for i in (1, 2)] == wanted
        assert all(tier_of(state["exp_avg"]) == HOST for state in optimizer.state.values())

    @pytest.mark.parametrize("name", ON_ANY_TIER)
    def test_loaded_weights_are_trained(self, name: str) -> None:
        workload, model, optimizer, tuned = started(ON_ANY_TIER[name])
        one_step(workload, model, optimizer, tuned, seed=SEED)
        saved = {key: value.clone() for key, value in model.state_dict().items()}
        wanted = one_step(workload, model, optimizer, tuned, seed=SEED + 1)
        model.load_state_dict(saved)
        assert all(torch.equal(saved[key], value) for key, value in model.state_dict().items())
        assert torch.equal(one_step(workload, model, optimizer, tuned, seed=SEED + 1)[0], wanted[0])

    @pytest.mark.parametrize("name", ["host", "all", "optimizer too"])
    def test_scaled_gradients_are_used(self, name: str) -> None:
        runs = []
        for workload, model, optimizer in (started(ON_ANY_TIER[name])[:3], build(ZOO["tied"])):
            torch.manual_seed(SEED)
            workload.loss(model, workload.make_batch(2)).backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
            optimizer.step()
            runs.append({key: value.clone() for key, value in model.state_dict().items()})
        assert all(torch.allclose(runs[0][key], value, rtol=0, atol=1e-6) for key, value in runs[1].items())


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("states", [Ddp(), Fsdp(kind="fsdp")], ids=lambda each: each.kind)
def test_tiers_train_as_one_rank(tmp_path: Path, states: Technique, parts: int) -> None:
    techniques = {name: (states, each, NATIVE) for name, each in WAYS.items()}
    check_on_ranks(techniques, tmp_path, parts=parts, bitwise=parts == 1 or states.kind == "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("states", [Ddp(), Fsdp(kind="fsdp")], ids=lambda each: each.kind)
def test_tiles_train_as_one_rank(tmp_path: Path, states: Technique) -> None:
    tiled = {name: WAYS[name].model_copy(update={"tiles": 3}) for name in ("host", "all")}
    check_on_ranks({name: (states, each, NATIVE) for name, each in tiled.items()}, tmp_path, bitwise=False)


def test_resident_weights_equal_the_native_update_on_the_host() -> None:
    """One candidate, which needs no drive."""
    target = replace(target_of(RESIDENT_PARAMETERS), offload_dir="")
    assert RESIDENT_PARAMETERS.record(target) == NATIVE.record(target)
    assert RESIDENT_PARAMETERS.fits(plain_program(ZOO["tied"]), target) is None
    assert "no directory" in str(ALL_ON_SSD.fits(plain_program(ZOO["tied"]), target))


@pytest.mark.slow
@pytest.mark.parametrize("update", ["native", "master"])
def test_resident_weights_train_as_with_the_native_update(update: Literal["native", "master"]) -> None:
    model, mine = (
        ZOO["tied" if update == "native" else "tobf16"],
        RESIDENT_PARAMETERS.model_copy(update={"update": update}),
    )
    assert drift(model, mine) == ""
    assert not differences(train(model, mine), train(model, NATIVE.model_copy(update={"update": update})))


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"optimizer": "device"}, "nothing is offloaded"),
        ({"optimizer": "device", "parameters": "host"}, "updated on the host, not on the device"),
        ({"optimizer": "host", "resume": "last_step"}, "the last step is kept on SSD"),
        ({"optimizer": "host", "gradients": "ssd"}, "on the device until the step"),
    ],
)
def test_fits_refuses_combinations_of_tiers_by_name(knobs: dict[str, Any], why: str) -> None:
    refused = ZeroInfinity.model_validate({"kind": "zero_infinity", **knobs})
    assert why in str(refused.fits(plain_program(ZOO["tied"]), target_of(refused)))
    workload, model, optimizer = build(ZOO["tied"])
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ApplyError, match=why):
        apply(model, optimizer, {"settings": settings_of(refused)}, loss=workload.loss, strict=False)
    assert all(map(torch.equal, model.parameters(), before))


def test_search_tries_each_tier_and_nothing_twice() -> None:
    tried = [each for each in variants(ZeroInfinity, target_of()) if isinstance(each, ZeroInfinity)]
    every = {
        (optimizer, parameters) for optimizer in ("ssd", "host") for parameters in ("device", "host", "ssd")
    }
    assert {(each.optimizer, each.parameters) for each in tried} == every - {("host", "device")}
    assert {each.optimizer for each in tried if each.tiles > 1} == {"ssd"}
