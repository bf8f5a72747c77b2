from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support import zoo_paths
from support.search.prepared_search import Probed

from memtune import cli
from memtune.autotune.search.preparation import Setup, prepare
from memtune.autotune.space.ablation import (
    AblatedSetting,
    Ablation,
    StepCost,
    ablate,
    ablation_reason,
    trade,
    trade_text,
)
from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.search_options import PlanOptions
from memtune.technique import Reason

GPT = str(zoo_paths.ZOO["gpt"])
SETTINGS = {
    "execution": {"micro_batch": 2, "accumulate": 2},
    "recompute": {"kind": "full"},
    "sharding": {"states": {"kind": "zero1"}, "communication": {"kind": "none"}},
    "allocator": {"kind": "expandable_segments"},
}


@pytest.fixture(scope="module")
def setup() -> Setup:
    return prepare(
        PlanOptions(workload=GPT, gpu_type="h100-80g", ranks=2, global_batch=8, axes=("recompute",)),
        for_trials=False,
        begun=Probed(),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def ablation(setup: Setup) -> Ablation:
    found = ablate(setup.scorer, Choice.from_document(SETTINGS))
    assert isinstance(found, Ablation)
    return found


def test_ablation_removes_one_setting_at_a_time(setup: Setup, ablation: Ablation):
    assert [each.setting for each in ablation.without] == [
        "execution.accumulate",
        "recompute",
        "sharding.states",
        "allocator",
    ]
    accumulate, recompute, sharding, allocator = ablation.without
    for row, changes in (
        (accumulate, {"execution": {"micro_batch": 4}}),
        (recompute, {"recompute": {"kind": "none"}}),
        (allocator, {"allocator": {"kind": "native"}}),
    ):
        scored = setup.scorer.score(Choice.from_document({**SETTINGS, **changes}), level="events")
        assert not isinstance(scored, Reason)
        assert row.taken == StepCost.from_prediction(scored.prediction)
    assert sharding.taken is None
    assert "choose ddp" in sharding.unfit


def test_ablation_of_recompute_costs_time_and_saves_memory(ablation: Ablation):
    recompute = ablation.without[1]
    assert recompute.taken is not None
    found = trade(ablation.all_settings, recompute.taken)
    assert found["costs"]["step_s"] == pytest.approx(ablation.all_settings.step_s - recompute.taken.step_s)
    assert found["saves"]["peak_bytes"] == recompute.taken.peak_bytes - ablation.all_settings.peak_bytes > 0


WHOLE = StepCost(step_s=1.0, peak_bytes=6 * 2**30, reserved_bytes=6 * 2**30, host_bytes=2**30, ssd_bytes=0)


def without(**values: Any) -> AblatedSetting:
    return AblatedSetting("recompute", "full", "none", StepCost(**{**asdict(WHOLE), **values}))


@pytest.mark.parametrize(
    ("row", "reason", "text"),
    [
        (
            without(step_s=0.8, peak_bytes=9 * 2**30, reserved_bytes=9 * 2**30),
            "without it 9.00 GiB would be needed, 1.00 GiB over the budget of 8.00 GiB",
            "saves 3.00 GiB of device memory; costs 200 ms a step (25.0% of what it takes without)",
        ),
        (
            without(step_s=2.0, host_bytes=0),
            "the step is faster with it",
            "saves 1.00 s a step (50.0% of what it takes without); costs 1.00 GiB of host memory",
        ),
        (
            without(reserved_bytes=7 * 2**30),
            "it needs less memory; without it the config would be within",
            "saves 1.00 GiB reserved",
        ),
        (
            without(step_s=1.0001),
            "the simulator sees nothing in its favour",
            "no difference that the simulator sees",
        ),
        (
            AblatedSetting("recompute", "full", "none", None, "no blocks"),
            "the rest does not stand without it: no blocks",
            "",
        ),
    ],
)
def test_ablation_reason_follows_prediction_without_setting(row: AblatedSetting, reason: str, text: str):
    assert ablation_reason(WHOLE, row, 8 * 2**30).startswith(reason)
    if row.taken is not None:
        assert trade_text(WHOLE, row.taken) == text


def test_config_keeps_ablation_until_settings_are_edited(ablation: Ablation):
    choice = Choice.from_document(SETTINGS)
    assert Ablation.read(json.loads(json.dumps(ablation.document())), choice) == ablation
    other = Choice.from_document({**SETTINGS, "recompute": {"kind": "selective"}})
    assert Ablation.read(ablation.document(), other) is None
    for path, value in (
        (("all_settings", "step_s"), "soon"),
        (("all_settings",), 3),
        (("without", "recompute"), []),
        (("without",), None),
    ):
        broken: Any = copy.deepcopy(ablation.document())
        at = broken
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        assert Ablation.read(broken, choice) is None, path
    assert Ablation.read("yes", choice) is None


def test_explain_gives_source_of_figures(
    ablation: Ablation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tmp_path / "tuned.yaml"
    document = {
        "settings": SETTINGS,
        "predicted": {"ablation": ablation.document()},
        "certificate": {"budget_bytes": 2**40},
    }
    config.write_text(json.dumps(document))
    assert cli.run(["explain", str(config)]) == 0
    said = capsys.readouterr().out
    assert "simulated when the config was written" in said
    assert said.count("why: ") == 4
    assert "instead of none it saves" in said
    assert "does not stand without it: 2 ranks" in said
    config.write_text(json.dumps({**document, "settings": {**SETTINGS, "recompute": {"kind": "selective"}}}))
    assert cli.run(["explain", str(config)]) == 0
    assert "the settings were changed since" in capsys.readouterr().out


def test_explain_records_given_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "def model(): return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])\n"
        "def batch(size): return torch.randn(size, 64)\n"
        "def loss(model, batch): return model(batch).pow(2).mean()\n"
    )
    config = tmp_path / "tuned.yaml"
    settings = {
        "execution": {"micro_batch": 256, "accumulate": 2},
        "offload": {"states": {"kind": "optimizer_cpu"}},
    }
    config.write_text(json.dumps({"settings": settings}))
    model = ["--model", str(tmp_path / "model.py")]
    assert cli.run(["explain", str(config), *model, "--gpus", "1", "--gpu-type", "h100-80g", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["costs_and_savings"].startswith("simulated now")
    (offload,) = found["settings"]
    assert offload["reason"] == "it needs less memory"
    assert offload["without"]["saves"]["peak_bytes"] > 0
    assert offload["without"]["costs"]["host_bytes"] > 0
    assert found["execution_trade"]["execution.accumulate"]["without"]["replacement"] == "micro_batch=512"
