"""Op times of a trial: duration by op class and size in a real step, in a few dozen rows."""

from __future__ import annotations

from collections.abc import Sequence

from memtune.hardware.op_clock import TimedOp
from memtune.hardware.op_time import OpTime, half_decade
from memtune.hardware.roofline import op_class


def op_times(
    observed: Sequence[TimedOp],
    step_s: float,
    *,
    update_s: float,
    ranks: int = 1,
    host_computes: bool = True,
    waiting: float = 0.0,
) -> list[OpTime]:
    """Return the op times of a step that takes `step_s` without the clock, grouped by class and size."""
    # The overhead of clock and dispatcher is about the time of the shortest op, which is subtracted
    # from each. If the host computes, the rest of the step is overhead of Python and autograd, spread
    # evenly over the ops, so that the rows add up to `step_s` without its fraction `waiting`.
    # `update_s` of it are the optimizer's, whose many small ops have none of autograd's overhead. If
    # the ops took longer than the step (the machine was busy), they are scaled down to it.
    if not observed or step_s <= 0:
        return []
    floor_s = min(each.seconds for each in observed) * 0.99  # nothing takes no time
    update_s = min(update_s, step_s)
    updates = [each for each in observed if each.is_update]
    others = [each for each in observed if not each.is_update]
    rows = []
    for ops, part_s in ((others, max(step_s * (1 - waiting) - update_s, 0.0)), (updates, update_s)):
        if ops and part_s > 0:
            rows += _rows(ops, part_s, floor_s, ranks, host_computes)
    return rows


def _rows(
    observed: Sequence[TimedOp], part_s: float, floor_s: float, ranks: int, host_computes: bool
) -> list[OpTime]:
    """Return the op times of a part of a step that takes `part_s`."""
    kernels_s = sum(each.seconds - floor_s for each in observed)
    # On a GPU the host issues ahead, so its overhead is `launch_s` and no part of the ops.
    host_s = max(part_s - kernels_s, 0.0) / len(observed) if host_computes else 0.0
    scale = min(1.0, part_s / kernels_s) if kernels_s > 0 else 1.0
    groups: dict[tuple[str, str, int, int], list[TimedOp]] = {}
    for each in observed:
        size = _bin(each.flops), _bin(each.traffic_bytes)
        kind = op_class(each.name, is_update=each.is_update)
        groups.setdefault((kind, each.dtype, *size), []).append(each)
    rows = []
    for (kind, dtype, *_), group in groups.items():
        count = len(group)
        seconds = sum(each.seconds - floor_s for each in group) / count * scale + host_s
        work, traffic = (
            sum(getattr(each, name) for each in group) / count for name in ("flops", "traffic_bytes")
        )
        if seconds > 0:
            row = OpTime(
                op_class=kind,
                dtype=dtype,
                flops=work,
                traffic_bytes=traffic,
                seconds=seconds,
                count=count,
                ranks=ranks,
            )
            rows.append(row)
    return rows


def _bin(value: float) -> int:
    return half_decade(value) if value >= 1 else -1
