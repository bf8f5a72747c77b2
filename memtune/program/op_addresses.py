"""Calls of ops by address, as plans name them: the name, and how many of that name came before in the same
block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memtune.program.step import I32, I64, Step

OpAddress = tuple[str, int]
"""An op by name, and how many of that name its region had called before."""

INPUTS: OpAddress = ("inputs", 0)
"""What a region was called with, where calls name tensors that move."""

SHAPE_ALONE = frozenset(
    [f"aten.{name}_like.default" for name in ("empty", "zeros", "ones", "full", "rand", "randn")]
    + [f"aten.new_{name}.default" for name in ("empty", "empty_strided", "zeros", "ones", "full")]
    + ["aten.bernoulli.p"]
)
"""Ops that look at the shape of what they are given and not at its values: a dropout needs no activation for
its mask.
"""

EMPTY = frozenset(f"aten.{name}.default" for name in ("empty_like", "new_empty", "new_empty_strided"))
"""Of those, the ones in whose place a schedule may allocate without having the tensor."""
ALLOCATES = "aten.empty_strided.default"
"""What it runs for them."""

STAND_FOR_SEVERAL = {
    "aten._scaled_dot_product_attention_math.default": 0,
    "aten._scaled_dot_product_flash_attention.default": 5,
    "aten._cudnn_rnn.default": 0,
}
"""Ops of a translated step that may stand for several of the live model's, and how many storages they make
where they do not. Flash attention's stand for padding as well where they make more; what a recurrent layer
does about its weights is not known.
"""

BATCH_NORMS = frozenset(
    f"aten.{name}.default" for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
)
"""They update running statistics beside what they return: a second run leaves those out."""


@dataclass(frozen=True)
class OpAddresses:
    """Which calls of one region do not run again: for what ops' names alone cannot tell apart."""

    kept: frozenset[OpAddress] = frozenset()
    """Their outputs stay."""
    left_out: frozenset[OpAddress] = frozenset()
    """Nothing that runs again needs their outputs; what autograd saved of them, it keeps."""

    def to_plain(self) -> dict[str, dict[str, list[int]]]:
        """As plain data, for a plan."""
        return {"kept": by_name(self.kept), "left_out": by_name(self.left_out)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Mapping[str, list[int]]]) -> OpAddresses:
        """What `to_plain` gave."""
        return cls(from_names(plain["kept"]), from_names(plain["left_out"]))


def from_names(plain: Mapping[str, list[int]]) -> frozenset[OpAddress]:
    """What `by_name` was given."""
    return frozenset((name, int(i)) for name, at in plain.items() for i in at)


def by_name(calls: frozenset[OpAddress]) -> dict[str, list[int]]:
    """Calls as plain data."""
    found: dict[str, list[int]] = {}
    for name, i in sorted(calls):
        found.setdefault(name, []).append(i)
    return found


def calls_of(step: Step, ops: I32) -> list[tuple[int, int, OpAddress]]:
    """Row, block and address of each of `ops`: all forward ops of some blocks, ascending."""
    names, blocks = step.ops.name[ops].tolist(), step.ops.block[ops].tolist()
    rows = zip(ops.tolist(), blocks, names, nth_of_name(step, ops).tolist(), strict=True)
    return [(op, block, (step.names[name], i)) for op, block, name, i in rows]


def nth_of_name(step: Step, ops: I32) -> I64:
    """(k,) how many of `ops` before each are of the same name in the same block."""
    key = step.ops.block[ops].astype(np.int64) * len(step.names) + step.ops.name[ops]
    order = np.argsort(key, kind="stable")
    new = np.append(True, np.diff(key[order]) > 0)[: len(ops)]
    found = np.empty(len(ops), np.int64)
    found[order] = np.arange(len(ops)) - np.maximum.accumulate(np.where(new, np.arange(len(ops)), 0))
    return found
