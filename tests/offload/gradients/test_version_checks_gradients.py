"""Offloaded gradients, and a loop that skips a step, clears or changes gradients itself."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path

import pytest
import torch
from support.interrupted_loops import (
    ALL,
    AT_END,
    STORES,
    Net,
    assert_equal,
    batch,
    build,
    loss,
    made,
    plain,
    weights,
)
from torch import Tensor, nn

from memtune.api import Tuned, apply
from memtune.errors import ApplyError
from memtune.ssd import offload_dir

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))


def none(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def assigns_ones(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


CLEARS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "children": lambda model, optimizer: [each.zero_grad() for each in model.children()] and None,
}


def trained(model: Net, optimizer: torch.optim.Optimizer, clear: Callable[..., None]) -> dict[str, Tensor]:
    """Three steps of two micro-batches, the second of which is skipped; gradients are cleared by `clear`."""
    for step in range(3):
        for micro_batch in range(2):
            loss(model, batch(2 * step + micro_batch)).backward()  # type: ignore[no-untyped-call]
        if step != 1:
            optimizer.step()
        clear(model, optimizer)
    return weights(model)


@cache
def trained_plain(clear: Callable[..., None]) -> dict[str, Tensor]:
    return trained(*build(), clear)


@pytest.mark.parametrize(
    "how", ["model", *(pytest.param(each, marks=pytest.mark.slow) for each in ("to zero", "children"))]
)
@pytest.mark.parametrize("name", ALL)
def test_zero_grad_of_the_model_frees_gradients_of_a_skipped_step(name: str, how: str) -> None:
    model, optimizer, _ = made(name)
    assert_equal(trained(model, optimizer, CLEARS[how]), trained_plain(CLEARS[how]))


@pytest.mark.parametrize("name", ALL)
def test_gradients_set_to_none_after_a_skipped_step_are_cleared(name: str) -> None:
    model, optimizer, _ = made(name)
    assert_equal(trained(model, optimizer, none), trained_plain(none))


def test_copy_of_the_model_clears_only_its_own_gradients() -> None:
    model, optimizer, _ = made("zero_offload")
    loss(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.zero_grad()
        assert all(each.grad is None for each in other.parameters())
    held = [each for group in optimizer.param_groups for each in group["params"]]
    assert sum(each.grad is not None for each in held) == len(held)
    model.blocks[1].zero_grad()  # type: ignore[operator]
    assert sum(each.grad is not None for each in held) == len(held) - len(list(model.blocks[1].parameters()))
    model.zero_grad()
    assert all(each.grad is None for each in held)


def clipped(
    model: Net, optimizer: torch.optim.Optimizer, tuned: Tuned | None = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the norms that a loop gets which clips the optimizer's parameters, and the weights after its
    steps.
    """
    norms = []
    for index in range(3):
        optimizer.zero_grad()
        with nullcontext() if tuned is None else tuned.micro_batch(last=True):
            loss(model, batch(index)).backward()  # type: ignore[no-untyped-call]
        held = [each for group in optimizer.param_groups for each in group["params"]]
        norms.append(nn.utils.clip_grad_norm_(held, 1e-2))
        optimizer.step()
    return norms, weights(model)


@cache
def clipped_plain() -> tuple[list[Tensor], dict[str, Tensor]]:
    return clipped(*build())


@pytest.mark.parametrize("name", [*ALL, *AT_END])
def test_clipping_through_param_groups_clips_all_gradients(name: str) -> None:
    (norms, mine), (wanted, plain) = clipped(*made(name)[:2]), clipped_plain()
    assert norms == wanted
    assert norms[0] > 1e-2
    assert_equal(mine, plain)


@pytest.mark.parametrize("name", ["l2l", "late", "per_gradient", "one by one"])
def test_clipping_after_updates_inside_backward_raises(name: str) -> None:
    with pytest.raises(ApplyError, match="MT364 clipping cannot change gradients that have been used"):
        clipped(*made(name))


def replaced(model: Net, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Three steps, each with gradients that user code has assigned to the parameters of the optimizer."""
    for index in range(3):
        loss(model, batch(index)).backward()  # type: ignore[no-untyped-call]
        for group in optimizer.param_groups:
            for each in group["params"]:
                each.grad = each.grad.sign()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@cache
def replaced_plain() -> dict[str, Tensor]:
    return replaced(*build())


@pytest.mark.parametrize("name", [*ALL, *AT_END])
def test_gradients_assigned_to_the_optimizers_parameters_are_used(name: str) -> None:
    assert_equal(replaced(*made(name)[:2]), replaced_plain())


EARLY = ["l2l", "late", "per_gradient", "one by one"]
TOUCHES: dict[str, Callable[[Net, torch.optim.Optimizer], object]] = {
    "read": lambda model, _: [each.grad for each in model.parameters()],
    "assign": assigns_ones,
    "clear": none,
    "another optimizer": lambda model, _: torch.optim.SGD(model.parameters()).step(),
    "another optimizer of the same groups": lambda _, optimizer: torch.optim.SGD(
        [each for group in optimizer.param_groups for each in group["params"]]
    ).step(),
}
LOADS: dict[str, Callable[[Net, torch.optim.Optimizer, Tuned], object]] = {
    "model": lambda model, optimizer, tuned: model.load_state_dict(model.state_dict()),
    "block": lambda model, optimizer, tuned: model.blocks[3].load_state_dict(model.blocks[3].state_dict()),  # type: ignore[operator]
    "optimizer": lambda model, optimizer, tuned: optimizer.load_state_dict(optimizer.state_dict()),
    "all": lambda model, optimizer, tuned: tuned.load_state_dict(copy.deepcopy(tuned.state_dict())),
}


@pytest.mark.parametrize("how", TOUCHES)
@pytest.mark.parametrize("name", EARLY)
def test_gradients_that_an_update_inside_backward_has_used_can_be_neither_read_nor_changed(
    name: str, how: str
) -> None:
    model, optimizer, tuned = made(name)
    with tuned.micro_batch(last=True):
        loss(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ApplyError, match="has been used and freed by an update inside backward"):
        TOUCHES[how](model, optimizer)
    if how == "read":  # others may have changed the gradients that were not used
        optimizer.step()
        optimizer.zero_grad()
        assert all(each.grad is None for each in model.parameters())
        assert_equal(weights(model), plain(1))


@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("name", EARLY)
def test_load_between_updates_inside_backward_and_their_step_is_refused_in_the_step(
    name: str, how: str
) -> None:
    model, optimizer, tuned = made(name)
    with tuned.micro_batch(last=True):
        loss(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    LOADS[how](model, optimizer, tuned)
    with pytest.raises(ApplyError, match="were loaded between a backward that had updated some and"):
        optimizer.step()


@pytest.mark.parametrize("name", EARLY)
def test_load_of_all_after_updates_inside_backward_ends_a_step_that_is_dropped(name: str) -> None:
    model, optimizer, tuned = made(name)
    state = copy.deepcopy(tuned.state_dict())
    with tuned.micro_batch(last=True):
        loss(model, batch(7)).backward()  # type: ignore[no-untyped-call]
    tuned.load_state_dict(state)
    optimizer.zero_grad()
    with tuned.micro_batch(last=True):
        loss(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert_equal(weights(model), plain(1))


@pytest.mark.parametrize("through_data", [False, True], ids=["assigned", "through data"])
@pytest.mark.parametrize("name", EARLY)
def test_change_of_gradients_in_any_way_after_some_were_used_raises(name: str, through_data: bool) -> None:
    model, optimizer, tuned = made(name)
    with tuned.micro_batch(last=True):
        loss(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    for each in model.parameters():
        with suppress(ApplyError):  # of a gradient that has been used
            if each.grad is not None and through_data:
                each.grad.data.clamp_(-1e-6, 1e-6)
            elif each.grad is not None:
                each.grad = each.grad * 0.5
    with pytest.raises(ApplyError, match="changed between backward and the optimizer's step"):
        optimizer.step()


@pytest.mark.parametrize("name", EARLY)
def test_clearing_of_gradients_that_an_update_has_used_raises(name: str) -> None:
    model, optimizer, tuned = made(name)
    with tuned.micro_batch(last=True):
        loss(model, batch(0)).backward()  # type: ignore[no-untyped-call]
    model.blocks[1].zero_grad()  # type: ignore[operator]
    with pytest.raises(ApplyError, match="gradients were cleared that an update inside backward had used"):
        optimizer.step()


@pytest.mark.parametrize("name", ["l2l", "zero_offload", "native", "optimizer_cpu"])
def test_moments_restart_when_the_state_of_the_optimizer_is_cleared(name: str) -> None:
    runs = []
    for model, optimizer in (made(name)[:2], build()):
        for index in range(4):
            loss(model, batch(index)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if index == 1:
                optimizer.state.clear()
        runs.append(weights(model))
    assert_equal(*runs)


@pytest.mark.parametrize("name", ["native", "optimizer_cpu", "zero_infinity"])
def test_another_dtype_of_the_weights_after_apply_raises(name: str) -> None:
    model, optimizer, _ = made(name)
    model.bfloat16()

    def step() -> None:
        loss(model, batch(0).bfloat16()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    with pytest.raises(ApplyError, match=r"float32 was changed to .* torch.bfloat16 after memtune.apply"):
        step()


def only_blocks() -> tuple[Net, torch.optim.Optimizer]:
    """Return a net of which the blocks alone are trained, as with LoRA."""
    model, _ = build()
    for each in (model.first, model.last):
        each.requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2, fused=True)


def tuned_blocks(name: str) -> tuple[Net, torch.optim.Optimizer]:
    model, optimizer = only_blocks()
    settings, plan = STORES[name]
    config = {"settings": {"offload": {"states": settings}}, "plan": {"offload.states": plan} if plan else {}}
    apply(model, optimizer, config, loss=loss, strict=False)
    return model, optimizer


@pytest.mark.parametrize("name", STORES)
def test_blocks_alone_are_trained_as_plain(name: str) -> None:
    """All gradients are offloaded."""
    ended = []
    for model, optimizer in (tuned_blocks(name), only_blocks()):
        for index in range(3):
            loss(model, batch(index)).backward()  # type: ignore[no-untyped-call]
            loss(model, batch(index + 7)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
        ended.append(weights(model))
    assert_equal(*ended)


def scales_one(model: Net) -> None:
    _weight(model).grad.mul_(0.5)  # type: ignore[union-attr]


def scales_all(model: Net) -> None:
    torch._foreach_mul_([each.grad for each in model.parameters() if each.grad is not None], 0.5)


def assigns(model: Net) -> None:
    _weight(model).grad = torch.full((16, 8), 1e-3)


def drops_one(model: Net) -> None:
    _weight(model).grad = None


def drops_all(model: Net) -> None:
    for each in model.parameters():
        each.grad = None


def clips_by_hand(model: Net) -> None:
    there = [each.grad for each in model.parameters() if each.grad is not None]
    norm = torch.stack([each.norm() for each in there]).norm()
    for each in there:
        each.mul_((1e-2 / norm).clamp(max=1.0))


def clips_a_block(model: Net) -> None:
    nn.utils.clip_grad_norm_(model.blocks[1].parameters(), 1e-3)
    nn.utils.clip_grad_value_(model.blocks[2].parameters(), 1e-4)


def zeroes(model: Net) -> None:
    model.blocks[1].zero_grad(set_to_none=False)  # type: ignore[operator]
    for each in model.blocks[2].parameters():
        each.grad.zero_()  # type: ignore[union-attr]


def evaluates(model: Net) -> None:
    with torch.no_grad():
        loss(model, batch(99))


def scales_data(model: Net) -> None:
    for each in model.parameters():
        if each.grad is not None:
            each.grad.data.clamp_(-1e-3, 1e-3)


def scales_one_and_clips(model: Net) -> None:
    scales_one(model)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def replaces_and_clips(model: Net) -> None:
    assigns(model)
    _weight(model).grad = _weight(model).grad * 100  # type: ignore[operator]
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def _weight(model: Net) -> nn.Parameter:
    weight = model.blocks[1].up.weight  # type: ignore[union-attr]
    assert isinstance(weight, nn.Parameter)
    return weight


@pytest.mark.drawn(84)
@pytest.mark.parametrize(
    "change",
    [
        *(scales_one, scales_all, assigns, drops_one, drops_all, clips_by_hand, clips_a_block, zeroes),
        *(evaluates, scales_data, scales_one_and_clips, replaces_and_clips),
    ],
)
@pytest.mark.parametrize("name", ALL)
def test_changes_of_offloaded_gradients_train_as_the_plain_model(
    name: str, change: Callable[[Net], None]
) -> None:
    """Gradients are `grad` of the parameters until the step, and the next backward adds to them."""
    model, optimizer, _ = made(name)
    found, wanted = changed(model, optimizer, change), changed_plain(change)
    assert found.keys() == wanted.keys()
    assert_equal(found, wanted)


def changed(net: Net, optimizer: torch.optim.Optimizer, change: Callable[[Net], None]) -> dict[str, Tensor]:
    """Return the weights and all gradients of three steps with `change` after backward."""
    seen: dict[str, Tensor] = {}
    for index in range(3):
        for part in range(2):
            loss(net, batch(2 * index + part)).backward()  # type: ignore[no-untyped-call]
            seen |= {
                f"{index} {part} {key}": each.grad.clone()
                for key, each in net.named_parameters()
                if each.grad is not None
            }
            if index != 1 or part == 0:
                change(net)
        optimizer.step()
        optimizer.zero_grad(set_to_none=index == 0)
    return weights(net) | seen


@cache
def changed_plain(change: Callable[[Net], None]) -> dict[str, Tensor]:
    return changed(*build(), change)


@pytest.mark.parametrize("name", ALL)
def test_gradient_hooks_after_apply_read_and_change_gradients(name: str) -> None:
    """Both kinds of hooks, and one that ends the backward of the second step."""
    model, optimizer, _ = made(name)
    runs = []
    for net, own in ((model, optimizer), build()):
        seen: dict[str, Tensor] = {}

        def halves(parameter: Tensor, seen: dict[str, Tensor] = seen) -> None:
            assert parameter.grad is not None
            seen[str(len(seen))] = parameter.grad.clone()
            parameter.grad.mul_(0.5)
            if len(seen) == 2:
                raise Interrupted

        _weight(net).register_post_accumulate_grad_hook(halves)
        net.blocks[2].norm.weight.register_hook(lambda gradient: gradient + 1e-3)  # type: ignore[union-attr, operator]
        for index in range(4):
            with pytest.raises(Interrupted) if index == 1 else nullcontext():
                loss(net, batch(index)).backward()  # type: ignore[no-untyped-call]
            if index != 1:
                own.step()
            own.zero_grad()
        runs.append(weights(net) | seen)
    assert_equal(*runs)


@pytest.mark.parametrize("name", ALL)
def test_gradient_that_a_hook_uses_and_frees_is_not_offloaded(name: str) -> None:
    """The user's own update of one weight, inside backward."""
    model, optimizer, _ = made(name)
    runs = []
    for net, own in ((model, optimizer), build()):
        seen: list[Tensor] = []

        def uses(parameter: Tensor, seen: list[Tensor] = seen) -> None:
            assert parameter.grad is not None
            seen.append(parameter.grad.clone())
            parameter.grad = None

        _weight(net).register_post_accumulate_grad_hook(uses)
        for index in range(3):
            own.zero_grad()
            loss(net, batch(index)).backward()  # type: ignore[no-untyped-call]
            own.step()
        runs.append(weights(net) | {str(index): each for index, each in enumerate(seen)})
    assert_equal(*runs)


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize(
    ("name", "again"),
    [("l2l", True), ("zero_offload", True), ("lohan", True), ("l2l", False), ("native", False)],
)
def test_step_interrupted_by_a_hook_can_be_repeated_or_dropped(name: str, again: bool) -> None:
    def fails(*_: object) -> None:
        raise Interrupted

    found = []
    for model, optimizer in (made(name)[:2], build()):
        for index in range(3):
            optimizer.zero_grad()
            loss(model, batch(index)).backward()  # type: ignore[no-untyped-call]
            if index == 1:
                handle = optimizer.register_step_pre_hook(fails)
                with pytest.raises(Interrupted):
                    optimizer.step()
                handle.remove()
                if not again:  # a step of one block's gradients alone
                    model.zero_grad()
                    loss(model.blocks[0], batch(9)).backward()  # type: ignore[no-untyped-call, arg-type]
            optimizer.step()
        found.append(weights(model))
    assert_equal(*found)


@pytest.mark.parametrize("name", STORES)
def test_backward_that_is_differentiated_again_is_refused_where_weights_are_freed(name: str) -> None:
    """Frames of pages hold other weights by then: without a refusal the second backward was wrong."""
    model, _, _ = made(name)
    value = loss(model, batch(0))
    with pytest.raises(ApplyError, match="create_graph=True"):
        torch.autograd.grad(value, list(model.parameters()), create_graph=True)
