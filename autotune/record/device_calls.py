"""Run a call on fake tensors of the CPU with the ops that an accelerator runs for it.

ATen composes some calls of other ops by the device of their arguments: recurrent layers of fused cells on
accelerators, of gates on the CPU. Inside such a call the fake tensors are on the accelerator, in the memory
of those outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

_FIRST = 2**64 - 1
"""Number of the nodes that autograd's engine runs as soon as they can."""


class _OnDevice(torch.autograd.Function):
    """A fake tensor on another device, in the same storage; its gradient is on the tensor's own."""

    @staticmethod
    def forward(context: Any, tensor: FakeTensor, device: torch.device) -> Tensor:
        """Return `tensor` on `device`."""
        context.device = tensor.fake_device
        return _twin(tensor, device)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        """Return the gradient on the device of the forward's argument."""
        return _twin(gradient, context.device), None


def _twin(tensor: FakeTensor, device: torch.device) -> FakeTensor:
    # Below all modes: no op makes it.
    with torch._C._DisableTorchDispatch():
        same = torch.empty(0, dtype=tensor.dtype, device="meta").set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
    return FakeTensor(tensor.fake_mode, same, device)


def as_on(device: torch.device, call: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the results of `call`, whose arguments are fake, with the ops of `device`."""
    origin = next(each.fake_device for each in args if isinstance(each, FakeTensor))
    args, kwargs = tree_map_only(FakeTensor, lambda each: _moved(each, device), (args, dict(kwargs)))
    return tree_map_only(FakeTensor, lambda each: _moved(each, origin), call(*args, **kwargs))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    moved: Tensor = _OnDevice.apply(tensor, device)  # type: ignore[no-untyped-call]
    node: Any = moved.grad_fn
    if node is not None:
        # As `AccumulateGrad` it goes first: gradients of weights are complete at the ops that make them.
        node._set_sequence_nr(_FIRST)
    return moved


@contextmanager
def backward_on_one_thread() -> Iterator[None]:
    """Run nodes of all devices on the thread that calls backward: on several the order is left to chance."""
    with torch.autograd.set_multithreading_enabled(False):
        yield
