"""No recomputation: autograd keeps what it keeps."""

from __future__ import annotations

from typing import ClassVar

import pytest
from support.zoo_paths import ZOO

from memtune.search_spaces.recompute.none import KeepAll
from memtune.testing import TechniqueSuite, rewritten

SAVED_BYTES = {
    "autocast": 329_220,
    "cnn_bn": 449_252,
    "gpt": 1_287_940,
    "hf_llama": 960_260,
    "inplace_views": 138_240,
    "lora": 144_516,
    "lstm": 365_076,
    "moe": 136_460,
    "tied": 182_540,
    "tobf16": 106_500,
}


class TestKeepAll(TechniqueSuite):
    technique = KeepAll
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "cnn_bn")}
    quick = ("gpt",)

    @pytest.mark.parametrize("model", ZOO)
    def test_saved_bytes_are_those_of_the_model(self, model: str) -> None:
        assert rewritten(ZOO[model]).saved_bytes() == SAVED_BYTES[model]
