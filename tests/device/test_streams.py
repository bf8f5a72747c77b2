"""Streams: nothing on CPU, and contexts that restore the streams that were current."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from memtune.device import accelerator, memory_statistics, streams
from memtune.errors import EnvironmentFault

CPU = torch.device("cpu")


def test_cpu_has_no_streams() -> None:
    assert not accelerator.has_streams(CPU)
    assert not accelerator.has_streams(torch.device("meta"))
    assert streams.new_stream(CPU) is None
    assert streams.end_of(None) is None
    with streams.on(None):
        streams.wait_current(None, CPU)
        streams.used_on(torch.ones(2))
        streams.synchronize(CPU)


@dataclass(frozen=True)
class Lane:
    """A stream of a device, by name."""

    device: int
    name: str

    @property
    def device_index(self) -> int:
        return self.device


class Accelerator:
    """Current device, and current stream of each: `torch.accelerator` in as much as `on` uses it."""

    def __init__(self) -> None:
        self.index, self.current = 0, {0: Lane(0, "default"), 1: Lane(1, "default")}

    def current_stream(self, device: int | None = None) -> Lane:
        return self.current[self.index if device is None else device]

    def set_stream(self, stream: Lane) -> None:
        self.index, self.current[stream.device] = stream.device, stream


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    found = Accelerator()
    monkeypatch.setattr(torch.accelerator, "current_stream", found.current_stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", found.set_stream)
    return found


def test_on_restores_streams_in_nested_use(there: Accelerator) -> None:
    side = Lane(0, "side")
    again = streams.on(side)  # type: ignore[arg-type]
    with streams.on(side):  # type: ignore[arg-type]
        with again:
            assert there.current_stream() == side
        assert there.current_stream() == side
    assert there.current_stream().name == "default"


def test_on_restores_device_and_stream_of_another_device(there: Accelerator) -> None:
    with streams.on(Lane(1, "side")):  # type: ignore[arg-type]
        assert (there.index, there.current[1].name) == (1, "side")
    assert (there.index, there.current[0].name, there.current[1].name) == (0, "default", "default")


def test_wait_takes_the_stream_of_the_events_device(there: Accelerator) -> None:
    """torch's `event.wait()` takes that of the current device."""
    waited = list[Lane]()
    streams.wait(SimpleNamespace(device=1, wait=waited.append))  # type: ignore[arg-type]
    assert waited == [Lane(1, "default")]


def test_on_restores_streams_after_an_error(there: Accelerator) -> None:
    with pytest.raises(ZeroDivisionError), streams.on(Lane(0, "side")):  # type: ignore[arg-type]
        _ = 1 / 0
    assert there.current_stream().name == "default"


def test_forked_generators_continue_where_they_were() -> None:
    torch.manual_seed(3)
    with accelerator.fork_rng(CPU):
        torch.rand(5)
    inside = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(inside, torch.rand(1))


def test_limit_without_the_capability_is_one_message() -> None:
    memory_statistics.limit(torch.device("meta"), None)  # nothing to lift
    with pytest.raises(EnvironmentFault, match="cannot limit the memory") as caught:
        memory_statistics.limit(torch.device("meta"), 1 << 20)
    assert caught.value.code == "MT132"
