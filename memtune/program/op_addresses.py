"""Addresses of op calls in plans: the op name, and the number of its earlier calls in the block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memtune.program.step import I32, I64, Step

OpAddress = tuple[str, int]
"""An op name, and the number of earlier calls of that name in its region."""

INPUTS: OpAddress = ("inputs", 0)
"""Address of a region's inputs, where addresses name tensors to offload."""

SHAPE_ALONE = frozenset(
    [f"aten.{name}_like.default" for name in ("empty", "zeros", "ones", "full", "rand", "randn")]
    + [f"aten.new_{name}.default" for name in ("empty", "empty_strided", "zeros", "ones", "full")]
    + ["aten.bernoulli.p"]
)
"""Ops that read the shape of their input but not its values, such as the mask of a dropout."""

EMPTY = frozenset(f"aten.{name}.default" for name in ("empty_like", "new_empty", "new_empty_strided"))
"""Those of `SHAPE_ALONE` that a schedule may replace by a plain allocation, without the input."""
ALLOCATES = "aten.empty_strided.default"
"""The op that a schedule runs instead of them."""

MERGED_OPS = {
    "aten._scaled_dot_product_attention_math.default": 0,
    "aten._scaled_dot_product_flash_attention.default": 5,
    "aten._cudnn_rnn.default": 0,
}
"""Ops of a translated step that may merge several ops of the live model → number of outputs if they do not.

Flash attention with more outputs includes the padding of its inputs. Recurrent layers (0) may repack their
weights, which is unknown.
"""

BATCH_NORMS = frozenset(
    f"aten.{name}.default" for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
)
"""Ops that update running statistics in place; recomputing them must skip that update."""


@dataclass(frozen=True)
class OpAddresses:
    """Op calls of one region that are not recomputed, by address because op names are ambiguous."""

    kept: frozenset[OpAddress] = frozenset()
    """Calls whose outputs are kept."""
    skipped: frozenset[OpAddress] = frozenset()
    """Calls whose outputs no recomputed op needs; autograd keeps what it saved of them."""

    def to_plain(self) -> dict[str, dict[str, list[int]]]:
        """Return plain data, for a plan."""
        return {"kept": by_name(self.kept), "skipped": by_name(self.skipped)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Mapping[str, list[int]]]) -> OpAddresses:
        """Return the addresses that `to_plain` serialized."""
        return cls(from_names(plain["kept"]), from_names(plain["skipped"]))


def from_names(plain: Mapping[str, list[int]]) -> frozenset[OpAddress]:
    """Return the calls that `by_name` serialized."""
    return frozenset((name, int(i)) for name, at in plain.items() for i in at)


def by_name(calls: frozenset[OpAddress]) -> dict[str, list[int]]:
    """Return calls as plain data: op name → numbers."""
    found: dict[str, list[int]] = {}
    for name, i in sorted(calls):
        found.setdefault(name, []).append(i)
    return found


def calls_of(step: Step, ops: I32) -> list[tuple[int, int, OpAddress]]:
    """Return row, block and address of each of `ops`: all forward ops of some blocks, ascending."""
    names, blocks = step.ops.name[ops].tolist(), step.ops.block[ops].tolist()
    rows = zip(ops.tolist(), blocks, names, nth_of_name(step, ops).tolist(), strict=True)
    return [(op, block, (step.names[name], i)) for op, block, name, i in rows]


def nth_of_name(step: Step, ops: I32) -> I64:
    """Return (k,) the number of earlier ops in `ops` with the same name and block."""
    key = step.ops.block[ops].astype(np.int64) * len(step.names) + step.ops.name[ops]
    order = np.argsort(key, kind="stable")  # stable: equal keys keep program order
    new = np.append(True, np.diff(key[order]) > 0)[: len(ops)]
    found = np.empty(len(ops), np.int64)
    found[order] = np.arange(len(ops)) - np.maximum.accumulate(np.where(new, np.arange(len(ops)), 0))
    return found
