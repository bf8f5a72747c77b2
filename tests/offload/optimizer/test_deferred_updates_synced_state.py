"""Deferred updates: reads of the optimizer's state, and forks, find the state of the last step."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.zoo_paths import ZOO
from torch import Tensor, nn
from torch.optim import Optimizer

from memtune.api import apply
from memtune.offload.optimizer import native_update
from memtune.offload.optimizer.deferred_updates import SyncedState
from memtune.search_spaces.offload.states.stronghold import Stronghold
from memtune.testing.training import SEED, build, config_of, one_step

DEFERRED = Stronghold(kind="stronghold", window=2, deferred=(0, 1, 2, 3))
IN_TIME = Stronghold(kind="stronghold", window=2, deferred=())
pytestmark = pytest.mark.usefixtures("one_thread")


def by_key(optimizer: Optimizer) -> list[Any]:
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def by_deepcopy(optimizer: Optimizer) -> list[Any]:
    return [*by_key(other := copy.deepcopy(optimizer)), *({"p": p} for p in other.param_groups[0]["params"])]


def by_pickle(optimizer: Optimizer) -> list[Any]:
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return by_key(torch.load(file, weights_only=False))


READS: dict[str, Callable[[Optimizer], list[Any]]] = {
    "key": by_key,
    "deepcopy of the optimizer": by_deepcopy,
    "pickle of the optimizer": by_pickle,
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "key": lambda state: state["a"],
    "get": lambda state: state.get("a"),
    "pop": lambda state: state.pop("a"),
    "setdefault": lambda state: state.setdefault("a", {}),
    "iteration": list,
    "keys": lambda state: list(state.keys()),
    "values": lambda state: list(state.values()),
    "items": lambda state: list(state.items()),
    "dict": dict,
    "unpacking": lambda state: {**state},
    "union": lambda state: state | {},
    "copy": copy.copy,
    "union from the right": lambda state: {} | state,
    "text": repr,
    "its copy": lambda state: state.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("way", WAYS)
def test_synced_state_waits_on_every_kind_of_read(way: str) -> None:
    """Every read waits for the updates, and inside `without_sync` none does."""
    waited: list[bool] = []
    state = SyncedState({"a": {}}, lambda: waited.append(True))
    with state.without_sync():
        WAYS[way](state)
        state["a"] = {}
    assert not waited
    WAYS[way](state)
    assert waited


def after_two_steps(
    technique: Stronghold, delayed: bool = False, loads: bool = False
) -> tuple[nn.Module, Optimizer]:
    """`delayed`: the second step's updates on the thread wait for a moment behind another task."""
    workload, model, optimizer = build(ZOO["gpt"])
    tuned = apply(model, optimizer, config_of(ZOO["gpt"], technique), strict=False)
    one_step(workload, model, optimizer, tuned, seed=SEED + 1)
    if loads:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    tuned.state_dict()  # nothing is under way
    if delayed:
        native_update._threads().submit(threading.Event().wait, 0.3)
    one_step(workload, model, optimizer, tuned, seed=SEED + 2)
    return model, optimizer


def tensors(states: list[Any]) -> list[Tensor]:
    return [value.detach().clone() for state in states for value in state.values()]


@pytest.mark.parametrize(
    ("read", "loads"), [("key", False), ("key", True), *((read, False) for read in list(READS)[1:])]
)
def test_read_of_state_returns_that_of_the_last_step(read: str, loads: bool) -> None:
    _, plain = after_two_steps(IN_TIME, loads=loads)
    _, optimizer = after_two_steps(DEFERRED, delayed=True, loads=loads)
    expected, found = (tensors(READS[read](each)) for each in (plain, optimizer))
    assert len(found) > 20
    assert all(map(torch.equal, expected, found))


def test_copy_of_synced_state_is_a_plain_dict() -> None:
    state = SyncedState({"a": {}}, lambda: None)
    assert {
        type(each) for each in (copy.deepcopy(state), copy.copy(state), pickle.loads(pickle.dumps(state)))
    } == {defaultdict}


def test_forked_child_has_weights_of_the_last_step_despite_deferred_updates() -> None:
    expected = after_two_steps(IN_TIME)[0].state_dict()
    model, _ = after_two_steps(DEFERRED, delayed=True)
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        equal = all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        native_update._threads().submit(int).result()  # it has a thread of its own
        os._exit(0 if equal else 1)
    assert os.waitpid(child, 0)[1] == 0
