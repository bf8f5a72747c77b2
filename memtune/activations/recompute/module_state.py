"""Parameters and buffers of a block, found again at each run without a walk over its modules."""

from __future__ import annotations

from torch import Tensor, nn

from memtune.activations.offload import id_of
from memtune.activations.recompute.buffer_mutation import only_written
from memtune.runtime import local


class ModuleState:
    """Parameters and buffers of `module` by name; the tree of its modules is walked again if it has changed.

    Tensors are looked up at each call: sharding and offload put others in their place between two uses.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._walk()

    def _walk(self) -> None:
        self._modules = [
            (f"{name}." if name else "", each, list(each._modules.values()))
            for name, each in self._module.named_modules()
        ]
        self.only_written = only_written(self._module)
        """Buffers that a forward may write but does not read."""

    def refresh(self) -> None:
        """Walk the modules again if one of them has other children."""
        for _, each, children in self._modules:
            if len(children) != len(each._modules) or any(
                one is not other for one, other in zip(children, each._modules.values(), strict=True)
            ):
                self._walk()
                return

    def names(self) -> dict[int, str]:
        """Return the names of all parameters and buffers by `id_of`."""
        found: dict[int, str] = {}
        for prefix, each, _ in self._modules:
            for tensors in (each._parameters, each._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        found.setdefault(id_of(local(tensor)), prefix + name)
        return found

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name, each once."""
        seen, found = set[int](), dict[str, Tensor]()
        for prefix, each, _ in self._modules:
            for name, buffer in each._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[prefix + name] = buffer
        return found
