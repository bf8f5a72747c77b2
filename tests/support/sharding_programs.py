"""Programs and targets for tests of the sharding axis."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from support.zoo_paths import ZOO

from memtune.hardware.spec import find
from memtune.program.edit import accumulate_gradients
from memtune.program.step import Parameter, Program, RankClass, Step
from memtune.technique import Target
from memtune.testing.drift_check import recording_of


@cache
def step(model: str = "gpt") -> Step:
    return recording_of(ZOO[model]).at(2)


def program(model: str = "gpt", *, ranks: int = 2, accumulate: int = 1) -> Program:
    plain = step(model) if accumulate == 1 else accumulate_gradients(step(model))
    return Program((RankClass(ranks, plain),), 2, accumulate)


def with_parameter(index: int, **changes: object) -> Program:
    """Return the GPT's program with one parameter described differently."""
    plain = step()
    parameters: list[Parameter] = list(plain.parameters)
    parameters[index] = parameters[index]._replace(**changes)  # type: ignore[arg-type]
    return Program((RankClass(2, replace(plain, parameters=tuple(parameters))),), 2)


def target(ranks: int, device: str = "cuda") -> Target:
    return Target(replace(find("h100-80g"), device=device), ranks)  # type: ignore[arg-type]
