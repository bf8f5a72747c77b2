"""Blocks divided by FSDP2 whose rows come and go: what a rank holds of them, and their gathers, for `runtime.host_parameters`.

Four rules on top of those of `runtime.store`:

Rule 1. What comes and goes are this rank's rows, padded as FSDP2 pads them; whole parameters are FSDP2's to gather and free.
Rule 2. Rows are used where FSDP2 gathers them: in forward when their block begins, in backward while the block after it
        computes. A moment begins before FSDP2's own hooks run.
Rule 3. What is gathered and not there comes in then. What takes its place waits until it has been read.
Rule 4. FSDP2 calls what waits for gradients when it has reduced a block's, one parameter after the other: a rank's rows of each
        leave as whole gradients do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from memtune.chunks import aligned
from memtune.errors import ApplyError
from memtune.runtime.collectives import SeamAllGather
from memtune.runtime.context import Context
from memtune.runtime.tree import local

_FIX = "sharding: {states: {kind: fsdp}} with its defaults, communication: {kind: plain}"


def is_gathered(model: nn.Module) -> bool:
    """Whether FSDP2 gathers the parameters of `model`."""
    return isinstance(model, FSDPModule)


class GatheredBlocks:
    """The units of FSDP2 that the blocks of `context` are.

    Args:
        context: Whose model is divided.

    Raises:
        ApplyError: A block is no unit of its own that is gathered for each pass, by one plain message among all ranks.
    """

    def __init__(self, context: Context) -> None:
        model: Any = context.model
        self._units: list[Any] = [_unit(context, name) for name in context.blocks]
        self._of = {each.sharded_param: each for unit in self._units for each in unit.fsdp_params}
        self._reads: torch.cuda.Event | None = None
        model._get_fsdp_state()._lazy_init()  # looks at the rows, which must be there

    def rows_of(self, parameter: nn.Parameter) -> Tensor:
        """(numel,) this rank's rows, padded to what every rank has; the memory that they are in."""
        rows: Tensor = self._of[parameter]._sharded_param_data
        return rows

    def put_rows(self, parameter: nn.Parameter, rows: Tensor) -> None:
        """Have the parameter's rows in `rows`, (numel,) as in `rows_of`."""
        each = self._of[parameter]
        shape = local(parameter.detach()).shape
        each._sharded_param_data = rows
        each.sharded_param._local_tensor = rows[: shape.numel()].view(shape)

    def before_gathers(self, block: int, bring: Callable[[], None], pieces: Callable[[], list[Tensor]]) -> None:
        """Call `bring` before FSDP2 gathers the rows of `block` (Rule 3), whose memory `pieces` then names."""
        unit = self._units[block]
        gather = unit.unshard

        def unshard(async_op: bool = False) -> None:
            if unit._all_gather_result is None and not unit.is_unsharded:
                bring()
            streams = _streams(unit, async_op)
            for stream in streams:  # what comes in does so in the order of the stream that computes
                stream.wait_stream(torch.cuda.current_stream(unit.device))
            gather(async_op)
            if streams:  # the rows are read on the first one
                self._reads = streams[0].record_event()
            for stream in streams:  # given back, it must not be filled anew under the gather's feet
                for piece in pieces():
                    piece.record_stream(stream)

        unit.unshard = unshard

    def wait_for_reads(self) -> None:
        """The current stream goes on when the rows that were gathered last have been read: it may write where they are."""
        if self._reads is not None:
            torch.cuda.current_stream().wait_event(self._reads)


def _streams(unit: Any, async_op: bool) -> tuple[torch.cuda.Stream, ...]:
    if unit.device.type != "cuda":
        return ()
    return tuple(dict.fromkeys(unit.comm_ctx.get_all_gather_streams(async_op, unit._training_state)))


def _unit(context: Context, name: str) -> Any:
    module: Any = context.model.get_submodule(name)
    unit: Any = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
    why = ""
    if unit is None or len(unit.modules) > 1:
        why = "is no unit of its own"
    elif not unit._reshard_after_forward or unit.post_forward_mesh_info.shard_mesh_size != unit.mesh_info.shard_mesh_size:
        why = "stays gathered after forward, or a part of it"
    elif unit.mesh_info.shard_mesh_size != context.ranks:
        why = "is not divided over all ranks"
    elif module._get_fsdp_state()._states_to_backward_prefetch:
        why = "is gathered in an order of its own"
    elif type(unit._all_gather_comm) is not SeamAllGather:
        why = "is not gathered by one plain message"
    if why:
        raise ApplyError(f"{name} {why}, so its rows cannot come and go.", fix=_FIX, code="MT364")
    return unit


class _Counted(DTensor):
    """A gradient whose version tells of foreach kernels as well: those change DTensors without counting."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.endswith("_") and args and isinstance(args[0], list | tuple):
            for each in args[0]:
                if isinstance(each, cls):
                    torch.autograd.graph.increment_version(each)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def count_changes(gradient: Tensor) -> None:
    """Have the version of `gradient` tell of all changes in place: clipping by norm, a gradient scaler."""
    if type(gradient) is DTensor:
        gradient.__class__ = _Counted


def bytes_in_chunks(context: Context) -> tuple[int, ...]:
    """What each parameter of a block takes in a chunk, in the order of use: of divided ones a rank's padded rows."""
    blocks = [context.model.get_submodule(name) for name in context.blocks]
    if not is_gathered(context.model):
        return tuple(aligned(p.nbytes) for block in blocks for p in block.parameters())
    units = GatheredBlocks(context)
    return tuple(aligned(units.rows_of(p).nbytes) for block in blocks for p in block.parameters())


def divided_like(parameter: nn.Parameter, rows: Tensor) -> Tensor:
    """`rows`, of `parameter` on the host, as a checkpoint sees them: on its device where the ranks' messages need that."""
    if not isinstance(parameter, DTensor):
        return rows
    return DTensor.from_local(
        rows.to(parameter.device), parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
