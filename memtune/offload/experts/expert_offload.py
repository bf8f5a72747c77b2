"""Expert offload: experts and their optimizer state on SSD, a cache of them on the host, those of current
blocks on the device.

All other parameters remain on the device with the user's own optimizer. Rules on top of those of
`offload.parameters.offloader`, whose units are the blocks' experts here (SE-MoE, Shen et al. 2022, section
3.1: sparse parameters):

Rule 1. An expert that is called with no row is *unused*: it runs on weights without memory, because no op
  reads them. Only used experts are loaded to host or device, and only their state is read and written.
Rule 2. When a block's moment begins, the experts that its last forward used (in backward: any forward since
  the step) are prefetched to the device; another one is loaded when it is called. Experts of the `read_ahead`
  moments after it are read from SSD meanwhile, by the same guess. A wrong guess costs bytes, not bits.
Rule 3. Host memory holds `slots` experts, each with weights and moments. A full cache
  (`host_cache.HostCache`) evicts one by its rule before it loads another; a changed one is written first.
Rule 4. A dense optimizer also updates an expert whose gradient is zeros. Here such an update is deferred:
  before the expert is used next, or the user reads it, all updates that it missed are applied, each with
  the settings of its step. So deferred updates have the bits of dense ones and move no bytes. Without any
  gradient an optimizer does nothing, and neither does this one.
Rule 5. Gradients are offloaded when ready. In the last micro-batch of `Tuned.step` a block's experts are
  updated after its backward; in any other loop `optimizer.step()` updates all.
Rule 6. Under FSDP2 a rank has its rows of each expert on SSD; they are gathered and reduced with the rest of
  their block (`offload.core.fsdp_shards`), and all experts are used. Reduced gradients of a block are views
  of one buffer, so those of resident parameters are copied out of it; otherwise they would keep the experts'
  gradients in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_leaves

import memtune.ssd.ssd_tensors  # noqa: F401  (defines torch.ops.memtune, to_ssd and from_ssd there too)
from memtune.offload.core import (
    OffloadedParameter,
    adopt_together,
    allocate_together,
    free_together,
    is_gathered,
    sharded_like,
    to_host_now,
)
from memtune.offload.experts.host_cache import HostCache, experts_to_read, moments_of
from memtune.offload.parameters import Mappings, OffloadedBlocks, Prefetched, bytes_of, piece_of
from memtune.offload.ssd_states import SsdOptimizer
from memtune.program import Rule
from memtune.runtime import HOST, Context, before_step, local, tier, transfer
from memtune.workload import Expert


class ExpertOptimizer:
    """Moves the weights and state of experts to SSD and updates them natively; the optimizer's own step
    updates all others.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        experts: Of the model.
        slots: Experts that host memory holds.
        rule: Eviction rule of the cache.
        on_device: Blocks whose experts are resident at once.

    Attributes:
        before_reload: Adopts weights that a load has written, before the state that it has loaded.
        before_state_dict: Adopts weights that the user has written through the file's mapping.

    Raises:
        ApplyError: The native update does not support the optimizer or a parameter's type.
        EnvironmentFault: There is no room on SSD; names the parameter.
    """

    def __init__(
        self, context: Context, experts: Sequence[Expert], slots: int, rule: Rule, on_device: int
    ) -> None:
        parameters = list(context.model.parameters())
        expert_params = {parameters[index] for expert in experts for index in expert.parameters}
        gathered = is_gathered(context.model)
        self._on_ssd = on_ssd = SsdOptimizer(context, master=False, read_ahead=0, chosen=expert_params)
        on_ssd.settle = self._settle
        context.events.weights_loaded.subscribe(self._reload)
        # Experts without trained parameters have no records, so not every parameter is found.
        piece_of = {piece.device: piece for piece in on_ssd.pieces}
        self.pieces = [
            [piece_of[parameters[i]] for i in each.parameters if parameters[i] in piece_of]
            for each in experts
        ]
        self.expert_of = {
            piece.device: expert for expert, pieces in enumerate(self.pieces) for piece in pieces
        }
        # Of stochastic rounding: fixed, so that a missed update has the same bits whenever it runs.
        self._seeds = {piece.device: seed for seed, piece in enumerate(on_ssd.pieces)}
        uses = moments_of(len(context.blocks), on_device, gathered)
        self.block_of = [each.block for each in experts]
        self._cache = HostCache(slots, rule, self.block_of, uses)
        self.slots = slots
        self._resident: dict[int, list[Tensor]] = {}
        self._dirty: set[int] = set()
        self._zero: set[nn.Parameter] = set()
        # A cleared gradient is none, and an optimizer does nothing without one (Rule 4).
        context.events.grads_cleared.subscribe(self._zero.difference_update)
        self._missed: dict[nn.Parameter, list[dict[str, Any]]] = {}
        self.moment = 0
        self.caught_up = 0
        self.before_reload: Callable[[], None] = lambda: None
        self.before_state_dict: Callable[[], None] = lambda: None
        # Before the optimizer's own step, which would skip experts: their device gradients are None.
        before_step(on_ssd.optimizer, lambda *_: self._update_rest())

    # -- host memory -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def start_read(self, expert: int) -> None:
        """Start reading the expert if the cache lacks it; evict another if the cache is full."""
        # The cache only decides; tensors are here, so that the pass can run the same cache without torch.
        comes, gone = self._cache.insert(expert, self.moment)
        if gone is not None:
            self._evict(gone)
        if comes:
            self._resident[expert] = [self._on_ssd.load(piece) for piece in self.pieces[expert]]

    def _evict(self, expert: int) -> None:
        hosts = self._resident.pop(expert)
        self._write_back(expert, hosts)
        for host in hosts:
            # A read that was never waited for still writes this pinned memory.
            transfer.abandon(host)

    def _write_back(self, expert: int, hosts: list[Tensor]) -> None:
        if expert in self._dirty:
            self._dirty.discard(expert)
            for piece, host in zip(self.pieces[expert], hosts, strict=True):
                self._on_ssd.write(piece, host)

    @torch.no_grad()
    def host(self, expert: int) -> list[Tensor]:
        """Return weights and moments of the expert in host memory, missed updates applied (Rule 4)."""
        self.start_read(expert)
        self._cache.count_use(expert)
        hosts = self._resident[expert]
        for piece, host in zip(self.pieces[expert], hosts, strict=True):
            transfer.finish(host)
            for group in self._missed.pop(piece.device, ()):
                self._dirty.add(expert)
                self.caught_up += 1
                with tier(HOST):
                    # Zeros are a gradient: weight decay and momentum still change the weight.
                    zeros = torch.zeros(piece.held.shape)
                self._on_ssd.update(piece, host, zeros, self._seeds[piece.device], group)
        return hosts

    def verify(self, expert: int) -> None:
        """Check the expert's records on SSD, after all changed experts are written."""
        self.flush()
        self._on_ssd.verify({piece.device for piece in self.pieces[expert]})

    def _settle(self) -> None:
        self.before_state_dict()
        self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Apply missed updates and write all changed experts."""
        missed = {self.expert_of[parameter] for parameter in self._missed}
        # `host` applies the missed updates.
        for expert in sorted(missed):
            self.host(expert)
        for expert, hosts in self._resident.items():
            self._write_back(expert, hosts)
        # Two SSD writes may be in flight; state dicts read what has arrived.
        self._on_ssd.finish_writes()

    @torch.no_grad()
    def set_weights(self, expert: int) -> None:
        """Copy the expert's weights, which the user has changed on the device, to the cache."""
        for piece, host in zip(self.pieces[expert], self.host(expert), strict=True):
            piece.parts(host)[0].copy_(to_host_now(local(piece.device)))
        self._dirty.add(expert)

    @torch.no_grad()
    def adopt(self, expert: int) -> None:
        """Write the expert's records again, whose weights the user has changed through the file's mapping."""
        cached = self._resident.get(expert, ())
        for host in cached:
            transfer.finish(host)
        for index, piece in enumerate(self.pieces[expert]):
            with tier(HOST):
                record = piece.ssd.detach().clone()
            self._on_ssd.write_now(piece, record)
            if cached:
                cached[index].copy_(record)

    @torch.no_grad()
    def _reload(self) -> None:
        """Adopt loaded weights and optimizer state."""
        self.before_reload()
        for expert, pieces in enumerate(self.pieces):
            for piece, host in zip(pieces, self.host(expert), strict=True):
                self._on_ssd.adopt_state(
                    piece, self._on_ssd.optimizer.state[piece.held], piece.parts(host)[1:]
                )
            self._dirty.add(expert)
        self.flush()

    def clear_missed(self) -> None:
        """Forget missed updates, when `apply` is undone."""
        self._missed.clear()

    # -- updates ---------------------------------------------------------------------------------------------

    def note_zero_gradient(self, parameter: nn.Parameter) -> None:
        """Note that the parameter's gradient in this micro-batch would be zeros."""
        self._zero.add(parameter)

    @torch.no_grad()
    def update(self, parameters: Iterable[nn.Parameter], *, at_once: bool = True) -> None:
        """Update those of `parameters` that have a gradient; at once."""
        for expert in self._numbers_of(parameters):
            if all(piece.held.grad is None for piece in self.pieces[expert]):
                continue
            self._dirty.add(expert)
            for piece, host in zip(self.pieces[expert], self.host(expert), strict=True):
                gradient, piece.held.grad = piece.held.grad, None
                if gradient is not None:
                    # A real gradient in another micro-batch of the step takes the place of the zeros.
                    self._zero.discard(piece.device)
                    self._on_ssd.update(piece, host, gradient, self._seeds[piece.device])

    def _numbers_of(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        return list(dict.fromkeys(self.expert_of[each] for each in parameters))

    def _update_rest(self) -> None:
        """Update experts that backward has not, and note missed updates of zero gradients (Rules 4 and 5)."""
        self.update(self.expert_of)
        settings: dict[int, dict[str, Any]] = {}
        for parameter in self._zero:
            group = next(
                piece.group for piece in self.pieces[self.expert_of[parameter]] if piece.device is parameter
            )
            now = settings.setdefault(
                # A copy: schedulers change the group's learning rate before the update is applied.
                id(group),
                {name: value for name, value in group.items() if name != "params"},
            )
            self._missed.setdefault(parameter, []).append(now)
        self._zero.clear()

    def check(self) -> dict[str, Any]:
        """Return bytes on SSD and in the cache, and the number of missed updates applied, for the audit.

        Raises:
            ApplyError: Some state is not on SSD.
        """
        cached = sum(host.nbytes for hosts in self._resident.values() for host in hosts)
        facts = {"experts": len(self.pieces), "cached_bytes": cached, "caught_up": self.caught_up}
        return self._on_ssd.check() | facts


def blocks_of_experts(context: Context, optimizer: ExpertOptimizer) -> OffloadedBlocks:
    """Return the experts of each block, whose values between uses are those of their records on SSD."""
    held, members = context.placement.optimizer_params, [list[nn.Parameter]() for _ in context.blocks]
    for pieces, block in zip(optimizer.pieces, optimizer.block_of, strict=True):
        members[block] += [piece.device for piece in pieces]
    return OffloadedBlocks(context, None, members, host_of=lambda parameter: held[parameter].detach())


class ExpertUnits:
    """The experts of `context`'s model, by blocks; those that a block uses are loaded.

    Args:
        context: Its model.
        experts: Of the model.
        blocks: Their parameters.
        optimizer: Holds the experts.
        read_ahead: Moments by which experts are read from SSD before their block.

    Attributes:
        prefetched: Blocks of which experts are in copies.
        resident: Blocks of which experts may be on the device.
        on_device: Experts on the device.
    """

    def __init__(
        self,
        context: Context,
        experts: Sequence[Expert],
        blocks: OffloadedBlocks,
        optimizer: ExpertOptimizer,
        read_ahead: int,
    ) -> None:
        self.experts, self._optimizer, self._read_ahead = experts, optimizer, read_ahead
        self._blocks, self._device = blocks, context.device
        self.prefetched = Prefetched(context.device)
        numbers = range(len(blocks))
        self._members = [
            [i for i, expert in enumerate(experts) if expert.block == block] for block in numbers
        ]
        self.of_block = [(block,) for block in numbers]
        self.resident, self.on_device = set(numbers), set(range(len(experts)))
        self._last: list[set[int]] = [set() for _ in numbers]
        self._used: list[set[int]] = [set() for _ in numbers]
        self._places = [[piece_of(context, blocks, each.device) for each in its] for its in optimizer.pieces]
        self._mappings: Mappings[int] = Mappings(optimizer.verify, optimizer.adopt)
        self.loaded_bytes = 0
        context.undo.callback(self._load_all)
        optimizer.before_reload, optimizer.before_state_dict = self._mappings.adopt, self._mappings.write
        blocks.load_before_gathers(self.load_block, self._memory)
        if blocks.gathered is not None:  # Rule 6: a gather reads all experts' rows
            # One list for both: it never changes.
            self._last = self._used = [set(expert_params) for expert_params in self._members]
            self._separate_resident_gradients(context)
            return
        for index, expert in enumerate(experts):
            module = context.model.get_submodule(expert.name)
            # Set on the instance, so that hooks of the module still run around it.
            vars(module)["forward"] = self._forward_of(index, module, module.forward)

    def _separate_resident_gradients(self, context: Context) -> None:
        expert_params = {id(each) for each in self._blocks.parameters}
        for parameter in (each for module in self._blocks.modules for each in module.parameters()):
            if parameter.requires_grad and id(parameter) not in expert_params:
                context.undo.callback(parameter.register_post_accumulate_grad_hook(_copy_out_gradient).remove)

    # -- calls -----------------------------------------------------------------------------------------------

    def _forward_of(self, index: int, module: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
        block = self.experts[index].block

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            # No rows in any argument: the expert is unused, unless its output has elements all the same.
            if given and not any(each.numel() for each in given):
                with _reparametrize_module(module, self._without_memory(module)):
                    found = own(*args, **kwargs)
                if not any(each.numel() for each in tree_leaves(found) if isinstance(each, Tensor)):
                    return found
            self._last[block].add(index)
            self._used[block].add(index)
            self._load_expert(index)
            return own(*args, **kwargs)

        return forward

    def _without_memory(self, module: nn.Module) -> dict[str, Tensor]:
        """Return weights of one number each, expanded, for a call that reads none."""
        # Their grad-ready hooks report that autograd has a gradient, of zeros, for the parameter (Rule 4).
        found = {}
        for name, parameter in module.named_parameters():
            one = torch.zeros(
                (), dtype=parameter.dtype, device=self._device, requires_grad=parameter.requires_grad
            )
            if parameter.requires_grad and torch.is_grad_enabled():
                one.register_post_accumulate_grad_hook(
                    lambda _, parameter=parameter: self._optimizer.note_zero_gradient(parameter)
                )
            found[name] = one.expand(parameter.shape)
        return found

    # -- units -----------------------------------------------------------------------------------------------

    @property
    def moment(self) -> int:
        """The moment of the step that runs, or that ran last."""
        return self._optimizer.moment

    @moment.setter
    def moment(self, moment: int) -> None:
        self._optimizer.moment = moment
        self._mappings.adopt()

    def read_ahead(self) -> None:
        """Start reading experts of later moments from SSD (Rule 2)."""
        last, used = ([sorted(each) for each in which] for which in (self._last, self._used))
        moment, gathered = self.moment, self._blocks.gathered is not None
        for expert in experts_to_read(moment, self._read_ahead, self._optimizer.slots, last, used, gathered):
            self._optimizer.start_read(expert)
        # The forward that begins notes its own experts; its guess has been used above.
        if moment < len(self._blocks) and not gathered:
            self._last[moment] = set()

    def load_block(self, block: int) -> None:
        """Make the experts that `block` is expected to use resident for the compute stream."""
        self.prefetched.wait_for((block,), self.resident)
        self.prefetch((block,))

    def prefetch(self, units: Iterable[int]) -> None:
        """Load the experts that the blocks `units` are expected to use."""
        for block in units:
            if block not in self.resident:
                self.resident.add(block)
                # Forward can only guess from the last one; backward uses what its own forward has used.
                guess = self._last if self.moment < len(self._blocks) else self._used
                for expert in sorted(guess[block]):
                    self._load_expert(expert)

    @torch.no_grad()
    def _load_expert(self, expert: int) -> None:
        if expert in self.on_device:
            return
        self._mappings.adopt()
        self.on_device.add(expert)
        self.resident.add(self.experts[expert].block)
        pieces, hosts = self._optimizer.pieces[expert], self._optimizer.host(expert)
        for piece, host, place in zip(pieces, hosts, self._places[expert], strict=True):
            weight = piece.parts(host)[0].detach()
            allocate_together((place,))
            with _unsafe_preserve_version_counter(place.memory):
                torch.ops.memtune.copy_to_device_(place.memory.detach(), weight)
            # After the copy is issued: from here on the user's parameter shows this memory.
            place.of[0].restore()
            self.loaded_bytes += weight.nbytes

    def free(self, units: Iterable[int]) -> None:
        """Free the experts of the blocks `units`."""
        for index in list(units):
            self.resident.discard(index)
            for expert in self._members[index]:
                if expert in self.on_device:
                    self.on_device.discard(expert)
                    owners = self._owners(expert)
                    # Before the memory is freed, which has the only copy of what the user has written on the
                    # device.
                    if adopt_together(owners):
                        self._optimizer.set_weights(expert)
                    free_together(self._places[expert])
                    self._mappings.map_for_access(expert, owners)

    def _load_all(self) -> None:
        # Weights are about to be restored by `undo`, so updates must not be applied to them.
        self._optimizer.clear_missed()
        for expert, places in enumerate(self._places):
            if any(place.memory.untyped_storage().nbytes() == 0 for place in places):
                self.on_device.discard(expert)
            self._load_expert(expert)

    def step_begins(self) -> None:
        """Free all experts, and write what the user has changed."""
        self.free(self.resident)
        self._mappings.adopt()
        for used in self._used if self._blocks.gathered is None else ():
            used.clear()

    # -- places ----------------------------------------------------------------------------------------------

    def _memory(self, block: int) -> list[Tensor]:
        return [place.memory for expert in self._members[block] for place in self._places[expert]]

    def _owners(self, expert: int) -> list[OffloadedParameter]:
        return [place.of[0] for place in self._places[expert]]

    def resident_bytes(self) -> int:
        """Return the bytes of weights on the device."""
        return bytes_of(place for places in self._places for place in places)


@torch.no_grad()
def _copy_out_gradient(parameter: Tensor) -> None:
    """Copy a reduced gradient out of the buffer that it shares with others (Rule 6); grad-ready hook."""
    assert isinstance(parameter, nn.Parameter)
    gradient = parameter.grad
    if gradient is not None and (rows := local(gradient)).untyped_storage().nbytes() > rows.nbytes:
        parameter.grad = sharded_like(parameter, rows.clone())
