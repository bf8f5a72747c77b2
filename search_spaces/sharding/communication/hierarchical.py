"""Gathers between nodes first and inside them afterwards (MiCS)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from memtune.message import Communication
from memtune.passes.communicate import communicate as rewrite_collectives
from memtune.program import Program
from memtune.runtime.communication import communicate
from memtune.runtime.context import Context
from memtune.search_spaces.sharding.communication import _units
from memtune.technique import Exactness, Plan, Reason, Target, Technique

_MOST_NODES = 16
"""What came from each node is gathered by itself inside it: more of them would mostly pay latency."""


class Hierarchical(Technique):
    """Trades a buffer of 1/k of a unit for p - k instead of p - 1 of p shards on the link between nodes of k ranks.

    Ranks with the same place on their nodes gather from each other first, k rings side by side; then the ranks of a node gather,
    node by node, what each of them has got, straight into place. Reductions are as they were.

    Bitwise: bytes arrive as they were sent, wherever they went.

    Distinguishing test: of a unit of M bytes over p ranks, (p/k - 1)·M/p reach a rank between nodes and (k - 1)·M/k inside its
    own.
    """

    kind: Literal["hierarchical"] = "hierarchical"
    slot: ClassVar[str] = "sharding.communication"
    title: ClassVar[str] = "Gathers between nodes, then inside them"
    source: ClassVar[str] = "Zhang et al. 2022, MiCS, VLDB 16(1), arXiv:2205.00119, section 3.3"
    exactness: ClassVar[Exactness] = Exactness.BITWISE

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

    def plan(self, program: Program, target: Target) -> Plan:
        """The size of a node."""
        return _units.planned(target, self.ranks_per_node)

    def rewrite(self, program: Program, plan: Plan, target: Target) -> Program:
        """A gather between nodes and one per node inside, in place of every gather."""
        degree, per_node = _units.ranks_of(target, self.ranks_per_node)
        how = Communication(per_node, gather="hierarchical")
        return program.with_step(rewrite_collectives(program.step, how, degree, stages_messages=target.device == "cpu"))

    def apply(self, context: Context, plan: Plan) -> None:
        """Put the collectives into FSDP2's units."""
        communicate(context, Communication(_units.live_node_size(plan, self.ranks_per_node), gather="hierarchical"))

    def explain(self, plan: Plan) -> tuple[str, ...]:
        """The size of a node."""
        size = plan.decisions.get("ranks_per_node")
        return () if size is None else (f"nodes of {size} ranks",)

    def record(self, target: Target) -> dict[str, Any]:
        """Which collectives are used, and over nodes of how many ranks."""
        return {"communication": asdict(Communication(_units.node_size(target, self.ranks_per_node), gather="hierarchical"))}
