from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, strategies as st
from support.search.prepared_search import rewriter

from memtune.autotune.space.baseline_settings import baselines
from memtune.autotune.space.candidates import Candidate, Choice
from memtune.autotune.space.scoring import Scorer
from memtune.autotune.space.search_space import batch_sizes, build_space, executions, variants
from memtune.errors import ConfigError, UsageError
from memtune.search_spaces import find, null
from memtune.technique import Reason


@given(st.integers(1, 512), st.integers(1, 8))
def test_executions_make_global_batch(each: int, ranks: int):
    found = executions(each * ranks, ranks)
    assert all((one.micro_batch or 0) * one.accumulate * ranks == each * ranks for one in found)
    assert found[0].micro_batch == each
    assert found[-1].micro_batch == 1
    assert len(set(found)) == len(found)


def test_space_suggests_nearest_divisible_batch():
    with pytest.raises(UsageError, match="global_batch=10") as caught:
        executions(10, 4)
    assert "8 or 12" in caught.value.fix


def test_batch_sizes_are_dense_enough_to_bisect():
    sizes = [one.micro_batch or 0 for one in batch_sizes(100)]
    assert sizes[:3] == [96, 64, 48]
    assert sizes[-1] == 1
    assert all(larger <= 2 * smaller for larger, smaller in itertools.pairwise(sizes))


def test_space_contains_fitting_kinds_and_reasons_for_others():
    space = build_space(rewriter(), 8)
    assert {each.kind for each in space.slots["recompute"]} >= {"none", "full", "every_nth", "selective"}
    assert "recompute: every_nth" not in space.unfit
    for slot, techniques in space.slots.items():
        assert techniques[0] == null(slot)
    assert space.slots["sharding.states"] == (null("sharding.states"),)
    assert {"sharding.states: ddp", "sharding.states: fsdp"} <= space.unfit.keys()


def test_space_requires_gradient_averaging_on_several_ranks():
    space = build_space(rewriter(ranks=2), 8)
    assert {each.kind for each in space.slots["sharding.states"]} == {
        "ddp",
        "fsdp",
        "zero1",
        "zero2",
        "zero3",
    }
    assert "train different models" in str(space.unfit["sharding.states: none"])


def test_unsearched_axes_have_default():
    space = build_space(rewriter(ranks=2), 8, axes=("recompute",))
    assert len(space.executions) == 1
    assert [each.kind for each in space.slots["sharding.states"]] == ["ddp"]
    assert [each.kind for each in space.slots["offload.states"]] == ["none"]
    assert len(space.slots["recompute"]) > 1


def test_axis_selects_all_its_slots():
    space = build_space(rewriter(), 8, axes=("offload",))
    assert len(space.slots["offload.states"]) > 1
    assert len(space.slots["offload.activations"]) > 1
    assert len(space.slots["recompute"]) == 1


def test_freeze_keeps_knobs_of_kind():
    space = build_space(rewriter(), 8, freeze={"recompute": "every_nth", "micro_batch": "4"})
    assert {each.kind for each in space.slots["recompute"]} == {"every_nth"}
    assert len(space.slots["recompute"]) > 1
    assert [(one.micro_batch, one.accumulate) for one in space.executions] == [(4, 2)]


@pytest.mark.parametrize(
    ("axes", "freeze", "error", "text"),
    [
        (("recompte",), {}, UsageError, "Did you mean 'recompute'"),
        ((), {"recompte": "full"}, UsageError, "Did you mean 'recompute'"),
        ((), {"recompute": "ful"}, ConfigError, "Did you mean 'full'"),
        ((), {"offload": "none"}, UsageError, "more than one choice"),
        ((), {"micro_batch": "3"}, UsageError, "does not divide"),
        ((), {"sharding.states": "fsdp"}, UsageError, "No technique for sharding.states"),
    ],
)
def test_space_reports_invalid_requests(
    axes: tuple[str, ...], freeze: dict[str, str], error: type[Exception], text: str
):
    with pytest.raises(error, match=text):
        build_space(rewriter(), 8, axes=axes, freeze=freeze)


def test_refused_freeze_offers_the_way_out_of_its_reason():
    with pytest.raises(UsageError) as caught:
        build_space(rewriter(), 8, freeze={"offload.states": "moesys"})
    way, _, drop = caught.value.fix.partition("; or ")  # this model has no experts, which moesys moves
    assert "zero_infinity" in way
    assert drop == "drop --freeze offload.states"


def test_lossy_batch_split_freezes_execution_with_note():
    space = build_space(rewriter(), 8, batch_frozen=Reason("BatchNorm"))
    assert [one.accumulate for one in space.executions] == [1]
    assert "BatchNorm" in space.notes[0]


def test_sample_contains_distinct_choices_and_repeats_by_seed():
    space = build_space(rewriter(), 8, axes=("execution", "recompute", "offload", "allocator"))
    drawn = space.sample(space.size // 4, seed=3)
    assert drawn == space.sample(space.size // 4, seed=3) != space.sample(space.size // 4, seed=4)
    every = {(each.execution, each.techniques) for each in space}
    assert len(every) == space.size
    found = {(each.execution, each.techniques) for each in drawn}
    assert found < every
    assert len(found) == len(drawn)
    order = {choice: i for i, choice in enumerate(space)}
    assert [order[each] for each in drawn] == sorted(order[each] for each in drawn)


def test_sample_contains_all_combinations_of_kinds():
    space = build_space(rewriter(), 8, axes=("execution", "recompute", "offload", "allocator"))
    combined = [{each.kind: each for each in reversed(some)}.values() for some in space.slots.values()]
    drawn = set(space.sample(math.prod(map(len, combined)) * len(space.executions), seed=0))
    assert len(drawn) < space.size
    for execution in space.executions:
        for kinds in itertools.product(*combined):
            assert Choice.of(execution, {each.slot: each for each in kinds}) in drawn


def test_small_sample_contains_every_pair_of_kinds():
    space = build_space(rewriter(), 8, axes=("execution", "recompute", "offload", "allocator"))
    drawn = space.sample(1, seed=0)
    assert len(drawn) < space.size / 3
    held = [{(each.slot, each.kind) for each in choice.techniques} for choice in drawn]
    for one, other in itertools.combinations(space.slots, 2):
        for first, second in itertools.product(space.slots[one], space.slots[other]):
            wanted = {(each.slot, each.kind) for each in (first, second) if each != null(each.slot)}
            assert any(wanted <= each for each in held), wanted


def test_neighbours_differ_in_one_slot():
    space = build_space(rewriter(), 8, axes=("execution", "recompute", "offload"))
    middle = list(space)[space.size // 2]
    found = space.around([middle])
    assert (
        len(found)
        == len(set(found))
        == 1 + len(space.executions) - 1 + sum(len(each) - 1 for each in space.slots.values())
    )
    for each in found:
        apart = [slot for slot in space.slots if each.technique(slot) != middle.technique(slot)]
        assert len(apart) + (each.execution != middle.execution) <= 1


def test_variants_begin_with_defaults():
    technique = find("allocator", "native")
    found = variants(technique, rewriter().target)
    assert found[0] == technique(kind="native")
    assert len(found) == len(set(found)) == 3 * 3 * 2


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (1, ["plain", "full recompute"]),
        (2, ["plain", "full recompute", "plain fsdp", "full recompute with fsdp"]),
    ],
)
def test_baselines_are_plain_full_recompute_and_fsdp(ranks: int, names: list[str]):
    scorer = Scorer(rewriter(ranks=ranks))
    found, refused = baselines(scorer, 8)
    assert [each.name for each in found] == names
    assert not refused
    assert all(each.scored.choice.execution.micro_batch == 8 // ranks for each in found)
    kinds = [each.scored.choice.technique("sharding.states").kind for each in found]
    assert kinds == (["none", "none"] if ranks == 1 else ["ddp", "ddp", "fsdp", "fsdp"])
    assert all(isinstance(scorer.rewriter.candidate(each.scored.choice), Candidate) for each in found)
