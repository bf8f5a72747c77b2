"""Kernel workspace: measured op by op, stored in a table, and exact for the native peak of training steps."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_measurements
from torch._subclasses.fake_tensor import FakeTensorMode

from memtune.errors import EnvironmentFault
from memtune.memory import cpu_allocator, workspace
from memtune.memory.dispatch_ledger import ModeLedger
from memtune.memory.workspace import Measured, SignatureCollector, WorkspaceTable, measure, op_of, signature
from memtune.runtime.memory_tiers import tier
from memtune.runtime.training_step import train_step
from memtune.workload.workload import Workload

pytestmark = pytest.mark.native_ledger

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


def test_signature_is_equal_for_fake_and_real_arguments() -> None:
    def key() -> str:
        x = torch.ones(3, 4)
        return key_of(
            aten.convolution.default, x, x.t(), None, [1, 1], (2, 2), dtype=torch.bfloat16, device=x.device
        )

    real = key()
    with FakeTensorMode():
        assert key() == real
    assert op_of(real) == "aten.convolution.default"


def test_signature_ignores_values_that_do_not_affect_sizes() -> None:
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


def test_measure_returns_bytes_beyond_outputs() -> None:
    assert measure(CUMSUM) == Measured(4 * 32 * 8, (("int64", (4, 32), (32, 1)),))


def test_measure_of_op_without_workspace_is_zero() -> None:
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
        ledger.track(model)
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
def test_real_outputs_gives_fake_runs_real_live_bytes(op: str, make: Any) -> None:
    assert op in workspace.RealOutputs.OPS
    real = peak_of(make, outer=nullcontext())
    assert op in dict(real)
    assert peak_of(make, outer=FakeTensorMode()) != real
    with FakeTensorMode():
        assert peak_of(make, outer=workspace.RealOutputs(WorkspaceTable())) == real


def test_real_outputs_norm_gradient_is_contiguous() -> None:
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


def test_real_outputs_measures_norms_on_one_row() -> None:
    table = WorkspaceTable()
    with FakeTensorMode(), workspace.RealOutputs(table):
        norm = torch.nn.LayerNorm(8)
        _, mean, _ = torch.native_layer_norm(
            torch.ones(1 << 40, 3, 8, dtype=torch.bfloat16), (8,), norm.weight, norm.bias, 1e-5
        )
    assert (mean.dtype, mean.shape) == (torch.float32, (1 << 40, 3, 1))
    assert [key for key in table.entries if "[1,1,8]" in key] == list(table.entries)


def test_measure_preserves_random_state() -> None:
    key = key_of(aten.native_dropout.default, torch.ones(100), 0.5, True)
    before = torch.get_rng_state()
    measure(key)
    assert torch.equal(torch.get_rng_state(), before)


def test_measure_uses_a_new_generator() -> None:
    def key(generator: torch.Generator | None) -> str:
        return key_of(aten.normal.Tensor_float, torch.zeros(1000), 0.1, generator=generator)

    mine = torch.Generator()
    before, table = mine.get_state(), WorkspaceTable()
    table.fill([key(mine), key(None)])
    assert not table.unknown
    assert table.workspace_bytes(key(mine)) == table.workspace_bytes(key(None)) == 4000
    assert torch.equal(mine.get_state(), before)


def test_measure_creates_valid_indices_and_targets() -> None:
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


def test_table_survives_json() -> None:
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
def test_from_json_rejects_broken_table(text: str) -> None:
    with pytest.raises(EnvironmentFault, match="not a workspace table that can be read"):
        WorkspaceTable.from_json(text)


def test_save_merges_tables_and_survives_damage() -> None:
    other = key_of(aten.add.Tensor, torch.ones(3), 1)
    first, second = WorkspaceTable(), WorkspaceTable()
    first.fill([CUMSUM])
    second.fill([other])
    path = first.save()
    assert second.save() == path
    assert set(WorkspaceTable.cached().entries) == {CUMSUM, other}
    path.write_text("{")
    assert WorkspaceTable.cached().entries == {}


def test_cached_table_depends_on_threads() -> None:
    table = WorkspaceTable()
    table.fill([CUMSUM])
    table.save()
    torch.set_num_threads(2)
    assert WorkspaceTable.cached().entries == {}


@pytest.mark.usefixtures("started")
def test_fill_in_child_measures_the_same() -> None:
    here, child = WorkspaceTable(), WorkspaceTable()
    keys = [CUMSUM, key_of(aten.addmm.default, torch.ones(8).bfloat16(), *[torch.ones(8, 8).bfloat16()] * 2)]
    here.fill(keys)
    child.fill_in_child(keys)
    assert child == here


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are started, not forked from the server of the tests."""
    monkeypatch.setattr(workspace, "_start_child", forked_measurements.started)


@pytest.mark.usefixtures("started")
def test_child_loading_starts_the_child_of_fill_in_child_once_and_ends_it() -> None:
    table = WorkspaceTable()
    with table.child_loading():
        child = table._child
        table.fill_in_child([CUMSUM])
        assert child is not None
        assert child.returncode == 0
        assert table._child is None
    with table.child_loading():
        assert table._child is None  # it has entries: another one may not be needed
    with (empty := WorkspaceTable()).child_loading():
        unused = empty._child
    assert unused is not None
    assert unused.returncode is not None
    assert empty._child is None


@pytest.mark.usefixtures("started")
def test_fill_in_child_reports_dead_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace.sys, "executable", "false")
    with pytest.raises(EnvironmentFault, match="measures kernel workspaces died"):
        WorkspaceTable().fill_in_child([CUMSUM])


# -- what it is for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODELS)
def test_mode_ledger_with_workspaces_equals_native_peak(path: Path) -> None:
    """Forward, backward and AdamW, in the steady state.

    Both ledgers watch the same step, as routing may change between steps.
    """
    base = cpu_allocator.live_bytes()
    workload = Workload.load(path)
    torch.manual_seed(0)
    model = workload.build_model().train()
    optimizer = workload.make_optimizer(model)
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
    ledger.track(model, optimizer)
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
