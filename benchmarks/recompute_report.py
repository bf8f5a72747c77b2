"""The page and the plot of `recompute_dynamic.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#edae49", "#8d5a97", "#5c5c5c")
_SHOWN = ("e*", "classes", "local", "LRU", "size", "MSPS")
_PREDICTED = """Predictions, made before the first run of the three systems:
coop's smallest budget at most DTR's on every log, 0.8 to 1.0 times it on most;
its fragmentation when a search starts 2 to 4 %; megtaichi at 0.95 of DTR on the ResNet.
The settings of megtaichi (one score) (neighbourhoods, fit, area of small pieces) and coop (first fit; neighbourhoods) were then chosen among a
dozen variants on these same logs; one step of the grid is 4 to 7 % of the smallest budgets, and with best fit plain DTR itself
gets along with 11 % on the ResNet."""  # noqa: E501


def _swapping(ratios: Sequence[float], found: dict[str, Any] | None) -> list[str]:
    if not found:
        return []
    lines = ["", "`megtaichi` in its arena, without swaps and with them on a link of each rate:", ""]
    lines += ["| budget | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for row, ratio in enumerate(ratios):
        cells = (each[row] for each in found.values())
        lines.append(f"| {ratio} | " + " | ".join("fails" if c is None else f"{c:g}" for c in cells) + " |")
    return lines


def markdown(ratios: Sequence[float], results: dict[str, Any], svg: str) -> str:
    """Return the page."""
    lines = [
        "# Dynamic recompute on the DTR artifact's operator logs",
        "",
        f"![slowdown against budget]({svg})",
        "",
    ]
    lines += [
        (
            "Costs are the logs' own times; a run fails where nothing is left to evict or five times the"
            " plain cost is exceeded."
        ),
        (
            "The systems' budgets are one arena with addresses: what does not fit in one hole does not fit."
            " `dtr` is DTR"
        ),
        (
            "with equivalence classes, first fit; the smallest budget is the one above which all budgets"
            " work, in steps of 1 %."
        ),
        (
            "Fragmentation is the share of the arena that is free, in holes too small, whenever a search for"
            " victims starts: the"
        ),
        "mean over all budgets that work, and at the smallest one.",
        "",
        _PREDICTED,
        "",
    ]
    lines += [
        "`megtaichi` and `coop` are what ships: their options (recomputed tensors kept or not; ancestors"
        " alone and no age for the former,",
        "either fit for the latter) are played at each budget, and the cheapest counts. `dtr`'s columns below"
        " are single heuristics; `best` is",
        "what it ships, all published heuristics played, each with recomputed tensors kept or not.",
        "",
    ]
    lines += ["## Smallest budget, % of the plain peak (fragmentation %: mean, at the smallest)", ""]
    systems = list(next(iter(results.values()))["smallest"])
    lines += ["| log | " + " | ".join(systems) + " |", "|---" * (len(systems) + 1) + "|"]
    for log, result in results.items():
        lines.append(f"| {log} | " + " | ".join(_cell(result["smallest"][each]) for each in systems) + " |")
    lines += ["", "## Against the aims", "", *_aims(results)]
    for log, result in results.items():
        heuristics = list(result["curves"])
        seconds = result["chosen"]["seconds"]
        lines += ["", f"## {log}: slowdown by budget, a counter of bytes ({result['ops']} ops)", ""]
        lines += ["| budget | " + " | ".join(heuristics) + " |", "|---" * (len(heuristics) + 1) + "|"]
        for row, ratio in enumerate(ratios):
            cells = (result["curves"][each][row] for each in heuristics)
            lines.append(
                f"| {ratio} | "
                + " | ".join("fails" if cell is None else f"{cell:.4f}" for cell in cells)
                + " |"
            )
        chosen = ", ".join(
            f"{ratio} {option}"
            for ratio, option in zip(ratios, result["chosen"]["option"], strict=True)
            if option
        )
        lines += _swapping(ratios, result.get("swapping"))
        lines += ["", f"Best: {chosen}. Playing all takes {min(seconds)} to {max(seconds)} s a budget."]
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, Any]) -> str:
    return (
        f"{found['percent']} ({100 * found['fragmentation']:.1f},"
        f" {100 * found['fragmentation_at_smallest']:.1f})"
    )


def _aims(results: dict[str, Any]) -> list[str]:
    of = {log: result["smallest"] for log, result in results.items()}
    ratio = {log: found["coop"]["percent"] / found["dtr"]["percent"] for log, found in of.items()}
    worst = max(100 * found["coop"]["fragmentation"] for found in of.values())
    half = {
        log: (found["megtaichi"]["slowdown_at_half"], found["coop"]["slowdown_at_half"])
        for log, found in of.items()
    }
    lines = [
        f"- coop's smallest budget at most DTR's on every log: {_met(max(ratio.values()) <= 1)}; "
        + ", ".join(f"{log} {value:.2f} ×" for log, value in ratio.items()),
        f"- at most 0.75 × on two logs: {_met(sorted(ratio.values())[:2][-1] <= 0.75)}",
        f"- coop's fragmentation at most 5 %: {_met(worst <= 5)}, the largest mean of a log is {worst:.1f} %",
        "- megtaichi at half of the peak, coop there: "
        + ", ".join(f"{log} {_times(mine)}, {_times(other)}" for log, (mine, other) in half.items()),
    ]
    for log, found in of.items():
        if log.startswith("resnet"):
            share = found["megtaichi"]["percent"] / found["dtr"]["percent"]
            lines.append(f"- megtaichi at most 0.92 × DTR on {log}: {_met(share <= 0.92)}, {share:.2f} ×")
    return lines


def _times(slowdown: float | None) -> str:
    return "fails" if slowdown is None else f"{slowdown:.3f} ×"


def _met(holds: bool) -> str:
    return "met" if holds else "**missed**"


def plot(ratios: Sequence[float], results: dict[str, Any]) -> str:
    """Return an SVG of slowdown against budget, one panel per log."""
    width, height, top = 230, 190, 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * len(results) + 20}" height="{height + 60}"'
    ]
    parts.append(' font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>')
    for panel, (log, result) in enumerate(results.items()):
        left = panel * width + 35
        parts.append(f'<text x="{left}" y="18">{log}</text>')
        for slowdown in (1.0, 1.2, 1.4, 1.6, 1.8, 2.0):
            y = top + (2.0 - slowdown) * (height - top)
            parts.append(f'<text x="{left - 24}" y="{y + 3:.1f}">{slowdown:.1f}×</text>')
            parts.append(f'<line x1="{left}" x2="{left + 180}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        for ratio in (0.2, 0.6, 1.0):
            parts.append(
                f'<text x="{left + 200 * ratio - 28:.0f}" y="{height + 14}">{100 * ratio:.0f} %</text>'
            )
        for name, colour in zip(_SHOWN, _COLOURS, strict=True):
            points = [
                f"{left + 200 * ratio - 20:.1f},{top + (2.0 - cost) * (height - top):.1f}"
                for ratio, cost in zip(ratios, result["curves"][name], strict=True)
                if cost is not None and cost <= 2.0
            ]
            parts.append(
                f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            )
    for index, (name, colour) in enumerate(zip(_SHOWN, _COLOURS, strict=True)):
        parts.append(f'<text x="{35 + 80 * index}" y="{height + 40}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
