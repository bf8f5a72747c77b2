"""Region that runs a module under a byte budget with evictions decided online, for models without a static
schedule.

The module's forward and backward run under a dispatch mode: each op passes through
`activations.eviction.eviction_table`, which evicts until the op's outputs fit, and keeps for autograd what
autograd would have saved. The region has an inner autograd graph, whose backward is run by a node of the
outer graph, so the mode sees backward as well.

After a few equal runs in a row the decisions run as a schedule, without the mode
(`activations.eviction.schedule_cache`), until a call differs or begins before the backward of the previous
one.

Concurrency: one thread at a time runs a forward, or a backward under the mode. Calls without gradients are
not accounted and run concurrently, but not during a capture (`activations.capture.capture_lock`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from memtune import refusals
from memtune.activations.capture import (
    CaptureLock,
    GradientLike,
    call_key,
    is_accumulated,
    is_hooked,
    is_watched,
)
from memtune.activations.eviction.eviction_table import OnlineTable
from memtune.activations.eviction.op_metadata import Costs, OpMetadataCache
from memtune.activations.eviction.policy import Policy
from memtune.activations.eviction.schedule_cache import Decided, ScheduleCache
from memtune.runtime import HOST, ReplacedForward, members_of, storages_of, tier, unhooked


@dataclass
class OnlineRuns:
    """Counters of online runs, for the audit."""

    steps: int = 0
    replays: int = 0
    evictions: int = 0
    peak_bytes: int = 0
    """Peak of values and background bytes while evictions were decided online."""


@dataclass(frozen=True)
class OnlineSettings:
    """Settings of the region; all but the policy come from the plan."""

    policy: Policy
    budget_bytes: int
    """Device budget while the module's forward and backward run."""
    costs: Costs
    reserve_bytes: int = 0
    """Bytes that the loss needs between forward and backward."""
    scratch: Mapping[str, int] = field(default_factory=dict)
    """Workspace bytes of kernels, by the names of `OpMetadataCache`."""
    makes: Mapping[str, int] = field(default_factory=dict)
    """Output bytes of ops whose fake implementation reports too few, by the names of `OpMetadataCache`."""
    unseen_bytes: int = 0
    """Background bytes that are no arguments of the module, such as labels."""
    freeze_after: int = 3
    """Number of equal runs in a row after which the decisions run as a schedule; 0: never."""


class OnlineRegion(ReplacedForward):
    """Module whose forward and backward stay within a budget; `install` replaces its forward.

    Args:
        module: The module.
        optimizer: The optimizer, whose state on the device counts as background.
        settings: Policy, budget and costs.
        device: Device of the module.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer, settings: OnlineSettings, device: torch.device
    ) -> None:
        super().__init__(module)
        self.settings, self.device, self._optimizer = settings, device, optimizer
        self._start()

    def _start(self) -> None:
        """Reset all state of runs."""
        module, settings, device = self.module, self.settings, self.device
        self.forward_lock, self._lock = threading.RLock(), CaptureLock()
        self.runs = OnlineRuns()
        self.facts = OpMetadataCache(settings.costs, settings.scratch, settings.makes)
        self._table: Callable[[], OnlineTable | None] = lambda: None
        """Returns the table of the forwards that wait for their backward; they own it."""
        self._members: tuple[list[nn.Parameter], list[Tensor]] = [], []
        """Parameters and buffers at the last call of forward."""
        self._live: weakref.WeakSet[_Run] = weakref.WeakSet()
        self.schedule_cache = ScheduleCache(
            module, self._original, self._online, settings.freeze_after, device, self._lock
        )
        # Autograd needs an input that requires a gradient, or it would never call the region's backward.
        with tier(HOST):  # not accounted as device memory: the prediction has no such tensor
            self.token = torch.zeros((), device=device, requires_grad=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnlineRegion:
        """Return the region of a copy of the module, without schedules, which belong to the original."""
        # It has the copy of the optimizer if that was made first, else the original one, whose
        # state is resident as well.
        copied = memo[id(self)] = type(self).__new__(type(self))
        # `deepcopy` records what it has copied so far in `memo`.
        optimizer = memo.get(id(self._optimizer), self._optimizer)
        own = {
            "module": deepcopy(self.module, memo),
            "_original": deepcopy(self._original, memo),
            "_optimizer": optimizer,
        }
        copied.__setstate__(self.__getstate__() | own)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: vars(self)[name]
            for name in ("module", "_original", "_had_own", "settings", "device", "_optimizer")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward within the budget."""
        # Nothing is saved for a backward, so nothing could be evicted.
        if not torch.is_grad_enabled():
            with self._lock.running():
                return self._original(*args, **kwargs)
        with self.forward_lock:
            return self._within(args, kwargs)

    def _within(self, args: Any, kwargs: Any) -> Any:
        key = self._key(args, kwargs)
        # A schedule was made for the whole budget, so no other forward may hold values.
        ready = self.schedule_cache.ready(key, alone=not self._live)
        return self._online(key, args, kwargs) if ready is None else ready.forward(*args, **kwargs)

    def _online(self, key: Any, args: Any, kwargs: Any) -> Any:
        """Run the module's forward under the mode, which decides evictions as each op runs."""
        alone = not self._live and not self.schedule_cache.waiting_bytes()
        # Values of runs of schedules count too: they lie outside of the table and within the budget.
        run = _Run(self, self._table_for(args, kwargs, waits=not alone), key)
        for each in self._live:
            each.alone = alone
        run.alone, run.table.waits = alone, not alone
        self._live.add(run)
        # Several forwards in flight share one table and budget, so none of them is a run to repeat.
        return run.start(self._original, args, kwargs)

    @property
    def frozen_steps(self) -> int:
        """Number of steps that ran as a schedule."""
        return self.schedule_cache.frozen_steps

    @property
    def why_online(self) -> str:
        """Reason why the last run was decided online although a schedule was due, or ''."""
        return self.schedule_cache.why_online

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that require a gradient, as of the last call of forward."""
        return [each for each in self._members[0] if each.requires_grad]

    def _key(self, args: Any, kwargs: Any) -> Any:
        """Return the key of decisions: the call's form, and which gradients and optimizer state exist."""
        # The first step differs: gradients and optimizer state do not exist yet, and so the budget is another
        # one.
        called = call_key(args, kwargs)
        self._members = members_of(self.module)
        gradients = sum([each.grad is not None for each in self._members[0]])
        return (
            None if called is None else (called, self.module.training, gradients, len(self._optimizer.state))
        )

    def _table_for(self, args: Any, kwargs: Any, *, waits: bool) -> OnlineTable:
        """Return the table that all forwards waiting for their backward share."""
        # Weakly: the runs own the table, and with the last of them its values are freed.
        table = self._table()
        if table is None or not self._live:
            policy, budget_bytes = self.settings.policy, self.settings.budget_bytes
            background = self._background_bytes(tree_leaves((args, kwargs)))
            table = OnlineTable(
                self.module, policy, budget_bytes - background, background, self.facts, waits=waits
            )
            self._table = weakref.ref(table)
        return table

    def _background_bytes(self, inputs: Iterable[Any]) -> int:
        """Return the bytes always resident: parameters, buffers, gradients, optimizer state and inputs."""
        parameters, buffers = self._members
        held = [*parameters, *buffers, *(p.grad for p in parameters), *inputs]
        held += tree_leaves(list(self._optimizer.state.values()))
        storages = (each for tensor in held if isinstance(tensor, Tensor) for each in storages_of(tensor))
        # Each storage once: tied weights and views share theirs.
        there = sum({each._cdata: each.nbytes() for each in storages}.values())
        return there + self.settings.unseen_bytes + self.schedule_cache.waiting_bytes()

    def finish(self, run: _Run) -> None:
        """Count `run`, whose backward has ended."""
        table = run.table
        self._live.discard(run)
        if run.is_whole:  # a partial backward (`autograd.grad`) must not become a schedule
            decided = Decided(table.ran, run.n_forward, table.replays, run.flowed_in)
            self.schedule_cache.count_run(run.key, decided if run.alone else None)
        counted = table.counted()
        self.runs.steps += 1
        self.runs.replays += counted["replays"]
        self.runs.evictions += counted["evictions"]
        self.runs.peak_bytes = max(self.runs.peak_bytes, counted["peak_bytes"] + table.background_bytes)


class _Mode(TorchDispatchMode):
    def __init__(self, table: OnlineTable, facts: OpMetadataCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table, self.facts = table, facts

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `_Run` keeps Dynamo out of the whole run, which is cheaper than once for every op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        about = self.facts.properties_of(func)
        if about.unseen or self._table.paused:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._table.run(about, args, kwargs or {})


class _Run:
    """One forward and its backward."""

    def __init__(self, region: OnlineRegion, table: OnlineTable, key: Any) -> None:
        self.region, self.table, self.key = region, table, key
        self.alone, self.n_forward = True, 0
        """`alone`: no other forward waited for its backward at the same time. Number of ops in forward."""
        self.gradients: list[Tensor | None] = []
        self.flowed_in: dict[int, GradientLike] = {}
        """Layouts of the incoming gradients, by output."""
        self._roots: list[int] = []
        """Outputs that the gradients belong to."""
        self._inner: Tensor | None = None
        self._inputs: list[Tensor] = []
        self._parameters = [each for each in region.trainable() if each.is_leaf]
        self._hands_out = self.is_whole = True
        """Gradients of parameters may go to the outer graph; backward computed all of them."""

    def start(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run forward; the returned tensors have `_RegionOutputs` as their grad_fn."""
        leaves, spec = tree_flatten((args, kwargs))
        flow = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        # The inner graph ends at these, so its backward does not run on into the caller's graph.
        twins = {id(leaf): leaf.detach().requires_grad_() for leaf in flow}
        given, named = tree_unflatten([twins.get(id(leaf), leaf) for leaf in leaves], spec)
        self._inputs = [twins[id(leaf)] for leaf in flow]
        table = self.table
        table.backward = False
        with _Mode(table, self.region.facts), saved_tensors_hooks(table.pack, table.unpack):
            out = _without_dynamo(forward, given, named)
            leaves, spec = tree_flatten(out)
        self._roots = [
            at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        roots = [leaves[at] for at in self._roots]
        self._inner = _apply(_Gather, self, *roots) if roots else None
        self.n_forward = len(table.ran)
        # The table frees a value only if it holds the last reference.
        del out, given, named
        # The loss runs outside of the mode, where no request evicts.
        table.leave_room(self.region.settings.reserve_bytes)
        table.note_outputs([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        if not roots:
            return tree_unflatten(leaves, spec)
        # Handed to the outer graph, `autograd.grad` with respect to a parameter works too.
        self._hands_out = not is_watched(self._parameters)
        if not self._hands_out:  # parameters' nodes call hooks and must run once only, in the inner graph
            self._parameters = []
        token = _apply(_Region, self, len(flow), self.region.token, *flow, *self._parameters)
        outer = iter(_apply(_RegionOutputs, self, token, *(root.detach() for root in roots)))
        return tree_unflatten(
            [next(outer) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves],
            spec,
        )

    def hooked_since(self) -> list[Tensor]:
        """Return the parameters hooked since forward; the outer graph calls hooks with returned gradients."""
        return [each for each in self._parameters if is_hooked(each)]

    def backward(self, *, accumulates: bool) -> list[Tensor | None]:
        """Run backward of the inner graph; return gradients of the inputs, then of parameters unless
        `accumulates`.

        Raises:
            ApplyError: Backward creates a graph, or runs a second time.
        """
        if torch.is_grad_enabled():
            raise refusals.error_of(refusals.second_order("an online budget"))
        if self._inner is None:
            raise refusals.error_of(refusals.second_backward())
        # Dropped before it runs: its nodes would otherwise keep their saved values until the end.
        inner, self._inner = self._inner, None
        self.table.backward = True
        for at, each in zip(self._roots, self.gradients, strict=False):
            if each is not None:
                self.table.track_constant(each)
                self.flowed_in[at] = GradientLike(tuple(each.shape), each.stride(), each.dtype)
        root, each = torch.zeros_like(inner), None  # from here on only the engine holds the gradients
        inputs, self._inputs = self._inputs, []
        found: list[Tensor | None] = []
        with _Mode(self.table, self.region.facts):
            # Under the mode, so that ops of backward make room and replays come before the ops that need
            # them.
            if accumulates:
                _without_dynamo(torch.autograd.backward, (inner, root), {})
            else:
                self.is_whole, asked = self._hands_out, [*inputs, *self._parameters]
                found += _without_dynamo(torch.autograd.grad, (inner, asked, root), {"allow_unused": True})
        del inner
        self._parameters = []
        self.region.finish(self)
        del self.table
        return found or [each.grad for each in inputs]


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def _without_dynamo(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `run` outside Dynamo, because under a dispatch mode compiled code runs eagerly anyway."""
    return (
        torch.compiler.disable(run)(*args, **kwargs)
        if "torch._dynamo" in sys.modules
        else run(*args, **kwargs)
    )


class _Gather(torch.autograd.Function):
    """Root of the inner graph: passes it the gradients of its outputs and drops its own references."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *roots: Tensor) -> Tensor:
        # Weak, because the run holds the inner graph: an abandoned run is freed without the cycle collector.
        ctx.run = weakref.ref(run)
        return run.region.token.detach().clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        run = ctx.run()
        gradients, run.gradients = run.gradients, []
        return None, *gradients


class _Region(torch.autograd.Function):
    """Outer node whose backward runs the region's backward; a token flows through it."""

    @staticmethod
    def forward(ctx: Any, run: _Run, n_inputs: int, token: Tensor, *flow: Tensor) -> Tensor:
        ctx.run, ctx.n_inputs = run, n_inputs
        return token.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        edges = [edge for edge, _ in ctx.next_functions]
        hooked = ctx.run.hooked_since()
        # If the engine would accumulate anyway, the inner backward does so, gradient by gradient.
        accumulates = not hooked and all(map(is_accumulated, edges[:1] + edges[1 + ctx.n_inputs :]))
        with ctx.run.region.forward_lock, unhooked(hooked):
            found = ctx.run.backward(accumulates=accumulates)
        n_reached = len(edges) - 1
        return None, None, None, *found[:n_reached], *[None] * (n_reached - len(found))


class _RegionOutputs(torch.autograd.Function):
    """Outer node behind the outputs: stores their gradients for the region and returns a token's gradient."""

    @staticmethod
    def forward(ctx: Any, run: _Run, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        # Outputs without a gradient must arrive as None: zeros would make their ops run in backward.
        ctx.set_materialize_grads(False)
        # Detached, so they are no views of a custom Function's inputs: the caller may write into them in
        # place (`OnlineTable.note_outputs`).
        return tuple(each.detach() for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.run.gradients = list(gradients)
        return None, ctx.run.region.token.detach(), *(None for _ in gradients)
