"""Title, source, exactness and texts of knobs of every technique, read from the source text: importing one
loads torch.

A class variable that a technique inherits is read from the file of its base.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
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


def knob_texts(slot: str, kind: str) -> dict[str, str]:
    """Return the docstring of each knob of a technique."""
    return _read(slot, kind)[1]


def _card(slot: str, kind: str) -> Card:
    values, _ = _read(slot, kind)
    return Card(slot, kind, values["title"], values["source"], values.get("paper", ""), values["exactness"])


def _read(slot: str, kind: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the class variables of a technique, and the docstrings of its fields."""
    path = _ROOT / slot.replace(".", "/") / f"{kind}.py"
    name = next(name for name, (_, values, _) in _heads(path).items() if "kind" in values)
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for more_values, more_texts in _with_bases(path, name):
        values, texts = {**more_values, **values}, {**more_texts, **texts}
    return values, texts


def _with_bases(path: Path, name: str) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """Yield class variables and docstrings of fields of a class, then of its bases in this catalogue."""
    heads = _heads(path)
    if name not in heads:
        return
    base, values, texts = heads[name]
    yield values, texts
    home = path if base in heads else next((e for e in _homes(path, base) if base in _heads(e)), None)
    if home is not None:
        yield from _with_bases(home, base)


def _homes(path: Path, base: str) -> Iterable[Path]:
    """Yield the files that may define a base which `path` imports: a module, or any file of a package."""
    for module, names in re.findall(
        r"^from memtune\.(search_spaces[\w.]*|technique) import (\([^)]*\)|.*)$",
        path.read_text(),
        re.MULTILINE,
    ):
        if re.search(rf"\b{base}\b", names):
            place = _ROOT.parent / module.replace(".", "/")
            yield from [place.with_suffix(".py")] if not place.is_dir() else sorted(place.glob("*.py"))


def _heads(path: Path) -> dict[str, tuple[str, dict[str, Any], dict[str, str]]]:
    """Return base, class variables and docstrings of fields of each class in a file."""
    found = {}
    for match in _HEAD.finditer(path.read_text()):
        (tree,) = ast.parse(match[0]).body
        assert isinstance(tree, ast.ClassDef)
        values, texts = {}, {}
        for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            if isinstance(node.value, ast.Constant):
                values[node.target.id] = node.value.value
            elif isinstance(node.value, ast.Attribute):
                values[node.target.id] = node.value.attr.lower()
            is_knob = not ast.unparse(node.annotation).startswith("ClassVar")
            if is_knob and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[node.target.id] = " ".join(str(after.value.value).split())
        found[match[1]] = (match[2], values, texts)
    return found
