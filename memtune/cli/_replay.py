"""`memtune replay`: replay of a recorded memory trace under other allocator settings."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from memtune.autotune.predict import AllocatorResult, AllocatorSettings, Trace, read_trace, replay
from memtune.cli._options import memory
from memtune.cli._output import emit, say
from memtune.errors import UsageError
from memtune.search_spaces import find
from memtune.units import format_bytes

SCHEMA = 1
_SUGGESTED = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:8",
)
"""Settings to try by default: those that PyTorch's documentation recommends against fragmentation."""
_STITCHED, _WITH_STEPS = "gmlake", ("planned_layout", "lifetime_pools")


def replay_snapshot(
    path: Path, given: list[str], device: int | None, capacity: str | None, as_json: bool
) -> int:
    """Print the memory that each setting would have reserved; return 0, or 1 if none fits the capacity."""
    asked = [_settings(text) for text in given or _SUGGESTED]
    capacity_bytes = memory(capacity, "--capacity")
    trace = read_trace(path, device=device, capacity_bytes=capacity_bytes)
    rows = _replayed(trace, asked, capacity_bytes)
    fitting = {text: row for text, row in rows.items() if not row.native.ooms}
    least = min(fitting, key=lambda text: fitting[text].peak_reserved_bytes, default=None)
    if as_json:
        emit(_document(path, trace, rows, least, capacity_bytes))
    else:
        _show(trace, rows, least)
    return 0 if least is not None else 1


def _settings(text: str) -> tuple[str, AllocatorSettings]:
    """Return the parsed settings of PYTORCH_ALLOC_CONF, or those of `gmlake` with its knobs:
    `gmlake,arena_below_mb:20`.
    """
    written = text.strip().replace("=", ":")
    kind, _, knobs = written.partition(",")
    if kind in _WITH_STEPS:
        raise UsageError(
            f"--set {kind} cannot be replayed on a recorded trace.",
            evidence=(
                "It plans from the allocations of one step, and a trace does not mark where steps end."
            ),
            fix="--set gmlake, or train with it:  memtune trial",
            code="MT145",
        )
    if kind != _STITCHED:
        return written, AllocatorSettings.parse(written)
    given = dict(each.partition(":")[::2] for each in knobs.split(",") if each)
    try:
        return written, AllocatorSettings.from_env(
            find("allocator", kind).model_validate_strings(given, strict=False).env()
        )
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UsageError(
            f"--set {written} cannot be used: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}.",
            fix="memtune config schema  prints the knobs of gmlake",
            code="MT140",
        ) from None


def _replayed(
    trace: Trace, asked: list[tuple[str, AllocatorSettings]], capacity_bytes: int | None
) -> dict[str, AllocatorResult]:
    """Return the replays by settings, the recorded run's first."""
    try:
        recorded = [(trace.recorded.settings, AllocatorSettings.parse(trace.recorded.settings))]
    except UsageError as error:  # recorded by a torch with more settings
        say(f"the recorded settings are not replayed: {error.what}")
        recorded = []
    chosen = dict([*recorded, ("", AllocatorSettings()), *asked])
    return {text: replay(trace.events, settings, capacity_bytes) for text, settings in chosen.items()}


def _row(result: AllocatorResult) -> dict[str, Any]:
    found = {name: value for name, value in result.to_dict().items() if not name.startswith("step_")}
    return found | (
        {} if result.oom_op is None else {"oom": {"entry": result.oom_op - 1, "reason": result.oom}}
    )


def _document(
    path: Path, trace: Trace, rows: dict[str, AllocatorResult], least: str | None, capacity_bytes: int | None
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "file": str(path),
        "device": trace.device,
        "entries": trace.entries,
        "storages_before": trace.storages_before,
        "capacity_bytes": capacity_bytes,
        "recorded": asdict(trace.recorded),
        "replays": [{"settings": text, **_row(result)} for text, result in rows.items()],
        "least": least,
        "notes": list(trace.notes),
    }


def _show(trace: Trace, rows: dict[str, AllocatorResult], least: str | None) -> None:
    recorded = asdict(trace.recorded)
    width = max(len("settings"), *(len(_name(text)) for text in rows))
    print(
        f"{'settings':<{width}}  {'reserved':>9}  {'allocated':>9}  {'unused at peak':>14} "
        f" {'driver calls':>12}  {'retries':>7}"
    )
    print(_line("recorded", width, recorded))
    for text, row in rows.items():
        print(_line(_name(text), width, _row(row)))
    if least is None:
        first = next(iter(rows.values()))
        print(
            f"none of these fits; {_name(next(iter(rows)))} fails at entry {(first.oom_op or 1) - 1}:"
            f" {first.oom}"
        )
    else:
        best, was = (
            format_bytes(each) for each in (rows[least].peak_reserved_bytes, recorded["peak_reserved_bytes"])
        )
        print(f"{_name(least)} would need the least: {best} reserved, {was} recorded")
    for note in trace.notes:
        say(note)


def _line(name: str, width: int, row: dict[str, Any]) -> str:
    reserved, allocated = format_bytes(row["peak_reserved_bytes"]), format_bytes(row["peak_allocated_bytes"])
    cells = (
        f"{name:<{width}}",
        f"{reserved:>9}",
        f"{allocated:>9}",
        f"{row['fragmentation']:>14.1%}",
        f"{row['device_allocs']:>12}",
    )
    ooms = f"out of memory ×{row['ooms']}" if row["ooms"] else ""
    return "  ".join((*cells, f"{row.get('retries', ''):>7}", ooms)).rstrip()


def _name(text: str) -> str:
    return text or "torch's defaults"
