"""States sharded or replicated among copies of a pipeline's stages: gloo ranks train as one, peaks and bytes
as predicted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import SEPARATE, assert_trained_as_one, refusal, rewriter
from support.ranks.pipeline_runs import (
    CHAIN,
    KIND,
    MOVED,
    RANKS,
    STAGES,
    STATES,
    Found,
    assert_as_predicted,
    candidate,
    counted,
    document,
    link_bytes,
    measured_and_trained,
    other_slots,
    portable,
    trained,
)

from memtune.api import apply
from memtune.errors import ApplyError
from memtune.testing.training import build


def asked(states: str, accumulate: int, more: dict[str, Any] | None = None, **knobs: Any) -> dict[str, Any]:
    return document(CHAIN, RANKS, other_slots(states, more, **knobs), accumulate=accumulate, degree=STAGES)


# -- what fits -----------------------------------------------------------------------------------------------


def refused(
    states: dict[str, Any], more: dict[str, Any] | None = None, path: Path = CHAIN, **knobs: Any
) -> str:
    parallel = {"kind": KIND, "degree": STAGES, **knobs}
    return refusal(KIND, path, {"sharding": {"parallel": parallel, "states": states}, **(more or {})})


def test_refusals_name_what_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.ranks.model_parallel_runs.rewriter", lambda path: rewriter(path, RANKS))
    zero3 = {"kind": "zero3"}
    assert "zero3: the first and the last stage share" in refused(zero3, path=SEPARATE)
    assert "zero3 needs one stage per rank" in refused(zero3, schedule="interleaved_1f1b")
    assert "zero3: with one pipeline there is one copy" in refused(zero3, degree=4)
    assert "may lie in two stages" in refused({**zero3, "blocks_per_unit": 2})
    assert "all 2 ranks in one group are fsdp" in refused({"kind": "mics", "group": 2})
    assert "paro does not work on the stages" in refused({"kind": "paro", "group": 2})


def test_parameters_outside_of_blocks_are_gathered_before_reloads() -> None:
    """The first stage's parameters in no block are gathered before the H2D copies of its last block, although
    no module's call requests them.
    """
    made = candidate(
        CHAIN, RANKS, other_slots("zero3", {"offload": {"activations": MOVED}}), accumulate=1, degree=STAGES
    )
    alone = candidate(CHAIN, RANKS, other_slots("zero3"), accumulate=1, degree=STAGES)
    assert made.program.step.peak_bytes() < alone.program.step.peak_bytes()


# -- on gloo ranks -------------------------------------------------------------------------------------------


def on_rank(cases: list[tuple[dict[str, Any], bool, int]]) -> list[tuple[Found, dict[str, int]]]:
    return [
        (measured_and_trained(CHAIN, RANKS, config, clip, accumulate), counted(config))
        for config, clip, accumulate in cases
    ]


def check(cases: list[tuple[str, bool, int, dict[str, Any] | None]]) -> None:
    """Check training against one rank, peaks within 2 %, and bytes by formula."""
    configs = [
        (asked(states, accumulate, more), clip, accumulate) for states, clip, accumulate, more in cases
    ]
    ranks = run_ranks(on_rank, RANKS, configs, deadline_s=280)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    wanted = {
        each: trained(CHAIN, RANKS, None, *each)
        for each in {(clip, accumulate) for _, clip, accumulate in configs}
    }
    torch.set_num_threads(threads)
    for number, (states, clip, accumulate, more) in enumerate(cases):
        found = [each[number][0] for each in ranks]
        assert_as_predicted(
            found, candidate(CHAIN, RANKS, other_slots(states, more), accumulate=accumulate, degree=STAGES)
        )
        assert_trained_as_one([run for _, run in found], wanted[clip, accumulate], atol=2e-6)
        for rank, each in enumerate(ranks):
            got = each[number][1]
            assert (got["intra_link"], got["inter_link"]) == link_bytes(states, rank, accumulate), (
                states,
                rank,
            )


@pytest.mark.slow
def test_four_ranks_with_gathered_stages_train_as_one() -> None:
    check([("zero3", True, 2, None)])


@pytest.mark.slow
@pytest.mark.parametrize("states", list(STATES))
def test_state_sharding_trains_as_one_rank(states: str) -> None:
    check(
        [
            (states, clip, accumulate, None)
            for clip, accumulate in ((False, 1), (True, 1), (False, 4), (True, 4))
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"recompute": {"kind": "full"}},
        {"recompute": {"kind": "selective"}},
        {"offload": {"activations": MOVED}},
    ],
    ids=["full", "selective", "copy_out"],
)
def test_training_with_activation_techniques(more: dict[str, Any]) -> None:
    check([(states, True, 2, more) for states in ("zero2", "zero3", "kept")])


@pytest.mark.slow
@pytest.mark.parametrize("states", ["ddp", "zero2", "zero3"])
def test_checkpoints_do_not_depend_on_sharded_stages(states: str, tmp_path: Path) -> None:
    found = run_ranks(portable_chain, RANKS, str(tmp_path), asked(states, 1))
    _, model, _ = build(CHAIN)
    for run in found:
        assert {n: v.shape for n, v in run["state"]["model"].items()} == {
            n: v.shape for n, v in model.state_dict().items()
        }
        for again in run["again"]:
            torch.testing.assert_close(again["model"], run["state"]["model"], rtol=0, atol=0)
            torch.testing.assert_close(
                again["optimizer"]["state"], run["state"]["optimizer"]["state"], rtol=0, atol=0
            )


def portable_chain(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    return portable(CHAIN, folder, config)


def errors(config: dict[str, Any], kinds: list[dict[str, Any]]) -> list[str]:
    """Return the errors of edited configs that no search would write."""
    said = []
    for kind in kinds:
        workload, model, optimizer = build(SEPARATE)
        parallel = config["settings"]["sharding"]["parallel"]
        edited = {
            **config,
            "settings": {**config["settings"], "sharding": {"parallel": parallel, "states": kind}},
        }
        with pytest.raises(ApplyError) as error:
            apply(model, optimizer, edited, loss=workload.loss, strict=False)
        said.append(str(error.value))
    return said


@pytest.mark.slow
def test_edited_configs_are_refused() -> None:
    """The head of this model is tied to its embedding."""
    asked_of = document(SEPARATE, RANKS, other_slots("zero1"), accumulate=2, degree=STAGES)
    for said in run_ranks(errors, RANKS, asked_of, [{"kind": "zero2"}, {"kind": "zero3"}]):
        assert all("the first and the last stage share" in each for each in said)
