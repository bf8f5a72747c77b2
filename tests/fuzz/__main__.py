"""Run random cases for MEMTUNE_FUZZ_SECONDS; print findings, shrunk, with their seeds: `python -m fuzz`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from fuzz.run import run_fitting, shrunk


def main() -> int:
    """Return 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + float(os.environ.get("MEMTUNE_FUZZ_SECONDS", "120"))
    counts: Counter[str] = Counter()
    seed = asked.first
    while time.monotonic() < until and seed < asked.first + asked.cases:
        with tempfile.TemporaryDirectory() as folder:
            case, outcome, refused = run_fitting(seed, asked.ranks, Path(folder))
        counts[outcome.kind] += 1
        counts["refused"] += refused
        if asked.verbose:
            print(seed, outcome.kind, outcome.text[:150].replace("\n", " "), flush=True)
        if outcome.is_finding:
            small, found = (case, outcome) if asked.no_shrink else shrunk(case, outcome)
            print(f"seed {seed}, {asked.ranks} ranks: {found.kind}: {found.text}\n  {small}\n", flush=True)
        seed += 1
    findings = sum(n for kind, n in counts.items() if kind not in ("equal", "refused"))
    total = sum(counts.values())
    print(f"{total} cases, seeds {asked.first} to {seed - 1}, {asked.ranks} ranks: {dict(counts)}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
