"""What the techniques that bring memtune's own allocator have in common."""

from __future__ import annotations

import abc
import os
from typing import ClassVar

from memtune.memory import VARIABLE, ArenaSettings, arena
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.allocator import not_remapped
from memtune.technique import Exactness, Plan, Reason, Target, Technique

SEARCHED = "MEMTUNE_SEARCH_OWN_ALLOCATORS"
"""Set to 1, searches on GPUs try these techniques, too."""


class OwnAllocator(Technique):
    """Storages come from memtune's own allocator (csrc/vmm); `settings` say how it serves them."""

    slot: ClassVar[str] = "allocator"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    @abc.abstractmethod
    def settings(self) -> ArenaSettings:
        """The knobs as the allocator takes them."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Not searched on CPU; on GPUs only where the user asks for it, and where NCCL does not register its
        memory.

        A config may name it on both. CUDA graphs, which memtune never captures, end with a message while the
        model trains; legacy IPC handles of its memory cannot be had, and torch raises where user code asks
        for one.
        """
        if target.device == "cpu":
            return Reason(
                "malloc loses nothing to fragmentation that a budget on CPU counts",
                "a config may still name it",
            )
        if (reason := not_remapped(target)) is not None:
            return reason
        if os.environ.get(SEARCHED) != "1":
            why = "memtune's own allocator has not been measured on a GPU yet"
            return Reason(
                why,
                f"{SEARCHED}=1 plans and searches with it; trial and apply take it from a config as it is",
            )
        return None

    def env(self) -> dict[str, str]:
        """Which allocator, with which knobs; read by the simulator, and by whoever starts the process."""
        return {VARIABLE: self.settings().text()}

    def apply(self, context: Context, plan: Plan) -> None:
        """Storages come from the allocator from now on; steps end where the optimizer's do."""
        arena.use(context, self.settings())
