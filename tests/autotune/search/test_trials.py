"""Starting trials."""

from __future__ import annotations

import pytest

from memtune.autotune.search.trials import executor_name, make_executor
from memtune.executors.local import LocalExecutor


@pytest.mark.parametrize(
    ("name", "device", "ranks", "address", "found"),
    [
        ("auto", "cpu", 1, None, "local"),
        ("auto", "cpu", 8, None, "local"),
        ("auto", "cuda", 1, None, "local"),
        ("auto", "cuda", 2, None, "ray"),
        ("auto", "cuda", 1, "10.0.0.1:6379", "ray"),
        ("auto", "cpu", 1, "auto", "ray"),
        ("local", "cuda", 8, None, "local"),
        ("ray", "cpu", 1, None, "ray"),
    ],
)
def test_auto_executor_is_ray_for_two_gpus_or_an_address(name, device, ranks, address, found) -> None:
    assert executor_name(name, device=device, ranks=ranks, ray_address=address) == found


def test_open_executor_resolves_auto(tmp_path) -> None:
    opened = make_executor(device="cpu", ranks=2, log_dir=tmp_path)
    assert isinstance(opened, LocalExecutor)
    opened.close()
