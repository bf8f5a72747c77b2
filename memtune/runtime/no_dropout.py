"""A model in training mode without dropout: two runs that cut their batch differently then compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, torch.native_dropout,
}  # fmt: skip


class _WithoutDropout(TorchFunctionMode):
    """Functional dropout returns its input; attention drops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            kwargs.pop("dropout_p", None)
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return func(*args, **kwargs)


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, `model` drops nothing. Dropout modules call the functions; recurrent layers have it inside their kernel."""
    recurrent = [(each, each.dropout) for each in model.modules() if isinstance(each, nn.RNNBase)]
    for rnn, _ in recurrent:
        rnn.dropout = 0.0
    try:
        with _WithoutDropout():
            yield
    finally:
        for rnn, rate in recurrent:
            rnn.dropout = rate
