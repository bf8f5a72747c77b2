"""Kernels that look at the grad mode although they run below autograd: oneDNN's LSTM keeps what backward needs only under it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

ASK_GRAD_MODE = frozenset({"aten.mkldnn_rnn_layer.default"})
"""Ops whose kernels do."""


@contextmanager
def as_recorded() -> Iterator[None]:
    """Inside, kernels find the grad mode on, and autograd records nothing."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        yield
