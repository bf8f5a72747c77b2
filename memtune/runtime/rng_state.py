"""Random state at the start of a region, on the host, so that its second run draws the same numbers.

States of Python's and numpy's generators are included on request (`python`).

The user's own generators (`y.bernoulli_(p, generator=mine)`) are included as far as they are known:
attributes of the region's modules, also those of Python and numpy, and arguments of ops of its first run.

`kept` is for states that passes count. No op makes them, so a recorder is notified (`observe_kept`).
"""

from __future__ import annotations

import _random
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from memtune.device import accelerator, platform_of
from memtune.random_seeds import PythonRandomState
from memtune.runtime.memory_tiers import HOST, tier
from memtune.runtime.op_recorder import OpVisitor
from memtune.runtime.op_schema import draws, without_modes


@dataclass(frozen=True)
class RandomState:
    """State of the CPU generator, and of that of the module's device if it is another one."""

    cpu: Tensor  # uint8, on the host tier
    on_device: Tensor | None
    device: torch.device | None
    own: tuple[tuple[Any, Any], ...] = ()
    """States of the user's own generators."""
    counted: bool = False
    """A pass counts it, and then also the state that `restored` saves."""
    python: PythonRandomState | None = None

    @classmethod
    def capture(
        cls, module: nn.Module, generators: Iterable[Any] = (), *, python: bool = False
    ) -> RandomState:
        """Return the current state, also of `generators` and, if `python`, of Python and numpy."""
        # Without a context no parameter is on a device, and the walk to the first one takes longer than an
        # op.
        first = next(module.parameters(), None) if accelerator.is_started() else None
        device = None if first is None or platform_of(first.device).is_host else first.device
        with tier(HOST):
            return cls(
                torch.get_rng_state(),
                _state_on(device),
                device,
                tuple((each, _state_of(each)) for each in generators),
                python=PythonRandomState.now() if python else None,
            )

    @classmethod
    def kept(cls, module: nn.Module, generators: Iterable[Any] = (), *, python: bool = False) -> RandomState:
        """Return the same as `capture`, counted: for a state held until a region has run again."""
        return replace(cls.capture(module, generators, python=python), counted=True)._notify()

    def is_now(self, module: nn.Module) -> bool:
        """Return True if nothing has been drawn since; fake tensors draw nothing."""
        if self.python is not None and not self.python.is_now():
            return False
        if isinstance(self.cpu, FakeTensor):
            return True
        now = self.capture(module, [each for each, _ in self.own])
        # Compared by state, not counted by draws: the user's ops draw without telling anyone.
        if not all(_is_same(then, state) for (_, then), (_, state) in zip(self.own, now.own, strict=True)):
            return False
        pairs = [(self.cpu, now.cpu)]
        if self.on_device is not None and now.on_device is not None:
            pairs.append((self.on_device, now.on_device))
        with without_modes():
            return all(torch.equal(then, state) for then, state in pairs)

    def without_unchanged(self, generators: Iterable[Any]) -> RandomState:
        """Return the state without those of `generators` from which nothing has been drawn since."""
        among = {id(each) for each in generators}
        own = [(g, s) for g, s in self.own if id(g) not in among or not _is_same(s, _state_of(g))]
        return replace(self, own=tuple(own))

    def with_generators(self, others: Iterable[tuple[Generator, Tensor]]) -> RandomState:
        """Return the state with the states of `others` added."""
        return replace(self, own=(*self.own, *others))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw from this state in this context; restore the current state afterwards."""
        now = self._now()
        self._set()
        try:
            yield
        finally:
            now._set()

    def continue_from(self) -> None:
        """Draw from this state from now on; for use inside `restored`."""
        self._set()

    def _now(self) -> RandomState:
        with tier(HOST):
            own = tuple((each, _state_of(each)) for each, _ in self.own)
            python = None if self.python is None else PythonRandomState.now()
            on_device = _state_on(self.device)
            state = RandomState(torch.get_rng_state(), on_device, self.device, own, self.counted, python)
            return state._notify()

    def _notify(self) -> RandomState:
        """Return the state itself, after notifying recorders if it is counted."""
        for note in _notes if self.counted else ():
            note(self.cpu)
        return self

    def _set(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.on_device is not None and self.device is not None:
            accelerator.set_rng_state(self.device, self.on_device)
        for generator, state in self.own:
            _set_state(generator, state)
        if self.python is not None:
            self.python.continue_from()


_IN_PYTHON = (_random.Random, np.random.Generator, np.random.RandomState)
"""Generators of other libraries that a module may have."""


def is_python_generator(value: Any) -> bool:
    """Return True for a generator of Python or numpy."""
    return isinstance(value, _IN_PYTHON)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, _random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two states of a generator are equal."""
    if isinstance(one, Tensor):
        with without_modes():
            return torch.equal(one, other)
    # States of numpy contain arrays, which `==` compares element by element.
    return pickle.dumps(one) == pickle.dumps(other)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, _random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _state_on(device: torch.device | None) -> Tensor | None:
    return None if device is None else accelerator.get_rng_state(device)


def seed_generators(seed: int) -> None:
    """Seed torch's generators, as `torch.manual_seed` does."""
    # Without an accelerator that function queues a seed with a formatted stack for each kind of device
    # at each call.
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def observe_kept(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `note` in this context with the CPU part of every counted state when it is captured."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)


_notes: list[Callable[[Tensor], None]] = []


def generators_of(module: nn.Module) -> list[Any]:
    """Return the generators, of any library, that `module` and its submodules have as attributes."""
    return _generators_in(vars(each) for each in module.modules())


def generators_of_files(module: nn.Module) -> list[Any]:
    """Return the generators that are global where the forwards of `module` and its submodules are written."""
    forwards = dict.fromkeys(getattr(type(each), "forward", None) for each in module.modules())
    return _generators_in(getattr(each, "__globals__", {}) for each in forwards)


def _generators_in(places: Iterable[Mapping[str, Any]]) -> list[Any]:
    found = (v for each in places for v in each.values() if isinstance(v, (Generator, *_IN_PYTHON)))
    return list({id(each): each for each in found}.values())


class PythonDraws:
    """Draws from now on from the generators of Python and numpy, the global ones and those of `module`."""

    def __init__(self, module: nn.Module) -> None:
        # torch's generators are not touched, because fake tensors draw nothing.
        self._before = PythonRandomState.now()
        generators = [*generators_of(module), *generators_of_files(module)]
        self._own = [(each, _state_of(each)) for each in generators if is_python_generator(each)]

    def some(self) -> bool:
        """Return whether anything has been drawn."""
        same = (_is_same(state, _state_of(each)) for each, state in self._own)
        return not (self._before.is_now() and all(same))

    def undo(self) -> None:
        """Restore the generators."""
        self._before.continue_from()
        for each, state in self._own:
            _set_state(each, state)


@contextmanager
def undone_draws(module: nn.Module) -> Iterator[Callable[[], bool]]:
    """Restore Python's and numpy's generators and those of `module` at the end; yield what returns whether
    anything has been drawn.
    """
    draws = PythonDraws(module)
    try:
        yield draws.some
    finally:
        draws.undo()


def generator_of(kwargs: Any) -> Generator | None:
    """Return the generator passed to an op by keyword."""
    found = (kwargs or {}).get("generator")
    return found if isinstance(found, Generator) else None


class NoteGenerators(OpVisitor):
    """Visitor that notes generators passed to ops and not in `known` yet, with their states before the first
    such op.

    Attributes:
        draws: True if an op has drawn.
    """

    def __init__(self, known: list[Any]) -> None:
        self._known, self.found = known, list[tuple[Generator, Tensor]]()
        self.draws = False

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note the generator of the op."""
        generator = generator_of(kwargs)
        self.draws = self.draws or draws(func, args, kwargs)
        # Before its first draw in the region: a second run must begin from there.
        if generator is not None and generator not in self._known:
            self._known.append(generator)
            with tier(HOST):
                self.found.append((generator, generator.get_state()))
        return NotImplemented


def autocast_now() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Return context makers that restore the current autocast state, for later; none if it is off."""

    def maker(device: str) -> Callable[[], AbstractContextManager[Any]]:
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        # With the cache on, casts of weights are shared within a region; a second run must cast as often.
        cache = torch.is_autocast_cache_enabled()
        return lambda: torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)

    return [maker(device) for device in accelerator.types()] if is_autocast_on() else []


def is_autocast_on() -> bool:
    """Return whether autocast is on for a device that this process uses."""
    return any(map(torch.is_autocast_enabled, accelerator.types()))


def no_autocast_contexts() -> list[AbstractContextManager[Any]]:
    """Return contexts without autocast, for code that ran without it."""
    return [torch.autocast(device, enabled=False) for device in accelerator.types()]
