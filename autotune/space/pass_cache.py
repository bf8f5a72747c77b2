"""Cache of the programs of a search: a tree of passes, whose programs are evicted least recently used first.

Invariants:

1. Using a node uses its ancestors. So a node is never older than its descendants, and the programs of a
  branch are evicted from its leaves.
2. Verdicts and plans remain, which may have taken seconds to find: a walk rewrites evicted programs by them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, TypeAlias

from memtune.program import Program
from memtune.technique import NO_PLAN, Plan, Reason, Technique

Seen: TypeAlias = Mapping[str, Technique | None]
"""Reads of other slots; None for absent ones."""

MAX_ROWS = 1_000_000
"""Limit on op rows of cached programs, about 0.15 GB; beyond it, the least recently used half is evicted."""


@dataclass(eq=False)
class Node:
    """Result of a prefix of passes: a program, or why it does not fit.

    Passes that return the identical program share the node, whatever their plans: the passes after it give
    the same.
    """

    held: Program | Reason | None
    """None: the program was evicted, until `ProgramCache.use`."""
    n_rows: int = 0
    """Of the program, unless it is that of the parent node."""
    used: int = 0
    """Time of last use, counted in walks from a root."""
    below: dict[int, list[Pass]] = field(default_factory=dict)
    """Children by number of the next technique; each is valid for the same reads of other slots."""
    made: dict[Hashable, list[Pass]] = field(default_factory=dict)
    """Children by slot and record of the next technique, with the reads of its pass; `fits` may read more."""

    @property
    def result(self) -> Program | Reason:
        """Return the result of a node in use."""
        assert self.held is not None
        return self.held

    def after(self, slot: str, program: Program) -> Node | None:
        """Return the child with `program`, if a technique of `slot` made it from this node."""
        known = (
            each
            for key, passes in self.made.items()
            if isinstance(key, tuple) and key[0] == slot
            for each in passes
        )
        return next(
            (
                each.node
                for each in known
                if isinstance(held := each.node.held, Program) and _same(held, program)
            ),
            None,
        )


def _same(one: Program, other: Program) -> bool:
    """Return whether two programs are equal; steps are where they are one object."""
    return one is other or all(getattr(one, name) == getattr(other, name) for name in _FIELDS)


_FIELDS = tuple(each.name for each in fields(Program))


class Pass(NamedTuple):
    """One pass: its reads of other slots, its plan, and the node it leads to."""

    seen: Seen
    node: Node
    plan: Plan = NO_PLAN


def find_pass(known: list[Pass], chosen: Mapping[str, Technique]) -> Pass | None:
    """Return the pass that is valid for these techniques by slot."""
    for each in known:
        if not each.seen or all(_equal(chosen.get(slot), seen) for slot, seen in each.seen.items()):
            return each
    return None


def _equal(one: Technique | None, other: Technique | None) -> bool:
    """Return whether both settings are equal."""
    # Mostly they are identical, and comparing models field by field is slow.
    return one is other or one == other


class ProgramCache:
    """The cache, with one tree per execution."""

    def __init__(self) -> None:
        self.roots: dict[Hashable, Node] = {}
        self._walks = 0
        self._n_rows = 0

    def begin(self) -> None:
        """Start a walk from a root; nodes used in it are the most recent."""
        if self._n_rows > MAX_ROWS:
            self._evict_older_than(self._half())
        self._walks += 1

    def use(self, node: Node, rewritten: Callable[[], Program | Reason]) -> Node:
        """Mark `node` as used; return it, with its program `rewritten` if that was evicted."""
        node.used = self._walks
        if node.held is None:
            node.held = rewritten()
            self.count(node)
        return node

    def count(self, node: Node) -> Node:
        """Count a new node; return it."""
        self._n_rows += node.n_rows
        return node

    def forget(self) -> None:
        """Drop everything."""
        self.roots.clear()
        self._n_rows = 0

    def _half(self) -> int:
        """Return the walk such that nodes used before it are to be evicted."""
        n_rows = 0
        for node in sorted(self._held(), key=lambda node: -node.used):
            n_rows += node.n_rows
            if n_rows > MAX_ROWS // 2:
                return node.used + 1
        return 0

    def _evict_older_than(self, walk: int) -> None:
        self._n_rows = 0
        for node in self._held():
            if node.used < walk:
                node.held = None
            else:
                self._n_rows += node.n_rows

    def _held(self) -> Iterator[Node]:
        """Yield the nodes with a program."""
        return (node for node in self._nodes() if isinstance(node.held, Program))

    def _nodes(self) -> Iterator[Node]:
        """Yield all nodes, each once and before its descendants."""
        reached: set[int] = set()
        left = list(self.roots.values())
        while left:
            node = left.pop()
            if id(node) not in reached:
                reached.add(id(node))
                yield node
                left += [
                    each
                    for table in (node.below, node.made)
                    for known in table.values()
                    for _, each, _ in known
                ]
