"""Read the operator logs of the DTR artifact as traces, by the artifact's own rules.

The logs are not part of memtune: `MEMTUNE_DTR_LOGS` names their folder, with the artifact's files (`*.log`
of its `simrd/logs.zip`) or with `<model>-<batch>.log.gz`. An in-place op is a copy followed by
a write (the written tensor gets a new storage, as large as the one behind the argument); a view has no bytes.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from memtune.activations.eviction.policy import Policy, Replay, Trace, TraceWriter, replay

VARIABLE = "MEMTUNE_DTR_LOGS"
_EXPENSIVE = ("conv", "mm", "matmul", "linear", "lstm", "bilinear")
"""Parts of the names of ops whose outputs are not cheap (Coop: convolutions, products and their
gradients).
"""

WORK_LIMIT, LEAST_WORK = 800_000_000, 20_000_000
"""Limit of the work (`Replay.work`) of all options together, about 3 s. Each option may take half of the work
that is left, and always `LEAST_WORK`.
"""


def folder() -> Path | None:
    """Return the folder of the logs, None if `MEMTUNE_DTR_LOGS` is not set."""
    found = os.environ.get(VARIABLE)
    return Path(found) if found and Path(found).is_dir() else None


def names() -> list[str]:
    """Return the names of the logs in the folder."""
    return sorted(_files())


@cache
def load(name: str) -> Trace:
    """Return the trace of one log; costs are nanoseconds."""
    path = _files()[name]
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return _Reader().read(json.loads(line) for line in lines)


def _files() -> dict[str, Path]:
    """Return the files by model and batch size, which begin their names."""
    found = folder()
    paths = [] if found is None else [*found.glob("*.log"), *found.glob("*.log.gz")]
    return {named[1]: path for path in paths if (named := re.match(r"(?:tv_)?(\w+-\d+)[-.]", path.name))}


class _Reader:
    """Maps the log's names to tensors."""

    def __init__(self) -> None:
        self._tensor: dict[str, int] = {}
        self._trace = TraceWriter()

    def read(self, lines: Iterator[dict[str, Any]]) -> Trace:
        """Read all lines; those before START are not part of the program."""
        for line in lines:
            if line.get("ANNOTATION") == "START":
                break
        for line in lines:
            getattr(self, f"_{line['INSTRUCTION'].lower()}")(line, lines)
        return self._trace.done()

    def _annotate(self, line: dict[str, Any], lines: Iterator[dict[str, Any]]) -> None:
        """Ignore the mark of where backward begins."""

    def _constant(self, line: dict[str, Any], lines: Iterator[dict[str, Any]]) -> None:
        self._tensor[line["NAME"]] = self._trace.constant(int(next(lines)["MEMORY"]))

    def _call(self, line: dict[str, Any], lines: Iterator[dict[str, Any]]) -> None:
        args = [self._tensor[name] for name in line["ARGS"]]
        outs = []
        for _ in line["RESULT"]:
            n_bytes, alias = int(next(lines)["MEMORY"]), int(next(lines)["ALIAS"])
            outs.append((n_bytes, -1) if alias < 0 else (0, args[alias]))
        cheap = not any(part in line["NAME"] for part in _EXPENSIVE)
        made = self._trace.call(float(line["TIME"]), args, outs, cheap=cheap)
        self._tensor.update(zip(line["RESULT"], made, strict=True))

    def _mutate(self, line: dict[str, Any], lines: Iterator[dict[str, Any]]) -> None:
        args = [self._tensor[name] for name in line["ARGS"]]
        old = [args[index] for index in line["MUTATE"]]
        takes_over = old[0] if len(old) == 1 and not self._trace.is_view(old[0]) else -1
        outs = [(self._trace.storage_bytes(tensor), -1) for tensor in old]
        made = self._trace.call(float(line["TIME"]), args, outs, cheap=True, takes_over=takes_over)
        self._tensor.update(zip((line["ARGS"][index] for index in line["MUTATE"]), made, strict=True))
        for tensor in old:
            self._trace.release(tensor)

    def _copy(self, line: dict[str, Any], lines: Iterator[dict[str, Any]]) -> None:
        self._tensor[line["DST"]] = self._tensor[line["SRC"]]
        self._trace.retain(self._tensor[line["SRC"]])

    def _copy_from(self, line: dict[str, Any], lines: Iterator[dict[str, Any]]) -> None:
        self._trace.release(self._tensor[line["DST"]])
        self._copy(line, lines)

    def _release(self, line: dict[str, Any], lines: Iterator[dict[str, Any]]) -> None:
        if line["NAME"] in self._tensor:
            self._trace.release(self._tensor.pop(line["NAME"]))


def replay_cheapest(
    trace: Trace,
    options: Sequence[Policy],
    budget_bytes: int,
    *,
    settle: bool = False,
    cost_limit: float = 0.0,
) -> tuple[Policy, Replay]:
    """Play `trace` under each of `options`; return the one with the lowest cost and its result.

    An option is played only until it costs more than the best before it, or has taken its part of
    `WORK_LIMIT`. The first one wins a tie, and is returned if none gets through.
    """
    best: tuple[Policy, Replay] | None = None
    work = WORK_LIMIT
    for policy in options:
        # Halved each time: a policy that thrashes must not take the time of those behind it.
        limit = max(work // 2, LEAST_WORK)
        done = replay(trace, policy, budget_bytes, settle=settle, cost_limit=cost_limit, work_limit=limit)
        work -= done.work
        if best is None or (done.outcome == "done" and best[1].outcome != "done"):
            best = policy, done
        elif done.outcome == "done" and done.replay_cost < best[1].replay_cost:
            best = policy, done
        if best[1].outcome == "done":
            # The next option ends as soon as it costs more.
            cost_limit = best[1].first_cost + best[1].replay_cost
            # Without a replay nothing can be cheaper.
            if not best[1].replays:
                break
    assert best is not None, "no options"
    return best
