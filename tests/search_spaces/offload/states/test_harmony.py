"""Packs over all micro-batches: what crosses the link, when each pack is updated, and who is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers_suite import block_bytes, total
from packs_suite import CHAIN, PacksSuite, config, drifts, planned, trained
from zoo_paths import ZOO

from memtune._apply import Tuned, apply
from memtune.program import Phase, Resource
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.states.harmony import Harmony
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.testing import rewritten
from memtune.testing.drift import plain_program, target_of
from memtune.testing.training import build

PAIRS = Harmony(kind="harmony", backward=2)
UNEVEN = Harmony(kind="harmony", backward=2, forward=3, packing="greedy", boundaries="host", prefetch=True)
GROUPS = Harmony(kind="harmony", backward=2, group=2)


def weights_up(technique: Any, micro_batches: int) -> int:
    """Bytes of blocks' weights that come in, in a whole step."""
    step = planned(technique, micro_batches).program.step
    copies = step.op_name == step.names.index("memtune.copy_to_device_.default")
    return int(step.op_traffic_bytes[copies & (step.op_phase != Phase.OPTIMIZER)].sum())


class TestHarmony(PacksSuite):
    technique = Harmony
    variants = (PAIRS, UNEVEN)

    def test_bytes_are_the_formula_whatever_the_number_of_micro_batches(self) -> None:
        """The mechanism: 3|W| - |W of the last pack|. Layers that come and go for each micro-batch move more with each."""
        sizes = block_bytes(rewritten(CHAIN))
        outside = sum(p.shape[0] * int(np.prod(p.shape[1:])) * 4 for p in rewritten(CHAIN).parameters if p.block < 0)
        for micro_batches in (1, 2, 4):
            plan = planned(PAIRS, micro_batches)
            assert weights_up(PAIRS, micro_batches) == 2 * sum(sizes) - sum(sizes[-2:])
            assert total(plan.program.step, Resource.DEVICE_TO_HOST) == sum(sizes) + outside
            assert plan.plans["offload.states"].decisions["swapped_bytes"] == 3 * sum(sizes) - sum(sizes[-2:])
        in_turn = L2L(kind="l2l")
        step, plain = rewritten(CHAIN, in_turn), rewritten(CHAIN)
        each = total(step, Resource.HOST_TO_DEVICE) - total(plain, Resource.HOST_TO_DEVICE) - outside
        assert 4 * each > 3 * weights_up(PAIRS, 4)

    def test_counted_bytes_of_training_are_the_plan_s(self) -> None:
        """What the links counted in a live step, boundaries and batches too."""
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
        [UNEVEN, *(pytest.param(each, marks=pytest.mark.slow) for each in (PAIRS, GROUPS))],
        ids=["uneven", "pairs", "groups"],
    )
    def test_the_pass_is_the_runtime_s_step_with_several_micro_batches(self, technique: Harmony) -> None:
        """Ops, and bytes of every tier at every op."""
        assert not drifts(technique, 3)

    @pytest.mark.slow
    def test_groups_have_the_bits_and_pay_per_group(self) -> None:
        from packs_suite import in_place

        from memtune.testing import differences

        assert not differences(trained(GROUPS, 3), in_place(3))
        assert weights_up(GROUPS, 3) == weights_up(GROUPS, 4) == 2 * weights_up(PAIRS, 4)
        peaks = [planned(each, 4).program.step.peak_bytes() for each in (PAIRS, GROUPS)]
        assert peaks[1] < peaks[0]

    def test_each_pack_is_updated_before_the_one_before_it_runs_backward(self) -> None:
        """The mechanism: just in time."""
        step = planned(PAIRS, 2).program.step
        updates = np.flatnonzero(step.op_name == step.names.index("memtune.host_update_.default"))
        updates = updates[step.op_phase[updates] == Phase.BOUNDARY]
        backward = np.flatnonzero((step.op_phase == Phase.BACKWARD) & (step.op_resource == Resource.COMPUTE))
        for pack, blocks in enumerate(((0, 1), (2, 3))):
            computes = backward[np.isin(step.op_block[backward], blocks)]
            assert (updates < computes[0]).sum() == len(updates) * (2 - pack) // 3

    def test_micro_batches_run_pack_by_pack(self) -> None:
        """The mechanism: event order of a live step."""
        workload, model, optimizer = build(CHAIN)
        tuned = apply(model, optimizer, config(PAIRS, 2), loss=workload.loss)
        tuned.step([workload.make_batch(2) for _ in range(2)])
        ran = tuned._context.order.order  # type: ignore[union-attr]
        assert [(what, pack) for what, pack, _ in ran[::2]] == [
            ("forward", (0, 2)), ("forward", (2, 4)), ("turn", (4, 6)), ("backward", (2, 4)), ("backward", (0, 2)),
        ]  # fmt: skip
        assert [index for _, _, index in ran] == [0, 1] * 5

    def test_fewest_packs_that_the_budget_holds(self) -> None:
        free = Harmony(kind="harmony")
        plain = planned(Harmony(kind="harmony", backward=6), 3).program.step.peak_bytes()
        assert len(planned(free, 3, plain).plans["offload.states"].decisions["backward"]) == 1
        two = planned(Harmony(kind="harmony", backward=3), 3).program.step.peak_bytes()
        fitting = planned(free, 3, two)
        assert len(fitting.plans["offload.states"].decisions["backward"]) <= 3
        assert fitting.program.step.peak_bytes() <= two < plain

    def sabotage(self, tuned: Tuned) -> bool:
        block = tuned._context.model.get_submodule(tuned._context.blocks[0])
        vars(block).pop("forward")
        return True


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("tied", "before and after the blocks"),
        *(
            pytest.param(model, why, marks=pytest.mark.slow)
            for model, why in (("gpt", "random numbers"), ("cnn_bn", "changes a buffer"), ("lora", "outside of the"))
        ),
    ],
)
def test_what_is_no_chain_is_refused_by_name(model: str, why: str) -> None:
    """By `fits` from the recording."""
    assert why in str(PAIRS.fits(plain_program(ZOO[model]), target_of(PAIRS)))
