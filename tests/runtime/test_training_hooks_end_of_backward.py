"""Steps that raise in the middle and are caught: training continues unaffected, or is refused."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.interrupted_loops import (
    ALL,
    STORES,
    Net,
    assert_equal,
    batch,
    build,
    loss,
    made,
    plain,
    step,
    weights,
)
from torch import Tensor, nn

from memtune.activations.recompute.activation_table import ActivationTable
from memtune.api import apply
from memtune.errors import ApplyError
from memtune.offload.optimizer import native_update
from memtune.parallel.model.tensor_parallel import Average
from memtune.parallel.replicas.grad_buckets import Buckets
from memtune.runtime.context import Context
from memtune.runtime.training_hooks import BackwardEnd
from memtune.ssd import offload_dir

EARLY = ("l2l", "stronghold", "late", "per_gradient", "one by one")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))


def raises_in_backward(model: Net, run: Callable[[], Any]) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("backward raised")

    handle = model.blocks[1].down.register_full_backward_hook(fails)  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="backward raised"):
        run()
    handle.remove()


def test_backward_end_runs_once_per_backward_and_not_after_an_error() -> None:
    """Covers a backward inside of another one, and two forwards before one backward."""
    seen: list[str] = []
    end = BackwardEnd(lambda: seen.append("ended"), lambda: seen.append("raised"))
    fails = False

    def on_gradient(_: Tensor) -> None:
        seen.append("first" if end.expect() else "again")
        inner = torch.ones(2, requires_grad=True)
        inner.register_hook(lambda _: seen.append("first inside" if end.expect() else "inside"))
        with torch.enable_grad():
            inner.sum().backward()  # type: ignore[no-untyped-call]
        end.settle()  # as a forward inside of this backward does
        if fails:
            raise RuntimeError("hook")

    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x.register_hook(on_gradient)
    y.register_hook(on_gradient)
    (x * y).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == ["first", "inside", "again", "inside", "ended"]
    seen.clear()
    fails = True
    with pytest.raises(RuntimeError, match="hook"):
        (x * y).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == ["first", "inside"]
    fails = False
    end.settle()
    end.settle()
    (x * y).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == ["first", "inside", "raised", "first", "inside", "again", "inside", "ended"]


@pytest.mark.drawn(7)
@pytest.mark.parametrize("name", ALL)
def test_loop_continues_after_a_failed_backward(name: str) -> None:
    model, optimizer, _ = made(name)
    for index in range(4):
        if index in (0, 2):
            raises_in_backward(model, lambda: loss(model, batch(9)).backward())  # type: ignore[no-untyped-call]
        step(model, optimizer, index)
    assert_equal(weights(model), plain(4))


def twice_backward(model: Net) -> None:
    """Run backward of two losses, one after the other."""
    for index in range(2):
        loss(model, batch(index)).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", ["l2l", "stronghold", "lohan", "per_gradient"])
def test_second_backward_after_updates_in_the_first_is_refused(name: str) -> None:
    """Its gradients would be left to the next step."""
    model, _, tuned = made(name)
    with pytest.raises(ApplyError, match="MT367"), tuned.micro_batch(last=True):
        twice_backward(model)
    with pytest.raises(ApplyError, match="MT368"):
        tuned.step([batch(2)])


@pytest.mark.parametrize("name", ["patrickstar", "zero_offload"])
def test_gradients_of_a_second_backward_are_added(name: str) -> None:
    plain_model, plain_optimizer = build()
    model, optimizer, tuned = made(name)
    twice_backward(plain_model)
    with tuned.micro_batch(last=True):
        twice_backward(model)
    for each in (plain_optimizer, optimizer):
        each.step()
    assert_equal(weights(model), weights(plain_model))


@pytest.mark.parametrize("name", ALL)
def test_step_with_early_updates_is_refused_after_an_error_until_a_load(name: str) -> None:
    model, optimizer, tuned = made(name)
    tuned.step([batch(0)])
    saved = copy.deepcopy(tuned.state_dict())
    raises_in_backward(model, lambda: tuned.step([batch(9)]))
    if name in EARLY:
        for _ in range(2):
            with pytest.raises(
                ApplyError, match=r"MT368 A step was begun(.|\n)*updated inside(.|\n)*Tuned.load_state_dict"
            ):
                tuned.step([batch(1)])
        with pytest.raises(ApplyError, match="MT368"):
            optimizer.step()
        tuned.load_state_dict(saved)
    optimizer.zero_grad()
    for index in (1, 2):
        tuned.step([batch(index)])
    assert_equal(weights(model), plain(3))


@pytest.mark.parametrize("name", ["stronghold", "late", "per_gradient"])
def test_loaded_state_replaces_early_updates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """State is loaded while slow updates are running."""
    at_once = native_update._call_and_release
    monkeypatch.setattr(native_update, "_call_and_release", lambda call: (time.sleep(0.01), at_once(call)))
    model, optimizer, tuned = made(name)
    tuned.step([batch(0)])
    saved = copy.deepcopy(tuned.state_dict())
    raises_in_backward(model, lambda: tuned.step([batch(9)]))
    tuned.load_state_dict(saved)
    step(model, optimizer, 1)
    assert_equal(weights(model), plain(2))


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        loss(model, batch(8))


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))


def skip(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@pytest.mark.parametrize(
    "between", [evaluate, *(pytest.param(each, marks=pytest.mark.slow) for each in (load, skip))]
)
@pytest.mark.parametrize("name", STORES)
def test_loop_continues_after_a_failed_forward(name: str, between: Callable[..., None]) -> None:
    model, optimizer, _ = made(name)
    for index in range(3):
        if index == 1:
            optimizer.zero_grad()
            model.blocks[0].fails = True  # type: ignore[assignment]
            with pytest.raises(RuntimeError, match="forward raised"):
                loss(model, batch(9))
            model.blocks[0].fails = False  # type: ignore[assignment]
            between(model, optimizer)
        step(model, optimizer, index)
    assert_equal(weights(model), plain(3))


def on_ranks(settings: dict[str, Any], fails: bool) -> dict[str, Tensor]:
    model, optimizer = build()
    tuned = apply(model, optimizer, {"settings": settings}, loss=loss, strict=False)
    for index in range(3):
        if fails and index == 1:
            raises_in_backward(model, lambda: loss(model, batch(9)).backward())  # type: ignore[no-untyped-call]
        step(model, optimizer, index)
    return dict(tuned.state_dict()["model"])


def averaged(kind: str, fails: bool) -> list[Tensor]:
    """Return the gradients of the second of two steps, averaged by `kind`, after a backward that raised if it
    `fails`.
    """
    model, optimizer = build()
    context = Context(model, optimizer, [], torch.device("cpu"), ActivationTable(model, []))
    if kind == "buckets":
        Buckets(context, bucket_cap_mb=0, find_unused_parameters=False)
    else:
        group = dist.distributed_c10d._get_default_group()
        context.loop.sync = Average(context, group, list(model.parameters())).sync
    assert context.loop.sync is not None
    for index in range(2):  # buckets are made in the first step
        if index and fails:
            raises_in_backward(model, lambda: loss(model, batch(9)).backward())  # type: ignore[no-untyped-call]
        model.zero_grad()
        with context.loop.sync(True):
            loss(model, batch(10 * index + dist.get_rank())).backward()  # type: ignore[no-untyped-call]
    return [each.grad for each in model.parameters() if each.grad is not None]


def both_ways(kind: str) -> tuple[list[Tensor], list[Tensor]]:
    return averaged(kind, False), averaged(kind, True)


@pytest.mark.parametrize("kind", ["buckets", pytest.param("tensor", marks=pytest.mark.slow)])
def test_gradients_are_averaged_after_a_failed_backward_on_all_ranks(kind: str) -> None:
    (calm, upset), (others, _) = run_ranks(both_ways, 2, kind)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(upset, calm, strict=True))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(calm, others, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "states",
    [{"kind": "mics", "group": 2}, {"kind": "amsp", "parameters": 2, "gradients": 2, "optimizer": 4}],
    ids=["copies of shards", "states over FSDP2"],
)
def test_four_ranks_continue_after_a_failed_backward(states: dict[str, Any]) -> None:
    settings = {"sharding": {"states": states}}
    calm, upset = (run_ranks(on_ranks, 4, settings, fails) for fails in (False, True))
    for rank in range(4):
        assert_equal(upset[rank], calm[rank])


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"sharding": {"states": {"kind": "zero1"}}},
        {"sharding": {"states": {"kind": "zero2"}}},
        {"sharding": {"states": {"kind": "ddp"}}, "offload": {"states": {"kind": "zero_offload"}}},
        {"sharding": {"states": {"kind": "ddp"}}, "offload": {"states": {"kind": "l2l"}}},
        {"sharding": {"states": {"kind": "fsdp"}}},
        {"sharding": {"states": {"kind": "fsdp"}}, "offload": {"states": {"kind": "zero_offload"}}},
        {"sharding": {"states": {"kind": "fsdp"}}, "offload": {"states": {"kind": "l2l"}}},
    ],
    ids=[
        "zero1",
        "zero2",
        "ddp, gradient offload",
        "ddp, blocks",
        "fsdp",
        "fsdp, gradient offload",
        "fsdp, blocks",
    ],
)
def test_ranks_continue_after_a_failed_backward(settings: dict[str, Any]) -> None:
    calm, upset = (run_ranks(on_ranks, 2, settings, fails) for fails in (False, True))
    for rank in range(2):
        assert_equal(upset[rank], calm[rank])


def test_updated_packs_are_refused_after_an_error_until_a_load() -> None:
    model, optimizer = build()
    plan = {"offload.states": {"forward": [[0, 2]], "backward": [[0, 2], [2, 4]], "swapped_bytes": 0}}
    config = {"settings": {"offload": {"states": {"kind": "harmony"}}}, "plan": plan}
    tuned = apply(model, optimizer, config, loss=loss, strict=False)
    tuned.step([batch(0)])
    saved = copy.deepcopy(tuned.state_dict())
    raises_in_backward(model, lambda: tuned.step([batch(9)]))
    with pytest.raises(ApplyError, match=r"MT368 A step was begun(.|\n)*2 blocks were updated"):
        tuned.step([batch(1)])
    tuned.load_state_dict(saved)
    optimizer.zero_grad()
    model.zero_grad()
    tuned.step([batch(1)])
    assert_equal(weights(model), plain(2))
