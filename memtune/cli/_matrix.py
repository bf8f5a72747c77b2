"""`memtune techniques --matrix`: techniques that work together, by the rules and pairs of
`search_spaces._support`.
"""

from __future__ import annotations

import re
import sys
from string import ascii_letters

from memtune.cli._output import emit
from memtune.progress import shown_phase
from memtune.search_spaces._support import catalogue, matrix, matrix_by_knobs
from memtune.technique import Reason, Technique

_COMPILE = "execution.compile"
_WORKS, _SAME_SLOT = "·", " "
_FIX = "execution.compile: false"


def show(as_json: bool) -> int:
    """Print the matrix: a row and a column per technique, and a letter for the reason of each refused
    pair.
    """
    with shown_phase("loading the techniques", sys.stderr):
        found = _rows() if as_json else _lines()
    if as_json:
        emit(found)
    else:
        print(*found, sep="\n")
    return 0


def _rows() -> list[dict[str, str | bool | None]]:
    """Return each pair of techniques of different axes once, and each technique with torch.compile."""
    techniques = catalogue()
    cells, rank = matrix(techniques), {each: number for number, each in enumerate(techniques)}
    found: list[dict[str, str | bool | None]] = [
        _row(one, other.slot, other.kind, reason)
        for (one, other), reason in cells.items()
        if rank[one] < rank[other]
    ]
    return found + [_row(each, _COMPILE, "true", _compiled(each)) for each in techniques]


def _row(one: Technique, slot: str, kind: str, reason: Reason | None) -> dict[str, str | bool | None]:
    text, fix = (None, None) if reason is None else (reason.text, reason.fix)
    return {
        "axis": one.slot,
        "kind": one.kind,
        "with_axis": slot,
        "with_kind": kind,
        "works": reason is None,
        "reason": text,
        "fix": fix,
    }


def _compiled(technique: Technique) -> Reason | None:
    why = technique.effects.eager_only
    return Reason(why, _FIX) if why else None


def _lines() -> list[str]:
    techniques = catalogue()
    cells, letters = matrix(techniques), dict[str, str]()

    def cell(reason: Reason | None, *about: Technique) -> str:
        """Return the letter of a reason, the same for all techniques that it names."""
        if reason is None:
            return _WORKS
        text = _without_kinds(reason.text, *about)
        return letters.setdefault(text, ascii_letters[len(letters)])

    names = [f"{each.slot}: {each.kind}" for each in techniques]
    width, numbers = max(map(len, names)), range(1, len(techniques) + 1)
    head = " " * (width + 4)
    lines = [head + "".join(f"{number:2}"[digit] for number in numbers) for digit in range(2)]
    for number, name, one in zip(numbers, names, techniques, strict=True):
        row = [
            _SAME_SLOT if one.slot == other.slot else cell(cells[one, other], one, other)
            for other in techniques
        ]
        lines.append(f"{number:2} {name:<{width}} {''.join(row)} {cell(_compiled(one))}")
    lines[0] += " c"
    return [
        *lines,
        "",
        f"{_WORKS}  work together, if the program allows each of them; c  with execution.compile",
        *(f"{letter}  {text}" for text, letter in letters.items()),
        "",
        "refused only with these knobs:",
        *(
            f"{one.kind} ({knobs}) with {other.slot}: {other.kind}: {reason.text}"
            for one, knobs, other, reason in matrix_by_knobs(techniques)
        ),
    ]


def _without_kinds(text: str, *about: Technique) -> str:
    """Return `text` with an ellipsis for the technique that it names as `slot: kind`, or else by its kind
    alone.
    """
    named = next((f"{each.slot}: {each.kind}" for each in about if f"{each.slot}: {each.kind}" in text), "")
    if named:
        return text.replace(named, f"{named.partition(':')[0]}: …")
    return re.sub(rf"\b({'|'.join(re.escape(each.kind) for each in about)})\b", "…", text) if about else text
