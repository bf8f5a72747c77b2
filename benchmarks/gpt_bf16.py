"""examples/gpt.py with its weights in bf16, as large fine-tunes hold them; MEMTUNE_GPT_* settings are that
file's.
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
    """The GPT, cast."""
    made: nn.Module = _GPT["model"]().to(torch.bfloat16)
    return made


def loss(model: nn.Module, batch: Any) -> Tensor:
    """That of the GPT."""
    found: Tensor = _GPT["loss"](model, batch)
    return found
