"""Secrets of the environment do not reach the study."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtune.executors.secret_values import mask_file, masked

ENVIRON = {
    "MODEL_API_KEY": "sk-123456789",
    "HF_TOKEN": "hf_abcdefgh",
    "LONGER_SECRET": "sk-123456789-and-more",
    "DATABASE_URL": "postgres://me:letmein@host/db",
    "RAY_AUTH_MODE": "token",
    "SSH_AUTH_SOCK": "/tmp/ssh-1/agent",
    "HOME": "/home/someone",
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("key sk-123456789.", "key <MODEL_API_KEY>."),
        ("sk-123456789-and-more", "<LONGER_SECRET>"),
        ("connecting to postgres://me:letmein@host/db", "connecting to <DATABASE_URL>"),
        ("a token in /home/someone with /tmp/ssh-1/agent", "a token in /home/someone with /tmp/ssh-1/agent"),
    ],
)
def test_masked_hides_secret_values_only(text: str, wanted: str) -> None:
    assert masked(text, ENVIRON) == wanted


def test_log_of_a_trial_has_no_secret(ground, monkeypatch) -> None:
    monkeypatch.setenv("LICENCE_KEY", "no licence server found")
    from memtune.executors.rank_group import run_group

    result = run_group(ground.trial("exit_three"), ground.command, log_dir=ground.logs, cores=2)
    assert "no licence server found" not in result.model_dump_json()
    assert "<LICENCE_KEY>" in result.reason
    assert ground.logs.stat().st_mode & 0o077 == 0
    logs = [each.read_text() for each in ground.logs.iterdir()]
    assert any("<LICENCE_KEY>" in each for each in logs)
    assert not any("no licence server found" in each for each in logs)


def test_log_is_masked_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was rewritten in place: a kill or a full disk in between left a part of it."""
    monkeypatch.setenv("LICENCE_KEY", "sk-987654321")
    log = tmp_path / "trial.log"
    log.write_bytes(b"key sk-987654321\xff\n")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", _no_space)
        mask_file(log)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"key sk-987654321\xff\n"]
    mask_file(log)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"key <LICENCE_KEY>\xff\n"]
    assert log.stat().st_mode & 0o077 == 0


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")
