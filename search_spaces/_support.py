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
from memtune.refusals import no_blocks_to_load
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
    """Return the technique of `offload.states` if it acts on calls of blocks or on gradients when they are
    ready.
    """
    offload = config.chosen.get("offload.states")
    return offload if offload is not None and offload.effects.follows_calls else None


def needs_calls_of_blocks(config: Config) -> bool:
    """Return True if hooks on the calls of blocks move parameters, gradients or activations.

    A schedule of the whole model makes no such calls, so each block has a schedule of its own.
    """
    return (
        is_gathered(config)
        or follows_calls(config) is not None
        or active(config, "offload.activations") is not None
    )


def one_for_all_buckets(chosen: Mapping[str, Technique], compiled: CompileScope) -> tuple[str, Reason | None]:
    """Return the setting under which length buckets cannot have plans of their own, and why; no setting and
    None if they can.
    """
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


@dataclass(frozen=True)
class Rule:
    """Effects of two techniques that exclude each other; `{slot}` and `{kind}` in a text are the second
    one's.
    """

    slot: str
    """Slot of the technique that refuses."""
    when: Callable[[Effects], bool]
    """Condition on its effects."""
    other: str
    """Slot of the technique that is refused."""
    refuses: Callable[[Effects], bool]
    """Condition on the refused technique's effects."""
    text: str
    fix: str
    only: Callable[[Config], bool] = _always
    """Condition on the config."""
    needs: bool = False
    """It requires a technique in the slot, so the null technique is refused as well."""
    code: str = "MT315"
    """Error code of `apply`; empty for rules about making a plan, which `apply` does not do."""
    where: Mapping[str, Any] = field(default_factory=dict)
    """Knobs of the technique that refuses for which this holds."""


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


def _any(effects: Effects) -> bool:
    return True


def _offloads_blocks(effects: Effects) -> bool:
    """Return True if parameters of blocks or experts are reloaded for their calls, and their gradients
    averaged for the offload.
    """
    return effects.averages in ("blocks", "experts")


def _not_sharded_alike(effects: Effects) -> bool:
    """Return True unless weights are whole on each rank, or unsharded unit by unit with gradients final in
    backward.
    """
    return effects.shards not in ("replicas", "parameters") or effects.reduces != "ready"


def _for_all_blocks(effects: Effects) -> bool:
    """Return True if its decisions on activations hold only for a rank that has all blocks."""
    return effects.activations not in ("uniform", "stage", "block")


def _planned_for_a_step(effects: Effects) -> bool:
    """Return True if its decisions hold only where all blocks run forward, then backward."""
    return effects.calls == "schedule" or effects.activations in ("model", "tensor", "graph")


def _one_schedule(effects: Effects) -> bool:
    """Return True if one schedule runs the ops of all blocks."""
    return effects.calls == "schedule" and effects.activations == "model"


_STAGED = "{slot}: {kind} does not work on the stages of a pipeline"
_FOR_ALL_BLOCKS = "{slot}: {kind} is planned for a rank that has all blocks"
_SCHEDULED = "a frozen schedule runs the model without {slot}: {kind}"
_NOT_IN_PACKS = "plans of activations do not hold for packs, which run one after the other"
_OTHER_UPDATE = "offload: {{states: {{kind: optimizer_cpu}}}} with trigger: end_of_step"

RULES = (
    # Layers over ranks
    Rule(
        "sharding.parallel",
        lambda e: e.layers == "shared",
        "offload.states",
        _any,
        "{slot}: {kind} does not work on layers that ranks share",
        "{slot}: {{kind: none}}",
    ),
    *(
        Rule(
            "sharding.parallel", lambda e: e.layers == "stages", slot, _any, _STAGED, "{slot}: {{kind: none}}"
        )
        for slot in ("sharding.communication", "offload.states", "split", "execution.order")
    ),
    Rule(
        "sharding.parallel",
        lambda e: e.layers == "stages",
        "sharding.states",
        lambda e: e.shards == "nested",
        _STAGED,
        "sharding.states: {{kind: none}}, or zero1",
    ),
    Rule(
        "sharding.parallel",
        lambda e: e.layers == "stages",
        "recompute",
        _for_all_blocks,
        _FOR_ALL_BLOCKS,
        "recompute: {{kind: full}}",
        code="",
    ),
    Rule(
        "sharding.parallel",
        lambda e: e.layers == "stages",
        "offload.activations",
        _for_all_blocks,
        _FOR_ALL_BLOCKS,
        "offload.activations: {{kind: pipelined}}",
        code="",
    ),
    # Schedules in place of the model's code
    Rule(
        "recompute",
        lambda e: e.calls == "schedule",
        "sharding.parallel",
        _any,
        _SCHEDULED,
        "{slot}: {{kind: none}}",
    ),
    *(
        Rule(
            "recompute",
            lambda e: e.calls == "schedule",
            slot,
            _any,
            _SCHEDULED,
            "{slot}: {{kind: none}}",
            only=_of_the_model,
        )
        for slot in ("split", "sharding.communication")
    ),
    Rule(
        "recompute",
        lambda e: e.calls == "schedule",
        "split",
        lambda e: e.calls == "parts",
        "a schedule runs a block's ops, and MLPs in parts have graphs of their own, made in backward",
        "split: {{kind: tiled, mlp: 1}}",
    ),
    Rule(
        "recompute",
        lambda e: e.calls == "schedule",
        "offload.states",
        lambda e: e.moves == "tile",
        "a schedule runs a block's recorded ops, and products with tiled weights are other ops",
        "tiles: 1",
    ),
    Rule(
        "offload.states",
        lambda e: e.moves == "tile",
        "recompute",
        lambda e: e.calls == "schedule",
        "a schedule runs the ops of blocks on whole weights",
        "tiles: 1, or recompute: {{kind: full}}",
    ),
    Rule(
        "offload.states",
        lambda e: e.moves == "expert",
        "recompute",
        lambda e: e.calls == "schedule",
        "a schedule replaces the experts' calls",
        "recompute: {{kind: full}}",
        only=_not_gathered,
        code="MT364",
    ),
    # One schedule of the whole model
    Rule(
        "recompute",
        _one_schedule,
        "sharding.states",
        _any,
        "one schedule runs ops of all blocks, and {kind} unshards a block's parameters for its own calls"
        " only",
        "recompute: {{kind: planned}}, or sharding.states: {{kind: zero1}}",
        only=is_gathered,
    ),
    Rule(
        "recompute",
        _one_schedule,
        "offload.states",
        lambda e: e.follows_calls,
        "one schedule runs ops of all blocks, and {kind} moves a block's parameters or gradients at its own"
        " calls only",
        "recompute: {{kind: planned}}, or offload.states: {{kind: optimizer_cpu}}",
    ),
    Rule(
        "recompute",
        _one_schedule,
        "offload.activations",
        _any,
        "one schedule runs ops of all blocks, and {kind} moves what each block keeps",
        "recompute: {{kind: planned}}, or offload.activations: {{kind: none}}",
    ),
    # Packs of blocks, layer-major
    Rule(
        "recompute",
        _planned_for_a_step,
        "offload.states",
        lambda e: e.layer_major,
        _NOT_IN_PACKS,
        "recompute: {{kind: full}}, selective or every_nth",
    ),
    Rule(
        "offload.states",
        lambda e: e.layer_major,
        "recompute",
        _planned_for_a_step,
        _NOT_IN_PACKS,
        "recompute: {{kind: full}}, selective or every_nth",
    ),
    Rule(
        "offload.states",
        lambda e: e.layer_major,
        "offload.activations",
        _any,
        "a pack's activations are used at once",
        "{slot}: {{kind: none}}",
    ),
    Rule(
        "offload.states",
        lambda e: e.layer_major,
        "split",
        _any,
        "the model's own code runs a second time up to the first block",
        "{slot}: {{kind: none}}",
    ),
    *(
        Rule(
            "offload.states",
            lambda e: e.averages == "all",
            slot,
            _any,
            "packs average their gradients themselves",
            "{slot}: {{kind: none}}",
            only=_on_ranks,
        )
        for slot in ("sharding.states", "sharding.parallel")
    ),
    # Parameters of blocks that are offloaded
    Rule(
        "offload.states",
        _offloads_blocks,
        "sharding.parallel",
        _any,
        "offloaded blocks must be whole on each rank",
        "sharding: {{parallel: {{kind: none}}}}",
        only=_on_ranks,
        code="MT364",
    ),
    Rule(
        "offload.states",
        _offloads_blocks,
        "sharding.states",
        _not_sharded_alike,
        "offloaded blocks on several ranks must be whole on each, or gathered from all",
        "sharding: {{states: {{kind: ddp}}}} or fsdp",
        only=_on_ranks,
        needs=True,
        code="MT364",
    ),
    Rule(
        "offload.states",
        lambda e: e.averages == "blocks",
        "sharding.states",
        lambda e: e.finds_unused,
        "ranks average gradients block by block when they are ready, so every rank must have all of them",
        "find_unused_parameters: false",
        only=_on_ranks,
    ),
    Rule(
        "offload.states",
        lambda e: e.averages == "blocks",
        "sharding.states",
        lambda e: e.shards == "replicas",
        "each rank's thread would update at its own times, and weights of replicas would differ",
        "lock_free: false, or  sharding: {{states: {{kind: fsdp}}}}",
        only=_on_ranks,
        code="MT364",
        where={"lock_free": True},
    ),
    Rule(
        "offload.states",
        _offloads_blocks,
        "sharding.communication",
        _any,
        "sharded blocks that are offloaded are all-gathered in one message, not as {kind} does",
        "plain",
        only=_on_ranks,
        code="MT364",
    ),
    Rule(
        "offload.states",
        lambda e: e.calls == "block_hooks" and e.averages == "none",
        "sharding.states",
        lambda e: e.shards != "replicas",
        "it needs replicas: sharded weights are unsharded and resharded by hooks of their own",
        "sharding: {{states: {{kind: ddp}}}}",
        needs=True,
        code="MT364",
    ),
    # Gradients that are offloaded when they are ready
    Rule(
        "offload.states",
        lambda e: e.calls == "grad_hooks",
        "sharding.parallel",
        _any,
        "gradients that are offloaded when they are ready do not work with {kind}",
        _OTHER_UPDATE,
        only=_on_ranks,
    ),
    Rule(
        "offload.states",
        lambda e: e.calls == "grad_hooks",
        "sharding.states",
        lambda e: e.reduces != "ready",
        "under {kind} gradients are on the device until backward has ended",
        "sharding.states: ddp, fsdp, zero3, zero1 or zero2",
        only=_on_ranks,
        needs=True,
    ),
    Rule(
        "offload.states",
        lambda e: e.calls == "grad_hooks",
        "sharding.states",
        lambda e: e.finds_unused,
        "ranks average gradients one by one when they are ready, so every rank must have all of them",
        "find_unused_parameters: false",
        only=_on_ranks,
    ),
    Rule(
        "offload.states",
        lambda e: e.calls == "grad_hooks",
        "sharding.states",
        lambda e: e.shards in ("optimizer", "gradients"),
        "under {kind} other ranks' copies of delayed weights would be stale",
        "sharding.states: fsdp",
        only=_on_ranks,
        where={"delayed": True},
    ),
    *(
        Rule(
            "recompute",
            _any,
            "execution.order",
            _any,
            "deciding while the model runs it reads weights that updates inside backward have changed",
            "online: false, or execution: {{order: {{kind: program}}}}",
            only=_eager,
            where={"online": online},
        )
        for online in (None, True)
    ),
    Rule(
        "execution.order",
        _any,
        "offload.states",
        _any,
        "the optimizer's step is on the host",
        "offload: {{states: {{kind: optimizer_cpu, trigger: per_gradient}}}}",
        only=_eager,
    ),
    # Collectives of units that are gathered
    Rule(
        "sharding.communication",
        _any,
        "sharding.states",
        lambda e: e.shards != "parameters",
        "it changes how FSDP2 gathers parameters, and sharding.states is {kind}",
        "sharding.states: fsdp",
        needs=True,
        code="MT341",
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
    """Return the first reason why `technique` does not work with the techniques in `slots`, in
    their order.
    """
    for slot in slots:
        other = config.chosen.get(slot) or null(slot)
        reason = _by_rule(technique.slot, technique.effects, other, config, technique) or _by_pair(
            technique, other
        )
        if reason is not None:
            return reason
    return None


def effects_conflict(slot: str, effects: Effects, config: Config, *slots: str) -> Reason | None:
    """Return a reason as `conflict` does, for any technique of `slot` with these effects, by the
    rules alone.
    """
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
    """Yield each pair that is refused only for knobs that differ from the defaults: the technique with these
    knobs, the knobs as text, the other one, the reason.
    """
    every = tuple(techniques)
    held = [*(each.where for each in RULES), *(each.where for each in PAIRS)]
    wheres = dict.fromkeys(tuple(where.items()) for where in held if where)
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
        if not (acts or rule.needs) or (live and not rule.code) or not _has_knobs(technique, rule.where):
            continue
        if rule.when(effects) and rule.refuses(other.effects) and rule.only(config):
            text, fix = (each.format(slot=other.slot, kind=other.kind) for each in (rule.text, rule.fix))
            return Reason(text, fix, rule.code)
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
