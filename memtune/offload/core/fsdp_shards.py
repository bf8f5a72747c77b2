"""FSDP2's sharded blocks under offload: the rank's rows, and the all-gathers that read them.

Extends `offload.parameters.offloader` to blocks that FSDP2 shards:

- Only the rank's rows, padded as FSDP2 pads them, are offloaded and loaded; FSDP2 itself unshards and
  reshards whole parameters.
- Rows are read by FSDP2's all-gather: in forward when their block begins, in backward while the block after
  it computes. A moment begins before FSDP2's own hooks run.
- FSDP2 calls the grad-ready hooks once it has reduced a block's gradients, one parameter after the other; a
  rank's rows of each are offloaded as whole gradients are.

This file reads private attributes of `torch.distributed.fsdp` (torch 2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from memtune.device import accelerator, streams
from memtune.errors import ApplyError
from memtune.offload.core.parameter_layout import aligned
from memtune.runtime import Context, memory_of

_FIX = "sharding: {states: {kind: fsdp}} with its defaults, communication: {kind: plain}"


def is_gathered(model: nn.Module) -> bool:
    """Return whether FSDP2 all-gathers the parameters of `model`."""
    return isinstance(model, FSDPModule)


class GatheredBlocks:
    """The FSDP2 units of the blocks of `context`.

    Args:
        context: Its model is sharded by FSDP2.

    Raises:
        ApplyError: A block is not an FSDP2 unit of its own that one plain all-gather over all ranks unshards
            in each pass.
    """

    def __init__(self, context: Context) -> None:
        model: Any = context.model
        self._units: list[Any] = [_unit(context, name) for name in context.blocks]
        self._of = {each.sharded_param: each for unit in self._units for each in unit.fsdp_params}
        self._reads: torch.Event | None = None
        # Before any state dict: `Module.state_dict` detaches parameters, whose rows may be on the host by
        # then.
        _detach_offloaded_rows()
        # Now, while the parameters show their rows: it reads them.
        model._get_fsdp_state()._lazy_init()
        for each in self._of.values():
            # After a load FSDP2 would gather the rows that a parameter shows, which are on the host.
            each.reset_sharded_param = lambda: None
            context.undo.callback(vars(each).pop, "reset_sharded_param", None)

    def rows_of(self, parameter: nn.Parameter) -> Tensor:
        """Return the memory of this rank's rows, (numel,), padded to the same size on every rank."""
        rows: Tensor = self._of[parameter]._sharded_param_data
        return rows

    def put_rows(self, parameter: nn.Parameter, rows: Tensor) -> None:
        """Move the parameter's rows to the memory `rows`, (numel,) as in `rows_of`."""
        each = self._of[parameter]
        shape = memory_of(parameter).shape
        each._sharded_param_data = rows
        # The DTensor object remains, as the optimizer and the user's references need.
        each.sharded_param._local_tensor = rows[: shape.numel()].view(shape)

    def free_rows(self, parameter: nn.Parameter, device: torch.device) -> Tensor:
        """Move the parameter's rows from the host to freed memory on `device`; return the shard in it."""
        each = self._of[parameter]
        shape = memory_of(parameter).shape
        rows = torch.empty_like(each._sharded_param_data, device=device)
        shard = rows[: shape.numel()].view(shape)
        rows.untyped_storage().resize_(0)
        each._sharded_param_data = rows
        return shard

    def before_gathers(
        self, block: int, load: Callable[[], None], pieces: Callable[[], list[Tensor]]
    ) -> None:
        """Call `load` before FSDP2 gathers the rows of `block`; `pieces` then returns their memory."""
        # Rows that are not resident by then are loaded here, synchronously.
        unit = self._units[block]
        gather = unit.unshard

        def unshard(async_op: bool = False) -> None:
            if unit._all_gather_result is None and not unit.is_unsharded:
                # Only for a gather that really happens: FSDP2 asks for a unit that is in flight or unsharded
                # as well.
                load()
            readers = _readers(unit, async_op)
            # Rows are loaded on the compute stream, so the gather's streams wait for it.
            for stream in readers:
                streams.wait_current(stream, unit.device)
            gather(async_op)
            if readers:  # the first one copies the rows into the all-gather's input
                self._reads = streams.end_of(readers[0])
            # The allocator must not hand out freed rows again before the gather has read them.
            for stream in readers:
                for piece in pieces():
                    streams.used_on(piece, stream)

        unit.unshard = unshard

    def wait_for_reads(self) -> None:
        """Make the current stream wait for the last gather's reads, so that it may overwrite the rows."""
        if self._reads is not None:
            streams.wait(self._reads)


def _readers(unit: Any, async_op: bool) -> tuple[torch.Stream, ...]:
    """Return FSDP2's streams that read the unit's rows in an all-gather; none on CPU."""
    if not accelerator.has_streams(unit.device):
        return ()
    return tuple(dict.fromkeys(unit.comm_ctx.get_all_gather_streams(async_op, unit._training_state)))


def _unit(context: Context, name: str) -> Any:
    """Return FSDP2's parameter group of a block; raise if the block is not gathered and freed by itself."""
    module: Any = context.model.get_submodule(name)
    unit: Any = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
    why = ""
    if unit is None or len(unit.modules) > 1:
        why = "is not an FSDP2 unit of its own"
    elif (
        not unit._reshard_after_forward
        or unit.post_forward_mesh_info.shard_mesh_size != unit.mesh_info.shard_mesh_size
    ):
        why = "is not fully resharded after forward"
    elif unit.mesh_info.shard_mesh_size != context.placement.world_size:
        why = "is not divided over all ranks"
    elif module._get_fsdp_state()._states_to_backward_prefetch:
        why = "has a custom order of backward prefetch"
    elif not getattr(unit._all_gather_comm, "is_one_message", False):
        why = "is not gathered by one plain message"
    if why:
        raise ApplyError(f"{name} {why}, so its rows cannot be offloaded.", fix=_FIX, code="MT364")
    return unit


def bytes_in_chunks(context: Context) -> tuple[int, ...]:
    """Return the bytes in a chunk of each block parameter, or of a rank's padded rows, in order of use."""
    blocks = [context.model.get_submodule(name) for name in context.blocks]
    if not is_gathered(context.model):
        return tuple(aligned(p.nbytes) for block in blocks for p in block.parameters())
    units = GatheredBlocks(context)
    return tuple(aligned(units.rows_of(p).nbytes) for block in blocks for p in block.parameters())


def sharded_like(parameter: nn.Parameter, rows: Tensor) -> Tensor:
    """Return the host's `rows` of `parameter` as a DTensor on the mesh's device, for checkpoints."""
    if not isinstance(parameter, DTensor):
        return rows
    mine = rows.to(parameter.device)
    # torch cannot pickle a DTensor made of a tensor with an offset in its storage, as on a page.
    found = DTensor.from_local(
        mine.new_empty(()).expand(mine.shape) if mine.storage_offset() else mine,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    found._local_tensor = mine
    return found


_CLASS: Any = DTensor


def _detach_offloaded_rows() -> None:
    """Let `DTensor.detach` return rows that are on another device as they are; once per process."""
    # Torch makes the result on the device of the rows, and then fails to make it share the storage of the
    # DTensor, which is on another one. `Module.state_dict` detaches each parameter.
    own = _CLASS.detach
    if hasattr(own, "__wrapped__"):
        return

    @functools.wraps(own)
    def detach(self: DTensor) -> Tensor:
        rows = self._local_tensor
        found: Tensor = (
            own(self)
            if rows.device == self.device
            else _CLASS(rows.detach(), self._spec, requires_grad=False)
        )
        return found

    _CLASS.detach = detach
