"""Ranks that fail together: what failed first is what every rank says.

A rank whose training step or `apply` raises leaves its message in the ranks' store before it goes on to end. Ranks that then
fail in a collective, because their peer is gone, look there and say that instead. Where nobody has left a message (a rank was
killed, or was the one with the store), they say as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from memtune.errors import ApplyError, EnvironmentFault

_KEY = "memtune/first failure"
_PATIENCE = timedelta(seconds=5)


class RankFailed(EnvironmentFault):
    """Another rank ended in the middle of a collective; says which, and why if it could tell (exit code 3)."""


@contextmanager
def first_failure_is_shown(ranks: int) -> Iterator[None]:
    """What fails inside is told to the other ranks; what fails because of another rank says why that one failed.

    Raises:
        RankFailed: A collective failed because another rank is gone.
    """
    try:
        yield
    except Exception as error:
        if ranks == 1 or not dist.is_initialized() or isinstance(error, ApplyError | RankFailed):
            raise  # a refusal is every rank's
        if not _is_of_a_collective(error):
            _tell(f"Rank {dist.get_rank()} failed first: {type(error).__name__}: {error}")
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


def _tell(message: str) -> None:
    try:
        dist.distributed_c10d._get_default_store().compare_set(_KEY, "", message)
    except (RuntimeError, ValueError):  # the store is gone with its rank: nobody is left to be told
        return


def _told() -> str:
    try:
        store = dist.distributed_c10d._get_default_store()
        store.wait([_KEY], _PATIENCE)
        return store.get(_KEY).decode()
    except (RuntimeError, ValueError):
        return ""
