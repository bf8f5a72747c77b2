"""Conditions of memtune's native update on optimizers and parameters."""

from __future__ import annotations

from typing import Literal

import numpy as np

from memtune.program import Step, columns_of
from memtune.technique import Reason, Target

_OWN = "offload: {states: {kind: optimizer_cpu, update: user}}"


def unknown_optimizer(target: Target) -> Reason | None:
    """Return why the native update cannot replace the user's optimizer."""
    why = "" if target.optimizer is None else target.optimizer.native_refusal
    return Reason(why, _OWN) if why else None


def no_native_update(step: Step, update: Literal["native", "master"], target: Target) -> Reason | None:
    """Return why the host's native update does not apply: an unknown optimizer, or a parameter type.

    `native` is for float32 parameters, `master` for narrower ones.
    """
    if (reason := unknown_optimizer(target)) is not None:
        return reason
    columns = columns_of(step.parameters)
    sizes = set(columns.itemsize[columns.gradient >= 0].tolist())
    if update == "native" and sizes != {4}:
        return Reason("the native update keeps float32 weights", "update: master")
    if update == "master" and 2 not in sizes:
        return Reason("the parameters are float32 themselves", "update: native")
    return None


def not_contiguous(step: Step) -> Reason | None:
    """Return why a parameter cannot be divided as a flat row of elements: it has gaps in memory, or shares
    it.
    """
    columns = columns_of(step.parameters)
    wrong = (columns.gradient >= 0) & (
        step.storages.bytes[columns.storage] != columns.numel * columns.itemsize
    )
    if not wrong.any():
        return None
    name = columns.names[int(np.argmax(wrong))]
    return Reason(
        f"{name} has gaps in memory, or shares memory with another tensor",
        "offload: {states: {kind: zero_infinity}}",
    )
