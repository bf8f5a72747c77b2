"""A parameter of a block: one object owns where its values are, and which memory the user's parameter shows.

The user's parameter remains one Python object. Between uses its memory is the host's (or the mapping of a
file on SSD), which has the true values; from load to free it is the device's. State dicts, loads, writes
through `data`, copies, pickles and averages of weights therefore see a plain parameter. FSDP2 registers the
sharded parameter between uses for the same reason; here `data` is exchanged, not the object, so that
references of the user, hooks and the graph's accumulators remain valid.

    on the device: is_resident             parameter is device; `host` has the values of the load
        | free                ^ restore, after the H2D copy
        v                     |
    on the host, on SSD                    parameter is host; the device's memory may be freed
        | expect_values       ^ settle: at the first access, or when the values are loaded
        v                     |
    in flight                              parameter is host, which an update writes; an access waits for it

A write by the user counts in the parameter's version in all states, so autograd finds one between forward and
backward. A parameter that is written, or whose `data` is assigned, on the device is copied to the host when
it is freed; one whose `data` is assigned between uses is copied to the host before its next use (`adopt`).

An exchange between types of devices gives a parameter a new gradient accumulator, which DDP's reducer would
not know. Where DDP averages its gradient, a parameter keeps the device's memory, and functions that are
called with it while that is freed get the host's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from memtune.offload.core.fsdp_shards import GatheredBlocks
from memtune.offload.core.optimizer_param import changed_type_error, to_host_now
from memtune.offload.core.parameter_layout import Chunks
from memtune.runtime import (
    HOST,
    SSD,
    Context,
    ShowsGrad,
    class_of,
    host_like,
    is_data_used,
    local,
    mark,
    memory_of,
    plain_type,
    tier_of,
    transfer,
    version_of_data,
)

_is_alias_of: Final[Callable[[Tensor, Tensor], bool]] = torch._C._is_alias_of  # type: ignore[attr-defined]
_DATA: Final[Any] = torch._C.TensorBase.data
set_data: Final[Callable[[nn.Parameter, Tensor], None]] = _DATA.__set__
"""Exchange the memory of a parameter, as `parameter.data = memory` does.

torch's own: that of a tracked parameter (`runtime.shown_grad`) counts assignments.
"""


def _with_storage_offset(memory: Tensor) -> tuple[Tensor, int]:
    """Return `memory` with its place in its storage, which costs a call to ask for."""
    return memory, int(memory.storage_offset())


class OffloadedParameter:
    """The memory of one parameter, of a rank's rows if FSDP2 shards it, on the device and between uses.

    Args:
        parameter: Of the model; on the device, or at rest (`at_rest`).
        host: Its values between uses, of the same shape and dtype.
        device: Given for a parameter at rest: its memory on the device, freed.
        keeps: The parameter shows the device's memory at all times.
    """

    __slots__ = (
        *("_class", "_device_at", "_host_at", "_is_shard", "_keeps", "_writes"),
        *("device", "host", "is_resident", "parameter"),
    )

    def __init__(
        self, parameter: nn.Parameter, host: Tensor, device: Tensor | None = None, *, keeps: bool = False
    ) -> None:
        self.parameter, self.host, self._keeps, self.is_resident = parameter, host, keeps, device is None
        self._is_shard = isinstance(parameter, DTensor)
        if device is None:
            # A detached alias shares the version counter, and keeps the storage that saved views refer to.
            device = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
        else:
            self._show(host)
        self.device: Tensor = device
        self._device_at, self._host_at = _with_storage_offset(self.device), _with_storage_offset(host)
        self._class: type | None = None  # the parameter's own class while its values are in flight
        self._writes = self._count_writes()

    def _count_writes(self) -> int:
        version = self.parameter._version
        return version + sum(version_of_data(self.parameter)) if is_data_used() else version

    def _memory(self) -> Any:
        """Return the tensor that has the parameter's memory."""
        return self.parameter._local_tensor if self._is_shard else self.parameter  # type: ignore[attr-defined]

    def _show(self, memory: Tensor) -> None:
        if self._is_shard:
            self.parameter._local_tensor = memory  # type: ignore[attr-defined]
        else:
            set_data(self.parameter, memory)

    # -- states ----------------------------------------------------------------------------------------------

    def free(self) -> None:
        """Show the host's memory, which gets what the user has written on the device since the load."""
        _show_hosts((self,))

    def restore(self) -> None:
        """Show the device's memory, which has the host's values now."""
        restore_together((self,))

    def adopt(self) -> bool:
        """Copy what the user has assigned to `data` to the memory of this state.

        Returns:
            Whether the user has written the values since the last call or load, in this or another way.

        Raises:
            ApplyError: The assigned tensor has another shape or dtype.
        """
        if self._class is not None:  # an access would have settled it
            return False
        memory, at = self._device_at if self.is_resident else self._host_at
        shown = self._memory() if self._is_shard else self.parameter
        # By storage: `data_ptr()` is 0 for all that is freed, and fake tensors have none.
        is_assigned = not _is_alias_of(shown, memory) or shown.storage_offset() != at
        if is_assigned:
            self._copy_to(memory)
            self._show(memory)
        # Counted after the copy, whose own write must not look like the user's next time.
        before, self._writes = self._writes, self._count_writes()
        return is_assigned or before != self._writes

    def move_host(self, host: Tensor) -> None:
        """Have `host` as the memory between uses from here on, which has the values."""
        self.host, self._host_at = host, _with_storage_offset(host)
        if not self.is_resident:
            self._show(host)

    @torch.no_grad()
    def _copy_to(self, memory: Tensor) -> None:
        values = self._memory().detach()
        if values.shape != memory.shape or values.dtype is not memory.dtype:
            raise changed_type_error(values, memory.dtype, memory.shape)
        memory.copy_(values)

    # -- values in flight ------------------------------------------------------------------------------------

    def expect_values(self, finish: Callable[[], None]) -> None:
        """Have each access to the parameter call `finish` first, until `settle`; it is not on the device."""
        if self._class is None and not self.is_resident:
            shown = self.parameter
            in_flight = _IN_FLIGHT[plain_type(shown)]
            vars(shown).update(_finish=finish, _host=self.host if self._keeps else None)
            # Last, so that an error in between leaves nothing to settle. A class, since attributes of a
            # tensor cannot be intercepted on the object; `settle` gives the own one back.
            self._class, shown.__class__ = type(shown), in_flight

    def settle(self) -> None:
        """End the wait: the host has the values."""
        if self._class is not None:
            del vars(self.parameter)["_finish"], vars(self.parameter)["_host"]
            # A gradient may be shown since, or no longer.
            self.parameter.__class__, self._class = class_of(self.parameter, self._class), None


class _InFlight(ShowsGrad):
    """A parameter whose values are in flight: access to them calls `_finish`, which settles it.

    With `_host`, functions that autograd does not record are called with that tensor instead.
    """

    _finish: Callable[[], None]
    _host: Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, attribute = _called(func)
        if name not in _METADATA and (not attribute or attribute in _VIEWS):
            # The graph must refer to the parameter itself, or its gradient would go to the host's tensor.
            is_recorded = torch.is_grad_enabled() and not ({name, attribute} & _UNRECORDED)
            args, kwargs = tree_map_only(_InFlight, lambda each: each._source(is_recorded), (args, kwargs))
            if attribute == "data":  # the class's own, which may count writes (`runtime.shown_grad`)
                return _DATA_OF[name](*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _source(self, is_recorded: bool) -> Tensor:
        """Return the tensor that has the values: the parameter, or its host memory."""
        if self._host is not None and not is_recorded:
            return self._host
        self._finish()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._alone(), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self._alone().__reduce_ex__(protocol)

    def _alone(self) -> Any:
        values = self._source(False)
        return self if values is self else nn.Parameter(values, self.requires_grad)


class _ParameterInFlight(_InFlight, nn.Parameter):
    """A full parameter."""


class _ShardInFlight(_InFlight, DTensor):
    """A parameter that FSDP2 shards; its methods that read rows pass no `__torch_function__`."""

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        self._finish()
        return self.to_local(grad_placements=grad_placements)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        self._finish()
        return self.redistribute(*args, **kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        self._finish()
        return self.full_tensor(**kwargs)


_IN_FLIGHT: Final[dict[type, type]] = {nn.Parameter: _ParameterInFlight, DTensor: _ShardInFlight}
_VIEWS: Final = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})
_UNRECORDED: Final = frozenset({"data", "detach"})


def _assign(of: Tensor, value: Tensor) -> None:
    if isinstance(of, nn.Parameter):
        of.data = value
    else:
        of.copy_(value)  # the host's memory, which others share


_DATA_OF: Final[dict[str, Callable[..., Any]]] = {"__get__": lambda of, *_: of.data, "__set__": _assign}
_METADATA: Final = frozenset(
    {"size", "stride", "dim", "numel", "element_size", "storage_offset", "__len__", "__hash__"}
    | {"is_contiguous", "is_floating_point", "is_complex", "get_device", "untyped_storage"}
    | {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
)
"""Functions that read no values."""


def _called(func: Any) -> tuple[str, str]:
    """Return the name of `func`, and of the attribute that it gets or sets."""
    name, owner = func.__name__, getattr(func, "__self__", None)
    # Attributes are descriptors: torch passes `Tensor.grad.__get__`, whose owner names the attribute.
    if name not in ("__get__", "__set__", "__delete__"):
        return name, ""
    getter = getattr(owner, "fget", None)
    return name, str(getattr(owner, "__name__", None) or getattr(getter, "__name__", ""))


# -- memory in pieces that are freed, allocated and copied as one: weights and chunks ------------------------

# Memory is freed and allocated in place, so views of its storage, among them autograd's saved ones, remain
# views of the same memory.


class Piece(NamedTuple):
    """Device memory and the host copy of its contents, offloaded and loaded together."""

    memory: Tensor
    host: Tensor
    in_frame: bool = False
    """The memory is permanent and serves other pieces as well; otherwise it is freed and allocated again."""
    padded_bytes: int = 0
    """Bytes of the memory, where they exceed those copied."""
    of: tuple[OffloadedParameter, ...] = ()
    """The parameters whose memory, or whose rows' memory, this is."""


def allocate_together(pieces: Iterable[Piece]) -> None:
    """Allocate the memory of all `pieces`; their parameters show it once they are restored."""
    for piece in pieces:
        if not piece.in_frame:
            piece.memory.untyped_storage().resize_(piece.padded_bytes or piece.host.nbytes)


def free_together(pieces: Iterable[Piece]) -> None:
    """Free all of `pieces`, whose parameters are on the host from here on."""
    freed = [piece for piece in pieces if not piece.in_frame]
    _show_hosts([each for piece in freed for each in piece.of])
    for piece in freed:
        piece.memory.untyped_storage().resize_(0)


# These run for every parameter at each load and at each release: one loop instead of a call for each state.
def adopt_together(parameters: Iterable[OffloadedParameter]) -> list[OffloadedParameter]:
    """Call `adopt` of each of `parameters`; return those that the user has written."""
    written, is_tracked = [], is_data_used()
    for each in parameters:
        if each._class is not None:  # an access would have settled it
            continue
        shown: Any = each.parameter
        if not is_tracked and not each._is_shard and shown._version == each._writes:
            memory, at = each._device_at if each.is_resident else each._host_at
            if _is_alias_of(shown, memory) and shown.storage_offset() == at:
                continue
        if each.adopt():
            written.append(each)
    return written


def restore_together(parameters: Iterable[OffloadedParameter]) -> None:
    """Have `parameters` show the device's memory, which has the host's values now."""
    is_tracked = is_data_used()
    for each in parameters:
        if each._class is not None:
            each.settle()
        if not each.is_resident:
            if each._keeps:
                pass
            elif each._is_shard:
                each._show(each.device)
            else:
                set_data(each.parameter, each.device)
            each.is_resident = True
            each._writes = each._count_writes() if is_tracked else each.parameter._version


def _show_hosts(parameters: Sequence[OffloadedParameter]) -> None:
    resident = [each for each in parameters if each.is_resident]
    for each in adopt_together(resident):
        each._copy_to(each.host)
    for each in resident:
        each.is_resident = False
        if each._keeps:
            continue
        if each._is_shard:
            each._show(each.host)
        else:
            set_data(each.parameter, each.host)


def in_chunks(
    context: Context,
    parameters: Sequence[nn.Parameter],
    hosts: dict[nn.Parameter, Tensor],
    chunks: Chunks,
    gathered: GatheredBlocks | None = None,
) -> list[Piece]:
    """Move `parameters` and their host copies into chunks; both stay the same Python objects.

    Args:
        context: `undo` gets the reverse.
        parameters: In the order of `chunks`.
        hosts: Their host copies; those of parameters that are not trained are replaced.
        chunks: Place of each one.
        gathered: Given where FSDP2 shards the parameters; their rows are moved then.
    """
    at_rest = context.placement.at_rest.intersection(parameters)
    own = {} if gathered is not None else {p: p.detach() for p in parameters if p not in at_rest}
    context.undo.callback(lambda: [put_back(each, there, each.detach()) for each, there in own.items()])
    pieces = []
    for chunk in range(chunks.count):
        members = [
            (p, at) for p, of, at in zip(parameters, chunks.chunk, chunks.offset, strict=True) if of == chunk
        ]
        memory = torch.zeros(chunks.chunk_bytes, dtype=torch.uint8, device=context.device)
        for parameter, at in members:
            values = parameter.detach() if gathered is None else gathered.rows_of(parameter)
            place = place_in(memory, values, at)
            # Values first, then the views move: a failure in between leaves the parameter as it was.
            place.copy_(values)
            if gathered is not None:
                gathered.put_rows(parameter, place)
            else:
                set_data(parameter, place)
                if parameter in own:
                    own[parameter].untyped_storage().resize_(0)
        # One host buffer per chunk, so that one copy loads it; the optimizer's parameters become views of it.
        host = to_host_now(memory)
        mark(host, HOST)
        for parameter, at in members:
            hosts[parameter] = place_in(host, memory_of(parameter), at)
            if parameter in context.placement.optimizer_params:
                context.placement.optimizer_params[parameter].data = hosts[parameter]
        of = tuple(OffloadedParameter(parameter, hosts[parameter]) for parameter, _ in members)
        pieces.append(Piece(memory, host, of=of))
        if at_rest:  # the device holds one chunk at a time
            free_together(pieces[-1:])
    context.placement.at_rest -= at_rest
    return pieces


def place_in(memory: Tensor, like: Tensor, at: int) -> Tensor:
    """Return a view of `memory`, from byte `at` of its storage, with the shape and strides of `like`."""
    return (
        memory[at : at + like.nbytes]
        .view(like.dtype)
        .as_strided(like.size(), like.stride(), at // like.element_size())
    )


@torch.no_grad()
def put_back(parameter: nn.Parameter, own: Tensor, values: Tensor) -> None:
    """Give `parameter` its `own` storage again, whose memory may have been freed, with `values`."""
    # The storage, not another one: the user's code may hold views of it.
    own.untyped_storage().resize_(own.nbytes)
    with _unsafe_preserve_version_counter(own):  # it is the parameter's, and nothing changes
        own.copy_(values)
    set_data(parameter, own)


# -- parameters at rest, which `apply` has put on their tier already -----------------------------------------


def host_values(context: Context, parameter: nn.Parameter) -> Tensor:
    """Return host memory with the values of `parameter`: its own if it rests there, else a complete copy."""
    if parameter not in context.placement.at_rest:
        host = to_host_now(local(parameter))
    else:
        host = memory_of(parameter)
        if tier_of(host) == SSD:
            # In memory: a copy to the device from the file's mapping would read the drive each time.
            host = host_like(host, locked=transfer.pins(context.device)).copy_(host)
    mark(host, HOST)
    return host


def freed_memory(
    context: Context, parameter: nn.Parameter, gathered: GatheredBlocks | None = None
) -> Tensor | None:
    """Return freed device memory for a parameter at rest, which is at rest no more; None for other ones."""
    # Its owner is `OffloadedParameter` from here on.
    if parameter not in context.placement.at_rest:
        return None
    context.placement.at_rest.discard(parameter)
    if gathered is not None:
        return gathered.free_rows(parameter, context.device)
    memory = torch.empty_strided(
        parameter.size(), parameter.stride(), dtype=parameter.dtype, device=context.device
    )
    memory.untyped_storage().resize_(0)
    return memory
