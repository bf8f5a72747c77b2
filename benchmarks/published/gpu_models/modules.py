"""Single modules whose memory and time Liger-Kernel measured in eager PyTorch: NAME is cross_entropy,
layer_norm, rms_norm, mlp (ACT names its activation), head (a linear layer and cross-entropy) or experts.

As in the source, gradients of the input and the weights are of earlier steps when a step begins, the output
is differentiated by random numbers with `retain_graph`, so saved tensors live to the step's end, and there is
no optimizer. A sample is ROWS rows of D values.
"""

from __future__ import annotations

from typing import Any

import torch
from case_sizes import whole, word
from torch import Tensor, nn
from torch.nn import functional as F

NAME, WIDTH, ROWS, INNER = word("NAME", "mlp"), whole("D", 64), whole("ROWS", 32), whole("FF", 128)
VOCABULARY, EXPERTS, CHOSEN = whole("V", 256), whole("E", 8), whole("K", 2)
DTYPE = getattr(torch, word("TRUE", "bfloat16"))
global_batch = whole("B", 8)
zero_grad_to_none = False
_kept: list[Tensor] = []


def _keep(x: Tensor) -> Tensor:
    """Return `x`, which lives until the next step begins."""
    _kept.append(x)
    return x


class Constant(nn.Module):
    """Adds a constant that is trained to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum."""
        return x + self.bias


class RmsNorm(nn.Module):
    """Root-mean-square norm in float32, as in LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        wide = _keep(x.float())
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * _keep((wide * scale).to(x.dtype))


class Mlp(nn.Module):
    """A gated MLP without biases, as in LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False, dtype=DTYPE) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layers."""
        gate = _keep(self.gate(x))
        active = _keep(F.silu(gate) if word("ACT", "silu") == "silu" else F.gelu(gate, approximate="tanh"))
        found: Tensor = self.down(_keep(active * _keep(self.up(x))))
        return found


class Experts(nn.Module):
    """Gated MLPs in a loop over experts; their stacked weights are products with a constant, so each expert's
    gradient is added to a tensor of all experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH, dtype=DTYPE))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER, dtype=DTYPE))

    def forward(self, x: Tensor, tokens: Tensor, places: Tensor, shares: Tensor) -> Tensor:
        """Return the sum over the chosen experts of rows `x` (tokens, D).

        `tokens` (EXPERTS, rows) has each expert's rows of `x`, `places` their columns of `shares` (tokens,
        CHOSEN).
        """
        gate_up, down = _keep(self.gate_up * 0.02), _keep(self.down * 0.02)
        found = torch.zeros_like(x)
        for expert in range(EXPERTS):
            mine = tokens[expert]
            rows = _keep(x[mine])
            gate, up = _keep(F.linear(rows, gate_up[expert])).chunk(2, -1)
            hidden = _keep(_keep(F.silu(gate)) * up)
            share = _keep(shares[mine, places[expert], None])
            found.index_add_(0, mine, _keep(_keep(F.linear(hidden, down[expert])) * share))
        return found


class Slope(torch.autograd.Function):
    """A sum whose gradient is random, as of an output that is differentiated by random numbers."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        """Return the sum."""
        context.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        """Return random numbers."""
        return _keep(torch.randn_like(context.saved_tensors[0]))


def model() -> nn.Module:
    """Return the module."""
    made = _module()
    if whole("IDLE", 0):
        made.register_buffer("idle", torch.zeros(whole("IDLE", 0), dtype=DTYPE))
    return made


def _module() -> nn.Module:
    match NAME:
        case "cross_entropy":
            return Constant()
        case "layer_norm":
            return nn.LayerNorm(WIDTH, dtype=DTYPE)
        case "rms_norm":
            return RmsNorm()
        case "head":
            return nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=DTYPE)
        case "experts":
            return Experts()
        case _:
            return Mlp()


def batch(size: int) -> tuple[Tensor, ...]:
    """Return classes; for experts each one's rows, their columns among the chosen, and the shares."""
    count = size * ROWS
    if NAME == "experts":
        each = torch.arange(count * CHOSEN)
        tokens = (each // CHOSEN).view(-1, EXPERTS).T.contiguous()
        places = (each % CHOSEN).view(-1, EXPERTS).T.contiguous()
        return tokens, places, torch.rand(count, CHOSEN, dtype=DTYPE)
    return (torch.randint(VOCABULARY if NAME == "head" else WIDTH, (count,)),)


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the loss, or a sum with a random gradient, of rows that are on the device before the step."""
    _kept.clear()
    last = batch[-1]
    x = torch.empty(last.shape[0], WIDTH, dtype=DTYPE, device=last.device)
    for leaf in (x, last):
        if leaf.is_floating_point():
            leaf.requires_grad_()
            leaf.grad = torch.zeros_like(leaf)  # of earlier steps
    if NAME == "cross_entropy":
        return model(F.cross_entropy(x, last))  # type: ignore[no-any-return]
    if NAME == "head":
        return F.cross_entropy(model(x), last)
    found = model(x, *batch) if NAME == "experts" else model(x)
    return Slope.apply(_keep(found))  # type: ignore[no-untyped-call,no-any-return]


class Nothing(torch.optim.Optimizer):
    """An optimizer without state whose step does nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Leave the parameters."""


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer that does nothing."""
    return Nothing(params, {})
