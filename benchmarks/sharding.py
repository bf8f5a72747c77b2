"""Benchmarks of sharding: exactness, bytes, peaks, published ratios, and the loss due to quantization.

    python benchmarks/sharding.py [published …] [--only PATTERN] [--json FILE] [--markdown FILE]

Without names all parts run; with names only those, and other parts' results stay as in the JSON file. With a
pattern, rows of techniques that do not match stay too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sharding_published as published
import sharding_ranks as ranks
import sharding_shared as shared
import torch

Wanted = Callable[[str], bool]
Rows = list[dict[str, Any]]
PARTS: dict[str, tuple[str, Callable[[Wanted], Rows], Callable[[Rows], list[str]]]] = {
    "exact": (
        "Five steps against one rank",
        lambda only: ranks.exact(only) + shared.exact(only),
        ranks.exact_lines,
    ),
    "bytes": (
        "Bytes on each class of link",
        lambda only: ranks.bytes_sent(only) + shared.bytes_sent(only),
        ranks.bytes_lines,
    ),
    "peak": ("Peaks", lambda only: ranks.peak(only) + shared.peak(only), ranks.peak_lines),
    "quantised": ("Quantised training", ranks.quantised, ranks.quantised_lines),
    "published": ("The simulator against published ratios", published.all_compared, published.lines),
}
"""Name → heading, function that returns the rows, function that formats them."""


def main() -> None:
    """Run the requested parts and write one JSON and one Markdown document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all where none is given"
    )
    parser.add_argument("--json", type=Path, help="read the other parts from this file, write all to it")
    parser.add_argument("--markdown", type=Path, help="write tables to this file")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="a regular expression in a technique's name"
    )
    parser.add_argument(
        "--rewrite", action="store_true", help="run nothing, write the tables of what the JSON file has"
    )
    asked = parser.parse_args()
    known: dict[str, Any] = json.loads(asked.json.read_text()) if asked.json and asked.json.exists() else {}
    found = {
        "schema": 1,
        "torch": torch.__version__,
        **{name: known[name] for name in PARTS if name in known},
    }
    for name in () if asked.rewrite else asked.parts or PARTS:
        began = time.perf_counter()
        rows = PARTS[name][1](lambda technique: re.search(asked.only, technique) is not None)
        kept = [
            row
            for row in found.get(name, ())
            if asked.only and not re.search(asked.only, row.get("technique") or row["paper"])
        ]
        found[name] = kept + rows
        print(f"{name}: {len(rows)} rows in {time.perf_counter() - began:.0f} s", flush=True)
        if asked.json:  # what is found stays found, whatever becomes of the next part
            asked.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    text = [
        "# Sharding",
        "",
        "Written by `make bench-sharding`; the JSON file of the same name has every number.",
        "",
    ]
    for name in (each for each in PARTS if each in found):
        heading, _, lines = PARTS[name]
        text += [f"## {heading}", "", *lines(found[name]), ""]
    print("\n".join(text))
    if asked.markdown:
        asked.markdown.write_text("\n".join(text))


if __name__ == "__main__":
    main()
