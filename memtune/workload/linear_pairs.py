"""Pairs of linear layers that tensor parallelism may cut: what widens by its outputs, what narrows again by
its inputs.

Found from names and shapes of weights alone, so that a recorded step and a live model give the same pairs.
Two patterns:

1. Attention: query, key and value with one output layer, recognized by name; all four cut by heads.
2. An MLP: the last linear layer of a module takes what each of the others (one, or two where one gates the
   other) makes.

Whether the code between them treats each head or feature alike is not seen here: a recording tells
(`autotune.record_parallel.sharded_recording`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_QUERY = re.compile(r"(linear_)?(to_)?(w_?)?(q|query)(_?(proj|lin))?")
_KEY_VALUE = re.compile(r"(linear_)?(to_)?(w_?)?(k|v|key|value)(_?(proj|lin))?")
_OUTPUT = re.compile(r"(linear_)?(to_)?(w_?)?(o|out)(_?(proj|lin))?|proj|c_proj|dense")
_FUSED = re.compile(r"qkv|c_attn|query_key_value|in_proj|kv", re.IGNORECASE)
_MOST_COLUMNS = 2
"""Linear layers of an MLP that share their input: up, and a gate."""


@dataclass(frozen=True)
class Pair:
    """Linear layers between which each rank holds its share of the features."""

    columns: tuple[str, ...]
    """Qualified names; each rank holds a share of their outputs."""
    row: str
    """Each rank holds the share of its inputs that the columns make."""
    attention: bool

    @property
    def owner(self) -> str:
        """The module whose children they are."""
        return self.row.rpartition(".")[0]


@dataclass(frozen=True)
class Pairs:
    """Pairs that may be sharded, and modules that look like attention and may not."""

    found: tuple[Pair, ...]
    refused: tuple[str, ...]
    """One line for each attention that cannot be cut: which, and why."""


def find_pairs(shapes: Iterable[tuple[str, tuple[int, ...]]], blocks: Iterable[str]) -> Pairs:
    """The pairs inside `blocks`.

    Args:
        shapes: Name and shape of every parameter, in order of registration; linear weights are (outputs,
            inputs).
        blocks: Qualified names of the repeated blocks.
    """
    prefixes = tuple(f"{block}." for block in blocks)
    owners: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes:
        module, _, last = name.rpartition(".")
        if last == "weight" and len(shape) == 2 and name.startswith(prefixes):
            owners.setdefault(module.rpartition(".")[0], {})[module] = shape
    found: list[Pair] = []
    refused: list[str] = []
    for owner, layers in owners.items():
        part = _attention(owner, layers) or _mlp(layers)
        if isinstance(part, str):
            refused.append(part)
        elif part is not None:
            found.append(part)
    return Pairs(tuple(found), tuple(refused))


def _attention(owner: str, layers: Mapping[str, tuple[int, ...]]) -> Pair | str | None:
    """Pattern 1, or why what is named like it is not it; None where nothing is."""
    last = {module: module.rpartition(".")[2] for module in layers}
    fused = [
        module for module, name in last.items() if _FUSED.search(name) and not _KEY_VALUE.fullmatch(name)
    ]
    if fused:
        return (
            f"{fused[0]} makes query, key and value in one product, whose outputs are not in the order of the"
            " heads"
        )
    columns = tuple(m for m, name in last.items() if _QUERY.fullmatch(name) or _KEY_VALUE.fullmatch(name))
    if not columns:
        return None
    rest = [module for module in layers if module not in columns]
    rows = [module for module in rest if _OUTPUT.fullmatch(last[module])]
    if len(columns) != 3 or len(rest) != 1 or not rows:
        return (
            f"{owner} has other linear layers than query, key, value and one output:"
            f" {', '.join(last.values())}"
        )
    query = next(module for module in columns if _QUERY.fullmatch(last[module]))
    if layers[query][0] != layers[rows[0]][1]:
        return (
            f"{rows[0]} does not take what {query} makes: {layers[rows[0]][1]} features of {layers[query][0]}"
        )
    return Pair(columns, rows[0], attention=True)


def _mlp(layers: Mapping[str, tuple[int, ...]]) -> Pair | None:
    *columns, row = layers
    outputs, inputs = layers[row]
    fits = 1 <= len(columns) <= _MOST_COLUMNS and inputs != outputs
    return (
        Pair(tuple(columns), row, attention=False)
        if fits and all(layers[c] == (inputs, outputs) for c in columns)
        else None
    )


def share_of(pair: Pair, shapes: Mapping[str, tuple[int, ...]], degree: int) -> str | None:
    """Return the reason why `degree` ranks cannot shard `pair` equally, '' if they can; `shapes` are those of
    the weights, by module.
    """
    for module in pair.columns:
        if shapes[module][0] % degree:
            return f"{degree} ranks do not divide the {shapes[module][0]} outputs of {module}"
    return None


def whole_in_blocks(names: Iterable[str], pairs: Sequence[Pair], blocks: Iterable[str]) -> list[str]:
    """Those of the parameters `names` that are in `blocks` and not cut where `pairs` are."""
    cut = {f"{column}.{kind}" for pair in pairs for column in pair.columns for kind in ("weight", "bias")}
    cut |= {f"{pair.row}.weight" for pair in pairs}
    prefixes = tuple(f"{block}." for block in blocks)
    return [name for name in names if name.startswith(prefixes) and name not in cut]
