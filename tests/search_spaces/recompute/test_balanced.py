"""Norms and activation functions run twice, all other saved tensors are kept.

Distinguishing test: of a LLaMA block's activations 0.60 are kept, and only norm, activation and gate run
twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from support.zoo_paths import ZOO

from memtune.api import apply
from memtune.errors import ApplyError
from memtune.program.step import Phase, Resource
from memtune.search_spaces.recompute._block_planner.fits import is_matmul_or_attention
from memtune.search_spaces.recompute.balanced import Balanced
from memtune.testing import TechniqueSuite, rewritten
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import build, config_of, settings_of

LLAMA_7B = Path(__file__).parents[2] / "support" / "models" / "recompute" / "llama_7b_block.py"


class TestBalanced(TechniqueSuite):
    technique = Balanced
    models: ClassVar = {
        **{name: ZOO[name] for name in ("gpt", "hf_llama", "moe", "inplace_views")},
        "llama_7b": LLAMA_7B,
    }
    quick = ("gpt",)

    def test_six_tenths_of_a_llama_block_are_kept(self) -> None:
        plain, mine = rewritten(LLAMA_7B), rewritten(LLAMA_7B, self.default())
        for block in range(len(plain.blocks)):
            assert mine.saved_bytes(block) / plain.saved_bytes(block) == pytest.approx(0.60, abs=0.05)

    def test_only_norm_activation_and_gate_run_twice(self) -> None:
        step = rewritten(LLAMA_7B, self.default())
        runs = (step.ops.copy_of >= 0) & (step.ops.resource != Resource.NOTHING) & (step.ops.block == 0)
        again = [step.names[i] for i in step.ops.name[runs]]
        norm = [
            "aten.pow.Tensor_Scalar",
            "aten.mean.dim",
            "aten.add.Tensor",
            "aten.rsqrt.default",
            *["aten.mul.Tensor"] * 2,
        ]
        assert again == [*norm, *norm, "aten.silu.default", "aten.mul.Tensor"]

    @pytest.mark.parametrize("model", ["gpt", "hf_llama", "moe"])
    def test_products_run_once(self, model: str) -> None:
        step = rewritten(ZOO[model], self.default())
        assert not any(
            is_matmul_or_attention(step.names[i]) for i in step.ops.name[step.ops.phase == Phase.RECOMPUTE]
        )

    def test_equal_blocks_share_an_entry_of_the_plan(self) -> None:
        plan = self.default().plan(plain_program(ZOO["gpt"]), target_of())
        assert len(plan.calls) == 1
        assert plan.blocks == (0, 0, 0, 0)

    def test_apply_refuses_a_missing_plan_or_one_for_another_model(self) -> None:
        for config in ({"settings": settings_of(self.default())}, config_of(ZOO["hf_llama"], self.default())):
            _, model, optimizer = build(ZOO["gpt"])
            with pytest.raises(ApplyError, match="needs a plan") as caught:
                apply(model, optimizer, config, strict=False)
            assert caught.value.code == "MT316"
        assert not self.default().plan(plain_program(ZOO["gpt"]), target_of()).is_empty

    def test_convolutions_whose_norms_feed_the_residual_too_are_refused(self) -> None:
        assert "feeds a matrix product" in str(self.default().fits(plain_program(ZOO["cnn_bn"]), target_of()))
