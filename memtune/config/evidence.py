"""`tuned.evidence.json`, next to `tuned.yaml`: exact measurements, certificate and plan of the config.

`tuned.yaml` is for people: settings, each with its clause, and figures in round numbers. It names the
evidence and its hash, so that a plan is never applied with settings that it was not made for. A config in one
file, without `evidence`, holds the same sections itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memtune.config.yaml_io import Document, flow
from memtune.errors import ConfigError
from memtune.units import format_bytes, format_seconds

SECTIONS = ("measured", "predicted", "certificate", "plan", "buckets", "study")
"""Sections of a config that the evidence holds."""
_SUFFIX = ".evidence.json"
_MAX_BYTES = 2**26


def name_of(config: Path) -> str:
    """Return the name of the evidence of a config: `tuned.evidence.json` of `tuned.yaml`."""
    return config.stem + _SUFFIX


def evidence_text(document: Mapping[str, Any]) -> str:
    """Return the evidence of a whole config; empty if it has none."""
    found = {name: document[name] for name in SECTIONS if name in document}
    if not found:
        return ""
    return json.dumps({"settings": document["settings"], **found}, indent=1) + "\n"


def people_text(
    document: Mapping[str, Any], sentences: Mapping[str, str], evidence_name: str, evidence: str
) -> str:
    """Return `tuned.yaml`: settings with their clauses, round figures, origin, and the evidence's hash."""
    lines = ["# memtune.apply(model, optimizer, <this file>) applies it; after an edit: memtune config check"]
    lines += [f"memtune: {document['memtune']}", "settings:"]
    lines += _setting_lines(document["settings"], sentences, "", "  ")
    certificate = document.get("certificate", {})
    budget = certificate.get("budget_bytes")
    unconfirmed = certificate.get("confirmed_in_fresh_process") is False
    measured = (
        "best so far of a search that was stopped, not confirmed" if unconfirmed else "in fresh processes"
    )
    for name, note in (("measured", measured), ("predicted", "by simulation, before any run")):
        if name in document and (name == "measured" or "measured" not in document):
            lines.append(f"{name}: {flow(_round(document[name], budget))}  # {note}")
    if "made_for" in document:
        lines.append(f"made_for: {flow(document['made_for'])}")
    if count := len(document.get("buckets", ())):
        lines.append(f"# shorter batches, in {count} length bucket{'s' * (count > 1)}: plans in the evidence")
    if evidence:
        digest = hashlib.sha256(evidence.encode()).hexdigest()
        lines.append(f"evidence: {{file: {flow(evidence_name)}, sha256: {flow(digest)}}}")
    return "\n".join(lines) + "\n"


def _setting_lines(
    settings: Mapping[str, Any], sentences: Mapping[str, str], path: str, indent: str
) -> list[str]:
    lines = []
    for key, value in settings.items():
        slot = f"{path}.{key}" if path else key
        # The axis `execution` has fields of its own and a slot, `order`.
        if slot not in sentences and "kind" not in value and slot != "execution":
            lines += [f"{indent}{key}:", *_setting_lines(value, sentences, slot, indent + "  ")]
            continue
        clauses = [sentences[each] for each in (slot, f"{slot}.order") if each in sentences]
        comment = f"  # {'; '.join(clauses)}" if clauses else ""
        lines.append(f"{indent}{key}: {flow(value)}{comment}")
    return lines


def _round(figures: Mapping[str, Any], budget_bytes: object) -> dict[str, Any]:
    """Return figures for people: three digits, with units."""
    found: dict[str, Any] = {}
    rate, step_s, spread_s = (figures.get(name) for name in ("samples_per_s", "step_s", "spread_s"))
    if isinstance(rate, float):
        rounded = float(f"{rate:.3g}")
        found["samples_per_s"] = int(rounded) if rounded >= 100 else rounded
    if isinstance(step_s, float):
        spread = f" ± {format_seconds(spread_s)}" if isinstance(spread_s, float) else ""
        found["step"] = format_seconds(step_s) + spread
    peak = figures.get("peak_bytes")
    if isinstance(peak, int):
        limit = f" of {format_bytes(budget_bytes)}" if isinstance(budget_bytes, int) else ""
        found["peak"] = format_bytes(peak) + limit
    for name, baseline in figures.get("baselines", {}).items():
        seconds = baseline.get("step_s") if isinstance(baseline, dict) else None
        status = baseline.get("status", "not measured") if isinstance(baseline, dict) else "not measured"
        found[f"{name} step"] = (
            format_seconds(seconds) if isinstance(seconds, float) else status.replace("oom", "out of memory")
        )
    return found


def with_evidence(document: Document, folder: Path | None) -> Document:
    """Return `document` with the sections of the evidence that it names, or unchanged if it names none.

    Of a config whose settings were edited, only the plans of unchanged techniques hold.

    Args:
        document: As parsed.
        folder: Of the config's file; None if it was given as text or data.

    Raises:
        ConfigError: The evidence is missing, was changed, or is malformed.
    """
    data = document.data
    named = data.get("evidence") if isinstance(data, dict) else None
    if named is None:
        return document
    name, digest = _named(document, named)
    if folder is None:
        raise _unusable(document, f"{document.source} names {name}, and was not given as a file")
    held = _read(document, folder / name, name, digest)
    rest = {key: value for key, value in data.items() if key not in (*SECTIONS, "evidence")}
    then, now = held.pop("settings", {}), data.get("settings") or {}
    if then == now:
        return Document({**rest, **held}, document.lines, document.source)
    same_batches = then.get("execution") == now.get("execution")
    plans = {
        slot: plan
        for slot, plan in (held.get("plan") or {}).items()
        if same_batches and _at(then, slot) == _at(now, slot)
    }
    return Document({**rest, **({"plan": plans} if plans else {})}, document.lines, document.source)


def _named(document: Document, named: object) -> tuple[str, str]:
    name, digest = (named.get("file"), named.get("sha256")) if isinstance(named, dict) else (None, None)
    if (
        not isinstance(name, str)
        or not isinstance(digest, str)
        or Path(name).name != name
        or not name.endswith(_SUFFIX)
        or set(named) != {"file", "sha256"}  # type: ignore[call-overload]  # a mapping, or both were None
    ):
        raise ConfigError(
            f"{document.where(('evidence',))}  evidence is a file name that ends in {_SUFFIX}, and its hash.",
            fix='evidence: {file: tuned.evidence.json, sha256: "…"}, or remove it',
            code="MT202",
        )
    return name, digest


def _read(document: Document, path: Path, name: str, digest: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else str(error)
        what = f"{name}, which belongs to {document.source}, cannot be read: {reason}"
        raise _unusable(document, what) from None
    if hashlib.sha256(raw).hexdigest() != digest:
        raise _unusable(document, f"{name} is not the file that {document.source} was written with")
    try:
        held = json.loads(raw)
    except (ValueError, RecursionError):
        held = None
    if not isinstance(held, dict) or set(held) - {"settings", *SECTIONS}:
        raise _unusable(document, f"{name} holds no evidence of a config")
    return held


def _unusable(document: Document, what: str) -> ConfigError:
    return ConfigError(
        f"{document.where(('evidence',))}  {what}.",
        evidence="It holds the plan and the exact measurements of these settings.",
        fix=f"copy both files together; or remove evidence from {document.source} to use the settings alone",
        code="MT211",
    )


def _at(settings: Any, slot: str) -> Any:
    for part in slot.split("."):
        settings = settings.get(part) if isinstance(settings, dict) else None
    return settings
