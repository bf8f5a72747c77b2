"""Start trials: the executor for a request, and a single trial (`memtune trial`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from memtune.config import TunedConfig, load_config
from memtune.device import platform_of
from memtune.errors import UsageError
from memtune.executors import (
    Executor,
    Progress,
    Trial,
    TrialResult,
    check_gpus,
    local_slots,
    probe,
    visible_gpu_ids,
)
from memtune.hardware import Device
from memtune.progress import advance

_STEP = re.compile(r"step (\d+)/(\d+)")
ExecutorName = Literal["auto", "local", "ray"]


def make_executor(
    name: ExecutorName = "auto",
    *,
    device: str = "cpu",
    ranks: int = 1,
    parallel: int | None = 1,
    timed: bool = True,
    ray_address: str | None = None,
    log_dir: Path | None = None,
) -> Executor:
    """Return the requested executor (`executor_name`), open.

    Args:
        name: Kind of executor.
        device: Device of the trials.
        ranks: Of one trial.
        parallel: Number of concurrent trials; None for as many as do not change each other's step times.
        timed: Whether step times are compared; trials that only show what fits may share processor cores.
        ray_address: Of the cluster, for Ray.
        log_dir: Folder of the ranks' output.

    Raises:
        UsageError: There are fewer GPUs than `parallel` trials need, or Ray assigns no such devices.
        EnvironmentFault: Ray is asked for and cannot be started.
    """
    name = executor_name(name, device=device, ranks=ranks, ray_address=ray_address)
    if name == "ray":
        # Here, not above: Ray is optional and slow to import.
        resource = platform_of(device).ray_resource
        if not resource:
            raise UsageError(
                f"Ray assigns no devices of type {device} to trials.", fix="--executor local", code="MT100"
            )
        from memtune.executors.ray import RayExecutor

        slots = parallel or (local_slots(device, ranks, timed=timed) if device == "cpu" else None)
        return RayExecutor(ray_address, slots=slots, ranks=ranks, resource=resource, log_dir=log_dir)
    from memtune.executors import LocalExecutor

    slots = parallel or local_slots(device, ranks, timed=timed)
    gpus = visible_gpu_ids(device) if device != "cpu" and slots > 1 else ()
    if device != "cpu" and slots > 1:
        check_gpus(slots, ranks, len(gpus))
    return LocalExecutor(slots, log_dir=log_dir, gpus=gpus)


def executor_name(name: ExecutorName, *, device: str, ranks: int, ray_address: str | None) -> ExecutorName:
    """Return `name`, for `auto` Ray for several devices that it assigns or an address, else `local`."""
    if name != "auto":
        return name
    several = device != "cpu" and ranks > 1 and platform_of(device).ray_resource
    return "ray" if ray_address is not None or several else "local"


def run_trial(
    workload: str,
    config: str | Path | TunedConfig | Mapping[str, Any],
    *,
    device: Device = "cpu",
    ranks: int = 1,
    budget_bytes: int | None = None,
    micro_batch: int | None = None,
    executor: Executor | ExecutorName = "auto",
    steps: int = 3,
    warmup_steps: int = 2,
    seed: int = 0,
    deadline_s: float = 600.0,
    ray_address: str | None = None,
) -> TrialResult:
    """Run one trial of `config` in fresh processes and wait for its result.

    Args:
        workload: `model.py` or `model.py:name`.
        config: A config, or the path of one.
        device: Device to compute on.
        ranks: Number of processes that train together.
        budget_bytes: Device bytes per rank; exceeding them ends the trial as `oom`.
        micro_batch: Replaces the config's.
        executor: An open one (it stays open), or the name of one.
        steps: Measured steps.
        warmup_steps: Steps before them.
        seed: Of weights, data and dropout.
        deadline_s: Seconds after which the trial is ended as `timeout`.
        ray_address: Of the cluster, for Ray.

    Raises:
        WorkloadError: `model.py` cannot be used.
        ConfigError: The config cannot be read.
    """
    probe(workload)
    tuned = config if isinstance(config, TunedConfig) else load_config(config)
    if micro_batch is not None:
        tuned = tuned.model_copy(update={"settings": tuned.settings.with_execution(micro_batch=micro_batch)})
    trial = Trial(
        number=0,
        workload=workload,
        config=tuned.document(),
        device=device,
        ranks=ranks,
        budget_bytes=budget_bytes,
        warmup_steps=warmup_steps,
        steps=steps,
        seed=seed,
        deadline_s=deadline_s,
        env=tuned.settings.env(),
    )
    if not isinstance(executor, str):
        return _wait_for(executor, trial)
    opened = make_executor(executor, device=device, ranks=ranks, ray_address=ray_address)
    try:
        return _wait_for(opened, trial)
    finally:
        opened.close()


def _wait_for(executor: Executor, trial: Trial) -> TrialResult:
    executor.submit(trial)
    while True:
        for event in executor.wait(1.0):
            if isinstance(event, Progress) and (step := _STEP.match(event.stage)):
                advance(int(step[1]), "steps", int(step[2]))
            if isinstance(event, TrialResult) and event.number == trial.number:
                return event
