"""FLOPs of one ATen call: torch's formulas for matrix products, one per output element for other ops.

torch's formulas cover the attention kernels of CUDA, but not those of the CPU, nor recurrent layers and
products in groups (experts), and count the weight gradient of a convolution in groups as if it had none;
these are here. A multiply and an add count as two FLOPs, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


def _attention(query: Tensor, key: Tensor, value: Tensor, products: tuple[int, int]) -> float:
    """Return the FLOPs of `products` of queries × keys matrices over the head sizes of query and value."""
    *batch, rows, width = query.shape
    each = 2 * rows * key.shape[-2] * (products[0] * width + products[1] * value.shape[-1])
    return float(_numel(batch) * each)


def _recurrent(input: Tensor, weights: tuple[Tensor, Tensor], passes: int) -> float:
    """Return two FLOPs per weight, sample and time step, times `passes`."""
    return float(passes * 2 * input.shape[0] * input.shape[1] * sum(weight.numel() for weight in weights))


def _convolution_backward(slope: Tensor, image: Tensor, weight: Tensor, *more: Any) -> float:
    """Return the FLOPs of the gradients of image and weight, each as many as the forward has."""
    transposed, wanted = bool(more[4]), more[-1]
    each = 2 * (image if transposed else slope).numel() * _numel([*weight.shape[1:]])
    return float(each * sum(map(bool, wanted[:2])))


def _grouped_product(left: Tensor, right: Tensor, *_: Any, **__: Any) -> float:
    """Return the FLOPs of products in groups, which are a batch dimension or divide another one."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return float(2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1])


def _numel(sizes: list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


# Forward: scores and output. Backward: the scores once more, and gradients of value, scores, query and key.
_HERE: dict[str, Callable[..., float]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": lambda q, k, v, *_, **__: _attention(
        q, k, v, (1, 1)
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": lambda _, q, k, v, *__, **___: (
        _attention(q, k, v, (3, 2))
    ),
    "aten.convolution_backward.default": _convolution_backward,
    "aten._grouped_mm.default": _grouped_product,
    "aten.mkldnn_rnn_layer.default": lambda x, w1, w2, *_, **__: _recurrent(x, (w1, w2), 1),
    "aten.mkldnn_rnn_layer_backward.default": lambda x, w1, w2, *_, **__: _recurrent(x, (w1, w2), 2),
}


def count(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of a call of `func`; a multiply and an add count as two."""
    own = _HERE.get(str(func))
    if own is not None:
        return own(*args, **kwargs)
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=out))
    return float(sum(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)))
