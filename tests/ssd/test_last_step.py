"""A run that is killed at any moment resumes from its last complete step, to the bit, or restarts if asked
to.
"""

from __future__ import annotations

import fcntl
import gc
import os
import shutil
import signal
import threading
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support.gloo import FRESH, run_ranks
from support.killed_training import (
    STEPS,
    end_updaters,
    fresh,
    kill_at_act,
    model_for,
    run,
    same,
    tuned_of,
)
from torch import nn

import memtune
from memtune.errors import EnvironmentFault
from memtune.ssd import last_step, offload_dir, ssd_tensors
from memtune.ssd.last_step import Manifest, dead_runs
from memtune.ssd.ssd_file import TENSORS


def killed_and_resumed(tmp_path: Path, acts: range, again: int = -1, resume: str = "last_step") -> int:
    """Kill at each of `acts`, resume (killed once more at act `again`), and compare; return the number of
    kills.
    """
    plain = tmp_path / "plain"
    assert run(tmp_path_of(tmp_path, "plain"), plain, resume=resume) == 0
    kills = 0
    for act in acts:
        directory, log = tmp_path_of(tmp_path, f"{act}"), tmp_path / f"log{act}"
        if run(directory, log, act, resume) == 0:
            break
        kills += 1
        done = sum(line.startswith("done") for line in log.read_text().splitlines()) if log.exists() else 0
        if again >= 0:
            run(directory, tmp_path / f"again{act}", again, resume)
        resumed = tmp_path / f"resumed{act}"
        assert run(directory, resumed, resume=resume) == 0
        start = int(resumed.read_text().split()[1])
        if done < STEPS:  # else it was killed when no step needed to be kept any more
            assert start in (done, done + 1) or (again >= 0 and start > done), (act, start, done)
        same(resumed, plain)
        assert not list(directory.iterdir())  # `finish` removes everything
    return kills


def tmp_path_of(tmp_path: Path, name: str) -> Path:
    (tmp_path / f"dir-{name}").mkdir()
    return tmp_path / f"dir-{name}"


def test_resume_after_kill_is_bitwise(tmp_path: Path) -> None:
    """At three of the acts of `apply` and three steps; at all of them in the slow tier."""
    assert killed_and_resumed(tmp_path, range(20, 60, 14)) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "acts", "least"), [("ssd", 140, 6), ("pages", 200, 5)])
def test_resume_with_ssd_parameters_is_bitwise(tmp_path: Path, kind: str, acts: int, least: int) -> None:
    """Weights on SSD are rebuilt from the kept masters, their pages on the host from the resumed records."""
    assert killed_and_resumed(tmp_path, range(20, acts, 17), resume=f"last_step,{kind}") >= least


def test_resume_after_kill_in_backward_is_bitwise(tmp_path: Path) -> None:
    """Pieces written in backward are not those of the last complete step."""
    assert killed_and_resumed(tmp_path, range(56, 57), resume="last_step,lohan") == 1


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_resume_with_early_updates_is_bitwise(tmp_path: Path) -> None:
    assert killed_and_resumed(tmp_path, range(20, 200, 5), resume="last_step,lohan") > 12


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_resume_after_kill_of_writing_updaters_is_bitwise(tmp_path: Path) -> None:
    """All updaters share one manifest; each has a slot that the running step does not write."""
    assert killed_and_resumed(tmp_path, range(84, 85), resume="last_step,updaters") == 1


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_resume_with_updaters_is_bitwise(tmp_path: Path) -> None:
    """Orders to updaters are acts too; those of a dead trainer may end while the resume runs."""
    assert killed_and_resumed(tmp_path, range(22, 2000, 11), resume="last_step,updaters") > 10


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("again", [-1, 20, 33])
def test_resume_after_kill_at_every_durable_act(tmp_path: Path, again: int) -> None:
    assert killed_and_resumed(tmp_path, range(200), again) > 40


def train_and_use_the_drive_for_more(directory: str) -> None:
    """Train one step; then continue without the model, write other tensors, and end abruptly."""
    os.environ[offload_dir.VARIABLE] = directory
    tuned = tuned_of(fresh(), "last_step")
    tuned.step([torch.randn(4, 6)])
    del tuned
    gc.collect()
    place, kept = ssd_tensors.current(), []
    for index in range(100):
        kept.append(place.tensor(f"other.{index}", torch.empty(1000)))
        place.store(kept[-1], torch.randn(1000)).result()
    os.kill(os.getpid(), signal.SIGKILL)


def test_step_is_kept_after_its_optimizer_is_deleted(tmp_path: Path) -> None:
    child = FRESH.Process(target=train_and_use_the_drive_for_more, args=(str(tmp_path),))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    log = tmp_path.with_name(f"{tmp_path.name}.log")
    assert run(tmp_path, log) == 0
    assert log.read_text().splitlines()[0] == "start 1"
    assert not list(tmp_path.iterdir())


def test_resume_checkpoint_keeps_no_step(tmp_path: Path) -> None:
    directory, log = tmp_path_of(tmp_path, "d"), tmp_path / "log"
    assert run(directory, log, kill_at=20, resume="checkpoint") != 0
    assert run(directory, log, resume="checkpoint") == 0
    assert [line for line in log.read_text().splitlines() if line.startswith("start")] == [
        "start 0",
        "start 0",
    ]
    assert not list(directory.iterdir())


def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a run that was killed after its first step."""
    directory = tmp_path_of(tmp_path, "kept")
    assert run(directory, tmp_path / "log", kill_at=40) != 0
    monkeypatch.setenv(offload_dir.VARIABLE, str(directory))
    (folder,) = directory.iterdir()
    return folder


def test_damaged_piece_raises_and_leaves_the_model_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kept(tmp_path, monkeypatch)
    manifest = max(
        (Manifest.read(each) for each in folder.glob("manifest-*")), key=lambda each: each.step if each else 0
    )
    assert manifest is not None
    with open(folder / TENSORS, "r+b") as file:
        file.seek(manifest.pieces[-1].offset)
        (right,) = file.read(1)
        file.seek(manifest.pieces[-1].offset)
        file.write(bytes([right ^ 1]))
    model = fresh()
    with pytest.raises(EnvironmentFault, match=r"the optimizer state of 1\.bias") as caught:
        tuned_of(model, "last_step")
    assert caught.value.code == "MT363"
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), fresh().parameters(), strict=True)
    )
    assert folder.exists()  # the user decides about the rest
    assert [left.path for left in offload_dir.clean(folder.parent) if left.resumable] == [folder]


def test_truncated_or_changed_manifest_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kept(tmp_path, monkeypatch)
    place = next(folder.glob("manifest-*"))
    text = place.read_bytes()
    assert Manifest.read(place) is not None
    for wrong in (
        b"",
        text[:-1],
        text[: len(text) // 2],
        text[:50] + b"0" + text[51:],
        b"\xff" * 300,
        b"{}\n",
    ):
        if wrong != text:
            place.write_bytes(wrong)
            assert Manifest.read(place) is None


@pytest.mark.parametrize("other", ["", ",updaters"])
def test_finish_leaves_the_process_ready_for_another_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """As in a notebook; a step that another model keeps is still there."""
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    kept = tuned_of(nn.Sequential(nn.Linear(6, 3)), "last_step")
    kept.step([torch.randn(4, 6)])
    ends = []
    for _ in range(2):
        tuned = tuned_of(model_for(f"last_step{other}"), f"last_step{other}")
        assert tuned.resumed_steps == 0
        generator = torch.Generator().manual_seed(5)
        for _ in range(2):
            tuned.step([torch.randn(4, 6, generator=generator)])
        ends.append(tuned.state_dict()["model"])
        tuned.finish()
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert len(list(tmp_path.glob("*/manifest-*-[01]"))) == 1
    kept.finish()
    assert not list(tmp_path.glob("*/manifest-*-[01]"))
    end_updaters()


def test_resume_searches_all_allowed_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive added since is first in the list; a missing one is ignored."""
    folder = kept(tmp_path, monkeypatch)
    roots = [tmp_path_of(tmp_path, "new"), tmp_path / "gone", folder.parent]
    monkeypatch.setenv(offload_dir.VARIABLE, os.pathsep.join(map(str, roots)))
    tuned = tuned_of(fresh(), "last_step")
    assert tuned.resumed_steps == 1
    tuned.step([torch.randn(4, 6)])
    assert not folder.exists()  # the step after it is kept in the first one
    tuned.finish()


def test_failed_manifest_write_raises_with_place_and_reason(tmp_path: Path) -> None:
    with pytest.raises(
        EnvironmentFault, match="Step 3 cannot be kept for resuming: its folder was removed"
    ) as caught:
        Manifest("key" * 20, 3, [], []).write(tmp_path / "memtune-run-1-abc")
    assert (caught.value.code, caught.value.evidence) == ("MT365", f"In {tmp_path}.")
    assert "free space" not in caught.value.fix


def test_step_of_another_model_is_neither_resumed_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = kept(tmp_path, monkeypatch)
    assert tuned_of(nn.Linear(3, 3), "last_step").resumed_steps == 0
    assert folder.exists()


@pytest.mark.slow
def test_repeated_crashes_do_not_fill_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run keeps the step that it resumed until it has completed one; none completes one."""
    folder = kept(tmp_path, monkeypatch)
    for n in range(3):
        shutil.copytree(folder, folder.parent / f"memtune-run-{n}-same")
    tuned = tuned_of(fresh(), "last_step")
    assert tuned.resumed_steps > 0
    assert len(list(folder.parent.iterdir())) == 2, "one of the four, and this process's own"


def test_remove_of_a_dead_run_that_a_crash_interrupts_leaves_no_manifest(tmp_path: Path) -> None:
    """Otherwise the next training would resume from tensors that are gone."""
    folder = tmp_path / "memtune-run-1"
    folder.mkdir()
    (folder / "owner").touch()
    Manifest("key" * 20, 3, [], []).write(folder)
    (run,) = dead_runs([tmp_path], "key" * 20)
    with (
        patch("shutil.rmtree", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        run.remove()
    assert [each.name for each in folder.iterdir()] == ["owner"]
    run.release()


def test_rank_finds_its_step_while_other_ranks_check_its_folder(tmp_path: Path) -> None:
    """Ranks start together; each checks whether the folders of all are dead, and holds their locks for a
    moment.
    """
    folder = tmp_path / "memtune-run-1"
    folder.mkdir()
    with open(folder / "owner", "w") as owner:
        Manifest("key" * 20, 3, [], []).write(folder)
        fcntl.flock(owner, fcntl.LOCK_SH)
        assert [left.path for left in offload_dir.orphans(tmp_path)] == [folder]
        threading.Timer(0.1, fcntl.flock, (owner, fcntl.LOCK_UN)).start()
        (run,) = dead_runs([tmp_path], "key" * 20)
        assert run.manifests[0].step == 3
        assert dead_runs([tmp_path], "other" * 20) == []
        run.release()
        others = Manifest("other" * 20, 4, [], [])
        others.write(folder)
        with patch.object(offload_dir, "locked", side_effect=AssertionError("it is another rank's")):
            assert dead_runs([tmp_path], "third" * 20) == []


def train_on_rank(
    directory: str, sharding: str, kill_at: int, kind: str = "zero_infinity"
) -> tuple[int, dict[str, torch.Tensor]]:
    """Train to step `STEPS`; rank 1 kills itself at durable act number `kill_at`."""
    os.environ[offload_dir.VARIABLE] = directory
    if kill_at >= 0 and torch.distributed.get_rank() == 1:
        kill_at_act(kill_at)
    model = fresh(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    states = {"kind": kind, "resume": "last_step"}
    settings = {"sharding": {"states": {"kind": sharding}}, "offload": {"states": states}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it goes on
        tuned = memtune.apply(
            model, optimizer, {"settings": settings}, loss=lambda m, x: m(x).pow(2).mean(), strict=False
        )
    began = tuned.resumed_steps
    for _ in range(began, STEPS):
        tuned.step([torch.randn(4, 6)])
    found = {name: value.clone() for name, value in tuned.state_dict()["model"].items()}
    tuned.finish()
    end_updaters()
    # what the end of an interpreter does; processes forked from a server have none
    ssd_tensors.folder().close()
    return began, found


def finish_on_one_rank(directory: str) -> str:
    os.environ[offload_dir.VARIABLE] = directory
    model = fresh(2)
    states = {"kind": "zero_infinity", "resume": "last_step"}
    settings = {"sharding": {"states": {"kind": "zero1"}}, "offload": {"states": states}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    tuned = memtune.apply(
        model, optimizer, {"settings": settings}, loss=lambda m, x: m(x).pow(2).mean(), strict=False
    )
    tuned.step([torch.randn(4, 6)])
    group = torch.distributed.distributed_c10d._get_default_store()
    if torch.distributed.get_rank() == 1:
        group.wait(["has raised"])
        return ""
    with patch.object(last_step, "FINISH_S", 1.0), pytest.raises(EnvironmentFault) as caught:
        tuned.finish()
    group.set("has raised", "")
    return str(caught.value)


def test_finish_names_ranks_that_never_call_it_and_keeps_the_step(tmp_path: Path) -> None:
    said, _ = run_ranks(finish_on_one_rank, 2, str(tmp_path), may_fail=True)
    assert "finish() has waited 1.00 s for the other ranks" in said
    assert "call finish() on all ranks" in said
    assert len(list(tmp_path.glob("*/manifest-*-[01]"))) == 2


@pytest.mark.slow
def test_killed_rank_resumes_with_new_updaters(tmp_path: Path) -> None:
    a_killed_rank_goes_on(tmp_path, "zero1", 40, "smart_infinity")


@pytest.mark.slow
def test_missing_updater_folder_prevents_the_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is unchanged, and files of another model's run are not removed."""
    directory = tmp_path_of(tmp_path, "kept")
    assert run(directory, tmp_path / "log", kill_at=84, resume="last_step,updaters") != 0
    monkeypatch.setenv(offload_dir.VARIABLE, str(directory))
    trainer, *of_updaters = sorted(
        directory.iterdir(), key=lambda path: not list(path.glob("manifest-*-[01]"))
    )
    assert len(of_updaters) == 2
    of_updaters[1].rename(tmp_path / "elsewhere")
    model = fresh(2)
    with pytest.raises(EnvironmentFault, match="storage domain") as caught:
        tuned_of(model, "last_step,updaters")
    assert caught.value.code == "MT365"
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), fresh(2).parameters(), strict=True)
    )
    assert trainer.exists()
    (tmp_path / "elsewhere").rename(of_updaters[1])
    with patch.object(Manifest, "read", return_value=None):  # no manifest names them any more
        assert tuned_of(fresh(2), "last_step,updaters").resumed_steps == 0
    assert not any(each.exists() for each in of_updaters)


@pytest.mark.slow
@pytest.mark.parametrize("act", [63, 75])
def test_killed_rank_with_early_updates_resumes(tmp_path: Path, act: int) -> None:
    a_killed_rank_goes_on(tmp_path, "fsdp", act, "lohan")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "zero1", "zero2"])
@pytest.mark.parametrize("act", [52, 63, 75])
def test_killed_rank_resumes_with_the_others(tmp_path: Path, sharding: str, act: int) -> None:
    a_killed_rank_goes_on(tmp_path, sharding, act, "zero_infinity")


def a_killed_rank_goes_on(tmp_path: Path, sharding: str, act: int, kind: str) -> None:
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    plain.mkdir()
    killed.mkdir()
    wanted = run_ranks(train_on_rank, 2, str(plain), sharding, -1, kind)
    assert None in run_ranks(train_on_rank, 2, str(killed), sharding, act, kind, may_fail=True)
    assert any(killed.iterdir())
    resumed = run_ranks(train_on_rank, 2, str(killed), sharding, -1, kind)
    starts = {began for began, _ in resumed}
    assert len(starts) == 1
    assert 0 < starts.pop() < STEPS
    for (_, found), (_, own) in zip(resumed, wanted, strict=True):
        assert all(torch.equal(value, own[name]) for name, value in found.items())
    assert not list(killed.iterdir())


def refused_on_one_rank(directory: str) -> tuple[str, bool, int]:
    """Return the error if rank 1 cannot record the resumed step; whether the weights are unchanged; a sum."""
    os.environ[offload_dir.VARIABLE] = directory
    model = fresh(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    knobs = {"kind": "zero_infinity", "resume": "last_step"}
    settings = {"sharding": {"states": {"kind": "zero1"}}, "offload": {"states": knobs}}
    if torch.distributed.get_rank() == 1:
        Manifest.write = full  # type: ignore[method-assign]
    warnings.simplefilter("ignore")  # that it goes on
    with pytest.raises((EnvironmentFault, OSError)) as caught:
        memtune.apply(
            model, optimizer, {"settings": settings}, loss=lambda m, x: m(x).pow(2).mean(), strict=False
        )
    same = all(map(torch.equal, model.parameters(), before))
    ranks = torch.ones(1)
    torch.distributed.all_reduce(ranks)  # the next collective matches on all ranks
    ssd_tensors.folder().close()
    return str(caught.value), same, int(ranks)


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
def test_failed_resume_of_one_rank_fails_all_ranks(tmp_path: Path) -> None:
    """Each rank restores its own weights without a collective."""
    assert None in run_ranks(train_on_rank, 2, str(tmp_path), "zero1", 63, may_fail=True)
    first, second = run_ranks(refused_on_one_rank, 2, str(tmp_path), deadline_s=60)
    assert "Another rank cannot resume" in first[0]
    assert "No space left" in second[0]
    assert first[1:] == second[1:] == (True, 2)
    starts = {
        began for began, _ in run_ranks(train_on_rank, 2, str(tmp_path), "zero1", -1)
    }  # what was kept is there still
    assert len(starts) == 1
    assert starts.pop() > 0
