"""BERT-like: encoder layers of torch itself, a padding mask, a loss over the masked positions only."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, SEQ, DIM, HEADS, LAYERS, MASK, PAD = 1024, 64, 192, 4, 4, 3, 0
global_batch = 8


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions, self.segments = (
            nn.Embedding(VOCAB, DIM),
            nn.Embedding(SEQ, DIM),
            nn.Embedding(2, DIM),
        )
        self.norm, self.drop = nn.LayerNorm(DIM), nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(
            DIM, HEADS, 4 * DIM, dropout=0.1, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.transform, self.decoder = nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]] + self.segments(segments)
        x = self.encoder(self.drop(self.norm(x)), src_key_padding_mask=tokens == PAD)
        return self.decoder(F.gelu(self.transform(x)))


def model() -> nn.Module:
    return Bert()


def batch(size: int) -> dict[str, Tensor]:
    labels = torch.randint(4, VOCAB, (size, SEQ))
    hidden = torch.rand(size, SEQ) < 0.15
    tokens = labels.masked_fill(hidden, MASK)
    tokens[:, -8:] = PAD
    segments = (torch.arange(SEQ) > SEQ // 2).long().expand(size, SEQ).contiguous()
    return {"tokens": tokens, "segments": segments, "labels": labels.masked_fill(~hidden, -100)}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"], batch["segments"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
