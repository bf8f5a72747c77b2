"""The FSDP2 pass against recordings of FSDP2 itself, op by op and byte by byte, on fake tensors and a fake
process group.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from support.sharding_programs import bytes_of, context_of, traffic_of_updates
from support.zoo_paths import ZOO
from torch.distributed.fsdp import MixedPrecisionPolicy

from memtune.activations.offload.activation_offload_pass import move_activations
from memtune.activations.offload.selection_plan import OffloadClaim
from memtune.activations.recompute.recompute_pass import recompute_blocks
from memtune.autotune.record.compiled import CompiledRecordings
from memtune.autotune.record.mixed_precision import PrecisionRecordings
from memtune.autotune.record.recorder import record
from memtune.autotune.record.recording_session import start_session
from memtune.autotune.record_parallel.fake_process_group import fake_ranks
from memtune.offload.optimizer.host_optimizer import HostOptimizer
from memtune.offload.optimizer.host_optimizer_pass import optimizer_on_host
from memtune.parallel.sharding import fsdp_sharding
from memtune.parallel.sharding.fsdp_pass import Sharding, shard_states
from memtune.program.edit import accumulate_gradients
from memtune.program.step import Kind, Recording, Step
from memtune.technique import ComputePrecision
from memtune.testing.drift_check import recording_of
from memtune.workload.workload import Workload

RANKS = 4
CPU = torch.device("cpu")
MATRIX = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.convolution.default")


@dataclass(frozen=True)
class Case:
    model: str
    degree: int = RANKS
    reshard: bool | int = True
    blocks_per_unit: int = 1
    micro_batches: int = 1
    recompute: str = "none"
    move: bool = False
    host: bool = False
    two_hop: bool = False
    prefetch: int | None = None
    reduce: torch.dtype | None = None
    param: torch.dtype | None = None
    keeps_root: bool = True

    def __str__(self) -> str:
        parts = [
            self.model,
            f"{self.degree} of {RANKS}",
            f"{self.blocks_per_unit} blocks",
            f"{self.micro_batches} micro-batches",
        ]
        flags = {
            "kept": not self.reshard,
            self.recompute: self.recompute != "none",
            "moved": self.move,
            "host": self.host,
        }
        flags |= {
            "two hops": self.two_hop,
            "root again": not self.keeps_root,
            str(self.reduce): self.reduce is not None,
            f"in {self.param}": self.param is not None,
        }
        flags |= {f"to {self.reshard}": self.reshard > 1, f"{self.prefetch} ahead": self.prefetch is not None}
        return " ".join(parts + [name for name, on in flags.items() if on])


CASES = (
    Case("gpt"),
    Case("gpt", reshard=False, blocks_per_unit=2, micro_batches=2),
    Case("gpt", recompute="selective", move=True, host=True, micro_batches=2, blocks_per_unit=2),
    Case("gpt", move=True),
    Case("gpt", degree=2),
    Case("gpt", degree=2, micro_batches=2, recompute="full"),
    Case("tied", recompute="full", host=True),
    Case("cnn_bn", recompute="selective"),
    Case("cnn_bn", recompute="full", micro_batches=2, host=True, reshard=False),
    Case("lora", blocks_per_unit=2, micro_batches=2),
    Case("lora", recompute="selective", move=True),
    Case("lstm", micro_batches=2),
    Case("autocast", recompute="selective", move=True, micro_batches=2),
    Case("inplace_views", recompute="full", blocks_per_unit=2),
    Case("hf_llama", recompute="full"),
    Case(
        "hf_llama", move=True
    ),  # every block saves the same rotary embedding, which is reloaded with the last of them
    Case("tobf16", micro_batches=2, host=True),
    Case("gpt", degree=2, two_hop=True),
    Case("gpt", degree=2, micro_batches=2, two_hop=True, recompute="selective", blocks_per_unit=2),
    Case("lora", degree=2, micro_batches=2, two_hop=True, move=True),
    Case("cnn_bn", degree=2, micro_batches=2, two_hop=True, reshard=False),
    Case("hf_llama", degree=2, micro_batches=2, two_hop=True, recompute="full", host=True),
    Case("gpt", reshard=2),
    Case("lora", reshard=2, micro_batches=2, recompute="selective", prefetch=0),
    Case("hf_llama", reshard=2, keeps_root=False, prefetch=1, recompute="full"),
    Case("gpt", prefetch=0),
    Case("gpt", prefetch=2, micro_batches=2, keeps_root=False, move=True),
    Case("cnn_bn", prefetch=3, blocks_per_unit=2, recompute="full"),
    Case("tied", keeps_root=False),
    Case("gpt", reduce=torch.bfloat16, degree=2, micro_batches=2),
    Case("tobf16", reduce=torch.float32, micro_batches=2, host=True),
    Case("lora", reduce=torch.bfloat16, reshard=False, prefetch=2),
    Case("gpt", param=torch.bfloat16),
    Case("lora", param=torch.bfloat16, micro_batches=2),
    Case("tobf16", param=torch.bfloat16, reduce=torch.float32, micro_batches=2),  # narrow shards stay narrow
    Case("gpt", param=torch.bfloat16, reduce=torch.float32, micro_batches=2, recompute="full"),
    Case("gpt", param=torch.bfloat16, degree=2, two_hop=True, micro_batches=2, blocks_per_unit=2),
    Case("hf_llama", param=torch.bfloat16, reduce=torch.float32, reshard=2, recompute="selective"),
    Case("twice"),
    Case("twice", reshard=False),
    Case("twice", reshard=2),
    Case("twice", keeps_root=False, blocks_per_unit=2, micro_batches=2),
    Case("twice", prefetch=1, recompute="full"),
    Case("twice", prefetch=0, move=True),
    Case("shared"),
    Case("shared", reshard=False, recompute="selective"),
    Case("shared", reshard=2),
    Case("teacher"),
    Case("rootless"),
    Case("rootless", prefetch=2),
    Case("reference before"),
    Case("reference before", param=torch.bfloat16),
    Case("reference before", blocks_per_unit=2, recompute="full"),
    Case("reference after"),
    Case("reference after", keeps_root=False, micro_batches=2),
    Case("reference after", reshard=False, host=True),
    Case("reference after", prefetch=0),
)
_LAYERS = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Linear(16, 16) if HAS_ROOT else nn.Identity() for _ in range(2))
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for index in ORDER:
            x = self.layers[index](x)
        return self.last(x)

def model(): return Model()
def batch(size): return torch.randn(size, 16)
def loss(model, x): return LOSS
def blocks(model): return list(model.layers)
"""
_REFERENCE = """
import copy

class Preference(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = Model()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, x):
        FORWARD
        return (policy - reference).pow(2).mean() + policy.mean()

def model(): return Preference()
def loss(model, x): return model(x)
def blocks(model): return [*model.policy.layers, *model.reference.layers]
"""
_RUNS = "policy = self.policy(x)", "with torch.no_grad(): reference = self.reference(x)"
TEXTS = {
    name: _LAYERS.replace("HAS_ROOT", str(has_root)).replace("ORDER", str(order)).replace("LOSS", loss)
    for name, has_root, order, loss in (
        ("twice", True, (0, 1, 2, 3), "model(x).pow(2).mean() + model(0.5 * x).mean()"),
        ("shared", True, (0, 1, 1, 2, 3, 0), "model(x).pow(2).mean()"),
        (
            "teacher",
            True,
            (0, 1, 2, 3),
            "(model(x) - torch.no_grad()(lambda: model(0.5 * x))()).pow(2).mean()",
        ),
        ("rootless", False, (0, 1, 2, 3), "model(x).pow(2).mean() + model(0.5 * x).mean()"),
    )
}
"""Models that run their layers several times: FSDP2 gathers once per call."""
_PLAIN = TEXTS["twice"].replace("+ model(0.5 * x).mean()", "")
TEXTS |= {
    f"reference {place}": _PLAIN + _REFERENCE.replace("FORWARD", "\n        ".join(order))
    for place, order in (("before", _RUNS[::-1]), ("after", _RUNS))
}
"""A frozen copy under no_grad: FSDP2 gathers its units in forward, and in backward the one it prefetches."""


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with fake_ranks(RANKS):
        yield


@cache
def narrow(model: str) -> Recording:
    recordings = PrecisionRecordings(CompiledRecordings(recorded(model)[0]))
    found = recordings(ComputePrecision("bfloat16"), None)
    assert isinstance(found, Recording), found
    return found


@cache
def recorded(model: str) -> tuple[Workload, Recording]:
    if model not in TEXTS:
        return Workload.load(ZOO[model]), recording_of(ZOO[model])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{model}.py")
        path.write_text(TEXTS[model])
        workload = Workload.load(path)
        return workload, record(workload)


def predicted(case: Case) -> Step:
    step = (narrow(case.model) if case.param else recorded(case.model)[1]).at(2)
    blocks = list(range(len(step.blocks)))
    if case.micro_batches > 1:
        step = accumulate_gradients(step)
    if case.recompute != "none":
        step = recompute_blocks(
            step, blocks, (lambda name: name in MATRIX) if case.recompute == "selective" else None
        )
    if case.move:
        step = move_activations(step, [OffloadClaim(block, 1.0) for block in blocks])
    copies = RANKS // case.degree
    step = shard_states(
        step,
        Sharding(
            case.degree,
            copies,
            case.reshard,
            case.blocks_per_unit,
            two_hop=case.two_hop,
            prefetch=case.prefetch,
            keeps_root=case.keeps_root,
            param_itemsize=case.param.itemsize if case.param else None,
            reduce_itemsize=case.reduce.itemsize if case.reduce else None,
        ),
    )
    if case.host:
        step = optimizer_on_host(step)
    step.validate()
    return step


def real(case: Case) -> Step:
    workload, recording = recorded(case.model)
    session = start_session(workload, recording.rung)
    if case.host:
        session.warm_up(2)
    context = context_of(session)
    table = context.activations
    with session.mode:
        for region in table.regions:
            if case.recompute != "none":
                table.claim_recompute(
                    region.index, (lambda op: str(op) in MATRIX) if case.recompute == "selective" else None
                )
            if case.move:
                table.claim_move(region.index, 1.0, 0)
        table.install()
        fsdp_sharding.shard(
            context,
            degree=case.degree,
            reshard_after_forward=case.reshard,
            blocks_per_unit=case.blocks_per_unit,
            two_hop=case.two_hop,
            keep_root=case.keeps_root,
            prefetch=case.prefetch,
            precision=MixedPrecisionPolicy(param_dtype=case.param, reduce_dtype=case.reduce),
        )
        if case.host:
            HostOptimizer(context)
    for _ in range(
        2
    ):  # in the second step DTensor still works out shapes it has not met, on tensors that are counted
        session.warm_up(2)
    return session.trace(2, micro_batches=case.micro_batches, trace_last=True)


def timeline(step: Step) -> list[tuple[str, int]]:
    live = step.live_bytes()
    return [(step.names[name], int(live[op])) for op, name in enumerate(step.ops.name)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fsdp_pass_equals_recording(case: Case) -> None:
    ours, theirs = predicted(case), real(case)
    first = next(
        (i for i, (a, b) in enumerate(zip(timeline(ours), timeline(theirs), strict=False)) if a != b), None
    )
    assert first is None, (first, timeline(ours)[first], timeline(theirs)[first])
    assert len(timeline(ours)) == len(timeline(theirs))
    assert ours.peak_bytes() == theirs.peak_bytes()
    assert collectives(ours) == collectives(theirs)
    np.testing.assert_allclose(
        *(traffic_of_updates(step, recorded(case.model)[1].at(2)) for step in (ours, theirs)), atol=64
    )


def collectives(step: Step) -> list[tuple[str, int, int]]:
    rows = [op for op in range(step.ops.n) if step.ops.group[op]]
    return [
        (step.names[step.ops.name[op]], int(step.ops.traffic_bytes[op]), int(step.ops.group[op]))
        for op in rows
    ]


def test_fsdp_pass_shards_state() -> None:
    whole = recorded("gpt")[1].at(2)
    step = shard_states(whole, Sharding(RANKS))

    assert bytes_of(step, Kind.PARAMETER) * RANKS == bytes_of(whole, Kind.PARAMETER)
    assert bytes_of(step, Kind.OPTIMIZER) * RANKS == bytes_of(whole, Kind.OPTIMIZER)
    assert bytes_of(step, Kind.GRADIENT) * RANKS == bytes_of(whole, Kind.GRADIENT)


def test_fsdp_pass_averages_replicas_over_inter_link() -> None:
    step = shard_states(recorded("tied")[1].at(2), Sharding(2, replicas=2, replicas_across_nodes=True))
    reduced = [
        op for op in range(step.ops.n) if step.names[step.ops.name[op]] == "memtune.all_reduce_.default"
    ]
    assert {int(step.ops.resource[op]) for op in reduced} == {4}  # Resource.INTER_LINK
    assert {int(step.ops.group[op]) for op in reduced} == {2}
    scattered = [op for op in range(step.ops.n) if "reduce_scatter" in step.names[step.ops.name[op]]]
    assert [int(step.ops.traffic_bytes[op]) for op in reduced] == [
        int(step.ops.traffic_bytes[op]) // 2 for op in scattered
    ]


TIED_TWICE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        first, second = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.blocks = nn.ModuleList([first, second, first])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def model(): return Model()
def batch(size): return torch.randn(size, 8)
def loss(model, x): return model(x).pow(2).mean() + model(0.5 * x).mean()
def blocks(model): return list(model.blocks[:2])
"""


def test_blocks_with_backward_out_of_order_are_gathered_in_time(tmp_path: Path) -> None:
    """The first block is also the third: its backward comes before that of the second one."""
    (tmp_path / "tied.py").write_text(TIED_TWICE)
    step = record(Workload.load(tmp_path / "tied.py")).step
    shard_states(step, Sharding(degree=2)).validate()
