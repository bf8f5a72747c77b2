"""memtune's own allocators serve the simulated accelerator, by the functions that torch and CUDA's driver
have for them: streams, events, memory that is mapped in several places, and little of it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memtune.search_spaces import find

pytestmark = pytest.mark.device
TESTS = Path(__file__).parents[2]
KINDS = ("gmlake", "planned_layout", "lifetime_pools")


def run(kind: str, *arguments: str) -> dict[str, Any]:
    """Return the result of `support.other_allocator_runs` under the allocator of `kind`."""
    done = subprocess.run(
        [sys.executable, "-m", "support.other_allocator_runs", *arguments],
        env=os.environ | find("allocator", kind)().env() | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_model_trains_as_on_the_cpu(kind: str) -> None:
    found = run(kind, "trains", kind)
    assert found["differences"] == found["races"] == []
    assert found["shown"] == found["counted"]
    assert found["plans"] == (0 if kind == "gmlake" else 1)


@pytest.mark.parametrize("pace", ["deferred", pytest.param("random", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
def test_blocks_keep_their_values_on_several_streams(kind: str, pace: str) -> None:
    found = run(kind, "served", pace, "5")
    assert (found["wrong"], found["races"]) == (0, [])
    assert found["refused"] > 0
    assert (found["stitched"] > 0) == (kind != "lifetime_pools")
    assert found["shown"] == found["counted"]


def test_memory_that_ops_still_use_is_neither_unmapped_nor_handed_out() -> None:
    freed, unmapped, unusable = run("gmlake", "misused")["raised"]
    assert re.search(
        r"freed and handed out again, and aten::add\S* on stream \d+ of sim:1 may still use", freed
    )
    assert re.search(r"memory is unmapped that aten::fill\S* on stream 0 of sim:1 may still use", unmapped)
    assert re.search(r"aten::fill\S* on stream 0 of sim:1 uses memory that is not mapped", unusable)
