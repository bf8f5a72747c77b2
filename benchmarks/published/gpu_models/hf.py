"""Hugging Face models from their configs with random weights; batches as xMem and the guide on
training memory make them. NAME picks the model, OPT the optimizer. With HOLDS the loop keeps the model's
outputs (logits, keys and values) until the next forward has returned, as one that assigns them to a variable;
with AMP the model runs under autocast. With SOFTMAX=input a softmax of attention saves its input besides its
output, as torch did before 1.11. TRUE is the type of all weights; CHECKPOINT names classes of modules that are
recomputed. SHIFTS is the loss of transformers before 4.46, which copies shifted logits; without MASK=0 samples come with
a mask of attention. With REPEATS keys and values are repeated for grouped queries, as before 4.48.
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
from transformers.integrations import sdpa_attention

NAME, LENGTH = word("NAME", "gpt2"), whole("T", 128)
global_batch = whole("B", 8)
_held: list[Any] = []
zero_grad_to_none = not whole("KEEPS_GRADS", 0)
_VOCABULARY = {
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


if whole("REPEATS", 0):
    sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False
if word("SOFTMAX") == "input":
    nn.functional.softmax = _softmax


class Contrasted(nn.Module):
    """CLIP of 336 × 336 images, with its contrastive loss."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        text = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "projection_dim": 768}
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
    if NAME == "bert-large":
        config = BertConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            attn_implementation=attention,
        )
        return BertForSequenceClassification(config)  # type: ignore[no-any-return]
    if NAME == "clip":
        return Contrasted(attention)
    if NAME in ("t5-small", "t5-large"):
        large = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16} if NAME == "t5-large" else {}
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
        layers = {"distilgpt2": 6, "gpt2-large": 36}.get(NAME, 12)
        wide = {"n_embd": 1280, "n_head": 20} if NAME == "gpt2-large" else {}
        config = GPT2Config(n_layer=layers, attn_implementation=attention, **wide)
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
        if not whole("SHIFTS", 0):
            return _kept(model(**batch))["loss"]  # type: ignore[no-any-return]
        outputs = _kept(model(**{name: each for name, each in batch.items() if name != "labels"}))
        logits = outputs.logits.float()
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
    more = {"weight_decay": real("DECAY", 0.0)} if "DECAY" in SIZES else {}
    made: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=1e-3, **more)
    return made
