"""Updates inside backward: the bits of any plain optimizer, gradients freed at once, clear errors for all
else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memtune.api import Tuned, apply
from memtune.errors import ApplyError
from memtune.offload.core.update_triggers import ONE_BY_ONE
from memtune.runtime import spent_as_none

pytestmark = pytest.mark.usefixtures("one_thread")
ROAM = {"settings": {"execution": {"order": {"kind": "roam"}}}}
MOMENTUM: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9},
}


class Net(nn.Module):
    """A weight used twice, a frozen one, one that no forward uses, and a sentinel."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.frozen, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.unused, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(1))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.frozen(self.shared(torch.tanh(self.shared(x))))) * self.scale  # type: ignore[no-any-return]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def made(make: Make) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net()
    groups = [
        {"params": model.shared.parameters(), "lr": 0.03},
        {"params": [*model.out.parameters(), *model.unused.parameters()]},
    ]
    return model, make([*groups, {"params": [model.scale]}])


def batches(step: int, count: int) -> list[Tensor]:
    torch.manual_seed(50 + step)
    return [torch.randn(4, 6) for _ in range(count)]


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Tensor]) -> None:
    for part in parts:
        (loss_of(model, part) / len(parts)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def tuned_net(make: Make) -> tuple[Net, torch.optim.Optimizer, Tuned]:
    model, optimizer = made(make)
    return model, optimizer, apply(model, optimizer, ROAM, loss=loss_of)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("kind", sorted(ONE_BY_ONE))
def test_fused_backward_has_the_bits_of_the_optimizers_own_step(kind: str, foreach: bool | None) -> None:
    """Three groups, two schedules of the learning rate (one made before, one after), one to three
    micro-batches, seven steps.
    """

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(groups, lr=0.01, foreach=foreach, **MOMENTUM.get(kind, {}))  # type: ignore[no-any-return]

    model, optimizer = made(make)
    other, others = made(make)
    early = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    tuned = apply(model, optimizer, ROAM, loss=loss_of)
    mine = [early, torch.optim.lr_scheduler.StepLR(optimizer, 2)]
    theirs = [torch.optim.lr_scheduler.ExponentialLR(others, 0.9), torch.optim.lr_scheduler.StepLR(others, 2)]
    for step in range(7):
        parts = batches(step, 1 + step % 3)
        tuned.step(parts)
        by_hand(other, others, parts)
        for each in (*mine, *theirs):
            each.step()
        assert equal(model, other), step
    assert tuned.audit()["execution.order"] == {"updated_in_backward": 4, "of_parameters": 7}
    saved, plain = tuned.state_dict()["optimizer"], others.state_dict()
    assert saved["state"].keys() == plain["state"].keys() or len(saved["state"]) == len(plain["state"])


def test_gradients_are_freed_one_by_one_in_backward() -> None:
    """During backward only the sentinel's gradient and the one that is being accumulated exist."""
    model, _, tuned = tuned_net(adamw)
    seen: list[int] = []
    model.shared.weight.register_hook(
        lambda _: seen.append(sum(p.grad is not None for p in model.parameters()))
    )
    tuned.step(batches(0, 1))
    assert seen == [1]  # `scale`; those of `out` have been used
    seen.clear()
    tuned.step(batches(0, 2))
    # After the first micro-batch all gradients are kept; in the last one the sentinel's and the one being
    # summed.
    assert seen == [4, 2]


def test_checkpoint_resumes_as_plain_training() -> None:
    model, _, tuned = tuned_net(adamw)
    other, others = made(adamw)
    for step in range(2):
        tuned.step(batches(step, 1))
        by_hand(other, others, batches(step, 1))
    again, _, resumed = tuned_net(adamw)
    resumed.load_state_dict({"model": other.state_dict(), "optimizer": others.state_dict()})
    for each in (tuned, resumed):
        each.step(batches(2, 2))
    by_hand(other, others, batches(2, 2))
    assert equal(model, other)
    assert equal(again, other)


def test_custom_loop_clips_and_scales_as_without_memtune() -> None:
    """Without an announced last micro-batch all gradients are kept until the step."""
    model, optimizer, tuned = tuned_net(adamw)
    other, others = made(adamw)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for net, stepping in 2 * ((model, optimizer), (other, others)):
            for part in batches(0, 2):
                loss_of(net, part).backward()  # type: ignore[no-untyped-call]
            assert all(p.grad is not None for p in net.out.parameters())
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            stepping.step()
            stepping.zero_grad()
    (message,) = (str(each.message) for each in told)
    assert "saves memory only if the last micro-batch is announced" in message
    assert equal(model, other)
    tuned.step(batches(1, 1))
    by_hand(other, others, batches(1, 1))
    assert equal(model, other)


def marked(model: nn.Module, tuned: Tuned, parts: list[Tensor]) -> None:
    for index, part in enumerate(parts):
        with tuned.micro_batch(last=index == len(parts) - 1):
            (loss_of(model, part) / len(parts)).backward()  # type: ignore[no-untyped-call]


def test_custom_loop_announces_the_last_micro_batch() -> None:
    model, optimizer, tuned = tuned_net(adamw)
    other, others = made(adamw)
    for step in range(4):
        parts = batches(step, 1 + step % 3)
        marked(model, tuned, parts)
        with pytest.raises(ApplyError, match=r"MT364 The gradient of shared\.weight has been used"):
            model.shared.weight.grad = None
        with spent_as_none():
            left = [name for name, p in model.named_parameters() if p.grad is not None]
        assert left == ["scale"]
        optimizer.step()
        optimizer.zero_grad()
        by_hand(other, others, parts)
        assert equal(model, other), step
    marked(model, tuned, batches(4, 1))
    with pytest.raises(ApplyError, match="MT364 clipping cannot change gradients that have been used"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def test_micro_batch_after_an_unfinished_step_raises() -> None:
    """A loop that skips the optimizer's step, after a loss that is not finite, has updated parameters all the
    same.
    """
    model, optimizer, tuned = tuned_net(adamw)
    saved = tuned.state_dict()
    marked(model, tuned, batches(0, 2))
    with pytest.raises(ApplyError, match=r"MT368 A step was begun(.|\n)*4 parameters were updated"):
        marked(model, tuned, batches(1, 1))
    tuned.load_state_dict(saved)
    optimizer.zero_grad()
    marked(model, tuned, batches(1, 1))
    optimizer.step()
    with tuned.micro_batch(last=True):
        loss_of(model, batches(2, 1)[0]).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(ApplyError, match=r"MT367 (.|\n)*one backward, of the sum of the losses"):
            loss_of(model, batches(3, 1)[0]).backward()  # type: ignore[no-untyped-call]


def clips(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)


def test_clipping_in_a_step_hook_raises() -> None:
    model, optimizer = made(adamw)
    optimizer.register_step_pre_hook(clips)
    with pytest.raises(ApplyError, match=r"MT315 (.|\n)*hook runs before"):
        apply(model, optimizer, ROAM, loss=loss_of)
    model, optimizer = made(adamw)
    seen: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(model.out.weight.grad is None))
    tuned = apply(model, optimizer, ROAM, loss=loss_of)
    tuned.step(batches(0, 1))
    assert seen == [True]
    optimizer.register_step_pre_hook(clips)
    with pytest.raises(ApplyError, match="MT364 clipping cannot change gradients that have been used"):
        tuned.step(batches(1, 1))


class Own(torch.optim.AdamW):
    """A subclass may do anything in its step."""


def test_optimizer_that_updates_parameters_together_is_refused_and_undone() -> None:
    for make in (lambda groups: Own(groups), lambda groups: torch.optim.AdamW(groups, differentiable=True)):
        model, optimizer = made(make)
        with pytest.raises(ApplyError, match="MT315"):
            apply(model, optimizer, ROAM, loss=loss_of)
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert not optimizer._optimizer_step_post_hooks


def test_gradient_accumulated_twice_in_one_backward_raises() -> None:
    """A reentrant checkpoint runs a backward of its own for each use of a shared weight."""

    class Reentrant(Net):
        def forward(self, x: Tensor) -> Tensor:
            once: Any = checkpoint(self.shared, x.requires_grad_(), use_reentrant=True)
            return self.out(checkpoint(self.shared, once, use_reentrant=True)) * self.scale  # type: ignore[no-any-return]

    model = Reentrant()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    tuned = apply(model, optimizer, ROAM, loss=loss_of)
    with pytest.raises(ApplyError, match=r"MT367 The gradient of shared"):
        tuned.step(batches(0, 1))
