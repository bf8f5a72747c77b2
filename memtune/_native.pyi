"""
memtune's native code: free of torch's ABI, over plain arrays of bytes and seconds.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray


def version() -> str:
    """
    Version of memtune that this module was built from; if it is not the package's, rebuild.
    """

def order_rows(removed: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)], anchor: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], after: Annotated[NDArray[numpy.bool_], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))]]:
    """
    New order of rows and insertions: (remaining rows, position by row with -1 for removed ones and one more -1, position or that of the last remaining row before, position or that of the next row). ValueError for an anchor outside [-1, rows].
    """

def take_rows(rows: NDArray[numpy.int32], old: NDArray[numpy.generic], added: NDArray[numpy.generic]) -> NDArray[numpy.generic]:
    """
    The given rows of the column `old` followed by `added`, of the same dtype. ValueError for a row in neither.
    """

def sort_uses(op: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], storage: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], mutates: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], n_ops: int) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.uint8], dict(shape=(None,))]]:
    """
    (op, storage, mutates) sorted by op, uses of one op in their order. ValueError for an op outside the step.
    """

IO_ALIGN: int = 4096

IO_WRONG_CHECKSUM: int = -1

IO_END_OF_FILE: int = -2

IO_CANCELLED: int = -3

def checksum(data: object) -> int:
    """XXH3, 64 bits, of more than 240 bytes."""

class IoEngine:
    """
    Reads and writes of tensors in files, block by block; csrc/io/engine.h has the rules.
    """

    def __init__(self, *, which: str = 'auto', depth: int = 16, block_bytes: int = 1048576, checksums: bool = True) -> None: ...

    def start(self, write: bool, fd: int, offset: int, memory: object, sums: object, priority: int = 0) -> int:
        """
        Begin to move `memory` (bytes); keep it, `sums` and the file until `wait` with the ticket has returned.
        """

    def wait(self, ticket: int) -> tuple[int, int]:
        """
        Until it is over: (0, an errno or an IO_ constant, first block that failed). Each ticket once.
        """

    def close(self) -> None:
        """
        End what is under way; what has not begun is cancelled, as is all that is started later.
        """

    def blocks(self, bytes: int) -> int:
        """Blocks, and so checksums, of that many bytes."""

    @property
    def read_bytes(self) -> int:
        """Moved by the kernel so far."""

    @property
    def written_bytes(self) -> int:
        """Moved by the kernel so far."""

    @property
    def backend(self) -> str:
        """`io_uring` or `threads`."""

    @property
    def refused(self) -> str:
        """Why io_uring is not used; empty where it is, or was not tried."""

def lay_out(start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], alignment: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], period: int, goal_bytes: int, heuristic_s: float, exact_s: float, seed: int) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], int, int, float, float]:
    """
    Offsets for buffers on a line (period 0) or a circle: (offsets, proven lower bound, placements tried by the exact tier, seconds on a core of the heuristic and of the exact tier). ValueError names an invalid row.
    """

def layout_fault(start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], alignment: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], period: int, offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], height: int) -> str:
    """The first error of a layout, '' if there is none."""

class OptimizerNumbers:
    """
    Scalars of one optimizer step; csrc/optim/update.h lists those that each rule reads.
    """

    def __init__(self, *, decay: float = 0.0, first: float = 0.0, second: float = 0.0, rest: float = 0.0, ahead: float = 0.0, correction: float = 1.0, eps: float = 0.0, rate: float = 0.0, sign: float = 1.0, from_gradient: bool = False, seed: int = 0) -> None: ...

def wish_huge_pages(memory: int, bytes: int) -> bool:
    """
    Advises huge pages within `bytes` at the address `memory`; returns False if there are none.
    """

MOMENT_BLOCK: int = 256

def optimizer_isa() -> str:
    """The instruction set that `optimizer_update` uses here."""

def optimizer_update(rule: str, moments: str, weight: object, gradient: object, out: object | None, first: object | None, second: object | None, first_scale: object | None, second_scale: object | None, numbers: OptimizerNumbers, threads: int = 1, isa: str = '') -> None:
    """
    One optimizer step over one tensor in host memory, in one pass on `threads` threads: weight (float32) and moments in place, the new weight in bfloat16 to `out`, which may be the gradient's memory. ValueError names an invalid argument.
    """

def optimizer_update_all(rule: str, moments: str, rows: Sequence[Sequence[int]], numbers: Sequence[OptimizerNumbers], threads: int = 1) -> None:
    """
    `optimizer_update` of several tensors of distinct memory, by address: a row has the number of elements, the addresses of weight, gradient, out, first, second, first_scale and second_scale (0: none), 1 for a bfloat16 gradient, and the index in `numbers`. The caller holds the tensors, which are dense and of the types of `optimizer_update`.
    """

def low_peak_order(n_ops: int, bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], producer: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], stays: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], use_op: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], use_storage: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], first: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], then: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], int, int]:
    """
    (ops in an order with a low peak, its most live bytes, those of program order); the first is never above the second, and exact for up to 16 ops. ValueError for numbers out of range and pairs against program order.
    """

def quantise(packed: object, values: object, error: object | None, lengths: Sequence[int], bits: int, block: int, nodes: int = 1, threads: int = 1, isa: str = '') -> None:
    """
    Packs rows of values into rows of bytes: stretches of `lengths` are alternately quantised in blocks and kept as float32. csrc/quant/quantise.h has the format. ValueError names an invalid argument.
    """

def dequantise(values: object, packed: object, lengths: Sequence[int], bits: int, block: int, sources: int = 1, factor: float = 1.0, threads: int = 1, isa: str = '') -> None:
    """
    Unpacks rows of bytes into values: `factor` times the sum over `sources`, each with all rows. ValueError names an invalid argument.
    """

def compress(packed: object, values: object, bits: int, group: int, seed: int | None, threads: int = 1, isa: str = '') -> None:
    """
    Compresses values, float32 or 16-bit floats, into bytes: groups of integers between their least and largest value, rounded at random from `seed`, or to the nearest without one. csrc/quant/groups.inl has the rules. ValueError names an invalid argument.
    """

def decompress(values: object, packed: object, bits: int, group: int, threads: int = 1, isa: str = '') -> None:
    """
    Decompresses what `compress` packed into values of the same number. ValueError names an invalid argument.
    """

class Rematerializer:
    """
    Dynamic rematerialization, simulated alongside a running program; a tensor is a storage.
    """

    def __init__(self, settings: dict[str, object]) -> None: ...

    def constant(self, n_bytes: int) -> int:
        """Adds a tensor that cannot be recomputed, with one reference."""

    def call(self, cost: float, args: Sequence[int], out_bytes: Sequence[int], takes_over: int, scratch_bytes: int, elements: int) -> list[int]:
        """
        Adds an operator that has run; returns the tensors that it made, each with one reference and one hold. takes_over: argument that the first one overwrites, or -1. scratch_bytes: workspace of another run. elements: number of output elements if it is elementwise, else 0.
        """

    def retain(self, tensor: int) -> None:
        """Adds a reference."""

    def release(self, tensor: int) -> None:
        """Removes a reference."""

    def hold(self, tensor: int) -> None:
        """Adds a hold; a held tensor is not evicted."""

    def let_go(self, tensor: int) -> None:
        """Removes a hold."""

    def take(self, tensor: int) -> None:
        """Adds a reference and a hold."""

    def give_back(self, tensor: int) -> None:
        """Removes a hold and a reference."""

    def pending(self) -> bool:
        """Whether `drain` has events."""

    def bring(self, tensor: int) -> None:
        """Recomputes the tensor if it was evicted."""

    def make_room(self, n_bytes: int) -> None:
        """Evicts until so many bytes are free."""

    def drain(self) -> list[tuple[int, int]]:
        """Events since the last call: evictions and replays."""

    def counted(self) -> dict[str, Any]:
        """Counters so far."""

def remat_trace(columns: dict[str, NDArray[numpy.generic]], settings: dict[str, object], settle: bool, journal: bool) -> dict[str, Any]:
    """
    Runs a trace (columns as in csrc/remat/trace.h) under a budget; returns results, and the journal if requested.
    """

class StepColumns:
    """
    The columns of one step with the seconds of its ops, checked once; ValueError names a bad column.
    """

    def __init__(self, op_phase: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], op_resource: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], op_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], op_issue_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], tier: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], kind: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], producer: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], held_until: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], use_op: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], use_storage: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], use_mutates: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], save_storage: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], save_until: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], op_stream: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], op_prefetch: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], op_match: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

class Footprint:
    """Peaks of a step."""

    @property
    def peak_bytes(self) -> list[int]:
        """By tier."""

    @property
    def peak_op(self) -> list[int]:
        """First op at the peak of each tier, -1 for a step without ops."""

    @property
    def pool_peak_bytes(self) -> list[int]:
        """On the device: of small requests, of large ones."""

    @property
    def bytes_by_kind(self) -> list[int]:
        """
        On the device at its peak, by kind; the last one holds the temporaries that autograd saved.
        """

class Live(Footprint):
    """Peaks of one step and sums of its resources."""

    @property
    def busy_s(self) -> list[list[float]]:
        """By resource (the last one is the host issuing ops) and phase."""

class ClassTimeline(Footprint):
    """One rank class in a simulated optimizer step."""

    @property
    def finish_s(self) -> float:
        """When its last op, or its host, has finished."""

    @property
    def busy_s(self) -> list[float]:
        """By resource; the last one is the host issuing ops."""

    @property
    def exposed_s(self) -> list[float]:
        """By resource: busy while compute is not."""

    @property
    def op_exposed_s(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """By op, all repetitions; 0 for compute."""

    @property
    def storage_stream(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        Allocations (storage + 1) and frees (-(storage + 1)) in order, beginning with what is there at the start.
        """

class Timeline:
    """A simulated optimizer step of all rank classes."""

    @property
    def step_s(self) -> float: ...

    @property
    def classes(self) -> list[ClassTimeline]: ...

    @property
    def critical_path(self) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.uint8], dict(shape=(None,))], Annotated[NDArray[numpy.float64], dict(shape=(None,))], Annotated[NDArray[numpy.float64], dict(shape=(None,))]]:
        """
        Rank class, op, whether it is the host that issues the op, start, stop; in order, without gaps from 0 to `step_s`.
        """

def live(columns: StepColumns, rounding_bytes: int = 1, small_bytes: int = 0) -> Live:
    """
    Live bytes of a step by tier and kind, and how long it needs each resource.
    """

def least_s(classes: Sequence[StepColumns], places: Sequence[tuple[int, int]], accumulate: int = 1, host_computes: bool = True, shares_cores: bool = False) -> list[float]:
    """
    A lower bound on the seconds of one optimizer step, by rank class; never above the result of `schedule`.
    """

def schedule(classes: Sequence[StepColumns], places: Sequence[tuple[int, int]], accumulate: int = 1, host_computes: bool = True, link_slowdown: float = 0.0, rounding_bytes: int = 1, small_bytes: int = 0, copies_in_turn: bool = False, shares_cores: bool = False, link_of_root: tuple[float, float] = (0.0, 0.0)) -> Timeline:
    """
    When the ops of one optimizer step run on every rank class. `places`: for each class its PCIe root and how many of its ranks are behind it. `copies_in_turn`: of the ranks behind a root one copies at a time. `shares_cores`: compute, host threads and copies share the cores of a class. `link_of_root`: where ranks reach each other through the host, the most of a root's rate, up and down, that a rank's link can take; 0 where links have a way of their own. ValueError where ops wait for each other.
    """

def tsplit_greedy(live_bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], tensor: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], number: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], part_of: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], more_s: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], free_action: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], first: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], stop: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], n_bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]], back: tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)]], budget_bytes: int, beyond: bool) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
    """
    By tensor the number of the action that TSPLIT's greedy planner takes, 0 for none. A link is (action, start_s, end_s, copy_s) of its copies. ValueError for columns that do not belong together.
    """

class ArenaOptions:
    """Options of memtune's allocator."""

    def __init__(self, *, defragment: bool = True, stitch_from_bytes: int = 0, reuse_limit: int = 10, most_stitched_bytes: int = 1099511627776, arena_below_bytes: int = 2097152, planned: bool = False, replan_after: int = 64, window: int = 64, layout_s: float = 1.0, pools: bool = False, transient_within: int = 64) -> None: ...

class ArenaStatistics:
    """Counters of an allocator of this process."""

    @property
    def allocated_bytes(self) -> int: ...

    @property
    def peak_allocated_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def peak_reserved_bytes(self) -> int: ...

    @property
    def driver_calls(self) -> int: ...

    @property
    def requests(self) -> int: ...

    @property
    def failures(self) -> int: ...

    @property
    def stitched_bytes(self) -> int:
        """Addresses in stitched blocks."""

    @property
    def states(self) -> list[int]:
        """How often GMLake's states S1 to S5 were reached."""

    @property
    def plan_bytes(self) -> int:
        """Height of the planned arena."""

    @property
    def plan_bound_bytes(self) -> int:
        """The most bytes of the plan alive at once."""

    @property
    def plan_requests(self) -> int:
        """Requests of a step that have a place."""

    @property
    def plan_served(self) -> int: ...

    @property
    def deviations(self) -> int:
        """Requests that were not as planned."""

    @property
    def plans(self) -> int:
        """How often a step was laid out, or its lifetimes were learned."""

    @property
    def first_deviation(self) -> str: ...

ARENA_CPU: int = -1

def arena_open(device: int) -> str:
    """
    Creates the allocator of a device if there is none; returns '' or the reason why it cannot.
    """

def arena_replace(device: int, options: ArenaOptions) -> str:
    """
    Replaces the allocator of a device; the old one ends when its blocks have been freed. Returns '' or the reason why it cannot.
    """

def arena_defaults(options: ArenaOptions) -> None:
    """Options for GPUs whose allocator torch's first request there makes."""

def arena_limit(device: int, n_bytes: int) -> None:
    """The most bytes that an allocator takes from the driver from now on."""

def arena_regions(device: int) -> list[tuple[int, int, int, str, list[tuple[int, int, bool]]]]:
    """
    Memory from the driver as (address, bytes, stream, kind, [(address, bytes, in use)]); stream -1: of several.
    """

def arena_begin_update(device: int) -> None:
    """
    Notifies an allocator that the optimizer begins: the first update makes the state.
    """

def arena_end_step(device: int) -> None:
    """Notifies an allocator that a training step has ended."""

def arena_release_unused(device: int) -> None: ...

def arena_restart_peaks(device: int) -> None: ...

def arena_statistics(device: int) -> ArenaStatistics: ...

def arena_cuda_functions() -> list[int]:
    """
    Addresses of the C functions of torch's pluggable allocator: alloc, free, record_stream, memory_fraction, empty_cache.
    """

def arena_functions() -> list[int]:
    """
    Addresses of the C functions that take and give memory of the CPU's allocator.
    """

class OutOfMemory:
    """
    The first allocation that could not be served; event is -1 where there is none.
    """

    @property
    def event(self) -> int: ...

    @property
    def requested_bytes(self) -> int: ...

    @property
    def allocated_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def largest_free_bytes(self) -> int: ...

class AllocatorReplay:
    """State of the caching allocator over a stream of allocations and frees."""

    @property
    def peak_reserved_bytes(self) -> int: ...

    @property
    def peak_allocated_bytes(self) -> int: ...

    @property
    def peak_event(self) -> int:
        """First event at the peak of reserved bytes, -1 without events."""

    @property
    def allocated_at_peak_bytes(self) -> int: ...

    @property
    def end_reserved_bytes(self) -> int: ...

    @property
    def end_allocated_bytes(self) -> int: ...

    @property
    def device_allocs(self) -> int:
        """Calls of cudaMalloc, or of mapping pages."""

    @property
    def device_frees(self) -> int: ...

    @property
    def retries(self) -> int:
        """How often everything cached was given back for one allocation."""

    @property
    def ooms(self) -> int: ...

    @property
    def first_oom(self) -> OutOfMemory: ...

    @property
    def step_reserved_bytes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """Peak by step."""

    @property
    def step_allocated_bytes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """Peak by step."""

    @property
    def step_device_calls(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """Calls of the driver by step."""

    @property
    def plan_bytes(self) -> int:
        """Height of the planned arena."""

    @property
    def plan_bound_bytes(self) -> int:
        """The most bytes of the plan alive at once."""

    @property
    def deviations(self) -> int:
        """Requests that were not as planned."""

    @property
    def reserved_bytes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """After each event, empty without `timeline`."""

    @property
    def allocated_bytes(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """After each event, empty without `timeline`."""

    @property
    def address(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """Of each allocation, else -1; empty without `timeline`."""

def replay_allocator(action: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], storage: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], stream: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], op: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], ready_op: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], step: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], max_split_bytes: int | None = None, max_non_split_rounding_bytes: int | None = None, large_segment_bytes: int = 20971520, roundup_divisions: Sequence[int] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], garbage_collection_threshold: float = 0.0, expandable_segments: bool = False, asynchronous: bool = False, arena: ArenaOptions | None = None, capacity_bytes: int | None = None, allowed_bytes: int | None = None, timeline: bool = False, held: dict[str, object] = {}) -> AllocatorReplay:
    """
    Runs allocations (action 0), frees (1) and calls of empty_cache (2) through PyTorch's CUDA caching allocator.
    """
