"""The user's own torch.compile around what memtune runs in Python: Dynamo calls it between two graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memtune.runtime.training_hooks import ForwardWrapper


class BetweenGraphs:
    """Runs calls that Dynamo must not trace, and warns once.

    Args:
        what: Clause of the warning, such as `whose weights memtune offloads`.
    """

    def __init__(self, what: str) -> None:
        self._what, self._has_warned = what, False

    def run(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `call` of the module `name`, eagerly; for use where `torch.compiler.is_compiling()`."""
        # Here and not before training: it imports Dynamo, which takes a second.
        return torch.compiler.disable(self._run)(name, call, args, kwargs)

    def _run(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"torch.compile does not compile {name}, {self._what}, nor others like it: they run between"
                " its graphs. Where their techniques can be compiled (docs/compile.md), execution: {compile:"
                " blocks} in the config does it",
                stacklevel=2,
            )
        return call(*args, **kwargs)

    def keep_out(self, name: str, module: nn.Module) -> Callable[[], None]:
        """Have Dynamo not trace `module` nor its hooks; return what ends this."""
        compiled, had = module._compiled_call_impl, "_call_impl" in vars(module)
        plain: Callable[..., Any] = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or compiled is not None:
                return self.run(name, plain, args, kwargs)
            return plain(*args, **kwargs)

        # Around the module's hooks; torch.compile and `Module.compile` compile it.
        module._compiled_call_impl = None
        vars(module)["_call_impl"] = ForwardWrapper(call, plain)

        def undo() -> None:
            module._compiled_call_impl = compiled
            if had:
                vars(module)["_call_impl"] = plain
            else:
                vars(module).pop("_call_impl", None)

        return undo
