"""Selective recompute: matrix products, convolutions and attention run once, the rest twice."""

from __future__ import annotations

import pytest
from zoo_paths import ZOO

from memtune.program import Phase
from memtune.search_spaces.recompute._keeps import is_matmul_or_attention
from memtune.search_spaces.recompute.selective import Selective
from memtune.testing import TechniqueSuite, rewritten

SAVED_BYTES = {
    "autocast": 70_404, "cnn_bn": 382_948, "gpt": 825_092, "hf_llama": 565_764, "inplace_views": 82_944,
    "lora": 150_276, "lstm": 338_452, "moe": 73_228, "tied": 108_044, "tobf16": 89_604,
}  # fmt: skip


class TestSelective(TechniqueSuite):
    technique = Selective
    models = ZOO
    quick = ("tied",)

    @pytest.mark.parametrize("model", ZOO)
    def test_saved_bytes(self, model: str) -> None:
        assert rewritten(ZOO[model], self.default()).saved_bytes() == SAVED_BYTES[model]

    @pytest.mark.parametrize("model", [name for name in ZOO if name != "inplace_views"])
    def test_no_product_runs_twice(self, model: str) -> None:
        step = rewritten(ZOO[model], self.default())
        again = {step.names[i] for i in step.op_name[step.op_phase == Phase.RECOMPUTE]}
        assert again or model == "lstm"
        assert not any(is_matmul_or_attention(name) for name in again)

    def test_what_is_written_into_later_runs_twice(self) -> None:
        step = rewritten(ZOO["inplace_views"], self.default())
        again = [step.names[i] for i in step.op_name[step.op_phase == Phase.RECOMPUTE]]
        assert again.count("aten.addmm.default") == 3  # `out` of each block, whose output is changed in place; `fused` is kept
