"""Title, source and exactness of every technique, read from the source text: importing one loads torch.

A class variable that a technique inherits is read from the file of its base.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent
_HEAD = re.compile(r"^class (\w+)\((\w+)[^)]*\):\n((?:(?!    def |    @|\S).*\n)*)", re.MULTILINE)
"""A class up to its first method: all class variables and fields precede the methods."""


@dataclass(frozen=True)
class Card:
    """A technique as `memtune techniques` lists it."""

    axis: str
    kind: str
    title: str
    source: str
    paper: str
    exactness: str


def read_cards(names: Iterable[tuple[str, str]]) -> tuple[Card, ...]:
    """Return the cards of techniques, given as slot and kind."""
    return tuple(_card(slot, kind) for slot, kind in names)


def _card(slot: str, kind: str) -> Card:
    path = _ROOT / slot.replace(".", "/") / f"{kind}.py"
    heads = _heads(path)
    name = next(name for name, (_, values) in heads.items() if "kind" in values)
    values = _with_inherited(path, name)
    return Card(slot, kind, values["title"], values["source"], values.get("paper", ""), values["exactness"])


def _with_inherited(path: Path, name: str) -> dict[str, Any]:
    """Return the class variables of a class, with those of its bases in this catalogue."""
    heads = _heads(path)
    if name not in heads:
        return {}
    base, values = heads[name]
    if base in heads:
        return {**_with_inherited(path, base), **values}
    home = next((each for each in _homes(path, base) if base in _heads(each)), None)
    return {**(_with_inherited(home, base) if home is not None else {}), **values}


def _homes(path: Path, base: str) -> Iterable[Path]:
    """Yield the files that may define a base which `path` imports: a module, or any file of a package."""
    for module, names in re.findall(
        r"^from memtune\.search_spaces\.([\w.]+) import (\([^)]*\)|.*)$", path.read_text(), re.MULTILINE
    ):
        if re.search(rf"\b{base}\b", names):
            place = _ROOT / module.replace(".", "/")
            yield from [place.with_suffix(".py")] if not place.is_dir() else sorted(place.glob("*.py"))


def _heads(path: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return base and class variables of each class in a file: texts, and the names of enum members."""
    found = {}
    for match in _HEAD.finditer(path.read_text()):
        (tree,) = ast.parse(match[0]).body
        assert isinstance(tree, ast.ClassDef)
        values = {}
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                if isinstance(node.value, ast.Constant):
                    values[node.target.id] = node.value.value
                elif isinstance(node.value, ast.Attribute):
                    values[node.target.id] = node.value.attr.lower()
        found[match[1]] = (match[2], values)
    return found
