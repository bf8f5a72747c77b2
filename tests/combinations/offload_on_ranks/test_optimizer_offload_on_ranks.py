"""Offload of states on several ranks: bits of the native update under the same sharding, counted bytes, and
peaks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gloo import run_ranks
from support.ranks.optimizer_offload_on_ranks import check_on_ranks
from support.zoo_paths import ZOO
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from memtune import hardware
from memtune.api import apply
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.errors import ApplyError
from memtune.program.step import Step
from memtune.search_spaces.offload.states.lohan import Lohan
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.smart_infinity import SmartInfinity
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.search_spaces.offload.states.zero_offload import ZeroOffload
from memtune.search_spaces.sharding.parallel.tensor import TensorParallel
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.search_spaces.sharding.states.mics import Mics
from memtune.search_spaces.sharding.states.zero1 import Zero1
from memtune.search_spaces.sharding.states.zero2 import Zero2
from memtune.technique import Target, Technique
from memtune.testing.drift_check import plain_program, recording_of, target_of
from memtune.testing.training import SEED, build, differences, settings_of, train_under

NATIVE = OptimizerCpu(kind="optimizer_cpu", update="native")
FSDP = Fsdp(kind="fsdp")
SHARDINGS = [Ddp(kind="ddp"), Zero1(kind="zero1"), FSDP]
BUCKETS = ZeroOffload(kind="zero_offload", bucket_mib=0.005)
WHEN_READY = [
    BUCKETS,
    ZeroOffload(kind="zero_offload"),
    OptimizerCpu(kind="optimizer_cpu", update="native", trigger="per_layer"),
    Lohan(kind="lohan", bucket_mib=0.005),
    SmartInfinity(kind="smart_infinity", gradients="backward", bucket_mib=0.005),
]
NO_HOST_PEAK = (OptimizerCpu, SmartInfinity)
"""Overlapped updates make the host's peak a race; the ledger does not count memory shared with processes."""
DDP = Ddp(kind="ddp")
REDUCING = [
    (Zero1(kind="zero1"), 1),
    (Zero1(kind="zero1", bucket_cap_mb=1), 3),
    (Zero2(kind="zero2"), 3),
    (FSDP, 1),
    (FSDP, 3),
]


def named(each: Any) -> str:
    return f"{each[0].kind}-{each[1]}" if isinstance(each, tuple) else f"{each.kind}"


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("sharding", SHARDINGS, ids=named)
@pytest.mark.parametrize(
    "technique", [SmartInfinity(kind="smart_infinity"), ZeroInfinity(kind="zero_infinity")], ids=named
)
def test_state_on_ssd(tmp_path: Path, technique: Technique, sharding: Technique) -> None:
    """Each rank has its part of the state in its own files, or updaters."""
    check_on_ranks(tmp_path, technique, sharding, NATIVE)


def test_zero_offload_offloads_reduced_gradients(tmp_path: Path) -> None:
    """ZeRO-Offload with FSDP: each rank's rows are offloaded, and updated on its host."""
    check_on_ranks(tmp_path, BUCKETS, FSDP, NATIVE, model="tied", host_rel=0.02, parts=2)


@pytest.mark.parametrize(
    ("technique", "parts"),
    [
        (BUCKETS, 1),
        *(pytest.param(each, parts, marks=pytest.mark.slow) for each in WHEN_READY for parts in (1, 3)),
    ],
)
@pytest.mark.usefixtures("ssd")
def test_offloaded_gradients_are_those_reduced_in_bfloat16(
    tmp_path: Path, technique: Technique, parts: int
) -> None:
    """FSDP2 casts narrow gradients to the parameters' type after it has reduced them."""
    narrow = FSDP.model_copy(update={"param_dtype": "bfloat16"})
    # The recording has no scratch of kernels, which oneDNN's products in bfloat16 take.
    check_on_ranks(tmp_path, technique, narrow, NATIVE, model="tied", parts=parts, peak_rel=0.15)


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize(("sharding", "parts"), REDUCING, ids=str)
@pytest.mark.parametrize("technique", WHEN_READY, ids=named)
def test_offloaded_gradients_under_every_reducing_technique(
    tmp_path: Path, technique: Technique, sharding: Technique, parts: int
) -> None:
    """With every technique that reduces gradients in backward."""
    host_rel = None if isinstance(technique, NO_HOST_PEAK) else 0.02
    check_on_ranks(tmp_path, technique, sharding, NATIVE, host_rel=host_rel, parts=parts)


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("technique", WHEN_READY, ids=named)
def test_replicas_average_each_gradient_when_it_is_ready(
    tmp_path: Path, technique: Technique, parts: int
) -> None:
    """Bitwise DDP's buckets with one micro-batch; with several, a sum of averages and not an average of
    sums.
    """
    host_rel = None if isinstance(technique, NO_HOST_PEAK) else 0.02
    tolerance = 1e-5 if parts > 1 else 0.0
    check_on_ranks(
        tmp_path, technique, DDP, NATIVE, model="tied", host_rel=host_rel, parts=parts, tolerance=tolerance
    )


def on_own_samples(
    path: str, settings: list[dict[str, Any]], micro_batches: int
) -> list[dict[str, torch.Tensor]]:
    """Return for each of `settings` the weights after three steps with this rank's own samples."""
    found = []
    for each in settings:
        workload, model, optimizer = build(Path(path))
        tuned = apply(model, optimizer, {"settings": each}, loss=workload.loss, strict=False)
        for step in range(3):
            torch.manual_seed(100 * step + torch.distributed.get_rank())
            tuned.step([workload.make_batch(2) for _ in range(micro_batches)])
        found.append({name: value.clone() for name, value in tuned.state_dict()["model"].items()})
    return found


@pytest.mark.slow
def test_replicas_with_different_samples_train_as_ddp() -> None:
    """Equal weights on all ranks, and those of DDP up to the order of the sum over micro-batches."""
    settings = [settings_of(DDP, each) for each in (NATIVE, *WHEN_READY[:3])]
    first, second = run_ranks(on_own_samples, 2, str(ZOO["tied"]), settings, 3)
    for mine, theirs in zip(first, second, strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
        assert max(float((value - first[0][name]).abs().max()) for name, value in mine.items()) < 1e-5


def test_link_of_a_replica_carries_each_gradient_once_per_micro_batch() -> None:
    """The mechanism: one message per gradient, overlapped with backward, instead of DDP's buckets, before its
    offload.
    """
    for technique in WHEN_READY[:3]:
        step = predicted(DDP, technique, 2)
        averages = np.flatnonzero(step.ops.name == step.names.index("memtune.all_reduce_.default"))
        trained = [p for p in step.parameters if p.trainable]
        assert len(averages) == len(trained)
        assert step.ops.traffic_bytes[averages].sum() == sum(
            p.itemsize * int(np.prod(p.shape)) for p in trained
        )
        assert "c10d.allreduce_.default" not in step.names
        downs = np.flatnonzero(step.ops.name == step.names.index("memtune.to_host.default"))
        sent = {
            int(step.uses.storage[row]): int(step.uses.op[row])
            for row in np.flatnonzero(np.isin(step.uses.op, downs))
        }
        averaged = {
            int(step.uses.storage[row]): int(step.uses.op[row])
            for row in np.flatnonzero(np.isin(step.uses.op, averages))
        }
        assert all(averaged[storage] < op for storage, op in sent.items())


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "parts"), [*REDUCING, (DDP, 1), (DDP, 3)], ids=str)
def test_ratio_keeps_a_part_of_each_rank_s_rows(tmp_path: Path, sharding: Technique, parts: int) -> None:
    """Each rank keeps the state of its rows of the first parameters: the user's own update there, the native
    one for the rest.
    """
    partly = BUCKETS.model_copy(update={"ratio": 0.4})
    own = OptimizerCpu(kind="optimizer_cpu")
    check_on_ranks(tmp_path, partly, sharding, own, model="tied", host_rel=0.02, parts=parts, tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "parts"), [*REDUCING[1::2], (DDP, 3)], ids=str)
def test_solved_ratio_keeps_as_much_as_the_budget_holds(
    tmp_path: Path, sharding: Technique, parts: int
) -> None:
    """Half way between the peaks with all and with nothing on the host; the same number of parameters for
    each rank's rows.
    """
    peaks = [
        predicted(sharding, BUCKETS.model_copy(update={"ratio": ratio}), parts).peak_bytes()
        for ratio in (1.0, 0.0)
    ]
    budget, solved = sum(peaks) // 2, BUCKETS.model_copy(update={"ratio": None})
    assert peaks[0] < predicted(sharding, solved, parts, budget).peak_bytes() <= budget
    own = OptimizerCpu(kind="optimizer_cpu")
    check_on_ranks(
        tmp_path, solved, sharding, own, model="tied", parts=parts, tolerance=1e-5, budget_bytes=budget
    )


def predicted(sharding: Technique, technique: Technique, parts: int, budget_bytes: int | None = None) -> Step:
    rewriter = Rewriter(recording_of(ZOO["tied"]), Target(hardware.detect("cpu"), 2, budget_bytes))
    execution = {"micro_batch": 2, "accumulate": parts}
    found = rewriter.candidate(
        Choice.from_document({**settings_of(sharding, technique), "execution": execution})
    )
    assert isinstance(found, Candidate), found
    return found.program.step


# -- against one rank ----------------------------------------------------------------------------------------


def five_steps(path: str, settings: dict[str, Any] | None, micro_batches: int) -> Any:
    """Return losses and weights after five steps; every rank has the same samples."""
    config = None if settings is None else {"settings": settings}
    return replace(train_under(Path(path), config, steps=5, micro_batches=micro_batches), gradients=[])


@pytest.mark.slow
@pytest.mark.parametrize(("sharding", "parts"), [*REDUCING, (DDP, 3)], ids=str)
def test_five_steps_equal_those_of_one_rank(sharding: Technique, parts: int) -> None:
    """All ranks train on the same samples, so their mean gradient is one rank's up to the order of the
    sum.
    """
    path = str(ZOO["gpt"])
    ranks = run_ranks(five_steps, 2, path, settings_of(sharding, BUCKETS), max(parts, 2))
    torch.set_num_threads(1)
    alone = five_steps(path, settings_of(NATIVE), max(parts, 2))
    for rank in ranks:
        assert not differences(rank, alone, 1e-6)


# -- what is refused -----------------------------------------------------------------------------------------


def clipped(path: str, settings: list[dict[str, Any]], order: float) -> list[tuple[float, dict[str, Tensor]]]:
    """Return the norm and the weights after a step whose gradients are clipped, under each of `settings`;
    every rank has the same samples.
    """
    found = []
    for each in settings:
        workload, model, optimizer = build(Path(path))
        tuned = apply(model, optimizer, {"settings": each}, strict=False)
        torch.manual_seed(SEED)
        workload.loss(tuned.model, workload.make_batch(2)).backward()
        norm = clip_grad_norm_(model.parameters(), 1e-3, order)  # imported before `apply`
        optimizer.step()
        found.append((float(norm), tuned.state_dict()["model"]))
    return found


@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_clipping_by_norm_is_that_of_one_rank(order: float) -> None:
    sharding = [FSDP, Zero2(kind="zero2"), DDP]
    settings = [settings_of(each, technique) for each in sharding for technique in (BUCKETS, WHEN_READY[2])]
    ((wanted, weights),) = clipped(str(ZOO["tied"]), [{}], order)
    assert wanted > 1e-3
    for rank in run_ranks(clipped, 2, str(ZOO["tied"]), settings, order):
        for norm, mine in rank:
            assert norm == pytest.approx(wanted, rel=1e-5)
            for name, weight in weights.items():
                torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=1e-6)


def test_gradients_that_change_until_the_step_are_not_offloaded() -> None:
    program = plain_program(ZOO["gpt"])
    target = replace(target_of(Mics(kind="mics", group=2)), ranks=4)
    assert "under mics gradients are on the device" in str(BUCKETS.fits(program, target))
    assert "zero2" in str(BUCKETS.fits(program, target))
    unused = Ddp(kind="ddp", find_unused_parameters=True)
    assert "one by one when they are ready" in str(BUCKETS.fits(program, replace(target_of(unused), ranks=4)))
    cut = replace(target_of(FSDP, TensorParallel(kind="tensor", degree=2)), ranks=4)
    assert "do not work with tensor" in str(BUCKETS.fits(program, cut))
    late = BUCKETS.model_copy(update={"delayed": True})
    assert "delayed" in str(late.fits(program, replace(target_of(Zero1(kind="zero1")), ranks=2)))
    assert late.fits(program, replace(target_of(FSDP), ranks=2)) is None


def refused(path: str, settings: dict[str, Any]) -> str:
    workload, model, optimizer = build(Path(path))
    del workload
    try:
        apply(model, optimizer, {"settings": settings}, strict=False)
    except ApplyError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_apply_refuses_by_name() -> None:
    late = BUCKETS.model_copy(update={"delayed": True})
    for sharding, technique, why in (
        (Mics(kind="mics", group=2), BUCKETS, "until backward has ended"),
        (Ddp(kind="ddp", find_unused_parameters=True), BUCKETS, "every rank must have all of them"),
        (Zero1(kind="zero1"), late, "copies of delayed weights would be stale"),
    ):
        said = run_ranks(
            refused,
            4 if sharding.kind == "mics" else 2,
            str(ZOO["tied"]),
            settings_of(sharding, technique),
            may_fail=True,
        )
        assert all(why in each for each in said), said
