"""Whose each storage is: a parameter's own, its gradient, its optimizer state, or what the optimizer makes for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memtune.program import I32, Parameter, Phase


def owners(n_storages: int, parameters: Sequence[Parameter], producer: Sequence[int], phases: Sequence[int], uses: I32) -> I32:
    """(n_storages,) index of the parameter that each storage belongs to, -1 for none; followed through the optimizer's reads.

    Args:
        n_storages: How many rows there are.
        parameters: With their storages and gradients.
        producer: Op that makes each storage.
        phases: Phase of each op.
        uses: (n, 3) rows of op, storage and whether it is written.
    """
    owner = np.full(n_storages, -1, np.int32)
    for i, parameter in enumerate(parameters):
        owner[parameter.storage] = i
        if parameter.gradient >= 0:
            owner[parameter.gradient] = i
    touched: dict[int, list[int]] = {}
    for op, storage, _ in uses.tolist():
        touched.setdefault(op, []).append(storage)
    for storage, op in enumerate(producer):
        touched.setdefault(op, []).append(storage)
    for op, phase in enumerate(phases):
        if phase != Phase.OPTIMIZER:
            continue
        storages = touched.get(op, [])
        whose = {int(owner[s]) for s in storages if owner[s] >= 0}
        if len(whose) == 1:
            mine = whose.pop()
            for s in storages:
                if owner[s] < 0:
                    owner[s] = mine
    return owner
