"""Candidates: one choice per slot, and the programs they stand for, each common prefix of passes rewritten once.

Three rules:

1. A candidate *is* its canonical record: choices with equal records are one candidate (`Rewriter.key`).
2. Every verb of a technique sees the program as the passes before it left it, and may look at what other slots chose.
   What it looked at is noted (`Watched`), so that a memoised pass is used again only where it would come out the same.
3. A candidate that does not fit is a Reason, never an exception.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from memtune.autotune.program_memory import Node, Pass, ProgramMemory, found
from memtune.config import Settings, load_config
from memtune.edit import accumulate_gradients
from memtune.program import Program, RankClass, Recording
from memtune.runtime.compiled import Compiling
from memtune.search_spaces import PASS_ORDER, _passes, null
from memtune.search_spaces._watched import Watched
from memtune.search_spaces.execution import Execution
from memtune.technique import NO_PLAN, Plan, Reason, Target, Technique

_MAX_KNOWN = 10_000
"""Technique and execution objects whose number is remembered."""


class Choice(Settings):
    """Settings as the search sees them: with a canonical key, a measure of simplicity and a short name."""

    @classmethod
    def of(cls, execution: Execution, techniques: Mapping[str, Technique]) -> Choice:
        """A choice from techniques by slot."""
        made = Settings.of(execution, techniques)
        return cls(made.execution, made.techniques)

    @classmethod
    def from_document(cls, settings: Mapping[str, Any]) -> Choice:
        """A choice from plain settings, as `dump` writes them; raises ConfigError where they are malformed."""
        read = load_config({"settings": settings}).settings
        return cls(read.execution, read.techniques)

    def with_batch(self, per_rank: int, micro_batch: int | None = None) -> Choice:
        """This choice with the micro-batch that was asked for, else its own, else what accumulation leaves of `per_rank`."""
        size = micro_batch or self.execution.micro_batch or max(1, per_rank // self.execution.accumulate)
        return Choice(Execution.model_validate({**self.execution.model_dump(), "micro_batch": size}), self.techniques)

    @cached_property
    def partitioning(self) -> tuple[tuple[str, Any], ...]:
        """What the techniques tell the partitioner of compiled graphs; nothing where nothing is compiled."""
        if not self.execution.compile:
            return ()
        return tuple(sorted(pair for each in self.techniques for pair in each.partitioning().items()))

    @cached_property
    def complexity(self) -> tuple[int, int]:
        """How much there is to understand: slots in use, then knobs off their default. Among equals the smaller ships."""
        knobs = sum(len(each.model_dump(exclude_defaults=True)) for each in self.techniques)
        return len(self.techniques) + int(self.execution.compile is not False), knobs + int(self.execution.accumulate > 1)

    @cached_property
    def summary(self) -> str:
        """The choice in one short line: `mb 4×2 · full · fsdp(degree=2)`."""
        parts = [self.execution.summary()] + [short(each) for each in self.techniques]
        return " · ".join(part for part in parts if part) or "plain"


def short(technique: Technique) -> str:
    """A technique in a short line, with knobs off their default, and with its slot where the kind alone says too little."""
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
    """A choice that fits, with what its techniques decided and the program it becomes."""

    choice: Choice
    key: str
    program: Program
    plans: Mapping[str, Plan] = field(default_factory=dict)
    """Plans by slot; slots with an empty plan are left out."""


class _Depends(Exception):
    """A verdict was asked for that depends on what is not decided yet."""


class _Undecided(Mapping[str, Technique]):
    """What slots hold where nothing is chosen yet: whoever looks at another slot than its own ends with `_Depends`.

    So no technique solves for a plan on a program that it may never see.
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
def _has_a_say(technique: type[Technique]) -> bool:
    """Whether a technique overrides any verb of the search; most null techniques do not and cost nothing here."""
    return any(getattr(technique, verb) is not getattr(Technique, verb) for verb in ("fits", "plan", "rewrite"))


@cache
def _null_with_a_say(slot: str) -> Technique | None:
    """The null technique of `slot` if it overrides a verb of the search."""
    technique = null(slot)
    return technique if _has_a_say(type(technique)) else None


class Rewriter:
    """Programs of choices on one recording and target.

    Args:
        recording: The user's step as a function of the micro-batch.
        target: Hardware, ranks and budget; what other slots chose is filled in per candidate.
        validate: Check every invariant after each pass.
        compiled: Recordings of the compiled model by how it is compiled; without it no choice that compiles fits.
    """

    def __init__(
        self,
        recording: Recording,
        target: Target,
        *,
        validate: bool = True,
        compiled: Callable[[Compiling], Recording | Reason] | None = None,
    ) -> None:
        self.recording, self.target = recording, replace(target, optimizer=recording.optimizer)
        self.compiled = compiled
        self._validate = validate
        self._memory = ProgramMemory()
        self._pairs: dict[Hashable, frozenset[str]] = {}
        self._numbers: dict[Technique | Execution, int] = {}
        self._known: dict[int, tuple[Technique | Execution, int]] = {}
        self.n_passes = 0
        """Passes that were run, not taken from memory."""

    def candidate(self, choice: Choice) -> Candidate | Reason:
        """`choice` with its program and plans, or why it does not fit."""
        result, plans = self._walk(choice)
        return result if isinstance(result, Reason) else Candidate(choice, self.key(choice), result, plans)

    def key(self, choice: Choice) -> str:
        """The canonical record (rule 1): which mechanisms run with which settings, whoever asked for them."""
        pairs = set(self._execution_pairs(choice.execution))
        for technique in choice.techniques:
            pairs |= self._record_pairs(technique, choice)
        return "\n".join(sorted(pairs))

    def program(self, choice: Choice) -> Program | Reason:
        """The program of `choice`, or why it does not fit."""
        return self._walk(choice)[0]

    def refusal(self, technique: Technique, execution: Execution) -> Reason | None:
        """Why `technique` does not fit the plain program, whatever other slots hold; None where it fits or that decides.

        What divides states works on other programs and fewer ranks where the model is in parts, which only candidates have.
        """
        root = self._root(execution)
        if isinstance(root.result, Reason):
            return root.result
        if technique.among_copies and self.target.ranks > 1 and self.target.cut is not None:
            return None
        chosen = _Undecided(technique.slot)
        target = replace(self.target, chosen=chosen, compiled=execution.compile, compile_backend=execution.compile_backend)
        try:
            return technique.fits(root.result, target)
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
        watched = Watched(choice.chosen)
        seen = _passes.target_seen(self._seen_by(watched, choice), self._parts(technique, choice))
        found = frozenset(_flat("", technique.record(seen)))
        if not watched.seen:  # the same whatever other slots hold
            self._pairs[asked] = found
        return found

    def _number(self, setting: Technique | Execution) -> int:
        """The same for equal ones. Objects are known by their id: hashing and comparing models would cost more than all else."""
        known = self._known.get(id(setting))
        if known is not None and known[0] is setting:
            return known[1]
        number = self._numbers.setdefault(setting, len(self._numbers))
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        self._known[id(setting)] = setting, number
        return number

    def _seen_by(self, watched: Watched, choice: Choice) -> Target:
        target = self.target
        compiled, backend = choice.execution.compile, choice.execution.compile_backend
        return Target(
            target.hardware,
            target.ranks,
            target.budget_bytes,
            watched,
            compiled,
            backend,
            cut=target.cut,
            optimizer=target.optimizer,
        )

    def _parts(self, technique: Technique, choice: Choice) -> int:
        """Ranks that hold parts of one copy, for `technique` if it works among the copies: what it sees follows from it.

        A program below the pass that made the parts holds for these parts alone, so this is nothing to be noted (rule 2).
        """
        return _passes.parts_seen(technique, choice.chosen, self.target.ranks)

    def _walk(self, choice: Choice) -> tuple[Program | Reason, Mapping[str, Plan]]:
        """What all passes of `choice` make, or why one of them cannot be, and the plans by slot that are not empty."""
        self._memory.begin()
        chosen, plans = choice.chosen, dict[str, Plan]()
        there = [chosen.get(slot) or _null_with_a_say(slot) for slot in PASS_ORDER]

        def passed(node: Node, technique: Technique) -> Node:
            _, after, plan = self._next(node, technique, choice)
            if plan is not NO_PLAN and plan != NO_PLAN:
                plans[technique.slot] = plan
            return self._memory.use(after)

        node = _passes.run(
            self._root(choice.execution, choice.partitioning),
            [each for each in there if each is not None and _has_a_say(type(each))],
            passed=passed,
            finished=lambda node, each: self._memory.use(self._finished(node, each, plans.get(each.slot, NO_PLAN), choice)),
            refused=lambda node: isinstance(node.result, Reason),
        )
        return node.result, plans

    def _finished(self, node: Node, technique: Technique, plan: Plan, choice: Choice) -> Node:
        """The node below `node` in which `technique` has done what comes after all other passes."""
        known = node.made.setdefault((self._number(technique), "finished"), [])
        same = found([each for each in known if each.plan == plan], choice.chosen)
        there = None if same is None else same.node
        if there is None:
            assert isinstance(node.result, Program)
            watched = Watched(choice.chosen)
            result = technique.finish(node.result, plan, self._seen_by(watched, choice))
            n_rows = 0
            if isinstance(result, Program):
                self._check(result)
                n_rows = sum(each.step.n_ops for each in result.rank_classes)
            there = self._memory.count(Node(result, n_rows))
            known.append(Pass(watched.seen, there, plan))
        return there

    def _root(self, execution: Execution, partitioning: tuple[tuple[str, Any], ...] = ()) -> Node:
        key = self._number(execution), partitioning
        root = self._memory.roots.get(key)
        if root is None:
            plain = self._plain(execution, partitioning)
            n_rows = 0 if isinstance(plain, Reason) else plain.step.n_ops
            root = self._memory.roots[key] = self._memory.count(Node(plain, n_rows))
        return self._memory.use(root)

    def _plain(self, execution: Execution, partitioning: tuple[tuple[str, Any], ...]) -> Program | Reason:
        if execution.micro_batch is None:
            return Reason("the micro-batch is not given", "set execution.micro_batch")
        recording: Recording | Reason = self.recording
        if execution.compile:
            if self.compiled is None:
                return Reason("the compiled step was not recorded", "execution.compile: false")
            recording = self.compiled(Compiling(execution.compile, execution.compile_backend, partitioning))
        if isinstance(recording, Reason):
            return recording
        step = recording.at(execution.micro_batch)
        if execution.accumulate > 1:
            step = accumulate_gradients(step)
        return Program((RankClass(self.target.ranks, step),), execution.micro_batch, execution.accumulate)

    def _next(self, node: Node, technique: Technique, choice: Choice) -> Pass:
        known = node.below.setdefault(self._number(technique), [])
        there = found(known, choice.chosen)
        if there is None:
            there = self._judged(node, technique, choice)
            known.append(there)
        return there

    def _judged(self, node: Node, technique: Technique, choice: Choice) -> Pass:
        """The way down from `node`, and what it holds for; techniques with equal records (rule 1) share one, if they fit."""
        assert isinstance(node.result, Program)
        watched, parts = Watched(choice.chosen), self._parts(technique, choice)
        reason = _passes.judged(node.result, technique, self._seen_by(watched, choice), parts)
        if reason is not None:
            return Pass(watched.seen, Node(reason))
        known = node.made.setdefault((technique.slot, self._record_pairs(technique, choice)), [])
        there = found(known, choice.chosen)
        if there is None:
            there = self._made(node, technique, choice)
            known.append(there)
        return there._replace(seen={**watched.seen, **there.seen})

    def _made(self, node: Node, technique: Technique, choice: Choice) -> Pass:
        """What the pass of `technique`, which fits, makes of `node`, and what it saw of other slots (rule 2)."""
        assert isinstance(node.result, Program)
        watched = Watched(choice.chosen)
        self.n_passes += 1
        result, plan = _passes.made(node.result, technique, self._seen_by(watched, choice), self._parts(technique, choice))
        if result is not node.result:
            self._check(result)
        there = node.after(technique.slot, result)
        if there is None:
            there = self._memory.count(Node(result, 0 if result is node.result else result.step.n_ops))
        return Pass(watched.seen, there, plan)

    def _check(self, program: Program) -> None:
        for each in program.rank_classes if self._validate else ():
            each.step.validate()
