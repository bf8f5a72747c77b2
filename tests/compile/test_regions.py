"""torch.compile as a setting: the audit proves that graphs run, and failures have messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.zoo_paths import ZOO
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from memtune import hardware
from memtune.api import Tuned, apply
from memtune.compile import regions
from memtune.errors import ApplyError
from memtune.search_spaces import all_techniques
from memtune.technique import Target, Technique
from memtune.testing.drift_check import plain_program
from memtune.testing.training import build, one_step

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Reset Dynamo: its graphs belong to code objects, which all tests share."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def execution(scope: str | bool, backend: str = "aot_eager", **axes: Any) -> dict[str, Any]:
    return {"settings": {"execution": {"compile": scope, "compile_backend": backend}, **axes}}


def steps(
    name: str, config: dict[str, Any] | None
) -> tuple[list[tuple[Tensor, dict[str, Tensor]]], Tuned | None]:
    workload, model, optimizer = build(ZOO[name])
    tuned = apply(model, optimizer, config, strict=False) if config else None
    return [
        one_step(workload, model, optimizer, tuned, seed=3 + step, micro_batches=2) for step in range(2)
    ], tuned


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "scope", "graphs"),
    [
        ("gpt", "blocks", 1),
        ("tied", True, 1),
        ("cnn_bn", "blocks", 3),
        ("lora", "blocks", 2),
        ("moe", "blocks", 2),
    ],
)
def test_compiled_training_is_bitwise_equal(name: str, scope: str | bool, graphs: int) -> None:
    """Graphs run op by op equal eager mode, with dropout and BatchNorm; equal blocks share one graph."""
    got, tuned = steps(name, execution(scope))
    wanted, _ = steps(name, None)
    for (loss, gradients), (plain_loss, plain_gradients) in zip(got, wanted, strict=True):
        assert torch.equal(loss, plain_loss)
        assert gradients.keys() == plain_gradients.keys()
        assert all(torch.equal(gradients[each], plain_gradients[each]) for each in gradients)
    assert tuned is not None
    facts = tuned.audit()["execution"]
    assert facts["graphs"] == graphs
    assert facts["calls"] == 4 * facts["compiled_regions"] <= facts["graph_runs"]


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_audit_reports_eager_calls() -> None:
    workload, model, optimizer = build(ZOO["tied"])
    tuned = apply(model, optimizer, execution("blocks"), strict=False)
    assert tuned.audit()["execution"]["graph_runs"] == 0  # nothing was called yet
    with _Mode():
        one_step(workload, model, optimizer, tuned, seed=1, micro_batches=1)
    with pytest.raises(ApplyError, match=r"MT310.*stayed eager in 1 of 1 calls") as caught:
        tuned.audit()
    assert "dispatch mode" in str(caught.value)


def test_audit_names_untraceable_code() -> None:
    _, tuned = steps("lstm", execution("model"))
    assert tuned is not None
    with pytest.raises(ApplyError, match=r"the model(.|\n)*does not support RNN, GRU, or LSTM"):
        tuned.audit()


class _Torn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        torch._dynamo.graph_break()
        x = x * self.weight
        torch._dynamo.graph_break()
        return (x * self.weight).sum()


def test_audit_reports_many_small_graphs() -> None:
    model = _Torn()
    tuned = apply(model, torch.optim.SGD(model.parameters(), 0.1), execution("model"), strict=False)
    tuned.step([torch.ones(4)])
    with pytest.raises(ApplyError, match=r"MT310 .*3 graphs of 1\.3 ops"):
        tuned.audit()


def test_failing_backend_raises_apply_error() -> None:
    (text,) = run_ranks(
        message_of_failing_backend, 0
    )  # what Dynamo leaves behind then stays out of the other tests
    assert re.search(r"MT319 torch.compile fails in the model: .*no assembler(.|\n)*compile: false", text), (
        text
    )


def message_of_failing_backend() -> str:
    regions.BACKENDS = {"aot_eager": _failing}
    workload, model, optimizer = build(ZOO["tied"])
    tuned = apply(model, optimizer, execution("model"), strict=False)
    try:
        one_step(workload, model, optimizer, tuned, seed=1)
    except ApplyError as error:
        return str(error)
    return ""


def _failing(*args: Any, **options: Any) -> Any:
    raise RuntimeError("no assembler")


def test_compile_regions_rejects_no_blocks_and_compiled_model() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ApplyError, match=r"MT310 .*finds no blocks"):
        apply(model, optimizer, execution("blocks"), strict=False)
    assert "forward" not in vars(model)
    model.compile(backend="eager")
    with pytest.raises(ApplyError, match="MT310 the model is compiled already"):
        apply(model, optimizer, execution("model"), strict=False)


DEFAULTS = [each(kind=each.__module__.rpartition(".")[2]) for each in all_techniques()]


@pytest.mark.parametrize(
    "made", [each for each in DEFAULTS if each.effects.eager_only], ids=lambda each: type(each).__name__
)
def test_compile_rejects_techniques_that_need_eager_ops(made: Technique) -> None:
    _, model, optimizer = build(ZOO["tied"])
    axis, _, part = made.slot.partition(".")
    config = execution("blocks", **{axis: {part: {"kind": made.kind}} if part else {"kind": made.kind}})
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ApplyError, match=f"MT315 .*{made.kind}.* cannot be used"):
        apply(model, optimizer, config, strict=False)
    assert {name: vars(module).keys() for name, module in model.named_modules()} == {
        n: v.keys() for n, v in before.items()
    }


@pytest.mark.slow
def test_inductor_training_equals_plain_up_to_rounding() -> None:
    """Inductor fuses sums, and draws dropout masks by its own generator."""
    got, tuned = steps("tied", execution("blocks", "inductor"))
    wanted, _ = steps("tied", None)
    for (loss, gradients), (plain_loss, plain_gradients) in zip(got, wanted, strict=True):
        assert torch.allclose(loss, plain_loss, rtol=1e-5)
        for name, gradient in gradients.items():
            assert torch.allclose(
                gradient, plain_gradients[name], rtol=1e-4, atol=1e-4 * float(gradient.abs().max())
            )
    assert tuned is not None
    assert tuned.audit()["execution"]["graphs"] == 1


def test_docs_list_techniques_that_work_with_compile() -> None:
    text = (ROOT / "docs" / "compile.md").read_text()
    table = re.findall(r"^\| (\S+) `(\w+)` \| (.+) \|$", text, re.MULTILINE)
    said = {(slot, kind): scopes for slot, kind, scopes in table}
    others = dict(re.findall(r"^\| (\S+), except the next \w+ \| (.+) \|$", text, re.MULTILINE))
    program = plain_program(ZOO["gpt"])
    for made in DEFAULTS:
        if made.slot not in {slot for slot, _ in said} or (made.kind == "none" and made.slot != "recompute"):
            continue
        refused = {
            scope: made.fits(program, Target(hardware.detect("cpu"), compiled=scope))
            for scope in ("blocks", "model")
        }
        eager_only = made.effects.eager_only
        works = [
            scope
            for scope, reason in refused.items()
            if reason is None or "compile" not in f"{reason} {eager_only}"
        ]
        works = [] if eager_only else works
        stated = said.get((made.slot, made.kind)) or others[made.slot]
        assert stated == (", ".join(works) or "no"), (made.kind, refused)
        if eager_only:
            assert all(str(reason).endswith("(execution.compile: false)") for reason in refused.values()), (
                made.kind
            )
