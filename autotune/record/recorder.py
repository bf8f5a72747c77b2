"""Record a workload: run the user's code on fake tensors at two micro-batches and build a Recording.

Sizes are affine functions of the micro-batch, fitted to the two recordings; further micro-batches are
recorded to check them (`check`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memtune.autotune.record.recording_session import Session, Trace, fake_errors_unlogged, open_session
from memtune.compile import Compiling
from memtune.config import fingerprint
from memtune.errors import WorkloadError
from memtune.hardware import Device
from memtune.memory import WorkspaceTable
from memtune.offload.core import inner_optimizers, not_one_by_one
from memtune.offload.optimizer import no_native_update_for
from memtune.program import I64, Edit, Kind, ModelFacts, OptimizerFacts, Recording, Step, at_micro_batch
from memtune.workload import DRAWS, Workload, summary

_AFFINE_TOLERANCE = 0.01
"""Relative error of the affine peak from which a size is not affine; scratch is never quite affine."""
_REAL_STEP_SHARE = 0.25
"""Share of this machine's memory that a real step may use, where the ops differ between micro-batches."""


@fake_errors_unlogged()
def record(
    workload: Workload,
    *,
    small: int = 2,
    large: int = 4,
    sizes: Iterable[int] = (),
    between: Iterable[int] = (),
    workspace: WorkspaceTable | None = None,
    target: Device = "cpu",
    compiling: Compiling | None = None,
    change: Callable[[Session], None] | None = None,
) -> Recording:
    """Record one training step of `workload`.

    Args:
        workload: The user's model, batch, loss and optimizer.
        small: First micro-batch. At least 2: at 1 the program differs (broadcast dimensions), so sizes could
            not be extrapolated.
        large: Second micro-batch; sizes in between and beyond follow from the two.
        sizes: Micro-batches that will be used. Each is recorded too, unless that takes a real step; a real
            step is taken where ops differ between micro-batches and it needs a small part of this machine's
            memory.
        between: Micro-batches that are recorded only if the largest of `sizes` is not affine (experts with a
            capacity, contrastive losses).
        workspace: Table of CPU kernels' scratch, by op; missing entries are measured in a child process and
            saved. Without it the recording holds tensors only, and its notes report that.
        target: Device on which the step is to run; a recording for another one than CPU is meant for
            `translate`.
        compiling: Scope and settings of torch.compile; None records the eager model.
        change: Called with a fresh session to change model and optimizer before recording.

    Returns:
        The recording, with its rung and the reasons why lower rungs failed.

    Raises:
        WorkloadError: Even a real step on CPU fails; the message is that step's error.
        ApplyError: The requested parts of the model were not compiled.
    """
    started = time.monotonic()
    workload.check_batch()
    session, small_trace, notes = open_session(workload, small, target, compiling, change)
    large_trace, traced = _large_trace(session, small_trace, large)
    # A real step takes the time and memory of training, so none is run for a size that may suffice by itself.
    further = set(sizes) - {small, large} if session.fake is not None else set()
    traces, failing = _further_traces(traced, further, (small, large), required=max(sizes, default=0))
    sizes, between = set(sizes) - failing.keys(), set(between) - failing.keys()
    notes += [f"micro-batch {size} is left out: {summary(each, 120)}" for size, each in failing.items()]
    if workspace is None:
        notes.append("kernel workspaces were not measured: the step holds tensors only")
    else:
        _measure_scratch([small_trace, large_trace, *traces.values()], workspace)
    # Row by row: sizes can be subtracted only where both run the same ops on the same storages.
    same = _same_program(small_trace.step, large_trace.step)
    first, second = _with_scratch(small_trace, large_trace if same else small_trace, workspace)
    notes += _assumptions(session, small, large, same)
    recording = Recording(
        small=small,
        step=first,
        # Integer division is exact for bytes that are affine; the check of further sizes finds those that are
        # not.
        bytes_slope=(second.storages.bytes - first.storages.bytes) // (large - small),
        flops_slope=(second.ops.flops - first.ops.flops) / (large - small),
        traffic_slope=(second.ops.traffic_bytes - first.ops.traffic_bytes) // (large - small),
        rung=session.rung,
        notes=tuple(notes),
        checked=frozenset({small, large} if same else {small}),
        failing=frozenset(failing),
        hints={small: small_trace.hints, large: large_trace.hints} if same else {small: small_trace.hints},
        keeps_gradients=not workload.zero_grad_to_none,
        autocast_cache=workload.autocast_cache,
        model=_model_facts(session),
        optimizer=OptimizerFacts(
            no_native_update_for(session.optimizer),
            not_one_by_one(session.optimizer),
            inner_optimizers(session.optimizer),
        ),
        batch_factors=_batch_factors(session, large_trace.step, large, {small, large, *sizes, *between}),
    )
    wanted = sorted(
        size
        for size in set(sizes)
        if session.fake is not None or (not same and _fits_in_memory(recording, size))
    )
    for size in wanted:
        if size not in recording.checked:
            recording = check(recording, session, size, workspace, traces.get(size) or traced(size))
    # The largest size has the largest error, so it decides for all.
    if wanted and _not_affine(recording, wanted[-1]):
        for size in sorted(set(between) - recording.checked):
            recording = check(recording, session, size, workspace, traced(size))
    return replace(recording, record_s=time.monotonic() - started)


def _large_trace(session: Session, small_trace: Trace, large: int) -> tuple[Trace, Callable[[int], Trace]]:
    """Return the trace of `large` samples, and the function that traces further sizes."""
    trace = session.traced(large)
    if session.fake is None or session.compiled is not None or _same_program(small_trace.step, trace.step):
        return trace, session.traced
    # A model that keeps tensors of the last batch creates others where the size has changed.
    steady = session.after_same_size(large)
    if _same_program(small_trace.step, steady.step):
        return steady, session.after_same_size
    return trace, session.traced


def _further_traces(
    traced: Callable[[int], Trace], sizes: Iterable[int], recorded: tuple[int, int], *, required: int
) -> tuple[dict[int, Trace], dict[int, WorkloadError]]:
    """Return the traces of `sizes` besides the `recorded` two, and the errors of those that cannot run.

    Raises:
        WorkloadError: The size `required` cannot run.
    """
    small, large = recorded
    traces, failing = dict[int, Trace](), dict[int, WorkloadError]()
    for size in sorted(sizes, reverse=True):
        try:
            traces[size] = traced(size)
        except WorkloadError as error:
            if size == required < small:
                raise WorkloadError(
                    error.what,
                    evidence=f"Micro-batches of {small} and {large} samples run, those of {size} do not.",
                    fix=f"a larger global batch, or fewer ranks, so that each has {small} samples",
                    code=error.code,
                ) from error
            if size == required:
                raise
            failing[size] = error  # BatchNorm refuses one sample, and a search can do without
    return traces, failing


def _assumptions(session: Session, small: int, large: int, same: bool) -> list[str]:
    """Return notes on what the recording assumes of batches, optimizer, blocks and other micro-batches.

    `same`: the steps at `small` and `large` run the same ops.
    """
    notes = list(session.assumed)
    drawn = session.drawn_at(large)
    if drawn is not None:
        notes.append(
            f"batches vary in size ({drawn.least_bytes} to {drawn.most_bytes} bytes of {large} samples in"
            f" {DRAWS} draws): peaks are those of the largest drawn, their intervals reach half the spread"
            " below and above; training may draw larger ones; worst_batch(size) in model.py gives the largest"
        )
    if session.optimizer_dedup is not None and session.optimizer_dedup.disabled_reason:
        notes.append(f"the optimizer's step was recorded in full: {session.optimizer_dedup.disabled_reason}")
    # In a model without equal blocks there was nothing to skip.
    if (
        session.block_dedup is not None
        and session.block_dedup.skipped
        and session.block_dedup.disabled_reason
    ):
        notes.append(f"equal blocks were recorded in full: {session.block_dedup.disabled_reason}")
    if session.fake is None:
        notes.append(
            "sizes may depend on the data: for other micro-batches they are extrapolated linearly from"
            f" {small} and {large}"
        )
    if not same:
        notes.append(
            f"the step at micro-batch {large} runs different ops than at {small}: sizes are known only at"
            f" {small}"
        )
    return notes


def _model_facts(session: Session) -> ModelFacts:
    parameters = sum(each.numel() for each in session.model.parameters())
    return ModelFacts(fingerprint(session.model), parameters)


def _batch_factors(
    session: Session, step: Step, size: int, sizes: Iterable[int]
) -> dict[int, tuple[float, float]]:
    """Return by micro-batch the factors on a batch's tensors and activations, for batches that are half the
    spread of the drawn ones smaller and larger than the largest; empty if all are of one size.

    Args:
        session: The session that recorded `step`.
        step: On the largest batch of `size` samples. A step on the smallest one shows how activations grow
            with the bytes of a batch.
        size: Micro-batch of `step`.
        sizes: Micro-batches of the result.
    """
    drawn = session.drawn_at(size)
    if drawn is None:
        return {}
    exponent = 1.0
    # A compiled model would be compiled once more.
    if session.compiled is None and drawn.least_bytes < drawn.most_bytes:
        # User code may raise anything on fake tensors of a batch that nothing has run on.
        with suppress(Exception):
            smaller = replace(session, on_smallest=True).traced(size).step
            growth = math.log(_bytes_of_batch(step) / _bytes_of_batch(smaller))
            exponent = max(0.0, growth / math.log(drawn.most_bytes / drawn.least_bytes))
    found = {}
    for each in sizes:
        drawn = session.drawn_at(each)
        if drawn is not None:
            half = (drawn.most_bytes - drawn.least_bytes) / drawn.most_bytes / 2
            found[each] = ((1 - half) ** exponent, (1 + half) ** exponent)
    return found


def _bytes_of_batch(step: Step) -> int:
    """Return the bytes of a step's batch and of what autograd saves."""
    return int(step.storages.bytes[step.storages.kind == Kind.BATCH].sum()) + step.saved_bytes()


def _fits_in_memory(recording: Recording, micro_batch: int) -> bool:
    """Return whether a real step at `micro_batch` fits in this machine's memory by linear growth."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return recording.step.peak_bytes() * micro_batch / recording.small < _REAL_STEP_SHARE * memory_bytes


def _not_affine(recording: Recording, micro_batch: int) -> bool:
    """Return whether the recorded peak at `micro_batch` differs from the affine prediction."""
    real, affine = recording.at(micro_batch).peak_bytes(), at_micro_batch(recording, micro_batch).peak_bytes()
    return abs(real - affine) > _AFFINE_TOLERANCE * real


def check(
    recording: Recording,
    session: Session,
    micro_batch: int,
    workspace: WorkspaceTable | None = None,
    trace: Trace | None = None,
) -> Recording:
    """Record at `micro_batch` too, use that step for this size, and note errors of the affine sizes."""
    if micro_batch in recording.checked:
        return recording
    trace = trace or session.traced(micro_batch)
    step = step_of(trace, workspace)
    predicted = recording.at(micro_batch)
    notes = recording.notes
    if not _same_program(step, predicted) or not np.array_equal(
        step.storages.bytes, predicted.storages.bytes
    ):
        more = step.peak_bytes() - predicted.peak_bytes()
        notes += (
            (
                f"micro-batch {micro_batch} was recorded by itself: its peak differs by {more:+d} bytes from"
                " the affine sizes"
            ),
        )
    exact = {**recording.exact, micro_batch: step}
    hints = {**recording.hints, micro_batch: trace.hints}
    return replace(
        recording, exact=exact, checked=recording.checked | {micro_batch}, notes=notes, hints=hints
    )


def step_of(trace: Trace, workspace: WorkspaceTable | None) -> Step:
    """Return the traced step, with storages for kernel scratch if there is a table to look it up in."""
    if workspace is None:
        return trace.step
    scratch = _workspaces(trace, workspace)
    return _with_workspaces(trace.step, scratch, scratch > 0)


def _measure_scratch(traces: Iterable[Trace], table: WorkspaceTable) -> None:
    """Measure the ops of all `traces` that the table lacks, in one child process, and save them."""
    # All in one child process, which starts torch once.
    keys = dict.fromkeys(key for trace in traces for key in trace.hints.signatures if key)
    if any(key not in table.entries and key not in table.unknown for key in keys):
        table.fill_in_child(keys)
        table.save()


def _with_scratch(small: Trace, large: Trace, workspace: WorkspaceTable | None) -> tuple[Step, Step]:
    """Return two steps of the same ops, with storages for kernel scratch if there is a table of it."""
    if workspace is None:
        return small.step, large.step
    scratch = _workspaces(small, workspace), _workspaces(large, workspace)
    # Both steps get storages for the same ops, or their bytes could not be subtracted.
    has_scratch = (scratch[0] > 0) | (scratch[1] > 0)
    return (
        _with_workspaces(small.step, scratch[0], has_scratch),
        _with_workspaces(large.step, scratch[1], has_scratch),
    )


def _workspaces(trace: Trace, table: WorkspaceTable) -> I64:
    """Return (n,) scratch bytes of every op; measure entries that the table lacks and save them."""
    _measure_scratch([trace], table)
    return np.asarray([table.workspace_bytes(key) if key else 0 for key in trace.hints.signatures], np.int64)


def _with_workspaces(step: Step, scratch_bytes: I64, has_scratch: npt.NDArray[np.bool_]) -> Step:
    """Return `step` with a storage for the scratch of every op in `has_scratch`, live while the op runs."""
    ops = np.flatnonzero(has_scratch).astype(np.int32)
    edit = Edit(step)
    edit.add_storages(scratch_bytes[ops], producer=ops, kind=Kind.WORKSPACE)
    return edit.done()


def _same_program(first: Step, second: Step) -> bool:
    return (
        first.names == second.names
        and np.array_equal(first.ops.name, second.ops.name)
        and np.array_equal(first.storages.producer, second.storages.producer)
        and np.array_equal(first.uses.storage, second.uses.storage)
    )
