"""Steps of first update, evaluation and checkpoint; autotune/test_moments.py compares them with real runs."""

from __future__ import annotations

import numpy as np
import pytest
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.record.recorder import record
from memtune.autotune.translate.translation import translate
from memtune.parallel.sharding.fsdp_pass import Sharding, shard_states
from memtune.program.edit import accumulate_gradients
from memtune.program.lifecycle_steps import checkpoint, evaluation, first_step
from memtune.program.step import FOREVER, Kind, Phase, Step, Tier
from memtune.testing.drift_check import recording_of
from memtune.workload.workload import Workload

MODELS = ("cnn_bn", "gpt", "lora", "lstm")


def plain(model: str) -> Step:
    return recording_of(ZOO[model]).at(2)


@pytest.mark.parametrize("model", MODELS)
def test_first_step_allocates_state_at_the_first_update(model: str) -> None:
    steady, first = plain(model), first_step(plain(model))
    first.validate()
    state = int(steady.storages.bytes[steady.storages.kind == Kind.OPTIMIZER].sum())
    update = int(np.flatnonzero(steady.ops.phase == Phase.OPTIMIZER)[0])
    assert state > 0
    assert np.array_equal(first.live_bytes()[:update], steady.live_bytes()[:update] - state)
    assert np.array_equal(first.live_bytes()[update:], steady.live_bytes()[update:])


@pytest.mark.parametrize("model", MODELS)
def test_evaluation_has_no_saves_and_no_dropout(model: str) -> None:
    step = evaluation(accumulate_gradients(plain(model)))
    step.validate()
    assert set(step.ops.phase.tolist()) == {Phase.FORWARD}
    assert not step.saves.n
    assert step.storages.bytes[step.storages.kind == Kind.GRADIENT].sum() == 0
    assert not [name for name in (step.names[i] for i in step.ops.name) if "bernoulli" in name]
    assert step.peak_bytes() < plain(model).peak_bytes()


def test_evaluation_removes_fused_dropout_of_cuda() -> None:
    recording = translate(record(Workload.load(ZOO["gpt"]), target="cuda"), hardware.find("h100-80g"))
    step = recording.at(2)
    assert "aten.native_dropout.default" in {step.names[i] for i in step.ops.name}
    after = evaluation(step)
    after.validate()
    assert "aten.native_dropout.default" not in {after.names[i] for i in after.ops.name}


def test_checkpoint_gathers_sharded_parameters_and_state() -> None:
    whole, shards = plain("gpt"), shard_states(plain("gpt"), Sharding(4))
    step = checkpoint(shards, parameters=4, optimizer=4, stages_messages=False, uploads=False)
    step.validate()

    def resident_bytes(step: Step) -> int:
        return int(
            step.storages.bytes[
                (step.storages.producer < 0)
                & (step.storages.held_until == FOREVER)
                & (step.storages.tier == Tier.DEVICE)
            ].sum()
        )

    counters = len(whole.parameters) * 4  # Adam's step counters are replicated
    assert step.peak_bytes() == resident_bytes(shards) + resident_bytes(whole) - counters


def test_checkpoint_without_sharding_allocates_nothing() -> None:
    step = plain("gpt")
    after = checkpoint(step, parameters=1, optimizer=1, stages_messages=True, uploads=True)
    resident = (
        (step.storages.producer < 0)
        & (step.storages.held_until == FOREVER)
        & (step.storages.tier == Tier.DEVICE)
    )
    assert after.peak_bytes() == int(step.storages.bytes[resident].sum())
