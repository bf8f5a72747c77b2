"""Several micro-batches joined to one batch in forward packs: u_F above u_B of Harmony.

Forward packs drop what autograd saves, so they have room for more samples than backward. Only the arguments
of blocks are joined, in their first dim; the user's batches are not. Rules:

1. The first argument of floating-point numbers has samples in its first dim. Others (masks, positions,
  tables) have them too if that dim has as many entries; else the first micro-batch's serves all.
2. Micro-batches whose arguments have other forms run one by one.
3. In the first step the last of the joined micro-batches also runs alone, and must give the same outputs up
  to rounding: blocks that mix samples, or a shared argument that differs, are an error.
4. Outputs are copied apart, because views would hold those of all micro-batches until the last backward.

Source: Li et al. 2022, Harmony (VLDB), section 4: a micro-batch size of forward and one of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from memtune.errors import ApplyError


def form_of(leaf: Any) -> Any:
    """Return what must be equal of an argument that is joined with others: shape and types, or the value."""
    return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)


def samples_of(forms: Sequence[Sequence[Any]]) -> int:
    """Return the samples of each of some micro-batches, by the forms of their arguments; 0: they cannot be
    joined (rule 2).
    """
    if any(each != forms[0] for each in forms):
        return 0
    found = (form for form in forms[0] if isinstance(form, tuple))
    return next((shape[0] for shape, dtype, _ in found if dtype.is_floating_point and len(shape) > 1), 0)


def join(given: Sequence[Sequence[Any]], samples: int, known: Sequence[Any] = ()) -> list[Any]:
    """Return the joined arguments of micro-batches of `samples` each; those of `known` are joined already."""
    found = list[Any]()
    for at, leaves in enumerate(zip(*given, strict=True)):
        first = leaves[0]
        if at < len(known) and known[at] is not None:
            found.append(known[at])
        elif isinstance(first, Tensor) and first.dim() > 0 and len(first) == samples:
            found.append(torch.cat(leaves))
        else:
            found.append(first)
    return found


def part_of(passed: Sequence[Tensor], number: int, count: int) -> list[Tensor]:
    """Return the outputs of one of `count` joined micro-batches (rule 4)."""
    return [each.chunk(count)[number].clone() for each in passed]


def require_equal(joined: Sequence[Tensor], alone: Sequence[Tensor]) -> None:
    """Check outputs against those of the micro-batch alone (rule 3).

    Raises:
        ApplyError: They differ by more than rounding.
    """
    for mine, wanted in zip(joined, alone, strict=True):
        if not wanted.numel():
            continue
        size, off = float(wanted.detach().abs().max()), float((mine - wanted).detach().abs().max())
        if not off <= torch.finfo(wanted.dtype).eps ** 0.5 * size:
            raise ApplyError(
                "Blocks compute other outputs for micro-batches that are joined to one.",
                evidence=f"They differ by {off:.2g} of {size:.2g}.",
                fix="offload: {states: {kind: harmony, joined: 1}}",
                code="MT397",
            )
