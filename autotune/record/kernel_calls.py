"""Record calls that CPU and CUDA run with different kernels.

On CPU, `scaled_dot_product_attention` or `dropout` is a sequence of small ops; CUDA has one kernel that saves
other tensors. Only the call shows which ops belong together, so it is recorded: first and last op, autograd's
sequence numbers around it (which identify its backward), and its saved tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from memtune.autotune.record.device_calls import as_on
from memtune.autotune.record.inplace_accumulation import PRODUCT_PLUS_BIAS
from memtune.autotune.record.tracer import Tracer
from memtune.autotune.translate import translation_table
from memtune.program import Call

Options = Mapping[str, float]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Options | None:
    if query.dim() != 4:
        return None
    dense = all(t.stride(-1) == 1 for t in (query, key, value))
    return {
        "dropout": dropout_p,
        "causal": is_causal,
        "masked": attn_mask is not None,
        "mask_elements": attn_mask.numel() if attn_mask is not None and attn_mask.dtype == torch.bool else 0,
        "dense": dense,
        "aligned": all((t.storage_offset() * t.element_size()) % 16 == 0 for t in (query, key, value)),
    }


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Options | None:
    # `dropout` composes its mask unless it is on CUDA; the composed form in place has no fused kernel
    # anywhere.
    return {"dropout": p} if training and 0 < p < 1 and not inplace else None


def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Options | None:
    # Torch composes it of small ops on CPU, and everywhere for these: other types of input and weight,
    # channels last, complex.
    cast = torch.is_autocast_enabled(input.device.type)
    alike = weight is None or weight.dtype == input.dtype or cast
    last = any(input.is_contiguous(memory_format=each) for each in _CHANNELS_LAST.get(input.dim(), ()))
    if not alike or input.is_complex() or (last and not input.is_contiguous()):
        return None
    values = 1
    for size in normalized_shape:
        values *= size
    return {"rows": input.numel() // max(values, 1)}


def _recurrent(*args: Any) -> Options | None:
    if not isinstance(args[1], Tensor | list | tuple) or isinstance(args[3], list | tuple):
        return None  # packed sequences: the kernel's sizes depend on the data
    input, _, weights, biased, layers, dropout, _, bidirectional, batch_first = args[:9]
    return {
        "layers": layers,
        "directions": 2 if bidirectional else 1,
        "dropout": dropout,
        "biased": biased,
        "batch_first": batch_first,
        "weights": sum(w.numel() for w in weights),
        "hidden": weights[1].shape[1],
        "weight_bytes": sum(w.nbytes for w in weights),
        "input": input.numel(),
    }


_CHANNELS_LAST = {4: (torch.channels_last,), 5: (torch.channels_last_3d,)}

_KINDS: dict[Any, tuple[str, Callable[..., Options | None]]] = {
    F.scaled_dot_product_attention: ("attention", _attention),
    F.dropout: ("dropout", _dropout),
    torch.dropout: ("dropout", _dropout),
    torch.lstm: ("lstm", _recurrent),
    torch.gru: ("gru", _recurrent),
    F.rms_norm: ("rms_norm", _rms_norm),
    torch.rms_norm: ("rms_norm", _rms_norm),
}

_IN_FLOAT32 = frozenset({"rms_norm"})
"""Calls that autocast on CUDA runs in float32."""


class _HeadsInside(torch.autograd.Function):
    """Strides of (samples, length, heads, size) for attention's output (samples, heads, length, size)."""

    @staticmethod
    def forward(context: Any, out: Tensor) -> Tensor:
        """Return `out` with the strides of that order; a fake tensor has no values to move."""
        _, heads, length, size = out.shape
        return out.as_strided(out.shape, (length * heads * size, size, heads * size, 1))

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient as it is."""
        return gradients[0]


class CallRecorder(TorchFunctionMode):
    """Function mode that records every call of `_KINDS` in `calls`; enter it together with the tracer.

    Args:
        tracer: Records the ops.
        fuse: For steps whose kernels are to be translated: run attention without its dropout, because CPU's
            fused kernel has none and only a fused kernel lays out its output as CUDA's do; run attention for
            which no GPU has a kernel as the composite that it is there.
        device: Run recurrent layers with this device's ops; None leaves them to the CPU's.
    """

    def __init__(self, tracer: Tracer, *, fuse: bool = False, device: torch.device | None = None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._tracer, self._fuse, self._device = tracer, fuse, device
        self._modes = 0

    def __enter__(self) -> Any:
        """Enter the mode. Dispatch modes entered after it are the runtime's own."""
        self._modes = torch._C._len_torch_dispatch_stack()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the call; record it if its function is one of `_KINDS`."""
        if func in PRODUCT_PLUS_BIAS and torch._C._len_torch_dispatch_stack() == self._modes:
            self._tracer.composite_from = self._tracer.mark().ops
            try:
                return self._noted(func, args, kwargs)
            finally:
                self._tracer.composite_from = -1
        return self._noted(func, args, kwargs)

    def _noted(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.multi_head_attention_forward:
            return self._inside(func, args, kwargs or {})
        known = _KINDS.get(func)
        options = known[1](*args, **(kwargs or {})) if known else None
        if known is None or options is None:
            return func(*args, **(kwargs or {}))
        if self._device is not None and known[1] is _recurrent:
            return as_on(self._device, func, args, kwargs or {})
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        inputs = tuple(self._tracer.storage_of(each) for each in tensors)
        dtype = _compute_dtype(known[0], tensors[0])
        kernels: AbstractContextManager[Any] = nullcontext()
        if self._fuse and known[0] == "attention":
            if _is_composed(tensors, dtype, options):
                kernels = sdpa_kernel(SDPBackend.MATH)
            else:
                args, kwargs = _without_dropout(args, kwargs or {})
        before = self._tracer.mark()
        with kernels:
            out = func(*args, **(kwargs or {}))
        after = self._tracer.mark()
        if self._fuse and known[0] == "attention" and _is_efficient(tensors, dtype, options):
            out = _HeadsInside.apply(out)  # type: ignore[no-untyped-call]
        if after.ops > before.ops:
            result = out[0] if isinstance(out, tuple) else out
            cast = dtype != str(tensors[0].dtype).removeprefix("torch.")
            self.calls.append(
                Call(
                    kind=known[0],
                    ops=(before.ops, after.ops),
                    nodes=(before.nodes, after.nodes),
                    saves=(before.saves, after.saves),
                    inputs=inputs,
                    output=self._tracer.storage_of(result),
                    shapes=tuple(tuple(each.shape) for each in tensors),
                    dtype=dtype,
                    options={name: float(value) for name, value in options.items()} | {"cast": float(cast)},
                )
            )
        return out

    def _inside(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a Python function of torch with this mode on, so that the calls inside it are recorded."""
        # Torch turns a mode off while it handles a function, and the function asks at its beginning whether a
        # mode is on; that one question is answered with no.
        asks = F.has_torch_function  # type: ignore[attr-defined]

        def answer(arguments: Any) -> bool:
            F.has_torch_function = asks  # type: ignore[attr-defined]
            return False

        F.has_torch_function = answer  # type: ignore[attr-defined]
        try:
            with self:
                return func(*args, **kwargs)
        finally:
            F.has_torch_function = asks  # type: ignore[attr-defined]


def attention_without_dropout(graph: GraphModule) -> None:
    """Take dropout off attention in a graph of Dynamo, where no call is recorded, if a GPU has a kernel for
    it.
    """
    # As `CallRecorder` with `fuse`.
    for node in graph.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta.get("example_value", each))
        options = _attention(*args, **kwargs)
        if options is None or not options["dropout"]:
            continue
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not _is_composed(tensors, _compute_dtype("attention", tensors[0]), options):
            node.args, node.kwargs = _without_dropout(node.args, node.kwargs)
    graph.recompile()


def _compute_dtype(called: str, tensor: Tensor) -> str:
    kind = tensor.device.type
    cast = torch.is_autocast_enabled(kind) and tensor.is_floating_point()
    narrow = torch.float32 if called in _IN_FLOAT32 else torch.get_autocast_dtype(kind)
    return str(narrow if cast else tensor.dtype).removeprefix("torch.")


def _is_composed(tensors: Sequence[Tensor], dtype: str, options: Options) -> bool:
    return translation_table.runs_everywhere("math", _called(tensors, dtype, options))


def _is_efficient(tensors: Sequence[Tensor], dtype: str, options: Options) -> bool:
    """Return whether GPUs run the kernel whose output does not have the order of the query's memory."""
    # Its meta registration: torch/_meta_registrations.py meta__scaled_dot_product_efficient_attention.
    return translation_table.runs_everywhere("efficient", _called(tensors, dtype, options))


def _called(tensors: Sequence[Tensor], dtype: str, options: Options) -> translation_table.Attention:
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in tensors[:3])
    shapes = [tuple(each.shape) for each in tensors]
    return translation_table.attention_of(shapes, dtype, options, needs_grad=needs_grad)


def _without_dropout(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an attention call with its fifth, `dropout_p`, at zero."""
    if len(args) > 4:
        return (*args[:4], 0.0, *args[5:]), dict(kwargs)
    return args, {**kwargs, "dropout_p": 0.0}
