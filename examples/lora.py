"""Fine-tuning: adapters on a frozen base, so that optimizer state and most gradients disappear.

    memtune plan examples/lora.py --gpus 1 --gpu-type rtx-4090
    memtune search examples/lora.py --device cpu --trials 4

With few trained parameters nearly all memory is activations and frozen weights. memtune sees that,
because it records which parameters have gradients: `memtune plan` lists the memory at the peak.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, DEPTH, SEQ, RANK = 64, 64, 4, 32, 4
global_batch = 8


class Adapter(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        return self.base(x) + self.up(self.down(x))


class Layer(nn.Module):
    """A gated block over positions so far, as a small language model has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the block's output."""
        value, gate = self.mix(self.norm(x)).chunk(2, -1)
        counts = torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)
        return x + self.out(value.cumsum(1) / counts * gate.sigmoid())


class Base(nn.Module):
    """The model to adapt."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the next token."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def adapt(module: nn.Module, *names: str) -> None:
    """Give an adapter to each of these linear layers of `module`."""
    for name in names:
        setattr(module, name, Adapter(getattr(module, name)))


def model() -> nn.Module:
    """Return the base, frozen, with adapters in every layer."""
    base = Base()
    for parameter in base.parameters():
        parameter.requires_grad = False
    for layer in base.layers:
        adapt(layer, "mix", "out")
    adapt(base, "head")
    return base


def batch(size: int) -> Tensor:
    """Return `size` rows that count upwards from a random start."""
    return (torch.randint(VOCAB, (size, 1)) + torch.arange(SEQ + 1)) % VOCAB


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW; the trial passes only parameters that are trained."""
    return torch.optim.AdamW(params, lr=1e-2)
