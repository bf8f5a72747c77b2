"""Candidates: one choice per slot, and the programs that they become.

Common prefixes of passes are rewritten once.

Invariants:

1. A candidate *is* its canonical record: choices with equal records are one candidate (`Rewriter.key`).
2. Every method of a technique sees the program after the passes before it, and may read what other slots
  chose. Its reads are recorded (`Watched`), so that a memoised pass is reused only where it would give the
  same result.
3. A candidate that does not fit is a Reason, never an exception.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from memtune.autotune.space.pass_cache import Node, Pass, ProgramCache, find_pass
from memtune.compile import Compiling
from memtune.config import Settings, load_config
from memtune.device import Capability
from memtune.program import Program, RankClass, Recording, accumulate_gradients
from memtune.search_spaces import PASS_ORDER, _pass_pipeline, null
from memtune.search_spaces._pass_pipeline import TrackedSlots
from memtune.search_spaces.execution import Execution
from memtune.technique import ComputePrecision, Facts, PassStage, Plan, Reason, Target, Technique, lacking

_MAX_KNOWN = 10_000
"""Number of technique and execution objects whose number is memoised."""


class Choice(Settings):
    """Settings with a canonical key, a measure of simplicity and a short name."""

    @classmethod
    def of(cls, execution: Execution, techniques: Mapping[str, Technique]) -> Choice:
        """Return a choice of techniques by slot."""
        made = Settings.of(execution, techniques)
        return cls(made.execution, made.techniques)

    @classmethod
    def from_document(cls, settings: Mapping[str, Any]) -> Choice:
        """Return a choice from plain settings as written by `dump`; raise ConfigError if malformed."""
        read = load_config({"settings": settings}).settings
        return cls(read.execution, read.techniques)

    def with_batch(self, per_rank: int, micro_batch: int | None = None) -> Choice:
        """Return this choice with the given micro-batch, else its own, else `per_rank` / accumulation."""
        size = micro_batch or self.execution.micro_batch or max(1, per_rank // self.execution.accumulate)
        return Choice(
            Execution.model_validate({**self.execution.model_dump(), "micro_batch": size}), self.techniques
        )

    @cached_property
    def partitioning(self) -> tuple[tuple[str, Any], ...]:
        """Return the techniques' settings for the partitioner of compiled graphs, if any is compiled."""
        if not self.execution.compile:
            return ()
        return tuple(sorted(pair for each in self.techniques for pair in each.partitioning().items()))

    @cached_property
    def precision(self) -> ComputePrecision | None:
        """Return the types in which a technique lets the model compute; None for its own."""
        return next((found for each in self.techniques if (found := each.computes_in()) is not None), None)

    @cached_property
    def complexity(self) -> tuple[int, int]:
        """Return (slots in use, knobs off their default)."""
        # Of equally good candidates the smaller one is chosen.
        knobs = sum(len(each.model_dump(exclude_defaults=True)) for each in self.techniques)
        return len(self.techniques) + int(self.execution.compile is not False), knobs + int(
            self.execution.accumulate > 1
        )

    @cached_property
    def summary(self) -> str:
        """Return the choice in one short line: `mb 4×2 · full · fsdp(degree=2)`."""
        parts = [self.execution.summary()] + [short(each) for each in self.techniques]
        return " · ".join(part for part in parts if part) or "plain"


def short(technique: Technique) -> str:
    """Return a technique in a short line.

    Its kind, its slot if the kind alone is ambiguous, and knobs off their default.
    """
    kind = (
        technique.kind
        if technique.slot in ("recompute", "sharding.states", "allocator")
        else f"{technique.slot}={technique.kind}"
    )
    knobs = technique.model_dump(exclude_defaults=True, exclude={"kind"}, mode="json")
    return kind + ("(" + ", ".join(f"{name}={value}" for name, value in knobs.items()) + ")" if knobs else "")


def _flat(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{path}/{name}", inner)
    else:
        yield f"{path}={json.dumps(value, sort_keys=True, default=str)}"


@dataclass(frozen=True, eq=False)
class Candidate:
    """A choice that fits, with its techniques' plans and its program."""

    choice: Choice
    key: str
    program: Program
    plans: Mapping[str, Plan] = field(default_factory=dict)
    """Plans by slot, without empty ones."""


class _Depends(Exception):
    """Raised where a refusal depends on slots that are not chosen yet."""


class _Undecided(Mapping[str, Technique]):
    """Slots of a choice that is not made yet: reading any slot but the technique's own raises `_Depends`.

    So no technique solves for a plan on a program that may never occur.
    """

    def __init__(self, own_slot: str) -> None:
        self._own_slot = own_slot

    def __getitem__(self, slot: str) -> Technique:
        raise KeyError(slot) if slot == self._own_slot else _Depends(slot)

    def __iter__(self) -> Iterator[str]:
        raise _Depends

    def __len__(self) -> int:
        raise _Depends


@cache
def _takes_part(technique: type[Technique]) -> bool:
    """Return whether a technique overrides a method of the search."""
    # Most null techniques do not, and are skipped.
    return any(
        getattr(technique, verb) is not getattr(Technique, verb) for verb in ("fits", "plan", "rewrite")
    )


@cache
def _active_null(slot: str) -> Technique | None:
    """Return the null technique of `slot` if it overrides a method of the search."""
    technique = null(slot)
    return technique if _takes_part(type(technique)) else None


class Rewriter:
    """Makes the programs of choices on one recording and target.

    Args:
        recording: The user's step as a function of the micro-batch.
        target: Hardware, ranks and budget; what other slots chose is filled in per candidate.
        validate: Check every invariant after each pass.
        compiled: Recordings of the compiled model by compile setting; None refuses choices that compile.
        in_precision: Recordings of the model that computes in other types, by those and by compile setting;
            None refuses choices with such types.
    """

    def __init__(
        self,
        recording: Recording,
        target: Target,
        *,
        validate: bool = True,
        compiled: Callable[[Compiling], Recording | Reason] | None = None,
        in_precision: Callable[[ComputePrecision, Compiling | None], Recording | Reason] | None = None,
    ) -> None:
        self.recording, self.target = recording, replace(target, optimizer=recording.optimizer)
        self.compiled, self.in_precision = compiled, in_precision
        self._validate = validate
        self._memory = ProgramCache()
        self._pairs: dict[Hashable, frozenset[str]] = {}
        self._numbers: dict[Technique | Execution, int] = {}
        self._known: dict[int, tuple[Technique | Execution, int]] = {}
        self.n_passes = 0
        """Passes that were run rather than memoised."""

    @property
    def execution(self) -> Execution:
        """Return the execution that was recorded, with the training script's micro-batches."""
        return Execution(autocast_cache=self.recording.autocast_cache)

    def candidate(self, choice: Choice) -> Candidate | Reason:
        """Return `choice` with its program and plans, or why it does not fit."""
        result, plans = self._walk(choice)
        return result if isinstance(result, Reason) else Candidate(choice, self.key(choice), result, plans)

    def key(self, choice: Choice) -> str:
        """Return the canonical record (rule 1): the mechanisms that run, with their settings."""
        pairs = set(self._execution_pairs(choice.execution))
        for technique in choice.techniques:
            pairs |= self._record_pairs(technique, choice)
        return "\n".join(sorted(pairs))

    def program(self, choice: Choice) -> Program | Reason:
        """Return the program of `choice`, or why it does not fit."""
        return self._walk(choice)[0]

    def refusal(self, technique: Technique, execution: Execution) -> Reason | None:
        """Return why `technique` never fits the plain program, whatever other slots chose.

        None if it fits or other slots decide.
        """
        # Techniques that shard states see other programs and fewer ranks where the model is
        # partitioned, which only candidates know.
        root = self._root(execution)
        if isinstance(root.result, Reason):
            return root.result
        if technique.effects.among_copies and self.target.ranks > 1 and self.target.sharded is not None:
            return None
        # A refusal that reads no other slot holds for all candidates.
        chosen = _Undecided(technique.slot)
        target = replace(
            self.target, chosen=chosen, compiled=execution.compile, compile_backend=execution.compile_backend
        )
        try:
            return _pass_pipeline.check_fit(root.result, technique, target, 1)
        except _Depends:
            return None

    def forget(self) -> None:
        """Drop all memoised programs."""
        self._memory.forget()

    def _execution_pairs(self, execution: Execution) -> frozenset[str]:
        number = self._number(execution)
        known = self._pairs.get(number)
        if known is None:
            known = self._pairs[number] = frozenset(_flat("execution", execution.model_dump(mode="json")))
        return known

    def _record_pairs(self, technique: Technique, choice: Choice) -> frozenset[str]:
        asked = (
            self._number(technique),
            choice.execution.compile,
            choice.execution.compile_backend,
            self._parts(technique, choice),
        )
        known = self._pairs.get(asked)
        if known is not None:
            return known
        watched = TrackedSlots(choice.chosen)
        seen = _pass_pipeline.visible_target(self._seen_by(watched, choice), self._parts(technique, choice))
        pairs = frozenset(_flat("", technique.record(seen)))
        if not watched.seen:  # the same whatever other slots hold
            self._pairs[asked] = pairs
        return pairs

    def _number(self, setting: Technique | Execution) -> int:
        """Return a number that is equal for equal settings, memoised by id."""
        # Hashing and comparing models would dominate.
        # The object is kept in the entry, so its id cannot be given to another one.
        known = self._known.get(id(setting))
        if known is not None and known[0] is setting:
            return known[1]
        number = self._numbers.setdefault(setting, len(self._numbers))
        if len(self._known) > _MAX_KNOWN:
            # Numbers stay in `_numbers`, so clearing costs hashing again, never another number.
            self._known.clear()
        self._known[id(setting)] = setting, number
        return number

    def _seen_by(self, watched: TrackedSlots, choice: Choice) -> Target:
        target = self.target
        compiled, backend = choice.execution.compile, choice.execution.compile_backend
        return Target(
            target.hardware,
            target.ranks,
            target.budget_bytes,
            watched,
            compiled,
            backend,
            sharded=target.sharded,
            recorded_kinds=target.recorded_kinds,
            optimizer=target.optimizer,
        )

    def _parts(self, technique: Technique, choice: Choice) -> int:
        """Return the number of ranks that partition one replica, if `technique` works across replicas."""
        # A program below the partitioning pass is specific to these parts, so this is no read to
        # record (rule 2).
        return _pass_pipeline.visible_parts(technique, choice.chosen, self.target.ranks)

    def _walk(self, choice: Choice) -> tuple[Program | Reason, Mapping[str, Plan]]:
        """Run all passes of `choice`.

        Return the program or the Reason of the first refusal, and the non-empty plans.
        """
        self._memory.begin()
        chosen, plans = choice.chosen, dict[str, Plan]()
        there = [chosen.get(slot) or _active_null(slot) for slot in PASS_ORDER]

        def passed(node: Node, technique: Technique, stage: PassStage) -> Node:
            # Plans are solved in the first stage; later ones only carry them out.
            if stage is not PassStage.AXES:
                return self._later(node, technique, stage, technique.plan_in(plans), choice)
            # A tree: choices with equal first slots share nodes, and passes below are memoised per node.
            _, after, plan = self._next(node, technique, choice)
            if not plan.is_empty:
                plans[technique.slot] = plan
            tracked = TrackedSlots(chosen)
            return self._memory.use(after, lambda: self._rewritten(node, technique, choice, tracked, plan)[0])

        root = self._root(choice.execution, choice.partitioning, choice.precision)
        if (reason := self._refused(choice, root)) is not None:
            return reason, {}
        node = _pass_pipeline.run_passes(
            root,
            [each for each in there if each is not None and _takes_part(type(each))],
            passed=passed,
            refused=lambda node: isinstance(node.result, Reason),
        )
        return node.result, plans

    def _refused(self, choice: Choice, root: Node) -> Reason | None:
        """Return why a technique refuses the other slots' choices, before the plans of others are solved."""
        # Not where ranks partition the model: then some techniques see fewer ranks.
        if isinstance(root.result, Reason) or "sharding.parallel" in choice.chosen:
            return None
        facts = Facts.of(root.result, self._seen_by(TrackedSlots(choice.chosen), choice))
        found = (each.refuses(facts) for each in choice.techniques)
        return next((reason for reason in found if reason is not None), None)

    def _later(self, node: Node, technique: Technique, stage: PassStage, plan: Plan, choice: Choice) -> Node:
        """Return the node below `node` after the pass of `technique` in a stage after the first."""
        assert isinstance(node.result, Program)
        program, watched = node.result, TrackedSlots(choice.chosen)

        def rewritten() -> Program | Reason:
            result = technique.passes()[stage](program, plan, self._seen_by(watched, choice))
            if isinstance(result, Program):
                self._check(result)
            return result

        known = node.made.setdefault((self._number(technique), stage), [])
        same = find_pass([each for each in known if each.plan == plan], choice.chosen)
        if same is not None:
            return self._memory.use(same.node, rewritten)
        result = rewritten()
        n_rows = sum(each.step.ops.n for each in result.rank_classes) if isinstance(result, Program) else 0
        there = self._memory.count(Node(result, n_rows))
        known.append(Pass(watched.seen, there, plan))
        return self._memory.use(there, rewritten)

    def _root(
        self,
        execution: Execution,
        partitioning: tuple[tuple[str, Any], ...] = (),
        precision: ComputePrecision | None = None,
    ) -> Node:
        key = self._number(execution), partitioning, precision
        root = self._memory.roots.get(key)
        if root is None:
            plain = self._plain(execution, partitioning, precision)
            n_rows = 0 if isinstance(plain, Reason) else plain.step.ops.n
            root = self._memory.roots[key] = self._memory.count(Node(plain, n_rows))
        return self._memory.use(root, lambda: self._plain(execution, partitioning, precision))

    def _plain(
        self,
        execution: Execution,
        partitioning: tuple[tuple[str, Any], ...],
        precision: ComputePrecision | None,
    ) -> Program | Reason:
        """Return the program before any pass, from the recording for this execution and precision."""
        if execution.micro_batch is None:
            return Reason("the micro-batch is not given", "set execution.micro_batch")
        recording: Recording | Reason = self.recording
        compiling = None
        if execution.compile:
            if self.compiled is None:
                return Reason("the compiled step was not recorded", "execution.compile: false")
            needs = (Capability.INDUCTOR,) if execution.compile_backend == "inductor" else ()
            if (reason := lacking(self.target.hardware.platform, needs)) is not None:
                return reason
            compiling = Compiling(execution.compile, execution.compile_backend, partitioning)
        if precision is not None:
            if self.in_precision is None:
                return Reason("the step was not recorded in another precision", "leave param_dtype out")
            recording = self.in_precision(precision, compiling)
        elif compiling is not None and self.compiled is not None:
            recording = self.compiled(compiling)
        if isinstance(recording, Reason):
            return recording
        step = recording.at(execution.micro_batch)
        # Gradients that are kept exist when backward begins, as in a later micro-batch.
        if execution.accumulate > 1 or recording.keeps_gradients:
            step = accumulate_gradients(step, kept=recording.keeps_gradients)
        return Program(
            (RankClass(self.target.ranks, step),),
            execution.micro_batch,
            execution.accumulate,
            batch_range=recording.batch_range(execution.micro_batch),
        )

    def _next(self, node: Node, technique: Technique, choice: Choice) -> Pass:
        known = node.below.setdefault(self._number(technique), [])
        there = find_pass(known, choice.chosen)
        if there is None:
            there = self._judged(node, technique, choice)
            known.append(there)
        return there

    def _judged(self, node: Node, technique: Technique, choice: Choice) -> Pass:
        """Return the pass of `technique` on `node` if it fits."""
        # Techniques with equal records (rule 1) share one.
        assert isinstance(node.result, Program)
        watched, parts = TrackedSlots(choice.chosen), self._parts(technique, choice)
        reason = _pass_pipeline.check_fit(node.result, technique, self._seen_by(watched, choice), parts)
        if reason is not None:
            return Pass(watched.seen, Node(reason))
        known = node.made.setdefault((technique.slot, self._record_pairs(technique, choice)), [])
        there = find_pass(known, choice.chosen)
        if there is None:
            there = self._run_pass(node, technique, choice)
            known.append(there)
        # The reads of `fits` count too: they decided that this pass is used.
        return there._replace(seen={**watched.seen, **there.seen})

    def _run_pass(self, node: Node, technique: Technique, choice: Choice) -> Pass:
        """Run the pass of `technique`, which fits, and return it with its reads of other slots (rule 2)."""
        watched = TrackedSlots(choice.chosen)
        result, plan = self._rewritten(node, technique, choice, watched)
        # Two techniques may give the same program, whose further passes are then shared.
        there = node.after(technique.slot, result)
        if there is None:
            there = self._memory.count(Node(result, 0 if result is node.result else result.step.ops.n))
        return Pass(watched.seen, there, plan)

    def _rewritten(
        self,
        node: Node,
        technique: Technique,
        choice: Choice,
        watched: TrackedSlots,
        plan: Plan | None = None,
    ) -> tuple[Program, Plan]:
        """Return the program of `node` after the pass of `technique`, and its plan: solved unless given."""
        assert isinstance(node.result, Program)
        self.n_passes += 1
        seen, parts = self._seen_by(watched, choice), self._parts(technique, choice)
        result, plan = _pass_pipeline.run_pass(node.result, technique, seen, parts, plan)
        if result is not node.result:
            self._check(result)
        return result, plan

    def _check(self, program: Program) -> None:
        for each in program.rank_classes if self._validate else ():
            each.step.validate()
