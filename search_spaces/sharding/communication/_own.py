"""What the techniques have in common that put collectives of their own into FSDP2's units."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

from pydantic import Field

from memtune.message import Communication, Gathering
from memtune.passes.communicate import communicate as rewrite_collectives
from memtune.program import Program
from memtune.runtime.communication import communicate
from memtune.runtime.context import Context
from memtune.search_spaces.sharding.communication import _units
from memtune.technique import Exactness, Plan, Reason, Target, Technique

_MOST_NODES = 16
"""What came from each node is gathered by itself inside it: more of them would mostly pay latency."""


class _OwnCollectives(Technique):
    """Gathers and reductions in the way of `_how`, in place of FSDP2's."""

    slot: ClassVar[str] = "sharding.communication"
    among_copies: ClassVar[bool] = True

    ranks_per_node: Annotated[int, Field(ge=1)] | None = None
    """Consecutive ranks on a node; by default what the hardware has."""

    @abstractmethod
    def _how(self, ranks_per_node: int) -> Communication: ...

    def plan(self, program: Program, target: Target) -> Plan:
        """The size of a node."""
        return _units.planned(target, self.ranks_per_node)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """Other messages on the links, what packs and unpacks them, and the copies that nodes keep."""
        degree, per_node = _units.ranks_of(target, self.ranks_per_node)
        step = rewrite_collectives(program.step, self._how(per_node), degree, stages_messages=target.device == "cpu")
        return program.with_step(step)

    def apply(self, context: Context, plan: Plan) -> None:
        """Put the collectives into FSDP2's units."""
        communicate(context, self._how(_units.live_node_size(plan, self.ranks_per_node)))

    def explain(self, plan: Plan) -> tuple[str, ...]:
        """The size of a node."""
        size = plan.decisions.get("ranks_per_node")
        return () if size is None else (f"nodes of {size} ranks",)

    def record(self, target: Target) -> dict[str, Any]:
        """Which collectives are used, and over nodes of how many ranks."""
        return {"communication": asdict(self._how(_units.node_size(target, self.ranks_per_node)))}


class _ByNode(_OwnCollectives):
    """Gathers in the way of `_gather`; reductions are as they were."""

    exactness: ClassVar[Exactness] = Exactness.BITWISE
    _gather: ClassVar[Gathering]

    ranks_per_node: Annotated[int, Field(ge=2)] | None = None
    """Consecutive ranks on a node; by default what the hardware has."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs parameters that FSDP2 shards over several, not too many, nodes."""
        found = (
            _units.one_node(target, self.ranks_per_node)
            or _units.unsharded(target)
            or _units.uneven_nodes(_units.ranks_of(target, self.ranks_per_node))
        )
        if found is not None:
            return found
        degree, per_node = _units.ranks_of(target, self.ranks_per_node)
        if degree // per_node > _MOST_NODES:
            return Reason(f"{degree // per_node} nodes share a copy, more than {_MOST_NODES}", "a smaller sharding degree")
        return None

    def _how(self, ranks_per_node: int) -> Communication:
        return Communication(ranks_per_node, gather=self._gather)
