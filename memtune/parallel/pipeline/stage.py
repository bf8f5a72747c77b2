"""One stage of a pipeline: runs its blocks, and skips the others in the user's code.

Weights of other stages are fake tensors while the code before the blocks runs, so results computed from them
have a shape and a dtype and no memory. A block of an earlier stage returns such a tensor, in its own output
structure (`(x, None)`); the stage's first block is called with the received activation instead. The last
block of every stage but the last ends the user's code with `_Done`, a BaseException that no `except
Exception` catches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining import PipelineStage

from memtune.activations.offload import Slots
from memtune.activations.recompute import ActivationTable
from memtune.errors import ApplyError
from memtune.program import StageAction
from memtune.runtime import Context, LossFunction, count_collective, seed_generators
from memtune.workload import LONE, map_tensors, structure_of, tensors_of, the_tensor, wrap_tensor

_PIECE = "_memtune_piece"


class _Done(BaseException):
    """The stage's last block has returned."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


def shared_batch_form(batches: Sequence[Any]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each tensor of the micro-batches of a step.

    Raises:
        ApplyError: Micro-batches differ.
    """
    forms = [[(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(batch)] for batch in batches]
    if any(form != forms[0] for form in forms):
        raise ApplyError(
            "the micro-batches of a step have different shapes.",
            evidence=f"Among them {forms[0]} and {forms[-1]}.",
            fix="micro-batches of one shape: stages receive into memory that is made before",
            code="MT396",
        )
    return forms[0]


@torch.no_grad()
def total_loss(
    losses: Sequence[Tensor], device: torch.device, group: dist.ProcessGroup, last_rank: int
) -> Tensor:
    """Return the sum of the losses of the last stage, on `last_rank` of `group`, on every rank of it."""
    total = sum(losses[1:], losses[0]) if losses else torch.zeros(())
    # In double, so that a loss of any float type arrives exactly; other stages do not know its type.
    total = total.to(device, torch.float64)
    dist.broadcast(total, group=group, group_src=last_rank)
    return total


class Run:
    """Decides how a model's blocks run at the moment.

    Args:
        count: Blocks of the model.
        outputs: Output structure of each block, from the plan; empty if all return a single tensor.
    """

    def __init__(self, count: int, outputs: Sequence[str] = ()) -> None:
        self._count, self._outputs = count, outputs or [LONE] * count
        self._active: tuple[int, int] | None = None
        self._given: Tensor | None = None
        self._probing = self._without_weights = False
        self._real: list[tuple[dict[str, Any], str, Tensor]] = []
        self.activations: ActivationTable | None = None
        """Activation table of this rank's blocks."""
        self.ended: Callable[[Tensor], Tensor] | None = None
        """Called with the output of a stage that has ended the user's code; returns it."""
        self._absent: list[tuple[dict[str, Any], str, Tensor]] = []
        """Weights that the code before the blocks uses: their dictionaries, names and fake replacements."""

    def replace_by_fake(
        self, module: nn.Module, name: str, like: Tensor, device: torch.device, mode: FakeTensorMode
    ) -> None:
        """Use a fake tensor for `name` of `module` while code before the blocks runs on a later stage."""
        with mode:
            fake = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        self._absent.append((module._parameters, name, fake))

    def probe(self, model: nn.Module, loss_function: LossFunction, batch: Any) -> Tensor:
        """Return a tensor without memory like the first block's input for `batch`."""
        # Before torch's stage is made, which wants a tensor like its input; a plan knows no batch size of the
        # user's.
        with torch.no_grad(), self._entered(0, 0, None, absent=True):
            self._probing = True
            try:
                loss_function(model, batch)
            except _Done as done:
                passed = self._ended(done.output)
                return torch.empty(passed.shape, dtype=passed.dtype, device="meta", requires_grad=True)
            finally:
                self._probing = False
        raise ApplyError("the loss was computed without a call of the model's first block.", code="MT395")

    def output_of(self, first: int, last: int, given: Tensor | None, call: Callable[[], Tensor]) -> Tensor:
        """Return the output of blocks `first` to `last` for `given` in `call`, or the loss."""
        with self._entered(first, last, given, absent=given is not None):
            if self.activations is not None and self.activations.own is not None:
                self.activations.own.begin()
            try:
                return call().contiguous()
            except _Done as done:
                return self._ended(self._sent(last, done.output)).contiguous()

    def _sent(self, last: int, output: Any) -> Tensor:
        """Return the tensor in the output of block `last`."""
        found, planned = structure_of(output), self._outputs[last]
        if found != planned:
            raise ApplyError(
                f"block {last} returns {found or 'a tensor'}, and {planned or 'a tensor'} when the config was"
                " made.",
                evidence="Later stages take it to return the same each time.",
                fix="parallel: {kind: none}, or search again",
                code="MT395",
            )
        return the_tensor(output)

    def _ended(self, output: Tensor) -> Tensor:
        return output if self.ended is None else self.ended(output)

    @contextmanager
    def _entered(self, first: int, last: int, given: Tensor | None, *, absent: bool) -> Iterator[None]:
        self._active, self._given, self._real = (first, last), given, []
        self._without_weights = absent
        # With FSDP2 (`ended` is set) the weights must be in place when its pre-forward hooks gather them.
        if self.ended is None:
            self._hide_prologue_weights()
        try:
            yield
        finally:
            self._restore_prologue_weights()
            self._active = self._given = None

    def _hide_prologue_weights(self) -> None:
        """Replace weights used before the blocks by fake ones."""
        # Parameters gathered in between (`fsdp_sharding.shard_stage`) are recorded, to be restored.
        for held, name, fake in self._absent if self._without_weights else []:
            if held[name] is not fake:
                self._real = [each for each in self._real if each[0] is not held or each[1] != name]
                self._real.append((held, name, held[name]))
                held[name] = fake

    def _restore_prologue_weights(self) -> None:
        """Restore this rank's weights from the stage's first block on: the head may share an embedding's."""
        for held, name, real in self._real:
            held[name] = real
        self._real, self._without_weights = [], False

    def require_step(self) -> tuple[int, int]:
        """Return the first and the last block to run.

        Raises:
            ApplyError: The model was called outside of `Tuned.step`.
        """
        if self._active is None:
            raise ApplyError(
                "the model of a pipeline was called outside of Tuned.step.",
                evidence="Each rank has some of the blocks; one micro-batch at a time cannot be pipelined.",
                fix="tuned.step(batches), with all micro-batches of the step",
                code="MT311",
            )
        return self._active

    def require_step_before(self, model: nn.Module, args: Any) -> None:
        """Raise before a call of the whole model outside of a step reaches the missing weights."""
        self.require_step()
        self._hide_prologue_weights()

    def called(self, index: int, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """Run, skip or end at block `index`, which the user's code calls."""
        first, last = self.require_step()
        if self._probing:
            # The shape of the first block's input is all that the probe needs.
            raise _Done(_chain(index, args, kwargs))
        if index < first:
            return wrap_tensor(self._outputs[index], _chain(index, args, kwargs))
        if index == first and self._given is not None:
            args, kwargs = self._with_given(index, args, kwargs)
        output = call(*args, **kwargs)
        if self.activations is not None and self.activations.own is not None:
            self.activations.own.returned(output)
        # The model's last block returns instead: norm, head and loss follow.
        if index == last and last + 1 < self._count:
            # An exception is the only way out of the middle of the user's forward.
            raise _Done(output)
        return output

    def _with_given(self, index: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given, passed = self._given, _chain(index, args, kwargs)
        assert given is not None
        self._given = None
        self._restore_prologue_weights()
        if passed.shape != given.shape or passed.dtype != given.dtype:
            raise ApplyError(
                f"block {index} is given {tuple(given.shape)} of {given.dtype}, where the first one is given "
                f"{tuple(passed.shape)} of {passed.dtype}.",
                fix="parallel: {kind: none}; stages pass on one tensor of one shape",
                code="MT395",
            )
        found: tuple[Any, Any] = map_tensors(
            (args, kwargs), lambda tensor: given if tensor is passed else tensor
        )
        return found


def _chain(index: int, args: Any, kwargs: Any) -> Tensor:
    """Return the one activation tensor among a block's arguments."""
    tensors = tensors_of((args, kwargs))
    fake = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
    # Skipped blocks return fake tensors; masks and tables that are computed here are real.
    found = {id(tensor): tensor for tensor in fake or tensors}
    if len(found) != 1:
        raise ApplyError(
            f"block {index} is given {len(found)} tensors that earlier stages compute, and one can be sent.",
            fix="parallel: {kind: none}",
            code="MT395",
        )
    return next(iter(found.values()))


class _Piece:
    """Mixed into a block's class, around its hooks and the forwards that recompute and offload install."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, index = vars(self)[_PIECE]
        return run.called(index, args, kwargs, super().__call__)  # type: ignore[misc]


def become_pieces(
    context: Context, blocks: Sequence[str], run: Run, first: frozenset[str], before: Mapping[str, Tensor]
) -> None:
    """Make the blocks of the model follow `run`, and register the weights `first` that the code before them
    uses.

    Args:
        context: Context whose model is changed.
        blocks: All blocks, in the order in which they run.
        run: Decides how blocks run.
        first: Plain names.
        before: The original weights, before any was replaced.
    """
    for index, name in enumerate(blocks):
        block = context.model.get_submodule(name)
        vars(block)[_PIECE] = run, index
        # A subclass per block: `isinstance` and `super()` of the user's class keep working.
        block.__class__ = type(type(block).__name__, (_Piece, type(block)), {})
    handle = context.model.register_forward_pre_hook(run.require_step_before)
    context.undo.callback(handle.remove)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    wanted = {id(context.model.get_parameter(name)): before[name] for name in first}
    inside = tuple(f"{name}." for name in blocks)
    for path, module in context.model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in wanted and not f"{path}.".startswith(inside):
                run.replace_by_fake(module, name, wanted[id(parameter)], context.device, mode)


class StageModule(nn.Module):
    """The module that torch's schedule calls for a stage: the user's loss function, without the blocks of
    other stages.

    Args:
        run: Decides how blocks run.
        first: Index of its first block.
        last: Index of its last block.
        index: The stage.
        count: Number of stages.
        frees_batch: No other stage of this rank needs a micro-batch after this one's forward.
    """

    def __init__(self, run: Run, first: int, last: int, index: int, count: int, frees_batch: bool) -> None:
        super().__init__()
        self._run, self._first, self._last = run, first, last
        self._index, self._is_last, self._frees_batch = index, index == count - 1, frees_batch
        self._now: tuple[nn.Module, LossFunction, list[Any], list[int]] | None = None

    def begin(
        self, model: nn.Module, loss_function: LossFunction, batches: list[Any], seeds: list[int]
    ) -> None:
        """Begin a step; `batches` are shared by the stages of a rank."""
        self._now = model, loss_function, batches, seeds

    def end(self) -> None:
        """End the step."""
        self._now = None

    def forward(self, given: Tensor | None, micro_batch: int) -> Tensor:
        """Return the stage's output of a micro-batch, or its share of the mean loss."""
        assert self._now is not None
        model, loss_function, batches, seeds = self._now
        # Each stage has a seed of its own per micro-batch, whatever ran before on this rank.
        # With the schedule alone, the numbers would depend on the order in which a rank runs its stages.
        seed_generators(seeds[micro_batch] + self._index)
        output = self._run.output_of(
            self._first, self._last, given, lambda: loss_function(model, batches[micro_batch])
        )
        if self._frees_batch:
            # Inputs of micro-batches that have run forward are dropped one by one, as the pass predicts.
            batches[micro_batch] = None
        return output / len(batches) if self._is_last and len(batches) > 1 else output


class Stage(PipelineStage):
    """torch's stage, with buffers allocated when a receive is posted and freed after their use.

    Args:
        submodule: The stage's module.
        stage_index: Index of the stage.
        num_stages: Number of stages.
        device: Device on which it computes.
        input_args: A tensor like its input.
        output_args: A tensor like its output.
        group: The ranks of the pipeline.
        count: Called with the bytes of each message that is sent.
        slots: Notified when a forward or backward begins and ends; None if activations follow no slots.
    """

    def __init__(
        self,
        submodule: StageModule,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: Tensor,
        output_args: Tensor,
        *,
        group: dist.ProcessGroup,
        count: Callable[[int], None],
        slots: Slots | None = None,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, input_args, output_args, group=group)
        self._like, self._count, self._members, self._slots = input_args, count, group, slots
        self.before_backward: Callable[[bool], None] | None = None
        self._posted: set[int] = set()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return receives of the micro-batch's input, into new memory."""
        if not self.is_first:
            self._room(self.args_recv_info, fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return receives of the gradient of the stage's output, into new memory."""
        if not self.is_last:
            self._room(self.grad_recv_info, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return sends of the stage's output."""
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return sends of the gradient of the stage's input."""
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run forward of a micro-batch; only its backward holds the received input."""
        del args, kwargs  # nothing is handed in: stages look up their micro-batch
        given = None if self.is_first else self._retrieve_recv_activations(fwd_chunk_id)[0]
        with self._slot(fwd_chunk_id, backward=False):
            output = self.submod(given, fwd_chunk_id)
        # The tuple that torch's `backward_one_chunk` reads.
        self.fwd_cache[fwd_chunk_id] = (output,), [] if given is None else [given]
        self._free_buffer(self.args_recv_info, fwd_chunk_id)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run backward of a micro-batch."""
        if self.before_backward is not None:
            self.before_backward(bwd_chunk_id + 1 == self.chunks)
        with self._slot(bwd_chunk_id, backward=True):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_last:
            self._free_buffer(self.grad_recv_info, bwd_chunk_id)

    @contextmanager
    def _slot(self, chunk: int, *, backward: bool) -> Iterator[None]:
        if self._slots is None:
            yield
            return
        self._slots.begins(StageAction(self.stage_index, chunk, backward))
        yield
        self._slots.ends()

    def _room(self, infos: Mapping[int, Sequence[Any]], chunk: int) -> None:
        for index, (info,) in infos.items():  # at first torch has allocated the buffers of all micro-batches
            if info.buffer is not None and index not in self._posted:
                # Keeps one input and one output gradient per micro-batch in flight, not of all micro-batches
                # of the step.
                info.buffer = None
        self._posted.add(chunk)
        infos[chunk][0].buffer = torch.empty(self._like.shape, dtype=self._like.dtype, device=self.device)

    def _free_buffer(self, infos: Mapping[int, Sequence[Any]], chunk: int) -> None:
        if chunk in infos and infos[chunk] and not infos[chunk][0].is_root_arg:
            infos[chunk][0].buffer = None
            self._posted.discard(chunk)

    def _counted(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        for send in sends:
            self._count(send.tensor.nbytes)
            count_collective(self._members, send.tensor.nbytes)
        return sends
