"""Compatibility of techniques: rules on their effects, a table of pairs, and the matrix of both.

`fits` calls `conflict` for the techniques in other slots; `apply` calls `refusal` for a whole config;
`memtune techniques --matrix` prints `matrix`. Refusals that depend on the program, on a plan or on the number
of ranks are in `fits`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations
from typing import Any, Protocol

from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.refusals import no_blocks_to_load, steps_others
from memtune.search_spaces import PASS_ORDER, SLOTS, active, all_techniques, is_null, null
from memtune.technique import CompileScope, Facts, Reason, Technique, lacking


class Config(Protocol):
    """Fields of a config that `Target` and `Facts` share."""

    @property
    def chosen(self) -> Mapping[str, Technique]:
        """Techniques by slot."""

    @property
    def ranks(self) -> int:
        """Number of ranks that train together."""

    @property
    def compiled(self) -> CompileScope:
        """The part of the model that runs through torch.compile."""


def is_gathered(config: Config) -> bool:
    """Return True if parameters are sharded over ranks and unsharded for the calls of their block only."""
    states = config.chosen.get("sharding.states")
    if states is None or config.ranks == 1:
        return False
    try:
        return states.divides_parameters(config.ranks, states.plan_in({}))
    except ApplyError:  # the degree is part of the technique's own plan, which does not exist yet
        return True


def follows_calls(config: Config) -> Technique | None:
    """Return the technique of `offload.states` if it acts on calls of blocks or on ready gradients."""
    offload = config.chosen.get("offload.states")
    return offload if offload is not None and offload.effects.follows_calls else None


def needs_calls_of_blocks(config: Config) -> bool:
    """Return True if hooks on the calls of blocks move parameters, gradients or activations."""
    # A schedule of the whole model makes no such calls, so each block has a schedule of its own.
    return (
        is_gathered(config)
        or follows_calls(config) is not None
        or active(config, "offload.activations") is not None
    )


def one_for_all_buckets(chosen: Mapping[str, Technique], compiled: CompileScope) -> tuple[str, Reason | None]:
    """Return the setting under which length buckets have no plans of their own, and why, if any."""
    if compiled:
        text = "a length bucket has no plan of its own under torch.compile, which decides what is saved"
        return f"execution: {{compile: {compiled}}}", Reason(text, "compile: false, or remove buckets")
    for technique in chosen.values():
        effects, name = technique.effects, f"{technique.slot}: {{kind: {technique.kind}}}"
        if effects.layers == "stages" or effects.layer_major or technique.slot == "execution.order":
            text = "micro-batches of all length buckets run in one order, and so follow one plan"
            return name, Reason(
                text, f"{technique.slot}: {{kind: {null(technique.slot).kind}}}, or remove buckets"
            )
        if technique.slot == "allocator" and technique.plan_types:
            text = "addresses are planned for one length of batches"
            return name, Reason(text, "another allocator, or remove buckets")
    return "", None


def _always(config: Config) -> bool:
    return True


def _on_ranks(config: Config) -> bool:
    return config.ranks > 1


def _of_the_model(config: Config) -> bool:
    """Return True if one schedule runs the whole model."""
    return not needs_calls_of_blocks(config)


def _not_gathered(config: Config) -> bool:
    return not is_gathered(config)


def _eager(config: Config) -> bool:
    return not config.compiled


def _any(effects: Effects) -> bool:
    return True


@dataclass(frozen=True)
class Excluded:
    """Techniques that a technique refuses; `{slot}` and `{kind}` in a text are those of the refused one."""

    slots: tuple[str, ...]
    text: str
    fix: str
    having: Callable[[Effects], bool] = _any
    """Condition on the refused technique's effects."""
    only: Callable[[Config], bool] = _always
    """Condition on the config."""
    needs: bool = False
    """A technique in the slot is required, so the null technique is refused as well."""
    code: str = "MT315"
    """Error code of `apply`; empty for rules about making a plan, which `apply` does not do."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the technique that refuses for which this holds."""


@dataclass(frozen=True)
class Rule:
    """Techniques of `slot` with some effects do not work with some techniques of the slot `other`."""

    slot: str
    when: Callable[[Effects], bool]
    other: str
    excluded: Excluded


def _rules_of(slot: str, when: Callable[[Effects], bool], *excluded: Excluded) -> Iterator[Rule]:
    """Yield the rules of techniques of `slot` whose effects fulfil `when`."""
    return (Rule(slot, when, other, each) for each in excluded for other in each.slots)


@dataclass(frozen=True)
class Pair:
    """Two techniques that exclude each other although no rule on their effects does."""

    one: tuple[str, str]
    """Slot and kind of the technique that refuses."""
    other: tuple[str, str]
    """Slot and kind of the technique that is refused; `*` is any kind but the null one."""
    text: str
    fix: str
    where: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the first one for which this holds."""


def _offloads_blocks(effects: Effects) -> bool:
    """Return True if parameters of blocks or experts are reloaded for their calls."""
    return effects.averages == "blocks" or effects.moves == "expert"


def _not_sharded_alike(effects: Effects) -> bool:
    """Return True unless weights are whole, or unsharded by unit with gradients final in backward."""
    return effects.shards not in ("replicas", "parameters") or effects.reduces != "ready"


def _for_all_blocks(effects: Effects) -> bool:
    """Return True if its decisions on activations hold only for a rank that has all blocks."""
    return effects.activations not in ("uniform", "stage", "block")


def _planned_for_a_step(effects: Effects) -> bool:
    """Return True if its decisions hold only where all blocks run forward, then backward."""
    return _schedules(effects) or effects.activations in ("model", "tensor", "graph")


def _schedules(effects: Effects) -> bool:
    """Return True if a schedule runs in place of the model's code."""
    return effects.calls == "schedule"


_FOR_ALL_BLOCKS = "{slot}: {kind} is planned for a rank that has all blocks"
_SCHEDULED = "a frozen schedule runs the model without {slot}: {kind}"
_ONE_SCHEDULE = "one schedule runs ops of all blocks, and {kind} "
_NOT_IN_PACKS = "plans of activations do not hold for packs, which run one after the other"
_BY_CALLS = "recompute: {{kind: full}}, selective or every_nth"
_NO_OTHER = "{slot}: {{kind: none}}"
_REPLICAS = "sharding: {{states: {{kind: ddp}}}}"


# Of one slot against another the first rule that holds gives the reason.
def _every_gradient(unit: str) -> Excluded:
    """Return the rule for gradients that ranks average `unit`, which some ranks must not lack."""
    return Excluded(
        ("sharding.states",),
        f"ranks average gradients {unit} when they are ready, so every rank must have all of them",
        "find_unused_parameters: false",
        having=lambda e: e.finds_unused,
        only=_on_ranks,
    )


RULES = (
    # Layers over ranks
    *_rules_of(
        "sharding.parallel",
        lambda e: e.layers == "shared",
        Excluded(("offload.states",), "{slot}: {kind} does not work on layers that ranks share", _NO_OTHER),
    ),
    *_rules_of(
        "sharding.parallel",
        lambda e: e.layers == "stages",
        Excluded(
            ("sharding.communication", "offload.states", "split", "execution.order"),
            "{slot}: {kind} does not work on the stages of a pipeline",
            _NO_OTHER,
        ),
        Excluded(
            ("sharding.states",),
            "{slot}: {kind} does not work on the stages of a pipeline",
            "sharding.states: {{kind: none}}, or zero1",
            having=lambda e: e.shards == "nested",
        ),
        Excluded(
            ("recompute",), _FOR_ALL_BLOCKS, "recompute: {{kind: full}}", having=_for_all_blocks, code=""
        ),
        Excluded(
            ("offload.activations",),
            _FOR_ALL_BLOCKS,
            "offload.activations: {{kind: pipelined}}",
            having=_for_all_blocks,
            code="",
        ),
    ),
    # Schedules in place of the model's code
    *_rules_of(
        "recompute",
        _schedules,
        Excluded(("sharding.parallel",), _SCHEDULED, _NO_OTHER),
        Excluded(("split", "sharding.communication"), _SCHEDULED, _NO_OTHER, only=_of_the_model),
        Excluded(
            ("split",),
            "a schedule runs a block's ops, and MLPs in parts have graphs of their own, made in backward",
            "split: {{kind: tiled, mlp: 1}}",
            having=lambda e: e.calls == "parts",
        ),
        Excluded(
            ("offload.states",),
            "a schedule runs a block's recorded ops, and products with tiled weights are other ops",
            "tiles: 1",
            having=lambda e: e.moves == "tile",
        ),
    ),
    *_rules_of(
        "recompute",
        lambda e: _schedules(e) and e.activations == "model",
        Excluded(
            ("sharding.states",),
            _ONE_SCHEDULE + "unshards a block's parameters for its own calls only",
            "recompute: {{kind: planned}}, or sharding.states: {{kind: zero1}}",
            only=is_gathered,
        ),
        Excluded(
            ("offload.states",),
            _ONE_SCHEDULE + "moves a block's parameters or gradients at its own calls only",
            "recompute: {{kind: planned}}, or offload.states: {{kind: optimizer_cpu}}",
            having=lambda e: e.follows_calls,
        ),
        Excluded(
            ("offload.activations",),
            _ONE_SCHEDULE + "moves what each block keeps",
            "recompute: {{kind: planned}}, or offload.activations: {{kind: none}}",
        ),
    ),
    *_rules_of(
        "offload.states",
        lambda e: e.moves == "tile",
        Excluded(
            ("recompute",),
            "a schedule runs the ops of blocks on whole weights",
            "tiles: 1, or recompute: {{kind: full}}",
            having=_schedules,
        ),
    ),
    *_rules_of(
        "offload.states",
        lambda e: e.moves == "expert",
        Excluded(
            ("recompute",),
            "a schedule replaces the experts' calls",
            "recompute: {{kind: full}}",
            having=_schedules,
            only=_not_gathered,
            code="MT364",
        ),
    ),
    # Packs of blocks, layer-major
    *_rules_of(
        "recompute",
        _planned_for_a_step,
        Excluded(("offload.states",), _NOT_IN_PACKS, _BY_CALLS, having=lambda e: e.layer_major),
    ),
    *_rules_of(
        "offload.states",
        lambda e: e.layer_major,
        Excluded(("recompute",), _NOT_IN_PACKS, _BY_CALLS, having=_planned_for_a_step),
        Excluded(("offload.activations",), "a pack's activations are used at once", _NO_OTHER),
        Excluded(("split",), "the model's own code runs a second time up to the first block", _NO_OTHER),
    ),
    *_rules_of(
        "offload.states",
        lambda e: e.averages == "all",
        Excluded(
            ("sharding.states", "sharding.parallel"),
            "packs average their gradients themselves",
            _NO_OTHER,
            only=_on_ranks,
        ),
    ),
    # Parameters of blocks that are offloaded
    *_rules_of(
        "offload.states",
        _offloads_blocks,
        Excluded(
            ("sharding.parallel",),
            "offloaded blocks must be whole on each rank",
            "sharding: {{parallel: {{kind: none}}}}",
            only=_on_ranks,
            code="MT364",
        ),
        Excluded(
            ("sharding.states",),
            "offloaded blocks on several ranks must be whole on each, or gathered from all",
            _REPLICAS + " or fsdp",
            having=_not_sharded_alike,
            only=_on_ranks,
            needs=True,
            code="MT364",
        ),
        Excluded(
            ("sharding.communication",),
            "sharded blocks that are offloaded are all-gathered in one message, not as {kind} does",
            "plain",
            only=_on_ranks,
            code="MT364",
        ),
    ),
    *_rules_of(
        "offload.states",
        lambda e: e.moves == "expert",
        Excluded(
            ("sharding.states",),
            "each replica would have all experts on SSD, where FSDP2 divides them over ranks",
            "sharding: {{states: {{kind: fsdp}}}}",
            having=lambda e: e.shards == "replicas",
            only=_on_ranks,
            code="MT364",
        ),
    ),
    *_rules_of(
        "offload.states",
        lambda e: e.averages == "blocks",
        _every_gradient("block by block"),
        Excluded(
            ("sharding.states",),
            "each rank's thread would update at its own times, and weights of replicas would differ",
            "lock_free: false, or  sharding: {{states: {{kind: fsdp}}}}",
            having=lambda e: e.shards == "replicas",
            only=_on_ranks,
            code="MT364",
            where={"lock_free": True},
        ),
    ),
    *_rules_of(
        "offload.states",
        lambda e: e.calls == "block_hooks" and e.averages == "none",
        Excluded(
            ("sharding.states",),
            "it needs replicas: sharded weights are unsharded and resharded by hooks of their own",
            _REPLICAS,
            having=lambda e: e.shards != "replicas",
            needs=True,
            code="MT364",
        ),
    ),
    # Gradients that are offloaded when they are ready
    *_rules_of(
        "offload.states",
        lambda e: e.calls == "grad_hooks",
        Excluded(
            ("sharding.parallel",),
            "gradients that are offloaded when they are ready do not work with {kind}",
            "offload: {{states: {{kind: optimizer_cpu}}}} with trigger: end_of_step",
            only=_on_ranks,
        ),
        Excluded(
            ("sharding.states",),
            "under {kind} gradients are on the device until backward has ended",
            "sharding.states: ddp, fsdp, zero3, zero1 or zero2",
            having=lambda e: e.reduces != "ready",
            only=_on_ranks,
            needs=True,
        ),
        _every_gradient("one by one"),
        Excluded(
            ("sharding.states",),
            "under {kind} other ranks' copies of delayed weights would be stale",
            "sharding.states: fsdp",
            having=lambda e: e.shards in ("optimizer", "gradients"),
            only=_on_ranks,
            where={"delayed": True},
        ),
    ),
    # Order of the ops
    *_rules_of(
        "recompute",
        _any,
        *(
            Excluded(
                ("execution.order",),
                "deciding while the model runs it reads weights that updates inside backward have changed",
                "online: false, or execution: {{order: {{kind: program}}}}",
                only=_eager,
                where={"online": online},
            )
            for online in (None, True)
        ),
    ),
    *_rules_of(
        "execution.order",
        _any,
        Excluded(
            ("offload.states",),
            "the optimizer's step is on the host",
            "offload: {{states: {{kind: optimizer_cpu, trigger: per_gradient}}}}",
            only=_eager,
        ),
    ),
    # Collectives of units that are gathered
    *_rules_of(
        "sharding.communication",
        _any,
        Excluded(
            ("sharding.states",),
            "it changes how FSDP2 gathers parameters, and sharding.states is {kind}",
            "sharding.states: fsdp",
            having=lambda e: e.shards != "parameters",
            needs=True,
            code="MT341",
        ),
    ),
)

PAIRS = (
    Pair(
        ("recompute", "lohan"),
        ("offload.activations", "*"),
        "another technique moves the tensors to swap",
        "offload.activations: {kind: none}",
    ),
    Pair(
        ("recompute", "planned"),
        ("offload.activations", "*"),
        "another technique moves tensors that the plan may move itself",
        "recompute: {kind: planned, offload: false}, or offload.activations: {kind: none}",
        where={"offload": True},
    ),
    *(
        Pair(
            ("offload.states", "zero_offload"),
            (slot, kind),
            f"{kind} plans for the same budget, and its result is not known beforehand",
            "ratio: 1.0",
            where={"ratio": None},
        )
        for slot, kind in (
            ("recompute", "planned"),
            ("recompute", "lohan"),
            ("offload.activations", "tsplit"),
            ("offload.activations", "pipelined"),
        )
    ),
)


def conflict(technique: Technique, config: Config, *slots: str) -> Reason | None:
    """Return the first reason why `technique` does not work with those in `slots`, in their order."""
    for slot in slots:
        other = config.chosen.get(slot) or null(slot)
        reason = _by_rule(technique.slot, technique.effects, other, config, technique) or _by_pair(
            technique, other
        )
        if reason is not None:
            return reason
    return None


def effects_conflict(slot: str, effects: Effects, config: Config, *slots: str) -> Reason | None:
    """Return a reason as `conflict` does, for any technique with these effects, by the rules alone."""
    found = (_by_rule(slot, effects, config.chosen.get(each) or null(each), config) for each in slots)
    return next((reason for reason in found if reason is not None), None)


def refusal(facts: Facts) -> tuple[Technique, Reason] | None:
    """Return the first technique that refuses a whole config, and why; for `apply`.

    A technique refuses by its effects, by a rule, or by its own `refuses`.
    """
    for technique in (technique for slot in PASS_ORDER if (technique := active(facts, slot)) is not None):
        for reason in _refusals(technique, facts):
            if reason is not None and reason.code:
                return technique, reason
    return None


def _refusals(technique: Technique, facts: Facts) -> Iterator[Reason | None]:
    if facts.compiled and technique.effects.eager_only:
        yield Reason(technique.effects.eager_only, "execution.compile: false")
    if facts.platform is not None:
        yield lacking(facts.platform, technique.needs)
    if technique.effects.parameters_on != "device" and not facts.blocks:
        yield no_blocks_to_load()
    yield steps_others(technique, facts.inner_optimizers)
    yield technique.refuses(facts)
    for slot in SLOTS:
        if slot != technique.slot:
            yield _by_rule(
                technique.slot,
                technique.effects,
                facts.chosen.get(slot) or null(slot),
                facts,
                technique,
                live=True,
            )


def excludes(one: Technique, other: Technique, ranks: int) -> Reason | None:
    """Return why `one` refuses `other`, with nothing else chosen; `other` may refuse `one` as well."""
    facts = Facts({one.slot: one, other.slot: other}, ranks, False, "inductor", 0)
    return conflict(one, facts, other.slot)


def catalogue() -> tuple[Technique, ...]:
    """Return every technique but the null ones, with default knobs, slot by slot."""
    every = (each(kind=each.model_fields["kind"].default) for each in all_techniques())
    return tuple(each for each in every if not is_null(each))


def matrix(techniques: Iterable[Technique]) -> dict[tuple[Technique, Technique], Reason | None]:
    """Return, for each two of `techniques` in different slots and in both orders, why they do not work
    together on several ranks.

    None: neither refuses the other for every program; `fits` may still refuse one of them for a given
    program.
    """
    pairs = [(one, other) for one, other in permutations(techniques, 2) if one.slot != other.slot]
    return {(one, other): excludes(one, other, 2) or excludes(other, one, 2) for one, other in pairs}


def matrix_by_knobs(techniques: Iterable[Technique]) -> Iterator[tuple[Technique, str, Technique, Reason]]:
    """Yield each pair refused only for other knobs than the defaults, with the knobs and the reason."""
    every = tuple(techniques)
    restricted = [*(rule.excluded.where for rule in RULES), *(pair.where for pair in PAIRS)]
    wheres = dict.fromkeys(tuple(where.items()) for where in restricted if where)
    for one in every:
        for where in wheres:
            if any(getattr(one, knob, value) == value for knob, value in where):
                continue  # it holds by default, or the technique has no such knob
            changed = one.model_copy(update=dict(where))
            knobs = ", ".join(f"{knob}: {json.dumps(value)}" for knob, value in where)
            for other in (each for each in every if each.slot != one.slot and excludes(one, each, 2) is None):
                if (reason := excludes(changed, other, 2)) is not None:
                    yield changed, knobs, other, reason


def _by_rule(
    slot: str,
    effects: Effects,
    other: Technique,
    config: Config,
    technique: Technique | None = None,
    *,
    live: bool = False,
) -> Reason | None:
    """Return the reason of the first rule that holds; `live`: only of rules that `apply` checks.

    Rules on knobs hold for a `technique` only, not for effects alone.
    """
    acts = not is_null(other)
    for rule in _rules(slot, other.slot):
        excluded = rule.excluded
        if not (acts or excluded.needs) or (live and not excluded.code):
            continue
        if not _has_knobs(technique, excluded.where) or not excluded.only(config):
            continue
        if rule.when(effects) and excluded.having(other.effects):
            text, fix = (
                each.format(slot=other.slot, kind=other.kind) for each in (excluded.text, excluded.fix)
            )
            return Reason(text, fix, excluded.code)
    return None


def _by_pair(one: Technique, other: Technique) -> Reason | None:
    for pair in PAIRS:
        if pair.one != (one.slot, one.kind) or pair.other[0] != other.slot or is_null(other):
            continue
        if pair.other[1] in ("*", other.kind) and _has_knobs(one, pair.where):
            return Reason(pair.text, pair.fix)
    return None


def _has_knobs(technique: Technique | None, where: Mapping[str, Any]) -> bool:
    """Return True if `technique` has the knobs `where` with these values."""
    absent = object()  # equal to no value: a technique may lack the knob
    return all(getattr(technique, knob, absent) == value for knob, value in where.items())


@cache
def _rules(slot: str, other: str) -> tuple[Rule, ...]:
    return tuple(rule for rule in RULES if (rule.slot, rule.other) == (slot, other))
