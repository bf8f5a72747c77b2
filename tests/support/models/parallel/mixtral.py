"""A small Mixtral, whose experts run as grouped products: no size depends on the router's choices."""

import torch
from support.models.parallel.stacked_experts import DIM, EXPERTS, SEQ, TOP, VOCAB
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

global_batch = 8


def model() -> nn.Module:
    config = MixtralConfig(
        hidden_size=DIM,
        intermediate_size=2 * DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP,
        vocab_size=VOCAB,
        experts_implementation="grouped_mm",
    )
    return MixtralForCausalLM(config)


def batch(size: int) -> Tensor:
    return torch.randint(VOCAB, (size, SEQ))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss
