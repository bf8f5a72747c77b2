"""Optimizer state on SSD, updated inside backward: read, update and write overlap, with the bits of an update
after it.

Distinguishing test: the read, the update and the write of all buckets but the last come before the last op of
backward; 12 bytes per parameter are read and 12 written in a step, and host memory holds three buckets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fixed_cpu import CPU, NO_HOST_COSTS
from support.state_dict_verification import verified_and_read
from support.suites.block_offload_suite import NATIVE, LayersSuite, total, without_gradients
from support.zoo_paths import ZOO

from memtune.api import Tuned, apply
from memtune.autotune.predict.simulation import simulate
from memtune.program.edit import Edit
from memtune.program.residency import WRITES_IN_FLIGHT
from memtune.program.step import Kind, Phase, Resource, Step, Tier
from memtune.runtime.memory_tiers import DEVICE, mark
from memtune.search_spaces.offload.states.lohan import Lohan
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.ssd import offload_dir, ssd_tensors
from memtune.technique import Exactness, Target
from memtune.testing import differences, rewritten, train
from memtune.testing.drift_check import drift, plain_program, target_of
from memtune.testing.training import build, config_of

BUCKET = 5242
SMALL = Lohan(kind="lohan", bucket_mib=0.005)
KEEPS = SMALL.model_copy(update={"resume": "last_step"})
AFTER = ZeroInfinity(kind="zero_infinity")


def ops(step: Step, name: str) -> np.ndarray[Any, Any]:
    return np.flatnonzero(step.ops.name == step.names.index(f"memtune.{name}.default"))


def in_backward(step: Step, name: str) -> float:
    """Return the share of the ops `name` before the last op of backward that computes."""
    computes = np.flatnonzero((step.ops.phase == Phase.BACKWARD) & (step.ops.resource == Resource.COMPUTE))
    return float((ops(step, name) < computes[-1]).mean())


@pytest.mark.usefixtures("ssd")
class TestLohan(LayersSuite):
    technique = Lohan
    models: ClassVar = {"tied": ZOO["tied"]}
    others: ClassVar = ZOO
    variants = (SMALL, Lohan(kind="lohan"))
    quick = ("tied",)

    def sabotage(self, tuned: Tuned) -> bool:
        mark(next(iter(tuned.optimizer.state.values()))["exp_avg"], DEVICE)
        return True

    def test_read_update_and_write_are_inside_backward(self) -> None:
        """The mechanism: event order. Updated after backward (`zero_infinity`), none of the three begins
        before its end.
        """
        step, after = rewritten(ZOO["gpt"], SMALL), rewritten(ZOO["gpt"], AFTER)
        for name in ("from_ssd", "host_update_", "copy_to_device_", "write_ssd_"):
            assert in_backward(step, name) > 0.7
            assert in_backward(after, name) == 0.0
        reads, updates, ups = (ops(step, name) for name in ("from_ssd", "host_update_", "copy_to_device_"))
        assert (
            reads[1:-1] < ups[:-2]
        ).all()  # a piece is being read while one of the bucket before it is updated
        assert (updates[:-1] < ups[:-1]).all()

    def test_bytes_on_the_drive_and_in_host_memory_follow_the_formula(self) -> None:
        plain, step = rewritten(ZOO["gpt"]), rewritten(ZOO["gpt"], SMALL)
        sizes = [int(plain.storages.bytes[each.gradient]) // 4 for each in plain.parameters]
        numel, largest = sum(sizes), max(sizes)
        assert (
            total(step, Resource.SSD_READ)
            == total(step, Resource.SSD_WRITE)
            == step.peak_bytes(Tier.SSD)
            == 12 * numel
        )
        assert total(step, Resource.DEVICE_TO_HOST) == 4 * numel
        assert total(step, Resource.HOST_TO_DEVICE) - total(plain, Resource.HOST_TO_DEVICE) == 4 * numel
        bucket = BUCKET // 4 + largest
        counters, batch = 4 * len(plain.parameters), plain.peak_bytes(Tier.HOST)
        assert (
            step.peak_bytes(Tier.HOST) - counters - batch
            <= 12 * (2 * bucket + (WRITES_IN_FLIGHT + 1) * largest) + 4 * 2 * bucket
        )
        assert not (step.storages.kind[step.storages.tier == Tier.DEVICE] == Kind.OPTIMIZER).any()

    def test_keeping_the_last_step_takes_twice_the_space_for_the_same_traffic(self) -> None:
        step, kept = rewritten(ZOO["tied"], SMALL), rewritten(ZOO["tied"], KEEPS)
        assert kept.peak_bytes(Tier.SSD) == 2 * step.peak_bytes(Tier.SSD)
        assert total(kept, Resource.SSD_WRITE) == total(step, Resource.SSD_WRITE)
        assert (kept.peak_bytes(), kept.peak_bytes(Tier.HOST)) == (
            step.peak_bytes(),
            step.peak_bytes(Tier.HOST),
        )
        self.check_drift("tied", KEEPS)
        found, wanted = (without_gradients(train(ZOO["tied"], each)) for each in (KEEPS, NATIVE))
        assert not differences(found, wanted)
        ssd_tensors.folder().remove()

    @pytest.mark.parametrize("technique", [SMALL, KEEPS], ids=["one slot", "two slots"])
    def test_verify_and_state_dict_wait_for_writes(self, technique: Lohan) -> None:
        """Updates that overlap with backward are written first."""
        workload, model, optimizer = build(ZOO["tied"])
        tuned = apply(model, optimizer, config_of(ZOO["tied"], technique), loss=workload.loss, strict=False)
        with tuned.micro_batch(last=True):
            workload.loss(tuned.model, workload.make_batch(2)).backward()
        seen = verified_and_read(tuned.optimizer)
        assert seen
        assert all(torch.equal(then, now) for then, now in seen)
        ssd_tensors.folder().remove()

    def test_drive_traffic_is_hidden_by_backward(self) -> None:
        """If backward takes longer than the drive, most of the update overlaps with it; the embedding's
        gradient is ready last.
        """
        program, target = plain_program(ZOO["gpt"], 64), Target(CPU)
        slow_drive = {"ssd_read_bytes_per_s": 1e9, "ssd_write_bytes_per_s": 1e9}
        hardware, found = replace(CPU, **slow_drive, hook_s=0.0, **NO_HOST_COSTS), {}
        for technique in (SMALL, AFTER):
            step = technique.rewrite(program, technique.plan(program, target), target).step
            found[technique.kind] = simulate(program.with_step(step), hardware, level="events").step_s
        edit = Edit(program.step)
        edit.drop_ops(program.step.ops.phase == Phase.OPTIMIZER)
        before = simulate(program.with_step(edit.done()), hardware, level="events").step_s
        assert found["lohan"] - before < 0.5 * (found["zero_infinity"] - before)

    @pytest.mark.slow
    @pytest.mark.parametrize("model", ZOO)
    def test_training_is_as_predicted(self, model: str) -> None:
        if (reason := SMALL.fits(plain_program(ZOO[model]), target_of())) is not None:
            pytest.skip(str(reason))
        if model != "moe":  # the recorder runs it for real, and keeps what it ran
            assert not drift(ZOO[model], SMALL)
        found, wanted = (without_gradients(train(ZOO[model], each)) for each in (SMALL, NATIVE))
        assert not differences(found, wanted)

    @pytest.mark.slow
    def test_float32_masters_of_bfloat16_parameters(self) -> None:
        master = SMALL.model_copy(update={"update": "master"})
        assert not drift(ZOO["tobf16"], master)
        host = without_gradients(train(ZOO["tobf16"], NATIVE.model_copy(update={"update": "master"})))
        assert not differences(without_gradients(train(ZOO["tobf16"], master)), host)
        assert (SMALL.exactly(), master.exactly()) == (Exactness.REORDERED, Exactness.LOSSY)

    def test_fits_refuses_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        program = plain_program(ZOO["gpt"])
        assert "under none" in str(SMALL.fits(program, replace(target_of(), ranks=2)))
        assert "compiled" in str(SMALL.fits(program, replace(target_of(), compiled="blocks")))
        assert "master" in str(SMALL.fits(plain_program(ZOO["tobf16"]), target_of()))
        edit, step = (
            Edit(program.step),
            program.step,
        )  # a weight that backward still reads when its gradient is complete
        last = np.flatnonzero((step.ops.phase == Phase.BACKWARD) & (step.ops.resource == Resource.COMPUTE))[
            -1:
        ].astype(np.int32)
        edit.add_uses(last, np.asarray([step.parameters[-3].storage], np.int32))
        why = SMALL.fits(program.with_step(edit.done()), target_of())
        assert "after its gradient is complete" in str(why)
        assert "zero_infinity" in str(why)
        monkeypatch.delenv(offload_dir.VARIABLE)
        assert "no directory" in str(SMALL.fits(program, target_of()))
