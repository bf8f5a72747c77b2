"""Sequence parallelism: refused models, a rank's bytes, and training on gloo ranks as on one.

Distinguishing test: a rank saves 1/degree of the saved bytes of a block's norms, and every pair sends its
input's bytes once in forward and one and a half times in backward, in all-gathers and reduce-scatters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import (
    MODELS,
    SEPARATE,
    SIZE,
    STEPS,
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
from memtune.errors import ApplyError
from memtune.parallel.model.sequence_sharding import summed_parameters
from memtune.program.step import Phase, Resource, Step
from memtune.runtime.transfer import COUNTERS
from memtune.search_spaces.sharding.parallel.sequence_parallel import SequenceParallel
from memtune.testing.training import build

KIND = "sequence_parallel"
HIDDEN = SIZE * 16 * 32 * 4
"""Bytes of one tensor between the blocks, all positions."""
PAIRS, FROZEN = 4, 1
"""In the model, and those of which the column layers' weights are frozen, so that nothing is gathered again.
"""


def bytes_of(step: Step, name: str, phase: Phase) -> int:
    ops = [
        op
        for op in range(step.ops.n)
        if name in step.names[step.ops.name[op]] and step.ops.phase[op] == phase
    ]
    assert {int(step.ops.resource[op]) for op in ops} <= {Resource.INTRA_LINK}
    return int(step.ops.traffic_bytes[ops].sum())


def test_step_sends_gathers_and_scatters_instead_of_sums() -> None:
    step = candidate(KIND).program.step
    assert bytes_of(step, "all_reduce_", Phase.FORWARD) == bytes_of(step, "all_reduce_", Phase.BACKWARD) == 0
    assert (
        bytes_of(step, "all_gather", Phase.FORWARD) == (PAIRS + 1) * HIDDEN
    )  # and where the last block ends
    assert bytes_of(step, "reduce_scatter", Phase.FORWARD) == PAIRS * HIDDEN
    assert bytes_of(step, "all_gather", Phase.BACKWARD) == (PAIRS + PAIRS - FROZEN + 1) * HIDDEN
    assert bytes_of(step, "reduce_scatter", Phase.BACKWARD) == PAIRS * HIDDEN
    whole = 2 * 6 * 32 * 4  # two norms of two weights and two biases a block
    assert bytes_of(step, "all_reduce_", Phase.BOUNDARY) == whole


def test_norms_and_layer_inputs_are_saved_as_shards() -> None:
    def saved(kind: str) -> int:
        step = candidate(kind).program.step
        mine = step.saves.storage[step.saves.block == 1]
        return int(
            step.storages.bytes[
                [each for each in set(mine.tolist()) if step.storages.bytes[each] == HIDDEN]
            ].sum()
        )

    assert saved(KIND) == 0
    assert saved("tensor") >= 4 * HIDDEN
    assert candidate(KIND).program.step.peak_bytes() < 0.95 * candidate("tensor").program.step.peak_bytes()


@pytest.mark.parametrize("ranks", [2, 4])
def test_checkpoints_are_shards_that_may_be_offloaded(ranks: int) -> None:
    """ZeRO-R's partitioned checkpoints (P_a) and those on the host (P_a+cpu): a share of a block's input."""
    full: dict[str, Any] = {
        "recompute": {"kind": "full"},
        "offload": {"activations": {"kind": "copy_out", "min_bytes": 0}},
    }

    def checkpoint(kind: str) -> list[int]:
        step = candidate(kind, SEPARATE, ranks, full).program.step
        copies = (step.ops.resource == Resource.DEVICE_TO_HOST) & (step.ops.block == 1)
        return step.ops.traffic_bytes[copies].astype(int).tolist()

    assert (checkpoint("tensor"), checkpoint(KIND)) == ([HIDDEN], [HIDDEN // ranks])


REASONS = {
    "first": "uses single positions",
    "table": "uses the first positions of what is whole",
    "odd": "cannot each take an equal share",
    "mean": "works along what was divided",
    "drawn": "draws random numbers",
    "between": "scale, which is outside of the blocks",
    "made": "what weights outside of the blocks have made",
    "batch_norm": "is not known to treat",
    "inside": "is not given what the module that holds it was given",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "first" else []) for name in REASONS]
)
def test_refusals_name_what_is_in_the_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BETWEEN_LAYERS", name)
    rewriter.cache_clear()
    try:
        assert REASONS[name] in refusal(KIND, MODELS / "positions.py")
    finally:
        rewriter.cache_clear()


def test_fits_refuses_a_weight_shared_with_the_head() -> None:
    _, model, _ = build(SEPARATE)
    model.ln_f.weight = model.h[0].ln_1.weight
    with pytest.raises(ApplyError, match="which sees all positions"):
        summed_parameters(model, [], ["h.0", "h.1"])
    with pytest.raises(ApplyError, match="not in one chain"):
        summed_parameters(model, [], ["h.0", "ln_f"])


# -- on gloo ranks -------------------------------------------------------------------------------------------


def test_two_ranks_train_as_one_with_clipping_and_dropout() -> None:
    found = run_ranks(trained, 2, 2, config(KIND), True, 1, True)
    assert_trained_as_one(found, trained(2, None, True, 1, True), atol=1e-5)
    audit = {"degree": 2, "pairs": 4, "layers": 12, "cut_bytes": 49152, "summed_parameters": 12}
    assert found[0]["audit"]["sharding.parallel"] == audit


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip", [False, True])
def test_accumulation_and_clipping(accumulate: int, clip: bool) -> None:
    found = run_ranks(trained, 2, 2, config(KIND, accumulate=accumulate), clip, accumulate)
    assert_trained_as_one(found, trained(2, None, clip, accumulate))


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{}, {"degree": 2}], ids=str)
def test_four_ranks_train_as_one(knobs: dict[str, Any]) -> None:
    found = run_ranks(trained, 4, 4, config(KIND, 4, **knobs), True)
    assert_trained_as_one(found, trained(4, None, True), atol=1e-5)


OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "full": {"recompute": {"kind": "full"}},
    "selective": {"recompute": {"kind": "selective"}},
    "copy_out": {"offload": {"activations": {"kind": "copy_out", "min_bytes": 0}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "selective", "copy_out"])
def test_training_with_activation_techniques(name: str) -> None:
    found = run_ranks(trained, 2, 2, config(KIND, other_slots=OTHERS[name]), False, 1, True)
    assert_trained_as_one(found, trained(2, None, False, 1, True), atol=1e-5)


@pytest.mark.native_ledger
@pytest.mark.parametrize(
    "name", ["alone", *(pytest.param(each, marks=pytest.mark.slow) for each in [*OTHERS][1:])]
)
def test_ledger_peak_is_as_predicted(name: str) -> None:
    predicted = simulate(
        candidate(KIND, SEPARATE, 2, OTHERS[name]).program, hardware.detect("cpu")
    ).peak_allocated_bytes
    for measured in run_ranks(peak, 2, config(KIND, other_slots=OTHERS[name])):
        assert abs(measured - predicted) <= 0.02 * predicted, (measured, predicted)


def user_loop(document: dict[str, Any]) -> dict[str, Any]:
    """Run two backwards before each step, without `Tuned.step`, on the same samples on every rank; return
    one's bytes.
    """
    workload, model, optimizer = build(SEPARATE)
    tuned = apply(model, optimizer, document, loss=workload.loss, strict=False) if document else None
    model.eval()
    sent, gradients = [], []
    for step in range(STEPS):
        torch.manual_seed(step)
        for _ in range(2):
            COUNTERS.take()
            workload.loss(model, workload.make_batch(SIZE)).backward()
            sent.append(COUNTERS.take().get("collective", 0))
        gradients.append(model.h[0].ln_1.weight.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
    state = tuned.state_dict()["model"] if tuned is not None else model.state_dict()
    return {"model": state, "gradients": gradients, "sent": sent[-1]}


def test_user_loop_sums_gradients_and_sends_bytes_by_formula() -> None:
    wanted = user_loop({})
    for found in run_ranks(user_loop, 2, config(KIND)):
        torch.testing.assert_close(found["model"], wanted["model"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            found["gradients"], wanted["gradients"], rtol=1e-4, atol=1e-6
        )  # AdamW sees no factor
        # (t - 1)/t of each message: two a pair forward, three back, one at each end; twice that of the summed
        # gradients.
        assert found["sent"] == (5 * PAIRS - FROZEN + 2) * HIDDEN // 2 + 2 * 6 * 32 * 4


class TestSequenceParallel(ShardedSuite):
    technique = SequenceParallel
    models: ClassVar[dict[str, Path]] = {"undrawn": UNDRAWN}
    accumulate, peak_rel, briefly = 2, 0.02, False
