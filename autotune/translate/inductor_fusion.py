"""Fuse the ops of graphs compiled by Inductor into the kernels that it generates for a GPU.

Inductor runs matrix products, convolutions, attention, scatters and collectives as kernels of libraries;
chains of elementwise ops, norms and reductions between two of them become one kernel, whose intermediate
tensors stay in registers (PyTorch 2, Ansel et al. 2024, section 4.2; torch/_inductor/scheduler.py
`Scheduler.fuse_nodes`). Here an op joins the kernel of an op whose output it reads, if no kernel of a
library lies on any path between their inputs. Not modelled: reductions over other dimensions, which read
their inputs again, and buffers that an output takes over from an input.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memtune.program import FOREVER, I32, I64, UNALIGNED, Phase, Recording, Resource, Step, at_micro_batch

_LIBRARY = (
    "mm.",
    "bmm",
    "convolution",
    "attention",
    "rnn",
    "scatter",
    "index_put",
    "embedding_dense_backward",
    "sort",
    "topk",
    "cumsum",
    "memtune.",
    "c10d",
    "fsdp.",
)
"""Parts of names of ops that Inductor calls instead of generating code."""


def fused(recording: Recording, *, whole_model: bool) -> Recording:
    """Return `recording` of a compiled model with the traffic and memory of fused kernels.

    Ops keep their rows: the last op of a kernel has its traffic and the others do nothing; intermediate
    tensors have no bytes.

    Args:
        recording: Made from Inductor's graphs.
        whole_model: The model is one graph; else every block is.
    """
    small = _fused(recording.step, whole_model)
    more = 2
    # Fused at two sizes, since the slopes of kernels follow from those of their ops.
    large = _fused(at_micro_batch(recording, recording.small + more), whole_model)
    return replace(
        recording,
        step=small,
        bytes_slope=(large.storages.bytes - small.storages.bytes) // more,
        traffic_slope=(large.ops.traffic_bytes - small.ops.traffic_bytes) // more,
        flops_slope=(large.ops.flops - small.ops.flops) / more,
        exact={size: _fused(step, whole_model) for size, step in recording.exact.items()},
    )


def _fused(step: Step, whole_model: bool) -> Step:
    is_library = np.array([any(part in name for part in _LIBRARY) for name in step.names])
    inside = step.ops.module > 0 if whole_model else step.ops.call >= 0
    generated = (
        inside
        & ~is_library[step.ops.name]
        & (step.ops.phase < Phase.BOUNDARY)
        & (step.ops.resource == Resource.COMPUTE)
    )
    kernel = _kernels(step, generated)
    inner = _intermediates(step, kernel)
    traffic = _traffic(step, kernel, inner)
    last = np.full(step.ops.n, -1, np.int64)
    np.maximum.at(last, kernel, np.arange(step.ops.n))
    absorbed = generated & (last[kernel] != np.arange(step.ops.n))
    runs = generated & ~absorbed
    return step.with_ops(
        resource=np.where(absorbed, Resource.NOTHING, step.ops.resource).astype(np.uint8),
        flops=np.where(absorbed, 0.0, step.ops.flops),
        traffic_bytes=np.where(absorbed, 0, np.where(runs, traffic[kernel], step.ops.traffic_bytes)),
        # it pads matrices to aligned rows (torch/_inductor/fx_passes/pad_mm.py)
        precision=np.where(inside, step.ops.precision % UNALIGNED, step.ops.precision).astype(np.uint8),
    ).with_storages(bytes=np.where(inner, 0, step.storages.bytes))


def _kernels(step: Step, generated: npt.NDArray[np.bool_]) -> I32:
    """Return (n,) the number of each op's kernel: the row of one of its ops."""
    parent = list(range(step.ops.n))

    def root(op: int) -> int:
        while parent[op] != op:
            # Union-find with path halving: steps have thousands of ops.
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    # Kernels of libraries on the longest path to an op: ops of one generated kernel have the same number.
    depth = [0] * step.ops.n
    producers = step.storages.producer[step.uses.storage].tolist()
    last_writer: dict[int, int] = {}
    for op, storage, producer, mode in zip(
        step.uses.op.tolist(), step.uses.storage.tolist(), producers, step.uses.mode.tolist(), strict=True
    ):
        before = last_writer.get(storage, producer)
        if mode:
            last_writer[storage] = op
        if before < 0 or before >= op:
            continue
        depth[op] = max(depth[op], depth[before] + (not generated[before]))
    phase = step.ops.phase.tolist()
    for op, producer in zip(step.uses.op.tolist(), producers, strict=True):
        if 0 <= producer < op and generated[op] and generated[producer]:
            if depth[op] == depth[producer] and phase[op] == phase[producer]:
                parent[root(op)] = root(producer)
    return np.array([root(op) for op in range(step.ops.n)], np.int32)


def _intermediates(step: Step, kernel: I32) -> npt.NDArray[np.bool_]:
    """Return (m,) which storages only the kernel that makes them uses."""
    producer = step.storages.producer
    made = producer >= 0
    inside = np.zeros(step.storages.n, bool)
    inside[made] = True
    used = np.zeros(step.storages.n, bool)
    used[step.uses.storage] = True
    elsewhere = kernel[step.uses.op] != np.append(kernel, -1)[producer[step.uses.storage]]
    inside[step.uses.storage[elsewhere]] = False
    inside[step.saves.storage] = False
    lasting = (step.storages.held_until == FOREVER) | (step.storages.grad_ready_after >= 0)
    returned = np.isin(np.arange(step.storages.n), [each.gradient for each in step.parameters])
    found: npt.NDArray[np.bool_] = inside & used & ~lasting & ~returned
    return found


def _traffic(step: Step, kernel: I32, inner: npt.NDArray[np.bool_]) -> I64:
    """Return (n,) bytes that each kernel reads from others and writes for them, by its number."""
    found = np.zeros(step.ops.n, np.int64)
    mine = kernel[step.uses.op].astype(np.int64)
    pairs = np.unique(np.stack([mine, step.uses.storage]), axis=1)
    made_here = np.append(kernel, -1)[step.storages.producer[pairs[1]]] == pairs[0]
    np.add.at(found, pairs[0], np.where(made_here, 0, step.storages.bytes[pairs[1]]))
    kept = np.flatnonzero((step.storages.producer >= 0) & ~inner)
    np.add.at(found, kernel[step.storages.producer[kept]], step.storages.bytes[kept])
    return found
