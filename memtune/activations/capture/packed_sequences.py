"""Packed sequences on fake tensors, where the lengths are known.

Torch's functions for them read lengths and batch sizes in C++, where a fake tensor has no data. Here they get
the real ones, and visible ops replace those that write lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memtune._replaced import replaced
from memtune.activations.capture.tape import ConstantTensors

_VF: Any = torch._VF
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextmanager
def packing_by_known_lengths(
    known: ConstantTensors, assume: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Pack, unpack and run recurrent layers on fake sequences by `known` lengths.

    Args:
        known: Their values.
        assume: Called wherever lengths are read.
    """
    pack, pad = _VF._pack_padded_sequence, _VF._pad_packed_sequence

    def packed(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        values = known.value(lengths) if isinstance(lengths, FakeTensor) else lengths
        if values is None or not isinstance(input, FakeTensor):
            return pack(input, lengths, batch_first)  # type: ignore[no-any-return]
        assume()
        with _disable_current_modes():
            _, sizes = pack(torch.empty(*input.shape[:2], 1), values, batch_first)
        return _Pack.apply(input, sizes, batch_first), _constant(sizes)  # type: ignore[no-untyped-call]

    def padded(
        data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, total_length: int
    ) -> tuple[Tensor, Tensor]:
        sizes = known.value(batch_sizes) if isinstance(batch_sizes, FakeTensor) else batch_sizes
        if sizes is None or not isinstance(data, FakeTensor):
            return pad(data, batch_sizes, batch_first, padding, total_length)  # type: ignore[no-any-return]
        counts: list[int] = sizes.tolist()
        steps = max(total_length, len(counts))
        out = torch.full((steps, counts[0], *data.shape[1:]), padding, dtype=data.dtype, device=data.device)
        row = 0
        for start, end in _runs(counts):
            rows, alive = counts[start] * (end - start), counts[start]
            out[start:end, :alive].copy_(data[row : row + rows].view(end - start, alive, *data.shape[1:]))
            row += rows
        with _disable_current_modes():
            lengths = (sizes[:, None] > torch.arange(counts[0])).sum(0)
        return out.transpose(0, 1) if batch_first else out, _constant(lengths)

    def with_real_sizes(run: Callable[..., Any]) -> Callable[..., Any]:
        def recurrent(data: Any, sizes: Any, *args: Any) -> Any:
            real = known.value(sizes) if isinstance(sizes, FakeTensor) and isinstance(args[1], list) else None
            return run(data, sizes if real is None else real, *args)

        return recurrent

    recurrent = {name: with_real_sizes(getattr(_VF, name)) for name in _RECURRENT}
    with replaced(_VF, _pack_padded_sequence=packed, _pad_packed_sequence=padded, **recurrent):
        yield


class _Pack(torch.autograd.Function):
    """Copies of the rows alive, one after the other, and the reverse in backward, as torch's kernels."""

    @staticmethod
    def forward(context: Any, input: Tensor, sizes: Tensor, batch_first: bool) -> Tensor:
        """Return the packed rows."""
        context.of = input.shape, sizes, batch_first
        by_step = input.transpose(0, 1) if batch_first else input
        counts: list[int] = sizes.tolist()
        return torch.cat(
            [by_step[start:end, : counts[start]].contiguous().flatten(0, 1) for start, end in _runs(counts)]
        )

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the padded input."""
        shape, sizes, batch_first = context.of
        of_input = torch.ops.aten._pack_padded_sequence_backward(gradients[0], shape, sizes, batch_first)
        return of_input, None, None


def _constant(real: Tensor) -> Tensor:
    """Return a fake of `real` that is a constant of the code."""
    with _disable_current_modes():
        values = real.tolist()
    return torch.tensor(values, dtype=real.dtype)


def _runs(counts: list[int]) -> Iterator[tuple[int, int]]:
    """Yield first and past-the-last step of each run with as many sequences."""
    start = 0
    for end in range(1, len(counts) + 1):
        if end == len(counts) or counts[end] != counts[start]:
            yield start, end
            start = end
