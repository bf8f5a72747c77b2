"""Operator orders of whole training steps: peaks in program order and in the planner's order, at batch 1, and
planning seconds.

Each workload of `--models` is recorded (forward, backward, optimizer), and all its ops may move as far as
data dependences and writes allow. Random ops and ops on links keep their order. The peak of program order is
counted by the same rule: a storage is freed after its last use. This is a statement about the graph, not
about what PyTorch can run: eager code runs in program order, and compiled graphs hold forward and backward of
their region, not the optimizer.

Each planned order is then laid out: offsets as high as its peak mean that no other order, chosen with its
layout, needs less memory than this peak allows.

A second table predicts the peaks of eager steps that could run: forward and backward reordered by a frozen
schedule, updates at the gradients (`execution.order: roam`), and both.

Run as `python benchmarks/order.py --json out.json --markdown out.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from buffer_layout import Buffers, lay_out

from memtune.activations.schedules import Region, region_of, run_schedule
from memtune.autotune.record.recorder import record
from memtune.compile.low_peak_planner import LowPeak, Ops, low_peak_order
from memtune.offload.optimizer import not_at_gradients, updates_at_gradients
from memtune.program import Schedule, build_schedule
from memtune.program.step import FOREVER, READS, Step, Tier
from memtune.workload.workload import Workload

LARGE = 10_000
_ZOO, _LARGER = Path(__file__).parents[1] / "tests" / "zoo", Path(__file__).parent / "predict_models"


def ops_of(step: Step) -> Ops:
    """Return the ops of `step` with their device storages; storages that outlive the step stay, writes keep
    their order.
    """
    device = step.storages.tier == Tier.DEVICE
    stays = step.storages.held_until == FOREVER
    storages = zip(
        np.where(device, step.storages.bytes, 0).tolist(),
        step.storages.producer.tolist(),
        stays.tolist(),
        strict=True,
    )
    writes = step.uses.mode != READS
    last_write: dict[int, int] = {}
    since: dict[int, list[int]] = {}
    pairs: list[tuple[int, int]] = []
    for op, storage, write in zip(
        step.uses.op.tolist(), step.uses.storage.tolist(), writes.tolist(), strict=True
    ):
        if storage in last_write:
            pairs.append((last_write[storage], op))
        if write:
            pairs += [(other, op) for other in since.pop(storage, [])]
            last_write[storage] = op
        else:
            since.setdefault(storage, []).append(op)
    kept = np.flatnonzero((step.ops.rng > 0) | (step.ops.group > 0)).tolist()
    pairs += pairwise(kept)
    uses = zip(step.uses.op.tolist(), step.uses.storage.tolist(), strict=True)
    return Ops.of(step.ops.n, storages, uses, {(first, then) for first, then in pairs if first < then})


def low_peak_schedule(region: Region) -> Schedule:
    """Return the schedule that runs the ops of forward, and those of backward, in the planner's order."""
    graph, loss = region.graph, region.graph.n_forward
    # Between the two runs the loss: an op that all of forward precedes and all of backward follows.
    new = [op if op < loss else op + 1 for op in range(graph.n_ops)]
    pairs = {(op, loss) for op in range(loss)} | {(loss, new[op]) for op in range(loss, graph.n_ops)}
    until, makers = region.outside_until.tolist(), graph.maker
    storages = [
        (int(size), new[maker], end >= graph.n_ops)
        for size, maker, end in zip(region.bytes, makers, until, strict=True)
    ]
    uses = [(new[op], value) for op in range(graph.n_ops) for value in graph.reads[op]]
    uses += [(loss, v) for v, maker in enumerate(makers) if maker < loss and until[v] >= loss - 1]
    for value, writers in graph.writers.items():
        readers = [op for op in range(graph.n_ops) if value in graph.reads[op]]
        both = {(min(a, b), max(a, b)) for a in readers for b in writers if a != b}
        pairs |= {(new[a], new[b]) for a, b in both}
    pairs |= {(new[a], new[b]) for a, b in pairwise(sorted(graph.random | graph.once))}
    order = low_peak_order(Ops.of(graph.n_ops + 1, storages, uses, pairs)).order.tolist()
    forward, backward = [op for op in order if op < loss], [op - 1 for op in order if op > loss]
    return build_schedule(graph, forward, backward)


def eager_row(name: str, step: Step) -> dict[str, Any] | None:
    """Return the peaks of an eager step, those that are possible; None if no schedule can run it."""
    region = region_of(step)
    if isinstance(region, str):
        return None
    steps = {"reordered": run_schedule(step, region, low_peak_schedule(region))}
    if not not_at_gradients(step):
        steps |= {"updated early": updates_at_gradients(step, 1)}
        steps |= {"both": updates_at_gradients(steps["reordered"], 1)}
    plain = step.peak_bytes()
    return {
        "model": name,
        "peak_bytes": plain,
        "ratio": {how: each.peak_bytes() / plain for how, each in steps.items()},
    }


def height_bytes(ops: Ops, found: LowPeak) -> int:
    """Return the height of a layout of all storages, live as the planned order runs."""
    position = np.empty(ops.count, np.int64)
    position[found.order] = np.arange(ops.count)
    start = np.where(ops.producer < 0, 0, position[ops.producer])
    end = np.where(ops.outlives > 0, ops.count, start + 1)
    np.maximum.at(end, ops.use_storage, position[ops.use_op] + 1)
    lives = zip(start.tolist(), end.tolist(), ops.bytes.tolist(), strict=True)
    return lay_out(Buffers.of(each for each in lives if each[2])).height_bytes


def row(name: str, ops: Ops) -> dict[str, Any]:
    """Run the planner on one graph."""
    started = time.perf_counter()
    found = low_peak_order(ops)
    seconds = time.perf_counter() - started
    return {
        "graph": name,
        "ops": ops.count,
        "program_peak_bytes": found.program_peak_bytes,
        "peak_bytes": found.peak_bytes,
        "ratio": found.peak_bytes / max(found.program_peak_bytes, 1),
        "plan_s": seconds,
        "height": height_bytes(ops, found) / max(found.peak_bytes, 1),
    }


def synthetic(kind: str) -> Ops:
    """Return ten thousand ops: random sizes and users, or updates of 1,250 layers after all of their
    gradients.
    """
    if kind == "random":
        rng = np.random.default_rng(0)
        storages = [(int(size), op, False) for op, size in enumerate(rng.integers(1, 1 << 20, LARGE))]
        near = np.minimum(np.arange(LARGE)[:, None] + rng.geometric(0.02, (LARGE, 3)), LARGE - 1)
        return Ops.of(
            LARGE, storages, [(int(user), each) for each, users in enumerate(near) for user in users]
        )
    layers = LARGE // 8
    storages = [(1 << 20, op, False) for op in range(4 * layers)] + [
        (1 << 20, 4 * layers + 4 * i, False) for i in range(layers)
    ]
    uses = [
        (op + 1, op) for op in range(4 * layers - 1)
    ]  # backward: a chain whose every fourth op makes a gradient
    pairs = []
    for layer in range(layers):
        first, temporary = 4 * layers + 4 * layer, 4 * layers + layer
        uses += [(first + i, temporary) for i in (1, 2, 3)] + [(first + i, 4 * layer) for i in (0, 3)]
        pairs += [(first + i, first + i + 1) for i in range(3)]
    return Ops.of(LARGE, storages, uses, pairs)


def markdown(rows: list[dict[str, Any]], eager: list[dict[str, Any]]) -> str:
    """Return the results as two tables."""
    lines = [
        "# Operator orders",
        "",
        (
            "Made by `make bench-order`. Whole steps (forward, backward, optimizer) at batch 1, all ops free"
            " to move; a storage goes"
        ),
        (
            "after its last use in both columns. Seconds are those of one thread. A statement on graphs, not"
            " a measurement."
        ),
        "Layout: height of a layout of the planned order over its peak; at 1 no layout is lower.",
        "",
        "| graph | ops | program order, MB | planned, MB | planned / program | s | layout |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        sizes = (each["program_peak_bytes"] / 1e6, each["peak_bytes"] / 1e6)
        lines.append(
            f"| {each['graph']} | {each['ops']:,} | {sizes[0]:.2f} | {sizes[1]:.2f} "
            f"| {each['ratio']:.3f} | {each['plan_s']:.2f} | {each['height']:.4f} |"
        )
    lines += [
        "",
        "Eager steps with two samples, peak by prediction over that of program order: forward and backward",
        "reordered by a frozen schedule, updates at the gradients (`execution.order: roam`), and both.",
        "",
        "| model | program order, MB | reordered | updated early | both |",
        "|---|---|---|---|---|",
    ]
    for each in eager:
        ratios = [each["ratio"].get(how) for how in ("reordered", "updated early", "both")]
        cells = " | ".join("–" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
        lines.append(f"| {each['model']} | {each['peak_bytes'] / 1e6:.2f} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", type=Path, nargs="+", default=[_ZOO, _LARGER], help="folders with workload files"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    rows, eager = [], []
    for path in (path for folder in asked.models for path in sorted(folder.glob("*.py"))):
        recording, name = record(Workload.load(path)), f"{path.parent.name}/{path.stem}"
        rows.append(row(name, ops_of(recording.at(1))))
        print(rows[-1], file=sys.stderr)
        if (found := eager_row(name, recording.at(2))) is not None:
            eager.append(found)
    rows += [row(f"{LARGE:,} ops, {kind}", synthetic(kind)) for kind in ("random", "updates")]
    if asked.json:
        asked.json.write_text(json.dumps({"schema": 1, "rows": rows, "eager": eager}, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(markdown(rows, eager))
    print(markdown(rows, eager))


if __name__ == "__main__":
    main()
