"""A frozen schedule gives what the plain module gives, to the bit; whatever differs from what was planned runs plainly."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from training_runs import same, trained_values
from zoo_paths import ZOO

from memtune.errors import ApplyError
from memtune.passes.region import Region, region_of
from memtune.runtime.frozen import FrozenRegion
from memtune.runtime.tape import GradientLike, autocast_state, capture, shapes_of
from memtune.schedule import Action, Do, OpGraph, Schedule, plain_schedule, scheduled, wrong_with
from memtune.testing.drift import recording_of
from memtune.testing.training import build

CPU = torch.device("cpu")
CAPTURED = ("autocast", "cnn_bn", "gpt", "hf_llama", "inplace_views", "lora", "lstm", "tied", "tobf16")
NOT_CAPTURED = {"moe": "nonzero"}
SCALE = 1.0


def region(name: str) -> Region:
    found = region_of(recording_of(ZOO[name]).at(2))
    assert isinstance(found, Region)
    return found


def everything_again(graph: OpGraph) -> Schedule:
    """Before backward all of forward runs again that may; where something must not, its products stay."""
    again = [op for op in range(graph.n_forward) if op not in graph.once]
    if not graph.once:
        again += range(graph.n_forward // 2)  # some for a third time
    found = scheduled(graph, range(graph.n_forward), [*again, *range(graph.n_forward, graph.n_ops)])
    return plain_schedule(graph) if wrong_with(graph, found) else found


def train(name: str, schedule: Schedule | None, steps: int) -> tuple[list[Tensor], FrozenRegion | None]:
    workload, model, optimizer = build(ZOO[name])
    frozen = None if schedule is None else FrozenRegion(model, schedule, CPU)
    if frozen is not None:
        frozen.install()
    return trained_values(workload, model, optimizer, 2, steps, micro_batches=2), frozen


@pytest.mark.parametrize("name", CAPTURED)
def test_zoo_trains_as_without(name: str) -> None:
    graph = region(name).graph
    plain, _ = train(name, None, steps=1)
    for schedule in (plain_schedule(graph), everything_again(graph)):
        got, frozen = train(name, schedule, steps=1)
        assert frozen is not None
        assert (frozen.runs.frozen, frozen.runs.plain, frozen.runs.captures) == (2, 0, 1), frozen.runs.why_plain
        assert same(got, plain)


@pytest.mark.parametrize("name", NOT_CAPTURED)
@pytest.mark.filterwarnings("ignore:memtune runs the model as it is")
def test_what_cannot_be_captured_runs_plainly_and_says_why(name: str) -> None:
    got, frozen = train(name, plain_schedule(region(name).graph), steps=1)
    assert frozen is not None
    assert frozen.runs.frozen == 0
    assert NOT_CAPTURED[name] in frozen.runs.why_plain
    assert same(got, train(name, None, steps=1)[0])


class Net(nn.Module):
    """Dropout, a view that is read in backward, an output beside the one that is used, and settings of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.drop = nn.Linear(6, 8), nn.Linear(4, 3), nn.Dropout(0.5)
        self.power = 2

    def forward(self, x: Tensor, *, times: float = 1.0) -> tuple[Tensor, Tensor]:
        y = self.drop(torch.tanh(self.one(x)))
        left, right = y.chunk(2, dim=-1)
        z = left * right.sigmoid() * times * SCALE
        return self.two(z) ** self.power, z


def graph_of(net: nn.Module, *args: Any, **kwargs: Any) -> OpGraph:
    return capture(net, net.forward, shapes_of((args, kwargs)), autocast_state(), lambda i, out: True).graph


def frozen_net(again: Callable[[OpGraph], Schedule] = plain_schedule) -> tuple[Net, FrozenRegion]:
    torch.manual_seed(0)
    net = Net()
    frozen = FrozenRegion(net, again(graph_of(net, torch.ones(5, 6))), CPU)
    frozen.install()
    return net, frozen


def gradients(
    net: nn.Module, *args: Any, loss: Callable[..., Tensor] = lambda a, b: a.sum() + b.sum(), **kwargs: Any
) -> list[Tensor]:
    net.zero_grad()
    torch.manual_seed(1)
    loss(*net(*args, **kwargs)).backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def twin() -> Net:
    torch.manual_seed(0)
    return Net()


@st.composite
def schedules(draw: st.DrawFn) -> tuple[OpGraph, Schedule]:
    """Before some ops of backward, some ops of forward and all that they need run again."""
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
    return graph, scheduled(graph, range(graph.n_forward), backward)


def test_a_mask_is_drawn_again_without_the_activation_that_it_looks_like() -> None:
    """Backward draws the mask once more right away, when forward has let go of all that dropout was given."""

    def masks_again(graph: OpGraph) -> Schedule:
        empty = graph.names.index("aten.empty_like.default")
        assert graph.reads[empty] == ()
        (mask,) = graph.makes[empty]
        again = [empty, *graph.writers[mask]]
        schedule = scheduled(graph, range(graph.n_forward), [*again, *range(graph.n_forward, graph.n_ops)])
        freed = [step.of for step in schedule.forward if step.action == Action.FREE]
        assert mask in freed
        return schedule

    net, frozen = frozen_net(masks_again)
    x = torch.randn(5, 6)
    assert same(gradients(net, x), gradients(twin(), x))
    assert frozen.runs.frozen == 1


@settings(max_examples=6, deadline=None)
@given(schedules())
def test_any_recomputation_gives_the_same_bits(made: tuple[OpGraph, Schedule]) -> None:
    graph, schedule = made
    assert wrong_with(graph, schedule) == ""
    net, frozen = frozen_net(lambda _: schedule)
    x = torch.randn(5, 6)
    assert same(gradients(net, x), gradients(twin(), x))
    assert frozen.runs.frozen == 1


def test_a_value_may_spend_the_time_on_the_host() -> None:
    def moved(graph: OpGraph) -> Schedule:
        plain = plain_schedule(graph)
        value = graph.makes[graph.n_forward - 3][0]
        leave, fetch = (Do(Action.TO_HOST, value), Do(Action.FREE, value)), Do(Action.FROM_HOST, value)
        return Schedule(plain.graph, plain.forward + leave, (fetch, *plain.backward))

    net, frozen = frozen_net(moved)
    x = torch.randn(5, 6)
    assert same(gradients(net, x), gradients(twin(), x))
    assert frozen.runs.frozen == 1


def test_shapes_and_strides_of_gradients_may_change() -> None:
    net, frozen = frozen_net()
    for x, loss in [
        (torch.randn(5, 6), lambda a, b: a.sum() + b.sum()),  # one number, seen as a matrix
        (torch.randn(5, 6), lambda a, b: (a * a).sum() + (b * 3).sum()),
        (torch.randn(9, 6), lambda a, b: a.t().contiguous().square().sum() + b.sum()),
        (torch.randn(6, 5).t(), lambda a, b: a.sum() + b.t().square().sum()),
    ]:
        assert same(gradients(net, x, loss=loss), gradients(twin(), x, loss=loss))
    assert (frozen.runs.frozen, frozen.runs.plain, frozen.runs.captures) == (4, 0, 3)


def test_gradients_of_new_strides_get_no_other_program() -> None:
    """A setting that is another one when backward begins is none of what forward ran with."""
    x, plain = torch.randn(5, 6), twin()
    net, frozen = frozen_net()

    def loss(a: Tensor, b: Tensor, each: Net) -> Tensor:
        each.power = 3
        return a.t().sum() + (b.t() * torch.ones(4, 5)).sum()

    for _ in range(2):
        found = [gradients(each, x, loss=partial(loss, each=each)) for each in (net, plain)]
        assert same(*found)
        net.power = plain.power = 2
    assert same(*(gradients(each, x, loss=lambda a, b: a.t().sum() + (b.t() * torch.ones(4, 5)).sum()) for each in (net, plain)))
    assert frozen.runs.frozen == 3


@pytest.mark.parametrize("watched", [False, True])
def test_what_the_loss_leaves_out_gets_no_gradient(watched: bool) -> None:
    """No zeros either: an optimizer would let the weight decay."""
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
    "classes second": lambda logits, *_: nn.functional.cross_entropy(logits.transpose(1, 2), torch.zeros(2, 5, dtype=torch.long)),
    "sum": lambda logits, *_: logits.sum(),
    "features alone": lambda logits, features, _: features.square().sum(),
    "all but the logits": lambda logits, features, number: features.square().sum() + number,
    "all": lambda logits, features, number: logits.square().sum() + features.square().sum() + number,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_schedule_is_for_what_the_loss_makes_of_the_outputs(name: str) -> None:
    torch.manual_seed(0)
    x, nets = torch.randn(2, 5, 6), [Head(), Head()]
    nets[1].load_state_dict(nets[0].state_dict())
    outputs = [each.detach().requires_grad_() for each in nets[0](x)]
    LOSSES[name](*outputs).backward()
    wanted = {i: out.grad for i, out in enumerate(outputs) if out.grad is not None}
    flowing = {i: GradientLike(tuple(g.shape), g.stride(), g.dtype) for i, g in wanted.items()}
    graph = capture(nets[1], nets[1].forward, shapes_of(((x,), {})), [], flowing).graph
    frozen = FrozenRegion(nets[1], everything_again(graph), CPU)
    frozen.install()
    for net in (*nets, *nets):
        LOSSES[name](*net(x)).backward()
    assert (frozen.runs.frozen, frozen.runs.plain) == (2, 0), frozen.runs.why_plain
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    assert all((one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad) for one, other in pairs)


def test_another_model_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    x, net = torch.randn(2, 5, 6), Head()
    longer = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    schedule = plain_schedule(capture(longer, longer.forward, shapes_of(((x,), {})), [], lambda i, out: True).graph)
    frozen = FrozenRegion(net, schedule, CPU)
    frozen.install()
    monkeypatch.setattr("memtune.runtime.frozen.guesses", lambda tape: pytest.fail("captured once more"))
    net(x)
    assert "runs other ops" in frozen.runs.why_plain


def test_gradients_of_inputs_flow_on() -> None:
    net, _ = frozen_net()
    x, y = torch.randn(5, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    y.data.copy_(x.data)
    assert same(gradients(net, x * 2), gradients(twin(), y * 2))
    assert torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_gradients_that_are_asked_for_are_returned() -> None:
    net, other, x = frozen_net()[0], twin(), torch.randn(5, 6)
    found = []
    for each in (net, other):
        torch.manual_seed(1)
        a, b = each(x)
        found.append(list(torch.autograd.grad(a.sum() + b.sum(), list(each.parameters()))))
    assert same(*found)
    assert all(p.grad is None for p in net.parameters())


def test_hooks_on_parameters_see_gradients() -> None:
    net, seen = frozen_net()[0], []
    net.one.weight.register_hook(lambda g: g * 2)
    net.two.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = torch.randn(5, 6)
    got, plain = gradients(net, x), gradients(twin(), x)
    assert torch.equal(got[0], plain[0] * 2)
    assert same(seen, [plain[2]])


def test_hooks_are_called_one_by_one_in_the_plain_order() -> None:
    """When a gradient is handed on, later ones are not there yet: whoever reduces it lets go of it before the next op."""
    seen: list[list[tuple[str, int]]] = []
    for each in (frozen_net()[0], twin()):
        seen.append([])
        parameters = dict(each.named_parameters())

        def arrived(p: Tensor, mine: list[Tensor], found: list[tuple[str, int]], names: dict[Tensor, str]) -> None:
            found.append((names[p], sum(other.grad is not None for other in mine)))

        names = {p: name for name, p in parameters.items()}
        for p in parameters.values():
            p.register_post_accumulate_grad_hook(partial(arrived, mine=list(names), found=seen[-1], names=names))
        gradients(each, torch.randn(5, 6))
    assert seen[0] == seen[1]
    assert [there for _, there in seen[0]] == list(range(1, len(seen[0]) + 1))


def test_weights_that_are_made_of_others_hand_their_gradients_on() -> None:
    """Swapped in for a call: before the first capture they are no parameters, after it they are given to the schedule."""
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


@pytest.mark.parametrize("change", ["eval", "attribute", "global", "argument", "hook", "submodule", "frozen weight", "subclass"])
@pytest.mark.filterwarnings("ignore:memtune runs the model as it is")
def test_what_differs_is_captured_anew_or_runs_plainly(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, frozen = frozen_net()
    plain, x, kwargs = twin(), torch.randn(5, 6), {}
    assert same(gradients(net, x), gradients(plain, x))
    for each in (net, plain):
        if change == "eval":
            each.eval()
        elif change == "attribute":
            each.power = 3
        elif change == "argument":
            kwargs = {"times": 2}  # an int where a float was: other ops, for all we know
        elif change == "hook":
            each.two.register_forward_hook(lambda module, args, out: out * 2)
        elif change == "submodule":
            each.drop = nn.Identity()
        elif change == "frozen weight":
            each.one.weight.requires_grad_(False)
        elif change == "subclass":
            x = torch.nn.Parameter(x, requires_grad=False).as_subclass(_Odd)
    if change == "global":
        monkeypatch.setitem(Net.forward.__globals__, "SCALE", 3.0)
    assert same(gradients(net, x, **kwargs), gradients(plain, x, **kwargs))
    assert frozen.runs.frozen + frozen.runs.plain == 2
    same_ops = change in ("argument", "attribute", "global")
    assert frozen.runs.plain == (not same_ops)
    assert bool(frozen.runs.why_plain) is not same_ops


def test_a_refusal_is_for_the_module_as_it_is() -> None:
    """Called first in evaluation, or with weights that are not trained yet: it runs its schedule when it is as planned."""
    for first in ("eval", "frozen weight"):
        net, frozen = frozen_net()
        x, plain = torch.randn(5, 6), twin()
        for each in (net, plain):
            each.train(first != "eval")
            each.one.weight.requires_grad_(first == "eval")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert same(*(gradients(each, x) for each in (net, plain)))
        assert len(said) == (first != "eval")
        for each in (net, plain):
            each.train()
            each.one.weight.requires_grad_(True)
        for _ in range(2):
            assert same(*(gradients(each, x) for each in (net, plain)))
        assert (frozen.runs.frozen, frozen.runs.plain, frozen.runs.captures) == (2, 1, 2)


def test_a_module_that_changes_ever_again_runs_plainly_and_says_so_once() -> None:
    (net, frozen), plain, x = frozen_net(), twin(), torch.randn(5, 6)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(7):
            net.drop.p = plain.drop.p = 0.1 + step / 10
            assert same(gradients(net, x), gradients(plain, x))
    assert frozen.runs.captures == frozen.runs.frozen == 4
    assert frozen.runs.plain == 3
    assert [str(each.message)[:33] for each in said] == ["memtune runs the model as it is, "]


class _Odd(Tensor):
    pass


def test_evaluation_is_the_plain_forward() -> None:
    net, frozen = frozen_net()
    with torch.no_grad():
        assert not net(torch.ones(5, 6))[0].requires_grad
    assert frozen.runs.frozen + frozen.runs.plain == 0
    frozen.remove()
    assert "forward" not in vars(net)


def test_what_cannot_be_right_is_an_error() -> None:
    x = torch.randn(5, 6)
    for spoil, code in ((_writes_output, "MT326"), (_steps_early, "MT326"), (_backward_twice, "MT326"), (_second_order, "MT326")):
        with pytest.raises(ApplyError) as caught:
            spoil(frozen_net()[0], x)
        assert caught.value.code == code


def _writes_output(net: Net, x: Tensor) -> None:
    a, b = net(x)
    b.detach().mul_(2)  # the last product reads it in backward
    (a.sum() + b.sum()).backward()


def _steps_early(net: Net, x: Tensor) -> None:
    a, b = net(x)
    with torch.no_grad():
        net.two.weight.mul_(2)
    (a.sum() + b.sum()).backward()


def _backward_twice(net: Net, x: Tensor) -> None:
    loss = sum(each.sum() for each in net(x))
    loss.backward(retain_graph=True)
    loss.backward()


def _second_order(net: Net, x: Tensor) -> None:
    a, b = net(x)
    torch.autograd.grad(a.sum() + b.sum(), list(net.parameters()), create_graph=True)


class Buffered(nn.Module):
    """Reads a buffer and a weight that wants no gradient, in backward too; `counts` into another buffer, which it has read."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.counts = nn.Linear(6, 8), nn.Linear(8, 3).requires_grad_(False), counts
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.register_buffer("bias", torch.ones(8))
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(torch.tanh(self.one(x) + self.bias + self.n) * self.scale)
        if self.counts:
            self.n.add_(1)
        return y


def frozen_buffered(again: Callable[[OpGraph], Schedule], counts: bool = False) -> tuple[Buffered, FrozenRegion]:
    net = Buffered(counts)
    frozen = FrozenRegion(net, again(graph_of(net, torch.ones(5, 6))), CPU)
    frozen.install()
    return net, frozen


@pytest.mark.parametrize("again", [plain_schedule, everything_again])
@pytest.mark.parametrize("name", ["scale", "two.weight", "bias"])
def test_what_backward_reads_must_not_be_written_into(name: str, again: Callable[[OpGraph], Schedule]) -> None:
    x, (net, _) = torch.randn(5, 6), frozen_buffered(again)
    out = net(x).sum()
    with torch.no_grad():
        net.get_parameter(name).mul_(5) if name == "two.weight" else net.get_buffer(name).mul_(5)
    if name == "bias" and again is plain_schedule:  # its backward does not read it: the plain module's neither
        out.backward()
        assert same([net.one.weight.grad], [_trained(Buffered(), x)])
        return
    with pytest.raises(ApplyError, match="written into"):
        out.backward()


def test_what_reads_a_buffer_before_it_is_written_does_not_run_again() -> None:
    (net, frozen), plain = frozen_buffered(plain_schedule, counts=True), Buffered(counts=True)
    graph = graph_of(plain, torch.ones(5, 6))
    adds = graph.names.index("aten.add.Tensor", graph.names.index("aten.add.Tensor") + 1)  # n
    again = [op for op in range(graph.n_forward) if op <= adds]
    assert wrong_with(graph, scheduled(graph, range(graph.n_forward), [*again, *range(graph.n_forward, graph.n_ops)]))
    for each in (net, plain):
        sum(out.sum() for out in [each(torch.ones(5, 6)), each(torch.zeros(5, 6))]).backward()
    assert frozen.runs.frozen == 2
    assert torch.equal(net.one.weight.grad, plain.one.weight.grad)


def _trained(net: Buffered, x: Tensor) -> Tensor:
    net.zero_grad()
    net(x).sum().backward()
    assert net.one.weight.grad is not None
    return net.one.weight.grad


CALLS = [0]


class Odd(nn.Module):
    """Does what a frozen schedule could not repeat."""

    calls = 0

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what, self.count, self.cache = nn.Linear(4, 4), what, 0, torch.ones(4)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if self.what == "counts":
            self.count += 1
        elif self.what == "draws":
            y = y * random.random()
        elif self.what == "counts in a global":
            CALLS[0] += 1
            y = y * CALLS[0]
        elif self.what == "counts in its class":
            Odd.calls += 1
        elif self.what == "writes":
            x.mul_(2)
        elif self.what == "looks":
            y = y * 2 if y.sum() > 0 else y
        elif self.what == "tensor":
            y = y * self.cache
        elif self.what == "noise":
            y = y * (random.random() * self.cache)
        return {1, 2} if self.what == "returns" else y


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("counts", "sets the attribute count"), ("draws", "random numbers in Python"), ("writes", "writes into an input"),
        ("looks", "depends on the data"), ("tensor", "neither parameter nor buffer"), ("returns", "returns a set"),
        ("noise", "neither parameter nor buffer"), ("counts in a global", "changes CALLS"),
        ("counts in its class", "changes calls"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:memtune runs the model as it is")
def test_refusals_name_the_reason_and_leave_no_trace(what: str, why: str) -> None:
    net = Odd(what)
    frozen = FrozenRegion(net, Schedule("?", (), ()), CPU)
    frozen.install()
    random.seed(0)
    counted = [*CALLS, Odd.calls]
    net(torch.ones(2, 4))
    assert sum([*CALLS, Odd.calls]) - sum(counted) == what.startswith("counts in")
    assert why in frozen.runs.why_plain
    drawn = random.getstate()
    random.seed(0)
    if what in ("draws", "noise"):
        random.random()
    assert drawn == random.getstate()  # by the plain run alone
    assert net.count == (what == "counts")  # the plain run's own
    assert net.cache.device == CPU
    assert all(type(p) is nn.Parameter and type(p.data) is Tensor for p in net.parameters())
