"""Deferred logits: values and gradients equal the plain model's for any use by the loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memtune.activations.tiling.deferred_logits import Count, Logits, lazy_head
from memtune.errors import ApplyError

CLASSES, WIDTH = 48, 16
WEIGHTS = torch.linspace(0.1, 2.0, CLASSES)
Loss = Callable[[Tensor, Tensor], Tensor]

IN_PARTS: dict[str, Loss] = {
    "flatten": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "view": lambda z, y: F.cross_entropy(z.view(-1, z.size(-1)), y.view(-1)),
    "module": lambda z, y: nn.CrossEntropyLoss()(z.reshape(-1, CLASSES), y.reshape(-1)),
    "shifted": lambda z, y: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].reshape(-1)
    ),
    "classes second": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "float": lambda z, y: F.cross_entropy(z.float().flatten(0, -2), y.flatten()),
    "ignored": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten().clamp(min=0), ignore_index=3),
    "sum": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum"),
    "smoothed": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "weighted": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), weight=WEIGHTS),
    "both": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), weight=WEIGHTS, label_smoothing=0.1),
    "capped": lambda z, y: F.cross_entropy((15 * torch.tanh(z / 15)).flatten(0, 1), y.flatten()),
    "distributions": lambda z, y: F.cross_entropy(
        z.flatten(0, 1), F.one_hot(y.flatten().clamp(min=0), CLASSES).float()
    ),
    "times two": lambda z, y: 2 * F.cross_entropy(z.flatten(0, 1), y.flatten()),
}
PARTLY_WHOLE: dict[str, Loss] = {
    "z-loss": lambda z, y: (
        F.cross_entropy(z.flatten(0, 1), y.flatten()) + 1e-3 * z.logsumexp(-1).square().mean()
    ),
    "accuracy after": lambda z, y: [F.cross_entropy(z.flatten(0, 1), y.flatten()), z.detach().argmax(-1)][0],
}
WHOLE: dict[str, Loss] = {
    "z-loss first": lambda z, y: (
        1e-3 * z.logsumexp(-1).square().mean() + F.cross_entropy(z.flatten(0, 1), y.flatten())
    ),
    "per token": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").mean(),
    "written into": lambda z, y: F.cross_entropy(z.div_(2).flatten(0, 1), y.flatten()),
    "written into after a view": lambda z, y: _write_after_view(z, y),
    "nll": lambda z, y: F.nll_loss(z.log_softmax(-1).flatten(0, 1), y.flatten()),
    "another loss": lambda z, y: z.square().mean(),
    "no gradient first": lambda z, y: _accuracy_first(z, y),
    "part of the classes": lambda z, y: F.cross_entropy(z[..., :40].flatten(0, 1), y.flatten().clamp(max=39)),
}


def _write_after_view(z: Tensor, y: Tensor) -> Tensor:
    view = z.flatten(0, 1)
    z.div_(2)
    return F.cross_entropy(view, y.flatten())


def _accuracy_first(z: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        hits = (z.argmax(-1) == y).sum()
    return F.cross_entropy(z.flatten(0, 1), y.flatten()) + 0 * hits


def run(
    loss: Loss, *, lazy: bool, bias: bool = True, autocast: bool = False
) -> tuple[Tensor, dict[str, Tensor], Count]:
    torch.manual_seed(0)
    embedding, head, count = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias), Count()
    if not bias:
        head.weight = embedding.weight
    if lazy:
        head.forward = lazy_head(head, chunks=4, count=count)  # type: ignore[assignment, method-assign]
    tokens, targets = torch.randint(CLASSES, (3, 7)), torch.randint(CLASSES, (3, 7))
    targets[0, 2] = -100
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = loss(head(embedding(tokens)), targets)
    (value / 3).backward()
    found = {
        f"{i}.{name}": p.grad for i, m in enumerate((embedding, head)) for name, p in m.named_parameters()
    }
    return value.detach(), {name: g for name, g in found.items() if g is not None}, count


def check(loss: Loss, *, bias: bool, autocast: bool) -> Count:
    wanted, got = (run(loss, lazy=lazy, bias=bias, autocast=autocast) for lazy in (False, True))
    unit = 2.0**-8 if autocast else 2.0**-23
    assert got[0].dtype == wanted[0].dtype
    torch.testing.assert_close(got[0], wanted[0], rtol=8 * 2.0**-23, atol=0)
    assert got[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert float((got[1][name] - gradient).abs().max()) <= 8 * unit * float(gradient.abs().max()), name
    return got[2]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "tied"])
@pytest.mark.parametrize("name", IN_PARTS)
def test_known_losses_are_tiled(name: str, bias: bool, autocast: bool) -> None:
    count = check(IN_PARTS[name], bias=bias, autocast=autocast)
    assert (count.tiled, count.whole) == (1, 0), count.read_by


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", PARTLY_WHOLE)
def test_other_readers_get_plain_logits(name: str, autocast: bool) -> None:
    count = check(PARTLY_WHOLE[name], bias=True, autocast=autocast)
    assert (count.tiled, count.whole) == (1, 1)


@pytest.mark.parametrize("name", WHOLE)
def test_unknown_losses_run_plainly(name: str) -> None:
    count = check(WHOLE[name], bias=True, autocast=False)
    assert (count.tiled, count.whole) == (0, 1)


def small(chunks: int = 2) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    head = nn.Linear(4, 6)
    head.forward = lazy_head(head, chunks=chunks, count=Count())  # type: ignore[assignment, method-assign]
    return head, torch.randn(5, 4), torch.randint(6, (5,))


def test_head_without_gradients_is_plain() -> None:
    head, x, _ = small()
    with torch.no_grad():
        assert type(head(x)) is Tensor


def test_logits_report_plain_metadata() -> None:
    head, x, _ = small()
    logits = head(x)
    assert isinstance(logits, Logits)
    assert (logits.shape, logits.dtype, logits.requires_grad, len(logits)) == ((5, 6), torch.float32, True, 5)
    assert (logits.is_cpu, logits.is_cuda, logits.is_xpu) == (True, False, False)
    assert logits.call.plain is None  # they were not computed
    assert torch.equal(logits + 0 * logits.detach(), F.linear(x, head.weight, head.bias))


def test_loss_runs_with_more_parts_than_rows() -> None:
    head, x, y = small(chunks=64)
    assert torch.isfinite(F.cross_entropy(head(x), y))


def test_loss_holds_neither_hidden_states_nor_logits() -> None:
    head, x, y = small()
    hidden = x.clone().requires_grad_()
    middle = hidden * 1
    seen = weakref.ref(middle)
    loss = F.cross_entropy(head(middle), y)
    del middle
    assert seen() is None
    loss.backward()
    assert hidden.grad is not None


def test_second_backward_raises() -> None:
    head, x, y = small()
    loss = F.cross_entropy(head(x), y)
    loss.backward(retain_graph=True)
    with pytest.raises(ApplyError, match="twice") as caught:
        loss.backward()
    assert caught.value.code == "MT331"


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, logits: Tensor) -> Tensor:
        return logits.square().sum()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * torch.ones(5, 6)


def test_users_autograd_function_on_logits_raises() -> None:
    head, x, _ = small()
    with pytest.raises(ApplyError):
        Own.apply(head(x)).backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is None


def test_hooks_on_logits_may_wait_but_not_read() -> None:
    head, x, y = small()
    logits, called = head(x), []
    handle = logits.register_hook(lambda gradient: called.append(1))
    logits.register_hook(lambda gradient: gradient).remove()
    F.cross_entropy(logits, y).backward()
    assert called == [1]
    handle.remove()
    logits = head(x)
    logits.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ApplyError, match="hook") as caught:
        F.cross_entropy(logits, y).backward()
    assert caught.value.code == "MT333"


def test_hooks_are_registered_on_plain_logits() -> None:
    head, x, _ = small()
    logits = head(x)
    logits.register_hook(lambda gradient: gradient * 2)
    logits.square().sum().backward()
    doubled = head.weight.grad
    head.weight.grad = None
    head(x).square().sum().backward()
    assert torch.equal(doubled, 2 * head.weight.grad)


@pytest.mark.parametrize("name", ["flatten", "ignored", "weighted", "sum"])
def test_parts_of_a_plain_cross_entropy_run_no_autograd_engine(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = nn.Linear(WIDTH, CLASSES)
    head.forward = lazy_head(head, chunks=4, count=Count())
    monkeypatch.setattr(torch.autograd, "grad", None)
    IN_PARTS[name](head(torch.randn(2, 8, WIDTH)), torch.randint(CLASSES, (2, 8))).backward()
    assert head.weight.grad is not None
