"""Path of a logged run along its tape: rematerializer calls before each op, and the number of each value.

A value of the tape is a storage; each version that an in-place op makes of it has its own number in the
rematerializer. Ops of backward that do not run on fake tensors (copies of gradients) are accounted but are
not on the tape.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memtune.activations.capture import Outside, Slot, Tape
from memtune.activations.eviction.decision_log import DecisionLog, LoggedCall, LoggedRun, OpLog
from memtune.activations.eviction.schedule_cache import places_of
from memtune.activations.schedules import bases_of, slots_in, viewed


@dataclass(frozen=True)
class OpPath:
    """One op of the tape, with its rematerializer calls."""

    ran: int
    """Its number among all ops that ran."""
    first: int
    """Rematerializer calls before it: from this one …"""
    asks: int
    """… over the first that backward needs for the op's arguments …"""
    end: int
    """… to before this one."""
    numbers: dict[int, int]
    """Numbers of the values that it reads and makes, after it has run."""
    over: tuple[int, int] | None
    """Number of the value that it writes into, and of the new version."""
    again: int
    """Its number among the ops that may run again; -1 if it must not."""
    outputs: tuple[int, ...]
    """Numbers of the region's outputs that the caller dropped before it ran, as logged."""


@dataclass(frozen=True)
class Path:
    """One forward and its backward."""

    ops: tuple[OpPath, ...]
    n_numbers: int
    """Count of numbers that the rematerializer assigns."""
    forward_end: int
    """Calls up to here belong to forward."""
    backward_begin: int
    """Calls in between add the incoming gradients."""
    flowed_in: tuple[tuple[int, int], ...]
    """Number and output of each incoming gradient, in order."""
    outputs: dict[int, int]
    """Number by output of forward; an output that is no value has none."""


def path_of(tape: Tape, logged: LoggedRun) -> Path | str:
    """Return the path along the tape of a run with the same ops, or the reason why there is none."""
    if not 0 < tape.graph.n_forward < tape.graph.n_ops:
        return "it has no forward or no backward to decide on"
    log, ran = logged.log, logged.ran
    places = places_of(tape, ran, logged.n_forward)
    if isinstance(places, str):
        return places
    off_tape = sorted(set(range(logged.n_forward)) - set(places))
    # Such an op would need room at a place where the path has no request.
    allocates = next((at for at in off_tape if log.ops[at].made), None)
    if allocates is not None:
        return f"{ran[allocates].about.name} runs, but not on fake tensors"
    walked = _Walk(tape, log, places).walk()
    if isinstance(walked, str):
        return walked
    # The path replays requests without knowing which reads caused them. So each argument must be held when
    # its op runs, whatever is evicted under another budget.
    return walked if all(_is_held(tape, log, walked)) else "an op reads a value that nothing holds"


class _Walk:
    def __init__(self, tape: Tape, log: DecisionLog, places: Sequence[int]) -> None:
        self._tape, self._notes, self._places = tape, log, places
        self._number = {Outside("gradient", at): number for number, at in log.flowed_in}
        self._of: dict[int, int] = {}  # value → number
        self._bases = bases_of(tape)
        self._viewed = viewed(tape, self._bases)

    def walk(self) -> Path | str:
        log, tape, begin = self._notes, self._tape, self._notes.forward_end + len(self._notes.flowed_in)
        ops: list[OpPath] = []
        outputs: dict[int, int] = {}
        calls = 0
        for op, place in enumerate(self._places):
            if op == tape.graph.n_forward:
                # The calls between forward and backward belong to the loss and to incoming gradients, not to
                # an op.
                calls, outputs = begin, self._outputs()
            note = log.ops[place]
            before = calls
            calls = note.before
            wrong = self._made(op, note)
            if wrong:
                return wrong
            asks = next(
                (at for at in range(before, calls) if log.calls[at][0] in ("bring", "take")), calls - 1
            )
            leaves = tuple(
                number for name, args in log.calls[before:calls] if name == "give_back" for number in args
            )
            leaves = tuple(sorted(set(leaves) & set(outputs.values())))
            ops.append(OpPath(place, before, asks, calls, self._numbers(op), note.over, note.again, leaves))
        return Path(tuple(ops), _count(log.calls), log.forward_end, begin, tuple(log.flowed_in), outputs)

    def _made(self, op: int, note: OpLog) -> str:
        """Note the numbers of the op's outputs; return why that fails, or ''."""
        graph, call = self._tape.graph, self._tape.calls[op]
        if len(graph.makes[op]) != len(note.made):
            return f"{call.func} makes other storages than on fake tensors"
        for value, made in zip(graph.makes[op], note.made, strict=True):
            base = self._bases[value]
            # Generated code views a value with the tape's strides; a kernel may choose others on real
            # tensors.
            if value in self._viewed and (base.size, base.stride, base.offset) != (
                made.size,
                made.stride,
                made.offset,
            ):
                return f"{call.func} returns another layout than on fake tensors"
            self._of[value] = made.number
        if note.over is not None:
            old, new = note.over
            written = [each for each in graph.writes[op] if self._of.get(each) == old]
            if not written:
                return f"{call.func} writes into other storages than on fake tensors"
            # A write makes a new version with a number of its own, in the storage of the old one.
            self._of[written[0]] = new
        return ""

    def _numbers(self, op: int) -> dict[int, int]:
        call = self._tape.calls[op]
        return {
            slot.of: self._of[slot.of]
            for slot in slots_in((call.args, call.kwargs, call.out))
            if isinstance(slot.of, int)
        }

    def _outputs(self) -> dict[int, int]:
        leaves = enumerate(self._tape.outputs)
        return {
            at: self._of[leaf.of]
            for at, leaf in leaves
            if isinstance(leaf, Slot) and isinstance(leaf.of, int)
        }


def _count(calls: Sequence[LoggedCall]) -> int:
    return sum(
        1 if name == "constant" else len(args[2]) for name, args in calls if name in ("constant", "call")
    )


def _is_held(tape: Tape, log: DecisionLog, path: Path) -> Iterator[bool]:
    """Yield for each op, and for the outputs, whether its arguments are resident under any budget."""
    held, number_of = _Held(log.calls), dict[int, int]()
    ready = defaultdict[int, set[int]](set)
    for _, after, slot in tape.ready_gradients:
        ready[after].update({slot.of} - {*tape.graph.makes[after]} if isinstance(slot.of, int) else ())
    flowed_in = {at: number for number, at in path.flowed_in}
    for op, each in enumerate(path.ops):
        if op == tape.graph.n_forward:
            # The outputs must outlive forward: no later call would restore them for the caller.
            held.run_to(path.forward_end)
            yield all(map(held.has, path.outputs.values()))
        held.run_to(each.end)
        old, new = each.over or (-1, -1)
        read = {each.numbers[value] for value in tape.graph.reads[op]}
        yield all(held.has(old if number == new else number) for number in read)
        slots = slots_in((tape.calls[op].args, tape.calls[op].kwargs))
        yield all(
            held.has(flowed_in[n])
            for kind, n in (s.of for s in slots if isinstance(s.of, Outside))
            if kind == "gradient"
        )
        number_of |= each.numbers
        yield all(held.has(number_of[value]) for value in ready[op])
    held.run_to(len(log.calls))
    yield all(held.has(number_of[slot.of]) for _, slot in tape.input_gradients if isinstance(slot.of, int))


class _Held:
    """Tracker of the values that are held at some point of the log, so that they cannot be evicted."""

    def __init__(self, calls: Sequence[LoggedCall]) -> None:
        self._calls, self._at, self._next = calls, 0, 0
        self._holds: Counter[int] = Counter()
        self._references: Counter[int] = Counter()
        self._constants: set[int] = set()

    def run_to(self, end: int) -> None:
        for name, args in self._calls[self._at : end]:
            # Numbers are given out in the order of these two calls, so they can be counted from the log.
            if name in ("constant", "call"):
                made = range(self._next, self._next + (1 if name == "constant" else len(args[2])))
                self._next = made.stop
                self._references.update(made)
                self._constants.update(made if name == "constant" else ())
                self._holds.update(made if name == "call" else ())
            elif name in ("hold", "take", "let_go", "give_back"):
                self._holds[args[0]] += 1 if name in ("hold", "take") else -1
            if name in ("retain", "take", "release", "give_back"):
                self._references[args[0]] += 1 if name in ("retain", "take") else -1
        self._at = end

    def has(self, number: int) -> bool:
        return self._holds[number] > 0 or (number in self._constants and self._references[number] > 0)
