"""One layer at a time: what is on the device at any op, what crosses the link, when each block is updated."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from layers_suite import LayersSuite, block_bytes, total
from zoo_paths import ZOO

from memtune.program import Kind, Phase, Resource, Tier
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.testing import drift, rewritten
from memtune.testing.drift import plain_program, target_of

DEFAULT = L2L(kind="l2l")


class TestL2L(LayersSuite):
    technique = L2L
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "tied")}
    quick = ("tied",)

    def test_one_block_is_there_at_any_op_and_bytes_are_the_formula(self) -> None:
        """The mechanism: residency and bytes. The last block stays at the turn, all others come in twice."""
        plain, step = rewritten(ZOO["gpt"]), rewritten(ZOO["gpt"], DEFAULT)
        sizes = block_bytes(plain)
        there = replace(step, tier=np.where(step.kind == Kind.COMMUNICATION, step.tier, Tier.SSD).astype(np.uint8))
        assert there.peak_bytes() == max(sizes)
        batch = total(plain, Resource.HOST_TO_DEVICE)
        outside = sum(int(plain.bytes[p.storage]) for p in plain.parameters if p.block < 0)
        assert total(step, Resource.HOST_TO_DEVICE) - batch == 2 * sum(sizes) - sizes[-1] + outside
        assert total(step, Resource.DEVICE_TO_HOST) == sum(sizes) + outside
        assert not (step.kind[step.tier == Tier.DEVICE] == Kind.OPTIMIZER).any()

    def test_each_block_is_updated_before_the_one_before_it_computes(self) -> None:
        """The mechanism: eager. The last block's update comes before the backward ops of the first block."""
        step = rewritten(ZOO["gpt"], DEFAULT)
        updates = np.flatnonzero(step.op_name == step.names.index("memtune.host_update_.default"))
        in_backward = updates[step.op_phase[updates] == Phase.BOUNDARY]
        assert len(in_backward) == sum(p.block >= 0 for p in step.parameters)
        backward = np.flatnonzero((step.op_phase == Phase.BACKWARD) & (step.op_resource == Resource.COMPUTE))
        for block in range(len(step.blocks) - 1):
            computes = backward[step.op_block[backward] == block]
            assert (in_backward < computes[0]).sum() == len(in_backward) * (len(step.blocks) - 1 - block) // len(step.blocks)

    @pytest.mark.slow
    @pytest.mark.parametrize("model", ZOO)
    def test_any_model(self, model: str) -> None:
        self._skip_unless_it_fits(model, DEFAULT)
        self.check_drift(model, DEFAULT)
        self.check_training(model, DEFAULT)

    @pytest.mark.parametrize(("model", "why"), [("lora", "outside of the blocks"), ("tobf16", "float32")])
    def test_what_it_cannot_do_is_refused(self, model: str, why: str) -> None:
        assert why in str(DEFAULT.fits(plain_program(ZOO[model]), target_of()))

    @pytest.mark.parametrize("model", ["gpt", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tied", "hf_llama"))])
    def test_copies_of_activations_wait_while_a_block_comes_in(self, model: str) -> None:
        """A copy to the host holds its source until the next one starts: what is brought in before that sees it."""
        assert drift(ZOO[model], CopyOut(min_bytes=0), L2L(kind="l2l")) == ""

    def test_models_without_an_order_of_layers_are_refused(self) -> None:
        program = plain_program(ZOO["gpt"])
        step = program.step
        alone = replace(step, parameters=tuple(p._replace(block=0) for p in step.parameters))
        assert "used outside" in str(DEFAULT.fits(program.with_step(alone), target_of()))
        twice = replace(step, call_block=np.append(step.call_block, np.int32(0)))
        assert "more than once" in str(DEFAULT.fits(program.with_step(twice), target_of()))
        ranks = replace(target_of(), ranks=2)
        assert "whole on each" in str(DEFAULT.fits(program, ranks))
