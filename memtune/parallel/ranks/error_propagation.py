"""Error propagation between ranks: all ranks report the first failure.

A rank whose training step or `apply` raises puts its message into the process group's store before it ends.
Ranks that then fail in a collective, because their peer is gone, look there and report that message. Without
a message (a rank was killed, or hosted the store), they report its absence.

After an error that all ranks raise, training may continue, with another config for example. Each rank
therefore counts its errors, and messages are stored by that count; an old one is not mistaken for a later
failure's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from memtune.errors import EnvironmentFault, MemtuneError

_TIMEOUT = timedelta(seconds=5)
_raised = 0
"""Number of failures of this process, including the current one."""


class RankFailed(EnvironmentFault):
    """Another rank ended in the middle of a collective; names the rank and its reason, if published."""


@contextmanager
def share_first_failure() -> Iterator[None]:
    """Publish an exception raised inside to the other ranks; an exception caused by another rank reports that
    rank's failure.

    Raises:
        RankFailed: A collective failed because another rank is gone.
    """
    global _raised
    try:
        yield
    except Exception as error:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            raise
        # Counted on every rank that fails, so that all look under the same key.
        _raised += 1
        if isinstance(error, RankFailed):
            raise
        if not _is_of_a_collective(error):
            what = str(error) if isinstance(error, MemtuneError) else f"{type(error).__name__}: {error}"
            _publish(f"Rank {dist.get_rank()} failed first: {what}")
            raise
        raise RankFailed(
            "Another rank ended in the middle of a collective.",
            evidence=_first_message()
            or f"It left no message, as one that is killed (out of memory on the host, say). Seen here: {error}",  # noqa: E501
            fix="the output of the rank that failed first",
            code="MT377",
        ) from error


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Return True for errors of a collective."""
    # Gloo's errors are plain RuntimeErrors that name its source file; in a forward they may be the cause of
    # another error.
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            return True
        error = error.__cause__
    return False


def _key() -> str:
    return f"memtune/first failure/{_raised}"


def _publish(message: str) -> None:
    try:
        # Only the first message counts: later failures are its consequences.
        dist.distributed_c10d._get_default_store().compare_set(_key(), "", message)
    except (RuntimeError, ValueError):  # the rank that hosted the store has ended, so no rank can read it
        return


def _first_message() -> str:
    try:
        store = dist.distributed_c10d._get_default_store()
        # The other rank raises and publishes in its own time; without a limit a killed rank would be waited
        # for without end.
        store.wait([_key()], _TIMEOUT)
        return store.get(_key()).decode()
    except (RuntimeError, ValueError):
        return ""
