"""Audit: proof that every trainable parameter is updated, every claimed block is wrapped and bytes did
move.
"""

from __future__ import annotations

from typing import Any

from memtune.errors import ApplyError
from memtune.runtime import Context


def audit(context: Context) -> dict[str, Any]:
    """Return facts by axis.

    Raises:
        ApplyError: A trainable parameter is in no parameter group, a claimed block is not wrapped, or a
            technique's own check failed.
    """
    return {"parameters": _check_parameters(context), **audit_claims(context)}


def audit_claims(context: Context) -> dict[str, Any]:
    """Return the facts of the activation table and of the techniques' own checks, which raise ApplyError."""
    facts = {"activations": _activations(context)}
    for slot, check in context.checks.items():
        facts[slot] = check()
    return facts


def _check_parameters(context: Context) -> int:
    """Return the number of trainable parameters, all of which the optimizer holds, or copies of them."""
    held = {id(p) for group in context.optimizer.param_groups for p in group["params"]}
    held |= {id(device) for device in context.placement.optimizer_params}
    lost = [name for name, p in context.model.named_parameters() if p.requires_grad and id(p) not in held]
    if lost:
        raise ApplyError(
            f"{len(lost)} trainable parameters are in no parameter group and would never be updated.",
            evidence=f"First: {', '.join(lost[:3])}.",
            fix="build the optimizer from model.parameters() of this model, before memtune.apply",
            code="MT312",
        )
    return sum(p.requires_grad for p in context.model.parameters())


def _activations(context: Context) -> dict[str, Any]:
    table = context.activations
    claimed = [region for region in table.regions if region.recompute or region.move]
    for region in claimed:
        if "forward" not in vars(region.module):
            raise ApplyError(
                f"{region.name} should be recomputed or offloaded, but its forward is not wrapped.",
                code="MT313",
            )
    # Counted only after a forward: right after `apply` no block has run, which is no finding.
    recompute = {region.name for region in claimed if region.recompute}
    ran = table.traffic.forwards
    idle = sorted(recompute & ran - table.traffic.recomputed_regions)
    # A stage of a pipeline may have nothing to recompute where another one has.
    is_whole = context.placement.remote_parameters is None
    if ran and is_whole and len(idle) == len(recompute) and recompute:
        raise ApplyError(
            f"{len(idle)} blocks ran but nothing in them is recomputed.",
            evidence=f"First: {idle[0]}.",
            fix="recompute: {kind: none}; blocks that checkpoint themselves need no other recompute",
            code="MT313",
        )
    return {
        "recomputed_blocks": len(recompute),
        "moved_blocks": sum(region.move > 0 for region in claimed),
        "moved_bytes": table.traffic.moved_bytes,
    }
