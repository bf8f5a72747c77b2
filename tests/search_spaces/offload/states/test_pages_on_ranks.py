"""Pages of weights on replicas: weights, bytes on links, peaks, checkpoints, clipping, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gloo import run_ranks
from layers_suite import total
from packs_suite import CHAIN
from stores_on_ranks import candidate, check_on_ranks, config_of, started

from memtune.errors import ApplyError
from memtune.program import Resource
from memtune.search_spaces.offload.states.angel_ptm import AngelPtm
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.sharding.states.ddp import Ddp
from memtune.search_spaces.sharding.states.fsdp import Fsdp
from memtune.technique import Technique
from memtune.testing.drift import plain_program, rewritten, target_of

RANKS, REPLICAS, OWN = 2, Ddp(kind="ddp"), OptimizerCpu(kind="optimizer_cpu")
PAGES = AngelPtm(kind="angel_ptm", page_mib=0.004)
ON_SSD = PAGES.model_copy(update={"optimizer": "ssd"})
LOCK_FREE = PAGES.model_copy(update={"lock_free": True})
pytestmark = pytest.mark.usefixtures("one_thread")


def cases(**techniques: Technique) -> dict[str, tuple[Technique, Technique, Technique]]:
    native = OptimizerCpu(kind="optimizer_cpu", update="native")
    return {name: (REPLICAS, each, native if each is ON_SSD else OWN) for name, each in techniques.items()}


def test_replicas_train_as_one_rank(tmp_path: Path) -> None:
    """The mechanism: pages go up as on one rank, and each gradient is averaged once before it leaves."""
    step = check_on_ranks(cases(pages=PAGES), tmp_path)["pages"]
    alone, plain = rewritten(CHAIN, PAGES), rewritten(CHAIN)
    gradients = sum(int(plain.bytes[p.gradient]) for p in plain.parameters if p.gradient >= 0)
    for link in (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST):
        assert total(step, link) == total(alone, link)
    assert total(step, Resource.DEVICE_TO_HOST) == total(step, Resource.INTRA_LINK) == gradients


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize("parts", [1, 3])
def test_replicas_with_the_optimizer_on_ssd_and_accumulation(tmp_path: Path, parts: int) -> None:
    check_on_ranks(cases(ssd=ON_SSD, pages=PAGES), tmp_path, parts=parts, bitwise=parts == 1)


def test_nothing_is_cached_among_replicas() -> None:
    """What stays would be averaged by nobody; one rank with the same budget keeps some of it."""
    ample = 1 << 30
    assert candidate((PAGES,), 1, 1, ample).plans["offload.states"].decisions["cached"] > 0
    assert "cached" not in candidate((REPLICAS, PAGES), 1, RANKS, ample).plans["offload.states"].decisions


def test_what_it_cannot_do_is_refused() -> None:
    program = plain_program(CHAIN)
    ranks = [replace(target_of(each), ranks=RANKS) for each in (REPLICAS, Fsdp(kind="fsdp"))]
    assert "weights would differ" in str(LOCK_FREE.fits(program, ranks[0]))
    assert "replicas" in str(PAGES.fits(program, ranks[1]))


def refusals(configs: list[dict[str, Any]]) -> list[str]:
    found = []
    for config in configs:
        try:
            started(config)
        except ApplyError as refused:
            found.append(str(refused))
    return found


@pytest.mark.slow
def test_apply_refuses_it_too() -> None:
    plan = config_of(candidate((REPLICAS, PAGES), 1, RANKS), (REPLICAS, PAGES))
    alone = config_of(candidate((PAGES,), 1, 1, 1 << 30), (REPLICAS, PAGES))
    configs = [
        {**plan, "settings": config_of(candidate((REPLICAS, PAGES), 1, RANKS), (Fsdp(kind="fsdp"), PAGES))["settings"]},
        {**plan, "settings": config_of(candidate((REPLICAS, PAGES), 1, RANKS), (REPLICAS, LOCK_FREE))["settings"]},
        alone,
    ]
    for said in run_ranks(refusals, RANKS, configs):
        assert [part in each for part, each in zip(("replicas", "weights would differ", "no plan for"), said, strict=True)] == [
            True, True, True
        ], said  # fmt: skip
