"""What the mechanism and the pass of updates within backward both go by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

Trigger = Literal["end_of_step", "per_gradient", "per_layer"]
"""When the host updates a parameter whose gradient has arrived."""
ONE_BY_ONE = frozenset({"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"})
"""torch's optimizers whose step for several parameters is that for each of them: state by parameter, no state of a group's own
(torch/optim, `_init_group` of each)."""


def not_one_by_one(optimizer: Any) -> str:
    """Why `optimizer` cannot update some parameters now and others later; empty where it can."""
    kind = type(optimizer)
    if kind.__module__.split(".")[:2] == ["torch", "optim"] and kind.__name__ in ONE_BY_ONE:
        return ""
    return f"{kind.__name__} is none that is known to update parameters one by one, as {', '.join(sorted(ONE_BY_ONE))} are"


def witness(n_bytes: Sequence[int]) -> int:
    """Index of the trained parameter whose gradient stays on the device until the step: the first of the smallest."""
    return min(range(len(n_bytes)), key=n_bytes.__getitem__)


def bucket_ends(n_bytes: Sequence[int], bucket_bytes: int) -> list[int]:
    """Indices of the gradients, in the order in which they land, with which a bucket is full; the last one may not be."""
    ends, held = [], 0
    for index, size in enumerate(n_bytes):
        held += size
        if held >= bucket_bytes:
            ends.append(index)
            held = 0
    return ends


def staying(n_bytes: Sequence[int], ratio: float) -> int:
    """How many trained parameters keep their optimizer state on the device: those used first, up to 1 - `ratio` of the bytes.

    At least one leaves.
    """
    room = (1.0 - ratio) * sum(n_bytes)
    for index, size in enumerate(n_bytes[:-1]):
        room -= size
        if room < 0:
            return index
    return max(len(n_bytes) - 1, 0)


def room_bytes(n_bytes: Sequence[int], block: Sequence[int]) -> int:
    """Bytes of gradients that wait on the host for updates beside backward: those of one block, or the largest that is in none.

    While one block's are used, those of the next are made: with less, host or device would wait for the other one each time.

    Args:
        n_bytes: Of each parameter on the host.
        block: Of each, -1 for none.
    """
    of_block: dict[int, int] = {}
    for size, index in zip(n_bytes, block, strict=True):
        of_block[index] = max(of_block.get(-1, 0), size) if index < 0 else of_block.get(index, 0) + size
    return max(of_block.values(), default=0)


class Waiting(Generic[T]):
    """Turns of updates beside backward whose gradients are still there, oldest first.

    Which turn is let go when does not depend on how fast updates are, so that the pass knows what host memory holds.

    Args:
        room_bytes: That gradients of all turns take at most; a single turn may take more.
    """

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes, self._turns = room_bytes, list[tuple[T, int]]()

    def let_go(self, n_bytes: int) -> Iterator[T]:
        """The turns that must be over before one of `n_bytes` more begins; each is forgotten."""
        while self._turns and n_bytes and sum(size for _, size in self._turns) + n_bytes > self._room_bytes:
            yield self._turns.pop(0)[0]

    def put(self, turn: T, n_bytes: int) -> None:
        """A turn begins, with gradients that nobody else needs."""
        self._turns.append((turn, n_bytes))

    def rest(self, keep: int = 0) -> Iterator[T]:
        """All turns but the newest `keep`; each is forgotten."""
        while len(self._turns) > keep:
            yield self._turns.pop(0)[0]
