"""Dry runs: apply a candidate as in training, on fake tensors, and record the memory of its step.

No pass is involved, so the result is exact where passes may err: every byte of the runtime, FSDP2 and
autograd, op by op. Memory that fake tensors do not show is refused with a reason (DDP's buckets are in C++)
or added from measurements (kernel workspaces, the message that gloo stages).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch.distributed as dist

from memtune import refusals
from memtune.api import apply
from memtune.autotune.predict import simulate
from memtune.autotune.record import Session, Trace, error_line, record, start_session, step_of
from memtune.autotune.record_parallel import fake_ranks
from memtune.autotune.search.preparation import Setup
from memtune.autotune.space import Candidate, Choice, Rewriter
from memtune.config import MadeFor, TunedConfig
from memtune.memory import WorkspaceTable
from memtune.program import Edit, Kind, Step
from memtune.technique import Reason, Target
from memtune.workload import Workload, autocast_cache

_MICRO_BATCHES = 2
"""Most micro-batches to trace: later ones start in the same state as the second."""
_ALL_MICRO_BATCHES = 8
"""Most micro-batches to trace if they do not run one after the other, so that each one's state may differ."""
_NEEDS_REAL = Reason("the model runs on real tensors only")
_COMPILED = Reason(
    "under the recorder's dispatch mode Dynamo compiles nothing, so the runtime would run as if it were not"
    " compiled; the prediction already rests on the compiled graphs",
    "execution.compile: false",
)
_STAGED_OP = "memtune.reduce_scatter_into_.default"
"""On gloo it works on a copy of the whole message (memtune.runtime.seam)."""


def dry_run(
    workload: Workload,
    candidate: Candidate,
    target: Target,
    *,
    rung: str = "fake",
    workspace: WorkspaceTable | None = None,
) -> Step | Reason:
    """Trace the steady step of `candidate` on rank 0, as the runtime itself runs it on fake tensors.

    Args:
        workload: The user's model, batch, loss and optimizer.
        candidate: The settings to apply, with plans and micro-batch.
        target: Number of ranks, and the device; the real device is not used.
        rung: The recording rung of the workload.
        workspace: Table of CPU kernels' scratch; None omits it.

    Returns:
        The step, or why there can be none: the model needs real tensors, or the runtime needs what fake ones
        lack.
    """
    if rung == "real-step":
        return _NEEDS_REAL
    execution = candidate.choice.execution
    assert execution.micro_batch is not None
    if target.ranks > 1 and dist.is_initialized() and not _ranks_are_fake(target.ranks):
        return refusals.trains_with_others()
    config = TunedConfig(settings=candidate.choice, plan=dict(candidate.plans))
    try:
        with fake_ranks(target.ranks):
            session = start_session(workload, rung)
            # Ranks that share layers work on those of all of them, one after the other.
            several = max(execution.accumulate, candidate.program.accumulate)
            trace = traced_under(session, config, execution.micro_batch, micro_batches=several)
    except (
        Exception
    ) as error:  # of user code, of the runtime or of torch, none of which is made for fake tensors
        return Reason(f"it does not run on fake tensors: {error_line(error, workload)}")
    if isinstance(trace, Reason):
        return trace
    step = step_of(trace, workspace)
    return _with_staging(step) if target.device == "cpu" else step


class DryRuns:
    """Dry runs of a plan's finalists.

    Fake tensors run CPU kernels. So a dry run is compared with the passes on a recording of those kernels,
    and the difference is added to the prediction for the device: on CPU that gives the dry run's own peak.

    Args:
        setup: The workload and its target.
        sizes: Micro-batches of the finalists.
    """

    def __init__(self, setup: Setup, sizes: Iterable[int]) -> None:
        self._setup, self._sizes = setup, sizes

    @cached_property
    def _rewriter(self) -> Rewriter:
        rewriter = self._setup.scorer.rewriter
        if self._setup.device == "cpu":
            return rewriter
        return Rewriter(record(self._setup.workload, sizes=self._sizes), rewriter.target)

    def peak_bytes(self, choice: Choice, predicted_bytes: int) -> int | Reason:
        """Return device bytes at the peak of `choice` from its prediction, or why a dry run is impossible."""
        setup = self._setup
        if setup.recorded.rung == "real-step":
            return _NEEDS_REAL
        if choice.execution.compile:
            return _COMPILED
        candidate = self._rewriter.candidate(choice)
        if isinstance(candidate, Reason):
            return candidate
        rung = setup.recorded.rung
        step = dry_run(setup.workload, candidate, self._rewriter.target, rung=rung, workspace=setup.workspace)
        if isinstance(step, Reason):
            return step
        done, passes = (
            simulate(candidate.program.with_step(each), setup.hardware).peak_allocated_bytes
            for each in (step, candidate.program.step)
        )
        return predicted_bytes + done - passes


def traced_under(
    session: Session, config: TunedConfig, micro_batch: int, *, micro_batches: int = 1
) -> Trace | Reason:
    """Apply `config` to the model of `session`, which is not usable afterwards, and trace its steady step."""
    with autocast_cache(config.settings.execution.autocast_cache):  # `apply` sets it for the whole process
        return _traced_under(session, config, micro_batch, micro_batches)


def _traced_under(
    session: Session, config: TunedConfig, micro_batch: int, micro_batches: int
) -> Trace | Reason:
    settings = config.settings.with_execution(compile=False)
    config = TunedConfig(settings=settings, plan=config.plan, made_for=MadeFor(blocks=list(session.blocks)))
    with session.entered():
        tuned = apply(session.model, session.optimizer, config, strict=False)
    if tuned.model is not session.model:
        return Reason("DistributedDataParallel keeps its buckets out of sight")
    session = replace(session, sync=tuned._context.loop.sync or session.sync, order=tuned._context.loop.order)
    if session.order is None:
        # Only the last one updates inside backward, so one in the middle holds more gradients than it.
        updates_inside = "execution.order" in config.settings.chosen
        micro_batches = min(micro_batches, _MICRO_BATCHES + updates_inside)
    elif micro_batches > _ALL_MICRO_BATCHES:
        return Reason(
            f"all {micro_batches} micro-batches would run op by op", "the prediction stands without a dry run"
        )
    # The first step makes the optimizer's state; in the second DTensor works out shapes that it has not met.
    for _ in range(2 if dist.is_initialized() else 1):
        session.warm_up(micro_batch)
    if config.settings.chosen.get("sharding.parallel") is not None and micro_batches > 1:
        session.traced(
            micro_batch, micro_batches=micro_batches
        )  # sums of gradients that are DTensors are another such shape
    return session.traced(micro_batch, micro_batches=micro_batches)


def _ranks_are_fake(ranks: int) -> bool:
    return dist.get_backend() == "fake" and dist.get_world_size() == ranks


def _with_staging(step: Step) -> Step:
    """Return `step` with the copy of the whole message that a reduce-scatter makes on CPU."""
    ops = np.flatnonzero(np.asarray([name == _STAGED_OP for name in step.names], bool)[step.ops.name]).astype(
        np.int32
    )
    if not len(ops):
        return step
    edit = Edit(step)
    edit.add_storages(step.ops.traffic_bytes[ops], producer=ops, kind=Kind.WORKSPACE)
    return edit.done()
