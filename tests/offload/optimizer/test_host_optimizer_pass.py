"""The host-optimizer pass on its own."""

from __future__ import annotations

import numpy as np
import pytest
from support.zoo_paths import ZOO

from memtune.autotune.record import record
from memtune.autotune.translate import translate
from memtune.hardware import find
from memtune.offload.optimizer.host_optimizer_pass import Native, optimizer_on_host
from memtune.program.step import Kind, Phase, Resource, Step, Tier
from memtune.testing.drift_check import plain_program
from memtune.workload import Workload


def step_of(model: str) -> Step:
    return plain_program(ZOO[model]).step


@pytest.mark.parametrize("model", ZOO)
def test_updates_run_on_host_threads_and_touch_host_memory_only(model: str) -> None:
    new = optimizer_on_host(step_of(model))
    new.validate()
    update = (new.ops.phase == Phase.OPTIMIZER) & (new.ops.resource == Resource.HOST_THREADS)
    assert update.any()
    touched = new.uses.storage[update[new.uses.op]]
    assert (new.storages.tier[touched] == Tier.HOST).all()
    assert (new.storages.tier[new.storages.kind == Kind.OPTIMIZER] == Tier.HOST).all()


def test_frozen_weights_have_no_host_copy() -> None:
    step = step_of("lora")
    new = optimizer_on_host(step)
    trainable = sum(int(step.storages.bytes[p.storage]) for p in step.parameters if p.trainable)
    masters = (new.storages.kind == Kind.PARAMETER) & (new.storages.tier == Tier.HOST)
    assert (
        int(new.storages.bytes[masters].sum())
        == trainable
        < sum(int(step.storages.bytes[p.storage]) for p in step.parameters)
    )


def test_gradients_are_freed_one_after_the_other() -> None:
    step = step_of("gpt")
    new = optimizer_on_host(step)
    down = np.flatnonzero(new.ops.resource == Resource.DEVICE_TO_HOST)
    live = new.live_bytes()[down]
    assert (np.diff(live) < 0).all()


def test_step_without_optimizer_is_unchanged() -> None:
    step = step_of("gpt")
    phase = np.where(step.ops.phase == Phase.OPTIMIZER, Phase.BACKWARD, step.ops.phase)
    without = step.with_ops(phase=phase.astype(step.ops.phase.dtype))
    assert optimizer_on_host(without) is without


def test_native_update_replaces_the_step_counters_of_an_accelerators_optimizer() -> None:
    recording = translate(record(Workload.load(ZOO["tied"]), target="cuda"), find("a100"))
    new = optimizer_on_host(recording.at(2), Native())
    names = {new.names[i] for i in new.ops.name[new.ops.phase == Phase.OPTIMIZER]}
    assert names == {"memtune.host_update_.default", "memtune.copy_to_device_.default"}
