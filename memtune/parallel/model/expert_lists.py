"""Lists of experts divided over ranks: a layer's calls of its experts become one exchange.

The user's code calls the experts one by one, each with the rows that it has chosen. Four rules, for each list
and call of the module that holds it:

1. The module's forward first runs with zeros for the experts' outputs, which tells the rows of all calls.
  Those rows visit the owners of their experts, and forward runs again with their outputs. Rows that depend on
  them are refused.
2. The first run draws the random numbers that the second draws, and changes no buffer. A module that changes
  its inputs, or a number or collection of its own, is refused: it would change them twice.
3. An owner calls each of its experts once, on the rows of all ranks, and not if there are none: its gradient
  is then None, as it is on one rank.
4. A rank that calls no expert takes part in the exchanges: their output, which is empty, is joined to the
  module's, so that backward visits it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from memtune.errors import ApplyError
from memtune.parallel.model.expert_dispatch import Load, Owners, Route, combined, dispatched, unused
from memtune.parallel.model.rotated_experts import join, no_tokens
from memtune.runtime import ForwardWrapper, RandomState
from memtune.workload import tensors_of

_FIX = "parallel: {kind: none}"


class ExpertList:
    """A list of experts of which this rank owns some; replaces their forwards and that of the module that
    calls them.

    Args:
        path: Name of the list.
        holder: The module that has the list.
        experts: All experts; the weights of other ranks' are placeholders.
        owners: The ranks that own them.
        rank: This rank among those.
        seen: Receives the load of each call while a step is recorded.
    """

    def __init__(
        self,
        path: str,
        holder: nn.Module,
        experts: Sequence[nn.Module],
        owners: Owners,
        rank: int,
        seen: list[Load] | None,
    ) -> None:
        self._path, self._holder, self._experts, self._owners = path, holder, experts, owners
        per_rank = len(experts) // owners.ranks
        self._own, self._seen = experts[rank * per_rank : (rank + 1) * per_rank], seen
        self._answer: Callable[[int, Tensor], Tensor] | None = None
        """Answers the calls of experts; None outside of the holder."""
        self._row_format: tuple[torch.Size, torch.dtype, bool] | None = None
        """Shape, type and need of gradients of the last rows, for a call without rows."""
        inside = {id(each) for expert in experts for each in expert.modules()}
        self._around = [each for each in holder.modules() if id(each) not in inside]
        self._is_checked = False
        holder.forward = ForwardWrapper(partial(self._run, holder.forward), holder.forward)
        for index, expert in enumerate(experts):
            expert.forward = ForwardWrapper(partial(self._called, index, expert.forward), expert.forward)

    def _called(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._answer is _run_own:
            return forward(*args, **kwargs)
        if self._answer is None:
            raise self._error(f"{self._path}.{index} is called outside of the module that has it")
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dim() < 2:
            raise self._error(f"{self._path}.{index} is called with more than rows")
        return self._answer(index, args[0])

    def _run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the holder's forward with the outputs of the experts' owners."""
        calls: list[tuple[int, Tensor]] = []
        nodes = {each.grad_fn for each in tensors_of([args, kwargs])}
        # Added to each placeholder: rows that depend on it are made from an expert's output.
        zero = None if self._is_checked else torch.zeros((), requires_grad=True)

        def collect(index: int, rows: Tensor) -> Tensor:
            if zero is not None and _depends(rows, zero, nodes):
                raise self._error(f"{self._path}.{index} is called with what another expert returned")
            calls.append((index, rows))
            made = torch.zeros_like(rows)
            return made if zero is None else made + zero.to(made)

        with self._answered(collect), self._without_effect((args, kwargs)):
            forward(*args, **kwargs)
        outputs = self._outputs(calls)
        # Shapes only: the rows of the first run need not live while the second makes them again.
        sent = [(index, rows.shape) for index, rows in calls]
        calls.clear()
        expected = iter(zip(sent, outputs, strict=False))

        def return_output(index: int, rows: Tensor) -> Tensor:
            call, output = next(expected, ((-1, None), rows))
            if call != (index, rows.shape):
                raise self._error(f"{self._path}: other rows are chosen once experts have run")
            return output

        with self._answered(return_output):
            made = forward(*args, **kwargs)
        if next(expected, None) is not None:
            raise self._error(f"{self._path}: fewer experts are called once some have run")
        # A rank without calls must still run backward through the exchange, in which others wait.
        return join(made, outputs) if not sent and outputs[0].requires_grad else made

    def _outputs(self, calls: Sequence[tuple[int, Tensor]]) -> Sequence[Tensor]:
        """Return the outputs of calls of experts, from their owners; one empty tensor for no calls."""
        if calls:
            x = torch.cat([rows for _, rows in calls])
            self._row_format = x.shape[1:], x.dtype, x.requires_grad
        else:
            x = self._no_rows()
        lengths = [len(rows) for _, rows in calls]
        device = x.device
        called = torch.tensor([index for index, _ in calls], dtype=torch.int64, device=device)
        index = torch.repeat_interleave(
            called, torch.tensor(lengths, dtype=torch.int64, device=device), output_size=len(x)
        )
        route = Route.from_index(index, len(self._experts), self._owners)
        if self._seen is not None:
            self._seen.append(Load(len(index), len(route.experts)))
        rows, _ = dispatched(x, None, route)
        made = combined(self._outputs_of_own(rows, route.experts), 1, route)
        # Not views of one tensor, which code could not write to.
        return torch.unsafe_split_with_sizes(made, lengths) if calls else (made,)

    def _outputs_of_own(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Return the outputs of the rows that have arrived for `experts` of this rank."""
        # Stable, so that an expert adds up the gradients of its rows in the same order in each run.
        order = torch.argsort(experts, stable=True)
        sizes = self._sizes(experts)
        parts = rows.index_select(0, order).split(sizes)
        with self._answered(_run_own):
            pairs = zip(self._own, parts, strict=True)
            made = [_checked(expert(part), part, self._path) for expert, part in pairs if len(part)]
        if made:
            return torch.cat(made).index_select(0, torch.argsort(order))
        # Depends on something that needs gradients where the outputs of other ranks do.
        trains = torch.is_grad_enabled() and any(p.requires_grad for p in self._experts[0].parameters())
        anchor = rows.new_empty(0).requires_grad_(trains)
        return unused(rows, anchor)

    def _sizes(self, experts: Tensor) -> list[int]:
        """Return the number of rows of each expert of this rank."""
        counts = torch.zeros(len(self._own), dtype=torch.int64, device=experts.device)
        counts = counts.scatter_add(0, experts, torch.ones_like(experts))
        try:
            found: list[int] = counts.tolist()
        except DataDependentOutputException:
            found = []
        if sum(found) != len(experts):  # recorded without values: spread evenly
            whole, rest = divmod(len(experts), len(self._own))
            found = [whole + (index < rest) for index in range(len(self._own))]
        return found

    def _no_rows(self) -> Tensor:
        """Return no rows, as other ranks have some."""
        if self._row_format is None:
            like = no_tokens(self._own[0])
            self._row_format = like.shape[1:], like.dtype, True
        shape, dtype, needs_grad = self._row_format
        device = next(self._holder.parameters()).device
        rows = torch.empty(0, *shape, dtype=dtype, device=device)
        return rows.requires_grad_(needs_grad and torch.is_grad_enabled())

    @contextmanager
    def _answered(self, call: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        """Answer calls of experts by `call` in this context."""
        before, self._answer = self._answer, call
        try:
            yield
        finally:
            self._answer = before

    @contextmanager
    def _without_effect(self, given: Any) -> Iterator[None]:
        """Undo the side effects of the holder's forward (rule 2)."""
        inputs = [(each, each._version) for each in tensors_of([given]) if not each.is_inference()]
        buffers = [(each, dict(each._buffers)) for each in self._around if each._buffers]
        state = RandomState.capture(self._holder)
        kept = None if self._is_checked else [_numbers(each) for each in self._around]
        for module, before in buffers:
            module._buffers.update({name: None if b is None else b.clone() for name, b in before.items()})
        try:
            yield
        finally:
            for module, before in buffers:
                module._buffers.update(before)
        if not state.is_now(self._holder):
            state.continue_from()
        if any(each._version != version for each, version in inputs):
            raise self._error(f"the module that has {self._path} writes to its inputs")
        # Once: a walk over all attributes takes longer than an op.
        if kept is not None and kept != [_numbers(each) for each in self._around]:
            raise self._error(f"the module that has {self._path} counts or collects its calls")
        self._is_checked = True

    def _error(self, what: str) -> ApplyError:
        return ApplyError(
            f"{what}.",
            evidence="The module that has experts runs twice, first with zeros for their outputs, so that the"
            " rows of all calls are exchanged at once.",
            fix=_FIX,
            code="MT390",
        )


def _run_own(index: int, rows: Tensor) -> Tensor:
    raise AssertionError  # a marker, never called: an owner runs the expert's own forward


def _checked(made: Any, rows: Tensor, path: str) -> Tensor:
    if isinstance(made, Tensor) and made.shape == rows.shape:
        return made
    raise ApplyError(
        f"an expert of {path} does not return a tensor of its input's shape.",
        evidence="Its output takes the way of its rows back.",
        fix=_FIX,
        code="MT390",
    )


def _depends(x: Tensor, leaf: Tensor, nodes: set[Any]) -> bool:
    """Return whether `x` depends on `leaf` in autograd's graph; `nodes` do not, and are extended."""
    following = [x.grad_fn]
    while following:
        node = following.pop()
        if node is None or node in nodes:
            continue
        if getattr(node, "variable", None) is leaf:
            return True
        nodes.add(node)
        following += [each for each, _ in node.next_functions]
    return False


def _numbers(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are numbers, and the lengths of its collections."""
    found = dict[str, Any]()
    for name, value in vars(module).items():
        if isinstance(value, (int, float, str)):
            found[name] = value
        elif isinstance(value, (list, dict, set)):
            found[name] = len(value)
    return found


def list_refusal(name: str, experts: nn.ModuleList, holder: nn.Module, degree: int) -> str:
    """Return why `degree` ranks cannot divide the list `name` of experts of `holder`, or an empty string."""
    kinds = {tuple((name, each.shape) for name, each in expert.named_parameters()) for expert in experts}
    if len(kinds) != 1 or not all(kinds):
        return "has modules of different weights"
    if len(experts) % degree:
        return f"has {len(experts)} experts, which {degree} ranks do not divide"
    if any(True for _ in experts.buffers()):
        return "has buffers, of which an owner would need a share"
    if not any(isinstance(each, nn.Linear) for each in experts[0].modules()):
        return "has experts without a linear layer, whose features are not known for no rows"
    if isinstance(holder, (nn.ModuleList, nn.ModuleDict)):
        return "is in no module that calls it"
    others = (each for each, child in holder.named_children() if isinstance(child, nn.ModuleList))
    if any("expert" in each and each != name for each in others):
        return "is not the only list of experts of its module"
    hooked = (each for each in experts.modules() if each._forward_hooks or each._forward_pre_hooks)
    if any("forward" in vars(each) for each in experts) or next(hooked, None) is not None:
        return "has hooks or a forward of its own"
    return ""
