"""Logits and loss in parts: equal to the plain model within the order of sums, and never a large part of the
logits.

Distinguishing test: a step holds at most 1/chunks of the logits at any moment, and runs as many FLOPs as the
plain one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.gloo import run_ranks
from support.ranks.sharded_step import sharded_step
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.activations.tiling.cross_entropy_pattern import loss_pattern
from memtune.activations.tiling.position_wise_pattern import norms, position_wise, sums_of
from memtune.api import Tuned, apply
from memtune.autotune.record.recording_session import start_session
from memtune.autotune.search.dry_runs import dry_run
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.config import TunedConfig
from memtune.errors import ApplyError
from memtune.program.step import Kind, Step
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.offload.activations.tsplit import TSplit
from memtune.search_spaces.recompute.balanced import Balanced
from memtune.search_spaces.recompute.full import Full
from memtune.search_spaces.recompute.planned import Planned
from memtune.search_spaces.recompute.selective import Selective
from memtune.search_spaces.split.tiled import Tiled
from memtune.technique import Target, Technique
from memtune.testing import TechniqueSuite, differences, drift, rewritten, train
from memtune.testing.drift_check import compare, plain_program, recording_of, target_of
from memtune.testing.training import build, config_of, plain, settings_of
from memtune.workload.workload import Workload

MODELS = Path(__file__).parents[2] / "support" / "models" / "tiling"
LARGE, CAPPED, SHIFTED, SHIFTED_AUTOCAST, NO_HEAD, OWN_HEAD, WIDE, BOTH = (
    MODELS / f"language_models.py:{name}"
    for name in (
        "large",
        "capped",
        "shifted",
        "shifted_autocast",
        "no_head",
        "own_head",
        "wide_mlp",
        "wide_both",
    )
)
NORMS = MODELS / "plain_norms.py"


class TestTiled(TechniqueSuite):
    technique = Tiled
    drawn_defects = 5  # among them those that no other suite draws
    models: ClassVar = {
        "large": LARGE,
        "capped": CAPPED,
        "shifted": SHIFTED,
        "no_head": NO_HEAD,
        "own_head": OWN_HEAD,
        "wide": WIDE,
    }
    variants = (Tiled(), Tiled(chunks=5), Tiled(chunks=1, mlp=5))
    quick = ("large",)
    tolerance = 2e-2  # three steps, one model in bfloat16; float32 alone is held tighter below

    def sabotage(self, tuned: Tuned) -> bool:
        del tuned.model.head.forward
        return True

    @pytest.mark.parametrize("chunks", [2, 8])
    def test_float32_gradients_differ_by_a_few_roundings(self, chunks: int) -> None:
        got = train(LARGE, Tiled(chunks=chunks), steps=1)
        wanted = plain(LARGE)
        for name, gradient in got.gradients[0].items():
            other = wanted.gradients[0][name]
            assert (
                float((gradient - other).abs().max()) <= (chunks + 2) * 2**-23 * float(other.abs().max()) * 4
            )

    @pytest.mark.parametrize("path", [LARGE, CAPPED], ids=["large", "capped"])
    def test_holds_a_part_of_the_logits_and_no_more_flops(self, path: Path) -> None:
        before, after = rewritten(path), rewritten(path, Tiled(chunks=8))
        pattern = loss_pattern(before)
        assert not isinstance(pattern, str)
        largest = int(
            after.storages.bytes[
                (after.storages.kind == Kind.TEMPORARY) & (after.storages.producer >= 0)
            ].max()
        )
        weight = int(before.storages.bytes[pattern.weight.plain])
        assert largest <= max(weight, int(before.storages.bytes[pattern.made[-2]]) // 8)
        assert after.ops.flops.sum() == pytest.approx(before.ops.flops.sum(), rel=0.02)
        assert after.peak_bytes() < before.peak_bytes()

    def test_composes_with_recompute_to_the_byte(self) -> None:
        assert not drift(LARGE, Tiled(), Full())
        assert not differences(train(LARGE, Tiled(), Full()), train(LARGE, Tiled()))

    @pytest.mark.drawn(1)
    @pytest.mark.parametrize("other", [Full(), Balanced(), Planned(share=0.5)], ids=lambda each: each.kind)
    def test_mlps_in_parts_compose_with_recompute_to_the_byte(self, other: Technique) -> None:
        mine = Tiled(chunks=1, mlp=4)
        assert not drift(WIDE, mine, other)
        assert not differences(train(WIDE, mine, other, steps=1), train(WIDE, mine, steps=1))

    def test_mlps_hold_a_part_of_what_is_inside_them(self) -> None:
        before, after = rewritten(WIDE), rewritten(WIDE, Tiled(chunks=1, mlp=8))
        inner = sum(region.inner_bytes for region in position_wise(before))
        assert before.saved_bytes() - after.saved_bytes() >= inner
        assert after.peak_bytes() < before.peak_bytes() - inner // 2

    def test_norms_in_parts_save_their_input_alone(self) -> None:
        mine, before = Tiled(chunks=1, norm=5), rewritten(NORMS)
        cut = norms(before)
        assert [each.module for each in cut] == [
            f"layers.{i}.norm" for i in (0, 1, 3)
        ]  # the fused one holds nothing to cut
        after, x_bytes = rewritten(NORMS, mine), int(before.storages.bytes[cut[0].x])
        assert (
            before.saved_bytes() - after.saved_bytes()
            == sum(each.inner_bytes for each in cut)
            >= 3 * 2 * x_bytes
        )
        assert after.peak_bytes() < before.peak_bytes() - x_bytes
        assert not drift(NORMS, mine)
        wanted = train(NORMS, steps=1)
        assert not differences(train(NORMS, mine, steps=1), wanted, tolerance=2**-8 * (5 + 2))
        assert not differences(train(NORMS, mine, Full(), steps=1), train(NORMS, mine, steps=1))

    def test_reasons_of_norms(self) -> None:
        gpt = plain_program(ZOO["gpt"])
        assert "no norm in the blocks" in str(Tiled(chunks=1, norm=4).fits(gpt, target_of()))
        assert "fewer than" in str(Tiled(chunks=1, norm=1000).fits(plain_program(NORMS), target_of()))

    @pytest.mark.slow
    def test_norms_with_mlps(self) -> None:
        llama = ZOO["hf_llama"]
        assert len(norms(plain_program(llama).step)) == 2 * len(position_wise(plain_program(llama).step)) == 6
        assert not drift(llama, Tiled(chunks=1, mlp=3, norm=4), Full())

    def test_norm_that_mixes_tokens_is_an_error_before_it_runs_in_parts(self) -> None:
        workload, model, optimizer = build(NORMS)
        plain_mean = model.layers[0].norm.forward

        def mixing(x: torch.Tensor) -> torch.Tensor:
            return plain_mean(x) - x.mean(-2, keepdim=True)

        model.layers[0].norm.forward = mixing
        config = config_of(NORMS, Tiled(chunks=1, norm=5))
        tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
        with pytest.raises(ApplyError, match=r"layers\.0\.norm does not treat tokens independently"):
            tuned.step([workload.make_batch(2)])

    def test_logits_and_mlps_together(self) -> None:
        assert not drift(BOTH, Tiled(chunks=4, mlp=3))

    def test_position_wise_modules_are_found(self) -> None:
        gpt = [region.module for region in position_wise(plain_program(ZOO["gpt"]).step)]
        assert gpt == [f"h.{i}.mlp" for i in range(4)]
        assert position_wise(plain_program(ZOO["cnn_bn"]).step) == ()
        assert position_wise(plain_program(CAPPED).step) == ()  # casts under autocast

    def test_reasons_of_mlps(self) -> None:
        program = plain_program(WIDE)
        assert "nothing is cut" in str(Tiled(chunks=1).fits(program, target_of()))
        assert "no module in the blocks" in str(
            Tiled(chunks=1, mlp=2).fits(plain_program(LARGE), target_of())
        )
        assert "fewer than" in str(Tiled(chunks=1, mlp=1000).fits(program, target_of()))
        assert "the outputs of the MLPs" in str(Tiled(chunks=1, mlp=2).fits(program, target_of(Selective())))
        assert Tiled(chunks=1, mlp=2).fits(program, target_of(Full())) is None

    def test_mlps_need_a_plan_for_this_model(self) -> None:
        for plan in ({}, {"split": {"mlps": ["h.9.mlp"]}}):
            _, model, optimizer = build(WIDE)
            with pytest.raises(ApplyError) as caught:
                apply(
                    model,
                    optimizer,
                    {"settings": settings_of(Tiled(chunks=1, mlp=2)), "plan": plan},
                    strict=False,
                )
            assert caught.value.code in ("MT316", "MT335")
            assert "forward" not in vars(model.layers[0].mlp)

    @pytest.mark.parametrize("chunks", [2, 32])
    def test_logits_cast_and_cut_before_the_loss(self, chunks: int) -> None:
        assert not drift(SHIFTED_AUTOCAST, Tiled(chunks=chunks))

    def test_small_logits_are_refused_and_so_are_those_made_inside_a_block(self) -> None:
        gpt = plain_program(ZOO["gpt"])
        assert str(Tiled().fits(gpt, target_of())).endswith("of the peak")
        assert str(Tiled(mlp=2).fits(gpt, target_of())).endswith("of the peak (chunks: 1)")
        assert Tiled(chunks=1, mlp=2).fits(gpt, target_of()) is None
        assert "inside a block" in str(Tiled().fits(plain_program(ZOO["lstm"]), target_of()))
        assert "fewer than" in str(Tiled(chunks=1000).fits(plain_program(LARGE), target_of()))

    def test_apply_without_a_plan_takes_the_widest_linear_layer_as_head(self) -> None:
        _, model, optimizer = build(LARGE)
        apply(model, optimizer, {"settings": settings_of(Tiled())}, strict=False)
        assert "forward" in vars(model.head)

    def test_product_that_is_not_found_in_the_module_is_an_error_of_the_audit(self) -> None:
        workload, model, optimizer = build(OWN_HEAD)
        config = config_of(OWN_HEAD, Tiled())
        tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone(), requires_grad=False)
        tuned.step([workload.make_batch(2)])
        with pytest.raises(ApplyError, match="no known product with its weight") as caught:
            tuned.audit()
        assert caught.value.code == "MT335"

    def test_apply_refuses_a_model_without_a_head(self) -> None:
        model = torch.nn.Conv2d(1, 1, 1)
        with pytest.raises(ApplyError, match="as head") as caught:
            apply(
                model,
                torch.optim.SGD(model.parameters(), 0.1),
                {"settings": settings_of(Tiled())},
                strict=False,
            )
        assert caught.value.code == "MT334"


@pytest.mark.drawn(4)
@pytest.mark.parametrize("path", [LARGE, CAPPED, WIDE, NO_HEAD], ids=["large", "capped", "wide", "no_head"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_composes_with_sharding_and_offload_to_the_byte(path: Path, ranks: int) -> None:
    split = {"kind": "tiled", "chunks": 1, "mlp": 4} if path == WIDE else {"kind": "tiled", "chunks": 4}
    settings: dict[str, Any] = {"split": split, "recompute": {"kind": "full"}}
    if ranks == 1:
        settings["offload"] = {
            "activations": {"kind": "copy_out", "min_bytes": 0},
            "states": {"kind": "optimizer_cpu"},
        }
    else:
        settings["sharding"] = {"states": {"kind": "fsdp"}}
    target = Target(hardware.detect("cpu"), ranks)
    choice = Choice.from_document({"execution": {"micro_batch": 2}, **settings})
    found = Rewriter(recording_of(path), target).candidate(choice)
    assert isinstance(found, Candidate), found
    step = dry_run(Workload.load(path), found, target)
    assert isinstance(step, Step), step
    assert compare(found.program.step, step) == ""


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("path", "mine"),
    [
        (WIDE, Tiled(chunks=1, mlp=4)),
        (NORMS, Tiled(chunks=1, norm=5)),
        (WIDE, TSplit(share=0.0, parts=4, min_bytes=64)),
    ],
    ids=["mlps", "norms", "micro-tensors"],
)
def test_parts_under_accumulation_are_predicted_to_the_byte(path: Path, mine: Technique) -> None:
    choice = Choice.of(Execution(micro_batch=2, accumulate=2), {mine.slot: mine})
    found = Rewriter(recording_of(path), target_of()).candidate(choice)
    assert isinstance(found, Candidate), found
    session = start_session(Workload.load(path), "fake")
    with session.entered():
        apply(session.model, session.optimizer, TunedConfig(settings=choice, plan=found.plans), strict=False)
    session.warm_up(2)
    real, step = session.trace(2, micro_batches=2, trace_last=True), found.program.step
    assert [real.names[i] for i in real.ops.name] == [step.names[i] for i in step.ops.name]
    # Autograd adds the gradients of one node to their sums in the order of a heap.
    same = np.asarray([op not in sums_of(step) for op in range(step.ops.n)])
    assert np.array_equal(step.live_bytes()[same], real.live_bytes()[same])
    assert step.peak_bytes() == real.peak_bytes()


@pytest.mark.slow
def test_two_sharded_ranks_train_as_the_plain_model() -> None:
    plain = sharded_step(str(BOTH), None)
    for rank in run_ranks(sharded_step, 2, str(BOTH), Tiled(chunks=4, mlp=3)):
        assert rank["audit"]["split"] == {"head": "head", "losses_in_parts": 1, "read_whole": 0}
        assert rank["audit"]["split.modules"] == {"modules": 4, "runs_in_parts": 4}
        for name, before in plain["before"].items():
            gradient, mine = before - plain["after"][name], rank["before"][name] - rank["after"][name]
            assert float((mine - gradient).abs().max()) <= 1e-5 * max(1.0, float(gradient.abs().max()))
