"""Any state on any tier: optimizer state on SSD or host; parameters and gradients too (ZeRO-Infinity)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import nn

from memtune import refusals
from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.offload.core import is_gathered
from memtune.offload.optimizer import (
    UPDATES,
    HostOptimizer,
    Native,
    no_native_update,
    no_state_to_offload,
    optimizer_on_host,
)
from memtune.offload.parameters import (
    BlockGradients,
    BlockUnits,
    OffloadedBlocks,
    ParameterOffloader,
    SsdGradients,
    SsdValues,
    on_ssd,
    replicas,
    stream_parameters,
    window_of,
)
from memtune.offload.ssd_states import (
    OffloadedParameters,
    SsdOptimizer,
    gradients_on_ssd,
    optimizer_in_host_pieces,
    optimizer_on_ssd,
)
from memtune.offload.tiles import (
    TileStore,
    install,
    linear_layers,
    sharded_tiles,
    tile_rows,
    tile_weights,
    tileable,
    tileable_rows,
    weights_before_biases,
)
from memtune.program import Program, gathers_of, is_in_expert, window_residency
from memtune.runtime import Context
from memtune.search_spaces._support import conflict
from memtune.search_spaces.offload.states._common.layer_rules import (
    EAGER_ONLY,
    NativelyUpdated,
    cannot_run_on_ranks,
    other_gathers,
)
from memtune.ssd import offload_dir
from memtune.technique import Facts, Plan, Reason, Target, no_directory


class ZeroInfinityPlan(Plan):
    """Names of the weights that are loaded in tiles."""

    tiled: tuple[str, ...] | None = None
    """Names of the weights; none with `tiles: 1`."""


class ZeroInfinity(NativelyUpdated):
    """Trades a read and a write of all optimizer state per step for its bytes on device and host.

    Master weights and moments lie on SSD, one piece per parameter. While one native pass updates a parameter,
    the pieces of the next ones are read and those of the last ones written, so host memory holds a few pieces
    for any size of model. With AdamW 24 bytes per parameter cross the drive in a step; drives wear, so the
    bytes written are reported. With `optimizer: host` they are in host memory and updated there, in place.

    With `parameters: ssd` (or `host`) the blocks' weights are offloaded: while one block computes, the next
    is loaded from the host and the one after that read from SSD. Each is read for forward and for backward
    (the last ones of forward are resident), and written once a step. Their gradients are offloaded when they
    are ready and kept on the host. With `gradients: ssd` they are written to SSD once per micro-batch, and
    read once more in the step and before every further micro-batch is added; clipping is refused then. On
    several ranks each has all of that on its own host and drive with `ddp`, or its rows of it with `fsdp`,
    which gathers a block from them. With `tiles` a large layer's weight is never completely on the device.
    Optimizer, parameters and gradients each have a tier of their own. Refused: offloaded gradients of
    resident parameters, and optimizer state on the device for offloaded parameters, since these are updated
    on the host.
    """

    kind: Literal["zero_infinity"] = "zero_infinity"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (ZeroInfinityPlan,)
    title: ClassVar[str] = "Any state on any tier, updated on the host"
    source: ClassVar[str] = (
        "Rajbhandari et al. 2021, ZeRO-Infinity: Breaking the GPU Memory Wall, arXiv:2104.07857, section 5.2.2"  # noqa: E501
    )
    paper: ClassVar[str] = "ZeRO-Infinity"

    optimizer: Literal["ssd", "host", "device"] = "ssd"
    """Tier of master weights and moments."""
    optimizer_prefetch: Annotated[int, Field(ge=0, le=64)] = 3
    """Pieces prefetched from SSD; each takes the bytes of a parameter's state on the host. With `optimizer:
    host`: gradients, if they are on SSD.
    """
    resume: Literal["checkpoint", "last_step"] = "checkpoint"
    """After a crash training resumes from the user's own checkpoint, or from the last complete step: then
    each piece has two slots on SSD, which takes twice the space for the same bytes written, and every step
    ends with a flush of the drive.
    """

    parameters: Literal["device", "host", "ssd"] = "device"
    """Tier of the blocks' weights while they are not used; parameters in no block are resident."""
    gradients: Literal["host", "ssd"] | None = None
    """Tier of the gradients of offloaded parameters until the step. Default: host. Gradients of resident
    parameters are on the device.
    """
    on_device: Annotated[int, Field(ge=1, le=64)] = 2
    """Blocks on the device at once if parameters are offloaded: with 2 the next one is loaded while the
    current one computes.
    """
    parameter_prefetch: Annotated[int, Field(ge=0, le=64)] = 1
    """Moments by which a block is read from SSD before its load; each takes the bytes of a block's weights on
    the host.
    """

    tiles: Annotated[int, Field(ge=1, le=64)] = 1
    """Parts in which the weights of large linear layers are loaded, if parameters are offloaded: at most two
    tiles, and two of their gradients, are on the device at once (section 5.1.3). With `fsdp` a tile is
    gathered from all ranks. 1 loads weights completely, with their block.
    """

    def sentence(self) -> str:
        """Return the setting as one clause."""
        places = {"ssd": "on SSD", "host": "in host memory"}
        tiers = (
            ("optimizer state", self.optimizer),
            ("weights", self.parameters),
            ("gradients", self.gradients),
        )
        parts = [f"{state} {places[tier]}" for state, tier in tiers if tier in places]
        kept = f"keeps {', '.join(parts)}, " if parts else ""
        tiled = f", loads large weights in {self.tiles} parts" if self.tiles > 1 else ""
        return f"{kept}updates on the host{tiled}{UPDATES[self.update]}"

    @property
    def effects(self) -> Effects:
        share, keeps_steps = 1.0 if self.optimizer == "host" else 0.0, self.resume == "last_step"
        if self.parameters == "device":
            return Effects(host_share=share, keeps_steps=keeps_steps)
        return Effects(
            averages="blocks",
            calls="block_hooks",
            moves="tile" if self.tiles > 1 else "block",
            parameters_on=self.parameters,
            eager_only=EAGER_ONLY,
            host_share=share,
            keeps_steps=keeps_steps,
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Require a drive, and a type of the native update; for offloaded parameters the rules of `l2l`."""
        if self._uses_ssd and (reason := no_directory(target)) is not None:
            return reason
        step = program.step
        reason = self.refuses(Facts.of(program, target)) or no_state_to_offload(step)
        reason = reason or no_native_update(step, self.update, target)
        if reason is not None or self.parameters == "device":
            return reason
        return cannot_run_on_ranks(self, program, target, natively=False) or self._no_tiles(program, target)

    def _no_tiles(self, program: Program, target: Target) -> Reason | None:
        if self.tiles > 1 and (reason := conflict(self, target, "recompute")) is not None:
            return reason
        if self.tiles == 1 or self._tileable(program):
            return None
        evenly = "" if gathers_of(program.step) is None else ", and a multiple of the ranks,"
        return Reason(
            f"no weight of a block is that of a plain linear layer with so many{evenly} outputs", "tiles: 1"
        )

    def _tileable(self, program: Program) -> tuple[int, ...]:
        step, ranks = program.step, program.ranks
        found = (
            tileable(step, self.tiles) if gathers_of(step) is None else tileable_rows(step, self.tiles, ranks)
        )
        return found if ranks == 1 else tuple(p for p in found if not is_in_expert(step.parameters[p].name))

    def plan(self, program: Program, target: Target) -> ZeroInfinityPlan:
        if self.tiles == 1:
            return ZeroInfinityPlan()
        step = program.step
        return ZeroInfinityPlan(tiled=tuple(step.parameters[each].name for each in self._tileable(program)))

    @property
    def _uses_ssd(self) -> bool:
        return "ssd" in (self.optimizer, self.parameters, self.gradients)

    def refuses(self, facts: Facts) -> Reason | None:
        if self.optimizer == "device":
            if self.parameters == "device":
                return Reason(
                    "nothing is offloaded if weights, gradients and optimizer state are on the device",
                    "optimizer: ssd",
                )
            return Reason(
                "offloaded weights are updated on the host, not on the device", "optimizer: host or ssd"
            )
        if self.optimizer == "host" and self.effects.keeps_steps:
            return Reason(
                "the last step is kept on SSD, so the state must be there",
                "optimizer: ssd, or resume: checkpoint",
            )
        if self.tiles > 1 and self.parameters == "device":
            return Reason("weights in tiles are offloaded", "parameters: host or ssd")
        if self.parameters != "device":
            return other_gathers(facts)
        if self.gradients is None:
            return None
        return Reason(
            "gradients of resident parameters are on the device until the step", "parameters: host or ssd"
        )

    def rewrite(self, program: Program, plan: ZeroInfinityPlan, target: Target) -> Program:
        """Move state and masters to SSD or host; replace optimizer ops by reads, updates and writes."""
        step, offloaded = program.step, None
        if self.parameters != "device":
            read_ahead = self.parameter_prefetch if self.parameters == "ssd" else None
            residency = window_of(program, min(self.on_device, len(step.blocks)))
            tiled = self._tileable(program) if self.tiles > 1 else ()
            is_divided = gathers_of(step) is not None
            step = weights_before_biases(step, tiled) if tiled and not is_divided else step
            step = stream_parameters(
                step,
                residency,
                early=False,
                read_ahead=read_ahead,
                ranks=replicas(program),
                alone=tiled,  # tile by tile
            )
            if self.gradients == "ssd":
                step, _ = gradients_on_ssd(step, OffloadedParameters.from_step(step))
            if tiled:
                step = (tile_rows if is_divided else tile_weights)(step, tiled, self.tiles, program.ranks)
            offloaded = OffloadedParameters.from_step(step)
        if self.optimizer == "ssd":
            return program.with_step(
                optimizer_on_ssd(
                    step, self.optimizer_prefetch, 2 if self.effects.keeps_steps else 1, offloaded
                )
            )
        on_host = (
            optimizer_on_host(step, Native())
            if offloaded is None
            else optimizer_in_host_pieces(step, self.optimizer_prefetch, offloaded)
        )
        return program.with_step(on_host)

    def apply(self, context: Context, plan: ZeroInfinityPlan) -> None:
        """Rebind the optimizer to tensors on SSD or host, then offload the blocks' parameters."""
        tiled = self._tiled(context, plan)
        if self._uses_ssd:
            offload_dir.checked()
        if self.optimizer == "host" and self.parameters == "device":
            context.checks["offload.states"] = HostOptimizer(context, self.update).check
            return
        moved = self._move_optimizer(context)
        context.checks["offload.states"] = moved.check
        if self.parameters != "device":
            context.checks["offload.states"] = self._offload_parameters(context, moved, tiled)

    def _offload_parameters(
        self, context: Context, optimizer: SsdOptimizer, tiled: dict[nn.Parameter, nn.Linear]
    ) -> Callable[[], dict[str, Any]]:
        """Offload the blocks' parameters; return the check."""
        is_on_ssd = self.parameters == "ssd"
        n_blocks, gathered = len(context.blocks), is_gathered(context.model)
        residency = window_residency(n_blocks, min(self.on_device, n_blocks), gathered=gathered)
        blocks = OffloadedBlocks(context, None, host_of=on_ssd(context) if is_on_ssd else None)
        values = SsdValues(residency, self.parameter_prefetch) if is_on_ssd else None
        units = BlockUnits(context, blocks, values=values, tiled=tiled)
        sums = SsdGradients(context, blocks.trained) if self.gradients == "ssd" else None
        gradients = BlockGradients(context, blocks, sums=sums, tiled=tiled)
        # Records are updated in `step`, in the order of their reads.
        store = ParameterOffloader(context, residency, blocks, units, gradients, None, optimizer.check)
        optimizer.write_weights_to(blocks.hosts)
        host_of = blocks.hosts.__getitem__ if values is None else lambda p: values.tiled(blocks.hosts[p])
        tiles = sharded_tiles(context, tiled) if tiled and gathered else None
        install(
            context,
            tiled,
            self.tiles,
            TileStore(context.device, host_of, gradients.offloaded.add_rows),
            tiles,
        )
        return partial(_check, store, self.parameters, values, sums)

    def _move_optimizer(self, context: Context) -> SsdOptimizer:
        is_master = self.update == "master"
        return SsdOptimizer(
            context,
            master=is_master,
            read_ahead=self.optimizer_prefetch,
            keep=self.effects.keeps_steps,
            on_host=self.optimizer == "host",
        )

    def _tiled(self, context: Context, plan: ZeroInfinityPlan) -> dict[nn.Parameter, nn.Linear]:
        if self.tiles == 1:
            return {}
        names = plan.tiled
        if names is None:
            raise refusals.plan_of_other_model(
                "offload.states: {kind: zero_infinity}", "It must name the weights in tiles.", "tiles: 1"
            )
        experts = [name for name in names if is_in_expert(name)] if context.placement.world_size > 1 else []
        if experts:
            raise ApplyError(
                f"{experts[0]} cannot be loaded in tiles: ranks that use different experts would wait for"
                " each other.",
                fix="tiles: 1, or a plan made for several ranks",
                code="MT364",
            )
        return linear_layers(context, names)

    def record(self, target: Target) -> dict[str, Any]:
        # Equal to `optimizer_cpu` if only the optimizer is on the host, so that a search tries one of them.
        knobs: dict[str, Any] = {"optimizer": self.optimizer, "trigger": "end_of_step", "update": self.update}
        knobs |= (
            {"optimizer_prefetch": self.optimizer_prefetch}
            if "ssd" in (self.optimizer, self.gradients)
            else {}
        )
        if self.parameters == "device":
            knobs |= {"moments": "float32"} if self.optimizer == "host" else {}
        else:
            prefetch = {"parameter_prefetch": self.parameter_prefetch} if self.parameters == "ssd" else {}
            knobs |= {"parameters": self.parameters, "on_device": self.on_device, **prefetch}
            knobs |= {"gradients": "ssd"} if self.gradients == "ssd" else {}
            knobs |= {"tiles": self.tiles} if self.tiles > 1 else {}
        return {"states.offload": {**knobs, **({"resume": self.resume} if self.effects.keeps_steps else {})}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        tiers = {"optimizer": ("ssd", "host"), "parameters": ("device", "host", "ssd")}
        return {"update": ("native", "master"), **tiers, "tiles": (1, 4)}

    def is_tried(self) -> bool:
        # With the optimizer on the host and weights on the device it does the work of `optimizer_cpu`. Tiles
        # are tried with the optimizer on SSD only: the device's bytes are the same for any tier of the state,
        # and programs with tiles take long to make.
        return self.optimizer != "host" or (self.parameters != "device" and self.tiles == 1)


def _check(
    store: ParameterOffloader, tier: str, values: SsdValues | None, sums: SsdGradients | None
) -> dict[str, Any]:
    facts = {"parameters_on": tier, "parameter_bytes_read": 0 if values is None else values.read_bytes}
    written = {} if sums is None else {"gradient_bytes_written": sums.written_bytes}
    return store.check() | facts | written
