"""Experts divided over ranks that have samples of their own: each rank owns some, and tokens are sent to
them.

Five rules:

1. Experts are modules of a list (`expert_lists`), or the rows of the weights of one module, (experts, …)
  (`stacked_experts`).
2. A weight of one module is a DTensor of the plain shape with this rank's experts; the module's own forward
  runs with them for the tokens that arrive, on one expert a row. Weights of other ranks' experts of a list
  are placeholders, whose gradients are the norms of the real ones (`ranks.remote_parameters`).
3. A rank that no token is sent to runs nothing, but takes part in the exchanges of backward, and its weights
  get gradients of zero, as those of a plain module do whose other experts were chosen.
4. Gradients of experts are complete on their owner (`expert_dispatch`); all other parameters are replicated,
  and their gradients averaged as with rotating weights, in buckets during the last backward.
5. All ranks of a group call the same modules in the same order.
6. Hot experts of a module may have replicas on other ranks (`expert_replicas`).

Sources: Lepikhin et al. 2020, GShard (arXiv:2006.16668); Shen et al. 2022, SE-MoE (arXiv:2205.10034), the
MoE training system of MoESys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.tensor import DTensor

from memtune import refusals
from memtune.deferred_init import Piece, keep_only
from memtune.errors import ApplyError
from memtune.parallel.model.expert_dispatch import Load, Owners, Route, combined, dispatched
from memtune.parallel.model.expert_lists import ExpertList, list_refusal
from memtune.parallel.model.expert_replicas import (
    NO_REPLICAS,
    Boundaries,
    ReplicaRule,
    ReplicatedLayer,
)
from memtune.parallel.model.stacked_experts import (
    StackedExperts,
    is_named_experts,
    shared_weight,
    stack_refusal,
)
from memtune.parallel.model.tensor_parallel import (
    LastBackward,
    Place,
    average_whole,
    mix_plain_and_sharded,
    part,
)
from memtune.parallel.ranks import SharedNorms, keep_own, require_groups, require_ranks
from memtune.parallel.sharding import meshes, rebind
from memtune.runtime import Context, after_step, local, node_topology


class Experts(StackedExperts):
    """A module of experts of which this rank owns some.

    Args:
        module: The module; its weights have been divided.
        name: Its name.
        experts: Number of experts over all ranks.
        owners: The ranks that own them.
        seen: Receives the load of each call while a step is recorded.
        replicas: Its replicas on other ranks; None: there are none.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        experts: int,
        owners: Owners,
        seen: list[Load] | None = None,
        replicas: ReplicatedLayer | None = None,
    ) -> None:
        super().__init__(module, name, experts, "expert parallelism")
        self.owners, self.replicas, self._seen = owners, replicas, seen

    def run_routed(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs of this rank's tokens, whose rows visit the owners of their experts."""
        route = self._route(index.flatten())
        held = self._weights()
        rows, row_weights = dispatched(x, weights, route)
        assert row_weights is not None
        made = self._at_hosts(held, rows, route.experts, row_weights)
        # The rows are not needed while their outputs travel.
        del rows, row_weights
        return combined(made, index.shape[1], route)

    def run_sorted(self, x: Tensor, index: Tensor, kind: torch.dtype) -> Tensor:
        """Return the outputs of this rank's rows, which visit the owners of their experts."""
        route = self._route(index)
        held = self._weights()
        rows, _ = dispatched(x, None, route)
        return combined(self._at_hosts(held, rows, route.experts, kind), 1, route)

    def _route(self, index: Tensor) -> Route:
        experts = self.experts
        if self.replicas is not None:
            index, experts = self.replicas.slots_of(index), self.replicas.slots * self.owners.ranks
        route = Route.from_index(index, experts, self.owners)
        if self._seen is not None:
            self._seen.append(Load(len(index), len(route.experts)))
        return route

    def _weights(self) -> list[dict[str, Tensor]]:
        """Return the weights of this rank's own experts by name, then those of its guests."""
        own = {name: local(each) for name, each in self.module._parameters.items() if each is not None}
        if self.replicas is None:
            return [own]
        return [own, dict(zip(own, self.replicas.weights(list(own.values())), strict=True))]

    def _at_hosts(
        self, held: list[dict[str, Tensor]], rows: Tensor, experts: Tensor, other: Tensor | torch.dtype
    ) -> Tensor:
        """Return the outputs of the rows that have arrived for `experts`: own ones, then guests.

        `other` has the weight of each row, or the type of the numbers of rows.
        """
        mine = self.experts // self.owners.ranks
        if self.replicas is None:
            return self.run_with(held[0], mine, rows, experts, other)
        is_guest, n_guests = experts >= mine, self.replicas.n_guests
        # Two runs, so that no weight is copied.
        order = torch.argsort(is_guest.to(torch.uint8), stable=True)
        n_own = len(rows) - _number(is_guest, len(rows) * n_guests // (mine + n_guests))
        made = []
        for weights, n_experts, first, at in zip(
            held, (mine, n_guests), (0, mine), (order[:n_own], order[n_own:]), strict=True
        ):
            given = other.index_select(0, at) if isinstance(other, Tensor) else other
            part = rows.index_select(0, at), experts.index_select(0, at) - first
            made.append(self.run_with(weights, n_experts, *part, given))
        return torch.cat(made).index_select(0, torch.argsort(order))


def _number(is_guest: Tensor, assumed: int) -> int:
    """Return the number of rows of guests; `assumed` in a recording without values."""
    try:
        return int(is_guest.sum())
    except DataDependentOutputException:
        return assumed


def divisible_experts(model: nn.Module, degree: int) -> tuple[dict[str, int], list[str]]:
    """Return the experts of each module that `degree` ranks can divide, and a line on similar others."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    found, refused = dict[str, int](), list[str]()
    for name, module in model.named_modules():
        # A module without weights of its own is a layer around experts.
        is_list = isinstance(module, nn.ModuleList) and len(module) > 1
        if not is_named_experts(name, module) or not (module._parameters or is_list):
            continue
        if isinstance(module, nn.ModuleList):
            path, _, own = name.rpartition(".")
            holder = model.get_submodule(path)
            why = list_refusal(own, module, holder, degree) or shared_weight(module, owners)
        else:
            why = stack_refusal(module, degree, owners)
        if why:
            refused.append(f"{name or 'the model'} {why}")
        else:
            found[name] = len(module) if isinstance(module, nn.ModuleList) else len(next(module.parameters()))
    return found, refused


def divide_layers(
    model: nn.Module,
    layers: dict[str, int],
    place: Place,
    owners: Owners,
    seen: list[Load] | None = None,
    rule: ReplicaRule = NO_REPLICAS,
) -> tuple[dict[str, Piece], dict[str, int], list[ReplicatedLayer]]:
    """Divide `layers`: replace the weights of modules by this rank's, and the forwards of modules and lists.

    Returns:
        The piece of each weight of modules, the owner of each weight of lists, which all remain here, and the
        modules' replicas, if there may be some.
    """
    replicas: list[ReplicatedLayer] = []
    piece, pieces, owner_of = Piece(0, place.ranks, place.rank), dict[str, Piece](), dict[str, int]()
    for name, experts in layers.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.ModuleList):
            holder = model.get_submodule(name.rpartition(".")[0])
            ExpertList(name, holder, list(module), owners, place.rank, seen)
            for index, expert in enumerate(module):
                for each, _ in expert.named_parameters():
                    owner_of[f"{name}.{index}.{each}"] = index * place.ranks // experts
            continue
        for each, whole in module._parameters.items():
            if whole is not None:
                module._parameters[each] = part(whole, piece, place.mesh)
                pieces[f"{name}.{each}"] = piece
        if rule.most:
            replicas.append(
                ReplicatedLayer(experts, place.group, place.ranks, place.rank, rule, seen is not None)
            )
        Experts(module, name, experts, owners, seen, replicas[-1] if rule.most else None)
    return pieces, owner_of, replicas


def owners_of(device_type: str, degree: int, inner_degree: int | None) -> Owners:
    """Return the owners in this rank's group, to which rows go at once, or first in `inner_degree`."""
    if inner_degree is None:
        return Owners(((meshes(device_type, degree)[1].get_group().group_name, degree),))
    nodes = node_topology.nodes_of(device_type, degree, inner_degree)
    return Owners(((nodes.inside.group_name, nodes.local), (nodes.between.group_name, nodes.nodes)))


def divide_experts(
    context: Context,
    layers: Sequence[str],
    degree: int,
    inner_degree: int | None,
    rule: ReplicaRule = NO_REPLICAS,
) -> None:
    """Divide the experts of `layers` over groups of `degree` ranks and rebind the optimizer.

    Args:
        context: Model and optimizer, changed in place; gets a `sync`.
        layers: Modules of experts, by name.
        degree: Ranks of a group; divides the number of ranks and of experts.
        inner_degree: Ranks of a node, among which rows are sent first; None sends them at once.
        rule: Replicas of hot experts.

    Raises:
        ApplyError: There is no process group, `degree` does not divide it, the ranks' weights differ, or a
            module is none that ranks can divide.
    """
    require_ranks(context, "expert parallelism")
    require_groups(context, degree)
    found, refused = divisible_experts(context.model, degree)
    for name in layers:
        if name not in found:
            why = next((line for line in refused if line.startswith(f"{name} ")), f"{name} is not there")
            raise refusals.error_of(refusals.no_divisible_experts(why))
    # Refusals are above: from here on the model changes, which a failed `apply` restores.
    copies, mesh = meshes(context.device.type, degree)
    before = dict(context.model.named_parameters())
    owners = owners_of(context.device.type, degree, inner_degree)
    place = Place(mesh.get_group().group_name, degree, mesh.get_local_rank(), mesh)
    own = {name: found[name] for name in layers}
    pieces, owner_of, replicas = divide_layers(context.model, own, place, owners, rule=rule)
    keep_only(context.model, pieces)
    rebind(context.optimizer, before, dict(context.model.named_parameters()))
    mix_plain_and_sharded()
    context.placement.model_parallel_size = degree
    divided = [*pieces, *owner_of]
    # Not now: whether `sharding.states` averages between the groups is known once that slot is applied.
    context.events.states_sharded.subscribe(lambda: average_whole(context, divided, mesh, copies))
    if owner_of:
        _keep_own(context, owner_of, place, mesh.get_group())
    if replicas:
        after_step(context.optimizer, Boundaries(replicas).step)
    context.checks["sharding.parallel"] = lambda: (
        _check(context, layers, divided, degree)
        | ({"replicas": sum(len(mine) for layer in replicas for mine in layer.guests)} if replicas else {})
    )


def _keep_own(context: Context, owner_of: dict[str, int], place: Place, group: dist.ProcessGroup) -> None:
    """Put placeholders instead of the weights of lists that other ranks own."""
    everyone = range(place.ranks)
    names = context.model.state_dict(keep_vars=True)
    owners = {name: (owner_of[name],) if name in owner_of else everyone for name in names}
    keep_own(context, owners, [place.rank], place.ranks, group)
    norms = SharedNorms(context, group)

    def listen() -> None:
        # After the averages, whose ends are queued in the same backward.
        replicated = [parameter for name, parameter in norms.trained() if name not in owner_of]
        loop = context.loop
        loop.sync = LastBackward(context, replicated, norms.share, loop.sync, is_last=True).sync

    context.events.states_sharded.subscribe(listen)


def _check(context: Context, layers: Sequence[str], divided: Sequence[str], degree: int) -> dict[str, Any]:
    absent = context.placement.absent
    held = {name: context.model.get_parameter(name) for name in divided}
    for name, mine in held.items():
        if (name in absent and mine.numel() > 1) or not (absent or isinstance(mine, DTensor)):
            raise ApplyError(f"{name} is not divided over the ranks.", code="MT392")
    n_bytes = sum(local(mine).nbytes for name, mine in held.items() if name not in absent)
    return {"degree": degree, "layers": len(layers), "expert_bytes": n_bytes}
