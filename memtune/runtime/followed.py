"""A forward and its backward decided op by op without a dispatch mode, because they have run before (`runtime.online`).

Rule 1. The first run of a new kind goes through the mode, with notes (`runtime.online_notes`). From the second one on its ops
        (`runtime.tape`) run one after the other; the books are told what they were told then, which does not depend on what ops
        make, so that they may be ahead of them; and what they decide is done between ops: evictions, and runs of ops again. So
        decisions, and the bytes on the books, are those of the mode.
Rule 2. Before each run all that the capture took for granted is compared (`runtime.guards`). What differs takes another path
        that was noted, or the mode once more, with notes.
Rule 3. The list of what is there holds every value alone, so that an eviction frees it. Where the caller holds what forward
        returned for longer than in the noted run, it is held on the books as long.
Rule 4. A forward that begins while another one waits for its backward goes through the mode, and its kind from then on. The
        first such time the one that waits gives back all that it holds (`runtime.gives_way`); where it cannot, up to half of the
        budget, and the new one has what it does not hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memtune import _native
from memtune.runtime.capture_lock import CaptureLock
from memtune.runtime.followed_path import path_of
from memtune.runtime.followed_run import FollowedRun, Route
from memtune.runtime.frozen import FrozenRegion, FrozenRun, held_bytes
from memtune.runtime.gives_way import GivingRun
from memtune.runtime.online_notes import Noted
from memtune.runtime.other_outputs import OutputsRun, left_out
from memtune.runtime.random_state import RandomState
from memtune.runtime.tape import GradientLike, Tape
from memtune.runtime.waiting_forwards import WaitingForwards
from memtune.schedule import Schedule

_MOST_KINDS = 64
_MOST_PATHS = 4
"""Of one kind of call; what takes ever new ones goes through the mode."""
_NOT_ALONE = "a forward begins before the backward of the one before it"


class Opened(NamedTuple):
    """Books for one forward and its backward."""

    opened: Callable[[], _native.Rematerializer]
    """New ones, the same each time."""
    budget_bytes: int
    """For the values alone."""
    background_bytes: int


class Followers(WaitingForwards):
    """The paths that were noted, by kind of call.

    Args:
        module: Whose forward and backward it is.
        forward: The module's own forward.
        device: Where the module computes.
        parts: In how many an op runs where the books say so.
        online: Runs it through the mode: with the kind, the arguments by position and those by name.
        opened: New books, for these arguments.
        through: Told of each run that is through: kind, what was noted, the run.
        locks: Held while a forward runs; and that of all that captures the module.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], device: torch.device, parts: int,
        online: Callable[[Any, Any, Any], Any], opened: Callable[[Sequence[Any]], Opened],
        through: Callable[[Any, Noted, FollowedRun], None], locks: tuple[AbstractContextManager[Any], CaptureLock],
    ) -> None:  # fmt: skip
        self.module, self.original, self.device, self.parts = module, forward, device, parts
        self.opened, self.through, self._online = opened, through, online
        self.turn, self.lock = locks
        self._regions: dict[Any, list[_FollowedRegion]] = {}
        self._retired = weakref.WeakSet[_FollowedRegion]()
        """Those of kinds that go through the mode now: a forward along one of them may still wait for its backward."""
        self.why_not: dict[Any, str] = {}
        """Why a kind of call goes through the mode for good."""

    def forward(self, key: Any, args: Any, kwargs: Any) -> Any:
        """The module's forward along a path, or through the mode."""
        regions = self._regions.get(key)
        if not regions:
            return self._online(key, args, kwargs)
        if self.waiting_bytes():
            self.never(key, _NOT_ALONE)
            return self._online(key, args, kwargs)
        return regions[0].forward(*args, **kwargs)

    def wants(self, key: Any) -> bool:
        """Whether a run of this kind should be noted."""
        known = self._regions.get(key)
        if key is None or key in self.why_not:
            return False
        return len(self._regions) < _MOST_KINDS if known is None else len(known) < _MOST_PATHS

    def note(self, key: Any, noted: Noted | None) -> None:
        """A run of this kind went through the mode; None: others ran in between."""
        if noted is None or noted.notes.why_not:
            self.never(key, "a forward begins before the backward of the one before it" if noted is None else noted.notes.why_not)
            return
        regions = self._regions.setdefault(key, [])
        regions.append(_FollowedRegion(self, key, noted, partial(self._instead, key, len(regions))))

    def _all(self) -> Iterator[_FollowedRegion]:
        yield from self._retired
        for regions in self._regions.values():
            yield from regions

    def _instead(self, key: Any, at: int, *args: Any, **kwargs: Any) -> Any:
        regions = self._regions[key]
        if not regions[at].is_captured and not regions[at].tries_again:
            self.never(key, regions[at].runs.why_plain)
        elif at + 1 < len(regions):
            return regions[at + 1].forward(*args, **kwargs)
        return self._online(key, args, kwargs)

    def never(self, key: Any, why: str) -> None:
        """This kind goes through the mode from now on."""
        if key is not None and len(self.why_not) < _MOST_KINDS:
            self.why_not[key] = why
        self._retired.update(self._regions.pop(key, ()))


class _FollowedRegion(FrozenRegion):
    """A region along one path."""

    _most_alike = 1  # what differs takes another path

    def __init__(self, followers: Followers, key: Any, noted: Noted, instead: Callable[..., Any]) -> None:
        super().__init__(followers.module, Schedule("", (), ()), followers.device, instead, followers.lock)
        self._original, self._followers, self._key, self._noted = followers.original, followers, key, noted

    @property
    def is_captured(self) -> bool:
        """Whether there is a tape to follow."""
        return any(hasattr(each, "tape") for known in self._captured.values() for each in known)

    def waiting_bytes(self) -> int:
        """What forwards hold that wait for their backward."""
        called = [each for run in self._runs() if isinstance(run, GivingRun) for each in run.called()]
        return sum(each.used_bytes() for each in self._waiting()) + held_bytes(called)

    def give_way(self) -> None:
        """See `WaitingForwards.give_way`."""
        for run in self._runs():
            if isinstance(run, GivingRun):
                run.give_way()
        for each in self._waiting():
            each.give_way()

    def _run(self, captured: Any, args: Any, kwargs: Any) -> FrozenRun:
        run = OutputsRun(self, captured)
        run.called_with(args, kwargs, self._followers.again)
        run.tells(partial(self._followers.never, self._key))
        return run

    def _waiting(self) -> list[FollowedRun]:
        return [run.saved[0][0] for run in self._runs() if run.saved]

    def _wanted(self) -> tuple[dict[int, GradientLike], ...]:
        return (self._noted.gradients,)

    def _differs(self, tape: Tape) -> str:
        path = path_of(tape, self._noted)
        if isinstance(path, str):
            return path
        return left_out(tape)

    def _coded(self, tape: Tape) -> Any:
        path = path_of(tape, self._noted)
        if isinstance(path, str):  # with gradients of other strides: those are made alike
            return next(iter(self._captured.values()))[0].first  # type: ignore[union-attr]
        random_state = partial(RandomState.capture, self.module)
        return _Followed(self, Route(tape, path, self._noted, self._followers.parts, random_state, self._device))

    def begin(self, route: Route, state: Sequence[Tensor], inputs: Sequence[Any]) -> FollowedRun:
        """A run with books of its own, on which is what other threads' forwards hold."""
        with self._followers.turn:
            opened = self._followers.opened(inputs)
        return FollowedRun(route, *opened, state, inputs)

    def taken(self, saved: list[Any]) -> FollowedRun:
        """The run whose backward begins: a forward in another thread cannot ask it to give way any more."""
        with self._followers.turn:
            run: FollowedRun = saved.pop()[0]
        return run

    def through(self, run: FollowedRun) -> None:
        """Its backward has run."""
        self._followers.through(self._key, self._noted, run)


class _Followed:
    """What runs forward and backward of one tape, as `frozen.FrozenRegion` asks for it."""

    def __init__(self, region: _FollowedRegion, route: Route) -> None:
        self.tape, self.lands, self._region, self._route = route.tape, route.lands, region, route

    def forward(self, state: Sequence[Tensor], inputs: Sequence[Any]) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """Its outputs, and what backward needs."""
        run = self._region.begin(self._route, state, inputs)
        return run.forward(), (run, *(inputs[number] for number in self._route.inputs_of_backward))

    def backward(
        self, _: Sequence[Tensor], saved: list[Any], gradients: list[Any], landed: list[Tensor]
    ) -> Generator[int, None, list[Tensor]]:
        """`frozen_code.Code.backward`."""
        run = self._region.taken(saved)
        found = yield from run.backward(self._route, gradients, landed)
        self._region.through(run)
        return found
