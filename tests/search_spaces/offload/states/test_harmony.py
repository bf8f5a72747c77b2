"""Packs over all micro-batches: bytes on the link, times of updates, and refusals.

Distinguishing test: bytes on the link do not grow with the number of micro-batches, and each pack is updated
before the pack before it runs backward.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixed_cpu import CPU
from support.gloo import run_ranks
from support.suites.block_offload_suite import block_bytes, total, without_gradients
from support.suites.layer_major_suite import (
    CHAIN,
    PacksSuite,
    config,
    drifts,
    in_place,
    planned,
    tied_chain,
    trained,
)
from support.zoo_paths import ZOO

from memtune.api import Tuned, apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.search.dry_runs import dry_run
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.config.tuned_config import TunedConfig
from memtune.errors import ApplyError
from memtune.program.step import Phase, Resource, Step
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces import find
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.offload.states.harmony import Harmony
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.testing import differences, drift, rewritten, train
from memtune.testing.drift_check import compare, plain_program, recording_of, target_of
from memtune.testing.training import build
from memtune.workload.workload import Workload

PAIRS = Harmony(kind="harmony", backward=2)
UNEVEN = Harmony(kind="harmony", backward=2, forward=3, packing="greedy", boundaries="host", prefetch=True)
GROUPS = Harmony(kind="harmony", backward=2, group=2)
JOINED = Harmony(kind="harmony", backward=2, joined=2)
JOINED_ON_HOST = UNEVEN.model_copy(update={"joined": 3})


def loaded_weight_bytes(technique: Any, micro_batches: int) -> int:
    """Return the bytes of blocks' weights loaded in a whole step."""
    step = planned(technique, micro_batches).program.step
    copies = step.ops.name == step.names.index("memtune.copy_to_device_.default")
    return int(step.ops.traffic_bytes[copies & (step.ops.phase != Phase.OPTIMIZER)].sum())


class TestHarmony(PacksSuite):
    technique = Harmony
    variants = (PAIRS, UNEVEN)

    def test_bytes_follow_the_formula_for_any_number_of_micro_batches(self) -> None:
        """The mechanism: 3|W| - |W of the last pack|. Layers loaded for each micro-batch copy more with
        each.
        """
        sizes = block_bytes(rewritten(CHAIN))
        outside = sum(
            p.shape[0] * int(np.prod(p.shape[1:])) * 4 for p in rewritten(CHAIN).parameters if p.block < 0
        )
        for micro_batches in (1, 2, 4):
            plan = planned(PAIRS, micro_batches)
            assert loaded_weight_bytes(PAIRS, micro_batches) == 2 * sum(sizes) - sum(sizes[-2:])
            assert total(plan.program.step, Resource.DEVICE_TO_HOST) == sum(sizes) + outside
            assert plan.plans["offload.states"].swapped_bytes == 3 * sum(sizes) - sum(sizes[-2:])
        in_turn = L2L(kind="l2l")
        step, plain = rewritten(CHAIN, in_turn), rewritten(CHAIN)
        each = total(step, Resource.HOST_TO_DEVICE) - total(plain, Resource.HOST_TO_DEVICE) - outside
        assert 4 * each > 3 * loaded_weight_bytes(PAIRS, 4)

    def test_searched_prefetch_shortens_the_step(self) -> None:
        slow = replace(CPU, host_to_device_bytes_per_s=3e7)
        steps = [
            planned(PAIRS.model_copy(update={"prefetch": prefetch}), 4)
            for prefetch in PAIRS.choices()["prefetch"]
        ]
        plain_s, prefetched_s = (simulate(each.program, slow, level="events").step_s for each in steps)
        assert prefetched_s < 0.98 * plain_s

    def test_searched_packs_are_the_fewest_that_fit_or_those_of_one_block(self) -> None:
        free, room = Harmony(kind="harmony", prefetch=True), 1 << 30
        fewest, single = (
            planned(free.model_copy(update={"backward": width}), 4, room)
            for width in free.choices()["backward"]
        )
        count = {len(each.plans["offload.states"].backward) for each in (fewest, single)}
        assert count == {1, len(single.program.step.blocks)}
        assert single.program.step.peak_bytes() < fewest.program.step.peak_bytes()

    def test_counted_bytes_of_training_are_those_of_the_plan(self) -> None:
        """Counted on the links of a live step, including boundaries and batches."""
        for technique in (PAIRS, UNEVEN):
            step = planned(technique, 3).program.step
            workload, model, optimizer = build(CHAIN)
            tuned = apply(model, optimizer, config(technique, 3), loss=workload.loss)
            for _ in range(2):
                COUNTERS.take()
                tuned.step([workload.make_batch(2) for _ in range(3)])
            counted = COUNTERS.take()
            assert counted["host_to_device"] == total(step, Resource.HOST_TO_DEVICE)
            assert counted["device_to_host"] == total(step, Resource.DEVICE_TO_HOST)

    @pytest.mark.parametrize(
        "technique",
        [
            UNEVEN,
            JOINED,
            *(pytest.param(each, marks=pytest.mark.slow) for each in (PAIRS, GROUPS, JOINED_ON_HOST)),
        ],
        ids=["uneven", "joined", "pairs", "groups", "joined on host"],
    )
    def test_pass_equals_the_recorded_step_with_several_micro_batches(self, technique: Harmony) -> None:
        """Compare ops, and bytes of every tier at every op."""
        assert not drifts(technique, 3)

    @pytest.mark.slow
    def test_groups_are_bitwise_and_copy_weights_per_group(self) -> None:
        assert not differences(trained(GROUPS, 3), in_place(3))
        assert (
            loaded_weight_bytes(GROUPS, 3)
            == loaded_weight_bytes(GROUPS, 4)
            == 2 * loaded_weight_bytes(PAIRS, 4)
        )
        peaks = [planned(each, 4).program.step.peak_bytes() for each in (PAIRS, GROUPS)]
        assert peaks[1] < peaks[0]

    def test_joined_micro_batches_compute_the_same_in_fewer_ops(self) -> None:
        """The mechanism: u_F = 3·u_B. Forward of the packs before the last; backward runs as before."""
        steps = [planned(PAIRS.model_copy(update={"joined": each}), 6).program.step for each in (1, 3)]
        runs = [
            [
                op
                for op in np.flatnonzero((step.ops.phase == Phase.FORWARD) & (step.ops.block < 4)).tolist()
                if step.ops.block[op] >= 0 and step.ops.copy_of[op] < 0 and step.ops.flops[op] > 0
            ]
            for step in steps
        ]
        flops = [step.ops.flops[ops].sum() for step, ops in zip(steps, runs, strict=True)]
        assert flops[0] == pytest.approx(flops[1])
        assert len(runs[0]) == 3 * len(runs[1])
        for column in ("flops", "traffic_bytes"):
            backward = [getattr(each.ops, column)[each.ops.phase == Phase.BACKWARD].sum() for each in steps]
            assert backward[0] == backward[1]
        assert loaded_weight_bytes(PAIRS, 6) == loaded_weight_bytes(JOINED, 6)

    @pytest.mark.parametrize("technique", [JOINED, JOINED_ON_HOST], ids=["device", "host"])
    def test_joined_micro_batches_train_as_separate_ones(self, technique: Harmony) -> None:
        """Also those that are left: four micro-batches by three, five by two."""
        found = differences(trained(technique, 5), in_place(5), 1e-5)
        assert all("qkv.bias" in each for each in found)  # the keys' bias has no gradient but rounding

    def test_joined_micro_batches_of_blocks_that_mix_samples_are_an_error(self, tmp_path: Path) -> None:
        line = "        x = x + self.out(attended.transpose(1, 2).flatten(2))\n"
        assert line in CHAIN.read_text()
        mixing = tmp_path / "mixing.py"
        mixing.write_text(CHAIN.read_text().replace(line, f"{line}        x = x - x.mean(0)\n"))
        workload, model, optimizer = build(mixing)
        tuned = apply(model, optimizer, config(JOINED, 2), loss=workload.loss, strict=False)
        with pytest.raises(ApplyError, match="joined to one"):
            tuned.step([workload.make_batch(2) for _ in range(2)])

    def test_fits_refuses_to_join_more_than_there_are(self) -> None:
        program, target = plain_program(CHAIN), target_of(JOINED)
        assert "joined=2, but packs run 1 micro-batches" in str(JOINED.fits(program, target))
        pipeline = JOINED.model_copy(update={"parallelism": "pipeline"})
        assert "run forward and backward alike" in str(pipeline.fits(program, replace(target, ranks=2)))

    def test_packs_are_updated_before_the_previous_pack_s_backward(self) -> None:
        """The mechanism: just-in-time update."""
        step = planned(PAIRS, 2).program.step
        updates = np.flatnonzero(step.ops.name == step.names.index("memtune.host_update_.default"))
        updates = updates[step.ops.phase[updates] == Phase.BOUNDARY]
        backward = np.flatnonzero(
            (step.ops.phase == Phase.BACKWARD) & (step.ops.resource == Resource.COMPUTE)
        )
        for pack, blocks in enumerate(((0, 1), (2, 3))):
            computes = backward[np.isin(step.ops.block[backward], blocks)]
            assert (updates < computes[0]).sum() == len(updates) * (2 - pack) // 3

    def test_micro_batches_run_pack_by_pack(self) -> None:
        """The mechanism: event order of a live step."""
        workload, model, optimizer = build(CHAIN)
        tuned = apply(model, optimizer, config(PAIRS, 2), loss=workload.loss)
        tuned.step([workload.make_batch(2) for _ in range(2)])
        ran = tuned._context.loop.order.order  # type: ignore[union-attr]
        assert [(what, pack) for what, pack, _ in ran[::2]] == [
            ("forward", (0, 2)),
            ("forward", (2, 4)),
            ("turnaround", (4, 6)),
            ("backward", (2, 4)),
            ("backward", (0, 2)),
        ]
        assert [index for _, _, index in ran] == [0, 1] * 5

    def test_plan_has_the_fewest_packs_within_the_budget(self) -> None:
        free = Harmony(kind="harmony")
        plain = planned(Harmony(kind="harmony", backward=6), 3).program.step.peak_bytes()
        assert len(planned(free, 3, plain).plans["offload.states"].backward) == 1
        two = planned(Harmony(kind="harmony", backward=3), 3).program.step.peak_bytes()
        fitting = planned(free, 3, two)
        assert len(fitting.plans["offload.states"].backward) <= 3
        assert fitting.program.step.peak_bytes() <= two < plain

    def sabotage(self, tuned: Tuned) -> bool:
        block = tuned._context.model.get_submodule(tuned._context.blocks[0])
        vars(block).pop("forward")
        return True


RANKS = 2


def with_ranks(technique: Harmony, micro_batches: int) -> Candidate:
    target = replace(target_of(technique), ranks=RANKS)
    choice = Choice.of(Execution(micro_batch=2, accumulate=micro_batches), {technique.slot: technique})
    candidate = Rewriter(recording_of(CHAIN), target).candidate(choice)
    assert isinstance(candidate, Candidate), candidate
    return candidate


def on_this_rank(
    document: dict[str, Any], micro_batches: int
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return weights after three steps on this rank's share of the samples, and the bytes of the last
    step.
    """
    workload, model, _ = build(CHAIN)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9
    )  # AdamW makes updates of what is zero but for rounding
    tuned = apply(model, optimizer, document, loss=workload.loss)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    torch.manual_seed(5)
    for _ in range(3):
        batches = [workload.make_batch(2) for _ in range(micro_batches * ranks)]
        COUNTERS.take()
        tuned.step(batches[rank * micro_batches : (rank + 1) * micro_batches])
    return dict(tuned.state_dict()["model"]), COUNTERS.take()


@pytest.mark.parametrize("technique", [pytest.param(PAIRS, marks=pytest.mark.slow), JOINED], ids=str)
def test_ranks_average_gradients_before_offload(technique: Harmony) -> None:
    """Harmony-DP: the weights of one rank with all micro-batches, the same on all ranks; each copies its
    3|W|.
    """
    candidate = with_ranks(technique, 2)
    config_of_ranks = TunedConfig(settings=candidate.choice, plan=dict(candidate.plans)).document()
    (weights, counted), (others, counted_there) = run_ranks(on_this_rank, RANKS, config_of_ranks, 2)
    alone, _ = on_this_rank(config(PAIRS, 4).document(), 4)
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name
        assert torch.allclose(value, alone[name], rtol=0, atol=1e-6), name
    step = candidate.program.step
    for link, resource in (
        ("host_to_device", Resource.HOST_TO_DEVICE),
        ("device_to_host", Resource.DEVICE_TO_HOST),
    ):
        assert counted[link] == counted_there[link] == total(step, resource)
    assert total(step, Resource.INTRA_LINK) == sum(4 * int(np.prod(p.shape)) for p in step.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("technique", [PAIRS, GROUPS, JOINED], ids=["pairs", "groups", "joined"])
def test_pass_equals_the_recorded_step_of_a_rank(technique: Harmony) -> None:
    candidate = with_ranks(technique, 3)
    real = dry_run(Workload.load(CHAIN), candidate, replace(target_of(technique), ranks=RANKS))
    assert isinstance(real, Step)
    assert not compare(candidate.program.step, real)


def test_fits_refuses_sharded_ranks() -> None:
    fsdp = find("sharding.states", "fsdp")(kind="fsdp")
    target = replace(target_of(PAIRS, fsdp), ranks=RANKS)
    assert "average their gradients" in str(PAIRS.fits(plain_program(CHAIN), target))


@pytest.mark.parametrize(
    "technique",
    [
        UNEVEN,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (PAIRS, GROUPS, Harmony(kind="harmony", backward=6))
        ),
    ],
    ids=["uneven", "pairs", "groups", "whole"],
)
def test_tied_head_gets_the_sum_of_both_uses(technique: Harmony, tmp_path: Path) -> None:
    """One sum of each use: equal up to rounding, op by op as in the pass."""
    path = tied_chain(tmp_path / "tied.py")
    assert not drifts(technique, 3, path)
    found = differences(trained(technique, 3, path=path), in_place(3, path=path), 1e-5)
    assert all(
        "qkv.bias" in each for each in found
    )  # the keys' bias has no gradient but rounding, by which Adam divides


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("gpt", "random numbers"),
        pytest.param("cnn_bn", "writes a buffer", marks=pytest.mark.slow),
    ],
)
def test_fits_refuses_models_without_a_chain(model: str, why: str) -> None:
    """By `fits`, from the recording."""
    assert why in str(PAIRS.fits(plain_program(ZOO[model]), target_of(PAIRS)))


@pytest.mark.slow
def test_adapters_in_blocks_train_as_the_plain_model() -> None:
    """No parameter outside of the blocks is trained."""
    assert not drift(ZOO["lora"], PAIRS)
    runs = (train(ZOO["lora"], PAIRS), train(ZOO["lora"]))
    assert not differences(*map(without_gradients, runs), 1e-5)
