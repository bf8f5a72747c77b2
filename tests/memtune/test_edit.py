"""Edits of a Step: insertions land where they should, everything else keeps its place and its life."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zoo_paths import ZOO

from memtune.edit import Edit, accumulate_gradients
from memtune.program import FOREVER, Phase, Resource, Step, Tier
from memtune.testing.drift import plain_program


def gpt() -> Step:
    return plain_program(ZOO["gpt"]).step


def i32(*values: int) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray(values, np.int32)


def test_nothing_changed_is_the_same_step() -> None:
    step = gpt()
    new = Edit(step).done()
    new.validate()
    for column in ("op_name", "producer", "held_until", "save_until", "save_asked", "use_storage", "bytes", "landing", "enter"):
        assert np.array_equal(getattr(new, column), getattr(step, column)), column


def test_insertions_come_before_and_after_their_anchors_in_the_order_of_the_calls() -> None:
    edit = Edit(gpt())
    edit.add_ops("b", before=i32(5), phase=Phase.FORWARD)
    edit.add_ops("c", before=i32(5), phase=Phase.FORWARD)
    edit.add_ops("d", after=i32(5), phase=Phase.FORWARD)
    edit.add_ops("a", after=i32(4), phase=Phase.FORWARD)
    new = edit.done()
    new.validate()
    names = [new.names[i] for i in new.op_name]
    assert names[5:8] == ["a", "b", "c"]
    assert names[9] == "d"
    assert names[8] == gpt().names[gpt().op_name[5]]


def test_a_new_storage_lives_from_its_op_to_its_last_use() -> None:
    step = gpt()
    edit = Edit(step)
    op = edit.add_ops("make", before=i32(10), phase=Phase.FORWARD, resource=Resource.DEVICE_TO_HOST, traffic_bytes=1000)
    storage = edit.add_storages(np.asarray([1000]), producer=op)
    edit.add_uses(i32(20), storage)
    new = edit.done()
    before = np.insert(step.live_bytes(), 10, 0)  # a new row at 10, where only what lives on both sides is there
    delta = new.live_bytes() - before
    assert delta[11:22].tolist() == [1000] * 11
    assert int(new.producer[-1]) == 10
    assert int(new.end[-1]) == 21  # op 20 moved up by one


def test_holds_and_releases() -> None:
    step = gpt()
    short = int(np.flatnonzero((step.producer >= 0) & (step.end < 10) & (step.tier == Tier.DEVICE))[0])
    edit = Edit(step)
    edit.hold_through(i32(short), i32(30))
    assert edit.done().end[short] == 30
    edit = Edit(step)
    edit.let_go_before(i32(short), i32(30))
    assert edit.done().end[short] == 29
    edit = Edit(step)
    edit.hold_through(i32(0), i32(30))
    assert edit.done().end[0] == FOREVER  # a parameter


def test_removed_ops_take_their_storages_with_them() -> None:
    step = gpt()
    dropped = np.zeros(step.n_ops, bool)
    dropped[-1] = True
    edit = Edit(step)
    op = edit.add_ops("make", before=i32(10), phase=Phase.FORWARD)
    edit.add_storages(np.asarray([8]), producer=op)
    edit.drop_ops(dropped)
    new = edit.done()
    new.validate()
    assert new.n_ops == step.n_ops
    assert new.n_storages == step.n_storages + 1 - int((step.producer == step.n_ops - 1).sum())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_insertions_anywhere_leave_the_old_ops_in_order(anchors: list[int]) -> None:
    step = gpt()
    edit = Edit(step)
    for anchor in anchors:
        edit.add_ops("memtune.test", before=i32(anchor), phase=Phase.FORWARD)
    new = edit.done()
    new.validate()
    old = new.op_name[[new.names[i] != "memtune.test" for i in new.op_name]]
    assert [new.names[i] for i in old] == [step.names[i] for i in step.op_name]
    assert new.peak_bytes() == step.peak_bytes()
    assert np.array_equal(np.sort(new.bytes), np.sort(step.bytes))


@pytest.mark.parametrize("model", ["gpt", "tied", "cnn_bn"])
def test_later_micro_batches_add_to_the_gradients_that_are_there(model: str) -> None:
    from memtune.autotune.record import start_session
    from memtune.testing.drift import compare
    from memtune.workload import Workload

    session = start_session(Workload.load(ZOO[model]), "fake")
    session.warm_up(2)
    real = session.trace(2, micro_batches=2, trace_last=True)
    assert compare(accumulate_gradients(plain_program(ZOO[model]).step), real) == ""
