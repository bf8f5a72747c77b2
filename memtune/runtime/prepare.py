"""What memtune switches off in a model before anything is recorded or measured, because training never needs it."""

from __future__ import annotations

from torch import nn


def prepare_model(model: nn.Module) -> nn.Module:
    """Switch off the key-value cache of Hugging Face models: it is for generation, and a second run would fill it twice."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]
    return model
