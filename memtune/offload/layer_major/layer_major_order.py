"""Layer-major order: each pack of blocks runs all micro-batches, forward or backward, before the next pack.

Order of a group of micro-batches, which the pass `offload.layer_major.layer_major_pass` follows op by op:

1. Prologue: the user's code runs up to the first block, whose arguments are saved (`Prologue`).
2. Forward packs run block by block from saved arguments, along the chain (`offload.layer_major.block_chain`),
  for one micro-batch or several joined to one (`offload.layer_major.joined_forward`).
  Saved tensors are dropped; arguments of later packs are saved on device or host (`BoundaryActivations`).
3. Turnaround: the last pack runs inside the user's code, from its first line to the loss and back.
4. The other packs run from last to first: forward again from saved arguments, then backward.
5. The prologue's backward runs last, in the graph of the turnaround.

Every pack takes micro-batches in their order, so each weight's gradient is the plain step's sum, to the bit.
The exception is a tied weight, used before and after the blocks: it gets the sum of two such sums, one per
use. With several groups the optimizer's updates run in the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from memtune.errors import ApplyError
from memtune.offload.layer_major.block_chain import (
    CallArguments,
    Chain,
    ChainRecorder,
    dropout_of,
    not_chain_error,
)
from memtune.offload.layer_major.boundary_activations import BoundaryActivations, SavedStart, discard_saved
from memtune.offload.layer_major.joined_forward import form_of, join, part_of, require_equal, samples_of
from memtune.offload.layer_major.pack_offloader import PackOffloader
from memtune.offload.layer_major.packs import BoundaryTier, Packs, Span, joins
from memtune.runtime import (
    Context,
    RandomState,
    ReplacedForward,
    generators_of,
    generators_of_files,
    training_step,
)


class _Step(NamedTuple):
    """The inputs of a step."""

    model: nn.Module
    loss_function: training_step.LossFunction
    batches: Sequence[Any]
    device: torch.device
    sync: training_step.SyncContext
    upload: training_step.Upload

    def run(self, index: int) -> Tensor:
        """Run the user's forward for a micro-batch; return the loss."""
        return self.loss_function(self.model, self.upload(self.batches[index], self.device))


class LayerMajor:
    """Runs `context`'s model in layer-major order.

    Args:
        context: Its model and blocks; the blocks' forwards are replaced.
        store: Loads and frees the blocks' parameters.
        packs: The packs of blocks, and their order.
        boundaries: Tier of saved boundary activations.

    Raises:
        ApplyError: The model has active dropout, or updates statistics in forward.
    """

    def __init__(
        self, context: Context, store: PackOffloader, packs: Packs, boundaries: BoundaryTier = "device"
    ) -> None:
        self._store = store
        self._packs, self._boundaries = packs, BoundaryActivations(boundaries)
        _refuse(context.model)
        self._model = context.model
        self._generators = [*generators_of(context.model), *generators_of_files(context.model)]
        self._calls = InterceptedBlocks(context.model, context.blocks)
        self._prologue = Prologue(context.model, context.blocks, self._calls, store)
        self._anchor = torch.empty(0, device=context.device, requires_grad=True)
        self._proven = isinstance(self._anchor, FakeTensor)
        """True if joined micro-batches have been compared with one alone, or have no values."""
        self._at = 0  # current micro-batch of the turnaround
        self._saved: dict[tuple[int, int], SavedStart] = {}
        """Arguments of packs, by first block of the pack and micro-batch."""
        self._starts: list[Any] = []
        """Arguments of the turnaround's first block, while the user's code runs past the blocks before it."""
        self._edges: dict[int, list[GradientEdge | None]] = {}
        """By micro-batch: edges of the first block's arguments, from which the prologue runs backward."""
        self._gradients: dict[int, list[Tensor | None]] = {}
        """By micro-batch: gradients of the arguments of the pack that ran backward last."""
        self.order: list[tuple[str, Span, int]] = []
        """Runs of the last step, in order: direction, pack, micro-batch."""

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
        """Run forward and backward of all micro-batches; replaces `training_step.accumulate`.

        Raises:
            ApplyError: The blocks are no chain (`offload.layer_major.block_chain`).
        """
        step = _Step(model, loss_function, batches, device, sync, upload)
        self.order = []
        # Refuses a step after one that raised half way, before anything runs.
        self._store.begin_step()
        total: Tensor | None = None
        try:
            for group in self._packs.groups(len(batches)):
                total = self._group(step, group, total)
        except BaseException:  # also KeyboardInterrupt: parameters must not remain on the device
            self._store.gradients.is_taken = False
            self._forget()
            self._store.abandon()
            raise
        finally:
            self._store.is_stepping = False
        self._store.end_step()
        assert total is not None
        return total

    def _group(self, step: _Step, group: range, total: Tensor | None) -> Tensor:
        """Run a group of micro-batches through all packs; return the sum of losses so far."""
        packs = self._packs
        following = dict(zip(range(len(packs.uses)), [*packs.uses[1:], None], strict=True))
        update = group.stop == len(step.batches)
        before = RandomState.capture(self._model, self._generators, python=True)
        if packs.forward:
            for index in group:
                # All prologues first: the forward packs then run without the user's code.
                given = self._prologue.run(index, step)
                self._saved[0, index] = self._boundaries.save(given)
                del given  # the saved arguments may be on the host; this would hold the device's
        for number, pack in enumerate(packs.uses):
            # Before the first micro-batch: its copies overlap with the whole previous pack.
            self._store.begin(pack, following[number] if packs.prefetch else None)
            backward = number >= len(packs.forward)
            if number == len(packs.forward):
                self._require_no_draws(before)
                total = self._turnaround(step, group, total)
            elif backward:
                for index in group:
                    self._store.gradients.is_taken = index == group[-1]
                    self._backward(pack, index)
                    self._store.next_micro_batch()
            else:
                for together in self._forward_runs(group):
                    self._forward(pack, together)
                    for _ in together:
                        self._store.next_micro_batch()
            self._store.gradients.is_taken = False
            self._boundaries.wait()
            # Only the last group's gradients are complete; earlier ones are added on the host.
            self._store.end(pack, update=backward and update)
        for index in group:
            self._prologue_backward(index)
        assert total is not None
        return total

    def _require_no_draws(self, before: RandomState) -> None:
        """Refuse draws in the forward packs, before any gradient is made: the recorded step had none.

        Raises:
            ApplyError: There were some.
        """
        if not self._packs.forward or before.is_now(self._model):
            return
        where = "" if before.python is None or before.python.is_now() else " in Python"
        raise not_chain_error(f"the model draws random numbers{where}, and their order would change")

    # -- packs -----------------------------------------------------------------------------------------------

    def _run(
        self, blocks: range, index: int, passed: list[Any], shared: Sequence[Any] | None = None
    ) -> list[Any]:
        """Run `blocks` from `passed` in micro-batch `index`; return the last one's passed outputs.

        `shared`: arguments of several blocks, if not those of the micro-batch.
        """
        chain = self._prologue.chain_of[index]
        shared = self._prologue.shared[index] if shared is None else shared
        with self._prologue.called_as[index].autocast_as_called():
            for block in blocks:
                args, kwargs = chain[block].arguments(passed, shared if block else passed)
                out = self._calls.blocks[block](*args, **kwargs)
                # Drop references before the next block runs: its peak must not include this one's arguments.
                del args, kwargs
                passed = chain[block].passed_outputs(out)
                del out
        return passed

    def _forward_runs(self, group: range) -> list[range]:
        """Return the micro-batches that a forward pack runs together: those that can be joined."""
        found: list[range] = []
        for together in joins(group, self._packs.joined):
            alike = len({id(self._prologue.chain_of[index]) for index in together}) == 1
            can_join = alike and samples_of([self._prologue.shapes[index] for index in together])
            found += [together] if can_join else [range(index, index + 1) for index in together]
        return found

    def _forward(self, pack: Span, together: range) -> None:
        """Run a forward pack, cut where packs of backward start, and save their arguments."""
        self.order += [("forward", pack, index) for index in together]
        index = together[0]
        starts = [first for first, _ in self._packs.backward]
        cuts = [pack[0], *(first for first in starts if pack[0] < first < pack[1]), pack[1]]
        for first, last in itertools.pairwise(cuts):
            is_needed_again = first in starts  # by backward; otherwise only this run reads the arguments
            # Autograd records although its saved tensors are dropped: under no_grad an op may choose another
            # kernel, with other bits than the plain step.
            with self._calls.handled_by(run_block), discard_saved():
                if len(together) > 1:
                    self._run_joined(first, last, together, keep=is_needed_again)
                    continue
                self._saved[last, index] = self._boundaries.save(
                    self._run(range(first, last), index, self._start(first, index, [], keep=is_needed_again))
                )

    def _run_joined(self, first: int, last: int, together: range, *, keep: bool) -> None:
        """Run blocks of forward for several micro-batches as one, and save the outputs of each."""
        blocks, prologue, end = range(first, last), self._prologue, together[-1]
        samples = samples_of([prologue.shapes[index] for index in together])
        shared = join([prologue.shared[index] for index in together], samples)
        proof = None if self._proven else self._run(blocks, end, self._start(first, end, [], keep=True))
        passed = self._run(
            blocks,
            end,
            join(
                [self._start(first, index, [], keep=keep) for index in together],
                samples,
                shared if first == 0 else (),
            ),
            shared,
        )
        del shared
        for number, index in enumerate(together):
            part = part_of(passed, number, len(together))
            if index == end:
                passed.clear()
                if proof is not None:
                    require_equal(part, proof)
                self._proven = True
            self._saved[last, index] = self._boundaries.save(part)
            del part  # before the next one is made

    def _start(self, first: int, index: int, sink: list[Tensor | None], *, keep: bool = False) -> list[Any]:
        """Return the arguments of the pack that begins with block `first`; unless `keep`, forget them."""
        start = self._saved[first, index] if keep else self._saved.pop((first, index))
        return start(self._anchor, sink)

    def _turnaround(self, step: _Step, group: range, total: Tensor | None) -> Tensor:
        """Run the user's code with the last pack, forward and backward; earlier blocks are skipped."""
        indices = iter(group)

        def next_upload(batch: Any, device: torch.device) -> Any:
            self._at = next(indices)
            self._store.gradients.is_taken = self._at == group[-1]
            self.order.append(("turnaround", self._packs.turnaround, self._at))
            return step.upload(batch, device)

        with self._calls.handled_by(self._skip):
            return training_step.accumulate(
                step.model,
                step.loss_function,
                step.batches,
                step.device,
                sync=step.sync,
                upload=next_upload,
                among=group,
                total=total,
            )

    def _skip(self, block: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block of the turnaround; answer an earlier block's call with a placeholder output."""
        first, index = self._packs.turnaround[0], self._at
        if block >= first:
            return forward(*args, **kwargs)
        if block == 0:
            # The skipped blocks cut the graph here; the prologue runs backward from these edges later.
            self._edges[index] = [_edge(leaf) for leaf in tree_leaves((args, kwargs))]
            self._gradients[index] = sink = list[Any]()
            # Restored here, at the first block's call: the user's code before it has run, and made its own
            # graph.
            self._starts = self._start(first, index, sink)
        out = self._prologue.chain_of[index][block].placeholder_output(self._starts)
        if block == first - 1:
            self._starts = []
        return out

    def _backward(self, pack: Span, index: int) -> None:
        """Run a pack forward again from its saved arguments, then backward."""
        self.order.append(("backward", pack, index))
        sink: list[Tensor | None] = []
        with self._calls.handled_by(run_block):
            # With saved tensors this time: backward follows at once.
            passed = self._run(range(*pack), index, self._start(pack[0], index, sink))
        # Backward needs the graph only; an edge holds no activation, as an output tensor would.
        edges = [_edge(each) for each in passed]
        del passed
        _run_backward(edges, self._gradients.pop(index))
        self._gradients[index] = sink

    def _prologue_backward(self, index: int) -> None:
        """Run the backward of the prologue in micro-batch `index`, in the graph of the turnaround."""
        self._prologue.forget(index)
        if index not in self._edges:
            return
        try:
            _run_backward(self._edges.pop(index), self._gradients.pop(index))
        except RuntimeError as error:
            # The turnaround's backward has already run through the prologue's graph, past the blocks.
            if "second time" not in str(error):
                raise
            raise not_chain_error("code after the blocks uses a tensor made before the blocks") from None

    def _forget(self) -> None:
        self._prologue.forget()
        self._saved.clear()
        self._boundaries.wait()
        self._edges.clear()
        self._gradients.clear()
        self._starts = []

    def check(self) -> dict[str, Any]:
        """Return the number of packs, for the audit; ApplyError: a block's forward was replaced."""
        self._calls.check()
        return {"packs": len(self._packs.backward), "forward_packs": len(self._packs.forward)}


def _edge(leaf: Any) -> GradientEdge | None:
    return get_gradient_edge(leaf) if isinstance(leaf, Tensor) and leaf.requires_grad else None


def _run_backward(edges: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]) -> None:
    """Run backward from those of `edges` that have a gradient."""
    both = [
        (edge, each)
        for edge, each in zip(edges, gradients, strict=True)
        if edge is not None and each is not None
    ]
    if both:
        torch.autograd.backward([edge for edge, _ in both], [each for _, each in both])


def _refuse(model: nn.Module) -> None:
    """Refuse violations of the chain rules that need no forward to be seen.

    Raises:
        ApplyError: The model has active dropout or BatchNorm.
    """
    if name := dropout_of(model):
        raise not_chain_error(f"dropout{name} draws random numbers, and their order would change")
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.modules.batchnorm._NormBase)
            and module.track_running_stats
            and module.training
        ):
            raise not_chain_error(f"{name} updates its statistics in every forward, and blocks run twice")


# BaseException, so that an `except Exception` in the user's code does not catch it.
class _Stop(BaseException):
    """Stops the user's code at the first block."""


class Prologue:
    """Runs the user's code up to the first block, and records the chain of blocks.

    Args:
        model: The user's model.
        names: Module paths of its blocks.
        calls: The same blocks, intercepted.
        store: Loads and frees their parameters.
    """

    def __init__(
        self, model: nn.Module, names: list[str], calls: InterceptedBlocks, store: PackOffloader
    ) -> None:
        self._model, self._names, self._calls, self._store = model, names, calls, store
        self._chains: dict[Any, Chain] = {}
        self.chain_of: dict[int, Chain] = {}
        """By micro-batch: the chain of its blocks."""
        self.called_as: dict[int, CallArguments] = {}
        """By micro-batch: the first block's call, without tensors."""
        self.shared: dict[int, list[Any]] = {}
        """By micro-batch: argument leaves of the first block that later blocks take too, None for others."""
        self.shapes: dict[int, list[Any]] = {}
        """By micro-batch: shape and type of argument leaves of the first block, or their values."""

    def run(self, index: int, step: _Step) -> tuple[Any, ...]:
        """Return the argument leaves of the first block in micro-batch `index`.

        Raises:
            ApplyError: The blocks are no chain.
        """
        calls: list[CallArguments] = []

        def stop(block: int, forward: Any, args: Any, kwargs: Any) -> Any:
            # Flattened before the unwind: `_Stop` drops the user's frames and with them the arguments.
            calls.append(CallArguments.flatten(args, kwargs))
            raise _Stop

        with self._calls.handled_by(stop), discard_saved():
            try:
                step.run(index)
            except _Stop:
                pass
        if not calls:
            raise not_chain_error(f"{self._names[0]} does not run")
        given = calls.pop()
        # Another structure of arguments may be another data flow, so it is recorded again.
        if given.key not in self._chains:
            self._chains[given.key] = self._record_chain(lambda: step.run(index))
        chain = self.chain_of[index] = self._chains[given.key]
        # Without leaves: `BoundaryActivations` alone decides where the tensors live.
        self.called_as[index] = CallArguments((), given.spec, given.autocast)
        later = {where for link in chain[1:] for kind, where in link.sources if kind == "first"}
        self.shapes[index] = [form_of(leaf) for leaf in given.leaves]
        self.shared[index] = [leaf if at in later else None for at, leaf in enumerate(given.leaves)]
        return given.leaves

    def _record_chain(self, run: Callable[[], Any]) -> Chain:
        """Record the chain in one plain forward, with one block resident at a time."""
        recorder, store = ChainRecorder(self._model, self._names), self._store

        def recorded(block: int, forward: Any, args: Any, kwargs: Any) -> Any:
            store.units.load_block(block)
            try:
                return recorder.block(block, forward, args, kwargs)
            finally:
                store.units.free((block,))

        with self._calls.handled_by(recorded), discard_saved():
            return recorder.chain(run)

    def forget(self, index: int | None = None) -> None:
        """Free the data of micro-batch `index`, or of all."""
        for each in (self.chain_of, self.called_as, self.shared, self.shapes):
            if index is None:
                each.clear()
            else:
                each.pop(index, None)


CallHandler = Callable[[int, Callable[..., Any], Any, Any], Any]
"""Answers the call of a block, from its index, its own forward, args and kwargs."""


class _Block(ReplacedForward):
    """The replaced forward of a block: passes its calls to the current handler."""

    def __init__(self, module: nn.Module, index: int, calls: InterceptedBlocks) -> None:
        super().__init__(module)
        self._index, self._calls = index, calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the handler's answer to this call."""
        return self._calls.called(self._index, self._original, args, kwargs)


class InterceptedBlocks:
    """The blocks of a model with replaced forwards, whose calls a handler answers.

    Args:
        model: Holds the blocks.
        names: Module paths of the blocks.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._names, self.blocks = names, [model.get_submodule(name) for name in names]
        self._handler: CallHandler | None = None
        for index, block in enumerate(self.blocks):
            _Block(block, index, self).install()

    def called(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call of block `index`, by the user's code or by a pack; without a handler, run it."""
        if self._handler is None:
            return forward(*args, **kwargs)
        return self._handler(index, forward, args, kwargs)

    @contextmanager
    def handled_by(self, handler: CallHandler) -> Iterator[None]:
        """Return a context in which `handler` answers the calls of blocks."""
        self._handler = handler
        try:
            yield
        finally:
            self._handler = None

    def check(self) -> None:
        """Require that the replaced forwards are in place.

        Raises:
            ApplyError: A block's forward was replaced after `apply`.
        """
        for name, block in zip(self._names, self.blocks, strict=True):
            if not isinstance(getattr(vars(block).get("forward"), "__self__", None), _Block):
                raise ApplyError(f"the forward of {name} was replaced after memtune.apply.", code="MT309")


def run_block(block: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run the block itself; a `CallHandler`."""
    return forward(*args, **kwargs)
