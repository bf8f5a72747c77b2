"""Small language models whose logits or MLPs set the peak, one object per case: `language_models.py:large`
and so on.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQ, DIM, LARGE_VOCAB, CAP = 48, 32, 2048, 15.0


class Residual(nn.Module):
    """A norm and an MLP on the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Plain(nn.Module):
    """An MLP eight times as wide as the residual stream, with a norm inside and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 8 * DIM), nn.Linear(8 * DIM, DIM)
        self.up.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        _, _, _ = x.shape  # no flat tokens
        return self.down(F.gelu(self.up(self.norm(x))))


class Gated(nn.Module):
    """An MLP as LLaMA's, as wide."""

    def __init__(self) -> None:
        super().__init__()
        ends = ((DIM, 8 * DIM), (DIM, 8 * DIM), (8 * DIM, DIM))
        self.gate, self.up, self.down = (nn.Linear(*each, bias=False) for each in ends)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Wide(nn.Module):
    """A residual block around one of the two MLPs."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(DIM), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class OwnHead(nn.Module):
    """A custom head: scaled logits from x @ weight.t()."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()) * 0.5


class Model(nn.Module):
    """Embedding, layers, head; no module for the head where `head` is None: F.linear with the embedding's
    weight.
    """

    def __init__(self, vocab: int, layers: list[nn.Module], head: str | None) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(vocab, DIM), nn.ModuleList(layers)
        self.has_head = head is not None
        if head == "own":
            self.head = OwnHead(self.embedding.weight)
        elif head is not None:
            self.head = nn.Linear(DIM, vocab, bias=head == "biased")
        if head == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if self.has_head else F.linear(x, self.embedding.weight)


class Story:
    """A workload with ignored targets and a cross-entropy loss."""

    global_batch = 8

    def __init__(self, *, vocab: int = LARGE_VOCAB, head: str | None = "tied", wide: bool = False) -> None:
        self.vocab, self.head, self.wide = vocab, head, wide

    def model(self) -> nn.Module:
        wide = [Wide(Gated() if i % 2 else Plain()) for i in range(4 * self.wide)]
        return Model(self.vocab, wide or [Residual(), Residual()], self.head)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.vocab, (size, SEQ + 1))
        targets = tokens[:, 1:].clone()
        targets[:, ::5] = -100
        return tokens[:, :-1], targets

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        logits = model(inputs)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Capped(Story):
    """Under bfloat16 autocast, the logits capped and the loss in float32 outside of autocast; plain SGD."""

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(self.vocab, (size, SEQ + 1))
        return tokens[:, :-1], tokens[:, 1:]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
            logits = model(inputs)
        logits = CAP * torch.tanh(logits.float() / CAP)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Shifted(Story):
    """The loss cuts the last token off the logits."""

    def batch(self, size: int) -> Tensor:
        return torch.randint(self.vocab, (size, SEQ))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        shifted = self.logits(model, batch)[..., :-1, :].contiguous()
        targets = batch[..., 1:].contiguous()
        return F.cross_entropy(shifted.view(-1, self.vocab), targets.view(-1))

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        return model(tokens)


class ShiftedAutocast(Shifted):
    """The same under bfloat16 autocast, cast to float32 before the cut."""

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            return model(tokens).float()


large, no_head, own_head = Story(), Story(head=None), Story(head="own")
shifted, shifted_autocast, capped = Shifted(), ShiftedAutocast(), Capped(head="biased")
wide_mlp = Story(vocab=64, head="plain", wide=True)
wide_both = Story(vocab=1024, head="plain", wide=True)
