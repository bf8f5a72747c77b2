"""Simulate an eviction policy on the recorded step, and run the schedule that it makes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from memtune.activations.eviction import HostLink, Policy, PolicySchedule, Trace, freeze, region_trace
from memtune.activations.schedules import ScheduledRegion, elements_of, region_of
from memtune.hardware import Hardware, op_class, op_costs
from memtune.parallel.ranks import require_whole_parameters
from memtune.program import Schedule, Step
from memtune.runtime import Context
from memtune.search_spaces.recompute._schedule_planner.block_schedules import require_schedule_ran
from memtune.search_spaces.recompute._schedule_planner.region_placement import Placement

FitsOnline = Callable[[Placement, Policy, int], bool]
"""Return whether the runtime can use a policy within a budget when it decides while the model runs."""


@lru_cache(maxsize=32)
def solve_policy(
    place: Placement,
    options: tuple[Policy, ...],
    budget_bytes: int,
    fits_online: FitsOnline | None = None,
    below_s: float = math.inf,
) -> PolicySchedule | None:
    """Return the cheapest schedule of `options` within `budget_bytes` that recomputes for less than
    `below_s`, None if there is none; cached by all arguments.

    With `fits_online` the policy decides online, and an option that it refuses is taken only if all others
    fail too.
    """
    online = fits_online is not None
    # Where nothing is written in place, both traces are the same, and so are their plays.
    alternatives = (False, True) if any(place.region.graph.writes) else (False,)
    traces = [partial(_trace, place.step, place.hardware, online, each) for each in alternatives]

    def accepts(policy: Policy) -> bool:
        return fits_online is None or len(options) == 1 or fits_online(place, policy, budget_bytes)

    hardware = place.hardware
    link = HostLink(
        1 / hardware.device_to_host_bytes_per_s,
        1 / hardware.host_to_device_bytes_per_s,
        hardware.launch_s,
        hides_copies=hardware.device != "cpu",
    )
    # Decisions while the model runs do not swap, so the schedule that predicts them does not either.
    hopeless = () if link.hides_copies else ("hidden",)
    return freeze(
        place.region_after_passes,
        traces,
        [each for each in options if each.swap == "never" or not (online or each.swap in hopeless)],
        budget_bytes,
        place.peak_bytes,
        accepts,
        below_s,
        None if online else link,
    )


_EXPENSIVE = frozenset({"attention", "convolution", "recurrent", "matmul"})


def _is_cheap(name: str) -> bool:
    """Return True if ops of this name take little time to recompute."""
    return op_class(name) not in _EXPENSIVE


@lru_cache(maxsize=16)
def _trace(step: Step, hardware: Hardware, online: bool, keep_written: bool) -> Trace:
    """Return the trace that policies are simulated on; equal for all policies and budgets."""
    region = region_of(step)
    assert not isinstance(region, str)  # checked by `cannot_schedule_model`
    op_s = op_costs(step, hardware).op_s[region.rows]
    return region_trace(
        region, op_s, _is_cheap, elements_of(step, region), keep_written=keep_written, online=online
    )


def install_region(context: Context, schedule: Schedule, kind: str) -> ScheduledRegion:
    """Replace the model's forward by the executor of `schedule`, for the technique `kind`."""
    region = ScheduledRegion(context.model, schedule, context.device)
    region.install()
    context.events.states_sharded.subscribe(
        partial(require_whole_parameters, context, f"recompute: {{kind: {kind}}}")
    )
    return region


def check_schedule(region: ScheduledRegion) -> dict[str, Any]:
    """Return facts for the audit: runs by the schedule, and runs of the plain model instead.

    Raises:
        ApplyError: The schedule never ran, or another component replaced the executor.
    """
    require_schedule_ran(region, "the model", "selective")
    runs = region.runs
    return {"frozen_runs": runs.frozen, "plain_runs": runs.plain, "why_plain": runs.why_plain}
