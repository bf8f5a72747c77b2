"""What the techniques have in common that change the collectives of FSDP2's units: over which ranks, and on
which nodes.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import Field

from memtune.runtime import link_classes
from memtune.search_spaces._support import conflict
from memtune.technique import Plan, Reason, Target, Technique


class NodesPlan(Plan):
    """The size of a node, where the config does not declare it."""

    ranks_per_node: Annotated[int, Field(ge=1)] | None = None
    """Consecutive ranks on a node; none where the knob says it."""


class Ranks(NamedTuple):
    """Ranks that share a copy of the model state, and how many of them share a node."""

    degree: int
    per_node: int


def node_size(target: Target, declared: int | None) -> int:
    """Ranks of `target` on one node: as many consecutive ranks as declared, else the hardware's."""
    return max(declared // target.parts, 1) if declared else target.hardware.local_ranks(target.ranks)


def ranks_of(target: Target, declared: int | None) -> Ranks:
    """The ranks that gather a unit, where the states are sharded by `target.chosen`."""
    degree = int(target.chosen["sharding.states"].record(target)["states.shard"]["parameters"])
    return Ranks(degree, min(node_size(target, declared), degree))


def planned(target: Target, declared: int | None) -> NodesPlan:
    """The size of a node, where the config does not declare it."""
    return NodesPlan(ranks_per_node=None if declared else _all_of_a_node(target, None))


def live_node_size(plan: NodesPlan, declared: int | None) -> int:
    """Consecutive ranks on one node of a training that runs: as declared, as planned, or as its
    starter says.
    """
    return declared or plan.ranks_per_node or link_classes.ranks_per_node()


def one_node(target: Target, declared: int | None) -> Reason | None:
    """Why not, where there are no two nodes; nothing else is looked at."""
    if target.ranks < 2:
        return Reason("there is only one rank", "--gpus or --workers 2 and more")
    size, node, parts = node_size(target, declared), _all_of_a_node(target, declared), target.parts
    if node % parts and parts % node:
        text = f"groups of {parts} ranks, which share layers, are no whole nodes of {node} or parts of one"
        return Reason(text, "another degree")
    if size >= target.ranks:
        return Reason(
            f"all {target.ranks} ranks share a node: there is no slow link to spare",
            "--nodes 2 and more, or ranks_per_node",
        )
    return None


def _all_of_a_node(target: Target, declared: int | None) -> int:
    """Consecutive ranks on one node, with those that hold other parts of the model."""
    everyone = target.whole or target
    return declared or everyone.hardware.local_ranks(everyone.ranks)


def unsharded(technique: Technique, target: Target) -> Reason | None:
    """Why not, where no parameters are gathered unit by unit."""
    if target.ranks < 2:
        return Reason("there is only one rank", "--gpus or --workers 2 and more")
    if (reason := conflict(technique, target, "sharding.states")) is not None:
        return reason
    if not isinstance(_gather(target)["again_in_backward"], bool):
        return Reason("backward gathers in groups of its own already", "reshard_after_forward: true")
    if "states.reduce" in target.chosen["sharding.states"].record(target):
        return Reason("gradients travel in a type of their own already", "leave reduce_dtype out")
    return None


def uneven_nodes(ranks: Ranks) -> Reason | None:
    """Why not, where the ranks that gather are one node or no whole nodes."""
    if ranks.degree <= ranks.per_node:
        return Reason(
            f"the {ranks.degree} ranks that share a copy are on one node",
            "a larger sharding degree, or ranks_per_node",
        )
    if ranks.degree % ranks.per_node:
        return Reason(
            f"nodes of {ranks.per_node} ranks do not divide the {ranks.degree} ranks that share a copy",
            "ranks_per_node or a sharding degree of whole nodes",
        )
    if ranks.per_node == 1:
        return Reason(
            "every node has one rank: there is no fast link to use instead", "sharding.communication: none"
        )
    return None


def gathers_again(target: Target) -> bool:
    """Whether units are gathered again in backward."""
    return bool(_gather(target).get("again_in_backward"))


def _gather(target: Target) -> dict[str, Any]:
    found: dict[str, Any] = target.chosen["sharding.states"].record(target)["states.gather"]
    return found
