"""Bytes, seconds, ranks and budgets, parsed from what users type and printed for people; inside memtune only
bytes and seconds exist.
"""

from __future__ import annotations

import re

from memtune.errors import UsageError

KIB, MIB, GIB = 2**10, 2**20, 2**30
_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": 2**40,
}
_COUNTED = re.compile(
    r"\b([0-9]+) bytes\b|\b([0-9]+)(?= of the [0-9]+ bytes\b)|(?:(?<=device )|(?<=host )|(?<=ssd"
    r" ))([0-9]{4,})(?=[,;])"
)
_SECOND_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def _parse(text: str, units: dict[str, float] | dict[str, int], example: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in units:
        raise UsageError(
            f"'{text}' is not a quantity with a known unit.", fix=f"write it like {example}", code="MT203"
        )
    return float(match[1]) * units[match[2].lower()]


def parse_bytes(text: str) -> int:
    """Return bytes of a text like `24GiB`, `600MiB`, `1.5g` (binary) or `80GB` (decimal).

    Raises:
        UsageError: The text is none.
    """
    return int(_parse(text, _BYTE_UNITS, "24GiB or 600MiB"))


def parse_seconds(text: str) -> float:
    """Return seconds of a text like `90`, `30s`, `15m`, `1.5h`.

    Raises:
        UsageError: The text is none.
    """
    return _parse(text, _SECOND_UNITS, "30m or 1.5h")


def format_bytes(n_bytes: float) -> str:
    """Return `n_bytes` with three significant digits in the largest fitting binary unit: `1.50 GiB`."""
    sign, size = ("-" if n_bytes < 0 else ""), abs(float(n_bytes))
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while size >= 1024 and power < len(units) - 1:
        size, power = size / 1024, power + 1
    unit = units[power]
    digits = 0 if unit == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{sign}{size:.{digits}f} {unit}"


def bytes_in_words(text: str) -> str:
    """Return `text` with its numbers of bytes formatted by `format_bytes`: `100 of the 2097152 bytes`."""
    return _COUNTED.sub(lambda found: format_bytes(int(found[1] or found[2] or found[3])), text)


def format_seconds(seconds: float) -> str:
    """Return `seconds` in a form for people: `412 ms`, `3.20 s`, `4:07`, `1:02:09`."""
    if seconds < 0.9995:  # more would round to 1e+03 ms
        return f"{seconds * 1e3:#.3g}".rstrip(".") + " ms"
    if seconds < 60:
        return f"{seconds:#.3g} s"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def format_count(number: float) -> str:
    """Return a number of parameters with three significant digits: `17.3k`, `28.5M`, `6.74B`."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + unit
    return f"{number:.0f}"


def format_rate(per_s: float) -> str:
    """Return a number per second with three significant digits: `2.00`, `18.9`, `1,240`."""
    return f"{per_s:,.0f}" if per_s >= 99.95 else f"{per_s:#.3g}"


def format_micro_batch(samples: int | None, accumulate: int) -> str:
    """Return the samples of a micro-batch, and how many make a step if several do: `2×4`; empty for None."""
    if samples is None:
        return ""
    return f"{samples}×{accumulate}" if accumulate > 1 else str(samples)


def format_ranks(degree: int | None) -> str:
    """Return `4 ranks`, or `all ranks` for None."""
    return "all ranks" if degree is None else f"{degree} ranks"


def format_budget(budget_bytes: int | None, share: float | None) -> str:
    """Return the purpose of a plan: within bytes, a share of the range of peaks, or the search's limit."""
    if budget_bytes is not None:
        return f"to stay within {format_bytes(budget_bytes)}"
    if share is not None:
        return f"to stay within {share:.0%} of the way from the least to the plain peak"
    return "to stay within the memory limit"
