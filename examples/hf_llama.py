"""A Llama of Hugging Face transformers, built from a config with random weights: nothing is downloaded.

    memtune plan examples/hf_llama.py --gpus 8 --gpu-type h100-80g
    memtune search examples/hf_llama.py --device cpu --trials 4
    MEMTUNE_LLAMA_EXPERTS=8 memtune plan examples/hf_llama.py --gpus 8 --axes sharding,sharding.parallel

It needs `pip install transformers`.

Environment variables: MEMTUNE_LLAMA_LAYERS, _DIM, _HEADS, _KV_HEADS, _SEQ, _VOCAB and _BATCH (samples per
optimizer step over all ranks). Layers 32, dim 4096, heads 32, vocab 32000 is Llama-7B. With _EXPERTS above 0
it is a Mixtral, whose tokens choose two experts. The text is Python's own source, as bytes.
"""

import functools
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM


def _setting(name: str, default: int) -> int:
    return int(os.environ.get(f"MEMTUNE_LLAMA_{name}", default))


SEQ, VOCAB = _setting("SEQ", 128), _setting("VOCAB", 256)
global_batch = _setting("BATCH", 8)


@functools.cache
def text() -> Tensor:
    """Return the bytes of the larger modules of the standard library as one row of tokens (about 3 MB)."""
    library = Path(os.__file__).parent
    parts = [path.read_bytes() for path in sorted(library.glob("*.py")) if path.stat().st_size > 30_000]
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


def model() -> nn.Module:
    """Return the Llama or Mixtral, with weights drawn from torch's generator."""
    dim, experts = _setting("DIM", 256), _setting("EXPERTS", 0)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": dim,
        "intermediate_size": dim * 11 // 4,
        "num_hidden_layers": _setting("LAYERS", 8),
        "num_attention_heads": _setting("HEADS", 4),
        "num_key_value_heads": _setting("KV_HEADS", 2),
        "max_position_embeddings": SEQ,
        "use_cache": False,
    }
    if experts:
        return MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=experts))
    return LlamaForCausalLM(LlamaConfig(**shape))


def batch(size: int) -> dict[str, Tensor]:
    """Return `size` pieces of the text; the model itself shifts the labels by one."""
    starts = torch.randint(len(text()) - SEQ, (size, 1))
    tokens = text()[starts + torch.arange(SEQ)].long() % VOCAB
    return {"input_ids": tokens, "labels": tokens}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy per byte, as the model computes it."""
    outputs = model(**batch)
    value: Tensor = outputs.loss
    return value
