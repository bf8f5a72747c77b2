"""A training step as plain data: operations, storages, and who holds what until when.

A `Step` has five tables of numpy columns: `ops` (n rows), `storages` (m), `uses` (u), `saves` (v) and `calls`
(c) of blocks. Nothing here knows torch.

Time is the op index. A storage is allocated by its `producer` (-1: it was there before the step) and is freed
right after the *last* of: the last op that uses it, the op after which Python drops its last reference
(`storages.held_until`), the op after which autograd frees it (`saves.held_until`). Bytes are counted while an
op runs: after its outputs exist, before anything it frees; a storage that is donated to an output (`DONATES`)
is freed before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from memtune.program.parameter_columns import Parameter as Parameter
from memtune.program.parameter_columns import columns_of
from memtune.program.pipeline_order import Stages

FOREVER = np.int32(2**31 - 1)
"""`held_until` of what outlives the step: parameters, buffers, optimizer state."""
READS, WRITES, DONATES = 0, 1, 2
"""How an op uses a storage. A donated one is read, and the op's output takes its memory unless somebody holds
it.
"""
OWN_GENERATOR = 2
"""See `Ops.rng`."""

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]


class Phase(IntEnum):
    """Which part of the step an op belongs to; prologue, boundary and optimizer run once, the rest per
    micro-batch.
    """

    PROLOGUE = 0
    FORWARD = 1
    RECOMPUTE = 2
    BACKWARD = 3
    BOUNDARY = 4
    OPTIMIZER = 5


class Resource(IntEnum):
    """What an op occupies while it runs; each serves its ops in program order."""

    COMPUTE = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    INTRA_LINK = 3
    INTER_LINK = 4
    SSD_READ = 5
    SSD_WRITE = 6
    HOST_THREADS = 7
    NOTHING = 8  # allocation only


class Tier(IntEnum):
    """Where a storage lives."""

    DEVICE = 0
    HOST = 1
    SSD = 2


class Kind(IntEnum):
    """What a storage is for. A saved activation is a TEMPORARY that autograd holds; reports tell them
    apart.
    """

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER = 2
    BUFFER = 3
    BATCH = 4
    TEMPORARY = 5
    WORKSPACE = 6
    COMMUNICATION = 7


ON_GPU_ONLY = 128
"""In `Ops.elementwise_bytes`: on this device the op makes other bits where it runs in parts, on a GPU it
would not.
"""


@dataclass(frozen=True, eq=False)
class Table:
    """Rows as columns of one length."""

    def columns(self) -> dict[str, Any]:
        """Return the columns by name, without derived ones."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    def rows(self, index: Any) -> Self:
        """Return the rows at `index`, anything that indexes an array."""
        return replace(self, **{name: column[index] for name, column in self.columns().items()})

    @cached_property
    def n(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns().values())))


@dataclass(frozen=True, eq=False)
class CallInputs(Table):
    """Storages among the arguments of the calls: one row (i) per pair, in the order of the arguments."""

    call: I32  # (i,) row of Calls
    storage: I32  # (i,) row of Storages


@dataclass(frozen=True, eq=False)
class Calls(Table):
    """Calls of blocks: one row (c) each, in forward order."""

    block: I32  # (c,) index into Step.blocks; where no block runs twice, call i is of block i
    grad_enabled: U8
    """(c,) 1 where the call began in grad mode and no checkpoint of the model's own replaces what autograd
    saves.
    """
    inputs: CallInputs

    def block_of(self, call: I32) -> I32:
        """Return the block of each of the rows `call`, -1 for -1."""
        if self._once_each:
            return call
        return np.append(self.block, np.int32(-1))[call]  # the last entry serves -1

    @cached_property
    def _once_each(self) -> bool:
        return np.array_equal(self.block, np.arange(len(self.block)))

    @cached_property
    def input_block(self) -> I32:
        """(i,) block that was given `inputs.storage`."""
        return self.block_of(self.inputs.call)


_NO_CALLS = Calls(
    np.empty(0, np.int32), np.empty(0, np.uint8), CallInputs(np.empty(0, np.int32), np.empty(0, np.int32))
)


@dataclass(frozen=True, eq=False)
class Ops(Table):
    """Operations: one row (n) each, in program order."""

    name: I32  # (n,) index into Step.names
    module: I32  # (n,) index into Step.modules
    call: I32  # (n,) row of Calls, -1 outside
    phase: U8  # (n,) Phase
    resource: U8  # (n,) Resource
    flops: F64  # (n,) FLOPs
    traffic_bytes: I64  # (n,) read + written by the kernel; for copies and collectives, bytes on the link
    # (n,) 1: draws random numbers from the default generator; OWN_GENERATOR: from one it is given; 0: draws
    # none
    rng: U8
    # (n,) ranks in the collective, 0 for none; + APART · (a - 1) where members are a ranks apart, not
    # neighbours
    group: I32
    sequence_nr: I32  # (n,) autograd's sequence number of the node that runs a backward op, -1 for all others
    copy_of: I32  # (n,) the forward op that this op recomputes or only allocates for, -1 for all others
    # (n,) its order: 0 its resource's own stream, 1 the compute stream, 2 to 7 a side stream, which goes
    # first
    stream: U8
    # (n,) 0: runs as early as issued; d: once compute comes to the place of the (d - 1)-th such op before it
    prefetch: U8
    match: I32  # (n,) ops of several rank classes with the same number start together, 0 for none
    elementwise_bytes: U8
    """(n,) bytes of an element of its one output where each element is made of the same one of what it reads,
    else 0; plus ON_GPU_ONLY.
    """
    calls: Calls = field(default=_NO_CALLS, repr=False)
    """The table that `call` points into; the Step sets it."""

    @cached_property
    def block(self) -> I32:
        """(n,) index into Step.blocks, -1 outside."""
        return self.calls.block_of(self.call)


@dataclass(frozen=True, eq=False)
class Storages(Table):
    """Storages: one row (m) each, in the order in which the step first has them."""

    bytes: I64  # (m,) size
    tier: U8  # (m,) Tier
    kind: U8  # (m,) Kind
    producer: I32  # (m,) op that allocates it, -1 before the step
    held_until: I32  # (m,) op after which Python or a module drops its last reference, -1 nobody holds it
    grad_ready_after: I32  # (m,) op after which autograd has accumulated this gradient, -1 for all others
    # (m,) index into Step.parameters of what this gradient, state or optimizer temporary belongs to, -1 none
    owner: I32


@dataclass(frozen=True, eq=False)
class Uses(Table):
    """Which op reads or writes which storage: one row (u) per pair, sorted by op."""

    op: I32  # (u,) row of Ops
    storage: I32  # (u,) row of Storages
    mode: U8  # (u,) READS, WRITES or DONATES


@dataclass(frozen=True, eq=False)
class Saves(Table):
    """Saved tensors, which autograd keeps for backward: one row (v) each, in the order in which it packed
    them.
    """

    storage: I32  # (v,) row of Storages
    packed_before: I32  # (v,) the pack hook was called just before this op of forward
    held_until: I32  # (v,) op after which autograd frees it
    used_until: I32  # (v,) last op of the backward node that used it; autograd itself frees it a little later
    unpacked_before: I32  # (v,) backward first unpacked it just before this op, -1 if it never did
    unpack_order: I32  # (v,) orders what is unpacked before the same op
    is_output: U8  # (v,) 1 where the op just before saved its own output, which it still held while it packed
    call: I32  # (v,) row of Calls whose forward was running, -1 outside
    calls: Calls = field(default=_NO_CALLS, repr=False)
    """The table that `call` points into; the Step sets it."""

    @cached_property
    def block(self) -> I32:
        """(v,) block whose forward was running, -1 outside."""
        return self.calls.block_of(self.call)


@dataclass(frozen=True, eq=False)
class Step:
    """One training step of one rank in SSA form: five tables, and what is none.

    See the module docstring for how lifetimes follow from the tables.
    """

    names: tuple[str, ...]
    """Op names by id: `aten.addmm.default`, `memtune.to_host.default`."""
    modules: tuple[str, ...]
    """Qualified module names by id; id 0 is `(outside)`: loss function and optimizer; the root is ''."""
    blocks: tuple[str, ...]
    """Qualified names of the repeated blocks, in forward order."""
    parameters: Sequence[Parameter]

    ops: Ops
    storages: Storages
    uses: Uses
    saves: Saves
    calls: Calls

    forward_starts: I32  # (blocks + 1,) op before which each block's forward began, then the whole model's
    forward_ends: (
        I32  # (blocks + 1,) op after which each block's forward had returned, then the whole model's
    )
    grad_order: I32
    """(g,) gradient storages in the order in which autograd accumulated them; `storages.grad_ready_after`
    says when.
    """
    returned: I32
    """(r,) storages of the tensors that the model's forward returned."""
    partly_written: I32
    """(p,) storages that autograd saved in parts while other parts were still written into
    (`activations.offload.offloaded_tensor`): they stay.
    """
    read_by_host: I32
    """(h,) storages of which the model's code read a number (`.item()`): what it does next may follow from
    it.
    """
    model_calls: int = 1
    """How often the whole model's forward ran; `forward_starts` is that of the first one, `forward_ends` of
    the last.
    """
    lazy_values: bool = False
    """Whether an op of forward or backward was given a tensor that torch conjugates or negates as it is read:
    complex numbers.
    """
    by_schedules: bool = False
    """Whether blocks run by schedules: what they save is what these keep, and what runs again does so op by
    op.
    """
    block_outputs: tuple[str, ...] = ()
    """What each block returns (`block_outputs.form_of`), its last call if it has several."""

    def __post_init__(self) -> None:
        if self.ops.calls is not self.calls:
            object.__setattr__(self, "ops", replace(self.ops, calls=self.calls))
        if self.saves.calls is not self.calls:
            object.__setattr__(self, "saves", replace(self.saves, calls=self.calls))

    def values(self) -> dict[str, Any]:
        """Return all that the step says by name: columns as `ops.name`, what is no table by its own name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        tables = {name: value for name, value in found.items() if isinstance(value, Table)}
        rest = {name: value for name, value in found.items() if name not in tables}
        tables["calls.inputs"] = self.calls.inputs
        return rest | {
            f"{name}.{column}": values
            for name, table in tables.items()
            for column, values in table.columns().items()
        }

    def with_ops(self, **columns: Any) -> Step:
        """Return this step with `columns` of its ops replaced."""
        return replace(self, ops=replace(self.ops, **columns))

    def with_storages(self, **columns: Any) -> Step:
        """Return this step with `columns` of its storages replaced."""
        return replace(self, storages=replace(self.storages, **columns))

    def with_uses(self, **columns: Any) -> Step:
        """Return this step with `columns` of its uses replaced."""
        return replace(self, uses=replace(self.uses, **columns))

    def with_saves(self, **columns: Any) -> Step:
        """Return this step with `columns` of its saved tensors replaced."""
        return replace(self, saves=replace(self.saves, **columns))

    def with_calls(self, **columns: Any) -> Step:
        """Return this step with `columns` of its calls of blocks replaced."""
        return replace(self, calls=replace(self.calls, **columns))

    @cached_property
    def freed_after(self) -> I32:
        """(m,) op after which each storage is freed; FOREVER for what outlives the step."""
        end = np.maximum(self.storages.held_until, self.storages.producer)
        np.maximum.at(end, self.uses.storage, self.uses.op - (self.uses.mode == DONATES))
        np.maximum.at(end, self.saves.storage, self.saves.held_until)
        return end

    @cached_property
    def parameter_of(self) -> I32:
        """(m,) index of the parameter whose weights a storage holds, -1 for all others."""
        index = np.full(self.storages.n, -1, np.int32)
        index[columns_of(self.parameters).storage] = np.arange(len(self.parameters), dtype=np.int32)
        return index

    @cached_property
    def use_phase(self) -> U8:
        """(u,) phase of the op of each use."""
        phase: U8 = self.ops.phase[self.uses.op]
        return phase

    def without_donations(self, ops: I32 | None = None) -> Step:
        """Return this step where `ops` (None: all) allocate their outputs: as under a dispatch mode or
        without autograd.
        """
        donated = self.uses.mode == DONATES
        if ops is not None:
            donated &= np.isin(self.uses.op, ops)
        return (
            self.with_uses(mode=np.where(donated, READS, self.uses.mode).astype(np.uint8))
            if donated.any()
            else self
        )

    def live_bytes(self, tier: Tier = Tier.DEVICE) -> I64:
        """(n,) bytes of `tier` that are live while each op runs."""
        mine = self.storages.tier == tier
        start = np.maximum(self.storages.producer[mine], 0)
        stop = np.minimum(self.freed_after[mine], self.ops.n - 1)
        delta = np.zeros(self.ops.n + 1, np.int64)
        np.add.at(delta, start, self.storages.bytes[mine])
        np.add.at(delta, stop + 1, -self.storages.bytes[mine])
        return np.cumsum(delta[:-1])

    def peak_bytes(self, tier: Tier = Tier.DEVICE) -> int:
        """Largest value of `live_bytes`, 0 for a step without ops."""
        return int(self.live_bytes(tier).max(initial=0))

    def saved_bytes(self, block: int | None = None) -> int:
        """Bytes that autograd holds after forward, each storage once, parameters and what outlives the step
        left out.
        """
        rows = slice(None) if block is None else self.saves.block == block
        storages = np.unique(self.saves.storage[rows])
        producer = self.storages.producer[storages]
        later = (producer >= 0) & (
            self.ops.phase[producer] > Phase.FORWARD
        )  # made, or made again, by backward
        return int(
            self.storages.bytes[storages][(self.storages.held_until[storages] != FOREVER) & ~later].sum()
        )

    def saved_by_autograd(self) -> npt.NDArray[np.bool_]:
        """(m,) True where autograd holds the storage for backward."""
        saved = np.zeros(self.storages.n, bool)
        saved[self.saves.storage] = True
        return saved

    def validate(self) -> None:
        """Check every invariant of the form.

        Raises:
            ValueError: naming the first invariant that is broken and the rows that break it.
        """
        n, m = self.ops.n, self.storages.n
        _check("uses.op within the ops", (self.uses.op >= 0) & (self.uses.op < n))
        _check("uses.storage within the storages", (self.uses.storage >= 0) & (self.uses.storage < m))
        _check("saves.storage within the storages", (self.saves.storage >= 0) & (self.saves.storage < m))
        _check("uses sorted by op", np.diff(self.uses.op) >= 0)
        _check("producer within the ops", (self.storages.producer >= -1) & (self.storages.producer < n))
        _check("bytes not negative", self.storages.bytes >= 0)
        _check("no use before its producer", self.uses.op >= self.storages.producer[self.uses.storage])
        _check(
            "autograd lets go after it saved",
            self.saves.held_until >= self.storages.producer[self.saves.storage],
        )
        _check("names cover ops.name", (self.ops.name >= 0) & (self.ops.name < len(self.names)))
        _check("calls cover ops.call", (self.ops.call >= -1) & (self.ops.call < len(self.calls.block)))
        _check("calls cover saves.call", (self.saves.call >= -1) & (self.saves.call < len(self.calls.block)))
        _check("blocks cover calls.block", (self.calls.block >= 0) & (self.calls.block < len(self.blocks)))
        parameters = columns_of(self.parameters)
        outside = (parameters.storage < 0) | (parameters.storage >= m) | (parameters.gradient >= m)
        if outside.any():
            raise ValueError(
                f"parameter {parameters.names[int(outside.argmax())]} points outside the {m} storages"
            )


def _check(invariant: str, holds: npt.NDArray[np.bool_]) -> None:
    if not holds.all():
        raise ValueError(f"step breaks '{invariant}' at rows {np.flatnonzero(~holds)[:5].tolist()}")


APART = 1 << 16
"""See `Ops.group`."""


@dataclass(frozen=True)
class RankClass:
    """Ranks that run the same step; equal where it is one step, not where it is an equal one."""

    count: int
    step: Step
    ranks: tuple[int, ...] = ()
    """Which ones, rising; empty where they are those after the ranks of the classes before."""


@dataclass(frozen=True, eq=False)
class Program:
    """What one optimizer step does on every rank: prologue, body × `accumulate`, boundary, optimizer
    (`Ops.phase`).

    With `accumulate` > 1 the step is a *later* micro-batch, whose gradients are added to those already there:
    the first one needs no more memory, so peaks are the same, and `accumulate` times the body is the step's
    time.
    """

    rank_classes: tuple[RankClass, ...]
    micro_batch: int
    accumulate: int = 1
    notes: tuple[str, ...] = ()
    """What was assumed on the way, for people to read."""
    sharers: int = 1
    """Consecutive ranks that work on one micro-batch together; each brings its own, so `accumulate` counts
    those of all.
    """
    copies_in_turn: bool = False
    """Of the ranks behind one PCIe root one copies at a time in each direction, first come first served."""
    unrolled: int = 1
    """Micro-batches that the steps themselves hold, on their way through the stages of a pipeline."""
    idle: float = 0.0
    """Seconds that a rank of a pipeline waits for its neighbours, over those in which it runs forward and
    backward.
    """
    stages: Stages | None = None
    """How the blocks are divided in a pipeline, where the step still has all of them."""

    @property
    def samples(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.micro_batch * self.accumulate * self.unrolled * self.ranks // self.sharers

    @property
    def ranks(self) -> int:
        """Number of ranks over all classes."""
        return sum(each.count for each in self.rank_classes)

    @property
    def step(self) -> Step:
        """The step of the first rank class, the heaviest rank."""
        return self.rank_classes[0].step

    def with_step(self, step: Step, **changes: Any) -> Program:
        """This program with `step` on every rank (for passes that treat all ranks alike)."""
        return replace(self, rank_classes=(RankClass(self.ranks, step),), **changes)


@dataclass(frozen=True)
class Call:
    """A call of the user's code that other devices answer with other kernels, and which rows of its Step it
    became.
    """

    kind: str
    """`attention`, `dropout`, `recurrent`."""
    ops: tuple[int, int]
    """First op and the one after the last; all of them ran inside the call."""
    nodes: tuple[int, int]
    """Autograd's sequence number when the call began and when it returned: backward ops of these nodes are
    its own.
    """
    saves: tuple[int, int]
    """First save and the one after the last."""
    inputs: tuple[int, ...]
    """Storage of each tensor it was given, in the order of the arguments."""
    output: int
    """Storage of what it returned."""
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors it was given, in the order of the arguments."""
    dtype: str
    """What the kernel computes in: autocast's type where it is on, else the first tensor's."""
    options: Mapping[str, float] = field(default_factory=dict)
    """What else kernels are chosen by: `dropout`, `causal`, `masked`, `aligned`, …"""


@dataclass(frozen=True, eq=False)
class Hints:
    """What a Step cannot say and another device's kernels depend on."""

    calls: tuple[Call, ...] = ()
    signatures: tuple[str, ...] = ()
    """(n,) each op with its arguments, the key of a workspace table; empty for what is not an op."""
    foreach: Step | None = None
    """The optimizer phase as it would be with foreach kernels, None where the optimizer has none or the user
    chose.
    """
    step_counters: tuple[int, ...] = ()
    """Storages of the optimizer's step counters, which torch keeps on the host beside a model on CUDA."""


@dataclass(frozen=True)
class OptimizerFacts:
    """What the user's optimizer cannot do, which no Step shows; empty where it can."""

    not_natively: str = ""
    """Why memtune's own update cannot take the place of its step."""
    not_one_by_one: str = ""
    """Why it cannot update some parameters now and others later."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A step recorded at two micro-batches, so that every size is known as a function of the micro-batch.

    Sizes are affine in the micro-batch: value(b) = value(small) + (b - small) * slope.
    """

    small: int
    step: Step
    """The step at micro-batch `small`."""
    bytes_slope: I64  # (m,) bytes per sample
    flops_slope: F64  # (n,) FLOPs per sample
    traffic_slope: I64  # (n,) bytes per sample
    rung: str
    """Which rung of the ladder recorded it: fake, meta, real-init, real-step."""
    notes: tuple[str, ...] = ()
    record_s: float = 0.0
    checked: frozenset[int] = field(default_factory=frozenset)
    """Micro-batches that were recorded themselves, not extrapolated."""
    exact: Mapping[int, Step] = field(default_factory=dict)
    """Steps recorded at further micro-batches, used instead of the affine sizes."""
    device: str = "cpu"
    """Whose kernels the steps hold; `autotune.translate.translation` makes the one of the other."""
    hints: Mapping[int, Hints] = field(default_factory=dict)
    """By micro-batch, for the steps that were recorded themselves."""
    optimizer: OptimizerFacts = OptimizerFacts()

    def at(self, micro_batch: int) -> Step:
        """The step with all sizes evaluated at `micro_batch` samples."""
        return self.exact[micro_batch] if micro_batch in self.exact else at_micro_batch(self, micro_batch)


def at_micro_batch(recording: Recording, micro_batch: int) -> Step:
    """Evaluate the affine sizes of `recording` at `micro_batch` samples."""
    more, step = micro_batch - recording.small, recording.step
    ops, storages = step.ops, step.storages
    return step.with_storages(bytes=np.maximum(storages.bytes + more * recording.bytes_slope, 0)).with_ops(
        flops=np.maximum(ops.flops + more * recording.flops_slope, 0.0),
        traffic_bytes=np.maximum(ops.traffic_bytes + more * recording.traffic_slope, 0),
    )


# The first ops of a step alone: what decides about forward and backward need not look at the optimizer, most
# of a step's ops.
def forward_and_backward(step: Step) -> Step:
    """`step` up to the op after backward, equal live bytes op by op; `step` itself where its storages are not
    in order.

    What lives on at the end is held to the last op.
    """
    training = np.flatnonzero(step.ops.phase <= Phase.BACKWARD)
    n_ops = min(int(training.max(initial=-1)) + 2, step.ops.n)
    later = step.storages.producer >= n_ops
    n_storages = step.storages.n - int(later.sum())
    if n_ops == step.ops.n or later[:n_storages].any():
        return step
    storages = step.storages.rows(slice(n_storages))
    end = step.freed_after[:n_storages]
    held = np.where((end >= n_ops) & (storages.held_until != FOREVER), n_ops - 1, storages.held_until).astype(
        np.int32
    )
    return replace(
        step,
        ops=step.ops.rows(slice(n_ops)),
        storages=replace(storages, held_until=held),
        uses=step.uses.rows(slice(int(np.searchsorted(step.uses.op, n_ops)))),
        saves=replace(
            step.saves,
            held_until=np.minimum(step.saves.held_until, n_ops - 1),
            used_until=np.minimum(step.saves.used_until, n_ops - 1),
        ),
    )
