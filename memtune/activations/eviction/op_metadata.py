"""Metadata of ops before they run: output bytes, workspace, cost; computed once per op and shapes, corrected
by real runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from memtune.activations.capture import Slot
from memtune.hardware import flops
from memtune.program import BATCH_NORMS
from memtune.runtime import BY_ELEMENT, BY_ELEMENT_ON_GPU, draws_nothing, may_write, tensors_in

Key = tuple[Any, ...]
_MOST_KEYS = 1 << 16
_AS_IT_IS = (int, float, str)  # a union costs three times as much, at every argument
_NOT_SEEN = ("prim", "prims", "profiler")
_ONCE = ("c10d", "_c10d_functional", "memtune")


def key_of(func: Any, args: Any, kwargs: Any) -> Key:
    """Return the key of an op call: shapes and dtypes of tensors, other arguments by value or text."""
    if kwargs:
        return (func, *map(_plain, args), *((name, _plain(value)) for name, value in kwargs.items()))
    return (func, *map(_plain, args))


def scratch_name(name: str, read_bytes: Iterable[int]) -> str:
    """Return the name under which the workspace of an op that reads storages of these sizes is stored."""
    return " ".join([name, *map(str, sorted(read_bytes))])


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if value is None or isinstance(value, _AS_IT_IS):
        return value
    if isinstance(value, Slot):
        return value.size, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return str(value)


@dataclass(frozen=True)
class Costs:
    """Cost model of ops, which selects values cheap to recompute; equal on every rank and in every run."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float

    def seconds(self, n_flops: float, n_bytes: float) -> float:
        """Return the seconds of an op."""
        return n_flops / self.flops_per_s + n_bytes / self.bytes_per_s + self.launch_s


@dataclass(slots=True, eq=False)
class OpProperties:
    """Properties of all calls of one op."""

    func: Any
    name: str
    unseen: bool
    """True for a view, or an op that is not the model's."""
    once: bool
    """True if it never runs again."""
    writes: bool
    """True if a call may write into its arguments."""
    norm: bool
    """True if it updates running statistics, which a second run must not update."""
    seeded: bool
    scratch_bytes: int
    """Largest workspace of its kernel over all shapes."""
    by_element: bool
    """True if it may be elementwise: each output element depends on the same element of its inputs."""


@dataclass(slots=True, eq=False)
class OpMetadata:
    """Metadata of an op with arguments of certain shapes."""

    about: OpProperties
    key: Key
    makes_bytes: int
    """Output bytes; before the first run of an op with data-dependent sizes 0, then the largest sum."""
    random: bool
    scratch_bytes: int
    """Kernel workspace."""
    cost_s: float = -1.0
    """Negative until it has run."""


class OpMetadataCache:
    """Metadata of all ops that ran, kept over many steps.

    Args:
        costs: The cost model.
        scratch: Kernel workspace in bytes, by `scratch_name`; by the op's name alone the largest, for other
            sizes.
        makes: Output bytes, by the same name, where fake implementations report too few.
    """

    def __init__(
        self, costs: Costs, scratch: Mapping[str, int], makes: Mapping[str, int] | None = None
    ) -> None:
        self._costs, self._scratch, self._makes = costs, scratch, makes or {}
        self._about: dict[Any, OpProperties] = {}
        self._known: dict[Key, OpMetadata] = {}

    def properties_of(self, func: Any) -> OpProperties:
        """Return the properties of all calls of `func`."""
        found = self._about.get(func)
        if found is None:
            name = str(func)
            found = self._about[func] = OpProperties(
                func=func,
                name=name,
                unseen=func.is_view or func.namespace in _NOT_SEEN,
                once=func.namespace in _ONCE,
                writes=may_write(func),
                norm=name in BATCH_NORMS,
                seeded=torch.Tag.nondeterministic_seeded in func.tags,
                scratch_bytes=self._scratch.get(name, 0),
                by_element=name in BY_ELEMENT or name in BY_ELEMENT_ON_GPU,
            )
        return found

    def lookup(self, about: OpProperties, args: Any, kwargs: Any) -> OpMetadata:
        """Return the metadata of this call."""
        key = key_of(about.func, args, kwargs)
        # The workspace depends on the argument storages, not only on the views in `key`.
        name = _read_by(about, args, kwargs) if about.scratch_bytes else about.name
        # Most ops have no workspace, and a name from storages costs more than the key itself.
        known = (key, name) if about.scratch_bytes else key
        found = self._known.get(known)
        if found is None:
            # New shapes in every step would grow it without end; a cleared entry is computed again.
            if len(self._known) > _MOST_KEYS:
                self._known.clear()
            random = about.seeded and not draws_nothing(about.func, args, kwargs)
            scratch_bytes = self._scratch.get(name, about.scratch_bytes)
            # Fake kernels omit what some CUDA kernels save for backward.
            makes_bytes = max(sum(_fake_output_bytes(about.func, args, kwargs)), self._makes.get(name, 0))
            found = self._known[known] = OpMetadata(about, key, makes_bytes, random, scratch_bytes)
        return found

    def cost_s(self, facts: OpMetadata, args: Any, kwargs: Any, out: Any, inputs: list[Tensor]) -> float:
        """Return the modelled seconds of a call that has run."""
        if facts.cost_s < 0:
            traffic = sum(each.nbytes for each in inputs) + sum(each.nbytes for each in tensors_in([out]))
            facts.cost_s = self._costs.seconds(flops.count(facts.about.func, args, kwargs, out), traffic)
        return facts.cost_s


def _read_by(about: OpProperties, args: Any, kwargs: Any) -> str:
    storages = [each.untyped_storage() for each in tensors_in([*args, *kwargs.values()])]
    return scratch_name(about.name, {each._cdata: each.nbytes() for each in storages}.values())


def _fake_output_bytes(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, ...]:
    """Return the bytes of each storage that `func` would make, by its fake form; none if that fails."""
    twins: dict[int, Tensor] = {}

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in twins:
            twins[id(leaf)] = torch.empty_strided(
                leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
            )
        return twins[id(leaf)]

    # The evicting mode must not see the fake run, or it would count it as an op of the model.
    with _disable_current_modes(), FakeTensorMode():
        try:
            given, named = tree_map(twin, (tuple(args), kwargs))
            out = func(*given, **named)
        except Exception:  # data-dependent sizes, no fake implementation: known after the first run
            return ()
        old = {each.untyped_storage()._cdata for each in twins.values()}
        made: dict[int, int] = {}
        for each in tensors_in([out]):
            storage = each.untyped_storage()
            if storage._cdata not in old:
                made[storage._cdata] = storage.nbytes()
        return tuple(made.values())
