"""The random state a region starts with, so that its second run draws the same numbers. It lives on the host.

Generators of the user's own (`y.bernoulli_(p, generator=mine)`) are part of it as far as they are known: the attributes of the
region's modules, and those that ops of its first run were given.

`kept` is for states that passes count: no op makes them, so a recorder is told of them (`tell_of_kept`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memtune.runtime.op_arguments import draws
from memtune.runtime.tiers import HOST, tier
from memtune.runtime.watching import WatchingMode


@dataclass(frozen=True)
class RandomState:
    """State of the CPU generator, and of the CUDA generator of the module's device where it has one."""

    cpu: Tensor  # uint8, on the host tier
    cuda: Tensor | None
    device: torch.device | None
    own: tuple[tuple[Generator, Tensor], ...] = ()
    """Of generators of the user's own."""
    counted: bool = False
    """By a pass; then so is what `restored` puts aside."""

    @classmethod
    def capture(cls, module: nn.Module, generators: Iterable[Generator] = ()) -> RandomState:
        """The state now, that of `generators` beside torch's own."""
        first = next(module.parameters(), None)
        device = first.device if first is not None and first.is_cuda else None
        with tier(HOST):
            cuda = None if device is None else torch.cuda.get_rng_state(device)
            return cls(torch.get_rng_state(), cuda, device, tuple((each, each.get_state()) for each in generators))

    @classmethod
    def kept(cls, module: nn.Module, generators: Iterable[Generator] = ()) -> RandomState:
        """As `capture`, of what is kept until something has run again, as `passes.random_states` counts it."""
        return replace(cls.capture(module, generators), counted=True)._told()

    def is_now(self, module: nn.Module) -> bool:
        """Nothing has drawn since; fake tensors draw nothing."""
        now = self.capture(module, [each for each, _ in self.own])
        if isinstance(self.cpu, FakeTensor):
            return True
        pairs = [(self.cpu, now.cpu), *((then, state) for (_, then), (_, state) in zip(self.own, now.own, strict=True))]
        if self.cuda is not None and now.cuda is not None:
            pairs.append((self.cuda, now.cuda))
        with _disable_current_modes():
            return all(torch.equal(then, state) for then, state in pairs)

    def beside(self, others: Iterable[tuple[Generator, Tensor]]) -> RandomState:
        """The same with the states of `others`."""
        return replace(self, own=(*self.own, *others))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw from this state inside; outside, everything goes on as if nothing had been drawn."""
        now = self._now()
        self._set()
        try:
            yield
        finally:
            now._set()

    def continue_from(self) -> None:
        """Draw from this state from here on; for use inside `restored`."""
        self._set()

    def _now(self) -> RandomState:
        with tier(HOST):
            cuda = None if self.device is None else torch.cuda.get_rng_state(self.device)
            own = tuple((each, each.get_state()) for each, _ in self.own)
            return RandomState(torch.get_rng_state(), cuda, self.device, own, self.counted)._told()

    def _told(self) -> RandomState:
        """Itself; recorders know of it from here on, if it is counted."""
        for note in _notes if self.counted else ():
            note(self.cpu)
        return self

    def _set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and self.device is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        for generator, state in self.own:
            generator.set_state(state)


@contextmanager
def tell_of_kept(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, `note` is told of the CPU generator's part of every state that a pass counts, when it is taken."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)


_notes: list[Callable[[Tensor], None]] = []


def generators_of(module: nn.Module) -> list[Generator]:
    """The generators that `module` and its modules have as attributes."""
    found = (value for each in module.modules() for value in vars(each).values() if isinstance(value, Generator))
    return list(dict.fromkeys(found))


def generator_of(kwargs: Any) -> Generator | None:
    """The generator that a call of an op was given by name, as ops take it."""
    found = (kwargs or {}).get("generator")
    return found if isinstance(found, Generator) else None


class NoteGenerators(WatchingMode):
    """Notes generators that ops are given and that are not in `known` yet, with their states before the first such op.

    Attributes:
        draws: Whether an op has drawn.
    """

    def __init__(self, known: list[Generator]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self.found = known, list[tuple[Generator, Tensor]]()
        self.draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op."""
        generator = generator_of(kwargs)
        self.draws = self.draws or draws(func, args, kwargs or {})
        if generator is not None and generator not in self._known:
            self._known.append(generator)
            with tier(HOST):
                self.found.append((generator, generator.get_state()))
        return func(*args, **(kwargs or {}))
