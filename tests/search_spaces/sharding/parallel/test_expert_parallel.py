"""Expert parallelism: modules that ranks may divide, a rank's bytes, and training on gloo ranks as on one.

Distinguishing test: with even routing a rank receives (degree - 1)/degree of its tokens' rows, tokens ×
chosen × features, twice in forward and twice in backward.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from support.gloo import run_ranks
from support.models.parallel.stacked_experts import DIM, EXPERTS, SEQ, TOP, VOCAB, Experts
from support.ranks.model_parallel_runs import (
    MODELS,
    SIZE,
    Measured,
    assert_trained_as_one,
    candidate,
    config,
    measured,
    refusal,
    rewriter,
    trained,
)
from support.suites.sharded_suite import ShardedSuite
from torch import Tensor, nn

from memtune import hardware
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.autotune.space.candidates import Choice
from memtune.config.tuned_config import Settings, TunedConfig, dump_yaml, load_config
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.parallel.model.expert_dispatch import Owners
from memtune.parallel.model.expert_lists import ExpertList
from memtune.parallel.model.expert_parallel import divisible_experts
from memtune.program.step import Step
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.sharding.parallel.expert_parallel import ExpertParallel, ExpertPlan
from memtune.technique import Target
from memtune.testing.training import build

KIND = "expert_parallel"
STACKED, HASHED, SORTED, MIXTRAL = (
    MODELS / f"{name}.py" for name in ("stacked_experts", "hashed_experts", "sorted_experts", "mixtral")
)
LAYERS, TOKENS = 2, SIZE * SEQ
ROUTED = MODELS / "routed.py"
LEARNED, NOISY, LISTED = (MODELS / f"listed_experts.py:{name}" for name in ("learned", "noisy", "hashed"))
REPLICATED = 4 * (2 * VOCAB * DIM + VOCAB + LAYERS * (2 * DIM + EXPERTS * DIM))
"""Bytes of embedding, head, norms and routers."""

NORMS = 2 * 4 * (3 + LAYERS * (3 + 6 * EXPERTS))
"""Bytes of the norms of all gradients of `LISTED`, and of their presence."""


def to_owner(degree: int, owner: int) -> int:
    """Return the rows that the router of `HASHED` sends to an owner, of one rank and layer."""
    chosen = [(place % 2, EXPERTS - 1 if place % 4 == 0 else 1 - place % 2) for place in range(TOKENS)]
    return sum(expert * degree // EXPERTS == owner for pair in chosen for expert in pair)


def moved(arriving: int, returning: int, counts: int, *, recomputed: bool = False) -> int:
    """Return the bytes that a rank receives in one exchange per layer and micro-batch, by the formula: rows
    of features and a weight to the owners, rows of features back; before them, numbers of rows.

    Args:
        arriving: Rows that other ranks send here in forward.
        returning: Rows that have gone to other ranks.
        counts: Numbers that other ranks send here.
        recomputed: Forward runs twice.
    """
    times = 2 if recomputed else 1
    forward = 4 * (arriving * (DIM + 1) + returning * DIM) + 8 * counts
    backward = 4 * (arriving * DIM + returning * (DIM + 1))
    return LAYERS * (times * forward + backward)


def exchanged(degree: int, rank: int, *, recomputed: bool = False) -> int:
    """Return `moved` of `HASHED`, whose rows go to their owners at once."""
    arriving = (degree - 1) * to_owner(degree, rank)
    returning = TOKENS * TOP - to_owner(degree, rank)
    return moved(arriving, returning, EXPERTS // degree * (degree - 1), recomputed=recomputed)


# -- which experts may be divided ----------------------------------------------------------------------------


def test_refusals_name_what_is_in_the_way() -> None:
    both = {"parallel": {"kind": KIND}, "states": {"kind": "fsdp"}}
    assert "fsdp has no copies of a part" in refusal(KIND, STACKED, other_slots={"sharding": both})
    assert "degree=4 is more than the 2 ranks" in refusal(KIND, STACKED, degree=4)
    assert "inner_degree=2 is no proper divisor of the 2 ranks" in refusal(KIND, STACKED, inner_degree=2)
    zero = {"parallel": {"kind": KIND, "degree": 2}, "states": {"kind": "zero1"}}
    asked = {"execution": {"micro_batch": SIZE}, "sharding": zero}
    found = rewriter(LISTED, 4).candidate(Choice.from_document(asked))
    assert "each expert of a list is whole on its owner" in str(found)
    assert "the model has none" in refusal(KIND)
    program, here = candidate(KIND, STACKED).program, hardware.detect("cpu")
    assert "each degree must be recorded" in str(ExpertParallel().fits(program, Target(here, 2)))
    assert "only one rank" in str(ExpertParallel().fits(program, Target(here, 1)))
    cut = rewriter(STACKED).target.sharded
    assert cut is not None
    assert "layers.0.experts has 4 experts, which 3 ranks do not divide" in str(cut(3, "experts", 3))


class DenseExperts(Experts):
    """Takes the weight of every expert for each token."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return x * weights.sum()


def with_shared_weight(model: nn.Module) -> None:
    model.layers[1].experts.down_proj = model.layers[0].experts.down_proj  # type: ignore[union-attr,index]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda model: None, ""),
        (with_shared_weight, "shares its weight: layers.0.experts.down_proj and layers.1.experts.down_proj"),
        (
            lambda model: model.layers[0].experts.register_forward_hook(lambda *_: None),
            "layers.0.experts has hooks",
        ),
        (
            lambda model: model.layers[0].experts.register_parameter("scale", nn.Parameter(torch.ones(2))),
            "layers.0.experts has weights that are not all of (experts, …)",
        ),
        (
            lambda model: model.layers[0].experts.register_buffer("counts", torch.zeros(EXPERTS)),
            "layers.0.experts has buffers",
        ),
        (
            lambda model: model.layers[0].experts.add_module("up", nn.Linear(2, 2)),
            "layers.0.experts has weights in modules of its own",
        ),
        (
            lambda model: setattr(model.layers[0], "experts", DenseExperts()),
            "layers.0.experts takes neither tokens, the experts of each and their weights",
        ),
    ],
)
def test_modules_that_are_not_stacked_experts_are_replicated(change: Any, line: str) -> None:
    _, model, _ = build(STACKED)
    change(model)
    found, refused = divisible_experts(model, 2)
    assert any(line in each for each in refused) if line else not refused
    assert "layers.1.experts" in found or "shares" in line


def first_list(model: nn.Module) -> Any:
    return model.layers[0].moe.experts  # type: ignore[union-attr,index]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda model: None, ""),
        (lambda model: first_list(model).append(nn.Linear(DIM, DIM)), "has modules of different weights"),
        (lambda model: first_list(model)[0].register_buffer("seen", torch.zeros(1)), "has buffers"),
        (lambda model: first_list(model)[1].register_forward_hook(lambda *_: None), "has hooks"),
        (lambda model: setattr(first_list(model)[1], "up", first_list(model)[0].up), "shares its weight"),
        (
            lambda model: setattr(
                model.layers[0].moe, "shared_experts", nn.ModuleList([nn.Linear(2, 2)] * 2)
            ),
            "is not the only list",
        ),
    ],
)
def test_lists_whose_experts_are_not_alike_are_replicated(change: Any, line: str) -> None:
    _, model, _ = build(LEARNED)
    change(model)
    found, refused = divisible_experts(model, 2)
    assert any(f"layers.0.moe.experts {line}" in each for each in refused) if line else not refused
    assert "layers.1.moe.experts" in found


def collects(holder: Any, x: Tensor) -> Tensor:
    holder.calls.append(x)
    return holder.experts[0](x)


def scales(holder: Any, x: Tensor) -> Tensor:
    return holder.experts[0](x.mul_(2))


def chains(holder: Any, x: Tensor) -> Tensor:
    return holder.experts[1](holder.experts[0](x).mul_(2))


def weighs(holder: Any, x: Tensor) -> Tensor:
    return holder.experts[0](x, x)


class Holder(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.experts, self.calls = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), list[Any]()
        self._run = run

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self, x)


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (collects, "counts or collects its calls"),
        (scales, "writes to its inputs"),
        (chains, "is called with what another expert returned"),
        (weighs, "is called with more than rows"),
    ],
)
def test_module_that_cannot_run_twice_is_refused(run: Any, line: str) -> None:
    with fake_ranks(2):
        holder, group = Holder(run), "0"
        ExpertList("experts", holder, list(holder.experts), Owners(((group, 2),)), 0, None)
        with pytest.raises(ApplyError, match=line):
            holder(torch.randn(3, 4))
        with pytest.raises(ApplyError, match="outside of the module"):
            holder.experts[0](torch.randn(3, 4))


def test_apply_refuses_a_plan_of_another_degree() -> None:
    context: Any = SimpleNamespace(placement=SimpleNamespace(world_size=2))
    plan = ExpertPlan(degree=4, layers=("x",), parameters=("x.w",), divided_bytes=0, busiest=1.0)
    with pytest.raises(ApplyError, match="groups of 4, the config has 2"):
        ExpertParallel().apply(context, plan)


def test_expert_parallel_config_survives_yaml() -> None:
    technique = ExpertParallel(degree=4, inner_degree=2)
    made = TunedConfig(settings=Settings.of(Execution(), {"sharding.parallel": technique}))
    assert load_config(dump_yaml(made)) == made


# -- the rank's step -----------------------------------------------------------------------------------------


def rows_sent(step: Step) -> int:
    """Return the bytes of all exchanges of rows."""
    ops = [op for op in range(step.ops.n) if "all_to_all_rows" in step.names[step.ops.name[op]]]
    return int(step.ops.traffic_bytes[ops].sum())


def test_step_has_a_share_of_the_experts_and_sends_rows_by_formula() -> None:
    """A router whose choices are not known sends even shares: tokens × chosen rows, there and back, twice."""
    made = candidate(KIND, MIXTRAL)
    step, rows = made.program.step, TOKENS * TOP
    shapes = {p.name: p.shape for p in step.parameters}
    assert shapes["model.layers.1.mlp.experts.down_proj"] == (EXPERTS // 2, DIM, 2 * DIM)
    assert rows_sent(step) == LAYERS * rows * 4 * (4 * DIM + 2)
    assert made.plans["sharding.parallel"].document()["busiest"] == 1
    assert (made.program.accumulate, made.program.samples) == (1, 2 * SIZE)


def test_recorded_routing_gives_the_load_of_the_busiest_rank() -> None:
    made = candidate(KIND, HASHED)
    wanted = 2 * to_owner(2, 0) / (TOKENS * TOP)
    plan = made.plans["sharding.parallel"]
    assert plan.document()["busiest"] == pytest.approx(wanted) == 1.75
    assert "the busiest rank gets 1.75 times" in ExpertParallel().explain(plan)[1]


def test_rows_by_node_are_offered_where_a_group_spans_nodes() -> None:
    for ranks, ways in ((8, (None,)), (16, (None, 8))):
        target = Target(hardware.find("h100-80g"), ranks)
        assert ExpertParallel().choices_on(target)["inner_degree"] == ways


# -- on gloo ranks -------------------------------------------------------------------------------------------


def both(document: dict[str, Any], path: Path) -> tuple[Measured, dict[str, Any]]:
    return measured({"": document}, path=path), trained(2, document, True, path=path)


def test_two_ranks_train_as_one_with_clipping_as_predicted() -> None:
    made = candidate(KIND, HASHED)
    found = run_ranks(both, 2, config(KIND, path=HASHED), HASHED)
    assert_trained_as_one([run for _, run in found], trained(2, None, True, path=HASHED))
    assert found[0][1]["audit"]["sharding.parallel"] == {"degree": 2, "layers": 2, "expert_bytes": 24576}
    # All-reduces of two ranks receive as many bytes as they reduce.
    assert [rank[""][1:] for rank, _ in found] == [(exchanged(2, r) + REPLICATED, 0) for r in range(2)]
    if cpu_allocator.available() is None:
        predicted = simulate(made.program, hardware.detect("cpu")).peak_allocated_bytes
        assert max(rank[""][0] for rank, _ in found) == pytest.approx(predicted, rel=0.02)


EXPERT_BYTES = 4 * (4 * DIM * DIM + 2 * DIM * DIM)
REPLICATED_EXPERTS: dict[str, Any] = {"replicas": 1, "worth_rows": 0, "replica_steps": 1}


def test_hot_experts_have_replicas_and_train_as_one_as_predicted() -> None:
    """An expert of the busiest rank is copied to the other: 1.25 instead of 1.75 times the mean."""
    made = candidate(KIND, HASHED, **REPLICATED_EXPERTS)
    assert made.plans["sharding.parallel"].document()["busiest"] == 1.25
    found = run_ranks(both, 2, config(KIND, path=HASHED, **REPLICATED_EXPERTS), HASHED)
    assert_trained_as_one([run for _, run in found], trained(2, None, True, path=HASHED))
    assert [run["audit"]["sharding.parallel"]["replicas"] for _, run in found] == [LAYERS, LAYERS]
    # Weights of an expert go to its host, gradients to the owner; numbers of rows, and the sum of all counts.
    more = LAYERS * (EXPERT_BYTES + 8 + 8 * EXPERTS)
    assert [rank[""][1:] for rank, _ in found] == [(exchanged(2, r) + REPLICATED + more, 0) for r in range(2)]
    if cpu_allocator.available() is None:
        predicted = simulate(made.program, hardware.detect("cpu")).peak_allocated_bytes
        assert max(rank[""][0] for rank, _ in found) == pytest.approx(predicted, rel=0.02)


def test_list_of_experts_trains_as_one_with_clipping_as_predicted() -> None:
    """Also buffers of the router, which runs twice, and an expert to which no row is sent."""
    made = candidate(KIND, LISTED)
    found = run_ranks(both, 2, config(KIND, path=LISTED), LISTED)
    assert_trained_as_one([run for _, run in found], trained(2, None, True, path=LISTED))
    for rank, (each, _) in enumerate(found):
        rows = to_owner(2, rank) + TOKENS * TOP - to_owner(2, rank)  # arriving and returning; without weights
        exchanged = LAYERS * (2 * 4 * rows * DIM + 8 * EXPERTS // 2)
        assert each[""][1:] == (exchanged + REPLICATED + NORMS, 0)
    if cpu_allocator.available() is None:
        predicted = simulate(made.program, hardware.detect("cpu")).peak_allocated_bytes
        assert max(rank[""][0] for rank, _ in found) == pytest.approx(predicted, rel=0.02)


def with_counts(document: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Train two steps; return the losses and the tokens that the first router has counted in the first."""
    workload, model, optimizer = build(NOISY)
    tuned = apply(model, optimizer, document, loss=workload.loss, strict=False)
    torch.manual_seed(torch.distributed.get_rank())
    losses = [float(tuned.step([workload.make_batch(SIZE)]))]
    counted = model.layers[0].moe.tokens.tolist()  # type: ignore[union-attr,index]
    return [*losses, float(tuned.step([workload.make_batch(SIZE)]))], counted


def test_router_of_a_list_draws_and_counts_as_if_it_ran_once() -> None:
    replicas = {"settings": {"sharding": {"states": {"kind": "ddp"}}}}
    divided, plain = (run_ranks(with_counts, 2, each) for each in (config(KIND, path=NOISY), replicas))
    for (losses, tokens), (wanted, counted) in zip(divided, plain, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-6)
        assert tokens == counted
        assert sum(tokens) == TOKENS * TOP


def test_sorted_rows_train_as_one() -> None:
    """Also on the owner of an expert without rows."""
    found = run_ranks(trained, 2, 2, config(KIND, path=SORTED), True, 1, False, SORTED)
    assert_trained_as_one(found, trained(2, None, True, path=SORTED))


OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "full": {"recompute": {"kind": "full"}},
    "selective": {"recompute": {"kind": "selective"}},
    "copy_out": {"offload": {"activations": {"kind": "copy_out", "min_bytes": 0}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_peaks_and_bytes_with_activation_techniques(ranks: int) -> None:
    asked = {name: config(KIND, ranks, more, HASHED) for name, more in OTHERS.items()}
    found = run_ranks(measured, ranks, asked, 8, HASHED)
    for name, more in OTHERS.items():
        for rank, each in enumerate(found):
            rows = exchanged(ranks, rank, recomputed="recompute" in more)
            assert each[name][1:] == (rows + 2 * REPLICATED * (ranks - 1) // ranks, 0), (name, rank)
        if cpu_allocator.available() is None:
            made = candidate(KIND, HASHED, ranks, more).program
            predicted = simulate(made, hardware.detect("cpu")).peak_allocated_bytes
            assert max(each[name][0] for each in found) == pytest.approx(predicted, rel=0.02), name


def saved(document: dict[str, Any], folder: str, path: Path) -> dict[str, Any]:
    """Train a step, save, load into a second model that goes on, and return its state."""
    workload, model, optimizer = build(path)
    tuned = apply(model, optimizer, document, loss=workload.loss, strict=False)
    tuned.step([workload.make_batch(SIZE)])
    tuned.save(folder)
    workload, model, optimizer = build(path)
    again = apply(model, optimizer, document, loss=workload.loss, strict=False)
    again.load(folder)
    return {"before": tuned.state_dict(), "after": again.state_dict()}


@pytest.mark.slow
@pytest.mark.parametrize("path", [STACKED, LEARNED], ids=lambda path: path.stem)
def test_checkpoint_of_divided_experts_loads_on_these_ranks_and_on_one(path: Path, tmp_path: Path) -> None:
    found = run_ranks(saved, 2, config(KIND, path=path), str(tmp_path), path)
    workload, model, optimizer = build(path)
    tuned = apply(model, optimizer, {"settings": {}}, loss=workload.loss, strict=False)
    tuned.load(tmp_path)
    wanted = found[0]["before"]
    for state in (tuned.state_dict(), *(rank["after"] for rank in found)):
        torch.testing.assert_close(state["model"], wanted["model"], rtol=0, atol=0)
        moments = state["optimizer"]["state"], wanted["optimizer"]["state"]
        torch.testing.assert_close(*moments, rtol=0, atol=0)


@pytest.mark.slow
def test_rows_by_node_cross_the_network_between_ranks_of_one_place() -> None:
    asked = {"": config(KIND, 4, path=HASHED, inner_degree=2)}
    found = run_ranks(measured, 4, asked, 2, HASHED)
    for rank, each in enumerate(found):
        node, place = divmod(rank, 2)
        owners = [[to_owner(4, 2 * n + p) for p in range(2)] for n in range(2)]
        inside = moved(sum(own[place] for own in owners), sum(own[1 - place] for own in owners), 2)
        # Both ranks of a node have rows for an owner in the other one, and the ranks of its place send them.
        between = moved(2 * owners[node][place], 2 * owners[1 - node][place], 2)
        assert each[""][1:] == (inside, between + 2 * REPLICATED * 3 // 4), rank


@pytest.mark.slow
@pytest.mark.parametrize("states", ["ddp", "zero1", "zero3", "fsdp"])
def test_states_sharded_between_copies_train_as_one(states: str) -> None:
    slots = {"sharding": {"parallel": {"kind": KIND, "degree": 2}, "states": {"kind": states}}}
    found = run_ranks(trained, 4, 4, config(KIND, 4, slots, STACKED), True, 1, False, STACKED)
    assert_trained_as_one(found, trained(4, None, True, path=STACKED), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{}, {"degree": 2}, {"inner_degree": 2}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize(
    "path", [STACKED, HASHED, SORTED, MIXTRAL, LEARNED, ROUTED], ids=lambda path: path.stem
)
def test_four_ranks_train_as_one(path: Path, knobs: dict[str, Any]) -> None:
    """Also a rank of `HASHED` to which no token is sent: its experts have gradients of zero."""
    accumulate = knobs.get("accumulate", 1)
    document = config(KIND, 4, path=path, **knobs)
    found = run_ranks(trained, 4, 4, document, True, accumulate, False, path)
    assert_trained_as_one(found, trained(4, None, True, accumulate, path=path), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [{"replicas": 1}, {"replicas": 2, "inner_degree": 2}, {"replicas": 1, "accumulate": 2}], ids=str
)
@pytest.mark.parametrize("path", [STACKED, HASHED, SORTED, MIXTRAL], ids=lambda path: path.stem)
def test_replicas_on_four_ranks_train_as_one(path: Path, knobs: dict[str, Any]) -> None:
    """Also blocks that run again in backward, between whose runs the replicas do not change."""
    accumulate = knobs.get("accumulate", 1)
    slots = {"recompute": {"kind": "full"}}
    document = config(KIND, 4, slots, path, **REPLICATED_EXPERTS | knobs)
    found = run_ranks(trained, 4, 4, document, True, accumulate, False, path)
    assert_trained_as_one(found, trained(4, None, True, accumulate, path=path), atol=1e-5)
    if path == HASHED:
        assert found[0]["audit"]["sharding.parallel"]["replicas"] > 0


def test_experts_of_a_list_have_no_replicas() -> None:
    assert "no replicas" in refusal(KIND, LISTED, replicas=1)


class TestExpertParallel(ShardedSuite):
    technique = ExpertParallel
    models: ClassVar[dict[str, Path]] = {"hashed": HASHED, "listed": LISTED}
    accumulate, peak_rel, briefly, busiest_only = 2, 0.02, False, True
