"""Drawings as inline SVG: axes with ticks, marks and text. No script, no network, no package."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

# Okabe and Ito's palette: eight colours that people with any form of colour vision can tell apart.
BLUE, ORANGE, GREEN, RED = "#0072b2", "#e69f00", "#009e73", "#d55e00"
PURPLE, SKY, YELLOW, GREY = "#cc79a7", "#56b4e9", "#f0e442", "#767676"
_TEXT = "#222"
_serial = itertools.count(1)
_CHARACTER = 6.2
"""Mean width of a character of the labels, in pixels."""

Format = Callable[[float], str]


@dataclass(frozen=True)
class Picture:
    """A drawing with its title and a description for readers who do not see it; a notebook shows it."""

    title: str
    description: str
    svg: str

    def save(self, path: str | Path) -> Path:
        """Write the drawing to an `.svg` file and return its path."""
        target = Path(path)
        target.write_text(self.svg, encoding="utf-8")
        return target

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        """Return title and description."""
        return f"{self.title}: {self.description}"


@dataclass(frozen=True)
class Scale:
    """Maps values of an axis to pixels."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of `value`."""
        low, high, at = (
            (math.log(each) for each in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        return self.start + (at - low) / ((high - low) or 1.0) * (self.stop - self.start)

    def ticks(self, count: int = 5, base: int = 10) -> list[float]:
        """Return round values within the scale: 1, 2 or 5 times a power of 10, or powers of 2 of bytes."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            return [each for each in found if self.low <= each <= self.high]
        step = _round_step((self.high - self.low) / count, base)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_step(raw: float, base: int) -> float:
    if raw <= 0:
        return 1.0
    if base == 1024:
        return 2.0 ** math.ceil(math.log2(raw * 0.999))
    power = 10.0 ** math.floor(math.log10(raw))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= raw * 0.999)


@dataclass
class Canvas:
    """A drawing under construction; pixels count from the upper left."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def add(self, tag: str, text: str = "", hint: str = "", **attributes: Any) -> None:
        """Append an element; `hint` appears when the pointer rests on it."""
        markup = "".join(
            f' {name.rstrip("_").replace("_", "-")}="{_value(value)}"' for name, value in attributes.items()
        )
        inside = (f"<title>{escape(hint)}</title>" if hint else "") + escape(text)
        self.parts.append(f"<{tag}{markup}>{inside}</{tag}>" if inside else f"<{tag}{markup}/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str = GREY, **more: Any) -> None:
        """Draw a line."""
        self.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=color, **more)

    def text(self, x: float, y: float, text: str, anchor: str = "start", **more: Any) -> None:
        """Write one line of text."""
        self.add("text", text, x=x, y=y, text_anchor=anchor, **more)

    def rect(
        self, x: float, y: float, width: float, height: float, color: str, hint: str = "", **more: Any
    ) -> None:
        """Draw a filled rectangle."""
        self.add(
            "rect", hint=hint, x=x, y=y, width=max(width, 0.0), height=max(height, 0.0), fill=color, **more
        )

    def mark(self, x: float, y: float, shape: str, color: str, hint: str = "") -> None:
        """Draw a mark of about 11 pixels: circle, square, cross or star."""
        if shape == "circle":
            self.add("circle", hint=hint, cx=x, cy=y, r=5, fill=color, stroke="#fff")
        elif shape == "square":
            self.add("rect", hint=hint, x=x - 4.5, y=y - 4.5, width=9, height=9, fill=color, stroke="#fff")
        elif shape == "cross":
            arms = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
            self.add("path", hint=hint, d=arms, stroke=color, stroke_width=2, fill="none")
        else:
            points = " ".join(
                f"{x + r * math.sin(i * math.pi / 5):.1f},{y - r * math.cos(i * math.pi / 5):.1f}"
                for i, r in enumerate([9, 4] * 5)
            )
            self.add("polygon", hint=hint, points=points, fill=color, stroke="#fff")

    def polyline(self, points: Iterable[tuple[float, float]], color: str, **more: Any) -> None:
        """Draw connected lines."""
        self.add("polyline", points=_points(points), fill="none", stroke=color, **more)

    def polygon(self, points: Iterable[tuple[float, float]], color: str, hint: str = "") -> None:
        """Draw a filled area."""
        self.add("polygon", hint=hint, points=_points(points), fill=color)

    def axes(
        self,
        x: Scale,
        y: Scale,
        x_title: str,
        y_title: str,
        x_format: Format,
        y_format: Format,
        *,
        x_base: int = 10,
        y_base: int = 10,
    ) -> None:
        """Draw both axes with grid lines, ticks and titles."""
        for value in y.ticks(base=y_base):
            self.line(x.start, y(value), x.stop, y(value), "#e4e4e4")
            self.text(x.start - 6, y(value) + 4, y_format(value), "end")
        for value in x.ticks(base=x_base):
            self.line(x(value), y.start, x(value), y.start + 4)
            self.text(x(value), y.start + 17, x_format(value), "middle")
        self.line(x.start, y.start, x.stop, y.start)
        self.line(x.start, y.start, x.start, y.stop)
        self.text((x.start + x.stop) / 2, y.start + 34, x_title, "middle", font_weight="bold")
        self.text(x.start - 6, y.stop - 10, y_title, "start", font_weight="bold")

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str, str]]) -> None:
        """Write a row of entries: shape (`bar` for a rectangle), colour, label."""
        for shape, color, label in entries:
            if shape == "bar":
                self.rect(x, y - 9, 12, 10, color)
            elif shape == "line":
                self.line(x, y - 4, x + 12, y - 4, color, stroke_width=2)
            else:
                self.mark(x + 6, y - 4, shape, color)
            self.text(x + 17, y, label)
            x += 17 + _CHARACTER * len(label) + 16

    def picture(self, title: str, description: str) -> Picture:
        """Return the drawing."""
        name = f"picture-{next(_serial)}"
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
            f' width="{self.width}" role="img" aria-labelledby="{name}-title {name}-text"'
            f' font-family="system-ui, sans-serif" font-size="12" fill="{_TEXT}"'
            ' style="max-width:100%;height:auto">'
        )
        texts = f'<title id="{name}-title">{escape(title)}</title>'
        texts += f'<desc id="{name}-text">{escape(description)}</desc>'
        return Picture(title, description, "\n".join([head + texts, *self.parts, "</svg>"]))


def _value(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else escape(str(value), quote=True)


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
