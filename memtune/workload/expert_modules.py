"""Experts of a mixture-of-experts model: modules of a list of equal modules in a block."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from memtune.program import Step, columns_of, split_expert_name

if TYPE_CHECKING:
    from torch import nn

Shape = tuple[int, ...]


class Expert(NamedTuple):
    """One expert: a module of a list of equal modules in a block."""

    block: int
    name: str
    """Qualified name of the module."""
    parameters: tuple[int, ...]
    """Indices among the model's parameters."""


def find_experts(
    names: Sequence[str], shapes: Sequence[Shape], block_of: Sequence[int]
) -> tuple[Expert, ...]:
    """Return the experts: two or more equal modules of a list in a block, with `expert` in the list's name.

    Args:
        names: Qualified names of the model's parameters.
        shapes: Shape of each parameter.
        block_of: Block of each parameter, -1 for none.
    """
    found: dict[tuple[int, str], dict[str, list[tuple[str, Shape, int]]]] = {}
    for index, (name, shape, block) in enumerate(zip(names, shapes, block_of, strict=True)):
        if block >= 0 and (split := split_expert_name(name)) is not None:
            path, number, rest = split
            found.setdefault((block, path), {}).setdefault(number, []).append((rest, shape, index))
    experts = []
    for (block, path), members in found.items():
        kinds = {tuple((rest, shape) for rest, shape, _ in each) for each in members.values()}
        if len(members) > 1 and len(kinds) == 1:
            experts += [
                Expert(block, f"{path}.{n}", tuple(index for *_, index in each))
                for n, each in members.items()
            ]
    return tuple(sorted(experts, key=lambda expert: expert.block))


def experts_of(model: nn.Module, blocks: Sequence[str]) -> tuple[Expert, ...]:
    """Return the experts of a live model with these blocks; indices are into `model.parameters()`."""
    block_of = {id(p): i for i, name in enumerate(blocks) for p in model.get_submodule(name).parameters()}
    named = list(model.named_parameters())
    shapes = [tuple(parameter.shape) for _, parameter in named]
    return find_experts(
        [name for name, _ in named], shapes, [block_of.get(id(parameter), -1) for _, parameter in named]
    )


def experts_in(step: Step) -> tuple[Expert, ...]:
    """Return the experts that are trained; indices are into `step.parameters`."""
    gradient = columns_of(step.parameters).gradient
    return tuple(
        each for each in _experts_of_step(step) if all(gradient[index] >= 0 for index in each.parameters)
    )


def frozen_expert_parameter(step: Step) -> str:
    """Return the name of a frozen parameter of an expert, '' if there is none."""
    columns = columns_of(step.parameters)
    frozen = (
        index for each in _experts_of_step(step) for index in each.parameters if columns.gradient[index] < 0
    )
    return next((columns.names[index] for index in frozen), "")


def _experts_of_step(step: Step) -> tuple[Expert, ...]:
    columns = columns_of(step.parameters)
    if not any("expert" in name for name in columns.names):
        return ()
    return _found(columns.names, columns.shapes, tuple(columns.block.tolist()))


@functools.lru_cache(maxsize=32)
def _found(
    names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], blocks: tuple[int, ...]
) -> tuple[Expert, ...]:
    return find_experts(names, shapes, blocks)
