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
    of_nobody = set[int]()
    for storage, op in enumerate(producer):
        touched.setdefault(op, []).append(storage)
    for op, phase in enumerate(phases):
        if phase != Phase.OPTIMIZER:
            continue
        storages = touched.get(op, [])
        whose = {int(owner[s]) for s in storages if owner[s] >= 0}
        if not whose:
            of_nobody.update(storages)
        elif len(whose) == 1:
            mine = whose.pop()
            for s in storages:
                if owner[s] < 0:
                    owner[s] = mine
        else:
            _of_lists(owner, list(dict.fromkeys(storages)), of_nobody)
    return owner


def _of_lists(owner: I32, storages: list[int], of_nobody: set[int]) -> None:
    """Of an op that takes lists (a fused or foreach step): what is at one place in each of them belongs to one parameter.

    Args:
        owner: Of each storage; changed in place.
        storages: That the op touches, each once, in the order of its arguments.
        of_nobody: Storages that ops without a parameter have touched: what counts steps.
    """
    first: list[int] = owner[storages].tolist()
    seen, count = set[int](), len(first)
    for n, each in enumerate(first):
        if each < 0 or each in seen:
            count = n
            break
        seen.add(each)
    if count < 2:
        return
    for place, s in enumerate(storages[: len(storages) // count * count]):
        mine = first[place % count]
        if owner[s] >= 0 and owner[s] != mine:
            return  # no lists of one length
    for place, s in enumerate(storages[: len(storages) // count * count]):
        if owner[s] < 0 and s not in of_nobody:
            owner[s] = first[place % count]
