"""What a program will need and take on some hardware, predicted without running it; the counting itself is native code."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from memtune import _native
from memtune.autotune.allocator_model import AllocatorSettings, event_stream, replay
from memtune.autotune.exposure import RESOURCES, OpTime, critical_path, exposed_by_op
from memtune.autotune.page_locked import held_bytes
from memtune.hardware import Hardware
from memtune.op_costs import op_costs
from memtune.program import Kind, Phase, Program, Resource, Step, Tier
from memtune.traffic import REPEATED, traffic_bytes
from memtune.units import MIB, format_bytes, format_seconds

Level = Literal["coarse", "events"]

KINDS = {
    **{Kind.PARAMETER: "parameters", Kind.GRADIENT: "gradients", Kind.OPTIMIZER: "optimizer", Kind.BUFFER: "buffers"},
    **{Kind.BATCH: "batch", Kind.TEMPORARY: "temporaries", Kind.WORKSPACE: "workspace", Kind.COMMUNICATION: "communication"},
}
ACTIVATIONS = "activations"
"""Temporaries that autograd saved for backward."""

# Half-widths without any trial behind them. Peaks: what the recorder cannot see (kernel workspaces), and on CUDA what differs
# from the CPU recording. Times: a roofline with table rates is seldom off by more than these factors.
UNCALIBRATED_PEAK = (0.85, 1.15)
UNCALIBRATED_STEP = (0.4, 2.5)

# On a CPU these are all work of the same cores.
_ON_CORES = [Resource.COMPUTE, Resource.HOST_THREADS, Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST]
_ON_GPU = [Resource.COMPUTE]
_IS_REPEATED = np.isin(np.arange(len(Phase)), REPEATED)

# PyTorch's caching allocator: requests up to 1 MiB come from segments of 2 MiB, larger ones from a pool of their own.
_SMALL_BYTES = MIB
_SEGMENT_BYTES = 2 * MIB
_ALLOCATOR_STEPS = 3
"""The first one, in which the optimizer state appears, one on what it left behind, and one more that shows whether it holds."""


class Interval(NamedTuple):
    """Where the truth is expected; `peak_low_bytes` is what pruning may rely on."""

    peak_low_bytes: int
    peak_high_bytes: int
    step_low_s: float
    step_high_s: float


@dataclass(frozen=True)
class Prediction:
    """What `simulate` says of one candidate; bytes are per rank, of the heaviest rank class."""

    level: Level
    step_s: float
    """One optimizer step, all micro-batches, of the slowest rank class."""
    samples_per_s: float
    """Over all ranks, each training on a micro-batch of its own."""
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    host_peak_bytes: int
    ssd_peak_bytes: int
    busy_s: dict[str, float]
    """By resource, `host_issue` among them, for one optimizer step; resources that are not used are left out."""
    exposed_s: dict[str, float]
    """Of `busy_s`, not hidden behind compute; at the coarse level as much as cannot be."""
    peak_by_kind: dict[str, int]
    """Device bytes at the peak; they sum up to `peak_allocated_bytes`."""
    peak_op: str
    """Name of the first op at the peak, empty for a step without ops."""
    peak_module: str
    interval: Interval
    calibrated: bool
    step_correction: float = 1.0
    """Factor that trials have put on `step_s`; the seconds of single ops and resources are without it."""
    communicator_bytes: int = 0
    """Device bytes that communicators hold outside PyTorch's allocator; in no peak."""
    exposed_by_op: tuple[OpTime, ...] = ()
    """What compute waits for longest, of the slowest rank class; empty at the coarse level."""
    critical_path: tuple[OpTime, ...] = ()
    """The longest parts of the chain of ops that decides `step_s`; empty at the coarse level."""
    critical_s: dict[str, float] = field(default_factory=dict)
    """All of that chain by resource; without `step_correction` it sums up to `step_s`."""
    ssd_written_bytes: int = 0
    """In one optimizer step, all micro-batches; drives wear."""

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {**asdict(self), "interval": self.interval._asdict()}

    def __str__(self) -> str:
        """Peak and step time with their interval, and the word "uncalibrated" where no trial is behind it."""
        low, high, fast, slow = self.interval
        return (
            f"peak {format_bytes(self.peak_allocated_bytes)} ({format_bytes(low)} to {format_bytes(high)}), "
            f"step {format_seconds(self.step_s)} ({format_seconds(fast)} to {format_seconds(slow)})"
            f"{'' if self.calibrated else ', uncalibrated'}"
        )


@dataclass(frozen=True)
class Calibration:
    """What finished trials say of the model: measured over predicted, one ratio each."""

    peak_ratios: tuple[float, ...] = ()
    step_ratios: tuple[float, ...] = ()

    ENOUGH = 3
    """Trials from which an interval of their own is made."""
    LEVEL = 0.9
    """Share of trials that the interval is meant to hold."""

    def add(self, prediction: Prediction, measured_peak_bytes: int | None, measured_step_s: float | None) -> Calibration:
        """This calibration with one more trial; what was not measured (an out-of-memory trial has no time) is None."""
        peaks, steps = self.peak_ratios, self.step_ratios
        if measured_peak_bytes and prediction.peak_allocated_bytes:
            peaks += (measured_peak_bytes / prediction.peak_allocated_bytes,)
        if measured_step_s and prediction.step_s:
            steps += (measured_step_s * prediction.step_correction / prediction.step_s,)
        return Calibration(peaks, steps)

    @property
    def step_correction(self) -> float:
        """Median of measured over predicted step time, 1 without trials."""
        return statistics.median(self.step_ratios) if self.step_ratios else 1.0

    def peak_range(self) -> tuple[float, float]:
        """Factors on the predicted peak between which the truth is expected; the prediction itself is always inside."""
        low, high = _conformal(self.peak_ratios, floor=0.005) or UNCALIBRATED_PEAK
        return min(low, 1.0), max(high, 1.0)

    def step_range(self) -> tuple[float, float]:
        """Factors on the corrected step time between which the truth is expected."""
        found = _conformal([ratio / self.step_correction for ratio in self.step_ratios], floor=0.02)
        return found or UNCALIBRATED_STEP

    @property
    def is_calibrated(self) -> bool:
        """Whether there are enough trials for both intervals."""
        return min(len(self.peak_ratios), len(self.step_ratios)) >= self.ENOUGH


def _conformal(ratios: Iterable[float], *, floor: float) -> tuple[float, float] | None:
    """Median ± the split-conformal quantile of the logarithmic residuals, None with too few of them.

    Where there are too few residuals for the level asked, the largest one is doubled in place of the quantile that is not there.
    """
    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < Calibration.ENOUGH:
        return None
    centre = statistics.median(logs)
    scores = sorted(abs(each - centre) for each in logs)
    rank = math.ceil((len(scores) + 1) * Calibration.LEVEL)
    width = max(scores[rank - 1] if rank <= len(scores) else 2 * scores[-1], floor)
    return math.exp(centre - width), math.exp(centre + width)


def simulate(
    program: Program,
    hardware: Hardware,
    *,
    level: Level = "coarse",
    calibration: Calibration | None = None,
    allocator: AllocatorSettings | None = None,
    as_held: bool = True,
) -> Prediction:
    """Predict peak memory and step time of `program` on `hardware`.

    `coarse` counts live bytes, and of time what `events` never undercuts: the longest way through what ops wait for, or the
    busiest resource (`csrc/simulator/least.h`). `events` runs all rank classes together, op by op (`csrc/simulator/machine.h`
    has the rules), and counts bytes as it goes: a transfer that is late keeps its source alive unless somebody waits for it.
    The peak is the heaviest rank class's, the time the slowest one's. Beside a GPU
    page-locked host memory counts as it is held (`page_locked`); without `as_held`, which saves a millisecond, as it is used.

    Peak reserved on CUDA: at the events level, under the settings of an `allocator`, its replay of several steps that nothing
    presses; else small and large requests each keep the segments of their own peak, since cached blocks never change pools, and
    fragmentation within a pool is not modelled. On CPU reserved is allocated, but for memtune's own allocator, which is replayed.

    Raises:
        ValueError: A column of a step is broken.
    """
    runs = _coarse(program, hardware, as_held) if level == "coarse" else _events(program, hardware)
    beside = [run.live for run in runs] if level == "coarse" else _beside_the_device(program, hardware, runs)
    heaviest = max(runs, key=lambda run: run.live.peak_bytes[Tier.DEVICE])
    slowest = max(runs, key=lambda run: run.time.step_s)
    calibration = calibration or Calibration()
    step_s = slowest.time.step_s * calibration.step_correction
    reserved = _reserved_bytes(heaviest, hardware, allocator if level == "events" else None)
    peak = heaviest.live.peak_bytes[Tier.DEVICE]
    op = heaviest.live.peak_op[Tier.DEVICE]
    step = heaviest.step
    by_kind = dict(zip((*KINDS.values(), ACTIVATIONS), heaviest.live.bytes_by_kind, strict=True))
    return Prediction(
        level=level,
        step_s=step_s,
        samples_per_s=program.samples / step_s if step_s else 0.0,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        host_peak_bytes=max(live.peak_bytes[Tier.HOST] for live in beside),
        ssd_peak_bytes=max(live.peak_bytes[Tier.SSD] for live in beside),
        busy_s=_named(slowest.time.busy_s, slowest.time.busy_s),
        exposed_s=_named(slowest.time.exposed_s, slowest.time.busy_s),
        peak_by_kind={kind: n_bytes for kind, n_bytes in by_kind.items() if n_bytes},
        peak_op=step.names[step.op_name[op]] if op >= 0 else "",
        peak_module=step.modules[step.op_module[op]] if op >= 0 else "",
        interval=_interval(peak, reserved, slowest.time, calibration),
        calibrated=calibration.is_calibrated,
        step_correction=calibration.step_correction,
        communicator_bytes=_communicators(step) * hardware.communicator_bytes,
        exposed_by_op=slowest.exposed_by_op,
        critical_path=slowest.critical_path,
        critical_s=slowest.critical_s,
        ssd_written_bytes=max(_ssd_written_bytes(run.step, program.accumulate) for run in runs),
    )


def _ssd_written_bytes(step: Step, accumulate: int) -> int:
    writes = step.op_resource == Resource.SSD_WRITE
    if not writes.any():
        return 0
    return int(traffic_bytes(step, accumulate)[writes].sum())


class _Time(NamedTuple):
    step_s: float
    low_s: float
    high_s: float
    busy_s: list[float]
    exposed_s: list[float]


class _Run(NamedTuple):
    step: Step
    live: _native.Footprint
    time: _Time
    exposed_by_op: tuple[OpTime, ...] = ()
    critical_path: tuple[OpTime, ...] = ()
    critical_s: dict[str, float] = {}  # noqa: RUF012


def _columns(step: Step, hardware: Hardware, ranks: int, as_held: bool = True) -> _native.StepColumns:
    costs, n_bytes = op_costs(step, hardware, ranks=ranks), held_bytes(step, hardware) if as_held else step.bytes
    return _native.StepColumns(
        op_phase=step.op_phase, op_resource=step.op_resource, op_s=costs.op_s, op_issue_s=costs.issue_s,
        bytes=n_bytes, tier=step.tier, kind=step.kind, producer=step.producer, held_until=step.held_until,
        use_op=step.use_op, use_storage=step.use_storage, use_mutates=step.use_mutates,
        save_storage=step.save_storage, save_until=step.save_until,
        op_stream=step.op_stream, op_prefetch=step.op_prefetch, op_match=step.op_match,
    )  # fmt: skip


def _coarse(program: Program, hardware: Hardware, as_held: bool) -> list[_Run]:
    columns = [_columns(each.step, hardware, program.ranks, as_held) for each in program.rank_classes]
    on_cpu, stand = hardware.device == "cpu", places(program, hardware)
    least = _native.least_s(columns, stand, accumulate=program.accumulate, host_computes=on_cpu, shares_cores=on_cpu)
    runs = []
    for each, mine, (_, sharing), least_s in zip(program.rank_classes, columns, stand, least, strict=True):
        live = _native.live(mine, rounding_bytes=hardware.allocation_rounding_bytes, small_bytes=_SMALL_BYTES)
        crossing = _on_roots(each.step, hardware, program.ranks)
        runs.append(_Run(each.step, live, _coarse_time(live, least_s, program, hardware, sharing, crossing)))
    return runs


def _events(program: Program, hardware: Hardware) -> list[_Run]:
    steps = [each.step for each in program.rank_classes]
    timeline = _native.schedule(
        [_columns(step, hardware, program.ranks) for step in steps],
        places(program, hardware),
        accumulate=program.accumulate,
        host_computes=hardware.device == "cpu",
        link_slowdown=hardware.link_slowdown,
        rounding_bytes=hardware.allocation_rounding_bytes,
        small_bytes=_SMALL_BYTES,
        copies_in_turn=program.copies_in_turn,
        shares_cores=hardware.device == "cpu",
        link_of_root=_link_of_root(hardware),
    )
    path, by_resource = critical_path(steps, timeline)
    runs = []
    for step, found in zip(steps, timeline.classes, strict=True):
        at = found.finish_s + _waits(program, step, hardware)
        time = _Time(at, at, at, list(found.busy_s), list(found.exposed_s))
        runs.append(_Run(step, found, time, exposed_by_op(step, found.op_exposed_s), path, by_resource))
    return runs


def _beside_the_device(program: Program, hardware: Hardware, runs: list[_Run]) -> list[_native.Footprint]:
    """What says how much of host and SSD is taken: on a GPU program order.

    The host runs ahead of the device, and counts what it asks for there as it issues ops. For memory of its own it waits: it
    reads into a buffer, or updates from one, when the transfer before is over (`runtime.transfer.wait`), so it never has more
    at once than program order says.
    """
    if hardware.device == "cpu":
        return [run.live for run in runs]
    rounding = hardware.allocation_rounding_bytes
    return [
        _native.live(_columns(run.step, hardware, program.ranks), rounding_bytes=rounding, small_bytes=_SMALL_BYTES)
        for run in runs
    ]


def _link_of_root(hardware: Hardware) -> tuple[float, float]:
    """The most of a PCIe root, to the device and to the host, that a device's link takes; 0 where it has a way of its own."""
    if not hardware.links_through_host:
        return 0.0, 0.0
    link = hardware.intra_link_bytes_per_s
    return min(1.0, link / hardware.host_to_device_bytes_per_s), min(1.0, link / hardware.device_to_host_bytes_per_s)


def _on_roots(step: Step, hardware: Hardware, ranks: int) -> npt.NDArray[np.float64]:
    """(phases, 2) seconds of a PCIe root, to the device and to the host, that ops of links take from copies."""
    shares = _link_of_root(hardware)
    if not any(shares):
        return np.zeros((len(Phase), 2))
    device = step.tier == Tier.DEVICE
    uses_device = np.zeros(step.n_ops, bool)
    uses_device[step.use_op[device[step.use_storage]]] = True
    uses_device[step.producer[device & (step.producer >= 0)]] = True
    mine = np.flatnonzero(uses_device & (step.op_resource == Resource.INTRA_LINK))
    seconds = np.bincount(step.op_phase[mine], op_costs(step, hardware, ranks=ranks).op_s[mine], len(Phase))
    found: npt.NDArray[np.float64] = np.outer(seconds, shares)
    return found


def _waits(program: Program, step: Step, hardware: Hardware) -> float:
    """Seconds that a rank of a pipeline waits for its neighbours in one optimizer step."""
    if not program.idle:
        return 0.0
    body = np.isin(step.op_phase, REPEATED) & (step.op_resource == Resource.COMPUTE)
    return program.accumulate * program.idle * float(op_costs(step, hardware, ranks=program.ranks).op_s[body].sum())


def places(program: Program, hardware: Hardware) -> list[tuple[int, int]]:
    """For each rank class a PCIe root and how many of its ranks are behind it.

    A class that fills a root is judged by such a one, any other by its first rank's. Ranks of a class that does not name them are
    neighbours, after those of the classes before. On CPU `op_costs` shares out the machine.
    """
    per_root = hardware.gpus_per_pcie_root
    if hardware.device == "cpu":
        return [(number, 1) for number in range(len(program.rank_classes))]
    found, first = [], 0
    for each in program.rank_classes:
        if each.ranks:
            behind = Counter(rank // per_root for rank in each.ranks)
            root = next((root for root, count in behind.items() if count == per_root), each.ranks[0] // per_root)
            found.append((root, behind[root]))
            continue
        filled = -(-first // per_root)
        if (filled + 1) * per_root <= first + each.count:
            found.append((filled, per_root))
        else:
            found.append((first // per_root, min(each.count, per_root - first % per_root)))
        first += each.count
    return found


def _communicators(step: Step) -> int:
    """Groups of ranks that talk to each other, told apart by their size and link."""
    talk = np.flatnonzero(step.op_group > 1)
    return len(set(zip(step.op_group[talk].tolist(), step.op_resource[talk].tolist(), strict=True)))


def _coarse_time(
    live: _native.Live, least_s: float, program: Program, hardware: Hardware, sharing: int, crossing: npt.NDArray[np.float64]
) -> _Time:
    """What the dependencies of ops allow (`least_s`), and no less than what its resources are busy; at most all of that in turn.

    A pipeline waits besides, while forward and backward would run. A PCIe root is a resource as well: for copies of one
    direction, and for what links send over it (`crossing`, as `_on_roots` has it). So are cores that compute shares with others,
    and compute with the part that a link takes of it while it is busy.
    """
    times = np.where(_IS_REPEATED, program.accumulate, 1)
    by_phase = np.array(live.busy_s) * times
    for copies in (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST):
        by_phase[copies] *= sharing
    busy = by_phase.sum(1)
    through = sharing * (crossing * times[:, None]).sum(0)
    up, down = busy[Resource.HOST_TO_DEVICE], busy[Resource.DEVICE_TO_HOST]
    link = max(busy[Resource.INTRA_LINK], busy[Resource.INTER_LINK])
    compute = busy[Resource.COMPUTE] + link * hardware.link_slowdown / (1 + hardware.link_slowdown)
    on_cores = _ON_CORES if hardware.device == "cpu" else _ON_GPU
    waits = program.idle * float(by_phase[Resource.COMPUTE][_IS_REPEATED].sum())
    low = waits + max(least_s, *map(float, (busy.max(), busy[on_cores].sum(), compute, up + through[0], down + through[1])))
    exposed = np.maximum(busy - busy[Resource.COMPUTE], 0.0)
    exposed[on_cores] = busy[on_cores]
    return _Time(low, low, waits + float(busy.sum()), busy.tolist(), exposed.tolist())


def _interval(peak: int, reserved: int, time: _Time, calibration: Calibration) -> Interval:
    """The lower end of the peak is of allocated bytes, which no allocator can undercut; the upper end of reserved ones."""
    low, high = calibration.peak_range()
    fast, slow = (factor * calibration.step_correction for factor in calibration.step_range())
    # With trials behind it the correction already holds how much is hidden.
    longest = time.step_s if calibration.is_calibrated else time.high_s
    return Interval(math.floor(peak * low), math.ceil(reserved * high), time.low_s * fast, longest * slow)


def _reserved_bytes(run: _Run, hardware: Hardware, allocator: AllocatorSettings | None) -> int:
    if hardware.device == "cpu" and (allocator is None or allocator.arena is None):
        return run.live.peak_bytes[Tier.DEVICE]
    if allocator is not None:
        return replay(event_stream(run.step, _ALLOCATOR_STEPS), allocator, None).peak_reserved_bytes
    return sum(-(-peak // _SEGMENT_BYTES) * _SEGMENT_BYTES for peak in run.live.pool_peak_bytes)


def _named(values: Iterable[float], busy: Iterable[float]) -> dict[str, float]:
    return {name: seconds for name, seconds, used in zip(RESOURCES, values, busy, strict=True) if used > 0}
