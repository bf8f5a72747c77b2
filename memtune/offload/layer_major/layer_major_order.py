"""Layer-major order: each pack of blocks runs all micro-batches before the next one begins, forward and back.

Seven rules, which the pass `offload.layer_major.layer_major_pass` follows op by op:

Rule 1. The user's code runs up to the first block once for each micro-batch; there it is stopped, and what
the block was to be
        given is kept. Packs of forward are run from what is kept, block by block, as the chain
        (`offload.layer_major.block_chain`) says.
Rule 2. What a pack of backward starts from is kept for each micro-batch, on the device or the host, until
that backward is done. Rule 3. Autograd looks on in every forward, so that kernels are those of the plain
step; what it saves in a forward pack is
        dropped at once, and no claim on activations holds; in the turn and in packs of backward they do
        (`recompute`).
Rule 4. The turn, the last pack of backward, runs inside the user's code, from its beginning to its loss and
back, as a plain
        micro-batch does (`runtime.training_step`); the blocks before it are skipped, and the last of them
        returns what was kept.
Rule 5. Then packs run backward from last to first: each again forward from what was kept, then back from the
gradient of what it
        returned. What comes before the blocks runs backward last of all, in the graph that the turn made.
Rule 6. Every pack takes micro-batches in their order, so each weight's gradient is the plain step's sum, to
the bit; but for a
        weight before the blocks and after them (a tied head), which gets the sum of two such sums, one of
        each of its uses.
Rule 7. With groups, all this is done for some micro-batches, then for others; the optimizer's updates come in
the last group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from memtune.errors import ApplyError
from memtune.offload.layer_major.block_chain import Chain, Given, Look, dropout_of, no_chain
from memtune.offload.layer_major.boundary_activations import Boundaries, BoundaryTier, Kept, nothing_saved
from memtune.offload.layer_major.pack_offloader import PackStore
from memtune.offload.layer_major.packs import Packs, Span
from memtune.runtime import Context, ReplacedForward, training_step


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

    def __init__(
        self, context: Context, store: PackStore, packs: Packs, boundaries: BoundaryTier = "device"
    ) -> None:
        self._store = store
        self._packs, self._boundaries = packs, Boundaries(boundaries)
        _refuse(context.model)
        self._calls = BlockCalls(context.model, context.blocks)
        self._before = BeforeBlocks(context.model, context.blocks, self._calls, store)
        self._anchor = torch.empty(0, device=context.device, requires_grad=True)
        self._at = 0  # micro-batch whose turn it is
        self._kept: dict[tuple[int, int], Kept] = {}
        """By first block of a pack and micro-batch."""
        self._starts: list[Any] = []
        self._edges: dict[int, list[GradientEdge | None]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self.order: list[tuple[str, Span, int]] = []
        """What the last step ran, when: direction, pack, micro-batch."""

    def accumulate(
        self,
        model: nn.Module,
        loss_function: training_step.LossFunction,
        batches: Sequence[Any],
        device: torch.device,
        *,
        sync: training_step.SyncContext = lambda last: nullcontext(),
        upload: training_step.Upload = training_step.upload,
    ) -> Tensor:
        """As `loop.accumulate`, layer by layer.

        Raises:
            ApplyError: The blocks are no chain (`offload.layer_major.block_chain`).
        """
        self.order = []
        self._store.step_starts()
        total: Tensor | None = None
        try:
            for group in self._packs.groups(len(batches)):
                total = self._group(model, loss_function, batches, group, device, sync, upload, total)
        except BaseException:
            self._store.is_last = False
            self._forget()
            self._store.abandon()
            raise
        finally:
            self._store.is_stepping = False
        self._store.step_ends()
        assert total is not None
        return total

    def _group(
        self,
        model: nn.Module,
        loss_function: training_step.LossFunction,
        batches: Sequence[Any],
        group: range,
        device: torch.device,
        sync: training_step.SyncContext,
        upload: training_step.Upload,
        total: Tensor | None,
    ) -> Tensor:
        packs = self._packs
        following = dict(zip(range(len(packs.uses)), [*packs.uses[1:], None], strict=True))
        update = group.stop == len(batches)
        if packs.forward:
            for index in group:
                given = self._before.run(index, model, loss_function, batches[index], device, upload)
                self._kept[0, index] = self._boundaries.keep(given)
                del given
        for number, pack in enumerate(packs.uses):
            self._store.begin(pack, following[number] if packs.prefetch else None)
            backward = number >= len(packs.forward)
            if number == len(packs.forward):
                total = self._turn(model, loss_function, batches, group, device, sync, upload, total)
            else:
                for index in group:
                    self._store.is_last = backward and index == group[-1]
                    self._backward(pack, index) if backward else self._forward(pack, index)
                    self._store.go_on()
            self._store.is_last = False
            self._boundaries.arrive()
            self._store.end(pack, update=backward and update)
        for index in group:
            self._back_to_the_start(index)
        assert total is not None
        return total

    # -- packs -----------------------------------------------------------------------------------------------

    def _run(self, blocks: range, index: int, passed: list[Any]) -> list[Any]:
        """What the last of `blocks` passes on in micro-batch `index`, when the first one starts from
        `passed`.
        """
        chain = self._before.chain_of[index]
        with self._before.called_as[index].as_called():
            for block in blocks:
                args, kwargs = chain[block].arguments(passed, self._before.shared[index] if block else passed)
                out = self._calls.blocks[block](*args, **kwargs)
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
            with self._calls.answered_by(as_it_is), nothing_saved():
                self._kept[last, index] = self._boundaries.keep(
                    self._run(range(first, last), index, self._start(first, index, [], stays=stays))
                )

    def _start(self, first: int, index: int, sink: list[Tensor | None], *, stays: bool = False) -> list[Any]:
        """What the pack that begins with block `first` starts from; nothing else holds it unless it
        `stays`.
        """
        start = self._kept[first, index] if stays else self._kept.pop((first, index))
        return start(self._anchor, sink)

    def _turn(
        self,
        model: nn.Module,
        loss_function: training_step.LossFunction,
        batches: Sequence[Any],
        group: range,
        device: torch.device,
        sync: training_step.SyncContext,
        upload: training_step.Upload,
        total: Tensor | None,
    ) -> Tensor:
        """Rule 4."""
        indices = iter(group)

        def next_upload(batch: Any, device: torch.device) -> Any:
            self._at = next(indices)
            self._store.is_last = self._at == group[-1]
            self.order.append(("turn", self._packs.turn, self._at))
            return upload(batch, device)

        with self._calls.answered_by(self._skip):
            return training_step.accumulate(
                model, loss_function, batches, device, sync=sync, upload=next_upload, among=group, total=total
            )

    def _skip(self, block: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        first, index = self._packs.turn[0], self._at
        if block >= first:
            return forward(*args, **kwargs)
        if block == 0:
            self._edges[index] = [_edge(leaf) for leaf in tree_leaves((args, kwargs))]
            self._gradients[index] = sink = list[Any]()
            self._starts = self._start(first, index, sink)
        out = self._before.chain_of[index][block].stand_in(self._starts)
        if block == first - 1:
            self._starts = []
        return out

    def _backward(self, pack: Span, index: int) -> None:
        """Rule 5."""
        self.order.append(("backward", pack, index))
        sink: list[Tensor | None] = []
        with self._calls.answered_by(as_it_is):
            passed = self._run(range(*pack), index, self._start(pack[0], index, sink))
        edges = [_edge(each) for each in passed]
        del passed
        _back(edges, self._gradients.pop(index))
        self._gradients[index] = sink

    def _back_to_the_start(self, index: int) -> None:
        """Rule 5, of what comes before the blocks."""
        self._before.forget(index)
        if index not in self._edges:
            return
        try:
            _back(self._edges.pop(index), self._gradients.pop(index))
        except RuntimeError as error:
            if "second time" not in str(error):
                raise
            raise no_chain("what comes after the blocks uses what was made before the blocks") from None

    def _forget(self) -> None:
        self._before.forget()
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
        self._calls.check()
        return {"packs": len(self._packs.backward), "forward_packs": len(self._packs.forward)}


def _edge(leaf: Any) -> GradientEdge | None:
    return get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None


def _back(edges: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]) -> None:
    """Backward from those of `edges` that have a gradient."""
    both = [
        (edge, each)
        for edge, each in zip(edges, gradients, strict=True)
        if edge is not None and each is not None
    ]
    if both:
        torch.autograd.backward([edge for edge, _ in both], [each for _, each in both])


def _refuse(model: nn.Module) -> None:
    """What can be seen without a forward.

    Raises:
        ApplyError: A dropout or a BatchNorm.
    """
    if name := dropout_of(model):
        raise no_chain(f"dropout{name} draws random numbers, and their order would be another")
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.modules.batchnorm._NormBase)
            and module.track_running_stats
            and module.training
        ):
            raise no_chain(f"{name} updates its statistics in every forward, and blocks run twice")


# The user's code up to the first block, and the chain that follows: Rule 1 of
# `offload.layer_major.layer_major_order`.
class _Stop(BaseException):
    """The user's code has come to the first block."""


class BeforeBlocks:
    """What the first block is given in each micro-batch, and how the others follow.

    Args:
        model: The user's.
        names: Of its blocks.
        calls: Of the same blocks.
        store: Where their parameters are.
    """

    def __init__(self, model: nn.Module, names: list[str], calls: BlockCalls, store: PackStore) -> None:
        self._model, self._names, self._calls, self._store = model, names, calls, store
        self._chains: dict[Any, Chain] = {}
        self.chain_of: dict[int, Chain] = {}
        """By micro-batch."""
        self.called_as: dict[int, Given] = {}
        """By micro-batch: how the first block was called, without tensors."""
        self.shared: dict[int, list[Any]] = {}
        """By micro-batch: what the first block is given and later ones as well."""

    def run(
        self,
        index: int,
        model: nn.Module,
        loss_function: training_step.LossFunction,
        batch: Any,
        device: torch.device,
        upload: training_step.Upload,
    ) -> tuple[Any, ...]:
        """What the first block is to be given in micro-batch `index`.

        Raises:
            ApplyError: The blocks are no chain.
        """
        taken: list[Given] = []

        def stop(block: int, forward: Any, args: Any, kwargs: Any) -> Any:
            taken.append(Given.of(args, kwargs))
            raise _Stop

        with self._calls.answered_by(stop), nothing_saved():
            try:
                loss_function(model, upload(batch, device))
            except _Stop:
                pass
        if not taken:
            raise no_chain(f"{self._names[0]} does not run")
        given = taken.pop()
        if given.key not in self._chains:
            self._chains[given.key] = self._look(lambda: loss_function(model, upload(batch, device)))
        chain = self.chain_of[index] = self._chains[given.key]
        self.called_as[index] = Given((), given.spec, given.autocast)
        later = {where for link in chain[1:] for kind, where in link.sources if kind == "first"}
        self.shared[index] = [leaf if at in later else None for at, leaf in enumerate(given.leaves)]
        return given.leaves

    def _look(self, run: Callable[[], Any]) -> Chain:
        look, store = Look(self._model, self._names), self._store

        def watched(block: int, forward: Any, args: Any, kwargs: Any) -> Any:
            store.fetch_one(block)
            try:
                return look.block(block, forward, args, kwargs)
            finally:
                store.release_one(block)

        with self._calls.answered_by(watched), nothing_saved():
            return look.chain(run)

    def forget(self, index: int | None = None) -> None:
        """Let go of micro-batch `index`, or of all."""
        for each in (self.chain_of, self.called_as, self.shared):
            if index is None:
                each.clear()
            else:
                each.pop(index, None)


# Calls of a model's blocks, by the user's code or by others, that whoever orders them may answer otherwise.
Called = Callable[[int, Callable[..., Any], Any, Any], Any]
"""Takes the place of a block: its number, its own forward, what it is called with."""


class _Block(ReplacedForward):
    """A block that runs, is skipped or stops the user's code, as the order wants."""

    def __init__(self, module: nn.Module, index: int, calls: BlockCalls) -> None:
        super().__init__(module)
        self._index, self._calls = index, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward, or what takes its place."""
        return self._calls.called(self._index, self._original, args, kwargs)


class BlockCalls:
    """The blocks `names` of `model`, whose forwards are replaced.

    Args:
        model: Holds the blocks.
        names: Of the blocks.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._names, self.blocks = names, [model.get_submodule(name) for name in names]
        self._called: Called | None = None
        for index, block in enumerate(self.blocks):
            _Block(block, index, self).install()

    def called(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A block is called by the user's code, or by a pack."""
        if self._called is None:
            return forward(*args, **kwargs)
        return self._called(index, forward, args, kwargs)

    @contextmanager
    def answered_by(self, called: Called) -> Iterator[None]:
        """Inside, `called` takes the place of the blocks."""
        self._called = called
        try:
            yield
        finally:
            self._called = None

    def check(self) -> None:
        """Look whether all is as it was put there.

        Raises:
            ApplyError: A block's forward is another one.
        """
        for name, block in zip(self._names, self.blocks, strict=True):
            if not isinstance(getattr(vars(block).get("forward"), "__self__", None), _Block):
                raise ApplyError(f"the forward of {name} was replaced after memtune.apply.", code="MT309")


def as_it_is(block: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The block itself."""
    return forward(*args, **kwargs)
