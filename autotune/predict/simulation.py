"""Predict peak memory and step time of a program on given hardware.

The counting is native code (`csrc/simulator`). One file: the coarse level and the level of events fill the
same `Prediction`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from memtune import _native
from memtune.autotune.predict.breakdown import (
    OPTIMIZER,
    RECOMPUTE,
    RESOURCES,
    CriticalPath,
    OpTime,
    by_mechanism,
    critical_path,
    exposed_by_op,
)
from memtune.autotune.predict.caching_allocator import AllocatorSettings, event_stream, replay
from memtune.autotune.predict.calibration import Calibration
from memtune.autotune.predict.prediction import Interval, Level, Prediction
from memtune.autotune.predict.python_work import NO_PYTHON, PythonWork, python_s
from memtune.device import Capability
from memtune.hardware import Hardware, op_costs
from memtune.program import (
    I64,
    REPEATED,
    Kind,
    Phase,
    Program,
    Resource,
    Step,
    Tier,
    columns_of,
    traffic_bytes,
)
from memtune.units import MIB

KINDS = {
    **{
        Kind.PARAMETER: "parameters",
        Kind.GRADIENT: "gradients",
        Kind.OPTIMIZER: "optimizer",
        Kind.BUFFER: "buffers",
    },
    **{
        Kind.BATCH: "batch",
        Kind.TEMPORARY: "temporaries",
        Kind.WORKSPACE: "workspace",
        Kind.COMMUNICATION: "communication",
    },
}
ACTIVATIONS = "activations"
"""Temporaries that autograd saves for backward."""
UNSPLIT = "unsplit"
"""Ends of blocks that torch's allocator does not split off; its counters have them as allocated."""

# On a CPU these are all work of the same cores.
_ON_CORES = [Resource.COMPUTE, Resource.HOST_THREADS, Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST]
_ON_GPU = [Resource.COMPUTE]
_LINK_CORES = 0.75
"""Cores that gloo uses while an all-reduce runs: CPU over wall time, 0.6 to 0.9 on a 2-core server."""
_IS_REPEATED = np.isin(np.arange(len(Phase)), REPEATED)

# PyTorch's caching allocator: requests up to 1 MiB come from segments of 2 MiB, larger ones from a pool of
# their own.
_SMALL_BYTES = MIB
_SEGMENT_BYTES = 2 * MIB
_ALLOCATOR_STEPS = 3
"""The first step allocates the state, one runs on the pools that it leaves, one confirms that."""


def simulate(
    program: Program,
    hardware: Hardware,
    *,
    level: Level = "coarse",
    calibration: Calibration | None = None,
    allocator: AllocatorSettings | None = None,
    as_held: bool = True,
    python: PythonWork = NO_PYTHON,
) -> Prediction:
    """Predict peak memory and step time of `program` on `hardware`.

    `coarse` counts live bytes, and a lower bound of the time of `events`: the longest path through the ops'
    dependencies, or the busiest resource (`csrc/simulator/least.h`). `events` runs all rank classes together,
    op by op (`csrc/simulator/machine.h` has the rules), and counts bytes meanwhile: a delayed transfer keeps
    its source alive unless an op waits for it. The peak is that of the rank class with the largest one, the
    time that of the slowest. With a GPU, pinned host memory counts as it is held (`held_bytes`); without
    `as_held`, which saves a millisecond, as it is used.

    Peak reserved on CUDA: at the events level, with the settings of an `allocator`, its replay of several
    steps without memory pressure; otherwise small and large requests each keep the segments of their own
    peak, since cached blocks never change pools, and fragmentation within a pool is not modelled. On CPU
    reserved equals allocated, except for memtune's own allocator, which is replayed. A replay of torch's own
    allocator also gives allocated bytes as torch counts them: blocks as large as they are, not as asked for.

    Raises:
        ValueError: A column of a step is malformed.
    """
    runs = (
        _coarse(program, hardware, as_held, python)
        if level == "coarse"
        else _events(program, hardware, python)
    )
    host_and_ssd = (
        [run.live for run in runs] if level == "coarse" else _host_and_ssd_runs(program, hardware, runs)
    )
    # The rank with most memory need not be the slowest one: a pipeline's first stage, say.
    heaviest = max(runs, key=lambda run: run.live.peak_bytes[Tier.DEVICE])
    slowest = max(runs, key=lambda run: run.time.step_s)
    calibration = calibration or Calibration()
    step_s = slowest.time.step_s * calibration.step_correction
    peak, reserved = _peak_bytes(heaviest, hardware, allocator if level == "events" else None)
    op = heaviest.live.peak_op[Tier.DEVICE]
    step = heaviest.step
    groups = _communicators(step)
    outside, outside_low, outside_high = _outside_bytes(step, groups, hardware)
    # Once trials have measured peaks, the calibrated range has the error of workspaces too.
    estimated = 0 if calibration.is_calibrated else _estimated_bytes(step)
    by_kind = dict(zip((*KINDS.values(), ACTIVATIONS), heaviest.live.bytes_by_kind, strict=True))
    spread = _batch_spread_bytes(step, program.batch_range)
    by_kind[UNSPLIT] = peak - heaviest.live.peak_bytes[Tier.DEVICE]
    return Prediction(
        level=level,
        step_s=step_s,
        samples_per_s=program.samples / step_s if step_s else 0.0,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved,
        host_peak_bytes=max(live.peak_bytes[Tier.HOST] for live in host_and_ssd),
        ssd_peak_bytes=max(live.peak_bytes[Tier.SSD] for live in host_and_ssd),
        busy_s=_by_resource(slowest.time.busy_s, slowest.time.busy_s),
        exposed_s=_by_resource(slowest.time.exposed_s, slowest.time.busy_s),
        peak_by_kind={kind: n_bytes for kind, n_bytes in by_kind.items() if n_bytes},
        peak_op=step.names[step.ops.name[op]] if op >= 0 else "",
        peak_module=step.modules[step.ops.module[op]] if op >= 0 else "",
        interval=_interval(peak, reserved, estimated, spread, slowest.time, calibration),
        calibrated=calibration.is_calibrated,
        step_correction=calibration.step_correction,
        communicator_bytes=groups * hardware.communicator_bytes,
        outside_bytes=outside,
        outside_range=(outside_low, outside_high),
        estimated_bytes=estimated,
        allocated_factors=calibration.peak_range(),
        reserved_factors=calibration.reserved_range(),
        device_factors=calibration.device_range(),
        exposed_by_op=slowest.exposed_by_op,
        critical_path=slowest.path.longest,
        critical_s=slowest.path.by_resource,
        mechanism_s=slowest.path.by_mechanism,
        ssd_written_bytes=max(_ssd_written_bytes(run.step, program.accumulate) for run in runs),
        batch_spread_bytes=spread,
    )


def _ssd_written_bytes(step: Step, accumulate: int) -> int:
    writes = step.ops.resource == Resource.SSD_WRITE
    if not writes.any():
        return 0
    return int(traffic_bytes(step, accumulate)[writes].sum())


class _Time(NamedTuple):
    step_s: float
    low_s: float
    high_s: float
    busy_s: list[float]
    exposed_s: list[float]


_NO_PATH = CriticalPath((), {}, {})


class _Run(NamedTuple):
    step: Step
    live: _native.Footprint
    time: _Time
    exposed_by_op: tuple[OpTime, ...] = ()
    path: CriticalPath = _NO_PATH


def step_columns(
    step: Step,
    hardware: Hardware,
    ranks: int,
    as_held: bool = True,
    python: PythonWork = NO_PYTHON,
    more_s: npt.NDArray[np.float64] | None = None,
) -> _native.StepColumns:
    """Return a step as the simulator takes it; `more_s` is (ops,) seconds to add to each op."""
    costs = op_costs(step, hardware, ranks=ranks)
    n_bytes = held_bytes(step, hardware) if as_held else step.storages.bytes
    ops, storages, uses, saves = step.ops, step.storages, step.uses, step.saves
    return _native.StepColumns(
        op_phase=ops.phase,
        op_resource=ops.resource,
        op_s=costs.op_s if more_s is None else costs.op_s + more_s,
        op_issue_s=costs.issue_s + python_s(step, hardware, python),
        bytes=n_bytes,
        tier=storages.tier,
        kind=storages.kind,
        producer=storages.producer,
        held_until=storages.held_until,
        use_op=uses.op,
        use_storage=uses.storage,
        use_mutates=uses.mode,
        save_storage=saves.storage,
        save_until=saves.held_until,
        op_stream=ops.stream,
        op_prefetch=ops.prefetch,
        op_match=ops.match,
    )


def _coarse(program: Program, hardware: Hardware, as_held: bool, python: PythonWork) -> list[_Run]:
    """Return live bytes, and times from sums over resources, without simulating op by op."""
    columns = [
        step_columns(each.step, hardware, program.ranks, as_held, python) for each in program.rank_classes
    ]
    on_cpu, stand = hardware.device == "cpu", places(program, hardware)
    least = _native.least_s(
        columns, stand, accumulate=program.accumulate, host_computes=on_cpu, shares_cores=on_cpu
    )
    runs = []
    for each, mine, (_, sharing), least_s in zip(program.rank_classes, columns, stand, least, strict=True):
        live = _native.live(mine, rounding_bytes=hardware.allocation_rounding_bytes, small_bytes=_SMALL_BYTES)
        crossing = _on_roots(each.step, hardware, program.ranks)
        time, mechanism_s = _coarse_time(live, least_s, program, hardware, sharing, crossing)
        runs.append(_Run(each.step, live, time, path=CriticalPath((), {}, mechanism_s)))
    return runs


def scheduled(
    columns: list[_native.StepColumns], program: Program, hardware: Hardware, accumulate: int
) -> _native.Timeline:
    """Return the simulated optimizer step of all rank classes, whose steps are `columns`."""
    return _native.schedule(
        columns,
        places(program, hardware),
        accumulate=accumulate,
        host_computes=hardware.device == "cpu",
        link_slowdown=_link_slowdown(hardware, program.ranks),
        rounding_bytes=hardware.allocation_rounding_bytes,
        small_bytes=_SMALL_BYTES,
        copies_in_turn=program.serial_copies,
        shares_cores=hardware.device == "cpu",
        link_of_root=_link_of_root(hardware),
    )


def _events(program: Program, hardware: Hardware, python: PythonWork) -> list[_Run]:
    steps = [each.step for each in program.rank_classes]
    columns = [step_columns(step, hardware, program.ranks, python=python) for step in steps]
    timeline = scheduled(columns, program, hardware, program.accumulate)
    path = critical_path(steps, timeline)
    runs = []
    for step, found in zip(steps, timeline.classes, strict=True):
        at = found.finish_s + _bubble_s(program, step, hardware)
        time = _Time(at, at, at, list(found.busy_s), list(found.exposed_s))
        runs.append(_Run(step, found, time, exposed_by_op(step, found.op_exposed_s), path))
    return runs


def _host_and_ssd_runs(program: Program, hardware: Hardware, runs: list[_Run]) -> list[_native.Footprint]:
    """Return the runs that host and SSD peaks are taken from: in program order if the device is a GPU."""
    # The host runs ahead of the device, and counts device memory when it issues ops. For its own memory it
    # waits: it reads into a buffer, or updates from one, after the transfer before is complete
    # (`runtime.transfer.wait`), so it never holds more at once than in program order.
    if hardware.device == "cpu":
        return [run.live for run in runs]
    rounding = hardware.allocation_rounding_bytes
    return [
        _native.live(
            step_columns(run.step, hardware, program.ranks), rounding_bytes=rounding, small_bytes=_SMALL_BYTES
        )
        for run in runs
    ]


def _link_slowdown(hardware: Hardware, ranks: int) -> float:
    """Return by how much of its time an op takes longer while a link is busy."""
    # On CPU a collective is work of a core of its rank: the fewer cores a rank has, the less it overlaps.
    if hardware.device != "cpu":
        return hardware.link_slowdown
    taken = _LINK_CORES / max(hardware.cores / hardware.local_ranks(ranks), 1.0)
    # A share of `taken` of a core's time leaves 1 - taken for compute, which takes 1 / (1 - taken) as long.
    return taken / (1 - taken)


def _link_of_root(hardware: Hardware) -> tuple[float, float]:
    """Return the largest share of a PCIe root, per direction, that a device's collectives use.

    0 if they have their own link.
    """
    if not hardware.links_through_host:
        return 0.0, 0.0
    link = hardware.intra_link_bytes_per_s
    return min(1.0, link / hardware.host_to_device_bytes_per_s), min(
        1.0, link / hardware.device_to_host_bytes_per_s
    )


def _on_roots(step: Step, hardware: Hardware, ranks: int) -> npt.NDArray[np.float64]:
    """Return (phases, 2) seconds of a PCIe root, per direction, that collectives take from copies."""
    shares = _link_of_root(hardware)
    if not any(shares):
        return np.zeros((len(Phase), 2))
    device = step.storages.tier == Tier.DEVICE
    # Collectives between host tensors do not cross the root of a device.
    uses_device = np.zeros(step.ops.n, bool)
    uses_device[step.uses.op[device[step.uses.storage]]] = True
    uses_device[step.storages.producer[device & (step.storages.producer >= 0)]] = True
    mine = np.flatnonzero(uses_device & (step.ops.resource == Resource.INTRA_LINK))
    seconds = np.bincount(step.ops.phase[mine], op_costs(step, hardware, ranks=ranks).op_s[mine], len(Phase))
    found: npt.NDArray[np.float64] = np.outer(seconds, shares)
    return found


def _bubble_s(program: Program, step: Step, hardware: Hardware) -> float:
    """Return the seconds that a pipeline rank waits for its neighbours in a step (bubble)."""
    if not program.idle:
        return 0.0
    body = np.isin(step.ops.phase, REPEATED) & (step.ops.resource == Resource.COMPUTE)
    return (
        program.accumulate
        * program.idle
        * float(op_costs(step, hardware, ranks=program.ranks).op_s[body].sum())
    )


def places(program: Program, hardware: Hardware) -> list[tuple[int, int]]:
    """Return for each rank class a PCIe root and the number of its ranks behind that root."""
    # A class that fills a root is modelled by such a root, any other by its first rank's. Ranks of a
    # class that does not list them are consecutive, after those of the classes before. On CPU
    # `op_costs` divides the machine.
    per_root = hardware.gpus_per_pcie_root
    if hardware.device == "cpu":
        return [(number, 1) for number in range(len(program.rank_classes))]
    found, first = [], 0
    for each in program.rank_classes:
        if each.ranks:
            behind = Counter(rank // per_root for rank in each.ranks)
            root = next(
                (root for root, count in behind.items() if count == per_root), each.ranks[0] // per_root
            )
            found.append((root, behind[root]))
            continue
        # The first root behind which no rank of an earlier class is.
        filled = -(-first // per_root)
        if (filled + 1) * per_root <= first + each.count:
            found.append((filled, per_root))
        else:
            found.append((first // per_root, min(each.count, per_root - first % per_root)))
        first += each.count
    return found


_ON_CUDNN = ("convolution", "cudnn")


def _outside_bytes(step: Step, groups: int, hardware: Hardware) -> tuple[int, int, int]:
    """Return bytes outside torch's allocator (context, cuDNN if used, communicators), and their bounds."""
    # cuDNN is loaded, with memory of its own, when the first op uses it.
    used = int(any(part in name for name in step.names for part in _ON_CUDNN))
    sizes = (hardware.context_bytes, *hardware.context_range)
    cudnn = (hardware.cudnn_bytes, *hardware.cudnn_range)
    each = (hardware.communicator_bytes, *hardware.communicator_range)
    found = [size + used * more + groups * one for size, more, one in zip(sizes, cudnn, each, strict=True)]
    return found[0], found[1], found[2]


def _communicators(step: Step) -> int:
    """Return the number of process groups, distinguished by size and link."""
    # A Step has sizes of groups only; two of one size and link count once.
    talk = np.flatnonzero(step.ops.group > 1)
    return len(set(zip(step.ops.group[talk].tolist(), step.ops.resource[talk].tolist(), strict=True)))


def _coarse_time(
    live: _native.Live,
    least_s: float,
    program: Program,
    hardware: Hardware,
    sharing: int,
    crossing: npt.NDArray[np.float64],
) -> tuple[_Time, dict[str, float]]:
    """Return the time that dependencies of ops (`least_s`) and busy resources allow, and its mechanisms.

    At most all of them in sequence.
    """
    # A pipeline also waits while forward and backward would run. A PCIe root is a resource as well: for
    # copies of one direction, and for collectives that cross it (`crossing`, from `_on_roots`). So are
    # cores that compute shares.
    times = np.where(_IS_REPEATED, program.accumulate, 1)
    by_phase = np.array(live.busy_s) * times
    for copies in (Resource.HOST_TO_DEVICE, Resource.DEVICE_TO_HOST):
        # Ranks behind one PCIe root share its bandwidth.
        by_phase[copies] *= sharing
    busy = by_phase.sum(1)
    # Collectives without links of their own cross the root too.
    through = sharing * (crossing * times[:, None]).sum(0)
    up, down = busy[Resource.HOST_TO_DEVICE], busy[Resource.DEVICE_TO_HOST]
    link = max(busy[Resource.INTRA_LINK], busy[Resource.INTER_LINK])
    on_cores = _ON_CORES if hardware.device == "cpu" else _ON_GPU
    slowdown = _link_slowdown(hardware, program.ranks)
    # While a link is busy compute takes 1 + slowdown as long, so it loses this part of the link's seconds.
    compute = busy[on_cores].sum() + link * slowdown / (1 + slowdown)
    waits = program.idle * float(by_phase[Resource.COMPUTE][_IS_REPEATED].sum())
    low = waits + max(least_s, *map(float, (busy.max(), compute, up + through[0], down + through[1])))
    exposed = np.maximum(busy - busy[Resource.COMPUTE], 0.0)
    # On a CPU these run on the cores that compute uses, so none of their seconds is hidden.
    exposed[on_cores] = busy[on_cores]
    computes = by_phase[Resource.COMPUTE]
    parts = {RECOMPUTE: float(computes[Phase.RECOMPUTE]), OPTIMIZER: float(computes[Phase.OPTIMIZER])}
    return (
        _Time(low, low, waits + float(busy.sum()), busy.tolist(), exposed.tolist()),
        by_mechanism(_by_resource(exposed, busy), parts),
    )


def _interval(
    peak: int, reserved: int, estimated: int, spread: tuple[int, int], time: _Time, calibration: Calibration
) -> Interval:
    """Return the interval."""
    # Its lower end is allocated bytes, which no allocator can undercut, its upper end reserved ones.
    (low, _), (_, high) = calibration.peak_range(), calibration.reserved_range()
    fast, slow = (factor * calibration.step_correction for factor in calibration.step_range())
    # With trials behind it the correction already holds how much is hidden.
    longest = time.step_s if calibration.is_calibrated else time.high_s
    # Outwards: a rounded-in bound could exclude the exact value.
    below, above = spread
    least = math.floor((peak - estimated - below) * low)
    most = math.ceil((reserved + estimated + above) * high)
    return Interval(least, most, time.low_s * fast, longest * slow)


_OF_BATCH = (Kind.BATCH, Kind.TEMPORARY, Kind.WORKSPACE)


def _batch_spread_bytes(step: Step, factors: tuple[float, float]) -> tuple[int, int]:
    """Return by how much the peak shrinks and grows if the tensors of the batch are `factors` as large."""
    if factors == (1.0, 1.0):
        return 0, 0
    producer = step.storages.producer
    in_optimizer = (producer >= 0) & (step.ops.phase[producer] == Phase.OPTIMIZER)
    varies = np.isin(step.storages.kind, _OF_BATCH) & ~in_optimizer
    low, high = (
        step.with_storages(
            bytes=np.where(varies, step.storages.bytes * factor, step.storages.bytes).astype(np.int64)
        ).peak_bytes()
        for factor in factors
    )
    peak = step.peak_bytes()
    return peak - low, high - peak


def _estimated_bytes(step: Step) -> int:
    """Return bytes that only cuDNN knows: a convolution's largest workspace, half of recurrent reserves."""
    made = np.flatnonzero(step.storages.producer >= 0)
    by, n_bytes = step.ops.name[step.storages.producer[made]], step.storages.bytes[made]
    is_convolution = np.array(["convolution" in name for name in step.names], bool)[by]
    scratch = n_bytes[is_convolution & (step.storages.kind[made] == Kind.WORKSPACE)]
    is_recurrent = np.array(["_cudnn_rnn.default" in name for name in step.names], bool)[by]
    # A reserve is larger than the output that the op makes with it.
    reserves = np.zeros(step.ops.n, np.int64)
    np.maximum.at(reserves, step.storages.producer[made][is_recurrent], n_bytes[is_recurrent])
    return int(scratch.max(initial=0) + reserves.sum() // 2)


def _peak_bytes(run: _Run, hardware: Hardware, allocator: AllocatorSettings | None) -> tuple[int, int]:
    """Return the peaks of allocated and reserved bytes."""
    live = run.live.peak_bytes[Tier.DEVICE]
    if hardware.device == "cpu" and (allocator is None or allocator.arena is None):
        return live, live
    if allocator is not None:
        found = replay(event_stream(run.step, _ALLOCATOR_STEPS), allocator, None)
        allocated = live if allocator.arena else max(live, found.peak_allocated_bytes)
        return allocated, found.peak_reserved_bytes
    # Each pool in whole segments of 2 MiB, torch's kSmallBuffer and kRoundLarge.
    return live, sum(-(-peak // _SEGMENT_BYTES) * _SEGMENT_BYTES for peak in run.live.pool_peak_bytes)


def _by_resource(values: Iterable[float], busy: Iterable[float]) -> dict[str, float]:
    return {name: seconds for name, seconds, used in zip(RESOURCES, values, busy, strict=True) if used > 0}


_MAKES_PINNED: Final = ("memtune.to_host.default", "memtune.from_ssd.default")


def held_bytes(step: Step, hardware: Hardware) -> I64:
    """Return (m,) `step.storages.bytes`, with pinned storages as large as `hardware` allocates them."""
    # Torch's pinned allocator rounds each request up to a power of two.
    if Capability.PINNED not in hardware.platform.capabilities:
        return step.storages.bytes
    on_host = np.flatnonzero((step.storages.tier == Tier.HOST) & (step.storages.bytes > 0))
    if not len(on_host):
        return step.storages.bytes
    locked = on_host[_is_page_locked(step, on_host)]
    found = step.storages.bytes.copy()
    found[locked] = next_power_of_two(found[locked])
    return found


def next_power_of_two(n_bytes: I64) -> I64:
    """Return sizes above 0 rounded up to a power of two."""
    _, exponents = np.frexp((n_bytes - 1).astype(np.float64))  # exact below 2^53, as `log2` is not
    found: I64 = np.int64(1) << exponents.astype(np.int64)
    return found


def _is_page_locked(step: Step, on_host: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
    """Return which host storages are pinned."""
    # Copies from the device, reads from SSD, and weights and gradient sums made of them.
    # Moments are made on the host, and masters of narrower weights are casts of copies: both are pageable.
    makes = _makes_pinned(step.names)
    producer = step.storages.producer[on_host]
    kind = step.storages.kind[on_host]
    owner = step.storages.owner[on_host]
    copied = (producer >= 0) & makes[step.ops.name[producer]]
    columns = columns_of(step.parameters)
    own = (owner < 0) | (step.storages.bytes[on_host] == np.append(columns.n_bytes, 0)[owner])
    found: npt.NDArray[np.bool_] = copied | (
        (producer < 0) & ((kind == Kind.PARAMETER) | (kind == Kind.GRADIENT)) & own
    )
    return found


@functools.lru_cache(maxsize=8)
def _makes_pinned(names: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    return np.fromiter((name in _MAKES_PINNED for name in names), bool, len(names))
