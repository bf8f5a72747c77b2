"""Layer-major order: each pack of blocks runs all micro-batches before the next one begins, forward and back.

Seven rules, which the pass `passes.layer_major` follows op by op:

Rule 1. The user's code runs up to the first block once for each micro-batch; there it is stopped, and what the block was to be
        given is kept. Packs of forward are run from what is kept, block by block, as the chain (`runtime.chain`) says.
Rule 2. What a pack of backward starts from is kept for each micro-batch, on the device or the host, until that backward is done.
Rule 3. Autograd looks on in every forward, so that kernels are those of the plain step; what it saves in a forward pack is
        dropped at once.
Rule 4. The turn, the last pack of backward, runs inside the user's code, from its beginning to its loss and back, as a plain
        micro-batch does (`runtime.loop`); the blocks before it are skipped, and the last of them returns what was kept.
Rule 5. Then packs run backward from last to first: each again forward from what was kept, then back from the gradient of what it
        returned. What comes before the blocks runs backward last of all, in the graph that the turn made.
Rule 6. Every pack takes micro-batches in their order, so each weight's gradient is the plain step's sum, to the bit.
Rule 7. With groups, all this is done for some micro-batches, then for others; the optimizer's updates come in the last group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

import memtune.ops  # noqa: F401  (defines torch.ops.memtune)
from memtune.errors import ApplyError
from memtune.packs import Packs, Span
from memtune.runtime import loop, transfer
from memtune.runtime.chain import Chain, Given, Look, dropout_of, no_chain
from memtune.runtime.context import Context
from memtune.runtime.pack_store import PackStore
from memtune.runtime.replaced_forward import ReplacedForward
from memtune.runtime.tiers import HOST, mark

Where = Literal["device", "host"]


class _Stop(BaseException):
    """The user's code has come to the first block."""


class _Boundary(torch.autograd.Function):
    """What a pack starts from, with autograd looking on; its gradient goes to `sink[at]` and no further."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, sink: list[Tensor | None], at: int) -> Tensor:
        ctx.sink, ctx.at = sink, at
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.sink[ctx.at] = gradient
        return None, None, None, None


class _Boundaries:
    """What packs start from, kept until they do (Rule 2)."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._leaving: tuple[Tensor, Tensor] | None = None  # on the device, and the host memory that it is on the way to

    def keep(self, tensors: Sequence[Any]) -> Callable[[Tensor, list[Tensor | None]], list[Any]]:
        """Keeps `tensors`; returns what gives them back, from an anchor and a list that gets their gradients."""
        kept = [(self._leave(x), isinstance(x, Tensor) and x.requires_grad) for x in tensors]

        def start(anchor: Tensor, sink: list[Tensor | None]) -> list[Any]:
            found = []
            sink += [None] * len(kept)
            for at, (x, needs_gradient) in enumerate(kept):
                there = torch.ops.memtune.to_device(x, anchor.device) if needs_gradient and self._where == "host" else x
                found.append(_Boundary.apply(anchor, there, sink, at) if needs_gradient else there)  # type: ignore[no-untyped-call]
            return found

        return start

    def _leave(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if self._where == "device" or not x.requires_grad:
            return x.detach()
        self.arrive()
        host = torch.ops.memtune.to_host(x.detach())
        mark(host, HOST)
        self._leaving = x.detach(), host
        return host

    def arrive(self) -> None:
        """What is on its way to the host is let go on the device."""
        if self._leaving is not None:
            transfer.wait(self._leaving[1])
            self._leaving = None


class _Block(ReplacedForward):
    """A block that runs, is skipped or stops the user's code, as the order wants."""

    def __init__(self, module: nn.Module, index: int, order: LayerMajor) -> None:
        super().__init__(module)
        self._index, self._order = index, order

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward, or what takes its place."""
        return self._order.called(self._index, self._original, args, kwargs)


class LayerMajor:
    """Runs `context`'s model layer by layer over all micro-batches.

    Args:
        context: Its model and blocks; the blocks' forwards are replaced.
        store: Where the blocks' parameters are.
        packs: Which blocks run together.
        boundaries: Where what packs start from is kept.

    Raises:
        ApplyError: The model drops at random, or updates statistics in forward.
    """

    def __init__(self, context: Context, store: PackStore, packs: Packs, boundaries: Where = "device") -> None:
        self._model, self._names, self._store = context.model, context.blocks, store
        self._packs, self._boundaries = packs, _Boundaries(boundaries)
        _refuse(context.model)
        self._blocks = [context.model.get_submodule(name) for name in context.blocks]
        self._chains: dict[Any, Chain] = {}
        self._anchor = torch.empty(0, device=context.device, requires_grad=True)
        self._called: Callable[[int, Callable[..., Any], Any, Any], Any] | None = None
        for index, block in enumerate(self._blocks):
            _Block(block, index, self).install()
        self._at = 0  # micro-batch whose turn it is
        self._chain_of: dict[int, Chain] = {}
        self._called_as: dict[int, Given] = {}
        self._shared: dict[int, list[Any]] = {}  # by micro-batch: what the first block is given and later ones as well
        self._kept: dict[
            tuple[int, int], Callable[[Tensor, list[Tensor | None]], list[Any]]
        ] = {}  # by first block of a pack and micro-batch
        self._starts: list[Any] = []
        self._edges: dict[int, list[GradientEdge | None]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._in_turn: set[Tensor] = set()
        self._at_the_start = False
        self._watch_outside(context)
        self.order: list[tuple[str, Span, int]] = []
        """What the last step ran, when: direction, pack, micro-batch."""

    def called(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block is called by the user's code, or by a pack."""
        if self._called is None:
            return forward(*args, **kwargs)
        return self._called(index, forward, args, kwargs)

    def _watch_outside(self, context: Context) -> None:
        """A weight before the blocks and after them would have another sum: two sums of micro-batches, not one of both."""
        inside = {id(parameter) for block in self._blocks for parameter in block.parameters()}

        def watch(name: str, parameter: nn.Parameter) -> None:
            def landed(parameter: Tensor) -> None:
                if not self._at_the_start:
                    self._in_turn.add(parameter)
                elif parameter in self._in_turn:
                    raise no_chain(f"{name} is used before the blocks and after them, so its sum would have another order")

            context.undo.callback(parameter.register_post_accumulate_grad_hook(landed).remove)

        for name, parameter in context.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in inside:
                watch(name, parameter)

    @contextmanager
    def _calls(self, called: Callable[[int, Callable[..., Any], Any, Any], Any]) -> Iterator[None]:
        self._called = called
        try:
            yield
        finally:
            self._called = None

    def accumulate(
        self,
        model: nn.Module,
        loss_function: loop.LossFunction,
        batches: Sequence[Any],
        device: torch.device,
        *,
        sync: loop.SyncContext = lambda last: nullcontext(),
        upload: loop.Upload = loop.upload,
    ) -> Tensor:
        """As `loop.accumulate`, layer by layer.

        Raises:
            ApplyError: The blocks are no chain (`runtime.chain`).
        """
        self.order = []
        self._store.is_stepping = True
        total: Tensor | None = None
        try:
            for group in self._packs.groups(len(batches)):
                total = self._group(model, loss_function, batches, group, device, sync, upload, total)
        except BaseException:
            self._called, self._store.is_last = None, False
            self._forget()
            self._store.abandon()
            raise
        finally:
            self._store.is_stepping = False
        self._store.step_ends()
        assert total is not None
        return total

    def _group(
        self, model: nn.Module, loss_function: loop.LossFunction, batches: Sequence[Any], group: range, device: torch.device,
        sync: loop.SyncContext, upload: loop.Upload, total: Tensor | None,
    ) -> Tensor:  # fmt: skip
        packs = self._packs
        following = dict(zip(range(len(packs.uses)), [*packs.uses[1:], None], strict=True))
        update = group.stop == len(batches)
        if packs.forward:
            for index in group:
                self._before_blocks(index, model, loss_function, batches[index], device, upload)
        for number, pack in enumerate(packs.uses):
            self._store.begin(pack, following[number] if packs.prefetch else None)
            backward = number >= len(packs.forward)
            if number == len(packs.forward):
                total = self._turn(model, loss_function, batches, group, device, sync, upload, total)
            else:
                for index in group:
                    self._store.is_last = backward and index == group[-1]
                    self._backward(pack, index) if backward else self._forward(pack, index)
            self._store.is_last = False
            self._boundaries.arrive()
            self._store.end(pack, update=backward and update)
        for index in group:
            self._back_to_the_start(index)
        assert total is not None
        return total

    # -- what comes before the blocks ------------------------------------------------------------------------------------

    def _before_blocks(
        self,
        index: int,
        model: nn.Module,
        loss_function: loop.LossFunction,
        batch: Any,
        device: torch.device,
        upload: loop.Upload,
    ) -> None:
        """Rule 1."""
        taken: list[Given] = []

        def stop(block: int, forward: Any, args: Any, kwargs: Any) -> Any:
            taken.append(Given.of(args, kwargs))
            raise _Stop

        with self._calls(stop), _nothing_saved():
            try:
                loss_function(model, upload(batch, device))
            except _Stop:
                pass
        if not taken:
            raise no_chain(f"{self._names[0]} does not run")
        given = taken.pop()
        if given.key not in self._chains:
            self._chains[given.key] = self._look(lambda: loss_function(model, upload(batch, device)))
        chain = self._chain_of[index] = self._chains[given.key]
        self._called_as[index] = Given((), given.spec, given.autocast)
        later = {where for link in chain[1:] for kind, where in link.sources if kind == "first"}
        self._shared[index] = [leaf if at in later else None for at, leaf in enumerate(given.leaves)]
        self._kept[0, index] = self._boundaries.keep(given.leaves)

    def _look(self, run: Callable[[], Any]) -> Chain:
        look, store = Look(self._model, self._names), self._store

        def watched(block: int, forward: Any, args: Any, kwargs: Any) -> Any:
            store.fetch_one(block)
            try:
                return look.block(block, forward, args, kwargs)
            finally:
                store.release_one(block)

        with self._calls(watched), _nothing_saved():
            return look.chain(run)

    # -- packs -----------------------------------------------------------------------------------------------------------

    def _run(self, blocks: range, index: int, passed: list[Any]) -> list[Any]:
        """What the last of `blocks` passes on in micro-batch `index`, when the first one starts from `passed`."""
        chain = self._chain_of[index]
        with self._called_as[index].as_called():
            for block in blocks:
                args, kwargs = chain[block].arguments(passed, self._shared[index] if block else passed)
                out = self._blocks[block](*args, **kwargs)
                del args, kwargs
                passed = chain[block].passes(out)
                del out
        return passed

    def _forward(self, pack: Span, index: int) -> None:
        """Rules 2 and 3."""
        self.order.append(("forward", pack, index))
        starts = [first for first, _ in self._packs.backward]
        cuts = [pack[0], *(first for first in starts if pack[0] < first < pack[1]), pack[1]]
        for first, last in itertools.pairwise(cuts):
            stays = first in starts  # else it is handed over from one pack of forward to the next
            with self._calls(_as_it_is), _nothing_saved():
                self._kept[last, index] = self._boundaries.keep(
                    self._run(range(first, last), index, self._start(first, index, [], stays=stays))
                )

    def _start(self, first: int, index: int, sink: list[Tensor | None], *, stays: bool = False) -> list[Any]:
        """What the pack that begins with block `first` starts from; nothing else holds it unless it `stays`."""
        start = self._kept[first, index] if stays else self._kept.pop((first, index))
        return start(self._anchor, sink)

    def _turn(
        self, model: nn.Module, loss_function: loop.LossFunction, batches: Sequence[Any], group: range, device: torch.device,
        sync: loop.SyncContext, upload: loop.Upload, total: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Rule 4."""
        indices = iter(group)

        def next_upload(batch: Any, device: torch.device) -> Any:
            self._at = next(indices)
            self._store.is_last = self._at == group[-1]
            self._in_turn.clear()
            self.order.append(("turn", self._packs.turn, self._at))
            return upload(batch, device)

        with self._calls(self._skip):
            return loop.accumulate(model, loss_function, batches, device, sync=sync, upload=next_upload, among=group, total=total)

    def _skip(self, block: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        first, index = self._packs.turn[0], self._at
        if block >= first:
            return forward(*args, **kwargs)
        if block == 0:
            self._edges[index] = [_edge(leaf) for leaf in tree_leaves((args, kwargs))]
            self._gradients[index] = sink = list[Any]()
            self._starts = self._start(first, index, sink)
        out = self._chain_of[index][block].stand_in(self._starts)
        if block == first - 1:
            self._starts = []
        return out

    def _backward(self, pack: Span, index: int) -> None:
        """Rule 5."""
        self.order.append(("backward", pack, index))
        sink: list[Tensor | None] = []
        with self._calls(_as_it_is):
            passed = self._run(range(*pack), index, self._start(pack[0], index, sink))
        edges = [_edge(each) for each in passed]
        del passed
        _back(edges, self._gradients.pop(index))
        self._gradients[index] = sink

    def _back_to_the_start(self, index: int) -> None:
        """Rule 5, of what comes before the blocks."""
        self._shared.pop(index, None)
        self._chain_of.pop(index, None)
        self._called_as.pop(index, None)
        if index not in self._edges:
            return
        self._at_the_start = True
        try:
            _back(self._edges.pop(index), self._gradients.pop(index))
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise no_chain("what comes after the blocks uses what was made before the blocks") from None
        finally:
            self._at_the_start = False

    def _forget(self) -> None:
        self._chain_of.clear()
        self._called_as.clear()
        self._shared.clear()
        self._kept.clear()
        self._boundaries.arrive()
        self._edges.clear()
        self._gradients.clear()
        self._starts = []

    def check(self) -> dict[str, Any]:
        """Packs of the model.

        Raises:
            ApplyError: A block's forward is another one than was put there.
        """
        for name, block in zip(self._names, self._blocks, strict=True):
            if not isinstance(getattr(vars(block).get("forward"), "__self__", None), _Block):
                raise ApplyError(f"the forward of {name} was replaced after memtune.apply.", code="MT309")
        return {"packs": len(self._packs.backward), "forward_packs": len(self._packs.forward)}


def _as_it_is(block: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _edge(leaf: Any) -> GradientEdge | None:
    return get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None


def _back(edges: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]) -> None:
    """Backward from those of `edges` that have a gradient."""
    both = [(edge, each) for edge, each in zip(edges, gradients, strict=True) if edge is not None and each is not None]
    if both:
        torch.autograd.backward([edge for edge, _ in both], [each for _, each in both])


def _nothing_saved() -> saved_tensors_hooks:
    """Inside, what autograd saves is let go at once; nothing that runs there can run backward."""
    return saved_tensors_hooks(lambda tensor: None, _gone)


def _gone(nothing: None) -> Tensor:
    raise AssertionError("a forward pack has no backward")


def _refuse(model: nn.Module) -> None:
    """What can be seen without a forward.

    Raises:
        ApplyError: A dropout or a BatchNorm.
    """
    if name := dropout_of(model):
        raise no_chain(f"dropout{name} draws random numbers, and their order would be another")
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats and module.training:
            raise no_chain(f"{name} updates its statistics in every forward, and blocks run twice")
