"""The model of `stacked_experts`, routed by position (hash layers): three in four tokens choose experts 0 and
1, the others one of them and the last one.
"""

import torch
from support.models.parallel import stacked_experts
from support.models.parallel.stacked_experts import (
    EXPERTS,
    batch as batch,
    global_batch as global_batch,
    loss as loss,
)
from torch import Tensor, nn


class Block(stacked_experts.Block):
    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        index = chosen(torch.arange(len(tokens), device=x.device))
        weights = self.gate(tokens).softmax(-1).gather(1, index)
        return x + self.experts(tokens, index, weights).view_as(x)


def chosen(place: Tensor) -> Tensor:
    """Return the experts of the tokens at each place."""
    return torch.stack([place % 2, torch.where(place % 4 == 0, EXPERTS - 1, 1 - place % 2)], 1)


def model() -> nn.Module:
    made = stacked_experts.model()
    made.layers = nn.ModuleList(Block() for _ in made.layers)
    return made
