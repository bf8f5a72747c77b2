"""Buffers that a block's forward writes, and those of them that it may read, which the second run must find
unchanged.
"""

from __future__ import annotations

from torch import Tensor, nn


def changed_buffers(module: nn.Module, versions: dict[str, int]) -> list[str]:
    """Return the names of the buffers that a forward changed, by their version counters.

    BatchNorm's kernel writes its statistics without bumping the version counter; its `num_batches_tracked`
    does bump it, so all buffers of such a norm count.
    """
    changed = [name for name, buffer in module.named_buffers() if buffer._version != versions.get(name)]
    parents = {name.rpartition(".")[0] for name in changed}
    norms = {
        name for name in parents if isinstance(module.get_submodule(name), nn.modules.batchnorm._NormBase)
    }
    return [name for name, _ in module.named_buffers() if name in changed or name.rpartition(".")[0] in norms]


def only_written(module: nn.Module) -> set[str]:
    """Return the names of buffers that a forward may write but does not read: the statistics of PyTorch's
    norms in training.
    """
    norms = {
        name: norm
        for name, norm in module.named_modules()
        if isinstance(norm, nn.modules.batchnorm._NormBase) and type(norm).__module__.startswith("torch.nn.")
    }
    return {
        f"{name}.{buffer}".lstrip(".")
        for name, norm in norms.items()
        for buffer, _ in norm.named_buffers(recurse=False)
    }


def copied_buffers(
    buffers: dict[str, Tensor], reads_back: frozenset[str] | None, written: set[str]
) -> dict[str, Tensor]:
    """Return copies of the buffers that a second run must find unchanged: `reads_back`, or all but the only
    `written` ones while that is unknown (None).
    """
    names = set(buffers) - written if reads_back is None else reads_back
    return {name: buffer.detach().clone() for name, buffer in buffers.items() if name in names}
