"""Record a workload: run the user's code on fake tensors at two micro-batches and build a Recording.

A model that cannot be built or run on one recording rung is tried on the next (`RUNGS`); the recording names
the rung that succeeded and why the lower ones failed. Sizes are affine functions of the micro-batch, fitted
to the two recordings; further micro-batches are recorded to check them (`check`).
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from memtune.autotune.record.accelerator_autocast import accelerator_autocast_on_cpu
from memtune.autotune.record.block_dedup import BlockDedup, optimizer_mark
from memtune.autotune.record.block_expand import PartialRecording
from memtune.autotune.record.fake_divergence import BatchValues, as_in_training
from memtune.autotune.record.foreach_record import foreach_phase, step_counters
from memtune.autotune.record.kernel_calls import CallRecorder
from memtune.autotune.record.optimizer_dedup import OptimizerDedup
from memtune.autotune.record.tracer import Tracer
from memtune.compile import CompiledModel, Compiling
from memtune.deferred_init import OneFakeMode
from memtune.errors import MemtuneError, WorkloadError
from memtune.hardware import Device
from memtune.memory import RealOutputs, WorkspaceTable
from memtune.offload.core import not_one_by_one
from memtune.offload.optimizer import available_bytes, no_native_update_for
from memtune.program import I64, Edit, Hints, Kind, OptimizerFacts, Recording, Step, at_micro_batch
from memtune.runtime import (
    HOST,
    Order,
    SyncContext,
    accumulate,
    mark,
    prepare_model,
    tier,
    train_step,
)
from memtune.units import format_bytes
from memtune.workload import DRAWS, DrawnBatches, Workload, map_tensors, summary, user_line

RUNGS = {
    "fake": "on fake tensors",
    "meta": "with the model built on the meta device",
    "real-init": "with the model built for real, then made fake",
    "real-step": "with a real step on CPU",
}
"""The recording rungs, lowest first, with the phrase that notes use for each."""
CPU = torch.device("cpu")
_AFFINE_TOLERANCE = 0.01
"""Relative error of the affine peak from which a size counts as not affine; kernel scratch is never quite
affine.
"""
_REAL_STEP_SHARE = 0.25
"""Share of this machine's memory that a real step may use, where the ops differ between micro-batches."""
_NO_HOOKS = "don't yet support saved tensor hooks"
"""In the error of a `torch.func` transform that runs under hooks on saved tensors."""
SEED = 0
"""Seed of every random draw while recording, so that data-dependent code (routing) takes the same path each
time.
"""


@dataclass(frozen=True)
class Trace:
    """A traced step: the Step, and the hints that translation needs in addition."""

    step: Step
    hints: Hints


@dataclass(frozen=True)
class Session:
    """Model and optimizer on one recording rung, ready to be traced."""

    workload: Workload
    rung: str
    mode: AbstractContextManager[Any]
    fake: FakeTensorMode | None
    model: nn.Module
    optimizer: Optimizer
    blocks: list[str]
    sizes: WorkspaceTable
    """Output sizes of CPU kernels whose fake implementations report others."""
    target: Device = "cpu"
    """Device on which the step is to run; for another one than CPU, the recorded code paths are those that
    `translate` can follow.
    """
    sync: SyncContext = field(default=lambda last: nullcontext())
    """Context manager around each micro-batch, given whether it is the last; set by techniques that reduce
    gradients.
    """
    order: Order | None = None
    """Order of the micro-batches; None runs them one after the other."""
    optimizer_dedup: OptimizerDedup | None = None
    """Records the optimizer's step once per parameter signature; None records it for every parameter."""
    block_dedup: BlockDedup | None = None
    """Records forward and backward of equal blocks once; None runs all blocks."""
    assumed: list[str] = field(default_factory=list)
    """Notes on answers that user code got where it read the data of fake tensors."""
    values: BatchValues | None = None
    """Known integers and masks of the micro-batches, although the tensors are fake; None on the real rung."""
    drawn: dict[int, DrawnBatches | None] = field(default_factory=dict)
    """The batches drawn, by micro-batch, where they vary in size."""
    on_smallest: bool = False
    """Steps run on the smallest batch drawn, not on the largest."""
    observes_saves: bool = True
    """The tracer notes what autograd saves. Otherwise Python counts as the holder of every saved tensor."""
    compiled: CompiledModel | None = None
    """The parts of the model that run through torch.compile. Their graphs are made in an untraced step,
    because Dynamo must not see the recorder.
    """

    def batch(self, size: int) -> Any:
        """Return one micro-batch of `size` samples, made fake unless the rung is real."""
        with tier(HOST):
            drawn = self.drawn_at(size)
            if drawn is not None:
                batch = drawn.smallest if self.on_smallest else drawn.largest
            elif self.workload.has_worst_batch:
                batch = self.workload.make_worst_batch(size)
            else:
                batch = self.workload.make_batch(size)
        if self.values is not None:
            batch = map_tensors(batch, self.values.fake)
        map_tensors(batch, lambda tensor: mark(tensor, HOST))
        return batch

    def drawn_at(self, size: int) -> DrawnBatches | None:
        """Return the batches drawn at micro-batch `size`, drawn once; None if all are of one size."""
        if size not in self.drawn:
            self.drawn[size] = self.workload.drawn_batches(size)
        return self.drawn[size]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the recording modes: fake tensors unless the rung is real, real output sizes of CPU kernels,
        random draws from `SEED`.
        """
        casts = nullcontext() if self.target == "cpu" else accelerator_autocast_on_cpu(self.target)
        with casts, torch.random.fork_rng(devices=[]), self.mode:
            torch.manual_seed(SEED)
            if self.fake is None:
                yield
            else:
                # Dynamo compiles nothing under a dispatch mode, so compiled models go without one.
                values = self.values if self.compiled is None else None
                with as_in_training(self.assumed, self.optimizer, values), RealOutputs(self.sizes):
                    yield

    def warm_up(self, size: int) -> None:
        """Run one untraced step for the optimizer's state; of equal blocks only some, if possible."""
        with self.entered():
            batches = [self.batch(size)]
            if self.optimizer_dedup is None:
                train_step(
                    self.model,
                    self.optimizer,
                    self.workload.loss,
                    batches,
                    CPU,
                    sync=self.sync,
                    order=self.order,
                )
                return
            dedup = self.block_dedup
            # As `train_step`, but with an optimizer step that `OptimizerDedup` shortens to one of each
            # signature.
            if dedup is None or not dedup.attempt(lambda: self._warm_up_partially(dedup, batches)):
                self.optimizer.zero_grad(set_to_none=True)
                accumulate(self.model, self.workload.loss, batches, CPU, sync=self.sync, order=self.order)
            self.optimizer_dedup.first_step()
            self.optimizer.zero_grad(set_to_none=True)

    def _warm_up_partially(self, dedup: BlockDedup, batches: list[Any]) -> bool:
        """Run forward and backward without the blocks that `dedup` skips; return False if all must run."""
        if dedup.disabled_reason or self.optimizer_dedup is None or self.optimizer_dedup.disabled_reason:
            return False
        with dedup.skipping_blocks():
            accumulate(self.model, self.workload.loss, batches, CPU, sync=self.sync, order=self.order)
        dedup.lend_gradients()
        return True

    def trace(self, size: int, *, micro_batches: int = 1, trace_last: bool = False) -> Step:
        """Return the steady-state step at micro-batch `size`; with `trace_last`, only the last micro-batch of
        several and the optimizer.
        """
        return self.traced(size, micro_batches=micro_batches, trace_last=trace_last).step

    def traced(self, size: int, *, micro_batches: int = 1, trace_last: bool = False) -> Trace:
        """Return the Step as in `trace`, together with its hints."""
        dedup = self.block_dedup
        # Deduplication is verified for a step of one micro-batch.
        if dedup is None or micro_batches > 1:
            return self._record_full(size, micro_batches=micro_batches, trace_last=trace_last)
        if dedup.verified and (
            expanded := dedup.attempt(lambda: dedup.expand(self._record_partial(dedup, size)))
        ):
            return Trace(*expanded)
        if not dedup.verified and not dedup.disabled_reason:
            if trace := dedup.attempt(lambda: self._verified(dedup, size)):
                return trace
            if dedup.lent:  # skipped blocks have had no warm-up
                self.optimizer.state.clear()
                self.warm_up(size)
        return self._record_full(size)

    def _verified(self, dedup: BlockDedup, size: int) -> Trace:
        """Record the first size in full, which verifies that blocks may be left out of all further ones."""
        trace = self._record_full(size, check=dedup.check_lent)
        dedup.verify(trace.step, trace.hints, self._record_partial(dedup, size))
        return trace

    def _record_partial(self, dedup: BlockDedup, size: int) -> PartialRecording:
        """Record forward and backward, without the blocks that `dedup` skips and without the optimizer."""
        # The optimizer's rows follow from those of the full recording: it does not see the batch.
        tracer = Tracer(self.model, self.optimizer, dedup.recorded, on_cpu=self.target == "cpu")
        with self.entered(), dedup.skipping_blocks():
            batches = [self.batch(size)]
            calls = CallRecorder(tracer, fuse=self.target != "cpu")
            try:
                with tracer.recording():
                    with calls:
                        loss = accumulate(
                            self.model, self.workload.loss, batches, CPU, sync=self.sync, order=self.order
                        )
                    tracer.note_gradients()
                    gradients = dedup.gradient_specs()
                    optimizer_mark(tracer)
                    self.optimizer.zero_grad(set_to_none=True)
                    del loss  # as in `_record_full`
            finally:
                self.optimizer.zero_grad(set_to_none=True)
        return dedup.partial_recording(tracer, calls.calls, self.optimizer, gradients)

    def _record_full(
        self,
        size: int,
        *,
        micro_batches: int = 1,
        trace_last: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> Trace:
        """Record a whole step; `check` is called when its gradients are complete."""
        if self.compiled is not None:
            # Another size is another graph, and a graph cannot be compiled while its ops are traced.
            self.warm_up(size)
        tracer = Tracer(
            self.model,
            self.optimizer,
            self.blocks,
            placeholders=self.observes_saves,
            on_cpu=self.target == "cpu",
        )
        with self.entered():
            # Before the recording starts, so that batches count as storages from before the step.
            batches = [self.batch(size) for _ in range(micro_batches)]
            if trace_last and micro_batches > 1:
                accumulate(
                    self.model, self.workload.loss, batches[:-1], CPU, sync=lambda last: self.sync(False)
                )
                batches = batches[-1:]
            calls = CallRecorder(tracer, fuse=self.target != "cpu")
            with tracer.recording():
                with calls if self.compiled is None else _no_new_graphs():
                    loss = accumulate(
                        self.model, self.workload.loss, batches, CPU, sync=self.sync, order=self.order
                    )
                tracer.note_gradients()
                check()
                foreach = None
                if self.target != "cpu":
                    with tracer.paused():
                        # Inserted here, since it needs the gradients; its ops are not part of this step.
                        foreach = (
                            self.optimizer_dedup.foreach()
                            if self.optimizer_dedup
                            else foreach_phase(self.model, self.optimizer, self.blocks)
                        )
                counters = step_counters(tracer, self.optimizer)
                self.optimizer.step() if self.optimizer_dedup is None else self.optimizer_dedup.step(tracer)
                self.optimizer.zero_grad(set_to_none=True)
                del loss  # `train_step` holds the loss until here, so its storage lives as long in the Step
        return Trace(
            tracer.step(), Hints(tuple(calls.calls), tuple(tracer.draft.signatures), foreach, counters)
        )


@contextmanager
def fake_errors_unlogged() -> Iterator[None]:
    """Silence torch's log of an op that failed on fake tensors: it raises too, and the next attempt may
    succeed.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


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
    large_trace = session.traced(large)
    # A real step takes the time and memory of training, so none is run for a size that may suffice by itself.
    further = set(sizes) - {small, large} if session.fake is not None else set()
    traces = {size: session.traced(size) for size in sorted(further)}
    # Row by row: sizes can be subtracted only where both run the same ops on the same storages.
    first, second = small_trace.step, large_trace.step
    same = _same_program(first, second)
    if workspace is None:
        notes.append("kernel workspaces were not measured: the step holds tensors only")
    else:
        _measure_scratch([small_trace, large_trace, *traces.values()], workspace)
        scratch = _workspaces(small_trace, workspace), _workspaces(large_trace, workspace)
        # Both steps get rows for the same ops, or their storages could not be subtracted.
        has_scratch = (scratch[0] > 0) | (scratch[1] > 0) if same else scratch[0] > 0
        first = _with_workspaces(first, scratch[0], has_scratch)
        if same:
            second = _with_workspaces(second, scratch[1], has_scratch)
    notes += _assumptions(session, small, large, same)
    if not same:
        second = first
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
        hints={small: small_trace.hints, large: large_trace.hints} if same else {small: small_trace.hints},
        keeps_gradients=not workload.zero_grad_to_none,
        autocast_cache=workload.autocast_cache,
        optimizer=OptimizerFacts(no_native_update_for(session.optimizer), not_one_by_one(session.optimizer)),
        batch_factors=_batch_factors(session, large_trace.step, large, {small, large, *sizes, *between}),
    )
    wanted = sorted(
        size
        for size in set(sizes)
        if session.fake is not None or (not same and _fits_in_memory(recording, size))
    )
    for size in wanted:
        recording = check(recording, session, size, workspace, traces.get(size))
    # The largest size has the largest error, so it decides for all.
    if wanted and _not_affine(recording, wanted[-1]):
        for size in sorted(set(between)):
            recording = check(recording, session, size, workspace)
    return replace(recording, record_s=time.monotonic() - started)


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
    """Record at `micro_batch` too, unless `trace` is given, use that step for this size, and note errors of
    the affine sizes.
    """
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


def _traced_on(
    workload: Workload,
    rung: str,
    micro_batch: int,
    target: Device,
    compiling: Compiling | None,
    change: Callable[[Session], None] | None,
    *,
    observes_saves: bool = True,
) -> tuple[Session, Trace]:
    """Return a session on `rung` and its trace; raises any error of the user's code."""
    session = replace(start_session(workload, rung), target=target, observes_saves=observes_saves)
    if change is not None:
        change(session)
    session = _with_dedup(session) if compiling is None else _with_compile(session, compiling)
    session.warm_up(micro_batch)
    return session, session.traced(micro_batch)


@fake_errors_unlogged()
def open_session(
    workload: Workload,
    micro_batch: int,
    target: Device = "cpu",
    compiling: Compiling | None = None,
    change: Callable[[Session], None] | None = None,
) -> tuple[Session, Trace, list[str]]:
    """Open a session on the first rung that records; return it, its trace and why lower rungs failed.

    Raises:
        WorkloadError: The real step, which is the last rung, fails too.
    """
    notes: list[str] = []
    for rung, how in RUNGS.items():
        try:
            try:
                session, trace = _traced_on(workload, rung, micro_batch, target, compiling, change)
            except Exception as error:
                # The tracer's placeholders are hooks on saved tensors, so it goes without them.
                if _NO_HOOKS not in str(error):
                    raise
                session, trace = _traced_on(
                    workload, rung, micro_batch, target, compiling, change, observes_saves=False
                )
                notes.append(
                    "torch.func in loss() allows no hooks on saved tensors: nothing can be recomputed or"
                    " offloaded one by one"
                )
        # User code may raise anything on fake tensors. The last rung is real: its error is the user's.
        except Exception as error:
            if rung == "real-step":
                if isinstance(error, MemtuneError):
                    raise
                # torch's error on reading the storage of a sparse tensor
                if "SparseTensorImpl" in str(error):
                    raise WorkloadError(
                        "the training step makes sparse tensors; memtune counts bytes of dense tensors only.",
                        fix=(
                            "nn.Embedding(…, sparse=False) and a dense optimizer (Adam, Adagrad, SGD instead"
                            " of SparseAdam)"
                        ),
                        code="MT118",
                    ) from error
                fix = "make it train without memtune first"
                raise WorkloadError(f"One training step fails: {error}", fix=fix, code="MT118") from error
            notes.append(f"rung {rung}: {error_line(error, workload)}")
            # The first note has the error on plain fake tensors, which says most about the model.
            _require_memory_for_weights(workload, rung, notes[0])
        else:
            if session.compiled is not None:
                session.compiled.check()
            if rung != "fake":
                notes.append(f"so the step was recorded {how}")
            return session, trace, notes
    raise AssertionError("unreachable: the last rung returns or raises")


@contextmanager
def _no_new_graphs() -> Iterator[None]:
    """Run existing graphs but compile none: neither the recorder's own code nor a graph that includes it."""
    with torch.compiler.set_stance("eager_on_recompile"):
        yield


def _with_dedup(session: Session) -> Session:
    """Return `session` with deduplication of equal blocks and parameters; it needs a plain step."""
    if session.fake is None:
        return session
    return replace(
        session,
        optimizer_dedup=OptimizerDedup(session.model, session.optimizer, session.blocks),
        block_dedup=BlockDedup(session.model, session.blocks) if session.observes_saves else None,
    )


def _with_compile(session: Session, compiling: Compiling) -> Session:
    """Return `session` with the model compiled as `compiling` specifies; a model compiled whole has no
    blocks.
    """
    regions = session.blocks if compiling.scope == "blocks" else [""]
    compiled = CompiledModel(
        session.model, regions, f"recorded {compiling.backend}", dict(compiling.partitioning)
    )
    compiled.install()
    return replace(session, compiled=compiled, blocks=session.blocks if compiling.scope == "blocks" else [])


def _require_memory_for_weights(workload: Workload, failed: str, why: str) -> None:
    """Refuse to build weights for real that this machine's memory does not hold; the kernel would end this
    process without a message.

    Args:
        workload: The model.
        failed: Rung that failed, the one before.
        why: Error of the first rung.

    Raises:
        WorkloadError: There is too little memory for the weights, or on the last rung for weights, gradients
            and Adam's moments.
    """
    if failed not in ("meta", "real-init") or (free_bytes := available_bytes()) is None:
        return
    try:
        session = start_session(workload, "fake")
    except Exception:  # nothing is known of its size
        return
    parameters = list(session.model.parameters())
    needed_bytes = sum(each.nbytes for each in parameters)
    if failed == "real-init":
        copies = 3 if "betas" in session.optimizer.defaults else 1
        needed_bytes += copies * sum(each.nbytes for each in parameters if each.requires_grad)
    if needed_bytes > free_bytes:
        raise WorkloadError(
            f"one training step failed on tensors without data, and real ones take"
            f" {format_bytes(needed_bytes)} of host memory; {format_bytes(free_bytes)} are free.",
            evidence=why,
            fix="look whether this error is the model's own (fewer layers run for real);"
            " else take out what reads values of tensors in model() or loss()",
            code="MT118",
        )


def start_session(workload: Workload, rung: str) -> Session:
    """Build model and optimizer on one rung, from a fixed seed; raises any error of the user's code."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Deep copies read the data pointer of fake tensors. The result is right, and users cannot act on the
        # warning.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        torch.manual_seed(SEED)
        return _build_session(workload, rung)


def _build_session(workload: Workload, rung: str) -> Session:
    fake = None if rung == "real-step" else OneFakeMode()
    mode: AbstractContextManager[Any] = nullcontext() if fake is None else fake
    build: Callable[[], nn.Module] = workload.build_model
    if rung == "fake":
        assert fake is not None
        with fake:
            model = build()
    elif rung == "meta":
        # Weights are never allocated, so a model larger than this machine can be built.
        with torch.device("meta"):
            model = build()
        _make_fake(model, fake, CPU)
    else:
        model = build()
        if fake is not None:
            _make_fake(model, fake, None)
    prepare_model(model).train()
    with mode:
        optimizer = workload.make_optimizer(model)
    blocks = workload.find_blocks(model)
    return Session(
        workload,
        rung,
        mode,
        fake,
        model,
        optimizer,
        blocks,
        WorkspaceTable.cached(),
        values=None if fake is None else BatchValues(fake),
    )


def _make_fake(model: nn.Module, fake: FakeTensorMode | None, device: torch.device | None) -> None:
    """Replace every parameter and buffer by a fake one in place; tied tensors remain tied."""
    assert fake is not None
    made: dict[int, torch.Tensor] = {}

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            with fake:
                new = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
                )
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
            # Keeps it alive: a freed tensor's `id` could be given to another one.
            originals.append(tensor)
        return made[id(tensor)]

    # Shared by parameters and buffers: a buffer may be tied to a parameter.
    originals: list[torch.Tensor] = []
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = faked(parameter)  # type: ignore[assignment]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = faked(buffer)


def _same_program(first: Step, second: Step) -> bool:
    return (
        first.names == second.names
        and np.array_equal(first.ops.name, second.ops.name)
        and np.array_equal(first.storages.producer, second.storages.producer)
        and np.array_equal(first.uses.storage, second.uses.storage)
    )


def error_line(error: BaseException, workload: Workload) -> str:
    """Return the exception as one line: the op, the message, and the line of the user's file."""
    cause = error
    while isinstance(cause, MemtuneError) and cause.__cause__ is not None:
        cause = cause.__cause__
    found, op = user_line(cause, workload.path), _op_of(cause)
    text = summary(cause, 160)
    return (
        (f"{op}: " if op and op not in text else "")
        + text
        + (f" ({workload.path.name}, line {found[0]})" if found else "")
    )


def _op_of(error: BaseException) -> str:
    """Return the name of the op that raised `error` on fake tensors, '' if none did."""
    name, at = "", error.__traceback__
    while at is not None:
        func = at.tb_frame.f_locals.get("func")
        if isinstance(func, torch._ops.OpOverload):
            name = str(func)
        at = at.tb_next
    return name
