"""`memtune replay`: what is printed, the JSON document, and one clear message for each kind of bad file."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from support.memory_snapshots import Row, record

from memtune.cli import run

MIB = 2**20
HOLES: list[Row] = [
    (0, 0, 30 * MIB, 0, 0, -1),
    (0, 1, 30 * MIB, 0, 1, -1),
    (1, 0, 0, 0, 2, -1),
    (1, 1, 0, 0, 3, -1),
    (0, 2, 50 * MIB, 0, 4, -1),
]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(record(HOLES, "garbage_collection_threshold:0.9")[0]))
    return path


def test_replay_prints_a_table(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["replay", str(snapshot), "--set", "expandable_segments=True", "--set", "max_split_size_mb:32"])
        == 0
    )
    assert capsys.readouterr().out.splitlines() == [
        "settings                           reserved  allocated  unused at peak  driver calls  retries",
        "recorded                            110 MiB   60.0 MiB           54.5%             3",
        "garbage_collection_threshold:0.9    110 MiB   60.0 MiB           54.5%             3        0",
        "torch's defaults                    110 MiB   60.0 MiB           54.5%             3        0",
        "expandable_segments:True           60.0 MiB   60.0 MiB            0.0%             2        0",
        "max_split_size_mb:32                110 MiB   60.0 MiB           54.5%             3        0",
        "expandable_segments:True would need the least: 60.0 MiB reserved, 110 MiB recorded",
    ]


def test_replay_prints_a_document(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(snapshot), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    replays = {each["settings"]: each for each in document.pop("replays")}
    assert document == {
        "schema": 1,
        "file": str(snapshot),
        "device": 0,
        "entries": 10,
        "storages_before": 0,
        "capacity_bytes": None,
        "recorded": {
            "settings": "garbage_collection_threshold:0.9",
            "peak_reserved_bytes": 110 * MIB,
            "peak_allocated_bytes": 60 * MIB,
            "fragmentation": pytest.approx(6 / 11),
            "device_allocs": 3,
            "ooms": 0,
        },
        "least": "expandable_segments:True",
        "notes": [],
    }
    assert set(replays) >= {
        "",
        "expandable_segments:True",
        "max_split_size_mb:128",
        "roundup_power2_divisions:8",
    }
    assert replays["expandable_segments:True"] == {
        "settings": "expandable_segments:True",
        "peak_reserved_bytes": 60 * MIB,
        "peak_allocated_bytes": 60 * MIB,
        "fragmentation": 0.0,
        "device_allocs": 2,
        "device_frees": 0,
        "retries": 0,
        "ooms": 0,
        "oom": None,
    }


def test_replay_exits_1_if_nothing_fits(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(snapshot), "--capacity", "45MiB"]) == 1
    assert (
        "none of these fits; garbage_collection_threshold:0.9 fails at entry 3: 30.0 MiB asked for"
        in capsys.readouterr().out
    )
    assert run(["replay", str(snapshot), "--capacity", "45MiB", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["least"] is None
    assert document["replays"][0]["oom"]["entry"] == 3


def test_replay_skips_settings_of_a_newer_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new.pickle"
    path.write_bytes(pickle.dumps(record(HOLES, "quantum_pages:True")[0]))
    assert run(["replay", str(path), "--set", "expandable_segments:True"]) == 0
    printed = capsys.readouterr()
    assert "quantum_pages" in printed.err
    assert "quantum_pages" not in printed.out


def test_replay_of_gmlake_uses_its_knobs(snapshot: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["replay", str(snapshot), "--set", "gmlake", "--set", "gmlake,defragment:false", "--json"]) == 0
    )
    reserved = {
        each["settings"]: each["peak_reserved_bytes"]
        for each in json.loads(capsys.readouterr().out)["replays"]
    }
    assert reserved["gmlake"] == 60 * MIB  # the two holes of 20 and 30 MiB serve the last request
    assert reserved["gmlake,defragment:false"] > 60 * MIB


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gmlake,reuse_limit:99", "reuse_limit"),
        ("gmlake,quick", "quick"),
        ("planned_layout", "does not mark where steps end"),
    ],
)
def test_replay_refuses_allocators_that_need_steps(
    snapshot: Path, capsys: pytest.CaptureFixture[str], given: str, message: str
) -> None:
    assert run(["replay", str(snapshot), "--set", given]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/hacked",)


WHOLE = pickle.dumps(record(HOLES)[0])


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "MT141"),
        (WHOLE[: len(WHOLE) // 2], "MT141"),
        (WHOLE[:-1], "MT141"),
        (b"PK\x03\x04", "MT141"),
        (pickle.dumps({"segments": Hostile()}), "MT142"),
        (pickle.dumps([{"address": 0}]), "MT143"),
        (pickle.dumps({"segments": [], "traces": []}), "MT143"),
        (pickle.dumps({"segments": [], "device_traces": [[]]}), "MT144"),
    ],
)
def test_replay_refuses_bad_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, code: str
) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(data)
    assert run(["replay", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"{code} bad.pickle")
    assert "Fix: " in printed.err
    assert "Traceback" not in printed.err
    assert run(["replay", str(path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--set", "max_split_size_mb=1"], "MT140"),
        (["--set", "max_splt_size_mb=128"], "MT140"),
        (["--capacity", "lots"], "MT203"),
        (["--capacity", "0"], "MT100"),
        (["--device", "3"], "MT144"),
    ],
)
def test_replay_refuses_bad_arguments(
    snapshot: Path, capsys: pytest.CaptureFixture[str], more: list[str], code: str
) -> None:
    assert run(["replay", str(snapshot), *more]) == 2
    assert capsys.readouterr().err.startswith(code)


def test_replay_refuses_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(tmp_path / "none.pickle")]) == 2
    assert capsys.readouterr().err.startswith("MT110")
