"""Rows of a recording in the making: what a tracer writes down, and parts of it that are written again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memtune.program import I32

OpRow = tuple[str, int, int, int, int, float, int, int, int, int]
"""Name, module, call of a block, phase, resource, FLOPs, traffic, whether it draws, ranks, autograd's number: an op's columns."""


class Extent(NamedTuple):
    """How many rows there are of each sort."""

    ops: int
    storages: int
    uses: int


class Made(NamedTuple):
    """A storage that an op made, and the op after which it was let go."""

    storage: int
    op: int
    size_bytes: int
    tier: int
    kind: int
    until: int


class Rows(NamedTuple):
    """Part of a recording; ops are counted from its first one."""

    ops: list[OpRow]
    signatures: list[str]
    uses: list[tuple[int, int, int]]
    """Op, storage, whether it is written."""
    made: list[Made]


def op_columns(columns: Sequence[Sequence[Any]], names: Mapping[str, int], call_number: I32) -> dict[str, Any]:
    """The columns of a Step's ops from those of their rows; `call_number` says what the rows' calls are called there."""
    n_ops = len(columns[0])
    return {
        "op_name": np.asarray([names[name] for name in columns[0]], np.int32),
        "op_module": np.asarray(columns[1], np.int32),
        "op_call": call_number[np.asarray(columns[2], np.int32)],
        "op_phase": np.asarray(columns[3], np.uint8),
        "op_resource": np.asarray(columns[4], np.uint8),
        "op_flops": np.asarray(columns[5], np.float64),
        "op_traffic_bytes": np.asarray(columns[6], np.int64),
        "op_rng": np.asarray(columns[7], np.uint8),
        "op_group": np.asarray(columns[8], np.int32),
        "op_node": np.asarray(columns[9], np.int32),
        "op_copy_of": np.full(n_ops, -1, np.int32),
        "op_stream": np.zeros(n_ops, np.uint8),
        "op_prefetch": np.zeros(n_ops, np.uint8),
        "op_match": np.zeros(n_ops, np.int32),
    }
