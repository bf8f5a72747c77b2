"""Edits of a Step: insertions go to their anchors; other rows keep their order and lifetimes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.zoo_paths import ZOO

from memtune.program.edit import Edit, accumulate_gradients
from memtune.program.step import FOREVER, Phase, Resource, Step, Tier
from memtune.testing.drift_check import plain_program


def gpt() -> Step:
    return plain_program(ZOO["gpt"]).step


def i32(*values: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray(values, np.int32)


def test_edit_without_changes_returns_an_equal_step() -> None:
    step = gpt()
    new = Edit(step).done()
    new.validate()
    before = step.values()
    for name, value in new.values().items():
        assert (
            np.array_equal(value, before[name]) if isinstance(value, np.ndarray) else value == before[name]
        ), name


def test_add_ops_keeps_call_order_around_anchors() -> None:
    edit = Edit(gpt())
    edit.add_ops("b", before=i32(5), phase=Phase.FORWARD)
    edit.add_ops("c", before=i32(5), phase=Phase.FORWARD)
    edit.add_ops("d", after=i32(5), phase=Phase.FORWARD)
    edit.add_ops("a", after=i32(4), phase=Phase.FORWARD)
    new = edit.done()
    new.validate()
    names = [new.names[i] for i in new.ops.name]
    assert names[5:8] == ["a", "b", "c"]
    assert names[9] == "d"
    assert names[8] == gpt().names[gpt().ops.name[5]]


def test_added_storage_lives_from_its_producer_to_its_last_use() -> None:
    step = gpt()
    edit = Edit(step)
    op = edit.add_ops(
        "make", before=i32(10), phase=Phase.FORWARD, resource=Resource.DEVICE_TO_HOST, traffic_bytes=1000
    )
    storage = edit.add_storages(np.asarray([1000]), producer=op)
    edit.add_uses(i32(20), storage)
    new = edit.done()
    before = np.insert(step.live_bytes(), 10, 0)  # the new row, which is not compared
    delta = new.live_bytes() - before
    assert delta[11:22].tolist() == [1000] * 11
    assert int(new.storages.producer[-1]) == 10
    assert int(new.freed_after[-1]) == 21  # op 20 moved up by one


def test_hold_through_and_release_before_set_lifetimes() -> None:
    step = gpt()
    short = int(
        np.flatnonzero(
            (step.storages.producer >= 0) & (step.freed_after < 10) & (step.storages.tier == Tier.DEVICE)
        )[0]
    )
    edit = Edit(step)
    edit.hold_through(i32(short), i32(30))
    assert edit.done().freed_after[short] == 30
    edit = Edit(step)
    edit.release_before(i32(short), i32(30))
    assert edit.done().freed_after[short] == 29
    edit = Edit(step)
    edit.hold_through(i32(0), i32(30))
    assert edit.done().freed_after[0] == FOREVER  # a parameter


def test_drop_ops_removes_their_storages() -> None:
    step = gpt()
    dropped = np.zeros(step.ops.n, bool)
    dropped[-1] = True
    edit = Edit(step)
    op = edit.add_ops("make", before=i32(10), phase=Phase.FORWARD)
    edit.add_storages(np.asarray([8]), producer=op)
    edit.drop_ops(dropped)
    new = edit.done()
    new.validate()
    assert new.ops.n == step.ops.n
    assert new.storages.n == step.storages.n + 1 - int((step.storages.producer == step.ops.n - 1).sum())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_add_ops_at_any_anchor_keeps_original_order_and_peak(anchors: list[int]) -> None:
    step = gpt()
    edit = Edit(step)
    for anchor in anchors:
        edit.add_ops("memtune.test", before=i32(anchor), phase=Phase.FORWARD)
    new = edit.done()
    new.validate()
    old = new.ops.name[[new.names[i] != "memtune.test" for i in new.ops.name]]
    assert [new.names[i] for i in old] == [step.names[i] for i in step.ops.name]
    assert new.peak_bytes() == step.peak_bytes()
    assert np.array_equal(np.sort(new.storages.bytes), np.sort(step.storages.bytes))


@pytest.mark.parametrize("model", ["gpt", "tied", "cnn_bn"])
def test_accumulate_gradients_equals_recorded_second_micro_batch(model: str) -> None:
    from memtune.autotune.record.recording_session import start_session
    from memtune.testing.drift_check import compare
    from memtune.workload.workload import Workload

    session = start_session(Workload.load(ZOO[model]), "fake")
    session.warm_up(2)
    real = session.trace(2, micro_batches=2, trace_last=True)
    assert compare(accumulate_gradients(plain_program(ZOO[model]).step), real) == ""
