"""A language model whose blocks are experts in one module, with stacked weights, as Transformers 5 has them;
tokens choose two, the first expert more often than the others.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, SEQ, EXPERTS, TOP = 32, 16, 8, 4, 2
global_batch = 8


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 4 * DIM, DIM) / 4)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM) / 4)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        mixed = torch.zeros_like(hidden_states)
        mask = F.one_hot(top_k_index, self.num_experts).permute(2, 1, 0)
        for expert in mask.sum((-1, -2)).nonzero().flatten().tolist():
            place, token = torch.where(mask[expert])
            gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down_proj[expert])
            mixed.index_add_(0, token, made * top_k_weights[token, place, None])
        return mixed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(DIM), nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        weights, index = self.gate(tokens).softmax(-1).topk(TOP)
        return x + self.experts(tokens, index, weights / weights.sum(-1, keepdim=True)).view_as(x)


class StackedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model() -> nn.Module:
    return StackedExperts()


def batch(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (size, SEQ + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # Adam would divide by tiny gradients, and make an update of their rounding.
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)
