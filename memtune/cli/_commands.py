"""The smaller commands: trial, run, techniques, doctor, clean, watch, config."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtune._optional import install_command
from memtune.cli._output import emit, folded, results, say
from memtune.errors import EnvironmentFault, UsageError, existing_file
from memtune.progress import Progress, shown, shown_phase
from memtune.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memtune.config import TunedConfig
    from memtune.executors import TrialResult
    from memtune.technique import Reason, Technique

SCHEMA = 1
_WIDTH = 100
"""Columns of text that describes a technique."""


def trial(given: dict[str, Any]) -> int:
    """Run `memtune trial`.

    Returns:
        0 if the trial ran, 1 if it ran out of memory, timed out or crashed, 3 if the storage failed.
    """
    from memtune.cli import _options

    _options.config_file(given["config"])
    executor: Any = _options.launcher(given)
    device, ranks = _options.place(given, for_trials=True)
    _options.offload_dir(given, for_trials=True)
    workload, progress = _options.workload(given["model"]), Progress()
    say(f"memtune trial {given['model']} with {given['config']}")
    tuned = _options.config(given["config"])
    with shown_phase("loading the search", sys.stderr):
        from memtune.autotune.search import run_trial
    from memtune.executors import CAPACITY_ERRORS
    from memtune.technique import Reason

    def run(config: TunedConfig) -> TrialResult:
        progress.phase("running the trial")
        with shown(progress, sys.stderr):
            return run_trial(
                workload,
                config,
                device=device,
                ranks=ranks,
                budget_bytes=_options.memory(given["max_memory"]),
                micro_batch=given["micro_batch"],
                steps=given["steps"],
                seed=given["seed"],
                executor=executor,
                ray_address=given["ray_address"],
            )

    with results() as stream:
        result = run(tuned)
        # The config may be unfit only because a technique needs a plan: make the plan and try again.
        if result.status == "unfit" and not tuned.plan and result.code not in CAPACITY_ERRORS:
            found = _planned(tuned, given, device, ranks)
            if isinstance(found, Reason):
                result = result.model_copy(
                    update={"reason": f"the config does not fit {given['model']}: {found}", "log_tail": ""}
                )
            else:
                tuned = found
                result = run(found)
        if given["as_json"]:
            document = result.model_dump(mode="json")
            emit({"schema": SCHEMA, "loss": document.pop("losses"), **document}, stream)
        elif result.status == "ok":
            for line in _measured_lines(result):
                print(line, file=stream)
    for each in tuned.settings.techniques:
        for line in each.unmet(tuned.plan[each.slot]) if each.slot in tuned.plan else ():
            print(line, file=sys.stderr)
    if result.status != "ok":
        print(failure_text(result), file=sys.stderr)
    return 0 if result.status == "ok" else result.exit_code or 1


def _measured_lines(result: TrialResult) -> Iterator[str]:
    """Yield what was measured in a trial that ran to its end."""
    yield f"step {format_seconds(result.step_s or 0)} ± {format_seconds(result.spread_s)}"
    allocated, reserved = result.peak_allocated_bytes or 0, result.peak_reserved_bytes or 0
    yield f"peak {format_bytes(allocated)} allocated, {format_bytes(reserved)} reserved"
    if written := result.link_bytes.get("ssd_write"):
        yield f"written to SSD: {format_bytes(written)} a step and rank"
    yield f"loss {' '.join(f'{loss:.4f}' for loss in result.losses)}"


def failure_text(result: TrialResult) -> str:
    """Return a trial's failure and the end of its output; a message that is in both is printed once, in its
    own lines.
    """
    at, lines = result.reason.find(result.code or "\n"), result.log_tail.splitlines()
    for i in range(len(lines) if at >= 0 else 0):
        if " ".join(" ".join(lines[i:]).split()).startswith(result.reason[at:]):
            return "\n".join(
                [*lines[:i], f"{result.status}: {result.reason[:at]}{lines[i]}", *lines[i + 1 :]]
            )
    return f"{result.status}: {result.reason}\n{result.log_tail}".rstrip()


def _planned(tuned: TunedConfig, given: dict[str, Any], device: Any, ranks: int) -> TunedConfig | Reason:
    """Return `tuned`, which has no plan, with the plans that its techniques make for the workload; or the
    reason why one does not fit.
    """
    from memtune.autotune.search import plan_buckets, prepare
    from memtune.autotune.space import PlanOptions
    from memtune.cli import _options
    from memtune.technique import Reason

    say("the config has no plan: recording one training step to make one")
    progress = Progress()
    with shown(progress, sys.stderr):
        setup = prepare(
            PlanOptions(
                workload=given["model"],
                device=device,
                ranks=ranks,
                budget_bytes=_options.memory(given["max_memory"]),
                config=given["config"],
                micro_batch=given["micro_batch"],
            ),
            say=progress.phase,
        )
    assert setup.only is not None  # because `config` is given
    found = setup.scorer.rewriter.candidate(setup.only)
    if isinstance(found, Reason):
        return found
    return tuned.model_copy(update={"plan": dict(found.plans), "buckets": plan_buckets(setup, found)})


def init(target: str, out: Path, force: bool, as_json: bool) -> int:
    """Run `memtune init`: write the file, record a step of it, list the lines to check."""
    if not target.strip():
        raise UsageError("TARGET is empty.", fix="memtune init --help", code="MT100")
    if out.exists() and not force:
        raise existing_file(out, "--out another.py, or --force to replace it")
    if not os.access(out.absolute().parent, os.W_OK):
        raise EnvironmentFault(
            f"{out} cannot be written:  {out.absolute().parent} is no folder, or not yours to write.",
            fix="name a file in a folder of yours with --out",
            code="MT407",
        )
    progress = Progress()
    progress.phase("loading torch")
    with results() as stream:
        with shown(progress, sys.stderr):
            from memtune.scaffold import write_model_file

            written = write_model_file(target, out, say=progress.phase)
        if as_json:
            document = {
                "schema": SCHEMA,
                "out": str(written.path),
                "parameters": written.parameters,
                "record_s": written.record_s,
                "checks": list(written.checks),
            }
            emit(document, stream)
            return 0
        print(
            f"{written.path}: {written.parameters:,} parameters, one training step recorded in"
            f" {format_seconds(written.record_s)}",
            file=stream,
        )
        print("to check:", *written.checks, sep="\n  ", file=stream)
        print(f"next: memtune plan {out} --gpus 1 --gpu-type h100-80g, or memtune search {out}", file=stream)
    return 0


def run(config: Path, command: list[str]) -> int:
    """Run `memtune run`: replace this process by the command, with the config's environment."""
    from memtune.cli import _options

    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        raise UsageError(
            "memtune run needs a command.", fix=f"memtune run {config} -- python train.py", code="MT100"
        )
    program = shutil.which(command[0])
    if program is None:
        raise UsageError(f"There is no command {command[0]}.", fix="give it with its path", code="MT100")
    wanted = _options.config(config).settings.env()
    sys.stdout.flush()  # execve drops what is still in Python's buffer
    os.execve(program, command, {**os.environ, **wanted})


def techniques(as_json: bool) -> int:
    """Run `memtune techniques`."""
    from memtune.search_spaces import cards

    found = cards()
    if as_json:
        emit([asdict(each) for each in found])
        return 0
    width = max(len(each.axis) for each in found)
    for each in found:
        paper = f" ({each.paper})" if each.paper and each.paper not in each.title else ""
        head = f"{each.axis:<{width}}  {each.kind:<20}  {each.exactness:<9}  "
        print(folded(f"{head}{each.title}{paper}", sys.stdout, len(head)))
    return 0


def technique(asked: str, as_json: bool) -> int:
    """Run `memtune techniques KIND`: print what it does and its knobs."""
    from memtune.search_spaces import find, knob_texts, matching

    names = matching(asked)
    with shown_phase("loading the technique", sys.stderr):
        documents = [_described(find(slot, kind), knob_texts(slot, kind)) for slot, kind in names]
    if as_json:
        emit(documents)
        return 0
    for each in documents:
        print(f"{each['axis']}: {{kind: {each['kind']}}}   {each['title']}, {each['exactness']}")
        print(textwrap.fill(each["text"], _WIDTH, initial_indent="  ", subsequent_indent="  "))
        print(f"  Source: {each['source']}")
        for name, knob in each["knobs"].items():
            text = f"{name} = {knob['default']}: {knob['text']}"
            print(textwrap.fill(text, _WIDTH, initial_indent="  ", subsequent_indent="      "))
    return 0


def _described(technique: type[Technique], texts: dict[str, str]) -> dict[str, Any]:
    knobs = {
        name: {"default": field.get_default(call_default_factory=True), "text": texts.get(name, "")}
        for name, field in technique.model_fields.items()
        if name != "kind"
    }
    return {
        "axis": technique.slot,
        "kind": technique.model_fields["kind"].default,
        "title": technique.title,
        "text": " ".join((technique.__doc__ or "").split()),
        "source": technique.source,
        "exactness": technique.exactness,
        "knobs": knobs,
    }


def doctor(as_json: bool) -> int:
    """Run `memtune doctor`: print the hardware and software, and the commands that add missing parts."""
    with shown_phase("loading torch", sys.stderr):
        import torch

        import memtune
        from memtune.device import accelerator
        from memtune.hardware import calibration_cache, usable_cores
        from memtune.memory import cpu_allocator

    known = {
        device: found.source for device in accelerator.types() if (found := calibration_cache.load(device))
    }
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "memtune": memtune.__version__,
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes,
        "gpus": [accelerator.name(index) for index in range(accelerator.count())],
        "accelerator": _accelerator(),
        "ray": importlib.util.find_spec("ray") is not None,
        "transformers": importlib.util.find_spec("transformers") is not None,
        "native_ledger": cpu_allocator.available() is None,
        "rates": known,
    }
    if as_json:
        emit(facts)
        return 0
    print(f"memtune {facts['memtune']} · Python {facts['python']} · torch {facts['torch']}")
    print(f"{facts['cores']} cores · {format_bytes(memory_bytes)} memory")
    print("\n".join(_accelerator_lines(facts["accelerator"], facts["gpus"])))
    reason = cpu_allocator.available()
    print(
        "native CPU ledger: "
        + ("ready" if reason is None else f"not available, the slower one is used ({reason.what})")
    )
    for device, source in (
        known or {"rates": "not measured; memtune doctor --calibrate does it in a minute"}
    ).items():
        print(f"{device}: {source}")
    print(
        "Ray: "
        + ("installed" if facts["ray"] else f"not installed; for several GPUs  {install_command('ray')}")
    )
    missing = f"not installed; for memtune init of its models  {install_command('transformers')}"
    print(f"transformers: {'installed' if facts['transformers'] else missing}")
    return 0


def _accelerator() -> dict[str, Any] | None:
    """Return the accelerator of this process: device type, title, runtime, capabilities that it lacks, and
    known gaps.
    """
    from memtune.device import accelerator

    there = accelerator.device_type()
    if there is None:
        return None
    platform = accelerator.platform_of(there)
    return {
        "type": there,
        "title": platform.title,
        "runtime": accelerator.runtime(),
        "lacks": list(platform.lacks),
        "gaps": list(platform.gaps),
    }


def _accelerator_lines(found: dict[str, Any] | None, names: list[str]) -> list[str]:
    if found is None:
        return ["accelerator: none that torch sees"]
    devices = ", ".join(f"{count} × {name}" for name, count in Counter(names).items())
    runtime = f", {found['runtime']}" if found["runtime"] else ""
    lines = [f"accelerator: {devices} (--device {found['type']}: {found['title']}{runtime})"]
    lines += [f"  lacks {each}" for each in found["lacks"]]
    lines += [f"  known not to work: {each}" for each in found["gaps"]]
    return lines


def clean(directory: Path | None, as_json: bool) -> int:
    """Run `memtune clean`: print the removed files with their sizes."""
    import tempfile

    from memtune.ssd import offload_dir

    roots = [str(directory)] if directory is not None else offload_dir.allowed_dirs()
    places = [offload_dir.checked(root, quiet=True) for root in roots]
    if directory is None:
        places.append(Path(tempfile.gettempdir()))
    removed = [left for place in places for left in offload_dir.clean(place)]
    if as_json:
        emit(
            {
                "schema": SCHEMA,
                "removed": [{"path": str(each.path), "bytes": each.n_bytes} for each in removed],
            }
        )
        return 0
    for each in removed:
        note = ", from which training could have been resumed" if each.resumable else ""
        print(f"removed {each.path}: {format_bytes(each.n_bytes)}{note}")
    if not removed:
        print("nothing to remove")
    return 0


def calibrate(device: str | None, as_json: bool) -> int:
    """Run `memtune doctor --calibrate`: measure this machine, save the result, print each figure with its
    method.
    """
    from memtune.autotune.predict import calibrate as measure_machine
    from memtune.cli import _options
    from memtune.device import accelerator

    where = accelerator.types()[-1] if device is None else _options.device_type(device)
    with results() as stream:
        found = measure_machine(where, say=lambda text: print(text, file=sys.stderr))
        if as_json:
            emit({"schema": SCHEMA, "device": where, **asdict(found)}, stream)
            return 0
        print(f"{found.machine}: {found.source}, {found.details['seconds']:.0f} s", file=stream)
        for name, value in found.constants.items():
            print(f"{name:<28} {_rate(name, value):>14}   {found.how[name]}", file=stream)
        for name, points in sorted(found.curves.items()):
            x, y = points[-1]
            smallest = format_seconds(points[0][1])
            print(
                f"{name:<28} {x / y:>13.0%}    of peak at its largest; smallest {smallest}; {len(points)}"
                " sizes",
                file=stream,
            )
        for name, value in found.details.items():
            if isinstance(value, str):
                print(f"{name:<28} {value}", file=stream)
    return 0


def _rate(name: str, value: float) -> str:
    if name.endswith("flops_per_s"):
        return f"{value / 1e9:,.1f} GFLOP/s"
    return f"{value / 1e9:,.2f} GB/s" if name.endswith("bytes_per_s") else format_seconds(value)


def watch(study: str | None) -> int:
    """Run `memtune watch`: show the search screen over an event log."""
    path = _event_log(study)
    if not sys.stdout.isatty():
        raise UsageError("watch needs a terminal.", fix=f"read {path} instead", code="MT100")
    with shown_phase("loading the screen", sys.stderr):
        from memtune.autotune.search import has_owner, read_events
        from memtune.autotune.ui import SearchView, run_tui, summary_lines
    run_tui(path, is_alive=lambda: has_owner(path.parent))
    view = SearchView()
    for event in read_events(path):
        view.apply(event)
    goes_on = f"the search goes on; its log is {path}"
    if not has_owner(path.parent):
        resumed = f"--study {path.parent.name} --resume"
        goes_on = f"the search ended without a result; its command with {resumed} goes on"
    print("\n".join(summary_lines(view)) or goes_on)
    return 0


def _event_log(study: str | None) -> Path:
    """Return the event log of a study, given by its name, folder or log; by default the one written last."""
    logs = sorted(Path(".memtune").glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
    places = (
        logs[-1:]
        if study is None
        else [Path(study), Path(study) / "events.jsonl", Path(".memtune") / study / "events.jsonl"]
    )
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise EnvironmentFault(
            "There is no study here." if study is None else f"There is no study {study} here.",
            evidence=f"Known: {', '.join(sorted(each.parent.name for each in logs))}." if logs else "",
            fix=(
                "give its name or the path of its events.jsonl"
                if logs
                else "run in the folder of the search, or begin one: memtune search model.py"
            ),
            code="MT404",
        )
    return path


def report(study: str | None, out: Path, force: bool, as_json: bool) -> int:
    """Run `memtune report`: write the page and print its path."""
    from memtune.autotune.search import check_writable

    path, progress = _event_log(study), Progress()
    check_writable(out, force=force)
    progress.phase(f"drawing {path.parent.name}")
    with shown(progress, sys.stderr):
        from memtune.autotune.report import write_report

        write_report(path, out)
    if as_json:
        emit({"schema": SCHEMA, "out": str(out), "bytes": out.stat().st_size})
    else:
        print(f"{out}  {format_bytes(out.stat().st_size)}, opens in any browser")
    return 0


def config_check(config: Path, as_json: bool) -> int:
    """Run `memtune config check`."""
    from memtune.cli import _options

    tuned = _options.config(config)
    if as_json:
        emit({"schema": SCHEMA, "ok": True, "settings": tuned.settings.dump()})
    else:
        count = len(tuned.settings.techniques)
        execution = tuned.settings.execution.summary() or "plain execution"
        print(f"{config} is valid: {count} technique{'s' * (count != 1)}, {execution}")
    return 0


def config_show(config: Path, as_json: bool) -> int:
    """Run `memtune config show`."""
    from memtune.cli import _options
    from memtune.config import dump_yaml

    tuned = _options.config(config)
    if as_json:
        emit({"schema": SCHEMA, **tuned.document()})
    else:
        print(dump_yaml(tuned), end="")
    return 0


def config_schema() -> int:
    """Run `memtune config schema`."""
    with shown_phase("loading the techniques", sys.stderr):
        from memtune.config import schema

        document = schema()
    emit(document)
    return 0
