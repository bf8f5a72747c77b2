"""Sessions: the model and optimizer of a workload on one recording rung, ready to be traced.

A model that cannot be built or run on one rung is tried on the next (`RUNGS`); notes name the rung that
succeeded and why the lower ones failed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from memtune.autotune.record.accelerator_autocast import accelerator_autocast_on_cpu
from memtune.autotune.record.block_dedup import BlockDedup, optimizer_mark
from memtune.autotune.record.block_expand import PartialRecording
from memtune.autotune.record.device_calls import backward_on_one_thread
from memtune.autotune.record.fake_divergence import BatchValues, as_in_training
from memtune.autotune.record.foreach_record import foreach_phase, step_counters
from memtune.autotune.record.kernel_calls import CallRecorder, attention_without_dropout
from memtune.autotune.record.optimizer_dedup import OptimizerDedup
from memtune.autotune.record.tracer import Tracer
from memtune.compile import CompiledModel, Compiling
from memtune.deferred_init import OneFakeMode
from memtune.device import Capability, accelerator, platform_of
from memtune.errors import MemtuneError, WorkloadError
from memtune.hardware import Device
from memtune.memory import RealOutputs, WorkspaceTable
from memtune.offload.optimizer import available_bytes
from memtune.program import Hints, Kind, Step
from memtune.random_seeds import preserved_random, seed_all
from memtune.runtime import HOST, Order, SyncContext, accumulate, mark, prepare_model, tier, train_step
from memtune.units import format_bytes
from memtune.workload import DrawnBatches, Workload, map_tensors, summary, user_line

RUNGS = {
    "fake": "on fake tensors",
    "meta": "with the model built on the meta device",
    "real-init": "with the model built for real, then made fake",
    "real-step": "with a real step on CPU",
}
"""The recording rungs, lowest first, with the phrase that notes use for each."""
CPU = torch.device("cpu")
_SHORT_FLOPS, _SHORT_PARAMETER_BYTES = 1e11, 256 << 20
"""FLOPs and weights of a step below which a real step is taken instead of assumed choices."""
_NO_HOOKS = "don't yet support saved tensor hooks"
"""In the error of a `torch.func` transform that runs under hooks on saved tensors."""
SEED = 0
"""Seed of every random draw while recording: data-dependent code (routing) takes one path."""


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
    """Device on which the step is to run; not on CPU, code paths are those that `translate` can follow."""
    device: torch.device = CPU
    """Device on which model and optimizer are. Another one than the CPU is the target itself: its own kernels
    run, for real, and nothing is left to `translate`.
    """
    sync: SyncContext = field(default=lambda last: nullcontext())
    """Context manager around each micro-batch, given whether it is the last; for gradient reduction."""
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
    """The parts of the model under torch.compile. Their graphs are made in an untraced step."""

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

    @property
    def _is_for_another(self) -> bool:
        """True if the step is to run on another device than the one that is recorded."""
        return self.target != self.device.type

    @property
    def _has_other_kernels(self) -> bool:
        """True if `translate` has a table of the target's kernels, which are not those of a CPU."""
        return self._is_for_another and Capability.TRANSLATION in platform_of(self.target).capabilities

    @property
    def _composing_device(self) -> torch.device | None:
        """Device of the target whose composition of calls a recording on fake tensors can follow: one that is
        present and whose kernels `translate` does not know.
        """
        follows = self._is_for_another and not self._has_other_kernels and self.fake is not None
        return torch.device(self.target, 0) if follows and accelerator.device_type() == self.target else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the recording modes: fake tensors unless the rung is real, random draws from `SEED`."""
        casts = accelerator_autocast_on_cpu(self.target) if self._is_for_another else nullcontext()
        threads = nullcontext() if self._composing_device is None else backward_on_one_thread()
        with casts, threads, preserved_random(), self.mode:
            seed_all(SEED)
            if self.fake is None:
                yield
            else:
                # Dynamo compiles nothing under a dispatch mode, so compiled models go without one.
                values = self.values if self.compiled is None else None
                outputs = RealOutputs(self.sizes, on_cpu=self.target == "cpu")
                with as_in_training(self.assumed, self.optimizer, values), outputs:
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
                    self.device,
                    sync=self.sync,
                    order=self.order,
                )
                return
            dedup = self.block_dedup
            # As `train_step`, but with an optimizer step that `OptimizerDedup` shortens to one of each
            # signature.
            if dedup is None or not dedup.attempt(lambda: self._warm_up_partially(dedup, batches)):
                self.optimizer.zero_grad(set_to_none=True)
                accumulate(
                    self.model, self.workload.loss, batches, self.device, sync=self.sync, order=self.order
                )
            self.optimizer_dedup.first_step()
            self.optimizer.zero_grad(set_to_none=True)

    def after_same_size(self, size: int) -> Trace:
        """Return `traced` after an untraced pass of that size, of which the model may keep tensors."""
        with self.entered():
            batches = [self.batch(size)]
            accumulate(self.model, self.workload.loss, batches, self.device, sync=self.sync, order=self.order)
            self.optimizer.zero_grad(set_to_none=True)
        return self.traced(size)

    def _warm_up_partially(self, dedup: BlockDedup, batches: list[Any]) -> bool:
        """Run forward and backward without the blocks that `dedup` skips; return False if all must run."""
        if dedup.disabled_reason or self.optimizer_dedup is None or self.optimizer_dedup.disabled_reason:
            return False
        with dedup.skipping_blocks():
            accumulate(self.model, self.workload.loss, batches, self.device, sync=self.sync, order=self.order)
        dedup.lend_gradients()
        return True

    def trace(self, size: int, *, micro_batches: int = 1, trace_last: bool = False) -> Step:
        """Return the steady-state step; with `trace_last` its last micro-batch and the optimizer only."""
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
        tracer = self._tracer(dedup.recorded)
        with self.entered(), dedup.skipping_blocks():
            batches = [self.batch(size)]
            calls = self._call_recorder(tracer)
            try:
                with tracer.recording():
                    with calls:
                        loss = accumulate(
                            self.model,
                            self.workload.loss,
                            batches,
                            self.device,
                            sync=self.sync,
                            order=self.order,
                        )
                    tracer.note_gradients()
                    gradients = dedup.gradient_specs()
                    optimizer_mark(tracer)
                    self.optimizer.zero_grad(set_to_none=True)
                    del loss  # as in `_record_full`
            finally:
                self.optimizer.zero_grad(set_to_none=True)
        return dedup.partial_recording(tracer, calls.calls, self.optimizer, gradients)

    def _call_recorder(self, tracer: Tracer) -> CallRecorder:
        return CallRecorder(tracer, fuse=self._has_other_kernels, device=self._composing_device)

    def _tracer(self, blocks: list[str]) -> Tracer:
        return Tracer(
            self.model,
            self.optimizer,
            blocks,
            placeholders=self.observes_saves,
            on_cpu=self.target == "cpu",
            device_type=self.device.type,
            **({} if self.values is None else {"on_save": self.values.known.alias}),
        )

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
        tracer = self._tracer(self.blocks)
        with self.entered():
            # Before the recording starts, so that batches count as storages from before the step.
            batches = [self.batch(size) for _ in range(micro_batches)]
            if trace_last and micro_batches > 1:
                accumulate(
                    self.model,
                    self.workload.loss,
                    batches[:-1],
                    self.device,
                    sync=lambda last: self.sync(False),
                )
                batches = batches[-1:]
            calls = self._call_recorder(tracer)
            with tracer.recording():
                with calls if self.compiled is None else _no_new_graphs():
                    loss = accumulate(
                        self.model, self.workload.loss, batches, self.device, sync=self.sync, order=self.order
                    )
                tracer.note_gradients()
                check()
                foreach = None
                if self._is_for_another:
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
    """Silence torch's log of an op that failed on fake tensors: it raises too, and may be tried again."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def _traced_on(
    workload: Workload,
    rung: str,
    micro_batch: int,
    target: Device,
    compiling: Compiling | None,
    change: Callable[[Session], None] | None,
    *,
    observes_saves: bool = True,
    chooses: bool = False,
) -> tuple[Session, Trace]:
    """Return a session on `rung` and its trace; raises any error of the user's code."""
    session = replace(start_session(workload, rung), target=target, observes_saves=observes_saves)
    if session.values is not None:
        session.values.chooses = chooses
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
    is_short = False
    for rung, how in RUNGS.items():
        record_on = partial(_traced_on, workload, rung, micro_batch, target, compiling, change)
        try:
            try:
                session, trace = record_on()
            except Exception as error:
                # The tracer's placeholders are hooks on saved tensors, so it goes without them.
                unseen = _NO_HOOKS in str(error)
                # Assumptions on a third rung would cost real weights once more.
                if not unseen and (rung not in ("fake", "meta") or is_short):
                    raise
                try:
                    session, trace = record_on(observes_saves=not unseen, chooses=not unseen)
                except Exception as second:
                    raise second if unseen else error from None
                if unseen:
                    notes.append(
                        "torch.func in loss() allows no hooks on saved tensors: nothing can be recomputed or"
                        " offloaded one by one"
                    )
                # A real step is quick here, and needs no assumed values: go down to that rung.
                elif is_short := _is_short(trace.step):
                    raise
        # User code may raise anything on fake tensors.
        except Exception as error:
            _raise_if_final(error, rung)
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


def _raise_if_final(error: Exception, rung: str) -> None:
    """Raise what the user has to mend if no lower rung can record the step either."""
    # Torch's error on reading the storage of a sparse tensor, which a real step raises too.
    if "SparseTensorImpl" in str(error):
        raise WorkloadError(
            "the training step makes sparse tensors; memtune counts bytes of dense tensors only.",
            fix="nn.Embedding(…, sparse=False) and a dense optimizer (Adam, Adagrad or SGD, not SparseAdam)",
            code="MT118",
        ) from error
    # The last rung runs real tensors: its error is the model's own.
    if rung == "real-step":
        if isinstance(error, MemtuneError):
            raise error
        fix = "make it train without memtune first"
        raise WorkloadError(f"One training step fails: {error}", fix=fix, code="MT118") from error


def _is_short(step: Step) -> bool:
    """Return whether this machine's CPU runs `step` in seconds, so that nothing need be assumed."""
    parameters = (step.storages.kind == Kind.PARAMETER) & (step.storages.producer < 0)
    return (
        float(step.ops.flops.sum()) < _SHORT_FLOPS
        and int(step.storages.bytes[parameters].sum()) < _SHORT_PARAMETER_BYTES
    )


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
    """Return `session` with the model compiled as specified; a model compiled whole has no blocks."""
    regions = session.blocks if compiling.scope == "blocks" else [""]
    compiled = CompiledModel(
        session.model,
        regions,
        f"recorded {compiling.backend}",
        dict(compiling.partitioning),
        change_graph=attention_without_dropout if session._has_other_kernels else lambda graph: None,
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


def start_session(workload: Workload, rung: str, device: torch.device = CPU) -> Session:
    """Build model and optimizer on one rung, from a fixed seed; raises any error of the user's code.

    On another `device` than the CPU the rung is that of a real step.
    """
    with preserved_random(), warnings.catch_warnings():
        # Deep copies read the data pointer of fake tensors. The result is right, and users cannot act on the
        # warning.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        seed_all(SEED)
        return _build_session(workload, rung, device)


def _build_session(workload: Workload, rung: str, device: torch.device) -> Session:
    fake = None if rung == "real-step" else OneFakeMode()
    values = None if fake is None else BatchValues(fake)
    assumed: list[str] = []
    mode: AbstractContextManager[Any] = nullcontext() if fake is None else fake
    build: Callable[[], nn.Module] = workload.build_model
    if rung == "fake":
        assert fake is not None
        assert values is not None
        with fake, values.answering_reads(assumed):  # rates of depth, masks in buffers
            model = build()
    elif rung == "meta":
        # Weights are never allocated, so a model larger than this machine can be built.
        with torch.device("meta"):
            model = build()
        _make_fake(model, fake, CPU)
    else:
        model = build() if device == CPU else build().to(device)
        if fake is not None:
            _make_fake(model, fake, None)
    prepare_model(model).train()
    with mode:
        optimizer = workload.make_optimizer(model)
    blocks = workload.find_blocks(model)
    return Session(
        workload=workload,
        rung=rung,
        mode=mode,
        fake=fake,
        model=model,
        optimizer=optimizer,
        blocks=blocks,
        sizes=WorkspaceTable.cached(),
        target=device.type,
        device=device,
        assumed=assumed,
        values=values,
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
