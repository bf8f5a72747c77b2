"""Deferred initialization: models larger than one rank's memory are sharded first, then filled shard by
shard.

`deferred` runs the user's code on fake tensors, records it, and leaves the model on the meta device. `apply`
needs only names and shapes until the model is sharded:

- FSDP2: each shard gets its rows as soon as the full value is final (`fill_shards`). Only tensors on which
  the construction still works exist in full, one layer's parameters if layers initialize their own weights.
- Tensor parallelism and pipeline stages: each parameter is cut on the meta device, and a rank keeps its piece
  of the value (`keep_only`); FSDP2 may shard that piece further.
- Other models are filled before the first technique that needs values (`fill`).

Parameters that the config keeps off the device are put on their tier at once (`at_rest`).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from memtune.deferred_init.construction import Construction, ConstructionRecorder, not_deferred
from memtune.errors import ApplyError, MemtuneError
from memtune.runtime import DEVICE, HOST, local, mark, page_locked, tier, transfer

_MARK, _PIECES = "_memtune_construction", "_memtune_pieces"

AtRest = Mapping[str, Callable[[Tensor], Tensor]]
"""By name of a parameter that starts off the device: its values on the host → the memory it shows."""
_NONE: AtRest = MappingProxyType({})


@dataclass(frozen=True)
class Piece:
    """One of `ranks` equal pieces of a tensor along `dim`."""

    dim: int
    ranks: int
    rank: int

    def __call__(self, whole: Tensor) -> Tensor:
        """Return the piece, a view."""
        return whole.chunk(self.ranks, self.dim)[self.rank]


def deferred(build: Callable[[], nn.Module], device: torch.device | str = "cpu") -> nn.Module:
    """Return the model of `build()` without memory.

    `memtune.apply` shards it and then fills this rank's part: weights that the config keeps off the device
    straight on the host or SSD, all others on the device.

        model = memtune.deferred(Model, "cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = memtune.apply(model, optimizer, "tuned.yaml")

    Weights that `build` reads from files, by `from_pretrained` or `load_state_dict(..., assign=True)`, are
    not copied here; without `assign` each is, and the copy is held until `apply` returns.

    Weights and buffers get the bits that a plain `build()` would give them, drawn from torch's generators in
    their current state. `apply` leaves the generators as `build()` would have, unless something has drawn
    from them in between.

    Args:
        build: Makes and initializes the model; only `apply` may change the model's tensors afterwards.
        device: Device of the model.

    Raises:
        ApplyError: The construction cannot be deferred (MT398): it reads values that were drawn, changes
            memory that other tensors share, or fails on fake tensors. The message has the op or the error.
    """
    recorder = ConstructionRecorder(torch.device(device))
    construction = recorder.construction
    with recorder.recording(), warnings.catch_warnings():
        # Deep copies read the address of fake tensors, which is harmless, and the user cannot avoid the
        # warning.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        try:
            model = build()
        except MemtuneError:
            raise
        except Exception as error:  # user code may raise anything
            raise not_deferred(f"it fails on fake tensors: {(str(error).splitlines() or [''])[0]}") from error
        for name, places in _places(model).items():
            fake = places[0][2]
            if isinstance(fake, FakeTensor):
                construction.tensors[name] = recorder.ref(fake)
                _put(places, _on_meta(fake))
    _require_none_left(model)
    vars(model)[_MARK] = construction
    return model


def _on_meta(fake: Tensor) -> Tensor:
    with _disable_current_modes():
        bare = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="meta")
        if not isinstance(fake, nn.Parameter):
            return bare
        parameter = nn.Parameter(bare, requires_grad=fake.requires_grad)
    # Users mark parameters (`no_weight_decay`) and look the marks up later.
    vars(parameter).update(_own_attributes(fake))
    return parameter


def _own_attributes(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes that the user's code has set on a parameter."""
    known = vars(FakeTensor).get("__annotations__", {}).keys() | {"_is_param", "_spec", "_local_tensor"}
    return {
        name: value
        for name, value in vars(parameter).items()
        if name not in known and not name.startswith("_")
    }


def _require_none_left(model: nn.Module) -> None:
    """Check that containers in modules' attributes hold no fake tensors, which could not be filled.

    Raises:
        ApplyError: One does.
    """
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else value
            if isinstance(value, dict | list | tuple) and any(isinstance(each, FakeTensor) for each in held):
                raise not_deferred(
                    f"{path}.{attribute} holds tensors that are not parameters or buffers".lstrip(".")
                )


def construction_of(model: nn.Module) -> Construction | None:
    """Return the recorded construction of a deferred model; None for other models and after filling."""
    return vars(model).get(_MARK)


def require_untouched(model: nn.Module) -> None:
    """Check that a deferred model has the tensors that it was built with.

    Raises:
        ApplyError: It was moved or converted since.
    """
    construction = construction_of(model)
    if construction is None:
        unknown = next((name for name, each in model.named_parameters() if each.is_meta), None)
        if unknown is not None:
            raise ApplyError(
                f"{unknown} is on the meta device, and its values are unknown.",
                fix="model = memtune.deferred(build), where build() makes the model",
                code="MT399",
            )
        return
    for name, places in _places(model).items():
        each = places[0][2]
        known = construction.tensors.get(name)
        if each.is_meta and (known is None or (known.size, known.dtype) != (tuple(each.size()), each.dtype)):
            raise not_deferred(f"{name} was changed after memtune.deferred")


def keep_only(model: nn.Module, pieces: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
    """Keep only pieces of a deferred model's parameters: by name, a function of the full value."""
    if construction_of(model) is not None:
        vars(model)[_PIECES] = {**vars(model).get(_PIECES, {}), **pieces}


def agreed_state(model: nn.Module) -> list[str]:
    """Return strings that must be equal on all ranks: the generators' states, so that all build one model."""
    construction = construction_of(model)
    if construction is None:
        return []
    digest = hashlib.sha256()
    for state in construction.states.values():
        digest.update(state.numpy().tobytes())
    return [f"random numbers at the model's construction: sha256:{digest.hexdigest()[:16]}"]


def fill(
    model: nn.Module, optimizer: Optimizer, rebind: Callable[..., None], at_rest: AtRest = _NONE
) -> list[nn.Parameter]:
    """Fill a deferred model on its device: this rank's pieces of all parameters and buffers.

    Other models are left unchanged.

    Args:
        model: Model; changed in place.
        optimizer: Optimizer that is rebound to the new parameters.
        rebind: `parallel.sharding.fsdp_sharding.rebind`.
        at_rest: Parameters that start off the device.

    Returns:
        The parameters that were filled off the device; others of `at_rest` had values before.
    """
    construction, pieces = vars(model).pop(_MARK, None), vars(model).pop(_PIECES, {})
    if construction is None:
        return []
    before = dict(model.named_parameters())
    places = _places(model)

    def place(name: str, whole: Tensor) -> None:
        piece = pieces[name](whole) if name in pieces else whole
        value = at_rest[name](piece) if name in at_rest else _value(places[name], piece, construction)
        _put(places[name], _like(places[name], value))

    construction.run(place)
    for name, found in places.items():
        real, moves = found[0][2], name not in at_rest and _goes_along(found)
        if not real.is_meta and real.device != construction.device and moves:
            _put(found, _like(found, _value(found, local(real.detach()), construction)))
    rebind(optimizer, before, dict(model.named_parameters()))
    filled = construction.tensors.keys() & set(at_rest)
    return [each for name, each in model.named_parameters() if name in filled]


def _like(places: _Places, value: Tensor) -> Tensor:
    """Return `value` with the type in `places`: parameter or buffer, DTensor or not."""
    old = places[0][2]
    if isinstance(old, DTensor):
        value = DTensor.from_local(
            value, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(value, requires_grad=old.requires_grad)
        vars(value).update(_own_attributes(old))
    return value


def fill_shards(model: nn.Module, at_rest: Collection[str] = ()) -> list[nn.Parameter]:
    """Fill this rank's shards of a deferred model that FSDP2 has sharded on the meta device.

    Other models are left unchanged.

    Args:
        model: Model; changed in place.
        at_rest: Names of parameters whose shards start on the host.

    Returns:
        The parameters on the host.
    """
    construction, pieces = vars(model).pop(_MARK, None), vars(model).pop(_PIECES, {})
    if construction is None:
        return []
    places = _places(model)
    shards = {id(each.sharded_param): each for each in _fsdp_params(model)}

    def place(name: str, whole: Tensor) -> None:
        old, piece = places[name][0][2], pieces[name](whole) if name in pieces else whole
        if id(old) in shards:
            _fill_shard(shards[id(old)], piece, construction.device, on_host=name in at_rest)
            return
        _put(places[name], _like(places[name], _value(places[name], piece, construction)))

    construction.run(place)
    filled = construction.tensors.keys() & set(at_rest)
    return [each for name, each in model.named_parameters() if name in filled]


def _fill_shard(shard: FSDPParam, whole: Tensor, device: torch.device, *, on_host: bool) -> None:
    """Give `shard` its rows of `whole`, padded as FSDP2 pads them."""
    dim, rank = shard.fsdp_placement.dim, shard.mesh_info.shard_mesh_rank
    padded, length = shard.padded_sharded_param_size, shard.sharded_size[dim]
    old = shard.sharded_param
    with tier(HOST if on_host else DEVICE):
        make = partial(torch.zeros, padded, dtype=whole.dtype, device="cpu" if on_host else device)
        memory = page_locked(lambda locked: make(pin_memory=locked), wanted=on_host and transfer.pins(device))
        if on_host:
            mark(memory, HOST)
        piece = memory.narrow(dim, 0, length)
        if length:
            piece.copy_(whole.narrow(dim, rank * padded[dim], length))
        # A view of the padded memory, as FSDP2 makes it: its all-gather reads the memory as a whole.
        # Gradients are of the DTensor's own device, which is the mesh's also while the rows are on the host.
        there = torch.empty_like(piece, device=device) if on_host else piece
        new = nn.Parameter(shard.to_sharded_dtensor(there), requires_grad=old.requires_grad)
        new._local_tensor = piece  # type: ignore[attr-defined]
        vars(new).update(_own_attributes(old))
        shard._setattr_on_modules(new)
        shard.sharded_param, shard._sharded_param_data = new, memory.view(-1)
        shard.reset_sharded_param()


def _fsdp_params(model: nn.Module) -> Iterator[FSDPParam]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = module._get_fsdp_state()._fsdp_param_group
            yield from group.fsdp_params if group is not None else ()


_Places = list[tuple[nn.Module, str, Tensor]]


def _places(model: nn.Module) -> dict[str, _Places]:
    """Return all places of each parameter, buffer and other tensor, by its first name.

    A place is a module and the attribute that holds the tensor.
    """
    first, found = dict[int, str](), dict[str, _Places]()
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers, vars(module)):
            for attribute, each in held.items():
                if isinstance(each, Tensor):
                    name = first.setdefault(id(each), f"{path}.{attribute}" if path else attribute)
                    found.setdefault(name, []).append((module, attribute, each))
    return found


def _put(places: _Places, value: Tensor) -> None:
    for module, attribute, _ in places:
        setattr(module, attribute, value)  # setattr: recurrent layers update their own list of weights


def _goes_along(places: _Places) -> bool:
    """Return whether `Module.to` would move the tensor: a parameter or buffer, not a plain attribute."""
    return any(
        attribute in module._parameters or attribute in module._buffers for module, attribute, _ in places
    )


def _value(places: _Places, whole: Tensor, construction: Construction) -> Tensor:
    """Return a copy of `whole`, the value for `places`, on its device."""
    with tier(DEVICE):
        return torch.empty_like(
            whole, device=construction.device if _goes_along(places) else whole.device
        ).copy_(whole)
