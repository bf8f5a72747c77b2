"""The model of `stacked_experts` with a module for each expert, called with its rows, as Mixtral was before
Transformers 5 and as models of other authors are. The router counts tokens; with `noisy` it draws noise, with
`hashed` it chooses as that of `hashed_experts`.
"""

import torch
import torch.nn.functional as F
from support.models.parallel import hashed_experts, stacked_experts
from support.models.parallel.stacked_experts import (
    DIM,
    EXPERTS,
    TOP,
    batch,
    global_batch,
    loss,
    optimizer,
)
from torch import Tensor, nn


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(DIM, 2 * DIM),
            nn.Linear(DIM, 2 * DIM),
            nn.Linear(2 * DIM, DIM),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Routes as `stacked_experts.Block` does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.noise = nn.Linear(DIM, EXPERTS, bias=False), 0.0
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.register_buffer("tokens", torch.zeros(EXPERTS), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        logits = self.gate(tokens)
        weights, index = self.chosen(logits)
        mask, mixed = F.one_hot(index, EXPERTS).permute(2, 1, 0), torch.zeros_like(tokens)
        self.tokens += mask.sum((-1, -2))
        for expert in mask.sum((-1, -2)).nonzero().flatten().tolist():
            place, token = torch.where(mask[expert])
            made = self.experts[expert](tokens[token])
            made *= weights[token, place, None]
            mixed.index_add_(0, token, made)
        return mixed.view_as(x)

    def chosen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return (logits + self.noise * torch.rand_like(logits)).softmax(-1).topk(TOP)


class HashedExperts(Experts):
    def chosen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        index = hashed_experts.chosen(torch.arange(len(logits), device=logits.device))
        return logits.softmax(-1).gather(1, index), index


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.moe = nn.LayerNorm(DIM), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))


class Listed:
    global_batch = global_batch
    batch, loss, optimizer = staticmethod(batch), staticmethod(loss), staticmethod(optimizer)

    def __init__(self, experts: type[Experts] = Experts, noise: float = 0.0) -> None:
        self._experts, self._noise = experts, noise

    def model(self) -> nn.Module:
        made = stacked_experts.model()
        made.layers = nn.ModuleList(Block() for _ in made.layers)
        for layer in made.layers:
            layer.moe = self._experts()
            layer.moe.noise = self._noise
        return made


learned, noisy, hashed = Listed(), Listed(noise=0.1), Listed(HashedExperts)
