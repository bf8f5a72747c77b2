"""Programs and targets for tests of the sharding axis."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from support.zoo_paths import ZOO

from memtune.activations.recompute.activation_table import ActivationTable
from memtune.autotune.record.recording_session import Session
from memtune.hardware.spec import find
from memtune.program.edit import accumulate_gradients
from memtune.program.step import Kind, Parameter, Phase, Program, RankClass, Step, Tier
from memtune.runtime.context import Context
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


def bytes_of(step: Step, kind: Kind) -> int:
    """Return the bytes on the device of the storages of a kind, without counters."""
    storages = step.storages
    mine = (storages.kind == kind) & (storages.tier == Tier.DEVICE) & (storages.bytes > 8)
    return int(storages.bytes[mine].sum())


def traffic_of_updates(step: Step, plain: Step) -> list[int]:
    """Return the traffic of the ops of the optimizer itself, without copies to the host and gathers."""
    names = {plain.names[name] for name in plain.ops.name[plain.ops.phase == Phase.OPTIMIZER]}
    rows = np.flatnonzero(step.ops.phase == Phase.OPTIMIZER)
    return [int(step.ops.traffic_bytes[row]) for row in rows if step.names[step.ops.name[row]] in names]


def context_of(session: Session) -> Context:
    """Return the context of a recording's model on CPU."""
    table = ActivationTable(session.model, session.blocks)
    return Context(session.model, session.optimizer, session.blocks, torch.device("cpu"), table)
