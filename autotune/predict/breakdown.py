"""Break down a step: time into exposed ops and critical path, peak bytes into kinds and modules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memtune import _native
from memtune.program import F64, Kind, Phase, Resource, Step, Tier
from memtune.units import format_bytes, format_seconds

RESOURCES = (*(each.name.lower() for each in Resource), "host_issue")
TOP = 10
"""Number of ops that a prediction lists."""
OUTSIDE = "(outside)"
"""Storages of no module: the batch, the loss, messages between ranks."""
_NAMES = {
    **{
        Kind.PARAMETER: "weights",
        Kind.GRADIENT: "gradients",
        Kind.OPTIMIZER: "optimizer",
        Kind.BUFFER: "buffers",
    },
    **{Kind.WORKSPACE: "workspace", Kind.COMMUNICATION: "communication"},
}


@dataclass(frozen=True)
class OpTime:
    """All runs of one op of one module in an optimizer step."""

    op: str
    module: str
    resource: str
    seconds: float


def exposed_by_op(step: Step, op_exposed_s: F64) -> tuple[OpTime, ...]:
    """Return at most `TOP` ops that compute waits for longest, by the seconds in which it is idle."""
    ops = np.flatnonzero(op_exposed_s > 0)
    return _largest(_seconds_by_op(step, ops, step.ops.resource[ops].astype(np.int64), op_exposed_s[ops]))


RECOMPUTE, OPTIMIZER = "recompute", "optimizer"
"""Mechanisms whose seconds are part of the resource `compute`."""


class CriticalPath(NamedTuple):
    """The chain of ops that determines the time of a step."""

    longest: tuple[OpTime, ...]
    """At most `TOP` parts."""
    by_resource: dict[str, float]
    """Seconds by resource."""
    by_mechanism: dict[str, float]
    """The same seconds, those of `compute` divided into the model's own, recomputation and optimizer."""


def critical_path(steps: list[Step], timeline: _native.Timeline) -> CriticalPath:
    """Return the critical path of a simulated step."""
    rank_class, op, by_host, start_s, stop_s = timeline.critical_path
    seconds = stop_s - start_s
    found: dict[tuple[str, str, str], float] = {}
    part = {RECOMPUTE: 0.0, OPTIMIZER: 0.0}
    for number, step in enumerate(steps):
        mine = np.flatnonzero(rank_class == number)
        if len(mine):
            ops = op[mine]
            # The time to issue an op counts for the host, not for the resource that the op waits for.
            resource = np.where(by_host[mine] == 1, len(RESOURCES) - 1, step.ops.resource[ops])
            for row, total in _seconds_by_op(step, ops, resource, seconds[mine]).items():
                found[row] = found.get(row, 0.0) + total
            for name, phase in ((RECOMPUTE, Phase.RECOMPUTE), (OPTIMIZER, Phase.OPTIMIZER)):
                computes = (resource == Resource.COMPUTE) & (step.ops.phase[ops] == phase)
                part[name] += float(seconds[mine][computes].sum())
    by_resource: dict[str, float] = {}
    for (_, _, name), total in found.items():
        by_resource[name] = by_resource.get(name, 0.0) + total
    return CriticalPath(
        _largest(found),
        dict(sorted(by_resource.items(), key=lambda item: -item[1])),
        by_mechanism(by_resource, part),
    )


def by_mechanism(by_resource: Mapping[str, float], parts_of_compute: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by resource, with those of `compute` divided into the given parts and the rest."""
    compute = RESOURCES[Resource.COMPUTE]
    rest = by_resource.get(compute, 0.0) - sum(parts_of_compute.values())
    found = {**by_resource, compute: rest, **parts_of_compute}
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def time_lines(prediction: Mapping[str, Any]) -> list[str]:
    """Return a prediction's critical path, five longest exposed ops and SSD writes, as text."""
    # Predictions of the coarse level have neither path nor exposed ops. SSD writes are listed because
    # drives wear.
    critical, waits = prediction.get("critical_s") or {}, prediction.get("exposed_by_op") or ()
    total = sum(critical.values())
    lines = []
    if total:
        shares = " · ".join(
            f"{name} {seconds / total:.0%}" for name, seconds in critical.items() if seconds / total >= 0.005
        )
        lines.append(f"critical path: {shares}")
    for each in waits[:5]:
        place = f" in {each['module']}" if each["module"] else ""
        lines.append(
            f"not hidden: {format_seconds(each['seconds'])} of {each['op']}{place} ({each['resource']})"
        )
    if written := prediction.get("ssd_written_bytes"):
        lines.append(f"written to SSD: {format_bytes(written)} a step and rank")
    return lines


def _seconds_by_op(
    step: Step, ops: npt.NDArray[Any], resource: npt.NDArray[Any], seconds: F64
) -> dict[tuple[str, str, str], float]:
    """Return seconds by op name, module and resource."""
    # One integer for the three columns: `unique` of rows takes many times as long.
    key = (step.ops.name[ops].astype(np.int64) * len(step.modules) + step.ops.module[ops]) * len(
        RESOURCES
    ) + resource
    keys, at = np.unique(key, return_inverse=True)
    rows: dict[tuple[str, str, str], float] = {}
    for each, total in zip(keys.tolist(), np.bincount(at, seconds, len(keys)).tolist(), strict=True):
        rest, used = divmod(each, len(RESOURCES))
        name, module = divmod(rest, len(step.modules))
        rows[step.names[name], step.modules[module], RESOURCES[used]] = total
    return rows


def _largest(rows: dict[tuple[str, str, str], float]) -> tuple[OpTime, ...]:
    return tuple(
        OpTime(*row, seconds) for row, seconds in sorted(rows.items(), key=lambda item: -item[1])[:TOP]
    )


@dataclass(frozen=True)
class PeakRow:
    """Bytes at the peak of one module and kind."""

    module: str
    """Qualified name, numbers of repeated blocks as `*`; '' for the model itself."""
    kind: str
    """weights, gradients, optimizer, buffers, workspace, communication, activations or temporaries."""
    n_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return all fields."""
        return {"module": self.module, "kind": self.kind, "bytes": self.n_bytes}


def at_peak(step: Step) -> tuple[PeakRow, ...]:
    """Return the device bytes at the first op at the peak, largest row first.

    They add up to `step.peak_bytes()`.
    """
    if not step.ops.n:
        return ()
    op = int(step.live_bytes().argmax())
    live = (
        (np.maximum(step.storages.producer, 0) <= op)
        & (step.freed_after >= op)
        & (step.storages.tier == Tier.DEVICE)
    )
    kept = step.kept_for_backward()
    rows: Counter[tuple[str, str]] = Counter()
    for storage in np.flatnonzero(live).tolist():
        rows[folded(_module(step, storage)), kind_of(step, storage, bool(kept[storage]))] += int(
            step.storages.bytes[storage]
        )
    found = [PeakRow(module, kind, n_bytes) for (module, kind), n_bytes in rows.items() if n_bytes]
    return tuple(sorted(found, key=lambda row: (-row.n_bytes, row.module, row.kind)))


def folded(module: str) -> str:
    """Return `module` with numbers replaced by `*`, as in `h.*.mlp`, so that repeated blocks share a name."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def kind_of(step: Step, storage: int, kept: bool) -> str:
    """Return the name of a storage's kind; `kept` is its entry of `Step.kept_for_backward`."""
    return _NAMES.get(Kind(step.storages.kind[storage]), "activations" if kept else "temporaries")


def _module(step: Step, storage: int) -> str:
    owner, producer = int(step.storages.owner[storage]), int(step.storages.producer[storage])
    if owner >= 0:
        return step.parameters[owner].name.rpartition(".")[0]
    return step.modules[step.ops.module[producer]] if producer >= 0 else OUTSIDE
