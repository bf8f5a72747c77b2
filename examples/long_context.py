"""Long sequences: activations grow with the tokens, the logits of a large vocabulary most of all.

    memtune plan examples/long_context.py --gpus 4 --gpu-type h100-80g --axes recompute,split
    memtune search examples/long_context.py --device cpu --axes recompute,split --trials 4

`split: {kind: tiled}` computes logits and loss in tiles, so that they never exist at once;
`head_context` divides the sequence over ranks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, DEPTH, SEQ = 512, 32, 3, 256
global_batch = 4


class Layer(nn.Module):
    """Causal attention and an MLP, each with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q_proj, self.k_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.v_proj, self.o_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        y = self.norm_1(x)
        q, k, v = (
            p(y).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """A decoder-only language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(VOCAB, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next token."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    """Return the decoder."""
    return Decoder()


def batch(size: int) -> Tensor:
    """Return `size` rows that count upwards in steps of one to four."""
    start, step = torch.randint(VOCAB, (size, 1)), torch.randint(1, 5, (size, 1))
    return (start + step * torch.arange(SEQ + 1)) % VOCAB


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW."""
    return torch.optim.AdamW(params, lr=3e-3)
