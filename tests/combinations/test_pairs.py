"""Every pair of techniques across axes that `fits` allows trains for real with the results of the plain
model.
"""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path

import pytest
import torch
from support.gloo import run_ranks
from support.suites.block_offload_suite import without_gradients
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.config.tuned_config import TunedConfig
from memtune.errors import MemtuneError
from memtune.search_spaces import NULL_KINDS, all_techniques
from memtune.search_spaces.execution import Execution
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Target, Technique
from memtune.testing import differences, train
from memtune.testing.drift_check import plain_program, recording_of, target_of
from memtune.testing.training import Run, plain, train_under

MODEL = "gpt"
ALONE = "alone.pt"
KNOBS: dict[str, dict[str, object]] = {
    "stronghold": {"window": 2},
    "patrickstar": {"chunk_bytes": 70_000},
    "angel_ptm": {"page_mib": 0.02},
    "copy_out": {"min_bytes": 0},
    "compressed": {"min_bytes": 0},
    "planned": {"share": 0.5},
    "checkmate": {"share": 0.5},
    "mics": {"group": 2},
    "smart_infinity": {"sub_group_mib": 0.1},
    "tsplit": {"share": 0.5, "parts": 1, "min_bytes": 64},
    "orchestrated": {"group": 2},
    "lohan": {"min_bytes": 1, "bucket_mib": 0.005},
} | {kind: {"ratio": 0.5} for kind in ("dtr", "megtaichi", "coop")}


def made(technique: type[Technique]) -> Technique:
    kind = technique.__module__.rpartition(".")[2]
    mine = {
        name: value for name, value in KNOBS.get(kind, {}).items() if name in technique.model_fields
    }  # of two slots' kinds
    return technique(kind=kind, **mine)


SLOW = (
    "stronghold",
    "elixir",
    "lohan",
    "tsplit",
    "orchestrated",
    "smart_infinity",
    "moesys",
    "harmony",
    "mobius",
    "angel_ptm",
    "head_context",
    "pipeline",
    "compressed",
)
LOSSY_ERROR = 0.001
"""Largest relative error of a loss; 8 bits change those after an update by 2e-5."""
BY_BLOCKS = ("attention_boundary", "dtr", "megtaichi", "coop")
"""Schedules for each block by themselves, as those of `checkmate` are with `Effects.follows_calls`."""
TECHNIQUES = [made(each) for each in all_techniques()]
REAL = [each for each in TECHNIQUES if each.kind != NULL_KINDS[each.slot]]
PAIRS = [(one, two) for one, two in combinations(REAL, 2) if one.slot != two.slot]


def pair_id(pair: tuple[Technique, ...]) -> str:
    return "+".join(each.kind for each in pair)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def drive(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))


def param(pair: tuple[Technique, ...]) -> object:
    """Two kinds of one mechanism: one of them in the short list."""
    alike = any(each.kind in BY_BLOCKS for each in pair) and any(each.effects.follows_calls for each in pair)
    slow = alike or any(each.kind in SLOW for each in pair)
    return pytest.param(pair, id=pair_id(pair), marks=[pytest.mark.slow] if slow else [])


@pytest.mark.drawn(650)
@pytest.mark.parametrize("pair", [param(each) for each in PAIRS])
def test_pair_trains_as_the_plain_model_does(pair: tuple[Technique, Technique]) -> None:
    program, target = plain_program(ZOO[MODEL]), target_of(*pair)
    for technique in pair:
        reason = technique.fits(program, target)
        if reason is not None:
            pytest.skip(f"{technique.kind}: {reason}")
    # One that is exact adds no difference to the other's own.
    others = [each for each in pair if each.exactly() is not Exactness.BITWISE]
    if any(each.exactly() is Exactness.LOSSY for each in pair):
        assert relative_errors(train(ZOO[MODEL], *pair), plain(ZOO[MODEL])) < LOSSY_ERROR
        return
    found, wanted = train(ZOO[MODEL], *pair), train(ZOO[MODEL], *others) if others else plain(ZOO[MODEL])
    if any(each.kind == "roam" for each in pair):
        found, wanted = without_gradients(found), without_gradients(wanted)
    assert not differences(found, wanted, 0.0 if len(others) < 2 else 1e-4)


def relative_errors(found: Run, wanted: Run) -> float:
    """Return the largest relative error of a loss."""
    pairs = zip(found.losses, wanted.losses, strict=True)
    return max(abs(float(one) / float(other) - 1) for one, other in pairs)


def test_expected_pairs_fit_on_one_rank() -> None:
    program = plain_program(ZOO[MODEL])
    fitting = {
        pair_id(pair) for pair in PAIRS if all(each.fits(program, target_of(*pair)) is None for each in pair)
    }
    assert {
        "full+copy_out",
        "every_nth+copy_out",
        "selective+copy_out",
        "full+optimizer_cpu",
        "every_nth+optimizer_cpu",
        "selective+optimizer_cpu",
    } <= {name for pair in fitting for name in (pair, "+".join(reversed(pair.split("+"))))}


def test_one_technique_of_each_axis_trains_as_the_plain_model() -> None:
    chosen = [each for each in REAL if each.kind in ("selective", "copy_out", "optimizer_cpu")]
    assert len(chosen) == 3
    assert not differences(train(ZOO[MODEL], *chosen), plain(ZOO[MODEL]))


def refused_on_ranks() -> list[Technique]:
    """Return techniques that reorder sums and work on one rank, or only with a technique that averages
    gradients.
    """
    program, here = plain_program(ZOO[MODEL]), hardware.detect("cpu")
    inexact = [
        each
        for each in REAL
        if not each.slot.startswith("sharding") and each.exactly() is not Exactness.BITWISE
    ]
    alone = [each for each in inexact if each.fits(program, target_of(each)) is None]
    return [each for each in alone if each.fits(program, Target(here, 2)) is not None]


def sharded_pairs(kind: str, drive: str) -> dict[str, list[str]]:
    """Return the differences of each pair with the sharding technique `kind` that `fits` allows on these
    ranks.

    All ranks train on the same samples, so that their mean gradient is the plain model's. A file has the
    results on one rank of techniques that several ranks refuse alone.
    """
    on_one_rank: dict[str, Run] = torch.load(Path(drive, ALONE), weights_only=False)
    os.environ[offload_dir.VARIABLE] = drive
    target = Target(hardware.detect("cpu"), torch.distributed.get_world_size())
    rewriter, execution = Rewriter(recording_of(ZOO[MODEL]), target), Execution(micro_batch=2, accumulate=2)
    found: dict[str, list[str]] = {}
    for pair in PAIRS:
        if any(each.exactly() is Exactness.LOSSY for each in pair):
            continue  # sums in another order change roundings; each technique has a test on ranks of its own
        mine, other = sorted(pair, key=lambda each: each.kind != kind)
        candidate = (
            rewriter.candidate(Choice.of(execution, {each.slot: each for each in pair}))
            if mine.kind == kind
            else None
        )
        if not isinstance(candidate, Candidate):
            continue
        alone = plain(ZOO[MODEL])
        if not other.slot.startswith("sharding") and other.exactly() is not Exactness.BITWISE:
            alone = on_one_rank.get(f"{other.slot} {other.kind}") or train(ZOO[MODEL], other)
        config = TunedConfig(settings=candidate.choice, plan=dict(candidate.plans))
        try:
            run = train_under(ZOO[MODEL], config.document())
            if kind in ("zero1", "zero2") and other.effects.calls == "grad_hooks":
                # Each rank has rows of an offloaded gradient: there is no `p.grad` to compare.
                run, alone = without_gradients(run), without_gradients(alone)
            found[pair_id(pair)] = differences(run, alone, tolerance=1e-4)
        except MemtuneError as error:
            found[pair_id(pair)] = [str(error)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [each.kind for each in REAL if each.slot.startswith("sharding")])
def test_sharded_pairs_train_as_the_plain_model(kind: str, tmp_path: Path) -> None:
    ranks = 4 if kind == "mics" else 2  # on two ranks its groups are all of them, and it is fsdp
    alone = {f"{each.slot} {each.kind}": train(ZOO[MODEL], each) for each in refused_on_ranks()}
    torch.save(alone, tmp_path / ALONE)
    first, *others = run_ranks(sharded_pairs, ranks, kind, str(tmp_path), deadline_s=900)
    assert not {pair: differing for pair, differing in first.items() if differing}
    assert all(other == first for other in others)
    assert len(first) >= 3 or kind not in ("ddp", "fsdp", "zero1", "zero2", "zero3", "mics"), sorted(first)
