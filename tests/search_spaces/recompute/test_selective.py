"""Selective recompute: matrix products, convolutions and attention run once, the rest twice.

Distinguishing test: no matrix product runs twice, and every matmul and attention output of a block is still
held.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from support.zoo_paths import ZOO

from memtune.program.step import Phase, Resource
from memtune.search_spaces.recompute._block_planner.fits import is_matmul_or_attention
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.selective import Selective
from memtune.testing import TechniqueSuite, rewritten
from memtune.testing.drift_check import plain_program, target_of


class TestSelective(TechniqueSuite):
    technique = Selective
    models = ZOO
    quick = ("tied",)

    @pytest.mark.parametrize("model", [name for name in ZOO if name != "inplace_views"])
    def test_products_run_once(self, model: str) -> None:
        step = rewritten(ZOO[model], self.default())
        again = {step.names[i] for i in step.ops.name[step.ops.phase == Phase.RECOMPUTE]}
        assert again or model == "lstm"
        assert not any(is_matmul_or_attention(name) for name in again)

    def test_ops_with_outputs_written_later_run_twice(self) -> None:
        step = rewritten(ZOO["inplace_views"], self.default())
        again = [step.names[i] for i in step.ops.name[step.ops.phase == Phase.RECOMPUTE]]
        assert (
            again.count("aten.addmm.default") == 3
        )  # `out` of each block, whose output is changed in place; `fused` is kept


class TestCoreAttention(TechniqueSuite):
    """Korthikanti's own form, on a GPT as the paper counts it."""

    technique = Selective
    models: ClassVar = {
        "korthikanti": Path(__file__).parents[2] / "support" / "models" / "recompute" / "korthikanti.py"
    }
    variants = (Selective(kind="selective", scope="core_attention"),)

    def test_saved_bytes_are_the_papers(self) -> None:
        """Table 2 with t = 1: sbh(34 + 5as/h), 34 sbh and 2 sbh bytes per block."""
        path, s, b, h, a = self.models["korthikanti"], 64, 2, 256, 4
        steps = [rewritten(path), rewritten(path, self.variants[0]), rewritten(path, Full(kind="full"))]
        for step, formula in zip(steps, (34 + 5 * a * s / h, 34, 2), strict=True):
            assert [step.saved_bytes(block) for block in range(2)] == pytest.approx(
                [s * b * h * formula] * 2, rel=0.02
            )

    def test_only_the_core_of_attention_runs_twice(self) -> None:
        step = rewritten(self.models["korthikanti"], self.variants[0])
        runs = (step.ops.copy_of >= 0) & (step.ops.resource != Resource.NOTHING) & (step.ops.block == 0)
        again = [step.names[i] for i in step.ops.name[runs]]
        assert again == [
            "aten.bmm.default",
            "aten.div.Tensor",
            "aten.masked_fill.Scalar",
            "aten._softmax.default",
            "aten.native_dropout.default",
        ]

    @pytest.mark.parametrize(("model", "why"), [("gpt", "fused already"), ("moe", "not in the blocks")])
    def test_refused_where_no_scores_are_saved(self, model: str, why: str) -> None:
        assert why in str(self.variants[0].fits(plain_program(ZOO[model]), target_of()))


class TestSelectedOps(TechniqueSuite):
    """torchtitan's default, and a list of the user's."""

    technique = Selective
    models: ClassVar = {name: ZOO[name] for name in ("gpt", "hf_llama")}
    quick = ("gpt",)
    variants = (
        Selective(kind="selective", matmuls="every_second"),
        Selective(kind="selective", save_ops=("aten.addmm",)),
    )

    def test_second_products_run_twice(self) -> None:
        step = rewritten(ZOO["hf_llama"], self.variants[0])
        first = step.ops.block == 0
        runs = (step.ops.copy_of >= 0) & (step.ops.resource != Resource.NOTHING) & first
        again = [step.names[i] for i in step.ops.name[runs]].count("aten.mm.default")
        plain = [step.names[i] for i in step.ops.name[first & (step.ops.phase == Phase.FORWARD)]]
        assert again == plain.count("aten.mm.default") // 2 == 3

    def test_unknown_op_is_refused_with_the_nearest_name(self) -> None:
        refused = Selective(kind="selective", save_ops=("aten.admm",)).fits(
            plain_program(ZOO["gpt"]), target_of()
        )
        assert "aten.addmm" in str(refused)
