"""Starting trials."""

from __future__ import annotations

import pytest

from memtune.autotune.search.trials import executor_name, make_executor
from memtune.device import Platform, accelerator
from memtune.errors import UsageError
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


def test_devices_that_ray_does_not_assign_train_in_local_processes(monkeypatch) -> None:
    monkeypatch.setitem(accelerator._platforms, "npux", Platform("npux", "npux", "NPU X"))
    assert executor_name("auto", device="npux", ranks=2, ray_address=None) == "local"
    with pytest.raises(UsageError, match="Ray assigns no devices of type npux") as caught:
        make_executor("ray", device="npux", ranks=2)
    assert caught.value.fix == "--executor local"
