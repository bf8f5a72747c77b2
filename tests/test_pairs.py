"""Every pair of techniques across axes that `fits` allows trains for real and gives what the plain model gives."""

from __future__ import annotations

import os
import socket
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from zoo_paths import ZOO

from memtune.runtime import offload_dir
from memtune.search_spaces import NULL_KINDS, all_techniques
from memtune.technique import Exactness, Technique
from memtune.testing import differences, train
from memtune.testing.drift import plain_program, target_of
from memtune.testing.training import plain

MODEL = "gpt"
KNOBS: dict[str, dict[str, object]] = {
    "stronghold": {"window": 2},
    "copy_out": {"min_bytes": 0},
    "planned": {"share": 0.5},
    "checkmate": {"share": 0.5},
} | {kind: {"ratio": 0.5} for kind in ("dtr", "megtaichi", "coop")}


def made(technique: type[Technique]) -> Technique:
    kind = technique.__module__.rpartition(".")[2]
    return technique(kind=kind, **KNOBS.get(kind, {}))


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
    return pytest.param(pair, id=pair_id(pair), marks=[pytest.mark.slow] if any(p.kind == "stronghold" for p in pair) else [])


@pytest.mark.parametrize("pair", [param(each) for each in PAIRS])
def test_pair_trains_as_the_plain_model(pair: tuple[Technique, Technique]) -> None:
    program, target = plain_program(ZOO[MODEL]), target_of(*pair)
    for technique in pair:
        reason = technique.fits(program, target)
        if reason is not None:
            pytest.skip(f"{technique.kind}: {reason}")
    # One that is exact adds no difference to the other's own.
    others = [each for each in pair if each.exactly() is not Exactness.BITWISE]
    wanted = train(ZOO[MODEL], *others) if others else plain(ZOO[MODEL])
    assert not differences(train(ZOO[MODEL], *pair), wanted, 0.0 if len(others) < 2 else 1e-4)


def test_most_pairs_fit_on_one_rank() -> None:
    program = plain_program(ZOO[MODEL])
    fitting = {pair_id(pair) for pair in PAIRS if all(each.fits(program, target_of(*pair)) is None for each in pair)}
    assert {
        "full+copy_out", "every_nth+copy_out", "selective+copy_out",
        "full+optimizer_cpu", "every_nth+optimizer_cpu", "selective+optimizer_cpu",
    } <= {name for pair in fitting for name in (pair, "+".join(reversed(pair.split("+"))))}  # fmt: skip


def test_all_axes_at_once() -> None:
    chosen = [each for each in REAL if each.kind in ("selective", "copy_out", "optimizer_cpu")]
    assert len(chosen) == 3
    assert not differences(train(ZOO[MODEL], *chosen), plain(ZOO[MODEL]))


def _rank(rank: int, port: int, kinds: tuple[str, ...], out: Path) -> None:
    sys.stderr = open(os.devnull, "w")
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.distributed.init_process_group("gloo")
    chosen = [each for each in REAL if each.kind in kinds]
    found = differences(train(ZOO[MODEL], *chosen), plain(ZOO[MODEL]), tolerance=1e-4)
    (out / f"rank{rank}").write_text("\n".join(found) or "equal")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("other", ["full", "selective", "copy_out", "optimizer_cpu"])
def test_sharded_pair_trains_as_the_plain_model(sharding: str, other: str, tmp_path: Path) -> None:
    """Both ranks train on the same samples, so that their mean gradient is the plain model's."""
    if sharding not in {each.kind for each in REAL}:
        pytest.skip(f"no technique {sharding}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_rank, (port, (sharding, other), tmp_path), nprocs=2)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["equal", "equal"]
