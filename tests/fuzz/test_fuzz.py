"""A fixed part of the cases of `make fuzz`; and the tool itself finds a defect and makes its case smaller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuzz import run
from fuzz.cases import Case, draw_case
from fuzz.run import Outcome, run_case, shrunk

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS = range(7)


@pytest.mark.parametrize("seed", SEEDS)
def test_case_trains_as_the_plain_model_or_is_refused(seed: int, tmp_path: Path) -> None:
    outcome = run_case(draw_case(seed, 1), tmp_path)
    assert not outcome.is_finding, f"{outcome.text}\n{draw_case(seed, 1)}"


def test_differing_weights_are_found_and_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in a step's update: half of the learning rate wherever the config has a technique."""
    seed = next(seed for seed in SEEDS if run_case(draw_case(seed, 1), tmp_path).kind == "equal")
    case = replace(draw_case(seed, 1), behaviours=("ema", "evaluate"), accumulate=2)
    trained = run.trained

    def defective(case: Case, path: Path, config: object) -> dict[str, torch.Tensor]:
        found = trained(case, path, config)  # type: ignore[arg-type]
        return found if config is None else {name: value + 1 for name, value in found.items()}

    monkeypatch.setattr(run, "trained", defective)
    outcome = run_case(case, tmp_path)
    assert outcome.kind == "differs"
    small, found = shrunk(case, Outcome("differs", outcome.text), tries=6)
    assert found.kind == "differs"
    assert len(small.behaviours) < 2 or small.accumulate == 1
