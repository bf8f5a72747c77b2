"""Ranks that fail together: what failed first is what every rank says.

A rank whose training step or `apply` raises leaves its message in the ranks' store before it goes on to end. Ranks that then
fail in a collective, because their peer is gone, look there and say that instead. Where nobody has left a message (a rank was
killed, or was the one with the store), they say as much.

What all ranks refuse, they go on after: with another config, say. So each counts what it has raised, and messages are by that
count; an old one is not taken for that of a later failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from memtune.errors import EnvironmentFault, MemtuneError

_PATIENCE = timedelta(seconds=5)
_raised = 0
"""Failures of this process, this one included."""


class RankFailed(EnvironmentFault):
    """Another rank ended in the middle of a collective; says which, and why if it could tell (exit code 3)."""


@contextmanager
def first_failure_is_shown() -> Iterator[None]:
    """What fails inside is told to the other ranks; what fails because of another rank says why that one failed.

    Raises:
        RankFailed: A collective failed because another rank is gone.
    """
    global _raised
    try:
        yield
    except Exception as error:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            raise
        _raised += 1
        if isinstance(error, RankFailed):
            raise
        if not _is_of_a_collective(error):
            what = str(error) if isinstance(error, MemtuneError) else f"{type(error).__name__}: {error}"
            _tell(f"Rank {dist.get_rank()} failed first: {what}")
            raise
        raise RankFailed(
            "Another rank ended in the middle of a collective.",
            evidence=_told() or f"It left no message, as one that is killed (out of memory on the host, say). Seen here: {error}",
            fix="the output of the rank that failed first", code="MT377",
        ) from error  # fmt: skip


def _is_of_a_collective(error: BaseException | None) -> bool:
    """Gloo's errors are plain RuntimeErrors that name its source file; in a forward they may be the cause of another."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            return True
        error = error.__cause__
    return False


def _key() -> str:
    return f"memtune/first failure/{_raised}"


def _tell(message: str) -> None:
    try:
        dist.distributed_c10d._get_default_store().compare_set(_key(), "", message)
    except (RuntimeError, ValueError):  # the store is gone with its rank: nobody is left to be told
        return


def _told() -> str:
    try:
        store = dist.distributed_c10d._get_default_store()
        store.wait([_key()], _PATIENCE)
        return store.get(_key()).decode()
    except (RuntimeError, ValueError):
        return ""
