"""Experts and their optimizer state on SSD, a cache of them in host memory, those of the current block on the
device.

Everything else of the model stays where it is, and the user's own optimizer updates it. Eight rules on top of
those of `offload.parameters.offloader`, whose units are the blocks' experts here (SE-MoE, Shen et al. 2022,
section 3.1: sparse parameters):

Rule 1. An expert that is called with no row is *not used*: it runs on weights that take no memory, since none
is read. Only
        experts that are used ever come to the host or the device, and only their state is read and written.
Rule 2. When a block's moment begins, the experts that its last forward used (in backward: that any forward
since the step used)
        come to the device; one that turns out to be used besides comes when it is called. Experts of the
        `ahead` moments after it are read from SSD meanwhile, by the same guess.
Rule 3. Host memory holds `slots` experts, each with weights and moments. Where there is no room one goes by
the rule of
        `experts.HostCache`, and is written before if it has changed.
Rule 4. What dense Adam does to an expert that got a gradient of zeros is done too, but late: before the
expert is used next, or
        asked for by a state dict, every step that it missed is made up for, with that step's settings. So
        lazy updates have the bits of dense ones, and cost no bytes. Where autograd gives no gradient at all,
        an optimizer does nothing, as here.
Rule 5. Gradients leave as they land, and wait on the host. In the last micro-batch of `Tuned.step` a block's
experts are updated
        when its backward is over, in any other loop all are in `optimizer.step()`.
Rule 6. What is asked for comes: a guess that is wrong costs bytes, not bits.
Rule 7. Replicas have all experts, each its own copy on SSD. Before a block's experts are updated ranks tell
each other which of
        them got a gradient, or zeros, on any rank; of those that did gradients are averaged, zeros for who
        has none.
Rule 8. Where FSDP2 divides the blocks, a rank has its rows of each expert on SSD, which are gathered and
reduced with all else of
        their block (`offload.core.fsdp_shards`): all are used. What stays of a block has its reduced
        gradients copied out of the piece that all lie in, or those of experts would stay with them.

With `keep` each complete step stays on SSD, by the rules of `offload.experts.resume_experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves

import memtune.ssd.ssd_tensors  # noqa: F401  (defines torch.ops.memtune, to_ssd and from_ssd there too)
from memtune.offload.core import Piece as Place
from memtune.offload.core import is_gathered, sharded_like, to_host_now
from memtune.offload.experts.resume_experts import KeptBeside, KeptExperts, Staying
from memtune.offload.parameters import ParameterOffloader
from memtune.offload.ssd_states import SsdOptimizer
from memtune.program import Residency, Rule
from memtune.runtime import HOST, Context, after_step, before_step, local, mark, tier, transfer
from memtune.ssd import Piece, RecordSlots
from memtune.workload import Expert, HostCache, moments_of, read_ahead


class ExpertOptimizer(SsdOptimizer):
    """Moves the weights and state of experts to SSD, and updates them natively; the optimizer's own step does
    the rest.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        experts: Of the model.
        slots: Experts that host memory holds.
        rule: Which one goes where there is no room.
        on_device: Blocks whose experts are on the device at once.
        keep: Every complete step is kept, as `SsdOptimizer` has it.

    Attributes:
        hosts: Where others look for experts' weights while they are not on the device; kept steps turn from
            place to place.

    Raises:
        ApplyError: The optimizer or a parameter's type is none that the native update knows.
        EnvironmentFault: There is no room on SSD; says for which parameter.
    """

    def __init__(
        self,
        context: Context,
        experts: Sequence[Expert],
        slots: int,
        rule: Rule,
        on_device: int,
        keep: bool = False,
    ) -> None:
        parameters = list(context.model.parameters())
        mine = {parameters[index] for expert in experts for index in expert.parameters}
        gathered = is_gathered(context.model)
        averages = context.placement.world_size > 1 and not gathered
        self._group = dist.new_group() if averages else None  # of its own: DDP's messages go at other moments
        if self._group is not None:
            context.undo.callback(dist.destroy_process_group, self._group)
        super().__init__(context, master=False, ahead=0, keep=keep, chosen=mine)
        piece_of = {piece.device: piece for piece in self._pieces}
        self.pieces = [
            [piece_of[parameters[i]] for i in each.parameters if parameters[i] in piece_of]
            for each in experts
        ]
        self.expert_of = {
            piece.device: expert for expert, pieces in enumerate(self.pieces) for piece in pieces
        }
        self._seeds = {piece.device: seed for seed, piece in enumerate(self._pieces)}
        uses = moments_of(len(context.blocks), on_device, gathered)
        self._cache = HostCache(slots, rule, [each.block for each in experts], uses)
        self.slots = slots
        self._there: dict[int, list[Tensor]] = {}
        self._dirty: set[int] = set()
        self._zero: set[nn.Parameter] = set()
        context.events.grads_cleared.subscribe(self._zero.difference_update)
        self._missed: dict[nn.Parameter, list[dict[str, Any]]] = {}
        self.moment = 0
        self.made_up = 0
        self.hosts: dict[nn.Parameter, Tensor] | None = None
        before_step(self._optimizer, lambda *_: self._update_rest())
        self._beside: KeptBeside | None = None
        self._is_loaded = False
        if keep:
            self._optimizer.register_load_state_dict_post_hook(lambda _: self._loaded())
            self._beside = KeptBeside(self._staying(context), self._optimizer)
            after_step(self._optimizer, lambda *_: self._complete())
            experts_ = RecordSlots(self._pieces, self._optimizer)
            self._keep_steps(context, KeptExperts(experts_, self._pieces, self._beside, self._missed))

    def _staying(self, context: Context) -> list[Staying]:
        """What the optimizer trains on the device, with two places on SSD for each tensor of it."""
        names = {parameter: name for name, parameter in context.model.named_parameters()}
        held = {piece.held for piece in self._pieces}
        found = []
        for group in self._optimizer.param_groups:
            moments = self._native.moment_names(group)
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in held:
                    name, host = names.get(parameter, "a parameter"), to_host_now(local(parameter))
                    places = (self._on_ssd(host, name) for _ in range(2 * (1 + len(moments))))
                    found.append(Staying.of(name, parameter, group, moments, places))
        return found

    # -- host memory -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def read(self, expert: int) -> None:
        """Start reading it, where it is not there (Rule 3)."""
        comes, gone = self._cache.take(expert, self.moment)
        if gone is not None:
            self._leaves(gone)
        if comes:
            self._there[expert] = [torch.ops.memtune.from_ssd(piece.ssd) for piece in self.pieces[expert]]

    def _leaves(self, expert: int) -> None:
        hosts = self._there.pop(expert)
        self._write_back(expert, hosts)
        for host in hosts:
            transfer.abandon(host)

    def _write_back(self, expert: int, hosts: list[Tensor]) -> None:
        if expert in self._dirty:
            self._dirty.discard(expert)
            for piece, host in zip(self.pieces[expert], hosts, strict=True):
                self._write(piece, host)

    @torch.no_grad()
    def host(self, expert: int) -> list[Tensor]:
        """Weights and moments of its parameters in host memory, as after the last step (Rule 4)."""
        self.read(expert)
        self._cache.use(expert)
        hosts = self._there[expert]
        for piece, host in zip(self.pieces[expert], hosts, strict=True):
            transfer.finish(host)
            for group in self._missed.pop(piece.device, ()):
                self._dirty.add(expert)
                self.made_up += 1
                with tier(HOST):
                    zeros = torch.zeros(piece.held.shape)
                self._on_host(replace(piece, group=group), host, zeros, self._seeds[piece.device])
        return hosts

    @torch.no_grad()
    def verify(self, only: Container[nn.Parameter] | None = None) -> None:
        """As `SsdOptimizer.verify`, of what is on SSD once all that is on the way has been written."""
        self.flush()
        super().verify(only)

    @torch.no_grad()
    def flush(self) -> None:
        """Everything is on SSD as after the last step."""
        missed = {self.expert_of[parameter] for parameter in self._missed}
        for expert in sorted(missed):
            self.host(expert)
        self._write_changed()

    def _turn(self, piece: Piece) -> None:
        super()._turn(piece)
        if self.hosts is not None:
            self.hosts[piece.device] = piece.held.detach()

    def _write_changed(self) -> None:
        for expert, hosts in self._there.items():
            self._write_back(expert, hosts)
        while self._writing:
            self._finish_oldest()

    @torch.no_grad()
    def set_weights(self, expert: int) -> None:
        """They are what the device has now."""
        for piece, host in zip(self.pieces[expert], self.host(expert), strict=True):
            piece.parts(host)[0].copy_(to_host_now(local(piece.device)))
        self._dirty.add(expert)

    @torch.no_grad()
    def _reload(self) -> None:
        """State that was read is not on SSD yet; weights have been set block by block."""
        self._adopt_all()
        if self._beside is not None:
            self._complete(steps=0)

    def _loaded(self) -> None:
        self._is_loaded = True

    def _adopt_all(self) -> None:
        self._is_loaded = False
        for expert, pieces in enumerate(self.pieces):
            for piece, host in zip(pieces, self.host(expert), strict=True):
                self._adopt(piece, self._optimizer.state[piece.held], piece.parts(host)[1:])
            self._dirty.add(expert)
        self.flush()

    @torch.no_grad()
    def _complete(self, steps: int = 1) -> None:
        """All that a step has changed is on SSD, and on all ranks."""
        assert self._beside is not None
        if self._is_loaded:  # by the optimizer's own method, which nobody else hears of
            self._adopt_all()
        self._write_changed()
        self._beside.write()
        if self._last is not None:
            self._last.complete(steps)
        if self._group is not None:
            done = torch.zeros(1, device=self._pieces[0].device.device)
            torch.ops.memtune.all_reduce_(done, self._group.group_name, self._group.size(), "avg")

    def nothing_missed(self) -> None:
        """What apply took up is given back."""
        self._missed.clear()

    # -- updates ---------------------------------------------------------------------------------------------

    def leave_down(self, parameters: Iterable[nn.Parameter]) -> None:
        """They are nowhere but here."""

    def got_zeros(self, parameter: nn.Parameter) -> None:
        """Its gradient would be zeros in this micro-batch."""
        self._zero.add(parameter)

    @torch.no_grad()
    def share(self, parameters: Iterable[nn.Parameter]) -> None:
        """Rule 7, before these are updated."""
        if self._group is None:
            return
        pieces = [piece for expert in self._of(parameters) for piece in self.pieces[expert]]
        if not pieces:
            return
        there = [piece.held.grad is not None for piece in pieces] + [
            piece.device in self._zero for piece in pieces
        ]
        flags = torch.tensor(there, dtype=torch.float32, device=pieces[0].device.device)
        torch.ops.memtune.all_reduce_(flags, self._group.group_name, self._group.size(), "avg")
        given, zeros = (part.tolist() for part in flags.chunk(2))
        for piece, has, got_zeros in zip(pieces, given, zeros, strict=True):
            if has:
                self._average(piece, self._group)
            elif got_zeros:
                self._zero.add(piece.device)

    def _average(self, piece: Piece, group: dist.ProcessGroup) -> None:
        """On the device, one after the other: the host's is let go before what comes back is taken."""
        mine, piece.held.grad = piece.held.grad, None
        device = piece.device.device
        whole = (
            torch.zeros(piece.held.shape, dtype=piece.held.dtype, device=device)
            if mine is None
            else torch.ops.memtune.to_device(mine, device)
        )
        del mine
        torch.ops.memtune.all_reduce_(whole, group.group_name, group.size(), "avg")
        host = torch.ops.memtune.to_host(whole)
        mark(host, HOST)
        transfer.finish(host)
        piece.held.grad = host

    @torch.no_grad()
    def update(self, parameters: Iterable[nn.Parameter]) -> None:
        """Update those of these that have a gradient, which replicas have shared."""
        for expert in self._of(parameters):
            if all(piece.held.grad is None for piece in self.pieces[expert]):
                continue
            self._dirty.add(expert)
            for piece, host in zip(self.pieces[expert], self.host(expert), strict=True):
                gradient, piece.held.grad = piece.held.grad, None
                if gradient is not None:
                    self._zero.discard(piece.device)
                    self._on_host(piece, host, gradient, self._seeds[piece.device])

    def _of(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        return list(dict.fromkeys(self.expert_of[each] for each in parameters))

    def _update_rest(self) -> None:
        """Rules 4 and 5: those that have not been updated in backward, and those that got zeros alone."""
        if self._beside is not None:
            self._beside.require_known({piece.held for piece in self._pieces})
        self.share(self.expert_of)
        self.update(self.expert_of)
        settings: dict[int, dict[str, Any]] = {}
        for parameter in self._zero:
            group = next(
                piece.group for piece in self.pieces[self.expert_of[parameter]] if piece.device is parameter
            )
            now = settings.setdefault(
                id(group), {name: value for name, value in group.items() if name != "params"}
            )
            self._missed.setdefault(parameter, []).append(now)
        self._zero.clear()

    def check(self) -> dict[str, Any]:
        """Bytes on SSD and of the cache, and updates that were made up for.

        Raises:
            ApplyError: Some state is elsewhere.
        """
        cached = sum(host.nbytes for hosts in self._there.values() for host in hosts)
        facts = super().check()
        facts["ssd_bytes"] += self._beside.n_bytes if self._beside is not None else 0
        return {**facts, "cached_bytes": cached, "made_up": self.made_up}


class ExpertStore(ParameterOffloader):
    """Makes the experts of `context`'s model come and go.

    Args:
        context: Its model.
        experts: Of the model.
        residency: Which blocks' experts are on the device when.
        optimizer: Holds them.
        ahead: Moments by which they are read from SSD ahead.

    Raises:
        ApplyError: An expert's parameter is used outside of its block, or nothing but experts is trained.
    """

    def __init__(
        self,
        context: Context,
        experts: Sequence[Expert],
        residency: Residency,
        optimizer: ExpertOptimizer,
        ahead: int,
    ) -> None:
        blocks = range(len(context.blocks))
        self._experts, self._held_by, self._ahead = experts, optimizer, ahead
        self._members = [[i for i, expert in enumerate(experts) if expert.block == block] for block in blocks]
        self._on_device = set(range(len(experts)))
        self._last: list[set[int]] = [set() for _ in blocks]
        self._used: list[set[int]] = [set() for _ in blocks]
        members = [[piece.device for i in mine for piece in optimizer.pieces[i]] for mine in self._members]
        self._places: dict[nn.Parameter, Place] = {}
        super().__init__(context, residency, optimizer, members=members)
        optimizer.hosts = self._hosts
        if self._gathered is not None:  # Rule 8
            self._last = self._used = [set(mine) for mine in self._members]
            self._keep_others_apart(context)
            return
        for index, expert in enumerate(experts):
            module = context.model.get_submodule(expert.name)
            vars(module)["forward"] = self._forward_of(index, module, module.forward)

    def _piece(self, parameter: nn.Parameter) -> Place:
        found = self._places[parameter] = super()._piece(parameter)
        return found

    def _keep_others_apart(self, context: Context) -> None:
        mine = {id(each) for block in self._blocks for each in block}
        for parameter in (each for module in self._modules for each in module.parameters()):
            if parameter.requires_grad and id(parameter) not in mine:
                context.undo.callback(parameter.register_post_accumulate_grad_hook(_own_memory).remove)

    # -- calls -----------------------------------------------------------------------------------------------

    def _forward_of(self, index: int, module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        block = self._experts[index].block

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            if given and not any(each.numel() for each in given):
                with _reparametrize_module(module, self._without_memory(module)):
                    found = own(*args, **kwargs)
                if not any(each.numel() for each in tree_leaves(found) if isinstance(each, Tensor)):
                    return found
            self._last[block].add(index)
            self._used[block].add(index)
            self._bring(index)
            return own(*args, **kwargs)

        return forward

    def _without_memory(self, module: nn.Module) -> dict[str, Tensor]:
        """Weights of one number each, for a call that reads none; they tell when autograd has a gradient for
        them (Rule 4).
        """
        found = {}
        for name, parameter in module.named_parameters():
            one = torch.zeros(
                (), dtype=parameter.dtype, device=parameter.device, requires_grad=parameter.requires_grad
            )
            if parameter.requires_grad and torch.is_grad_enabled():
                one.register_post_accumulate_grad_hook(
                    lambda _, parameter=parameter: self._held_by.got_zeros(parameter)
                )
            found[name] = one.expand(parameter.shape)
        return found

    # -- moments ---------------------------------------------------------------------------------------------

    def _begin(self, moment: int) -> None:
        is_same = moment == self._moment
        self._held_by.moment = moment
        super()._begin(moment)
        if is_same:
            return
        last, used = ([sorted(each) for each in which] for which in (self._last, self._used))
        gathered = self._gathered is not None
        for expert in read_ahead(moment, self._ahead, self._held_by.slots, last, used, gathered):  # Rule 2
            self._held_by.read(expert)
        if moment < len(self._blocks) and not gathered:
            self._last[moment] = set()

    def _fetch(self, index: int) -> None:
        if index not in self._there:
            self._there.add(index)
            for expert in sorted(
                self._last[index] if self._moment < len(self._blocks) else self._used[index]
            ):
                self._bring(expert)

    def _fetch_whole(self, block: int) -> None:
        self._there.add(block)
        for expert in self._members[block]:
            self._bring(expert)

    @torch.no_grad()
    def _bring(self, expert: int) -> None:
        if expert in self._on_device:
            return
        self._on_device.add(expert)
        self._there.add(self._experts[expert].block)
        for piece, host in zip(self._held_by.pieces[expert], self._held_by.host(expert), strict=True):
            place, weight = self._places[piece.device], piece.parts(host)[0].detach()
            place.take()
            with _unsafe_preserve_version_counter(place.there):
                torch.ops.memtune.copy_to_device_(place.there.detach(), weight)
            self.loaded_bytes += weight.nbytes

    def _release(self, units: Any) -> None:
        for index in list(units):
            self._there.discard(index)
            for expert in self._members[index]:
                if expert in self._on_device:
                    self._on_device.discard(expert)
                    for piece in self._held_by.pieces[expert]:
                        self._places[piece.device].give_back()

    def _bring_all(self) -> None:
        self._held_by.nothing_missed()
        for expert, pieces in enumerate(self._held_by.pieces):
            if any(self._places[piece.device].there.untyped_storage().nbytes() == 0 for piece in pieces):
                self._on_device.discard(expert)
            self._bring(expert)

    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        super()._step_begins(optimizer, args, kwargs)
        for used in self._used if self._gathered is None else ():
            used.clear()

    def _show(self, parameters: Iterable[nn.Parameter]) -> None:
        """As they are used: averaged, where replicas do that."""
        mine = list(parameters)
        self._held_by.share(mine)
        super()._show(mine)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _into_state_dict(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """As copies: whoever loads a state dict may write into the tensors of this one."""
        self._held_by.verify(set(module.parameters(recurse=False)))
        super()._into_state_dict(module, state, prefix, metadata)
        for name, parameter in module.named_parameters(recurse=False):
            if prefix + name in state and parameter in self._hosts:
                with tier(HOST):
                    state[prefix + name] = state[prefix + name].clone()

    def _keep(self, loaded: list[nn.Parameter]) -> None:
        for expert in dict.fromkeys(
            self._held_by.expert_of[each] for each in loaded if each in self._held_by.expert_of
        ):
            self._held_by.set_weights(expert)

    def check(self) -> dict[str, Any]:
        """Where the experts are.

        Raises:
            ApplyError: Some are on the device between two steps, or some state is elsewhere.
        """
        return super().check() | {"experts": len(self._experts)}


@torch.no_grad()
def _own_memory(parameter: Tensor) -> None:
    """Rule 8."""
    assert isinstance(parameter, nn.Parameter)
    gradient = parameter.grad
    if gradient is not None and (rows := local(gradient)).untyped_storage().nbytes() > rows.nbytes:
        parameter.grad = sharded_like(parameter, rows.clone())
