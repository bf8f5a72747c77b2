"""Hugging Face models from their configs with random weights, float32; batches as xMem and the guide on
training memory make them. NAME picks the model, OPT the optimizer. With HOLDS the loop keeps the model's
outputs (logits, keys and values) until the next forward has returned, as one that assigns them to a variable;
with AMP the model runs under autocast. With SOFTMAX=input a softmax of attention saves its input besides its
output, as torch did before 1.11.
"""

from __future__ import annotations

from typing import Any

import torch
from case_sizes import whole, word
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPTNeoConfig,
    T5Config,
    T5ForConditionalGeneration,
)

NAME, LENGTH = word("NAME", "gpt2"), whole("T", 128)
global_batch = whole("B", 8)
_held: list[Any] = []
zero_grad_to_none = not whole("KEEPS_GRADS", 0)
_VOCABULARY = {"bert-large": 30522, "t5-small": 32128}.get(NAME, 50257)


class SavingSoftmax(torch.autograd.Function):
    """Softmax that saves input and output."""

    @staticmethod
    def forward(context: Any, scores: Tensor, dim: int) -> Tensor:
        """Return probabilities over `dim`."""
        found = torch.softmax(scores, dim)
        context.save_for_backward(scores, found)
        context.dim = dim
        return found

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the scores."""
        _, found = context.saved_tensors
        return torch._softmax_backward_data(gradients[0], found, context.dim, found.dtype), None


def _softmax(scores: Tensor, dim: int) -> Tensor:
    # Autocast computes a softmax in float32.
    return SavingSoftmax.apply(scores.float(), dim)  # type: ignore[no-any-return,no-untyped-call]


if word("SOFTMAX") == "input":
    nn.functional.softmax = _softmax


def model() -> nn.Module:
    """Return the model."""
    attention = word("ATTN", "sdpa")
    config: Any
    if NAME == "bert-large":
        config = BertConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            attn_implementation=attention,
        )
        return BertForSequenceClassification(config)  # type: ignore[no-any-return]
    if NAME == "t5-small":
        # Before transformers 5 the model had no other attention.
        config = T5Config(decoder_start_token_id=0, attn_implementation="eager")
        return T5ForConditionalGeneration(config)  # type: ignore[no-any-return]
    if NAME.startswith("gpt-neo"):
        config = GPTNeoConfig(
            hidden_size=768,
            num_layers=12,
            num_heads=12,
            attention_types=[[["global", "local"], 6]],
            attn_implementation="eager",
        )
    elif NAME == "cerebras-111m":
        config = GPT2Config(
            n_layer=10,
            n_embd=768,
            n_head=12,
            n_inner=3072,
            n_positions=2048,
            activation_function="gelu",
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            attn_implementation=attention,
        )
    else:
        config = GPT2Config(n_layer=6 if NAME == "distilgpt2" else 12, attn_implementation=attention)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def batch(size: int) -> dict[str, Tensor]:
    """Return token ids, padded to one length, and labels."""
    ids = torch.randint(100, _VOCABULARY - 200, (size, LENGTH))
    if NAME == "bert-large":
        return {"input_ids": ids, "labels": torch.randint(2, (size,))}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the model's own loss; with `SHIFTS` that of transformers before 4.46, which copies shifted
    logits.
    """
    if not whole("SHIFTS", 0):
        narrow = getattr(torch, word("AMP", "bfloat16"))
        with torch.autocast(batch["input_ids"].device.type, narrow, enabled=bool(word("AMP"))):
            return _kept(model(**batch)).loss  # type: ignore[no-any-return]
    given = {name: each for name, each in batch.items() if name != "labels"}
    logits = _kept(model(**given)).logits.float()
    shifted, labels = logits[:, :-1].contiguous(), batch["labels"][:, 1:].contiguous()
    return nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), labels.view(-1))


def _kept(outputs: Any) -> Any:
    if whole("HOLDS", 0):
        _held[:] = [{name: each for name, each in outputs.items() if name != "loss"}]
    return outputs


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of the case."""
    name = word("OPT", "AdamW")
    if name == "AdamW-loop":
        return torch.optim.AdamW(params, lr=1e-3, foreach=False)
    made: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=1e-3)
    return made
