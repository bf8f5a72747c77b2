"""Offload techniques in real training, compared with `rewrite` and `simulate`: peaks of every tier and bytes
on every link.

    python benchmarks/offload_peaks.py [PATTERN] [--json FILE] [--markdown FILE]

A row is a technique with an option, a model and a number of ranks. PATTERN is a regular expression on its
name; without it all rows run, and other rows stay as in the JSON file. The native ledger measures four steps
after three warm-up steps. Memory is pinned only with a GPU; there the whole host tier is.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import torch
from offload_cases import EVERYWHERE, Case, Sizes, cases
from support.gloo import run_ranks
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.record.recorder import record
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.memory.ledger import Ledger
from memtune.memory.workspace import WorkspaceTable
from memtune.program.parameter_columns import columns_of
from memtune.program.step import Kind, Program, Recording, Resource, Step, traffic_bytes
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.transfer import COUNTERS
from memtune.ssd import offload_dir
from memtune.ssd.ssd_file import Extent, SsdFile
from memtune.technique import Reason, Target
from memtune.testing.training import build
from memtune.workload.workload import Workload

MODELS = {**ZOO, "chain": Path(__file__).parents[1] / "tests" / "support" / "models" / "chain_model.py"}
TIERS = ("device", "host", "ssd")
LINKS = {
    "host_to_device": Resource.HOST_TO_DEVICE,
    "device_to_host": Resource.DEVICE_TO_HOST,
    "ssd_read": Resource.SSD_READ,
    "ssd_write": Resource.SSD_WRITE,
}
WITHIN, SPARE_BYTES, DEADLINE_S, AT_ONCE = 0.02, 64, 900, 40
FIRST, STEPS = 3, 7
"""Steps that come before those that are measured, and all of them."""
Row = dict[str, Any]


# -- on the ranks --------------------------------------------------------------------------------------------


@contextmanager
def _ssd_bytes() -> Iterator[list[int]]:
    """Track live and peak bytes of tensors on SSD, without the padding to blocks."""
    live, reserve, release = [0, 0], SsdFile.reserve, SsdFile.release

    def reserved(self: SsdFile, name: str, n_bytes: int) -> Extent:
        live[0] += n_bytes
        live[1] = max(live)
        return reserve(self, name, n_bytes)

    def released(self: SsdFile, extent: Extent) -> None:
        live[0] -= extent.n_bytes
        release(self, extent)

    SsdFile.reserve, SsdFile.release = reserved, released  # type: ignore[method-assign]
    try:
        yield live
    finally:
        SsdFile.reserve, SsdFile.release = reserve, release  # type: ignore[method-assign]


def on_rank(directory: str, asked: list[tuple[str, dict[str, Any], int]]) -> list[Row]:
    """Return peaks by tier and bytes by link of each measured step, for each path, config and number of
    micro-batches.
    """
    os.environ[offload_dir.VARIABLE] = directory
    return [_measured(Path(path), config, parts) for path, config, parts in asked]


def _measured(path: Path, config: dict[str, Any], parts: int) -> Row:
    ledger = Ledger.open("cpu")
    gc.collect()  # the model before is in cycles
    empty = {name: ledger.live_bytes(name) for name in ("device", "host")}
    peaks: dict[str, list[int]] = {name: [] for name in TIERS}
    moved: list[dict[str, int]] = []
    with _ssd_bytes() as on_ssd:
        workload, model, optimizer = build(path)
        tuned = apply(model, optimizer, config, loss=workload.loss, strict=False)
        gc.collect()  # what it has replaced is in cycles as well
        for step in range(STEPS):
            torch.manual_seed(step)
            with tier(HOST):
                batches = [workload.make_batch(2) for _ in range(parts)]
            ledger.reset_peak()
            on_ssd[1] = on_ssd[0]
            COUNTERS.take()
            tuned.step(batches)
            for name in ("device", "host"):
                peaks[name].append(ledger.peak_allocated_bytes(name) - empty[name])
            peaks["ssd"].append(on_ssd[1])
            moved.append(COUNTERS.take())
        elsewhere = tuned.audit().get("offload.states", {})  # updaters are processes of their own
        peaks["host"] = [each + elsewhere.get("shared_bytes", 0) for each in peaks["host"]]
        if "shared_bytes" in elsewhere:
            peaks["ssd"] = [each + sum(elsewhere["ssd_bytes"]) for each in peaks["ssd"]]
        del batches, workload, model, optimizer, tuned
        gc.collect()
    return {"peaks": {name: each[FIRST:] for name, each in peaks.items()}, "moved": moved[-1]}


# -- what is predicted ---------------------------------------------------------------------------------------


@functools.cache
def _recording(model: str) -> Recording:
    """Return the model's recording, with kernel scratch of this machine on one thread."""
    return record(Workload.load(MODELS[model]), sizes={2}, workspace=WorkspaceTable.cached(threads=1))


def _candidate(case: Case, ranks: int, states: str) -> Candidate | Reason:
    recording, here = _recording(case.model), hardware.detect("cpu")
    document: dict[str, Any] = {"execution": {"micro_batch": 2, "accumulate": case.parts}}
    if ranks > 1:
        document["sharding"] = {"states": {"kind": states}}
    target = Target(here, ranks)
    if case.share is not None:
        plain = Rewriter(recording, target, validate=False).program(Choice.from_document(document))
        assert isinstance(plain, Program), plain
        target = replace(target, budget_bytes=int(case.share * plain.step.peak_bytes()))
    return Rewriter(recording, target, validate=False).candidate(
        Choice.from_document({**document, **case.slots})
    )


def _bytes_on_links(step: Step, parts: int) -> dict[str, int]:
    traffic = traffic_bytes(step, parts)
    return {link: int(traffic[step.ops.resource == each].sum()) for link, each in LINKS.items()}


def _sizes(case: Case, ranks: int, states: str) -> Sizes:
    """Return the sizes of the same model and ranks without offload."""
    found = _candidate(replace(case, slots={}, share=None), ranks, states)
    assert isinstance(found, Candidate), found
    step = found.program.step
    columns = columns_of(step.parameters)
    sizes = (columns.numel * columns.itemsize)[columns.trainable]
    block = columns.block[columns.trainable]
    batch = _bytes_on_links(step, 1)["host_to_device"]
    blocks = tuple(int(sizes[block == each].sum()) for each in range(len(step.blocks)))
    state = int(
        step.storages.bytes[(step.storages.kind == Kind.OPTIMIZER) & (step.storages.producer < 0)].sum()
    )
    given, times = np.unique(step.calls.inputs.storage, return_counts=True)
    given = given[(times == 1) & (step.storages.producer[given] >= 0)]  # not what is given to all blocks
    boundary = int(step.storages.bytes[given].max(initial=0))
    moments = round(state / int(sizes.sum()))
    return Sizes(blocks, int(sizes[block < 0].sum()), int(sizes.min()), case.parts, batch, moments, boundary)


# -- rows ----------------------------------------------------------------------------------------------------


def _asked() -> list[tuple[Case, int, str]]:
    found = [(case, ranks, states) for case in cases() for ranks, states in case.ranks]
    first = {name: next(case for case in cases() if case.technique == name) for name in EVERYWHERE}
    found += [
        (replace(case, model=model), 1, "none")
        for case in first.values()
        for model in MODELS
        if model != case.model
    ]
    return found


def _name(case: Case, ranks: int, states: str) -> str:
    return f"{case.technique} / {case.option} / {case.model} / {states if ranks > 1 else 'alone'}"


def rows(pattern: str) -> Iterator[list[Row]]:
    """Predict and measure the requested rows, in batches."""
    asked = [each for each in _asked() if re.search(pattern, _name(*each))]
    for count in sorted({ranks for _, ranks, _ in asked}):
        mine = [each for each in asked if each[1] == count]
        for start in range(0, len(mine), AT_ONCE):
            found = [_predicted(*each) for each in mine[start : start + AT_ONCE]]
            made = [(row, each) for row, each in found if isinstance(each, Candidate)]
            if made:
                _measure(count, made)
            yield [row for row, _ in found]


def _predicted(case: Case, ranks: int, states: str) -> tuple[Row, Candidate | Reason]:
    row: Row = {
        "name": _name(case, ranks, states),
        "technique": case.technique,
        "option": case.option,
        "model": case.model,
        "ranks": ranks,
        "sharding": states,
        "micro_batches": case.parts,
    }
    made = _candidate(case, ranks, states)
    if isinstance(made, Reason):
        return {**row, "refused": str(made)}, made
    prediction = simulate(made.program, hardware.detect("cpu"))
    row["predicted"] = dict(
        zip(
            TIERS,
            (prediction.peak_allocated_bytes, prediction.host_peak_bytes, prediction.ssd_peak_bytes),
            strict=True,
        )
    )
    row["links"] = _bytes_on_links(made.program.step, made.program.accumulate)
    if case.formula is not None:
        row["formula"] = case.formula(_sizes(case, ranks, states))
    return row, made


def _measure(ranks: int, made: Sequence[tuple[Row, Candidate]]) -> None:
    asked = [(str(MODELS[row["model"]]), _config(each), row["micro_batches"]) for row, each in made]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        runs = run_ranks(on_rank, ranks if ranks > 1 else 0, folder, asked, deadline_s=DEADLINE_S)
        print(f"{len(asked)} on {ranks} ranks in {time.perf_counter() - began:.0f} s", flush=True)
    for (row, _), of_ranks in zip(made, zip(*runs, strict=True), strict=True):
        _compare(row, of_ranks)


def _config(made: Candidate) -> dict[str, Any]:
    settings = {slot: each for slot, each in made.choice.dump().items() if slot != "execution"}
    return {"settings": settings, "plan": {slot: plan.document() for slot, plan in made.plans.items()}}


def _compare(row: Row, runs: Iterable[Row]) -> None:
    """Compare with the prediction: peaks of the fullest rank, at the step that differs most; bytes of the
    rank that moves most.
    """
    runs = list(runs)
    row["measured"], row["off"] = {}, {}
    for name, wanted in row["predicted"].items():
        fullest = max((run["peaks"][name] for run in runs), key=max)
        row.setdefault("steps", {})[name] = fullest
        row["measured"][name] = furthest = max(fullest, key=lambda n: abs(n - wanted))
        row["off"][name] = 0.0 if abs(furthest - wanted) <= SPARE_BYTES else furthest / max(wanted, 1) - 1
    row["within"] = all(abs(off) <= WITHIN for off in row["off"].values())
    links = sorted(
        {*LINKS, *row.get("formula", {})}
        | {link for run in runs for link in run["moved"] if link.endswith("updaters")}
    )
    row["moved"] = {link: max(run["moved"].get(link, 0) for run in runs) for link in links}
    row["bytes_equal"] = all(row["moved"][link] == wanted for link, wanted in row["links"].items())
    if "formula" in row:
        row["formula_equal"] = all(row["moved"][link] == wanted for link, wanted in row["formula"].items())


# -- report --------------------------------------------------------------------------------------------------


def lines(found: Sequence[Row]) -> list[str]:
    """Return the rows as Markdown."""
    ran = [row for row in found if "off" in row]
    beyond = [row for row in ran if not row["within"]]
    unequal = [row for row in ran if not row["bytes_equal"] or not row.get("formula_equal", True)]
    out = [
        "# Offload: peaks and bytes",
        "",
        "Written by `make bench-offload`; the JSON file of the same name has every number.",
        "",
        (
            f"{len(ran)} runs on CPU, {len(beyond)} with a peak beyond {WITHIN:.0%} on some tier,"
            f" {len(unequal)} with other bytes on a link than predicted or published. Peaks: measured over"
            " predicted, less 1, of the step that is furthest off. On CPU no memory is pinned; with a GPU"
            " all host memory is. Generator states, kept on the host by recomputed blocks and ops that draw"
            " random numbers, are counted: 5,056 bytes each. Not counted by any pass: the state of a block"
            " that draws nothing, while its forward runs, and those of the online runtime."
        ),
        "",
        (
            "| technique | option | model | ranks | device | off | host | off | SSD | off | bytes as"
            " predicted | as published |"
        ),
        "|---" * 12 + "|",
    ]
    for row in ran:
        peaks = " | ".join(f"{row['measured'][name]:,} | {row['off'][name]:+.2%}" for name in TIERS)
        formula = {None: "", True: "yes", False: "no"}[row.get("formula_equal")]
        ranks = "1" if row["ranks"] == 1 else f"{row['ranks']}, {row['sharding']}"
        out.append(
            f"| {row['technique']} | {row['option']} | {row['model']} | {ranks} | {peaks} | "
            f"{'yes' if row['bytes_equal'] else 'no'} | {formula} |"
        )
    refused: dict[str, list[str]] = {}
    for row in found:
        if "refused" in row:
            refused.setdefault(row["refused"], []).append(
                f"{row['technique']} ({row['model']}, {row['ranks']})"
            )
    return [
        *out,
        "",
        *(f"- refused: {', '.join(dict.fromkeys(names))}: {reason}" for reason, names in refused.items()),
    ]


def main() -> None:
    """Run the requested rows and write one JSON and one Markdown document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression in a row's name")
    parser.add_argument("--json", type=Path, help="keep other rows of this file, write all to it")
    parser.add_argument("--markdown", type=Path, help="write a table to this file")
    parser.add_argument(
        "--rewrite", action="store_true", help="run nothing, write the table of what the JSON file has"
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)  # as on the ranks, whose kernels' scratch is predicted
    known = json.loads(asked.json.read_text())["rows"] if asked.json and asked.json.exists() else []
    order = {_name(*each): at for at, each in enumerate(_asked())}
    found: dict[str, Row] = {row["name"]: row for row in known if row["name"] in order}
    with tempfile.TemporaryDirectory() as folder:
        os.environ[offload_dir.VARIABLE] = folder  # looked at, not written to
        for some in () if asked.rewrite else rows(asked.pattern):
            for row in some:
                print(
                    row["name"],
                    row.get("refused") or {name: f"{off:+.2%}" for name, off in row["off"].items()},
                    flush=True,
                )
            found |= {row["name"]: row for row in some}
            if asked.json:  # what is found stays found, whatever becomes of the next ones
                in_order = sorted(found.values(), key=lambda row: order[row["name"]])
                document = {"schema": 1, "torch": torch.__version__, "rows": in_order}
                asked.json.write_text(json.dumps(document, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(
            "\n".join(lines(sorted(found.values(), key=lambda row: order[row["name"]]))) + "\n"
        )


if __name__ == "__main__":
    main()
