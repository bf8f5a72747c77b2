"""The CUDA caching allocator's settings, parsed from the text that torch parses: `PYTORCH_ALLOC_CONF`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memtune.errors import UsageError
from memtune.memory import VARIABLE, ArenaSettings
from memtune.search_spaces import did_you_mean
from memtune.units import MIB

ROUNDUP_INTERVALS = 16
"""Powers of two from 1 MiB to 32 GiB, each with its own rounding; larger sizes use the last one."""
NO_ROUNDUP = (0,) * ROUNDUP_INTERVALS

# Known to torch 2.13 and without effect on how many bytes are reserved.
_WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)
_TOKEN = re.compile(r"[,:\[\]]|[^,:\[\]]+")
_FIX = "write it as PYTORCH_ALLOC_CONF has it: max_split_size_mb:128,garbage_collection_threshold:0.8"


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Settings of one allocator; the defaults are torch's."""

    backend: str = "native"
    """`native`, or `cudaMallocAsync`, which ignores all others but the memory fraction."""
    max_split_size_mb: int | None = None
    """Blocks of at least this many MiB are neither split nor given to smaller requests."""
    max_non_split_rounding_mb: int | None = None
    """Limit in MiB by which larger than the request such a block may be; None for large_segment_size_mb."""
    large_segment_size_mb: int = 20
    """Segment in MiB for requests between 1 and 10 MiB, and page of expandable segments."""
    roundup_power2_divisions: tuple[int, ...] = NO_ROUNDUP
    """Parts into which each power of two from 1 MiB is divided for rounding; 0 and 1 round to 512 bytes."""
    garbage_collection_threshold: float | None = None
    """Share of the memory limit above which old blocks are released; acts only with a limit."""
    expandable_segments: bool = False
    per_process_memory_fraction: float | None = None
    """The limit as a share of the device's memory."""
    arena: ArenaSettings | None = None
    """memtune's own allocator, which replaces torch's."""

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Return the settings in `text`, a value of `PYTORCH_ALLOC_CONF` or `PYTORCH_CUDA_ALLOC_CONF`.

        Raises:
            UsageError: torch would refuse the text or one of its keys (code MT140).
        """
        tokens = _TOKEN.findall(re.sub(r"\s", "", text))
        values = _Values(text, tokens).all()
        return _checked(cls(**values), text)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> AllocatorSettings:
        """Return the settings in the environment of a technique or process.

        Raises:
            UsageError: As for `parse`.
        """
        if own := environ.get(VARIABLE):
            return cls(arena=ArenaSettings.parse(own))
        return cls.parse(environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))

    def limit_bytes(self, capacity_bytes: int | None) -> int | None:
        """Return the limit of the process on a device of `capacity_bytes`; None without one.

        A fraction of 1 is no limit.
        """
        if (
            self.per_process_memory_fraction is None
            or self.per_process_memory_fraction >= 1
            or capacity_bytes is None
        ):
            return None
        return int(self.per_process_memory_fraction * capacity_bytes)

    def native(self) -> dict[str, Any]:
        """Return the arguments of `_native.replay_allocator`, except events and capacity."""
        max_split, rounding = self.max_split_size_mb, self.max_non_split_rounding_mb
        return {
            "max_split_bytes": None if max_split is None else max_split * MIB,
            "max_non_split_rounding_bytes": None if rounding is None else rounding * MIB,
            "large_segment_bytes": self.large_segment_size_mb * MIB,
            "roundup_divisions": list(self.roundup_power2_divisions),
            "garbage_collection_threshold": self.garbage_collection_threshold or 0.0,
            "expandable_segments": self.expandable_segments,
            "asynchronous": self.backend == "cudaMallocAsync",
            **({} if self.arena is None else {"arena": self.arena.options()}),
        }


@dataclass
class _Values:
    """Parser of `key:value,key:[a:b,c:d]`, left to right."""

    text: str
    tokens: list[str]
    at: int = 0
    found: dict[str, Any] = field(default_factory=dict)

    def all(self) -> dict[str, Any]:
        while self.at < len(self.tokens):
            self._setting()
            if self.at < len(self.tokens):
                self._expect(",")
        return self.found

    def _setting(self) -> None:
        key = self._next("the name of a setting")
        if key not in _READERS and key not in _WITHOUT_EFFECT:
            near = did_you_mean(key, [*_READERS, *_WITHOUT_EFFECT])
            raise _refused(self.text, f"torch knows no allocator setting '{key}'.{near}")
        self._expect(":")
        if key == "roundup_power2_divisions" and self.tokens[self.at : self.at + 1] == ["["]:
            self.found[key] = self._list_of_divisions()
        elif key in _READERS:
            self.found[key] = self._value(key)
        else:
            self._next(f"a value for {key}")

    def _value(self, key: str) -> Any:
        word = self._next(f"a value for {key}")
        try:
            return _READERS[key](word)
        except ValueError as error:
            raise _refused(self.text, f"{key}:{word} is not possible: {error}") from None

    def _list_of_divisions(self) -> tuple[int, ...]:
        """Parse a list as torch does: its first pair also applies below its size, `>` above the last."""
        divisions, last, first = [0] * ROUNDUP_INTERVALS, 0, True
        self._expect("[")
        while self.tokens[self.at : self.at + 1] != ["]"]:
            size = self._next("a size in MiB or >")
            self._expect(":")
            count = self._count(self._next("a number of divisions"))
            if size == ">":
                divisions[last + 1 :] = [count] * (ROUNDUP_INTERVALS - last - 1)
            else:
                last = min(self._power(size), ROUNDUP_INTERVALS - 1)
                if first:
                    divisions[:last] = [count] * last
                divisions[last], first = count, False
            if self.tokens[self.at : self.at + 1] != ["]"]:
                self._expect(",")
        self._expect("]")
        return tuple(divisions)

    def _count(self, word: str) -> int:
        return 0 if word == "0" else 2 ** self._power(word)

    def _power(self, word: str) -> int:
        if not word.isascii() or not word.isdigit() or int(word) < 1 or int(word) & (int(word) - 1):
            raise _refused(self.text, f"roundup_power2_divisions: {word} is not a power of two.")
        return int(word).bit_length() - 1

    def _next(self, what: str) -> str:
        if self.at >= len(self.tokens):
            raise _refused(self.text, f"it ends where {what} should follow.")
        self.at += 1
        return self.tokens[self.at - 1]

    def _expect(self, sign: str) -> None:
        found = self._next(f"'{sign}'")
        if found != sign:
            raise _refused(self.text, f"'{found}' stands where '{sign}' should.")


def _parse_bool(word: str) -> bool:
    if word not in ("True", "False"):
        raise ValueError("True or False")
    return word == "True"


def _mib(word: str) -> int:
    if not word.isascii() or not word.isdigit():
        raise ValueError("a whole number of MiB")
    return min(int(word), 2**40)


def _divisions(word: str) -> tuple[int, ...]:
    count = _mib(word)
    if count < 1 or count & (count - 1):
        raise ValueError("a power of two")
    return (count,) * ROUNDUP_INTERVALS


def _share(word: str) -> float:
    share = float(word)
    if not 0 < share < 1:
        raise ValueError("between 0 and 1")
    return share


def _fraction(word: str) -> float:
    fraction = float(word)
    if not 0 <= fraction <= 1:
        raise ValueError("from 0 to 1")
    return fraction


def _backend(word: str) -> str:
    if word not in ("native", "cudaMallocAsync"):
        raise ValueError("native or cudaMallocAsync")
    return word


_READERS: Mapping[str, Any] = {
    "backend": _backend,
    "max_split_size_mb": _mib,
    "max_non_split_rounding_mb": _mib,
    "large_segment_size_mb": _mib,
    "roundup_power2_divisions": _divisions,
    "garbage_collection_threshold": _share,
    "expandable_segments": _parse_bool,
    "per_process_memory_fraction": _fraction,
}


def _checked(settings: AllocatorSettings, text: str) -> AllocatorSettings:
    segment = settings.large_segment_size_mb
    if segment <= 10:
        raise _refused(text, f"large_segment_size_mb:{segment} is not possible: more than 10.")
    for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
        value = getattr(settings, name)
        if value is not None and value < segment:
            raise _refused(
                text, f"{name}:{value} is not possible: at least {segment}, the size of a large segment."
            )
    return settings


def _refused(text: str, why: str) -> UsageError:
    return UsageError(f"The allocator settings '{text}' cannot be used: {why}", fix=_FIX, code="MT140")
