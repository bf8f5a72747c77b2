"""Forwards without the mode that wait for their backward, of all regions that one module has: their bytes, and giving way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class _Region(Protocol):
    def waiting_bytes(self) -> int: ...

    def give_way(self) -> None: ...


class WaitingForwards(ABC):
    """What `Followers` and `WarmUp` say of the regions that they hold."""

    _online: Callable[[Any, Any, Any], Any]

    def waiting_bytes(self) -> int:
        """What forwards hold that wait for their backward."""
        return sum(each.waiting_bytes() for each in self._all())

    def give_way(self) -> None:
        """Another forward begins: those that wait for their backward let go of what may run again."""
        for each in self._all():
            each.give_way()

    def again(self, args: Any, kwargs: Any) -> Any:
        """Run a forward that gave way once more."""
        return self._online(None, args, kwargs)

    @abstractmethod
    def _all(self) -> Iterable[_Region]:
        """All regions, those that are retired too."""
