"""Whether a schedule can run the ops of a region: they are the same for every batch, as far as a recorded step tells."""

from __future__ import annotations

import numpy as np

from memtune.calls import STAND_FOR_SEVERAL
from memtune.passes.region import Region
from memtune.program import OWN_GENERATOR, WRITES, Step

_SIZES = frozenset(f"aten.{name}" for name in (
    "nonzero.default", "masked_select.default", "_unique2.default", "unique_dim.default", "unique_consecutive.default",
    "bincount.default",
))  # fmt: skip
"""The size of what they return depends on values."""
_LOOKED_AT = frozenset(f"aten.{name}" for name in ("all.default", "all.dim", "any.default", "any.dim"))
"""Code asks for them to decide what to do next."""
_NUMBER = "aten._local_scalar_dense.default"


def not_foreseen(step: Step, region: Region) -> str:
    """Why no schedule of `region` can be made before it runs, '' where one can: data decide, an op has a generator, lazy values.

    Nor where an op of a translated step is several on CUDA. A schedule's ops draw from torch's own generators, whose states it
    knows; which one a model will hand over, it does not.
    """
    odd = depends_on_data(step, region)
    if odd:
        return f"{odd} runs in the model: what follows it depends on the data"
    if step.lazy_values:
        return "an op is given values that torch conjugates as they are read (complex numbers), which no schedule does"
    several = stands_for_several(region)
    if several:
        return f"{several} stands for several ops on CUDA, which are not known before the model runs there"
    given = region.rows[step.op_rng[region.rows] == OWN_GENERATOR]
    if not np.size(given):
        return ""
    return f"{step.names[step.op_name[given[0]]]} in the model is given a generator, and a schedule draws from torch's own alone"


def stands_for_several(region: Region) -> str:
    """Name of the first op of `region` in whose place the live model runs several, '' for none."""
    if not STAND_FOR_SEVERAL.keys() & set(region.graph.names):
        return ""
    pairs = zip(region.graph.names, region.graph.makes, strict=True)
    return next((name for name, made in pairs if STAND_FOR_SEVERAL.get(name, len(made)) != len(made)), "")


def depends_on_data(step: Step, region: Region) -> str:
    """Name of the first op of `region` by which code learns something of its data, '' for none.

    A number that code asks for (`.item()`) is a read-out, no op: that one is named `aten._local_scalar_dense.default`.

    What follows from constants alone is no data: a mask made from positions, say.
    """
    names = region.graph.names
    if not (_SIZES | _LOOKED_AT) & set(names) and not step.looked_at.size:
        return ""
    constant = _from_constants(step)
    for name, row in zip(names, region.rows.tolist(), strict=True):
        if name in _SIZES or (name in _LOOKED_AT and not constant[row]):
            return name
    for storage in step.looked_at[step.looked_at >= 0].tolist():
        row = int(step.producer[storage])
        writes = step.use_op[(step.use_storage == storage) & (step.use_mutates == WRITES)].tolist()
        if row < 0 or not all(constant[each] for each in (row, *writes)):
            return _NUMBER
    return ""


def _from_constants(step: Step) -> list[bool]:
    """(n,) whether what an op makes follows from constants, drawing nothing."""
    constant = [True] * step.n_ops
    varies = [int(row) < 0 for row in step.producer]  # storages that were there before the step, or follow from one
    made: list[list[int]] = [[] for _ in constant]
    for storage, row in enumerate(step.producer.tolist()):
        if row >= 0:
            made[row].append(storage)
    read: list[list[int]] = [[] for _ in constant]
    written: list[list[int]] = [[] for _ in constant]
    for row, storage, mutates in zip(step.use_op.tolist(), step.use_storage.tolist(), step.use_mutates.tolist(), strict=True):
        (written if mutates else read)[row].append(storage)
    for row in range(step.n_ops):
        constant[row] = not step.op_rng[row] and not any(varies[storage] for storage in (*read[row], *written[row]))
        if not constant[row]:
            for storage in (*made[row], *written[row]):
                varies[storage] = True
    return constant
