"""How long an op occupies its resource: a roofline by op class for compute, bytes and latencies for everything else.

Everything is a handful of numpy operations over the columns of a Step; what depends only on its names is kept.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.collective_costs import collective_s
from memtune.hardware import Hardware
from memtune.measured import Curve
from memtune.parameters import columns_of
from memtune.program import APART, F64, Kind, Resource, Step


class OpCosts(NamedTuple):
    """(n,) seconds each."""

    op_s: F64
    """How long the op occupies its resource."""
    issue_s: F64
    """How long the host takes to issue it; 0 on CPU, where the host computes."""


class _Reach(NamedTuple):
    """What ops of a class reach, as fractions of the peak rates, and how many times the usual overhead they have on CPU."""

    matmul: float
    memory: float
    overhead: float = 1.0


# Op class by parts of its name, first match wins; the last class takes the rest. CPU: measured on one core of a server (AVX-512)
# at sizes of small training runs, overheads with `memtune doctor --calibrate` on two of its cores. CUDA: rules of thumb for bf16
# at large sizes. Measured curves (`Hardware.curves`) take the place of both; what trials show to be left, by class and size, is a
# factor on either (`Hardware.residuals`), and of whole steps in Calibration.
_CLASSES: tuple[tuple[str, tuple[str, ...], _Reach, _Reach], ...] = (
    ("attention", ("attention", "flash", "sdpa"), _Reach(0.40, 0.5, 3.0), _Reach(0.50, 0.7)),
    ("convolution", ("conv",), _Reach(0.45, 0.5, 8.0), _Reach(0.50, 0.7)),
    ("recurrent", ("lstm", "gru", "rnn"), _Reach(0.40, 0.5, 8.0), _Reach(0.35, 0.5)),
    ("optimizer", ("_fused_adam", "_fused_sgd", "_fused_adagrad", "adam_", "_foreach_"), _Reach(1.0, 0.90), _Reach(1.0, 0.85)),
    ("matmul", ("addmm", "bmm", "aten.mm.", "_scaled_mm", "linear", "matmul", "addmv", "aten.mv.", "_grouped_mm"),
     _Reach(0.85, 0.9, 1.5), _Reach(0.70, 0.8)),
    ("random", ("dropout", "bernoulli", "rand", "normal_", "uniform_"), _Reach(1.0, 0.03), _Reach(1.0, 0.6)),
    ("gather", ("embedding", "index", "gather", "scatter", "sort", "topk", "unique"), _Reach(1.0, 0.3), _Reach(1.0, 0.4)),
    ("normalisation", ("norm", "softmax", "nll_loss", "cross_entropy"), _Reach(1.0, 0.45), _Reach(1.0, 0.7)),
    ("reduction", ("aten.sum", "aten.mean", "amax", "amin", "cumsum", "aten.var"), _Reach(1.0, 0.5), _Reach(1.0, 0.7)),
    ("copy", ("_to_copy", "clone", "copy_", "aten.cat", "aten.stack"), _Reach(1.0, 0.8), _Reach(1.0, 0.8)),
    ("transcendental", ("gelu", "silu", "tanh", "sigmoid", "exp", "log", "erf", "pow", "sin", "cos"),
     _Reach(1.0, 0.25), _Reach(1.0, 0.8)),
    ("elementwise", ("",), _Reach(1.0, 0.90), _Reach(1.0, 0.80)),
)  # fmt: skip
CLASSES = tuple(name for name, *_ in _CLASSES)
EVERY_CLASS = "every"
"""Key of `Hardware.residuals` for the classes that it does not name."""


def op_class(name: str) -> str:
    """The class that decides what part of the peak rates an op of this name reaches."""
    return _CLASSES[_class_index(name)][0]


@functools.cache  # there are some hundreds of names
def _class_index(name: str) -> int:
    return next(i for i, (_, parts, _, _) in enumerate(_CLASSES) if any(part in name for part in parts))


@functools.cache
def _reach(device: str) -> tuple[F64, F64, F64]:
    """Fractions of the matmul and the memory rate and multiples of the overhead, by class."""
    rows: list[_Reach] = [cpu if device == "cpu" else cuda for _, _, cpu, cuda in _CLASSES]
    return tuple(np.array(values) for values in zip(*rows, strict=True))  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def _classes(names: tuple[str, ...]) -> npt.NDArray[np.intp]:
    """Index of the class by name id."""
    return np.array([_class_index(name) for name in names])


def peak_s(flops: F64, traffic_bytes: F64, flops_per_s: float, bytes_per_s: float) -> F64:
    """The roofline at peak rates: what a curve's first coordinate is."""
    found: F64 = np.maximum(flops / flops_per_s, traffic_bytes / bytes_per_s)
    return found


def on_curve(curve: Curve, at_peak_s: F64) -> F64:
    """Seconds of ops that take `at_peak_s` at peak: between points on straight lines of logarithms, beyond them as at their ends.

    Below the smallest point an op takes what that point took, above the largest one its efficiency.
    """
    x, y = np.log(np.array(curve).T)
    at = np.log(np.maximum(at_peak_s, 1e-12))
    found: F64 = np.exp(np.interp(at, x, y) + np.maximum(at - x[-1], 0.0))
    return found


def factor_on(residual: Curve, at_peak_s: F64) -> F64:
    """Measured over predicted seconds: between points on straight lines of logarithms, beyond them as at their ends."""
    x, y = np.log(np.array(residual).T)
    found: F64 = np.exp(np.interp(np.log(np.maximum(at_peak_s, 1e-12)), x, y))
    return found


def matmul_dtype(step: Step) -> str:
    """Type in which matrix products run, as far as columns tell: that of most parameters, or 16 bits under autocast."""
    if not step.parameters:
        return "float32"
    columns = columns_of(step.parameters)
    numel = step.bytes[columns.storage] // columns.itemsize
    narrow = columns.itemsize < 4
    return "bfloat16" if numel[narrow].sum() > numel[~narrow].sum() or _casts_weights(step) else "float32"


def _casts_weights(step: Step) -> bool:
    if "aten._to_copy.default" not in step.names:
        return False
    casts = step.op_name[step.use_op] == step.names.index("aten._to_copy.default")
    is_weight = (step.parameter_of >= 0) | (step.kind == Kind.COMMUNICATION)  # there, or gathered or brought in for its use
    casts &= is_weight[step.use_storage] & (step.use_mutates == 0)
    by, made = step.use_op[casts], np.flatnonzero(step.producer >= 0)
    bytes_made = np.bincount(step.producer[made], step.bytes[made], step.n_ops)
    # Cast by cast: a weight that is cast again for a second forward is still cast.
    cast_bytes, weight_bytes = bytes_made[by].sum(), step.bytes[step.use_storage[casts]].sum()
    return bool(cast_bytes > 0 and cast_bytes * 3 < weight_bytes * 2)


def op_costs(step: Step, hardware: Hardware, *, ranks: int = 1) -> OpCosts:
    """Seconds of every op of `step` on one of `ranks` ranks.

    Ranks on one node share its host threads, and on CPU the cores and the memory as well. `op_traffic_bytes` of a collective is
    its whole message, as the recorder counts it.
    """
    local = hardware.local_ranks(ranks)
    share = local if hardware.device == "cpu" else 1
    op_s = _compute_s(step, hardware, share)
    if hardware.device == "cpu":
        issue_s = np.zeros(step.n_ops)
    else:
        issue_s = np.full(step.n_ops, hardware.launch_s)
    issue_s[step.op_resource == Resource.NOTHING] = 0.0
    others = np.flatnonzero(step.op_resource != Resource.COMPUTE)
    if len(others):
        op_s[others] = _transfers_s(step, others, hardware, local)
    return OpCosts(op_s, issue_s)


def _compute_s(step: Step, hardware: Hardware, share: int) -> F64:
    """Seconds of every op as if it computed."""
    classes, traffic = _classes(step.names), step.op_traffic_bytes
    return _seconds(classes, step.op_name, step.op_flops, traffic, matmul_dtype(step), hardware, share)


def _seconds(
    classes: npt.NDArray[np.intp],  # (names,) index of the class
    names: npt.NDArray[np.integer[Any]],  # (ops,) name id
    flops: F64,
    traffic_bytes: npt.NDArray[Any],
    dtype: str,
    hardware: Hardware,
    share: int,
) -> F64:
    """By the table's fractions, by a measured curve where a class has one, both times what trials showed to be missing."""
    matmul, memory, overhead = _reach(hardware.device)
    flops_per_s, bytes_per_s = hardware.matmul_flops_per_s(dtype) / share, hardware.memory_bytes_per_s / share
    by_flops, by_bytes = (1.0 / (matmul * flops_per_s))[classes], (1.0 / (memory * bytes_per_s))[classes]
    op_s: F64 = np.maximum(flops * by_flops[names], traffic_bytes * by_bytes[names])
    launch_s = hardware.launch_s if hardware.device == "cpu" else 0.0
    if launch_s:
        op_s += launch_s * (overhead[classes][names] if not hardware.curves else 1.0)
    if not hardware.curves and not hardware.residuals:
        return op_s
    at_peak = peak_s(flops, traffic_bytes.astype(np.float64), flops_per_s, bytes_per_s)
    class_of_op = classes[names]
    for index in np.unique(classes):
        curve = hardware.curves.get(CLASSES[index])
        residual = hardware.residuals.get(CLASSES[index], hardware.residuals.get(EVERY_CLASS))
        mine = np.flatnonzero(class_of_op == index) if curve or residual else ()
        if curve and len(mine):
            op_s[mine] = on_curve(curve, at_peak[mine]) + launch_s
        if residual and len(mine):
            op_s[mine] *= factor_on(residual, at_peak[mine])
    return op_s


def op_s(kind: str, dtype: str, flops: float, traffic_bytes: float, hardware: Hardware, *, ranks: int = 1) -> tuple[float, float]:
    """Seconds of one op of class `kind` that computes: at peak rates, and as `op_costs` predicts them."""
    share = hardware.local_ranks(ranks) if hardware.device == "cpu" else 1
    work, traffic = np.array([flops]), np.array([traffic_bytes])
    rates = hardware.matmul_flops_per_s(dtype) / share, hardware.memory_bytes_per_s / share
    found = _seconds(np.array([CLASSES.index(kind)]), np.zeros(1, np.intp), work, traffic, dtype, hardware, share)
    return float(peak_s(work, traffic, *rates)[0]), float(found[0])


def _transfers_s(step: Step, ops: np.ndarray[tuple[int], np.dtype[np.intp]], hardware: Hardware, local: int) -> F64:
    """Seconds of ops that are not compute."""
    resource, group = step.op_resource[ops], (step.op_group[ops] % APART).astype(np.float64)
    bytes_per_s = np.array(_bytes_per_s(hardware, local))[resource]
    seconds: F64 = step.op_traffic_bytes[ops] / bytes_per_s + np.array(_latency_s(hardware))[resource]
    together = np.flatnonzero((group > 0) & ((resource == Resource.INTRA_LINK) | (resource == Resource.INTER_LINK)))
    if len(together):
        rows = ops[together]
        traffic = step.op_traffic_bytes[rows].astype(np.float64)
        apart = step.op_group[rows] // APART + 1
        seconds[together] = collective_s(
            step.names, step.op_name[rows], resource[together], group[together], traffic, hardware, apart=apart
        )
    return seconds


def _bytes_per_s(hardware: Hardware, local: int) -> list[float]:
    """Rate by Resource; what the ranks of a node share is divided."""
    shared = local if hardware.device == "cpu" else 1
    return [
        1.0,
        hardware.host_to_device_bytes_per_s / shared,
        hardware.device_to_host_bytes_per_s / shared,
        hardware.intra_link_bytes_per_s,
        hardware.inter_link_bytes_per_s,
        hardware.ssd_read_bytes_per_s / local,
        hardware.ssd_write_bytes_per_s / local,
        hardware.host_adam_bytes_per_s / local,
        np.inf,
    ]


def _latency_s(hardware: Hardware) -> list[float]:
    """Latency by Resource, per copy or message."""
    start = hardware.launch_s
    return [0.0, start, start, hardware.intra_link_latency_s, hardware.inter_link_latency_s, 1e-4, 1e-4, start, 0.0]
