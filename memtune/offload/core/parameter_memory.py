"""Memory of offloaded parameters: free it, restore it, and refuse access to a parameter while it is freed.

torch's kernels would read freed memory as noise or end the process. While a parameter's memory is freed, or
holds other values, its class is replaced by one whose `__torch_function__` answers metadata (shape, gradient,
hooks) and refuses all else with MT364. A resident parameter is a plain `nn.Parameter` and costs nothing. The
same holds for a rank's rows of a parameter that FSDP2 shards, and for aliases (`detach()`, `data`) of a freed
parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Final, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from memtune.errors import ApplyError
from memtune.offload.core.fsdp_shards import GatheredBlocks
from memtune.offload.core.optimizer_param import to_host_now
from memtune.offload.core.parameter_layout import Chunks
from memtune.runtime import HOST, Context, local, mark, untrack_data

_ALIASES: Final = frozenset({"data", "detach"})
_READ: Final = frozenset({"T", "H", "mT", "mH", "real", "imag"})
"""Attributes that are views of the same memory."""
_TEXTS: Final = frozenset({"__repr__", "__format__", "__str__"})
_HARMLESS: Final = frozenset(
    {
        "size",
        "stride",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "storage_offset",
        "untyped_storage",
        "__len__",
    }
    | {
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_pinned",
        "is_shared",
        "get_device",
        "data_ptr",
        "__hash__",
    }
    | {
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "grad",
        "backward",
        "_backward_hooks",
    }
    | {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
    | {"new_empty", "new_zeros", "new_ones", "new_full"}
)
"""Functions and methods that do not read values; `torch.autograd.grad` is one."""
_FIX: Final = (
    "Tuned.state_dict() or model.state_dict(), which have the values, and load_state_dict to change them"
)


class _Guarded(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, kind = _called(func)
        # `DisableTorchFunctionSubclass` in all branches: without it the call would dispatch to this method
        # again.
        if kind == "harmless":  # most calls, such as `parameter.grad`: no walk through the arguments
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        gone = [
            # The state is read at the call, not from the class alone: an alias outlives the moment in which
            # it was made.
            each
            for each in tree_leaves((args, kwargs))
            if isinstance(each, _Guarded) and _is_freed(each)
        ]
        with torch._C.DisableTorchFunctionSubclass():
            if gone and kind == "text":
                return _text(gone[0])
            if gone and kind == "values":
                _refuse(name, gone[0])
            found = func(*args, **kwargs)
            return _alias(found, gone[0]) if gone and kind == "alias" else found


class _Alias(_Guarded):
    """A `detach()` or `data` of a freed parameter, as in state dicts; refused while its owner is freed."""

    _owner: Tensor


class _FreedParameter(_Guarded, nn.Parameter):
    """A parameter whose memory is freed."""


class _GuardedShard(_Guarded, DTensor):
    """A freed DTensor; overrides the methods that read rows without `__torch_function__`."""

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        if _is_freed(self):
            rows: Tensor = _alias(self._local_tensor.detach(), self)
            return rows
        return super().to_local(grad_placements=grad_placements)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        if _is_freed(self):
            _refuse("redistribute", self)
        return super().redistribute(*args, **kwargs)

    def full_tensor(self, **kwargs: Any) -> Tensor:
        if _is_freed(self):
            _refuse("full_tensor", self)
        return super().full_tensor(**kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return _text(self) if _is_freed(self) else super().__repr__()  # type: ignore[no-untyped-call]


class _ShardAlias(_GuardedShard):
    """An alias of a freed parameter that FSDP2 shards."""

    _owner: Tensor


class _FreedShard(_GuardedShard):
    """A parameter that FSDP2 shards and whose rows are freed."""


_FREED_CLASS: Final[dict[type, type]] = {nn.Parameter: _FreedParameter, DTensor: _FreedShard}
_FULL: Final = frozenset({nn.Parameter, _FreedParameter})
_RESIDENT_CLASS: Final[dict[type, type]] = {freed: resident for resident, freed in _FREED_CLASS.items()}


def _alias(found: Any, of: Tensor) -> Any:
    found.__class__ = _ShardAlias if isinstance(found, DTensor) else _Alias
    found._owner = getattr(of, "_owner", of)
    return found


def _called(func: Any) -> tuple[str, str]:
    """Return the name of `func` and its kind: harmless, alias, text, or values if it reads them."""
    name, owner = str(getattr(func, "__name__", func)), getattr(func, "__self__", None)
    # Attributes are descriptors: torch passes `Tensor.grad.__get__`, whose owner names the attribute.
    if name in ("__get__", "__set__", "__delete__"):
        attribute = str(
            getattr(owner, "__name__", None) or getattr(getattr(owner, "fget", None), "__name__", "")
        )
        takes = attribute in _READ if name == "__get__" else attribute == "data"
        alias = name == "__get__" and attribute in _ALIASES
        return f"parameter.{attribute}", "values" if takes else "alias" if alias else "harmless"
    kind = (
        "alias"
        if name in _ALIASES
        else "text"
        if name in _TEXTS
        else "harmless"
        if name in _HARMLESS
        else "values"
    )
    return name, kind


def _is_freed(tensor: _Guarded) -> bool:
    return type(tensor._owner if isinstance(tensor, _Alias | _ShardAlias) else tensor) in _RESIDENT_CLASS


def _text(tensor: Tensor) -> str:
    return f"a weight of shape {tuple(tensor.shape)} that is not on the device now"


def _refuse(name: str, tensor: Tensor) -> None:
    raise ApplyError(
        f"A weight of shape {tuple(tensor.shape)} is on the host, and freed on the device between uses.",
        evidence=f"{name} would read freed memory.",
        fix=_FIX,
        code="MT364",
    )


def mark_freed(parameters: Iterable[nn.Parameter]) -> None:
    """Mark `parameters` as freed: reads and writes raise. Other classes and fake rows are unchanged."""
    for each in parameters:
        if type(each) is nn.Parameter:  # in every block of every step
            each.__class__ = _FreedParameter
            continue
        # `__class__` can hold one of the two subclasses: a freed weight refuses writes, so it needs no
        # counting of them.
        untrack_data(each)
        kind = type(each)
        if kind in _FREED_CLASS and not isinstance(getattr(each, "_local_tensor", None), FakeTensor):
            each.__class__ = _FREED_CLASS[kind]


def mark_resident(parameters: Iterable[nn.Parameter]) -> None:
    """Mark `parameters` as resident: they have memory, and their values are about to be copied there."""
    for each in parameters:
        resident = _RESIDENT_CLASS.get(type(each))
        if resident is not None:
            each.__class__ = resident


def require_own_memory(parameters: Iterable[nn.Parameter], memory: Tensor) -> None:
    """Check that `parameters` are still views of `memory`.

    `parameter.data = ...` would replace the memory by one that is never offloaded or loaded; it is found
    here.

    Raises:
        ApplyError: A parameter has other memory.
    """
    for each in parameters:
        # By storage: `data_ptr()` is 0 for every freed one.
        here = each if type(each) in _FULL else getattr(each, "_local_tensor", each)
        if torch._C._is_alias_of(here, memory):  # type: ignore[attr-defined]  # not in torch's stubs
            continue
        raise ApplyError(
            f"The memory of a weight of shape {tuple(each.shape)} was replaced, as  parameter.data = ... "
            " does.",
            evidence="It is offloaded and loaded in a storage that memtune manages.",
            fix="model.load_state_dict, of the whole model or a part, or Tuned.load_state_dict",
            code="MT364",
        )


def unguarded() -> AbstractContextManager[None]:
    """Return a context for memtune's own code, in which no access to a freed parameter is examined."""
    return torch._C.DisableTorchFunctionSubclass()


def guard_module(module: nn.Module) -> None:
    """Refuse to copy, pickle, or change the type or device of `module` while parameters of it are freed.

    `copy.deepcopy`, `torch.save` and `module.to` reach a module by these three methods.
    """
    vars(module)["_apply"] = MethodType(_apply, module)
    vars(module)["__deepcopy__"] = MethodType(_deepcopy, module)
    vars(module)["__reduce_ex__"] = MethodType(_reduce, module)


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
    for parameter in _freed_parameters(self):
        # `module.to` and the like convert leaf by leaf; an empty tensor shows whether `fn` converts without
        # reading a value.
        probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if fn(probe) is not probe:
            _refuse_module(
                "changed in type or place", "model.double(), .to(...) or the like before memtune.apply"
            )
    gone = [each for each in self.parameters() if type(each) in _RESIDENT_CLASS]
    mark_resident(gone)  # `fn` may read them; it has proved to change nothing
    try:
        module: nn.Module = type(self)._apply(self, fn, *args, **kwargs)
    finally:
        mark_freed(gone)
    return module


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if _freed_parameters(self):
        _refuse_module("copied", "Tuned.state_dict, loaded into a model of its own")
    # Removed for the copy: it would otherwise carry methods that are bound to this module.
    own = {name: vars(self).pop(name) for name in ("_apply", "__deepcopy__", "__reduce_ex__")}
    try:
        return copy.deepcopy(self, memo)
    finally:
        vars(self).update(own)


def _reduce(self: nn.Module, protocol: SupportsIndex) -> Any:
    if _freed_parameters(self):
        _refuse_module("pickled", "torch.save of Tuned.state_dict(), or Tuned.save")
    return type(self).__reduce_ex__(self, protocol)


def _freed_parameters(module: nn.Module) -> list[nn.Parameter]:
    found = (each for each in module.parameters() if not isinstance(local(each.detach()), FakeTensor))
    return [
        each for each in found if type(each) in _RESIDENT_CLASS or (each.numel() and not _local_bytes(each))
    ]


def _local_bytes(parameter: nn.Parameter) -> int:
    return local(parameter.detach()).untyped_storage().nbytes()


def _refuse_module(what: str, fix: str) -> None:
    raise ApplyError(
        f"The model cannot be {what} here: weights of its blocks are on the host, and freed on the device"
        " between uses.",
        fix=fix,
        code="MT364",
    )


class Piece(NamedTuple):
    """Device memory and the host copy of its contents, offloaded and loaded together."""

    memory: Tensor
    host: Tensor
    in_frame: bool = False
    """The memory is permanent and serves other pieces as well; otherwise it is freed and allocated again."""
    padded_bytes: int = 0
    """Bytes of the memory, where they exceed those copied."""
    of: tuple[nn.Parameter, ...] = ()
    """The parameters whose memory, or whose rows' memory, this is."""

    def allocate(self) -> None:
        """Allocate the memory.

        Raises:
            ApplyError: A parameter has other memory.
        """
        allocate_together((self,))

    def free(self) -> None:
        """Free the memory, whose contents are not needed any more; raises as `allocate` does."""
        free_together((self,))


def allocate_together(pieces: Iterable[Piece]) -> None:
    """Allocate all of `pieces`; see `Piece.allocate`."""
    for piece in pieces:
        if not piece.in_frame:
            require_own_memory(piece.of, piece.memory)
            # In place: views of the storage, among them autograd's saved ones, remain views of the same
            # memory.
            piece.memory.untyped_storage().resize_(piece.padded_bytes or piece.host.nbytes)
            mark_resident(piece.of)


def free_together(pieces: Iterable[Piece]) -> None:
    """Free all of `pieces`; see `Piece.free`."""
    for piece in pieces:
        if not piece.in_frame:
            require_own_memory(piece.of, piece.memory)
            piece.memory.untyped_storage().resize_(0)
            mark_freed(piece.of)


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
    own = {} if gathered is not None else {each: each.detach() for each in parameters}
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
            if gathered is None:
                parameter.data = place
                own[parameter].untyped_storage().resize_(0)
            else:
                gathered.put_rows(parameter, place)
        # One host buffer per chunk, so that one copy loads it; the optimizer's parameters become views of it.
        host = to_host_now(memory)
        mark(host, HOST)
        for parameter, at in members:
            hosts[parameter] = place_in(host, local(parameter.detach()), at)
            if parameter in context.placement.optimizer_params:
                context.placement.optimizer_params[parameter].data = hosts[parameter]
        pieces.append(Piece(memory, host, of=tuple(parameter for parameter, _ in members)))
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
    """Give `parameter` its `own` storage again, whose memory may have been freed, with `values`.

    The storage, not another one: the user's code may hold views of it.
    """
    own.untyped_storage().resize_(own.nbytes)
    own.copy_(values)
    parameter.data = own
