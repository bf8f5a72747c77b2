"""Run random cases for MEMTUNE_FUZZ_SECONDS; print findings, shrunk, with their seeds: `python -m fuzz`."""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from support.simulated_device import start

from fuzz.cases import SETTINGS_LOOPS, draw_cases, draw_spec
from fuzz.ranks import Ranks
from fuzz.run import Recorded, shrunk


def main() -> int:
    """Return 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "sim"), default="cpu", help="sim: the simulated one")
    parser.add_argument("--first", type=int, default=0, help="seed of the first model")
    parser.add_argument("--cases", type=int, default=10**9)
    parser.add_argument("--peaks", action="store_true", help="compare peaks alone; nothing is trained")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + float(os.environ.get("MEMTUNE_FUZZ_SECONDS", "120"))
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    seen: set[str] = set()
    seed, draws = asked.first, Counter[str]()
    ranks = Ranks(asked.ranks, device=asked.device) if asked.ranks > 1 and not asked.peaks else None
    if asked.device == "sim":
        start(asked.ranks + 1)
    gc.freeze()
    while time.monotonic() < until and counts.total() < asked.cases:
        with tempfile.TemporaryDirectory() as folder:
            model = Recorded(draw_spec(seed, asked.ranks), ranks, Path(folder), asked.ranks, asked.device)
            cases = draw_cases(seed, asked.ranks, model.fits, draws, asked.device)
            for case in itertools.islice(cases, 0, None, SETTINGS_LOOPS) if asked.peaks else cases:
                outcome = model.peak(case) if asked.peaks else model.outcome(case)
                counts[outcome.kind] += 1
                if outcome.kind == "refused" or "not compared" in outcome.text:
                    reasons[f"{outcome.kind}: {outcome.text}".split("\n")[0][:130]] += 1
                if asked.verbose:
                    print(seed, outcome.kind, outcome.text[:150].replace("\n", " "), case, flush=True)
                if outcome.is_finding and outcome.key not in seen:
                    seen.add(outcome.key)
                    print(
                        f"seed {seed}, {asked.ranks} ranks: {outcome.kind}: {outcome.text}\n  {case}\n",
                        flush=True,
                    )
                    if not asked.no_shrink:
                        small, found = shrunk(case, outcome, ranks)
                        print(f"smaller: {found.text}\n  {small}\n", flush=True)
                if time.monotonic() > until or counts.total() >= asked.cases:
                    break
        seed += 1
        if seed % 20 == 0:
            print(f"{counts.total()} cases: {dict(counts)}", flush=True)
    if ranks is not None:
        ranks.close()
    print(
        f"{counts.total()} cases, models {asked.first} to {seed - 1}, {asked.ranks} ranks: {dict(counts)};"
        f" draws of a technique: {dict(draws)}"
    )
    for text, count in reasons.most_common(30):
        print(f"  {count} {text}")
    findings = counts.total() - counts["equal"] - counts["refused"]
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
