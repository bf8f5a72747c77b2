"""Options of a search or plan from the command line; refuses early what needs no model."""

from __future__ import annotations

import difflib
import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtune.device import DEFAULT_ACCELERATOR, PLATFORMS
from memtune.errors import EnvironmentFault, UsageError
from memtune.progress import shown_phase
from memtune.units import KIB, format_bytes, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from memtune.config import TunedConfig

_MOST_FIXES = 5
_GOALS = ("throughput", "memory", "batch")
_SHORT = ("batch", "alloc", "shard")
_EXECUTORS = ("auto", "local", "ray")


def workload(target: str) -> str:
    """Return `target` if its file exists and parses; it runs later, in a process of its own."""
    from memtune.workload import check_source

    check_source(target)
    return target


def config(path: Path) -> TunedConfig:
    """Return the config in a file, with a sign of life: its techniques import torch, which takes seconds."""
    from memtune.config import load_config

    config_file(path)
    with shown_phase(f"loading torch, reading {path}", sys.stderr):
        return load_config(path)


def config_file(path: Path) -> Path:
    """Return `path` if it can be read; its content is checked later."""
    if not path.exists() or path.is_dir() or path.suffix == ".py":
        from memtune.config import load_config

        load_config(path)  # raises
    return path


def one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    """Return `value` if it is one of `known`.

    Raises:
        UsageError: It is not; the message has the closest known value.
    """
    if value not in known:
        from memtune.search_spaces import did_you_mean

        what = f"{name} {value} is unknown.{did_you_mean(value, known)}"
        near = (
            known if len(known) <= _MOST_FIXES else difflib.get_close_matches(value, known, _MOST_FIXES, 0.0)
        )
        raise UsageError(what, fix=f"{name} {' or '.join(near)}", code="MT100")
    return value


def memory(text: str | None, option: str = "--max-memory") -> int | None:
    """Return a typed size in bytes."""
    if text is None:
        return None
    n_bytes = parse_bytes(text)
    if n_bytes <= 0:
        raise UsageError(f"{option} {text} leaves no memory at all.", fix=f"{option} 24GiB", code="MT100")
    if text.strip().isdigit() and n_bytes < KIB:
        raise UsageError(f"{option} {text} is {text} bytes.", fix=f"{option} {text.strip()}GiB", code="MT100")
    return n_bytes


def _time_limit(text: str | None) -> float | None:
    """Return a typed time in seconds."""
    time_s = None if text is None else parse_seconds(text)
    if time_s == 0:
        raise UsageError(f"--time {text} leaves no time for a trial.", fix="--time 10m", code="MT100")
    return time_s


def device_type(text: str) -> str:
    """Return `text` if it is a device type of torch.

    Raises:
        UsageError: It is none.
    """
    common = tuple(dict.fromkeys(each.device for each in PLATFORMS.values()))
    if text in common:  # without importing torch, which takes seconds
        return text
    from memtune.device import accelerator

    return text if accelerator.has_type(text) else one_of("--device", text, accelerator.known_types())


def place(given: dict[str, Any], *, for_trials: bool) -> tuple[str, int]:
    """Return device type and number of ranks; looks for GPUs only if trials will run on them.

    `--device TYPE:N` is N devices of a type.
    """
    device, gpus, workers = given.get("device"), given.get("gpus"), given.get("workers")
    if device is not None:
        device, sign, number = device.partition(":")
        device_type(device)
        if sign:
            gpus, workers = _counted(device, number, gpus, workers)
    if device == "cpu":
        if gpus is not None:
            raise UsageError(
                "--gpus goes with GPUs, not with --device cpu.",
                fix=f"--device cpu --workers {gpus}",
                code="MT100",
            )
        return "cpu", workers or 1
    if workers is not None:
        raise UsageError(
            "--workers is the number of ranks on CPU.",
            fix="--device cpu --workers N, or --gpus N",
            code="MT100",
        )
    if not for_trials:
        return device or DEFAULT_ACCELERATOR, gpus or 1
    found, visible = visible_gpus(device)
    wanted = found or device or DEFAULT_ACCELERATOR
    if visible == 0:
        raise _no_gpu(
            wanted,
            "--device cpu --workers 2  runs the search on this CPU;  memtune plan --gpus 8 --gpu-type"
            " h100-80g  needs none",
        )
    if gpus is not None and gpus > visible and not given.get("ray_address"):
        raise EnvironmentFault(
            f"{gpus} GPUs requested, {visible} visible.",
            evidence=_visibility(wanted),
            fix=f"--gpus {visible}, or make more of them visible",
            code="MT104",
        )
    return wanted, gpus or visible


def check_predictable(gpu_type: str | None, device: str) -> None:
    """Refuse a prediction for a GPU that is neither named nor here, without importing torch."""
    if gpu_type is None and device != "cpu" and not _may_have_gpus(device):
        raise _no_gpu(device, "name the GPU that is meant: --gpu-type h100-80g; or add --device cpu")


def _no_gpu(device: str, fix: str) -> EnvironmentFault:
    return EnvironmentFault("No GPU is visible here.", evidence=_visibility(device), fix=fix, code="MT104")


def _visibility(device: str) -> str:
    variable = PLATFORMS[device].visible_devices if device in PLATFORMS else ""
    return f"{variable}={os.environ.get(variable, '')!r}" if variable else ""


def _counted(
    device: str, number: str, gpus: int | None, workers: int | None
) -> tuple[int | None, int | None]:
    """Return `--gpus` and `--workers` with the N of `--device TYPE:N`.

    Raises:
        UsageError: It is no number, or another one than that of the option.
    """
    option, other = ("--workers", workers) if device == "cpu" else ("--gpus", gpus)
    if not number.isdecimal() or not int(number) or other not in (None, int(number)):
        raise UsageError(
            f"--device {device}:{number} does not give a number of devices"
            + (f" that agrees with {option} {other}." if other else "."),
            fix=f"--device {device}:2",
            code="MT100",
        )
    return (gpus, int(number)) if device == "cpu" else (int(number), workers)


def visible_gpus(device: str | None = None) -> tuple[str | None, int]:
    """Return type and number of the devices that torch sees, of the accelerator or of type `device`.

    Without a driver's device file and without a package that adds a device to torch there are none, and torch
    is not imported, which takes seconds.
    """
    if not _may_have_gpus(device):
        return None, 0
    from memtune.device import accelerator

    there = accelerator.device_type()
    return (there, accelerator.count()) if device in (None, there) else (None, 0)


def _may_have_gpus(device: str | None) -> bool:
    known = [each for each in PLATFORMS.values() if device in (None, each.device)]
    files = any(Path(file).exists() for each in known for file in each.driver_files)
    return not known or files or bool(entry_points(group="torch.backends"))


def searched(text: str | None) -> tuple[str, ...]:
    """Return the axes of `--axes`, each of which must exist."""
    return tuple(one_of("--axes", part.strip(), _axes()) for part in (text or "").split(",") if part.strip())


def _axes() -> tuple[str, ...]:
    """Return the names that options accept for an axis or a slot."""
    from memtune.search_spaces import SLOTS

    return tuple(
        dict.fromkeys(["execution", *(slot.split(".")[0] for slot in SLOTS), *SLOTS, "micro_batch", *_SHORT])
    )


def frozen(pairs: list[str] | None) -> dict[str, str]:
    """Return `--freeze axis=kind` as a dict by axis.

    Raises:
        UsageError: An axis or kind does not exist.
    """
    from memtune.search_spaces import SLOTS, did_you_mean, kinds

    found = {}
    for pair in pairs or []:
        axis, sign, kind = pair.partition("=")
        if not sign or not axis or not kind:
            raise UsageError(
                f"--freeze {pair} is not of the form AXIS=KIND.", fix="--freeze recompute=full", code="MT100"
            )
        one_of("--freeze", axis, (*_axes(), "compile", "compile_backend"))
        if axis in SLOTS and kind not in kinds(axis):
            raise UsageError(
                f"--freeze {pair}: there is no technique '{kind}' for"
                f" {axis}.{did_you_mean(kind, kinds(axis))}",
                evidence=f"Known: {', '.join(kinds(axis))}.",
                fix="memtune techniques  lists all",
                code="MT201",
            )
        found[axis] = kind
    return found


def offload_dir(given: dict[str, Any], *, for_trials: bool) -> None:
    """Set `--offload-dir` for this process and its children; if trials run, the directory must be usable
    here.
    """
    from memtune.ssd import offload_dir

    if given["offload_dir"] is not None:
        os.environ[offload_dir.VARIABLE] = given["offload_dir"]
    for each in offload_dir.allowed_dirs() if for_trials else ():
        if warning := offload_dir.in_memory(offload_dir.checked(each, quiet=True)):
            print(warning, file=sys.stderr)


def common(given: dict[str, Any], *, for_trials: bool) -> dict[str, Any]:
    """Return the options that a search and a plan share."""
    target = workload(given["model"])
    if given["gpu_type"] is not None:
        from memtune.hardware import known_name

        known_name(given["gpu_type"])
    device, ranks = place(given, for_trials=for_trials)
    offload_dir(given, for_trials=for_trials)
    return {
        **{name: given[name] for name in ("gpu_type", "global_batch", "allow_lossy", "seed")},
        "workload": target,
        "device": device,
        "ranks": ranks,
        "budget_bytes": memory(given["max_memory"]),
        "host_memory_bytes": memory(given["host_memory"], "--host-memory"),
        "goal": one_of("--goal", given["goal"], _GOALS),
        "axes": searched(given["axes"]),
        "freeze": frozen(given["freeze"]),
    }


def parallel(wish: str | int) -> int | None:
    """Return the number of concurrent trials, None for `auto`.

    Raises:
        UsageError: It is neither `auto` nor a positive number.
    """
    text = str(wish)
    if text == "auto":
        return None
    if not text.isdecimal() or not int(text):
        raise UsageError(
            f"--parallel {text} is neither a number of trials nor auto.", fix="--parallel 2", code="MT100"
        )
    return int(text)


def launcher(given: dict[str, Any]) -> str:
    """Return the executor; a cluster's address contradicts local trials."""
    executor = one_of("--executor", given["executor"], _EXECUTORS)
    if given["ray_address"] is not None and executor == "local":
        raise UsageError(
            "--executor local starts trials on this machine, --ray-address on a cluster.",
            fix="leave one of the two out",
            code="MT100",
        )
    return executor


def header(given: dict[str, Any], options: dict[str, Any]) -> str:
    """Return the heading of a command: model, devices, limit and goal, as far as they are given."""
    ranks = options["ranks"]
    plural = "s" if ranks > 1 else ""
    devices = (f"{ranks} CPU worker{plural}" if options["device"] == "cpu" else f"{ranks} GPU{plural}") + (
        f" {given['gpu_type']}" if given["gpu_type"] else ""
    )
    limit = f" · limit {format_bytes(options['budget_bytes'])} each" if options["budget_bytes"] else ""
    return f"{given['model']} · {devices}{limit} · goal {options['goal']}"


def search_only(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a search that a plan does not have; checks the output file now rather than after
    the search.
    """
    from memtune.autotune.search import check_writable, named_study

    executor = launcher(given)
    if given["study"] is not None and not given["resume"]:
        named_study(given["study"]).check_new()
    # On resume the study itself checks that it wrote the file.
    check_writable(given["out"], force=given["force"] or given["resume"])
    if given["ray_address"] is not None:
        from memtune.executors.ray import check_reachable

        check_reachable(given["ray_address"])
    as_given = ("out", "force", "study", "resume", "trials", "ray_address", "dry_run")
    return {
        **{name: given[name] for name in as_given},
        "time_s": _time_limit(given["time_limit"]),
        "parallel": parallel(given["parallel"]),
        "executor": executor,
    }


def plan_only(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a plan that a search does not have; checks them before the recording."""
    if given["config"] is None and given["micro_batch"] is not None:
        raise UsageError(
            "--micro-batch changes the config of --config, and there is none.",
            fix=f"--freeze micro_batch={given['micro_batch']} plans with this micro-batch",
            code="MT100",
        )
    if given["why_not"] is not None:
        from memtune.search_spaces import matching

        matching(given["why_not"])
    if given["out"] is not None:
        from memtune.autotune.search import check_writable

        check_writable(given["out"], force=given["force"])
    as_given = ("nodes", "config", "micro_batch", "exact", "out", "row", "why_not")
    return {**{name: given[name] for name in as_given}, "top": max(given["top"], given["row"])}
