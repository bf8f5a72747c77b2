"""Rules and pairs: they match `fits` in both directions, and nothing else compares kinds."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from support.zoo_paths import ZOO

from memtune.effects import NO_EFFECTS
from memtune.hardware.spec import find as find_hardware
from memtune.program.step import Program, RankClass
from memtune.search_spaces import all_techniques, find, is_null
from memtune.search_spaces._support import PAIRS, RULES, Rule, catalogue, conflict, excludes, matrix, refusal
from memtune.ssd import offload_dir
from memtune.technique import Facts, Reason, Target, Technique
from memtune.testing.drift_check import recording_of

ROOT = Path(__file__).parents[2]
TECHNIQUES = catalogue()
MATRIX = matrix(TECHNIQUES)
REFUSED = [
    pair
    for pair, reason in MATRIX.items()
    if reason is not None and TECHNIQUES.index(pair[0]) < TECHNIQUES.index(pair[1])
]


def made(slot: str, kind: str, **knobs: object) -> Technique:
    return find(slot, kind).model_validate({"kind": kind, **knobs})


def target_of(*techniques: Technique, ranks: int = 1) -> Target:
    return Target(find_hardware("h100-80g"), ranks, chosen={each.slot: each for each in techniques})


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: f"{pair[0].kind}+{pair[1].kind}")
def test_fits_refuses_what_the_matrix_refuses(
    pair: tuple[Technique, Technique], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    ranks = 4 if any(each.slot.startswith("sharding") for each in pair) else 1
    program = Program((RankClass(ranks, recording_of(ZOO["gpt"]).at(2)),), 2)
    target = target_of(*pair, ranks=ranks)
    assert any(each.fits(program, target) is not None for each in pair)


def test_matrix_is_symmetric() -> None:
    assert MATRIX
    assert all(MATRIX[other, one] is None for (one, other), reason in MATRIX.items() if reason is None)


def test_matrix_has_the_known_combinations() -> None:
    by_kind = {
        (f"{one.slot}: {one.kind}", f"{other.slot}: {other.kind}"): reason
        for (one, other), reason in MATRIX.items()
    }
    assert by_kind["recompute: full", "sharding.states: fsdp"] is None
    assert by_kind["recompute: selective", "sharding.parallel: pipeline"] is None
    assert by_kind["sharding.states: fsdp", "offload.states: stronghold"] is None
    assert by_kind["recompute: attention_output", "sharding.parallel: pipeline"] is None
    assert "has all blocks" in str(by_kind["recompute: planned", "sharding.parallel: pipeline"])
    assert "gathered from all" in str(by_kind["sharding.states: zero1", "offload.states: l2l"])


def test_null_techniques_have_no_effects() -> None:
    nulls = [
        each
        for each in (cls(kind=cls.model_fields["kind"].default) for cls in all_techniques())
        if is_null(each)
    ]
    assert {each.slot for each in nulls} >= {"recompute", "sharding.states", "offload.states"}
    assert all(each.effects == NO_EFFECTS for each in nulls)


def test_rules_that_need_something_refuse_the_null_technique() -> None:
    communication = made("sharding.communication", "zeropp")
    assert isinstance(conflict(communication, target_of(communication, ranks=4), "sharding.states"), Reason)
    assert (
        conflict(
            communication,
            target_of(communication, made("sharding.states", "fsdp"), ranks=4),
            "sharding.states",
        )
        is None
    )


def test_effects_follow_the_knobs() -> None:
    schedule = made("recompute", "planned", by_schedule=True)
    assert "without split: tiled" in str(excludes(schedule, made("split", "tiled"), 1))
    assert excludes(made("recompute", "planned"), made("split", "tiled"), 1) is None
    together, replicas = (
        made("offload.states", "l2l", order="layer_major"),
        made("sharding.states", "ddp"),
    )
    assert "average their gradients themselves" in str(excludes(together, replicas, 2))
    assert excludes(made("offload.states", "l2l"), replicas, 2) is None


@pytest.mark.parametrize(
    ("slot", "kind", "knob", "default", "refusing", "other"),
    [
        ("offload.states", "angel_ptm", "lock_free", False, True, ("sharding.states", "ddp")),
        ("offload.states", "zero_offload", "delayed", False, True, ("sharding.states", "zero1")),
        ("recompute", "dtr", "online", False, None, ("execution.order", "roam")),
    ],
)
def test_rules_hold_for_their_knobs_alone(
    slot: str, kind: str, knob: str, default: object, refusing: object, other: tuple[str, str]
) -> None:
    one, with_knob = (made(slot, kind, **{knob: value}) for value in (default, refusing))
    assert excludes(one, made(*other), 2) is None
    assert excludes(with_knob, made(*other), 2) is not None
    assert refusal(Facts({each.slot: each for each in (with_knob, made(*other))}, 2, False, "inductor", 4))


def test_pairs_hold_for_their_knobs_alone() -> None:
    planned, moved = made("recompute", "planned"), made("offload.activations", "copy_out")
    assert excludes(planned, moved, 1) is not None
    assert excludes(made("recompute", "planned", offload=False), moved, 1) is None
    solved = made("offload.states", "zero_offload", ratio=None)
    assert excludes(solved, planned, 1) is not None
    assert excludes(made("offload.states", "zero_offload"), planned, 1) is None


def holds(rule: Rule, one: Technique, other: Technique) -> bool:
    """Return True if `rule` refuses these two alone, or with activations offloaded as well."""
    facts = Facts({one.slot: one, other.slot: other}, 2, False, "inductor", 4)
    moved = replace(
        facts, chosen={**facts.chosen, "offload.activations": made("offload.activations", "copy_out")}
    )
    excluded = rule.excluded
    return (
        rule.when(one.effects) and excluded.having(other.effects) and any(map(excluded.only, (facts, moved)))
    )


def test_rules_and_pairs_refuse_something() -> None:
    more = [
        made("offload.states", "zero_infinity", parameters="host", tiles=2),
        made("split", "tiled", mlp=2),
        made("offload.states", "zero_offload", ratio=None),
        made("sharding.states", "ddp", find_unused_parameters=True),
    ]
    every = [*TECHNIQUES, *more]
    pairs = [(one, other) for one in every for other in every if one.slot != other.slot]
    for rule in RULES:
        assert any(
            holds(rule, *pair) for pair in pairs if (pair[0].slot, pair[1].slot) == (rule.slot, rule.other)
        ), rule.excluded.text
    said = {
        (one.slot, other.slot, reason.text)
        for one, other in pairs
        if (reason := excludes(one, other, 2)) is not None
    }
    for pair in PAIRS:
        assert (pair.one[0], pair.other[0], pair.text) in said, pair


def test_apply_skips_rules_about_plans() -> None:
    """`apply` does not ask whether a plan can be made: a config has it."""
    pipeline, planned = made("sharding.parallel", "pipeline"), made("recompute", "planned")
    assert excludes(pipeline, planned, 2) is not None
    assert refusal(Facts({pipeline.slot: pipeline, planned.slot: planned}, 2, False, "inductor", 4)) is None
    dtr, l2l, zero1 = (
        made("recompute", "dtr"),
        made("offload.states", "l2l"),
        made("sharding.states", "zero1"),
    )
    by_technique, reason = refusal(Facts({l2l.slot: l2l, zero1.slot: zero1}, 2, False, "inductor", 4)) or (
        None,
        None,
    )
    assert (by_technique, reason and reason.code) == (l2l, "MT364")
    by_technique, reason = refusal(Facts({dtr.slot: dtr}, 1, "blocks", "aot_eager", 4)) or (None, None)
    assert (by_technique, reason and reason.fix) == (dtr, "execution.compile: false")
    full = made("recompute", "full")
    by_technique, reason = refusal(Facts({full.slot: full}, 1, False, "inductor", 0)) or (None, None)
    assert (by_technique, reason and reason.code) == (full, "MT303")


@pytest.mark.parametrize(
    "technique",
    [each for each in TECHNIQUES if each.effects.parameters_on != "device"],
    ids=lambda each: f"{each.kind}-{each.effects.moves}",
)
def test_refusal_of_offloaded_weights_without_blocks(technique: Technique) -> None:
    found = refusal(Facts({technique.slot: technique}, 1, False, "inductor", 0))
    assert found is not None
    assert found[1].code


def compares_a_kind(node: ast.AST) -> bool:
    """Return True if `node` is `technique.kind == "full"`, `kind in (...)` or the like: with names of kinds,
    or tuples of them.
    """
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    others = [each for each in sides if not (isinstance(each, ast.Attribute) and each.attr == "kind")]
    inside = [part for each in others for part in ast.walk(each)]
    names = any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in inside)
    return len(others) < len(sides) and (
        names or any(isinstance(part, ast.Name) and part.id.isupper() for part in inside)
    )


def test_techniques_do_not_compare_kinds() -> None:
    """Knowledge of another technique belongs in a rule on effects or in a pair."""
    sources = sorted((ROOT / "search_spaces").rglob("*.py"))
    found = {
        path.name for path in sources if any(map(compares_a_kind, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == {"__init__.py"}  # `is_null`
