"""The repeated blocks of a model, found from its module tree alone, and lists of their names written short.

Words: a *unit* is a child seen through pure containers (ModuleList, ModuleDict and a Sequential of larger
modules), which have no computation of their own; a *stack* is units of one class, held in a container, under
one parent.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from memtune.errors import ConfigError

_MAX_NAMES = 100_000  # configs are untrusted: a range must not fill the memory
_RANGE = re.compile(r"(.*?)\{([0-9]{1,9})\.\.([0-9]{1,9})\}(.*)")
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_SMALL_STACK = 0.01  # of the parameters in the largest stack; below that, wrapping gains nothing


class _Unit(NamedTuple):
    name: str
    module: nn.Module
    in_container: bool


def find_blocks(model: nn.Module) -> list[str]:
    """Qualified names of the outermost repeated blocks of `model`, in the order of its module tree.

    Transformer layers win over the experts inside them; stages that all differ (Swin, ConvNeXt) are replaced
    by the blocks they hold; residual blocks are found through nested Sequentials. A model without repetition
    gives its parts: the children with parameters (embedding, lstm, head). A model that is a single leaf gives
    none.
    """
    stacks = _stacks("", model)
    if not stacks:
        return _parts("", model)
    sizes = [sum(_n_params(unit.module) for unit in stack) for stack in stacks]
    names = {
        unit.name
        for stack, size in zip(stacks, sizes, strict=True)
        if size >= _SMALL_STACK * max(sizes)
        for unit in stack
    }
    return [name for name, _ in model.named_modules() if name in names]


def _stacks(prefix: str, module: nn.Module) -> list[list[_Unit]]:
    """Outermost stacks under `module`; modules of one class held as attributes count only where no stack is
    inside them.
    """
    groups: dict[object, list[_Unit]] = defaultdict(list)
    for unit in _units(prefix, module):
        if not _is_leaf(unit.module) and _n_params(unit.module):
            groups[_kind(unit.module)].append(unit)
    found = []
    for group in groups.values():
        inner = [stack for unit in group for stack in _stacks(unit.name, unit.module)]
        is_stack = len(group) > 1 and all(unit.in_container for unit in group)
        if is_stack and not (inner and _are_stages(group)):
            found.append(group)
        elif inner:
            found.extend(inner)
        elif len(group) > 1:
            found.append(group)
    return found


def _are_stages(group: Sequence[_Unit]) -> bool:
    """Return True if three or more modules of one class all differ in the shapes of their parameters."""
    shapes = Counter(tuple(tuple(param.shape) for param in unit.module.parameters()) for unit in group)
    return len(group) > 2 and max(shapes.values()) == 1


def _parts(prefix: str, module: nn.Module) -> list[str]:
    """The units of `module` that have parameters, seen through wrappers that hold one module and nothing
    else.
    """
    units = [unit for unit in _units(prefix, module, through_sequential=False) if _n_params(unit.module)]
    if len(units) == 1 and not _is_leaf(units[0].module):
        return _parts(units[0].name, units[0].module) or [units[0].name]
    return [unit.name for unit in units]


def _units(
    prefix: str, module: nn.Module, *, through_sequential: bool = True, in_container: bool = False
) -> Iterator[_Unit]:
    in_container = in_container or _is_container(module)
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if _is_container(child) and (through_sequential or not isinstance(child, nn.Sequential)):
            yield from _units(path, child, through_sequential=through_sequential, in_container=True)
        else:
            yield _Unit(path, child, in_container)


def _is_container(module: nn.Module) -> bool:
    if type(module) is nn.Sequential:  # of leaves only, it is a small network, a unit itself
        return any(not _is_leaf(child) for child in module.children())
    return type(module) in (nn.ModuleList, nn.ModuleDict)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _kind(module: nn.Module) -> object:
    """Return the key by which two units are equal: the class, and for a Sequential also the classes in it."""
    return (type(module), tuple(map(type, module))) if type(module) is nn.Sequential else type(module)


def _n_params(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def compress(names: Iterable[str]) -> list[str]:
    """`names` in order, with runs of consecutive integers written as one: `h.0 … h.23` becomes
    `h.{0..23}`.
    """
    patterns: list[str] = []
    run: list[str] = []
    at = -1  # which dotted part counts up in the run
    for name in names:
        step = _step(run[-1], name) if run else -1
        if step >= 0 and (len(run) == 1 or step == at):
            run.append(name)
            at = step
        else:
            patterns.extend(_written(run, at))
            run = [name]
    return patterns + _written(run, at)


def _step(before: str, after: str) -> int:
    """The index of the only dotted part in which `after` differs from `before`, being one higher; else -1."""
    old, new = before.split("."), after.split(".")
    differing = [i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b]
    if len(old) != len(new) or len(differing) != 1:
        return -1
    (i,) = differing
    is_next = _NUMBER.fullmatch(old[i]) and _NUMBER.fullmatch(new[i]) and int(new[i]) == int(old[i]) + 1
    return i if is_next else -1


def _written(run: list[str], at: int) -> list[str]:
    if len(run) < 2:
        return run
    first, last = run[0].split("."), run[-1].split(".")
    return [".".join([*first[:at], f"{{{first[at]}..{last[at]}}}", *first[at + 1 :]])]


def expand(patterns: Iterable[str]) -> list[str]:
    """The names that `compress` was given, from what it wrote; a pattern may hold several ranges, the last
    runs fastest.

    Raises:
        ConfigError: A range runs backwards, or the patterns expand to more than 100,000 names.
    """
    names: list[str] = []
    for pattern in patterns:
        names.extend(_expanded(pattern, _MAX_NAMES - len(names)))
    return names


def _expanded(pattern: str, room: int) -> list[str]:
    match = _RANGE.fullmatch(pattern)
    if match is None:
        heads, tail = [pattern], None
    else:
        first, last = int(match[2]), int(match[3])
        if last < first:
            raise ConfigError(
                f"'{pattern}' runs backwards.",
                fix=f"write  {match[1]}{{{last}..{first}}}{match[4]}",
                code="MT202",
            )
        heads, tail = [f"{match[1]}{i}" for i in range(first, min(last + 1, first + room + 1))], match[4]
    tails = [""] if tail is None else _expanded(tail, room)
    if len(heads) * len(tails) > room:
        raise ConfigError(
            f"'{pattern}' and what precedes it stand for more than {_MAX_NAMES:,} names.",
            fix="write the range of blocks that the model has",
            code="MT202",
        )
    return [head + end for head in heads for end in tails]
