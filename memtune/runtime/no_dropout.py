"""A model in training mode without dropout: two runs that cut their batch differently then compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DROPOUTS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
    torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, torch.native_dropout,
}  # fmt: skip


_NEVER = 1e-300
"""A rate at which the ops of dropout run and nothing drops: 1 - p is 1 to the bit. On CPU alone; a GPU's generators return 1 now
and then, which would drop."""


class _WithoutDropout(TorchFunctionMode):
    """Dropout drops nothing. On CPU its ops still run, so that what was planned for them, a schedule say, holds for the model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return _dropped_nothing(func, args, kwargs)
        if func is F.scaled_dot_product_attention:
            rate = kwargs.pop("dropout_p", args[4] if len(args) > 4 else 0.0)
            if len(args) > 5:
                kwargs["is_causal"] = args[5]
            args, kwargs["dropout_p"] = args[:4], _rate(args[0] if args else kwargs["query"], rate)
            with torch.random.fork_rng(devices=[]):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _dropped_nothing(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given: Tensor = args[0] if args else kwargs["input"]
    rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    if not _rate(given, rate):
        return given
    with torch.random.fork_rng(devices=[]):  # the next batch is drawn as if nothing had been drawn here
        return func(args[0], _NEVER, *args[2:], **kwargs) if len(args) > 1 else func(*args, **{**kwargs, "p": _NEVER})


def _rate(given: Tensor, rate: float) -> float:
    return _NEVER if rate > 0 and given.device.type == "cpu" else 0.0


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
