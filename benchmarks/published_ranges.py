"""Ranges of true over predicted bytes that `memtune plan` states without trials, derived from published rows.

    python benchmarks/published_ranges.py [RESULTS]

Reads a result of `published_gpu.py`. Each residual is the absolute logarithm of measured over predicted
bytes: of torch's counters (allocated and reserved), or of the device's total. The half-width is
the smallest that holds `LEVEL` of the rows of every source, by split conformal prediction: sources differ in
what they leave out, and one with many rows must not decide. Cross-validated: the half-width of all other
sources is tried on the rows of each source.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results/published-gpu.json"
COLUMNS = {"torch": ("allocated", "reserved"), "device": ("device",)}
"""Subject of a range → columns of a result."""
LEVEL = 0.9
"""Share of measurements that a range should hold."""


@dataclass(frozen=True)
class Derived:
    """A range, and how it does on sources that it was not derived from."""

    half_width: float
    """Of the logarithm: the range is exp(-half_width) to exp(half_width)."""
    rows: int
    by_source: Mapping[str, tuple[float, float]]
    """Source → half-width derived without it, and the share of its own rows which that holds."""

    @property
    def factors(self) -> tuple[float, float]:
        """Return the range, rounded outwards to hundredths."""
        return (
            math.floor(100 * math.exp(-self.half_width)) / 100,
            math.ceil(100 * math.exp(self.half_width)) / 100,
        )

    @property
    def held(self) -> float:
        """Return the mean over sources of the share that the other sources' range holds."""
        return sum(share for _, share in self.by_source.values()) / len(self.by_source)


def residuals(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> dict[str, list[float]]:
    """Return the absolute logarithms of measured over predicted, by source; without rows set apart."""
    found: dict[str, list[float]] = {}
    for row in rows:
        case = row["case"]
        for column in columns:
            if column in row["predicted"] and column in case["measured"] and not case["excluded"]:
                ratio = case["measured"][column] / row["predicted"][column]
                found.setdefault(case["source"], []).append(abs(math.log(ratio)))
    return found


def half_width(by_source: Mapping[str, Sequence[float]]) -> float:
    """Return the smallest half-width that holds `LEVEL` of the rows of every source, and of its next one."""

    def of_one(rows: Sequence[float]) -> float:
        return sorted(rows)[min(math.ceil((len(rows) + 1) * LEVEL), len(rows)) - 1]

    return max(map(of_one, by_source.values()))


def derive(by_source: Mapping[str, Sequence[float]]) -> Derived:
    """Return the range of all rows, and of all but each source's."""
    apart = {}
    for source, mine in by_source.items():
        width = half_width({name: rows for name, rows in by_source.items() if name != source})
        apart[source] = width, sum(each <= width for each in mine) / len(mine)
    return Derived(half_width(by_source), sum(map(len, by_source.values())), apart)


def derive_all(rows: Sequence[Mapping[str, Any]]) -> dict[str, Derived]:
    """Return each range for which there are rows of several sources."""
    found = {name: residuals(rows, columns) for name, columns in COLUMNS.items()}
    return {name: derive(by_source) for name, by_source in found.items() if len(by_source) > 1}


def main() -> None:
    """Print each range and how each source does in that of the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS, help="of `published_gpu.py`")
    rows = json.loads(parser.parse_args().results.read_text())["rows"]
    for name, found in derive_all(rows).items():
        low, high = found.factors
        print(f"{name}, {found.rows} rows: true bytes are {low} to {high} of predicted")
        for source, (width, share) in sorted(found.by_source.items()):
            print(f"  {source}: {share:.0%} within {math.expm1(width):.1%}, the width of the others")
        print(f"  mean over sources: {found.held:.0%}")


if __name__ == "__main__":
    main()
