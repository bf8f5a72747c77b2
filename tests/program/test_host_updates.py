"""A step for a GPU whose optimizer is moved to the host has the host's ops there, as the CPU's step has."""

from __future__ import annotations

from functools import cache

import pytest
from support.zoo_paths import ZOO

from memtune.autotune.record import record
from memtune.autotune.translate import translate
from memtune.hardware import Hardware, detect, find
from memtune.offload.optimizer.host_optimizer_pass import optimizer_on_host
from memtune.program import Phase, Program, RankClass, Step, Tier, one_by_one
from memtune.search_spaces import find as technique_class
from memtune.technique import Target
from memtune.workload import Workload

GPU = find("a100")


@cache
def steps_of(model: str) -> tuple[Step, Step]:
    """Return the step on the CPU and on a GPU."""
    workload = Workload.load(ZOO[model])
    return record(workload).at(2), translate(record(workload, target="cuda"), GPU).at(2)


def updates_of(step: Step) -> list[str]:
    return [step.names[i] for i in step.ops.name[step.ops.phase == Phase.OPTIMIZER]]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("model", ["gpt", "tied", "lora", "autocast"])
def test_updates_and_host_bytes_are_those_of_a_cpu(model: str) -> None:
    cpu, gpu = steps_of(model)
    assert any("_foreach_" in name for name in updates_of(gpu))
    ours, theirs = optimizer_on_host(gpu), optimizer_on_host(cpu)
    ours.validate()
    assert updates_of(ours) == updates_of(theirs)
    assert ours.peak_bytes(Tier.HOST) == theirs.peak_bytes(Tier.HOST)


def on_ranks(kind: str, step: Step, hardware: Hardware) -> Step:
    technique = technique_class("sharding.states", kind)(kind=kind)
    program, target = (
        Program((RankClass(2, step),), 2),
        Target(hardware, chosen={technique.slot: technique}),
    )
    return technique.rewrite(program, technique.plan(program, target), target).step


@pytest.mark.parametrize("kind", ["ddp", "zero1", "fsdp"])
def test_updates_of_a_rank_are_those_of_its_shards(kind: str) -> None:
    cpu, gpu = steps_of("gpt")
    ours = optimizer_on_host(on_ranks(kind, gpu, GPU))
    ours.validate()
    theirs = optimizer_on_host(on_ranks(kind, cpu, detect("cpu")))
    assert ours.peak_bytes(Tier.HOST) == theirs.peak_bytes(Tier.HOST)


def test_step_of_a_cpu_is_unchanged() -> None:
    cpu, _ = steps_of("tied")
    assert one_by_one(cpu) is cpu
