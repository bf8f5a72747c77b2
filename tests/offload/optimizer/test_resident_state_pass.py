"""Resident parameters are updated first: ops move or are split in two, with all storages they touch."""

from __future__ import annotations

import numpy as np
import pytest
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.record.recorder import record
from memtune.autotune.translate.translation import translate
from memtune.offload.optimizer.host_optimizer_pass import optimizer_on_host
from memtune.offload.optimizer.resident_state_pass import cannot_part, updated_first
from memtune.program.parameter_columns import columns_of
from memtune.program.step import Kind, Phase, Tier
from memtune.testing.drift_check import recording_of
from memtune.workload.workload import Workload


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_resident_parameters_are_updated_first_by_their_own_ops(device: str) -> None:
    """On CPU the optimizer goes from parameter to parameter, on CUDA one kernel works on many."""
    if device == "cuda":
        plain = translate(record(Workload.load(ZOO["tied"]), target="cuda"), hardware.find("h100-80g")).at(2)
    else:
        plain = recording_of(ZOO["tied"]).at(2)
    assert cannot_part(plain) == ""
    stays = (columns_of(plain.parameters).block >= 0) & (np.arange(len(plain.parameters)) % 3 == 0)
    step, count = updated_first(plain, stays)
    step.validate()
    ops = np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)
    whose = np.where(step.parameter_of >= 0, step.parameter_of, step.storages.owner)
    for first, mine in ((True, stays), (False, ~stays)):
        used = np.isin(step.uses.op, ops[:count] if first else ops[count:])
        touched = whose[step.uses.storage[used]]
        assert set(touched[touched >= 0].tolist()) <= set(np.flatnonzero(mine).tolist())
        assert (touched >= 0).any()
    before = plain.ops.phase == Phase.OPTIMIZER
    total = int(plain.ops.traffic_bytes[before].sum())
    assert int(step.ops.traffic_bytes[ops].sum()) == pytest.approx(total, rel=1e-3)
    assert (len(ops) > before.sum()) == (device == "cuda")
    assert step.peak_bytes() <= plain.peak_bytes()
    moved = optimizer_on_host(step, n_resident_ops=count)
    moved.validate()
    state = (
        (moved.storages.kind == Kind.OPTIMIZER) & (moved.storages.producer < 0) & (moved.storages.owner >= 0)
    )
    assert (moved.storages.tier[state & stays[moved.storages.owner]] == Tier.DEVICE).all()
    assert (moved.storages.tier[state & ~stays[moved.storages.owner]] == Tier.HOST).all()
