"""A fixed part of the cases of `make fuzz` (CI runs others at each commit); and the tool finds a defect and
makes its case smaller.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from fuzz import run
from fuzz.cases import SETTINGS_LOOPS, Case, draw_cases, draw_spec
from fuzz.models import ModelSpec
from fuzz.run import Outcome, Recorded, run_case, shrunk

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS = (0,)


@pytest.mark.parametrize("seed", SEEDS)
def test_case_trains_as_the_plain_model_or_is_refused(seed: int, tmp_path: Path) -> None:
    model = Recorded(draw_spec(seed, 1), None, tmp_path)
    for case in itertools.islice(draw_cases(seed, 1, model.fits, Counter()), 0, None, SETTINGS_LOOPS):
        outcome = model.outcome(case)
        assert not outcome.is_finding, f"{outcome.text}\n{case}"


def test_differing_weights_are_found_and_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in a step's update: half of the learning rate wherever the config has a technique."""
    model = ModelSpec(("mlp",), 2, "mean", "fixed", tied=False, nested=False, adam=False)
    settings = (("recompute", (("kind", "full"),)),)
    case = Case(model, settings, ("ema", "evaluate"), accumulate=2, own_loop=False, ranks=1)
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
