"""Gradients that a weight shows although another parameter, on another device, has them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.runtime.shown_grad import hide_grad_of, show_grad_of, shows_grad, track_data, untrack_data


def halves(weight: nn.Parameter) -> None:
    weight.grad.mul_(0.5)  # type: ignore[union-attr]


def halves_data(weight: nn.Parameter) -> None:
    weight.grad.data.mul_(0.5)  # type: ignore[union-attr]


def halves_together(weight: nn.Parameter) -> None:
    torch._foreach_mul_([weight.grad], 0.5)  # type: ignore[list-item]


def replaces(weight: nn.Parameter) -> None:
    weight.grad = weight.grad * 0.5  # type: ignore[operator]


def clears(weight: nn.Parameter) -> None:
    weight.grad = None


CHANGES = [halves, halves_data, halves_together, replaces]


def held_like(rows: Tensor) -> nn.Parameter:
    held = nn.Parameter(torch.zeros_like(rows))
    held.grad = torch.ones_like(rows)
    return held


@pytest.mark.parametrize("change", [*CHANGES, clears])
@pytest.mark.parametrize("is_tracked", [False, True])
def test_change_of_a_shown_gradient_changes_the_one_on_the_other_device(
    change: Callable[[nn.Parameter], None], is_tracked: bool
) -> None:
    weight = nn.Parameter(torch.empty(3, 2, device="meta"))
    if is_tracked:
        track_data(weight)
    held = held_like(torch.empty(3, 2))
    show_grad_of(weight, held)
    assert weight.grad is held.grad
    change(weight)
    assert held.grad is None if change is clears else torch.equal(held.grad, torch.full((3, 2), 0.5))  # type: ignore[arg-type]
    assert hide_grad_of(weight)
    assert weight.grad is None
    untrack_data(weight)
    assert type(weight) is nn.Parameter


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_change_of_a_shown_shard_changes_the_rows_on_the_host(
    device: str, change: Callable[[nn.Parameter], None]
) -> None:
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        rows = torch.zeros(2, 3, device=device)
        weight = nn.Parameter(DTensor.from_local(rows, mesh, [Shard(0)], run_check=False))
        held = held_like(torch.empty(2, 3))
        show_grad_of(weight, held)
        assert isinstance(weight.grad, DTensor)
        assert weight.grad.shape == (4, 3)
        assert weight.grad is weight.grad
        version = held.grad._version  # type: ignore[union-attr]
        change(weight)
        assert torch.equal(held.grad, torch.full((2, 3), 0.5))  # type: ignore[arg-type]
        assert hide_grad_of(weight)
        assert change is replaces or held.grad._version > version  # type: ignore[union-attr]
        assert type(weight) is DTensor


def test_unchanged_gradient_is_reported_as_such_when_hidden() -> None:
    weight, held = nn.Parameter(torch.zeros(2)), held_like(torch.zeros(2))
    show_grad_of(weight, held)
    assert float(weight.grad.norm()) > 0  # type: ignore[union-attr]
    assert not hide_grad_of(weight)
    assert not hide_grad_of(weight)


def test_gradient_of_the_weight_itself_is_shown_first() -> None:
    weight, held = nn.Parameter(torch.ones(2)), held_like(torch.zeros(2))
    show_grad_of(weight, held)
    weight.sum().mul(3).backward()  # type: ignore[no-untyped-call]
    assert torch.equal(weight.grad, torch.full((2,), 3.0))  # type: ignore[arg-type]
    weight.grad = None
    assert weight.grad is held.grad


def test_copy_and_pickle_of_a_weight_show_no_gradient_of_another() -> None:
    weight, held = nn.Parameter(torch.ones(2)), held_like(torch.zeros(2))
    show_grad_of(weight, held)
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert type(copied) is nn.Parameter
        assert copied.grad is None
    assert shows_grad(weight)


def test_backward_accumulates_in_the_own_gradient_of_a_weight_that_shows_one() -> None:
    """FSDP2 reads and assigns `grad` itself, inside backward; the shown one may be on another device."""
    weight, held, x = (
        nn.Parameter(torch.ones(2)),
        held_like(torch.empty(2)),
        torch.ones(2, requires_grad=True),
    )
    show_grad_of(weight, held)
    seen: list[Tensor | None] = []

    def reduced(gradient: Tensor) -> None:
        seen.append(weight.grad)
        weight.grad = gradient * 3

    x.register_hook(reduced)
    x.sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [None]
    assert torch.equal(held.grad, torch.ones(2))  # type: ignore[arg-type]
    assert torch.equal(weight.grad, torch.full((2,), 3.0))  # type: ignore[arg-type]
    hide_grad_of(weight)
