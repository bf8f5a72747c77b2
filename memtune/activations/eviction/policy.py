"""Eviction policies (DTR, MegTaiChi, Coop) and their simulation under a byte budget.

The rematerializer is native (`csrc/remat`): one lineage of ops and storages, and three rules that select
victims. A `Trace` is a program in the rematerializer's terms; `replay` plays it under a `Policy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from memtune import _native
from memtune.program import F64, I32, I64, U8

Neighbours = Literal["nothing", "own", "classes", "closure", "ancestors"]

RUN, REPLAY, EVICT, OVERWRITE, ALONG, SWAP, RELOAD = range(7)
"""First item of a journal entry before the op or storage; ALONG runs in the parts of the next one, SWAP
evicts to the host.
"""

CONSTANT, CALL, RELEASE, RETAIN, REQUIRE = range(5)
"""Kinds of a trace's events."""


@dataclass(frozen=True)
class HostLink:
    """Costs of copies to the host and back, in the trace's unit."""

    to_host_per_byte: float = 0.0
    from_host_per_byte: float = 0.0
    copy_cost: float = 0.0
    """Of any copy."""
    hides_copies: bool = True
    """Ops run meanwhile; False where copies take the same cores."""

    def to_host(self, n_bytes: float) -> float:
        """Return the cost of a copy to the host."""
        return self.copy_cost + n_bytes * self.to_host_per_byte

    def from_host(self, n_bytes: float) -> float:
        """Return the cost of a copy from the host."""
        return self.copy_cost + n_bytes * self.from_host_per_byte


@dataclass(frozen=True)
class Policy:
    """An eviction rule and its options; the defaults are DTR with equivalence classes (Kirisame et al. 2021,
    section 4).

    A storage's score is (own cost + cost of its `neighbours`) / (bytes * staleness); the lowest score is
    evicted first.
    """

    rule: Literal["dtr", "megtaichi", "coop"] = "dtr"
    """dtr: lowest score first. megtaichi: the same with a score that counts free bytes adjacent to a storage.
    coop: the run of adjacent pieces with the lowest summed score that makes room for the request.
    """
    neighbours: Neighbours = "classes"
    """The cost in the score: `nothing` (every cost is 1), `own`, with evicted `ancestors`, with evicted
    ancestors and descendants exactly (`closure`, e*) or by union-find (`classes`).
    """
    by_size: bool = True
    by_staleness: bool = True
    random: bool = False
    """Scores are random draws."""
    sample: bool = False
    """Consider every k-th candidate, k drawn for each search from 1 … sqrt(candidates)."""
    ignore_small: float = 0.0
    """Storages below this fraction of the mean size are considered only if no other storage is left."""
    release: Literal["ignore", "evict", "banish"] = "evict"
    """Action when the program drops the last reference to a storage: nothing, eviction, or permanent removal.
    """
    keep_replayed: bool = True
    """A released storage that a replay recomputed remains until evicted; False: until the call has run."""
    forget: bool = False
    """A storage that cannot be requested again is freed and no neighbour; the DTR artifact keeps all."""
    addressed: bool = False
    """The budget is an arena with addresses, which fragments; False: a counter of bytes."""
    best_fit: bool = False
    align_bytes: int = 1
    small_bytes: int = 0
    """Pieces up to this size are allocated in an area of their own, while it lasts …"""
    small_share: float = 0.0
    """… which takes this share of the budget, at most 10 MiB."""
    groups: int = 1
    """2: outputs of cheap ops are placed from the other end of the arena (Coop's tensor partitioning)."""
    in_place: bool = False
    """An op that overwrites a value without other readers reuses its memory (Coop's recomputable in-place).
    """
    compacts: bool = False
    """Only bytes decide whether a request fits, because the allocator assigns the real addresses. If no hole
    is large enough, the cheapest pieces are evicted, the rest is compacted, and the small pieces' area
    returns its free bytes.
    """
    parts: int = 1
    """Above 1: under memory pressure an elementwise op and the producers of its evicted inputs run together
    in this many parts, so that those inputs never exist in full (MegTaiChi's tensor partition).
    """
    swap: Literal["never", "exposed", "hidden"] = "never"
    """An evicted storage is copied to the host where that costs less than to recompute it (MegTaiChi): what
    of the copy does not fit between its last use and its eviction, on a link that carries one copy at a time,
    and, `exposed`, the copy back; `hidden`: other ops hide that one.
    """
    link: HostLink = HostLink()
    foresight: bool = False
    """Staleness is the time to the next use, recorded in an earlier run (MegTaiChi's access pattern)."""
    cost_power: float = 1.0
    size_power: float = 1.0
    time_power: float = 1.0
    replay_base: float = 1.0
    """megtaichi: its score is multiplied by this to the power of the replays so far."""
    epsilon: float = 0.0
    """megtaichi: added to cost and staleness, in mean costs of an op."""
    seed: int = 0
    option: str = ""
    """Its name among the options that a technique plays (`dtr_options`)."""

    def settings(
        self, budget_bytes: int | None, cost_limit: float = 0.0, work_limit: int = 0
    ) -> dict[str, Any]:
        """Return the settings of the native rematerializer."""
        limits = {"cost_limit": cost_limit, "work_limit": work_limit, "swaps": self.swap != "never"}
        limits |= asdict(self.link)
        if self.swap == "hidden":
            limits["from_host_per_byte"] = 0.0
        if budget_bytes is None:
            return {**asdict(self), **limits}
        # The caching allocator, too, serves small requests from blocks of their own, so they do not split
        # large ones.
        small = min(10 << 20, int(self.small_share * budget_bytes)) if self.small_bytes else 0
        return {**asdict(self), "budget_bytes": budget_bytes, "small_capacity_bytes": small, **limits}


DTR = Policy(keep_replayed=False)
"""DTR as memtune runs it: a storage recomputed for a replay alone is dropped after the requesting call."""
_KEPT = "_kept"
"""End of the names of options that keep recomputed values until they are evicted."""
DTR_HEURISTICS: dict[str, dict[str, Any]] = {
    "e_star": {"neighbours": "closure"},
    "classes": {"neighbours": "classes"},
    "local": {"neighbours": "own"},
    "lru": {"neighbours": "nothing", "by_size": False},
    "size": {"neighbours": "nothing", "by_staleness": False},
    "msps": {"neighbours": "ancestors", "by_staleness": False},
}
"""Terms of the published scores (Kirisame et al. 2021, section 4), and largest first, MSPS."""
MEGTAICHI = Policy(
    rule="megtaichi",
    neighbours="closure",
    addressed=True,
    replay_base=1.0001,
    epsilon=0.01,
    small_bytes=10 * 1024,
    small_share=0.01,
    parts=4,
)
"""Powers and base of MegEngine; its epsilon of 1e-3 is about a hundredth of an op's cost there. Compared with
classes and one area, exact neighbourhoods and a separate small area halve the smallest budget on some logs.
"""
COOP = Policy(
    rule="coop", neighbours="closure", addressed=True, in_place=True, small_bytes=10 * 1024, small_share=0.01
)
"""One group, as in OneFlow, with a separate small area."""

_MEGTAICHI_NEIGHBOURS: tuple[Neighbours, ...] = ("closure", "ancestors")


def dtr_options(base: Policy = DTR) -> tuple[Policy, ...]:
    """Return the published heuristics, each with recomputed values dropped at once or kept (DTR artifact)."""
    return tuple(
        replace(base, **terms, keep_replayed=kept, option=f"{name}{suffix}")
        for suffix, kept in (("", False), (_KEPT, True))
        for name, terms in DTR_HEURISTICS.items()
    )


def megtaichi_options(base: Policy = MEGTAICHI, *, swap: bool = False) -> tuple[Policy, ...]:
    """Return `base`, its alternatives near thrashing (other costs, no age, values dropped at once), and with
    `swap` those that may copy to the host as well.
    """
    found = tuple(
        replace(
            base,
            neighbours=neighbours,
            time_power=power,
            keep_replayed=kept,
            option=f"{neighbours}{age}{suffix}",
        )
        for suffix, kept in ((_KEPT, True), ("", False))
        for age, power in (("", base.time_power), ("_without_age", 0.0))
        for neighbours in _MEGTAICHI_NEIGHBOURS
    )
    swaps: tuple[Literal["exposed", "hidden"], ...] = ("exposed", "hidden") if swap else ()
    return (
        *found,
        *(replace(each, swap=how, option=f"{each.option}_swap_{how}") for how in swaps for each in found),
    )


def coop_options(base: Policy = COOP) -> tuple[Policy, ...]:
    """Return `base` and its alternatives: the smallest hole that fits, recomputed values dropped at once."""
    return tuple(
        replace(base, best_fit=best_fit, keep_replayed=kept, option=f"{fit}{suffix}")
        for suffix, kept in ((_KEPT, True), ("", False))
        for fit, best_fit in (("first_fit", False), ("best_fit", True))
    )


@dataclass(frozen=True, eq=False)
class Trace:
    """A program: t tensors in the order of creation, n ops, k events in the order of time."""

    tensor_bytes: I64  # (t,)
    tensor_base: I32  # (t,) tensor whose storage it views, -1 if it has its own storage
    tensor_cheap: U8  # (t,) made by a cheap op (for partitioned arenas)
    op_cost: F64  # (n,) in any unit
    op_args_at: I32  # (n + 1,) where the arguments of each op begin in `op_args`
    op_args: I32  # tensors
    op_outs: I32  # (n,) number of tensors that it makes
    op_takes_over: I32  # (n,) tensor that the first output overwrites, -1 for none
    op_again: U8  # (n,) 0 if it must not run a second time
    op_elements: I64  # (n,) elements of an elementwise op's output; 0 for all other ops
    event_kind: I32  # (k,)
    event_id: I32  # (k,) op or tensor

    def columns(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the columns as the native rematerializer reads them."""
        return dict(vars(self))


class TraceWriter:
    """Writes a trace event by event; tensors are numbered from 0 in the order of creation."""

    def __init__(self) -> None:
        self._tensors: list[tuple[int, int, bool]] = []  # bytes, base, cheap
        self._ops: list[tuple[float, int, int, bool, int]] = []  # cost, outputs, takes over, again, elements
        self._args: list[int] = []
        self._args_at = [0]
        self._events: list[tuple[int, int]] = []

    def constant(self, n_bytes: int) -> int:
        """Add a tensor that is resident from now on; return its number."""
        self._tensors.append((n_bytes, -1, False))
        self._events.append((CONSTANT, len(self._tensors) - 1))
        return len(self._tensors) - 1

    def call(
        self,
        cost: float,
        args: Iterable[int],
        outs: Sequence[tuple[int, int]],
        *,
        cheap: bool = False,
        takes_over: int = -1,
        again: bool = True,
        elements: int = 0,
    ) -> list[int]:
        """Add an op; return the tensors that it makes.

        Args:
            cost: Of one run.
            args: Tensors that it reads.
            outs: Bytes of each output, and the tensor whose storage it is a view of or -1; every output has
                one reference.
            cheap: See `Trace.tensor_cheap`.
            takes_over: The argument that its first output overwrites, -1 for none.
            again: It may run a second time.
            elements: See `Trace.op_elements`.
        """
        first = len(self._tensors)
        self._tensors += [(n_bytes, base, cheap) for n_bytes, base in outs]
        self._args += args
        self._args_at.append(len(self._args))
        self._ops.append((cost, len(outs), takes_over, again, elements))
        self._events.append((CALL, len(self._ops) - 1))
        return list(range(first, first + len(outs)))

    def release(self, tensor: int) -> None:
        """Drop one reference of the program to `tensor`."""
        self._events.append((RELEASE, tensor))

    def retain(self, tensor: int) -> None:
        """Add one reference of the program to `tensor`."""
        self._events.append((RETAIN, tensor))

    def require(self, tensor: int) -> None:
        """Make `tensor` resident from now on."""
        self._events.append((REQUIRE, tensor))

    def storage_bytes(self, tensor: int) -> int:
        """Return the bytes of the storage behind `tensor`."""
        while self._tensors[tensor][1] >= 0:
            tensor = self._tensors[tensor][1]
        return self._tensors[tensor][0]

    def is_view(self, tensor: int) -> bool:
        """Return whether `tensor` is a view of another tensor's storage."""
        return self._tensors[tensor][1] >= 0

    def done(self) -> Trace:
        """Return the trace."""
        n_bytes, base, cheap = _unzipped(self._tensors, 3)
        cost, outs, takes_over, again, elements = _unzipped(self._ops, 5)
        kind, index = _unzipped(self._events, 2)
        return Trace(
            tensor_bytes=np.asarray(n_bytes, np.int64),
            tensor_base=np.asarray(base, np.int32),
            tensor_cheap=np.asarray(cheap, np.uint8),
            op_cost=np.asarray(cost, np.float64),
            op_args_at=np.asarray(self._args_at, np.int32),
            op_args=np.asarray(self._args, np.int32),
            op_outs=np.asarray(outs, np.int32),
            op_takes_over=np.asarray(takes_over, np.int32),
            op_again=np.asarray(again, np.uint8),
            op_elements=np.asarray(elements, np.int64),
            event_kind=np.asarray(kind, np.int32),
            event_id=np.asarray(index, np.int32),
        )


def _unzipped(rows: list[Any], width: int) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True)) if rows else [()] * width


@dataclass(frozen=True)
class Replay:
    """Result of a trace under a policy; costs in the trace's unit."""

    outcome: Literal["done", "infeasible", "thrashing"]
    first_cost: float
    replay_cost: float
    peak_bytes: int
    replays: int
    evictions: int
    released: int
    searches: int
    looked_at: int
    work: int
    """Candidates looked at and steps of walks over evicted neighbours: the work of the simulation."""
    compactions: int
    moved_bytes: int
    swaps: int
    swapped_bytes: int
    fragmentation: float
    """Mean share of the arena that was free, but in holes too small, when a search for victims began."""
    fragmentation_max: float
    wanted_bytes: int
    """Bytes of the request that failed, else 0."""
    held_bytes: int
    """Bytes that could not be evicted when it failed, else 0."""
    events_done: int
    journal: list[tuple[int, int]] = field(repr=False)

    @property
    def slowdown(self) -> float:
        """All costs divided by those of the first runs."""
        return 1.0 + self.replay_cost / self.first_cost


def replay(
    trace: Trace,
    policy: Policy,
    budget_bytes: int | None = None,
    *,
    settle: bool = False,
    cost_limit: float = 0.0,
    work_limit: int = 0,
    journal: bool = False,
) -> Replay:
    """Play `trace` under `policy`.

    Args:
        trace: The program.
        policy: The eviction policy.
        budget_bytes: Limit of resident bytes; None: no limit.
        settle: Make everything that is still referenced resident at the end, all together.
        cost_limit: The run ends as `thrashing` as soon as its costs must exceed this sum; 0 for no limit.
        work_limit: The same for `Replay.work`.
        journal: Return the journal, entry by entry.
    """
    settings = policy.settings(budget_bytes, cost_limit, work_limit)
    return Replay(**_native.remat_trace(trace.columns(), settings, settle, journal))
