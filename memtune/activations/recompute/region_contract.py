"""Contract of a region: what its forward reads besides the values of its arguments, and what it leaves.

A forward that runs a second time must find what the first run found: arguments that were not changed in
place, buffers, autocast, random states (torch's, Python's, numpy's, those of the user's generators). It must
leave what the first run left: losses of routers, counters and other attributes that the forward sets.
`RegionContract` has the facts that the runs of a module have shown, `RegionRun` the state that one run found
and restores for the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from memtune import refusals
from memtune.runtime import (
    NoteGenerators,
    RandomState,
    autocast_now,
    generators_of,
    generators_of_files,
    is_autocast_on,
    no_autocast_contexts,
)


class RegionContract:
    """Parameters and buffers of `module` by name, and what its runs so far read and wrote.

    Tensors are looked up at each call: sharding and offload put others in their place between two uses. The
    tree of modules is walked again if it has changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.generators: list[Any] = []
        """The user's generators from which its forward may draw; known after its first run."""
        self.of_files: list[Any] = []
        """Generators that are global where its forwards are written: a later run may be the first to draw."""
        self.draws = False
        """An op of its first run drew random numbers, or a later run did."""
        self.reads_back: frozenset[str] | None = None
        """Buffers that its forward has changed and may read so far; None before the first run."""
        self.sets: list[tuple[nn.Module, str]] = []
        """Attributes of modules that its first run has set."""
        self._walk()

    def _walk(self) -> None:
        self._modules = [
            (f"{name}." if name else "", each, list(each._modules.values()))
            for name, each in self.module.named_modules()
        ]
        self._norms = {
            prefix: type(each).__module__.startswith("torch.nn.")
            for prefix, each, _ in self._modules
            if isinstance(each, nn.modules.batchnorm._NormBase)
        }
        """Prefix of each norm with statistics → True if it is PyTorch's own."""

    def refresh(self) -> None:
        """Walk the modules again if one of them has other children."""
        for _, each, children in self._modules:
            if children != list(each._modules.values()):
                self._walk()
                return

    def names(self) -> dict[int, str]:
        """Return the names of all parameters and buffers by `id_of`."""
        found: dict[int, str] = {}
        for prefix, each, _ in self._modules:
            for tensors in (each._parameters, each._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        key = getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata
                        found.setdefault(key, prefix + name)
        return found

    def shapes(self) -> frozenset[torch.Size]:
        """Return the shapes of the parameters."""
        held = (tensor for _, each, _ in self._modules for tensor in each._parameters.values())
        return frozenset(tensor.shape for tensor in held if tensor is not None)

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers by name, each once."""
        seen, found = set[int](), dict[str, Tensor]()
        for prefix, each, _ in self._modules:
            for name, buffer in each._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[prefix + name] = buffer
        return found

    def attributes(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        """Return each module with its attributes, but not its parameters, buffers and hooks."""
        return [
            (each, {name: value for name, value in vars(each).items() if not _is_own(name, value)})
            for _, each, _ in self._modules
        ]

    def written(self, versions: Mapping[str, int]) -> list[str]:
        """Return the names of the buffers that a forward changed since they had `versions`."""
        # BatchNorm's kernel writes its statistics without bumping the version counter; its
        # `num_batches_tracked` does bump it, so all buffers of such a norm count.
        buffers = self.buffers()
        changed = {name for name, buffer in buffers.items() if buffer._version != versions.get(name)}
        norms = self._norms.keys() & map(_prefix, changed)
        return [name for name in buffers if name in changed or _prefix(name) in norms]

    def may_be_read(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of `names` that a forward may read."""
        # Statistics of PyTorch's norms in training are only written.
        return frozenset(name for name in names if not self._norms.get(_prefix(name), False))


class RegionRun:
    """State that a run of a region finds; made before it begins.

    Args:
        contract: Of the region.
        inputs: Tensors among its arguments.
        is_first: True for the region's first run, which shows from which generators it draws.
    """

    def __init__(self, contract: RegionContract, inputs: Iterable[Tensor], *, is_first: bool) -> None:
        self._contract = contract
        if is_first:
            contract.generators = generators_of(contract.module)
            contract.of_files = generators_of_files(contract.module)
        # A pass counts the state as host memory if the region draws.
        random = RandomState.kept if contract.draws else RandomState.capture
        self._random: RandomState | None = random(
            contract.module, dict.fromkeys([*contract.generators, *contract.of_files]), python=True
        )
        self.autocast = autocast_now()
        self.noted = NoteGenerators(contract.generators) if is_first else None
        """Mode of the first and second run: composite ops such as reshape take another path under a mode."""
        # Versions, not values: any change in place makes a second run start from other inputs.
        self._inputs = [(each, each._version) for each in inputs]
        buffers = contract.buffers()
        self._versions = {name: buffer._version for name, buffer in buffers.items()}
        reads = contract.may_be_read(buffers) if contract.reads_back is None else contract.reads_back
        self._before = {name: buffers[name].detach().clone() for name in buffers if name in reads}
        """Values of the buffers that a second run must find unchanged."""
        self._written: list[str] = []
        self._attributes = contract.attributes() if is_first else []
        # Not tensors of the last step: their graph would live as long as this run.
        self._found = [
            (each, name, value)
            for each, name in contract.sets
            if not isinstance(value := vars(each).get(name, _GONE), Tensor)
        ]
        """Attributes that its forward sets, with their values before."""

    def ended(self, name: str) -> None:
        """Note what the run of region `name` has left.

        Raises:
            ApplyError: It has changed an argument in place.
        """
        contract, random = self._contract, self._random
        assert random is not None
        # The walk over all attributes belongs to the first run alone: it would cost each block host time.
        after = contract.attributes() if self._attributes else []
        for (each, before), (_, now) in zip(self._attributes, after, strict=False):
            changed = [at for at, value in now.items() if before.get(at, _GONE) is not value]
            contract.sets += [(each, at) for at in changed]
            self._found += [(each, at, before.get(at, _GONE)) for at in changed]
        self._attributes = []
        if self.noted is not None:
            known = {id(each) for each in contract.of_files}
            random = random.with_generators(each for each in self.noted.found if id(each[0]) not in known)
        # An op may draw and restore the generator's state (`fork_rng`). The generators do not show that, but
        # the noted ops of the first run do.
        drew = self.noted is not None and self.noted.draws
        contract.draws = contract.draws or drew or not random.is_now(contract.module)
        if random.python is not None and random.python.is_now():  # it takes time to restore
            random = replace(random, python=None)
        unused = [each for each in contract.of_files if each not in contract.generators]
        self._random = random.without_unchanged(unused) if contract.draws else None
        inputs, self._inputs = self._inputs, []
        if any(tensor._version != version for tensor, version in inputs):
            raise refusals.error_of(refusals.changes_input(name))
        if self._versions:
            self._written = contract.written(self._versions)
            self._before = {each: copy for each, copy in self._before.items() if each in self._written}
            contract.reads_back = contract.may_be_read(self._written) | (contract.reads_back or frozenset())

    def contexts(self) -> Iterator[AbstractContextManager[object]]:
        """Yield the contexts in which a second run finds what this one found, outermost first."""
        if self._contract.sets:
            yield self._attributes_as_found()
        if self._written:
            yield self._buffers_as_found()
        if self._random is not None:
            yield self._random.restored()
        # Backward runs outside of autocast, so the first run's setting is entered again.
        if self.autocast:
            yield from (each() for each in self.autocast)
        elif is_autocast_on():
            yield from no_autocast_contexts()

    @contextmanager
    def _attributes_as_found(self) -> Iterator[None]:
        left = [(each, name, vars(each).get(name, _GONE)) for each, name in self._contract.sets]
        _set(self._found)
        try:
            yield
        finally:
            # The second run's tensors have a graph that no backward runs through: it would keep the inputs.
            _set(left)

    @contextmanager
    def _buffers_as_found(self) -> Iterator[None]:
        buffers = self._contract.buffers()
        written = tuple(buffers[name] for name in self._written)
        # The values after the first run are those of plain training. They are restored after the second, and
        # the versions with them: ops that do not run again have saved these buffers.
        with _unsafe_preserve_version_counter(written):
            with torch.no_grad():
                copies = [(buffer, buffer.clone()) for buffer in written]
                for name, before in self._before.items():
                    buffers[name].copy_(before)
            yield
            with torch.no_grad():
                for buffer, copy in copies:
                    buffer.copy_(copy)


_GONE: Any = object()
"""Value of an attribute that does not exist."""


def _is_own(name: str, value: Any) -> bool:
    """Return whether an attribute is a dictionary of torch: of parameters, buffers, modules or hooks."""
    return name[:1] == "_" and isinstance(value, dict)


def _set(values: Iterable[tuple[nn.Module, str, Any]]) -> None:
    for each, name, value in values:
        if value is _GONE:
            vars(each).pop(name, None)
        else:
            vars(each)[name] = value


def _prefix(name: str) -> str:
    return name[: name.rfind(".") + 1]
