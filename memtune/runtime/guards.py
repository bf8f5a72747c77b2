"""What a captured region took for granted, checked before each run: shapes, flags, and the plain data that its code can see.

A forward is Python: what it does may depend on any attribute of its modules and on any global of its file. Both are compared
with what they were when the region was captured, one level into objects that hold settings (a `config`). What a forward
reads elsewhere, in closures or in other files, is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from memtune.runtime.tape import is_plain, named_state

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def call_key(args: Any, kwargs: Any) -> Any | None:
    """What captures are looked up by: shapes and flags of the tensors among the arguments, all else as it is.

    None where something among them cannot be compared.
    """
    leaves, spec = tree_flatten((args, kwargs))
    seen: dict[int, int] = {}
    key: list[Any] = [spec, tuple(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda"))]
    key.append(torch.are_deterministic_algorithms_enabled())
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not is_plain(leaf):
                return None
            twin = seen.setdefault(id(leaf), len(seen))  # the same tensor twice is another program
            key.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, twin))
        elif isinstance(leaf, _PLAIN):
            key.append((type(leaf), leaf))
        else:
            return None
    return _hashable(key)


def _hashable(key: list[Any]) -> tuple[Any, ...]:
    return (key[0].__repr__(), *key[1:])


class Guards:
    """The state of a module when it was captured.

    Args:
        module: The region's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._values = [(held, name, value) for held, name, value in _plain_values(module)]
        self._tensors = [(held, name, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
                         for held, name, tensor in named_state(module)]  # fmt: skip
        self._children = [(each._modules, tuple(each._modules.values())) for each in module.modules()]
        self._hooks = [getattr(each, name) for each in module.modules() if each is not module for name in _HOOKS]

    def changed(self) -> str:
        """What is not as it was, '' if everything is."""
        for held, name, value in self._values:
            now = held.get(name, _GONE)
            if now is not value and (type(now) is not type(value) or now != value):
                return f"{name} is {now!r}, was {value!r}"
        for held, name, shape, dtype, device, requires_grad in self._tensors:
            tensor = held.get(name)
            if tensor is None or tensor.requires_grad is not requires_grad or tensor.shape != shape:
                return f"{name} is another tensor"
            if tensor.dtype is not dtype or tensor.device != device:
                return f"{name} has another type or device"
        for children, before in self._children:
            if len(children) != len(before) or any(one is not two for one, two in zip(children.values(), before, strict=True)):
                return "a submodule was replaced"
        return next(
            (f"{_who(hook)} is a hook inside" for hooks in self._hooks if hooks for hook in hooks.values() if not _ours(hook)), ""
        )

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers as they are now, in the order of `named_state`."""
        return [held[name] for held, name, *_ in self._tensors]


_GONE = object()


def _plain_values(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Dictionary, key and value of all plain data that the code of `module` and of the modules in it can see."""
    seen: set[Any] = set()
    for each in module.modules():
        for held in (vars(each), *_settings(each)):
            if id(held) in seen:
                continue
            seen.add(id(held))
            for name, value in held.items():
                if _is_plain(value):
                    yield held, name, value
        forward = type(each).forward  # of a class that FSDP2 has made, still the user's
        code = getattr(forward, "__code__", None)
        if code is None or forward.__module__.startswith("torch."):
            continue
        scope = forward.__globals__
        for name in code.co_names:
            if (id(scope), name) not in seen and name in scope and _is_plain(scope[name]):
                seen.add((id(scope), name))
                yield scope, name, scope[name]


def _settings(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The attributes of objects that a module holds: its config."""
    for name, value in vars(module).items():
        if name[:1] != "_" and not isinstance(value, nn.Module | Tensor | type) and hasattr(value, "__dict__"):
            yield vars(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple | list) and len(value) < 64 and all(map(_is_plain, value)))


def _ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("memtune.")


def _who(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))
