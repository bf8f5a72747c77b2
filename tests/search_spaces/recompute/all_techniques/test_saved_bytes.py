"""Bytes that blocks save under each technique, as known from earlier recordings."""

from __future__ import annotations

import pytest
from support.zoo_paths import ZOO

from memtune.search_spaces import find
from memtune.testing import rewritten

KINDS = ("none", "full", "selective", "every_nth", "balanced")
SAVED_BYTES = {
    "autocast": (329_220, 21_252, 70_404, 123_908, 70_404),
    "cnn_bn": (449_252, 263_140, 382_948, 356_068, None),
    "gpt": (1_287_940, 165_636, 825_092, 726_788, 759_556),
    "hf_llama": (960_260, 169_476, 565_764, 433_156, 565_764),
    "inplace_views": (138_240, 27_648, 82_944, 64_512, 82_944),
    "lora": (144_516, 25_348, 150_276, 88_068, None),
    "lstm": (365_076, 33_300, 338_452, 356_884, None),
    "moe": (136_460, 35_340, 73_228, 85_900, 86_796),
    "tied": (182_540, 58_892, 108_044, 100_108, 108_044),
    "tobf16": (106_500, 24_068, 89_604, 65_284, None),
}
"""Model → bytes under each of `KINDS`; None: not held to a number."""
CASES = [
    (kind, model, n_bytes)
    for model in ZOO
    for kind, n_bytes in zip(KINDS, SAVED_BYTES[model], strict=True)
    if n_bytes is not None
]


@pytest.mark.parametrize(("kind", "model", "n_bytes"), CASES)
def test_saved_bytes_are_those_of_the_model(kind: str, model: str, n_bytes: int) -> None:
    assert rewritten(ZOO[model], find("recompute", kind)(kind=kind)).saved_bytes() == n_bytes
