"""Runs a module under a byte budget with evictions decided online.

It is for models that have no static schedule (DTR and its kin).

Rule 1. The module's forward and backward run under a dispatch mode. Each op passes through
`activations.eviction.eviction_table`, which evicts before it until its outputs fit, and keeps for autograd
what autograd would have saved.
Rule 2. The region has an inner autograd graph: a node of the outer graph runs its backward, so the mode sees
backward as well. Autograd accumulates parameters' gradients itself. Where the caller asks for some gradients
only (`autograd.grad`, `backward(inputs=...)`), all are returned to the outer graph, which takes those.
Rule 3. Ops between forward and backward are not seen: their bytes are reserved at the end of forward.
Rule 4. A run that has been logged once is repeated without the mode (`activations.eviction.replayer`), with
the same result.
Rule 5. After a few equal runs in a row the decisions run as a schedule, without the mode
(`activations.eviction.schedule_cache`), until something differs.
Rule 6. One thread at a time runs a forward, or a backward under the mode. Calls without gradients are not
accounted and run concurrently, but not during a capture (`activations.capture.capture_lock`).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from memtune import _native
from memtune.activations.capture import (
    CaptureLock,
    GradientLike,
    call_key,
    is_accumulated,
    is_hooked,
    is_watched,
)
from memtune.activations.eviction.decision_log import DecisionLog, LoggedRun
from memtune.activations.eviction.evictable_tensor import too_small
from memtune.activations.eviction.eviction_table import OnlineTable
from memtune.activations.eviction.op_metadata import Costs, OpMetadataCache
from memtune.activations.eviction.policy import Policy
from memtune.activations.eviction.replay_run import ReplayRun
from memtune.activations.eviction.replayer import Opened, Replayer
from memtune.activations.eviction.schedule_cache import Decided, ScheduleCache
from memtune.errors import ApplyError
from memtune.runtime import HOST, ReplacedForward, members_of, storages_of, tier


@dataclass
class OnlineRuns:
    """Counters of online runs, for the audit."""

    steps: int = 0
    followed: int = 0
    """Number of steps without a dispatch mode."""
    replays: int = 0
    evictions: int = 0
    peak_bytes: int = 0
    """Peak of values and background bytes while evictions were decided online."""


@dataclass(frozen=True)
class OnlineSettings:
    """Settings of the region; all but the policy come from the plan."""

    policy: Policy
    budget_bytes: int
    """Budget of the device while the module's forward and backward run."""
    costs: Costs
    reserve_bytes: int = 0
    """Bytes that the loss needs between forward and backward."""
    scratch: Mapping[str, int] = field(default_factory=dict)
    """Bytes that a kernel takes while it runs, as `OpMetadataCache` looks them up."""
    makes: Mapping[str, int] = field(default_factory=dict)
    """Bytes that an op makes where its fake implementation says less, as `OpMetadataCache` looks them up."""
    unseen_bytes: int = 0
    """Background bytes that the module is not given, such as labels."""
    freeze_after: int = 3
    """Number of equal runs in a row after which the decisions run as a schedule; 0: never."""
    follow: bool = True
    """Repeat logged runs without a dispatch mode."""


class OnlineRegion(ReplacedForward):
    """A module whose forward and backward stay within a budget; `install` replaces its forward.

    Args:
        module: The module.
        optimizer: Its state on the device counts as background.
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
        self.turn, self._lock = threading.RLock(), CaptureLock()
        self.runs, self.facts = (
            OnlineRuns(),
            OpMetadataCache(settings.costs, settings.scratch, settings.makes),
        )
        self._table: Callable[[], OnlineTable | None] = _no_table
        """The table of the forwards that wait for their backward; they own it."""
        self._members: tuple[list[nn.Parameter], list[Tensor]] = [], []
        """Parameters and buffers at the last call of forward."""
        self._live: weakref.WeakSet[_Run] = weakref.WeakSet()
        self.warm_up = ScheduleCache(
            module, self._original, self.online, settings.freeze_after, device, self._lock
        )
        self.followers = Replayer(
            module,
            self._original,
            device,
            settings.policy.parts,
            self.online,
            self._opened,
            self._followed_through,
            (self.turn, self._lock),
        )
        with tier(HOST):  # it is none of the model's bytes
            self.token = torch.zeros((), device=device, requires_grad=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> OnlineRegion:
        """Return the region of a copy of the module: logs and schedules belong to the original.

        It has the copy of the optimizer if that is made first, else the same one, whose state is on the
        device as well.
        """
        copied = memo[id(self)] = type(self).__new__(type(self))
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
        if not torch.is_grad_enabled():
            with self._lock.running():
                return self._original(*args, **kwargs)
        with self.turn:
            return self._within(args, kwargs)

    def _within(self, args: Any, kwargs: Any) -> Any:
        key = self._key(args, kwargs)
        ready = self.warm_up.ready(key, alone=not self._live and not self.followers.waiting_bytes())
        if ready is not None:
            return ready.forward(*args, **kwargs)
        return self.followers.forward(key, args, kwargs) if not self._live else self.online(key, args, kwargs)

    def online(self, key: Any, args: Any, kwargs: Any) -> Any:
        """Run the module's forward under the mode; each op's evictions are decided when it runs."""
        with self.turn:  # one that gave way runs again in its backward
            return self._online(key, args, kwargs)

    def _online(self, key: Any, args: Any, kwargs: Any) -> Any:
        alone = not self._live and not self.followers.waiting_bytes() and not self.warm_up.waiting_bytes()
        if not alone:
            self.followers.give_way()
            self.warm_up.give_way()
        settings = self.settings
        follows = (
            settings.follow
            and settings.freeze_after != 1
            and settings.policy.forget
            and alone
            and self.followers.wants(key)
        )
        run = _Run(self, self._table_for(args, kwargs, DecisionLog() if follows else None), key)
        for each in self._live:
            each.alone = alone
        run.alone, run.table.waits = alone, not alone
        self._live.add(run)
        return run.start(self._original, args, kwargs)

    @property
    def frozen_steps(self) -> int:
        """Return the number of steps that ran as a schedule."""
        return self.warm_up.frozen_steps

    @property
    def why_online(self) -> str:
        """Return why the last run was decided online although a schedule was due, or ''."""
        return self.warm_up.why_online

    @property
    def why_under_mode(self) -> str:
        """Return the reason why a kind of call stays under the mode, '' if none does."""
        return next(iter(self.followers.why_not.values()), "")

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that require a gradient, as of the last call of forward."""
        return [each for each in self._members[0] if each.requires_grad]

    def _key(self, args: Any, kwargs: Any) -> Any:
        """Return the key of decisions.

        It describes how the module is called, and which gradients and optimizer state exist.
        """
        called = call_key(args, kwargs)
        self._members = members_of(self.module)
        gradients = sum([each.grad is not None for each in self._members[0]])
        return (
            None if called is None else (called, self.module.training, gradients, len(self._optimizer.state))
        )

    def _table_for(self, args: Any, kwargs: Any, notes: DecisionLog | None) -> OnlineTable:
        """Return the table that all forwards waiting for their backward share."""
        table = self._table()
        if table is None or not self._live:
            policy, budget_bytes = self.settings.policy, self.settings.budget_bytes
            background = self._background_bytes(tree_leaves((args, kwargs)))
            table = OnlineTable(self.module, policy, budget_bytes - background, background, self.facts, notes)
            self._table = weakref.ref(table)
        return table

    def _opened(self, inputs: Iterable[Any]) -> Opened:
        """Return the rematerializer and budget of a run without the mode."""
        background = self._background_bytes(inputs)
        budget_bytes = self.settings.budget_bytes - background
        if budget_bytes <= 0:
            raise too_small("the model", 0, 0, background)
        settings = self.settings.policy.settings(budget_bytes)
        return Opened(partial(_native.Rematerializer, settings), budget_bytes, background)

    def _background_bytes(self, inputs: Iterable[Any]) -> int:
        """Return the bytes that are resident throughout.

        These are parameters, buffers, gradients, optimizer state and inputs.
        """
        parameters, buffers = self._members
        held = [*parameters, *buffers, *(p.grad for p in parameters), *inputs]
        held += tree_leaves(list(self._optimizer.state.values()))
        storages = (each for tensor in held if isinstance(tensor, Tensor) for each in storages_of(tensor))
        there = sum({each._cdata: each.nbytes() for each in storages}.values())
        return (
            there + self.settings.unseen_bytes + self.warm_up.waiting_bytes() + self.followers.waiting_bytes()
        )

    def finish(self, run: _Run) -> None:
        """Count and log `run`, whose backward has ended."""
        table = run.table
        self._live.discard(run)
        if not run.is_whole:  # the next one may be whole again
            self._count(table.counted(), table.background_bytes)
            return
        if table.notes is not None:
            self.followers.note(
                run.key,
                LoggedRun(table.notes, table.ran, run.n_forward, run.flowed_in) if run.alone else None,
            )
        decided = Decided(table.ran, run.n_forward, table.replays, run.flowed_in)
        self.warm_up.note(run.key, decided if run.alone else None)
        self._count(table.counted(), table.background_bytes)

    def _followed_through(self, key: Any, noted: LoggedRun, run: ReplayRun) -> None:
        """Count and log a run without the mode, whose backward has ended."""
        with self.turn:
            alone = not self._live
            decided = Decided(noted.ran, noted.n_forward, run.replays, noted.gradients)
            self.warm_up.note(key, decided if alone else None)
            self.runs.followed += 1
            self._count(run.books.counted(), run.background_bytes)

    def _count(self, counted: dict[str, Any], background_bytes: int) -> None:
        self.runs.steps += 1
        self.runs.replays += counted["replays"]
        self.runs.evictions += counted["evictions"]
        self.runs.peak_bytes = max(self.runs.peak_bytes, counted["peak_bytes"] + background_bytes)


class _Mode(TorchDispatchMode):
    def __init__(self, table: OnlineTable, facts: OpMetadataCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._table, self.facts = table, facts

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # `_Run` keeps Dynamo out of the whole run, which is cheaper than once for every op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        about = self.facts.about(func)
        if about.unseen or self._table.paused:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self._table.run(about, args, kwargs or {})


class _Run:
    """One forward and its backward."""

    def __init__(self, region: OnlineRegion, table: OnlineTable, key: Any) -> None:
        self.region, self.table, self.key = region, table, key
        self.alone, self.n_forward = True, 0
        """No other forward waited for its backward at the same time; number of ops in this one's forward."""
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
        """Run forward; the returned tensors have `_Leave` as their grad_fn."""
        leaves, spec = tree_flatten((args, kwargs))
        flow = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
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
        del out, given, named
        table.leave_room(self.region.settings.reserve_bytes)
        table.note_outputs([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        if not roots:
            return tree_unflatten(leaves, spec)
        self._hands_out = not is_watched(self._parameters)
        if not self._hands_out:  # their nodes call hooks, and must run once only: in the inner graph
            self._parameters = []
        token = _apply(_Region, self, len(flow), self.region.token, *flow, *self._parameters)
        outer = iter(_apply(_Leave, self, token, *(root.detach() for root in roots)))
        return tree_unflatten(
            [next(outer) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in leaves],
            spec,
        )

    def hooked_since(self) -> list[Tensor]:
        """Return the parameters that got hooks since forward.

        The outer graph calls them with the returned gradients.
        """
        return [each for each in self._parameters if is_hooked(each)]

    def backward(self, *, accumulates: bool) -> list[Tensor | None]:
        """Run backward of the inner graph.

        Return gradients of the inputs, then of parameters unless `accumulates`.

        Raises:
            ApplyError: Backward creates a graph, or runs a second time.
        """
        if torch.is_grad_enabled():
            raise ApplyError(
                "gradients of gradients do not work under an online budget.",
                fix="choose recompute: {kind: none}",
                code="MT326",
            )
        if self._inner is None:
            raise ApplyError(
                "backward runs a second time, but what it needs has been let go.",
                fix="add the losses up before one backward(), or choose recompute: {kind: none}",
                code="MT326",
            )
        inner, self._inner = self._inner, None
        self.table.backward = True
        for at, each in zip(self._roots, self.gradients, strict=False):
            if each is not None:
                self.table.flow_in(at, each)
                self.flowed_in[at] = GradientLike(tuple(each.shape), each.stride(), each.dtype)
        root, each = torch.zeros_like(inner), None  # what flowed in is the engine's from here on
        inputs, self._inputs = self._inputs, []
        found: list[Tensor | None] = []
        with _Mode(self.table, self.region.facts):
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


@contextmanager
def _unhooked(parameters: list[Tensor]) -> Iterator[None]:
    """Disable the hooks of `parameters` inside: the outer graph calls them afterwards."""
    held = [(hooks, dict(hooks)) for each in parameters if (hooks := each._backward_hooks)]
    try:
        for hooks, _ in held:
            hooks.clear()
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)


def _no_table() -> OnlineTable | None:
    return None


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


def _without_dynamo(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run `run` outside Dynamo: under a dispatch mode compiled code runs eagerly anyway."""
    return (
        torch.compiler.disable(run)(*args, **kwargs)
        if "torch._dynamo" in sys.modules
        else run(*args, **kwargs)
    )


class _Gather(torch.autograd.Function):
    """The root of the inner graph: passes it the gradients of its outputs and drops its own references."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *roots: Tensor) -> Tensor:
        ctx.run = weakref.ref(
            run
        )  # the run holds the inner graph: abandoned, both go without the garbage collector
        return run.region.token.detach().clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        run = ctx.run()
        gradients, run.gradients = run.gradients, []
        return None, *gradients


class _Region(torch.autograd.Function):
    """The outer node whose backward runs the region's backward; a token flows through it."""

    @staticmethod
    def forward(ctx: Any, run: _Run, n_inputs: int, token: Tensor, *flow: Tensor) -> Tensor:
        ctx.run, ctx.n_inputs = run, n_inputs
        return token.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        edges = [edge for edge, _ in ctx.next_functions]
        hooked = ctx.run.hooked_since()
        accumulates = not hooked and all(map(is_accumulated, edges[:1] + edges[1 + ctx.n_inputs :]))
        with ctx.run.region.turn, _unhooked(hooked):
            found = ctx.run.backward(accumulates=accumulates)
        n_reached = len(edges) - 1
        return None, None, None, *found[:n_reached], *[None] * (n_reached - len(found))


class _Leave(torch.autograd.Function):
    """The outer node behind the outputs.

    Stores their gradients for the region and returns a token's gradient.
    """

    @staticmethod
    def forward(ctx: Any, run: _Run, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        return tuple(
            each.detach() for each in outputs
        )  # no views, so that they may be written into (`OnlineTable.note_outputs`)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.run.gradients = list(gradients)
        return None, ctx.run.region.token.detach(), *(None for _ in gradients)
