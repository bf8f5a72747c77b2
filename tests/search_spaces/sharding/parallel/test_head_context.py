"""Attention over heads and contexts: refused models, a rank's bytes, and training on gloo ranks as on one.

Distinguishing test: a rank saves 1/degree of the blocks' saved bytes, and if it exchanges heads attention's
output of its own positions once more. With Q and K the bytes of its own queries and keys, an attention sends
4·(Q + K)·(h - 1)/h in all-to-alls and 6·K·(c - 1) in rings (h ranks a context, c contexts; 16-bit keys 8·K,
as their gradients are sent in fp32). With work sharing the last context, which gets most, receives 4·K·⌊c/2⌋
+ (2·Q + L)·⌊(c - 1)/2⌋ (L of a log-sum-exp).
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from support.gloo import run_ranks
from support.ranks.model_parallel_runs import (
    MODELS,
    SEPARATE,
    SIZE,
    UNDRAWN,
    Measured,
    assert_trained_as_one,
    candidate,
    config,
    measured,
    peak,
    refusal,
    rewriter,
    settings,
    trained,
)
from support.ring_traffic import Contexts
from support.suites.sharded_suite import ShardedSuite

from memtune import hardware
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record import record
from memtune.autotune.record_parallel.sharded_recording import ShardedRecordings
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.autotune.translate import translate
from memtune.config.tuned_config import Settings, TunedConfig, dump_yaml, load_config
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.parallel.model.context_groups import Split
from memtune.parallel.model.context_parallel import HEAD_CONTEXT
from memtune.parallel.sharding.factors import Schedule, by_link
from memtune.program.step import Phase, Resource, Step
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.sharding.parallel.head_context import HeadContext, HeadContextPlan
from memtune.technique import ShardedRecording, Target
from memtune.workload.workload import Workload

KIND = "head_context"
CONTEXTS = MODELS / "contexts.py"
SEQ, DIM, LAYERS, HEADS = 16, 32, 2, 4
BLOCKS, WHOLE = 84992, 95488
"""Bytes of the gradients of `SEPARATE`'s blocks, of one of which a layer is frozen, and of all."""


def split_of(ranks: int, **knobs: Any) -> Split:
    found = HeadContext(**knobs).split(ranks, ranks)
    assert isinstance(found, Split), found
    return found


def sent(ranks: int, parts: int = 1, node: int = 8, rank: int = 0, **knobs: Any) -> tuple[float, float]:
    """Return bytes inside a node and between nodes, of a rank in a step, by the formula.

    Every rank provides `parts` micro-batches.
    """
    split = split_of(ranks, **knobs)
    own = SIZE * SEQ * DIM * 4 / split.ranks
    shape = split.heads, split.contexts, split.inner, split.context_first
    helped = split.place(rank % split.ranks)[0] if split.work_sharing else None
    contexts = Contexts(*shape, *(LAYERS * own,) * 3, own, BLOCKS, WHOLE, helped, LAYERS * own * HEADS / DIM)
    found = by_link(contexts.hops(Schedule(ranks, node, parts * split.ranks)), node)
    return found.intra_bytes, found.inter_bytes


# -- how a sequence is divided -------------------------------------------------------------------------------

EIGHT = [
    Split(heads, 8 // heads, inner, first, zigzag)
    for heads in (1, 2, 4, 8)
    for inner in (1, 2, 4, 8)
    for first in (False, True)
    for zigzag in (False, True)
    if 8 // heads % inner == 0
]


@pytest.mark.parametrize("split", EIGHT, ids=lambda split: split.name)
def test_split_assigns_each_position_and_context_once(split: Split) -> None:
    units = [[unit for first, n in pieces for unit in range(first, first + n)] for pieces in split.order()]
    assert sorted(unit for mine in units for unit in mine) == list(range(split.units))
    assert {len(mine) for mine in units} == {split.units // split.ranks}
    assert [split.rank(*split.place(rank)) for rank in range(8)] == list(range(8))
    contexts = [
        [unit for head in range(split.heads) for unit in units[split.rank(context, head)]]
        for context in range(split.contexts)
    ]
    assert all(mine == sorted(mine) for mine in contexts)  # so that what is causal in a context is causal
    work = {
        sum(2 * unit + 1 for unit in mine) for mine in contexts
    }  # half-units of keys that a unit of queries attends to
    assert (len(work) == 1) == (split.zigzag or split.contexts == 1)


def test_split_refuses_settings_without_groups() -> None:
    for knobs, said in (
        ({"head_degree": 3}, "head_degree=3 does not divide the 8 ranks"),
        ({"inner_ring": 3}, "inner_ring=3 does not divide a ring of 8 contexts"),
        ({"inner_ring": 8}, "does not divide a ring of 8 contexts into several"),
        ({"head_degree": 8, "inner_ring": 2}, "a ring of 1 contexts"),
        ({"load_balance": "work_sharing", "inner_ring": 2}, "ranks that share work form no inner rings"),
    ):
        assert said in str(HeadContext(**knobs).split(8, 8))

    def inner(placement: str, node: int) -> Any:
        found = HeadContext.model_validate(
            {"kind": KIND, "head_degree": 2, "inner_ring": "node", "placement": placement}
        )
        return getattr(found.split(16, node), "inner", None)

    assert [inner("head_first", node) for node in (2, 4, 8, 16)] == [8, 2, 4, 8]
    assert [inner("context_first", node) for node in (2, 4, 8, 16)] == [2, 4, 8, 8]


def test_plan_is_valid_for_another_node_size() -> None:
    technique = HeadContext(inner_ring="node")
    context: Any = SimpleNamespace(placement=SimpleNamespace(world_size=8))
    made = technique.split(8, 4)
    assert isinstance(made, Split)
    assert made.inner == 4
    assert technique._planned(context, HeadContextPlan(degree=8, split=made, attention_heads=(4,))) == made


# -- which models may be divided -----------------------------------------------------------------------------


def test_refusals_name_what_is_in_the_way() -> None:
    assert "degree=4 is more than the 2 ranks" in refusal(KIND, UNDRAWN, degree=4)
    program, here = candidate(KIND, UNDRAWN).program, hardware.detect("cpu")
    assert "each degree must be recorded" in str(HeadContext().fits(program, Target(here, 2)))
    assert "only one rank" in str(HeadContext(head_degree=2).fits(program, Target(here, 1)))


@pytest.mark.slow
def test_fits_refuses_heads_that_do_not_divide() -> None:
    cut = rewriter(UNDRAWN).target.sharded
    assert cut is not None
    eight = HeadContext(head_degree=8, load_balance="none")
    found = eight.fits(candidate(KIND, UNDRAWN).program, Target(hardware.detect("cpu"), 8, sharded=cut))
    assert "8 ranks do not divide the 4 heads of attention" in str(found)


REASONS = {
    "odd": "cannot each take an equal share of two positions and more in 4 equal pieces",
    "masked": "attention is given a mask",
    "both ways": "masks no later positions",
    "first": "uses the first positions of what is whole",
    "learned": "uses the first positions of what is whole",
    "arange": "is given another number",
    "conditioned": "that needs a gradient",
    "mask": "by pairs of positions",
    "extra outputs": "what the blocks return in addition to their output",
    "between": "scale, which is outside of the blocks",
    "made": "what weights outside of the blocks have made",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "first" else []) for name in REASONS]
)
def test_fits_refuses_code_that_is_wrong_for_a_share(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IN_CONTEXTS", name)
    found = rewriter.__wrapped__(CONTEXTS).candidate(Choice.from_document(settings(KIND)))
    assert REASONS[name] in str(found)


def test_apply_refuses_a_plan_of_another_split() -> None:
    context: Any = SimpleNamespace(placement=SimpleNamespace(world_size=4))
    plan: Any = candidate(KIND, UNDRAWN).plans["sharding.parallel"]
    with pytest.raises(ApplyError, match="needs a plan"):
        HeadContext(head_degree=2).plan_in({})
    with pytest.raises(ApplyError, match=r"for 1 × 2 ranks, in rings of 2. The config has 2 × 2"):
        HeadContext(head_degree=2).apply(context, plan)


def test_head_context_config_survives_yaml() -> None:
    knobs: dict[str, Any] = {
        "head_degree": 2,
        "inner_ring": "node",
        "placement": "context_first",
        "load_balance": "none",
    }
    made = TunedConfig(
        settings=Settings.of(Execution(), {"sharding.parallel": HeadContext(degree=8, **knobs)})
    )
    assert load_config(dump_yaml(made)) == made


# -- the rank's step -----------------------------------------------------------------------------------------


def bytes_of(step: Step, name: str) -> int:
    ops = [op for op in range(step.ops.n) if name in step.names[step.ops.name[op]]]
    return int(step.ops.traffic_bytes[ops].sum())


def saved_bytes(step: Step) -> int:
    """Return the bytes saved by the second block, without weights."""
    weights = {each.storage for each in step.parameters}
    return sum(
        int(step.storages.bytes[each])
        for each in set(step.saves.storage[step.saves.block == 1].tolist()) - weights
    )


def test_blocks_save_shares_and_send_bytes_by_formula() -> None:
    own, plain = SIZE * SEQ * DIM * 4 // 2, rewriter(UNDRAWN).recording.at(SIZE)
    # By heads, attention's output is another tensor than by positions.
    for knobs, to_all, hops, again in (({}, 0, 6 * own, 0), ({"head_degree": 2}, 8 * own, 0, own)):
        program = candidate(KIND, UNDRAWN, **knobs).program
        step = program.step
        assert (bytes_of(step, "all_to_all"), bytes_of(step, "send_next")) == (LAYERS * to_all, LAYERS * hops)
        assert saved_bytes(step) == saved_bytes(plain) // 2 + again
        assert (program.accumulate, program.sharers, program.samples) == (2, 2, 2 * SIZE)


@pytest.mark.slow
def test_unbalanced_contexts_record_the_rank_with_most_work() -> None:
    def attention_flops(**knobs: Any) -> float:
        step = candidate(KIND, SEPARATE, 4, **knobs).program.step
        ops = [
            op
            for op in range(step.ops.n)
            if "scaled_dot" in step.names[step.ops.name[op]] and step.ops.phase[op] == Phase.FORWARD
        ]
        return float(step.ops.flops[ops].sum())

    assert attention_flops(load_balance="none") / attention_flops() == pytest.approx(4 / (1 + 3 / 2))


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_collectives_of_each_group_use_its_link(first: bool) -> None:
    workload = Workload.load(UNDRAWN)
    cut = ShardedRecordings(workload, rewriter(UNDRAWN).recording, ranks_per_node=2)
    found = cut(4, HEAD_CONTEXT + Split(2, 2, 2, first, True).name, 4)
    assert isinstance(found, ShardedRecording), found
    step = found.recording.step
    for name, between in (("all_to_all", first), ("send_next", not first)):
        links = {
            int(step.ops.resource[op]) for op in range(step.ops.n) if name in step.names[step.ops.name[op]]
        }
        assert links == {Resource.INTER_LINK if between else Resource.INTRA_LINK}


# -- on gloo ranks -------------------------------------------------------------------------------------------


def assert_as_predicted(
    found: list[Measured], knobs: dict[str, dict[str, Any]], ranks: int, node: int = 8
) -> None:
    """Assert peaks within 2 %, and the bytes of each class of link to the byte."""
    for name, each in knobs.items():
        of_split = {knob: value for knob, value in each.items() if knob not in ("accumulate", "other_slots")}
        predicted = simulate(
            candidate(KIND, SEPARATE, ranks, **each).program, hardware.detect("cpu")
        ).peak_allocated_bytes
        for number, rank in enumerate(found):
            wanted = sent(ranks, each.get("accumulate", 1), node, number, **of_split)
            assert (
                cpu_allocator.available() is not None or abs(rank[name][0] - predicted) <= 0.02 * predicted
            ), (
                name,
                rank,
                predicted,
            )
            assert rank[name][1:] == wanted or "other_slots" in each, (name, rank, wanted)


def test_two_ranks_train_as_one_with_clipping() -> None:
    found = run_ranks(trained, 2, 2, config(KIND, path=UNDRAWN), True, 1, False, UNDRAWN)
    assert_trained_as_one(found, trained(2, None, True, 1, False, UNDRAWN), atol=1e-5)
    audit = {"heads": 1, "contexts": 2, "blocks": 2, "summed_parameters": 29}
    assert found[0]["audit"]["sharding.parallel"] == audit


KNOBS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ring": {},
        "heads": {"head_degree": 2},
        "one after another": {"load_balance": "none"},
        "accumulated": {"accumulate": 4},
    },
    4: {
        "ring": {},
        "heads": {"head_degree": 4},
        "both": {"head_degree": 2},
        "context first": {"head_degree": 2, "placement": "context_first"},
        "double ring": {"inner_ring": 2},
        "unbalanced double ring": {"inner_ring": 2, "load_balance": "none"},
        "work_sharing": {"load_balance": "work_sharing"},
        "copies": {"degree": 2},
        "copies of heads, accumulated": {"degree": 2, "head_degree": 2, "accumulate": 4},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "node"), [(2, 8), (4, 8), (4, 2)])
def test_peaks_and_bytes(ranks: int, node: int) -> None:
    documents = {name: config(KIND, ranks, **knobs) for name, knobs in KNOBS[ranks].items()}
    assert_as_predicted(
        run_ranks(measured, ranks, documents, node, deadline_s=280), KNOBS[ranks], ranks, node
    )


OTHERS: dict[str, dict[str, Any]] = {
    "full": {"recompute": {"kind": "full"}},
    "selective": {"recompute": {"kind": "selective"}},
    "copy_out": {"offload": {"activations": {"kind": "copy_out", "min_bytes": 0}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{}, {"head_degree": 2}], ids=str)
def test_peaks_and_dropout_with_activation_techniques(knobs: dict[str, Any]) -> None:
    other_slots = {name: {**knobs, "other_slots": more} for name, more in OTHERS.items()}
    documents = {name: config(KIND, 2, **each) for name, each in other_slots.items()}
    assert_as_predicted(run_ranks(measured, 2, documents), other_slots, 2)
    for document in documents.values():
        assert_trained_as_one(
            run_ranks(trained, 2, 2, document, False, 1, True), trained(2, None, False, 1, True), atol=1e-5
        )


DROPPING = MODELS / "dropping.py"
DROPS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "zigzag": {},
        "recomputed": {"other_slots": OTHERS["full"]},
        "heads": {"head_degree": 2},
    },
    4: {
        "zigzag": {},
        "double ring": {"inner_ring": 2, "load_balance": "none"},
        "heads": {"head_degree": 2},
        "work_sharing": {"load_balance": "work_sharing"},
        "work_sharing, recomputed": {"load_balance": "work_sharing", "other_slots": OTHERS["full"]},
    },
}
"""Divisions of a model that drops weights of attention."""


def dropping(ranks: int, documents: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {**trained(ranks, document, dropout=True, path=DROPPING), "peak": peak(document, DROPPING)}
        for name, document in documents.items()
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_dropped_weights_of_attention_are_those_of_one_rank(ranks: int) -> None:
    documents = {
        name: config(KIND, ranks, path=DROPPING, **{"other_slots": None, **knobs})
        for name, knobs in DROPS[ranks].items()
    }
    found = run_ranks(dropping, ranks, ranks, documents)
    wanted = trained(ranks, None, dropout=True, path=DROPPING)
    for name, knobs in DROPS[ranks].items():
        assert_trained_as_one([each[name] for each in found], wanted, atol=1e-5)
        program = candidate(KIND, DROPPING, ranks, **knobs).program
        predicted = simulate(program, hardware.detect("cpu")).peak_allocated_bytes
        highest = max(each[name]["peak"] for each in found)
        assert cpu_allocator.available() is not None or abs(highest - predicted) <= 0.02 * predicted, (
            name,
            highest,
            predicted,
        )


@pytest.mark.slow
def test_dropped_weights_of_shared_keys_are_divided_on_gpus() -> None:
    """There the plain step has no one op for them."""
    on, workload = hardware.find("h100"), Workload.load(DROPPING)
    plain, to_gpu = record(workload, target="cuda"), partial(translate, hardware=on)
    cut = ShardedRecordings(workload, plain, translate=to_gpu, target="cuda")
    found = Rewriter(to_gpu(plain), Target(on, 2, sharded=cut)).candidate(
        Choice.from_document(settings(KIND))
    )
    assert isinstance(found, Candidate), found


def all_trained(ranks: int, cases: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    return {
        (name, parts, clip): trained(ranks, document, clip, parts, False, CONTEXTS)
        for (name, parts, clip), document in cases.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_accumulation_and_clipping_train_as_one_rank(ranks: int) -> None:
    """Rotary tables are divided as positions are; four heads share two of keys, which four ranks have to
    repeat.
    """
    cases = {}
    for (name, knobs), parts, clip in product(KNOBS[ranks].items(), (1, 4), (False, True)):
        if "accumulate" not in knobs:
            cases[name, parts, clip] = config(KIND, ranks, None, CONTEXTS, **{**knobs, "accumulate": parts})
    found = run_ranks(all_trained, ranks, ranks, cases, deadline_s=290)
    wanted = {
        each: trained(ranks, None, each[1], each[0], False, CONTEXTS)
        for each in product((1, 4), (False, True))
    }
    for name, parts, clip in cases:
        assert_trained_as_one([rank[name, parts, clip] for rank in found], wanted[parts, clip])


EIGHT_RANKS: dict[str, dict[str, Any]] = {
    "one ring": {},
    "rings of two": {"inner_ring": 2},
    "rings of four": {"inner_ring": 4},
    "two heads": {"head_degree": 2},
    "two heads, rings of two": {"head_degree": 2, "inner_ring": 2},
    "two heads, context first": {"head_degree": 2, "placement": "context_first"},
    "four heads": {"head_degree": 4},
    "four heads, context first": {"head_degree": 4, "placement": "context_first"},
    "work sharing": {"load_balance": "work_sharing"},
    "work sharing, two heads": {"load_balance": "work_sharing", "head_degree": 2},
}


@pytest.mark.slow
def test_eight_ranks_train_as_one_for_every_division() -> None:
    """The papers' acceptance test: heads × contexts × rings of eight ranks."""
    cases = {(name, 1, False): config(KIND, 8, None, CONTEXTS, **each) for name, each in EIGHT_RANKS.items()}
    found = run_ranks(all_trained, 8, 8, cases, deadline_s=280)
    wanted = trained(8, None, False, 1, False, CONTEXTS)
    for case in cases:
        assert_trained_as_one([rank[case] for rank in found], wanted)


class TestHeadContext(ShardedSuite):
    technique = HeadContext
    models: ClassVar[dict[str, Path]] = {"undrawn": UNDRAWN}
    accumulate, peak_rel, briefly = 2, 0.02, False
