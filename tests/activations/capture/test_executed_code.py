"""Guards find changes of data that a forward reads through closures, objects and other files, and settings of
torch; they ignore those of names that no code reads. Clocks, iterators and files are refused.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import datetime
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memtune.activations.capture.executed_code import ExecutedCode
from memtune.activations.capture.guards import Guards, call_key
from memtune.activations.capture.region_capture import capture, shapes_of
from memtune.activations.capture.tape import CaptureError
from memtune.runtime import autocast_now

Reader = Callable[[], Any]
Change = Callable[[], Any]


class Box:
    """An object with a setting; others have it in a slot or compute it."""

    def __init__(self) -> None:
        self.scale, self.inner = 1.0, SimpleNamespace(scale=1.0)
        self._count = 1

    def __call__(self) -> float:
        return self.scale

    @property
    def counted(self) -> int:
        return self._count


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Settings:
    scale = 1.0


class Listed(list[int]):
    pass


class Net(nn.Module):
    """Its result depends on what `read` returns."""

    def __init__(self, read: Reader) -> None:
        super().__init__()
        self.linear, self.read, self.steps = nn.Linear(4, 4), read, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read()


OTHER = """
SCALE, STATE, UNREAD = 1.0, {"scale": 1.0}, 1.0

def scaled():
    return SCALE

def scaled_by_state(state=[1.0]):
    return STATE["scale"] * state[0] * scaled_by_state.scale

scaled_by_state.scale = 1.0
"""


def other_file() -> Any:
    """Return a file of the user's as imported."""
    found = ModuleType("settings_of_a_user")
    exec(OTHER, vars(found))
    return found


def guards_of(net: nn.Module) -> Guards:
    """Return guards of what a capture of `net` has read."""
    executed, guards = ExecutedCode(net), Guards(net)
    given = shapes_of(((torch.ones(2, 4),), {}))
    capture(net, net.forward, given, autocast_now(), lambda _, __: True, executed)
    guards.watch(executed)
    return guards


def in_closure() -> tuple[Reader, Change]:
    scale = 1.0

    def change() -> None:
        nonlocal scale
        scale = 2.0

    return lambda: scale, change


def of_object() -> tuple[Reader, Change]:
    box = Box()
    return lambda: box.inner.scale, lambda: setattr(box.inner, "scale", 2.0)


def of_called_object() -> tuple[Reader, Change]:
    box = Box()
    return lambda: box(), lambda: setattr(box, "scale", 2.0)  # its code is what is read


def of_property() -> tuple[Reader, Change]:
    box = Box()
    return lambda: box.counted, lambda: setattr(box, "_count", 2)


def of_slot() -> tuple[Reader, Change]:
    box = Slotted()
    return lambda: box.scale, lambda: setattr(box, "scale", 2.0)


def of_object_in_containers() -> tuple[Reader, Change]:
    boxes = {"all": [Box()]}
    return lambda: boxes["all"][0].scale, lambda: setattr(boxes["all"][0], "scale", 2.0)


def of_class() -> tuple[Reader, Change]:
    kind = type("Kind", (Settings,), {})
    return lambda: kind.scale, lambda: setattr(kind, "scale", 2.0)


def of_weak_reference() -> tuple[Reader, Change]:
    box = Box()
    found = weakref.ref(box)
    return lambda: found().scale, lambda: setattr(box, "scale", 2.0)  # type: ignore[union-attr]


def of_optimizer() -> tuple[Reader, Change]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 1.0)
    return lambda: optimizer.param_groups[0]["lr"], lambda: optimizer.param_groups[0].update(lr=2.0)


def of_other_module() -> tuple[Reader, Change]:
    parent = [nn.Linear(1, 1)]
    return lambda: 1.0 if parent[0].training else 2.0, lambda: parent[0].eval()


def of_partial() -> tuple[Reader, Change]:
    state = {"scale": 1.0}
    return functools.partial(lambda held: held["scale"], state), lambda: state.update(scale=2.0)


def of_parameter() -> tuple[Reader, Change]:
    weight: Any = nn.Parameter(torch.ones(1))
    weight.scale = 1.0
    return lambda: weight.scale, lambda: setattr(weight, "scale", 2.0)


def of_context() -> tuple[Reader, Change]:
    variable = ContextVar("scale", default=1.0)
    return lambda: variable.get(), lambda: variable.set(2.0)


def of_thread() -> tuple[Reader, Change]:
    local = threading.local()
    local.scale = 1.0
    return lambda: local.scale, lambda: setattr(local, "scale", 2.0)


def of_array() -> tuple[Reader, Change]:
    table = np.ones(1000)
    return lambda: float(table[7]), lambda: table.__setitem__(7, 2.0)


def of_long_list() -> tuple[Reader, Change]:
    table = [1.0] * 1000
    return lambda: table[7], lambda: table.__setitem__(7, 2.0)


def of_length() -> tuple[Reader, Change]:
    last = deque([1])
    return lambda: len(last), lambda: last.append(1)


def of_own_container() -> tuple[Reader, Change]:
    last, counts = Listed([1]), Counter("a")
    return lambda: len(last) + counts["a"], lambda: counts.update("a")


def of_order() -> tuple[Reader, Change]:
    scales = {"a": 1.0, "b": 2.0}
    return lambda: next(iter(scales.values())), lambda: scales.update(a=scales.pop("a"))


def of_other_file() -> tuple[Reader, Change]:
    other = other_file()
    return lambda: other.SCALE, lambda: setattr(other, "SCALE", 2.0)


def of_function_of_other_file() -> tuple[Reader, Change]:
    other = other_file()
    return lambda: other.scaled(), lambda: setattr(other, "SCALE", 2.0)


def of_data_of_other_file() -> tuple[Reader, Change]:
    other = other_file()
    return other.scaled_by_state, lambda: other.STATE.update(scale=2.0)


def of_default() -> tuple[Reader, Change]:
    other = other_file()
    return other.scaled_by_state, lambda: other.scaled_by_state.__defaults__[0].append(1)


def of_attribute_of_function() -> tuple[Reader, Change]:
    other = other_file()
    return other.scaled_by_state, lambda: setattr(other.scaled_by_state, "scale", 2.0)


def of_environment() -> tuple[Reader, Change]:
    return lambda: float(os.environ.get("SCALE", "1")), lambda: os.environ.update(SCALE="2")


def of_environment_by_name() -> tuple[Reader, Change]:
    ask = os.getenv
    return lambda: float(ask("SCALE", "1")), lambda: os.environ.update(SCALE="2")


def of_arguments() -> tuple[Reader, Change]:
    return lambda: len(sys.argv), lambda: sys.argv.append("--scale")


def of_seed() -> tuple[Reader, Change]:
    return lambda: torch.initial_seed() % 7, lambda: torch.manual_seed(torch.initial_seed() + 1)


READ_DATA = [
    *(in_closure, of_object, of_called_object, of_property, of_slot, of_object_in_containers, of_class),
    *(of_weak_reference, of_optimizer, of_other_module, of_partial, of_parameter, of_context, of_thread),
    *(of_array, of_long_list, of_length, of_own_container, of_order, of_other_file),
    *(of_function_of_other_file, of_data_of_other_file, of_default, of_attribute_of_function),
    *(of_environment, of_environment_by_name, of_arguments, of_seed),
]


@pytest.fixture(autouse=True)
def kept_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "environ", os.environ)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    before = os.environ.get("SCALE")
    yield
    if before is None:
        os.environ.pop("SCALE", None)


@pytest.mark.parametrize("made", READ_DATA)
def test_changes_of_data_that_code_has_read_are_found(made: Callable[[], tuple[Reader, Change]]) -> None:
    read, change = made()
    guards = guards_of(Net(read))
    assert guards.changed() == ""
    before = read()
    change()
    assert read() != before or made in (of_default,)
    assert guards.changed() != ""


def test_changes_of_names_that_no_code_reads_are_ignored() -> None:
    box, other, counts = Box(), other_file(), {"steps": 0}
    net = Net(lambda: box.scale * other.SCALE)
    guards = guards_of(net)
    box.inner.scale, box._count, other.UNREAD, counts["steps"] = 2.0, 2, 2.0, 1
    assert guards.changed() == ""


def counted() -> tuple[Reader, Reader]:
    number = 0

    def count() -> float:
        nonlocal number
        number += 1
        return float(number)

    return count, lambda: number


def counted_in_object() -> tuple[Reader, Reader]:
    box = Box()

    def count() -> float:
        box.scale += 1
        return box.scale

    return count, lambda: box.scale - 1


def counted_in_container() -> tuple[Reader, Reader]:
    last: list[int] = []
    return lambda: last.append(1) or len(last), lambda: len(last)


@pytest.mark.parametrize("made", [counted, counted_in_object, counted_in_container])
def test_changes_by_the_forward_are_undone_and_refused(made: Callable[[], tuple[Reader, Reader]]) -> None:
    read, count = made()
    with pytest.raises(CaptureError, match="belongs to no module"):
        guards_of(Net(read))
    assert count() == 0


def of_clock() -> Reader:
    return lambda: float(time.time() > 0)


def of_clock_by_name() -> Reader:
    return lambda: float(perf_counter() > 0)


def of_date() -> Reader:
    return lambda: float(datetime.now().year > 0)


def of_file() -> Reader:
    return lambda: float(len(open(__file__).readline()))


def of_iterator() -> Reader:
    scales = itertools.cycle([1.0, 2.0])
    return lambda: next(scales)


def of_iterator_in_object() -> Reader:
    box: Any = Box()
    box.scales = itertools.count()
    return lambda: float(next(box.scales))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (of_clock, "names time"),
        (of_clock_by_name, "names perf_counter"),
        (of_date, "names datetime"),
        (of_file, "names open"),
        (of_iterator, "the iterator scales"),
        (of_iterator_in_object, "the iterator scales"),
    ],
)
def test_values_that_differ_each_time_are_refused(made: Callable[[], Reader], why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        guards_of(Net(made()))


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_key_of_a_call_has_the_settings_of_torch() -> None:
    x = (torch.ones(2),)
    before = call_key(x, {})
    assert call_key(x, {}) == before
    flags = torch.backends.mkldnn
    try:
        torch.set_default_dtype(torch.float64)
        assert call_key(x, {}) != before
        torch.set_default_dtype(torch.float32)
        torch.backends.cuda.enable_flash_sdp(False)
        assert call_key(x, {}) != before
        torch.backends.cuda.enable_flash_sdp(True)
        assert call_key(x, {}) == before
        with flags.flags(enabled=False):
            assert call_key(x, {}) != before
        with torch.device("meta"):
            assert call_key(x, {}) not in (before, None)
        with Doubled():
            assert call_key(x, {}) is None
    finally:
        torch.set_default_dtype(torch.float32)
        torch.backends.cuda.enable_flash_sdp(True)
