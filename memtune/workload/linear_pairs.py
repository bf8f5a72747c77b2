"""Pairs of linear layers that tensor parallelism may shard: the first by columns, the second by rows
(Megatron).

They are found from names and shapes of weights alone, so a recorded step and a live model give the same
pairs. There are two patterns:

1. Attention: query, key, value and one output layer, recognized by name; all four are sharded by heads.
2. MLP: the last linear layer of a module takes the outputs of the others (one, or two with a gate).

A recording checks that the code between the layers treats each head or feature alike
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
"""Most linear layers of an MLP that share their input: up and gate."""


@dataclass(frozen=True)
class Pair:
    """Linear layers with sharded features between them."""

    columns: tuple[str, ...]
    """Qualified names of the layers that are sharded by outputs."""
    row: str
    """Qualified name of the layer that is sharded by inputs."""
    attention: bool

    @property
    def owner(self) -> str:
        """Qualified name of the module that contains the layers."""
        return self.row.rpartition(".")[0]


@dataclass(frozen=True)
class Pairs:
    """Pairs that may be sharded, and attention modules that may not."""

    found: tuple[Pair, ...]
    refused: tuple[str, ...]
    """One line per attention that cannot be sharded: its name and the reason."""


def find_pairs(shapes: Iterable[tuple[str, tuple[int, ...]]], blocks: Iterable[str]) -> Pairs:
    """Return the pairs inside `blocks`.

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
    """Return a pair of pattern 1, or the reason why layers named like it do not match; None otherwise."""
    last = {module: module.rpartition(".")[2] for module in layers}
    fused = [
        module for module, name in last.items() if _FUSED.search(name) and not _KEY_VALUE.fullmatch(name)
    ]
    if fused:
        return (
            f"{fused[0]} makes query, key and value in one product, whose outputs are not in the order of the"
            " heads"  # a rank's slice of them would mix query and key
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
        return f"{rows[0]} takes {layers[rows[0]][1]} features, not the {layers[query][0]} outputs of {query}"
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


def sharding_error(pair: Pair, shapes: Mapping[str, tuple[int, ...]], degree: int) -> str | None:
    """Return the reason why `degree` ranks cannot shard `pair` equally, None if they can.

    Args:
        pair: The pair.
        shapes: Shapes of the weights, by module.
        degree: Number of ranks.
    """
    for module in pair.columns:
        if shapes[module][0] % degree:
            return f"{degree} ranks do not divide the {shapes[module][0]} outputs of {module}"
    return None


def unsharded_in_blocks(names: Iterable[str], pairs: Sequence[Pair], blocks: Iterable[str]) -> list[str]:
    """Return the parameters in `blocks` that are replicated when `pairs` are sharded."""
    sharded = {f"{column}.{kind}" for pair in pairs for column in pair.columns for kind in ("weight", "bias")}
    sharded |= {f"{pair.row}.weight" for pair in pairs}  # its bias is added after the all-reduce
    prefixes = tuple(f"{block}." for block in blocks)
    return [name for name in names if name.startswith(prefixes) and name not in sharded]
