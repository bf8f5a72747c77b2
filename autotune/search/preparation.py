"""Common start of a search and a plan: record the workload, detect the machine, build the space."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

import memtune
from memtune import hardware
from memtune.autotune.predict import Calibration, calibration_of, load_searches
from memtune.autotune.record import (
    CompiledRecordings,
    PrecisionRecordings,
    activation_bytes,
    affordable_draws,
    batch_is_lossless,
    coupled_samples,
    most_casts_of_a_parameter,
    parameter_bytes,
    record,
    repeated_blocks,
)
from memtune.autotune.record_parallel import ShardedRecordings
from memtune.autotune.search.bucket_recordings import BucketRecording, record_buckets
from memtune.autotune.space import (
    Choice,
    Goal,
    PlanOptions,
    Pruner,
    Rewriter,
    Scored,
    Scorer,
    Scores,
    Space,
    TargetOptions,
    batch_sizes,
    build_space,
    executions,
    score_all,
)
from memtune.autotune.translate import COMPOSED_ATTENTION, translate
from memtune.config import Bucket, MadeFor, load_config
from memtune.device import DEFAULT_ACCELERATOR, accelerator
from memtune.errors import EnvironmentFault, UsageError
from memtune.executors import Probing, probe
from memtune.garbage import rare_collections
from memtune.hardware import Device, Hardware, LoadMeter, threads_per_rank, usable_cores
from memtune.memory import WorkspaceTable, cpu_allocator, op_of
from memtune.offload.optimizer import available_bytes
from memtune.program import Recording
from memtune.search_spaces import null
from memtune.ssd import offload_dir
from memtune.technique import Reason, Target
from memtune.units import GIB, format_bytes
from memtune.workload import Workload, compress

_DEFAULT_SAMPLES = 8
"""Samples per rank and step if neither the workload nor the user specifies them."""
_MOST_SAMPLES = 2**20
_NOT_COMPARED = (
    "gradients of micro-batches were not compared on this machine, the model is too large: that they add up"
    " to the batch's is assumed, and trials compare losses"
)
_NOT_COMPARED_BY_PLAN = (
    "gradients of micro-batches were not compared, which takes longer than a plan: that they add up to the"
    " batch's is assumed until  memtune search  compares them"
)
_SCORED_PER_TRIAL = 50
"""Random candidates per trial that are scored, in addition to all pairs of kinds and the neighbours of the
best: a search of few trials shall not score for longer than they take.
"""


@dataclass(frozen=True)
class Setup:
    """One workload on one target, ready to be searched."""

    workload: Workload
    recording: Recording
    hardware: Hardware
    device: Device
    ranks: int
    global_batch: int
    budget_bytes: int | None
    goal: Goal
    scorer: Scorer
    space: Space
    made_for: MadeFor
    recorded: Recording
    """The recording before its translation to the device."""
    buckets: tuple[BucketRecording, ...] = ()
    """The length buckets below the recorded batch, smallest first."""
    workspace: WorkspaceTable | None = None
    """Table of CPU kernels' scratch; None if not measured."""
    only: Choice | None = None
    """The one choice in question, with its micro-batch; None for a whole space."""
    calibration: Calibration = field(default_factory=Calibration)
    """Corrections from trials of earlier searches on this machine."""
    other_load: float = 0.0
    """Share of this machine's cores that others used while the step was recorded."""
    batch_adds_up: bool = False
    """Set if micro-batches were checked to add up to the batch, even if the search does not split it."""
    bucket_plans: dict[Choice, tuple[Bucket, ...]] = field(default_factory=dict)
    """The choices' length buckets so far: every trial of a choice has the same."""

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the model's parameters on the device, each storage once."""
        return parameter_bytes(self.recording)

    @property
    def advice(self) -> frozenset[str]:
        """Return the notes of the recording that users can act on; the others say how sizes were recorded."""
        # The recording cannot show how much larger than its batch another one may be.
        varies = not self.workload.has_worst_batch
        return frozenset(
            each
            for each in self.recording.notes
            if each.startswith(COMPOSED_ATTENTION) or (varies and "worst_batch(size)" in each)
        )

    @cached_property
    def tokens_per_sample(self) -> int | None:
        """Tokens of a sample; None if a batch holds none."""
        return self.workload.tokens_per_sample()

    def score(self, seed: int, trials: int | None = None) -> Scores:
        """Score the space with the simulator: of a large one more, the more `trials` will choose from it."""
        most = None if trials is None else _SCORED_PER_TRIAL * trials
        return score_all(self.space, self.scorer, self.goal, seed=seed, most_sampled=most)


def prepare(
    options: TargetOptions,
    *,
    say: Callable[[str], None] = lambda text: None,
    for_trials: bool = True,
    begun: Probing | None = None,
) -> Setup:
    """Probe, load and record the workload, detect the machine, check the batch axis, build the space.

    Args:
        options: The user's options.
        say: Called with one line about each phase as it begins.
        for_trials: Whether the device must be present.
        begun: A probe of the workload that the caller already started.

    Raises:
        WorkloadError: `model.py` cannot be used.
        UsageError: The options contradict each other, the machine or the workload.
        EnvironmentFault: There are fewer GPUs than requested.
        NothingFits: The budget is below the weights.
    """
    with rare_collections():
        return _prepared(options, say, for_trials, begun)


def _prepared(
    options: TargetOptions, say: Callable[[str], None], for_trials: bool, begun: Probing | None
) -> Setup:
    say("looking at the file")
    _probe(options.workload, begun)
    device = _device(options, for_trials)
    machine = _on_nodes(
        hardware.find(options.gpu_type) if options.gpu_type else hardware.detect(device), options
    )
    budget = _budget(options, machine, device)
    workload = Workload.load(options.workload)
    global_batch = options.global_batch or workload.global_batch or _DEFAULT_SAMPLES * options.ranks
    shares = executions(global_batch, options.ranks)  # says at once if the ranks cannot share the batch
    say("recording one training step")
    only = _one_config(options, global_batch // options.ranks)
    used = {each.micro_batch for each in (shares if only is None else [only.execution]) if each.micro_batch}
    workspace = _workspaces(device, options.ranks)
    # The plain micro-batch, from which the others are cut, and 1, at which a step may have other ops than at
    # 2 and more.
    sizes = {max(used), *(used & {1})}
    # Rates measured while others used the cores would be too low; the search reports the load.
    meter = LoadMeter()
    how: dict[str, Any] = {"sizes": sizes, "between": used, "workspace": workspace, "target": device}
    make: Callable[[Workload], Recording] = partial(record, **how)
    with contextlib.nullcontext() if workspace is None else workspace.child_loading():
        workload, recorded = _recorded(workload, only, make)
    other_load = max(meter.others(), 0.0)
    scratch = _device_workspaces(recorded) if device != "cpu" and options.gpu_type is None else None

    def to_device(each: Recording) -> Recording:
        return translate(each, machine, workspace=scratch)

    recording = to_device(recorded)
    buckets = record_buckets(workload, recorded.rung, lambda each: to_device(make(each)), say)
    frozen, adds_up = None, False
    if options.goal != "batch" and only is None:
        recording, frozen, adds_up = _check_batch(
            workload, recorded, recording, options.ranks, say, for_trials=for_trials
        )
    compiled = CompiledRecordings(workload, to_device, **how)
    local = machine.local_ranks(options.ranks)
    sharded = ShardedRecordings(workload, recorded, local, to_device, **how)
    # The recordings below are made when a candidate first asks for one: most searches need none.
    kinds = _recorded_kinds(options, only, recorded, local)
    target = Target(
        machine,
        options.ranks,
        budget,
        sharded=sharded if kinds is None or kinds else None,
        recorded_kinds=kinds,
    )
    rewriter = Rewriter(recording, target, compiled=compiled, in_precision=PrecisionRecordings(compiled))
    scorer, calibration = _scorer(options, device, rewriter, for_trials)
    space = build_space(
        scorer.rewriter,
        global_batch,
        axes=options.axes,
        freeze=options.freeze,
        batch_frozen=frozen,
        allow_lossy=options.allow_lossy,
    )
    if options.goal == "batch":
        space = _with_all_batches(space, scorer, budget)
    return Setup(
        workload=workload,
        recording=recording,
        hardware=machine,
        device=device,
        ranks=options.ranks,
        global_batch=global_batch,
        budget_bytes=budget,
        goal=options.goal,
        scorer=scorer,
        space=space,
        made_for=_made_for(recording, machine, options.ranks, global_batch),
        recorded=recorded,
        buckets=buckets,
        workspace=workspace,
        only=only,
        calibration=calibration,
        other_load=other_load,
        batch_adds_up=adds_up,
    )


def _probe(workload: str, begun: Probing | None) -> None:
    """Run the workload's file in a process of its own, which a crash or hang of its code ends alone."""
    with ThreadPoolExecutor(1) as pool:
        # Fake tensors need it; it takes as long to load as the probe's process to look.
        pool.submit(importlib.import_module, "torch._dynamo")
        probe(workload) if begun is None else begun.report()


def _recorded(
    workload: Workload, only: Choice | None, make: Callable[[Workload], Recording]
) -> tuple[Workload, Recording]:
    """Return the recording, and the workload, without autocast's cache if that changes no result."""
    # With the cache off a weight is cast by each op that uses it; if one op does, the values are the same,
    # and the copies need not live until forward has ended.
    if only is not None:
        workload = replace(workload, autocast_cache=only.execution.autocast_cache)
        return workload, make(workload)
    without = replace(workload, autocast_cache=False)
    recorded = make(without)
    # Recorded without the cache, where each cast is an op: their number says which of three cases holds.
    casts = most_casts_of_a_parameter(recorded.step)
    if casts == 1:
        return without, recorded
    return workload, make(workload) if casts else replace(recorded, autocast_cache=True)


def _scorer(
    options: TargetOptions, device: Device, rewriter: Rewriter, for_trials: bool
) -> tuple[Scorer, Calibration]:
    """Return a scorer with what is known of this machine, and the corrections from its earlier searches."""
    # Of another machine than this one nothing is known.
    is_here = options.gpu_type is None
    searches = load_searches(device) if is_here else []
    calibration = calibration_of(searches)
    scorer = Scorer(
        rewriter,
        op_times=[row for each in searches for row in each.op_times],
        # A search calibrates by its own trials, as they come.
        calibration=None if for_trials else calibration,
        host_bytes=_host_memory_bytes(options, rewriter.target),
        ssd_bytes=offload_dir.free_bytes() if is_here else None,
    )
    return scorer, calibration


def _host_memory_bytes(options: TargetOptions, target: Target) -> int | None:
    """Return the host bytes of a node that all settings must fit into; None for no limit."""
    # A typical node is no reason to refuse a config that the user asks about.
    if options.host_memory_bytes is not None:
        return options.host_memory_bytes
    if options.gpu_type is None:
        return available_bytes()
    if isinstance(options, PlanOptions) and options.config is not None:
        return None
    typical = hardware.find(options.gpu_type)  # not as `--nodes` divides it
    ranks = min(target.hardware.local_ranks(target.ranks), typical.gpus_per_node)
    return typical.host_memory_bytes * ranks // typical.gpus_per_node


def _check_batch(
    workload: Workload,
    recorded: Recording,
    recording: Recording,
    ranks: int,
    say: Callable[[str], None],
    *,
    for_trials: bool,
) -> tuple[Recording, Reason | None, bool]:
    """Check that the gradients of micro-batches add up to those of the batch.

    Args:
        workload: The user's model and batch.
        recorded: Its recording on CPU.
        recording: Its recording for the device, which gets a note if gradients were not compared.
        ranks: Number of ranks; they share this machine's cores.
        say: Called with one line as the comparison begins.
        for_trials: Whether this is a search, which has time for larger models than a plan.

    Returns:
        `recording`; why the search may not split the batch, or None; whether gradients were compared and add
        up.
    """
    without = repeated_blocks(recorded)
    draws = affordable_draws(recorded, without, for_trials=for_trials)
    if not draws:
        # The recorded ops show batch norm, the usual coupling of samples, without a comparison.
        coupled = coupled_samples(recorded)
        if coupled is None:
            searched = not for_trials and affordable_draws(recorded, without) > 0
            note = _NOT_COMPARED_BY_PLAN if searched else _NOT_COMPARED
            recording = replace(recording, notes=(*recording.notes, note))
        return recording, coupled, False
    say("checking that micro-batches add up to the batch")
    frozen = batch_is_lossless(
        workload,
        parameter_bytes=parameter_bytes(recording),
        activation_bytes=activation_bytes(recorded, without),
        without=without,
        threads=_threads(ranks),
        draws=draws,
    )
    return recording, frozen, frozen is None


def _budget(options: TargetOptions, machine: Hardware, device: Device) -> int | None:
    """Return the bytes that a rank may use; None for no limit.

    Raises:
        UsageError: The limit exceeds the GPU's memory.
    """
    if device != "cpu" and (options.budget_bytes or 0) > machine.memory_bytes:
        most = machine.usable_bytes(options.ranks)
        raise UsageError(
            f"A limit of {format_bytes(options.budget_bytes or 0)} is over the"
            f" {format_bytes(machine.memory_bytes)} of {machine.name}.",
            evidence=f"{format_bytes(most)} of them can be allocated.",
            fix=f"--max-memory {most * 10 // GIB / 10:g}GiB, or leave it out",
            code="MT100",
        )
    budget = options.budget_bytes or (machine.usable_bytes(options.ranks) if device != "cpu" else None)
    return machine.memory_bytes // options.ranks if budget is None and options.goal == "batch" else budget


def _with_all_batches(space: Space, scorer: Scorer, budget: int | None) -> Space:
    """Return `space` with the unaccumulated micro-batches worth trying, up to the largest that may fit."""
    assert budget is not None  # goal batch always has one
    like = space.executions[0]
    sizes = [each.micro_batch for each in batch_sizes(_most_samples(scorer, space, budget))]
    return replace(
        space,
        executions=tuple(like.model_copy(update={"micro_batch": each, "accumulate": 1}) for each in sizes),
    )


def _recorded_kinds(
    options: TargetOptions, only: Choice | None, recorded: Recording, local: int
) -> frozenset[str] | None:
    """Return the techniques for which partitioned layers are recorded, empty for none, None for all."""
    # Each degree takes a recording, so the slot must be requested. Without request, ranks of several nodes of
    # `local` divide experts, whose exchange sends less between nodes than gathers of all experts.
    slot = "sharding.parallel"
    if only is not None:
        return None if only.technique(slot) != null(slot) else frozenset()
    if options.ranks > 1 and (slot in options.freeze or slot in options.axes):
        return None
    has_experts = any("expert" in parameter.name for parameter in recorded.step.parameters)
    searched = not options.axes and options.ranks > local and has_experts
    return frozenset({"expert_parallel"}) if searched else frozenset()


def _one_config(options: TargetOptions, per_rank: int) -> Choice | None:
    """Return the one choice that a plan is for, with its micro-batch; None for a whole space."""
    if not isinstance(options, PlanOptions) or options.config is None:
        return None
    settings = load_config(options.config).settings
    return Choice(settings.execution, settings.techniques).with_batch(per_rank, options.micro_batch)


def _workspaces(device: Device, ranks: int) -> WorkspaceTable | None:
    """Return the scratch of CPU kernels at the thread count of a trial's ranks, if it can be measured."""
    if device != "cpu" or cpu_allocator.available() is not None:
        return None
    return WorkspaceTable.cached(threads=_threads(ranks))


def _device_workspaces(recorded: Recording) -> WorkspaceTable | None:
    """Return the table of scratch of the local GPU's kernels, with missing convolutions measured.

    None without a GPU.
    """
    device = accelerator.device_type()
    if device is None:
        return None
    # Convolutions only: cuDNN selects its algorithm, and with it the workspace, by size; no table has those.
    table = WorkspaceTable.cached(device)
    keys = {
        key
        for hints in recorded.hints.values()
        for key in hints.signatures
        if key and "convolution" in op_of(key)
    }
    try:
        table.fill_in_child(sorted(keys), device)
    except EnvironmentFault:
        return None  # the notes then say that convolutions are counted without
    table.save()
    return table


def _threads(ranks: int) -> int:
    """Return the CPU threads per rank of a trial: the user's setting, else an equal share of cores."""
    wish = os.environ.get("OMP_NUM_THREADS", "")
    return int(wish) if wish.isdecimal() and int(wish) else threads_per_rank(usable_cores(), ranks)


def _device(options: TargetOptions, for_trials: bool) -> Device:
    """Return the requested device, or the one present; a prediction needs none."""
    there, visible = accelerator.device_type(), accelerator.count()
    if options.device == "cpu" or (
        options.device is None and options.gpu_type is None and not visible and not for_trials
    ):
        return "cpu"
    if not for_trials and options.gpu_type is not None:
        return hardware.find(options.gpu_type).device
    wanted = options.device or there or DEFAULT_ACCELERATOR
    if not visible or wanted != there:
        fix = (
            "add --device cpu"
            if for_trials
            else "name the GPU that is meant: --gpu-type h100-80g; or add --device cpu"
        )
        raise EnvironmentFault(
            "No GPU is visible.",
            evidence=f"torch {torch.__version__} sees no {wanted} device.",
            fix=fix,
            code="MT104",
        )
    if options.ranks > visible and options.single_node:
        raise EnvironmentFault(
            f"{options.ranks} GPUs asked, {visible} visible.",
            evidence=accelerator.visible_devices(wanted),
            fix=f"--gpus {visible}, or make more of them visible",
            code="MT104",
        )
    return wanted


def _on_nodes(machine: Hardware, options: TargetOptions) -> Hardware:
    """Return `machine` with the number of devices per node that `options` request."""
    nodes = options.nodes
    if nodes is None:
        return machine
    if machine.device == "cpu" or options.ranks % nodes:
        raise UsageError(
            f"{options.ranks} {'CPU workers' if machine.device == 'cpu' else 'GPUs'} cannot be spread over"
            f" {nodes} nodes.",
            evidence=(
                f"{options.ranks} / {nodes} = {options.ranks / nodes:.4g} per node"
                if machine.device != "cpu"
                else ""
            ),
            fix=(
                f"--gpus {nodes * max(1, options.ranks // nodes)}, or a number of nodes that divides"
                f" {options.ranks}"
                if machine.device != "cpu"
                else "leave --nodes out on CPU"
            ),
            code="MT124",
        )
    return replace(machine, gpus_per_node=options.ranks // nodes)


def _most_samples(scorer: Scorer, space: Space, budget_bytes: int) -> int:
    """Return an upper bound for micro-batches: twice the largest power of two that may fit."""
    pruner = Pruner(budget_bytes)
    options = [
        tuple({each.kind: each for each in reversed(techniques)}.values())
        for techniques in space.slots.values()
    ]
    size = 1
    while size < _MOST_SAMPLES:
        # Kinds with their first knobs: an upper bound needs one combination that fits.
        for techniques in itertools.product(*options):
            execution = space.executions[0].model_copy(update={"micro_batch": size, "accumulate": 1})
            scored = scorer.score(Choice.of(execution, {each.slot: each for each in techniques}))
            if isinstance(scored, Scored) and pruner.reason(scored.prediction) is None:
                break
        else:
            return size
        size *= 2
    return size


def _made_for(recording: Recording, machine: Hardware, ranks: int, global_batch: int) -> MadeFor:
    return MadeFor(
        model=recording.model.fingerprint,
        parameters=recording.model.parameters,
        blocks=compress(recording.step.blocks),
        ranks=ranks,
        device=machine.device,
        hardware=machine.name,
        global_batch=global_batch,
        torch=str(torch.__version__),
        memtune=memtune.__version__,
    )
