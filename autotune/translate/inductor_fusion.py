"""Fuse the ops of graphs compiled by Inductor into the kernels that it generates for a GPU.

Inductor runs matrix products, convolutions, attention, scatters and collectives as kernels of libraries;
chains of elementwise ops, norms and reductions between two of them become one kernel, whose intermediate
tensors stay in registers (PyTorch 2, Ansel et al. 2024, section 4.2; torch/_inductor/scheduler.py
`Scheduler.fuse_nodes`). Here an op joins the kernel of an op whose output it reads, if no kernel of a
library lies on any path between their inputs. Not modelled: reductions over other dimensions, which read
their inputs again, and buffers that an output takes over from an input. An elementwise result that only
generated code reads is computed in each reader, if it takes few inputs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memtune.program import (
    COMPLEX,
    FOREVER,
    I32,
    I64,
    READS,
    UNALIGNED,
    Phase,
    Recording,
    Resource,
    Step,
    at_micro_batch,
)

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

_SCATTER, _FILL = "aten.scatter.value", "aten.full.default"
_REDUCTIONS = ("sum", "mean", "amax", "amin", "aten.var", "prod", "argm", "any", "aten.max", "aten.min")
_MOST_READS = 4
"""Inputs up to which an op with several readers is computed again in each (`realize_reads_threshold`)."""


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
    """Return `step` with each kernel of Inductor as the last of its ops, which does the work of all."""
    inside = step.ops.module > 0 if whole_model else step.ops.call >= 0
    generated = (
        inside
        & ~_calls_library(step)
        & (step.ops.phase < Phase.BOUNDARY)
        & (step.ops.resource == Resource.COMPUTE)
    )
    kernel = _kernels(step, generated)
    inner = _intermediates(step, kernel)
    again = _computed_again(step, generated, inner)
    nowhere = inner.copy()
    nowhere[list(again)] = True
    traffic = _traffic(step, kernel, nowhere, again)
    last = np.full(step.ops.n, -1, np.int64)
    np.maximum.at(last, kernel, np.arange(step.ops.n))
    absorbed = generated & ((last[kernel] != np.arange(step.ops.n)) | ~_writes(step, kernel, nowhere)[kernel])
    runs = generated & ~absorbed
    library_bytes = step.ops.traffic_bytes + _padding_bytes(step, inside)
    return step.with_ops(
        resource=np.where(absorbed, Resource.NOTHING, step.ops.resource).astype(np.uint8),
        flops=np.where(absorbed, 0.0, step.ops.flops),
        traffic_bytes=np.where(absorbed, 0, np.where(runs, traffic[kernel], library_bytes)),
        # Rows are padded, and images have channels last (torch/_inductor/config.py `layout_optimization`).
        precision=np.where(inside, step.ops.precision % UNALIGNED, step.ops.precision).astype(np.uint8),
    ).with_storages(bytes=np.where(nowhere, 0, step.storages.bytes))


def _padding_bytes(step: Step, inside: npt.NDArray[np.bool_]) -> I64:
    """Return (n,) bytes moved to pad products whose rows are not aligned."""
    # Their largest input is copied (torch/_inductor/fx_passes/pad_mm.py).
    padded = inside & (step.ops.precision & UNALIGNED > 0)
    reads = (step.uses.mode == READS) & padded[step.uses.op]
    found = np.zeros(step.ops.n, np.int64)
    np.maximum.at(found, step.uses.op[reads], 2 * step.storages.bytes[step.uses.storage[reads]])
    return found


def _calls_library(step: Step) -> npt.NDArray[np.bool_]:
    """Return (n,) which ops are kernels of libraries."""
    # So are ops on complex numbers that its decompositions leave (torch/_inductor/lowering.py
    # `fallback_node_due_to_unsupported_type`). A scatter of a constant into a constant, as the gradient of a
    # cross-entropy has it, is generated code (fx_passes/joint_graph.py `scatter_upon_const_tensor`).
    found = np.array([any(part in name for part in _LIBRARY) for name in step.names], bool)[step.ops.name]
    found |= step.ops.precision & COMPLEX > 0
    if _SCATTER in step.names and _FILL in step.names:
        scatters = step.ops.name[step.uses.op] == step.names.index(_SCATTER)
        by = step.storages.producer[step.uses.storage]
        filled = (by >= 0) & (step.ops.name[np.maximum(by, 0)] == step.names.index(_FILL))
        found[step.uses.op[scatters & filled]] = False
    return found


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
    used = np.zeros(step.storages.n, bool)
    used[step.uses.storage] = True
    outside_kernel = kernel[step.uses.op] != np.append(kernel, -1)[producer[step.uses.storage]]
    inside = (producer >= 0) & used & ~_kept(step)
    inside[step.uses.storage[outside_kernel]] = False
    return inside


def _kept(step: Step) -> npt.NDArray[np.bool_]:
    """Return (m,) which storages are saved for backward, last beyond the step or are gradients."""
    found = (step.storages.held_until == FOREVER) | (step.storages.grad_ready_after >= 0)
    found[step.saves.storage] = True
    returned = np.isin(np.arange(step.storages.n), [each.gradient for each in step.parameters])
    kept: npt.NDArray[np.bool_] = found | returned
    return kept


def _computed_again(
    step: Step, generated: npt.NDArray[np.bool_], inner: npt.NDArray[np.bool_]
) -> dict[int, frozenset[int]]:
    """Return storages that each reader computes again and no kernel writes, and what the reader reads."""
    # Inductor does so for elementwise ops with few inputs whose readers are all its own code
    # (torch/_inductor/ir.py `StorageBox.should_realize_on_reuse`).
    op_of, read = step.uses.op, step.uses.storage
    producer = step.storages.producer
    by = np.maximum(producer[read], 0)
    alike = (step.ops.phase[op_of] == step.ops.phase[by]) & (step.ops.call[op_of] == step.ops.call[by])
    may = (producer >= 0) & ~_kept(step)
    may[read[~(generated[op_of] & alike) | ((step.uses.mode != READS) & (op_of != producer[read]))]] = False
    reduces = np.array([any(part in name for part in _REDUCTIONS) for name in step.names], bool)
    reads: list[list[int]] = [[] for _ in range(step.ops.n)]
    for op, storage in zip(op_of.tolist(), read.tolist(), strict=True):
        reads[op].append(storage)
    sources: dict[int, frozenset[int] | None] = {}
    found = {}
    # In the order in which they are made: what an input reads is known before its readers come.
    for storage in np.lexsort((np.arange(step.storages.n), producer)).tolist():
        op = int(producer[storage])
        if op < 0 or not generated[op] or not (may[storage] or inner[storage]):
            continue
        # An input that is itself computed again counts with what it reads.
        parts = [sources.get(each, frozenset((each,))) for each in reads[op] if each != storage]
        given = (
            None if reduces[step.ops.name[op]] or None in parts else frozenset().union(*filter(None, parts))
        )
        if inner[storage]:
            sources[storage] = given
        elif given is not None and len(given) <= _MOST_READS:
            sources[storage] = found[storage] = given
    return found


def _writes(step: Step, kernel: I32, nowhere: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return (n,) which kernels, by number, write a result."""
    found = np.zeros(step.ops.n, bool)
    found[kernel[step.storages.producer[(step.storages.producer >= 0) & ~nowhere]]] = True
    found[kernel[step.uses.op[(step.uses.mode != READS) & ~nowhere[step.uses.storage]]]] = True
    return found


def _traffic(
    step: Step, kernel: I32, nowhere: npt.NDArray[np.bool_], again: dict[int, frozenset[int]]
) -> I64:
    """Return (n,) bytes that each kernel reads from others and writes for them, by its number."""
    found = np.zeros(step.ops.n, np.int64)
    made_by = np.append(kernel, -1)[step.storages.producer].tolist()
    n_bytes = step.storages.bytes.tolist()
    reads: set[tuple[int, int]] = set()
    for number, storage in zip(kernel[step.uses.op].tolist(), step.uses.storage.tolist(), strict=True):
        instead = again.get(storage) if made_by[storage] != number else None
        reads.update((number, each) for each in ((storage,) if instead is None else instead))
    for number, storage in reads:
        if made_by[storage] != number and not nowhere[storage]:
            found[number] += n_bytes[storage]
    kept = np.flatnonzero((step.storages.producer >= 0) & ~nowhere)
    np.add.at(found, kernel[step.storages.producer[kept]], step.storages.bytes[kept])
    return found
