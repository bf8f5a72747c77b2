"""The simulator against published ratios of offloading: what is committed is what the scripts find, from
their constants.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PUBLISHED = json.loads((BENCHMARKS / "results" / "offload-published.json").read_text())
ORCHESTRATION = json.loads((BENCHMARKS / "results" / "orchestration.json").read_text())


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, as if it were started in its folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    known = set(sys.modules)
    import offload_published

    yield offload_published
    for name in set(sys.modules) - known:
        if name.split(".")[0] in ("offload_published", "published"):
            del sys.modules[name]


def test_committed_results_have_present_constants(scripts: ModuleType) -> None:
    for name, (_, sources, published) in scripts.PAPERS.items():
        assert PUBLISHED[name]["sources"] == sources
        assert PUBLISHED[name]["published"] == json.loads(json.dumps(published))
        assert PUBLISHED[name]["why"] == scripts.WHY[name]


def test_committed_ratios_are_in_published_ranges() -> None:
    """Idle shares of ZeRO-Infinity, next to none with updates in backward; STRONGHOLD over L2L; orchestrated
    copies.
    """
    rows: list[dict[str, Any]] = PUBLISHED["lohan"]["rows"]
    low, high = PUBLISHED["lohan"]["published"]["idle"]
    assert any(low <= row["idle"]["zero_infinity"] <= high for row in rows)
    assert any(
        row["idle"]["lohan, no swaps"] <= PUBLISHED["lohan"]["published"]["idle_lohan"] for row in rows
    )
    assert all(min(row["ratio"].values()) > 1 for row in rows)
    low, high = PUBLISHED["stronghold"]["published"]["ratio"]
    assert all(low <= row["ratio"]["l2l"] <= high for row in PUBLISHED["stronghold"]["rows"])
    assert all(min(row["ratio"].values()) > 1 for row in PUBLISHED["stronghold"]["rows"])
    assert all(row["ratio"] > 2 for row in PUBLISHED["mobius"]["rows"])
    packs = PUBLISHED["harmony"]["rows"]
    assert all(1 < row["ratio"] <= PUBLISHED["harmony"]["published"]["up to"] for row in packs)
    assert all(row["harmony_s"] <= row["fewest_packs_s"] for row in packs)
    assert packs[-1]["harmony_s"] < 0.95 * packs[-1]["fewest_packs_s"]
    assert all(sum(row["waits"].values()) < 0.02 for row in PUBLISHED["angel_ptm"]["rows"])
    scale = max(row["ratio"] for row in PUBLISHED["patrickstar"]["rows"])
    assert scale == pytest.approx(PUBLISHED["patrickstar"]["published"]["ratio"], rel=0.2)
    of_one = [
        row["ratio_of_a_micro_batch"] for row in ORCHESTRATION["rows"] if "ratio_of_a_micro_batch" in row
    ]
    low, high = ORCHESTRATION["published"]
    assert low <= max(each["disjoint"] for each in of_one) <= high <= max(each["token"] for each in of_one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paper", "figure"),
    [("stronghold", "stronghold_s"), ("mobius", "zero3_s"), ("harmony", "harmony_s")],
)
def test_committed_rows_are_reproduced(
    scripts: ModuleType, paper: str, figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMTUNE_OFFLOAD_DIR", str(tmp_path))
    for name in ("LAYERS", "DIM", "HEADS", "SEQ", "VOCAB", "TIED", "BF16"):
        monkeypatch.setenv(f"MEMTUNE_GPT_{name}", "1")  # so that what the script sets does not stay
    (found,) = islice(scripts.PAPERS[paper][0](), 1)
    wanted = PUBLISHED[paper]["rows"][0]
    assert found[figure] == pytest.approx(wanted[figure], rel=0.01)
    assert found["ratio"] == pytest.approx(wanted["ratio"], rel=0.01)
