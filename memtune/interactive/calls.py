"""`memtune.search` and `memtune.plan`: the commands of the same names as functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from memtune.autotune.search import Control, check_writable, study_folder
from memtune.autotune.search import plan as run_plan
from memtune.autotune.search import search as run_search
from memtune.autotune.space import PlanOptions, SearchOptions
from memtune.autotune.ui import with_lines
from memtune.cli import _options
from memtune.interactive.objects import workload_of
from memtune.interactive.results import PlanResult, SearchResult
from memtune.search_spaces import matching

Goal = Literal["throughput", "memory", "batch"]


def search(
    model: Any,
    *,
    batch: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    blocks: Callable[..., Any] | None = None,
    gpus: int | None = None,
    device: str | None = None,
    workers: int | None = None,
    gpu_type: str | None = None,
    max_memory: str | int | None = None,
    goal: Goal = "throughput",
    trials: int = 12,
    time: str | None = None,
    axes: str | Sequence[str] | None = None,
    freeze: Mapping[str, str] | Sequence[str] | None = None,
    global_batch: int | None = None,
    allow_lossy: bool = False,
    offload_dir: str | Path | None = None,
    seed: int = 0,
    study: str | None = None,
    resume: bool = False,
    out: str | Path = "tuned.yaml",
    force: bool = False,
    dry_run: bool = False,
    parallel: int | Literal["auto"] = "auto",
    executor: Literal["auto", "local", "ray"] = "auto",
    ray_address: str | None = None,
    quiet: bool = False,
) -> SearchResult:
    """Find the fastest setting that fits, from real trials, and write `tuned.yaml`: `memtune search`.

    Each trial runs in processes of its own. Objects (everything but a path or module) are therefore stored
    with cloudpickle below `.memtune/objects`: functions and classes of importable modules by name, those of a
    notebook or of the running script by value, a model with its weights. Open files, locks and data loaders
    cannot be stored; make them inside `batch`.

    Args:
        model: The path of a `model.py` or `model.py:name`; an imported module of one; an object or class with
            its functions as methods; a function that builds the model; or the model itself. The last two need
            `batch` and `loss`.
        batch: `batch(size)`, which returns that many samples on the CPU; or one batch, whose samples are used
            over and over.
        loss: `loss(model, batch)`, which returns a scalar.
        optimizer: `optimizer(params)`; AdamW by default.
        blocks: `blocks(model)`, the repeated blocks; found automatically by default.
        gpus: Number of GPUs that train together; all visible ones by default.
        device: Type of the device to compute on, such as `"cpu"` or `"cuda"`; the accelerator if there is
            one.
        workers: Number of ranks on CPU (with `device="cpu"`).
        gpu_type: Name of the GPU, such as `h100-80g`, if the machine does not tell.
        max_memory: Device memory per rank, as `"24GiB"` or a number of bytes.
        goal: Maximize samples/s, minimize the peak, or maximize the micro-batch.
        trials: Maximum number of real trials, without repeats and the confirmation.
        time: Stop searching after this, such as `"30m"`.
        axes: Search only these axes, such as `["recompute", "offload"]`.
        freeze: Technique by axis that is fixed, such as `{"recompute": "full"}`.
        global_batch: Samples per optimizer step over all ranks.
        allow_lossy: Also use techniques that change results.
        offload_dir: Directory for offload to SSD; several drives as `/one:/two`.
        seed: Seed of weights, data and sampling.
        study: Name of the study; from the model by default.
        resume: Resume the study, and replace the config it wrote.
        out: File to write the config to.
        force: Replace the file even if memtune did not write it.
        dry_run: Do everything except trials.
        parallel: Number of trials that run side by side; `"auto"` for as many as do not change each other's
            step times.
        executor: Launcher of trials.
        ray_address: Ray cluster to join.
        quiet: Print nothing while the search runs.

    Returns:
        The result; after an interruption with the best so far.

    Raises:
        NothingFits: No trial was within the limit.
        UsageError: An argument or the workload cannot be used; the message says how to correct it.
        EnvironmentFault: A device, the storage or the cluster cannot be used.
    """
    given = _given(locals())
    given["time_limit"] = time
    only = _options.search_only(given)
    given["model"] = workload_of(model, batch=batch, loss=loss, optimizer=optimizer, blocks=blocks)
    common = _options.common(given, for_trials=not dry_run)
    options = SearchOptions(**common, **only)
    folder = study_folder(options)
    options = replace(options, study=str(folder.path))
    control = Control()
    if quiet or dry_run:
        with control.catch_signals():
            return SearchResult(run_search(options, control))
    return SearchResult(with_lines(lambda: run_search(options, control, say=_say), folder.events, control))


def plan(
    model: Any,
    *,
    batch: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    blocks: Callable[..., Any] | None = None,
    gpus: int | None = None,
    device: str | None = None,
    workers: int | None = None,
    gpu_type: str | None = None,
    nodes: int | None = None,
    max_memory: str | int | None = None,
    goal: Goal = "throughput",
    axes: str | Sequence[str] | None = None,
    freeze: Mapping[str, str] | Sequence[str] | None = None,
    global_batch: int | None = None,
    allow_lossy: bool = False,
    offload_dir: str | Path | None = None,
    seed: int = 0,
    config: str | Path | None = None,
    micro_batch: int | None = None,
    top: int = 6,
    exact: bool = False,
    out: str | Path | None = None,
    row: int = 1,
    force: bool = False,
    why_not: str | None = None,
    quiet: bool = False,
) -> PlanResult:
    """Rank settings by simulation, without GPUs and without running any: `memtune plan`.

    Args:
        model: As in `memtune.search`, like `batch`, `loss`, `optimizer` and `blocks`.
        batch: See `model`.
        loss: See `model`.
        optimizer: See `model`.
        blocks: See `model`.
        gpus: Number of GPUs that train together.
        device: Type of the device to predict for, such as `"cpu"`; CUDA by default.
        workers: Number of ranks on CPU (with `device="cpu"`).
        gpu_type: Predict for this GPU, such as `h100-80g`; the machine's own by default.
        nodes: Number of machines; as few as hold the GPUs by default.
        max_memory: Device memory per rank, as `"24GiB"` or a number of bytes.
        goal: Maximize samples/s, minimize the peak, or maximize the micro-batch.
        axes: Search only these axes.
        freeze: Technique by axis that is fixed.
        global_batch: Samples per optimizer step over all ranks.
        allow_lossy: Also use techniques that change results.
        offload_dir: Directory for offload to SSD.
        seed: Seed of weights, data and sampling.
        config: Predict only this config.
        micro_batch: Samples per micro-batch, instead of the config's.
        top: Number of rows of the ranking.
        exact: Dry-run the first rows: the real runtime on fake tensors.
        out: File to write the config of a row to.
        row: Row to write, from 1.
        force: Replace the file of `out`.
        why_not: Technique, as `kind` or `slot=kind`, to explain the absence of.
        quiet: Print nothing meanwhile.

    Returns:
        The result; `feasible` says whether anything is predicted to fit.

    Raises:
        UsageError: An argument or the workload cannot be used; the message says how to correct it.
    """
    given = _given(locals())
    given["model"] = workload_of(model, batch=batch, loss=loss, optimizer=optimizer, blocks=blocks)
    if why_not is not None:
        matching(why_not)
    if given["out"] is not None:
        check_writable(given["out"], force=force)
    common = _options.common(given, for_trials=False)
    options = PlanOptions(
        **common,
        nodes=nodes,
        config=None if config is None else Path(config),
        micro_batch=micro_batch,
        top=max(top, row),
        exact=exact,
        out=given["out"],
        row=row,
        why_not=why_not,
    )
    report = run_plan(options, say=(lambda text: None) if quiet else _say)
    return PlanResult(report, ("memtune", "plan", common["workload"]))


def _given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in the types of the command line."""
    given = dict(arguments)
    axes, freeze, memory, drives = (given[name] for name in ("axes", "freeze", "max_memory", "offload_dir"))
    if axes is not None and not isinstance(axes, str):
        given["axes"] = ",".join(axes)
    if isinstance(freeze, Mapping):
        given["freeze"] = [f"{axis}={kind}" for axis, kind in freeze.items()]
    given["max_memory"] = None if memory is None else str(memory)
    given["offload_dir"] = None if drives is None else str(drives)
    given["out"] = None if given["out"] is None else Path(given["out"])
    return given


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
