"""Fingerprints of saved tensors: two runs of the same code save tensors with equal fingerprints, made by the
same ops.

A `Fingerprinter` receives the saved tensors in order and reads from autograd's graph which ops ran since the
last one: the nodes behind a tensor that are younger than the run and behind no earlier tensor. So an op
between two saved tensors is found although it saves nothing itself. Each op is recorded with the module's
parameters that it took and the numbers that autograd saved of it (a dim, a power).

Values that autograd does not save, such as the number in `x + 2` or a bias without a gradient, have no
influence on the graph. So a `magnitude` of the values is compared as well: of all saved tensors in the first
run, later of the tensor that backward unpacks last, which depends on all before it.

The walk takes longer than a small op. Once both runs of a region were equal in full, later ones are compared
by quick fingerprints: the kind and the number of nodes, without what each of them took.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from memtune.activations.offload import id_of
from memtune.errors import ApplyError
from memtune.runtime import page_locked, transfer, without_modes

_LEAF = "torch::autograd::AccumulateGrad"
"""Its sequence number does not show the order, because inputs of the region are leaves in the second run."""
_CAST = "ToCopyBackward0"
"""Op that may occur in one run only: autocast casts a weight once and caches it."""
_LIBRARIES = ("torch.", "memtune.")
"""Packages whose autograd functions in Python may occur in one run only; FSDP2 has some."""

_MAY_BE_NUMBERS = frozenset(f"_raw_saved_{name}" for name in ("other", "self", "exponent"))


class GraphNode(NamedTuple):
    """Autograd node, as it is compared between two runs."""

    name: str
    parameters: tuple[str, ...]
    """Names of the module's parameters that the op took."""
    numbers: tuple[Any, ...]
    """Numbers that autograd saved of the op."""


_NOTHING = GraphNode("", (), ())


_SAMPLED = 1024
"""Number of values of a tensor that its magnitude is computed from."""
_CLOSE = 0.02
"""Relative tolerance of magnitudes, because kernels may sum in another order each time."""


class Fingerprint(NamedTuple):
    """Properties of a saved tensor that must be equal in both runs."""

    made_by: tuple[GraphNode, ...]
    """Autograd nodes that led to it since the tensor before, the latest first."""
    passed: tuple[str, ...]
    """The module's parameters and buffers that autograd saved since the tensor before."""
    size: torch.Size
    dtype: torch.dtype


class QuickFingerprint(NamedTuple):
    """Properties of a saved tensor that are read without a walk through the graph."""

    node: type
    """Autograd node that made it."""
    nodes: int
    """Nodes that the run had made so far."""
    passed: tuple[str, ...]
    size: torch.Size
    dtype: torch.dtype

    @property
    def made_by(self) -> tuple[GraphNode, ...]:
        """Return the last node alone."""
        return (GraphNode(self.node.__name__, (), ()),)


class QuickFingerprinter:
    """Computes the quick fingerprints of the saved tensors of one run, in order.

    Two runs of a region that made the same nodes differ in none of them, so a region whose two runs were
    equal in full is compared by these from then on.
    """

    def __init__(self, fixed: Mapping[int, str]) -> None:
        self._start, self._fixed = _next_sequence_number(), fixed
        self._passed: tuple[str, ...] = ()
        self.quick: list[QuickFingerprint] = []
        """Quick fingerprints so far; a full `Fingerprinter` collects them as well."""

    def passes(self, key: int) -> None:
        """Note that autograd saved a parameter or buffer."""
        self._passed += (self._fixed[key],)

    def fingerprint(self, tensor: Tensor) -> QuickFingerprint:
        """Return the fingerprint of `tensor`, the next saved one."""
        passed, self._passed = self._passed, ()
        found = QuickFingerprint(
            type(tensor.grad_fn), _next_sequence_number() - self._start, passed, tensor.shape, tensor.dtype
        )
        self.quick.append(found)
        return found


class Fingerprinter:
    """Computes the fingerprints of the saved tensors of one run, in order.

    Args:
        fixed: Names of the module's parameters and buffers by `id_of`.
    """

    def __init__(self, fixed: Mapping[int, str]) -> None:
        # Nodes of this run have numbers from here on; older ones belong to inputs and parameters.
        self._start = _next_sequence_number()
        self._fixed = fixed
        self._seen: set[int] = set()
        self._passed: list[str] = []
        self._quick = QuickFingerprinter(fixed)
        self.quick = self._quick.quick

    def passes(self, key: int) -> None:
        """Note that autograd saved a parameter or buffer."""
        self._passed.append(self._fixed[key])
        self._quick.passes(key)

    def fingerprint(self, tensor: Tensor) -> Fingerprint:
        """Return the fingerprint of `tensor`, the next saved one."""
        self._quick.fingerprint(tensor)
        passed, self._passed = tuple(self._passed), []
        return Fingerprint(tuple(self._new(tensor.grad_fn)), passed, tensor.shape, tensor.dtype)

    def _new(self, node: Any) -> Iterator[GraphNode]:
        """Yield the nodes of autograd's graph from `node` on that this run has made and no call has returned
        yet.
        """
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is None:
                continue
            number, name = node._sequence_nr(), node.name()
            if number < self._start or number in self._seen or name == _LEAF:
                continue
            # Each node is visited once per run, so the walk costs no more than the graph has nodes.
            self._seen.add(number)
            following = [each for each, _ in node.next_functions]
            # Autocast caches a weight's cast, so its node may be in the graph of one run only.
            if name != _CAST and not _is_ours(node):
                yield GraphNode(name, tuple(self._parameters(following)), _numbers(node))
            waiting += following

    def _parameters(self, nodes: list[Any]) -> Iterator[str]:
        """Yield names of parameters among `nodes`, also behind casts, which may be older than the run."""
        for node in nodes:
            while node is not None and node.name() == _CAST:
                node = node.next_functions[0][0]
            if node is not None and node.name() == _LEAF:
                found = self._fixed.get(id_of(node.variable))
                if found is not None:
                    yield found


def difference(
    before: Fingerprint | QuickFingerprint, now: Fingerprint | QuickFingerprint
) -> tuple[str, str]:
    """Return the first op that differs, before and now; '' if there was none, or none differs."""
    if isinstance(before, QuickFingerprint) and isinstance(now, QuickFingerprint):
        if before.nodes != now.nodes and before.node is now.node:
            return tuple(f"{each.nodes} nodes up to {each.node.__name__}" for each in (before, now))  # type: ignore[return-value]
    # Latest first in both, so reversed: the first op that ran is the cause, later ones may follow from it.
    pairs = zip_longest(reversed(before.made_by), reversed(now.made_by), fillvalue=_NOTHING)
    one, two = next(((one, two) for one, two in pairs if one != two), (_NOTHING, _NOTHING))
    if one.name != two.name:
        return one.name, two.name
    if one.parameters != two.parameters:
        return _of(one.name, one.parameters), _of(two.name, two.parameters)
    if one.numbers != two.numbers:
        return _of(one.name, map(str, one.numbers)), _of(two.name, map(str, two.numbers))
    return _of("an op", before.passed), _of("an op", now.passed)


def first_op(fingerprints: Sequence[Fingerprint | QuickFingerprint]) -> str:
    """Return the name of the first op that led to one of the tensors, as far as autograd's graph shows it."""
    return next(
        (made.name for each in fingerprints for made in reversed(each.made_by)),
        "the ops that saved the others",
    )


def magnitude(tensor: Tensor) -> Tensor | float | None:
    """Return the norm of up to 1,024 values of `tensor`; None if it has no readable values (fake, gaps)."""
    # On CPU a float, computed without a tensor; on other devices a tensor, so that the host does not
    # wait.
    # A tensor that no op returned, such as attention's padded log-sum-exp, may contain uninitialized
    # memory, so it has none.
    if type(tensor) is not Tensor or tensor.grad_fn is None or not tensor.numel():
        return None
    # A view of a parameter: both runs read the same weights, and numpy would fix the size of their storage,
    # which offloading frees and allocates again.
    if tensor._base is not None and tensor._base.grad_fn is None:
        return None
    if not tensor.is_contiguous() and not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return None
    # A strided view of every `step`-th element: no copy, whatever the size.
    step = -(-tensor.numel() // _SAMPLED)
    # Outside all modes: these ops are not the model's, and must not be counted or replaced.
    with torch._C._DisableTorchDispatch():
        some = tensor.detach().as_strided((-(-tensor.numel() // step),), (step,), tensor.storage_offset())
        if tensor.device.type == "cpu":
            return _norm(some)
        found: Tensor = torch.linalg.vector_norm(some.float())
        return found


def _norm(some: Tensor) -> float | None:
    if some.dtype == torch.bfloat16:
        # numpy has no bfloat16; its bits are the upper half of a float32.
        bits = some.view(torch.int16).numpy().astype(np.int32) << 16
        values = bits.view(np.float32)
        return math.sqrt(float(np.dot(values, values)))
    if not some.dtype.is_floating_point or some.dtype.itemsize == 1:
        return None
    values = np.asarray(some.numpy(), np.float32)
    return math.sqrt(float(np.dot(values, values)))


def is_close(before: Tensor | float | None, now: Tensor | float | None) -> bool:
    """Return whether two magnitudes agree up to summation order; unknown and non-finite ones always do."""
    if before is None or now is None:
        return True
    with without_modes():
        before, now = float(before), float(now)
    return not (math.isfinite(before) and math.isfinite(now)) or abs(before - now) <= _CLOSE * max(
        before, now
    )


@dataclass(frozen=True)
class Compared:
    """Values of a saved tensor in both runs of a region."""

    region: str
    number: int
    fingerprint: Fingerprint | QuickFingerprint
    before: Tensor | float | None
    now: Tensor | float | None
    event: torch.Event | None = None
    """Recorded after the copy of both values to the host."""

    def sent(self) -> Compared:
        """Return a copy whose values are being copied to the host, so that the host need not wait."""
        if not isinstance(self.before, Tensor) or not isinstance(self.now, Tensor):
            return self
        with without_modes():
            device = self.now.device
            there = page_locked(
                lambda locked: torch.empty(2, pin_memory=locked), wanted=transfer.pins(device)
            )
            # One copy and an event: the comparison takes place in a later forward of the region.
            there.copy_(torch.stack([self.before, self.now]), non_blocking=True)
            return replace(self, before=there[0], now=there[1], event=transfer.issued(device))

    def is_here(self) -> bool:
        """Return whether `check` need not wait."""
        return self.event is None or self.event.query()

    def check(self) -> None:
        """Compare both values; wait for them if necessary.

        Raises:
            ApplyError: They differ.
        """
        if not is_close(self.before, self.now):
            made_by = ", ".join(each.name for each in reversed(self.fingerprint.made_by)) or "the same ops"
            like = f"{self.fingerprint.dtype} {list(self.fingerprint.size)}"
            raise ApplyError(
                f"{self.region} computed other values when it was run again, in {made_by}.",
                evidence=f"Saved tensor {self.number}, {like}, has another norm.",
                fix=(
                    "its forward must do the same each time it runs, with the same weights: a second backward"
                    " through it finds those of an update inside the first; choose recompute: {kind: none} if"
                    " it cannot"
                ),
                code="MT307",
            )


def _of(name: str, what: Any) -> str:
    return f"{name} of {', '.join(filter(None, what)) or 'none'}"


def _numbers(node: Any) -> tuple[Any, ...]:
    plain, tensors = _saved_attributes(node.__class__)
    return (
        *(getattr(node, name) for name in plain),
        *(_python_number(getattr(node, name)) for name in tensors),
    )


@cache
def _saved_attributes(node: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the node's attributes that hold numbers, and packed tensors, which `getattr` would unpack."""
    names = dir(node)
    plain = tuple(name for name in names if name.startswith("_saved_") and f"_raw{name}" not in names)
    return plain, tuple(name for name in names if name in _MAY_BE_NUMBERS)


def _python_number(saved: Any) -> str:
    """Return the 2 of `x * 2`, which autograd saves as a tensor without calling hooks; '' for all else."""
    if getattr(saved, "unpack_hook", _NOTHING) is not None:  # torch before 2.13 may lack the attribute
        return ""
    data = saved.data
    if type(data) is not Tensor or data.dim() or data.device.type != "cpu":
        return ""
    with without_modes():  # not one of the model's ops: must not be counted or replaced
        return repr(data.item())


def _is_ours(node: Any) -> bool:
    if not isinstance(node, BackwardCFunction):
        return False
    function = getattr(node, "_forward_cls", type(node))
    return bool(function.__module__.startswith(_LIBRARIES))


def _next_sequence_number() -> int:
    """Return the sequence number of the next autograd node of this thread."""
    number: int = getattr(torch.autograd, "_get_sequence_nr")()  # noqa: B009
    return number
