"""`TunedConfig`: the config that a search writes and `memtune.apply` reads; short, commented, editable, never
code.

One file: a new field changes the config, its loader and its writer.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memtune.config.evidence import evidence_text, name_of, people_text, with_evidence
from memtune.config.yaml_io import Document, flow, parse, read_text, save_text
from memtune.errors import ConfigError
from memtune.search_spaces import PASS_ORDER, SLOTS, did_you_mean, find, null
from memtune.search_spaces.execution import Execution
from memtune.technique import Exactness, Plan, Technique

SCHEMA = 1
UNCHANGED = "changes nothing"
"""Sentence of settings under which a step is that of the user's script."""
_ALIASES = {("sharding.communication", "plain"): "none"}
"""Other names of a technique that configs may use, by slot."""
_EXECUTION = tuple(Execution.model_fields)
_AXES = sorted({slot.split(".")[0] for slot in SLOTS} | {"execution"})
_SECTIONS = (
    "memtune",
    "settings",
    "measured",
    "predicted",
    "certificate",
    "made_for",
    "plan",
    "buckets",
    "study",
    "evidence",
)
BUCKET_SLOTS = ("recompute", "offload.activations")
"""Slots that a length bucket decides for itself: they act on what one forward saves for its backward."""


@dataclass(frozen=True)
class Settings:
    """Execution of the step, and one technique per slot; omitted slots hold the null technique."""

    execution: Execution = field(default_factory=Execution)
    techniques: tuple[Technique, ...] = ()
    """The techniques that are not null, in pass order; use `Settings.of` to make them so."""

    @classmethod
    def of(cls, execution: Execution, techniques: Mapping[str, Technique]) -> Settings:
        """Return settings made from techniques by slot."""
        used = (techniques.get(slot) for slot in PASS_ORDER)
        return cls(execution, tuple(each for each in used if each is not None and each != null(each.slot)))

    @cached_property
    def chosen(self) -> dict[str, Technique]:
        """Techniques by slot, without null techniques."""
        return {each.slot: each for each in self.techniques}

    def technique(self, slot: str) -> Technique:
        """Return the technique in `slot`, or the null technique if none was chosen."""
        return self.chosen.get(slot) or null(slot)

    def with_execution(self, **changes: Any) -> Settings:
        """Return these settings with some fields of `execution` changed."""
        return Settings(Execution.model_validate({**self.execution.model_dump(), **changes}), self.techniques)

    def dump(self) -> dict[str, Any]:
        """Return the `settings` of a config, nested by slot, without null techniques and default knobs."""
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

    def sentences(self) -> dict[str, str]:
        """Return a plain clause by slot for the execution, if decided here, and each technique."""
        ordered = sorted(self.techniques, key=lambda each: SLOTS.index(each.slot))
        clauses = {"execution": self.execution.sentence()} | {each.slot: each.described() for each in ordered}
        return {slot: clause for slot, clause in clauses.items() if clause}

    @property
    def exactness(self) -> Exactness:
        """The least exact class of the execution and the techniques."""
        # Gradients of several micro-batches are added up in another order, and inductor fuses sums.
        sums = self.execution.accumulate > 1 or self.execution.compile is not False
        own = Exactness.REORDERED if sums else Exactness.BITWISE
        return max((own, *(each.exactly() for each in self.techniques)), key=list(Exactness).index)

    @cached_property
    def sentence(self) -> str:
        """The settings as clauses in one line, without the micro-batches, which tables show as numbers."""
        plain = Settings(
            self.execution.model_copy(update={"micro_batch": None, "accumulate": 1}), self.techniques
        )
        return "; ".join(plain.sentences().values()) or UNCHANGED

    def env(self) -> dict[str, str]:
        """Return environment variables that must be set before the device starts."""
        return {
            name: value
            # A null allocator is not in `techniques`, but may still need a variable.
            for each in [*self.techniques, self.technique("allocator")]
            for name, value in each.env().items()
        }


class MadeFor(BaseModel):
    """Model, ranks and machine that a config was tuned for; compared when it is applied."""

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


class Bucket(BaseModel):
    """A length bucket: batches up to some shapes, and the techniques on their saved tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    inputs: tuple[tuple[Annotated[int, Field(ge=0, strict=True)], ...], ...]
    """Shapes of the tensors that the model's forward gets, in order; those of a batch of this bucket are not
    larger.
    """
    settings: Settings = Settings()
    """Techniques in `BUCKET_SLOTS`, instead of the config's own; omitted slots hold the null technique."""
    plan: dict[str, Plan] = Field(default_factory=dict)
    """Plans by slot, without empty plans."""
    predicted: dict[str, Any] = {}

    def document(self) -> dict[str, Any]:
        """Return the bucket as plain data, without empty sections."""
        document: dict[str, Any] = {"inputs": [list(each) for each in self.inputs]}
        if self.settings.techniques:
            document["settings"] = self.settings.dump()
            del document["settings"]["execution"]
        plans = {slot: plan.document() for slot, plan in self.plan.items() if not plan.is_empty}
        rest = {"plan": plans, "predicted": self.predicted}
        return document | {name: each for name, each in rest.items() if each}

    @property
    def sha256(self) -> str:
        """Hash of the document; all ranks compare it before training."""
        return hashlib.sha256(json.dumps(self.document(), sort_keys=True).encode()).hexdigest()

    def holds(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Return whether inputs of these shapes are not larger than `inputs`."""
        return len(shapes) == len(self.inputs) and all(
            len(shape) == len(most) and all(map(operator.le, shape, most))
            for shape, most in zip(shapes, self.inputs, strict=True)
        )


class TunedConfig(BaseModel):
    """A whole config: settings, measurements, predictions, origin, and the plans of its techniques."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    memtune: int = SCHEMA
    settings: Settings = Settings()
    measured: dict[str, Any] = {}
    predicted: dict[str, Any] = {}
    certificate: dict[str, Any] = {}
    made_for: MadeFor | None = None
    plan: dict[str, Plan] = Field(default_factory=dict)
    """Plans by slot, without empty plans."""
    buckets: tuple[Bucket, ...] = ()
    """Length buckets, smallest first; a batch belongs to the first that holds it. Larger batches follow the
    settings and plans above.
    """
    study: dict[str, Any] = {}

    def in_bucket(self, bucket: Bucket) -> TunedConfig:
        """Return the config that batches of `bucket` follow."""
        techniques = {slot: each for slot, each in self.settings.chosen.items() if slot not in BUCKET_SLOTS}
        plans = {slot: each for slot, each in self.plan.items() if slot not in BUCKET_SLOTS}
        settings = Settings.of(self.settings.execution, techniques | bucket.settings.chosen)
        return self.model_copy(update={"settings": settings, "plan": plans | bucket.plan, "buckets": ()})

    def __repr__(self) -> str:
        """Return the text of its file, without the plans and the measurements that are its evidence."""
        return people_text(self.document(), self.settings.sentences(), "", "").rstrip()

    def __str__(self) -> str:
        return repr(self)

    def document(self) -> dict[str, Any]:
        """Return the config as plain data, without empty sections."""
        document: dict[str, Any] = {"memtune": self.memtune, "settings": self.settings.dump()}
        sections: dict[str, Any] = {
            "measured": self.measured,
            "predicted": self.predicted,
            "certificate": self.certificate,
            "study": self.study,
        }
        if self.made_for is not None:
            sections["made_for"] = self.made_for.model_dump(mode="json", exclude_defaults=True)
        sections["plan"] = {slot: plan.document() for slot, plan in self.plan.items() if not plan.is_empty}
        sections["buckets"] = [each.document() for each in self.buckets]
        document.update({name: sections[name] for name in _SECTIONS if sections.get(name)})
        return document


def load_config(source: str | Path | Mapping[str, Any]) -> TunedConfig:
    """Read a config from a file and the evidence that it names, from YAML text (anything with a line break or
    a brace), or from plain data.

    Raises:
        ConfigError: The config is malformed, has unknown keys, or is of a newer schema. The message has the
            line, and the known key closest to an unknown one. The evidence is missing or was changed.
    """
    if isinstance(source, Mapping):
        return _validated(with_evidence(Document(_plain(source), {}, "config"), None))
    if isinstance(source, str) and any(mark in source for mark in "\n{"):
        return _validated(with_evidence(parse(source), None))
    path = Path(source)
    return _validated(with_evidence(parse(read_text(path), path.name), path.resolve().parent))


def _plain(data: Mapping[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(dict(data)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the config is not plain data:  {error}",
            fix="use only mappings, lists, text, numbers, booleans and null",
            code="MT202",
        ) from None


def _validated(document: Document) -> TunedConfig:
    data = document.data
    if not isinstance(data, dict):
        raise ConfigError(
            f"{document.source}:1  a config is a mapping, this is {_abbreviated(data)}.",
            fix="settings: {…}",
            code="MT202",
        )
    version = data.get("memtune", SCHEMA)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ConfigError(
            f"{document.where(('memtune',))}  memtune: {_abbreviated(version)} is no schema version.",
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
    own = ("settings", "plan", "buckets", "evidence")
    rest = {name: value for name, value in data.items() if name not in own}
    _known(
        document,
        ("made_for",),
        _mapping(document, ("made_for",), data.get("made_for")),
        tuple(MadeFor.model_fields),
    )
    settings = _settings(document, _mapping(document, ("settings",), data.get("settings")))
    plans = _plans(document, settings, SLOTS)
    buckets = _buckets(document, data.get("buckets"))
    try:
        return TunedConfig(settings=settings, plan=plans, buckets=buckets, **rest)
    except ValidationError as error:
        raise _explained(document, (), data, error) from None


def _buckets(document: Document, data: Any) -> tuple[Bucket, ...]:
    if data is not None and not isinstance(data, list):
        raise ConfigError(
            f"{document.where(('buckets',))}  buckets is a list, not {_abbreviated(data)}.",
            fix="buckets: [{inputs: [[8, 128]]}]",
            code="MT202",
        )
    return tuple(_bucket(document, index) for index in range(len(data or ())))


def _bucket(document: Document, index: int) -> Bucket:
    """Return one bucket; its settings and plan are read as those of a config."""
    path: tuple[str | int, ...] = ("buckets", index)
    part = document.part(path)
    if not isinstance(part.data, dict):
        raise ConfigError(
            f"{document.where(path)}  a bucket is a mapping, not {_abbreviated(part.data)}.",
            fix="buckets: [{inputs: [[8, 128]]}]",
            code="MT202",
        )
    _known(part, (), part.data, tuple(Bucket.model_fields))
    settings = _settings(part, _mapping(part, ("settings",), part.data.get("settings")))
    other = [each for each in settings.chosen if each not in BUCKET_SLOTS]
    if other or settings.execution != Execution():
        raise ConfigError(
            f"{part.where(('settings',))}  {(other or ['execution'])[0]} cannot differ between buckets.",
            evidence=f"A bucket decides {' and '.join(BUCKET_SLOTS)}.",
            fix="set it under the config's own settings",
            code="MT202",
        )
    rest = {name: value for name, value in part.data.items() if name in ("inputs", "predicted")}
    try:
        return Bucket(settings=settings, plan=_plans(part, settings, BUCKET_SLOTS), **rest)
    except ValidationError as error:
        raise _explained(part, (), part.data, error) from None


def _plans(document: Document, settings: Settings, slots: Sequence[str]) -> dict[str, Plan]:
    """Return the plans of the techniques in `slots`, without empty ones."""
    plan = _mapping(document, ("plan",), document.data.get("plan"))
    _known(document, ("plan",), plan, list(slots))
    decided = {slot: _mapping(document, ("plan", slot), fields) for slot, fields in plan.items()}
    return {
        slot: _plan(document, settings.technique(slot), fields) for slot, fields in decided.items() if fields
    }


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
                f"{document.where(path)}  {slot} has no `kind`, which names its technique.",
                evidence=f"kind is the name of one technique, not {_abbreviated(kind)}."
                if "kind" in node
                else "",
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
            # Pydantic's strict mode accepts a list as a tuple and a word as an enum only in JSON input, and
            # still refuses "2" as a number.
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
    """Return the plan of the technique in a slot, validated without the model."""
    try:
        return technique.plan_from(fields)
    except ValidationError as error:
        name = f"{technique.slot}: {{kind: {technique.kind}}}"
        raise _explained(
            document,
            ("plan", technique.slot),
            fields,
            error,
            code="MT316",
            evidence="" if technique.plan_types else f"{name} plans nothing.",
            fix=(
                f"remove plan: {{{technique.slot}: …}}"
                if not technique.plan_types
                else f"memtune search  or  memtune trial --config  makes a new plan for {name}"
            ),
        ) from None


def _slots_in(axis: str) -> tuple[str, ...]:
    return tuple(slot.split(".")[1] for slot in SLOTS if slot.startswith(f"{axis}."))


def _at(document: Document, path: tuple[str, ...], data: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping at `path` below `settings`; the axis `execution` also holds settings of its own."""
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
            f"{document.where(path)}  {'.'.join(path)} is a mapping, not {_abbreviated(value)}.",
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
    fix: str = "memtune config schema  prints the knobs of each technique",
) -> ConfigError:
    first = error.errors()[0]
    where = (*path, *_place_in(data, first))
    wrong = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return ConfigError(
        f"{document.where(where)}  {'.'.join(map(str, where))}: {wrong}, but got"
        f" {_abbreviated(first.get('input'))}.",
        evidence=evidence,
        fix=fix,
        code=code,
    )


def _place_in(data: Any, error: Mapping[str, Any]) -> Iterator[str | int]:
    """Yield the keys that lead to the error."""
    # Pydantic's location also names the member of a union that it tried, which is no key of the config.
    for key in error["loc"]:
        if (isinstance(data, Mapping) and key in data) or (isinstance(data, list) and isinstance(key, int)):
            data = data[key]
            yield key
        elif error["type"] == "missing":
            yield key


def _abbreviated(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


# -- writing -------------------------------------------------------------------------------------------------

_COMMENTS = {
    "settings": "applied by memtune.apply; after an edit run  memtune config check",
    "measured": "in a fresh process, with these settings",
    "predicted": "by the simulator, before the run",
    "certificate": "checks that passed",
    "made_for": "apply compares this with your model and ranks",
    "plan": "decisions of the search",
    "buckets": "shorter batches, with techniques and plans of their own",
    "study": "origin",
}


def dump_yaml(config: TunedConfig) -> str:
    """Return the whole config as one commented YAML text; reading it returns an equal config."""
    lines: list[str] = []
    for name, value in config.document().items():
        if isinstance(value, Mapping):
            lines.append(f"{name}:  # {_COMMENTS[name]}" if name in _COMMENTS else f"{name}:")
            lines.extend(_block(value, "  "))
        elif name in _COMMENTS:
            lines.append(f"{name}:  # {_COMMENTS[name]}")
            lines.extend(f"- {flow(each)}" for each in value)
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
    """Write `tuned.yaml` for people, and its evidence to `tuned.evidence.json` in the same folder; each is
    replaced atomically, the evidence first.

    Raises:
        EnvironmentFault: They cannot be written.
    """
    text, evidence = file_texts(config, path)
    if evidence:
        real = Path(path).resolve()  # the evidence of a link is next to the file
        save_text(real.parent / name_of(real), evidence)
    return save_text(path, text)


def file_texts(config: TunedConfig, path: str | Path) -> tuple[str, str]:
    """Return the texts of the config at `path` and of its evidence, which is empty if there is none."""
    document = config.document()
    evidence = evidence_text(document)
    name = name_of(Path(path).resolve())
    return people_text(document, config.settings.sentences(), name, evidence), evidence
