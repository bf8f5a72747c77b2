"""Base of the techniques that use memtune's own allocator."""

from __future__ import annotations

import abc
import os
from typing import ClassVar

from memtune.device import Capability
from memtune.memory import VARIABLE, ArenaSettings, arena
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.allocator import not_remapped
from memtune.technique import Exactness, Plan, Reason, Target, Technique

SEARCHED = "MEMTUNE_SEARCH_OWN_ALLOCATORS"
"""If set to 1, searches on GPUs include these techniques."""


class OwnAllocator(Technique):
    """Serves storages from memtune's own allocator (csrc/vmm), configured by `settings`."""

    exactness: ClassVar[Exactness] = Exactness.BITWISE

    @abc.abstractmethod
    def settings(self) -> ArenaSettings:
        """Return the knobs as the allocator takes them."""

    @property
    def needs(self) -> tuple[Capability, ...]:
        return (Capability.OWN_ALLOCATOR,)

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Refuse CPU, NCCL that registers torch's memory, and GPU searches that the user did not ask for."""
        # A config may name the technique in all these cases. CUDA graphs, which memtune never
        # captures, raise while the model trains; legacy IPC handles of this memory do not exist,
        # and torch raises if user code asks for one.
        if target.device == "cpu":
            return Reason(
                "a budget on CPU does not count malloc's fragmentation", "a config may still name it"
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
        return {VARIABLE: self.settings().text()}

    def apply(self, context: Context, plan: Plan) -> None:
        """Serve storages from the allocator from now on; its steps end with the optimizer's."""
        arena.use(context, self.settings())
