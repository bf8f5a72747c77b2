"""Time that an op occupies its resource: a roofline by op class for compute, bytes and latency for transfers.

Computed with a few numpy operations over the columns of a Step; results that depend on op names only are
cached.

A collective takes the time of its algorithm, from the bytes on each class of link and the latency of every
step. There are n ranks, g of them on one node, k nodes, and S bytes: the whole message, as the recorder
counts it.
The terms are those of Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), section 4.

- ring: (n - 1)/n · S / bandwidth + (n - 1) · latency, all-reduce twice that; over nodes as slow as its
  slowest link, where every node sends through all of its network cards at once;
- hierarchical: a ring of k over the network on S/g, then a ring of g inside the node on S;
- all-to-all: each pair exchanges S/n, pairs of a node overlapped with those between nodes;
- send: S once.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memtune.hardware.calibration_cache import Curve
from memtune.hardware.spec import Hardware
from memtune.program import (
    APART,
    CHANNELS_FIRST,
    F64,
    READS,
    UNALIGNED,
    Kind,
    Phase,
    Precision,
    Resource,
    Step,
    columns_of,
)


class OpCosts(NamedTuple):
    """Costs of ops: (n,) seconds each."""

    op_s: F64
    """Time that the op occupies its resource."""
    issue_s: F64
    """Time of the host to issue the op; 0 on CPU, where the host computes."""


class _Roofline(NamedTuple):
    """Fractions of the peak rates that an op class reaches, and its overhead on CPU relative to most ops'."""

    matmul: float
    memory: float
    overhead: float = 1.0
    hidden: float = 1.0
    """Share of the shorter of the two times, of products and of memory, that the longer one hides."""


# Op class by parts of its name, first match wins; the last class takes the rest. CPU: measured on one core of
# a server (AVX-512) at sizes of small training runs, overheads with `memtune doctor --calibrate` on two of
# its cores. CUDA, of large ops: products, and convolutions, which cuDNN computes as products of implicit
# matrices (arXiv:1410.0759), reach the best shape's rate (`Hardware.matmul_share`). Loads before the first
# multiplication of a tile and stores after its last are not hidden: of products all traffic counts in
# addition, of convolutions half, whose implicit matrices are read once and multiplied more often. Chains of
# ops bound by memory reach 60 to 70 % of the data sheet. These parts were chosen with published step times
# known (benchmarks/published/gpu_rows.json); `make bench-published` shows the errors by source. Measured
# curves (`Hardware.curves`) take the place of both; what trials show to be left, by class and size, is a
# factor on either (`Hardware.residuals`), and of whole steps in Calibration.
_CLASSES: tuple[tuple[str, tuple[str, ...], _Roofline, _Roofline], ...] = (
    ("attention", ("attention", "flash", "sdpa"), _Roofline(0.40, 0.5, 3.0), _Roofline(1.0, 0.7)),
    ("convolution", ("convolution", "aten.conv"), _Roofline(0.45, 0.5, 8.0), _Roofline(1.0, 0.7, hidden=0.5)),
    ("recurrent", ("lstm", "gru", "rnn"), _Roofline(0.40, 0.5, 8.0), _Roofline(0.35, 0.5)),
    (
        "optimizer",
        ("_fused_adam", "_fused_sgd", "_fused_adagrad", "adam_", "_foreach_"),
        _Roofline(1.0, 0.90),
        _Roofline(1.0, 0.75),
    ),
    (
        "matmul",
        ("addmm", "bmm", "aten.mm.", "_scaled_mm", "linear", "matmul", "addmv", "aten.mv.", "_grouped_mm"),
        _Roofline(0.85, 0.9, 1.5),
        _Roofline(1.0, 0.7, hidden=0.0),
    ),
    (
        "random",
        ("dropout", "bernoulli", "rand", "normal_", "uniform_"),
        _Roofline(1.0, 0.03),
        _Roofline(1.0, 0.6),
    ),
    (
        "gather",
        ("embedding", "index", "gather", "scatter", "sort", "topk", "unique"),
        _Roofline(1.0, 0.3),
        _Roofline(1.0, 0.4),
    ),
    (
        "normalisation",
        ("norm", "softmax", "nll_loss", "cross_entropy"),
        _Roofline(1.0, 0.45),
        _Roofline(1.0, 0.6),
    ),
    (
        "reduction",
        ("aten.sum", "aten.mean", "amax", "amin", "cumsum", "aten.var"),
        _Roofline(1.0, 0.5),
        _Roofline(1.0, 0.6),
    ),
    (
        "copy",
        ("_to_copy", "clone", "copy_", "aten.cat", "aten.stack", "convert_element_type"),
        _Roofline(1.0, 0.8),
        _Roofline(1.0, 0.7),
    ),
    (
        "transcendental",
        ("gelu", "silu", "tanh", "sigmoid", "exp", "log", "erf", "pow", "sin", "cos"),
        _Roofline(1.0, 0.25),
        _Roofline(1.0, 0.7),
    ),
    ("compression", ("memtune.compress",), _Roofline(1.0, 0.22), _Roofline(1.0, 0.5)),
    ("decompression", ("memtune.decompress",), _Roofline(1.0, 0.80), _Roofline(1.0, 0.6)),
    # Elementwise ops of an optimizer's step, never by name: on a CPU a parameter, its gradient and state stay
    # in the cache from one of them to the next.
    ("update", (), _Roofline(1.0, 1.8), _Roofline(1.0, 0.70)),
    ("elementwise", ("",), _Roofline(1.0, 0.90), _Roofline(1.0, 0.70)),
)
_ATTENTION_ON_GPU: tuple[tuple[str, str, float], ...] = (
    # FlashAttention-2, arXiv:2307.08691, section 4.1: up to 73 % of A100's rate forward, 63 % backward
    ("_flash_attention_backward", "sm80", 0.45),
    ("_flash_attention.", "sm80", 0.55),
    # FlashAttention-3, arXiv:2407.08608, section 1: FlashAttention-2 reaches 35 % on H100; its own and
    # cuDNN's kernels up to 75 % forward
    ("_flash_attention", "sm90", 0.35),
    ("_cudnn_attention_backward", "sm90", 0.45),
    ("_cudnn_attention.", "sm90", 0.60),
    # The CUTLASS kernels of xFormers, about 0.6 of FlashAttention-2 in its figures 4 to 6
    ("_efficient_attention", "", 0.33),
    ("_attention", "", 0.50),
)
"""Name of the kernel, architecture → share of the matrix rate, by the FLOPs that it needs; first match
wins."""

_UNALIGNED = 0.4
"""Share of the rate of aligned products that 16-bit products with unaligned rows reach: half of it and less
on A100 (NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements").
"""
_LEAST_KERNEL_S = 3e-6
"""Shortest time of a kernel on a GPU, from its start to that of the next one in the stream."""

_OF_PRODUCTS = ("matmul", "convolution")

CLASSES = tuple(name for name, *_ in _CLASSES)
EVERY_CLASS = "every"
"""Key of `Hardware.residuals` for all other classes."""


_UPDATE, _ELEMENTWISE = CLASSES.index("update"), CLASSES.index("elementwise")


def op_class(name: str, *, is_update: bool = False) -> str:
    """Return the class of an op name (`is_update`: of an optimizer's step), which has one efficiency."""
    index = _class_index(name)
    return CLASSES[_UPDATE if is_update and index == _ELEMENTWISE else index]


@functools.cache  # at most some hundreds of names
def _class_index(name: str) -> int:
    # In the table's order: a name may have parts of several classes (`_foreach_norm`, `_flash_attention`).
    return next(i for i, (_, parts, _, _) in enumerate(_CLASSES) if any(part in name for part in parts))


@functools.cache
def _roofline(device: str) -> tuple[F64, F64, F64, F64]:
    """Return by class: fractions of matmul and memory rate, multiples of the overhead, hidden shares."""
    rows: list[_Roofline] = [cpu if device == "cpu" else cuda for _, _, cpu, cuda in _CLASSES]
    return tuple(np.array(values) for values in zip(*rows, strict=True))  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def _classes(names: tuple[str, ...]) -> npt.NDArray[np.intp]:
    """Return the class index by name id."""
    return np.array([_class_index(name) for name in names])


@functools.lru_cache(maxsize=256)
def _shares_on_gpu(names: tuple[str, ...], architecture: str) -> F64:
    """Return by name id the share of the matrix rate that a kernel reaches; nan if as products do."""

    def share(name: str) -> float:
        kind = op_class(name)
        if kind == "attention":
            return next(
                share
                for part, chip, share in _ATTENTION_ON_GPU
                if part in name and architecture.startswith(chip)
            )
        return float("nan") if kind in _OF_PRODUCTS else 1.0

    return np.array([share(name) for name in names])


def peak_s(flops: F64, traffic_bytes: F64, flops_per_s: F64 | float, bytes_per_s: float) -> F64:
    """Return seconds of the roofline at peak rates, the first coordinate of a curve."""
    found: F64 = np.maximum(flops / flops_per_s, traffic_bytes / bytes_per_s)
    return found


def on_curve(curve: Curve, at_peak_s: F64) -> F64:
    """Return the seconds of ops that take `at_peak_s` at peak rates, by log-log interpolation of `curve`."""
    # Below the smallest point an op takes the time of that point; above the largest it has that efficiency.
    x, y = np.log(np.array(curve).T)
    at = np.log(np.maximum(at_peak_s, 1e-12))
    found: F64 = np.exp(np.interp(at, x, y) + np.maximum(at - x[-1], 0.0))
    return found


def factor_on(residual: Curve, at_peak_s: F64) -> F64:
    """Return measured over predicted seconds, by log-log interpolation; constant beyond the end points."""
    x, y = np.log(np.array(residual).T)
    found: F64 = np.exp(np.interp(np.log(np.maximum(at_peak_s, 1e-12)), x, y))
    return found


def matmul_dtype(step: Step) -> str:
    """Return the dtype of matrix products: that of most parameters, or 16 bits under autocast."""
    if not step.parameters:
        return "float32"
    columns = columns_of(step.parameters)
    numel = step.storages.bytes[columns.storage] // columns.itemsize
    narrow = columns.itemsize < 4
    return "bfloat16" if numel[narrow].sum() > numel[~narrow].sum() or _casts_weights(step) else "float32"


def _casts_weights(step: Step) -> bool:
    if "aten._to_copy.default" not in step.names:
        return False
    casts = step.ops.name[step.uses.op] == step.names.index("aten._to_copy.default")
    is_weight = (step.parameter_of >= 0) | (
        step.storages.kind == Kind.COMMUNICATION
    )  # resident, or unsharded or reloaded for its use
    casts &= (is_weight & (step.storages.bytes > 0))[step.uses.storage] & (
        step.uses.mode == READS
    )  # frames have the bytes of pages
    by, made = step.uses.op[casts], np.flatnonzero(step.storages.producer >= 0)
    bytes_made = np.bincount(step.storages.producer[made], step.storages.bytes[made], step.ops.n)
    # Cast by cast: a weight that is cast again for a second forward is still cast, and one in pages is cast
    # once.
    cast_bytes = bytes_made[np.unique(by)].sum()
    weight_bytes = step.storages.bytes[step.uses.storage[casts]].sum()
    return bool(cast_bytes > 0 and cast_bytes * 3 < weight_bytes * 2)


def op_costs(step: Step, hardware: Hardware, *, ranks: int = 1) -> OpCosts:
    """Return the seconds of every op of `step` on one of `ranks` ranks."""
    # Ranks on one node share its host threads, and on CPU also its cores and memory. `traffic_bytes` of
    # a collective is its whole message, as the recorder counts it.
    local = hardware.local_ranks(ranks)
    share = local if hardware.device == "cpu" else 1
    op_s = _compute_s(step, hardware, share)
    if hardware.device == "cpu":
        issue_s = np.zeros(step.ops.n)
    else:
        issue_s = np.full(step.ops.n, hardware.launch_s)
    # Allocations by hooks are no kernel launches; their Python is in `hook_s`.
    issue_s[step.ops.resource == Resource.NOTHING] = 0.0
    others = np.flatnonzero(step.ops.resource != Resource.COMPUTE)
    if len(others):
        op_s[others] = _transfers_s(step, others, hardware, local)
    return OpCosts(op_s, issue_s)


def _compute_s(step: Step, hardware: Hardware, share: int) -> F64:
    """Return the seconds of every op as if all were compute ops."""
    classes = _classes(step.names)[step.ops.name]
    classes[(step.ops.phase == Phase.OPTIMIZER) & (classes == _ELEMENTWISE)] = _UPDATE
    return _seconds(
        classes, step.ops.flops, step.ops.traffic_bytes, _matrices(step, hardware), hardware, share
    )


class _Matrices(NamedTuple):
    """Products of each op, (n,) or one for all."""

    flops_per_s: F64 | float
    """Peak rate in the op's precision."""
    share: F64 | float
    """Part of it that large products reach."""
    transposes: F64 | float = 0.0
    """Passes over inputs and outputs before and after the products."""


def _matrices(step: Step, hardware: Hardware) -> _Matrices:
    if hardware.device == "cpu":
        return _Matrices(hardware.matmul_flops_per_s(matmul_dtype(step)), 1.0)
    dtypes = [matmul_dtype(step) if each is Precision.UNKNOWN else each.name.lower() for each in Precision]
    precision = step.ops.precision % UNALIGNED
    of_products = np.array([hardware.matmul_share(each) for each in dtypes])[precision]
    of_kernel = _shares_on_gpu(step.names, hardware.architecture)[step.ops.name]
    share: F64 = np.where(np.isnan(of_kernel), of_products, of_kernel)
    share *= np.where(step.ops.precision & UNALIGNED, _UNALIGNED, 1.0)
    on_tensor_cores = np.array([hardware.has_tensor_cores(each) for each in dtypes])[precision]
    transposed = on_tensor_cores & (step.ops.precision & CHANNELS_FIRST > 0)
    rates = np.array([hardware.matmul_flops_per_s(each) for each in dtypes])
    return _Matrices(rates[precision], share, np.where(transposed, 2.0, 0.0))


def _seconds(
    classes: npt.NDArray[np.intp],  # (ops,) index of the class
    flops: F64,
    traffic_bytes: npt.NDArray[Any],
    matrices: _Matrices,
    hardware: Hardware,
    share: int,
) -> F64:
    """Return seconds by the table's fractions or the class's measured curve, times the trials' residual."""
    matmul, memory, overhead, hidden = _roofline(hardware.device)
    flops_per_s, bytes_per_s = matrices.flops_per_s / share, hardware.memory_bytes_per_s / share
    by_flops, by_bytes = (1.0 / matmul)[classes], (1.0 / (memory * bytes_per_s))[classes]
    of_products = flops * by_flops / (flops_per_s * matrices.share)
    of_memory = traffic_bytes * by_bytes
    op_s: F64 = np.maximum(of_products, of_memory)
    if hardware.device != "cpu":
        # A GPU's products do not hide their memory traffic entirely.
        op_s += (1.0 - hidden)[classes] * np.minimum(of_products, of_memory)
        # Tensor cores take images with channels last: cuDNN reads and writes them once more to transpose them
        # (NVIDIA, Convolutional Layers User's Guide, "Tensor Layouts In Memory: NCHW vs NHWC").
        op_s += matrices.transposes * of_memory
        if not hardware.curves:
            op_s = np.maximum(op_s, _LEAST_KERNEL_S)
    launch_s = hardware.launch_s if hardware.device == "cpu" else 0.0
    if launch_s:
        op_s += launch_s * (overhead[classes] if not hardware.curves else 1.0)
    if not hardware.curves and not hardware.residuals:
        return op_s
    at_peak = peak_s(flops, traffic_bytes.astype(np.float64), flops_per_s, bytes_per_s)
    for index in np.unique(classes):
        curve = hardware.curves.get(CLASSES[index])
        residual = hardware.residuals.get(CLASSES[index], hardware.residuals.get(EVERY_CLASS))
        mine = np.flatnonzero(classes == index) if curve or residual else ()
        if curve and len(mine):
            op_s[mine] = on_curve(curve, at_peak[mine]) + launch_s
        if residual and len(mine):
            op_s[mine] *= factor_on(residual, at_peak[mine])
    return op_s


def op_s(
    kind: str, dtype: str, flops: float, traffic_bytes: float, hardware: Hardware, *, ranks: int = 1
) -> tuple[float, float]:
    """Return the seconds of a compute op of class `kind`: at peak rates, and as predicted by `op_costs`."""
    share = hardware.local_ranks(ranks) if hardware.device == "cpu" else 1
    work, traffic = np.array([flops]), np.array([traffic_bytes])
    rate = hardware.matmul_flops_per_s(dtype)
    of_products = hardware.device != "cpu" and kind in _OF_PRODUCTS
    reached = hardware.matmul_share(dtype) if of_products else 1.0
    found = _seconds(
        np.array([CLASSES.index(kind)]), work, traffic, _Matrices(rate, reached), hardware, share
    )
    at_peak = peak_s(work, traffic, rate / share, hardware.memory_bytes_per_s / share)
    return float(at_peak[0]), float(found[0])


def _transfers_s(
    step: Step, ops: np.ndarray[tuple[int], np.dtype[np.intp]], hardware: Hardware, local: int
) -> F64:
    """Return the seconds of ops that do not compute."""
    resource, group = step.ops.resource[ops], (step.ops.group[ops] % APART).astype(np.float64)
    bytes_per_s = np.array(_bytes_per_s(hardware, local))[resource]
    seconds: F64 = step.ops.traffic_bytes[ops] / bytes_per_s + np.array(_latency_s(hardware))[resource]
    # Messages between two ranks have no group, and are one transfer.
    together = np.flatnonzero(
        (group > 0) & ((resource == Resource.INTRA_LINK) | (resource == Resource.INTER_LINK))
    )
    if len(together):
        rows = ops[together]
        traffic = step.ops.traffic_bytes[rows].astype(np.float64)
        apart = step.ops.group[rows] // APART + 1
        seconds[together] = collective_s(
            step.names,
            step.ops.name[rows],
            resource[together],
            group[together],
            traffic,
            hardware,
            apart=apart,
        )
    return seconds


def _bytes_per_s(hardware: Hardware, local: int) -> list[float]:
    """Return the rate by Resource; rates that the ranks of a node share are divided by their number."""
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
    """Return the latency per copy or message, by Resource."""
    start = hardware.launch_s
    return [
        0.0,
        start,
        start,
        hardware.intra_link_latency_s,
        hardware.inter_link_latency_s,
        1e-4,
        1e-4,
        start,
        0.0,
    ]


class Algorithm(IntEnum):
    """Algorithm of a collective."""

    RING = 0
    HIERARCHICAL = 1
    ALL_TO_ALL = 2
    SEND = 3


_ALGORITHMS = (
    (Algorithm.ALL_TO_ALL, ("all_to_all", "alltoall")),
    (Algorithm.HIERARCHICAL, ("hierarchical",)),
    (Algorithm.SEND, (".send.", ".recv.", "send_next", "shift_into")),
)


def algorithm(name: str) -> Algorithm:
    """Return the algorithm of a collective of this name; a ring by default."""
    return next(
        (found for found, parts in _ALGORITHMS if any(part in name for part in parts)), Algorithm.RING
    )


@functools.lru_cache(maxsize=256)
def _algorithms(
    names: tuple[str, ...], all_gather_rounds: float, reduce_scatter_rounds: float
) -> tuple[npt.NDArray[np.int64], F64]:
    """Return by name id: the algorithm, and the number of passes around a ring."""
    passes = {"allreduce": 2.0, "allgather": all_gather_rounds, "reducescatter": reduce_scatter_rounds}
    rounds = [
        next((count for part, count in passes.items() if part in name.replace("_", "")), 1.0)
        for name in names
    ]
    return np.array([algorithm(name) for name in names], np.int64), np.array(rounds)


def collective_s(
    names: tuple[str, ...],
    name: npt.NDArray[np.int32],  # (c,) index into names
    resource: npt.NDArray[np.uint8],  # (c,) Resource
    ranks: F64,  # (c,) in the group
    n_bytes: F64,  # (c,)
    hardware: Hardware,
    *,
    apart: npt.NDArray[np.int32] | int = 1,  # (c,) ranks from one member of the group to the next
) -> F64:
    """Return (c,) seconds of each collective."""
    known = _algorithms(names, hardware.all_gather_rounds, hardware.reduce_scatter_rounds)
    algorithms, rounds = (column[name] for column in known)
    steps = np.maximum(ranks - 1, 0.0)
    bytes_per_s, latency_s = _ring_link(
        resource, ranks, np.maximum(hardware.gpus_per_node // apart, 1), hardware
    )
    # The ring of the module docstring: n - 1 steps of S/n each.
    seconds = rounds * (steps / ranks * n_bytes / bytes_per_s + steps * latency_s)
    if algorithms.any():
        local = np.minimum(ranks, hardware.gpus_per_node) if hardware.device != "cpu" else ranks
        local = np.where(resource == Resource.INTER_LINK, 1.0, local)  # no two of its ranks share a node
        other = np.select(
            [algorithms == Algorithm.HIERARCHICAL, algorithms == Algorithm.ALL_TO_ALL],
            [
                rounds * _hierarchical_s(n_bytes, ranks, local, hardware),
                _all_to_all_s(n_bytes, ranks, local, hardware),
            ],
            n_bytes / bytes_per_s + latency_s,
        )
        seconds = np.where(algorithms == Algorithm.RING, seconds, other)
    return seconds


def _ring_link(
    resource: npt.NDArray[np.uint8], ranks: F64, local: npt.NDArray[Any] | int, hardware: Hardware
) -> tuple[F64, F64]:
    """Return (c,) rate and latency of a ring's slowest link; `local` members per node have a card each."""
    inter = resource == Resource.INTER_LINK
    bytes_per_s = np.where(inter, hardware.inter_link_bytes_per_s, hardware.intra_link_bytes_per_s)
    latency_s = np.where(inter, hardware.inter_link_latency_s, hardware.intra_link_latency_s)
    if hardware.device != "cpu":
        across = ~inter & (ranks > local)
        # A node's members leave it through as many cards at once, but no faster than they exchange inside.
        network = np.minimum(hardware.intra_link_bytes_per_s, hardware.inter_link_bytes_per_s * local)
        bytes_per_s = np.where(across, network, bytes_per_s)
        latency_s[across] = hardware.inter_link_latency_s
    return bytes_per_s, latency_s


def _hierarchical_s(n_bytes: F64, ranks: F64, local: F64, hardware: Hardware) -> F64:
    nodes = np.ceil(ranks / local)
    network_s = (nodes - 1) * (
        n_bytes / local / nodes / hardware.inter_link_bytes_per_s + hardware.inter_link_latency_s
    )
    inside_s: F64 = (local - 1) * (
        n_bytes / local / hardware.intra_link_bytes_per_s + hardware.intra_link_latency_s
    )
    return network_s + inside_s


def _all_to_all_s(n_bytes: F64, ranks: F64, local: F64, hardware: Hardware) -> F64:
    each, far = n_bytes / ranks, ranks - local
    inside_s = (local - 1) * (each / hardware.intra_link_bytes_per_s + hardware.intra_link_latency_s)
    network_s = far * (each / hardware.inter_link_bytes_per_s + hardware.inter_link_latency_s)
    return np.maximum(inside_s, network_s)
