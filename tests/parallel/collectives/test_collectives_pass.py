"""The pass for collectives against recordings of the collectives themselves, on fake tensors and a fake
process group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.sharding_programs import target
from support.zoo_paths import ZOO

from memtune.autotune.record.recording_session import start_session
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.autotune.search.dry_runs import _with_staging, traced_under
from memtune.config.tuned_config import Settings, TunedConfig
from memtune.program.step import Program, RankClass, Resource, Step
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.sharding.communication.hierarchical import Hierarchical
from memtune.search_spaces.sharding.communication.ho_ring import HoRing
from memtune.search_spaces.sharding.communication.zeropp import ZeroPp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.technique import Target, Technique
from memtune.testing.drift_check import compare, recording_of
from memtune.workload.workload import Workload

RANKS, LOCAL = 4, 2
LOSSY: dict[str, Any] = {"qwz": True, "block": 16, "exact_below": 1000}
CASES: tuple[tuple[str, Fsdp, Technique], ...] = (
    ("gpt", Fsdp(), ZeroPp()),
    ("gpt", Fsdp(blocks_per_unit=2), ZeroPp(**LOSSY)),
    ("gpt", Fsdp(reshard_after_forward=False), ZeroPp(hpz=False, qgz=True, weight_bits=4, **LOSSY)),
    ("lora", Fsdp(), ZeroPp(qgz=True, error_feedback=True, **LOSSY)),
    ("gpt", Fsdp(), Hierarchical()),
    ("gpt", Fsdp(), HoRing(reductions=True)),
)


def where(*chosen: Technique) -> Target:
    """Fake CPU ranks, which FSDP2's pass treats as CUDA's where no message is staged."""
    return replace(target(RANKS, "cpu"), chosen={each.slot: each for each in chosen})


def predicted_and_real(model: str, *chosen: Any) -> tuple[Step, Step]:
    recording, on = recording_of(ZOO[model]), where(*chosen)
    program, plans = Program((RankClass(RANKS, recording.at(2)),), 2), {}
    for each in chosen:
        assert each.fits(program, on) is None
        plans[each.slot] = each.plan(program, on)
        program = each.rewrite(program, plans[each.slot], on)
        program.step.validate()
    config = TunedConfig(settings=Settings.of(Execution(), on.chosen), plan=plans)
    with fake_ranks(RANKS):
        session = start_session(Workload.load(ZOO[model]), recording.rung)
        trace = traced_under(session, config, 2)
    return program.step, _with_staging(trace.step)  # type: ignore[union-attr]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {case[2]}")
def test_collectives_pass_equals_recording(case: tuple[str, Fsdp, Technique]) -> None:
    model, states, communication = case
    communication = communication.model_copy(update={"ranks_per_node": LOCAL})
    found = compare(*predicted_and_real(model, states, communication))
    assert not found, found


def test_collectives_pass_without_copy_differs_from_recording() -> None:
    ours, theirs = predicted_and_real("gpt", Fsdp(), ZeroPp(ranks_per_node=LOCAL))
    without, _ = predicted_and_real("gpt", Fsdp(), ZeroPp(hpz=False, ranks_per_node=LOCAL, **LOSSY))
    assert compare(without, theirs)
    assert not compare(ours, theirs)


def test_cuda_gather_ops_share_one_stream() -> None:
    chosen = Fsdp(), ZeroPp(ranks_per_node=LOCAL, **LOSSY)
    program = Program((RankClass(RANKS, recording_of(ZOO["gpt"]).at(2)),), 2)
    on = replace(target(RANKS), chosen={each.slot: each for each in chosen})
    for each in chosen:
        program = each.rewrite(program, each.plan(program, on), on)
    step = program.step
    names = [step.names[name] for name in step.ops.name]
    packing = [
        op
        for op, name in enumerate(names)
        if "quantise" in name or name == "memtune.all_gather_into_.default"
    ]
    assert {int(step.ops.stream[op]) for op in packing} == {4}
    assert {int(step.ops.resource[op]) for op in packing if "quantise" in names[op]} == {Resource.COMPUTE}
