"""Ranks and nodes of FSDP2's collectives, for techniques that change them."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import Field

from memtune import refusals
from memtune.runtime import node_topology
from memtune.search_spaces._support import conflict
from memtune.technique import Plan, Reason, Target, Technique


class NodesPlan(Plan):
    """Size of a node, if the config does not declare it."""

    ranks_per_node: Annotated[int, Field(ge=1)] | None = None
    """Consecutive ranks on a node; none if the knob has it."""


class Ranks(NamedTuple):
    """Ranks that share a copy of the model state, and the number of them on one node."""

    degree: int
    per_node: int


def node_size(target: Target, declared: int | None) -> int:
    """Return the consecutive ranks of `target` on one node, as declared or from the hardware."""
    return max(declared // target.parts, 1) if declared else target.hardware.local_ranks(target.ranks)


def ranks_of(target: Target, declared: int | None) -> Ranks:
    """Return the ranks that gather a unit, with the states sharded by `target.chosen`."""
    degree = int(target.chosen["sharding.states"].record(target)["states.shard"]["parameters"])
    return Ranks(degree, min(node_size(target, declared), degree))


def nodes_plan(target: Target, declared: int | None) -> NodesPlan:
    """Return the size of a node, if the config does not declare it."""
    return NodesPlan(ranks_per_node=None if declared else _all_of_a_node(target, None))


def live_node_size(plan: NodesPlan, declared: int | None) -> int:
    """Return the consecutive ranks on one node in training: as declared, planned, or from the launcher."""
    return declared or plan.ranks_per_node or node_topology.ranks_per_node()


def one_node(target: Target, declared: int | None) -> Reason | None:
    """Return why a technique for nodes is useless: one rank, one node, or groups that are no nodes."""
    if target.ranks < 2:
        return refusals.one_rank()
    size, node, parts = node_size(target, declared), _all_of_a_node(target, declared), target.parts
    if node % parts and parts % node:
        text = (
            f"groups of {parts} ranks, which share layers, are neither whole nodes of {node} nor parts of one"
        )
        return Reason(text, "another degree")
    if size >= target.ranks:
        return Reason(
            f"all {target.ranks} ranks share a node: there is no slow link to spare",
            "--nodes 2 and more, or ranks_per_node",
        )
    return None


def _all_of_a_node(target: Target, declared: int | None) -> int:
    """Return the consecutive ranks on one node, including those with other parts of the model."""
    job = target.whole or target
    return declared or job.hardware.local_ranks(job.ranks)


def unsharded(technique: Technique, target: Target) -> Reason | None:
    """Return why parameters are not gathered unit by unit."""
    if target.ranks < 2:
        return refusals.one_rank()
    if (reason := conflict(technique, target, "sharding.states")) is not None:
        return reason
    if not isinstance(_gather(target)["again_in_backward"], bool):
        return Reason("backward already gathers in smaller groups", "reshard_after_forward: true")
    if "states.reduce" in target.chosen["sharding.states"].record(target):
        return Reason("gradients already travel in reduce_dtype", "leave reduce_dtype out")
    if "states.compute" in target.chosen["sharding.states"].record(target):
        return Reason("units are gathered in param_dtype", "leave param_dtype out")
    return None


def uneven_nodes(ranks: Ranks) -> Reason | None:
    """Return why the ranks that gather are one node, or no whole nodes of several ranks."""
    if ranks.degree <= ranks.per_node:
        return Reason(
            f"the {ranks.degree} ranks that share a copy are on one node",
            "a larger sharding degree, or ranks_per_node",
        )
    return refusals.uneven_nodes(ranks.degree, ranks.per_node)


def gathers_again(target: Target) -> bool:
    """Return whether units are gathered again in backward."""
    return bool(_gather(target).get("again_in_backward"))


def _gather(target: Target) -> dict[str, Any]:
    found: dict[str, Any] = target.chosen["sharding.states"].record(target)["states.gather"]
    return found
