"""The pass of ZeRO 1 and 2 against recordings of the mechanism itself, op by op and byte by byte, on ranks
that are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
from support.sharding_programs import bytes_of, context_of, traffic_of_updates
from support.zoo_paths import ZOO

import memtune.parallel.sharding.sharded_buckets as mechanism
from memtune.activations.offload.activation_offload_pass import move_activations
from memtune.activations.offload.selection_plan import OffloadClaim
from memtune.activations.recompute.recompute_pass import recompute_blocks
from memtune.autotune.record.recording_session import start_session
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.offload.optimizer.host_optimizer import HostOptimizer
from memtune.offload.optimizer.host_optimizer_pass import optimizer_on_host
from memtune.parallel.sharding.factors import Factors
from memtune.parallel.sharding.nested_sharding import divide
from memtune.parallel.sharding.nested_sharding_pass import Division, divide_states
from memtune.parallel.sharding.zero_partition_pass import Partitioning, partition_states
from memtune.program.edit import accumulate_gradients
from memtune.program.step import Kind, Recording, Step
from memtune.testing.drift_check import compare, recording_of
from memtune.workload.workload import Workload

RANKS = 4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    model: str
    bucket_bytes: int = 50_000
    micro_batches: int = 1
    every: bool = False
    full: bool = False
    move: bool = False
    host: bool = False
    factors: tuple[int, int, int] = (1, 1, RANKS)

    def __str__(self) -> str:
        flags = {"every": self.every, "full": self.full, "moved": self.move, "host": self.host}
        on = [name for name, is_on in flags.items() if is_on]
        over = [] if self.factors == (1, 1, RANKS) else [f"over {self.factors}"]
        return " ".join(
            [self.model, *over, f"{self.bucket_bytes} bytes", f"{self.micro_batches} micro-batches", *on]
        )


CASES = (
    Case("gpt"),
    Case("gpt", bucket_bytes=1, full=True),
    Case("gpt", micro_batches=2, full=True, host=True),
    Case("gpt", micro_batches=2, every=True, move=True),
    Case("tied", micro_batches=2, every=True, host=True),
    Case("tied", bucket_bytes=1 << 30, host=True),
    Case("cnn_bn", micro_batches=2, every=True, full=True),
    Case("lora", micro_batches=2),
    Case("lstm", micro_batches=2, every=True),
    Case("autocast", full=True, move=True),
    Case("tobf16", micro_batches=2, every=True, host=True),
    Case("gpt", factors=(1, 1, 2)),
    Case("gpt", factors=(1, 2, 2), micro_batches=2),
    Case("gpt", factors=(1, 2, 4), micro_batches=2),
    Case("gpt", factors=(2, 2, 4)),
    Case("gpt", factors=(2, 2, 4), micro_batches=2, full=True),
    Case("gpt", factors=(2, 4, 4), micro_batches=2),
    Case("gpt", factors=(2, 1, 4), micro_batches=2),
    Case("gpt", factors=(4, 1, 4), micro_batches=2),
    Case("lora", factors=(2, 1, 2), micro_batches=2, move=True),
    Case("cnn_bn", factors=(2, 2, 4), micro_batches=2),
    Case("tied", factors=(2, 4, 4), host=True),
)


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with fake_ranks(RANKS):
        yield


@cache
def recorded(model: str) -> tuple[Workload, Recording]:
    return Workload.load(ZOO[model]), recording_of(ZOO[model])


def predicted(case: Case) -> Step:
    step = recorded(case.model)[1].at(2)
    blocks = list(range(len(step.blocks)))
    if case.micro_batches > 1:
        step = accumulate_gradients(step)
    if case.full:
        step = recompute_blocks(step, blocks, None)
    if case.move:
        step = move_activations(step, [OffloadClaim(block, 1.0) for block in blocks])
    factors = Factors(1, RANKS, RANKS) if case.every else Factors(*case.factors)
    step = divide_states(step, Division(factors, RANKS, RANKS, case.micro_batches, case.bucket_bytes))
    if case.host:
        step = optimizer_on_host(step)
    step.validate()
    return step


def real(case: Case) -> Step:
    workload, recording = recorded(case.model)
    session = start_session(workload, recording.rung)
    if case.host:
        session.warm_up(2)
    context = context_of(session)
    filled = mechanism._filled
    with (
        session.mode,
        patch.object(mechanism, "_filled", lambda parameters, _: filled(parameters, case.bucket_bytes)),
    ):
        for region in context.activations.regions:
            if case.full:
                context.activations.claim_recompute(region.index)
            if case.move:
                context.activations.claim_move(region.index, 1.0, 0)
        context.activations.install()
        divide(
            context,
            Factors(1, RANKS, RANKS) if case.every else Factors(*case.factors),
            kind="amsp",
            bucket_cap_mb=1,
        )
        if case.host:
            HostOptimizer(context)
    session = replace(session, sync=context.loop.sync or session.sync)
    for _ in range(
        2
    ):  # in the second step DTensor still works out shapes it has not met, on tensors that are counted
        session.warm_up(2)
    return session.trace(2, micro_batches=case.micro_batches, trace_last=True)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_zero_partition_pass_equals_recording(case: Case) -> None:
    ours, theirs = predicted(case), real(case)
    assert compare(ours, theirs) == ""
    traffic = [traffic_of_updates(step, recorded(case.model)[1].at(2)) for step in (ours, theirs)]
    # A bucket's share is that of its parameters together, a parameter's may be up to a row more.
    np.testing.assert_allclose(*traffic, rtol=0.1, atol=64)


def test_zero_partition_pass_shards_state_and_gradients() -> None:
    whole = recorded("gpt")[1].at(2)
    step = partition_states(whole, Partitioning(RANKS, 1 << 30))
    flags = 4 * len(whole.parameters)
    assert bytes_of(step, Kind.PARAMETER) == bytes_of(whole, Kind.PARAMETER)
    assert bytes_of(step, Kind.OPTIMIZER) * RANKS == bytes_of(whole, Kind.OPTIMIZER)
    assert (bytes_of(step, Kind.GRADIENT) - flags) * RANKS == bytes_of(whole, Kind.GRADIENT)


def test_zero_partition_pass_counts_sums_of_middle_micro_batches() -> None:
    step = accumulate_gradients(recorded("lstm")[1].at(2))
    two, many = (partition_states(step, Partitioning(RANKS, 20_000, count)) for count in (2, 3))
    assert many.peak_bytes() >= two.peak_bytes()
    zero2 = partition_states(step, Partitioning(RANKS, 20_000, 3, every_micro_batch=True))
    assert zero2.peak_bytes() < two.peak_bytes()


def test_zero_partition_pass_fills_missing_gradient() -> None:
    step = recorded("gpt")[1].at(2)
    parameters = list(step.parameters)
    parameters[4] = parameters[4]._replace(gradient=-1)
    without = partition_states(replace(step, parameters=tuple(parameters)), Partitioning(RANKS, 1 << 30))
    without.validate()
    names = [without.names[name] for name in without.ops.name]
    assert (
        names.count("aten.zeros_like.default")
        - [step.names[name] for name in step.ops.name].count("aten.zeros_like.default")
        == 1
    )
    assert names.count("memtune.reduce_scatter_into_.default") == 1


def test_zero_partition_pass_keeps_untrained_model() -> None:
    step = recorded("gpt")[1].at(2)
    frozen = replace(step, parameters=tuple(p._replace(trainable=False) for p in step.parameters))
    assert partition_states(frozen, Partitioning(RANKS, 1 << 20)) is frozen
