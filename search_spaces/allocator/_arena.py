"""What the techniques that bring memtune's own allocator have in common."""

from __future__ import annotations

import abc
from typing import ClassVar

from memtune.arena_settings import VARIABLE, ArenaSettings
from memtune.program import Program
from memtune.runtime import arena
from memtune.runtime.context import Context
from memtune.technique import Exactness, Plan, Reason, Target, Technique


class OwnAllocator(Technique):
    """Storages come from memtune's own allocator (csrc/vmm); `settings` say how it serves them."""

    slot: ClassVar[str] = "allocator"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

    @abc.abstractmethod
    def settings(self) -> ArenaSettings:
        """The knobs as the allocator takes them."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Not searched on CPU, where a config may name it all the same, and not on GPUs yet."""
        if target.device == "cpu":
            return Reason("malloc loses nothing to fragmentation that a budget on CPU counts", "a config may still name it")
        return Reason("memtune's own allocator has not been run on a GPU yet", "allocator: {kind: expandable_segments}")

    def env(self) -> dict[str, str]:
        """Which allocator, with which knobs; read by the simulator, and by whoever starts the process."""
        return {VARIABLE: self.settings().text()}

    def apply(self, context: Context, plan: Plan) -> None:
        """Storages come from the allocator from now on; steps end where the optimizer's do."""
        arena.use(context, self.settings())
