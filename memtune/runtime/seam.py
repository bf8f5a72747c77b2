"""Seam: every act outside of PyTorch's own ops is a `torch.ops.memtune.*` operator with a declared resource
and tier.

On real tensors an operator moves bytes or calls native code; on fake tensors it does nothing but make the
output. So a recorder, a dry run and a byte counter see the same operators as the training step.

This file has the registry, the copies between host and device (`runtime.transfer`) and the collectives.
Copies of many tensors (`to_host_together`) group small neighbours into one call, unless a dispatch mode or a
recording must see the operator of each. Each other mechanism registers its own operators in the module of
their kernels, which its callers import:

| operator | registered in | resource | its output lives on |
|---|---|---|---|
| `to_device(x, device)` | here | host → device | device |
| `to_device_with_tail(x, tail, device)` | here | host → device | device |
| `to_host(x)` | here | device → host | host |
| `copy_to_host_(host, x)` | here | device → host | – |
| `copy_to_device_(x, host)` | here | host → device | – |
| `all_gather_into_(out, x, group, ranks)` | here | link | – |
| `reduce_scatter_into_(out, x, group, ranks, op)` | here | link | – |
| `all_reduce_(x, group, ranks, op)` | here | link | – |
| `all_to_all_into_(out, x, group, ranks)` | here | link | – |
| `all_to_all_rows_(out, x, group, ranks, arriving, sent)` | here | link | – |
| `send_next_into_(out, x, group, ranks)` | here | link | – |
| `shift_into_(out, x, group, distance, ranks)` | here | link | – |
| `all_gather_positions_(out, x, group, ranks)` | here | link | – |
| `reduce_scatter_positions_(out, x, group, ranks)` | here | link | – |
| `to_ssd(x, name)` | `ssd.ssd_tensors` | SSD write | SSD |
| `from_ssd(x)` | `ssd.ssd_tensors` | SSD read | host |
| `write_ssd_(ssd, x)` | `ssd.ssd_tensors` | SSD write | – |
| `host_update_(rule, …, weight, gradient, …)` | `offload.optimizer.native_update` | host threads | – |
| `updater_read_(host, weights, moments, link, order)` | `offload.near_storage.update_worker_client` | SSD
read, by an updater process | – |
| `updater_update_(slot, host, link, order)` | `offload.near_storage.update_worker_client` | host threads, of
an updater process | – |
| `updater_write_(ssd, host, link, order)` | `offload.near_storage.update_worker_client` | SSD write, by an
updater process | – |
| `largest_(kept, gradient, count)` | `offload.near_storage.topk_compression` | compute | device |
| `quantise_(packed, x, error, lengths, bits, block, nodes)` | `parallel.collectives.quantization` | compute |
– |
| `dequantise_(out, packed, lengths, bits, block, sources, factor)` | `parallel.collectives.quantization` |
compute | – |
| `compress(x, bits, group, seed)` | `activations.offload.compression` | compute | device |
| `decompress(packed, numel, dtype, bits, group)` | `activations.offload.compression` | compute | device |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from memtune.device import DISPATCH_KEYS
from memtune.program import Resource, Tier as TierId
from memtune.runtime import transfer
from memtune.runtime.memory_tiers import HOST, TIERS, mark
from memtune.runtime.node_topology import count_collective, is_between_nodes

_SPIN_S: Final = 2e-4
_NAP_S: Final = 2e-4
_LITTLE_PATIENCE_S: Final = 0.01
_patience_s = 10.0
"""Timeout of `_wait_released`."""
GROUP_BYTES: Final = 1 << 20
"""Bytes that one call copies; both ends of a group exist at once, as those of one large tensor do."""


@dataclass(frozen=True)
class SeamOp:
    """Properties of one operator of the seam, for the simulator."""

    resource: Resource
    output_tier: TierId = TierId.DEVICE
    collective: bool = False
    first_crosses: bool = False
    """Only the first of its inputs and outputs crosses the link."""


SEAM: dict[str, SeamOp] = {}
"""Registered operators, by the name that a dispatch mode sees (`memtune.to_host.default`)."""

_LIBRARY = torch.library.Library("memtune", "DEF")


def _nothing(*args: object) -> None:
    return None


def register(
    schema: str, op: SeamOp, kernel: Callable[..., object], fake: Callable[..., object] = _nothing
) -> None:
    """Define `torch.ops.memtune.<name>`; called once per operator, when its module is imported.

    Args:
        schema: As in `torch.library.Library.define`.
        op: Its resource, and the tier of its output.
        kernel: Its implementation on every device.
        fake: Its output on fake tensors; the default is for operators that write their arguments and return
            nothing.
    """
    # One table for both: a schema that is registered without its resource cannot be simulated.
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    # One kernel for all devices: it decides by its tensors. Not CompositeImplicit, which autograd and a
    # recorder would look through.
    for key in DISPATCH_KEYS:
        _LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"memtune::{name}", _in_tier(fake, op.output_tier), lib=_LIBRARY)
    SEAM[f"memtune.{name}.default"] = op


def _in_tier(fake: Callable[..., object], place: TierId) -> Callable[..., object]:
    """Return `fake` with its output marked."""
    # A tensor that lives on into the next step has no op there whose tier the tracer could read.
    if place is TierId.DEVICE:
        return fake

    def marked(*args: object) -> object:
        made = fake(*args)
        assert isinstance(made, Tensor)
        mark(made, TIERS[place])
        return made

    return marked


def link_of(func: torch._ops.OpOverload, args: Sequence[object]) -> Resource:
    """Return the link of a seam's collective: the network if no two ranks share a node, else the node's."""
    # By schema: operators have `group` at different places.
    name = args[[each.name for each in func._schema.arguments].index("group")]
    return Resource.INTER_LINK if is_between_nodes(_group(str(name))) else Resource.INTRA_LINK


# torch 2.13 renamed these and deprecates the old names, which 2.11 has alone.
all_gather_single: Callable[..., dist.Work | None] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def _reduce_op(name: str) -> dist.ReduceOp.RedOpType:
    found: dist.ReduceOp.RedOpType = getattr(dist.ReduceOp, name.upper())
    return found


def _group(name: str) -> dist.ProcessGroup:
    # Groups pass through the dispatcher by name, since an operator's arguments are plain values.
    resolve: Callable[[str], dist.ProcessGroup] = vars(dist.distributed_c10d)["_resolve_process_group"]
    return resolve(name)


def _all_gather_into(out: Tensor, x: Tensor, group: str, ranks: int) -> None:
    if x.device.type == "cpu":
        # NCCL gathers into the output directly; only gloo stages.
        _all_gather_on_gloo(out, x, _group(group))
    else:
        all_gather_single(out, x, group=_group(group))
    count_collective(_group(group), x.nbytes * (ranks - 1))


def _reduce_scatter_into(out: Tensor, x: Tensor, group: str, ranks: int, op: str) -> None:
    if x.device.type == "cpu":
        _reduce_scatter_on_gloo(out, x, _group(group), _reduce_op(op))
    else:
        reduce_scatter_single(out, x, op=_reduce_op(op), group=_group(group))
    count_collective(_group(group), out.nbytes * (ranks - 1))


def _all_gather_on_gloo(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather by a broadcast of each rank's part in place."""
    # gloo's own all-gather copies the whole output, and that copy's release cannot be awaited.
    parts = list(out.view(group.size(), -1))
    # Before any broadcast: this rank sends from its place in the output.
    parts[group.rank()].copy_(x.view(-1))
    # All at once: gloo overlaps them, and every rank starts them in the same order.
    sent = [
        dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in enumerate(parts)
    ]
    while sent:
        if (work := sent.pop()) is not None:
            work.wait()
    del work  # holds its tensor
    _wait_released(parts)


def _reduce_scatter_on_gloo(
    out: Tensor, x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType
) -> None:
    """Reduce-scatter by an all-reduce of a copy of the message, as gloo does it internally."""
    # gloo has no reduce-scatter that works in place, and the caller's message must not change.
    staged = x.clone()
    dist.all_reduce(staged, op=op, group=group)
    out.copy_(staged.view(group.size(), -1)[group.rank()].view_as(out))
    _wait_released([staged])


def _wait_released(sent: list[Tensor]) -> None:
    """Wait until gloo's thread has released these tensors; the caller has the only other references."""
    # gloo's thread wakes the waiting rank first and releases the tensors when it is scheduled next, ops or a
    # step later on a busy machine: bytes freed in between would remain allocated, and the peak would vary
    # from step to step. The wait sleeps, which yields the core to that thread, for as long as a busy machine
    # may keep it from running. After one timeout later waits are short, since the tensors may be held
    # permanently and only byte counts are delayed.
    global _patience_s
    start_s = time.monotonic()
    while any(_use_count(each) > 1 for each in sent):
        waited_s = time.monotonic() - start_s
        if waited_s > _patience_s:
            _patience_s = _LITTLE_PATIENCE_S
            return
        time.sleep(0 if waited_s < _SPIN_S else _NAP_S)


def _use_count(tensor: Tensor) -> int:
    return int(getattr(tensor, "_use_count", int)())  # private in torch: 0 if it is missing


def _all_reduce(x: Tensor, group: str, ranks: int, op: str) -> None:
    # An alias, so that its use count shows when gloo's thread has released it; the caller's own has other
    # users.
    ours = x.detach()
    dist.all_reduce(ours, op=_reduce_op(op), group=_group(group))
    if x.device.type == "cpu":
        _wait_released([ours])
    count_collective(_group(group), 2 * x.nbytes * (ranks - 1) // ranks)


def _all_to_all_into(out: Tensor, x: Tensor, group: str, ranks: int) -> None:
    mine, theirs = out.detach(), x.detach()
    dist.all_to_all_single(mine, theirs, group=_group(group))
    if x.device.type == "cpu":
        _wait_released([mine, theirs])
    count_collective(_group(group), x.nbytes // ranks * (ranks - 1))


def _all_to_all_rows(
    out: Tensor, x: Tensor, group: str, ranks: int, arriving: list[int], sent: list[int]
) -> None:
    """Send `sent[r]` rows of `x` to each rank r, in order, and receive `arriving[r]` rows from it."""
    members, mine, theirs = _group(group), out.detach(), x.detach()
    dist.all_to_all_single(mine, theirs, arriving, sent, group=members)
    if dist.get_backend(members) == "fake":
        out.zero_()  # uninitialized memory may hold NaN, by which later layers would be routed
    if x.device.type == "cpu":
        _wait_released([mine, theirs])
    row_bytes = out[:1].numel() * out.element_size() if len(out) else 0
    count_collective(members, row_bytes * (sum(arriving) - arriving[members.rank()]))


def _send_next_into(out: Tensor, x: Tensor, group: str, ranks: int) -> None:
    """Run one step of a ring: send `x` to the next rank, receive from the previous one into `out`."""
    members, mine, theirs = _group(group), out.detach(), x.detach()
    here = members.rank()
    # One batch: with separate calls, all ranks of a ring would send first and wait for a receiver.
    both = [
        dist.P2POp(dist.isend, theirs, group=members, group_peer=(here + 1) % ranks),
        dist.P2POp(dist.irecv, mine, group=members, group_peer=(here - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    del both, work
    if x.device.type == "cpu":
        _wait_released([mine, theirs])
    count_collective(members, x.nbytes)


def _shift_into(out: Tensor | None, x: Tensor | None, group: str, distance: int, ranks: int) -> None:
    """Send `x` to the rank at `distance`, receive into `out` from the one at minus `distance`, if given."""
    members = _group(group)
    here = members.rank()
    ours = [None if each is None else each.detach() for each in (out, x)]
    mine, theirs = ours
    both = []
    if theirs is not None:
        both.append(dist.P2POp(dist.isend, theirs, group=members, group_peer=(here + distance) % ranks))
    if mine is not None:
        both.append(dist.P2POp(dist.irecv, mine, group=members, group_peer=(here - distance) % ranks))
    for work in dist.batch_isend_irecv(both):
        work.wait()
    del both, work
    held = [each for each in ours if each is not None]
    # `_wait_released` waits until `held` has the only references.
    del mine, theirs, ours
    if held[0].device.type == "cpu":
        _wait_released(held)
    count_collective(members, 0 if out is None else out.nbytes)


def _all_gather_positions(out: Tensor, x: Tensor, group: str, ranks: int) -> None:
    """Gather every rank's `x` (samples, positions, …) along dim 1, sample by sample, without staging."""
    members = _group(group)
    if x.device.type == "cpu":
        parts = [part for sample in out.detach() for part in sample.chunk(ranks)]
        for mine, share in zip(parts[members.rank() :: ranks], x, strict=True):
            mine.copy_(share)
        for index, part in enumerate(parts):
            # Part by part, into its place: a rank's positions of several samples are not adjacent.
            dist.broadcast(part, group=members, group_src=index % ranks)
        _wait_released(parts)
    else:
        for sample, share in zip(out, x, strict=True):
            all_gather_single(sample, share, group=members)
    count_collective(members, x.nbytes * (ranks - 1))


def _reduce_scatter_positions(out: Tensor, x: Tensor, group: str, ranks: int) -> None:
    """Reduce-scatter along dim 1: this rank's positions of the sum, which gloo makes in place."""
    members = _group(group)
    if x.device.type == "cpu":
        ours = x.detach()
        dist.all_reduce(ours, group=members)
        out.copy_(ours.chunk(ranks, 1)[members.rank()])
        _wait_released([ours])
    else:
        for share, sample in zip(out, x, strict=True):
            reduce_scatter_single(share, sample, group=members)
    count_collective(members, out.nbytes * (ranks - 1))


def _below_autograd(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return `kernel` with its collectives below autograd."""
    # `collective_guard` would refuse them.

    @wraps(kernel)
    def called(*args: object) -> None:
        # The operator has no autograd kernel, so nothing excludes autograd for the collectives inside.
        with torch._C._AutoDispatchBelowAutograd():
            kernel(*args)

    return called


def _fake_to_device(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)


def _fake_to_device_with_tail(x: Tensor, tail: Tensor, device: torch.device) -> Tensor:
    return torch.empty(x.numel() + tail.numel(), dtype=x.dtype, device=device)


def fake_to_host(x: Tensor) -> Tensor:
    """Return a host tensor of `x`'s layout."""
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")


_UP, _DOWN = SeamOp(Resource.HOST_TO_DEVICE), SeamOp(Resource.DEVICE_TO_HOST)
register("to_device(Tensor x, Device device) -> Tensor", _UP, transfer.to_device, _fake_to_device)
register(
    "to_device_with_tail(Tensor x, Tensor tail, Device device) -> Tensor",
    SeamOp(Resource.HOST_TO_DEVICE, first_crosses=True),
    transfer.to_device_with_tail,
    _fake_to_device_with_tail,
)
register(
    "to_host(Tensor x) -> Tensor",
    SeamOp(Resource.DEVICE_TO_HOST, TierId.HOST),
    transfer.to_host,
    fake_to_host,
)
register("copy_to_host_(Tensor(a!) host, Tensor x) -> ()", _DOWN, transfer.copy_to_host)
register("copy_to_device_(Tensor(a!) x, Tensor host) -> ()", _UP, transfer.copy_to_device)

_COLLECTIVE = SeamOp(Resource.INTRA_LINK, collective=True)
for _schema, _kernel in (
    ("all_gather_into_(Tensor(a!) out, Tensor x, str group, int ranks) -> ()", _all_gather_into),
    (
        "reduce_scatter_into_(Tensor(a!) out, Tensor x, str group, int ranks, str op) -> ()",
        _reduce_scatter_into,
    ),
    ("all_reduce_(Tensor(a!) x, str group, int ranks, str op) -> ()", _all_reduce),
    ("all_to_all_into_(Tensor(a!) out, Tensor x, str group, int ranks) -> ()", _all_to_all_into),
    (
        "all_to_all_rows_(Tensor(a!) out, Tensor x, str group, int ranks, int[] arriving, int[] sent) -> ()",
        _all_to_all_rows,
    ),
    ("send_next_into_(Tensor(a!) out, Tensor x, str group, int ranks) -> ()", _send_next_into),
    ("shift_into_(Tensor(a!)? out, Tensor? x, str group, int distance, int ranks) -> ()", _shift_into),
    ("all_gather_positions_(Tensor(a!) out, Tensor x, str group, int ranks) -> ()", _all_gather_positions),
    (
        "reduce_scatter_positions_(Tensor(a!) out, Tensor(b!) x, str group, int ranks) -> ()",
        _reduce_scatter_positions,
    ),
):
    register(_schema, _COLLECTIVE, _below_autograd(_kernel))


def is_observed(tensor: Tensor) -> bool:
    """Return whether a dispatch mode, or a recording, must see the operators on `tensor`, no DTensor."""
    return bool(torch._C._len_torch_dispatch_stack()) or isinstance(tensor, FakeTensor)


def groups(tensors: list[Tensor]) -> Iterator[slice]:
    """Yield the consecutive parts of `tensors` that are copied together; single ones if they are observed."""
    # Holds none of them while it yields, so that the caller can free a part before the next one.
    n_bytes = [each.nbytes for each in tensors]
    # A recorded step has one operator for each tensor, as the pass inserts them.
    room_bytes = 0 if tensors and is_observed(tensors[0]) else GROUP_BYTES
    del tensors
    first, held = 0, 0
    for i, size in enumerate(n_bytes):
        if i > first and held + size > room_bytes:
            yield slice(first, i)
            first, held = i, 0
        held += size
    if n_bytes:
        yield slice(first, len(n_bytes))


def to_host_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Start the copies of `tensors`, no DTensors, to new host tensors; see `transfer.to_host`."""
    if len(tensors) > 1 and not is_observed(tensors[0]):
        return transfer.to_host_together(tensors)
    return [to_host(each) for each in tensors]


def to_host(tensor: Tensor) -> Tensor:
    """Start the copy of `tensor`, no DTensor, to a new host tensor; see `transfer.to_host`."""
    if not is_observed(tensor):
        return transfer.to_host(tensor)
    host: Tensor = torch.ops.memtune.to_host(tensor)
    mark(host, HOST)
    return host


def copy_to_device_together(tensors: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
    """Copy each of `hosts` into the one of `tensors`, no DTensors, at its place."""
    if tensors and not is_observed(tensors[0]):
        transfer.copy_to_device_together(tensors, hosts)
        return
    for tensor, host in zip(tensors, hosts, strict=True):
        torch.ops.memtune.copy_to_device_(tensor, host)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Return a new tensor on `device` with the values of `host`; see `transfer.to_device`."""
    if is_observed(host):
        found: Tensor = torch.ops.memtune.to_device(host, device)
        return found
    return transfer.to_device(host, device)
