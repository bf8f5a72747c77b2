"""Techniques that split a model's layers over real gloo ranks: five steps against one rank, bytes against the
formula, and peaks.

Models and loops are those of the tests: blocks of which several ranks work on one micro-batch, or that are
pipeline stages.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "search_spaces" / "sharding" / "parallel"))

import test_head_context as contexts
import torch
from sharding_ranks import OTHER_TECHNIQUES, PEAK
from support.gloo import run_ranks
from support.ranks import model_parallel_runs, pipeline_runs as stages

from memtune import hardware
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Choice
from memtune.runtime import node_topology
from memtune.technique import Reason

NODE, DEADLINE_S = 2, 3500
RTOL, ATOL = 1e-5, 1e-6
"""Of weights and moments."""
Knobs = dict[str, Any]


def techniques(ranks: int) -> dict[str, tuple[str, Knobs]]:
    """Return by name the kind and knobs of the techniques run on that many ranks."""
    found: dict[str, tuple[str, Knobs]] = {
        "tensor": ("tensor", {}),
        "sequence_parallel": ("sequence_parallel", {}),
        "head_context, ring": ("head_context", {}),
        "head_context, heads": ("head_context", {"head_degree": ranks}),
        "pipeline, 1F1B": ("pipeline", {"schedule": "1f1b"}),
        "pipeline, interleaved": ("pipeline", {"schedule": "interleaved_1f1b"}),
    }
    if ranks > 2:
        found |= {
            "head_context, both": ("head_context", {"head_degree": 2}),
            "head_context, double ring": ("head_context", {"inner_ring": 2}),
            "head_context, work sharing": ("head_context", {"load_balance": "work_sharing"}),
        }
        two = {"schedule": "1f1b", "degree": stages.STAGES}
        found |= {
            f"pipeline of 2, {states}": ("pipeline", {**two, "states": states}) for states in stages.STATES
        }
    return found


def _document(kind: str, knobs: Knobs, ranks: int, parts: int) -> dict[str, Any]:
    if kind == "pipeline":
        together_with, own = _split_pipeline_knobs(knobs)
        return stages.document(stages.CHAIN, ranks, together_with, accumulate=parts, **own)
    return model_parallel_runs.config(kind, ranks, accumulate=parts, **knobs)


def _split_pipeline_knobs(knobs: Knobs) -> tuple[dict[str, Any], Knobs]:
    """Return the slots used together with a pipeline, and the pipeline's own knobs."""
    own = {name: value for name, value in knobs.items() if name != "states"}
    return (stages.other_slots(knobs["states"]) if "states" in knobs else {}), own


def _trained(
    kind: str, ranks: int, document: dict[str, Any] | None, clip: bool, parts: int
) -> dict[str, Any]:
    if kind == "pipeline":
        return stages.trained(stages.CHAIN, ranks, document, clip, parts)
    return model_parallel_runs.trained(ranks, document, clip, parts, momentum=True)


def _all_trained(ranks: int, asked: list[tuple[str, str, int, bool, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [_trained(kind, ranks, document, clip, parts) for _, kind, parts, clip, document in asked]


def exact(wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """As `sharding_ranks.exact`, for techniques that split layers."""
    rows = []
    for ranks in (2, 4):
        asked = [
            (name, kind, parts, clip, _document(kind, knobs, ranks, parts))
            for name, (kind, knobs) in techniques(ranks).items()
            if wanted(name)
            for parts in (1, 4)
            for clip in (False, True)
        ]
        if not asked:
            continue
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as on the ranks
        plain = {
            (kind == "pipeline", parts, clip): _trained(kind, ranks, None, clip, parts)
            for _, kind, parts, clip, _ in asked
        }
        torch.set_num_threads(threads)
        found = run_ranks(_all_trained, ranks, ranks, asked, deadline_s=DEADLINE_S)
        for (name, kind, parts, clip, _), runs in zip(asked, zip(*found, strict=True), strict=True):
            off = _off(runs, plain[kind == "pipeline", parts, clip])
            rows.append(
                {"technique": name, "ranks": ranks, "accumulate": parts, "clipping": 0.5 * clip, **off}
            )
    return rows


def _off(runs: tuple[dict[str, Any], ...], wanted: dict[str, Any]) -> dict[str, Any]:
    pairs = {
        "weights": [(run["model"][name], each) for run in runs for name, each in wanted["model"].items()],
        "momenta": [],
    }
    for run in runs:
        for index, state in wanted["optimizer"].items():
            name = "exp_avg" if "exp_avg" in state else "momentum_buffer"
            pairs["momenta"].append((run["optimizer"][index][name], state[name]))
    off = {state: max(float((a - b).abs().max()) for a, b in each) for state, each in pairs.items()}
    losses = torch.tensor([run["losses"] for run in runs], dtype=torch.float64).mean(0)
    off["losses"] = float((losses - torch.tensor(wanted["losses"], dtype=torch.float64)).abs().max())
    within = all(torch.allclose(a, b, rtol=RTOL, atol=ATOL) for each in pairs.values() for a, b in each)
    return {**off, "within": within and off["losses"] <= ATOL * max(1.0, *map(abs, wanted["losses"]))}


def _counted(asked: list[tuple[str, str, dict[str, Any]]]) -> list[tuple[float, float]]:
    """Return the bytes that this rank receives inside its node and between nodes; for a pipeline, those it
    sends.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(NODE)
    found: list[tuple[float, float]] = []
    for _, kind, document in asked:
        if kind == "pipeline" and "states" in document["settings"]["sharding"]:
            counted = stages.counted(document)
            found.append((float(counted["intra_link"]), float(counted["inter_link"])))
        elif kind == "pipeline":
            found.append((float(stages.measured(stages.CHAIN, document)[1]), 0.0))
        else:
            found.append(model_parallel_runs.measured({"one": document}, NODE)["one"][1:])
        node_topology.declare(None)
    return found


def bytes_sent(wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """As `sharding_ranks.bytes_sent`, with a row per rank where bytes differ: `head_context` and
    pipelines.
    """
    rows: list[dict[str, Any]] = []
    chosen = [
        (name, kind, knobs, parts)
        for name, (kind, knobs) in techniques(4).items()
        if kind in ("head_context", "pipeline") and wanted(name)
        for parts in (1, 4)
    ]
    if not chosen:
        return rows
    asked = [(name, kind, _document(kind, knobs, 4, parts)) for name, kind, knobs, parts in chosen]
    counted = run_ranks(_counted, 4, asked, deadline_s=DEADLINE_S)
    for at, (name, kind, knobs, parts) in enumerate(chosen):
        seen = set()
        for rank in range(4):
            formula = (
                _stage_bytes(rank, parts, knobs)
                if kind == "pipeline"
                else contexts.sent(4, parts, NODE, rank, **knobs)
            )
            ours = counted[rank][at]
            if (ours, formula) not in seen:
                seen.add((ours, formula))
                label = name if not seen - {(ours, formula)} else f"{name}, rank {rank}"
                row = {
                    "technique": label,
                    "accumulate": parts,
                    "counted": list(map(int, ours)),
                    "formula": list(formula),
                }
                rows.append({**row, "within": tuple(ours) == tuple(formula)})
    return rows


# The models are small: what moves out has few bytes.
_WITH_PIPELINE = {
    **OTHER_TECHNIQUES,
    "copy_out": {"offload": {"activations": {"kind": "copy_out", "min_bytes": 0}}},
}


def _peaks(asked: list[tuple[str, dict[str, Any]]]) -> list[int]:
    found = []
    for kind, document in asked:
        gc.collect()  # the model before is in cycles
        found.append(
            stages.measured(stages.CHAIN, document)[0]
            if kind == "pipeline"
            else model_parallel_runs.peak(document)
        )
    return found


def peak(wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
    """As `sharding_ranks.peak`: the highest of four ranks, with one micro-batch each."""
    rows: list[dict[str, Any]] = []
    asked: list[tuple[str, dict[str, Any]]] = []
    predicted: list[tuple[str, str, int]] = []
    for name, (kind, knobs) in techniques(4).items():
        for together_with, more in _WITH_PIPELINE.items() if wanted(name) else ():
            states, own = _split_pipeline_knobs(knobs)
            settings = {**model_parallel_runs.settings(kind, **own), **states, **more}
            rewriter = model_parallel_runs.rewriter(
                stages.CHAIN if kind == "pipeline" else model_parallel_runs.SEPARATE, 4
            )
            made = rewriter.candidate(Choice.from_document(settings))
            if isinstance(made, Reason):
                rows.append(
                    {"technique": name, "beside": together_with, "accumulate": 1, "refused": str(made)}
                )
                continue
            plan = {slot: each.document() for slot, each in made.plans.items()}
            asked.append((kind, {"settings": settings, "plan": plan}))
            predicted.append(
                (name, together_with, simulate(made.program, hardware.detect("cpu")).peak_allocated_bytes)
            )
    if not asked:
        return rows
    found = run_ranks(_peaks, 4, asked, deadline_s=DEADLINE_S)
    for (name, together_with, n_bytes), each in zip(predicted, zip(*found, strict=True), strict=True):
        off = max(each) / n_bytes - 1
        row = {
            "technique": name,
            "beside": together_with,
            "accumulate": 1,
            "measured": max(each),
            "predicted": n_bytes,
            "off": off,
        }
        rows.append({**row, "within": abs(off) <= PEAK})
    return rows


def _stage_bytes(rank: int, parts: int, knobs: Knobs) -> tuple[float, float]:
    """Return a stage's sent bytes: a block's output to the next stage and its gradient to the previous one,
    for each micro-batch of all four ranks.
    """
    if "states" in knobs:
        inside, between = stages.link_bytes(knobs["states"], rank, parts)
        return float(inside), float(between)
    stages_per_rank = 2 if knobs["schedule"] == "interleaved_1f1b" else 1
    mine = [rank + 4 * turn for turn in range(stages_per_rank)]
    messages = sum((stage < 4 * stages_per_rank - 1) + (stage > 0) for stage in mine)
    return float(4 * parts * messages * stages.PASSED), 0.0
