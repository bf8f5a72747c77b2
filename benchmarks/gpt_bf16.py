"""examples/gpt.py with bf16 weights, as large fine-tunes hold them; it reads the same MEMTUNE_GPT_*
settings.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_GPT = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples" / "gpt.py"))
global_batch: int = _GPT["global_batch"]
batch: Callable[[int], Any] = _GPT["batch"]


def model() -> nn.Module:
    """Return the GPT in bfloat16."""
    made: nn.Module = _GPT["model"]().to(torch.bfloat16)
    return made


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the GPT's loss."""
    found: Tensor = _GPT["loss"](model, batch)
    return found
