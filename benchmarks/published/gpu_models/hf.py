"""Hugging Face models from their configs with random weights; batches as xMem and the guide make them.

NAME picks the model, OPT the optimizer, with DECAY of weights, TRUE the type of all weights, AMP that of
autocast. With HOLDS the loop keeps the model's outputs (logits, keys and values) until the next forward has
returned, as one that assigns them to a variable. CHECKPOINT names classes of modules that are recomputed.
Without MASK=0 samples come with a mask of attention. SHIFTS is the loss of transformers before 4.46, which
copies shifted logits. With VERSION=4.46 models keep keys and values for generation, as they do by default,
without copying them, repeat them for grouped queries, and T5 adds mask and bias of positions once, for all
samples, and computes its softmax in float32. With SOFTMAX=input a softmax of attention saves its input as
well, as torch did before 1.11.
"""

from __future__ import annotations

from typing import Any

import torch
from case_sizes import SIZES, real, whole, word
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    GemmaConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations import sdpa_attention
from transformers.models.t5.modeling_t5 import T5Attention

NAME, LENGTH = word("NAME", "gpt2"), whole("T", 128)
global_batch = whole("B", 8)
_held: list[Any] = []
zero_grad_to_none = not whole("KEEPS_GRADS", 0)
_VOCABULARY = {
    "bert-base-mlm": 28996,
    "bert-large-mlm": 28996,
    "bert-large": 30522,
    "t5-small": 32128,
    "t5-large": 32128,
    "llama-1b": 128256,
    "gemma-2b": 256000,
    "clip": 49408,
}.get(NAME, 50257)


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


def _appended(cache: Any, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    cache.keys, cache.values, cache.is_initialized = keys, values, True
    return keys, values


def _t5_attention(
    self: T5Attention,
    x: Tensor,
    mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention's output, the bias of positions with the mask, and weights."""
    seen = x if key_value_states is None else key_value_states
    query, key, value = (
        each.view(len(x), -1, self.n_heads, self.key_value_proj_dim).transpose(1, 2)
        for each in (self.q(x), self.k(seen), self.v(seen))
    )
    if past_key_values is not None:
        vars(past_key_values).setdefault("kept", []).append((key, value))
    scores = query @ key.transpose(3, 2)
    if position_bias is None:
        sizes = (x.shape[1], key.shape[2])
        learned = self.has_relative_attention_bias
        bias = (
            self.compute_bias(*sizes, device=x.device)
            if learned
            else scores.new_zeros(1, self.n_heads, *sizes)
        )
        position_bias = bias + (scores.new_zeros(len(x), 1, 1, sizes[1]) if mask is None else mask)
    scores += position_bias
    weights = nn.functional.softmax(scores.float(), -1).type_as(scores)
    weights = nn.functional.dropout(weights, self.dropout, self.training)
    mixed = (weights @ value).transpose(1, 2).contiguous().view(*x.shape[:2], self.inner_dim)
    return self.o(mixed), position_bias, weights


OLD = word("VERSION") == "4.46"
if OLD:
    sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False
    DynamicLayer.update = _appended
    T5Attention.forward = _t5_attention
if word("SOFTMAX") == "input":
    nn.functional.softmax = _softmax  # type: ignore[assignment]


class Contrasted(nn.Module):
    """CLIP of 336 × 336 images, with its contrastive loss."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        text = {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_attention_heads": 12,
            "projection_dim": 768,
        }
        seen = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
        seen |= {"num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768}
        config = CLIPConfig(
            text_config=text, vision_config=seen, projection_dim=768, attn_implementation=attention
        )
        self.clip, self.temperature = CLIPModel(config), nn.Parameter(torch.zeros(()))

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        found = self.clip(**inputs)
        logits = found.image_embeds @ found.text_embeds.t() * self.temperature.exp()
        places = torch.arange(len(logits), device=logits.device)
        entropy = nn.functional.cross_entropy
        return {"loss": (entropy(logits, places) + entropy(logits.t(), places)) / 2}


def model() -> nn.Module:
    """Return the model."""
    made = _model().to(getattr(torch, word("TRUE", "float32")))
    for module in made.modules():
        if type(module).__name__ in word("CHECKPOINT").split():
            module.forward = _recomputed(module.forward)
    return made


def _recomputed(forward: Any) -> Any:
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return checkpointed


def _model() -> nn.Module:
    attention = word("ATTN", "sdpa")
    config: Any
    if NAME.startswith("bert"):
        large = {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        }
        config = BertConfig(
            vocab_size=_VOCABULARY,
            attn_implementation=attention,
            **(large if NAME.startswith("bert-large") else {}),
        )
        made = BertForMaskedLM if NAME.endswith("mlm") else BertForSequenceClassification
        return made(config)  # type: ignore[no-any-return]
    if NAME == "clip":
        return Contrasted(attention)
    if NAME in ("t5-small", "t5-large"):
        large = (
            {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16} if NAME == "t5-large" else {}
        )
        # Before transformers 5 the model had no other attention.
        config = T5Config(decoder_start_token_id=0, attn_implementation="eager", **large)
        return T5ForConditionalGeneration(config)  # type: ignore[no-any-return]
    if NAME.startswith("gpt-neo"):
        config = GPTNeoConfig(
            hidden_size=768,
            num_layers=12,
            num_heads=12,
            attention_types=[[["global", "local"], 6]],
            attn_implementation="eager",
        )
    elif NAME == "llama-1b":
        config = LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            tie_word_embeddings=True,
            attn_implementation=attention,
        )
    elif NAME == "gemma-2b":
        config = GemmaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=2048,
            intermediate_size=16384,
            num_hidden_layers=18,
            num_attention_heads=8,
            num_key_value_heads=1,
            head_dim=256,
            hidden_act="gelu_pytorch_tanh",
            attn_implementation=attention,
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
        layers, width, heads = {
            "distilgpt2": (6, 768, 12),
            "gpt2-large": (36, 1280, 20),
            "gpt2-xl": (48, 1600, 25),
        }.get(NAME, (12, 768, 12))
        config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, attn_implementation=attention)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def batch(size: int) -> dict[str, Tensor]:
    """Return token ids, padded to one length, and labels."""
    ids = torch.randint(100, _VOCABULARY - 200, (size, LENGTH))
    if NAME == "clip":
        images = torch.randn(size, 3, 336, 336, dtype=getattr(torch, word("TRUE", "float32")))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": images}
    if NAME == "bert-large":
        return {"input_ids": ids, "labels": torch.randint(2, (size,))}
    mask = {"attention_mask": torch.ones_like(ids)} if whole("MASK", 1) else {}
    return {"input_ids": ids, **mask, "labels": ids.clone()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the model's own loss, or that of `SHIFTS`."""
    narrow = getattr(torch, word("AMP", "bfloat16"))
    with torch.autocast(batch["input_ids"].device.type, narrow, enabled=bool(word("AMP"))):
        cached = {"use_cache": True} if OLD and not NAME.startswith("bert") else {}
        if whole("SHIFTS", 0):
            outputs = model(**{name: each for name, each in batch.items() if name != "labels"}, **cached)
            found = _shifted(outputs.logits, batch["labels"])
        else:
            outputs = model(**batch, **cached)
            found = outputs["loss"]
    if whole("HOLDS", 0):
        _held[:] = [{name: each for name, each in outputs.items() if name != "loss"}]
    return found


def _shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of copies of logits and labels, in float32 except GPT-2's."""
    logits = logits if NAME.startswith("gpt2") else logits.float()
    shifted, wanted = logits[:, :-1].contiguous(), labels[:, 1:].contiguous()
    return nn.functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), wanted.view(-1))


def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
    """Return the optimizer of the case."""
    name = word("OPT", "AdamW")
    if name == "AdamW-loop":
        return torch.optim.AdamW(params, lr=1e-3, foreach=False)
    more = {"weight_decay": real("DECAY", 0.0)} if "DECAY" in SIZES else {}
    made: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=1e-3, **more)
    return made
