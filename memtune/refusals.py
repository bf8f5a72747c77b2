"""Refusals that a recording shows to the search and the live model to the runtime, one sentence each.

A technique's `fits` returns them as they are; the runtime raises `error_of` them.
"""

from __future__ import annotations

from memtune.errors import ApplyError
from memtune.technique import Reason


def error_of(reason: Reason, evidence: str = "") -> ApplyError:
    """Return `reason` as an error of `apply` or of a step, with what the live model showed."""
    first = reason.text.split()[0]
    text = reason.text if "." in first else reason.text[0].upper() + reason.text[1:]  # not the name of an op
    return ApplyError(f"{text}.", evidence=evidence, fix=reason.fix, code=reason.code)


def uneven_nodes(degree: int, per_node: int) -> Reason | None:
    """Return why collectives by node cannot divide the `degree` ranks that share a copy of the model."""
    if degree % per_node:
        return Reason(
            f"nodes of {per_node} ranks do not divide the {degree} ranks that share a copy of the model",
            "ranks_per_node: a divisor of the sharding degree",
            "MT342",
        )
    if per_node == 1:
        return Reason(
            "every node has one of the ranks that share a copy of the model: there is no fast link to use"
            " instead",
            "sharding.communication: {kind: none}",
            "MT342",
        )
    return None


def collective_runs_twice(op: object, block: str = "the blocks") -> Reason:
    """Return why a block with a collective cannot run again in backward."""
    return Reason(
        f"{op} runs inside {block}: a second run would exchange data between ranks again",
        "move it out of the block, or choose recompute: {kind: none}",
        "MT306",
    )


def one_graph() -> Reason:
    """Return why techniques that act on blocks do not work with `execution: {compile: model}`."""
    return Reason("one graph holds all blocks", "execution: {compile: blocks}")


def clipping_unnoticed_in_step(fix: str) -> Reason:
    """Return why gradients cannot be offloaded in backward if the smallest parameter has none."""
    return Reason(
        "the smallest parameter gets no gradient, so clipping by norm could not be noticed", fix, "MT364"
    )


def clipping_unnoticed_in_blocks() -> Reason:
    """Return why updates inside backward need a trained parameter outside of the blocks."""
    return Reason(
        "no parameter outside of the blocks is trained, so clipping by norm could not be noticed",
        "offload: {states: {kind: optimizer_cpu}}",
        "MT364",
    )


def no_experts() -> Reason:
    """Return why experts cannot be offloaded."""
    return Reason(
        "the model has no experts: modules of a block, in a list whose name has `experts`, all with equal"
        " parameters",
        "offload: {states: {kind: zero_infinity}}",
        "MT381",
    )


def several_stages(states: str) -> Reason:
    """Return why state sharding of kind `states` cannot reduce in each backward on interleaved stages."""
    return Reason(
        f"sharding.states: {states} needs one stage per rank",
        "schedule: 1f1b, or sharding: {states: {kind: zero1}}",
    )


def tied_stages(states: str, parameter: str) -> Reason:
    """Return why state sharding of kind `states` cannot reduce a parameter of two stages in each backward."""
    return Reason(
        f"sharding.states: {states}: the first and the last stage share {parameter}",
        "sharding: {states: {kind: zero1}}",
    )


def copies_follow_schedule(states: str) -> Reason:
    """Return why state sharding of kind `states` does not work with activation offload by stage."""
    return Reason(
        f"sharding.states: {states} does not work where copies follow the schedule",
        "offload.activations: {kind: copy_out}, or sharding: {states: {kind: zero1}}",
    )


def no_factors(problem: str) -> Reason:
    """Return why nested sharding cannot divide the ranks."""
    return Reason(problem, "factors that divide one another and the ranks", "MT345")
