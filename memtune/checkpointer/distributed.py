"""Distributed checkpoints under the plain model's names, of which every rank writes and reads its own part.

A checkpoint is what torch's `get_state_dict(model, optimizer)` returns for the plain model, written by
`torch.distributed.checkpoint`: `model.<name>`, `optim.state.<name>.<key>`, `optim.param_groups`. memtune and
torch read each other's checkpoints. A sharded tensor is a DTensor over its ranks. A tensor that several ranks
hold is written by one of them, and no rank ever holds more of a sharded tensor than its shard.

Loaded values reach the model through its own `load_state_dict`, the optimizer through its own. Mechanisms
that hold copies of either (an optimizer on the host) are notified (`weights_loaded`) and copy them again.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_all
from torch.distributed.checkpoint.state_dict_saver import save as write_all
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from memtune.checkpointer.checked_storage import CheckedPlanner, CheckedReader, CheckedWriter
from memtune.checkpointer.state_dict import ParameterEntry, held_parameters
from memtune.errors import ApplyError, EnvironmentFault, MemtuneError
from memtune.runtime import Context, local

T = TypeVar("T")
Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a full tensor."""
_STATE, _GROUPS = "optim.state.", "optim.param_groups."


def sharded_state_dict(context: Context) -> dict[str, Any]:
    """Return `{"model": ..., "optim": ...}` as torch's `get_state_dict` does; tensors are the live ones.

    Raises:
        ApplyError: A part of the optimizer's state has no name or place in the plain model.
    """
    model, held = _model(context), _named(context)
    plain = context.optimizer.state_dict()
    state = {
        held[i].name: {what: held[i].divided(value) for what, value in of.items()}
        for i, of in plain["state"].items()
    }
    groups = [{**group, "params": [held[i].name for i in group["params"]]} for group in plain["param_groups"]]
    return {"model": _here(context, model), "optim": {"state": _here(context, state), "param_groups": groups}}


def save(context: Context, folder: str | PathLike[str]) -> None:
    """Write a checkpoint; collective.

    Raises:
        ApplyError: As `sharded_state_dict`.
        EnvironmentFault: A rank could not write; then `folder` holds no checkpoint.
    """
    state = sharded_state_dict(context)
    with suppress(FileNotFoundError):
        if not _rank():
            # From here on the folder holds no checkpoint until the new one is complete.
            Path(folder, ".metadata").unlink()
    writer = CheckedWriter(folder)
    _collectively(
        "written to", folder, lambda: write_all(state, storage_writer=writer, no_dist=_on_one_rank())
    )


def load(context: Context, folder: str | PathLike[str]) -> None:
    """Read a checkpoint written under any sharding, or by a script without memtune; collective.

    Raises:
        ApplyError: The checkpoint is of another model or optimizer; lists the differences. Nothing has been
            changed.
        UsageError: Its `.metadata` would run code or is truncated. Nothing has been changed.
        EnvironmentFault: It cannot be read; if an item is damaged, weights may have been overwritten.
    """
    reader = _open(folder)
    described = reader.metadata.state_dict_metadata
    model, held = _model(context), _named(context)
    forms = {
        key: (tuple(m.size), m.properties.dtype)
        for key, m in described.items()
        if isinstance(m, TensorStorageMetadata)
    }
    # Before anything is read: a checkpoint of another model must change nothing.
    _require_fit(context, model, held, {key: forms.get(key, ((), None)) for key in described})
    groups = [dict.fromkeys(keys) for keys in _options(described)]
    tensors = {
        key: torch.empty(*forms[key][:1], dtype=forms[key][1]) for key in forms if key.startswith(_GROUPS)
    }
    for key, value in tensors.items():
        index, _, option = key.removeprefix(_GROUPS).partition(".")
        groups[int(index)][option] = value
    # Groups alone first: they are small, and may show that the rest must not be read.
    _read(reader, {"optim": {"param_groups": groups}})
    _require_groups(context, held, groups)
    states = {
        key.removeprefix(_STATE).rpartition("."): form
        for key, form in forms.items()
        if key.startswith(_STATE)
    }
    own_parameters = _here(context, {each.name: each for each in held})
    state = _empty_state(
        own_parameters,
        {(name, what): form for (name, _, what), form in states.items() if name in own_parameters},
    )
    wanted: dict[str, Any] = {"model": _here(context, model)}
    if state:
        wanted["optim"] = {"state": state}
    # These tensors are the model's own, so the read itself changes them; the load below runs the model's
    # hooks on the new values.
    _read(reader, wanted)
    context.model.load_state_dict(model)
    _give_optimizer(context, held, state, groups)


def load_full_state_dict(context: Context, state_dict: Mapping[str, Any]) -> None:
    """Load `{"model": ..., "optimizer": ...}` of the plain model and optimizer; each rank takes its shard.

    Raises:
        ApplyError: The state is of another model or optimizer; lists the differences. Nothing has been
            changed.
    """
    model, held = _model(context), _named(context)
    whole, optimizer = state_dict["model"], state_dict["optimizer"]
    # torch numbers parameters through all groups; names are independent of how they are grouped.
    numbers = [index for group in optimizer["param_groups"] for index in group["params"]]
    name_of = {index: each.name for index, each in zip(numbers, held, strict=False)}
    values = {
        f"{_STATE}{name_of.get(index, index)}.{what}": value
        for index, of in optimizer["state"].items()
        for what, value in of.items()
    }
    described = {f"model.{name}": value for name, value in whole.items()} | values
    _require_fit(context, model, held, {key: _form(value) for key, value in described.items()})
    groups = [
        {**group, "params": [name_of.get(index, "") for index in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    _require_groups(context, held, groups)
    state: dict[str, dict[str, Any]] = {}
    by_name = _here(context, {each.name: each for each in held})
    for key, value in values.items():
        name, _, what = key.removeprefix(_STATE).rpartition(".")
        if name not in by_name:
            continue
        state.setdefault(name, {})[what] = _cut_for(by_name[name], value)
    with torch.no_grad():
        for name, value in _here(context, model).items():
            if isinstance(value, Tensor):
                local(value).copy_(_part(whole[name], value))
            else:
                model[name] = whole[name]
    context.model.load_state_dict(model)
    _give_optimizer(context, held, state, groups)


# -- checks before any change --------------------------------------------------------------------------------


def _model(context: Context) -> dict[str, Any]:
    """Return the model's state, sharded where it is."""
    # Called first: FSDP2 then reshards units that a forward left gathered.
    state: dict[str, Any] = context.model.state_dict()
    return state


def _here(context: Context, entries: dict[str, T]) -> dict[str, T]:
    """Return the entries, by name of a weight or buffer, of which this rank holds a part."""
    absent = context.placement.absent
    return {name: entry for name, entry in entries.items() if name not in absent}


def _named(context: Context) -> list[ParameterEntry]:
    held = held_parameters(context)
    nameless = [each.held for each in held if not each.name]
    if nameless:
        raise ApplyError(
            f"The optimizer updates a tensor of shape {tuple(nameless[0].shape)} that is no parameter of the"
            " model.",
            fix="make it a parameter of the model",
            code="MT374",
        )
    return held


def _form(value: Any) -> tuple[tuple[int, ...], torch.dtype | None]:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ((), None)


def _require_fit(
    context: Context,
    model: Mapping[str, Any],
    held: list[ParameterEntry],
    found: Mapping[str, tuple[tuple[int, ...], Any]],
) -> None:
    """Raise if names or shapes do not fit those `found` by checkpoint key, before anything changes."""
    absent = context.placement.absent
    shapes = {
        name: tuple(absent.get(name, value.shape))
        for name, value in model.items()
        if isinstance(value, Tensor)
    }
    there = {key.removeprefix("model."): form for key, form in found.items() if key.startswith("model.")}
    problems = [f"{name} is missing" for name in model if name not in there]
    problems += [f"{name} is not in the model" for name in there if name not in model]
    problems += [
        f"{name} has shape {shape} here and {there[name][0]} there"
        for name, shape in shapes.items()
        if name in there and shape != there[name][0]
    ]
    names = {each.name for each in held}
    states = {key.removeprefix(_STATE).rpartition(".")[0] for key in found if key.startswith(_STATE)}
    problems += [
        f"the optimizer has state of {name}, which is not in the model" for name in sorted(states - names)
    ]
    _refuse(problems)


def _require_groups(context: Context, held: list[ParameterEntry], groups: list[dict[str, Any]]) -> None:
    names = iter(held)
    here = [[next(names).name for _ in group["params"]] for group in context.optimizer.param_groups]
    there = [list(group["params"]) for group in groups]
    if [sorted(each) for each in here] != [sorted(each) for each in there]:
        sizes = f"of {[len(each) for each in here]} parameters here and {[len(each) for each in there]} there"
        _refuse([f"the optimizer's parameter groups differ: groups {sizes}"])


def _refuse(problems: list[str]) -> None:
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ApplyError(
            "The checkpoint is not one of this model and optimizer.",
            evidence=f"{'; '.join(problems[:3])}{more}.",
            fix="build the model and optimizer as they were when it was saved",
            code="MT371",
        )


# -- tensors to read into ------------------------------------------------------------------------------------


def _empty_state(
    held: Mapping[str, ParameterEntry], forms: Mapping[tuple[str, str], Form]
) -> dict[str, dict[str, Tensor]]:
    """Return tensors, by parameter and key, into which the state of these parameters is read."""
    state: dict[str, dict[str, Tensor]] = {}
    for (name, what), (shape, dtype) in forms.items():
        layout = held[name].layout
        # Other shapes are not of the parameter's elements, such as a step counter; every rank has them whole.
        if shape and shape == tuple(layout.shape):
            rows = torch.empty_like(local(layout.detach()), dtype=dtype)
            value = held[name].part(rows) if isinstance(layout, DTensor) else rows
        else:
            value = torch.empty(shape, dtype=dtype)
        state.setdefault(name, {})[what] = value
    return state


def _cut_for(held: ParameterEntry, value: Any) -> Any:
    """Return a state tensor of the plain optimizer, or this rank's shard of it."""
    if not isinstance(value, Tensor):
        return value
    layout = held.layout
    if isinstance(layout, DTensor) and value.dim() and value.shape == layout.shape:
        return held.part(_part(value, layout).to(local(layout).device, copy=True))
    return value.clone()


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that every rank holds in full."""
    if not isinstance(like, DTensor):
        return whole
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    for dim, (length, first) in enumerate(zip(shape, offset, strict=True)):
        whole = whole.narrow(dim, min(first, whole.shape[dim]), length)
    return whole


def _give_optimizer(
    context: Context,
    held: list[ParameterEntry],
    state: dict[str, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    indexed = {
        index: {what: _for_holder(each, value) for what, value in state[each.name].items()}
        for index, each in enumerate(held)
        if each.name in state
    }
    numbers = iter(range(len(held)))
    mine = context.optimizer.param_groups
    options = [
        {**g, "params": [next(numbers) for _ in m["params"]]} for g, m in zip(groups, mine, strict=True)
    ]
    with context.events.loading():
        context.optimizer.load_state_dict({"state": indexed, "param_groups": options})


def _for_holder(held: ParameterEntry, value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) and not isinstance(held.held, DTensor) else value


# -- files ---------------------------------------------------------------------------------------------------


def _open(folder: str | PathLike[str]) -> CheckedReader:
    if not Path(folder, ".metadata").is_file():
        raise EnvironmentFault(
            f"There is no checkpoint in {folder}.",
            evidence="It has no file .metadata, which is written last.",
            fix="give the folder that was given to save",
            code="MT373",
        )
    try:
        return CheckedReader(folder)
    except OSError as error:
        raise _unusable("read from", folder, f"{type(error).__name__}: {error}") from error


def _options(described: Mapping[str, Any]) -> list[list[str]]:
    """Return names of the options of each parameter group."""
    groups: dict[str, list[str]] = {}
    for key in described:
        if key.startswith(_GROUPS):
            index, _, option = key.removeprefix(_GROUPS).partition(".")
            groups.setdefault(index, []).append(option)
    numbers = [str(each) for each in range(len(groups))]
    if groups.keys() != set(numbers):
        _refuse([f"the optimizer's parameter groups are numbered {', '.join(sorted(groups))[:60]}"])
    return [groups[each] for each in numbers]


def _read(reader: CheckedReader, wanted: dict[str, Any]) -> None:
    _collectively(
        "read from",
        reader.checkpoint_id,
        lambda: read_all(wanted, storage_reader=reader, planner=CheckedPlanner(), no_dist=_on_one_rank()),
    )


def _collectively(what: str, folder: str | PathLike[str], call: Any) -> None:
    """Run `call`; torch raises an error of any rank on all ranks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to.*")
            call()
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        if isinstance(error, MemtuneError):
            raise error from failed
        raise _unusable(what, folder, f"Rank {rank}: {type(error).__name__}: {error}") from failed


def _unusable(what: str, folder: str | PathLike[str], evidence: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"The checkpoint could not be {what} {folder}.",
        evidence=evidence,
        fix="check space and permissions, and use a folder that all ranks see",
        code="MT373",
    )


def _on_one_rank() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def _rank() -> int:
    return 0 if _on_one_rank() else dist.get_rank()
