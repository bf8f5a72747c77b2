"""Training mode without dropout, so that two runs that divide their batch differently compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_NEVER: Final = 1e-300
"""Rate at which the ops of dropout run but drop nothing: 1 - p is 1 to the bit. On CPU only, because a GPU's
generators may return 1, which would drop.
"""
_DROPOUTS: Final = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


@contextmanager
def no_dropout(model: nn.Module) -> Iterator[None]:
    """Disable dropout in `model` in this context.

    On CPU dropout's ops still run, so that plans made for them, such as a schedule, remain valid.
    """
    # The functions that modules and users call are replaced. A torch function mode would be inactive in
    # backward, where blocks run again. Functions that a user's module imported from
    # `torch.nn.functional` by name are covered if they are written in Python (all but attention).
    # Recurrent kernels apply dropout themselves.
    recurrent = [(each, each.dropout) for each in model.modules() if isinstance(each, nn.RNNBase)]
    functions = [
        (owner, name + end, 1, "p") for owner in (torch, torch._VF) for name in _DROPOUTS for end in ("", "_")
    ]
    with ExitStack() as stack:
        for owner, name, position, rate_name in (
            *functions,
            (F, "scaled_dot_product_attention", 4, "dropout_p"),
        ):
            function = getattr(owner, name)
            stack.callback(setattr, owner, name, function)
            setattr(owner, name, _without(function, position, rate_name))
        for rnn, rate in recurrent:
            stack.callback(setattr, rnn, "dropout", rate)
            rnn.dropout = 0.0
        yield


def _without(function: Callable[..., Any], position: int, name: str) -> Callable[..., Any]:
    """Return `function` with a rate, its argument at `position` or by `name`, at which it drops nothing."""

    @wraps(function)
    def dropping_nothing(*args: Any, **kwargs: Any) -> Any:
        given: Tensor = args[0] if args else kwargs["query" if "query" in kwargs else "input"]
        rate = args[position] if len(args) > position else kwargs.get(name, 0.0)
        if not rate:
            return function(*args, **kwargs)
        never = _NEVER if given.device.type == "cpu" else 0.0
        if len(args) > position:
            args = (*args[:position], never, *args[position + 1 :])
        else:
            kwargs[name] = never
        with torch.random.fork_rng(devices=[]):  # so that later draws, such as the next batch, do not change
            return function(*args, **kwargs)

    return dropping_nothing
