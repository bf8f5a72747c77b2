"""What a search remembers of the programs it made: a tree of passes, of which what was longest unused is forgotten first.

Invariant: a node is used whenever one below it is. So it is never older than those, and a branch is forgotten from its tips.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

from memtune.program import Program
from memtune.technique import NO_PLAN, Plan, Reason, Technique

K = TypeVar("K", bound=Hashable)
Seen: TypeAlias = Mapping[str, Technique | None]
"""What was looked at of other slots, absent ones as None."""

MAX_ROWS = 1_000_000
"""Op rows of remembered programs, about 0.15 GB; where there are more, those that were used last and are half as many stay."""


@dataclass(eq=False)
class Node:
    """What a prefix of passes gave: a program, or why it does not fit.

    Passes that leave the very same program share the node, whatever they had planned: what comes next is the same.
    """

    result: Program | Reason
    n_rows: int = 0
    """Of the program, where it is not also the one of the node above."""
    used: int = 0
    """When it was last used, counted in walks from a root."""
    below: dict[int, list[Pass]] = field(default_factory=dict)
    """By the number of the technique that comes next; each holds wherever what was seen is the same."""
    made: dict[Hashable, list[Pass]] = field(default_factory=dict)
    """By slot and record of the technique that came next, with what its pass saw; its verdict may have seen more."""

    def after(self, slot: str, program: Program) -> Node | None:
        """The node of `program`, if some technique of `slot` that came next made it of this one."""
        known = (each for key, passes in self.made.items() if isinstance(key, tuple) and key[0] == slot for each in passes)
        return next((each.node for each in known if each.node.result == program), None)  # steps are equal where they are one


class Pass(NamedTuple):
    """One pass: what it looked at of other slots, what it planned, and where it leads."""

    seen: Seen
    node: Node
    plan: Plan = NO_PLAN


def found(known: list[Pass], chosen: Mapping[str, Technique]) -> Pass | None:
    """The one that holds with these techniques by slot."""
    for each in known:
        if not each.seen or all(_equal(chosen.get(slot), seen) for slot, seen in each.seen.items()):
            return each
    return None


def _equal(one: Technique | None, other: Technique | None) -> bool:
    """Whether both are the same setting; mostly they are the same object, and comparing models field by field is slow."""
    return one is other or one == other


class ProgramMemory:
    """The tree, by execution at its roots."""

    def __init__(self) -> None:
        self.roots: dict[Hashable, Node] = {}
        self._walks = 0
        self._n_rows = 0

    def begin(self) -> None:
        """A walk from a root begins; what is used in it is younger than all else."""
        if self._n_rows > MAX_ROWS:
            self._forget_older_than(self._half())
        self._walks += 1

    def use(self, node: Node) -> Node:
        """`node`, which is now in use."""
        node.used = self._walks
        return node

    def count(self, node: Node) -> Node:
        """`node`, which is new and is kept from now on."""
        self._n_rows += node.n_rows
        return node

    def forget(self) -> None:
        """Drop all."""
        self.roots.clear()
        self._n_rows = 0

    def _half(self) -> int:
        """The walk before which what was used is to go."""
        n_rows = 0
        for node in sorted(self._nodes(), key=lambda node: -node.used):
            n_rows += node.n_rows
            if n_rows > MAX_ROWS // 2:
                return node.used + 1
        return 0

    def _forget_older_than(self, walk: int) -> None:
        self.roots = {key: node for key, node in self.roots.items() if node.used >= walk}
        self._n_rows = 0
        for node in self._nodes():
            self._n_rows += node.n_rows
            node.below = _younger(node.below, walk)
            node.made = _younger(node.made, walk)

    def _nodes(self) -> Iterator[Node]:
        """All that are kept, each once and before those below it."""
        reached: set[int] = set()
        left = list(self.roots.values())
        while left:
            node = left.pop()
            if id(node) not in reached:
                reached.add(id(node))
                yield node
                left += [each for table in (node.below, node.made) for known in table.values() for _, each, _ in known]


def _younger(table: dict[K, list[Pass]], walk: int) -> dict[K, list[Pass]]:
    """What was used in `walk` or later, and every Reason: it holds no program, and may have taken long to find."""
    kept = {key: [each for each in known if each.node.used >= walk or not each.node.n_rows] for key, known in table.items()}
    return {key: known for key, known in kept.items() if known}
