"""Order and sizes of host updates during backward, shared by the mechanism and its pass.

The mechanism and the pass must agree on buckets, the sentinel gradient and the bound of host memory, so both
call the functions of this file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Generic, Literal, TypeVar

from memtune.program import Mask, Step, columns_of

T = TypeVar("T")

Trigger = Literal["end_of_step", "per_gradient", "per_layer"]
"""When the host updates a parameter whose gradient it has."""
ONE_BY_ONE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""torch's optimizers that update each parameter independently: all state is per parameter (torch/optim,
`_init_group` of each).
"""


def not_one_by_one(optimizer: Any) -> str:
    """Return why `optimizer` cannot update some parameters now and others later; empty if it can."""
    kind = type(optimizer)
    if kind.__module__.split(".")[:2] == ["torch", "optim"] and kind.__name__ in ONE_BY_ONE:
        return ""
    return (
        f"{kind.__name__} is none that is known to update parameters one by one, as"
        f" {', '.join(sorted(ONE_BY_ONE))} are"
    )


def inner_optimizers(optimizer: Any) -> tuple[str, ...]:
    """Return the classes of optimizers that `optimizer` holds, unless they share its parameter groups."""
    values = [
        each
        for value in vars(optimizer).values()
        for each in (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        )
    ]
    groups = ((type(each).__name__, getattr(each, "param_groups", None)) for each in values)
    return tuple(
        name for name, each in groups if isinstance(each, list) and each is not optimizer.param_groups
    )


def sentinel_index(n_bytes: Sequence[int]) -> int:
    """Return the index of the sentinel gradient, which is resident: the first of the smallest."""
    return min(range(len(n_bytes)), key=n_bytes.__getitem__)


def bucket_ends(n_bytes: Sequence[int], bucket_bytes: int) -> list[int]:
    """Return the indices of gradients, in grad-ready order, that fill a bucket; the last may not be full."""
    ends, held = [], 0
    for index, size in enumerate(n_bytes):
        held += size
        if held >= bucket_bytes:
            ends.append(index)
            held = 0
    return ends


def resident_count(n_bytes: Sequence[int], ratio: float) -> int:
    """Return the number of parameters whose optimizer state is resident on the device.

    Those used first are resident, up to 1 - `ratio` of the bytes; at least one is offloaded.
    """
    # Front to back: the last parameters get their gradients first, and the host has most time to update
    # those.
    room = (1.0 - ratio) * sum(n_bytes)
    for index, size in enumerate(n_bytes[:-1]):
        room -= size
        if room < 0:
            return index
    return max(len(n_bytes) - 1, 0)


def room_bytes(n_bytes: Sequence[int], block: Sequence[int]) -> int:
    """Return the bytes of gradients, of parameters in `block` (-1: none), that may wait for updates.

    Args:
        n_bytes: Bytes of each parameter on the host.
        block: Block of each, -1 for none.
    """
    # The host uses one block's (or the largest gradient in no block) while the device produces those of
    # the next. With less, host and device would wait for each other.
    of_block: dict[int, int] = {}
    for size, index in zip(n_bytes, block, strict=True):
        of_block[index] = max(of_block.get(-1, 0), size) if index < 0 else of_block.get(index, 0) + size
    return max(of_block.values(), default=0)


class PendingUpdates(Generic[T]):
    """Rounds of overlapped updates whose gradients are still held, oldest first.

    A round's end does not depend on the speed of updates, so that the pass can predict host memory.

    Args:
        room_bytes: Bound of the gradients of all rounds; a single round may exceed it.
    """

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes, self._rounds = room_bytes, deque[tuple[T, int]]()
        self._held_bytes = 0

    def make_room(self, n_bytes: int) -> Iterator[T]:
        """Yield, and forget, the rounds that must end before one of `n_bytes` begins; none for 0 bytes."""
        # A round of 0 bytes needs no room, and a single one may exceed the bound: otherwise it could never
        # begin.
        while self._rounds and n_bytes and self._held_bytes + n_bytes > self._room_bytes:
            yield self._take()

    def add(self, round_: T, n_bytes: int) -> None:
        """Add a round whose gradients no other component needs."""
        self._rounds.append((round_, n_bytes))
        self._held_bytes += n_bytes

    def drain(self, keep: int = 0) -> Iterator[T]:
        """Yield, and forget, all rounds but the newest `keep`."""
        while len(self._rounds) > keep:
            yield self._take()

    def _take(self) -> T:
        round_, n_bytes = self._rounds.popleft()
        self._held_bytes -= n_bytes
        return round_


def waiting_room(step: Step, held: Mask | None = None) -> int:
    """Return the bytes of gradients (`held`: of these parameters) that may wait for overlapped updates.

    Args:
        step: Step of a rank.
        held: (parameters,) parameters that the rank has; None: all.
    """
    # Masters are float32: 4 bytes an element.
    columns = columns_of(step.parameters)
    selected = columns.trainable if held is None else columns.trainable & held
    return room_bytes((4 * columns.numel[selected]).tolist(), columns.block[selected].tolist())
