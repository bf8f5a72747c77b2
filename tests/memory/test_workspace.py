"""Kernel scratch: measured op by op, kept in a table, and enough to explain the native peak of real training
steps.
"""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memtune.errors import EnvironmentFault
from memtune.memory import cpu_allocator, workspace
from memtune.memory.dispatch_ledger import ModeLedger
from memtune.memory.workspace import Measured, SignatureCollector, WorkspaceTable, measure, op_of, signature
from memtune.runtime.memory_tiers import tier
from memtune.runtime.training_step import train_step
from memtune.workload.workload import Workload

pytestmark = pytest.mark.skipif(
    cpu_allocator.available() is not None, reason=f"no native ledger here: {cpu_allocator.available()}"
)

CPU = torch.device("cpu")
ZOO = Path(__file__).parents[1] / "zoo"
MODELS = [
    pytest.param(path, id=path.stem, marks=pytest.mark.skipif(missing, reason="needs the extra memtune[hf]"))
    for path in sorted(ZOO.glob("*.py"))
    for missing in [path.stem.startswith("hf_") and importlib.util.find_spec("transformers") is None]
]
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _own_cache(one_thread: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu_allocator.install()  # from the user's cache, before the cache moves
    monkeypatch.setenv("MEMTUNE_CACHE", str(tmp_path))
    gc.collect()


def key_of(func: Any, *args: Any, **kwargs: Any) -> str:
    return signature(func, args, kwargs)


CUMSUM = key_of(aten.cumsum.default, torch.ones(4, 32, dtype=torch.bool), 1)
"""Casts its input to int64 first: 4 × 32 × 8 bytes of scratch."""


# -- signatures ----------------------------------------------------------------------------------------------


def test_fake_and_real_arguments_have_one_signature() -> None:
    def key() -> str:
        x = torch.ones(3, 4)
        return key_of(
            aten.convolution.default, x, x.t(), None, [1, 1], (2, 2), dtype=torch.bfloat16, device=x.device
        )

    real = key()
    with FakeTensorMode():
        assert key() == real
    assert op_of(real) == "aten.convolution.default"


def test_what_changes_sizes_changes_the_signature_and_a_learning_rate_does_not() -> None:
    x = torch.ones(4, 4)
    one = key_of(aten.add.Tensor, x, x, alpha=0.1)
    assert one == key_of(aten.add.Tensor, x, x, alpha=0.01)
    others = [
        key_of(aten.add.Tensor, x, x, alpha=1.0),
        key_of(aten.add.Tensor, x, x, alpha=2),
        key_of(aten.add.Tensor, x, x, alpha=float("inf")),
        key_of(aten.add.Tensor, x, x.t(), alpha=0.1),
        key_of(aten.add.Tensor, x[:2], x, alpha=0.1),
        key_of(aten.add.Tensor, x.double(), x, alpha=0.1),
        key_of(aten.sub.Tensor, x, x, alpha=0.1),
    ]
    assert len({one, *others}) == 8


# -- measuring -----------------------------------------------------------------------------------------------


def test_scratch_is_what_the_kernel_takes_beyond_its_outputs() -> None:
    assert measure(CUMSUM) == Measured(4 * 32 * 8, (("int64", (4, 32), (32, 1)),))


def test_an_op_without_scratch_measures_none() -> None:
    x = torch.ones(10, 20)
    assert measure(key_of(aten.add.Tensor, x, x)) == Measured(0, (("float32", (10, 20), (20, 1)),))
    assert measure(key_of(aten.relu_.default, x)).workspace_bytes == 0


def peak_of(
    make: Callable[[], tuple[torch.nn.Module, torch.Tensor]], *, outer: AbstractContextManager[Any]
) -> list[tuple[str, int]]:
    """Live bytes after each op of a forward and backward pass."""
    with outer:
        model, x = make()
        ledger = ModeLedger(keep_timeline=True)
        ledger.watch(model)
        with ledger:
            out = model(x)
            (out[0] if isinstance(out, tuple) else out).float().sum().backward()
    ledger.close()
    return ledger.timeline


@pytest.mark.parametrize(
    ("op", "make"),
    [
        ("aten.mkldnn_rnn_layer.default", lambda: (torch.nn.LSTM(8, 8), torch.ones(3, 2, 8))),
        (
            "aten.native_layer_norm.default",
            lambda: (torch.nn.LayerNorm(8), torch.ones(64, 8, dtype=torch.bfloat16)),
        ),
    ],
)
def test_fake_runs_hold_what_real_ones_hold(op: str, make: Any) -> None:
    assert op in workspace.RealOutputs.OPS
    real = peak_of(make, outer=nullcontext())
    assert op in dict(real)
    assert peak_of(make, outer=FakeTensorMode()) != real
    with FakeTensorMode():
        assert peak_of(make, outer=workspace.RealOutputs(WorkspaceTable())) == real


def test_a_norms_gradient_lies_row_by_row_whatever_flows_in() -> None:
    def strides() -> tuple[int, ...]:
        x, norm = torch.ones(2, 5, 8, requires_grad=True), torch.nn.LayerNorm(8)
        flows_in = (
            torch.ones(2, 8)
            .unsqueeze(-1)
            .expand(2, 8, 5)
            .clone(memory_format=torch.contiguous_format)
            .transpose(1, 2)
        )
        return torch.autograd.grad(norm(x), x, flows_in)[0].stride()

    real = strides()
    with FakeTensorMode():
        assert strides() != real
        with workspace.RealOutputs(WorkspaceTable()):
            assert strides() == real


def test_a_normalisation_is_measured_on_one_row_however_many_there_are() -> None:
    table = WorkspaceTable()
    with FakeTensorMode(), workspace.RealOutputs(table):
        norm = torch.nn.LayerNorm(8)
        _, mean, _ = torch.native_layer_norm(
            torch.ones(1 << 40, 3, 8, dtype=torch.bfloat16), (8,), norm.weight, norm.bias, 1e-5
        )
    assert (mean.dtype, mean.shape) == (torch.float32, (1 << 40, 3, 1))
    assert [key for key in table.entries if "[1,1,8]" in key] == list(table.entries)


def test_measuring_leaves_the_random_state_alone() -> None:
    key = key_of(aten.native_dropout.default, torch.ones(100), 0.5, True)
    before = torch.get_rng_state()
    measure(key)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_op_that_draws_from_a_generator_of_its_callers_is_measured_with_one_of_its_own() -> None:
    def key(generator: torch.Generator | None) -> str:
        return key_of(aten.normal.Tensor_float, torch.zeros(1000), 0.1, generator=generator)

    mine = torch.Generator()
    before, table = mine.get_state(), WorkspaceTable()
    table.fill([key(mine), key(None)])
    assert not table.unknown
    assert table.workspace_bytes(key(mine)) == table.workspace_bytes(key(None)) == 4000
    assert torch.equal(mine.get_state(), before)


def test_indices_and_targets_are_made_valid() -> None:
    weight, index = torch.ones(5, 3), torch.tensor([[4, 1]])
    assert measure(key_of(aten.embedding.default, weight, index)).outputs == (
        ("float32", (1, 2, 3), (6, 3, 1)),
    )
    log = torch.zeros(2, 5)
    assert (
        measure(key_of(aten.nll_loss_forward.default, log, torch.tensor([1, 2]), None, 1, -100)).outputs
        == (("float32", (), ()),) * 2
    )


# -- the table -----------------------------------------------------------------------------------------------


def test_a_table_goes_through_json_unchanged() -> None:
    table = WorkspaceTable()
    table.fill(
        [CUMSUM, key_of(aten.add.Tensor, torch.ones(3), float("nan")), '["aten.no_such_op.default",[],{}]']
    )
    assert WorkspaceTable.from_json(table.to_json()) == table
    assert table.nonzero()[CUMSUM] == 1024
    assert list(table.unknown) == ['["aten.no_such_op.default",[],{}]']


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema_version": 99}', '{"schema_version":1,"made_for":{},"entries":{"a":[1]}}']
)
def test_a_broken_table_is_refused_by_name(text: str) -> None:
    with pytest.raises(EnvironmentFault, match="not a workspace table that can be read"):
        WorkspaceTable.from_json(text)


def test_the_cache_keeps_what_two_processes_measured_and_survives_damage() -> None:
    other = key_of(aten.add.Tensor, torch.ones(3), 1)
    first, second = WorkspaceTable(), WorkspaceTable()
    first.fill([CUMSUM])
    second.fill([other])
    path = first.save()
    assert second.save() == path
    assert set(WorkspaceTable.cached().entries) == {CUMSUM, other}
    path.write_text("{")
    assert WorkspaceTable.cached().entries == {}


def test_another_number_of_threads_is_another_table() -> None:
    table = WorkspaceTable()
    table.fill([CUMSUM])
    table.save()
    torch.set_num_threads(2)
    assert WorkspaceTable.cached().entries == {}


def test_a_child_measures_the_same() -> None:
    here, child = WorkspaceTable(), WorkspaceTable()
    keys = [CUMSUM, key_of(aten.addmm.default, torch.ones(8).bfloat16(), *[torch.ones(8, 8).bfloat16()] * 2)]
    here.fill(keys)
    child.fill_in_child(keys)
    assert child == here


def test_a_child_that_dies_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace.sys, "executable", "false")
    with pytest.raises(EnvironmentFault, match="measures kernel workspaces died"):
        WorkspaceTable().fill_in_child([CUMSUM])


# -- what it is for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODELS)
def test_mode_peak_with_workspaces_is_the_native_peak(path: Path) -> None:
    """Forward, backward and AdamW, in the steady state.

    Both ledgers watch the same step, as routing may change between steps.
    """
    base = cpu_allocator.live_bytes()
    workload = Workload.load(path)
    torch.manual_seed(0)
    model = workload.build_model().train()
    optimizer = workload.make_optimizer([p for p in model.parameters() if p.requires_grad])
    with tier("host"):
        batch = workload.make_batch(4)

    def step() -> None:
        train_step(model, optimizer, workload.loss, [batch], CPU)

    step()
    seen, table = SignatureCollector(), WorkspaceTable()
    with ModeLedger(workspace=seen):
        step()
        step()
    table.fill(seen.keys)
    ledger = ModeLedger(workspace=table)
    ledger.watch(model, optimizer)
    with ledger:
        step()
        ledger.reset_peak()
        cpu_allocator.reset_peak()
        step()
        native = cpu_allocator.peak_bytes() - base
    named = "\n".join(f"{n_bytes:>9} {key}" for key, n_bytes in table.nonzero().items())
    assert not table.unknown, table.unknown
    assert ledger.live_bytes() == cpu_allocator.live_bytes() - base
    # 64 bytes for the numbers that the dispatch mode itself wraps as tensors; within 0.5 % is what was asked
    # for
    assert abs(native - ledger.peak_bytes()) <= 64, (
        f"native {native}, mode {ledger.peak_bytes()} in {ledger.peak_op()}:\n{named}"
    )
    ledger.close()
