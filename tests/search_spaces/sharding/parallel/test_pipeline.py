"""Pipelines: models that can be cut into stages, a rank's bytes, and training on gloo ranks as on one.

Distinguishing test: each rank sends boundaries · m · bytes of a block's output, and holds no weight of
another stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import SEPARATE, SIZE, assert_trained_as_one, refusal, rewriter
from support.ranks.pipeline_runs import (
    CHAIN,
    KIND,
    MOVED,
    PASSED,
    Found,
    assert_as_predicted,
    candidate,
    chain_returning,
    document,
    measured_and_trained,
    portable,
    sent_bytes,
    trained,
)
from support.suites.sharded_suite import ShardedSuite
from torch import nn

from memtune import hardware
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.errors import ApplyError
from memtune.parallel.pipeline.pipeline_pass import PipelineSettings, pipelined
from memtune.parallel.ranks.remote_parameters import NormAlone
from memtune.program.edit import accumulate_gradients
from memtune.program.step import Kind, Phase
from memtune.search_spaces.sharding.parallel.pipeline import Pipeline
from memtune.technique import Target, Technique
from memtune.testing.seeded_defects import mutations
from memtune.testing.training import build


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread as on the ranks: several threads sum products in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- which models can be cut into stages ---------------------------------------------------------------------


def written(folder: Path, forward: str, more: str = "", given: str = "x") -> Path:
    file = folder / "model.py"
    file.write_text(f"""
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
    def forward(self, {given}):
        return self.b(self.a(x).relu()){more}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.h, self.last = nn.Linear(4, 4), nn.ModuleList(Block() for _ in range(4)), nn.Linear(4, 1)
    def forward(self, x):
        x = self.first(x)
{forward}
        return self.last(x)
def model():
    return Net()
def batch(size):
    return torch.ones(size, 4)
def loss(model, batch):
    return model(batch).mean()
""")  # noqa: E501
    return file


@pytest.mark.parametrize(
    ("forward", "more", "given", "reason"),
    [
        ("        for h in self.h: x = x + h(x)", "", "x", "aten.add.Tensor runs between h.0 and h.1"),
        (
            "        y = x\n        for h in self.h: x = h(x, y)",
            " + y",
            "x, y",
            "in h.1 reads what was computed before h.0",
        ),
        ("        for h in self.h: x = h(x)[0]", ", x + 1", "x", "h.0 returns 2 tensors; stages pass on one"),
        (
            "        for h in self.h: x = h(x)[0]",
            ", x.shape[0]",
            "x",
            "h.0 returns an object of int; stages pass on one",
        ),
        ("        for h in [*self.h, *self.h]: x = h(x)", "", "x", "do not run once each"),
    ],
)
def test_fits_refuses_blocks_without_a_chain(
    tmp_path: Path, forward: str, more: str, given: str, reason: str
) -> None:
    assert reason in refusal(KIND, written(tmp_path, forward, more, given))


def test_refusals_name_what_is_in_the_way() -> None:
    assert "2 blocks are fewer than 4 stages" in refusal(KIND, schedule="interleaved_1f1b")
    assert "sharding.states: paro does not work" in refusal(
        KIND, other_slots={"sharding": {"parallel": {"kind": KIND}, "states": {"kind": "paro", "group": 2}}}
    )
    assert "recompute: dtr is planned for a rank that has all blocks" in refusal(
        KIND, other_slots={"recompute": {"kind": "dtr"}}
    )
    assert "degree=4 is more than the 2 ranks" in refusal(KIND, degree=4)
    program, here = candidate(SEPARATE).program, hardware.detect("cpu")
    assert "only one rank" in str(Pipeline().fits(program, Target(here, 1)))
    assert "when the slot is searched" in str(Pipeline().fits(program, Target(here, 2)))


def test_apply_refuses_configs_without_a_plan_of_this_model() -> None:
    """Checked before any change, so no ranks are needed."""
    good = document(SEPARATE)
    for plan in ({}, {"sharding.parallel": {**good["plan"]["sharding.parallel"], "degree": 4}}):
        workload, model, optimizer = build(SEPARATE)
        with pytest.raises(ApplyError, match="plan"):
            apply(model, optimizer, {**good, "plan": plan}, loss=workload.loss, strict=False)


# -- what the pass says --------------------------------------------------------------------------------------


def test_stages_divide_the_model_and_send_bytes_by_formula() -> None:
    """Each stage sends a block's output or its gradient to each neighbour, once per micro-batch."""
    program = candidate(CHAIN, 4, accumulate=2).program
    assert (program.unrolled, program.sharers, program.samples) == (8, 4, 4 * 2 * SIZE)
    assert [each.count for each in program.rank_classes] == [
        1,
        2,
        1,
    ]  # the two between are alike, the fullest is first
    assert [each.ranks for each in program.rank_classes] == [(0,), (1, 2), (3,)]
    plain = rewriter(CHAIN, 4).recording.at(SIZE)
    steps = pipelined(accumulate_gradients(plain), PipelineSettings((0, 2, 4, 6), 4, "1f1b", 8))
    assert [sent_bytes(step) for step in steps] == [8 * PASSED, 16 * PASSED, 16 * PASSED, 8 * PASSED]
    names = [p.name for step in steps for p in step.parameters]
    assert sorted(names) == sorted(p.name for p in plain.parameters)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        whole = plain.ops.flops[plain.ops.phase == phase].sum()
        assert sum(s.ops.flops[s.ops.phase == phase].sum() for s in steps) == pytest.approx(
            8 * whole, rel=1e-3
        )  # masks are made on each


def test_idle_time_follows_the_formula() -> None:
    """With equal stages and links that cost nothing, m + p - 1 forwards and backwards pass in a step."""
    program = candidate(CHAIN, 4, accumulate=2).program
    free = replace(hardware.detect("cpu"), intra_link_bytes_per_s=1e18, intra_link_latency_s=0.0, hook_s=0.0)
    coarse = simulate(program, free)
    body = coarse.busy_s["compute"]
    assert coarse.step_s == pytest.approx(body * (1 + 3 / 8), rel=0.15)  # the optimizer does not wait
    events = simulate(program, free, level="events").step_s
    assert events == pytest.approx(coarse.step_s, rel=0.05)


# -- on gloo ranks -------------------------------------------------------------------------------------------


def all_of_it(path: Path, config: dict[str, Any], folder: str) -> tuple[Found, list[str], dict[str, Any]]:
    return (
        measured_and_trained(path, 2, config, True, 2),
        refused(path, config),
        portable(path, folder, config),
    )


def refused(path: Path, config: dict[str, Any]) -> list[str]:
    """Return the errors of user loops, and of micro-batches of several shapes."""
    workload, model, optimizer = build(path)
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
    said = []
    for attempt in (
        lambda: workload.loss(model, workload.make_batch(SIZE)),
        lambda: tuned.micro_batch(last=True).__enter__(),
        lambda: tuned.step([workload.make_batch(SIZE), workload.make_batch(SIZE + 1)]),
    ):
        with pytest.raises(ApplyError) as error:
            attempt()
        said.append(str(error.value))
    return said


def test_two_ranks_with_a_tied_head_train_as_one_and_save(tmp_path: Path) -> None:
    """With clipping; checkpoints and exports have plain names, the user's own loops are refused."""
    ranks = run_ranks(all_of_it, 2, SEPARATE, document(SEPARATE, accumulate=2), str(tmp_path))
    found: list[Found] = [each for each, _, _ in ranks]
    assert_as_predicted(found, candidate(SEPARATE, accumulate=2))
    assert_trained_as_one([run for _, run in found], trained(SEPARATE, 2, None, True, 2))
    assert [run["audit"]["sharding.parallel"]["blocks"] for _, run in found] == [1, 1]
    own_loop, micro_batch, shapes = ranks[0][1]
    assert "was called outside of Tuned.step" in own_loop
    assert "Only Tuned.step" in micro_batch
    assert "have different shapes" in shapes
    assert_portable([each for _, _, each in ranks], tmp_path)


def assert_portable(found: list[dict[str, Any]], folder: Path) -> None:
    _, model, optimizer = build(SEPARATE)
    for run in found:
        shapes = {name: value.shape for name, value in run["state"]["model"].items()}
        assert shapes == {name: value.shape for name, value in model.state_dict().items()}
        for again in run["again"]:
            torch.testing.assert_close(again["model"], run["state"]["model"], rtol=0, atol=0)
            torch.testing.assert_close(
                again["optimizer"]["state"], run["state"]["optimizer"]["state"], rtol=0, atol=0
            )
    optimizer.load_state_dict(found[0]["state"]["optimizer"])
    exported = load_file(folder / "weights.safetensors")
    torch.testing.assert_close(exported, dict(found[0]["state"]["model"]), rtol=0, atol=0)


def check(
    path: Path,
    ranks: int,
    clip: bool = True,
    accumulate: int = 2,
    other_slots: dict[str, Any] | None = None,
    **knobs: Any,
) -> list[Found]:
    """Check training against one rank, peaks within 2 %, and bytes by formula."""
    config = document(path, ranks, other_slots, accumulate=accumulate, **knobs)
    found: list[Found] = run_ranks(
        measured_and_trained, ranks, path, ranks, config, clip, accumulate, deadline_s=200
    )
    assert_as_predicted(found, candidate(path, ranks, other_slots, accumulate=accumulate, **knobs))
    wanted = trained(path, ranks, None, clip, accumulate)
    assert_trained_as_one([run for _, run in found], wanted, atol=2e-6)
    assert all(run["losses"] == found[0][1]["losses"] for _, run in found)
    return found


@pytest.mark.slow
def test_untied_chain_without_clipping_is_bitwise() -> None:
    """No weight is tied and there is one pipeline, so the order of every sum is the plain one."""
    found = check(CHAIN, 2, clip=False)
    wanted = trained(CHAIN, 2, None, False, 2)
    for _, run in found:
        assert run["losses"] == wanted["losses"]
        assert all(torch.equal(run["model"][name], weight) for name, weight in wanted["model"].items())


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{}, {"schedule": "interleaved_1f1b"}], ids=str)
def test_blocks_that_return_tuples_train_as_one(tmp_path: Path, knobs: dict[str, Any]) -> None:
    check(chain_returning("{y}, None", "{out}[0]", tmp_path), 2, **knobs)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "gpipe"])
def test_two_ranks_train_as_one_as_predicted(schedule: str, accumulate: int) -> None:
    check(CHAIN, 2, accumulate=accumulate, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"degree": 2},
        {"schedule": "interleaved_1f1b"},
        {"degree": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 4},
    ],
    ids=str,
)
def test_four_ranks_train_as_one_as_predicted(knobs: dict[str, Any], clip: bool) -> None:
    check(CHAIN, 4, clip=clip, **knobs)


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAIN, SEPARATE], ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "other_slots",
    [
        {"recompute": {"kind": "full"}},
        {"recompute": {"kind": "selective"}},
        {"offload": {"activations": MOVED}},
    ],
    ids=lambda each: str(next(iter(each.values())).get("kind", "copy_out")),
)
def test_training_with_activation_techniques(path: Path, other_slots: dict[str, Any]) -> None:
    check(path, 2, other_slots=other_slots)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize("moved", [False, True])
def test_optimizer_state_is_sharded_among_pipelines(schedule: str, accumulate: int, moved: bool) -> None:
    knobs = {"degree": 2, "schedule": schedule}
    other_slots: dict[str, Any] = {
        "sharding": {"parallel": {"kind": KIND, **knobs}, "states": {"kind": "zero1"}}
    }
    if moved:
        other_slots["offload"] = {"activations": MOVED}
    found = check(CHAIN, 4, clip=accumulate == 4, accumulate=accumulate, other_slots=other_slots, **knobs)
    whole = candidate(CHAIN, 4, accumulate=accumulate, **knobs).program.step
    state_bytes = sum(
        int(whole.storages.bytes[row])
        for row in np.flatnonzero(whole.storages.kind == Kind.OPTIMIZER)
        if whole.storages.producer[row] < 0
    )
    divided = candidate(CHAIN, 4, other_slots, accumulate=accumulate, **knobs).program.step
    held = np.flatnonzero((divided.storages.kind == Kind.OPTIMIZER) & (divided.storages.producer < 0))
    assert int(divided.storages.bytes[held].sum()) == pytest.approx(state_bytes / 2, rel=0.01)
    assert all(run["audit"]["sharding.states"]["ranks"] == 2 for _, run in found)


@pytest.mark.slow
def test_checkpoints_do_not_depend_on_sharding_among_pipelines(tmp_path: Path) -> None:
    other_slots = {"sharding": {"parallel": {"kind": KIND, "degree": 2}, "states": {"kind": "zero1"}}}
    assert_portable(
        run_ranks(portable, 4, SEPARATE, str(tmp_path), document(SEPARATE, 4, other_slots, degree=2)),
        tmp_path,
    )


@pytest.mark.parametrize("foreach", [False, True])
def test_unknown_norms_are_refused(foreach: bool) -> None:
    """Of another stage's gradient a rank has only the 2-norm."""
    mine, absent = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    mine.grad, absent.grad = torch.tensor([2.0, 3.0]), torch.tensor([6.0]).as_subclass(NormAlone)
    assert float(nn.utils.clip_grad_norm_([mine, absent], 7.0, foreach=foreach)) == 7.0
    for order in (1.0, float("inf")):
        with pytest.raises(ApplyError, match="norm of gradients is not known"):
            nn.utils.clip_grad_norm_([mine, absent], 7.0, norm_type=order, foreach=foreach)
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind([mine, absent], lr=0.1, foreach=foreach)
        optimizer.step()
        held = [value for state in optimizer.state.values() for value in state.values() if value is not None]
        assert all(type(value) is torch.Tensor for value in held)


def test_fits_refuses_activation_plans_for_all_blocks() -> None:
    assert "is planned for a rank" in refusal(
        KIND, CHAIN, {"offload": {"activations": {"kind": "tsplit"}}}, degree=2
    )


def test_sharding_among_pipelines_needs_several() -> None:
    for states in ("zero1", "ddp", "fsdp"):
        both = {"sharding": {"parallel": {"kind": KIND}, "states": {"kind": states}}}
        assert f"{states}: with one pipeline there is one copy" in refusal(KIND, other_slots=both)


def under(
    defect: str, path: Path, ranks: int, config: dict[str, Any], clip: bool, accumulate: int
) -> tuple[tuple[int, int], dict[str, Any]]:
    seeded = {each.name: each for each in mutations(Pipeline)}
    with seeded[defect].seed(Pipeline) if defect else nullcontext():
        return measured_and_trained(path, ranks, config, clip, accumulate)


@pytest.mark.slow
class TestPipeline(ShardedSuite):
    """The suite's own loops cannot pipeline: training and peaks are those of `Tuned.step`."""

    technique = Pipeline
    models: ClassVar[dict[str, Path]] = {"separate": SEPARATE}
    variants = (Pipeline(),)
    accumulate, briefly = 2, False

    def _found(self, model: str, variant: Technique) -> list[Found]:
        path = self.models[model]
        config = self._config(model, variant)
        config["settings"]["execution"] = {"micro_batch": SIZE, "accumulate": self.accumulate}
        found: list[Found] = run_ranks(
            under, 2, self.defect, path, 2, config, True, self.accumulate, deadline_s=200
        )
        return found

    def check_training(self, model: str, variant: Technique) -> None:
        found = self._found(model, variant)
        assert_trained_as_one(
            [run for _, run in found], trained(self.models[model], 2, None, True, self.accumulate)
        )

    def check_drift(self, model: str, variant: Technique) -> None:
        assert_as_predicted(self._found(model, variant), self._candidate(model, variant))

    def test_audit_finds_technique_not_in_effect(self) -> None:
        (_, first), (_, last) = self._found("separate", Pipeline())
        assert first["audit"]["sharding.parallel"] == {
            "degree": 2,
            "stages": 2,
            "blocks": 1,
            "own_bytes": 60928,
        }
        assert last["audit"]["sharding.parallel"] == {
            "degree": 2,
            "stages": 2,
            "blocks": 1,
            "own_bytes": 59136,
        }
