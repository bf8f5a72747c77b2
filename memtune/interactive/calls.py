"""`memtune.search` and `memtune.plan`: the commands of the same names as functions."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, Unpack

from memtune.cli import _options
from memtune.progress import Progress, shown, shown_phase
from memtune.search_spaces import did_you_mean

if TYPE_CHECKING:
    from memtune.interactive.results import PlanResult, SearchResult

Goal = Literal["throughput", "memory", "batch"]
Given = ParamSpec("Given")
Returned = TypeVar("Returned")


class SharedOptions(TypedDict, total=False):
    """Options that `search` and `plan` share.

    Attributes:
        batch: `batch(size)`, which returns that many samples on the CPU; or one batch, whose samples are used
            over and over.
        loss: `loss(model, batch)`, which returns a scalar.
        optimizer: `optimizer(params)` or `optimizer(model)`; AdamW by default.
        blocks: `blocks(model)`, the repeated blocks; found automatically by default.
        gpus: Number of GPUs that train together; by default all visible ones for `search`, 1 for `plan`.
        device: Type of the device to compute on, or to predict for, such as `"cpu"` or `"cuda"`; the
            accelerator if there is one, and CUDA by default for `plan`.
        workers: Number of ranks on CPU (with `device="cpu"`).
        gpu_type: Name of the GPU, such as `h100-80g`; the machine's own by default.
        max_memory: Device memory per rank, as `"24GiB"` or a number of bytes.
        host_memory: Host memory of each machine that training may use, likewise; what is free here by
            default, or the GPUs' share of a typical machine with `gpu_type`.
        goal: Maximize samples/s, minimize the peak, or maximize the micro-batch.
        axes: Search only these axes, such as `["recompute", "offload"]`.
        freeze: Technique by axis that is fixed, such as `{"recompute": "full"}`.
        global_batch: Samples per optimizer step over all ranks.
        allow_lossy: Also use techniques that change results.
        offload_dir: Directory for offload to SSD; several drives as `/one:/two`.
        seed: Seed of weights, data and sampling.
        force: Replace the file of `out` even if memtune did not write it.
        quiet: Print nothing meanwhile.
    """

    batch: Any
    loss: Callable[..., Any] | None
    optimizer: Callable[..., Any] | None
    blocks: Callable[..., Any] | None
    gpus: int | None
    device: str | None
    workers: int | None
    gpu_type: str | None
    max_memory: str | int | None
    host_memory: str | int | None
    goal: Goal
    axes: str | Sequence[str] | None
    freeze: Mapping[str, str] | Sequence[str] | None
    global_batch: int | None
    allow_lossy: bool
    offload_dir: str | Path | None
    seed: int
    force: bool
    quiet: bool


_NO_OPTIONS = (
    "model",
    "batch",
    "loss",
    "optimizer",
    "blocks",
    "quiet",
    "out",
    "force",
    "top",
    "row",
    "why_not",
)
"""Arguments that the command line for the same model does not repeat."""
_DEFAULTS: SharedOptions = {
    "goal": "throughput",
    "allow_lossy": False,
    "seed": 0,
    "force": False,
    "quiet": False,
}
"""Defaults other than None."""


def _with_shared_options(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Give a function of `**options` the signature and the documentation of the shared options."""
    # So `help` and notebooks show them, and a mistyped name is a TypeError.
    own = list(inspect.signature(function).parameters.values())
    shared = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_DEFAULTS.get(name),
            annotation=getattr(hint, "__forward_arg__", hint),  # a TypedDict wraps its texts
        )
        for name, hint in SharedOptions.__annotations__.items()
    ]
    signature = inspect.Signature(
        [own[0], *shared, *own[1:-1]], return_annotation=function.__annotations__["return"]
    )

    @functools.wraps(function)
    def call(*args: Given.args, **given: Given.kwargs) -> Returned:
        try:
            bound = signature.bind(*args, **given)
        except TypeError as error:
            unknown = next((name for name in given if name not in signature.parameters), "")
            near = did_you_mean(unknown, [*signature.parameters]) if unknown else ""
            raise TypeError(f"memtune.{function.__name__}: {error}.{near}") from None
        bound.apply_defaults()
        return function(*bound.args, **bound.kwargs)

    rows = (SharedOptions.__doc__ or "").partition("Attributes:\n")[2].strip()
    call.__doc__ = (function.__doc__ or "").replace("options: As in `SharedOptions`.", rows)
    call.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect
    return call


@_with_shared_options
def search(
    model: Any,
    *,
    trials: int = 12,
    time: str | None = None,
    study: str | None = None,
    resume: bool = False,
    out: str | Path = "tuned.yaml",
    dry_run: bool = False,
    parallel: int | Literal["auto"] = "auto",
    executor: Literal["auto", "local", "ray"] = "auto",
    ray_address: str | None = None,
    **options: Unpack[SharedOptions],
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
        options: As in `SharedOptions`.
        trials: Maximum number of real trials, without repeats and the confirmation.
        time: Stop searching after this, such as `"30m"`.
        study: Name of the study; from the model by default.
        resume: Resume the study, and replace the config it wrote.
        out: File to write the config to.
        dry_run: Do everything except trials.
        parallel: Number of trials that run side by side; `"auto"` for as many as do not change each other's
            step times.
        executor: Launcher of trials.
        ray_address: Ray cluster to join.

    Returns:
        The result; after an interruption with the best so far.

    Raises:
        NothingFits: No trial was within the limit.
        UsageError: An argument or the workload cannot be used; the message says how to correct it.
        EnvironmentFault: A device, the storage or the cluster cannot be used.
    """
    quiet = options["quiet"]
    with _loading(quiet):
        from memtune.autotune.search import Control, search as run_search, study_folder
        from memtune.autotune.space import SearchOptions
        from memtune.autotune.ui import LinePrinter, with_lines
        from memtune.interactive.results import SearchResult

    own = {"trials": trials, "time_limit": time, "study": study, "resume": resume, "out": out}
    own |= {"dry_run": dry_run, "parallel": parallel, "executor": executor, "ray_address": ray_address}
    given = _given(options, own)
    only = _options.search_only(given)
    given["model"] = _workload(model, options)
    common = _options.common(given, for_trials=not dry_run)
    search_options = SearchOptions(**common, **only)
    folder = study_folder(search_options)
    search_options = replace(search_options, study=str(folder.path))
    control, progress = Control(), _announced("memtune.search", given, common, quiet)
    if quiet or dry_run:
        with control.catch_signals(), _shown(progress, quiet):
            return SearchResult(run_search(search_options, control, say=progress.phase))
    printer = LinePrinter(progress=progress)
    work = functools.partial(run_search, search_options, control, say=progress.phase)
    return SearchResult(with_lines(work, folder.events, control, printer))


@_with_shared_options
def plan(
    model: Any,
    *,
    nodes: int | None = None,
    config: str | Path | None = None,
    micro_batch: int | None = None,
    top: int = 6,
    exact: bool = False,
    out: str | Path | None = None,
    row: int = 1,
    why_not: str | None = None,
    **options: Unpack[SharedOptions],
) -> PlanResult:
    """Rank settings by simulation, without GPUs and without running any: `memtune plan`.

    Args:
        model: As in `memtune.search`.
        options: As in `SharedOptions`.
        nodes: Number of machines; as few as hold the GPUs by default.
        config: Predict only this config.
        micro_batch: Samples per micro-batch, instead of the config's.
        top: Number of rows of the ranking.
        exact: Dry-run the first rows: the real runtime on fake tensors.
        out: File to write the config of a row to.
        row: Row to write, from 1.
        why_not: Technique, as `kind` or `slot=kind`, to explain the absence of.

    Returns:
        The result; `feasible` says whether anything is predicted to fit.

    Raises:
        UsageError: An argument or the workload cannot be used; the message says how to correct it.
    """
    quiet = options["quiet"]
    with _loading(quiet):
        from memtune.autotune.search import plan as run_plan
        from memtune.autotune.space import PlanOptions
        from memtune.interactive.results import PlanResult

    own: dict[str, Any] = {"nodes": nodes, "config": None if config is None else Path(config)}
    own |= {
        "micro_batch": micro_batch,
        "top": top,
        "exact": exact,
        "out": out,
        "row": row,
        "why_not": why_not,
    }
    given = _given(options, own)
    only = _options.plan_only(given)
    given["model"] = _workload(model, options)
    common = _options.common(given, for_trials=False)
    progress = _announced("memtune.plan", given, common, quiet)
    with _shown(progress, quiet):
        report = run_plan(PlanOptions(**common, **only), say=progress.phase)
    return PlanResult(report, _command_line(given))


@contextlib.contextmanager
def _loading(quiet: bool) -> Iterator[None]:
    """Show the first imports, which take seconds, as a phase."""
    loaded = "memtune.interactive.results" in sys.modules
    with contextlib.nullcontext() if quiet or loaded else shown_phase("loading torch", sys.stderr):
        yield


def _announced(name: str, given: dict[str, Any], common: dict[str, Any], quiet: bool) -> Progress:
    """Print the heading of a call, unless only the result is wanted; return its progress."""
    progress = Progress(_options.header(given, common))
    if not quiet:
        print(f"{name} {progress.heading}", file=sys.stderr, flush=True)
    return progress


def _shown(progress: Progress, quiet: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if quiet else shown(progress, sys.stderr)


def _workload(model: Any, options: SharedOptions) -> str:
    from memtune.interactive.objects import workload_of

    return workload_of(
        model,
        batch=options["batch"],
        loss=options["loss"],
        optimizer=options["optimizer"],
        blocks=options["blocks"],
    )


def _command_line(given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command that plans the same, without the options of its output."""
    words = ["memtune", "plan", given["model"]]
    for name, parameter in inspect.signature(plan).parameters.items():
        value = given.get(name)
        if name in _NO_OPTIONS or value in (None, False, parameter.default):
            continue
        option = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list | tuple) else ["" if value is True else value]
        words += [word for each in values for word in (option, str(each)) if word]
    return tuple(words)


def _given(options: SharedOptions, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in the types of the command line."""
    given: dict[str, Any] = {**options, **own}
    axes, freeze = given["axes"], given["freeze"]
    if axes is not None and not isinstance(axes, str):
        given["axes"] = ",".join(axes)
    if isinstance(freeze, Mapping):
        given["freeze"] = [f"{axis}={kind}" for axis, kind in freeze.items()]
    for name in ("max_memory", "host_memory", "offload_dir"):
        given[name] = None if given[name] is None else str(given[name])
    given["out"] = None if given["out"] is None else Path(given["out"])
    return given
