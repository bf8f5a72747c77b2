"""The full model on one rank; several ranks need a technique that reduces gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.sharding_programs import program, target

from memtune.search_spaces.sharding.states.none import Alone
from memtune.technique import NO_PLAN


def test_fits_one_rank_only() -> None:
    assert Alone().fits(program(), target(1)) is None
    assert "2 ranks would each train a model of their own" in str(Alone().fits(program(), target(2)))


def test_rewrite_changes_nothing() -> None:
    plain = program()
    assert Alone().rewrite(plain, NO_PLAN, target(1)) is plain
    assert Alone().record(target(1)) == {}


def test_fits_several_ranks_with_model_parallelism() -> None:
    parallel = Alone()  # any technique of that slot that is not the null one
    cut = replace(target(2), chosen={"sharding.parallel": parallel.model_construct(kind="tensor")})
    assert Alone().fits(program(), cut) is None


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_kind_is_checked(kind: str) -> None:
    with pytest.raises(ValueError, match="none"):
        Alone(kind=kind)  # type: ignore[arg-type]
