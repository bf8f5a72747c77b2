"""Regions from attention to attention: attention runs once, and a block keeps only attention's output.

Distinguishing test: attention's forward runs once per block and step; with k = L, all that L blocks keep is L
outputs and log-sum-exps of attention, to the byte.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from support.zoo_paths import ZOO
from torch.utils._python_dispatch import TorchDispatchMode

from memtune.api import Tuned, apply
from memtune.errors import ApplyError
from memtune.search_spaces.recompute._block_planner.fits import is_attention
from memtune.search_spaces.recompute.attention_boundary import AttentionBoundary
from memtune.search_spaces.recompute.attention_output import AttentionOutput
from memtune.search_spaces.recompute.full import Full
from memtune.testing import TechniqueSuite, rewritten
from memtune.testing.drift_check import plain_program, recorded, target_of
from memtune.testing.training import build, config_of, settings_of

LAYERS = {"gpt": 4, "hf_llama": 3}
HIDDEN, LOG_SUM_EXP = (
    2 * 32 * 64 * 4,
    2 * 4 * 32 * 4,
)  # gpt: (micro-batch, sequence, width) and (…, heads, sequence), float32


class TestAttentionBoundary(TechniqueSuite):
    technique = AttentionBoundary
    models: ClassVar = {name: ZOO[name] for name in LAYERS}
    variants = (AttentionBoundary(residual_every=3),)
    quick = ("gpt",)

    def sabotage(self, tuned: Tuned) -> bool:
        del vars(tuned._context.model)["forward"]
        return True

    @pytest.mark.parametrize("model", LAYERS)
    def test_attention_runs_once_per_block(self, model: str) -> None:
        workload, module, optimizer = build(ZOO[model])
        tuned = apply(module, optimizer, config_of(ZOO[model], self.default()), strict=False)
        workload.loss(module, workload.make_batch(2)).backward()  # captures, too
        with _Counter() as counter:
            workload.loss(module, workload.make_batch(2)).backward()
        assert counter.count == LAYERS[model]
        assert tuned.audit()

    @pytest.mark.parametrize(("every", "residuals"), [(1, 3), (None, 1), (3, 1), (4, 0)])
    def test_blocks_keep_outputs_of_attention_and_every_kth_residual(
        self, every: int | None, residuals: int
    ) -> None:
        technique = AttentionBoundary(residual_every=every)
        plan = technique.plan(plain_program(ZOO["gpt"]), target_of(technique))
        assert plan.kept_bytes == 4 * (HIDDEN + LOG_SUM_EXP) + residuals * HIDDEN

    def test_forward_without_residuals_ends_with_a_tenth_more_than_full(self) -> None:
        """Live bytes when the loss is computed, recorded from the running model: attention's outputs instead
        of inputs.
        """
        full, twice, mine = (
            _live_after_forward(technique)
            for technique in (Full(), AttentionOutput(), AttentionBoundary(residual_every=4))
        )
        assert twice - full == 4 * (HIDDEN + LOG_SUM_EXP)
        assert mine - full <= 0.1 * 4 * HIDDEN

    def test_plan_states_the_peak(self) -> None:
        technique = self.default()
        plan = technique.plan(plain_program(ZOO["gpt"]), target_of(technique))
        assert plan.peak_bytes == recorded(ZOO["gpt"], technique).peak_bytes()
        assert plan.peak_bytes <= rewritten(ZOO["gpt"], AttentionOutput()).peak_bytes()

    def test_refusals_name_the_reason(self) -> None:
        technique = self.default()
        assert "not fused" in str(technique.fits(plain_program(ZOO["moe"]), target_of()))
        assert "no attention" in str(technique.fits(plain_program(ZOO["lora"]), target_of()))

    def test_apply_refuses_a_missing_plan(self) -> None:
        _, model, optimizer = build(ZOO["gpt"])
        with pytest.raises(ApplyError, match="needs a plan"):
            apply(model, optimizer, {"settings": settings_of(self.default())}, strict=False)
        assert "forward" not in vars(model)


def _live_after_forward(technique: Any) -> int:
    step = recorded(ZOO["gpt"], technique)
    return int(step.live_bytes()[int(step.forward_ends[-1])])


class _Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += is_attention(func)
        return func(*args, **(kwargs or {}))
