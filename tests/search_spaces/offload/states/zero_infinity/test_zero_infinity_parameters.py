"""Parameters offloaded to SSD and host together with an optimizer on SSD, by the suite of all block
offloads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from support.suites.block_offload_suite import LayersSuite, block_bytes, total
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.autotune.record.recording_session import start_session
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.errors import ApplyError
from memtune.program.edit import accumulate_gradients
from memtune.program.residency import WRITES_IN_FLIGHT
from memtune.program.step import FOREVER, Kind, Program, RankClass, Resource, Step, Tier, traffic_bytes
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.testing import drift, rewritten
from memtune.testing.drift_check import compare, plain_program, recording_of, target_of
from memtune.testing.training import build, config_of, settings_of
from memtune.workload.workload import Workload

ON_SSD = ZeroInfinity(kind="zero_infinity", parameters="ssd")


GRADIENTS_TOO = ON_SSD.model_copy(update={"gradients": "ssd"})
ON_LINKS = {"ssd_write": Resource.SSD_WRITE, "ssd_read": Resource.SSD_READ}


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
class TestGradientsOnSsd(LayersSuite):
    technique = ZeroInfinity
    models: ClassVar = {name: ZOO[name] for name in ("tied", "gpt")}
    variants = (
        GRADIENTS_TOO,
        GRADIENTS_TOO.model_copy(update={"parameters": "host", "optimizer_prefetch": 0}),
    )
    quick = ("tied",)

    @classmethod
    def default(cls) -> ZeroInfinity:
        return GRADIENTS_TOO


@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("parameters", [pytest.param("host", marks=pytest.mark.slow), "ssd"])
def test_gradients_on_ssd_are_written_and_read_as_predicted(parameters: str) -> None:
    """The mechanism: host memory holds a few gradients instead of all, for a write and a read of each."""
    there = GRADIENTS_TOO.model_copy(update={"parameters": parameters})
    assert drift(ZOO["tied"], there) == ""
    step, before = (
        rewritten(ZOO["tied"], each) for each in (there, there.model_copy(update={"gradients": None}))
    )
    gradients = sum(block_bytes(rewritten(ZOO["tied"])))
    for resource in (Resource.SSD_WRITE, Resource.SSD_READ):
        assert total(step, resource) - total(before, resource) == gradients
    largest = max(4 * int(np.prod(p.shape)) for p in step.parameters)
    assert step.peak_bytes(Tier.SSD) - before.peak_bytes(Tier.SSD) == gradients
    assert (
        step.peak_bytes(Tier.HOST)
        <= before.peak_bytes(Tier.HOST) - gradients + (WRITES_IN_FLIGHT + 2) * largest
    )
    assert step.peak_bytes() == before.peak_bytes()


def predicted(micro_batches: int) -> Step:
    """Return the prediction for the model with everything on SSD."""
    rewriter = Rewriter(recording_of(ZOO["tied"]), target_of())
    execution = {"micro_batch": 2, "accumulate": micro_batches}
    found = rewriter.candidate(Choice.from_document({**settings_of(GRADIENTS_TOO), "execution": execution}))
    assert isinstance(found, Candidate), found
    return found.program.step


@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_gradients_on_ssd_are_bitwise_those_on_the_host(micro_batches: int) -> None:
    """Each micro-batch writes each gradient once, and all but the first read it once more."""
    gradients, found = sum(block_bytes(rewritten(ZOO["tied"]))), []
    for technique in (GRADIENTS_TOO, ON_SSD):
        workload, model, optimizer = build(ZOO["tied"])
        tuned = apply(model, optimizer, config_of(ZOO["tied"], technique), loss=workload.loss, strict=False)
        for step in range(3):
            torch.manual_seed(step)
            COUNTERS.take()
            tuned.step([workload.make_batch(2) for _ in range(micro_batches)])
        weights = {name: value.clone() for name, value in tuned.state_dict()["model"].items()}
        counted = COUNTERS.take()
        found.append((weights, counted["ssd_write"], counted["ssd_read"]))
        facts = tuned.audit()["offload.states"]
    (mine, written, read), (wanted, written_before, read_before) = found
    assert all(torch.equal(value, wanted[name]) for name, value in mine.items())
    assert written - written_before == read - read_before == micro_batches * gradients
    there = predicted(micro_batches)
    assert {"ssd_write": written, "ssd_read": read} == {
        link: int(traffic_bytes(there, micro_batches)[there.ops.resource == resource].sum())
        for link, resource in ON_LINKS.items()
    }
    assert "gradient_bytes_written" not in facts


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("parameters", ["host", "ssd"])
def test_later_micro_batch_on_ssd_is_as_predicted(parameters: str, tiles: int) -> None:
    """The sums are read, added to and written again, op by op."""
    technique = GRADIENTS_TOO.model_copy(update={"parameters": parameters, "tiles": tiles})
    recording, target = recording_of(ZOO["tied"]), target_of(technique)
    program = Program((RankClass(1, accumulate_gradients(recording.at(2))),), 2, 2)
    session = start_session(Workload.load(ZOO["tied"]), recording.rung)
    with session.entered():
        tuned = apply(session.model, session.optimizer, config_of(ZOO["tied"], technique), strict=False)
    session = replace(session, sync=tuned._context.loop.sync or session.sync)
    session.warm_up(2)
    real = session.trace(2, micro_batches=2, trace_last=True)
    assert compare(technique.rewrite(program, technique.plan(program, target), target).step, real) == ""


@pytest.mark.usefixtures("ssd")
def test_sums_on_ssd_ignore_activations_kept_by_a_module() -> None:
    """A module that stores an activation in an attribute of its own (`self.aux = …`)."""
    recording, target = recording_of(ZOO["tied"]), target_of(GRADIENTS_TOO)
    step = accumulate_gradients(recording.at(2))
    kept = np.flatnonzero((step.storages.kind == Kind.TEMPORARY) & (step.storages.producer >= 0))[0]
    held_until = step.storages.held_until.copy()
    held_until[kept] = FOREVER
    program = Program((RankClass(1, step.with_storages(held_until=held_until)),), 2, 2)
    after = GRADIENTS_TOO.rewrite(program, GRADIENTS_TOO.plan(program, target), target).step
    after.validate()
    assert (after.freed_after[after.storages.tier == Tier.DEVICE] == FOREVER).any()


@pytest.mark.usefixtures("ssd")
def test_zero_grad_discards_gradients_on_ssd() -> None:
    """`zero_grad` between two backward passes, in the user's own loop."""
    found = []
    for technique in (GRADIENTS_TOO, ON_SSD):
        workload, model, optimizer = build(ZOO["tied"])
        apply(model, optimizer, config_of(ZOO["tied"], technique), strict=False)
        for step in range(3):
            torch.manual_seed(step)
            workload.loss(model, workload.make_batch(2)).backward()
            if step != 1:
                optimizer.step()
            optimizer.zero_grad()
        found.append([value.clone() for value in model.state_dict().values()])
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("ssd")
def test_offloaded_gradients_of_resident_parameters_are_refused() -> None:
    nonsense = ZeroInfinity(kind="zero_infinity", gradients="ssd")
    assert "on the device until the step" in str(
        nonsense.fits(plain_program(ZOO["tied"]), target_of(nonsense))
    )
    workload, model, optimizer = build(ZOO["tied"])
    with pytest.raises(ApplyError, match="on the device until the step"):
        apply(model, optimizer, config_of(ZOO["tied"], nonsense), loss=workload.loss, strict=False)


@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("parameters", ["host", "ssd"])
def test_offloaded_parameters_on_ranks_need_averaged_gradients(parameters: str) -> None:
    """A config without sharding of states: ranks would update weights by gradients that no component
    averages.
    """
    there = ON_SSD.model_copy(update={"parameters": parameters})
    workload, model, optimizer = build(ZOO["tied"])
    before = [parameter.clone() for parameter in model.parameters()]
    assert "whole on each, or gathered" in str(
        there.fits(plain_program(ZOO["tied"]), replace(target_of(there), ranks=2))
    )
    with fake_ranks(2), pytest.raises(ApplyError, match="gathered from all"):
        apply(model, optimizer, {"settings": settings_of(there)}, loss=workload.loss, strict=False)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
class TestParametersOnSsd(LayersSuite):
    technique = ZeroInfinity
    models: ClassVar = {name: ZOO[name] for name in ("tied", "gpt")}
    variants = (ON_SSD, ZeroInfinity(kind="zero_infinity", parameters="host", on_device=1))
    quick = ("tied",)

    @classmethod
    def default(cls) -> ZeroInfinity:
        return ON_SSD

    @pytest.mark.parametrize(
        "model", sorted(set(ZOO) - {"moe"})
    )  # recorded for real, which keeps the model and its file
    def test_training_is_as_predicted(self, model: str) -> None:
        self._skip_unless_it_fits(model, ON_SSD)
        self.check_drift(model, ON_SSD)
        self.check_training(model, ON_SSD)
