"""Dropout that drops nothing and still runs its ops, so that plans for the model remain valid."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memtune.runtime.dropout import no_dropout


def nodes(out: Tensor) -> list[str]:
    found, node = [], out.grad_fn
    while node is not None:
        found.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return found


@pytest.mark.parametrize("module", [nn.Dropout(0.5), nn.AlphaDropout(0.3)])
def test_no_dropout_runs_the_same_ops_and_drops_nothing(module: nn.Module) -> None:
    x = torch.randn(8, 16, 9, requires_grad=True)
    before = torch.get_rng_state()
    with no_dropout(module):
        y = module(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, x)
    assert torch.equal(gradient, torch.ones_like(x))
    assert torch.equal(torch.get_rng_state(), before)  # the next batch is the same for any split of this one
    assert nodes(y) == nodes(module(x))


def test_no_dropout_covers_positional_attention_arguments() -> None:
    q = torch.randn(1, 2, 8, 4)
    with no_dropout(nn.Identity()):
        got = F.scaled_dot_product_attention(q, q, q, None, 0.5, True)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, q, q, is_causal=True))


def test_no_dropout_restores_recurrent_rates() -> None:
    lstm, x = nn.LSTM(8, 8, 2, dropout=0.5), torch.randn(5, 3, 8)
    with no_dropout(lstm):
        assert torch.equal(lstm(x)[0], lstm(x)[0])
    assert lstm.dropout == 0.5


def test_no_dropout_leaves_other_functions_unchanged() -> None:
    x = torch.randn(4)
    with no_dropout(nn.Identity()):
        assert F.dropout(x, 0.0, True) is x
        assert torch.equal(F.dropout(x, 0.5, training=False), x)


@pytest.mark.parametrize("attention", [False, True])
def test_no_dropout_holds_in_recomputation(attention: bool) -> None:
    q = torch.randn(1, 2, 8, 4, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        return (
            F.scaled_dot_product_attention(y, y, y, dropout_p=0.5) if attention else F.dropout(y, 0.5)
        ).square()

    def g(x: Tensor) -> Tensor:
        y = x.sin()
        return (F.scaled_dot_product_attention(y, y, y) if attention else y).square()

    with no_dropout(nn.Identity()):
        checkpoint(f, q, use_reentrant=False).sum().backward()
    (plain,) = torch.autograd.grad(g(q).sum(), q)
    torch.testing.assert_close(q.grad, plain)
