"""Recompute of all but attention: attention's output and log-sum-exp are kept, and it runs once.

Distinguishing test: attention's forward runs once per block and step, all other ops of the block up to the
last tensor saved run twice; a block holds its input, attention's output and its log-sum-exp, to the byte.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from support.zoo_paths import ZOO
from torch.utils._python_dispatch import TorchDispatchMode

from memtune.api import apply
from memtune.program.step import Phase
from memtune.search_spaces.recompute._block_planner.fits import is_attention
from memtune.search_spaces.recompute.attention_output import AttentionOutput
from memtune.search_spaces.recompute.full import Full
from memtune.technique import Technique
from memtune.testing import TechniqueSuite, rewritten
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import build, settings_of

SAVED_BYTES = {"gpt": 235_268, "hf_llama": 221_700}
LAYERS = {"gpt": 4, "hf_llama": 3}
REFUSED = {"moe": "not fused", "cnn_bn": "no attention runs inside", "lora": "no attention runs inside"}


class TestAttentionOutput(TechniqueSuite):
    technique = AttentionOutput
    models: ClassVar = {name: ZOO[name] for name in SAVED_BYTES}
    quick = ("gpt",)

    @pytest.mark.parametrize("model", SAVED_BYTES)
    def test_saved_bytes_are_those_of_the_model(self, model: str) -> None:
        assert rewritten(ZOO[model], self.default()).saved_bytes() == SAVED_BYTES[model]

    def test_block_holds_one_hidden_state_and_the_log_sum_exp_more_than_full(self) -> None:
        full, mine = (rewritten(ZOO["gpt"], technique) for technique in (Full(kind="full"), self.default()))
        hidden, log_sum_exp = (
            2 * 32 * 64 * 4,
            2 * 4 * 32 * 4,
        )  # (micro-batch, sequence, width) and (…, heads, sequence), float32
        assert [mine.saved_bytes(block) - full.saved_bytes(block) for block in range(4)] == [
            hidden + log_sum_exp
        ] * 4

    def test_second_run_skips_only_attention(self) -> None:
        full, mine = (rewritten(ZOO["gpt"], technique) for technique in (Full(kind="full"), self.default()))
        names = [
            [step.names[i] for i in step.ops.name[step.ops.phase == Phase.RECOMPUTE]] for step in (full, mine)
        ]
        assert [name for name in names[0] if not is_attention(name)] == names[1]
        assert len(names[0]) == len(names[1]) + 4

    @pytest.mark.parametrize("model", LAYERS)
    @pytest.mark.parametrize(
        ("technique", "times"), [(Full(kind="full"), 2), (AttentionOutput(kind="attention_output"), 1)]
    )
    def test_attention_runs_once_per_block(self, model: str, technique: Technique, times: int) -> None:
        assert attention_forwards(model, technique) == times * LAYERS[model]

    @pytest.mark.parametrize("model", REFUSED)
    def test_blocks_without_fused_attention_are_refused(self, model: str) -> None:
        technique = self.default()
        assert REFUSED[model] in str(technique.fits(plain_program(ZOO[model]), target_of(technique)))


def attention_forwards(model: str, technique: Technique) -> int:
    """Return the number of attention forwards that ran in one forward and backward."""
    workload, module, optimizer = build(ZOO[model])
    apply(module, optimizer, {"settings": settings_of(technique)}, strict=False)
    batch = workload.make_batch(2)
    with _Counter() as counter:
        workload.loss(module, batch).backward()
    return counter.count


class _Counter(TorchDispatchMode):
    """Counts the ops that reach the kernels, without outputs that a region returns from its kept ones."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += is_attention(func)
        return func(*args, **(kwargs or {}))


def test_counter_counts_calls_of_attention() -> None:
    query = torch.randn(1, 2, 4, 8)
    with _Counter() as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert counter.count == 1
