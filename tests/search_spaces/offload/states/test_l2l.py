"""One layer at a time: resident bytes at every op, bytes on the link, and times of updates.

Distinguishing test: at every op at most one block's weights are on the device, and each block is updated
before the backward of the block before it begins to compute; layer-major, bytes of weights and gradients on
the link do not grow with the number of micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from pydantic import ValidationError
from support.suites.block_offload_suite import LayersSuite, block_bytes, total
from support.suites.layer_major_suite import CHAIN, PacksSuite, config, drifts, planned
from support.zoo_paths import ZOO

from memtune.api import Tuned, apply
from memtune.program.step import Kind, Phase, Resource, Tier
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.offload.states.harmony import Harmony
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.testing import drift, rewritten
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import build

DEFAULT = L2L(kind="l2l")
TOGETHER = L2L(kind="l2l", order="layer_major")
ON_THE_HOST = L2L(kind="l2l", order="layer_major", stash="host")


class TestL2L(LayersSuite):
    technique = L2L
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "tied")}
    quick = ("tied",)

    def test_one_block_is_resident_at_any_op_and_bytes_follow_the_formula(self) -> None:
        """The mechanism: residency and bytes. The last block is resident between forward and backward, others
        are loaded twice.
        """
        plain, step = rewritten(ZOO["gpt"]), rewritten(ZOO["gpt"], DEFAULT)
        sizes = block_bytes(plain)
        there = step.with_storages(
            tier=np.where(step.storages.kind == Kind.COMMUNICATION, step.storages.tier, Tier.SSD).astype(
                np.uint8
            )
        )
        assert there.peak_bytes() == max(sizes)
        batch = total(plain, Resource.HOST_TO_DEVICE)
        outside = sum(int(plain.storages.bytes[p.storage]) for p in plain.parameters if p.block < 0)
        assert total(step, Resource.HOST_TO_DEVICE) - batch == 2 * sum(sizes) - sizes[-1] + outside
        assert total(step, Resource.DEVICE_TO_HOST) == sum(sizes) + outside
        assert not (step.storages.kind[step.storages.tier == Tier.DEVICE] == Kind.OPTIMIZER).any()

    def test_blocks_are_updated_before_the_previous_block_s_backward(self) -> None:
        """The mechanism: eager updates. The last block's update comes before the backward ops of the first
        block.
        """
        step = rewritten(ZOO["gpt"], DEFAULT)
        updates = np.flatnonzero(step.ops.name == step.names.index("memtune.host_update_.default"))
        in_backward = updates[step.ops.phase[updates] == Phase.BOUNDARY]
        assert len(in_backward) == sum(p.block >= 0 for p in step.parameters)
        backward = np.flatnonzero(
            (step.ops.phase == Phase.BACKWARD) & (step.ops.resource == Resource.COMPUTE)
        )
        for block in range(len(step.blocks) - 1):
            computes = backward[step.ops.block[backward] == block]
            assert (in_backward < computes[0]).sum() == len(in_backward) * (
                len(step.blocks) - 1 - block
            ) // len(step.blocks)

    @pytest.mark.slow
    @pytest.mark.parametrize("model", ZOO)
    def test_training_is_as_predicted(self, model: str) -> None:
        self._skip_unless_it_fits(model, DEFAULT)
        self.check_drift(model, DEFAULT)
        self.check_training(model, DEFAULT)

    def test_fits_refuses_by_name(self) -> None:
        assert "float32" in str(DEFAULT.fits(plain_program(ZOO["tobf16"]), target_of()))
        assert DEFAULT.fits(plain_program(ZOO["lora"]), target_of()) is None  # blocks alone are trained

    @pytest.mark.parametrize(
        "model", ["gpt", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tied", "hf_llama"))]
    )
    def test_activation_copies_hold_their_source_while_a_block_is_loaded(self, model: str) -> None:
        """A D2H copy holds its source until the next one starts, so loads before that find the memory in
        use.
        """
        assert drift(ZOO[model], CopyOut(min_bytes=0), L2L(kind="l2l")) == ""

    def test_fits_refuses_models_without_an_order_of_layers(self) -> None:
        program = plain_program(ZOO["gpt"])
        step = program.step
        alone = replace(step, parameters=tuple(p._replace(block=0) for p in step.parameters))
        assert "used outside" in str(DEFAULT.fits(program.with_step(alone), target_of()))
        twice = step.with_calls(block=np.append(step.calls.block, np.int32(0)))
        assert "more than once" in str(DEFAULT.fits(program.with_step(twice), target_of()))
        ranks = replace(target_of(), ranks=2)
        assert "whole on each" in str(DEFAULT.fits(program, ranks))


@pytest.mark.slow
class TestLayerMajor(PacksSuite):
    technique = L2L
    variants = (TOGETHER, ON_THE_HOST)

    @classmethod
    def default(cls) -> L2L:
        return TOGETHER

    @pytest.mark.parametrize("technique", [TOGETHER, ON_THE_HOST], ids=["device", "host"])
    def test_pass_equals_the_recorded_step_with_several_micro_batches(self, technique: L2L) -> None:
        assert not drifts(technique, 3)

    def sabotage(self, tuned: Tuned) -> bool:
        block = tuned._context.model.get_submodule(tuned._context.blocks[0])
        vars(block).pop("forward")
        return True


def test_layer_major_bytes_do_not_grow_with_the_number_of_micro_batches() -> None:
    """The mechanism: layer-major. Weights are loaded once a pass and gradients offloaded once, else for each
    micro-batch.
    """
    sizes, micro_batches = block_bytes(rewritten(CHAIN)), (1, 2, 4)
    steps = [planned(TOGETHER, n).program.step for n in micro_batches]
    batch = total(steps[1], Resource.HOST_TO_DEVICE) - total(steps[0], Resource.HOST_TO_DEVICE)
    outside = sum(int(s.storages.bytes[p.storage]) for s in (steps[0],) for p in s.parameters if p.block < 0)
    for n, step in zip(micro_batches, steps, strict=True):
        assert total(step, Resource.HOST_TO_DEVICE) - n * batch == 2 * sum(sizes) - sizes[-1] + outside
        assert total(step, Resource.DEVICE_TO_HOST) == sum(sizes) + outside
    assert batch < sizes[0]


def test_layer_major_runs_all_micro_batches_before_the_next_layer() -> None:
    """The mechanism, by events of a live step; the counted bytes on the links are those of the pass."""
    step = planned(TOGETHER, 2).program.step
    workload, model, optimizer = build(CHAIN)
    tuned = apply(model, optimizer, config(TOGETHER, 2), loss=workload.loss)
    for _ in range(2):  # the first one looks at the chain as well
        COUNTERS.take()
        tuned.step([workload.make_batch(2) for _ in range(2)])
    counted, ran = COUNTERS.take(), tuned._context.loop.order.order  # type: ignore[union-attr]
    there, back = [("forward", i) for i in range(5)], [("backward", i) for i in reversed(range(5))]
    assert [(what, first) for what, (first, _), _ in ran[::2]] == [*there, ("turnaround", 5), *back]
    assert [index for _, _, index in ran] == [0, 1] * 11
    assert counted["host_to_device"] == total(step, Resource.HOST_TO_DEVICE)
    assert counted["device_to_host"] == total(step, Resource.DEVICE_TO_HOST)


def test_host_stash_keeps_device_bytes_constant_in_depth_and_micro_batches() -> None:
    """The paper's constant memory: layer inputs are on the host."""
    peaks = [[planned(each, n).program.step.peak_bytes() for n in (2, 4)] for each in (TOGETHER, ON_THE_HOST)]
    boundary = 2 * 16 * 32 * 4
    assert peaks[0][1] - peaks[0][0] >= 2 * 5 * boundary  # two more micro-batches before each of five layers
    assert peaks[1][1] - peaks[1][0] < 2 * 5 * boundary / 2


def test_layer_major_equals_the_candidate_with_packs_of_one_block() -> None:
    for each, where in ((TOGETHER, "device"), (ON_THE_HOST, "host")):
        for ranks in (1, 2):
            target = replace(target_of(), ranks=ranks)
            assert each.record(target) == Harmony(kind="harmony", backward=1, boundaries=where).record(target)


def test_layer_major_refuses_models_without_a_chain() -> None:
    assert "random numbers" in str(TOGETHER.fits(plain_program(ZOO["gpt"]), target_of()))
    with pytest.raises(ValidationError, match="layer inputs are stashed"):
        L2L(kind="l2l", stash="host")
