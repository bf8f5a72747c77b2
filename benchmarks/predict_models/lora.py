"""LoRA on a frozen bf16 transformer: fp32 adapters on the attention, the loss in fp32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM, HEADS, LAYERS, RANK = 2048, 128, 256, 4, 5, 8
global_batch = 8


class Adapted(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(n_in, n_out)
        self.a, self.b = (
            nn.Parameter(torch.randn(RANK, n_in) / n_in**0.5),
            nn.Parameter(torch.zeros(n_out, RANK)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (F.dropout(x, 0.05, self.training).float() @ self.a.T @ self.b.T).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v = Adapted(DIM, DIM), nn.Linear(DIM, DIM), Adapted(DIM, DIM)
        self.out, self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        q, k, v = (each(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, DIM), nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    made = Model()
    for name, parameter in made.named_parameters():
        if not name.endswith((".a", ".b")):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(torch.bfloat16)
    return made


def batch(size: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (size, SEQ + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())
