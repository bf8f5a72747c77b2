"""memtune.search and memtune.plan: the command line's names and defaults, and results that print."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.zoo_paths import ZOO
from torch import nn

import memtune
from memtune.autotune.search import SearchOutcome
from memtune.cli import _app
from memtune.errors import UsageError
from memtune.interactive import results

OF_PYTHON = {"batch", "loss", "optimizer", "blocks"}
OF_A_TERMINAL = {"no_tui", "as_json", "context", "verbose", "why"}
"""Options that choose the output of a command; results of functions have all of it."""


@pytest.mark.parametrize("name", ["search", "plan"])
def test_function_has_the_options_of_its_command(name):
    command, function = (inspect.signature(getattr(owner, name)).parameters for owner in (_app, memtune))
    options = {
        ("time" if option == "time_limit" else option): each.default for option, each in command.items()
    }
    arguments = {argument: each.default for argument, each in function.items()}
    left_out = OF_A_TERMINAL & options.keys()
    quiet = {"quiet"} - options.keys()
    assert arguments.keys() - OF_PYTHON - quiet == options.keys() - left_out
    assert "ForwardRef" not in str(inspect.signature(getattr(memtune, name)))
    same = options.keys() - left_out
    assert {each: str(arguments[each]) for each in same} == {each: str(options[each]) for each in same}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for each in self.layers:
            x = each(x).relu()
        return x


def test_plan_of_objects_ranks_prints_and_draws(tmp_path, monkeypatch, capfd):
    pytest.importorskip("cloudpickle")
    monkeypatch.chdir(tmp_path)
    found = memtune.plan(
        Net,
        batch=lambda size: torch.randn(size, 16),
        loss=lambda model, batch: model(batch).mean(),
        device="cpu",
        global_batch=4,
        axes=["execution"],
        max_memory=2**30,
        quiet=True,
    )
    assert found.feasible
    assert found.best.summary == found.report.front[0].summary
    assert len(found.rows) == len(found.report.rows)
    assert "do this" in repr(found)
    assert found.command[3:] == (
        "--device",
        "cpu",
        "--max-memory",
        str(2**30),
        "--axes",
        "execution",
        "--global-batch",
        "4",
    )
    assert re.fullmatch(r"<mb 4: [\d,.]+ samples/s, peak .+, ok, predicted>", repr(found.best))
    assert "settings. Fastest that fits" in found.plot().description
    assert found.report.facts["budget_bytes"] == 2**30
    assert capfd.readouterr() == ("", "")


def test_mistyped_option_is_named_with_the_nearest():
    with pytest.raises(TypeError, match=r"memtune\.plan: .*'gpu_tpye'.* Did you mean 'gpu_type'"):
        memtune.plan(ZOO["gpt"], gpu_tpye="h100-80g")


def test_plan_refuses_a_micro_batch_without_the_config_that_it_changes():
    with pytest.raises(UsageError, match="freeze micro_batch=2"):
        memtune.plan(ZOO["gpt"], device="cpu", micro_batch=2)


def test_plan_reports_a_mistyped_axis():
    with pytest.raises(UsageError, match="Did you mean 'recompute'"):
        memtune.plan(ZOO["gpt"], device="cpu", axes="recompte")


def trial(
    number: int, role: str, name: str, peak_mib: int, step_s: float, status: str = "ok"
) -> dict[str, object]:
    return {
        "number": number,
        "role": role,
        "name": name,
        "summary": f"mb 4 · setting {number}",
        "status": status,
        "sentence": f"recomputes one block in {number + 2} in backward",
        "settings": {"execution": {"micro_batch": 4, "accumulate": 2}},
        "peak_allocated_bytes": peak_mib * 2**20 if status == "ok" else None,
        "step_s": step_s if status == "ok" else None,
        "samples_per_s": 4 / step_s if status == "ok" else None,
    }


@pytest.fixture
def outcome() -> SearchOutcome:
    return SearchOutcome(
        "done",
        ".memtune/s",
        "24% faster than full recompute",
        config={
            "memtune": 1,
            "settings": {"recompute": {"kind": "selective"}},
            "certificate": {"budget_bytes": 6 * 2**20},
            "study": {"trial": 2},
        },
        out="tuned.yaml",
        trials=(
            trial(0, "baseline", "full recompute", 3, 1.2),
            trial(1, "audit", "audit", 0, 0.0, "oom"),
            trial(2, "search", "", 5, 0.9),
            trial(3, "confirm", "", 5, 0.9),
        ),
    )


def test_search_result_gives_best_trials_and_picture(outcome, tmp_path):
    found = results.SearchResult(outcome)
    assert [each.kind for each in found.best.settings.techniques] == ["selective"]
    assert found.path == Path("tuned.yaml")
    assert found.study == Path(".memtune/s")
    assert len(found.trials) == len(outcome.trials)
    assert {"number", "summary", "step_s", "peak_allocated_bytes"} <= set(
        found.trials[0] if isinstance(found.trials, list) else found.trials.columns
    )
    said = repr(found)
    assert outcome.message in said
    assert all(row["sentence"] in said and row["summary"] not in said for row in outcome.trials)
    assert said.count("4×2") == len(outcome.trials)
    assert found.plot().description.startswith("2 settings.")
    stopped = results.SearchResult(replace(outcome, status="interrupted"))
    assert repr(stopped).startswith("interrupted, best so far, not confirmed")
    html = found._repr_html_()
    assert html.count("<tr>") == len(outcome.trials) + 1
    assert "limit 6.00 MiB" in found.plot().svg
    assert found.plot().save(tmp_path / "front.svg").read_text().startswith("<svg")


def test_trials_are_plain_rows_without_pandas(outcome, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    assert results.SearchResult(outcome).trials[0]["role"] == "baseline"
