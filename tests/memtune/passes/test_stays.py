"""Some parameters are updated first, the others afterwards: each op once, or in two parts, with all that it touches."""

from __future__ import annotations

import numpy as np
import pytest
from zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.record import record
from memtune.autotune.translate import translate
from memtune.parameters import columns_of
from memtune.passes.host_optimizer import optimizer_on_host
from memtune.passes.stays import cannot_part, updated_first
from memtune.program import Kind, Phase, Tier
from memtune.testing.drift import recording_of
from memtune.workload import Workload


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_stays_is_updated_first_and_by_itself(device: str) -> None:
    """On CPU the optimizer goes from parameter to parameter, on CUDA one kernel works on many."""
    if device == "cuda":
        plain = translate(record(Workload.load(ZOO["tied"]), target="cuda"), hardware.find("h100-80g")).at(2)
    else:
        plain = recording_of(ZOO["tied"]).at(2)
    assert cannot_part(plain) == ""
    stays = (columns_of(plain.parameters).block >= 0) & (np.arange(len(plain.parameters)) % 3 == 0)
    step, count = updated_first(plain, stays)
    step.validate()
    ops = np.flatnonzero(step.op_phase == Phase.OPTIMIZER)
    whose = np.where(step.parameter_of >= 0, step.parameter_of, step.owner)
    for first, mine in ((True, stays), (False, ~stays)):
        used = np.isin(step.use_op, ops[:count] if first else ops[count:])
        touched = whose[step.use_storage[used]]
        assert set(touched[touched >= 0].tolist()) <= set(np.flatnonzero(mine).tolist())
        assert (touched >= 0).any()
    before = plain.op_phase == Phase.OPTIMIZER
    total = int(plain.op_traffic_bytes[before].sum())
    assert int(step.op_traffic_bytes[ops].sum()) == pytest.approx(total, rel=1e-3)
    assert (len(ops) > before.sum()) == (device == "cuda")
    assert step.peak_bytes() <= plain.peak_bytes()
    moved = optimizer_on_host(step, stay=count)
    moved.validate()
    state = (moved.kind == Kind.OPTIMIZER) & (moved.producer < 0) & (moved.owner >= 0)
    assert (moved.tier[state & stays[moved.owner]] == Tier.DEVICE).all()
    assert (moved.tier[state & ~stays[moved.owner]] == Tier.HOST).all()
