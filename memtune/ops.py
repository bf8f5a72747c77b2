"""The seam: every act that leaves PyTorch's own ops is a `torch.ops.memtune.*` operator with a declared resource and tier.

On real tensors an operator moves bytes through `runtime.transfer`; on fake tensors it does nothing but make the output.
So a recorder, a dry run and a byte counter see the same operators as the training step.

| operator | resource | its output lives on |
|---|---|---|
| `to_device(x, device)` | host → device | device |
| `to_device_beside(x, beside, device)` | host → device | device |
| `to_host(x)` | device → host | host |
| `copy_to_host_(host, x)` | device → host | – |
| `copy_to_device_(x, host)` | host → device | – |
| `to_ssd(x, name)` | SSD write | SSD |
| `from_ssd(x)` | SSD read | host |
| `write_ssd_(ssd, x)` | SSD write | – |
| `host_update_(rule, …, weight, gradient, …)` | host threads | – |
| `updater_read_(host, weights, moments, link, order)` | SSD read, by an updater process | – |
| `updater_update_(slot, host, link, order)` | host threads, of an updater process | – |
| `updater_write_(ssd, host, link, order)` | SSD write, by an updater process | – |
| `largest_(kept, gradient, count)` | compute | device |
| `all_gather_into_(out, x, group, ranks)` | link | – |
| `reduce_scatter_into_(out, x, group, ranks, op)` | link | – |
| `all_reduce_(x, group, ranks, op)` | link | – |
| `all_to_all_into_(out, x, group, ranks)` | link | – |
| `send_next_into_(out, x, group, ranks)` | link | – |
| `shift_into_(out, x, group, distance, ranks)` | link | – |
| `all_gather_positions_(out, x, group, ranks)` | link | – |
| `reduce_scatter_positions_(out, x, group, ranks)` | link | – |
| `quantise_(packed, x, error, lengths, bits, block, nodes)` | compute | – |
| `dequantise_(out, packed, lengths, bits, block, sources, factor)` | compute | – |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from memtune.program import Resource
from memtune.program import Tier as TierId
from memtune.runtime import host_update, largest, nodes, quantised, transfer, updater_link
from memtune.runtime.nodes import count_collective

_SPIN_S: Final = 2e-4
_NAP_S: Final = 2e-4
_LITTLE_PATIENCE_S: Final = 0.01
_patience_s = 10.0
"""How long `_let_go` waits."""


@dataclass(frozen=True)
class SeamOp:
    """What the simulator must know of one operator of the seam."""

    resource: Resource
    output_tier: TierId = TierId.DEVICE
    collective: bool = False
    first_crosses: bool = False
    """Of what it reads and makes, its first argument alone is what crosses the link."""


SEAM: dict[str, SeamOp] = {
    "memtune.to_device.default": SeamOp(Resource.HOST_TO_DEVICE),
    "memtune.to_device_beside.default": SeamOp(Resource.HOST_TO_DEVICE, first_crosses=True),
    "memtune.to_host.default": SeamOp(Resource.DEVICE_TO_HOST, TierId.HOST),
    "memtune.copy_to_host_.default": SeamOp(Resource.DEVICE_TO_HOST),
    "memtune.copy_to_device_.default": SeamOp(Resource.HOST_TO_DEVICE),
    "memtune.to_ssd.default": SeamOp(Resource.SSD_WRITE, TierId.SSD),
    "memtune.from_ssd.default": SeamOp(Resource.SSD_READ, TierId.HOST),
    "memtune.write_ssd_.default": SeamOp(Resource.SSD_WRITE),
    "memtune.host_update_.default": SeamOp(Resource.HOST_THREADS),
    "memtune.updater_read_.default": SeamOp(Resource.SSD_READ),
    "memtune.updater_update_.default": SeamOp(Resource.HOST_THREADS),
    "memtune.updater_write_.default": SeamOp(Resource.SSD_WRITE),
    "memtune.largest_.default": SeamOp(Resource.COMPUTE),
    "memtune.all_gather_into_.default": SeamOp(Resource.INTRA_LINK, collective=True),
    "memtune.reduce_scatter_into_.default": SeamOp(Resource.INTRA_LINK, collective=True),
    "memtune.all_reduce_.default": SeamOp(Resource.INTRA_LINK, collective=True),
    "memtune.all_to_all_into_.default": SeamOp(Resource.INTRA_LINK, collective=True),
    "memtune.send_next_into_.default": SeamOp(Resource.INTRA_LINK, collective=True),
    "memtune.shift_into_.default": SeamOp(Resource.INTRA_LINK, collective=True),
    "memtune.all_gather_positions_.default": SeamOp(Resource.INTRA_LINK, collective=True),
    "memtune.reduce_scatter_positions_.default": SeamOp(Resource.INTRA_LINK, collective=True),
    "memtune.quantise_.default": SeamOp(Resource.COMPUTE),
    "memtune.dequantise_.default": SeamOp(Resource.COMPUTE),
}


def link_of(func: torch._ops.OpOverload, args: Sequence[object]) -> Resource:
    """The link that a collective of the seam occupies: the network where no two of its ranks share a node, else the node's."""
    name = args[[each.name for each in func._schema.arguments].index("group")]
    return Resource.INTER_LINK if nodes.is_between_nodes(_group(str(name))) else Resource.INTRA_LINK


_LIBRARY = torch.library.Library("memtune", "DEF")
_LIBRARY.define("to_device(Tensor x, Device device) -> Tensor")
_LIBRARY.define("to_device_beside(Tensor x, Tensor beside, Device device) -> Tensor")
_LIBRARY.define("to_host(Tensor x) -> Tensor")
_LIBRARY.define("copy_to_host_(Tensor(a!) host, Tensor x) -> ()")
_LIBRARY.define("copy_to_device_(Tensor(a!) x, Tensor host) -> ()")
_LIBRARY.define("to_ssd(Tensor x, str name) -> Tensor")
_LIBRARY.define("from_ssd(Tensor x) -> Tensor")
_LIBRARY.define("write_ssd_(Tensor(a!) ssd, Tensor x) -> ()")
_LIBRARY.define(
    "host_update_(str rule, str moments, Tensor(a!) weight, Tensor gradient, Tensor(b!)? out, Tensor(c!)? first, "
    "Tensor(d!)? second, Tensor(e!)? first_scale, Tensor(f!)? second_scale, Tensor(g!)? step, float[] settings, bool maximize, "
    "int seed) -> ()"
)
_LIBRARY.define("updater_read_(Tensor(a!) host, Tensor weights, Tensor moments, int link, str order) -> ()")
_LIBRARY.define("updater_update_(Tensor(a!) slot, Tensor(b!) host, int link, str order) -> ()")
_LIBRARY.define("updater_write_(Tensor(a!) ssd, Tensor host, int link, str order) -> ()")
_LIBRARY.define("largest_(Tensor(a!) kept, Tensor gradient, int count) -> (Tensor, Tensor)")
_LIBRARY.define("all_gather_into_(Tensor(a!) out, Tensor x, str group, int ranks) -> ()")
_LIBRARY.define("reduce_scatter_into_(Tensor(a!) out, Tensor x, str group, int ranks, str op) -> ()")
_LIBRARY.define("all_reduce_(Tensor(a!) x, str group, int ranks, str op) -> ()")
_LIBRARY.define("all_to_all_into_(Tensor(a!) out, Tensor x, str group, int ranks) -> ()")
_LIBRARY.define("send_next_into_(Tensor(a!) out, Tensor x, str group, int ranks) -> ()")
_LIBRARY.define("shift_into_(Tensor(a!)? out, Tensor? x, str group, int distance, int ranks) -> ()")
_LIBRARY.define("all_gather_positions_(Tensor(a!) out, Tensor x, str group, int ranks) -> ()")
_LIBRARY.define("reduce_scatter_positions_(Tensor(a!) out, Tensor(b!) x, str group, int ranks) -> ()")
_LIBRARY.define("quantise_(Tensor(a!) packed, Tensor x, Tensor(b!)? error, int[] lengths, int bits, int block, int nodes) -> ()")
_LIBRARY.define("dequantise_(Tensor(a!) out, Tensor packed, int[] lengths, int bits, int block, int sources, float factor) -> ()")

# torch 2.13 has new names for these and warns of the old ones, which are all that 2.11 has.
all_gather_single: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., dist.Work | None] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def _reduce_op(name: str) -> dist.ReduceOp.RedOpType:
    found: dist.ReduceOp.RedOpType = getattr(dist.ReduceOp, name.upper())
    return found


def _group(name: str) -> dist.ProcessGroup:
    resolve: Callable[[str], dist.ProcessGroup] = vars(dist.distributed_c10d)["_resolve_process_group"]
    return resolve(name)


def _all_gather_into(out: Tensor, x: Tensor, group: str, ranks: int) -> None:
    if x.device.type == "cpu":
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
    """Each rank sends its part in place; gloo's own all-gather makes a copy of the whole that nobody can wait for."""
    parts = list(out.view(group.size(), -1))
    parts[group.rank()].copy_(x.view(-1))
    sent = [dist.broadcast(part, group=group, group_src=rank, async_op=True) for rank, part in enumerate(parts)]
    while sent:
        if (work := sent.pop()) is not None:
            work.wait()
    del work  # it holds its tensor
    _let_go(parts)


def _reduce_scatter_on_gloo(out: Tensor, x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType) -> None:
    """What gloo does too: it reduces a copy of the whole message and keeps a part."""
    staged = x.clone()
    dist.all_reduce(staged, op=op, group=group)
    out.copy_(staged.view(group.size(), -1)[group.rank()].view_as(out))
    _let_go([staged])


def _let_go(sent: list[Tensor]) -> None:
    """Wait until gloo's thread holds none of these tensors, which nobody but the caller and it has.

    It wakes the waiting rank first and drops the tensors when it is scheduled next, ops or a step later on a busy machine: what
    is freed in between would stay, and the peak would vary from step to step. So the wait sleeps, which leaves that thread a
    core, and is as long as a busy machine may keep a thread from running. Who holds tensors longer than that holds them for
    good: from then on there is little waiting, since only bytes are late.
    """
    global _patience_s
    start_s = time.monotonic()
    while any(_use_count(each) > 1 for each in sent):
        waited_s = time.monotonic() - start_s
        if waited_s > _patience_s:
            _patience_s = _LITTLE_PATIENCE_S
            return
        time.sleep(0 if waited_s < _SPIN_S else _NAP_S)


def _use_count(tensor: Tensor) -> int:
    return int(getattr(tensor, "_use_count", int)())  # private in torch: 0 where it is not there


def _all_reduce(x: Tensor, group: str, ranks: int, op: str) -> None:
    ours = x.detach()
    dist.all_reduce(ours, op=_reduce_op(op), group=_group(group))
    if x.device.type == "cpu":
        _let_go([ours])
    count_collective(_group(group), 2 * x.nbytes * (ranks - 1) // ranks)


def _all_to_all_into(out: Tensor, x: Tensor, group: str, ranks: int) -> None:
    mine, theirs = out.detach(), x.detach()
    dist.all_to_all_single(mine, theirs, group=_group(group))
    if x.device.type == "cpu":
        _let_go([mine, theirs])
    count_collective(_group(group), x.nbytes // ranks * (ranks - 1))


def _send_next_into(out: Tensor, x: Tensor, group: str, ranks: int) -> None:
    """A step of a ring: `x` goes to the next rank of the group, what the one before has sent comes into `out`."""
    members, mine, theirs = _group(group), out.detach(), x.detach()
    here = members.rank()
    both = [dist.P2POp(dist.isend, theirs, group=members, group_peer=(here + 1) % ranks),
            dist.P2POp(dist.irecv, mine, group=members, group_peer=(here - 1) % ranks)]  # fmt: skip
    for work in dist.batch_isend_irecv(both):
        work.wait()
    del both, work
    if x.device.type == "cpu":
        _let_go([mine, theirs])
    count_collective(members, x.nbytes)


def _shift_into(out: Tensor | None, x: Tensor | None, group: str, distance: int, ranks: int) -> None:
    """`x` goes to the rank `distance` on, `out` comes from the one as far before; one of them may be None on some ranks."""
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
    del mine, theirs, ours
    if held[0].device.type == "cpu":
        _let_go(held)
    count_collective(members, 0 if out is None else out.nbytes)


def _all_gather_positions(out: Tensor, x: Tensor, group: str, ranks: int) -> None:
    """Every rank's `x` (samples, positions, …) side by side along dim 1, one sample at a time: nothing is staged."""
    members = _group(group)
    if x.device.type == "cpu":
        parts = [part for sample in out.detach() for part in sample.chunk(ranks)]
        for mine, share in zip(parts[members.rank() :: ranks], x, strict=True):
            mine.copy_(share)
        for index, part in enumerate(parts):
            dist.broadcast(part, group=members, group_src=index % ranks)
        _let_go(parts)
    else:
        for sample, share in zip(out, x, strict=True):
            all_gather_single(sample, share, group=members)
    count_collective(members, x.nbytes * (ranks - 1))


def _reduce_scatter_positions(out: Tensor, x: Tensor, group: str, ranks: int) -> None:
    """This rank's positions (dim 1) of the sum of every rank's `x`, which gloo sums in place."""
    members = _group(group)
    if x.device.type == "cpu":
        ours = x.detach()
        dist.all_reduce(ours, group=members)
        out.copy_(ours.chunk(ranks, 1)[members.rank()])
        _let_go([ours])
    else:
        for share, sample in zip(out, x, strict=True):
            reduce_scatter_single(share, sample, group=members)
    count_collective(members, out.nbytes * (ranks - 1))


def _below_autograd(kernel: Callable[..., None]) -> Callable[..., None]:
    """`kernel` where `runtime.exchanges` does not take what it calls for the user's (Rule 3 there)."""

    @wraps(kernel)
    def called(*args: object) -> None:
        with torch._C._AutoDispatchBelowAutograd():
            kernel(*args)

    return called


def _fake_to_device(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device)


def _fake_to_device_beside(x: Tensor, beside: Tensor, device: torch.device) -> Tensor:
    return torch.empty(x.numel() + beside.numel(), dtype=x.dtype, device=device)


def _fake_to_ssd(x: Tensor, name: str) -> Tensor:
    return _fake_to_host(x)


def _fake_to_host(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cpu")


def _updater_reads(host: Tensor, weights: Tensor, moments: Tensor, link: int, order: str) -> None:
    transfer.COUNTERS.add("ssd_read", host.nbytes)
    updater_link.order(link, order)


def _updater_updates(slot: Tensor, host: Tensor, link: int, order: str) -> None:
    updater_link.order(link, order)


def _updater_writes(ssd: Tensor, host: Tensor, link: int, order: str) -> None:
    transfer.COUNTERS.add("ssd_write", host.nbytes)
    updater_link.order(link, order)


def _nothing(*args: object) -> None:
    return None


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("to_device", transfer.to_device, _key)
    _LIBRARY.impl("to_device_beside", transfer.to_device_beside, _key)
    _LIBRARY.impl("to_host", transfer.to_host, _key)
    _LIBRARY.impl("copy_to_host_", transfer.copy_to_host, _key)
    _LIBRARY.impl("copy_to_device_", transfer.copy_to_device, _key)
    _LIBRARY.impl("to_ssd", transfer.to_ssd, _key)
    _LIBRARY.impl("from_ssd", transfer.from_ssd, _key)
    _LIBRARY.impl("write_ssd_", transfer.write_ssd, _key)
    _LIBRARY.impl("host_update_", host_update.update_, _key)
    _LIBRARY.impl("updater_read_", _updater_reads, _key)
    _LIBRARY.impl("updater_update_", _updater_updates, _key)
    _LIBRARY.impl("updater_write_", _updater_writes, _key)
    _LIBRARY.impl("largest_", largest.largest_, _key)
    for _kernel in (
        _all_gather_into, _reduce_scatter_into, _all_reduce, _all_to_all_into, _send_next_into, _shift_into,
        _all_gather_positions, _reduce_scatter_positions,
    ):  # fmt: skip
        _LIBRARY.impl(f"{_kernel.__name__[1:]}_", _below_autograd(_kernel), _key)
    _LIBRARY.impl("quantise_", quantised.quantise_, _key)
    _LIBRARY.impl("dequantise_", quantised.dequantise_, _key)
torch.library.register_fake("memtune::to_device", _fake_to_device, lib=_LIBRARY)
torch.library.register_fake("memtune::to_device_beside", _fake_to_device_beside, lib=_LIBRARY)
torch.library.register_fake("memtune::to_host", _fake_to_host, lib=_LIBRARY)
torch.library.register_fake("memtune::to_ssd", _fake_to_ssd, lib=_LIBRARY)
torch.library.register_fake("memtune::largest_", largest.fake_largest, lib=_LIBRARY)
torch.library.register_fake("memtune::from_ssd", _fake_to_host, lib=_LIBRARY)
for _name in (
    "copy_to_host_", "copy_to_device_", "write_ssd_", "host_update_", "updater_read_", "updater_update_", "updater_write_",
    "all_gather_into_", "reduce_scatter_into_", "all_reduce_",
    "all_to_all_into_", "send_next_into_", "shift_into_", "all_gather_positions_", "reduce_scatter_positions_", "quantise_",
    "dequantise_",
):  # fmt: skip
    torch.library.register_fake(f"memtune::{_name}", _nothing, lib=_LIBRARY)
