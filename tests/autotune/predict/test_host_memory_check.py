"""Too little host memory or SSD space is refused before the run, with the numbers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.search import prepared_search
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.predict.host_memory_check import host_memory_shortage, ssd_shortage
from memtune.autotune.search import preparation as setups
from memtune.autotune.search.plan_report import plan
from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.scoring import Scored, Scorer
from memtune.autotune.space.search_options import PlanOptions
from memtune.offload.optimizer.host_capacity import available_bytes
from memtune.ssd import offload_dir
from memtune.technique import Reason
from memtune.units import format_bytes, parse_bytes

ON_HOST = {"execution": {"micro_batch": 4}, "offload": {"states": {"kind": "zero_offload"}}}


def test_host_memory_shortage_counts_all_ranks_of_a_host() -> None:
    made = prepared_search.rewriter("gpt")
    choice = Choice.from_document(ON_HOST)
    fitting = Scorer(made, host_bytes=1 << 50).score(choice)
    assert isinstance(fitting, Scored)
    needed = fitting.prediction.host_peak_bytes
    assert isinstance(Scorer(made, host_bytes=needed).score(choice), Scored)
    for level in ("coarse", "events"):
        refused = Scorer(made, host_bytes=needed - 1).score(choice, level=level)  # type: ignore[arg-type]
        assert isinstance(refused, Reason)
        assert (
            f"needs {format_bytes(needed)} of host memory, and {format_bytes(needed - 1)} are available"
            in str(refused)
        )
    several = replace(made.target, ranks=2)
    shared = host_memory_shortage(fitting.prediction, several, 2 * needed - 1)
    assert f"{format_bytes(2 * needed)} of host memory for 2 ranks of {format_bytes(needed)} each" in str(
        shared
    )
    assert host_memory_shortage(fitting.prediction, several, 2 * needed) is None


def test_plan_keeps_within_the_gpus_share_of_a_typical_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMTUNE_GPT_SIZE", "tiny")
    card = hardware.find("a100-40g")
    options = PlanOptions(workload=str(ZOO["gpt"]), ranks=2, gpu_type="a100-40g", axes=("offload.states",))
    begun = prepared_search.Probed()
    found = plan(options, begun=begun)  # type: ignore[arg-type]
    assert found.facts["host_memory_bytes"] == card.host_memory_bytes * 2 // card.gpus_per_node
    assert not any("of host memory" in reason for reason in found.refused)
    least = min(each.details["host_peak_bytes"] for each in found.rows if "zero_offload" in each.summary)
    short = plan(replace(options, host_memory_bytes=least), begun=begun)  # type: ignore[arg-type]
    assert any(f"needs {format_bytes(2 * least)} of host memory" in reason for reason in short.refused)


@pytest.mark.parametrize("host_bytes", [1, 10_000])  # all settings are refused; the plain one is not
def test_plan_without_enough_host_memory_says_how_much_suffices(host_bytes: int) -> None:
    budget = 6 << 20
    options = PlanOptions(
        workload=str(ZOO["gpt"]),
        device="cpu",
        budget_bytes=budget,
        axes=("offload.states",),
        host_memory_bytes=host_bytes,
    )
    found = plan(options, begun=prepared_search.Probed())  # type: ignore[arg-type]
    assert not found.front
    first = found.remedies[0]
    assert first.change.startswith("--host-memory ")
    assert first.peak_bytes <= budget
    enough = replace(options, host_memory_bytes=parse_bytes(first.change.removeprefix("--host-memory ")))
    assert plan(enough, begun=prepared_search.Probed()).front  # type: ignore[arg-type]


def test_plan_reports_host_memory_shortage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (available_bytes() or 0) > 0
    config = tmp_path / "config.yaml"
    config.write_text(
        "memtune: 1\nsettings:\n  execution: {micro_batch: 4}\n  offload: {states: {kind: zero_offload}}\n"
    )
    monkeypatch.setattr(setups, "available_bytes", lambda: 1000)
    found = plan(
        PlanOptions(workload=str(ZOO["gpt"]), config=config, device="cpu"),
        begun=prepared_search.Probed(),  # type: ignore[arg-type]
    ).config
    assert found is not None
    assert found.status == "unfit"
    assert f"of host memory, and {format_bytes(1000)} are available" in found.reason


def test_ssd_shortage_gives_needed_and_free_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, "/nothing-is-written")
    made = prepared_search.rewriter("gpt")
    choice = Choice.from_document(
        {"execution": {"micro_batch": 4}, "offload": {"states": {"kind": "zero_infinity"}}}
    )
    fitting = Scorer(made).score(choice)
    assert isinstance(fitting, Scored)
    needed = fitting.prediction.ssd_peak_bytes
    assert isinstance(Scorer(made, ssd_bytes=needed).score(choice), Scored)
    refused = Scorer(made, ssd_bytes=needed - 1).score(choice)
    assert f"needs {format_bytes(needed)} on SSD, and {format_bytes(needed - 1)} are free" in str(refused)
    shared = ssd_shortage(fitting.prediction, replace(made.target, ranks=2), 2 * needed - 1)
    assert f"for 2 ranks of {format_bytes(needed)} each" in str(shared)


def test_ssd_shortage_doubles_need_of_resumable_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all techniques that keep steps; the file itself is no larger."""
    monkeypatch.setenv(offload_dir.VARIABLE, "/nothing-is-written")
    made = prepared_search.rewriter("gpt")
    for states in ({"kind": "zero_infinity"}, {"kind": "lohan"}, {"kind": "angel_ptm", "optimizer": "ssd"}):
        choice = Choice.from_document(
            {"execution": {"micro_batch": 4}, "offload": {"states": {**states, "resume": "last_step"}}}
        )
        fitting = Scorer(made).score(choice)
        assert isinstance(fitting, Scored)
        needed = 2 * fitting.prediction.ssd_peak_bytes
        assert isinstance(Scorer(made, ssd_bytes=needed).score(choice), Scored)
        refused = Scorer(made, ssd_bytes=needed - 1).score(choice)
        assert f"needs {format_bytes(needed)} on SSD, half of it to go on from a run that ended" in str(
            refused
        )


def test_free_ssd_bytes_count_each_drive_once_without_leftovers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(offload_dir.VARIABLE, raising=False)
    assert offload_dir.free_bytes() is None
    for name in "ab":
        (tmp_path / name).mkdir()
    monkeypatch.setenv(offload_dir.VARIABLE, f"{tmp_path}/a:{tmp_path}/b")
    drive = os.statvfs(tmp_path)
    assert offload_dir.free_bytes() == pytest.approx(drive.f_bavail * drive.f_frsize, rel=0.05)
    dead = tmp_path / "a" / "memtune-run-1"
    dead.mkdir()
    with open(dead / "tensors", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 2**20)
    one = type("Drive", (), {"f_bavail": 10, "f_frsize": 100})
    monkeypatch.setattr(os, "statvfs", lambda _: one)
    assert offload_dir.free_bytes() == 1000 + 2**20
    (dead / "manifest-0").touch()
    assert offload_dir.free_bytes() == 1000
    monkeypatch.setenv(offload_dir.VARIABLE, f"{tmp_path}/missing")
    assert offload_dir.free_bytes() is None
