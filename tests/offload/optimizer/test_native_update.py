"""The native update of one tensor: against torch's kernels, formats of moments, instruction sets, threads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtune import _native
from memtune.api import apply
from memtune.errors import ApplyError
from memtune.offload.optimizer import native_update
from memtune.offload.optimizer.native_update import BLOCK, NativeUpdate
from memtune.search_spaces.offload.states.l2l import L2L
from memtune.search_spaces.offload.states.lohan import Lohan
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.search_spaces.offload.states.smart_infinity import SmartInfinity
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.technique import Technique
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import build, config_of, differences, plain, train

ADAMW = [1e-3, 0.9, 0.999, 1e-8, 1e-2]
N = 16 * 4099  # no scalar tail in torch's kernels, and several parts for several threads


def values(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(n), torch.randn(n) * torch.logspace(-8, 0, n)


def update(
    rule: str, weight: Tensor, gradient: Tensor, settings: list[float], steps: int = 3, **given: Any
) -> dict[str, Any]:
    """Some steps on the same gradient; returns the state."""
    moments = given.pop("moments", "float32")
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}[moments]
    state: dict[str, Any] = {
        "out": None,
        "first_scale": None,
        "second_scale": None,
        "step": torch.zeros(()),
        **given,
    }
    for name in ("first", "second"):
        state.setdefault(name, torch.zeros(weight.shape, dtype=dtype))
        if moments == "int8":
            state[f"{name}_scale"] = torch.zeros(-(-weight.numel() // BLOCK))
    order = ("out", "first", "second", "first_scale", "second_scale", "step")
    for _ in range(steps):
        torch.ops.memtune.host_update_(
            rule,
            moments,
            weight,
            gradient,
            *(state[name] for name in order),
            settings,
            False,
            state.get("seed", 0),
        )
    return state


def fused(weight: Tensor, gradient: Tensor, steps: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([parameter], fused=True)
    for _ in range(steps):
        parameter.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


def test_adamw_has_the_bits_of_torchs_fused_kernel() -> None:
    weight, gradient = values()
    wanted = fused(weight, gradient)
    state = update("adamw", weight, gradient, ADAMW)
    for got, want in zip((weight, state["first"], state["second"]), wanted, strict=True):
        assert torch.equal(got, want)


def test_adamw_differs_from_torchs_scalar_tails_by_one_rounding() -> None:
    weight, gradient = values(15)
    wanted = fused(weight, gradient, steps=1)
    state = update("adamw", weight, gradient, ADAMW, steps=1)
    assert torch.equal(state["first"], wanted[1])
    torch.testing.assert_close(state["second"], wanted[2], rtol=2.0**-23, atol=0)
    torch.testing.assert_close(weight, wanted[0], rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("isa", ["base", "avx2", "avx512"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rule", ["adamw", "sgd", "adagrad", "lion"])
def test_update_has_the_same_bits_for_all_instruction_sets_and_threads(
    rule: str, moments: str, isa: str
) -> None:
    n = 300 * BLOCK + 37
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}[moments]

    def run(isa: str, threads: int) -> list[Tensor]:
        weight, gradient = values(n)
        narrow = gradient.bfloat16()
        first, second = (torch.zeros(n, dtype=dtype) for _ in range(2))
        scales = [torch.zeros(-(-n // BLOCK)) for _ in range(2)] if moments == "int8" else [None, None]
        numbers = _native.OptimizerNumbers(
            decay=0.99,
            first=0.1,
            second=0.999,
            rest=0.001,
            ahead=0.9,
            correction=0.03,
            eps=1e-8,
            rate=-0.01,
            seed=5,
        )
        held = (None if rule == "adagrad" else first, second if rule in ("adamw", "adagrad") else None)
        for _ in range(2):
            _native.optimizer_update(
                rule, moments, weight, narrow, narrow, *held, *scales, numbers, threads, isa
            )
        return [weight, narrow, first, second]

    try:
        got = run(isa, 3)
    except ValueError as error:
        pytest.skip(str(error))
    assert all(torch.equal(one, other) for one, other in zip(got, run("", 1), strict=True))


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ([0.1, 0, 0, 0, 0], {}),
        ([0.1, 0.9, 0, 0.01, 0], {"momentum": 0.9, "weight_decay": 0.01}),
        ([0.1, 0.9, 0, 0.01, 1], {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    ],
)
def test_native_sgd_equals_that_of_torch(settings: list[float], options: dict[str, Any]) -> None:
    weight, gradient = values()
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.1, **options)
    for _ in range(3):
        parameter.grad = gradient.clone()
        optimizer.step()
    update("sgd", weight, gradient, settings, second=None, **({} if settings[1] else {"first": None}))
    torch.testing.assert_close(weight, parameter.detach(), rtol=2.0**-22, atol=2.0**-24)


def test_adagrad_and_lion() -> None:
    weight, gradient = values()
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.Adagrad([parameter], lr=0.1, lr_decay=0.1, eps=1e-10)
    for _ in range(3):
        parameter.grad = gradient.clone()
        optimizer.step()
    update("adagrad", weight, gradient, [0.1, 0.1, 1e-10, 0], first=None)
    torch.testing.assert_close(weight, parameter.detach(), rtol=2.0**-22, atol=2.0**-24)

    weight, gradient = values()
    wanted, momentum = weight.double(), torch.zeros(N, dtype=torch.double)
    for _ in range(3):
        wanted = wanted * (1 - 0.1 * 0.2) - 0.1 * (0.9 * momentum + 0.1 * gradient.double()).sign()
        momentum = 0.99 * momentum + 0.01 * gradient.double()
    update("lion", weight, gradient, [0.1, 0.9, 0.99, 0.2], second=None)
    torch.testing.assert_close(weight.double(), wanted, rtol=1e-5, atol=1e-6)


def test_new_bfloat16_weight_is_in_the_gradients_memory() -> None:
    weight, gradient = values()
    narrow = gradient.bfloat16()
    wanted = fused(weight, narrow.float())[0].bfloat16()
    parameter, state = (
        weight.clone(),
        {"first": torch.zeros(N), "second": torch.zeros(N), "step": torch.zeros(())},
    )
    for _ in range(3):
        low = narrow.clone()
        update("adamw", parameter, low, ADAMW, steps=1, out=low, **state)
    assert torch.equal(low, wanted)


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_narrow_moments_are_unbiased(moments: str) -> None:
    """A second moment that changes by less than half a step of its format still gets there."""
    weight, gradient = torch.zeros(64 * BLOCK), torch.full((64 * BLOCK,), 1.0)
    gradient[::BLOCK] = 1.9  # so that the others are not their block's largest
    state = update("adamw", weight, gradient, ADAMW, steps=300, moments=moments)
    second = (
        state["second"].float() if moments == "bfloat16" else decoded(state["second"], state["second_scale"])
    )
    second = second.view(-1, BLOCK)[:, 1:]
    wanted = 1 - 0.999**300
    assert second.std() > 0
    assert (
        abs(second.mean().item() - wanted) < 6 * second.std().item() / second.numel() ** 0.5 + 0.002 * wanted
    )


def decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """8-bit second moments as numbers: five bits of exponent, three of mantissa, 255 is 1."""
    exponent = (codes.float() - 255 + 1016).div(8).floor() - 127
    value = (1 + ((codes.long() - 255 + 1016) % 8).float() / 8) * torch.exp2(exponent)
    return torch.where(codes == 0, 0.0, value) * scale.repeat_interleave(BLOCK)[: len(codes)]


def test_stochastic_rounding_follows_from_seed_and_step() -> None:
    def run(seed: int) -> Tensor:
        weight, gradient = values()
        found: Tensor = update("adamw", weight, gradient, ADAMW, moments="bfloat16", seed=seed)["second"]
        return found

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_unsupported_optimizer_is_refused_by_name() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    for optimizer, what in (
        (torch.optim.RMSprop([parameter]), "RMSprop"),
        (torch.optim.AdamW([parameter], amsgrad=True), "amsgrad"),
        (torch.optim.Adam([parameter], weight_decay=0.1), "weight_decay of Adam"),
        (torch.optim.AdamW([parameter], lr=torch.tensor(0.1), capturable=False, foreach=False), "lr"),
    ):
        with pytest.raises(ApplyError, match=what):
            NativeUpdate(optimizer, "float32")


def test_invalid_arrays_are_refused() -> None:
    weight, numbers = torch.zeros(4), _native.OptimizerNumbers()
    with pytest.raises(ValueError, match="number of moments"):
        _native.optimizer_update("adamw", "float32", weight, weight, None, None, None, None, None, numbers)
    with pytest.raises(ValueError, match="as many elements"):
        _native.optimizer_update("sgd", "float32", weight, weight[:3], None, None, None, None, None, numbers)


def laid(value: Tensor, how: str) -> Tensor:
    """`value` in memory column by column, or as a part of wider rows."""
    if how == "transposed":
        return value.t().contiguous().t()
    return torch.cat([value, torch.full_like(value, torch.nan)], 1)[:, : value.shape[1]]


@pytest.mark.parametrize("gradient_too", [False, True])
@pytest.mark.parametrize("how", ["transposed", "gaps"])
def test_update_has_the_same_bits_in_any_memory_order(how: str, gradient_too: bool) -> None:
    weight, gradient = (each.view(16, -1) for each in values())
    other, its = laid(weight, how), laid(gradient, how) if gradient_too else gradient
    wanted, got = update("adamw", weight, gradient, ADAMW), update("adamw", other, its, ADAMW)
    assert torch.equal(other, weight)
    assert all(torch.equal(got[name], wanted[name]) for name in ("first", "second"))
    narrow, its = gradient.bfloat16(), laid(gradient.bfloat16(), how)
    update("adamw", weight, narrow, ADAMW, steps=1, out=narrow)
    update("adamw", other, its, ADAMW, steps=1, out=its)
    assert torch.equal(its, narrow)


STRIDED = Path(__file__).parents[2] / "support" / "models" / "strided_model.py"


@pytest.mark.usefixtures("ssd")
def test_training_has_the_same_bits_in_any_memory_order() -> None:
    native = train(STRIDED, OptimizerCpu(kind="optimizer_cpu", update="native"))
    assert not differences(native, plain(STRIDED), 1e-5)
    for technique in (ZeroInfinity(kind="zero_infinity"), Lohan(kind="lohan")):
        assert not differences(
            replace(train(STRIDED, technique), gradients=[]), replace(native, gradients=[])
        )
    away = ZeroInfinity(kind="zero_infinity", parameters="ssd", on_device=1)
    gapless = STRIDED.with_name(f"{STRIDED.name}:gapless")
    native = train(gapless, OptimizerCpu(kind="optimizer_cpu", update="native"))
    assert not differences(replace(train(gapless, away), gradients=[]), replace(native, gradients=[]))


@pytest.mark.usefixtures("ssd")
@pytest.mark.parametrize(
    "technique", [L2L(kind="l2l"), SmartInfinity(kind="smart_infinity")], ids=lambda each: each.kind
)
def test_weight_with_gaps_is_refused_by_name(technique: Technique) -> None:
    name = "layers.0.down.weight"
    assert name in str(technique.fits(plain_program(STRIDED), target_of()))
    _, model, optimizer = build(STRIDED)
    with pytest.raises(ApplyError, match=name):
        apply(model, optimizer, config_of(STRIDED, technique), strict=False)


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_one_call_for_all_parameters_has_the_bits_of_one_for_each(
    moments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups, several threads' worth of elements, an empty tensor, a transposed one, and bfloat16."""

    def trained() -> list[Tensor]:
        torch.manual_seed(0)
        shapes = [(N,), (3,), (0, 4), (5, 7)]
        weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        weights.append(nn.Parameter(torch.randn(6, 4).t()))
        gradients = [torch.randn_like(each) for each in weights]
        gradients[3] = gradients[3].bfloat16()
        optimizer = torch.optim.AdamW(
            [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.1}], weight_decay=0.1
        )
        native, by_weight = NativeUpdate(optimizer, moments), dict(zip(weights, gradients, strict=True))
        with torch.no_grad():
            for _ in range(2):
                native.step(optimizer, lambda each: by_weight[each].clone())
        return [*weights, *(each for w in weights for each in optimizer.state[w].values())]

    together = trained()
    monkeypatch.setattr(native_update, "_update_all", None)
    assert all(torch.equal(one, each) for one, each in zip(together, trained(), strict=True))
