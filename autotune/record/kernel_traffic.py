"""Bytes that the kernel of an op moves: each input and output once, except what it does not touch.

A gather reads as many rows as it returns, and an update of rows in place leaves the others alone; an
allocation moves nothing, and a tensor like another one has only its shape. Of a tensor of log-probabilities,
the loss reads one value per target (ATen, native/cuda/NLLLoss2d.cu, Indexing.cu, IndexKernel.cu). On a GPU a
second kernel reads inputs of norms again, for the gradients of weights or after the groups' sums (ATen,
native/cuda/layer_norm_kernel.cu, group_norm_kernel.cu); a CPU has their rows in its cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

_ALLOCATIONS = ("aten.empty", "aten.new_empty")
_MADE_LIKE = (
    "aten.full_like.",
    "aten.new_full.",
    "aten.new_ones.",
    "aten.new_zeros.",
    "aten.ones_like.",
    "aten.rand_like.",
    "aten.randint_like.",
    "aten.randn_like.",
    "aten.zeros_like.",
)
_READ_ROWS = ("aten.embedding.", "aten.gather.", "aten.index.", "aten.index_select.")
_WRITE_ROWS = ("aten._index_put_impl", "aten.index_add", "aten.index_put", "aten.scatter", "aten.scatter_add")
"""Ops whose last input has the rows, if they run in place."""
_UNREAD = {"aten.nll_loss_forward.default": 0, "aten.nll_loss_backward.default": 1}
"""Op → index of the log-probabilities among its inputs."""
_GROUP_NORM = "aten.native_group_norm.default"
_NORMS_BACKWARD = (
    "aten.native_layer_norm_backward.default",
    "aten._fused_rms_norm_backward.default",
    "aten.native_group_norm_backward.default",
)
"""Norms whose first inputs are the gradient of the output and the input."""


def kernel_traffic_bytes(
    name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, in_place: bool, on_cpu: bool
) -> int:
    """Return the bytes that op `name` reads and writes, for tensors `inputs` and `outputs` of its call."""
    written = sum(each.nbytes for each in outputs)
    if name.startswith(_ALLOCATIONS):
        return 0
    if name.startswith(_MADE_LIKE):
        return written
    n_bytes = sum(each.nbytes for each in inputs) + written
    if name.startswith(_READ_ROWS):
        return n_bytes + outputs[0].nbytes - inputs[0].nbytes
    if in_place and name.rpartition(".")[0].rstrip("_") in _WRITE_ROWS:
        return n_bytes + 2 * (inputs[-1].nbytes - inputs[0].nbytes)
    if name in _UNREAD:
        return n_bytes - inputs[_UNREAD[name]].nbytes
    return n_bytes if on_cpu else n_bytes + _read_again_bytes(name, inputs, outputs)


def _read_again_bytes(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Return the bytes of activations and gradients that a second kernel of a norm reads once more."""
    if name == _GROUP_NORM:
        return inputs[0].nbytes
    if name not in _NORMS_BACKWARD:
        return 0
    gives_input, gives_weights = (
        any((each.shape == inputs[1].shape) is wanted for each in outputs) for wanted in (True, False)
    )
    return inputs[0].nbytes + inputs[1].nbytes if gives_input and gives_weights else 0
