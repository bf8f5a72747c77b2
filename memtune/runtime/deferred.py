"""Models larger than one rank: built without memory, divided, and filled shard by shard (`runtime.construction`).

Five rules:

1. `deferred` runs the user's code on fake tensors and leaves the model on the meta device. What `apply` finds out before anything
   is divided needs names and shapes only.
2. Where parameters are divided by FSDP2, their meta shards get their rows as each whole value becomes final: at no time is more
   whole than what the construction still works on, which is one layer's where layers fill their own weights.
3. Where ranks share layers or have stages, each parameter is cut on the meta device, and a rank keeps its piece of the value
   (`keep_only`); what FSDP2 divides further are rows of that piece.
4. Anything else is filled before the first technique that needs values.
5. Ranks compare their generators' states: they must start from one model, which nobody has yet.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from memtune.errors import ApplyError, MemtuneError
from memtune.runtime.construction import Construction, Recorder, not_deferred
from memtune.runtime.tiers import DEVICE, tier
from memtune.runtime.tree import local

_MARK, _PIECES = "_memtune_construction", "_memtune_pieces"


@dataclass(frozen=True)
class Piece:
    """One of `ranks` equal pieces of a tensor along `dim`."""

    dim: int
    ranks: int
    rank: int

    def __call__(self, whole: Tensor) -> Tensor:
        """The piece, a view."""
        return whole.chunk(self.ranks, self.dim)[self.rank]


def deferred(build: Callable[[], nn.Module], device: torch.device | str = "cpu") -> nn.Module:
    """The model of `build()` without memory: `memtune.apply` divides it first, and then makes what this rank holds of it.

        model = memtune.deferred(Model, "cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model, optimizer = memtune.apply(model, optimizer, "tuned.yaml")

    Weights and buffers get the bits that `build()` by itself would have given them, drawn from torch's generators as they are
    now. `apply` leaves those as `build()` would have, if nothing has drawn from them in between.

    Args:
        build: Makes the model, weights and all; nothing may change the model's tensors afterwards but `apply`.
        device: Where the model is to be.

    Raises:
        ApplyError: The construction cannot be put off (MT398): it looks at values that were drawn, changes memory that other
            tensors have, or fails where tensors have no memory. The message names the op, or has the error.
    """
    recorder = Recorder(torch.device(device))
    construction = recorder.construction
    with recorder.recording(), warnings.catch_warnings():
        # Deep copies ask fake tensors for their address; the answer is right, and the user can do nothing about the warning.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        try:
            model = build()
        except MemtuneError:
            raise
        except Exception as error:  # user code may raise anything
            raise not_deferred(f"it fails on tensors without memory: {(str(error).splitlines() or [''])[0]}") from error
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
    vars(parameter).update(_own_attributes(fake))
    return parameter


def _own_attributes(parameter: Tensor) -> dict[str, Any]:
    """What the user's code has written on a parameter."""
    known = vars(FakeTensor).get("__annotations__", {}).keys() | {"_is_param", "_spec", "_local_tensor"}
    return {name: value for name, value in vars(parameter).items() if name not in known and not name.startswith("_")}


def _require_none_left(model: nn.Module) -> None:
    """Check that nothing but parameters, buffers and attributes of modules holds tensors."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if any(isinstance(each, FakeTensor) for each in held):
                raise not_deferred(f"{path}.{attribute} holds tensors that are no parameters or buffers".lstrip("."))


def construction_of(model: nn.Module) -> Construction | None:
    """How a deferred model is made; None of one that is there, or has been made."""
    return vars(model).get(_MARK)


def require_untouched(model: nn.Module) -> None:
    """Check that a deferred model has the tensors that it was built with (rule 1).

    Raises:
        ApplyError: It was moved or converted since.
    """
    construction = construction_of(model)
    if construction is None:
        strange = next((name for name, each in model.named_parameters() if each.is_meta), None)
        if strange is not None:
            raise ApplyError(
                f"{strange} is on the meta device, and nothing is known of its values.",
                fix="model = memtune.deferred(build), where build() makes the model", code="MT399",
            )  # fmt: skip
        return
    for name, places in _places(model).items():
        each = places[0][2]
        known = construction.tensors.get(name)
        if each.is_meta and (known is None or (known.size, known.dtype) != (tuple(each.size()), each.dtype)):
            raise not_deferred(f"{name} was changed after memtune.deferred")


def keep_only(model: nn.Module, pieces: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
    """Have this rank keep of a deferred model's parameters what `pieces` take of the whole values, by name (rule 3)."""
    if construction_of(model) is not None:
        vars(model)[_PIECES] = {**vars(model).get(_PIECES, {}), **pieces}


def said(model: nn.Module) -> list[str]:
    """What all ranks must have alike (rule 5)."""
    construction = construction_of(model)
    if construction is None:
        return []
    digest = hashlib.sha256()
    for state in construction.states.values():
        digest.update(state.numpy().tobytes())
    return [f"random numbers at the model's construction: sha256:{digest.hexdigest()[:16]}"]


def fill(model: nn.Module, optimizer: Optimizer, rebind: Callable[..., None]) -> None:
    """Make all that this rank has of a deferred model on its device (rules 3 and 4); nothing is done to any other.

    Args:
        model: Changed in place.
        optimizer: Gets the new parameters.
        rebind: `runtime.sharding.rebind`.
    """
    construction, pieces = vars(model).pop(_MARK, None), vars(model).pop(_PIECES, {})
    if construction is None:
        return
    before = dict(model.named_parameters())
    places = _places(model)

    def place(name: str, whole: Tensor) -> None:
        mine = pieces[name](whole) if name in pieces else whole
        _put(places[name], _like(places[name], mine, construction))

    construction.run(place)
    for found in places.values():
        real = found[0][2]
        if not real.is_meta and real.device != construction.device and _goes_along(found):
            _put(found, _like(found, local(real.detach()), construction))
    rebind(optimizer, before, dict(model.named_parameters()))


def _like(places: _Places, mine: Tensor, construction: Construction) -> Tensor:
    """A copy of `mine` where it is to be, as what is at `places`: parameter or buffer, a part of a larger one or a whole one."""
    old, value = places[0][2], _value(places, mine, construction)
    if isinstance(old, DTensor):
        value = DTensor.from_local(
            value, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )  # fmt: skip
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(value, requires_grad=old.requires_grad)
        vars(value).update(_own_attributes(old))
    return value


def fill_shards(model: nn.Module) -> None:
    """Make this rank's shards of a deferred model that FSDP2 has divided on the meta device (rule 2); else do nothing."""
    construction, pieces = vars(model).pop(_MARK, None), vars(model).pop(_PIECES, {})
    if construction is None:
        return
    places = _places(model)
    shards = {id(each.sharded_param): each for each in _fsdp_params(model)}

    def place(name: str, whole: Tensor) -> None:
        old, mine = places[name][0][2], pieces[name](whole) if name in pieces else whole
        if id(old) in shards:
            _fill_shard(shards[id(old)], mine, construction.device)
            return
        _put(places[name], _like(places[name], mine, construction))

    construction.run(place)


def _fill_shard(shard: FSDPParam, whole: Tensor, device: torch.device) -> None:
    """Give `shard` its rows of `whole`, padded as FSDP2 pads them."""
    dim, rank = shard.fsdp_placement.dim, shard.mesh_info.shard_mesh_rank
    padded, length = shard.padded_sharded_param_size, shard.sharded_size[dim]
    old = shard.sharded_param
    with tier(DEVICE):
        memory = torch.zeros(padded, dtype=whole.dtype, device=device)
        mine = memory.narrow(dim, 0, length)
        if length:
            mine.copy_(whole.narrow(dim, rank * padded[dim], length))
        new = nn.Parameter(shard.to_sharded_dtensor(mine), requires_grad=old.requires_grad)
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
    """By the first name of each parameter, buffer and other tensor of a module: all modules and attributes that are it."""
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
        setattr(module, attribute, value)  # recurrent layers keep a list of their own beside


def _goes_along(places: _Places) -> bool:
    """`Module.to` would take it to the device: a parameter or a buffer. What is a plain attribute stays where it was made."""
    return any(attribute in module._parameters or attribute in module._buffers for module, attribute, _ in places)


def _value(places: _Places, whole: Tensor, construction: Construction) -> Tensor:
    """A copy of `whole`, which belongs at `places`, where it is to be."""
    with tier(DEVICE):
        return torch.empty_like(whole, device=construction.device if _goes_along(places) else whole.device).copy_(whole)
