"""Inputs of the online runtime, and the budget that it needs."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from memtune.activations.eviction import (
    Costs,
    OnlineSettings,
    Policy,
    RuntimeCosts,
    least_budget_bytes,
    online_policy,
    peak_within,
    scratch_name,
)
from memtune.activations.schedules import Region, region_of
from memtune.hardware import Hardware
from memtune.memory import RealOutputs
from memtune.program import Kind, Step, Tier
from memtune.search_spaces._plan_fields import Bytes
from memtune.technique import Reason
from memtune.units import format_bytes


class OnlinePlan(BaseModel):
    """Inputs of the online runtime: the budget, bytes that it does not see, rates of an op's cost."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    budget_bytes: Bytes
    """Limit for all bytes on the device."""
    peak_bytes: Bytes
    """Largest live bytes on the device while model and backward run; 0 if no run stays within the budget."""
    reserve_bytes: Bytes
    """Bytes that are live between forward and backward."""
    external_bytes: Bytes
    """Bytes that are live when the model's forward begins and do not belong to the model."""
    scratch: dict[str, Bytes]
    """Op, or op with the bytes that it reads → bytes of its workspace."""
    rnn_reserve: dict[str, Bytes]
    """Op with the bytes that it reads → bytes that a recurrent layer saves for backward."""
    flops_per_s: Annotated[float, Field(gt=0)]
    bytes_per_s: Annotated[float, Field(gt=0)]
    launch_s: Annotated[float, Field(ge=0)]


def online_plan_fields(step: Step, hardware: Hardware, buffer_bytes: int = 0) -> dict[str, Any]:
    """Return the bytes unseen by the runtime, `buffer_bytes` included, and the rates of an op's cost."""
    region = _region(step)
    return {
        "reserve_bytes": max(region.between_bytes - int(region.background_bytes[0]), 0),
        "external_bytes": _unseen_bytes(step, region) + buffer_bytes,
        "scratch": _scratch(step, region),
        "rnn_reserve": _makes(step, region),
        "flops_per_s": hardware.matmul_flops_per_s("float32"),
        "bytes_per_s": hardware.memory_bytes_per_s,
        "launch_s": hardware.launch_s,
    }


@lru_cache(maxsize=32)
def online_peak_bytes(step: Step, policy: Policy, budget_bytes: int, hardware: Hardware) -> int | None:
    """Return the largest live device bytes of model and backward; None if they exceed `budget_bytes`."""
    return peak_within(
        step, _region(step), online_policy(policy), budget_bytes, _runtime_costs(step, hardware)
    )


def _runtime_costs(step: Step, hardware: Hardware) -> RuntimeCosts:
    region, plain = _region(step), online_plan_fields(step, hardware)
    costs = Costs(plain["flops_per_s"], plain["bytes_per_s"], plain["launch_s"])
    sizes = zip(
        step.ops.flops[region.rows].tolist(), step.ops.traffic_bytes[region.rows].tolist(), strict=True
    )
    op_s = np.asarray([costs.seconds(n_flops, n_bytes) for n_flops, n_bytes in sizes])
    scratch = [plain["scratch"].get(name, 0) for name in _scratch_names(step, region)]
    return RuntimeCosts(op_s, plain["reserve_bytes"], np.asarray(scratch, np.int64))


def _scratch(step: Step, region: Region) -> dict[str, int]:
    """Return workspace bytes by op and bytes read, and each op's most, as `OpMetadataCache` looks up."""
    found: dict[str, int] = {}
    sizes = region.scratch_bytes.tolist()
    for name, size in zip(region.graph.names, sizes, strict=True):
        if size:
            found[name] = max(found.get(name, 0), size)
    for name, detailed, size in zip(region.graph.names, _scratch_names(step, region), sizes, strict=True):
        if name in found:
            found[detailed] = max(found.get(detailed, 0), size)
    return found


def _makes(step: Step, region: Region) -> dict[str, int]:
    """Return the bytes that recurrent layers save for backward, by bytes read: empty in a fake run."""
    found: dict[str, int] = {}
    for name, detailed, made, scratch in zip(
        region.graph.names,
        _scratch_names(step, region),
        region.graph.makes,
        region.scratch_bytes.tolist(),
        strict=True,
    ):
        if name in RealOutputs.OPS and scratch:
            found[detailed] = max(found.get(detailed, 0), int(region.bytes[list(made)].sum()))
    return found


def _scratch_names(step: Step, region: Region) -> list[str]:
    """Return the (n,) key of each op for `scratch`: its name with the bytes that it reads."""
    op_at = np.full(step.ops.n, -1, np.int32)
    op_at[region.rows] = np.arange(len(region.rows), dtype=np.int32)
    uses = np.flatnonzero(
        (op_at[step.uses.op] >= 0) & (step.storages.producer[step.uses.storage] != step.uses.op)
    )
    read: list[set[int]] = [set() for _ in region.rows]
    for op, storage in zip(op_at[step.uses.op[uses]].tolist(), step.uses.storage[uses].tolist(), strict=True):
        read[op].add(storage)
    return [
        scratch_name(name, step.storages.bytes[list(storages)].tolist())
        for name, storages in zip(region.graph.names, read, strict=True)
    ]


@lru_cache(maxsize=32)
def online_shortfall(
    step: Step, policy: Policy, budget_bytes: int, hardware: Hardware, more_bytes: int = 0
) -> Reason | None:
    """Return why deciding while the model runs exceeds `budget_bytes`, with a sufficient budget; a schedule
    made before may fit.

    Args:
        step: The step before the passes of other techniques.
        policy: Selects the victims.
        budget_bytes: Limit for all bytes on the device.
        hardware: Gives the rates of costs.
        more_bytes: Bytes that the later passes add outside the model's values.
    """
    least = sufficient_online_bytes(step, policy, budget_bytes, hardware, more_bytes)
    if least == budget_bytes:
        return None
    given = format_bytes(budget_bytes)
    why = (
        f"deciding while the model runs does not stay within {given}: the model itself holds too much"
        " meanwhile"
    )
    fix = (
        "recompute: {kind: planned}"
        if least is None
        else f"budget_bytes: {least}, or recompute: {{kind: planned}}"
    )
    return Reason(why if least is None else f"{why}; {format_bytes(least)} are enough", fix)


def sufficient_online_bytes(
    step: Step, policy: Policy, budget_bytes: int, hardware: Hardware, more_bytes: int = 0
) -> int | None:
    """Return `budget_bytes` if deciding online stays within it, else a larger budget, if one does."""
    if online_peak_bytes(step, policy, budget_bytes - more_bytes, hardware) is not None:
        return budget_bytes
    costs = _runtime_costs(step, hardware)
    least = least_budget_bytes(step, _region(step), online_policy(policy), budget_bytes - more_bytes, costs)
    return None if least is None else least + more_bytes


def _region(step: Step) -> Region:
    region = region_of(step)
    assert not isinstance(region, str)  # checked by `cannot_schedule_model`
    return region


def _unseen_bytes(step: Step, region: Region) -> int:
    """Return the bytes live when forward begins that are neither the model's nor its inputs, as labels."""
    kinds = (Kind.PARAMETER, Kind.BUFFER, Kind.GRADIENT, Kind.OPTIMIZER)
    is_live = (step.storages.producer < region.rows[0]) & (step.freed_after >= region.rows[0])
    # The runtime counts these itself, from the model and the optimizer.
    seen = np.isin(step.storages.kind, kinds)
    seen[step.uses.storage[np.isin(step.uses.op, region.rows)]] = True
    return int(step.storages.bytes[is_live & ~seen & (step.storages.tier == Tier.DEVICE)].sum())


def online_settings(plan: OnlinePlan, policy: Policy, freeze_after: int) -> OnlineSettings:
    """Return the settings of the runtime."""
    costs = Costs(plan.flops_per_s, plan.bytes_per_s, plan.launch_s)
    return OnlineSettings(
        policy,
        plan.budget_bytes,
        costs,
        plan.reserve_bytes,
        plan.scratch,
        plan.rnn_reserve,
        plan.external_bytes,
        freeze_after,
    )
