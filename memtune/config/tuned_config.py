"""TunedConfig: what a search writes and `memtune.apply` reads. Short, commented, editable by hand, never
code.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memtune.config.yaml_io import Document, flow, parse, read_text, save_text
from memtune.errors import ApplyError, ConfigError
from memtune.search_spaces import PASS_ORDER, SLOTS, did_you_mean, find, null
from memtune.search_spaces.execution import Execution
from memtune.technique import Plan, Technique

if TYPE_CHECKING:
    from torch import nn

SCHEMA = 1
_ALIASES = {("sharding.communication", "plain"): "none"}
"""Other names of a technique that configs may use, by slot."""
_EXECUTION = tuple(Execution.model_fields)
_AXES = sorted({slot.split(".")[0] for slot in SLOTS} | {"execution"})
_SECTIONS = ("memtune", "settings", "measured", "predicted", "certificate", "made_for", "plan", "study")


@dataclass(frozen=True)
class Settings:
    """How the step is executed, and one technique per slot; slots that are left out hold the null
    technique.
    """

    execution: Execution = field(default_factory=Execution)
    techniques: tuple[Technique, ...] = ()
    """The techniques that are not null, in pass order; `Settings.of` makes them so."""

    @classmethod
    def of(cls, execution: Execution, techniques: Mapping[str, Technique]) -> Settings:
        """Settings from techniques by slot."""
        used = (techniques.get(slot) for slot in PASS_ORDER)
        return cls(execution, tuple(each for each in used if each is not None and each != null(each.slot)))

    @cached_property
    def chosen(self) -> dict[str, Technique]:
        """The techniques that are not null, by slot."""
        return {each.slot: each for each in self.techniques}

    def technique(self, slot: str) -> Technique:
        """The technique in `slot`, the null one where nothing was chosen."""
        return self.chosen.get(slot) or null(slot)

    def with_execution(self, **changes: Any) -> Settings:
        """These settings with other fields of `execution`."""
        return Settings(Execution.model_validate({**self.execution.model_dump(), **changes}), self.techniques)

    def dump(self) -> dict[str, Any]:
        """The `settings` of a config: nested by slot, null techniques and default knobs left out."""
        settings: dict[str, Any] = {
            "execution": self.execution.model_dump(exclude_defaults=True, mode="json")
        }
        for technique in sorted(self.techniques, key=lambda each: SLOTS.index(each.slot)):
            *folders, last = technique.slot.split(".")
            node = settings
            for folder in folders:
                node = node.setdefault(folder, {})
            node[last] = {"kind": technique.kind} | technique.model_dump(exclude_defaults=True, mode="json")
        return settings

    def env(self) -> dict[str, str]:
        """What must be set before the device starts."""
        return {
            name: value
            for each in [*self.techniques, self.technique("allocator")]
            for name, value in each.env().items()
        }


class MadeFor(BaseModel):
    """What a config was tuned for; compared when it is applied."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = ""
    """`sha256:` over names, shapes and dtypes of the parameters."""
    parameters: int = 0
    blocks: list[str] = []
    """Qualified names of the repeated blocks; runs are written `h.{0..23}`."""
    ranks: int = 1
    device: str = "cpu"
    hardware: str = ""
    global_batch: int | None = None
    torch: str = ""
    memtune: str = ""


class TunedConfig(BaseModel):
    """A whole config: settings, what was measured and predicted, what it was made for, and the plans it
    needs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    memtune: int = SCHEMA
    settings: Settings = Settings()
    measured: dict[str, Any] = {}
    predicted: dict[str, Any] = {}
    certificate: dict[str, Any] = {}
    made_for: MadeFor | None = None
    plan: dict[str, Plan] = Field(default_factory=dict)
    """Plans by slot; slots with an empty plan are left out."""
    study: dict[str, Any] = {}

    def document(self) -> dict[str, Any]:
        """The config as plain data, empty sections left out."""
        document: dict[str, Any] = {"memtune": self.memtune, "settings": self.settings.dump()}
        sections = {
            "measured": self.measured,
            "predicted": self.predicted,
            "certificate": self.certificate,
            "study": self.study,
        }
        if self.made_for is not None:
            sections["made_for"] = self.made_for.model_dump(mode="json", exclude_defaults=True)
        sections["plan"] = {slot: plan.document() for slot, plan in self.plan.items() if not plan.is_empty}
        document.update({name: sections[name] for name in _SECTIONS if sections.get(name)})
        return document


def load_config(source: str | Path | Mapping[str, Any]) -> TunedConfig:
    """Read a config from a file, from YAML text (anything with a line break or a brace), or from plain data.

    Raises:
        ConfigError: It is malformed, has unknown keys, or is of a newer schema; says where, and what is
            close.
    """
    if isinstance(source, Mapping):
        return _validated(Document(_plain(source), {}, "config"))
    if isinstance(source, str) and any(mark in source for mark in "\n{"):
        return _validated(parse(source))
    path = Path(source)
    return _validated(parse(read_text(path), path.name))


def _plain(data: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(data)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the config is not plain data:  {error}", fix="give what a YAML file can hold", code="MT202"
        ) from None


def _validated(document: Document) -> TunedConfig:
    data = document.data
    if not isinstance(data, dict):
        raise ConfigError(
            f"{document.source}:1  a config is a mapping, this is {_said(data)}.",
            fix="settings: {…}",
            code="MT202",
        )
    version = data.get("memtune", SCHEMA)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ConfigError(
            f"{document.where(('memtune',))}  memtune: {_said(version)} is no schema version.",
            fix="memtune: 1",
            code="MT202",
        )
    if version > SCHEMA:
        raise ConfigError(
            f"{document.where(('memtune',))}  this config is of schema {version}; this memtune reads up to"
            f" {SCHEMA}.",
            fix="pip install --upgrade memtune",
            code="MT204",
        )
    _known(document, (), data, _SECTIONS)
    rest = {name: value for name, value in data.items() if name not in ("settings", "plan")}
    plan = _mapping(document, ("plan",), data.get("plan"))
    _known(document, ("plan",), plan, SLOTS)
    _known(
        document,
        ("made_for",),
        _mapping(document, ("made_for",), data.get("made_for")),
        tuple(MadeFor.model_fields),
    )
    settings = _settings(document, _mapping(document, ("settings",), data.get("settings")))
    decided = {slot: _mapping(document, ("plan", slot), fields) for slot, fields in plan.items()}
    plans = {
        slot: _plan(document, settings.technique(slot), fields) for slot, fields in decided.items() if fields
    }
    try:
        return TunedConfig(settings=settings, plan=plans, **rest)
    except ValidationError as error:
        raise _explained(document, (), data, error) from None


def _settings(document: Document, data: dict[str, Any]) -> Settings:
    _known(document, ("settings",), data, _AXES)
    techniques = {}
    for slot in SLOTS:
        path: tuple[str, ...] = ("settings", *slot.split("."))
        node = _at(document, path, data)
        if not node:
            continue
        kind = node.get("kind")
        if not isinstance(kind, str):
            raise ConfigError(
                f"{document.where(path)}  {slot} does not say which technique it is.",
                evidence=f"kind is the name of one technique, not {_said(kind)}." if "kind" in node else "",
                fix=f"{slot}: {{kind: {null(slot).kind}}}",
                code="MT202",
            )
        kind = _ALIASES.get((slot, kind), kind)
        try:
            technique = find(slot, kind)
        except ConfigError as error:
            raise ConfigError(
                f"{document.where((*path, 'kind'))}  {error.what}",
                evidence=error.evidence,
                fix=error.fix,
                code=error.code,
            ) from None
        _known(document, path, node, tuple(technique.model_fields))
        try:
            # Through JSON, where strict means what a config can say: a list is a tuple, a word an enum, "2"
            # is no number.
            techniques[slot] = technique.model_validate_json(json.dumps({**node, "kind": kind}))
        except ValidationError as error:
            raise _explained(document, path, node, error) from None
    path = ("settings", "execution")
    execution = _mapping(document, path, data.get("execution"))
    own = {name: value for name, value in execution.items() if name not in _slots_in("execution")}
    _known(document, path, own, _EXECUTION)
    try:
        return Settings.of(Execution.model_validate_json(json.dumps(own)), techniques)
    except ValidationError as error:
        raise _explained(document, path, own, error) from None


def _plan(document: Document, technique: Technique, fields: dict[str, Any]) -> Plan:
    """Return the plan of the technique in a slot, checked in all that needs no model."""
    try:
        return technique.plan_from(fields)
    except ValidationError as error:
        how = f"{technique.slot}: {{kind: {technique.kind}}}"
        raise _explained(
            document,
            ("plan", technique.slot),
            fields,
            error,
            code="MT316",
            evidence="" if technique.plan_types else f"{how} plans nothing.",
            fix=(
                f"leave plan: {{{technique.slot}: …}} out"
                if not technique.plan_types
                else f"memtune search  or  memtune trial --config  makes a new plan for {how}"
            ),
        ) from None


def _slots_in(axis: str) -> tuple[str, ...]:
    return tuple(slot.split(".")[1] for slot in SLOTS if slot.startswith(f"{axis}."))


def _at(document: Document, path: tuple[str, ...], data: dict[str, Any]) -> dict[str, Any]:
    """The mapping at `path` below `settings`; axes hold their slots, and `execution` its own settings."""
    node = data
    for depth, part in enumerate(path[1:], start=1):
        if depth > 1:
            _known(
                document,
                path[:depth],
                node,
                _slots_in(path[1]) + (_EXECUTION if path[1] == "execution" else ()),
            )
        node = _mapping(document, path[: depth + 1], node.get(part))
    return node


def _mapping(document: Document, path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(
            f"{document.where(path)}  {'.'.join(path)} is a mapping, not {_said(value)}.",
            evidence="One technique stands there." if isinstance(value, list) and path[1:] else "",
            fix="write  kind: …  under it",
            code="MT202",
        )
    return value


def _known(
    document: Document, path: tuple[str, ...], data: dict[str, Any], known: tuple[str, ...] | list[str]
) -> None:
    for key in data:
        if key not in known:
            name = f"'{key[:60]}'" + (f" under {'.'.join(path)}" if path else "")
            raise ConfigError(
                f"{document.where((*path, key))}  unknown key {name}.{did_you_mean(key, known)}",
                evidence=f"Known: {', '.join(known)}.",
                fix=f"settings: {{{key}: …}}" if not path and key in _AXES else "",
                code="MT201",
            )


def _explained(
    document: Document,
    path: tuple[str, ...],
    data: Any,
    error: ValidationError,
    *,
    code: str = "MT202",
    evidence: str = "",
    fix: str = "memtune techniques  shows what each technique can be given",
) -> ConfigError:
    first = error.errors()[0]
    where = (*path, *_place_in(data, first))
    wrong = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return ConfigError(
        f"{document.where(where)}  {'.'.join(map(str, where))}: {wrong}, but got"
        f" {_said(first.get('input'))}.",
        evidence=evidence,
        fix=fix,
        code=code,
    )


def _place_in(data: Any, error: Mapping[str, Any]) -> Iterator[str | int]:
    """The keys that lead to what is wrong; pydantic also names the member of a union that it tried, which is
    no key.
    """
    for key in error["loc"]:
        if (isinstance(data, Mapping) and key in data) or (isinstance(data, list) and isinstance(key, int)):
            data = data[key]
            yield key
        elif error["type"] == "missing":
            yield key


def _said(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


# -- writing -------------------------------------------------------------------------------------------------

_COMMENTS = {
    "settings": "what memtune.apply does; edit by hand if you like, then  memtune config check",
    "measured": "in a fresh process, with these settings",
    "predicted": "before the run, by the simulator",
    "certificate": "what was checked",
    "made_for": "apply compares this with your model and ranks",
    "plan": "decided once, in the search",
    "study": "where it came from",
}


def dump_yaml(config: TunedConfig) -> str:
    """The config as commented YAML; reading it back gives an equal config."""
    lines: list[str] = []
    for name, value in config.document().items():
        if isinstance(value, Mapping):
            lines.append(f"{name}:  # {_COMMENTS[name]}" if name in _COMMENTS else f"{name}:")
            lines.extend(_block(value, "  "))
        else:
            lines.append(f"{name}: {flow(value)}  # schema of this file")
    return "\n".join(lines) + "\n"


def _block(data: Mapping[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for key, value in data.items():
        if isinstance(value, Mapping) and value and not _is_short(value):
            lines.append(f"{indent}{flow(str(key))}:")
            lines.extend(_block(value, indent + "  "))
        else:
            lines.append(f"{indent}{flow(str(key))}: {flow(value)}")
    return lines


def _is_short(value: Mapping[str, Any]) -> bool:
    return not any(isinstance(each, Mapping) for each in value.values()) and len(flow(value)) < 100


def save(config: TunedConfig, path: str | Path) -> Path:
    """Write the config so that a crash leaves the old file or the new one; raises EnvironmentFault if it
    cannot be written.
    """
    return save_text(path, dump_yaml(config))


# -- checks at apply -----------------------------------------------------------------------------------------


def fingerprint(model: nn.Module) -> str:
    """`sha256:` over names, shapes and dtypes of the parameters, whatever their values and wherever
    they are.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    return f"sha256:{digest.hexdigest()[:16]}"


def check_made_for(config: TunedConfig, model: nn.Module, ranks: int) -> None:
    """Compare the config with the model and ranks at hand; a config without `made_for` fits any.

    Raises:
        ConfigError: The config was made for another model or another number of ranks.
    """
    made_for = config.made_for
    if made_for is None:
        return
    if made_for.model and made_for.model != fingerprint(model):
        raise _other_model(made_for, model, "run  memtune search  on this model, or pass strict=False")
    if made_for.ranks != ranks:
        again = f"--device cpu --workers {ranks}" if made_for.device == "cpu" else f"--gpus {ranks}"
        then = f"{made_for.ranks} rank{'s' * (made_for.ranks > 1)}"
        raise ConfigError(
            f"this config was made for {then}, here {'are' if ranks > 1 else 'is'} {ranks}.",
            fix=f"torchrun --nproc-per-node {made_for.ranks} …, or search again with {again}",
            code="MT206",
        )


def check_machine(config: TunedConfig, device: str, hardware: str, torch_version: str) -> None:
    """Compare the machine with the one that the config was made on.

    What was decided op by op (`plan`) holds for the ops of one torch on one kind of device and is refused
    elsewhere; settings alone still train, and it is said that what was measured does not hold.

    Args:
        config: A config; one without `made_for` fits any machine.
        device: `cpu` or `cuda`.
        hardware: Name of the machine, as `memtune doctor` says it.
        torch_version: Of the torch at hand; patch releases and builds are not told apart.

    Raises:
        ConfigError: The config has a plan, which was made with another torch or for another device.
    """
    made_for = config.made_for
    if made_for is None or not made_for.torch:
        return
    then = {"torch": made_for.torch, "device": made_for.device, "hardware": made_for.hardware}
    now = {"torch": torch_version, "device": device, "hardware": hardware}
    other = [name for name in then if _release(then[name]) != _release(now[name])]
    if not other:
        return
    difference = "; ".join(f"{name}: {then[name]} then, {now[name]} now" for name in other)
    planned = [slot for slot, plan in config.plan.items() if not plan.is_empty]
    if planned:
        raise ConfigError(
            f"the plan of {', '.join(planned)} in this config was made on another machine.",
            evidence=f"{difference}.",
            fix="run  memtune search  here, or pass strict=False",
            code="MT206",
        )
    warnings.warn(
        f"this config was tuned elsewhere ({difference}): its measured figures do not hold here.",
        stacklevel=5,
    )


def _release(text: str) -> str:
    """`2.13` of `2.13.0+cpu`; a name as it is."""
    return ".".join(text.split(".")[:2])


def check_blocks(config: TunedConfig, model: nn.Module, blocks: Sequence[str]) -> None:
    """Raise ConfigError where the model has no module of the name of a block that the config was made
    with.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if config.made_for is not None and any(name not in modules for name in blocks):
        raise _other_model(
            config.made_for, model, "run  memtune search  on this model, or leave made_for out of the config"
        )


def _other_model(made_for: MadeFor, model: nn.Module, fix: str) -> ConfigError:
    count = sum(parameter.numel() for parameter in model.parameters())
    return ConfigError(
        "this config was made for another model.",
        evidence=(
            f"It was made for {made_for.parameters:,} parameters ({made_for.model}), "
            f"this model has {count:,} ({fingerprint(model)})."
        ),
        fix=fix,
        code="MT206",
    )


def environment(settings: Settings) -> dict[str, str]:
    """Variables that must be set before the device starts."""
    return settings.env()


def check_environment(settings: Settings, *, device: str = "cuda") -> None:
    """Check that what `environment` asks for was set when CUDA started; on CPU none of it has an effect.

    Raises:
        ApplyError: A variable is missing or different, or came too late; the message holds the exact `export`
            line.
    """
    wanted = {} if device == "cpu" else environment(settings)
    found = [
        f"{name}={os.environ.get(name, '(not set)')}"
        for name, value in wanted.items()
        if os.environ.get(name) != value
    ]
    if found or (wanted and _started_without(wanted)):
        raise ApplyError(
            "the allocator settings of this config must be in the environment before CUDA starts.",
            evidence=f"Now: {', '.join(found)}." if found else "CUDA had started before they were set.",
            fix="export "
            + " ".join(f"{name}={value}" for name, value in wanted.items())
            + "   or  memtune run tuned.yaml -- python train.py",
            code="MT314",
        )


def _started_without(wanted: Mapping[str, str]) -> bool:
    """Whether CUDA runs in this process with other allocator settings than `wanted`, as torch itself
    tells.
    """
    import torch

    in_effect: Callable[[], str] | None = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if in_effect is None or not torch.cuda.is_initialized():
        return False
    options = set(in_effect().split(","))
    return any(
        not set(value.split(",")) <= options for name, value in wanted.items() if name.endswith("_ALLOC_CONF")
    )
