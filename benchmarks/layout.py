"""Layouts of MiniMalloc's instances, of cut rectangles and of large synthetic steps: heights and seconds of
both tiers.

`MEMTUNE_MINIMALLOC` names the folder of the instances (github.com/google/minimalloc, benchmarks/challenging);
they are not part of memtune. Run as `python benchmarks/layout.py --json out.json --markdown out.md`. Seconds
are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from buffer_layout import Buffers, fault, lay_out

VARIABLE = "MEMTUNE_MINIMALLOC"
MINIMALLOC_S = {
    "A": 3.6,
    "B": 2.8,
    "C": 0.5,
    "D": 1.9,
    "E": 2.6,
    "F": 3.6,
    "G": 0.7,
    "H": 1.2,
    "I": 2.6,
    "J": 0.6,
    "K": 0.4,
}
"""Seconds that google/minimalloc took on two shared cores, one run each."""
HEURISTIC_S, EXACT_S = 5.0, 60.0
CUT_S = 10.0
CUTS = tuple((seed, 100 + 50 * (seed % 5), 0.05 if seed < 5 else 0.5) for seed in range(10))
"""Seed, buffers, share of the buffers that are made smaller."""
LARGE = 100_000


def instances(folder: str | None) -> dict[str, tuple[Buffers, int]]:
    """Return buffers and capacity of each instance `NAME.CAPACITY.csv` in the folder, by name."""
    found = {}
    for path in sorted(Path(folder).glob("?.*.csv")) if folder else []:
        name, capacity, _ = path.name.split(".")
        with path.open() as lines:
            rows = [(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(lines)]
        found[name] = (Buffers.of(rows), int(capacity))
    return found


def instance_row(name: str, buffers: Buffers, capacity: int) -> dict[str, Any]:
    """Run both tiers on one instance: the heuristic tier alone, and the exact tier from one best fit."""
    packed = lay_out(buffers, goal_bytes=capacity, heuristic_s=HEURISTIC_S)
    exact = lay_out(buffers, goal_bytes=capacity, heuristic_s=0.0, exact_s=EXACT_S)
    assert not fault(buffers, packed)
    assert not fault(buffers, exact)
    return {
        "instance": name,
        "buffers": len(buffers),
        "lower_bound": packed.lower_bound_bytes / capacity,
        "heuristic": packed.height_bytes / capacity,
        "heuristic_s": packed.heuristic_s,
        "exact": exact.height_bytes / capacity,
        "exact_s": exact.heuristic_s + exact.exact_s,
        "nodes": exact.nodes,
        "solved": exact.height_bytes <= capacity,
        "minimalloc_s": MINIMALLOC_S.get(name),
    }


def large_row(kind: str) -> dict[str, Any]:
    """Run a hundred thousand buffers: nested lifetimes with short ones between, or random lifetimes."""
    rng = np.random.default_rng(0)
    if kind == "random lifetimes":
        start = rng.integers(0, LARGE, LARGE)
        table = np.stack(
            [start, start + rng.integers(1, LARGE // 10, LARGE), rng.integers(1, 4096, LARGE) * 512], 1
        )
    else:
        kept = LARGE // 3
        start, short = np.sort(rng.integers(0, LARGE, kept)), rng.integers(0, 2 * LARGE, LARGE - kept)
        nested = np.stack(
            [start, 2 * LARGE - start + rng.integers(0, 50, kept), rng.integers(1, 4096, kept) * 512], 1
        )
        brief = np.stack(
            [short, short + rng.integers(1, 60, len(short)), rng.integers(1, 8192, len(short)) * 512], 1
        )
        table = np.concatenate([nested, brief])
    buffers = Buffers.of(table.tolist(), alignment_bytes=512)
    layout = lay_out(buffers, heuristic_s=HEURISTIC_S)
    assert not fault(buffers, layout)
    height = layout.height_bytes / layout.lower_bound_bytes
    return {"lifetimes": kind, "buffers": LARGE, "height": height, "heuristic_s": layout.heuristic_s}


def cut(seed: int, n: int, trimmed: float) -> tuple[Buffers, int]:
    """Cut a rectangle of one mebibyte into n buffers at random, so that a layout within the capacity exists;
    shrink some.
    """
    rng = np.random.default_rng(seed)
    unit, capacity = 1024, 1 << 20
    pieces = [(0, 4096, capacity // unit)]
    while len(pieces) < n:
        area = np.array([(end - start) * size for start, end, size in pieces], np.float64)
        i = int(rng.choice(len(pieces), p=area / area.sum()))
        start, end, size = pieces[i]
        share = rng.uniform(0.1, 0.9)
        if rng.random() < 0.5:
            at = start + int((end - start) * share)
            halves = [(start, at, size), (at, end, size)]
        else:
            at = int(size * share)
            halves = [(start, end, at), (start, end, size - at)]
        if all(low < high and height > 0 for low, high, height in halves):
            pieces[i : i + 1] = halves
    smaller = [
        max(1, int(size * rng.uniform(0.3, 1.0))) if rng.random() < trimmed else size for _, _, size in pieces
    ]
    return (
        Buffers.of(
            [(start, end, size * unit) for (start, end, _), size in zip(pieces, smaller, strict=True)]
        ),
        capacity,
    )


def cut_row(seed: int, n: int, trimmed: float) -> dict[str, Any]:
    """Run the exact tier on a cut rectangle."""
    buffers, capacity = cut(seed, n, trimmed)
    exact = lay_out(buffers, goal_bytes=capacity, heuristic_s=0.0, exact_s=CUT_S)
    assert not fault(buffers, exact)
    return {
        "seed": seed,
        "buffers": n,
        "trimmed": trimmed,
        "lower_bound": exact.lower_bound_bytes / capacity,
        "exact": exact.height_bytes / capacity,
        "exact_s": exact.heuristic_s + exact.exact_s,
        "nodes": exact.nodes,
        "solved": exact.height_bytes <= capacity,
    }


def markdown(results: dict[str, Any]) -> str:
    """Return the results as tables."""
    lines = [
        "# Layouts",
        "",
        (
            "Made by `make bench-layout`. Heights are divided by the capacity; seconds are those of one"
            " thread on a core."
        ),
        (
            f"The heuristic tier has {HEURISTIC_S:g} s; the exact tier starts from one best fit and has"
            f" {EXACT_S:g} s."
        ),
        (
            "MiniMalloc's seconds: its own binary on two shared cores, one run. Every layout has passed the"
            " validator."
        ),
        "",
        (
            "| instance | buffers | lower bound | heuristic | exact | solved | exact, s | placements |"
            " MiniMalloc, s |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in results["instances"]:
        lines.append(
            f"| {row['instance']} | {row['buffers']} | {row['lower_bound']:.4f} | {row['heuristic']:.4f} |"
            f" {row['exact']:.4f} | {'yes' if row['solved'] else 'NO'} | {row['exact_s']:.2f} |"
            f" {row['nodes']:,} | {row['minimalloc_s']} |"
        )
    if results["instances"]:
        mean = sum(row["heuristic"] for row in results["instances"]) / len(results["instances"])
        lines += ["", f"Mean height of the heuristic tier: {mean:.4f}."]
    else:
        lines.append(f"| none: {VARIABLE} does not say where they are | | | | | | | | |")
    lines += [
        "",
        (
            "Rectangles cut at random, some pieces made smaller: the exact tier at the rectangle's height,"
            f" {CUT_S:g} s."
        ),
        "",
        "| seed | buffers | made smaller | lower bound | exact | solved | exact, s | placements |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["cut"]:
        lines.append(
            f"| {row['seed']} | {row['buffers']} | {row['trimmed']:.0%} | {row['lower_bound']:.4f} |"
            f" {row['exact']:.4f} | {'yes' if row['solved'] else 'NO'} | {row['exact_s']:.2f} |"
            f" {row['nodes']:,} |"
        )
    lines += ["", "| 100,000 buffers | height / most live bytes | s |", "|---|---|---|"]
    lines += [
        f"| {row['lifetimes']} | {row['height']:.4f} | {row['heuristic_s']:.2f} |" for row in results["large"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--instances",
        default=os.environ.get(VARIABLE),
        help=f"folder with NAME.CAPACITY.csv; default: {VARIABLE}",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    found = instances(asked.instances)
    if not found:
        print(
            f"skipped MiniMalloc's instances: neither --instances nor {VARIABLE} names a folder that has"
            " them",
            file=sys.stderr,
        )
    results: dict[str, Any] = {"schema": 1, "instances": [], "cut": [], "large": []}
    for name, (buffers, capacity) in found.items():
        results["instances"].append(instance_row(name, buffers, capacity))
        print(results["instances"][-1], file=sys.stderr)
    for seed, n, trimmed in CUTS:
        results["cut"].append(cut_row(seed, n, trimmed))
        print(results["cut"][-1], file=sys.stderr)
    results["large"] = [large_row(kind) for kind in ("nested and short lifetimes", "random lifetimes")]
    text = markdown(results)
    print(text)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(text)


if __name__ == "__main__":
    main()
