"""Hooks do not keep a model alive: no cycle passes through a tensor's hooks, a finalizer or DDP."""

from __future__ import annotations

import gc
import weakref

import pytest
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.autotune.record.tracer import Tracer
from memtune.autotune.search.dry_runs import dry_run
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.parallel.replicas.data_parallel import Replicas
from memtune.technique import Reason, Target
from memtune.testing.drift_check import recording_of
from memtune.testing.training import SEED, build, one_step
from memtune.workload.workload import Workload

MOE = ZOO["moe"]
GRAD_OFFLOAD = {"offload": {"states": {"kind": "zero_offload", "update": "native"}}}
COMPLETE = {"execution": {"order": {"kind": "roam"}}}


@pytest.mark.parametrize("settings", [GRAD_OFFLOAD, COMPLETE], ids=["gradient_offload", "update_at_gradient"])
def test_hooks_do_not_outlive_the_optimizer(settings: dict[str, object]) -> None:
    workload, model, optimizer = build(ZOO["tied"])
    tuned = apply(model, optimizer, {"settings": settings}, strict=False)
    one_step(workload, model, optimizer, tuned, seed=SEED)
    gone = [weakref.ref(each) for each in (model, optimizer, next(model.parameters()))]
    del workload, model, optimizer, tuned
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_recording_of_real_tensors_frees_the_model() -> None:
    """The recorder is notified of freed storages; those of the model are freed with it."""
    workload, model, optimizer = build(MOE)
    gone = weakref.ref(model)
    tracer = Tracer(model, optimizer, [])
    with tracer.recording():
        workload.loss(model, workload.make_batch(2)).backward()
    del workload, model, optimizer, tracer
    gc.collect()
    assert gone() is None


def test_dry_run_of_replicas_frees_the_model() -> None:
    """DDP keeps its hook in C++, where the garbage collector cannot find a cycle."""
    target = Target(hardware.detect("cpu"), 2)
    choice = Choice.from_document({"sharding": {"states": {"kind": "ddp"}}, "execution": {"micro_batch": 2}})
    candidate = Rewriter(recording_of(ZOO["tied"]), target).candidate(choice)
    assert isinstance(candidate, Candidate)
    assert isinstance(dry_run(Workload.load(ZOO["tied"]), candidate, target), Reason)
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Replicas]
