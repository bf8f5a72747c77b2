"""Any state on any tier: optimizer state on SSD, or on the host; parameters, gradients too (ZeRO-Infinity,
2021).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import nn

from memtune.effects import Effects
from memtune.errors import ApplyError
from memtune.offload.core import gathers_of, is_gathered
from memtune.offload.optimizer import HostOptimizer, Native, optimizer_on_host
from memtune.offload.parameters import stream_parameters
from memtune.offload.ssd_states import (
    Away,
    HostPieces,
    KeptParameters,
    SsdOptimizer,
    gradients_on_ssd,
    optimizer_in_host_pieces,
    optimizer_on_ssd,
)
from memtune.offload.tiles import (
    install,
    linear_layers,
    sharded_tiles,
    tile_rows,
    tile_weights,
    tileable,
    tileable_rows,
    weights_before_biases,
)
from memtune.program import Kind, Program, window
from memtune.runtime import Context
from memtune.search_spaces._support import conflict
from memtune.search_spaces.offload.states._common import (
    EAGER_ONLY,
    cannot_run_on_ranks,
    no_native_update,
    replicas,
    window_of,
)
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Facts, Plan, Reason, Target, Technique, no_directory
from memtune.workload import is_in_expert


class ZeroInfinityPlan(Plan):
    """The weights that come in tiles."""

    tiled: tuple[str, ...] | None = None
    """Names of the weights; none with `tiles: 1`."""


class ZeroInfinity(Technique):
    """Trades a read and a write of all optimizer state per step for its bytes on device and host.

    Master weights and moments lie on SSD, each parameter's in one piece. While one native pass updates a
    parameter, the pieces of the next ones are read and those of the last ones written, so host memory holds a
    few pieces whatever the model's size. 24 bytes per parameter cross the drive in a step with AdamW; drives
    wear, so what is written is shown. With `optimizer: host` they are in host memory and are updated there,
    in place.

    With `parameters: ssd` (or `host`) the blocks' weights come and go: while one block computes, the next
    comes up from the host and the one after that is read from SSD. Each is read for forward and for backward
    (the last ones of forward stay), and written once a step. Their gradients go down as they land and wait on
    the host, so clipping by norm is noticed and refused. With `gradients: ssd` they wait there: each is
    written once per micro-batch, and read once more in the step, and before every further micro-batch is
    added. On several ranks each has all of that on a host and drive of its own beside `ddp`, and its rows of
    it beside `fsdp`, which gathers a block's from them. With `tiles` a large layer's weight is never whole
    there. Optimizer, parameters and gradients are each on a tier of its own. Refused: gradients away from
    parameters on the device, and optimizer state on the device, since what comes and goes is updated on the
    host.

    Distinguishing test: 12 bytes per parameter are read and 12 written in a step, the read of the third
    parameter begins before the first is updated, and host memory holds no more pieces than are on their way;
    a block is read from SSD while the one two before it computes; of a weight in tiles, and of its gradient,
    two tiles at most are on the device. With the optimizer on the host no byte of it crosses the drive, and
    what does is each block's weight and gradient, where those are there.
    """

    kind: Literal["zero_infinity"] = "zero_infinity"
    slot: ClassVar[str] = "offload.states"
    plan_types: ClassVar[tuple[type[Plan], ...]] = (ZeroInfinityPlan,)
    title: ClassVar[str] = "Any state on any tier, updated on the host"
    source: ClassVar[str] = (
        "Rajbhandari et al. 2021, ZeRO-Infinity: Breaking the GPU Memory Wall, arXiv:2104.07857, section 5.2.2"  # noqa: E501
    )
    exactness: ClassVar[Exactness] = Exactness.REORDERED

    update: Literal["native", "master"] = "native"
    """`native` is for float32 parameters and has the bits of torch's fused AdamW; `master` keeps float32
    masters for bfloat16 parameters, on SSD as well.
    """
    optimizer: Literal["ssd", "host", "device"] = "ssd"
    """Where master weights and moments are."""
    ahead: Annotated[int, Field(ge=0, le=64)] = 3
    """Pieces that are read ahead; each takes the bytes of a parameter's state on the host. With `optimizer:
    host`: gradients, where those are on SSD.
    """
    resume: Literal["checkpoint", "last_step"] = "checkpoint"
    """After a crash training goes on from the user's own checkpoint, or from the last complete step: then
    each piece has two slots on SSD, which takes twice the space for the same bytes written, and every step
    ends with a flush of the drive.
    """

    parameters: Literal["device", "host", "ssd"] = "device"
    """Where the weights of blocks are while they are not used; those of no block stay on the device."""
    gradients: Literal["host", "ssd"] | None = None
    """Where gradients of blocks whose parameters come and go wait for the step; none given: on the host.
    Those of parameters that stay are on the device.
    """
    on_device: Annotated[int, Field(ge=1, le=64)] = 2
    """Blocks on the device at once where parameters come and go: with 2 the next one comes up while the
    current one computes.
    """
    read_ahead: Annotated[int, Field(ge=0, le=64)] = 1
    """Moments by which a block is read from SSD before it comes up; each takes the bytes of a block's weights
    on the host.
    """

    tiles: Annotated[int, Field(ge=1, le=64)] = 1
    """Parts in which the weights of large linear layers come, where parameters come and go: at most two of
    them, and of their gradients, are on the device at once (section 5.1.3), also beside `fsdp`, where a part
    is gathered from all ranks. 1 brings weights whole, with their block.
    """

    @property
    def effects(self) -> Effects:
        """Blocks are hooked, and their gradients averaged when they are ready, where their parameters come
        and go.
        """
        share, keeps_steps = 1.0 if self.optimizer == "host" else 0.0, self.resume == "last_step"
        if self.parameters == "device":
            return Effects(host_share=share, keeps_steps=keeps_steps)
        return Effects(
            averages="blocks",
            calls="block_hooks",
            moves="tile" if self.tiles > 1 else "block",
            eager_only=EAGER_ONLY,
            host_share=share,
            keeps_steps=keeps_steps,
        )

    def fits(self, program: Program, target: Target) -> Reason | None:
        """Needs a directory on a drive, and a type that the native update knows; parameters that come and go
        as `l2l` does.
        """
        if self._uses_ssd and (reason := no_directory(target)) is not None:
            return reason
        if (reason := self.refuses(Facts.of(program, target))) is not None:
            return reason
        step = program.step
        if (
            not any(each.gradient >= 0 for each in step.parameters)
            or not (step.storages.kind == Kind.OPTIMIZER).any()
        ):
            return Reason("the optimizer has no state to move")
        if (reason := no_native_update(step, self.update, target)) is not None or self.parameters == "device":
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
        """Which weights come in tiles."""
        if self.tiles == 1:
            return ZeroInfinityPlan()
        step = program.step
        return ZeroInfinityPlan(tiled=tuple(step.parameters[each].name for each in self._tileable(program)))

    @property
    def _uses_ssd(self) -> bool:
        return "ssd" in (self.optimizer, self.parameters, self.gradients)

    def refuses(self, facts: Facts) -> Reason | None:
        """Tiers that do not go together."""
        if self.optimizer == "device":
            if self.parameters == "device":
                return Reason(
                    "nothing is moved where weights, gradients and optimizer state are on the device",
                    "optimizer: ssd",
                )
            return Reason(
                "weights that come and go are updated on the host, not on the device",
                "optimizer: host or ssd",
            )
        if self.optimizer == "host" and self.effects.keeps_steps:
            return Reason(
                "the last step is kept on SSD, where the state must be",
                "optimizer: ssd, or resume: checkpoint",
            )
        if self.tiles > 1 and self.parameters == "device":
            return Reason("weights in tiles come and go", "parameters: host or ssd")
        if self.gradients is None or self.parameters != "device":
            return None
        return Reason(
            "gradients of parameters that stay on the device stay there until the step",
            "parameters: host or ssd",
        )

    def rewrite(self, program: Program, plan: ZeroInfinityPlan, target: Target) -> Program:
        """State and masters to SSD, or to the host; reads, updates and writes in place of the optimizer's
        ops.
        """
        step, away = program.step, None
        if self.parameters != "device":
            read_ahead = self.read_ahead if self.parameters == "ssd" else None
            residency = window_of(program, min(self.on_device, len(step.blocks)))
            tiled, is_divided = (
                self._tileable(program) if self.tiles > 1 else (),
                gathers_of(step) is not None,
            )
            step = weights_before_biases(step, tiled) if tiled and not is_divided else step
            step = stream_parameters(
                step, residency, early=False, read_ahead=read_ahead, ranks=replicas(program)
            )
            if self.gradients == "ssd":
                step, _ = gradients_on_ssd(step, Away.of(step))
            if tiled:
                step = (tile_rows if is_divided else tile_weights)(step, tiled, self.tiles, program.ranks)
            away = Away.of(step)
        if self.optimizer == "ssd":
            return program.with_step(
                optimizer_on_ssd(step, self.ahead, 2 if self.effects.keeps_steps else 1, away)
            )
        on_host = (
            optimizer_on_host(step, Native())
            if away is None
            else optimizer_in_host_pieces(step, self.ahead, away)
        )
        return program.with_step(on_host)

    def apply(self, context: Context, plan: ZeroInfinityPlan) -> None:
        """Rebind the optimizer to tensors on SSD or on the host, then have the blocks' parameters come and
        go.
        """
        tiled = self._tiled(context, plan)
        if self._uses_ssd:
            offload_dir.checked()
        if self.optimizer == "host" and self.parameters == "device":
            context.checks["offload.states"] = HostOptimizer(context, self.update).check
            return
        moved = self._moved(context)
        context.checks["offload.states"] = moved.check
        if self.parameters != "device":
            where = self.parameters, self.gradients or "host"
            blocks, gathered = len(context.blocks), is_gathered(context.model)
            residency = window(blocks, min(self.on_device, blocks), gathered=gathered)
            kept = KeptParameters(context, residency, moved, self.read_ahead, *where, tiled)
            install(
                context,
                tiled,
                self.tiles,
                kept,
                sharded_tiles(context, tiled) if tiled and gathered else None,
            )
            context.checks["offload.states"] = kept.check

    def _moved(self, context: Context) -> SsdOptimizer:
        is_master = self.update == "master"
        if self.optimizer == "host":
            return HostPieces(context, master=is_master, ahead=self.ahead)
        return SsdOptimizer(context, master=is_master, ahead=self.ahead, keep=self.effects.keeps_steps)

    def _tiled(self, context: Context, plan: ZeroInfinityPlan) -> dict[nn.Parameter, nn.Linear]:
        if self.tiles == 1:
            return {}
        names = plan.tiled
        if names is None:
            raise ApplyError(
                "zero_infinity with tiles needs a plan of which weights come in them.",
                fix="memtune search  writes it with the config; or tiles: 1",
                code="MT316",
            )
        experts = [name for name in names if is_in_expert(name)] if context.placement.world_size > 1 else []
        if experts:
            raise ApplyError(
                f"{experts[0]} cannot come in tiles: ranks may use other experts than others, and would wait"
                " for each other.",
                fix="tiles: 1, or a plan made for several ranks",
                code="MT364",
            )
        return linear_layers(context, names)

    def record(self, target: Target) -> dict[str, Any]:
        """Tier of the state, and how it is updated; `optimizer_cpu` where that is all."""
        how: dict[str, Any] = {"optimizer": self.optimizer, "trigger": "end_of_step", "update": self.update}
        how |= {"ahead": self.ahead} if "ssd" in (self.optimizer, self.gradients) else {}
        if self.parameters == "device":
            how |= {"moments": "float32"} if self.optimizer == "host" else {}
        else:
            ahead = {"read_ahead": self.read_ahead} if self.parameters == "ssd" else {}
            how |= {"parameters": self.parameters, "on_device": self.on_device, **ahead}
            how |= {"gradients": "ssd"} if self.gradients == "ssd" else {}
            how |= {"tiles": self.tiles} if self.tiles > 1 else {}
        return {"states.offload": {**how, **({"resume": self.resume} if self.effects.keeps_steps else {})}}

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """One way to update for each type of parameter; tiers of optimizer and parameters; tiles."""
        tiers = {"optimizer": ("ssd", "host"), "parameters": ("device", "host", "ssd")}
        return {"update": ("native", "master"), **tiers, "tiles": (1, 4)}

    def is_tried(self) -> bool:
        """Not what `optimizer_cpu` does, and tiles with the optimizer on SSD alone.

        The device's bytes are the same wherever the state is, and programs in tiles take long to make.
        """
        return self.optimizer != "host" or (self.parameters != "device" and self.tiles == 1)

    def exactly(self) -> Exactness:
        """Lossy with masters: it trains as bfloat16 with float32 masters does, not as the user's
        optimizer.
        """
        return Exactness.LOSSY if self.update == "master" else Exactness.REORDERED
