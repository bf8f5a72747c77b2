"""Regions from attention to attention: attention runs once, and what is kept is what attention_output keeps."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_paths import ZOO

from memtune._apply import apply
from memtune.search_spaces.recompute._keeps import is_attention
from memtune.search_spaces.recompute.attention_boundary import AttentionBoundary
from memtune.search_spaces.recompute.attention_output import AttentionOutput
from memtune.search_spaces.recompute.full import Full
from memtune.testing import TechniqueSuite, compare, rewritten
from memtune.testing.drift import plain_program, target_of
from memtune.testing.training import build, settings_of

LAYERS = {"gpt": 4, "hf_llama": 3}


class TestAttentionBoundary(TechniqueSuite):
    technique = AttentionBoundary
    models: ClassVar = {name: ZOO[name] for name in LAYERS}
    quick = ("gpt",)

    @pytest.mark.parametrize("model", LAYERS)
    def test_attention_runs_once_per_block(self, model: str) -> None:
        workload, module, optimizer = build(ZOO[model])
        apply(module, optimizer, {"settings": settings_of(self.default())}, strict=False)
        batch = workload.make_batch(2)
        with _Counter() as counter:
            workload.loss(module, batch).backward()
        assert counter.count == LAYERS[model]

    def test_it_is_one_candidate_with_attention_output(self) -> None:
        other = AttentionOutput(kind="attention_output")
        assert self.default().record(target_of()) == other.record(target_of())
        assert compare(rewritten(ZOO["gpt"], self.default()), rewritten(ZOO["gpt"], other)) == ""

    def test_a_block_keeps_the_residual_stream_attentions_output_and_its_log_sum_exp(self) -> None:
        full, mine = rewritten(ZOO["gpt"], Full(kind="full")), rewritten(ZOO["gpt"], self.default())
        hidden, log_sum_exp = 2 * 32 * 64 * 4, 2 * 4 * 32 * 4  # (micro-batch, sequence, width) and (…, heads, sequence), float32
        assert [full.saved_bytes(block) for block in range(4)] == [hidden] * 4
        assert [mine.saved_bytes(block) for block in range(4)] == [2 * hidden + log_sum_exp] * 4

    def test_blocks_without_fused_attention_are_refused(self) -> None:
        assert "not fused" in str(self.default().fits(plain_program(ZOO["moe"]), target_of()))


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += is_attention(func)
        return func(*args, **(kwargs or {}))
