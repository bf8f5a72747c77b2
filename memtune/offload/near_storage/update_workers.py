"""The user's optimizer in updater processes, one per storage domain: gradients in, weights out, state stays
on SSD.

The optimizer object is the user's own, with its groups; its state is with the updaters and is collected for a
state dict. All parameters, flattened, are divided evenly over the domains
(`memtune.offload.near_storage.storage_domains`). Rules, which the pass
`offload.near_storage.update_workers_pass` follows op by op (Smart-Infinity, Jang et al. 2024: SmartUpdate and
its handler):

Rule 1. When a step begins, each updater reads its first `buffers` sub-groups; a buffer is read into again
  when its contents are written. Buffers and slots are allocated once.
Rule 2. In round i the gradients of each domain's i-th sub-group are offloaded into one of `SLOTS` slots,
  which trainer and updater share. A gradient is freed on the device when its last part has arrived. Then all
  updaters work at once.
Rule 3. Weights first: an updated sub-group's weights are handed over, then written, then its moments are.
  Writes of weights have priority over moments of other sub-groups in the drive's queue.
Rule 4. Weights of round i are copied to the device while the updaters work on round i + 1. `step` returns
  when all are on the device; moments may still be in writes. Later orders to an updater run after these
  writes.
Rule 5. With `on_host`, `offload.optimizer.grad_offload` offloads gradients in backward and sums them on the
  host. The optimizer's parameters then have no memory of their own, only these gradients, and a round copies
  its parts to the slots on the host; the sentinel's gradient alone is offloaded in the step.
Rule 6. An updater that has ended, or reports a fault, is named in an error, in this step and in all later
  ones: some weights are new and some are not, so training cannot continue from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memtune.runtime.seam  # noqa: F401  (defines torch.ops.memtune)
from memtune import refusals
from memtune.errors import ApplyError
from memtune.offload.core import optimizer_parameter
from memtune.offload.gradients import ExternalWrites, watch_loads
from memtune.offload.near_storage.storage_domains import (
    OFFLOAD,
    READ,
    SLOTS,
    UPDATE,
    WRITE_MOMENTS,
    WRITE_WEIGHTS,
    Layout,
    Segment,
    SubGroup,
    divide,
    step_actions,
    topk_layout,
)
from memtune.offload.near_storage.topk_compression import TopKCompression
from memtune.offload.near_storage.update_worker_client import UpdaterLink
from memtune.offload.near_storage.worker_slots import UpdaterSlots
from memtune.offload.optimizer import NativeUpdate, refuse_added_parameters
from memtune.runtime import (
    HOST,
    SSD,
    Context,
    keep_groups,
    local,
    mark,
    replace_step,
    tier,
    tier_of,
    transfer,
    with_hooks,
)
from memtune.ssd import LastStep


@dataclass(eq=False)
class _Parameter:
    """A parameter whose master weight and moments are with the updaters; or this rank's shard of it."""

    name: str
    rows: nn.Parameter
    """The weight on the device: the model's parameter, or this rank's shard."""
    held: nn.Parameter
    """The optimizer's parameter: `rows`, or with gradients on the host one that has these alone."""
    unsharded: nn.Parameter | None
    """The model's parameter, if the optimizer's shard is another object (rows); both have one gradient."""
    group: dict[str, Any]
    moments: list[str]
    steps: int = 0

    @property
    def device(self) -> Tensor:
        """Its memory on the device."""
        return local(self.rows.detach())

    @property
    def gradient(self) -> Tensor | None:
        """Its gradient, on the host if it was offloaded there, or None."""
        found = self.rows.grad if self.held.grad is None else self.held.grad
        return None if found is None else local(found)

    @property
    def is_on_host(self) -> bool:
        """True if its gradient was offloaded in backward."""
        return self.held is not self.rows and self.rows.grad is None

    def free_gradient(self) -> None:
        """Free the gradient."""
        self.held.grad = self.rows.grad = None
        if self.unsharded is not None:
            self.unsharded.grad = None


@dataclass(frozen=True, eq=False)
class _Domain:
    """The shared memory and SSD extents of an updater, and its process; no process under fake tensors."""

    slots: list[Tensor]
    buffers: list[Tensor]
    weights: list[Tensor]
    """On SSD, one per sub-group."""
    moments: list[Tensor]
    spares: list[Tensor]
    """Second slots of weights and moments, if steps are kept: a step writes those of two steps ago."""
    link: UpdaterLink | None

    @property
    def number(self) -> int:
        return 0 if self.link is None else self.link.number


class Updaters:
    """Moves an optimizer to updater processes.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        directories: Directory of each domain's file.
        master: bfloat16 parameters have float32 masters.
        sub_group_numel: Elements that are read, updated and written together.
        buffers: Sub-groups that an updater holds in host memory, 2 or more.
        keep: Every complete step is kept (`ssd.last_step`), and training resumes from the newest one; not
            with `share`.
        share: Share of each sub-group's gradients that is sent, the largest ones; the rest is added to the
            next step's gradients. None: all are sent.
        on_host: Gradients are on the host before the step (Rule 5); not with `share`.

    Raises:
        ApplyError: The native update does not support the optimizer or a parameter's type.
        EnvironmentFault: An updater cannot start; names it, and the reason.
    """

    def __init__(
        self,
        context: Context,
        directories: list[str],
        *,
        master: bool,
        sub_group_numel: int,
        buffers: int,
        share: float | None,
        on_host: bool = False,
        keep: bool = False,
    ) -> None:
        self._optimizer, self._n_buffers, self._share, self._keep = context.optimizer, buffers, share, keep
        # For its checks and numbers only: the updaters make the updates.
        self._native = NativeUpdate(context.optimizer, "float32")
        self._parameters = list(self._trained(context))
        for each in self._parameters:
            _refuse(each, master)
        sizes = [(each.device.numel(), each.device.itemsize, len(each.moments)) for each in self._parameters]
        numel, itemsize, moments = (tuple(column) for column in zip(*sizes, strict=True))
        self._layout: Layout = divide(numel, itemsize, moments, len(directories), sub_group_numel)
        self._compression = (
            None if share is None else TopKCompression([each.device for each in self._parameters], share)
        )
        self._domains = self._open_domains(context, directories)
        if on_host:
            self._hold_on_host(context)
        # Parameters whose weights were loaded into the model alone, so they are newer than the masters.
        self._stale: set[nn.Parameter] = set()
        watch_loads(context, {each.rows for each in self._parameters}, self._stale.update)
        self._last: LastStep | None = None
        self._writes = ExternalWrites(context, (each.rows for each in self._parameters))
        # After the processes are up and before `resume`: a run that resumes reads over what is written here.
        self._store(first=True)
        if keep and all(each.link is not None for each in self._domains):
            links = [each.link for each in self._domains if each.link is not None]
            self._last = LastStep(
                context, UpdaterSlots(links, self._layout, self._parameters, self._write_back)
            )
            context.loop.resumed_steps = self._last.resume()
            context.events.finished.subscribe(self._last.finish)
            self._note_weight_versions()
        context.events.weights_loaded.subscribe(self._store)
        # `_Parameter.group` must remain the optimizer's after a load, or schedulers would change other
        # groups.
        keep_groups(self._optimizer)
        # The optimizer's `state` is empty except inside `state_dict`: it would hold all moments in host
        # memory.
        self._optimizer.register_state_dict_pre_hook(lambda _: self._collect_state())
        self._optimizer.register_state_dict_post_hook(lambda *_: self._clear_state())
        self._optimizer.register_load_state_dict_post_hook(lambda _: self._store())
        replace_step(self._optimizer, with_hooks(self._optimizer, self._step))

    def _trained(self, context: Context) -> Iterator[_Parameter]:
        group_of = {each: group for group in self._optimizer.param_groups for each in group["params"]}
        for name, parameter in context.model.named_parameters():
            # The shard, if states are sharded: each rank's updaters have its rows alone.
            held = context.placement.optimizer_params.get(parameter, parameter)
            if held in group_of and parameter.requires_grad:
                group = group_of[held]
                unsharded = None if held is parameter else parameter
                yield _Parameter(name, held, held, unsharded, group, self._native.moment_names(group))

    def _hold_on_host(self, context: Context) -> None:
        """Give the optimizer parameters on the host, to which gradients are offloaded (Rule 5)."""
        state = self._optimizer.state
        memory = next(slot for each in self._domains for slot in each.slots)
        for each in self._parameters:
            # Any memory: nothing reads the value, and the gradient must have the shape.
            value = _view_as(memory, each.device.dtype, 1).expand(each.device.shape)
            each.held = optimizer_parameter(each.rows, value)
            if each.rows in state:
                state[each.held] = state.pop(each.rows)
        held_of = {each.rows: each.held for each in self._parameters}
        for group in self._optimizer.param_groups:
            group["params"] = [held_of.get(each, each) for each in group["params"]]
        context.placement.optimizer_params.update(held_of)

    # -- the processes ---------------------------------------------------------------------------------------

    def _open_domains(self, context: Context, directories: list[str]) -> list[_Domain]:
        if any(isinstance(each.device, FakeTensor) for each in self._parameters):
            return [self._fake_domain(domain) for domain in range(len(self._layout.domains))]
        links = []
        for domain, directory in enumerate(directories):
            links.append(UpdaterLink(domain, directory, self._spec(domain)))
            context.undo.callback(links[-1].close)
        return [
            self._open_domain(link, groups) for link, groups in zip(links, self._layout.domains, strict=True)
        ]

    def _spec(self, domain: int) -> dict[str, Any]:
        return {
            "rule": self._native.rule,
            "keep": self._keep,
            # Updaters work at once; together they use as many threads as the trainer would.
            "threads": max(1, torch.get_num_threads() // len(self._layout.domains)),
            "slots": self._layout.slots(domain),
            "slot_bytes": self._layout.slot_bytes,
            "buffers": self._layout.buffers(domain, self._n_buffers),
            "buffer_numel": self._layout.buffer_numel,
            "sub_groups": [self._group_spec(group) for group in self._layout.domains[domain]],
        }

    def _group_spec(self, group: SubGroup) -> dict[str, Any]:
        first, last = (self._parameters[group.segments[i].parameter].name for i in (0, -1))
        segments = [{**each._asdict(), **self._segment_spec(each)} for each in group.segments]
        name = first if first == last else f"{first} to {last}"
        return {"name": name, "numel": group.numel, "moments": group.moments, "segments": segments}

    def _segment_spec(self, segment: Segment) -> dict[str, int]:
        itemsize = self._parameters[segment.parameter].device.itemsize
        count, places = (0, 0) if self._share is None else topk_layout(segment, itemsize, self._share)
        n_moments = len(self._parameters[segment.parameter].moments)
        return {"itemsize": itemsize, "moments": n_moments, "n_sent": count, "places": places}

    def _open_domain(self, link: UpdaterLink, groups: tuple[SubGroup, ...]) -> _Domain:
        on_ssd = link.ready(
            [count for group in groups for count in (group.numel, group.moments)] * (1 + self._keep)
        )
        first, spares = on_ssd[: 2 * len(groups)], on_ssd[2 * len(groups) :]
        return _Domain(link.slots, link.buffers, first[::2], first[1::2], spares, link)

    def _fake_domain(self, domain: int) -> _Domain:
        layout, groups = self._layout, self._layout.domains[domain]
        with tier(HOST):
            slots = [torch.empty(layout.slot_bytes, dtype=torch.uint8) for _ in range(layout.slots(domain))]
            buffers = [
                torch.empty(layout.buffer_numel) for _ in range(layout.buffers(domain, self._n_buffers))
            ]
        weights = [torch.empty(each.numel) for each in groups]
        moments = [torch.empty(each.moments) for each in groups]
        spares = (
            [torch.empty(count) for each in groups for count in (each.numel, each.moments)]
            if self._keep
            else []
        )
        for where, tensors in ((HOST, slots + buffers), (SSD, weights + moments + spares)):
            for tensor in tensors:
                mark(tensor, where)
        return _Domain(slots, buffers, weights, moments, spares, None)

    # -- a step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _step(self) -> None:
        if any(self._optimizer.state.values()):  # the user assigned state
            self._store()
        refuse_added_parameters(self._optimizer, {each.held for each in self._parameters})
        # Before anything moves: after the first update the old weights would already be overwritten.
        self._refuse_stale()
        try:
            self._update_all()
        finally:  # also if an updater has ended: the other updaters' writes are not the user's
            self._note_weight_versions()

    def _note_weight_versions(self) -> None:
        for each in self._parameters:
            self._writes.note_write(each.rows)

    def _refuse_stale(self) -> None:
        self._stale.update(self._writes.take_external())
        if self._stale:
            raise ApplyError(
                f"{len(self._stale)} weights were loaded into the model by its own load_state_dict, or"
                " written on the device.",
                evidence="The updaters have the old weights, and the next step would overwrite the new ones.",
                fix="Tuned.load_state_dict or Tuned.load; or optimizer.load_state_dict after the model's",
                code="MT318",
            )

    def _update_all(self) -> None:
        missing = [0] * len(self._parameters)  # parts of each gradient that are not offloaded yet
        given = [each.gradient is not None for each in self._parameters]
        active = [
            [i for i, group in enumerate(groups) if any(given[s.parameter] for s in group.segments)]
            for groups in self._layout.domains
        ]
        for groups, mine in zip(self._layout.domains, active, strict=True):
            for segment in (s for i in mine for s in groups[i].segments if given[s.parameter]):
                # A gradient is cut at sub-groups, so several domains may have parts of it.
                missing[segment.parameter] += 1
        for each, has in zip(self._parameters, given, strict=True):
            # Counted as torch does: only steps in which the parameter had a gradient.
            each.steps += has
        for there in self._domains:
            if there.link is not None:
                there.link.order(["begin"])
        in_flight: list[tuple[int, int, int]] = []
        for action, domain, index in step_actions([len(each) for each in active], self._n_buffers):
            number = active[domain][index]
            if action == OFFLOAD:
                self._offload_gradients(domain, number, index % SLOTS, given)
                in_flight.append((domain, number, index % SLOTS))
                continue
            # All copies of a round have been started: they overlap with each other, and end before the
            # updates.
            if in_flight:
                self._finish_offload(in_flight, given, missing)
                in_flight = []
            if action == UPDATE:
                self._update(domain, number, index, given)
            elif action in (READ, WRITE_WEIGHTS, WRITE_MOMENTS):
                self._move(action, domain, number, index % self._n_buffers)
            else:
                self._reload_weights(domain, number, index % SLOTS, given)
        if self._last is not None:
            self._last.complete()

    def _segments(
        self, domain: int, number: int, given: list[bool]
    ) -> Iterator[tuple[int, Segment, _Parameter]]:
        for index, segment in enumerate(self._layout.domains[domain][number].segments):
            if given[segment.parameter]:
                yield index, segment, self._parameters[segment.parameter]

    def _offload_gradients(self, domain: int, number: int, slot: int, given: list[bool]) -> None:
        memory = self._domains[domain].slots[slot]
        for _, segment, parameter in self._segments(domain, number, given):
            gradient = _flat(parameter.gradient, parameter.device)[
                segment.start : segment.start + segment.numel
            ]
            there = memory[segment.slot :]
            if parameter.is_on_host:
                _view_as(there, gradient.dtype, segment.numel).copy_(gradient)
                transfer.COUNTERS.add("to_updaters", gradient.nbytes)
            elif self._compression is None:
                torch.ops.memtune.copy_to_host_(_view_as(there, gradient.dtype, segment.numel), gradient)
                transfer.COUNTERS.add("to_updaters", gradient.nbytes)
            else:
                self._compression.start_offload(segment, gradient, there)

    def _finish_offload(
        self, in_flight: list[tuple[int, int, int]], given: list[bool], missing: list[int]
    ) -> None:
        """Wait for the D2H copies of a round, and free gradients whose last part has arrived (Rule 2)."""
        for domain, number, slot in in_flight:
            transfer.finish(self._domains[domain].slots[slot])
            for _, segment, parameter in self._segments(domain, number, given):
                # The gradient may still be the source of another domain's copy, in this round or a later one.
                missing[segment.parameter] -= 1
                if not missing[segment.parameter]:
                    parameter.free_gradient()

    def _update(self, domain: int, number: int, index: int, given: list[bool]) -> None:
        there, buffer, slot = self._domains[domain], index % self._n_buffers, index % SLOTS
        numbers = []
        if there.link is not None:
            for at, _, parameter in self._segments(domain, number, given):
                numbers.append((at, self._native.numbers(parameter.group, parameter.steps)))
        command = json.dumps(["update", number, buffer, slot, numbers])
        torch.ops.memtune.updater_update_(there.slots[slot], there.buffers[buffer], there.number, command)

    def _move(self, action: int, domain: int, number: int, buffer: int) -> None:
        """Ask the updater of `domain` to read or write sub-group `number` through `buffer`."""
        there, group = self._domains[domain], self._layout.domains[domain][number]
        memory = there.buffers[buffer]
        both = [
            (there.weights[number], memory[: group.numel]),
            (there.moments[number], memory[group.numel :][: group.moments]),
        ]
        if action == READ:
            command = json.dumps(["read", number, buffer])
            torch.ops.memtune.updater_read_(
                memory[: group.numel + group.moments], *(ssd for ssd, _ in both), there.number, command
            )
        else:
            ssd, part = both[action == WRITE_MOMENTS]
            if there.spares:
                # Under kept steps the updater writes the other slot; the seam op must name what is written.
                ssd = there.spares[2 * number + (action == WRITE_MOMENTS)]
            command = json.dumps(
                ["write_weights" if action == WRITE_WEIGHTS else "write_moments", number, buffer]
            )
            torch.ops.memtune.updater_write_(ssd, part, there.number, command)

    def _reload_weights(self, domain: int, number: int, slot: int, given: list[bool]) -> None:
        """Copy the updated weights of a sub-group to the device (Rule 4)."""
        there = self._domains[domain]
        if there.link is not None:
            there.link.answer("updated")
        for _, segment, parameter in self._segments(domain, number, given):
            weight = _flat(parameter.device, parameter.device)[segment.start : segment.start + segment.numel]
            torch.ops.memtune.copy_to_device_(
                weight, _view_as(there.slots[slot][segment.slot :], weight.dtype, segment.numel)
            )
            transfer.COUNTERS.add("from_updaters", weight.nbytes)

    # -- state dicts -----------------------------------------------------------------------------------------

    def _settle(self, domain: int) -> dict[str, Any]:
        """Wait until the updater has executed all orders; return its bytes and events of this step."""
        link = self._domains[domain].link
        if link is None:
            return {"bytes": {}, "events": []}
        # After the fault of one updater, the replies that others have sent belong to an unfinished step.
        for each in self._domains:
            if each.link is not None:
                each.link.require_whole()
        link.order(["settle"])
        found: dict[str, Any] = link.answer("settled")
        return found

    def _sub_groups(self) -> Iterator[tuple[int, int, SubGroup, Tensor]]:
        """Yield each sub-group of each updater with the updater's first buffer, which no transfer uses."""
        for domain, (groups, there) in enumerate(zip(self._layout.domains, self._domains, strict=True)):
            for number, group in enumerate(groups):
                self._settle(domain)
                # All orders are done, so the first buffer is free for the caller.
                yield domain, number, group, there.buffers[0]

    @torch.no_grad()
    def _collect_state(self) -> None:
        """Give the optimizer its state, in host memory, for a state dict."""
        with tier(HOST):
            flat = [[torch.zeros(each.device.numel()) for _ in each.moments] for each in self._parameters]
        for domain, number, group, memory in self._sub_groups():
            self._move(READ, domain, number, 0)
            self._settle(domain)
            for segment in group.segments:
                for unsharded, part in zip(
                    flat[segment.parameter], _moments(group, segment, memory, flat), strict=True
                ):
                    unsharded[segment.start : segment.start + segment.numel] = part
        for each, values in zip(self._parameters, flat, strict=True):
            named = zip(each.moments, values, strict=True)
            state = {
                name: torch.as_strided(value, each.device.size(), each.device.stride())
                for name, value in named
            }
            if self._native.counts_steps:
                with tier(HOST):
                    state["step"] = torch.tensor(float(each.steps))
            for value in state.values():
                mark(value, HOST)
            self._optimizer.state[each.held] = state

    def _clear_state(self) -> None:
        self._optimizer.state.clear()

    @torch.no_grad()
    def _store(self, *, first: bool = False) -> None:
        """Write the device's weights and the optimizer's state to SSD."""
        # State that the optimizer does not have is left as the updaters have it, or set to zero if `first`.
        self._stale.clear()
        self._note_weight_versions()
        held = {each.held: self._optimizer.state.pop(each.held, {}) for each in self._parameters}
        for each in self._parameters:
            each.steps = int(held[each.held].get("step", each.steps))
        state = [[held[each.held].get(name) for name in each.moments] for each in self._parameters]
        for domain, number, group, memory in self._sub_groups():
            if not first:
                self._move(READ, domain, number, 0)
                self._settle(domain)
            for segment in group.segments:
                part = slice(segment.start, segment.start + segment.numel)
                device = self._parameters[segment.parameter].device
                # Straight into the updater's buffer, which it only writes to its file: no second copy of the
                # state in memory.
                memory[segment.weight :][: segment.numel].copy_(_flat(device, device)[part])
                for mine, values in zip(
                    _moments(group, segment, memory, state), state[segment.parameter], strict=True
                ):
                    if values is not None:
                        mine.copy_(_flat(local(values), device)[part])
                    elif first:
                        mine.zero_()
            self._write_back(domain, number)
        for domain in range(len(self._domains)):
            self._settle(domain)
        if self._last is not None:
            self._last.complete(steps=0)

    def _write_back(self, domain: int, number: int) -> None:
        """Write the first buffer to the sub-group."""
        self._move(WRITE_WEIGHTS, domain, number, 0)
        self._move(WRITE_MOMENTS, domain, number, 0)

    def check(self) -> dict[str, Any]:
        """Return SSD bytes by domain, shared host bytes, and each updater's actions in the last step, for the
        audit.

        Raises:
            ApplyError: Some state is not with its updater.
            EnvironmentFault: An updater has ended.
        """
        on_ssd = [[*each.weights, *each.moments, *each.spares] for each in self._domains]
        if any(self._optimizer.state.values()) or any(
            tier_of(each) != SSD for tensors in on_ssd for each in tensors
        ):
            raise ApplyError("Some of the optimizer's state is not with its updaters.", code="MT309")
        settled = [self._settle(domain) for domain in range(len(self._domains))]
        facts = {
            "parameters": len(self._parameters),
            "ssd_bytes": [sum(each.nbytes for each in tensors) for tensors in on_ssd],
        }
        links = [each.link for each in self._domains if each.link is not None]
        facts["shared_bytes"] = sum(each.nbytes for link in links for each in (*link.slots, *link.buffers))
        return facts | {
            "moved_bytes": [each["bytes"] for each in settled],
            "events": [each["events"] for each in settled],
        }


def _moments(group: SubGroup, segment: Segment, memory: Tensor, like: list[list[Any]]) -> list[Tensor]:
    first = group.numel + segment.moment
    return [memory[first + i * segment.numel :][: segment.numel] for i in range(len(like[segment.parameter]))]


def _view_as(memory: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    return memory[: count * dtype.itemsize].view(dtype)


def _flat(tensor: Tensor | None, parameter: Tensor) -> Tensor:
    """Return `tensor` as a row, in the memory order of `parameter`."""
    assert tensor is not None
    tensor = tensor.detach()
    # The updater's elements are in the parameter's memory order (channels-last weights).
    if tensor.stride() != parameter.stride():
        like = torch.empty_like(parameter, device=tensor.device, memory_format=torch.preserve_format)
        tensor = like.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _refuse(each: _Parameter, master: bool) -> None:
    """Require that the parameter can be divided: float32 (bfloat16 with masters), dense, no overlaps."""
    if each.device.dtype not in ((torch.float32, torch.bfloat16) if master else (torch.float32,)):
        fix = "update: master" if each.device.dtype is torch.bfloat16 else "offload: {states: {kind: none}}"
        raise refusals.error_of(refusals.float32_weights(fix), f"{each.name} is of {each.device.dtype}.")
    if (
        not each.device.is_contiguous()
        and each.device.stride() != torch.empty_like(each.device, device="meta").stride()
    ):
        raise refusals.error_of(refusals.not_contiguous(each.name))
