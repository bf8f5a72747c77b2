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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    FakeTensorMode,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from memtune.device import accelerator
from memtune.errors import ApplyError, MemtuneError
from memtune.runtime import (
    DEVICE,
    HOST,
    EagerRecorder,
    OpVisitor,
    local,
    mark,
    mutated,
    page_locked,
    tensors_in,
    tier,
    transfer,
)

_MARK, _PIECES = "_memtune_construction", "_memtune_pieces"

AtRest = Mapping[str, Callable[[Tensor], Tensor]]
"""By name of a parameter that starts off the device: maps its values on the host to the memory that it
shows.
"""
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
    recorder = Recorder(torch.device(device))
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
            held = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, list | tuple)
                else ()
            )
            if any(isinstance(each, FakeTensor) for each in held):
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
        mine = pieces[name](whole) if name in pieces else whole
        value = at_rest[name](mine) if name in at_rest else _value(places[name], mine, construction)
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
        old, mine = places[name][0][2], pieces[name](whole) if name in pieces else whole
        if id(old) in shards:
            _fill_shard(shards[id(old)], mine, construction.device, on_host=name in at_rest)
            return
        _put(places[name], _like(places[name], _value(places[name], mine, construction)))

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
        mine = memory.narrow(dim, 0, length)
        if length:
            mine.copy_(whole.narrow(dim, rank * padded[dim], length))
        # A view of the padded memory, as FSDP2 makes it: its all-gather reads the memory as a whole.
        # Gradients are of the DTensor's own device, which is the mesh's also while the rows are on the host.
        there = torch.empty_like(mine, device=device) if on_host else mine
        new = nn.Parameter(shard.to_sharded_dtensor(there), requires_grad=old.requires_grad)
        new._local_tensor = mine  # type: ignore[attr-defined]
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


# The recorded construction of a model, which runs later, tensor by tensor.
_FILLS = frozenset(
    f"aten.{name}_"
    for name in (
        "normal uniform zero fill copy random bernoulli exponential log_normal cauchy geometric".split()
    )
)
"""Ops that write every element of their first argument and read none."""
_SIZES = frozenset(("aten.resize_", "aten.set_"))
"""Ops that change a storage to which other lines refer."""

Place = Callable[[str, Tensor], None]
"""Receives a parameter or buffer by name when its value is final; the tensor is freed after the call."""


@dataclass(frozen=True)
class Ref:
    """A tensor as storage, sizes, strides and offset."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Line:
    """One recorded op of the construction."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Ref | None, ...]
    """Outputs with storages of their own, in the order of the outputs."""
    writes: frozenset[int]
    reads: frozenset[int]
    fills: int
    """Storage that it overwrites completely without reading it; -1: none."""
    draws: bool


@dataclass
class Construction:
    """The recorded construction of a model's tensors."""

    device: torch.device
    """Device of the model."""
    lines: list[Line] = field(default_factory=list)
    tensors: dict[str, Ref] = field(default_factory=dict)
    """Parameters and buffers of the finished model, one name each."""
    bytes: list[int] = field(default_factory=list)
    """Bytes of each storage."""
    places: list[torch.device] = field(default_factory=list)
    """Device of each storage in the user's code."""
    states: dict[Any, Tensor] = field(default_factory=dict)
    """Initial states of the generators; None is torch's CPU generator, a device that of an accelerator."""

    def run(self, place: Place) -> None:
        """Run the construction; pass each parameter and buffer to `place` when its value is final.

        torch's generators end as the plain construction would leave them, if they still have their initial
        states; if numbers were drawn since, they are restored.
        """
        needed = self._needed(self.tensors.values())
        named: dict[int, list[str]] = {}
        for name, ref in self.tensors.items():
            named.setdefault(ref.storage, []).append(name)
        last = {
            storage: at for at in sorted(needed) if needed[at] for storage in self._touched(self.lines[at])
        }
        now = {which: _state(which) for which in self.states}
        # The user has drawn nothing since: then the generators go on from where `build()` would have left
        # them.
        untouched = all(torch.equal(state, self.states[which]) for which, state in now.items())
        for which, state in self.states.items():
            _set_state(which, state)
        try:
            with torch.no_grad(), tier(HOST):
                memory = _Memory(self)
                for at in sorted(needed):
                    memory.run(self.lines[at], useful=needed[at])
                    for storage in self._touched(self.lines[at]) if needed[at] else ():
                        if last[storage] == at:
                            self._finish(storage, named.pop(storage, []), memory, place)
                for storage, names in named.items():  # storages that no line writes: empty tensors
                    self._finish(storage, names, memory, place)
        finally:
            if not untouched:
                for which, state in now.items():
                    _set_state(which, state)

    def _finish(self, storage: int, names: list[str], memory: _Memory, place: Place) -> None:
        for name in names:
            place(name, memory.tensor(self.tensors[name]))
        # At most one layer's tensors have memory at a time.
        memory.storages.pop(storage, None)

    def value(self, ref: Ref) -> Tensor:
        """Return the tensor's value at this point of the construction.

        Raises:
            ApplyError: It depends on random numbers, which must not be drawn twice.
        """
        needed = self._needed([ref], draws=False)
        drawn = next((self.lines[at] for at in needed if self.lines[at].draws), None)
        if drawn is not None:
            raise not_deferred(f"it reads a value that {drawn.func} has drawn")
        with torch.no_grad(), tier(HOST):
            memory = _Memory(self)
            for at in sorted(needed):
                memory.run(self.lines[at], useful=True)
            return memory.tensor(ref)

    def _needed(self, wanted: Iterable[Ref], *, draws: bool = True) -> dict[int, bool]:
        """Return the lines to run; False for those whose outputs are not needed, but whose draws are."""
        live, needed = {ref.storage for ref in wanted}, dict[int, bool]()
        # Liveness, backwards as in a compiler: what is overwritten before it is read is not needed.
        for at in range(len(self.lines) - 1, -1, -1):
            line = self.lines[at]
            made = {ref.storage for ref in line.made if ref is not None}
            if live & (line.writes | made):
                needed[at] = True
                live -= made
                # It overwrites all of it, so earlier writes are not needed.
                live.discard(line.fills)
                live |= line.reads
            elif line.draws and draws:
                # An overwritten initialization: it can run on any memory of that size, only to advance the
                # generator.
                scratch = line.fills >= 0 and line.reads <= {line.fills}
                needed[at] = not (scratch or not line.reads)
                if needed[at]:  # its draws depend on its inputs, so these must be computed
                    live -= made
                    live |= line.reads
        return needed

    @staticmethod
    def _touched(line: Line) -> set[int]:
        return {ref.storage for ref in line.made if ref is not None} | line.writes | line.reads


class _Memory:
    """The storages that currently have memory."""

    def __init__(self, construction: Construction) -> None:
        self._of = construction
        self.storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, ref: Ref) -> Tensor:
        """Return the real tensor; its memory is allocated on first use."""
        storage = self.storages.get(ref.storage)
        if storage is None:
            storage = torch.empty(
                self._of.bytes[ref.storage], dtype=torch.uint8, device=self._of.places[ref.storage]
            ).untyped_storage()
            self.storages[ref.storage] = storage
        empty = torch.empty(0, dtype=ref.dtype, device=storage.device)
        return empty.set_(storage, ref.offset, ref.size, ref.stride)

    def run(self, line: Line, *, useful: bool) -> None:
        """Run the op of `line`; unless `useful`, it only advances a generator and its outputs are freed."""
        memory = self if useful else _Memory(self._of)
        real = _mapped(
            lambda each: memory.tensor(each) if isinstance(each, Ref) else each, (line.args, line.kwargs)
        )
        out = line.func(*real[0], **real[1])
        for ref, each in zip(line.made, tensors_in((out,)), strict=True):
            if ref is None or not useful:
                continue
            if (tuple(each.stride()), each.storage_offset(), each.untyped_storage().nbytes()) != (
                ref.stride,
                ref.offset,
                self._of.bytes[ref.storage],
            ):
                self.tensor(ref).copy_(each)
            else:
                self.storages[ref.storage] = each.untyped_storage()


class _Converter(FakeTensorConverter):
    """Converter that does not memoize outputs of ops, because `Module.to` cannot swap a parameter that has a
    weak reference.
    """

    def set_tensor_memo(self, t: torch.Tensor, v: FakeTensor) -> None:
        """Memoize real tensors only, which may be converted again."""
        if t.device.type != "meta":
            super().set_tensor_memo(t, v)


_PLAIN_ARGUMENTS = frozenset((int, float, bool, type(None), torch.dtype, torch.device))


class OneFakeMode(FakeTensorMode):
    """One fake mode for a whole model that is recorded, or initialized later.

    A model may be built from deep copies of a layer (`nn.TransformerEncoder`), and the copy of a fake tensor
    copies the mode it belongs to as well: under another mode its views have storages of their own, so that
    each would count as new memory.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = _Converter()

    def __deepcopy__(self, memo: dict[int, Any]) -> OneFakeMode:
        return self

    def _prep_args_for_hash(self, result: list[object], args: Any, *more: Any) -> None:
        """Append the key of `args` in torch's cache of fake ops; torch's own takes half of the time of a fake
        op.
        """
        if type(args) not in (tuple, list):
            return super()._prep_args_for_hash(result, args, *more)
        result += (type(args), len(args))
        for arg in args:
            if type(arg) in _PLAIN_ARGUMENTS:
                result += (type(arg), arg)  # 1 and 1.0 are equal, but give outputs of other types
            elif (
                type(arg) is FakeTensor
                and arg.fake_mode is self
                and arg.constant is None
                and arg.layout is torch.strided
                and not arg._has_symbolic_sizes_strides
            ):
                result.append(
                    (
                        arg.dtype,
                        arg.shape,
                        arg.stride(),
                        arg.storage_offset(),
                        arg.untyped_storage().nbytes(),
                        arg.fake_device,
                        arg.requires_grad,
                        arg.is_conj(),
                        arg.is_neg(),
                        arg.is_inference(),
                    )
                )
            else:
                super()._prep_args_for_hash(result, [arg], *more)
        return None


class Recorder(OpVisitor):
    """Runs a model's construction on fake tensors and records it."""

    def __init__(self, device: torch.device) -> None:
        self.construction = Construction(device, states={which: _state(which) for which in _generators()})
        self._fake = OneFakeMode()
        self._storages: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all tensors that are made in the context.

        Raises:
            ApplyError: An op cannot be recorded.
        """
        whole = torch.nn.init._no_grad_trunc_normal_

        def at_once(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                return whole(tensor, *args, **kwargs)
            self._note_generator(kwargs)
            fills, ref = self._filled(tensor), self.ref(tensor)
            reads = frozenset(() if fills >= 0 else (ref.storage,))
            line = Line(
                whole, (ref, *args), kwargs, (None,), frozenset((ref.storage,)), reads, fills, draws=True
            )
            self.construction.lines.append(line)
            return tensor

        # It draws in a loop until all values are in range, which fake tensors cannot follow: one line
        # instead.
        torch.nn.init._no_grad_trunc_normal_ = at_once
        try:
            with EagerRecorder(self):
                yield
        finally:
            torch.nn.init._no_grad_trunc_normal_ = whole

    def ref(self, tensor: Tensor) -> Ref:
        """Return the reference of a fake `tensor`.

        Raises:
            ApplyError: It was not made while this recorded.
        """
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None:
            raise not_deferred("it uses a fake tensor that was made before")
        return Ref(
            storage, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype
        )

    def before(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the op's output on fake tensors, recorded."""
        given = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        fakes = [each for each in given if isinstance(each, FakeTensor)]
        if func is torch.ops.aten._local_scalar_dense.default and fakes:
            # `.item()` on a value that no draw affects, such as a linspace of drop rates.
            return self.construction.value(self.ref(fakes[0])).item()
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if given and not fakes:
            if draws:
                raise not_deferred(f"{func} draws into a tensor with real values")
            return NotImplemented  # real tensors, made from values: not recorded
        if str(func.overloadpacket) in _SIZES:
            raise not_deferred(f"{func} changes memory that other tensors share")
        try:
            with self._fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise not_deferred(f"{func} needs values") from None
        if func.namespace != "prim":
            self._record(func, args, kwargs, fakes, out, draws)
        return out

    def _record(
        self, func: Any, args: Any, kwargs: dict[str, Any], fakes: Sequence[Tensor], out: Any, draws: bool
    ) -> None:
        written = mutated(func, args, kwargs)
        made = tuple(self._new(each) for each in tensors_in((out,)))
        if not any(made) and not written:
            return  # a view
        if any(not isinstance(each, FakeTensor) for each in written):
            raise not_deferred(f"{func} writes a computed value into a tensor with real values")
        self._note_generator(kwargs)
        named, more = _mapped(self._as_now, (args, kwargs))
        fills = self._filled(args[0]) if str(func.overloadpacket) in _FILLS else -1
        storages = [self.ref(each).storage for each in fakes]
        reads = frozenset(each for each in storages if each != fills or storages.count(each) > 1)
        writes = frozenset(self.ref(each).storage for each in written)
        self.construction.lines.append(Line(func, named, more, made, writes, reads, fills, draws))

    def _as_now(self, value: Any) -> Any:
        """Return a copy of real tensors, which may be written into before the line runs."""
        if isinstance(value, FakeTensor):
            return self.ref(value)
        if not isinstance(value, Tensor):
            return value
        with _disable_current_modes(), tier(HOST):
            return value.detach().clone()

    def _new(self, tensor: Tensor) -> Ref | None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages or not isinstance(tensor, FakeTensor):
            return None
        self._storages[storage._cdata] = len(self._alive)
        self._alive.append(storage)  # keeps the address, the key of `_storages`, from being reused
        self.construction.bytes.append(int(storage.nbytes()))
        self.construction.places.append(tensor.device)
        return self.ref(tensor)

    def _note_generator(self, kwargs: dict[str, Any]) -> None:
        which = kwargs.get("generator")
        if which is not None and which not in self.construction.states:
            self.construction.states[which] = _state(which)

    def _filled(self, tensor: Tensor) -> int:
        """Return the storage of `tensor` if the tensor covers all of it, else -1."""
        whole = tensor.nbytes == tensor.untyped_storage().nbytes() and _is_dense(tensor)
        return self.ref(tensor).storage if whole else -1


def not_deferred(why: str) -> ApplyError:
    """Return the error for a construction that cannot be deferred."""
    return ApplyError(
        f"the model's construction cannot be deferred: {why}.",
        fix="build the model itself, without memtune.deferred",
        code="MT398",
    )


def _mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """Return `values` with `change` applied to every leaf of their tuples, lists and dicts."""
    if isinstance(values, dict):
        return {name: _mapped(change, value) for name, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(_mapped(change, value) for value in values)
    return change(values)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the tensor's elements are contiguous in memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _generators() -> list[Any]:
    return [None, *accelerator.started_devices()]


def _state(which: Any) -> Tensor:
    with tier(HOST):
        if isinstance(which, torch.Generator):
            return which.get_state()
        return torch.get_rng_state() if which is None else accelerator.get_rng_state(which)


def _set_state(which: Any, state: Tensor) -> None:
    if isinstance(which, torch.Generator):
        which.set_state(state)
    elif which is None:
        torch.set_rng_state(state)
    else:
        accelerator.set_rng_state(which, state)
