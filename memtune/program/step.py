"""A training step as plain data: ops, storages and lifetimes.

A `Step` has five tables of numpy columns: `ops` (n rows), `storages` (m), `uses` (u), `saves` (v) and `calls`
(c) of blocks. This module does not import torch.

Time is the op index. A storage is allocated by its `producer` (-1: it existed before the step). It is freed
right after the *last* of: the last op that uses it, the op after which Python drops its last reference
(`storages.held_until`), the op after which autograd frees it (`saves.held_until`). Live bytes of an op are
counted after its outputs are allocated and before it frees anything; a storage that it donates to an output
(`DONATES`) is freed before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import EnumType, IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt

from memtune.program.parameter_columns import Parameter as Parameter, columns_of
from memtune.program.pipeline_order import Stages

if TYPE_CHECKING:
    from memtune.program.host_updates import UpdatesOnHost

FOREVER = np.int32(2**31 - 1)
"""`held_until` of storages that outlive the step: parameters, buffers, optimizer state."""
READS, WRITES, DONATES = 0, 1, 2
"""Values of `Uses.mode`. A donated storage is read, and the op's output takes its memory unless another
reference holds it.
"""
OWN_GENERATOR = 2
"""Value of `Ops.rng`: the op draws from a generator passed to it, not from the default one."""

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]


class _CodeType(EnumType):
    """Metaclass of values that are compared with columns.

    Of each scalar numpy looks up protocols in its class. Before Python 3.12 an enum's class answers in
    Python that it has none, which takes longer than the comparison.
    """

    __getattr__ = type.__getattribute__  # members are found before it is asked


class Phase(IntEnum, metaclass=_CodeType):
    """Part of the step that an op belongs to.

    Prologue, boundary and optimizer run once per step; forward, recompute and backward once per micro-batch.
    """

    PROLOGUE = 0
    FORWARD = 1
    RECOMPUTE = 2
    BACKWARD = 3
    BOUNDARY = 4
    OPTIMIZER = 5


REPEATED: Final = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
"""Phases that run in each micro-batch."""


class Resource(IntEnum, metaclass=_CodeType):
    """Resource that an op occupies while it runs. Each resource runs its ops in program order."""

    COMPUTE = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    INTRA_LINK = 3
    INTER_LINK = 4
    SSD_READ = 5
    SSD_WRITE = 6
    HOST_THREADS = 7
    NOTHING = 8  # the op only allocates


class Tier(IntEnum, metaclass=_CodeType):
    """Memory that a storage is in."""

    DEVICE = 0
    HOST = 1
    SSD = 2


class Kind(IntEnum, metaclass=_CodeType):
    """Purpose of a storage. A saved activation is a TEMPORARY in `Saves`; reports list the two separately."""

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER = 2
    BUFFER = 3
    BATCH = 4
    TEMPORARY = 5
    WORKSPACE = 6
    COMMUNICATION = 7


class Precision(IntEnum, metaclass=_CodeType):
    """Type in which an op multiplies matrices."""

    UNKNOWN = 0  # that of most parameters, or of autocast
    FLOAT32 = 1
    TF32 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    FLOAT64 = 5


UNALIGNED = 16
"""Flag in `Ops.precision`: rows of a 16-bit matrix are no multiples of 16 bytes, so loads are narrower."""
CHANNELS_FIRST = 32
"""Flag in `Ops.precision`: images of a dense convolution have channels before rows and columns."""
COMPLEX = 64
"""Flag in `Ops.precision`: the op reads or writes complex numbers."""

ON_GPU_ONLY = 128
"""Flag in `Ops.elementwise_bytes`: running the op in tiles is bitwise exact on a GPU, but not on this device.
"""


@dataclass(frozen=True, eq=False)
class Table:
    """A table: numpy columns of equal length."""

    def columns(self) -> dict[str, Any]:
        """Return the columns by name, without derived ones."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}

    def rows(self, index: Any) -> Self:
        """Return the rows at `index`: a slice, a mask or row numbers."""
        return replace(self, **{name: column[index] for name, column in self.columns().items()})

    @cached_property
    def n(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns().values())))


@dataclass(frozen=True, eq=False)
class CallInputs(Table):
    """Tensor arguments of the calls: one row (i) per call and storage, in argument order."""

    call: I32  # (i,) row of Calls
    storage: I32  # (i,) row of Storages


@dataclass(frozen=True, eq=False)
class Calls(Table):
    """Calls of blocks: one row (c) each, in forward order."""

    block: I32  # (c,) index into Step.blocks; equals the row number if no block runs twice
    grad_enabled: U8
    """(c,) 1 if the call began in grad mode and outside the model's own `torch.utils.checkpoint`."""
    inputs: CallInputs

    def block_of(self, call: I32) -> I32:
        """Return the block of each row in `call`, -1 for -1."""
        # The common case, asked for in every pass: no lookup, no copy.
        if self._once_each:
            return call
        return np.append(self.block, np.int32(-1))[call]  # index -1 reads the appended entry

    @cached_property
    def _once_each(self) -> bool:
        return np.array_equal(self.block, np.arange(len(self.block)))

    @cached_property
    def input_block(self) -> I32:
        """(i,) block whose call received `inputs.storage`."""
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
    # (n,) 1: draws random numbers from the default generator; OWN_GENERATOR: from a generator passed to it;
    # 0: draws none
    rng: U8
    # (n,) ranks in the collective, 0 for none; + APART · (a - 1) if members are a ranks apart instead of
    # consecutive
    group: I32
    sequence_nr: I32  # (n,) autograd's sequence number of the node that runs a backward op, -1 for all others
    copy_of: I32  # (n,) the forward op that this op recomputes or only allocates for, -1 for all others
    # (n,) 0: the resource's own stream; 1: the compute stream; 2 to 7: a side stream, which has priority
    stream: U8
    # (n,) 0: starts as soon as it is issued; d: starts when compute reaches the (d - 1)-th such op before it
    prefetch: U8
    match: I32  # (n,) ops of several rank classes with the same number start together, 0 for none
    elementwise_bytes: U8
    """(n,) bytes per output element if the op is elementwise with one output, else 0; plus ON_GPU_ONLY."""
    precision: U8
    """(n,) Precision of its matrix products; plus UNALIGNED, CHANNELS_FIRST or COMPLEX."""
    calls: Calls = field(default=_NO_CALLS, repr=False)
    """The table that `call` indexes; the Step sets it."""

    @cached_property
    def block(self) -> I32:
        """(n,) index into Step.blocks, -1 outside."""
        return self.calls.block_of(self.call)


@dataclass(frozen=True, eq=False)
class Storages(Table):
    """Storages: one row (m) each, in the order of their first appearance."""

    bytes: I64  # (m,) size
    tier: U8  # (m,) Tier
    kind: U8  # (m,) Kind
    producer: I32  # (m,) op that allocates it, -1 before the step
    held_until: I32  # (m,) op after which Python or a module drops its last reference, -1 if there is none
    grad_ready_after: I32  # (m,) op after which autograd has accumulated this gradient, -1 for all others
    # (m,) index into Step.parameters of this gradient's, state's or optimizer temporary's parameter, -1 none
    owner: I32
    # (m,) bytes per element if it was allocated for floating-point numbers of 16 or 32 bits, else 0; also 0
    # for autocast's casts of parameters
    float_bytes: U8


@dataclass(frozen=True, eq=False)
class Uses(Table):
    """Accesses of ops to storages: one row (u) per pair, sorted by op."""

    op: I32  # (u,) row of Ops
    storage: I32  # (u,) row of Storages
    mode: U8  # (u,) READS, WRITES or DONATES


@dataclass(frozen=True, eq=False)
class Saves(Table):
    """Tensors that autograd saves for backward: one row (v) each, in the order of the pack hooks."""

    storage: I32  # (v,) row of Storages
    packed_before: I32  # (v,) the pack hook was called just before this op of forward
    held_until: I32  # (v,) op after which autograd frees it
    used_until: I32  # (v,) last op of the backward node that used it; autograd frees it a little later
    unpacked_before: I32  # (v,) op before which backward first unpacked it, -1 if it never did
    unpack_order: I32  # (v,) order among the saves that are unpacked before the same op
    is_output: U8  # (v,) 1 if an op saved its own output, and so still held it in the pack hook
    call: I32  # (v,) row of Calls whose forward was running, -1 outside
    calls: Calls = field(default=_NO_CALLS, repr=False)
    """The table that `call` indexes; the Step sets it."""

    @cached_property
    def block(self) -> I32:
        """(v,) block whose forward was running, -1 outside."""
        return self.calls.block_of(self.call)


@dataclass(frozen=True, eq=False)
class Step:
    """One training step of one rank in SSA form.

    Lifetimes follow from the tables: see the module docstring.
    """

    names: tuple[str, ...]
    """Op names by id: `aten.addmm.default`, `memtune.to_host.default`."""
    modules: tuple[str, ...]
    """Qualified module names by id; 0 is `(outside)`: loss function and optimizer. The root is ''."""
    blocks: tuple[str, ...]
    """Qualified names of the repeated blocks, in forward order."""
    parameters: Sequence[Parameter]

    ops: Ops
    storages: Storages
    uses: Uses
    saves: Saves
    calls: Calls

    # (blocks + 1,) op before which each block's forward began; the last entry is the whole model's
    forward_starts: I32
    # (blocks + 1,) op after which each block's forward returned; the last entry is the whole model's
    forward_ends: I32
    grad_order: I32
    """(g,) gradient storages in the order in which autograd accumulated them, after op `grad_ready_after`."""
    returned: I32
    """(r,) storages of the tensors that the model's forward returned."""
    partly_written: I32
    """(p,) storages of which autograd saved one view while forward wrote to another; not offloaded."""
    read_by_host: I32
    """(h,) storages of which the model's code read a value (`.item()`), on which its control flow may depend.
    """
    model_calls: int = 1
    """Calls of the whole model: `forward_starts` is that of the first call, `forward_ends` of the last."""
    lazy_values: bool = False
    """An op of forward or backward received a lazily conjugated or negated tensor (complex numbers)."""
    python_draws: bool = False
    """Forward of the model draws from generators of Python or numpy, which no op shows."""
    runs_schedules: bool = False
    """Blocks run by schedules, which decide op by op what is saved and recomputed."""
    block_outputs: tuple[str, ...] = ()
    """Structure of each block's output, of its last call (`workload.output_structure.structure_of`)."""
    updates_on_host: UpdatesOnHost | None = None
    """The optimizer's ops in host memory, if those of the device are others (foreach kernels)."""

    def __post_init__(self) -> None:
        if self.ops.calls is not self.calls:
            object.__setattr__(self, "ops", replace(self.ops, calls=self.calls))
        if self.saves.calls is not self.calls:
            object.__setattr__(self, "saves", replace(self.saves, calls=self.calls))

    def values(self) -> dict[str, Any]:
        """Return all fields by name: table columns as `ops.name`, other fields under their own names."""
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
    def backward_end(self) -> int:
        """The last op of forward and backward."""
        return int(np.flatnonzero(self.ops.phase < Phase.BOUNDARY)[-1])

    @cached_property
    def freed_after(self) -> I32:
        """(m,) op after which each storage is freed; FOREVER if it outlives the step."""
        end = np.maximum(self.storages.held_until, self.storages.producer)
        # A donated storage is freed before its op's output is allocated, that is, after the op before.
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
        """Return this step with donated uses of `ops` (None: all) as plain reads."""
        # Under a dispatch mode, or without autograd, another reference holds the input, so the
        # output is allocated.
        donated = self.uses.mode == DONATES
        if ops is not None:
            donated &= np.isin(self.uses.op, ops)
        return (
            self.with_uses(mode=np.where(donated, READS, self.uses.mode).astype(np.uint8))
            if donated.any()
            else self
        )

    def live_bytes(self, tier: Tier = Tier.DEVICE) -> I64:
        """Return (n,) the bytes of `tier` that are live while each op runs."""
        in_tier = self.storages.tier == tier
        # Storages from before the step are live from its first op on.
        start = np.maximum(self.storages.producer[in_tier], 0)
        stop = np.minimum(self.freed_after[in_tier], self.ops.n - 1)
        delta = np.zeros(self.ops.n + 1, np.int64)
        np.add.at(delta, start, self.storages.bytes[in_tier])
        np.add.at(delta, stop + 1, -self.storages.bytes[in_tier])
        return np.cumsum(delta[:-1])

    def peak_bytes(self, tier: Tier = Tier.DEVICE) -> int:
        """Return the largest value of `live_bytes`, 0 for a step without ops."""
        return int(self.live_bytes(tier).max(initial=0))

    def saved_bytes(self, block: int | None = None) -> int:
        """Return the bytes that autograd holds after forward, without storages that outlive the step.

        Args:
            block: Count saves of this block only; None: of all.
        """
        rows = slice(None) if block is None else self.saves.block == block
        # Several nodes may save one storage; it occupies memory once.
        storages = np.unique(self.saves.storage[rows])
        producer = self.storages.producer[storages]
        # Recompute and double backward save storages that do not exist yet when forward ends.
        later = (producer >= 0) & (self.ops.phase[producer] > Phase.FORWARD)
        return int(
            self.storages.bytes[storages][(self.storages.held_until[storages] != FOREVER) & ~later].sum()
        )

    def kept_for_backward(self) -> npt.NDArray[np.bool_]:
        """Return (m,) True for storages that autograd saves, or that forward makes and backward reads."""
        # A schedule keeps its values itself, so `saves` does not list them.
        kept = np.zeros(self.storages.n, bool)
        kept[self.saves.storage] = True
        later = np.isin(self.ops.phase[self.uses.op], (Phase.RECOMPUTE, Phase.BACKWARD))
        read = self.uses.storage[later]
        producer = self.storages.producer[read]
        kept[read[(producer >= 0) & (self.ops.phase[producer] == Phase.FORWARD)]] = True
        return kept

    def validate(self) -> None:
        """Check the invariants of the tables.

        Raises:
            ValueError: An invariant is broken; the message has its name and the rows.
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
            "no save is freed before its producer",
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
"""Factor in `Ops.group` of the distance between the members of a strided group."""


@dataclass(frozen=True)
class RankClass:
    """Ranks that run the same step. Two classes are equal only if their steps are one object."""

    count: int
    step: Step
    ranks: tuple[int, ...] = ()
    """The ranks, ascending; empty if they follow those of the classes before."""


@dataclass(frozen=True, eq=False)
class Program:
    """One optimizer step of all ranks: prologue, body × `accumulate`, boundary, optimizer (`Ops.phase`).

    With `accumulate` > 1 the step is that of a *later* micro-batch, which adds its gradients to the sums of
    the earlier ones. The first micro-batch needs no more memory, so the peak is that of the step, and the
    time of the body is `accumulate` times that of the step.
    """

    rank_classes: tuple[RankClass, ...]
    micro_batch: int
    accumulate: int = 1
    notes: tuple[str, ...] = ()
    """Assumptions of the passes, for reports."""
    sharers: int = 1
    """Consecutive ranks that work on one micro-batch together (micro-batch rotation). Each provides
    micro-batches, so `accumulate` counts those of all of them.
    """
    serial_copies: bool = False
    """Of the ranks behind one PCIe root one copies at a time per direction, in order of arrival."""
    unrolled: int = 1
    """Micro-batches that the steps contain: the number in the pipeline at once."""
    idle: float = 0.0
    """Time that a pipeline rank waits for its neighbours, divided by the time of its forwards and backwards.
    """
    stages: Stages | None = None
    """Division of the blocks into pipeline stages, while the step still has all blocks."""
    batch_range: tuple[float, float] = (1.0, 1.0)
    """Bounds of a batch's bytes over the recorded one's."""

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
        """Return this program with `step` on every rank, for passes that treat all ranks alike."""
        return replace(self, rank_classes=(RankClass(self.ranks, step),), **changes)


@dataclass(frozen=True)
class Call:
    """A call in the user's code whose kernels depend on the device, and its rows in the Step."""

    kind: str
    """`attention`, `dropout`, `recurrent`."""
    ops: tuple[int, int]
    """First op of the call and the one after its last."""
    nodes: tuple[int, int]
    """Autograd's sequence numbers at the start and end of the call; backward ops of these nodes belong to it.
    """
    saves: tuple[int, int]
    """First save of the call and the one after its last."""
    inputs: tuple[int, ...]
    """Storages of its tensor arguments, in argument order."""
    output: int
    """Storage of its result."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of its tensor arguments, in argument order."""
    dtype: str
    """Type that the kernel computes in: autocast's if it is on, else the first tensor's."""
    options: Mapping[str, float] = field(default_factory=dict)
    """Further inputs of the kernel choice: `dropout`, `causal`, `masked`, `aligned`, …"""


@dataclass(frozen=True, eq=False)
class Hints:
    """Facts about a recording that a Step does not hold and that translation to another device needs."""

    calls: tuple[Call, ...] = ()
    signatures: tuple[str, ...] = ()
    """(n,) op with its arguments, the key of a workspace table; '' for rows that are no torch op."""
    foreach: Step | None = None
    """The optimizer phase with foreach kernels; None if the optimizer has none or the user set `foreach`."""
    step_counters: tuple[int, ...] = ()
    """Storages of the optimizer's step counters, which torch keeps on the host even if the model is on CUDA.
    """


@dataclass(frozen=True)
class OptimizerFacts:
    """Limits of the user's optimizer, which no Step shows; '' means no limit."""

    native_refusal: str = ""
    """Reason why memtune's native update cannot replace its step."""
    not_one_by_one: str = ""
    """Reason why it cannot update parameters at different times."""
    inner: tuple[str, ...] = ()
    """Classes of the optimizers that it steps, whose parameters are lists of their own."""


@dataclass(frozen=True)
class ModelFacts:
    """The recorded model, as configs name it."""

    fingerprint: str = ""
    """Over names, shapes and dtypes of its parameters (`config.fingerprint`)."""
    parameters: int = 0
    """Elements of its parameters."""


@dataclass(frozen=True, eq=False)
class Recording:
    """A step recorded at two micro-batches, with every size as a function of the micro-batch.

    Sizes are affine in the micro-batch: value(b) = value(small) + (b - small) * slope.
    """

    small: int
    step: Step
    """The step at micro-batch `small`."""
    bytes_slope: I64  # (m,) bytes per sample
    flops_slope: F64  # (n,) FLOPs per sample
    traffic_slope: I64  # (n,) bytes per sample
    rung: str
    """Recording rung: fake, meta, real-init or real-step."""
    notes: tuple[str, ...] = ()
    record_s: float = 0.0
    checked: frozenset[int] = field(default_factory=frozenset)
    """Micro-batches that were recorded, not extrapolated."""
    failing: frozenset[int] = frozenset()
    """Micro-batches at which the user's code raises."""
    exact: Mapping[int, Step] = field(default_factory=dict)
    """Steps recorded at further micro-batches, used instead of the affine sizes."""
    device: str = "cpu"
    """Device type of the kernels; `autotune.translate.translation` rewrites steps for another one."""
    hints: Mapping[int, Hints] = field(default_factory=dict)
    """Hints by micro-batch, for recorded steps."""
    optimizer: OptimizerFacts = OptimizerFacts()
    model: ModelFacts = ModelFacts()
    keeps_gradients: bool = False
    """Gradients are zeroed in place at the end of a step, so that every backward adds to them."""
    autocast_cache: bool = True
    """Casts of weights live until the end of the autocast context."""
    batch_factors: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """By micro-batch, bounds of a batch's bytes over the recorded one's; empty for batches of one size."""

    def batch_range(self, micro_batch: int) -> tuple[float, float]:
        """Return the bounds of a batch's bytes over the recorded one's, (1, 1) for batches of one size."""
        # Of the next smaller micro-batch if it is not known: more samples vary less.
        below = [size for size in self.batch_factors if size <= micro_batch]
        nearest = max(below) if below else min(self.batch_factors, default=None)
        return (1.0, 1.0) if nearest is None else self.batch_factors[nearest]

    def at(self, micro_batch: int) -> Step:
        """Return the step with all sizes evaluated at `micro_batch` samples."""
        return self.exact[micro_batch] if micro_batch in self.exact else at_micro_batch(self, micro_batch)


def at_micro_batch(recording: Recording, micro_batch: int) -> Step:
    """Return the step with the affine sizes of `recording` evaluated at `micro_batch` samples."""
    more, step = micro_batch - recording.small, recording.step
    ops, storages = step.ops, step.storages
    # The line through two sizes may be negative far from the recorded micro-batches.
    return step.with_storages(bytes=np.maximum(storages.bytes + more * recording.bytes_slope, 0)).with_ops(
        flops=np.maximum(ops.flops + more * recording.flops_slope, 0.0),
        traffic_bytes=np.maximum(ops.traffic_bytes + more * recording.traffic_slope, 0),
    )


def forward_and_backward(step: Step) -> Step:
    """Return `step` up to the op after backward, with equal live bytes op by op."""
    # Planners of forward and backward skip the optimizer this way, which has most of a step's ops.
    # Storages that outlive the last op are held to it. Return `step` itself if its storages are not in
    # order of their producers.
    training = np.flatnonzero(step.ops.phase <= Phase.BACKWARD)
    n_ops = min(int(training.max(initial=-1)) + 2, step.ops.n)
    later = step.storages.producer >= n_ops
    n_storages = step.storages.n - int(later.sum())
    # Only a tail can be cut off: other rows would need new numbers.
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


def traffic_bytes(step: Step, accumulate: int) -> npt.NDArray[np.int64]:
    """Return the bytes that each op of `step` moves in an optimizer step of `accumulate` micro-batches."""
    # Ops of the body count once per micro-batch. Reads of gradient sums count one time fewer, since the
    # first micro-batch has no sums yet.
    body = np.isin(step.ops.phase, REPEATED)
    times = np.where(body, accumulate, 1)
    times[body & _reads_sums(step)] -= 1
    found: npt.NDArray[np.int64] = step.ops.traffic_bytes * times
    return found


def _reads_sums(step: Step) -> npt.NDArray[np.bool_]:
    """Return (n,) True for reads of gradient sums of earlier micro-batches from SSD."""
    found = np.zeros(step.ops.n, bool)
    sums = (
        (step.storages.kind == Kind.GRADIENT)
        & (step.storages.tier == Tier.SSD)
        & (step.storages.producer < 0)
    )
    found[step.uses.op[sums[step.uses.storage] & (step.uses.mode == READS)]] = True
    found &= step.ops.resource == Resource.SSD_READ
    return found


def split_calls(step: Step) -> Step:
    """Return `step` with one block per call, in call order; `step` itself if no block runs twice.

    ALBERT's shared layers and a GAN's discriminator run several times in one forward. Each call has its own
    inputs, outputs and backward, so passes that recompute a block or offload its saved tensors work per call.
    The recorder numbers calls in the order in which they begin; rows of ops, saves and inputs refer to them.
    """
    if len(step.calls.block) == len(step.blocks):
        return step
    blocks = tuple(step.blocks[each] for each in step.calls.block)
    outputs = tuple(step.block_outputs[each] for each in step.calls.block) if step.block_outputs else ()
    return replace(step, blocks=blocks, block_outputs=outputs).with_calls(
        block=np.arange(len(blocks), dtype=np.int32)
    )


def join_calls(step: Step, like: Step) -> Step:
    """Return `step`, which has one block per call of `like`, with the blocks of `like` restored."""
    if len(like.calls.block) == len(like.blocks):
        return step
    return replace(step, blocks=like.blocks, block_outputs=like.block_outputs).with_calls(
        block=like.calls.block
    )
