"""One rank of a trial: build the model, apply the config, warm up, measure, and report one record.

Runs as `python -m memtune.executors.worker` in a fresh process. Its input is the file named by
MEMTUNE_TRIAL_FILE and RANK, WORLD_SIZE, LOCAL_RANK and MEMTUNE_RENDEZVOUS; it reports JSON lines to the
descriptor named by MEMTUNE_REPORT_FD: `{"stage": ...}` as heartbeats, finally `{"result": {...}}`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memtune.api import Tuned, apply, begins_with_shards, starts_off_device
from memtune.config import TunedConfig, load_config
from memtune.deferred_init import deferred
from memtune.device import (
    accelerator,
    backend_of,
    explained,
    is_out_of_memory,
    memory_statistics,
    platform_of,
    streams,
)
from memtune.errors import ApplyError, MemtuneError, raised_at
from memtune.executors.base import CAPACITY_ERRORS, Trial
from memtune.executors.gradient_digest import GradientDigests
from memtune.executors.gradient_record import GradientRecord, sha256_of_all
from memtune.hardware import LoadMeter, OpClock, OpTime, UpdateClock, measure_rates, op_times, reference_s
from memtune.memory import Ledger
from memtune.random_seeds import seed_all
from memtune.runtime import COUNTERS, HOST, SSD, no_dropout, prepare_model, tier
from memtune.units import bytes_in_words
from memtune.workload import Workload, split_batch


@dataclass
class _Rank:
    """This process among the ranks of the trial."""

    trial: Trial
    rank: int
    world: int
    local_rank: int
    report_fd: int

    @property
    def device(self) -> torch.device:
        kind = self.trial.device
        return torch.device(kind) if kind == "cpu" else torch.device(kind, self.local_rank)

    def say(self, **record: Any) -> None:
        os.write(self.report_fd, (json.dumps(record) + "\n").encode())


@dataclass
class _Measurements:
    """Measurements of the rank so far."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    """Seconds of each step in optimizers' steps."""
    peak_allocated: int = 0
    peak_reserved: int = 0
    host_peak: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    """Device bytes at the peak."""
    gradients: list[dict[str, GradientRecord]] = field(default_factory=list)
    link_bytes: dict[str, int] = field(default_factory=dict)
    op_times: list[OpTime] = field(default_factory=list)
    load: LoadMeter | None = None
    other_load: float = 0.0
    reference_s: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)

    def note_peaks(self, ledger: Ledger) -> None:
        self.peak_allocated = max(self.peak_allocated, ledger.peak_allocated_bytes())
        self.peak_reserved = max(self.peak_reserved, ledger.peak_reserved_bytes())


def run(rank: _Rank) -> dict[str, Any]:
    """Build, apply, warm up, measure; return the record of this rank.

    Raises:
        torch.OutOfMemoryError: The budget or the device is exceeded.
        MemtuneError: The config or the workload cannot be used.
    """
    trial = rank.trial
    if trial.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    accelerator.select(rank.device)  # before the group, whose barriers use the current device
    if rank.world > 1:
        dist.init_process_group(
            backend_of(trial.device),
            init_method=os.environ["MEMTUNE_RENDEZVOUS"],
            rank=rank.rank,
            world_size=rank.world,
        )
    with tier(HOST):  # data sets that the file holds are the host's
        workload = Workload.load(trial.workload)
    ledger = Ledger.open(rank.device, budget_bytes=trial.budget_bytes)
    rank.say(stage="building")
    tuned, model, shapes = _build(rank, workload)
    ledger.track(model, tuned.optimizer)
    ledger.reset_peak()  # the peak is that of the steps: a model cast to bf16 needed more while it was built
    measured = _Measurements()
    if trial.fingerprint or trial.gradient_steps:
        _digest_gradients(rank, tuned, shapes, ledger, measured)
    with nullcontext() if trial.dropout else no_dropout(model):
        for step in range(trial.warmup_steps + trial.steps):
            rank.say(stage=_stage(trial, step, tuned), device_bytes=ledger.live_bytes())
            _step(rank, workload, tuned, step, measured)
    measured.note_peaks(ledger)
    measured.host_peak = ledger.peak_allocated_bytes(HOST)
    measured.by_kind = {kind.name.lower(): n for kind, n in ledger.peak_breakdown().items() if n}
    measured.other_load = measured.load.others() if measured.load is not None else 0.0
    if not platform_of(rank.device).is_host:
        # The buffers of the measurements below are not the training's.
        memory_statistics.limit(rank.device, None)
    with tier(HOST):
        measured.reference_s = reference_s(rank.device)
    if trial.clock_ops:
        with tier(HOST):
            measured.rates = measure_rates(rank.device, local_ranks=_local_ranks(rank))
        measured.op_times = _clock_ops(rank, workload, tuned, measured)
    samples = _micro_batch(rank, workload, tuned) * tuned.config.settings.execution.accumulate * rank.world
    return {**_record(trial, tuned, measured), "samples_per_step": samples}


def _local_ranks(rank: _Rank) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", rank.world))


def _clock_ops(rank: _Rank, workload: Workload, tuned: Tuned, measured: _Measurements) -> list[OpTime]:
    """Run one more step with a clock around every op; no peak, loss or step time is taken from it."""
    rank.say(stage="timing ops")
    trial = rank.trial
    batches = _batches(rank, workload, tuned, trial.warmup_steps + trial.steps)
    _synchronise(rank)
    try:
        with OpClock(rank.device, time.perf_counter) as clock:
            tuned.step(batches)
    except Exception as error:  # of code that cannot bear a dispatch mode; what was measured before stands
        print(f"ops were not timed: {error}", file=sys.stderr)
        return []
    step_s = statistics.median(measured.step_s)
    waiting = clock.waiting() if rank.world > 1 else 0.0
    return op_times(
        clock.observed,
        step_s,
        ranks=rank.world,
        host_computes=trial.device == "cpu",
        waiting=waiting,
        update_s=statistics.median(measured.update_s),
    )


def _stage(trial: Trial, step: int, tuned: Tuned) -> str:
    """Return the current stage; compilers work silently for minutes in the first step, which is no hang."""
    compiles = step == 0 and tuned.config.settings.execution.compile
    return f"{'compiling, ' if compiles else ''}step {step + 1}/{trial.warmup_steps + trial.steps}"


def _build(rank: _Rank, workload: Workload) -> tuple[Tuned, nn.Module, dict[str, torch.Size]]:
    """Return the tuned model, its module, and the full shape of each parameter."""
    config = load_config(rank.trial.config)
    off_device = starts_off_device(config, rank.world)
    model = prepare_model((_model_on_host if off_device else _model)(rank, workload, config)).train()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    optimizer = workload.make_optimizer(model)
    if rank.trial.fingerprint or rank.trial.gradient_steps:
        _reserve_first_hook(optimizer)
    tuned = apply(model, optimizer, config, loss=workload.loss, device=rank.device if off_device else None)
    return tuned, model, shapes


def _model_on_host(rank: _Rank, workload: Workload, config: TunedConfig) -> nn.Module:
    """Return the model on the host, from where `apply` moves the weights of the device."""
    # Deferred, if possible, when weights start on SSD: the host may have no memory for all of them.
    seed_all(rank.trial.seed)
    if config.settings.technique("offload.states").effects.parameters_on == SSD:
        try:
            return deferred(workload.build_model, rank.device)
        except MemtuneError as error:
            print(error, file=sys.stderr)
            seed_all(rank.trial.seed)
    with tier(HOST):
        return workload.build_model()


def _model(rank: _Rank, workload: Workload, config: TunedConfig) -> nn.Module:
    """Return the model on the device."""
    # On the meta device, to be materialised shard by shard, if it does not fit.
    seed_all(rank.trial.seed)
    try:
        return workload.build_model().to(rank.device)
    except RuntimeError as error:
        if not is_out_of_memory(error) or not begins_with_shards(config, rank.world):
            raise
        too_large = error.with_traceback(None)  # whose frames hold what was made so far
    seed_all(rank.trial.seed)
    try:
        return deferred(workload.build_model, rank.device)
    except MemtuneError as error:
        print(error, file=sys.stderr)
        raise too_large from None


# Hooks run in the order of their registration, and offloading takes the gradients away in a hook: ours must
# come first.
_FIRST_HOOK: dict[int, Any] = {}


def _reserve_first_hook(optimizer: torch.optim.Optimizer) -> None:
    def first(*args: Any) -> None:
        action = _FIRST_HOOK.get(id(optimizer))
        if action is not None:
            action()

    # as a program this file is `__main__`, and hooks of the user's own are refused
    first.__module__ = "memtune.executors.worker"
    optimizer.register_step_pre_hook(first)


def _digest_gradients(
    rank: _Rank, tuned: Tuned, shapes: Mapping[str, torch.Size], ledger: Ledger, measured: _Measurements
) -> None:
    """Digest the gradients just before each of the first optimizer steps."""
    # Gradients that are used and freed inside backward are digested there.
    trial, context = rank.trial, tuned._context
    steps = max(trial.gradient_steps, int(trial.fingerprint))

    def digests() -> GradientDigests:
        is_reported = len(measured.gradients) < trial.gradient_steps
        return GradientDigests(context, shapes, sketches=is_reported)

    of_step = [digests()]

    def before_use(parameter: nn.Parameter, gradient: Tensor) -> None:
        if len(measured.gradients) < steps:
            with tier(HOST), torch.no_grad():
                of_step[-1].add(parameter, gradient)

    context.events.before_grad_use.subscribe(before_use)

    def action() -> None:
        measured.note_peaks(ledger)
        with tier(HOST), torch.no_grad():
            of_step[-1].add_rest()
            measured.gradients.append(of_step.pop().records(rank.device))
            of_step.append(digests())
        ledger.reset_peak()
        if len(measured.gradients) == steps:
            del _FIRST_HOOK[id(tuned.optimizer)]

    _FIRST_HOOK[id(tuned.optimizer)] = action


def _step(rank: _Rank, workload: Workload, tuned: Tuned, step: int, measured: _Measurements) -> None:
    """Run a training step; after the warm-up it counts."""
    batches = _batches(rank, workload, tuned, step)
    seed_all(rank.trial.seed * 1_000_003 + step * 1009 + rank.rank)
    COUNTERS.take()
    _synchronise(rank)
    if step == rank.trial.warmup_steps:
        measured.load = LoadMeter(_local_ranks(rank))
    if step == rank.trial.warmup_steps - 1:
        with tier(HOST):
            count = len(workload.make_buckets(_micro_batch(rank, workload, tuned)))
        for index in range(count):
            tuned.step(_batches(rank, workload.of_bucket(index), tuned, step))
    with UpdateClock() as update:
        started = time.perf_counter()
        loss = tuned.step(batches)
        streams.synchronize(rank.device)
        elapsed = time.perf_counter() - started
    if step >= rank.trial.warmup_steps:
        measured.step_s.append(elapsed)
        measured.update_s.append(update.seconds)
        measured.link_bytes = COUNTERS.take()
    with tier(HOST), torch.no_grad():
        mean = loss.detach().float().cpu() if rank.trial.device == "cpu" else loss.detach().float().clone()
        if rank.world > 1:
            dist.all_reduce(mean)
        measured.losses.append(float(mean) / rank.world)


def _batches(rank: _Rank, workload: Workload, tuned: Tuned, step: int) -> list[Any]:
    """Return this rank's samples of the step, equal for all configs, split into micro-batches."""
    # The last warm-up step has the largest batch that the user declares, after a step for each length
    # bucket, or the largest drawn where batches vary in size: their peaks count, their times do not.
    execution = tuned.config.settings.execution
    micro = _micro_batch(rank, workload, tuned)
    is_last_warmup = step == rank.trial.warmup_steps - 1
    worst = workload.has_worst_batch and is_last_warmup
    make = workload.make_worst_batch if worst else workload.make_batch
    seed_all((rank.trial.seed + 1) * 7919 + step * 104_729 + rank.rank)
    with tier(HOST):
        if is_last_warmup and not worst:
            # Each micro-batch has tensors of its own, as in training.
            drawn = [workload.largest_batch(micro) for _ in range(execution.accumulate)]
            if drawn[0] is not None:
                return drawn
        if execution.accumulate == 1:
            return [make(micro)]
        parts = split_batch(make(micro * execution.accumulate), execution.accumulate)
        return parts if isinstance(parts, list) else [make(micro) for _ in range(execution.accumulate)]


def _micro_batch(rank: _Rank, workload: Workload, tuned: Tuned) -> int:
    """Return the samples of a micro-batch: the config's, else of the rank's share by its accumulation."""
    execution = tuned.config.settings.execution
    wanted = rank.trial.global_batch or workload.global_batch
    return execution.micro_batch or (max(1, wanted // rank.world // execution.accumulate) if wanted else 1)


def _synchronise(rank: _Rank) -> None:
    if rank.world > 1:
        dist.barrier()
    streams.synchronize(rank.device)


def _record(trial: Trial, tuned: Tuned, measured: _Measurements) -> dict[str, Any]:
    return {
        "status": "ok",
        "peak_allocated_bytes": measured.peak_allocated,
        "peak_reserved_bytes": measured.peak_reserved,
        "host_peak_bytes": measured.host_peak,
        "step_s_all": measured.step_s,
        "losses": measured.losses,
        "gradients_sha256": sha256_of_all(measured.gradients[0]) if trial.fingerprint else None,
        "gradients": [
            {name: each.model_dump() for name, each in step.items()}
            for step in measured.gradients[: trial.gradient_steps]
        ],
        "memory_by_kind": measured.by_kind,
        "op_times": [each.model_dump() for each in measured.op_times],
        "audit": tuned.audit(),
        "link_bytes": measured.link_bytes,
        "other_load": measured.other_load,
        "reference_s": measured.reference_s,
        "rates": measured.rates,
    }


def main() -> int:
    """Run this rank; every outcome is reported as one record, including out of memory and bad configs."""
    trial = Trial.model_validate_json(Path(os.environ["MEMTUNE_TRIAL_FILE"]).read_text())
    place = {
        name: int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    }
    rank = _Rank(
        trial, place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"], int(os.environ["MEMTUNE_REPORT_FD"])
    )
    rank.say(stage="starting")
    try:
        with explained(rank.device):
            result = run(rank)
    except torch.OutOfMemoryError as error:
        result = {"status": "oom", "reason": bytes_in_words(str(error).split("\n")[0])}
    except MemtuneError as error:  # its message has problem, evidence and fix: no traceback
        print(error, file=sys.stderr)
        # `unfit`: a technique refused the live model for a reason that the recording does not show, or host
        # memory or SSD space is too small.
        refused = isinstance(error, ApplyError) or error.code in CAPACITY_ERRORS
        fault = {} if refused else {"exit_code": error.exit_code}
        result = {
            "status": "unfit" if refused else "crash",
            "reason": " ".join(str(error).split()),
            "code": error.code,
            **fault,
        }
        result["raised_at"] = raised_at(error)
    except (
        Exception
    ) as error:  # user code may raise anything; the log has the traceback, the record its last line
        first_line = str(error).strip().splitlines()[0] if str(error) else ""
        out_of_memory = is_out_of_memory(error)
        if not out_of_memory:
            traceback.print_exc(file=sys.stderr)
        result = {
            "status": "oom" if out_of_memory else "crash",
            "reason": first_line if out_of_memory else f"{type(error).__name__}: {first_line}",
        }
    rank.say(result=result)
    if dist.is_initialized() and result["status"] == "ok":
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of a broken collective must not keep the process
