"""Simulate a step with each technique, for the drawings of the catalogue; writes technique_curves.json.

python docs/hooks/technique_curves.py             # all techniques
python docs/hooks/technique_curves.py NAME ...    # some again, such as `recompute: full`; the others remain
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtune.autotune.search.preparation import Setup
    from memtune.autotune.space import Choice
    from memtune.technique import Reason, Technique

HERE = Path(__file__).parent
FILE = HERE / "technique_curves.json"
ENVIRONMENT = {
    **{"MEMTUNE_GPT_LAYERS": "6", "MEMTUNE_GPT_DIM": "1024", "MEMTUNE_GPT_HEADS": "16"},
    **{"MEMTUNE_GPT_SEQ": "1024", "MEMTUNE_GPT_VOCAB": "50304", "MEMTUNE_EXPERTS_DIM": "1024"},
    **{"MEMTUNE_LLAMA_LAYERS": "6", "MEMTUNE_LLAMA_DIM": "1024", "MEMTUNE_LLAMA_HEADS": "16"},
    **{"MEMTUNE_LLAMA_KV_HEADS": "16", "MEMTUNE_LLAMA_SEQ": "1024", "MEMTUNE_LLAMA_VOCAB": "50304"},
    "MEMTUNE_SEARCH_OWN_ALLOCATORS": "1",
}
GPU = "h100-80g"
_PARTS = 100
"""Points of a curve, and least distance of two spans in parts of the step; a drawing is 700 pixels wide."""


@dataclass(frozen=True, eq=False)
class Scene:
    """A recorded step on a machine, with the settings around the technique that is drawn."""

    text: str
    """The machine and the settings, as the caption has them."""
    around: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the other slots."""
    ranks: int = 1
    nodes: int = 1
    micro_batch: int = 4
    accumulate: int = 1
    budget_gib: float = 5.0
    """Less than the plain step needs, so that planners have something to decide."""
    example: str = "gpt"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the example, besides ENVIRONMENT."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the technique, instead of the values that a search tries."""
    partitioned: bool = False
    """Record the layers cut over ranks, for techniques that partition the model; without one the ranks are
    replicas.
    """


def _replicas(kind: str) -> dict[str, Any]:
    return {"sharding": {"states": {"kind": kind}}}


_DDP, _NONE = _replicas("ddp"), _replicas("none")
SCENES = (
    Scene("16 GPUs in 2 nodes, DDP", _DDP, 16, 2),
    Scene("16 GPUs in 2 nodes, DDP, 4 micro-batches a step", _DDP, 16, 2, 1, 4, 3.5),
    Scene("16 GPUs in 2 nodes, FSDP", _replicas("fsdp"), 16, 2),
    Scene("one GPU, 4 micro-batches a step", {}, 1, 1, 1, 4, 3.0),
    Scene("one GPU, compiled blocks", {"execution": {"compile": "blocks", "compile_backend": "aot_eager"}}),
    Scene("4 GPUs in one node, a Llama", _NONE, 4, example="hf_llama", partitioned=True),
    Scene("4 GPUs in one node", _NONE, 4, partitioned=True),
    Scene("8 GPUs in one node, DDP, two behind each link to the host", _DDP, 8, knobs={"group": 2}),
    Scene("16 GPUs in 2 nodes, DDP", _DDP, 16, 2, knobs={"ratio": 0.5}),
    Scene(
        "16 GPUs in 2 nodes, DDP, 4 micro-batches a step",
        *(_DDP, 16, 2, 1, 4, 3.5),
        knobs={"parameters": 4, "gradients": 8, "optimizer": 16},
    ),
    Scene("one GPU, a mixture of experts", micro_batch=1024, budget_gib=0.5, example="experts"),
    Scene(
        "4 GPUs in one node, a Mixtral",
        *(_NONE, 4),
        example="hf_llama",
        environment={"MEMTUNE_LLAMA_EXPERTS": "8"},
        partitioned=True,
    ),
)
"""A technique is drawn in the first scene that it fits."""


def main() -> None:
    """Simulate every technique where it fits, and write the file."""
    os.environ |= {**ENVIRONMENT, "MEMTUNE_OFFLOAD_DIR": tempfile.mkdtemp()}
    from memtune.search_spaces import all_techniques, is_null

    asked = set(sys.argv[1:])
    document = json.loads(FILE.read_text(encoding="utf-8")) if asked else {"scenes": {}, "techniques": {}}
    document["model"] = f"a GPT of 6 layers, dim 1,024, on sequences of 1,024 tokens, on {GPU}"
    for technique in all_techniques():
        kind = technique.model_fields["kind"].default
        name = f"{technique.slot}: {kind}"
        if is_null(technique(kind=kind)) or (asked and name not in asked):
            continue
        refusals = []
        for number, scene in enumerate(SCENES):
            found = _drawing(scene, technique)
            if isinstance(found, dict):
                document["techniques"][name] = {"scene": number, **found}
                document["scenes"][str(number)] = {"text": scene.text, **_plain(scene)}
                break
            refusals.append(f"\n    {scene.text}: {found}")
        print(name, "drawn" if len(refusals) < len(SCENES) else "".join(refusals), file=sys.stderr)
        FILE.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")


def _drawing(scene: Scene, technique: type[Technique]) -> dict[str, Any] | Reason | None:
    """Return the step of `scene` with the first values of the technique's knobs that fit, or why none do."""
    from memtune.autotune.space import Choice, variants

    setup, refusal = _setup(scene), None
    around = Choice.from_document(_settings(scene))
    kind = technique.model_fields["kind"].default
    tried: Iterator[Technique] = iter(variants(technique, setup.scorer.rewriter.target))
    if scene.knobs:
        known = scene.knobs.keys() <= technique.model_fields.keys()
        tried = iter([technique(kind=kind, **scene.knobs)] if known else [])
    for each in tried:
        found = _simulated(setup, Choice.of(around.execution, {**around.chosen, each.slot: each}))
        if isinstance(found, dict):
            return {"setting": each.model_dump(exclude_defaults=True, mode="json") | {"kind": kind}, **found}
        refusal = refusal or found
    return refusal


@cache
def _plain(scene: Scene) -> dict[str, Any]:
    """Return the step of `scene` without a technique."""
    from memtune.autotune.space import Choice

    settings = {**_settings(scene), **(_DDP if scene.partitioned else {})}
    found = _simulated(_setup(scene), Choice.from_document(settings))
    assert isinstance(found, dict), found
    return found


def _settings(scene: Scene) -> dict[str, Any]:
    size = {"micro_batch": scene.micro_batch, "accumulate": scene.accumulate}
    return {**scene.around, "execution": {**size, **scene.around.get("execution", {})}}


@cache
def _setup(scene: Scene) -> Setup:
    from memtune.autotune.search import prepare
    from memtune.autotune.space import PlanOptions

    os.environ.update({"MEMTUNE_LLAMA_EXPERTS": "0", **scene.environment})
    settings = json.loads(json.dumps(_settings(scene)))
    if scene.partitioned:
        settings["sharding"]["parallel"] = {"kind": "tensor"}
    config = Path(tempfile.mkdtemp()) / "scene.yaml"
    config.write_text(json.dumps({"settings": settings}))
    return prepare(
        PlanOptions(
            workload=str(HERE.parents[1] / "examples" / f"{scene.example}.py"),
            device="cuda",
            gpu_type=GPU,
            ranks=scene.ranks,
            global_batch=scene.micro_batch * scene.accumulate * scene.ranks,
            budget_bytes=int(scene.budget_gib * 2**30),
            nodes=scene.nodes,
            config=config,  # with one config nothing is checked that takes a real step
        ),
        for_trials=False,
    )


def _simulated(setup: Setup, choice: Choice) -> dict[str, Any] | Reason:
    """Return the peak, the time and the timeline of a step, or why it cannot be."""
    from memtune.autotune.predict import step_timeline
    from memtune.autotune.space import python_work
    from memtune.technique import Reason

    scored = setup.scorer.score(choice, level="events")
    if isinstance(scored, Reason):
        return scored
    candidate = setup.scorer.candidate(choice)
    found = step_timeline(candidate.program, setup.scorer.hardware, python_work(candidate)).document()
    end_s = max(stop for spans in found["streams"].values() for _, _, stop in spans)
    return {
        "step_s": float(f"{end_s:.4g}"),
        "reserved_kib": scored.prediction.peak_reserved_bytes // 1024,
        **{tier: _thinned(found[tier], end_s) for tier in ("device", "host", "ssd")},
        "streams": {name: _joined(spans, end_s) for name, spans in found["streams"].items()},
    }


def _thinned(curve: dict[str, Any], end_s: float) -> dict[str, Any]:
    """Return the largest totals of a curve in each part of the time, and bytes in KiB; nothing if all are
    small.
    """
    kinds, times = curve["bytes_by_kind"], curve["time_s"]
    totals = [sum(column) for column in zip(*kinds.values(), strict=True)] if kinds else []
    if max(totals, default=0) < 2**20:  # the batch on the host
        return {"time": [], "kib_by_kind": {}}
    parts: dict[int, int] = {}
    for index, (time, total) in enumerate(zip(times, totals, strict=True)):
        part = int(time / end_s * _PARTS)
        if part not in parts or total > totals[parts[part]]:
            parts[part] = index
    kept = sorted({*parts.values(), len(times) - 1})
    return {
        "time": [round(times[i] / end_s, 3) for i in kept],
        "kib_by_kind": {
            kind: [values[i] // 1024 for i in kept] for kind, values in kinds.items() if any(values)
        },
    }


def _joined(spans: list[tuple[str, float, float]], end_s: float) -> list[tuple[str, float, float]]:
    """Return spans in parts of the step; those of one phase that almost touch are one."""
    found: list[tuple[str, float, float]] = []
    for phase, start, stop in spans:
        if found and found[-1][0] == phase and start / end_s - found[-1][2] < 1 / _PARTS:
            start = found.pop()[1] * end_s
        found.append((phase, round(start / end_s, 4), round(stop / end_s, 4)))
    return found


if __name__ == "__main__":
    main()
