"""Pairs of linear layers that tensor parallelism may shard: the first by columns, the second by rows
(Megatron).

They are found from names and shapes of weights alone, so a recorded step and a live model give the same
pairs. There are two patterns:

1. Attention: query, key, value and one output layer, recognized by name; all four are sharded by heads.
2. MLP: of the other linear layers of a module, the one with swapped inputs and outputs takes the outputs of
  the rest (one, or two with a gate).

A block may hold the layers of both itself. A recording checks that the code between the layers treats each
head or feature alike (`autotune.record_parallel.sharded_recording`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        for each in _pairs_of(owner, layers):
            if isinstance(each, str):
                refused.append(each)
            else:
                found.append(each)
    return Pairs(tuple(found), tuple(refused))


def _pairs_of(owner: str, layers: Mapping[str, tuple[int, ...]]) -> Iterator[Pair | str]:
    """Yield the pairs of a module: attention, or why it does not match, then an MLP of the others."""
    last = {module: module.rpartition(".")[2] for module in layers}
    columns = [m for m, name in last.items() if _QUERY.fullmatch(name) or _KEY_VALUE.fullmatch(name)]
    fused = [m for m, name in last.items() if _FUSED.search(name) and m not in columns]
    outputs = [m for m, name in last.items() if _OUTPUT.fullmatch(name) and (columns or fused)]
    mlp = _mlp({m: shape for m, shape in layers.items() if m not in (*columns, *fused, *outputs)})
    if fused:
        yield (
            f"{fused[0]} makes query, key and value in one product, whose outputs are not in the order of the"
            " heads"  # a rank's slice of them would mix query and key
        )
    elif columns:
        others = len(layers) - len(columns) - (0 if mlp is None else len(mlp.columns) + 1)
        if len(columns) != 3 or len(outputs) != 1 or others != 1:
            yield (
                f"{owner} has other linear layers than query, key, value and one output:"
                f" {', '.join(last.values())}"
            )
        else:
            yield _attention(columns, outputs[0], layers)
    if mlp is not None:
        yield mlp


def _attention(columns: Sequence[str], row: str, layers: Mapping[str, tuple[int, ...]]) -> Pair | str:
    query = next(module for module in columns if _QUERY.fullmatch(module.rpartition(".")[2]))
    if layers[query][0] != layers[row][1]:
        return f"{row} takes {layers[row][1]} features, not the {layers[query][0]} outputs of {query}"
    return Pair(tuple(columns), row, attention=True)


def _mlp(layers: Mapping[str, tuple[int, ...]]) -> Pair | None:
    """Return the pair in which one layer, of two the last, has swapped inputs and outputs of the others."""
    for row in reversed(list(layers)):
        columns = tuple(module for module in layers if module != row)
        outputs, inputs = layers[row]
        if 1 <= len(columns) <= _MOST_COLUMNS and inputs != outputs:
            if all(layers[c] == (inputs, outputs) for c in columns):
                return Pair(columns, row, attention=False)
    return None


def sharding_error(pair: Pair, shapes: Mapping[str, tuple[int, ...]], degree: int) -> str | None:
    """Return why `degree` ranks cannot shard `pair`, whose weights have these shapes, equally; else None."""
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
