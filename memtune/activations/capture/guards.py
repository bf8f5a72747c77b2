"""Guards of a captured region, checked before each run: shapes, flags, and the plain data that its code
reads.

A forward is Python: it may depend on any attribute of its modules and their classes, and on any global, cell,
object and file that its code reads (`activations.capture.executed_code`). These are compared with their
values at capture (`activations.capture.guard_sources`).
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_flatten

from memtune.activations.capture.executed_code import ExecutedCode
from memtune.activations.capture.guard_sources import PLAIN, named_data, visible_data
from memtune.activations.capture.region_capture import is_plain, named_state
from memtune.device import accelerator

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)

_FLAGS = (
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cudnn_allow_tf32,
    torch._C._get_mkldnn_enabled,
)
"""Readers of `torch.backends`, which a forward may read too."""


def call_key(args: Any, kwargs: Any) -> Any | None:
    """Return the key under which captures are stored: shapes and flags of tensor arguments, other arguments
    by value.

    None if an argument cannot be compared.
    """
    leaves, spec = tree_flatten((args, kwargs))
    seen: dict[int, int] = {}
    key: list[Any] = [
        repr(spec),
        tuple(
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in accelerator.types()
        ),
    ]
    modes = _modes_of_torch()
    if modes is None:
        return None
    key += modes
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not is_plain(leaf):
                return None
            twin = seen.setdefault(id(leaf), len(seen))  # the same tensor as two arguments is another program
            key.append((tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, twin))
        elif isinstance(leaf, PLAIN):
            key.append((type(leaf), leaf))
        else:
            return None
    return tuple(key)


def _modes_of_torch() -> tuple[Any, ...] | None:
    """Return the settings of torch that choose the ops or kernels of a forward, None with a mode of the
    user's.
    """
    around: list[Any] = []
    for at in range(torch._C._len_torch_function_stack()):
        mode = torch._C._get_function_stack_at(at)
        if isinstance(mode, DeviceContext):  # the default device, or a context of one
            around.append(mode.device)
        elif type(mode).__module__.partition(".")[0] not in ("torch", "memtune"):
            return None
    return (
        # Deterministic algorithms run other kernels, with other ops.
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        *(get() for get in _FLAGS),
        *around,
    )


class Guards:
    """State of a module when it was captured.

    Args:
        module: The region's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        modules = list(module.modules())
        self._seen = visible_data(module)
        self._tensors = [
            (held, name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            for held, name, tensor in named_state(module)
        ]
        self._slots: list[dict[str, Any]] = [
            held for each in modules for held in (each._parameters, each._buffers)
        ]
        self._shared = _shared(self._slots)
        self._children = [
            (each._modules, tuple(each._modules), tuple(each._modules.values())) for each in modules
        ]
        self._types = [(each, type(each)) for each in modules]
        # Hooks inside the region would not run in generated code; those of its own module run around forward.
        self._hooks = [getattr(each, name) for each in modules if each is not module for name in _HOOKS]
        self._hooks += [getattr(nn_module, name) for name in _GLOBAL_HOOKS]

    def watch(self, executed: ExecutedCode) -> None:
        """Guard what code that has run could read outside of the modules, or under names of theirs."""
        places = [(place.held, [*place.values]) for place in executed.places]
        self._seen += named_data(self._module, executed.names, places)

    def changed(self) -> str:
        """Return a description of the first change since the capture, '' if there is none."""
        return (
            self._changed_modules()
            or self._changed_tensors()
            or next(filter(None, (each.changed() for each in self._seen)), "")
        )

    def _changed_modules(self) -> str:
        for children, names, before in self._children:
            # Identity and order: a replaced submodule may have another forward, a reordered `Sequential` runs
            # otherwise.
            if tuple(children) != names or tuple(children.values()) != before:
                return "a submodule was replaced"
        if any(type(each) is not kind for each, kind in self._types):
            return "a submodule is of another class"
        # The usual case, without a loop over hooks at each step.
        if not any(self._hooks):
            return ""
        found = (hook for hooks in self._hooks for hook in hooks.values() if not _is_own_hook(hook))
        return next((f"{_qualified_name(hook)} is a hook inside" for hook in found), "")

    def _changed_tensors(self) -> str:
        if _shared(self._slots) != self._shared:
            return "a parameter or buffer was added, removed or tied"
        for held, name, shape, stride, dtype, device, requires_grad in self._tensors:
            tensor = held[name]
            if (
                tensor.requires_grad is not requires_grad
                or tensor.shape != shape
                or tensor.stride() != stride
            ):
                return f"{name} is another tensor"
            if tensor.dtype is not dtype or tensor.device != device:
                return f"{name} has another type or device"
            # Its gradient would have to flow on, where the tape ends.
            if requires_grad and not tensor.is_leaf:
                return f"{name} is computed from other tensors"
        return ""

    def tensors(self) -> list[Tensor]:
        """Return the current parameters and buffers, in the order of `named_state`."""
        return [held[name] for held, name, *_ in self._tensors]


def _shared(slots: list[dict[str, Any]]) -> tuple[list[str], list[int]]:
    """Return the names in `slots`, and for each the first place that holds the same tensor, -1 for None."""
    first: dict[int, int] = {id(None): -1}
    held = map(id, chain.from_iterable(each.values() for each in slots))
    return list(chain.from_iterable(slots)), [first.setdefault(tensor, at) for at, tensor in enumerate(held)]


def _is_own_hook(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("memtune.")


def _qualified_name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))
