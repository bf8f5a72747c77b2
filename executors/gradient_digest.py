"""Digests of gradients, to compare two runs without two models or any gradient in memory.

Of each gradient: a SHA-256, which proves bitwise equality; its norm; and a *sketch*, a random projection to
`BUCKETS` numbers that is the same in every run. The squared distance of two sketches equals that of the
gradients on average, and is within a factor of two of it (Charikar et al. 2002, count sketch, ICALP). A file
of all gradients would be exact, but as large as the model for each step.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from memtune.runtime import RemoteParameters

BUCKETS = 32
_ROWS = 1 << 16
"""Rows of BUCKETS numbers that are converted to float64 at a time."""


class GradientRecord(BaseModel):
    """Digest of one gradient."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str
    elements: int
    norm: float
    sketch: str
    """BUCKETS little-endian float64 numbers in base64."""

    @property
    def projected(self) -> npt.NDArray[np.float64]:
        """Return (BUCKETS,) the sketch.

        Raises:
            ValueError: It is damaged.
        """
        return np.frombuffer(base64.b64decode(self.sketch, validate=True), "<f8", BUCKETS)


def gradients_of(
    model: nn.Module,
    remote: RemoteParameters | None = None,
    optimizer_params: Mapping[nn.Parameter, nn.Parameter] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and full gradient of every parameter of `model`; all ranks must call it.

    Args:
        model: The trained model.
        remote: Parameters that this rank does not hold, under a pipeline.
        optimizer_params: The optimizer's parameter for each of the model's that it replaces; it has the
            gradient if that was offloaded.
    """
    for name, parameter in model.named_parameters():
        gradient, held = parameter.grad, (optimizer_params or {}).get(parameter)
        if (
            gradient is None and held is not None and held.shape == parameter.shape
        ):  # neither a shard nor a flat buffer
            gradient = held.grad
        if gradient is not None:
            if remote is not None:
                gradient = remote.full_value(name, gradient)
            yield (
                name.removeprefix("module."),
                gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient,
            )


def gradient_records(
    model: nn.Module,
    remote: RemoteParameters | None = None,
    optimizer_params: Mapping[nn.Parameter, nn.Parameter] | None = None,
) -> dict[str, GradientRecord]:
    """Return the digest of every gradient of `model`, by parameter name; arguments as for `gradients_of`.

    All ranks must call it.
    """
    return {name: record_of(gradient) for name, gradient in gradients_of(model, remote, optimizer_params)}


def sha256_of(gradient: Tensor) -> str:
    """Return the SHA-256 of shape, dtype and bytes."""
    data = gradient.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tuple(gradient.shape)}{data.dtype}".encode())
    digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sha256_of_all(each: Mapping[str, str]) -> str:
    """Return the SHA-256 of the parameters' names, in order, and the SHA-256 of their gradients."""
    return hashlib.sha256("".join(f"{name} {each[name]}\n" for name in sorted(each)).encode()).hexdigest()


def record_of(gradient: Tensor) -> GradientRecord:
    """Return the digest of one gradient."""
    data = gradient.detach().cpu().contiguous().reshape(-1)
    sketch, square = np.zeros(BUCKETS), 0.0
    signs = np.random.default_rng(0)
    for part in data.split(_ROWS * BUCKETS):
        rows = np.zeros((-(-len(part) // BUCKETS), BUCKETS))
        rows.reshape(-1)[: len(part)] = part.double().numpy()
        square += float(np.einsum("ij,ij->", rows, rows))
        sketch += (2.0 * signs.integers(0, 2, len(rows)) - 1.0) @ rows
    encoded = base64.b64encode(sketch.astype("<f8").tobytes()).decode()
    return GradientRecord(
        sha256=sha256_of(gradient), elements=len(data), norm=math.sqrt(square), sketch=encoded
    )


def largest_difference(
    mine: Mapping[str, GradientRecord], theirs: Mapping[str, GradientRecord]
) -> tuple[float, str]:
    """Return the parameter whose gradients differ most, and by how much: 0 if all are bitwise equal.

    A difference is relative to the gradient's norm, or if larger, to the norm that this many numbers of the
    full gradient have on average: some gradients are zero except for rounding (of a bias before a norm
    layer).

    Raises:
        ValueError: The parameters of the two differ, or a sketch is damaged.
    """
    if mine.keys() != theirs.keys():
        raise ValueError(f"only one run has a gradient of {sorted(mine.keys() ^ theirs.keys())[0]}")
    per_number = math.sqrt(
        sum(each.norm**2 for each in theirs.values()) / max(sum(each.elements for each in theirs.values()), 1)
    )
    worst = (0.0, "")
    for name, other in theirs.items():
        if mine[name].sha256 == other.sha256:
            continue
        distance = float(np.linalg.norm(mine[name].projected - other.projected))
        scale = max(other.norm, per_number * math.sqrt(other.elements))
        relative = (
            math.inf if math.isnan(distance) else distance / scale if scale else math.inf if distance else 0.0
        )
        worst = max(worst, (relative, name))
    return worst
