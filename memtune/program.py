"""A training step as plain data: operations, storages, and who holds what until when.

Legend: n = ops, m = storages, u = uses, v = saves. All columns are numpy arrays; nothing here knows torch.

Time is the op index. A storage is allocated by its `producer` (-1: it was there before the step) and is freed right
after the *last* of: the last op that uses it, the op after which Python lets go (`held_until`), the op after which
autograd lets go (its `saves`). Bytes are counted while an op runs: after its outputs exist, before anything it frees; what
is handed over to an output (`HANDS_OVER`) is freed before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from memtune.parameters import Parameter as Parameter
from memtune.parameters import columns_of
from memtune.pipeline_order import Stages

FOREVER = np.int32(2**31 - 1)
"""`held_until` of what outlives the step: parameters, buffers, optimizer state."""
READS, WRITES, HANDS_OVER = 0, 1, 2
"""How an op uses a storage. What is handed over is read, and what the op makes takes its memory unless somebody holds it."""
OWN_GENERATOR = 2
"""See `Step.op_rng`."""

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
F64 = npt.NDArray[np.float64]


class Phase(IntEnum):
    """Which part of the step an op belongs to; prologue, boundary and optimizer run once, the rest per micro-batch."""

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
    """What a storage is for. A saved activation is a TEMPORARY that autograd holds; reports tell them apart."""

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER = 2
    BUFFER = 3
    BATCH = 4
    TEMPORARY = 5
    WORKSPACE = 6
    COMMUNICATION = 7


ON_GPU_ONLY = 128
"""In `Step.op_by_element`: on this device the op makes other bits where it runs in parts, on a GPU it would not."""


@dataclass(frozen=True, eq=False)
class Step:
    """One training step of one rank in SSA form; see the module docstring for how lifetimes follow from it."""

    names: tuple[str, ...]
    """Op names by id: `aten.addmm.default`, `memtune.to_host.default`."""
    modules: tuple[str, ...]
    """Qualified module names by id; id 0 is `(outside)`: loss function and optimizer; the root is ''."""
    blocks: tuple[str, ...]
    """Qualified names of the repeated blocks, in forward order."""
    call_block: I32
    """(c,) the block of each call of a block, calls in forward order; where no block runs twice, call i is of block i."""
    call_grad: U8
    """(c,) 1 where autograd looked on when the call began, and no checkpoint of the model's own took what it saved."""
    parameters: Sequence[Parameter]

    # ops, one row each
    op_name: I32  # (n,) index into names
    op_module: I32  # (n,) index into modules
    op_call: I32  # (n,) index into call_block, -1 outside
    op_phase: U8  # (n,) Phase
    op_resource: U8  # (n,) Resource
    op_flops: F64  # (n,)
    op_traffic_bytes: I64  # (n,) read + written by the kernel; for copies and collectives, bytes on the link
    op_rng: U8  # (n,) 1 where the op draws random numbers, OWN_GENERATOR where it is given a generator to draw them from
    op_group: I32  # (n,) ranks in the collective, 0 for none; + APART · (a - 1) where members are a ranks apart, not neighbours
    op_node: I32  # (n,) autograd node that runs a backward op (its sequence number), -1 for all others
    op_copy_of: I32  # (n,) the forward op that this op runs once more or only allocates for, -1 for all others
    op_stream: U8  # (n,) its order: 0 its resource's own stream, 1 the compute stream, 2 to 7 a side stream, which goes first
    op_prefetch: U8  # (n,) 0: runs as early as issued; d: once compute comes to the place of the (d - 1)-th such op before it
    op_match: I32  # (n,) ops of several rank classes with the same number start together, 0 for none
    op_by_element: U8  # (n,) bytes of an element of its one output, each made of the same one of what it reads; 0 for all others

    # storages, one row each
    bytes: I64  # (m,)
    tier: U8  # (m,) Tier
    kind: U8  # (m,) Kind
    producer: I32  # (m,) op that allocates it, -1 before the step
    held_until: I32  # (m,) op after which Python or a module lets go, -1 nobody holds it
    ready_after: I32  # (m,) op after which autograd has put this gradient in place, -1 for all others
    owner: I32  # (m,) index into parameters of what this gradient, state or optimizer temporary belongs to, -1 none

    # uses: which op reads or mutates which storage, sorted by op
    use_op: I32  # (u,)
    use_storage: I32  # (u,)
    use_mutates: U8  # (u,) READS, WRITES or HANDS_OVER

    # saves: what autograd keeps for backward, in the order in which it packed them
    save_storage: I32  # (v,)
    save_before: I32  # (v,) the pack call came just before this op of the forward
    save_until: I32  # (v,) op after which autograd lets go
    save_used_until: I32  # (v,) last op of the backward node that used it; autograd itself lets go a little later
    save_asked: I32  # (v,) backward first asked for it just before this op, -1 if it never did
    save_turn: I32  # (v,) orders what is asked for before the same op
    save_is_output: U8  # (v,) 1 where the op just before saved its own output, which it still held while it packed
    save_call: I32  # (v,) call whose forward was running, -1 outside

    enter: I32  # (blocks + 1,) op before which each block's forward began, then the whole model's
    leave: I32  # (blocks + 1,) op after which each block's forward had returned, then the whole model's
    input_call: I32  # (i,) what each call of a block was given: the call …
    input_storage: I32  # (i,) … and a storage among its arguments, in the order of the arguments

    landing: I32
    """(g,) gradient storages in the order in which autograd put them in place; `ready_after` says when."""
    returned: I32
    """(r,) storages of the tensors that the model's forward returned."""
    written_parts: I32
    """(p,) storages that autograd saved in parts while other parts were still written into (`runtime.moved`): they stay."""
    looked_at: I32
    """(l,) storages of which the model's code asked for a number (`.item()`): what it does next may follow from it."""
    model_calls: int = 1
    """How often the whole model's forward ran; `enter` is that of the first one, `leave` that of the last."""
    lazy_values: bool = False
    """Whether an op of forward or backward was given a tensor that torch conjugates or negates as it is read: complex numbers."""
    by_schedules: bool = False
    """Whether blocks run by schedules: what they save is what these keep, and what runs again does so op by op."""
    block_outputs: tuple[str, ...] = ()
    """What each block returns (`block_outputs.form_of`), its last call if it has several."""

    @property
    def n_ops(self) -> int:
        """Number of ops, n."""
        return len(self.op_name)

    @property
    def n_storages(self) -> int:
        """Number of storages, m."""
        return len(self.bytes)

    def columns(self, prefix: str) -> dict[str, Any]:
        """The columns of ops (`op_`), saved tensors (`save_`) and so on by name, not what is derived from them."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name.startswith(prefix)}

    @cached_property
    def op_block(self) -> I32:
        """(n,) index into blocks, -1 outside."""
        return self._block_of(self.op_call)

    @cached_property
    def save_block(self) -> I32:
        """(v,) block whose forward was running, -1 outside."""
        return self._block_of(self.save_call)

    @cached_property
    def input_block(self) -> I32:
        """(i,) block that was given `input_storage`."""
        return self._block_of(self.input_call)

    def _block_of(self, calls: I32) -> I32:
        if len(self.call_block) == len(self.blocks):  # each runs once
            return calls
        return np.append(self.call_block, np.int32(-1))[calls]  # the last entry serves -1

    @cached_property
    def end(self) -> I32:
        """(m,) op after which each storage is freed; FOREVER for what outlives the step."""
        end = np.maximum(self.held_until, self.producer)
        np.maximum.at(end, self.use_storage, self.use_op - (self.use_mutates == HANDS_OVER))
        np.maximum.at(end, self.save_storage, self.save_until)
        return end

    @cached_property
    def parameter_of(self) -> I32:
        """(m,) index of the parameter whose weights a storage holds, -1 for all others."""
        index = np.full(self.n_storages, -1, np.int32)
        index[columns_of(self.parameters).storage] = np.arange(len(self.parameters), dtype=np.int32)
        return index

    @cached_property
    def use_phase(self) -> U8:
        """(u,) phase of the op of each use."""
        phase: U8 = self.op_phase[self.use_op]
        return phase

    def without_handing_over(self, ops: I32 | None = None) -> Step:
        """This step where `ops` (None: all) make what they return anew: as under a dispatch mode, or outside of autograd."""
        handed = self.use_mutates == HANDS_OVER
        if ops is not None:
            handed &= np.isin(self.use_op, ops)
        return replace(self, use_mutates=np.where(handed, READS, self.use_mutates).astype(np.uint8)) if handed.any() else self

    def live_bytes(self, tier: Tier = Tier.DEVICE) -> I64:
        """(n,) bytes of `tier` that are live while each op runs."""
        mine = self.tier == tier
        start = np.maximum(self.producer[mine], 0)
        stop = np.minimum(self.end[mine], self.n_ops - 1)
        delta = np.zeros(self.n_ops + 1, np.int64)
        np.add.at(delta, start, self.bytes[mine])
        np.add.at(delta, stop + 1, -self.bytes[mine])
        return np.cumsum(delta[:-1])

    def peak_bytes(self, tier: Tier = Tier.DEVICE) -> int:
        """Largest value of `live_bytes`, 0 for a step without ops."""
        return int(self.live_bytes(tier).max(initial=0))

    def saved_bytes(self, block: int | None = None) -> int:
        """Bytes that autograd holds after forward, each storage once, parameters and what outlives the step left out."""
        rows = slice(None) if block is None else self.save_block == block
        storages = np.unique(self.save_storage[rows])
        producer = self.producer[storages]
        later = (producer >= 0) & (self.op_phase[producer] > Phase.FORWARD)  # made, or made again, by backward
        return int(self.bytes[storages][(self.held_until[storages] != FOREVER) & ~later].sum())

    def saved_by_autograd(self) -> npt.NDArray[np.bool_]:
        """(m,) True where autograd holds the storage for backward."""
        saved = np.zeros(self.n_storages, bool)
        saved[self.save_storage] = True
        return saved

    def validate(self) -> None:
        """Check every invariant of the form.

        Raises:
            ValueError: naming the first invariant that is broken and the rows that break it.
        """
        n, m = self.n_ops, self.n_storages
        _check("use_op within the ops", (self.use_op >= 0) & (self.use_op < n))
        _check("use_storage within the storages", (self.use_storage >= 0) & (self.use_storage < m))
        _check("save_storage within the storages", (self.save_storage >= 0) & (self.save_storage < m))
        _check("uses sorted by op", np.diff(self.use_op) >= 0)
        _check("producer within the ops", (self.producer >= -1) & (self.producer < n))
        _check("bytes not negative", self.bytes >= 0)
        _check("no use before its producer", self.use_op >= self.producer[self.use_storage])
        _check("autograd lets go after it saved", self.save_until >= self.producer[self.save_storage])
        _check("names cover op_name", (self.op_name >= 0) & (self.op_name < len(self.names)))
        _check("calls cover op_call", (self.op_call >= -1) & (self.op_call < len(self.call_block)))
        _check("calls cover save_call", (self.save_call >= -1) & (self.save_call < len(self.call_block)))
        _check("blocks cover call_block", (self.call_block >= 0) & (self.call_block < len(self.blocks)))
        parameters = columns_of(self.parameters)
        outside = (parameters.storage < 0) | (parameters.storage >= m) | (parameters.gradient >= m)
        if outside.any():
            raise ValueError(f"parameter {parameters.names[int(outside.argmax())]} points outside the {m} storages")


def _check(invariant: str, holds: npt.NDArray[np.bool_]) -> None:
    if not holds.all():
        raise ValueError(f"step breaks '{invariant}' at rows {np.flatnonzero(~holds)[:5].tolist()}")


APART = 1 << 16
"""See `Step.op_group`."""


@dataclass(frozen=True)
class RankClass:
    """Ranks that run the same step; equal where it is one step, not where it is an equal one."""

    count: int
    step: Step
    ranks: tuple[int, ...] = ()
    """Which ones, rising; empty where they are those after the ranks of the classes before."""


@dataclass(frozen=True, eq=False)
class Program:
    """What one optimizer step does on every rank: prologue, body × `accumulate`, boundary, optimizer (`Step.op_phase`).

    With `accumulate` > 1 the step is a *later* micro-batch, whose gradients are added to those already there: the
    first one needs no more memory, so peaks are the same, and `accumulate` times the body is the step's time.
    """

    rank_classes: tuple[RankClass, ...]
    micro_batch: int
    accumulate: int = 1
    notes: tuple[str, ...] = ()
    """What was assumed on the way, for people to read."""
    sharers: int = 1
    """Consecutive ranks that work on one micro-batch together; each brings its own, so `accumulate` counts those of all."""
    copies_in_turn: bool = False
    """Of the ranks behind one PCIe root one copies at a time in each direction, first come first served."""
    unrolled: int = 1
    """Micro-batches that the steps themselves hold, on their way through the stages of a pipeline."""
    idle: float = 0.0
    """Seconds that a rank of a pipeline waits for its neighbours, over those in which it runs forward and backward."""
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
    """A call of the user's code that other devices answer with other kernels, and which rows of its Step it became."""

    kind: str
    """`attention`, `dropout`, `recurrent`."""
    ops: tuple[int, int]
    """First op and the one after the last; all of them ran inside the call."""
    nodes: tuple[int, int]
    """Autograd's sequence number when the call began and when it returned: backward ops of these nodes are its own."""
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
    """The optimizer phase as it would be with foreach kernels, None where the optimizer has none or the user chose."""
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
    """Whose kernels the steps hold; `autotune.translate` makes the one of the other."""
    hints: Mapping[int, Hints] = field(default_factory=dict)
    """By micro-batch, for the steps that were recorded themselves."""
    optimizer: OptimizerFacts = OptimizerFacts()

    def at(self, micro_batch: int) -> Step:
        """The step with all sizes evaluated at `micro_batch` samples."""
        return self.exact[micro_batch] if micro_batch in self.exact else at_micro_batch(self, micro_batch)


def at_micro_batch(recording: Recording, micro_batch: int) -> Step:
    """Evaluate the affine sizes of `recording` at `micro_batch` samples."""
    more, step = micro_batch - recording.small, recording.step
    return replace(
        step,
        bytes=np.maximum(step.bytes + more * recording.bytes_slope, 0),
        op_flops=np.maximum(step.op_flops + more * recording.flops_slope, 0.0),
        op_traffic_bytes=np.maximum(step.op_traffic_bytes + more * recording.traffic_slope, 0),
    )
