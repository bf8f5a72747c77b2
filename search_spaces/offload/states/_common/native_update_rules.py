"""What memtune's own update of the optimizer can be given."""

from __future__ import annotations

from typing import Literal

import numpy as np

from memtune.program import Step, columns_of
from memtune.technique import Reason, Target

_OWN = "offload: {states: {kind: optimizer_cpu, update: own}}"


def unknown_optimizer(target: Target) -> Reason | None:
    """Why memtune's own update cannot take the place of the user's optimizer's."""
    why = "" if target.optimizer is None else target.optimizer.not_natively
    return Reason(why, _OWN) if why else None


def no_native_update(step: Step, update: Literal["native", "master"], target: Target) -> Reason | None:
    """Why the host's native update is not for them: an unknown optimizer; `native` is for float32, `master`
    for narrower.
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


def not_rows(step: Step) -> Reason | None:
    """Why whole parameters cannot be taken as rows of elements: one has gaps in memory, or has its memory
    several times.
    """
    columns = columns_of(step.parameters)
    wrong = (columns.gradient >= 0) & (
        step.storages.bytes[columns.storage] != columns.numel * columns.itemsize
    )
    if not wrong.any():
        return None
    name = columns.names[int(np.argmax(wrong))]
    return Reason(f"{name} shares its memory with something else", "offload: {states: {kind: zero_infinity}}")
