"""Find the repeated blocks of a model from its module tree; compress and expand lists of block names.

A *unit* is a child module, looked up through pure containers (ModuleList, ModuleDict, and a Sequential of
larger modules), which compute nothing themselves. A *stack* is a group of units of one class in one
container.
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
_SMALL_STACK = 0.01  # fraction of the largest stack's parameters, below which wrapping a stack gains nothing


class _Unit(NamedTuple):
    name: str
    module: nn.Module
    in_container: bool


def find_blocks(model: nn.Module) -> list[str]:
    """Return the qualified names of the outermost repeated blocks of `model`, in module order.

    Transformer layers take precedence over the experts inside them. Stages that all differ (Swin, ConvNeXt)
    are replaced by the blocks inside them. Residual blocks are found through nested Sequentials. For a model
    without repetition, return its children with parameters (embedding, lstm, head); for a single leaf,
    nothing.
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
    """Return the outermost stacks under `module`."""
    # Modules of one class that are attributes, not in a container, count only if they contain no stack.
    groups: dict[object, list[_Unit]] = defaultdict(list)
    for unit in _units(prefix, module):
        if not _is_leaf(unit.module) and _n_params(unit.module):
            groups[_kind(unit.module)].append(unit)
    found = []
    for group in groups.values():
        inner = [stack for unit in group for stack in _stacks(unit.name, unit.module)]
        # A bottleneck of the same class next to the lists of a U-Net is one more of their blocks.
        is_stack = sum(unit.in_container for unit in group) > 1
        if is_stack and not (_covers_most(inner, group) and _are_stages(group)):
            found.append(group)
        elif inner:
            found.extend(inner)
        elif len(group) > 1:
            found.append(group)
    return found


def _covers_most(inner: list[list[_Unit]], group: list[_Unit]) -> bool:
    """Return whether the stacks `inner` hold most parameters of the units that contain them."""
    # Two attentions of a block repeat too, but recomputing them alone leaves the rest of a U-Net's level.
    return 2 * sum(_n_params(each.module) for stack in inner for each in stack) > sum(
        _n_params(each.module) for each in group
    )


def _are_stages(group: Sequence[_Unit]) -> bool:
    """Return whether there are three or more modules, all different in the shapes of their parameters."""
    shapes = Counter(tuple(tuple(param.shape) for param in unit.module.parameters()) for unit in group)
    return len(group) > 2 and max(shapes.values()) == 1


def _parts(prefix: str, module: nn.Module) -> list[str]:
    """Return the units of `module` with parameters, looking through wrappers."""
    # Lists of parameters are called by nothing.
    units = [
        unit
        for unit in _units(prefix, module, through_sequential=False)
        if _n_params(unit.module) and not isinstance(unit.module, nn.ParameterList | nn.ParameterDict)
    ]
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
    if type(module) is nn.Sequential:  # a Sequential of leaves only is a small network and a unit itself
        return any(not _is_leaf(child) for child in module.children())
    return type(module) in (nn.ModuleList, nn.ModuleDict)


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _kind(module: nn.Module) -> object:
    """Return the key for grouping units: the class, and for a Sequential the classes in it, too."""
    return (type(module), tuple(map(type, module))) if type(module) is nn.Sequential else type(module)


def _n_params(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def compress(names: Iterable[str]) -> list[str]:
    """Return `names` with runs of consecutive integers as ranges: `h.0 … h.23` becomes `h.{0..23}`."""
    patterns: list[str] = []
    run: list[str] = []
    at = -1  # index of the dotted part that counts up in the run
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
    """Return the index of the dotted part that is one higher in `after`, if all others are equal; else -1."""
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
    """Return the names of patterns made by `compress`. Of several ranges in a pattern the last runs fastest.

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
                f"The range in '{pattern}' runs backwards.",
                fix=f"write  {match[1]}{{{last}..{first}}}{match[4]}",
                code="MT202",
            )
        heads, tail = [f"{match[1]}{i}" for i in range(first, min(last + 1, first + room + 1))], match[4]
    tails = [""] if tail is None else _expanded(tail, room)
    if len(heads) * len(tails) > room:
        raise ConfigError(
            f"'{pattern}' and the patterns before it expand to more than {_MAX_NAMES:,} names.",
            fix="write the range of blocks that the model has",
            code="MT202",
        )
    return [head + end for head in heads for end in tails]
