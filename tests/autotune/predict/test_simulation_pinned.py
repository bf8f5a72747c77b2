"""Pinned host memory is held as powers of two if there is a GPU: which storages are pinned, and predictions
of the host.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.predict.simulation import held_bytes, next_power_of_two, simulate
from memtune.program.step import Kind, Program, Tier
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.testing.drift_check import planned

GPU, CPU = hardware.find("h100-80g"), hardware.detect("cpu")


def test_next_power_of_two_rounds_up() -> None:
    sizes = np.array([1, 2, 3, 4, 5, 4096, 4097, 3 << 20, 1 << 34, (1 << 34) + 1, (1 << 48) + 1])
    assert next_power_of_two(sizes).tolist() == [
        1,
        2,
        4,
        4,
        8,
        4096,
        8192,
        4 << 20,
        1 << 34,
        1 << 35,
        1 << 49,
    ]


@pytest.mark.parametrize(
    "technique", [CopyOut(min_bytes=0), OptimizerCpu(kind="optimizer_cpu", update="native")]
)
def test_held_bytes_round_pinned_copies_only_on_gpu(technique: CopyOut | OptimizerCpu) -> None:
    """Moments are made on the host: plain memory."""
    program = planned(ZOO["gpt"], technique)[0]
    step = program.step
    assert held_bytes(step, CPU) is step.storages.bytes
    held = held_bytes(step, GPU)
    on_host = step.storages.tier == Tier.HOST
    assert (held[~on_host] == step.storages.bytes[~on_host]).all()
    plain = on_host & np.isin(step.storages.kind, (Kind.OPTIMIZER, Kind.BUFFER))
    assert (held[plain] == step.storages.bytes[plain]).all()
    locked = on_host & ~plain
    assert (held[locked] == [1 << (int(n) - 1).bit_length() for n in step.storages.bytes[locked]]).all()
    assert held[locked].sum() > step.storages.bytes[locked].sum()
    rounded = program.with_step(step.with_storages(bytes=held))
    assert host_peak(program, GPU) == host_peak(rounded, CPU) > host_peak(program, CPU)


@pytest.mark.slow
def test_held_bytes_do_not_round_master_weights() -> None:
    step = planned(ZOO["tobf16"], OptimizerCpu(kind="optimizer_cpu", update="master"))[0].step
    masters = (step.storages.tier == Tier.HOST) & (step.storages.kind == Kind.PARAMETER)
    assert masters.any()
    assert (held_bytes(step, GPU)[masters] == step.storages.bytes[masters]).all()


def host_peak(program: Program, on: hardware.Hardware) -> int:
    return simulate(program, on).host_peak_bytes
