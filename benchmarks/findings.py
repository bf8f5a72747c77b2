"""Combinations that `memtune plan` ranks first, against published systems on the same workload and budget;
simulated.

    python benchmarks/findings.py [CASE ...] [--json FILE]

Each case is one `memtune plan` over all techniques, then one per published system: its techniques fixed, all
other slots empty, the micro-batch searched as well. Rows that the JSON file has already stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from memtune.autotune.search.plan_report import PlanRow, plan
from memtune.autotune.space.search_options import PlanOptions
from memtune.search_spaces import NULL_KINDS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "findings.json"
GIB = 1 << 30

FULL = {"recompute": "full"}
OFFLOAD = {
    "ZeRO-Offload, full recomputation": FULL | {"offload.states": "zero_offload"},
    "STRONGHOLD, full recomputation": FULL | {"offload.states": "stronghold"},
    "L2L": {"offload.states": "l2l"},
    "Harmony": {"offload.states": "harmony"},
    "Mobius": {"offload.states": "mobius"},
}
RECOMPUTE = {
    "full recomputation": FULL,
    "Korthikanti et al.": {"recompute": "selective"},
    "vDNN": {"offload.activations": "copy_out"},
}
SHARDED = {
    "FSDP, full recomputation": FULL | {"sharding.states": "fsdp"},
    "FSDP, selective recomputation": {"recompute": "selective", "sharding.states": "fsdp"},
    "FSDP and STRONGHOLD, full": FULL | {"sharding.states": "fsdp", "offload.states": "stronghold"},
    "FSDP and ZeRO-Offload, full": FULL | {"sharding.states": "fsdp", "offload.states": "zero_offload"},
}


@dataclass(frozen=True)
class Case:
    """A workload and budget, and the published systems to compare with."""

    environment: dict[str, str]
    options: PlanOptions
    published: dict[str, dict[str, str]] = field(default_factory=dict)


def _gpt(**asked: Any) -> dict[str, str]:
    return {f"MEMTUNE_GPT_{name}": str(value) for name, value in asked.items()}


def _options(gpu: str, **more: Any) -> PlanOptions:
    return PlanOptions(workload=str(ROOT / "examples" / "gpt.py"), gpu_type=gpu, top=3, **more)


CASES = {
    "7B on one RTX 4090": Case(
        _gpt(SIZE="7b", BATCH=8),
        _options("rtx-4090", budget_bytes=22 * GIB, host_memory_bytes=256 * GIB),
        OFFLOAD,
    ),
    "1.3B on one A100-40G, 16 bits": Case(
        _gpt(SIZE="1.3b", BATCH=16, BF16=1),
        _options("a100-40g", budget_bytes=24 * GIB),
        {"ZeRO-Offload": {"offload.states": "zero_offload"}} | RECOMPUTE | OFFLOAD,
    ),
    "7B on 8 A100-40G": Case(_gpt(SIZE="7b", BATCH=64), _options("a100-40g", ranks=8), SHARDED),
}


def row(name: str, found: PlanRow) -> dict[str, Any]:
    """Return the figures of one setting."""
    facts: dict[str, Any] = {"summary": found.summary, "status": found.status}
    if found.step_s is not None:
        facts |= {"samples_per_s": round(found.samples_per_s or 0.0, 4), "step_s": round(found.step_s, 3)}
        facts |= {"peak_gib": round((found.peak_allocated_bytes or 0) / GIB, 2)}
    return {"system": name, **facts}


def compared(case: Case, known: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the first row of the plan, then that of each published system; without those known already."""
    os.environ.update(case.environment)
    if "memtune plan" not in known:
        yield fastest("memtune plan", case.options)
    empty = {slot: kind for slot, kind in NULL_KINDS.items() if slot != "allocator"}
    if case.options.ranks > 1:
        del empty["sharding.states"]
    for name in (each for each in case.published if each not in known):
        yield fastest(name, replace(case.options, axes=(), freeze=empty | case.published[name]))


def fastest(name: str, options: PlanOptions) -> dict[str, Any]:
    """Return the figures of the fastest setting that fits."""
    best = next((each for each in plan(options).rows if each.status != "oom"), None)
    return row(name, best) if best is not None else {"system": name, "status": "does not fit"}


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    found = json.loads(asked.json.read_text())["cases"] if asked.json.exists() else {}
    for name in asked.cases or CASES:
        rows = found.setdefault(name, [])
        for each in compared(CASES[name], {each["system"] for each in rows}):
            print(each, flush=True)
            rows.append(each)
            asked.json.write_text(json.dumps({"schema": 1, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
