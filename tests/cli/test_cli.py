"""The command line as its users meet it: a process, its two streams, its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.zoo_paths import ZOO

from memtune import cli
from memtune.cli._commands import failure_text
from memtune.config.tuned_config import load_config, save
from memtune.errors import Interrupted
from memtune.executors.base import TrialResult
from memtune.ssd import offload_dir

ROOT = Path(__file__).parents[2]
TINY = """\
import torch
from torch import nn

print("printed by model.py")

def model():
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

def batch(size):
    return torch.randn(size, 16), torch.randn(size, 16)

def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

global_batch = 4
"""
HAS_GPU = Path("/dev/nvidiactl").exists()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(TINY)
    (tmp_path / "broken.py").write_text("def model(:\n")
    (tmp_path / "c.yaml").write_text("settings:\n  execution: {micro_batch: 2}\n")
    study = tmp_path / ".memtune" / "old"
    study.mkdir(parents=True)
    (study / "study.json").write_text("{}")
    (tmp_path / "gpu.yaml").write_text("settings:\n  allocator: {kind: expandable_segments}\n")
    return tmp_path


def memtune(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memtune", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **env},
        timeout=240,
        check=False,
    )


BAD = [
    ("serch model.py", 2, "Did you mean 'search'"),
    ("config chek c.yaml", 2, "Did you mean 'check'"),
    ("search model.py --goa memory", 2, "--goal"),
    ("search", 2, "MODEL.PY"),
    ("search model.py --nodes", 2, "memtune search --help"),
    ("search model.py --trials none --device cpu", 2, "integer"),
    ("search nope.py --device cpu", 2, "no file nope.py"),
    ("plan modle.py", 2, "Here: model.py"),
    ("plan broken.py", 2, "does not parse, line 1"),
    ("plan model.py --micro-batch 2", 2, "--freeze micro_batch=2"),
    ("init Llama --out model.py", 2, "model.py exists"),
    ("search model.py --device tpu", 2, "--device cpu or cuda"),
    ("search model.py --device cpu --gpus 2", 2, "--device cpu --workers 2"),
    ("search model.py --device cpu --max-memory plenty", 2, "24GiB"),
    ("search model.py --device cpu --max-memory 0", 2, "no memory"),
    ("search model.py --device cpu --max-memory 12", 2, "Fix: --max-memory 12GiB"),
    ("search model.py --device cpu --time soon", 2, "30m"),
    ("search model.py --device cpu --time 0s", 2, "no time for a trial"),
    ("search model.py --device cpu --goal throughputs", 2, "Did you mean 'throughput'"),
    ("search model.py --device cpu --executor rays", 2, "Did you mean 'ray'"),
    ("search model.py --device cpu --axes recompte", 2, "Did you mean 'recompute'"),
    ("search model.py --device cpu --freeze recompute", 2, "--freeze recompute=full"),
    ("search model.py --device cpu --freeze recompute=ful", 2, "Did you mean 'full'"),
    ("search model.py --device cpu --freeze recompte=full", 2, "Did you mean 'recompute'"),
    ("search model.py --device cpu --out c.yaml", 2, "--force"),
    ("search model.py --device cpu --out missing/tuned.yaml", 3, "cannot be written"),
    ("search model.py --device cpu --out /proc/tuned.yaml", 3, "cannot be written"),
    ("plan model.py --device cpu --config nope.yaml", 2, "no file nope.yaml"),
    ("plan model.py --gpu-type h100-80x", 2, "Fix: use h100-80g"),
    ("plan model.py --device cpu --why-not selectiv", 2, "Did you mean 'selective'"),
    ("plan model.py --device cpu --out c.yaml", 2, "--force"),
    ("search model.py --device cpu --executor local --ray-address auto", 2, "leave one of the two out"),
    ("explain c.yaml --why-not full", 2, "add --model model.py"),
    ("search model.py --device cpu --study old", 2, "add --resume, or --study another"),
    ("trial model.py --device cpu --config nope.yaml", 2, "no file nope.yaml"),
    ("run nope.yaml -- true", 2, "no file nope.yaml"),
    ("run c.yaml", 2, "memtune run c.yaml -- python train.py"),
    ("run c.yaml -- no-such-program", 2, "no command no-such-program"),
    ("run c.yaml -- no-such-program --json", 2, "no command no-such-program"),
    ("techniques --matrix full", 2, "memtune techniques full"),
    ("explain model.py", 2, "a Python file, not a config"),
    ("init llama --out missing/model.py", 3, "cannot be written"),
    ("report old --out c.yaml", 3, "no study old"),
    ("watch nothing", 3, "no study nothing"),
]


@pytest.mark.parametrize(("line", "code", "words"), BAD, ids=[each[0] for each in BAD])
def test_cli_error_prints_one_message_and_its_exit_code(
    line: str,
    code: int,
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(folder)
    assert cli.run(line.split()) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith("MT")
    assert "Traceback" not in err
    assert sorted(each.name for each in folder.iterdir()) == [
        ".memtune",
        "broken.py",
        "c.yaml",
        "gpu.yaml",
        "model.py",
    ]
    assert [each.name for each in (folder / ".memtune").rglob("*")] == ["old", "study.json"]


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@pytest.mark.parametrize("more", [[], ["--gpus", "4"]])
def test_missing_gpu_error_names_the_cpu_flag(
    more: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    assert cli.run(["search", "model.py", *more]) == 3
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_early_refusals_load_no_torch(folder: Path):
    code = (
        "import sys; from memtune import cli; codes = [cli.run(line.split()) for line in ('search model.py',"
        " 'search nope.py --device cpu', 'plan broken.py', 'init Llama --out model.py',"
        " 'config check c.yaml', 'plan model.py --gpu-type h100-80x',"
        " 'search model.py --device cpu --study old')]; print(codes, 'torch' in sys.modules,"
        " 'optuna' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[3, 2, 2, 2, 0, 2, 2] False False"


def test_help_lists_the_commands_and_exit_codes_and_loads_nothing_heavy(folder: Path):
    done = memtune(folder, "--help")
    assert done.returncode == 0
    assert all(
        name in done.stdout
        for name in ("search", "plan", "trial", "run", "techniques", "explain", "doctor", "watch")
    )
    assert "130 interrupted" in done.stdout
    code = (
        "import sys; from memtune import cli; cli.run(['--help']); print([m for m in %r if m in sys.modules])"
    )
    heavy = ["torch", "numpy", "optuna", "ray", "textual", "ruamel.yaml"]
    loaded = subprocess.run(
        [sys.executable, "-c", code % heavy],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert loaded.stdout.splitlines()[-1] == "[]"


def test_loading_keeps_threads_from_spinning_and_leaves_the_environment_to_trials():
    code = (
        "import os\nfrom memtune.cli._search import loading\nwith loading():\n    import numpy\n"
        "    print(os.environ['OMP_WAIT_POLICY'])\n"
        "names = 'OPENBLAS_NUM_THREADS', 'OMP_WAIT_POLICY'\n"
        "print(len(os.listdir('/proc/self/task')), *(os.environ.get(name) for name in names))"
    )
    for given, found in (
        ({}, "passive\n1 None None\n"),
        ({"OMP_WAIT_POLICY": "active"}, "active\n1 None active\n"),
        ({"OPENBLAS_NUM_THREADS": "2"}, " 2 None\n"),
    ):
        names = "OPENBLAS_NUM_THREADS", "OMP_WAIT_POLICY"
        env = {name: value for name, value in os.environ.items() if name not in names}
        env |= {"PYTHONPATH": str(ROOT), **given}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.stdout.endswith(found), done.stderr


def test_no_color_means_no_escape_sequences(folder: Path):
    assert "\x1b" in memtune(folder, "--help", FORCE_COLOR="1").stdout
    assert "\x1b" not in memtune(folder, "--help", NO_COLOR="1").stdout


@pytest.mark.parametrize(
    "line", ["search nope.py --json", "techniques --jsn --json", "config check nope.yaml --json"]
)
def test_errors_with_json_are_one_document(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    assert cli.run(line.split()) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == 1
    assert set(document["error"]) == {"code", "what", "evidence", "fix"}


def test_techniques_as_json(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["techniques", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(set(row) == {"axis", "kind", "title", "source", "paper", "exactness"} for row in rows)
    assert {"axis": "allocator", "kind": "expandable_segments"}.items() <= {
        key: value for row in rows if row["kind"] == "expandable_segments" for key, value in row.items()
    }.items()


def test_techniques_describes_one_with_its_knobs(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["techniques", "every_nth"]) == 0
    said = capsys.readouterr().out
    assert "recompute: {kind: every_nth}" in said
    assert "n = 2: One block in n is recomputed" in said
    assert cli.run(["techniques", "lohan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["axis"] for each in found] == ["recompute", "offload.states"]
    assert cli.run(["techniques", "zerro3"]) == 2
    assert "Did you mean 'zero3'?" in capsys.readouterr().err


def test_techniques_matrix_lists_pairs_and_reasons(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["techniques", "--matrix"]) == 0
    rows, _, legend = capsys.readouterr().out.partition("\n\n")
    head, table = rows.splitlines()[:2], rows.splitlines()[2:]
    assert len({len(row) for row in [head[0], *table]}) == 1
    legend, _, by_knobs = legend.partition("\n\n")
    assert "angel_ptm (lock_free: true) with sharding.states: ddp: each rank's thread" in by_knobs
    said = {line[0]: line[3:] for line in legend.splitlines()}
    row = next(row for row in table if "recompute: dtr " in row)
    assert said[row[-1]] == "a recorded schedule replaces the model's code, compiled or not"
    assert cli.run(["techniques", "--matrix", "--json"]) == 0
    found = {
        tuple(row[name] for name in ("kind", "with_kind")): row for row in json.loads(capsys.readouterr().out)
    }
    assert found["full", "fsdp"] == {
        "axis": "recompute",
        "kind": "full",
        "with_axis": "sharding.states",
        "with_kind": "fsdp",
        "works": True,
        "reason": None,
        "fix": None,
    }
    assert found["dtr", "true"]["works"] is False
    assert found["dtr", "true"]["fix"] == "execution.compile: false"


def test_trial_and_plan_print_one_document_whatever_the_model_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    for command in ("trial", "plan"):
        code = cli.run([command, "model.py", "--config", "c.yaml", "--device", "cpu", "--json"])
        out, err = capfd.readouterr()
        assert code == 0, err
        document = json.loads(out)
        assert document["status"] == "ok"
        assert document["peak_allocated_bytes"] > 0
        assert document["peak_reserved_bytes"] > 0
        assert document["step_s"] > 0
        if command == "trial":
            assert len(document["loss"]) >= 3
            assert len(document["gradients_sha256"]) == 64


@pytest.mark.slow
def test_trial_out_of_memory_exits_1(folder: Path):
    done = memtune(
        folder, "trial", "model.py", "--config", "c.yaml", "--device", "cpu", "--max-memory", "1KiB", "--json"
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["status"] == "oom"


def test_run_becomes_the_command_with_the_environment_of_the_config(folder: Path):
    show = "import os, sys; print(os.environ['PYTORCH_ALLOC_CONF'], sys.argv[1:]); sys.exit(7)"
    done = memtune(folder, "run", "gpu.yaml", "--", sys.executable, "-c", show, "--json", "-v")
    assert done.stdout == "expandable_segments:True ['--json', '-v']\n"
    assert done.returncode == 7


def test_config_show_is_a_config(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    assert cli.run(["config", "show", "gpu.yaml"]) == 0
    assert load_config(capsys.readouterr().out) == load_config(folder / "gpu.yaml")
    assert cli.run(["config", "check", "gpu.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_config_schema_accepts_what_load_config_does(capsys: pytest.CaptureFixture[str]):
    jsonschema = pytest.importorskip("jsonschema")
    assert cli.run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(
        {"settings": {"recompute": {"kind": "full"}, "execution": {"micro_batch": 2}}}, schema
    )
    for bad in (
        {"settings": {"recompute": {"kind": "fulll"}}},
        {"settings": {"recompute": {}}},
        {"settings": {"allocator": {"kind": "native", "max_split_size_mb": "128"}}},
        {"setings": {}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


def test_explain_names_source_and_exactness(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    assert cli.run(["explain", "gpu.yaml"]) == 0
    short = capsys.readouterr().out
    assert "allocator            lets PyTorch's allocator grow its segments" in short
    assert "PyTorch, CUDA semantics" not in short
    assert cli.run(["explain", "gpu.yaml", "--verbose"]) == 0
    said = capsys.readouterr().out
    assert "Expandable segments" in said
    assert "bitwise" in said
    assert cli.run(["explain", "gpu.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"][0]["slot"] == "allocator"


@pytest.mark.parametrize("confirmed", [True, False])
def test_explain_marks_an_unconfirmed_measurement(
    confirmed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = {
        "settings": {"recompute": {"kind": "full"}},
        "measured": {"samples_per_s": 12.0},
        "certificate": {"confirmed_in_fresh_process": confirmed},
    }
    save(load_config(config), tmp_path / "tuned.yaml")
    assert cli.run(["explain", str(tmp_path / "tuned.yaml")]) == 0
    assert (
        "12.0 samples/s, best so far of a search that was stopped" in capsys.readouterr().out
    ) != confirmed


def test_explain_reports_a_crash_of_the_model(folder: Path):
    (folder / "crashing.py").write_text(
        TINY.replace("def model():\n", "def model():\n    import os; os.abort()\n")
    )
    done = memtune(folder, "explain", "c.yaml", "--model", "crashing.py", "--device", "cpu", "--json")
    assert done.returncode == -signal.SIGABRT
    assert done.stderr.count("MT113 crashing.py crashed the process in model(), line 7:  Aborted.") == 1
    assert json.loads(done.stdout)["error"]["code"] == "MT113"


@pytest.mark.drawn(2)
@pytest.mark.parametrize("more", [["--config", "c.yaml"], ["--axes", "recompute"]])
@pytest.mark.parametrize(("budget", "code"), [("4KiB", 1), ("1GiB", 0)])
def test_plan_without_a_fit_exits_1(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    budget: str,
    code: int,
):
    monkeypatch.chdir(folder)
    assert cli.run(["plan", "model.py", *more, "--device", "cpu", "--max-memory", budget, "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    feasible = document["status"] == "ok" if "--config" in more else bool(document["front"])
    assert feasible == (code == 0)


def test_clean_removes_what_dead_runs_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    left = tmp_path / "memtune-run-1-x"
    left.mkdir(mode=0o700)
    (left / "tensors").write_bytes(bytes(5000))
    (kept := tmp_path / "memtune-run-2-x").mkdir(mode=0o700)
    (kept / "manifest-0").touch()
    assert cli.run(["clean", str(tmp_path)]) == 0
    dead, resumable = capsys.readouterr().out.splitlines()
    assert str(left) in dead
    assert "could have been resumed" not in dead
    assert f"{kept}: 0 B, from which training could have been resumed" in resumable
    assert not left.exists()
    assert cli.run(["clean", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == []
    assert cli.run(["clean", str(tmp_path / "missing")]) == 3


def test_clean_removes_temporary_files_of_dead_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("MEMTUNE_OFFLOAD_DIR", raising=False)
    (left := tmp_path / "memtune-run-1-x").mkdir(mode=0o700)
    mine = offload_dir.RunFolder.temporary()  # removes it, as `memtune clean` does
    assert [each.name for each in tmp_path.iterdir()] == [mine.path.name]
    left.mkdir(mode=0o700)
    assert cli.run(["clean"]) == 0
    assert str(left) in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == [mine.path.name]
    mine.remove()


def test_trial_message_is_printed_once():
    said = (
        "MT366 The host has too little memory: 9 GiB are needed.\n      As predicted.\n      Fix: offload"
        " less"
    )
    reason = "rank 1: " + " ".join(said.split())
    result = TrialResult(number=0, status="unfit", code="MT366", reason=reason, log_tail=f"loading\n{said}")
    assert failure_text(result) == f"loading\nunfit: rank 1: {said}"
    assert (
        failure_text(result.model_copy(update={"reason": reason[:40]})) == f"loading\nunfit: rank 1: {said}"
    )
    assert failure_text(result.model_copy(update={"log_tail": "loading"})) == f"unfit: {reason}\nloading"
    crash = TrialResult(number=0, status="crash", reason="ValueError: x", log_tail="Traceback\nValueError: x")
    assert failure_text(crash) == "crash: ValueError: x\nTraceback\nValueError: x"


@pytest.mark.slow
def test_trial_without_an_offload_directory_exits_3(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.delenv("MEMTUNE_OFFLOAD_DIR", raising=False)
    config = tmp_path / "c.yaml"
    config.write_text(
        "memtune: 1\nsettings: {execution: {micro_batch: 4}, offload: {states: {kind: zero_infinity}}}\n"
    )
    assert (
        cli.run(["trial", str(ZOO["gpt"]), "--config", str(config), "--device", "cpu", "--workers", "1"]) == 3
    )
    assert capfd.readouterr().err.count("MT361 No directory for tensors on SSD was given.") == 1


@pytest.mark.slow
def test_trial_without_ssd_space_is_unfit_once(tmp_path: Path):
    """A file may not grow beyond 1 MiB; no plan is made, because none would help."""
    config = tmp_path / "c.yaml"
    config.write_text(
        "memtune: 1\nsettings: {execution: {micro_batch: 4}, offload: {states: {kind: zero_infinity}}}\n"
    )
    (drive := tmp_path / "drive").mkdir()
    limit = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,) * 2);"
        " os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [
        sys.executable,
        "-m",
        "memtune",
        "trial",
        str(ZOO["gpt"]),
        "--config",
        str(config),
        "--device",
        "cpu",
    ]
    command += ["--offload-dir", str(drive)]
    done = subprocess.run(
        [sys.executable, "-c", limit, *command], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert "unfit: MT362 There is no room for the optimizer state of" in done.stderr
    assert done.stderr.count("MT362") == 1
    assert "ulimit -f" in done.stderr
    assert "recording" not in done.stderr
    assert not list(drive.iterdir())


def test_doctor_reports_the_machine(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 2**20
    assert facts["torch"]


def test_bug_writes_its_traceback_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from memtune.cli import _commands

    def broken(as_json: bool) -> int:
        raise KeyError("lost")

    monkeypatch.setattr(_commands, "doctor", broken)
    monkeypatch.setenv("MEMTUNE_CACHE", str(tmp_path))
    assert cli.run(["doctor"]) == 4
    said = capsys.readouterr().err
    (file,) = tmp_path.glob("traceback-*.txt")
    assert str(file) in said
    assert "Traceback" not in said
    assert "KeyError: 'lost'" in file.read_text()


def test_bug_prints_its_traceback_if_no_file_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from memtune.cli import _commands

    monkeypatch.setattr(_commands, "doctor", lambda as_json: 1 // 0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMTUNE_CACHE", str(tmp_path / "file" / "cache"))
    assert cli.run(["doctor"]) == 4
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_output_fits_an_encoding_without_its_characters():
    command = [sys.executable, "-c", "from memtune.cli import main; main(['--help'])"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=ascii_only, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Exit codes: 0 done ? 1 nothing feasible" in " ".join(done.stdout.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_behind_stdout_is_one_message():
    command = [sys.executable, "-c", "from memtune.cli import main; main(['techniques'])"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("MT402 a disk is full.")
    assert "Exception" not in done.stderr


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from memtune.cli import _commands

    def interrupted(as_json: bool) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(_commands, "doctor", interrupted)
    assert cli.run(["doctor"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_verbose_prints_the_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    assert cli.run(["-v", "config", "check", "nope.yaml"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.slow
def test_trial_of_settings_alone_makes_a_plan_or_names_the_least_budget(tmp_path: Path) -> None:
    gpt = ROOT / "tests" / "zoo" / "gpt.py"
    large = ROOT / "tests" / "support" / "models" / "tiling" / "language_models.py:large"
    for model, setting, code, said in (
        (
            gpt,
            "recompute: {kind: planned, budget_bytes: 1000000}",
            1,
            r"no plan stays within 967 KiB .*: the smallest needs \d",
        ),
        (gpt, "recompute: {kind: planned, share: 0.3}", 0, ""),
        (
            large,
            "offload: {activations: {kind: tsplit, share: 0.3, min_bytes: 64}}",
            0,
            "splits nothing: no submodule",
        ),
    ):
        settings = f"{{execution: {{micro_batch: 2}}, {setting}}}"
        (tmp_path / "c.yaml").write_text(f"memtune: 1\nsettings: {settings}\n")
        done = memtune(tmp_path, "trial", str(model), "--config", "c.yaml", "--device", "cpu")
        assert done.returncode == code, done.stderr
        assert re.search(said, done.stderr), done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "line",
    ["explain gpu.yaml", "trial model.py --config c.yaml --device cpu", "plan model.py --gpu-type v100"],
)
def test_header_is_printed_before_torch_loads(line: str, folder: Path):
    (folder / "torch.py").write_text("import sys\nsys.exit('torch loads')\n")
    said = memtune(folder, *line.split()).stderr.splitlines()
    assert said[0].startswith(f"memtune {' '.join(line.split()[:2])}")
    assert said[-1] == "torch loads"


def test_python_call_shows_a_phase_while_torch_loads(folder: Path):
    (folder / "torch.py").write_text("import sys\nsys.exit('torch loads')\n")
    done = subprocess.run(
        [sys.executable, "-c", "import memtune; memtune.plan('model.py', gpu_type='a100-40g')"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr.splitlines()[0].startswith("loading torch")
    assert done.stderr.splitlines()[-1] == "torch loads"


def test_interruption_has_one_message_and_the_code_of_its_signal():
    from memtune.autotune.search import Control
    from memtune.cli._search import _interruptible

    control = Control()
    control.interrupt(143)
    with pytest.raises(Interrupted, match="before the first trial") as raised, _interruptible(control):
        raise KeyboardInterrupt
    assert raised.value.exit_code == 143
