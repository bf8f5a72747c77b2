"""Workload → Recording: run the user's own code on fake tensors, at two micro-batches, and write the step down.

The ladder: a model that cannot be built or run on one rung is tried on the next, and the recording says which rung it took.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from memtune.autotune.block_fold import BlockFold, optimizer_mark
from memtune.autotune.calls import CallRecorder
from memtune.autotune.cuda_autocast import as_on_cuda
from memtune.autotune.foreach import foreach_phase, step_counters
from memtune.autotune.optimizer_fold import OptimizerFold
from memtune.autotune.tracer import Tracer
from memtune.autotune.unfold import Short
from memtune.autotune.untraced import BatchValues, as_in_training
from memtune.batches import map_tensors
from memtune.early_updates import not_one_by_one
from memtune.edit import Edit
from memtune.errors import MemtuneError, WorkloadError
from memtune.hardware import Device
from memtune.program import I64, Hints, Kind, OptimizerFacts, Recording, Step, at_micro_batch
from memtune.runtime.compiled import CompiledModel, Compiling
from memtune.runtime.fake_mode import OneFakeMode
from memtune.runtime.host_update import no_native_update_for
from memtune.runtime.loop import Order, SyncContext, accumulate, train_step
from memtune.runtime.prepare import prepare_model
from memtune.runtime.tiers import HOST, mark, tier
from memtune.runtime.workspace import RealOutputs, WorkspaceTable
from memtune.user_file import summary, user_line
from memtune.workload import Workload

RUNGS = {
    "fake": "on fake tensors",
    "meta": "with the model built on the meta device",
    "real-init": "with the model built for real, then made fake",
    "real-step": "with a real step on CPU",
}
"""The ladder, lowest first, and how a step is recorded on each rung."""
CPU = torch.device("cpu")
_OFF_THE_LINE = 0.01
"""Share of the peak from which sizes count as off the line; kernel scratch is always off a little."""
_REAL_STEP_SHARE = 0.25
"""Of this machine's memory, which a real step may take whose ops are others at each micro-batch."""
SEED = 0
"""Of every random draw while recording, so that what depends on the data (routing) is the same each time."""


@dataclass(frozen=True)
class Trace:
    """What one traced step gave: the Step, and what it cannot say of itself."""

    step: Step
    hints: Hints


@dataclass(frozen=True)
class Session:
    """A model and optimizer on one rung of the ladder, ready to be traced."""

    workload: Workload
    rung: str
    mode: AbstractContextManager[Any]
    fake: FakeTensorMode | None
    model: nn.Module
    optimizer: Optimizer
    blocks: list[str]
    sizes: WorkspaceTable
    """What CPU kernels really return, where their fake implementations differ."""
    target: Device = "cpu"
    """Where the step is to run: what is recorded for CUDA takes the paths that `translate` can follow."""
    sync: SyncContext = field(default=lambda last: nullcontext())
    """The context in which a micro-batch runs, from whether it is the last; techniques that reduce gradients have one."""
    order: Order | None = None
    """In which micro-batches run, where that is not one after the other."""
    fold: OptimizerFold | None = None
    """What pays for the optimizer's step once per sort of parameter; None: every step runs whole."""
    blocks_fold: BlockFold | None = None
    """What pays for forward and backward of equal blocks once; None: all blocks run."""
    assumed: list[str] = field(default_factory=list)
    """What user code would have asked the data, and the answer it was given."""
    values: BatchValues = field(default_factory=BatchValues)
    """What is known of the micro-batches although they are fake."""

    compiled: CompiledModel | None = None
    """What of the model runs through torch.compile; graphs are made in an untraced step, as Dynamo sees no recorder then."""

    def batch(self, size: int) -> Any:
        """One micro-batch of `size` samples; made for real, then made fake where the rung is."""
        with tier(HOST):
            batch = self.workload.make_batch(size)
        fake = self.fake
        if fake is not None:
            batch = map_tensors(batch, lambda tensor: self.values.fake(tensor, fake))
        map_tensors(batch, lambda tensor: mark(tensor, HOST))
        return batch

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, tensors are fake where the rung is, outputs have their real sizes, and draws start from the seed."""
        casts = as_on_cuda() if self.target == "cuda" else nullcontext()
        with casts, torch.random.fork_rng(devices=[]), self.mode:
            torch.manual_seed(SEED)
            if self.fake is None:
                yield
            else:
                values = self.values if self.compiled is None else None  # Dynamo compiles nothing under a dispatch mode
                with as_in_training(self.assumed, self.optimizer, values), RealOutputs(self.sizes):
                    yield

    def warm_up(self, size: int) -> None:
        """One step without tracing, so that the optimizer has its state."""
        with self.entered():
            batches = [self.batch(size)]
            if self.fold is None:
                train_step(self.model, self.optimizer, self.workload.loss, batches, CPU, sync=self.sync, order=self.order)
                return
            accumulate(self.model, self.workload.loss, batches, CPU, sync=self.sync, order=self.order)
            self.fold.first_step()
            self.optimizer.zero_grad(set_to_none=True)

    def trace(self, size: int, *, micro_batches: int = 1, trace_last: bool = False) -> Step:
        """The steady-state step at micro-batch `size`; with `trace_last`, of the last of several micro-batches."""
        return self.traced(size, micro_batches=micro_batches, trace_last=trace_last).step

    def traced(self, size: int, *, micro_batches: int = 1, trace_last: bool = False) -> Trace:
        """As `trace`, with what the ops' workspaces are looked up by."""
        fold = self.blocks_fold
        if fold is None or micro_batches > 1:
            return self._whole(size, micro_batches=micro_batches, trace_last=trace_last)
        if fold.proven and (written := fold.attempt(lambda: fold.written(self._short(fold, size)))):
            return Trace(*written)
        trace = self._whole(size)
        if not fold.proven and not fold.whole:
            fold.attempt(lambda: fold.prove(trace.step, trace.hints, self._short(fold, size)))
        return trace

    def _short(self, fold: BlockFold, size: int) -> Short:
        """Forward and backward without the blocks that `fold` leaves out."""
        tracer = Tracer(self.model, self.optimizer, fold.kept, on_cpu=self.target == "cpu")
        with self.entered(), fold.without_blocks():
            batches = [self.batch(size)]
            calls = CallRecorder(tracer, fuse=self.target == "cuda")
            try:
                with tracer.recording():
                    with calls:
                        loss = accumulate(self.model, self.workload.loss, batches, CPU, sync=self.sync, order=self.order)
                    tracer.note_gradients()
                    seen = fold.gradients()
                    optimizer_mark(tracer)
                    self.optimizer.zero_grad(set_to_none=True)
                    del loss  # as in `_whole`
            finally:
                self.optimizer.zero_grad(set_to_none=True)
        return fold.short(tracer, calls.calls, self.optimizer, seen)

    def _whole(self, size: int, *, micro_batches: int = 1, trace_last: bool = False) -> Trace:
        if self.compiled is not None:
            self.warm_up(size)
        tracer = Tracer(self.model, self.optimizer, self.blocks, on_cpu=self.target == "cpu")
        with self.entered():
            batches = [self.batch(size) for _ in range(micro_batches)]
            if trace_last and micro_batches > 1:
                accumulate(self.model, self.workload.loss, batches[:-1], CPU, sync=lambda last: self.sync(False))
                batches = batches[-1:]
            calls = CallRecorder(tracer, fuse=self.target == "cuda")
            with tracer.recording():
                with calls if self.compiled is None else _no_new_graphs():
                    loss = accumulate(self.model, self.workload.loss, batches, CPU, sync=self.sync, order=self.order)
                tracer.note_gradients()
                foreach = None
                if self.target == "cuda":
                    with tracer.paused():
                        foreach = self.fold.foreach() if self.fold else foreach_phase(self.model, self.optimizer, self.blocks)
                counters = step_counters(tracer, self.optimizer)
                self.optimizer.step() if self.fold is None else self.fold.step(tracer)
                self.optimizer.zero_grad(set_to_none=True)
                del loss  # held as long as `train_step` holds it
        return Trace(tracer.step(), Hints(tuple(calls.calls), tuple(tracer.draft.signatures), foreach, counters))


@contextmanager
def _unlogged() -> Iterator[None]:
    """Inside, torch does not log, with a traceback, which op failed on fake tensors: it raises too, and another rung may do."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


@_unlogged()
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
        small: First micro-batch; 1 gives another program than 2 and more, so it is never used to extrapolate.
        large: Second micro-batch; sizes in between and beyond follow from the two.
        sizes: Micro-batches that will be used: recorded themselves too, where that needs no real step, or where the ops are
            others at each micro-batch and a real step is small beside this machine's memory.
        between: Micro-batches that are recorded themselves only if the largest of `sizes` is off the line (experts
            with a capacity, contrastive losses).
        workspace: Where the scratch of CPU kernels is looked up, op by op; what is missing is measured in a child process
            and saved. Without it the recording holds tensors only, and says so in its notes.
        target: Where the step is to run; what is recorded for CUDA is meant for `translate`.
        compiling: What is compiled and how; None records the plain model.
        change: Changes model and optimizer of a fresh session before anything is recorded.

    Returns:
        The recording, with the rung of the ladder and the reasons why earlier rungs did not do.

    Raises:
        WorkloadError: When not even a real step on CPU runs; the message is that step's own.
        ApplyError: What was to be compiled was not.
    """
    started = time.monotonic()
    workload.check_batch()
    session, one, notes = open_session(workload, small, target, compiling, change)
    two = session.traced(large)
    first, second = one.step, two.step
    same = _same_program(first, second)
    if workspace is None:
        notes.append("kernel workspaces were not measured: the step holds tensors only")
    else:
        scratch = _workspaces(one, workspace), _workspaces(two, workspace)
        somewhere = (scratch[0] > 0) | (scratch[1] > 0) if same else scratch[0] > 0
        first = _with_workspaces(first, scratch[0], somewhere)
        if same:
            second = _with_workspaces(second, scratch[1], somewhere)
    notes += session.assumed
    if session.fold is not None and session.fold.whole:
        notes.append(f"the optimizer's step was recorded whole: {session.fold.whole}")
    if session.blocks_fold is not None and session.blocks_fold.left_out and session.blocks_fold.whole:
        notes.append(f"equal blocks were recorded one by one: {session.blocks_fold.whole}")
    if session.fake is None:
        notes.append(f"sizes may depend on the data: between micro-batches {small} and {large} and beyond they lie on a line")
    if not same:
        notes.append(f"the step at micro-batch {large} has other ops than at {small}: sizes are only known at {small}")
        second = first
    recording = Recording(
        small=small,
        step=first,
        bytes_slope=(second.bytes - first.bytes) // (large - small),
        flops_slope=(second.op_flops - first.op_flops) / (large - small),
        traffic_slope=(second.op_traffic_bytes - first.op_traffic_bytes) // (large - small),
        rung=session.rung,
        notes=tuple(notes),
        checked=frozenset({small, large} if same else {small}),
        hints={small: one.hints, large: two.hints} if same else {small: one.hints},
        optimizer=OptimizerFacts(no_native_update_for(session.optimizer), not_one_by_one(session.optimizer)),
    )
    wanted = sorted(size for size in set(sizes) if session.fake is not None or (not same and _runs_here(recording, size)))
    for size in wanted:
        recording = check(recording, session, size, workspace)
    if wanted and _off_the_line(recording, wanted[-1]):
        for size in sorted(set(between)):
            recording = check(recording, session, size, workspace)
    return replace(recording, record_s=time.monotonic() - started)


def _runs_here(recording: Recording, micro_batch: int) -> bool:
    """Whether a real step at `micro_batch` surely fits in this machine's memory, if its bytes grow as the micro-batch does."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return recording.step.peak_bytes() * micro_batch / recording.small < _REAL_STEP_SHARE * memory_bytes


def _off_the_line(recording: Recording, micro_batch: int) -> bool:
    """Whether the peak that was recorded at `micro_batch` is another than the affine sizes give."""
    real, affine = recording.at(micro_batch).peak_bytes(), at_micro_batch(recording, micro_batch).peak_bytes()
    return abs(real - affine) > _OFF_THE_LINE * real


def check(recording: Recording, session: Session, micro_batch: int, workspace: WorkspaceTable | None = None) -> Recording:
    """Record once more at `micro_batch` and keep that step for this size; notes a difference from the affine sizes."""
    if micro_batch in recording.checked:
        return recording
    trace = session.traced(micro_batch)
    step = step_of(trace, workspace)
    predicted = recording.at(micro_batch)
    notes = recording.notes
    if not _same_program(step, predicted) or not np.array_equal(step.bytes, predicted.bytes):
        more = step.peak_bytes() - predicted.peak_bytes()
        notes += (f"micro-batch {micro_batch} was recorded by itself: {more:+d} bytes at the peak against the affine sizes",)
    exact = {**recording.exact, micro_batch: step}
    hints = {**recording.hints, micro_batch: trace.hints}
    return replace(recording, exact=exact, checked=recording.checked | {micro_batch}, notes=notes, hints=hints)


def step_of(trace: Trace, workspace: WorkspaceTable | None) -> Step:
    """The traced step, with the scratch of its kernels where there is a table to look it up in."""
    if workspace is None:
        return trace.step
    scratch = _workspaces(trace, workspace)
    return _with_workspaces(trace.step, scratch, scratch > 0)


def _workspaces(trace: Trace, table: WorkspaceTable) -> I64:
    """(n,) scratch bytes of every op; measures what the table lacks and saves it."""
    keys = [key for key in trace.hints.signatures if key]
    if any(key not in table.entries and key not in table.unknown for key in keys):
        table.fill_in_child(keys)
        table.save()
    return np.asarray([table.workspace_bytes(key) if key else 0 for key in trace.hints.signatures], np.int64)


def _with_workspaces(step: Step, scratch_bytes: I64, somewhere: npt.NDArray[np.bool_]) -> Step:
    """`step` with a storage for the scratch of every op in `somewhere`; it lives while the op runs."""
    ops = np.flatnonzero(somewhere).astype(np.int32)
    edit = Edit(step)
    edit.add_storages(scratch_bytes[ops], producer=ops, kind=Kind.WORKSPACE)
    return edit.done()


@_unlogged()
def open_session(
    workload: Workload,
    micro_batch: int,
    target: Device = "cpu",
    compiling: Compiling | None = None,
    change: Callable[[Session], None] | None = None,
) -> tuple[Session, Trace, list[str]]:
    """Climb the ladder to the first rung that records; returns the session, its trace and why lower rungs failed.

    Raises:
        WorkloadError: The real step, which is the last rung, does not run either.
    """
    notes: list[str] = []
    for rung, how in RUNGS.items():
        try:
            session = replace(start_session(workload, rung), target=target)
            if change is not None:
                change(session)
            session = _folded(session) if compiling is None else _compiled(session, compiling)
            session.warm_up(micro_batch)
            trace = session.traced(micro_batch)
        except Exception as error:  # whatever user code raises on fake tensors; the last rung is real and its error is the user's
            if rung == "real-step":
                if isinstance(error, MemtuneError):
                    raise
                if "SparseTensorImpl" in str(error):  # torch says so where it is asked for a sparse tensor's storage
                    raise WorkloadError(
                        "the training step makes sparse tensors, and memtune counts the bytes of dense ones only.",
                        fix="nn.Embedding(…, sparse=False) and a dense optimizer (Adam, Adagrad, SGD in place of SparseAdam)",
                        code="MT118",
                    ) from error
                fix = "make it train without memtune first"
                raise WorkloadError(f"One training step fails: {error}", fix=fix, code="MT118") from error
            notes.append(f"rung {rung}: {why(error, workload)}")
        else:
            if session.compiled is not None:
                session.compiled.check()
            return session, trace, [*notes, f"so the step was recorded {how}"] if notes else []
    raise AssertionError("unreachable: the last rung returns or raises")


@contextmanager
def _no_new_graphs() -> Iterator[None]:
    """Graphs that are there run, but none is made: not of the recorder's own code, nor with it around."""
    with torch.compiler.set_stance("eager_on_recompile"):
        yield


def _folded(session: Session) -> Session:
    """`session` with the optimizer's step recorded once per sort of parameter; only for a step that nobody else changes."""
    return (
        session
        if session.fake is None
        else replace(
            session,
            fold=OptimizerFold(session.model, session.optimizer, session.blocks),
            blocks_fold=BlockFold(session.model, session.blocks),
        )
    )


def _compiled(session: Session, compiling: Compiling) -> Session:
    """`session` with what `compiling` says compiled; a compiled model is one piece, whose blocks cannot be told apart."""
    regions = session.blocks if compiling.scope == "blocks" else [""]
    compiled = CompiledModel(session.model, regions, f"recorded {compiling.backend}", dict(compiling.partitioning))
    compiled.install()
    return replace(session, compiled=compiled, blocks=session.blocks if compiling.scope == "blocks" else [])


def start_session(workload: Workload, rung: str) -> Session:
    """Build model and optimizer on one rung, from a fixed seed; raises whatever the user's code raises there."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Deep copies ask fake tensors for their address; the answer is right, and the user can do nothing about the warning.
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
        with torch.device("meta"):
            model = build()
        _make_fake(model, fake, CPU)
    else:
        model = build()
        if fake is not None:
            _make_fake(model, fake, None)
    prepare_model(model).train()
    with mode:
        optimizer = workload.make_optimizer([p for p in model.parameters() if p.requires_grad])
    blocks = workload.find_blocks(model)
    return Session(workload, rung, mode, fake, model, optimizer, blocks, WorkspaceTable.cached())


def _make_fake(model: nn.Module, fake: FakeTensorMode | None, device: torch.device | None) -> None:
    """Replace every parameter and buffer by a fake one in place; what was tied stays tied."""
    assert fake is not None
    made: dict[int, torch.Tensor] = {}

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            with fake:
                new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = new
            keep.append(tensor)
        return made[id(tensor)]

    keep: list[torch.Tensor] = []
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
        and np.array_equal(first.op_name, second.op_name)
        and np.array_equal(first.producer, second.producer)
        and np.array_equal(first.use_storage, second.use_storage)
    )


def why(error: BaseException, workload: Workload) -> str:
    """The exception in one line, which names the op, and where in the user's file it was raised."""
    cause = error
    while isinstance(cause, MemtuneError) and cause.__cause__ is not None:
        cause = cause.__cause__
    found, op = user_line(cause, workload.path), _op_of(cause)
    text = summary(cause, 160)
    return (f"{op}: " if op and op not in text else "") + text + (f" ({workload.path.name}, line {found[0]})" if found else "")


def _op_of(error: BaseException) -> str:
    """Name of the op that raised `error` on fake tensors, '' where none did."""
    name, at = "", error.__traceback__
    while at is not None:
        func = at.tb_frame.f_locals.get("func")
        if isinstance(func, torch._ops.OpOverload):
            name = str(func)
        at = at.tb_next
    return name
