"""Tensor parallelism: layers that can be divided, a rank's bytes, and training on gloo ranks as on one.

Distinguishing test: a rank holds 1/degree of the divided weights, and every pair sends its input's bytes once
in forward and once in backward, in all-reduces.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import (
    MODELS,
    SEPARATE,
    SIZE,
    UNDRAWN,
    assert_trained_as_one,
    candidate,
    config,
    peak,
    refusal,
    rewriter,
    trained,
)
from support.suites.sharded_suite import ShardedSuite

from memtune import hardware
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record_parallel.sharded_recording import chosen_pairs
from memtune.errors import ApplyError
from memtune.parallel.model.tensor_parallel import require_linear
from memtune.program.step import Phase, Resource
from memtune.search_spaces.sharding.parallel.tensor import TensorParallel
from memtune.technique import Target
from memtune.testing.training import build
from memtune.workload.linear_pairs import Pairs, find_pairs

KIND = "tensor"
FLAT = MODELS / "flat.py"


# -- what may be cut -----------------------------------------------------------------------------------------


def pairs_of(shapes: dict[str, tuple[int, ...]]) -> Pairs:
    return find_pairs([(f"h.0.{name}.weight", shape) for name, shape in shapes.items()], ["h.0"])


def test_pairs_are_found_by_names_and_shapes() -> None:
    attention = {f"attn.{name}": (32, 32) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    gated = {"mlp.gate": (64, 32), "mlp.up": (64, 32), "mlp.down": (32, 64)}
    found = pairs_of({**attention, **gated, "norm": (32,)}).found
    assert [(pair.owner, pair.attention, len(pair.columns)) for pair in found] == [
        ("h.0.attn", True, 3),
        ("h.0.mlp", False, 2),
    ]
    assert not pairs_of({"mlp.up": (64, 32), "mlp.down": (32, 32)}).found
    assert "in one product" in pairs_of({"attn.c_attn": (96, 32), "attn.c_proj": (32, 32)}).refused[0]
    assert "other linear layers" in pairs_of({**attention, "attn.gate": (32, 32)}).refused[0]
    fused = pairs_of({"c_attn": (96, 32), "c_proj": (32, 32), "up": (64, 32), "down": (32, 64)})
    assert "in one product" in fused.refused[0]
    assert [pair.row for pair in fused.found] == ["h.0.down"]


def test_refusals_name_what_is_in_the_way() -> None:
    both = {"parallel": {"kind": "tensor"}, "states": {"kind": "fsdp"}}
    assert "sharding.states: fsdp has no copies of a part" in refusal(KIND, other_slots={"sharding": both})
    assert "degree=4 is more than the 2 ranks" in refusal(KIND, degree=4)
    program, here = candidate(KIND).program, hardware.detect("cpu")
    assert "each degree must be recorded" in str(TensorParallel().fits(program, Target(here, 2)))
    assert "only one rank" in str(TensorParallel().fits(program, Target(here, 1)))
    step = rewriter(SEPARATE).recording.step
    assert "3 ranks do not divide the 32 outputs of h.0.attn.q_proj" in str(chosen_pairs(step, 3, "all"))


def test_code_that_names_the_number_of_heads_is_refused_with_its_line() -> None:
    path = FLAT.with_name("flat.py:fixed_heads")
    said = refusal(KIND, path)
    assert re.search(r"does not run with a share of the weights .*flat.py, line 30", said), said
    assert "layers: mlp" in said
    assert candidate(KIND, path, layers="mlp").program.step.ops.n > 0


@pytest.mark.parametrize(
    ("degree", "change", "reason"),
    [
        (8, lambda block: None, "8 ranks do not divide the 4 heads of h.0.attn.q_proj"),
        (2, lambda block: setattr(block.mlp[0], "weight", block.mlp[0].weight), None),
        (
            2,
            lambda block: setattr(block.attn.q_proj, "weight", block.attn.k_proj.weight),
            "shares its weight with h.0.attn.k_proj",
        ),
        (2, lambda block: block.mlp[2].register_forward_hook(lambda *_: None), "h.0.mlp.2 has hooks"),
    ],
)
def test_fits_refuses_layers_that_are_not_plain(degree: int, change: Any, reason: str | None) -> None:
    _, model, _ = build(SEPARATE)
    pairs = find_pairs([(name, tuple(p.shape)) for name, p in model.named_parameters()], ["h.0", "h.1"]).found
    change(model.h[0])
    if reason is None:
        require_linear(model, pairs, degree)
        return
    with pytest.raises(ApplyError, match=re.escape(reason)):
        require_linear(model, pairs, degree)


# -- the rank's step -----------------------------------------------------------------------------------------


def test_step_has_half_the_divided_weights_and_two_sums_a_pair() -> None:
    plain, cut = rewriter(SEPARATE).recording.at(SIZE), candidate(KIND).program.step
    shapes = {p.name: p.shape for p in cut.parameters}
    assert shapes["h.1.attn.q_proj.weight"] == (16, 32)
    assert shapes["h.1.attn.out_proj.weight"] == (32, 16)
    assert shapes["h.1.mlp.0.bias"] == (64,)
    assert shapes["h.1.mlp.2.bias"] == (32,)
    sums = [op for op in range(cut.ops.n) if cut.names[cut.ops.name[op]] == "memtune.all_reduce_.default"]
    assert [int(cut.ops.phase[op]) for op in sums].count(Phase.FORWARD) == 4
    assert [int(cut.ops.phase[op]) for op in sums].count(Phase.BACKWARD) == 4
    assert {int(cut.ops.traffic_bytes[op]) for op in sums} == {SIZE * 16 * 32 * 4}
    assert {int(cut.ops.resource[op]) for op in sums} == {Resource.INTRA_LINK}
    assert cut.ops.flops.sum() < 0.75 * plain.ops.flops.sum()


def test_step_has_the_same_samples_in_more_micro_batches() -> None:
    program = candidate(KIND).program
    assert (program.accumulate, program.sharers, program.samples) == (2, 2, 2 * SIZE)


# -- on gloo ranks -------------------------------------------------------------------------------------------


def test_two_ranks_train_as_one_with_clipping() -> None:
    found = run_ranks(trained, 2, 2, config(KIND), True)
    assert_trained_as_one(found, trained(2, None, True))
    assert found[0]["audit"]["sharding.parallel"] == {
        "degree": 2,
        "pairs": 4,
        "layers": 12,
        "cut_bytes": 49152,
    }


@pytest.mark.parametrize("kind", ["tensor", "sequence_parallel"])
def test_blocks_that_hold_all_layers_train_as_one(kind: str) -> None:
    document = config(kind, path=FLAT)
    pairs = document["plan"]["sharding.parallel"]["pairs"]
    assert [pair["row"].rpartition(".")[2] for pair in pairs] == ["wo", "w2"] * 2
    found = run_ranks(trained, 2, 2, document, False, 1, False, FLAT)
    assert_trained_as_one(found, trained(2, None, path=FLAT))


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{}, {"degree": 2}, {"layers": "mlp"}], ids=str)
def test_four_ranks_train_as_one(knobs: dict[str, Any]) -> None:
    assert_trained_as_one(
        run_ranks(trained, 4, 4, config(KIND, 4, **knobs), True), trained(4, None, True), atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_training_with_recompute(kind: str) -> None:
    found = run_ranks(trained, 2, 2, config(KIND, other_slots={"recompute": {"kind": kind}}))
    assert_trained_as_one(found, trained(2, None))


def without_rotation(document: dict[str, Any]) -> list[str]:
    rank, said = torch.distributed.get_rank(), []
    for seed in (0, rank):
        workload, model, optimizer = build(SEPARATE)
        tuned = apply(model, optimizer, document, strict=False)
        torch.manual_seed(seed)
        batch = workload.make_batch(SIZE)
        try:
            workload.loss(tuned.model, batch)
            said.append("")
        except ApplyError as error:
            said.append(str(error))
    return said


def test_different_samples_outside_of_step_raise() -> None:
    for same, other in run_ranks(without_rotation, 2, config(KIND)):
        assert same == ""
        assert "different micro-batches" in other


@pytest.mark.native_ledger
@pytest.mark.parametrize(
    "other_slots",
    [
        {},
        pytest.param({"recompute": {"kind": "full"}}, marks=pytest.mark.slow),
        # The weights' local parts are not activations, although autograd saves them as plain tensors.
        pytest.param(
            {"offload": {"activations": {"kind": "copy_out", "min_bytes": 0}}}, marks=pytest.mark.slow
        ),
    ],
    ids=["alone", "full", "copy_out"],
)
def test_ledger_peak_is_as_predicted(other_slots: dict[str, Any]) -> None:
    made = candidate(KIND, SEPARATE, 2, other_slots)
    predicted = simulate(made.program, hardware.detect("cpu")).peak_allocated_bytes
    for measured in run_ranks(peak, 2, config(KIND, other_slots=other_slots)):
        assert abs(measured - predicted) <= 0.02 * predicted, (measured, predicted)


class TestTensor(ShardedSuite):
    technique = TensorParallel
    models: ClassVar[dict[str, Path]] = {"undrawn": UNDRAWN}
    accumulate, peak_rel, briefly = (
        2,
        0.03,
        False,
    )  # on a busy machine gloo may free a message late, 1.2 % of the peak here
