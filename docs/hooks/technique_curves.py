"""Simulate a step with each technique, for the drawings of the catalogue; writes technique_curves.json.

python docs/hooks/technique_curves.py
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SIZES = {"LAYERS": 6, "DIM": 1024, "HEADS": 16, "SEQ": 1024, "VOCAB": 50304}
MICRO_BATCH, RANKS, NODES, GPU = 4, 16, 2, "h100-80g"
BUDGET_BYTES = 5 * 2**30  # the plain step needs 5.8 GiB, so that planners have something to decide
_FEWER = 60
"""Points of a curve; a drawing is 700 pixels wide."""


def main() -> None:
    """Record the example once, simulate every technique, write the file."""
    os.environ |= {f"MEMTUNE_GPT_{name}": str(value) for name, value in SIZES.items()}
    os.environ["MEMTUNE_OFFLOAD_DIR"] = tempfile.mkdtemp()
    from memtune.autotune.predict import step_timeline
    from memtune.autotune.search import prepare
    from memtune.autotune.space import Choice, PlanOptions, python_work
    from memtune.search_spaces import all_techniques, is_null
    from memtune.technique import Reason

    null = {"execution": {"micro_batch": MICRO_BATCH}, "sharding": {"states": {"kind": "ddp"}}}
    plain = Path(tempfile.mkdtemp()) / "plain.yaml"
    plain.write_text(json.dumps({"settings": null}))
    setup = prepare(
        PlanOptions(
            workload=str(HERE.parents[1] / "examples" / "gpt.py"),
            device="cuda",
            gpu_type=GPU,
            ranks=RANKS,
            global_batch=MICRO_BATCH * RANKS,
            budget_bytes=BUDGET_BYTES,
            nodes=NODES,
            config=plain,  # with one config nothing is checked that takes a real step
        ),
        for_trials=False,
        say=lambda text: print(text, file=sys.stderr),
    )
    curves: dict[str, Any] = {}
    reasons: dict[str, str] = {}

    def simulate(name: str, settings: dict[str, Any]) -> None:
        choice = Choice.from_document(settings)
        candidate = setup.scorer.rewriter.candidate(choice)
        if isinstance(candidate, Reason):
            reasons[name] = str(candidate).rstrip(".")
        else:
            found = step_timeline(candidate.program, setup.scorer.hardware, python_work(choice)).document()
            curves[name] = {key: thinned(found[key]) for key in ("device", "host")}
        print(name, reasons.get(name, "drawn"), file=sys.stderr)

    simulate("none", null)
    for technique in all_techniques():
        kind = technique.model_fields["kind"].default
        if is_null(technique(kind=kind)):
            continue
        settings = json.loads(json.dumps(null))
        *folders, last = technique.slot.split(".")
        node = settings
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = {"kind": kind}
        simulate(f"{technique.slot}: {kind}", settings)
    model = f"a GPT of 6 layers, dim 1,024, micro-batch {MICRO_BATCH} of 1,024 tokens, on {RANKS} × {GPU}"
    model += f" in {NODES} nodes, limit 5 GiB"
    document = {"model": model, "curves": curves, "reasons": reasons}
    (HERE / "technique_curves.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")


def thinned(curve: dict[str, Any]) -> dict[str, Any]:
    """Return a curve with at most `_FEWER` points, those with the largest totals, and bytes in KiB."""
    kinds, times = curve["bytes_by_kind"], curve["time_s"]
    totals = [sum(column) for column in zip(*kinds.values(), strict=True)] if kinds else []
    if max(totals, default=0) < 2**20:  # the batch on the host
        return {"time_s": [], "kib_by_kind": {}}
    end = times[-1] or 1.0
    parts: dict[int, int] = {}
    for index, (time, total) in enumerate(zip(times, totals, strict=True)):
        part = int(time / end * _FEWER)
        if part not in parts or total > totals[parts[part]]:
            parts[part] = index
    kept = sorted({*parts.values(), len(times) - 1})
    return {
        "time_s": [times[i] for i in kept],
        "kib_by_kind": {
            kind: [values[i] // 1024 for i in kept] for kind, values in kinds.items() if any(values)
        },
    }


if __name__ == "__main__":
    main()
