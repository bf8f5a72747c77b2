"""Memory of the blocks' parameters: units that are loaded before use and freed after it.

`OffloadedBlocks` has the parameters and their host copies. `BlockUnits` loads and frees them: a unit is a
block, or a chunk. Other units implement the same methods (`offload.parameters.offloader.Units`): pages, and
the experts of a block.

- Memory is freed and allocated in place (`untyped_storage().resize_`), as FSDP2 does: saved tensors,
  recompute and offloaded activations keep working, because views keep their storage.
- Loads preserve version counters: a reload is no change that autograd should see.
- A unit whose deferred update still runs (STRONGHOLD) is prefetched in two parts: its memory is allocated at
  once, so that the peak does not depend on the speed of updates; its values are copied when the update has
  ended.

    freed --load--> resident --free--> freed
      '--allocate--> allocated, values missing --fill, when its update has ended--> resident
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor

from memtune.errors import ApplyError
from memtune.offload.core import (
    Chunks,
    GatheredBlocks,
    OffloadedParameter,
    Piece,
    adopt_together,
    allocate_together,
    free_together,
    freed_memory,
    host_values,
    in_chunks,
    is_gathered,
    restore_together,
    sharded_like,
    to_host_now,
)
from memtune.offload.optimizer import DeferredUpdates, HostOptimizer
from memtune.program import Units
from memtune.runtime import (
    HOST,
    Context,
    ReplacedForward,
    copy_to_device_together,
    groups,
    local,
    mark,
    tier_of,
    transfer,
)

if TYPE_CHECKING:
    from memtune.offload.parameters.ssd_values import SsdValues


class OffloadedBlocks:
    """The parameters of the blocks of `context` that are offloaded, and their host copies.

    Args:
        context: Its model.
        optimizer: Leaves copies of these parameters to the offloader; None: it copies none of them.
        members: Of each block, the offloaded parameters, which may be none; None: all.
        host_of: Returns the memory of a parameter's values between uses; None: on the host, that of the
            optimizer's own parameter if it has the same type, so that an update needs no further copy.

    Raises:
        ApplyError: A block's parameter is used outside of it.
    """

    def __init__(
        self,
        context: Context,
        optimizer: HostOptimizer | None,
        members: list[list[nn.Parameter]] | None = None,
        host_of: Callable[[nn.Parameter], Tensor] | None = None,
    ) -> None:
        held = context.placement.optimizer_params
        self.modules = [context.model.get_submodule(name) for name in context.blocks]
        # Under FSDP2 a block's parameters are this rank's rows; the all-gather, not the module, reads them
        # first.
        self.gathered = GatheredBlocks(context) if is_gathered(context.model) else None
        _refuse_schedules(context.model)
        self.are_all = members is None
        self.of_block = [list(block.parameters()) for block in self.modules] if members is None else members
        self.parameters = [parameter for block in self.of_block for parameter in block]
        self.outside = _outside(context.model, self.parameters)
        """Trained parameters that are not offloaded."""
        # Noted now: `piece_of` takes them out of `at_rest`, and `undo` must know where they were.
        self.were_at_rest = not context.placement.at_rest.isdisjoint(self.parameters)
        self.hosts = {p: (host_of or partial(_host_of, context))(p) for p in self.parameters}
        self.trained = {p: held[p] for p in self.parameters if p in held}
        """By parameter, that of the optimizer."""
        if optimizer is not None:
            optimizer.leave_to_offloader(self.parameters)
        for module in self.modules if self.gathered is not None else ():
            for each in module.modules():
                # A lambda: torch sets an attribute on the hook, which a bound method does not accept.
                each.register_state_dict_post_hook(lambda *args: self._into_state_dict(*args))

    def __len__(self) -> int:
        return len(self.modules)

    def load_before_gathers(self, load: Callable[[int], None], memory: Callable[[int], list[Tensor]]) -> None:
        """Have FSDP2, if it shards the blocks, `load` a block's rows before the all-gather reads them."""
        # The `memory` of those rows is freed and allocated again.
        if self.gathered is not None:
            for block in range(len(self)):
                self.gathered.before_gathers(block, partial(load, block), partial(memory, block))

    def _into_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put rows into a state dict as FSDP2 shows them, on the mesh's device."""
        for name, parameter in module.named_parameters(recurse=False):
            if prefix + name in state and parameter in self.hosts:
                state[prefix + name] = sharded_like(parameter, self.hosts[parameter])


def _host_of(context: Context, parameter: nn.Parameter) -> Tensor:
    # An update of the optimizer's own copy then is the new weight, without a second copy on the host.
    held = context.placement.optimizer_params.get(parameter)
    if held is not None and tier_of(held) == HOST and held.dtype is parameter.dtype:
        return held.detach()
    return host_values(context, parameter)


def piece_of(
    context: Context, blocks: OffloadedBlocks, parameter: nn.Parameter, *, keeps: bool = False
) -> Piece:
    """Return the memory of a parameter in no chunk; `keeps`: it shows the device's memory at all times."""
    freed = freed_memory(context, parameter, blocks.gathered)
    each = OffloadedParameter(parameter, blocks.hosts[parameter], freed, keeps=keeps)
    padded = 0 if blocks.gathered is None else blocks.gathered.rows_of(parameter).nbytes
    return Piece(each.device, each.host, padded_bytes=padded, of=(each,))


def bytes_of(pieces: Iterable[Piece]) -> int:
    """Return the bytes that `pieces` have on the device."""
    return sum(piece.memory.untyped_storage().nbytes() for piece in pieces)


class Prefetched:
    """Units in copies on the copy stream of `device`, for which the compute stream has not waited since."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._units = device, set[int]()

    def loading(self, units: Iterable[int]) -> AbstractContextManager[Any]:
        """Return a context in which `units` are loaded on the copy stream."""
        self._units.update(units)
        return transfer.prefetching(self._device)

    def wait(self) -> None:
        """Have the compute stream wait for all of them."""
        transfer.wait_prefetched(self._device)
        self._units.clear()

    def wait_for(self, units: Iterable[int], resident: Collection[int]) -> None:
        """Make compute, which is about to use `units`, wait if it must: blocks are called in any order."""
        # A missing unit waits as well: its frame may be the target of a copy in flight.
        if self._units and any(each in self._units or each not in resident for each in units):
            self.wait()


class BlockUnits:
    """Units of the parameters `blocks`; at first all are resident, or at rest.

    Args:
        context: `undo` loads all units.
        blocks: The parameters.
        chunks: Layout of the parameters; none: each block is a unit.
        copy: Copies a parameter's values from the host.
        keeps: Parameters show the device's memory at all times.
        values: Where the values are between uses; None: in host memory.
        tiled: Parameters that are loaded in tiles, and so have no memory on the device.

    Attributes:
        prefetched: Units in copies.
        moment: The moment of the step that runs, or that ran last.
        deferred: Updates of blocks that may still run when these are loaded.
        unfilled: By unit: pieces that are allocated and have no values yet.
        before_load: Called with a block that is about to be used.
        on_free: Called with a unit that is about to be freed.
    """

    def __init__(
        self,
        context: Context,
        blocks: OffloadedBlocks,
        chunks: Chunks | None = None,
        *,
        copy: Callable[[Tensor, Tensor], None] | None = None,
        keeps: bool = False,
        values: SsdValues | None = None,
        tiled: Iterable[nn.Parameter] = (),
    ) -> None:
        self._copy, self._keeps, self._values, self._tiled = copy, keeps, values, set(map(id, tiled))
        self._blocks, self.prefetched, self.moment = blocks, Prefetched(context.device), -1
        if chunks is None:
            self.pieces = [
                [piece_of(context, blocks, p, keeps=keeps) for p in its] for its in blocks.of_block
            ]
            self.of_block: Sequence[Units] = [(index,) for index in range(len(blocks))]
        else:
            found = in_chunks(context, blocks.parameters, blocks.hosts, chunks, blocks.gathered)
            self.pieces, self.of_block = [[piece] for piece in found], chunks.of_block
        self.resident = set(range(len(self.pieces)))
        self.deferred = DeferredUpdates({})
        self.before_load: Callable[[int], None] | None = None
        self.on_free: Callable[[int], None] | None = None
        self.unfilled: dict[int, list[Piece]] = {}
        self.loaded_bytes = 0
        context.undo.callback(self._load_all)
        blocks.load_before_gathers(self.load_block, self._memory)

    def _memory(self, block: int) -> list[Tensor]:
        return [piece.memory for unit in self.of_block[block] for piece in self.pieces[unit]]

    def _owners(self, units: Iterable[int]) -> list[OffloadedParameter]:
        return [each for unit in units for piece in self.pieces[unit] for each in piece.of]

    @property
    def owners(self) -> list[OffloadedParameter]:
        """The owners of all parameters."""
        return self._owners(range(len(self.pieces)))

    # -- load ------------------------------------------------------------------------------------------------

    def load_block(self, block: int) -> None:
        """Make the units of `block` resident for the compute stream, after the updates of these."""
        if self.before_load is not None:
            self.before_load(block)
        units = self.of_block[block]
        self.prefetched.wait_for(units, self.resident)
        for unit in units:
            self._load(unit)

    def _load(self, unit: int) -> None:
        if unit in self.unfilled:
            self.fill(unit)
        elif unit not in self.resident:
            self.deferred.finish(unit)
            self.resident.add(unit)
            self._load_pieces(self.pieces[unit])

    @torch.no_grad()
    def _load_pieces(self, pieces: Iterable[Piece]) -> None:
        every = list(pieces)
        if self._values is not None:
            # Tiled weights too: they are read with their block, although their tiles are loaded one by one.
            self._values.start_read(every)
        if self._tiled:
            every = [each for each in every if id(each.of[0].parameter) not in self._tiled]
        copy_together(every, self._copy if self._values is None else self._values.copy)
        self.loaded_bytes += sum([piece.host.nbytes for piece in every])

    def prefetch(self, units: Iterable[int]) -> None:
        """Load `units`; only allocate those whose updates still run."""
        if self.unfilled:
            self.fill_finished()
        for unit in units:
            if unit in self.resident or self.deferred.is_done(unit):
                self._load(unit)
            else:  # waiting here would stall the compute of the current block
                self.allocate(unit)

    def allocate(self, unit: int) -> None:
        """Allocate `unit` if it is not resident; `fill` loads its values."""
        if unit not in self.resident:
            # Resident though without values: no later load may allocate it again.
            self.resident.add(unit)
            self.unfilled[unit] = list(self.pieces[unit])
            allocate_together(self.unfilled[unit])

    def fill_finished(self) -> None:
        """Load the values of allocated units whose updates have ended, without waiting."""
        for unit in [each for each in self.unfilled if self.deferred.is_done(each)]:
            self.fill(unit)

    def fill(self, unit: int, pieces: int | None = None) -> None:
        """Load missing values of the first `pieces` pieces of `unit`, or of all; wait for its update."""
        # Values first exist on the host when the update has ended.
        self.deferred.finish(unit)
        unfilled = self.unfilled[unit]
        count = len(unfilled) if pieces is None else pieces
        self._load_pieces(unfilled[:count])
        del unfilled[:count]
        if not unfilled:
            del self.unfilled[unit]

    # -- free ------------------------------------------------------------------------------------------------

    def free(self, units: Iterable[int]) -> None:
        """Free those of `units` that are resident, with values or without."""
        gone = [each for each in units if each in self.resident]
        offloaded = [] if self._values is None else self._owners(gone)
        if self._values is not None:
            self._values.free(offloaded)
        for unit in gone:
            self.resident.discard(unit)
            self.unfilled.pop(unit, None)
            if self.on_free is not None:
                self.on_free(unit)
            free_together(self.pieces[unit])
            for each in self.pieces[unit] if self._keeps else ():
                # It still shows the device's memory, which is empty now: the first access loads the unit
                # again.
                each.of[0].expect_values(partial(self._load, unit))
        if self._values is not None:
            self._values.freed(offloaded, self)

    def step_begins(self) -> None:
        """Free all units, and take what the user has written, before the optimizer changes the weights."""
        if self._values is not None:
            # Reads in flight would bring values from before this update.
            self._values.drop()
        # A unit that is still resident would be used as it was.
        self.free(self.resident)
        if self._values is None:
            adopt_together(self.owners)
        else:
            self._values.adopt()

    def read_ahead(self) -> None:
        """Start reading values that later moments load, when the loads of `moment` have started."""
        if self._values is not None:
            self._values.read_ahead(self)

    def _load_all(self) -> None:
        """Make all units resident when the config is undone, unless the parameters were at rest before."""
        # Without the tiled forward their layers need whole weights on the device.
        self._tiled.clear()
        if self._blocks.were_at_rest:
            for each in self.owners:
                each.settle()
            return
        for index, pieces in enumerate(self.pieces):
            # Memory, not `resident`, decides: `apply` may have raised between the two.
            if any(piece.memory.untyped_storage().nbytes() == 0 for piece in pieces):
                self.resident.discard(index)
            self._load(index)

    def resident_bytes(self) -> int:
        """Return the bytes of weights on the device."""
        return bytes_of(piece for unit in self.pieces for piece in unit)


def copy_together(pieces: Iterable[Piece], copy: Callable[[Tensor, Tensor], None] | None = None) -> None:
    """Allocate `pieces` and copy their values to them; their parameters show them from here on.

    Args:
        pieces: Assignments of the user to their parameters are copied to the host before.
        copy: Copies a piece's values; None: all are copied together.
    """
    every = list(pieces)
    adopt_together([each for piece in every for each in piece.of])
    hosts = [piece.host for piece in every]
    for part in groups(hosts):
        offloaded = every[part]
        allocate_together(offloaded)
        memories = [piece.memory for piece in offloaded]
        # A counted write would make backward raise for the saved weight, whose values have not changed.
        with _unsafe_preserve_version_counter(tuple(memories)):
            if copy is None:
                copy_to_device_together(memories, hosts[part])
            else:
                for memory, host in zip(memories, hosts[part], strict=True):
                    copy(memory.detach(), host)
    restore_together([each for piece in every for each in piece.of])


def _refuse_schedules(model: nn.Module) -> None:
    """Refuse a model whose forward a schedule replaces: module hooks of its blocks would never run."""
    owner = getattr(vars(model).get("forward"), "__self__", None)
    if isinstance(owner, ReplacedForward):
        raise ApplyError(
            "A schedule replaces the model's code, so blocks are not called and cannot be loaded before use.",
            fix="recompute: {kind: full}",
            code="MT364",
        )


def _outside(model: nn.Module, offloaded: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return the trained parameters outside of the blocks.

    Raises:
        ApplyError: A block's parameter is used outside of it as well, or is a part of a larger tensor.
    """
    # `parameters()` reports a shared parameter once, so owners are counted module by module.
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    inside = {id(parameter) for parameter in offloaded}
    if len(inside) != len(offloaded) or any(owners[id(parameter)] > 1 for parameter in offloaded):
        raise ApplyError(
            "A parameter of a block is shared with another module, so it cannot be offloaded with its block.",
            fix="offload: {states: {kind: optimizer_cpu}}",
            code="MT364",
        )
    # The storage is freed as a whole; a shard's is FSDP2's own.
    parts = {
        id(p) for p in offloaded if not isinstance(p, DTensor) and p.untyped_storage().nbytes() != p.nbytes
    }
    if parts:
        name = next(name for name, each in model.named_parameters() if id(each) in parts)
        raise ApplyError(
            f"{name} shares its storage with another tensor, so it cannot be offloaded.",
            fix="offload: {states: {kind: optimizer_cpu}}",
            code="MT364",
        )
    return [p for p in model.parameters() if p.requires_grad and id(p) not in inside]


def host_copy(parameter: nn.Parameter) -> Tensor:
    """Return a copy of `parameter` in host memory."""
    host = to_host_now(local(parameter))
    mark(host, HOST)
    return host
