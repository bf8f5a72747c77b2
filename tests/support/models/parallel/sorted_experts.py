"""The model of `stacked_experts`, whose experts get rows sorted by expert and the number of each one's, as in
torchtitan; no row chooses the last expert.
"""

import torch
import torch.nn.functional as F
from support.models.parallel import stacked_experts
from support.models.parallel.stacked_experts import (
    EXPERTS,
    TOP,
    batch as batch,
    global_batch as global_batch,
    loss as loss,
)
from torch import Tensor, nn


class Experts(stacked_experts.Experts):
    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:  # type: ignore[override]
        made = []
        for expert, rows in enumerate(x.split(num_tokens_per_expert.tolist())):
            gate, up = F.linear(rows, self.gate_up_proj[expert]).chunk(2, -1)
            made.append(F.linear(F.silu(gate) * up, self.down_proj[expert]))
        return torch.cat(made)


class Block(stacked_experts.Block):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, index = self.gate(tokens)[:, :-1].softmax(-1).topk(TOP)
        chosen, order = index.flatten().sort(stable=True)
        counts = torch.zeros(EXPERTS, dtype=torch.int64).scatter_add(0, chosen, torch.ones_like(chosen))
        made = self.experts(tokens[order // TOP], counts) * weights.flatten()[order, None]
        return x + torch.zeros_like(tokens).index_add(0, order // TOP, made).view_as(x)


def model() -> nn.Module:
    made = stacked_experts.model()
    made.layers = nn.ModuleList(Block() for _ in made.layers)
    return made
