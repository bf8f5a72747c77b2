"""A scheduled module is bitwise equal to the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.scheduled_net import CPU, Net, everything_again, frozen_net, gradients, graph_of, twin
from support.training_runs import same, trained_values
from support.zoo_paths import ZOO
from torch import Tensor, nn
from torch.func import functional_call

from memtune.activations.capture.region_capture import capture, shapes_of
from memtune.activations.capture.tape import GradientLike
from memtune.activations.schedules.region_pass import Region, region_of
from memtune.activations.schedules.scheduled_region import ScheduledRegion
from memtune.program.op_schedule import (
    Action,
    OpGraph,
    Schedule,
    ScheduleStep,
    build_schedule,
    find_schedule_error,
    plain_schedule,
)
from memtune.testing.drift_check import recording_of
from memtune.testing.training import build

CAPTURED = ("autocast", "cnn_bn", "gpt", "hf_llama", "inplace_views", "lora", "lstm", "tied", "tobf16")
NOT_CAPTURED = {"moe": "nonzero"}


def region(name: str) -> Region:
    found = region_of(recording_of(ZOO[name]).at(2))
    assert isinstance(found, Region)
    return found


def train(name: str, schedule: Schedule | None, steps: int) -> tuple[list[Tensor], ScheduledRegion | None]:
    workload, model, optimizer = build(ZOO[name])
    frozen = None if schedule is None else ScheduledRegion(model, schedule, CPU)
    if frozen is not None:
        frozen.install()
    return trained_values(workload, model, optimizer, 2, steps, micro_batches=2), frozen


@pytest.mark.drawn(5)
@pytest.mark.parametrize("name", CAPTURED)
def test_schedule_trains_the_zoo_bitwise(name: str) -> None:
    graph = region(name).graph
    plain, _ = train(name, None, steps=1)
    for schedule in (plain_schedule(graph), everything_again(graph)):
        got, frozen = train(name, schedule, steps=1)
        assert frozen is not None
        assert (frozen.runs.frozen, frozen.runs.plain, frozen.runs.captures) == (2, 0, 1), (
            frozen.runs.why_plain
        )
        assert same(got, plain)


@pytest.mark.parametrize("name", NOT_CAPTURED)
@pytest.mark.filterwarnings("ignore:memtune runs the model without its schedule")
def test_uncapturable_module_runs_plainly_with_a_warning(name: str) -> None:
    got, frozen = train(name, plain_schedule(region(name).graph), steps=1)
    assert frozen is not None
    assert frozen.runs.frozen == 0
    assert NOT_CAPTURED[name] in frozen.runs.why_plain
    assert same(got, train(name, None, steps=1)[0])


@st.composite
def schedules(draw: st.DrawFn) -> tuple[OpGraph, Schedule]:
    """Schedules that recompute some forward ops, and their inputs, before some backward ops."""
    graph = graph_of(Net(), torch.ones(5, 6))
    backward: list[int] = []
    for op in range(graph.n_forward, graph.n_ops):
        wanted = draw(st.sets(st.integers(0, graph.n_forward - 1), max_size=2))
        again: set[int] = set()
        while wanted:
            each = wanted.pop()
            again.add(each)
            made = {graph.maker[value] for value in graph.reads[each]} | {
                w for v in graph.makes[each] for w in graph.writers.get(v, ())
            }
            wanted |= made - again
        backward += [*sorted(again), op]
    return graph, build_schedule(graph, range(graph.n_forward), backward)


def test_dropout_mask_is_redrawn_after_its_inputs_are_freed() -> None:
    """Backward redraws the mask at its start, after forward has freed all inputs of dropout."""

    def masks_again(graph: OpGraph) -> Schedule:
        empty = graph.names.index("aten.empty_like.default")
        assert graph.reads[empty] == ()
        (mask,) = graph.makes[empty]
        again = [empty, *graph.writers[mask]]
        schedule = build_schedule(
            graph, range(graph.n_forward), [*again, *range(graph.n_forward, graph.n_ops)]
        )
        freed = [step.target for step in schedule.forward if step.action == Action.FREE]
        assert mask in freed
        return schedule

    net, frozen = frozen_net(masks_again)
    x = torch.randn(5, 6)
    assert same(gradients(net, x), gradients(twin(), x))
    assert frozen.runs.frozen == 1


@settings(max_examples=6, deadline=None)
@given(schedules())
def test_random_recomputation_is_bitwise(made: tuple[OpGraph, Schedule]) -> None:
    graph, schedule = made
    assert find_schedule_error(graph, schedule) == ""
    net, frozen = frozen_net(lambda _: schedule)
    x = torch.randn(5, 6)
    assert same(gradients(net, x), gradients(twin(), x))
    assert frozen.runs.frozen == 1


@pytest.mark.parametrize("ops_between", [0, 2])
def test_offloaded_value_is_bitwise(ops_between: int) -> None:
    """Also if ops run between the beginning of its reload and the op that reads it."""

    def moved(graph: OpGraph) -> Schedule:
        def first_read(value: int) -> int:
            later = range(graph.n_forward, graph.n_ops)
            return next((op for op in later if value in graph.reads[op]), graph.n_forward) - graph.n_forward

        value = max((made for each in graph.makes[: graph.n_forward] for made in each), key=first_read)
        assert first_read(value) > ops_between
        leave = ScheduleStep(Action.TO_HOST, value), ScheduleStep(Action.FREE, value)
        backward = list(graph.runs[graph.n_forward :])
        backward.insert(first_read(value) - ops_between, ScheduleStep(Action.FROM_HOST, value))
        return build_schedule(graph, (*graph.runs[: graph.n_forward], *leave), backward)

    net, frozen = frozen_net(moved)
    x = torch.randn(5, 6)
    assert same(gradients(net, x), gradients(twin(), x))
    assert frozen.runs.frozen == 1
    (captured,) = next(iter(frozen._captured.values()))
    assert ("with prefetching" in captured.first._code.source) == (ops_between > 0)  # type: ignore[union-attr]


def test_gradient_layouts_may_change() -> None:
    net, frozen = frozen_net()
    for x, loss in [
        (torch.randn(5, 6), lambda a, b: a.sum() + b.sum()),  # one number, seen as a matrix
        (torch.randn(5, 6), lambda a, b: (a * a).sum() + (b * 3).sum()),
        (torch.randn(9, 6), lambda a, b: a.t().contiguous().square().sum() + b.sum()),
        (torch.randn(6, 5).t(), lambda a, b: a.sum() + b.t().square().sum()),
    ]:
        assert same(gradients(net, x, loss=loss), gradients(twin(), x, loss=loss))
    assert (frozen.runs.frozen, frozen.runs.plain, frozen.runs.captures) == (4, 0, 3)


def test_changed_setting_before_backward_does_not_change_the_program() -> None:
    """A setting changed before backward begins does not belong to the forward that ran."""
    x, plain = torch.randn(5, 6), twin()
    net, frozen = frozen_net()

    def loss(a: Tensor, b: Tensor, each: Net) -> Tensor:
        each.power = 3
        return a.t().sum() + (b.t() * torch.ones(4, 5)).sum()

    for _ in range(2):
        found = [gradients(each, x, loss=partial(loss, each=each)) for each in (net, plain)]
        assert same(*found)
        net.power = plain.power = 2
    assert same(
        *(
            gradients(each, x, loss=lambda a, b: a.t().sum() + (b.t() * torch.ones(4, 5)).sum())
            for each in (net, plain)
        )
    )
    assert frozen.runs.frozen == 3


@pytest.mark.parametrize("watched", [False, True])
def test_unused_parameters_get_no_gradient(watched: bool) -> None:
    """Not zeros: an optimizer with weight decay would change the weight."""
    net, frozen = frozen_net()
    plain = twin()
    for each in (net, plain):
        if watched:
            each.one.weight.register_post_accumulate_grad_hook(lambda p: None)
        for _ in range(2):
            each.zero_grad()
            torch.manual_seed(1)
            each(torch.ones(5, 6))[1].sum().backward()
        assert each.two.weight.grad is None
        assert each.two.bias.grad is None
    assert same([net.one.weight.grad, net.one.bias.grad], [plain.one.weight.grad, plain.one.bias.grad])
    assert frozen.runs.frozen == 2


class Head(nn.Module):
    """Logits, features and a number; losses use some of them, in a layout of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features = self.body(x).tanh()
        return self.head(features), features, features.square().mean()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "classes second": lambda logits, *_: nn.functional.cross_entropy(
        logits.transpose(1, 2), torch.zeros(2, 5, dtype=torch.long)
    ),
    "sum": lambda logits, *_: logits.sum(),
    "features alone": lambda logits, features, _: features.square().sum(),
    "all but the logits": lambda logits, features, number: features.square().sum() + number,
    "all": lambda logits, features, number: logits.square().sum() + features.square().sum() + number,
}


@pytest.mark.parametrize("name", LOSSES)
def test_schedule_is_for_the_outputs_used_by_the_loss(name: str) -> None:
    torch.manual_seed(0)
    x, nets = torch.randn(2, 5, 6), [Head(), Head()]
    nets[1].load_state_dict(nets[0].state_dict())
    outputs = [each.detach().requires_grad_() for each in nets[0](x)]
    LOSSES[name](*outputs).backward()
    wanted = {i: out.grad for i, out in enumerate(outputs) if out.grad is not None}
    flowing = {i: GradientLike(tuple(g.shape), g.stride(), g.dtype) for i, g in wanted.items()}
    graph = capture(nets[1], nets[1].forward, shapes_of(((x,), {})), [], flowing).graph
    frozen = ScheduledRegion(nets[1], everything_again(graph), CPU)
    frozen.install()
    for net in (*nets, *nets):
        LOSSES[name](*net(x)).backward()
    assert (frozen.runs.frozen, frozen.runs.plain) == (2, 0), frozen.runs.why_plain
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    assert all(
        (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad) for one, other in pairs
    )


def test_schedule_of_another_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, net = torch.randn(2, 5, 6), Head()
    longer = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    schedule = plain_schedule(
        capture(longer, longer.forward, shapes_of(((x,), {})), [], lambda i, out: True).graph
    )
    frozen = ScheduledRegion(net, schedule, CPU)
    frozen.install()
    monkeypatch.setattr(
        "memtune.activations.schedules.scheduled_region.guess_layouts",
        lambda tape: pytest.fail("captured once more"),
    )
    net(x)
    assert "runs other ops" in frozen.runs.why_plain


def test_input_gradients_are_returned() -> None:
    net, _ = frozen_net()
    x, y = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    y.data.copy_(x.data)
    assert same(gradients(net, x * 2), gradients(twin(), y * 2))
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_requested_gradients_are_returned() -> None:
    net, other, x = frozen_net()[0], twin(), torch.randn(5, 6)
    found = []
    for each in (net, other):
        torch.manual_seed(1)
        a, b = each(x)
        found.append(list(torch.autograd.grad(a.sum() + b.sum(), list(each.parameters()))))
    assert same(*found)
    assert all(p.grad is None for p in net.parameters())


def test_parameter_hooks_receive_gradients() -> None:
    net, seen = frozen_net()[0], []
    net.one.weight.register_hook(lambda g: g * 2)
    net.two.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = torch.randn(5, 6)
    got, plain = gradients(net, x), gradients(twin(), x)
    assert torch.equal(got[0], plain[0] * 2)
    assert same(seen, [plain[2]])


def test_parameter_hooks_are_called_in_the_plain_order() -> None:
    """When a gradient is passed to hooks, later ones do not exist yet.

    A hook that reduces it frees it before the next op.
    """
    seen: list[list[tuple[str, int]]] = []
    for each in (frozen_net()[0], twin()):
        seen.append([])
        parameters = dict(each.named_parameters())

        def arrived(
            p: Tensor, mine: list[Tensor], found: list[tuple[str, int]], names: dict[Tensor, str]
        ) -> None:
            found.append((names[p], sum(other.grad is not None for other in mine)))

        names = {p: name for name, p in parameters.items()}
        for p in parameters.values():
            p.register_post_accumulate_grad_hook(
                partial(arrived, mine=list(names), found=seen[-1], names=names)
            )
        gradients(each, torch.randn(5, 6))
    assert seen[0] == seen[1]
    assert [there for _, there in seen[0]] == list(range(1, len(seen[0]) + 1))


def test_computed_weights_pass_gradients_to_their_sources() -> None:
    """Weights swapped in for a call are no parameters at the first capture, and are arguments of the schedule
    after it.
    """
    found = []
    for net, first in ((twin(), False), (frozen_net()[0], False), (frozen_net()[0], True)):
        if not first:
            gradients(net, torch.ones(5, 6))
        net.zero_grad()
        torch.manual_seed(1)
        weights = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
        out = functional_call(net, {name: w * 2 for name, w in weights.items()}, (torch.ones(5, 6),))
        (out[0].sum() + out[1].sum()).backward()
        assert all(p.grad is None for p in net.parameters())
        found.append([w.grad for w in weights.values()])
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_copied_or_pickled_module_trains_plainly_with_weights_of_its_own(tmp_path: Path) -> None:
    net, frozen = frozen_net()
    wanted = gradients(net, torch.ones(5, 6))
    assert frozen.runs.frozen == 1
    torch.save(net, tmp_path / "net")
    for other in (copy.deepcopy(net), torch.load(tmp_path / "net", weights_only=False)):
        assert same(gradients(other, torch.ones(5, 6)), wanted)
        with torch.no_grad():
            for each in other.parameters():
                each.zero_()
        assert not same(gradients(other, torch.ones(5, 6)), wanted)
    assert same(gradients(net, torch.ones(5, 6)), wanted)
    assert frozen.runs.frozen == 2
