"""A region of the activation table: a block, and what techniques have claimed for what its forward saves."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Generator, nn

from memtune.calls import Call
from memtune.runtime.kept import Keep
from memtune.runtime.look import Compared
from memtune.runtime.random_state import NoteGenerators, RandomState


@dataclass
class Region:
    """One block and what has been claimed for what its forward saves."""

    name: str
    module: nn.Module
    index: int
    recompute: bool = False
    keep: Keep | None = None
    """Which ops' outputs a recomputed region keeps; None keeps none and needs no dispatch mode."""
    move: float = 0.0
    """Fraction of the claimable bytes that goes to the host."""
    min_bytes: int = 0
    """Smaller tensors are never moved."""
    only: frozenset[Call] | None = None
    """Calls whose outputs may move, `INPUTS` for what the region is called with; None: all that is claimable."""
    watched: bool = False
    """Its first run was looked through for collectives and generators."""
    generators: list[Generator] = field(default_factory=list)
    """Of the user's own, from which its forward may draw: those that are known from its first run on."""
    draws: bool = False
    """An op of its first run drew random numbers, or a later run did."""
    looked_at: int = -1
    """Number of the saved tensor that backward asked for last of its latest run: whose values are compared in the next one."""
    compared: Compared | None = None
    """Of its latest second run, where nobody waited for the device."""
    reads_back: frozenset[str] | None = None
    """Buffers that its forward changes and may read, as far as its runs have shown; None before the first one."""
    ssd: bool = False
    """What moves goes on from the host to SSD."""

    def random_state(self) -> RandomState:
        """What a run starts with; a pass counts it where the region is known to draw."""
        return (RandomState.kept if self.draws else RandomState.capture)(self.module, self.generators)

    def needed(self, state: RandomState | None, noted: NoteGenerators | None) -> RandomState | None:
        """`state`, with which a run started that is over now, or None: no second run will draw from it.

        An op may draw and put back where it drew from (`fork_rng`). The generators do not tell that; the first run does, `noted`.
        """
        if state is not None and not self.draws:
            self.draws = (noted is not None and noted.draws) or not state.is_now(self.module)
        return state if self.draws else None


@dataclass
class Traffic:
    """What the table has done so far, for the audit."""

    forwards: set[str] = field(default_factory=set)
    """Names of the claimed regions that ran."""
    recomputed_regions: set[str] = field(default_factory=set)
    moved_bytes: int = 0
