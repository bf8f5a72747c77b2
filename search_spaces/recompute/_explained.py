"""A plan of `planned` in lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from memtune.technique import Plan
from memtune.units import format_bytes, format_seconds


def explained(plan: Plan) -> Iterator[str]:
    """The peak against the budget, then one line for each run of blocks that do the same; nothing for a damaged plan."""
    try:
        lines = list(_lines(plan.decisions))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return
    yield from lines


def _lines(decisions: Mapping[str, Any]) -> Iterator[str]:
    peak, budget, plain = (format_bytes(decisions[name]) for name in ("peak_bytes", "budget_bytes", "plain_bytes"))
    blocks = decisions["blocks"]
    costs = format_seconds(sum(decisions["options"][i]["seconds"] for i in blocks))
    yield f"peak {peak} planned for a budget of {budget}; {plain} if everything were kept; costs {costs} a micro-batch"
    for index, run in groupby(range(len(blocks)), key=lambda block: int(blocks[block])):
        members, option = list(run), decisions["options"][index]
        where = f"block {members[0]}" if len(members) == 1 else f"blocks {members[0]} to {members[-1]}"
        yield f"{where}: {_option(option, each='each ' if len(members) > 1 else '')}"


def _option(option: Mapping[str, Any], each: str) -> str:
    parts = []
    if option["again"]:
        parts.append(f"runs {_names(option['again'])} again")
    elif option["calls"] is not None:
        parts.append("runs again")
    if option["moved"]:
        moved = {name: len(calls) for name, calls in option["moved"].items()}
        parts.append(f"moves {_names(moved)} to the host")
    if not parts:
        return f"keeps everything, {each}{format_bytes(option['held_bytes'])}"
    held, plain = option["held_bytes"], option["plain_bytes"]
    kept = f"{each}keeps {format_bytes(held)} of {format_bytes(plain)} for {format_seconds(option['seconds'])}"
    return f"{kept}: {', '.join(parts)}"


def _names(counts: Mapping[str, int]) -> str:
    """`native_layer_norm ×2, gelu`."""
    short: dict[str, int] = {}
    for name, count in counts.items():
        key = name.split(".")[1] if "." in name else name
        short[key] = short.get(key, 0) + int(count)
    return ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in short.items())
