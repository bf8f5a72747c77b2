"""Shared by image classifiers: sizes of images, a batch, the loss under autocast, the optimizer of a case.

IMG is the side of an image, CLS the classes. AMP is the type of autocast, TRUE that of all weights instead,
LAST puts channels last. With READY the images are on the device before the step.
"""

from __future__ import annotations

from typing import Any

import torch
from case_sizes import SIZES, real, whole, word
from torch import Tensor, nn
from torch.nn import functional as F

SIDE, CLASSES = whole("IMG", 224), whole("CLS", 1000)
SHAPE, READY = (3, SIDE, SIDE), bool(whole("READY", 0))
DTYPE = getattr(torch, word("TRUE", "float32"))
FORMAT = torch.channels_last if whole("LAST", 0) else torch.contiguous_format


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return images, without values if they are on the device before the step, and labels."""
    images = torch.randn(size, *(() if READY else SHAPE), dtype=DTYPE)
    return images if READY else images.to(memory_format=FORMAT), torch.randint(CLASSES, (size,))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy."""
    images, labels = batch
    if READY:
        images = torch.empty(len(labels), *SHAPE, device=labels.device, dtype=DTYPE, memory_format=FORMAT)
    narrow = getattr(torch, word("AMP", "bfloat16"))
    with torch.autocast(images.device.type, narrow, enabled=bool(word("AMP"))):
        return F.cross_entropy(model(images), labels)


def optimizer_of(params: list[Tensor], default: str, **more: Any) -> torch.optim.Optimizer:
    """Return the optimizer OPT, with MOMENTUM, as a loop over parameters with LOOP."""
    more |= {"momentum": real("MOMENTUM", 0.0)} if "MOMENTUM" in SIZES else {}
    made: torch.optim.Optimizer = getattr(torch.optim, word("OPT", default))(
        params, foreach=False if whole("LOOP", 0) else None, **more
    )
    return made
