"""Rows of a recording in the making: what a tracer writes down, and parts of it that are written again."""

from __future__ import annotations

from typing import NamedTuple

OpRow = tuple[str, int, int, int, int, float, int, int, int, int]
"""Name, module, block, phase, resource, FLOPs, traffic, whether it draws, ranks, autograd's number: the columns of an op."""


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
