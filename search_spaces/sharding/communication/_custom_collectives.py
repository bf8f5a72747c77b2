"""Base classes of techniques that install their own collectives in FSDP2's units."""

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
"""Most nodes per copy: each node's shards take a collective of their own, so more pay latency."""


class _CustomCollectives(Technique):
    """Replaces FSDP2's gathers and reductions with those of `_communication`."""

    plan_types: ClassVar[tuple[type[Plan], ...]] = (_node_groups.NodesPlan,)
    effects: ClassVar[Effects] = Effects(among_copies=True)

    ranks_per_node: Annotated[int, Field(ge=1)] | None = None
    """Consecutive ranks on a node. Default: from the hardware."""

    @abstractmethod
    def _communication(self, ranks_per_node: int) -> Communication: ...

    def plan(self, program: Program, target: Target) -> _node_groups.NodesPlan:
        return _node_groups.nodes_plan(target, self.ranks_per_node)

    def rewrite(self, program: Program, plan: _node_groups.NodesPlan, target: Target) -> Program:
        """Replace messages on links and the ops that pack and unpack them; add the copies that nodes keep."""
        degree, per_node = _node_groups.ranks_of(target, self.ranks_per_node)
        step = rewrite_collectives(
            program.step, self._communication(per_node), degree, stages_messages=target.device == "cpu"
        )
        return program.with_step(step)

    def apply(self, context: Context, plan: _node_groups.NodesPlan) -> None:
        """Install the collectives in FSDP2's units."""
        install_collectives(
            context, self._communication(_node_groups.live_node_size(plan, self.ranks_per_node))
        )

    def explain(self, plan: _node_groups.NodesPlan) -> tuple[str, ...]:
        size = plan.ranks_per_node
        return () if size is None else (f"nodes of {size} ranks",)

    def record(self, target: Target) -> dict[str, Any]:
        return {
            "communication": asdict(self._communication(_node_groups.node_size(target, self.ranks_per_node)))
        }


class _GathersByNode(_CustomCollectives):
    """Replaces gathers with those of `_gather`; reductions are unchanged."""

    exactness: ClassVar[Exactness] = Exactness.BITWISE
    _gather: ClassVar[Gathering]

    ranks_per_node: Annotated[int, Field(ge=2)] | None = None
    """Consecutive ranks on a node. Default: from the hardware."""

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require parameters that FSDP2 shards over several nodes, but not too many."""
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

    def _communication(self, ranks_per_node: int) -> Communication:
        return Communication(ranks_per_node, gather=self._gather)
