"""`apply`, which puts a config into effect on a live model axis by axis, and the handle `Tuned` it
returns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from memtune import refusals
from memtune.activations.recompute import ActivationTable
from memtune.audit import audit, audit_claims
from memtune.checkpointer import distributed, export, full_state_dict, load_full_state_dict
from memtune.compile import compile_regions
from memtune.config import (
    BUCKET_SLOTS,
    TunedConfig,
    check_blocks,
    check_environment,
    check_machine,
    check_made_for,
    fingerprint,
    load_config,
)
from memtune.deferred_init import agreed_state, construction_of, fill, fill_shards, require_untouched
from memtune.device import (
    accelerator,
    backend_of,
    explained,
    keep_freed_pages,
    platform_of,
    require_one_device,
    streams,
)
from memtune.errors import ApplyError
from memtune.hardware import use_share_of_cores
from memtune.offload.core import inner_optimizers, move_model, rest_off_device
from memtune.offload.gradients import clip_everywhere, unscale_everywhere, warn_uncleared
from memtune.offload.optimizer import host_capacity
from memtune.parallel.ranks import (
    gather_descriptions,
    has_real_peers,
    require_plain,
    require_same_config,
    share_first_failure,
    shutdown,
)
from memtune.parallel.sharding import rebind
from memtune.refusals import error_of, one_graph
from memtune.runtime import DEVICE, Context, ForwardSwitch, LossFunction, Snapshot, prepare_model
from memtune.search_spaces import is_null
from memtune.search_spaces._support import one_for_all_buckets, refusal
from memtune.technique import Facts, Technique
from memtune.workload import expand, find_blocks

_MARK = "_memtune_tuned"


class Tuned:
    """A model and its optimizer with a config in effect; unpacks to `model, optimizer`.

    Attributes:
        model: The module to call in training; the user's own module, or DDP's wrapper around it.
        optimizer: The user's own optimizer object.
        config: The applied config.
    """

    def __init__(self, context: Context, config: TunedConfig, loss: LossFunction | None) -> None:
        self._context, self._loss = context, loss
        self.model: nn.Module = context.loop.runner or context.model
        self.optimizer, self.config = context.optimizer, config

    def __iter__(self) -> Iterator[Any]:
        """Yield the model and the optimizer, for `model, optimizer = memtune.apply(...)`."""
        return iter((self.model, self.optimizer))

    def step(self, batches: Iterable[Any]) -> Tensor:
        """Run one optimizer step over this rank's micro-batches; return their mean loss, detached.

        Args:
            batches: Micro-batches of one size, on any device; each is moved to the model's device before its
                forward.

        Raises:
            ApplyError: No `loss` was given to `apply` and the model does not return one, or a tensor is on
                another device than the model's.
            RankFailed: Another rank ended in the middle of a collective.
            EnvironmentFault: The device was lost; end the process and resume from a checkpoint.
        """
        context, loss = self._context, self._loss or _loss_of_output
        with share_first_failure(), explained(context.device):
            return context.loop.step(self.model, self.optimizer, loss, batches, context.device)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Return the context for forward and backward of one micro-batch in the user's own loop; `step`
        enters it itself.

        Only the last micro-batch of a step reduces gradients over ranks and updates parameters inside
        backward. Without this context every update waits for `optimizer.step()`, so early updates save no
        memory.

        Args:
            last: Whether `optimizer.step()` comes next.

        Raises:
            ApplyError: The config rotates micro-batches over ranks or runs layer-major; both need `step`.
        """
        loop = self._context.loop
        if loop.rotation is not None:
            raise ApplyError(
                "the ranks of this config rotate micro-batches.",
                evidence="Only Tuned.step distributes them.",
                fix="tuned.step(batches)",
                code="MT311",
            )
        if loop.order is not None:
            raise refusals.outside_of_step()
        with loop.micro_batch(last):
            yield

    @property
    def resumed_steps(self) -> int:
        """Number of optimizer steps of the earlier run that this one resumes (`resume: last_step`); 0 for a
        fresh start.

        Weights, optimizer state, buffers and torch's random number generators are restored. The training
        script restores its schedulers and its position in the data.
        """
        return self._context.loop.resumed_steps

    def finish(self) -> None:
        """End the training: wait for running updates and remove the files kept for resuming. Do not train
        afterwards.

        A collective with `resume: last_step`: all ranks call it, and none removes its files before.
        """
        self._context.events.finished.emit()

    def audit(self) -> dict[str, Any]:
        """Return facts that prove the config is in effect, by axis.

        Raises:
            ApplyError: Something the config asks for is not in effect; the message names it.
        """
        return audit(self._context)

    def state_dict(self) -> dict[str, Any]:
        """Return `{"model": ..., "optimizer": ...}` with the plain model's keys and shapes, unsharded on
        every rank.
        """
        return full_state_dict(self._context)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned under any config, or `{"model": model.state_dict(), "optimizer":
        ...}` of a plain run.

        Raises:
            ApplyError: It belongs to another model or optimizer; the message has the differences. Nothing has
                been changed.
        """
        load_full_state_dict(self._context, state_dict)

    def save(self, folder: str | PathLike[str]) -> None:
        """Write a checkpoint that loads under any other config and without memtune. All ranks must call it.

        Each rank writes its own part, in the format of `torch.distributed.checkpoint` and with the keys of
        torch's `get_state_dict(model, optimizer)` of the plain model. Checksums are written with it.

        Raises:
            ApplyError: A part of the optimizer's state has no place in the plain model's (8-bit moments of a
                shard).
            EnvironmentFault: A rank could not write; the same on all ranks.
        """
        distributed.save(self._context, folder)

    def load(self, folder: str | PathLike[str]) -> None:
        """Read a checkpoint that was saved under any config or without memtune. All ranks must call it; each
        reads its own part.

        Loading runs no code. A checkpoint of `save` has checksums, each checked before its tensor is used.

        Raises:
            ApplyError: It belongs to another model or optimizer; the message has the differences. Nothing has
                been changed.
            UsageError: It asks for code to be run; nothing has been changed.
            EnvironmentFault: There is none, it is damaged, or a rank could not read it; the same on all
                ranks.
        """
        distributed.load(self._context, folder)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the live tensors that `save` writes, for other writers such as
        `torch.distributed.checkpoint.async_save`.
        """
        return distributed.sharded_state_dict(self._context)

    def export(self, file: str | PathLike[str]) -> None:
        """Write the full weights under their plain names in safetensors format. All ranks must call it; rank
        0 writes.

        Raises:
            EnvironmentFault: Rank 0 could not write; the same on all ranks.
        """
        export(self._context, file)


def apply(
    model: nn.Module,
    optimizer: Optimizer,
    config: TunedConfig | Mapping[str, Any] | str | Path,
    *,
    loss: LossFunction | None = None,
    strict: bool = True,
    device: torch.device | str | None = None,
) -> Tuned:
    """Change `model` and `optimizer` in place so that they train as `config` says.

    On any error both are restored to their state before the call.

    Args:
        model: The model on its device, or on CPU with `device`, before any wrapper; or
            `memtune.deferred(build)`, which is initialized now, shard by shard if its parameters are sharded.
        optimizer: Its optimizer; the same object is rebound, so schedulers built on it keep working. Of a
            wrapper such as Accelerate's, the optimizer in it.
        config: A TunedConfig, the path of one, or a mapping with `settings`.
        loss: `loss(model, micro_batch) -> scalar`, used by `Tuned.step`.
        strict: Refuse a config that was made for another model or number of ranks, has a plan that was made
            with another release of torch or for another device, or needs more host memory than there is.
        device: Device to train on; None: the model's. The model is moved there, without the weights that the
            config keeps off the device between uses: these never exist on it as a whole, nor do those of a
            deferred model.

    Raises:
        ConfigError: The config is malformed, or was made for another model or machine.
        ApplyError: The config cannot be put into effect here; the message names the reason and a fix.
        EnvironmentFault: Host memory or the offload directory is too small; the message has the numbers.
            Or there is no such device.
        UsageError: Torch has no such device type.
    """
    with share_first_failure():
        return _applied(
            model,
            _unwrapped(optimizer),
            config if isinstance(config, TunedConfig) else load_config(config),
            loss,
            strict,
            None if device is None else accelerator.require_device(device),
        )


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside wrappers that forward to an attribute `optimizer`, as Accelerate's does.

    Raises:
        ApplyError: It is no torch optimizer.
    """
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer):
            raise ApplyError(
                f"{type(optimizer).__name__} is not a torch optimizer: it has no step hooks.",
                evidence="Techniques offload and reduce gradients in these hooks.",
                fix="give memtune.apply the torch.optim.Optimizer, before any wrapper",
                code="MT376",
            )
        optimizer = inner
    return optimizer


def _applied(
    model: nn.Module,
    optimizer: Optimizer,
    config: TunedConfig,
    loss: LossFunction | None,
    strict: bool,
    device: torch.device | None,
) -> Tuned:
    moves = device is not None
    context = _checked_context(model, optimizer, config, strict, device)
    # After the checks, which change nothing, and before the first change.
    snapshot = Snapshot(model, optimizer)
    try:
        if has_real_peers(model):
            # First of all collectives: ranks with other configs would enter other ones and wait for ever.
            require_same_config(_agreement_text(config, model), context.device)
        if strict and not any(isinstance(each, FakeTensor) for each in model.parameters()):
            _require_host_memory(context, config)
        context.undo.callback(torch.set_num_threads, torch.get_num_threads())
        use_share_of_cores()
        _apply_axes(context, config, moves=moves)
        # Inside the try block: a config that is not in effect must leave the model as it was.
        audit(context)
        if platform_of(context.device).is_host:
            keep_freed_pages()  # up to a quarter of a step with recomputation is page faults otherwise
        tuned = Tuned(context, config, loss)
    except BaseException:  # an interrupt too leaves the model as it was
        # Copies to the host may still read what the next step of the user overwrites; a lost device has none.
        with suppress(RuntimeError):
            streams.synchronize(context.device)
        # In the reverse order: the snapshot was taken before any hook was registered.
        context.undo.close()
        snapshot.restore()
        raise
    context.undo.pop_all()  # success: drop the callbacks that would undo `apply`
    vars(model)[_MARK] = True
    return tuned


def _checked_context(
    model: nn.Module, optimizer: Optimizer, config: TunedConfig, strict: bool, device: torch.device | None
) -> Context:
    """Return the context of `apply`, after all checks that change nothing."""
    if hasattr(model, _MARK):
        raise ApplyError(
            "this model has been tuned already.",
            fix="call memtune.apply once, on the fresh model",
            code="MT304",
        )
    if not config.settings.chosen.keys().isdisjoint(("sharding.states", "sharding.parallel")):
        require_plain(model)
    require_untouched(model)
    if construction_of(model) is None:  # a deferred model has no device yet
        require_one_device(model, optimizer.state)
    device = device or _device_of(model)
    if device.type == accelerator.device_type():
        device = accelerator.with_index(device)
    _join_ranks(device)  # before anything below asks for the rank or the number of ranks
    blocks = (
        expand(config.made_for.blocks) if config.made_for and config.made_for.blocks else find_blocks(model)
    )
    check_blocks(config, model, blocks)
    prepare_model(model)
    context = Context(model, optimizer, blocks, device, ActivationTable(model, blocks))
    # Before the slots: DDP and FSDP2 must know which gradients the offload will average itself.
    context.placement.offload = config.settings.technique("offload.states").effects
    if strict:
        check_made_for(config, model, context.placement.world_size)
        check_machine(config, context.device.type, _hardware(config, context.device), str(torch.__version__))
    check_environment(config.settings, device=context.device.type)
    return context


def begins_with_shards(config: TunedConfig, ranks: int) -> bool:
    """Return True if `config` shards the parameters over some of `ranks` before it needs their values."""
    parallel = config.settings.technique("sharding.parallel")
    cut = ranks > 1 and parallel.divides_parameters(ranks, parallel.plan_in(config.plan))
    return cut or _states_divide_parameters(config, ranks)


def _states_divide_parameters(config: TunedConfig, ranks: int) -> bool:
    states, parallel = (config.settings.technique(f"sharding.{slot}") for slot in ("states", "parallel"))
    copies = ranks // parallel.ranks_of_a_copy(ranks)
    return copies > 1 and states.divides_parameters(copies, states.plan_in(config.plan))


def starts_off_device(config: TunedConfig, ranks: int) -> bool:
    """Return True if the weights that `config` keeps off the device need never be there as a whole: `apply`
    puts those of a deferred model, or of one on CPU, on their tier.
    """
    keeps = config.settings.technique("offload.states").effects.parameters_on != DEVICE
    sharded = config.settings.technique("sharding.states").effects.shards not in ("none", "replicas")
    return keeps and not sharded and not begins_with_shards(config, ranks)


def _hardware(config: TunedConfig, device: torch.device) -> str:
    """Return the name of the GPU; for a CPU, or if nothing is compared with it, the name in the config."""
    if config.made_for is None or platform_of(device).is_host:
        return config.made_for.hardware if config.made_for else ""
    from memtune.hardware import gpu_name

    return gpu_name()


def _require_host_memory(context: Context, config: TunedConfig) -> None:
    """Require host memory for the larger of the predicted peak and the least size of the optimizer state, on
    every host.

    Memory already on the host that is freed by `apply` is not counted. On CPU that includes the "device"
    copies.
    """
    placement = context.placement
    technique, states = (config.settings.technique(f"{axis}.states") for axis in ("offload", "sharding"))
    share, predicted = technique.effects.host_share, config.predicted.get("host_peak_bytes")
    moments = dict(technique.knobs()).get("moments", "float32")
    divided = 1 if states.effects.shards == "replicas" else context.placement.world_size
    least = host_capacity.least_state_bytes(context, share, moments) // divided if share else 0
    foreseen = predicted if isinstance(predicted, int) and config.made_for is not None else 0
    if foreseen:
        weights: Any = "all" if divided > 1 else "none" if technique.effects.moves == "none" else "blocks"
        foreseen -= host_capacity.replaced_bytes(
            context, state=not is_null(technique) or divided > 1, weights=weights
        )
    needed, what = max(
        (least, f"the optimizer's state under {technique.kind}"), (foreseen, "as predicted for this config")
    )
    made = host_capacity.made_bytes(
        context, placement.world_size if begins_with_shards(config, placement.world_size) else 1
    )
    counted = {"the weights of a deferred model": made, what: needed}
    total = sum(max(each, 0) for each in counted.values())
    if total > 0:
        what = ", ".join(text for text, each in counted.items() if each > 0)
        host_capacity.require(context, total, what, gather_descriptions)


def _agreement_text(config: TunedConfig, model: nn.Module) -> str:
    settings = [
        f"{name}: {json.dumps(value, sort_keys=True)}"
        for name, value in sorted(config.settings.dump().items())
    ]
    plans = [f"plan of {slot}: sha256:{plan.sha256[:16]}" for slot, plan in sorted(config.plan.items())]
    plans += [f"bucket {index}: sha256:{each.sha256[:16]}" for index, each in enumerate(config.buckets)]
    return "\n".join([*settings, *plans, f"model: {fingerprint(model)}", *agreed_state(model)])


def _require_fitting(context: Context, config: TunedConfig) -> None:
    """Refuse, whatever the program, combinations that the search refuses as well; an edited config may
    contain them.

    Raises:
        ApplyError: A technique does not work with the others, with torch.compile or without blocks.
    """
    execution = config.settings.execution
    if not execution.autocast_cache:
        context.undo.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)  # read by each autocast context when it is made
    facts = Facts(
        config.settings.chosen,
        context.placement.world_size,
        execution.compile,
        execution.compile_backend,
        len(context.blocks),
        platform_of(context.device),
        inner_optimizers(context.optimizer),
    )
    if (found := refusal(facts)) is not None:
        technique, reason = found
        raise ApplyError(
            f"{technique.slot}: {{kind: {technique.kind}}} cannot be used in this config: {reason.text}.",
            fix=reason.fix,
            code=reason.code,
        )


def _apply_axes(context: Context, config: TunedConfig, *, moves: bool) -> None:
    """Apply all techniques from the inside out: a later axis sees, and moves or shards, the result of earlier
    ones. With `moves` the model is moved to the device first.
    """
    _require_fitting(context, config)
    _put_in_place(context, config, moves=moves)
    _execution(context, config)
    # Before everything that works on blocks: it replaces layers and defines this rank's blocks.
    _apply_slot(context, config, "sharding.parallel")
    if not _states_divide_parameters(config, context.placement.world_size):
        fill(context.model, context.optimizer, rebind)
    _apply_slot(context, config, "split")
    if config.buckets:
        _apply_buckets(context, config)
    else:
        _apply_to_saved_tensors(context, config)
    _apply_slot(context, config, "sharding.states")
    # Checks of whole parameters wait for this: only now is known what is sharded.
    context.events.states_sharded.emit()
    _apply_slot(context, config, "sharding.communication")  # replaces the collectives of the units above
    # On top of sharding, so that each rank offloads its shard and not the whole.
    _apply_slot(context, config, "offload.states")
    _apply_slot(context, config, "execution.order")
    moves_gradients = not config.settings.chosen.keys().isdisjoint(("offload.states", "execution.order"))
    if moves_gradients or context.placement.optimizer_params:
        gradients = unscale_everywhere(context)
        warn_uncleared(context)
        if moves_gradients:  # torch's own function clips shards
            clip_everywhere(context, gradients)
    # Last: it counts from here on, and what was made before stays in torch's allocator.
    _apply_slot(context, config, "allocator")


def _put_in_place(context: Context, config: TunedConfig, *, moves: bool) -> None:
    """Move the model to its device, or materialize a deferred one, without the weights that stay off the
    device.

    A deferred model gets its values as late as its sharding allows: here if no axis shards parameters, after
    model parallelism if only that does, and shard by shard otherwise.
    """
    ranks = context.placement.world_size
    at_rest = rest_off_device(context) if starts_off_device(config, ranks) else {}
    construction = construction_of(context.model)
    if construction is not None:
        construction.device = context.device
        if not begins_with_shards(config, ranks):
            context.placement.at_rest.update(fill(context.model, context.optimizer, rebind, at_rest))
            move_model(context, at_rest)  # weights that the construction has read from files
        else:
            # After sharding, so that a deferred model never has a full parameter on a rank.
            context.events.parameters_sharded.subscribe(partial(_fill_shards, context))
    elif moves:
        move_model(context, at_rest)


def _fill_shards(context: Context, off_device: Collection[str]) -> None:
    context.placement.at_rest.update(fill_shards(context.model, off_device))


def _apply_to_saved_tensors(context: Context, config: TunedConfig) -> None:
    for slot in BUCKET_SLOTS:
        _apply_slot(context, config, slot)
    _require_eager_blocks(context)
    # After all claims, before states are sharded: FSDP2's hooks must run outside of a block's second forward.
    context.activations.install()


def _apply_buckets(context: Context, config: TunedConfig) -> None:
    """Apply each length bucket's techniques, then the config's own, and switch between their forwards."""
    technique, reason = one_for_all_buckets(config.settings.chosen, config.settings.execution.compile)
    if reason is not None:
        raise error_of(
            reason, f"{technique} is set, and the config has {len(config.buckets)} length buckets."
        )
    switch, parts = ForwardSwitch(context.model), []
    for bucket in config.buckets:
        part = replace(context, activations=ActivationTable(context.model, context.blocks), checks={})
        own = config.in_bucket(bucket)
        _require_fitting(part, own)
        _apply_to_saved_tensors(part, own)
        switch.take()
        parts.append(part)
    _apply_to_saved_tensors(context, config)
    switch.take()

    def bucket_of(shapes: Sequence[tuple[int, ...]]) -> int:
        held = (index for index, each in enumerate(config.buckets) if each.holds(shapes))
        return next(held, len(config.buckets))

    switch.install(bucket_of)
    context.checks["buckets"] = lambda: {
        "forwards": [switch.calls[index] for index in range(len(parts) + 1)],
        "claims": [audit_claims(part) for part in parts],
    }


def _execution(context: Context, config: TunedConfig) -> None:
    execution = config.settings.execution
    if execution.compile:
        context.loop.compiled = compile_regions(context, execution.compile, execution.compile_backend)


def _require_eager_blocks(context: Context) -> None:
    whole = context.loop.compiled is not None and context.loop.compiled.is_whole
    if whole and any(region.recompute or region.move for region in context.activations.regions):
        raise error_of(one_graph(), "Recompute or offload of blocks is set with execution: {compile: model}.")


def _apply_slot(context: Context, config: TunedConfig, slot: str) -> None:
    technique: Technique = config.settings.technique(slot)
    technique.apply(context, technique.plan_in(config.plan))


def _loss_of_output(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        out = model(**batch)
    elif isinstance(batch, tuple | list):
        out = model(*batch)
    else:
        out = model(batch)
    loss = getattr(out, "loss", out)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ApplyError(
            "Tuned.step does not know the loss.",
            fix="memtune.apply(model, optimizer, config, loss=loss_function)",
            code="MT311",
        )
    return loss


def _device_of(model: nn.Module) -> torch.device:
    construction = construction_of(model)
    return next(model.parameters()).device if construction is None else construction.device


def _join_ranks(device: torch.device) -> None:
    """Start the process group under torchrun unless the training script has done so, and make the model's
    device the current one: NCCL sends objects and barriers from there.
    """
    if not dist.is_available():
        return
    starts = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if starts or (dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"):
        accelerator.select(device)
    if starts:
        dist.init_process_group(backend_of(device.type))
    # Also for the user's own process group: gloo's threads are the same.
    if dist.is_initialized():
        shutdown.drain_at_exit()
