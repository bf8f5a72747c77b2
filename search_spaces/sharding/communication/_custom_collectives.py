"""What the techniques have in common that put collectives of their own into FSDP2's units."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

from pydantic import Field

from memtune.effects import Effects
from memtune.parallel.collectives import Communication, Gathering, install_collectives, rewrite_collectives
from memtune.program import Program
from memtune.runtime import Context
from memtune.search_spaces.sharding.communication import _node_groups
from memtune.technique import Exactness, Plan, Reason, Target, Technique

_MOST_NODES = 16
"""What came from each node is gathered by itself inside it: more of them would mostly pay latency."""


class _OwnCollectives(Technique):
    """Gathers and reductions in the way of `_how`, in place of FSDP2's."""

    slot: ClassVar[str] = "sharding.communication"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (_node_groups.NodesPlan,)
    effects: ClassVar[Effects] = Effects(among_copies=True)

    ranks_per_node: Annotated[int, Field(ge=1)] | None = None
    """Consecutive ranks on a node; by default what the hardware has."""

    @abstractmethod
    def _how(self, ranks_per_node: int) -> Communication: ...

    def plan(self, program: Program, target: Target) -> _node_groups.NodesPlan:
        """The size of a node."""
        return _node_groups.planned(target, self.ranks_per_node)

    def rewrite(self, program: Program, plan: _node_groups.NodesPlan, target: Target) -> Program:
        """Other messages on the links, what packs and unpacks them, and the copies that nodes keep."""
        degree, per_node = _node_groups.ranks_of(target, self.ranks_per_node)
        step = rewrite_collectives(
            program.step, self._how(per_node), degree, stages_messages=target.device == "cpu"
        )
        return program.with_step(step)

    def apply(self, context: Context, plan: _node_groups.NodesPlan) -> None:
        """Put the collectives into FSDP2's units."""
        install_collectives(context, self._how(_node_groups.live_node_size(plan, self.ranks_per_node)))

    def explain(self, plan: _node_groups.NodesPlan) -> tuple[str, ...]:
        """The size of a node."""
        size = plan.ranks_per_node
        return () if size is None else (f"nodes of {size} ranks",)

    def record(self, target: Target) -> dict[str, Any]:
        """Which collectives are used, and over nodes of how many ranks."""
        return {"communication": asdict(self._how(_node_groups.node_size(target, self.ranks_per_node)))}


class _ByNode(_OwnCollectives):
    """Gathers in the way of `_gather`; reductions are as they were."""

    exactness: ClassVar[Exactness] = Exactness.BITWISE
    _gather: ClassVar[Gathering]

    ranks_per_node: Annotated[int, Field(ge=2)] | None = None
    """Consecutive ranks on a node; by default what the hardware has."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs parameters that FSDP2 shards over several, not too many, nodes."""
        found = (
            _node_groups.one_node(target, self.ranks_per_node)
            or _node_groups.unsharded(self, target)
            or _node_groups.uneven_nodes(_node_groups.ranks_of(target, self.ranks_per_node))
        )
        if found is not None:
            return found
        degree, per_node = _node_groups.ranks_of(target, self.ranks_per_node)
        if degree // per_node > _MOST_NODES:
            return Reason(
                f"{degree // per_node} nodes share a copy, more than {_MOST_NODES}",
                "a smaller sharding degree",
            )
        return None

    def _how(self, ranks_per_node: int) -> Communication:
        return Communication(ranks_per_node, gather=self._gather)
