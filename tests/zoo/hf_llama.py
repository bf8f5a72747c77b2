"""A tiny Llama of Hugging Face transformers, from a config: grouped-query attention, rotary positions, no
download.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, SEQ = 256, 32
global_batch = 8


def model() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch(size: int) -> dict[str, Tensor]:
    tokens = torch.randint(VOCAB, (size, SEQ))
    return {"input_ids": tokens, "labels": tokens}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss
