"""Which buffers a forward changes, and which of those it may read: a second run must find the latter as the first did."""

from __future__ import annotations

from torch import Tensor, nn


def changed_buffers(module: nn.Module, versions: dict[str, int]) -> list[str]:
    """Names of the buffers that a forward changed.

    BatchNorm's kernel writes its statistics without counting it as a change; its counter of batches does count.
    """
    changed = [name for name, buffer in module.named_buffers() if buffer._version != versions.get(name)]
    parents = {name.rpartition(".")[0] for name in changed}
    norms = {name for name in parents if isinstance(module.get_submodule(name), nn.modules.batchnorm._NormBase)}
    return [name for name, _ in module.named_buffers() if name in changed or name.rpartition(".")[0] in norms]


def only_written(module: nn.Module) -> set[str]:
    """Names of the buffers that a forward may change but does not read: statistics of PyTorch's own norms in training."""
    norms = {
        name: norm
        for name, norm in module.named_modules()
        if isinstance(norm, nn.modules.batchnorm._NormBase) and type(norm).__module__.startswith("torch.nn.")
    }
    return {f"{name}.{buffer}".lstrip(".") for name, norm in norms.items() for buffer, _ in norm.named_buffers(recurse=False)}


def copied_buffers(module: nn.Module, reads_back: frozenset[str] | None) -> dict[str, Tensor]:
    """What a second run must find in the buffers as it is now: of `reads_back`, or of all while that is not known."""
    buffers = dict(module.named_buffers())
    names = set(buffers) - only_written(module) if reads_back is None else reads_back
    return {name: buffer.detach().clone() for name, buffer in buffers.items() if name in names}
