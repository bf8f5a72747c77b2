"""Native results against a slow and obvious checker on random steps, and what simulate makes of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.synthetic_steps import columns_of, drawn_storages, make_step

from memtune import _native, hardware
from memtune.autotune.predict.caching_allocator import AllocatorSettings, event_stream, replay
from memtune.autotune.predict.calibration import UNCALIBRATED_PEAK, Calibration
from memtune.autotune.predict.simulation import ACTIVATIONS, UNSPLIT, simulate
from memtune.hardware.roofline import matmul_dtype, op_costs
from memtune.memory.arena_settings import ArenaSettings
from memtune.program.step import FOREVER, Kind, Parameter, Phase, Program, RankClass, Resource, Step, Tier

GPU = replace(hardware.find("h100-80g"), link_slowdown=0.0)
CPU = replace(
    GPU,
    name="cpu",
    device="cpu",
    gpus_per_node=1,
    allocation_rounding_bytes=1,
    fp32_flops_per_s=1e11,
    memory_bytes_per_s=1e10,
    launch_s=1e-6,
)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    n, m = draw(st.integers(1, 12)), draw(st.integers(1, 10))

    def column(values: list[int]) -> list[int]:
        return draw(st.lists(st.sampled_from(values), min_size=n, max_size=n))

    return make_step(
        n,
        m,
        ops_phase=sorted(column([*map(int, Phase)])),
        ops_resource=column([*map(int, Resource), 0, 0, 0, 0, 1, 1, 2, 2]),  # few, so that ops meet
        **drawn_storages(draw, n, m, most_bytes=3000, tiers=[0, 0, 0, 1, 2], uses=20, saves=8),
    )


# The checker: no arrays, no sweeps; every question is answered by looking at everything.


def is_live(step: Step, storage: int, op: int) -> bool:
    last = max(
        [int(step.storages.producer[storage]), int(step.storages.held_until[storage])]
        + [
            int(o) - (use == 2)
            for o, s, use in zip(step.uses.op, step.uses.storage, step.uses.mode, strict=True)
            if s == storage
        ]
        + [int(u) for u, s in zip(step.saves.held_until, step.saves.storage, strict=True) if s == storage]
    )
    return int(step.storages.producer[storage]) <= op <= last


def slow_live(step: Step, tier: int, size: Any, rows: list[int]) -> list[int]:
    return [
        sum(
            size(int(step.storages.bytes[s]))
            for s in rows
            if step.storages.tier[s] == tier and is_live(step, s, op)
        )
        for op in range(step.ops.n)
    ]


@given(steps(), st.sampled_from([1, 512]), st.sampled_from([0, 512, 1024]))
@settings(max_examples=150, deadline=None)
def test_simulated_live_bytes_equal_checker(step: Step, unit: int, small: int) -> None:
    found = _native.live(columns_of(step, [0] * step.ops.n, [0] * step.ops.n), unit, small)

    def rounded(n_bytes: int) -> int:
        return -(-n_bytes // unit) * unit

    everything = list(range(step.storages.n))
    for tier in Tier:
        at = slow_live(step, tier, rounded if tier == Tier.DEVICE else int, everything)
        assert found.peak_bytes[tier] == max(at)
        assert found.peak_op[tier] == at.index(max(at))
        if unit == 1:
            assert found.peak_bytes[tier] == step.peak_bytes(tier)
    is_small = [rounded(int(b)) <= small for b in step.storages.bytes]
    for pool, wanted in enumerate((True, False)):
        rows = [s for s in everything if is_small[s] == wanted]
        assert found.pool_peak_bytes[pool] == max(slow_live(step, Tier.DEVICE, rounded, rows))
    kinds = [0] * 9
    for s in everything:
        if step.storages.tier[s] == Tier.DEVICE and is_live(step, s, found.peak_op[0]):
            saved = step.storages.kind[s] == Kind.TEMPORARY and s in step.saves.storage
            kinds[8 if saved else int(step.storages.kind[s])] += rounded(int(step.storages.bytes[s]))
    assert list(found.bytes_by_kind) == kinds


@given(steps(), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_coarse_and_events_agree_on_bytes_and_bound_time(step: Step, accumulate: int) -> None:
    step = step.with_ops(traffic_bytes=np.full(step.ops.n, 10**6))
    program = Program((RankClass(1, step),), micro_batch=2, accumulate=accumulate)
    for machine in (CPU, GPU):
        coarse, events = simulate(program, machine), simulate(program, machine, level="events")
        # Late transfers keep their sources, and what the body leaves to the optimizer is there for every
        # micro-batch.
        assert events.peak_allocated_bytes >= coarse.peak_allocated_bytes == sum(coarse.peak_by_kind.values())
        assert sum(events.peak_by_kind.values()) == events.peak_allocated_bytes
        assert min(each.peak_reserved_bytes - each.peak_allocated_bytes for each in (coarse, events)) >= 0
        # Resources that share the cores of a CPU are busy for longer while they overlap.
        shared = {"compute", "host_to_device", "device_to_host", "host_threads"} if machine is CPU else set()
        for name, seconds in coarse.busy_s.items():
            assert events.busy_s[name] == pytest.approx(seconds) or (
                name in shared and events.busy_s[name] > seconds
            )
        assert sum(coarse.busy_s.get(name, 0.0) for name in shared) <= events.step_s * (1 + 1e-9)
        assert max(events.busy_s.values(), default=0.0) <= events.step_s * (1 + 1e-9)
        assert events.step_s <= sum(coarse.busy_s.values()) * (1 + 1e-9)
        assert sum(events.critical_s.values()) == pytest.approx(events.step_s)
        assert coarse.step_s <= sum(coarse.busy_s.values()) * (1 + 1e-9)


def training(**changes: Any) -> Step:
    """Forward, backward, optimizer over a parameter (0), a saved activation (1) and a gradient (2)."""
    columns: dict[str, Any] = {
        "names": ("aten.mm.default", "aten.add.Tensor"),
        "modules": ("", "layer"),
        "ops_name": [0, 0, 1],
        "ops_module": [1, 1, 0],
        "ops_phase": [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER],
        "ops_flops": [1e9, 2e9, 0],
        "ops_traffic_bytes": [10**6, 10**6, 10**7],
        "storages_bytes": [100, 1000, 10],
        "storages_kind": [Kind.PARAMETER, Kind.TEMPORARY, Kind.GRADIENT],
        "storages_producer": [-1, 0, 1],
        "storages_held_until": [FOREVER, -1, -1],
        "uses_op": [0, 1, 2, 2],
        "uses_storage": [0, 0, 0, 2],
        "uses_mode": [0, 0, 1, 0],
        "saves_storage": [1],
        "saves_held_until": [1],
    }
    return make_step(3, 3, **(columns | changes))


def program_of(*ranks: tuple[int, Step], accumulate: int = 1) -> Program:
    return Program(
        tuple(RankClass(count, step) for count, step in ranks), micro_batch=4, accumulate=accumulate
    )


def test_peak_by_kind_adds_up_to_peak() -> None:
    found = simulate(program_of((1, training())), CPU)
    assert found.peak_allocated_bytes == found.peak_reserved_bytes == 1110
    assert found.peak_by_kind == {"parameters": 100, ACTIVATIONS: 1000, "gradients": 10}
    assert (found.peak_op, found.peak_module) == ("aten.mm.default", "layer")


def test_cuda_bytes_are_rounded_to_blocks_and_segments() -> None:
    found = simulate(program_of((1, training(storages_bytes=[100, 3 * 2**20, 10]))), GPU)
    assert found.peak_allocated_bytes == 512 + 3 * 2**20 + 512
    assert found.peak_reserved_bytes == 2 * 2**20 + 4 * 2**20


def test_prediction_takes_peak_of_largest_and_time_of_slowest_class() -> None:
    heavy, slow = training(storages_bytes=[100, 5000, 10]), training(ops_flops=[1e12, 2e9, 0])
    found = simulate(program_of((1, training()), (1, heavy), (2, slow)), CPU)
    assert found.peak_allocated_bytes == 5110
    assert found.step_s == simulate(program_of((4, slow)), CPU).step_s
    assert found.samples_per_s == pytest.approx(4 * 4 / found.step_s)


@pytest.mark.parametrize("level", ["coarse", "events"])
def test_simulation_repeats_micro_batches_but_not_optimizer(level: Any) -> None:
    one, four = (simulate(program_of((1, training()), accumulate=n), CPU, level=level) for n in (1, 4))
    optimizer_s = 10**7 / (1.8 * 1e10) + 1e-6
    assert four.step_s - optimizer_s == pytest.approx(4 * (one.step_s - optimizer_s))
    assert four.peak_allocated_bytes == one.peak_allocated_bytes


def test_exposed_ops_are_reported_by_name() -> None:
    step = training(ops_resource=[Resource.COMPUTE, Resource.COMPUTE, Resource.DEVICE_TO_HOST])
    found = simulate(program_of((1, step)), CPU, level="events")
    assert set(found.busy_s) == {"compute", "device_to_host", "host_issue"}
    assert found.exposed_s["device_to_host"] == pytest.approx(found.busy_s["device_to_host"])
    assert "host_issue" in simulate(program_of((1, step)), GPU).busy_s


@pytest.mark.parametrize("level", ["coarse", "events"])
def test_python_of_hooks_delays_ops_on_cpu(level: Any) -> None:
    copy = training(ops_resource=[Resource.COMPUTE, Resource.DEVICE_TO_HOST, Resource.COMPUTE])
    free = replace(CPU, hook_s=0.0)
    with_hook, without = (simulate(program_of((1, copy)), each, level=level).step_s for each in (CPU, free))
    assert with_hook == pytest.approx(without + CPU.hook_s)


def test_collective_overlaps_less_the_fewer_cores_a_rank_has() -> None:
    """On CPU a collective is work of a core: nothing overlaps if it is the rank's only one."""
    step = training(
        names=("aten.mm.default", "aten.add.Tensor", "c10d.all_reduce"),
        ops_name=[2, 0, 1],
        ops_phase=[Phase.FORWARD, Phase.FORWARD, Phase.OPTIMIZER],
        ops_resource=[Resource.INTRA_LINK, Resource.COMPUTE, Resource.COMPUTE],
        ops_group=[2, 0, 0],
        uses_op=[1, 2],
        uses_storage=[0, 0],
        uses_mode=[0, 1],
    )
    program = program_of((2, step))
    few, many = (
        simulate(program, replace(CPU, cores=cores, hook_s=0.0), level="events") for cores in (2, 64)
    )
    link_s = few.busy_s["intra_link"]
    assert few.step_s - many.step_s > 0.5 * min(link_s, few.busy_s["compute"])
    coarse = simulate(program, replace(CPU, cores=2, hook_s=0.0))
    assert coarse.step_s <= few.step_s * (1 + 1e-9)


def test_simulate_accepts_step_without_ops() -> None:
    empty = make_step(0, 1, storages_producer=[-1], storages_held_until=[FOREVER], storages_bytes=[7])
    found = simulate(program_of((1, empty)), CPU, level="events")
    assert (found.peak_allocated_bytes, found.step_s, found.samples_per_s, found.peak_op) == (0, 0.0, 0.0, "")


def test_simulate_names_malformed_column() -> None:
    with pytest.raises(ValueError, match=r"use.*storage"):
        simulate(program_of((1, training(uses_storage=[0, 0, 0, 9]))), CPU)


def test_prediction_to_dict_is_plain_and_marked_uncalibrated() -> None:
    found = simulate(program_of((1, training())), CPU)
    document = found.to_dict()
    assert document["calibrated"] is False
    assert (
        document["interval"]["peak_low_bytes"]
        < document["peak_allocated_bytes"]
        < document["interval"]["peak_high_bytes"]
    )
    assert document["interval"]["step_low_s"] < document["step_s"] < document["interval"]["step_high_s"]
    assert str(found).endswith(", uncalibrated")


def test_allocated_bytes_have_ends_of_blocks_that_torch_does_not_split() -> None:
    """A reused block of 21 MiB holds 20.5: its end is below the 1 MiB that torch splits off."""
    half = 2**19
    step = make_step(
        3,
        3,
        storages_bytes=[42 * half, 41 * half, 43 * half],
        storages_producer=[0, 1, 2],
        storages_held_until=[0, 2, 2],
    )
    program = program_of((1, step))
    split = AllocatorSettings(expandable_segments=True)
    plain, exact = (
        simulate(program, GPU, level="events", allocator=each) for each in (AllocatorSettings(), split)
    )
    assert exact.peak_allocated_bytes == 84 * half
    assert plain.peak_allocated_bytes == 85 * half == sum(plain.peak_by_kind.values())
    assert plain.peak_by_kind[UNSPLIT] == half
    assert UNSPLIT not in exact.peak_by_kind


def test_bytes_that_only_cudnn_knows_widen_the_range() -> None:
    """A convolution's 2 MiB of workspace, and half of a recurrent layer's reserve of 4."""
    mib = 2**20

    def predicted(name: str, kind: Kind) -> Any:
        step = make_step(1, 2, names=(name,), storages_bytes=[4 * mib, 2 * mib], storages_kind=[5, int(kind)])
        return simulate(program_of((1, step)), GPU)

    plain = predicted("aten.add.Tensor", Kind.TEMPORARY)
    low, high = UNCALIBRATED_PEAK
    assert plain.allocated_bytes == (6 * mib, math.floor(6 * mib * low), math.ceil(6 * mib * high))
    assert plain.device_bytes[0] == plain.peak_reserved_bytes + GPU.context_bytes
    for name, kind in (
        ("aten.convolution.default", Kind.WORKSPACE),
        ("aten._cudnn_rnn.default", Kind.TEMPORARY),
    ):
        found = predicted(name, kind)
        most = math.hypot(plain.allocated_bytes[2] - 6 * mib, 2 * mib)  # independent errors
        assert found.allocated_bytes[2] == pytest.approx(6 * mib + most, abs=2)
        assert found.outside_bytes - plain.outside_bytes == GPU.cudnn_bytes > 0


def test_calibration_corrects_the_step_and_narrows_the_interval() -> None:
    program, seen = program_of((1, training())), Calibration()
    plain = simulate(program, CPU)
    for step_ratio, peak_ratio in ((2.0, 1.01), (2.1, 1.02), (2.2, 1.02)):
        # Each prediction is corrected by the trials before it; what is kept must be relative to the model
        # itself.
        found = simulate(program, CPU, calibration=seen)
        seen = seen.add(found, round(plain.peak_allocated_bytes * peak_ratio), plain.step_s * step_ratio)
    assert seen.step_ratios == pytest.approx((2.0, 2.1, 2.2))
    found = simulate(program, CPU, calibration=seen)
    assert found.calibrated
    assert "uncalibrated" not in str(found)
    assert found.step_s == pytest.approx(2.1 * plain.step_s)
    assert found.interval.step_low_s < 2.0 * plain.step_s < 2.2 * plain.step_s < found.interval.step_high_s
    assert found.interval.step_high_s < 3 * plain.step_s
    assert plain.interval.peak_low_bytes < found.interval.peak_low_bytes <= found.peak_allocated_bytes
    assert found.interval.peak_high_bytes < plain.interval.peak_high_bytes


def test_calibration_of_oom_trial_adds_no_step_ratio() -> None:
    found = simulate(program_of((1, training())), CPU)
    assert Calibration().add(found, 1200, None) == Calibration((1200 / 1110,), ())


def test_collectives_cost_ring_steps_and_share_hosts() -> None:
    step = training(ops_resource=[0, Resource.INTRA_LINK, Resource.HOST_THREADS], ops_group=[0, 4, 0])
    link = replace(GPU, intra_link_bytes_per_s=1e9, intra_link_latency_s=1e-3, host_adam_bytes_per_s=1e9)
    seconds = op_costs(step, link, ranks=4).op_s
    assert seconds[1] == pytest.approx(3e-3 + 0.75 * 10**6 / 1e9)
    assert seconds[2] == pytest.approx(4 * 10**7 / 1e9 + link.launch_s)


def test_ring_over_nodes_has_rate_of_slowest_link() -> None:
    step = training(ops_resource=[0, Resource.INTRA_LINK, Resource.INTRA_LINK], ops_group=[0, 8, 16])
    slow = replace(
        GPU,
        intra_link_bytes_per_s=1e9,
        inter_link_bytes_per_s=1e6,
        intra_link_latency_s=0.0,
        inter_link_latency_s=0.0,
    )
    seconds = op_costs(step, slow, ranks=16).op_s
    assert seconds[1] == pytest.approx(7 / 8 * 10**6 / 1e9)
    assert seconds[2] == pytest.approx(15 / 16 * 10**7 / 8e6)  # eight network cards in each node


def test_cpu_ranks_share_cores() -> None:
    one, two = (op_costs(training(), replace(CPU, launch_s=0.0), ranks=n).op_s for n in (1, 2))
    assert two == pytest.approx(2 * one)


@pytest.mark.parametrize(
    ("itemsize", "cast_bytes", "dtype"),
    [(4, 0, "float32"), (2, 0, "bfloat16"), (4, 50, "bfloat16"), (4, 200, "float32")],
)
def test_matrix_products_use_rate_of_their_dtype(itemsize: int, cast_bytes: int, dtype: str) -> None:
    weight = Parameter("w", 0, -1, (100 // itemsize,), itemsize, True, -1)
    casts = (
        {"names": ("aten._to_copy.default", "aten.add.Tensor"), "storages_bytes": [100, cast_bytes, 10]}
        if cast_bytes
        else {}
    )
    assert matmul_dtype(training(parameters=(weight,), ops_name=[0, 1, 1], **casts)) == dtype


@pytest.mark.parametrize("casts", [1, 2])
@pytest.mark.parametrize("gathered", [False, True])
def test_products_of_cast_weights_use_16_bit_rate(casts: int, gathered: bool) -> None:
    """Under autocast, also where a second forward casts again (full recompute), and where weights are
    gathered first (FSDP).
    """
    weight, source = Parameter("w", 0, -1, (25,), 4, True, -1), int(gathered)
    step = make_step(
        casts,
        2 + casts,
        names=("aten._to_copy.default",),
        storages_bytes=[100, 100] + [50] * casts,
        storages_producer=[-1, -1, *range(casts)],
        storages_kind=[int(Kind.PARAMETER), int(Kind.COMMUNICATION)] + [int(Kind.TEMPORARY)] * casts,
        parameters=(weight,),
        uses_op=list(range(casts)),
        uses_storage=[source] * casts,
        uses_mode=[0] * casts,
    )
    assert matmul_dtype(step) == "bfloat16"


def test_reserved_bytes_follow_allocator_settings() -> None:
    sizes = np.random.default_rng(0).integers(2**20, 2**25, 30)
    step = make_step(
        30,
        30,
        storages_bytes=sizes,
        storages_producer=np.arange(30),
        storages_held_until=np.arange(30) + 4,
        ops_phase=np.full(30, int(Phase.FORWARD)),
    )
    program = program_of((1, step))
    plain, growing = AllocatorSettings(), AllocatorSettings(expandable_segments=True)
    found = {
        each: simulate(program, GPU, level="events", allocator=each).peak_reserved_bytes
        for each in (plain, growing)
    }
    assert found[plain] == replay(event_stream(step, 3), plain, None).peak_reserved_bytes
    assert found[growing] < found[plain]
    assert simulate(program, GPU, allocator=plain) == simulate(program, GPU)
    assert simulate(program, CPU, level="events", allocator=plain) == simulate(program, CPU, level="events")
    own = AllocatorSettings(arena=ArenaSettings(kind="gmlake"))
    reserved = replay(event_stream(step, 3), own, None).peak_reserved_bytes
    assert simulate(program, CPU, level="events", allocator=own).peak_reserved_bytes == reserved


def test_host_peak_on_gpu_is_that_of_program_order() -> None:
    """The host issues ops ahead of the device, but waits for each write before it reads the next piece into
    memory.
    """
    gpu, pieces = hardware.find("a100-40g"), 12
    reads, writes = [2 * i for i in range(pieces)], [2 * i + 1 for i in range(pieces)]
    step = make_step(
        2 * pieces,
        pieces,
        names=("memtune.from_ssd.default", "memtune.write_ssd_.default"),
        ops_name=[0, 1] * pieces,
        ops_phase=[Phase.OPTIMIZER] * 2 * pieces,
        ops_resource=[Resource.SSD_READ, Resource.SSD_WRITE] * pieces,
        ops_traffic_bytes=[2**30] * 2 * pieces,
        storages_bytes=[2**30] * pieces,
        storages_tier=[Tier.HOST] * pieces,
        storages_producer=reads,
        uses_op=writes,
        uses_storage=list(range(pieces)),
    )
    program = Program((RankClass(1, step),), micro_batch=1)
    found = [simulate(program, gpu, level=level).host_peak_bytes for level in ("coarse", "events")]  # type: ignore[arg-type]
    assert found == [2**30, 2**30]
