"""Vision transformers as torchvision has them, around `nn.MultiheadAttention`.

D, L, H and FF are width, blocks, heads and inner width, PATCH the side of a patch; the rest as in images.py.
KEEPS_GRADS represents a loop that calls zero_grad between forward and backward, so that the gradients of the
step before are there in forward. VERSION=2.1 is torch of 2023-06: Adam's foreach step makes a second
temporary of all weights (torch/optim/adam.py, `denom = torch._foreach_add(exp_avg_sq_sqrt, eps)`), and flash
attention returns samples before lengths (transformers/cuda/attention.cu reshapes to `Nnz_q`), so
`nn.MultiheadAttention` copies its output.
"""

from __future__ import annotations

from typing import Any

import torch
from case_sizes import whole, word
from images import CLASSES, DTYPE, SIDE, batch, loss, optimizer_of
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, PATCH = whole("D", 1024), whole("H", 16), whole("PATCH", 16)
OLD = word("VERSION") == "2.1"
global_batch = whole("B", 8)
zero_grad_to_none = not whole("KEEPS_GRADS", 0)
__all__ = ["batch", "loss", "model", "optimizer"]
if whole("TF32", 0):
    torch.set_float32_matmul_precision("high")


class Block(nn.Module):
    """Attention and MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        up, down = nn.Linear(WIDTH, whole("FF", 4096)), nn.Linear(whole("FF", 4096), WIDTH)
        self.mlp = nn.Sequential(up, nn.GELU(), nn.Dropout(0.0), down, nn.Dropout(0.0))

    def attend(self, x: Tensor) -> Tensor:
        """Return attention of `x` (samples, patches, width)."""
        made = self.attention
        if not OLD:
            new: Tensor = made(x, x, x, need_weights=False)[0]
            return new
        length = x.shape[1]
        parts = F.linear(x.transpose(0, 1), made.in_proj_weight, made.in_proj_bias).unflatten(-1, (3, WIDTH))
        query, key, value = (
            part.view(length, -1, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
            for part in parts.unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        )
        found = F.scaled_dot_product_attention(query, key, value)
        mixed: Tensor = made.out_proj(
            found.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format).view(-1, WIDTH)
        )
        return mixed.view(length, -1, WIDTH).transpose(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block."""
        x = self.attend(self.norms[0](x)) + x
        mixed: Tensor = x + self.mlp(self.norms[1](x))
        return mixed


class Vit(nn.Module):
    """Patches, a class token, blocks and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, (SIDE // PATCH) ** 2 + 1, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(whole("L", 24))))
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each image."""
        x = self.patches(images).flatten(2).permute(0, 2, 1)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


def model() -> nn.Module:
    """Return the classifier."""
    return Vit().to(DTYPE)


class OldAdam(torch.optim.Optimizer):
    """Adam's foreach step with two temporaries of all weights."""

    def __init__(self, params: list[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients."""
        for group in self.param_groups:
            params = [each for each in group["params"] if each.grad is not None]
            grads = [each.grad for each in params]
            for each in params:
                if not self.state[each]:
                    self.state[each] = {name: torch.zeros_like(each) for name in ("exp_avg", "exp_avg_sq")}
            means, squares = (
                [self.state[each][name] for each in params] for name in ("exp_avg", "exp_avg_sq")
            )
            torch._foreach_mul_(means, 0.9)
            torch._foreach_add_(means, grads, alpha=0.1)
            torch._foreach_mul_(squares, 0.999)
            torch._foreach_addcmul_(squares, grads, grads, 0.001)
            roots = torch._foreach_sqrt(squares)
            below = torch._foreach_add(roots, 1e-8)
            torch._foreach_addcdiv_(params, means, below, -group["lr"])


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of the case."""
    if OLD and word("OPT", "Adam") == "Adam":
        return OldAdam(params, lr=5e-5)
    return optimizer_of(params, word("OPT", "Adam"), lr=5e-5)
