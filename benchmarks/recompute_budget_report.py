"""The page and the plot of `recompute_budget.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memtune.units import format_bytes, format_seconds

_COLOURS = {
    "planned": "#1b6ca8",
    "planned(by_schedule)": "#66a182",
    "checkmate": "#edae49",
    "dtr": "#8d5a97",
    "torch full": "#d1495b",
    "torch selective": "#d1495b",
    "torch auto-SAC": "#5c5c5c",
    "torch memory_budget": "#00798c",
}
_BY_BUDGET = ("planned", "planned(by_schedule)", "checkmate", "dtr", "megtaichi", "coop")
_TOP, _HEIGHT, _WIDTH, _COLUMNS = 30, 170, 230, 5
_MOST = 1.5
"""Slowdown at the upper edge of a panel."""


def markdown(
    found: dict[str, Any],
    rows: Sequence[Any],
    pairs: Sequence[tuple[Any, Any]],
    shares: Sequence[float],
    svg: Path | None,
) -> str:
    """Return the tables of the page from the rows and pairs of `recompute_budget`."""
    lines = [
        "# Recompute over a sweep of budgets",
        "",
        *([f"![slowdown against budget]({svg.name})", ""] if svg else []),
        (
            f"`{found['command']}` on {found['machine']['cpu']}, {found['threads']} thread, batch"
            f" {found['batch']}; simulated."
        ),
        (
            "A budget of 10 % lies a tenth of the way from the smallest peak by blocks to the plain one."
            " Cells: extra step time;"
        ),
        (
            "empty: no way within the budget. `planned` may move tensors to the host and keeps 1 % headroom;"
            " the others do neither."
        ),
        "",
        *(f"- {name.replace('_', ' ')}: {value}" for name, value in found["summary"].items()),
        "",
        "| model | technique | " + " | ".join(f"{share:.0%}" for share in shares) + " |",
        "|---|---|" + "---|" * len(shares),
    ]
    for model in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == model]
        plain, ends = (
            mine[0],
            (
                f"{model}, {format_bytes(min(row.peak_bytes for row in mine))} to"
                f" {format_bytes(mine[0].peak_bytes)}"
            ),
        )
        if len(mine) == 1:
            lines.append(
                f"| {model} | refused: nothing in its blocks can be recomputed |" + " |" * len(shares)
            )
            continue
        for technique in _BY_BUDGET:
            extra = {
                row.budget_share: f"{row.extra_s / plain.step_s:+.1%}"
                for row in mine
                if row.technique == technique
            }
            lines.append(f"| {ends} | {technique} | {' | '.join(extra.get(share, '') for share in shares)} |")
            ends = ""
    columns = "technique | peak | its extra time | planned's | its FLOPs again | planned's"
    lines += [
        "",
        "At the peak of each technique without a budget:",
        "",
        f"| model | {columns} |",
        "|---|---|---|---|---|---|---|",
    ]
    for peer, plan in pairs:
        times = f"{format_seconds(max(peer.extra_s, 0.0))} | {format_seconds(max(plan.extra_s, 0.0))}"
        flops = f"{peer.again_flops / 1e9:.2f} G | {plan.again_flops / 1e9:.2f} G"
        lines.append(
            f"| {peer.model} | {peer.technique} | {format_bytes(peer.peak_bytes)} | {times} | {flops} |"
        )
    trials = [row for row in rows if row.measured_bytes]
    if trials:
        lines += [
            "",
            "Real trials:",
            "",
            "| model | budget | planned | measured | error |",
            "|---|---|---|---|---|",
        ]
        for row in trials:
            sizes = " | ".join(
                format_bytes(each or 0) for each in (row.budget_bytes, row.peak_bytes, row.measured_bytes)
            )
            lines.append(f"| {row.model} | {sizes} | {(row.measured_bytes or 0) / row.peak_bytes - 1:+.3%} |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Any]) -> str:
    """Return an SVG: step over plain step against peak over plain peak, one panel per model; lines by budget,
    dots for torch's techniques.
    """
    models = [
        model
        for model in dict.fromkeys(row.model for row in rows)
        if sum(row.model == model for row in rows) > 1
    ]
    width, height = _WIDTH * _COLUMNS + 20, (_HEIGHT + 30) * -(-len(models) // _COLUMNS) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
        ' font-size="10">'
    ]
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for number, model in enumerate(models):
        left, top = number % _COLUMNS * _WIDTH + 35, number // _COLUMNS * (_HEIGHT + 30) + _TOP
        parts += _panel(left, top, [row for row in rows if row.model == model])
    for index, (name, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<text x="{35 + 140 * index}" y="{height - 10}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: int, top: int, rows: Sequence[Any]) -> list[str]:
    plain, inner, low = rows[0], _HEIGHT - 40, min(row.peak_bytes for row in rows) / rows[0].peak_bytes

    def place(row: Any) -> tuple[float, float]:
        x = left + 180 * (row.peak_bytes / plain.peak_bytes - low) / max(1 - low, 1e-9)
        return x, top + inner * (_MOST - min(row.step_s / plain.step_s, _MOST)) / (_MOST - 1)

    parts = [f'<text x="{left}" y="{top - 6}">{plain.model}</text>']
    for slowdown in (1.0, 1.25, _MOST):
        y = top + inner * (_MOST - slowdown) / (_MOST - 1)
        parts.append(f'<text x="{left - 30}" y="{y + 3:.1f}">{slowdown:.2f}×</text>')
        parts.append(f'<line x1="{left}" x2="{left + 180}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
    parts.append(f'<text x="{left}" y="{top + inner + 14}">{low:.0%}</text>')
    parts.append(f'<text x="{left + 150}" y="{top + inner + 14}">100 % peak</text>')
    for name, colour in _COLOURS.items():
        mine = [
            place(row)
            for row in rows
            if row.technique.startswith(name)
            and (row.technique == name or "(" in row.technique[len(name) :][:1])
        ]
        if name.startswith("torch"):
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in mine]
        elif mine:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(mine))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts
