"""Rotated tensor parallelism: weights that may rotate, a rank's bytes, and training on gloo ranks as on
one.

Distinguishing test: per micro-batch 3·(degree - 1)/degree of the rotated bytes cross the link in hops of one
shard, and no collective of a full unit does.
"""

from __future__ import annotations

import functools
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from support.gloo import run_ranks
from support.ranks.data_parallel_steps import (
    TiedNet,
    alone,
    batches,
    build as build_net,
    check,
    loss,
    on_this_rank,
)
from support.ranks.model_parallel_runs import (
    MODELS,
    SEPARATE,
    SIZE,
    Measured,
    assert_trained_as_one,
    bytes_received,
    candidate,
    config,
    measured,
    refusal,
    rewriter,
    trained,
)
from support.ring_traffic import Rotation
from support.suites.sharded_suite import ShardedSuite
from support.zoo_paths import ZOO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memtune import hardware
from memtune.api import apply
from memtune.autotune.predict.simulation import simulate
from memtune.autotune.space.candidates import Candidate, Choice
from memtune.config.tuned_config import Settings, TunedConfig, dump_yaml, load_config
from memtune.errors import ApplyError
from memtune.memory import cpu_allocator
from memtune.parallel.model.weight_rotation import rotatable
from memtune.parallel.sharding.factors import Schedule, by_link
from memtune.program.step import Phase, Resource, Step
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.sharding.parallel._sharded_layers import DividedPlan
from memtune.search_spaces.sharding.parallel.rtp import Rtp
from memtune.technique import Target
from memtune.testing.training import build

KIND = "rtp"
ROUTED = MODELS / "routed.py"
HELD, TIED, EMBEDDED, FROZEN = 108544, 8192, 10240, 16384
"""Bytes of the weights of `SEPARATE`; of them one that two layers use, those of embeddings, a frozen one."""
WHOLE = 2 * (2 * 2 * 32 + 3 * 32 + 4 * 32 + 32) * 4 + 2 * 32 * 4
"""Norms and biases of two blocks, and the last norm."""


def sent(degree: int, in_place: bool, ranks: int, parts: int = 1, node: int = 8) -> tuple[float, float]:
    """Return bytes inside a node and between nodes, per rank and step, by the formula."""
    used = HELD + TIED
    rotation = Rotation(degree, in_place, used, used - EMBEDDED, used - FROZEN, HELD - FROZEN, WHOLE)
    found = by_link(rotation.hops(Schedule(ranks, node, parts)), node)
    return found.intra_bytes, found.inter_bytes


# -- which weights may go round ------------------------------------------------------------------------------


def test_refusals_name_what_is_in_the_way() -> None:
    both = {"parallel": {"kind": KIND}, "states": {"kind": "fsdp"}}
    assert "fsdp has no copies of a part" in refusal(KIND, other_slots={"sharding": both})
    assert "degree=4 is more than the 2 ranks" in refusal(KIND, degree=4)
    program, here = candidate(KIND).program, hardware.detect("cpu")
    assert "each degree must be recorded" in str(Rtp().fits(program, Target(here, 2)))
    assert "only one rank" in str(Rtp().fits(program, Target(here, 1)))
    assert "aten.pow.Tensor_Scalar in the loss uses 2.weight" in refusal(
        KIND, MODELS / "weight_read_in_loss.py"
    )
    cut = rewriter(MODELS / "weight_read_in_loss.py").target.sharded
    assert cut is not None
    assert "0 has 8 outputs, which 3 ranks do not divide" in str(cut(3, "rotated", 3))


class NoEmpty(nn.Module):
    """Reads the first token."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x[0]


class Three(nn.Module):
    """Stacked experts."""

    experts = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(self.experts, 4, 4))

    def forward(self, x: Tensor, top_index: Tensor, top_weights: Tensor) -> Tensor:
        raise NotImplementedError


class Dropping(Three):
    experts = 4

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)


def changed(change: Any) -> list[str]:
    _, model, _ = build(SEPARATE)
    change(model)
    return rotatable(model, 2)[1]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            lambda model: setattr(model, "wpe", nn.Embedding(15, 32)),
            "wpe has 15 rows, which 2 ranks do not divide",
        ),
        (
            lambda model: setattr(model, "wpe", nn.Embedding(16, 32, padding_idx=3)),
            "wpe is an embedding with settings of its own",
        ),
        (lambda model: model.head.register_forward_hook(lambda *_: None), "head has hooks"),
        (
            lambda model: setattr(model.ln_f, "weight", model.h[0].attn.q_proj.weight),
            "shares its weight with ln_f.weight",
        ),
        (
            lambda model: setattr(model, "experts", nn.ModuleList([nn.Linear(8, 8).requires_grad_(False)])),
            "experts.0 is of an expert with frozen weights",
        ),
        (
            lambda model: setattr(
                model, "experts", nn.ModuleList([nn.Sequential(nn.Linear(8, 8), NoEmpty())])
            ),
            "experts.0.0 is of an expert that does not run on zero tokens (IndexError)",
        ),
        (
            lambda model: setattr(model, "conv", nn.Conv2d(6, 6, 3, groups=3)),
            "conv has 3 groups, which 2 ranks do not divide",
        ),
        (
            lambda model: setattr(model, "conv", nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular")),
            "conv is a convolution with padding (1, 1) of circular",
        ),
        (
            lambda model: setattr(model, "conv", nn.ConvTranspose2d(5, 6, 3)),
            "conv has 5 input channels, which 2 ranks do not divide",
        ),
        (lambda model: setattr(model, "more", nn.Bilinear(2, 2, 2)), ""),
        (lambda model: setattr(model, "experts", Dropping()), "experts draws random numbers"),
        (lambda model: setattr(model, "experts", Three()), "experts has 3 experts, which 2 ranks do not"),
    ],
)
def test_layers_that_are_not_plain_are_replicated(change: Any, line: str) -> None:
    found = changed(change)
    assert any(line in each for each in found) if line else not found


def test_layers_that_share_with_a_replicated_layer_are_replicated() -> None:
    assert (
        changed(lambda model: model.head.register_forward_hook(lambda *_: None))[1]
        == "wte shares its weight with head.weight"
    )


def test_apply_refuses_a_plan_of_another_degree_or_model() -> None:
    technique = Rtp()
    context: Any = SimpleNamespace(placement=SimpleNamespace(world_size=2))
    with pytest.raises(ApplyError, match="needs a plan"):
        technique.plan_in({})
    with pytest.raises(ApplyError, match="groups of 4, the config has 2"):
        technique.apply(
            context, DividedPlan(degree=4, layers=("head",), parameters=("head.weight",), divided_bytes=0)
        )


def test_rtp_config_survives_yaml() -> None:
    made = TunedConfig(settings=Settings.of(Execution(), {"sharding.parallel": Rtp(degree=2, in_place=True)}))
    assert load_config(dump_yaml(made)) == made


# -- the rank's step -----------------------------------------------------------------------------------------


def hops(step: Step) -> int:
    ops = [op for op in range(step.ops.n) if "send_next" in step.names[step.ops.name[op]]]
    assert {int(step.ops.resource[op]) for op in ops} <= {Resource.INTRA_LINK}
    assert {int(step.ops.phase[op]) for op in ops} - {Phase.RECOMPUTE} == {
        Phase.FORWARD,
        Phase.BACKWARD,
    }
    return int(step.ops.traffic_bytes[ops].sum())


@pytest.mark.parametrize("in_place", [False, True])
def test_step_has_half_the_weights_and_sends_bytes_by_formula(in_place: bool) -> None:
    made = candidate(KIND, in_place=in_place)
    step = made.program.step
    shapes = {p.name: p.shape for p in step.parameters}
    assert shapes["wte.weight"] == (32, 32)
    assert shapes["h.1.mlp.2.weight"] == (16, 128)
    assert shapes["h.1.mlp.2.bias"] == (32,)
    averaged = [op for op in range(step.ops.n) if "allreduce" in step.names[step.ops.name[op]]]
    assert int(step.ops.traffic_bytes[averaged].sum()) == WHOLE
    assert hops(step) + WHOLE == sum(sent(2, in_place, 2))
    assert (made.program.accumulate, made.program.samples) == (1, 2 * SIZE)


def test_layers_are_never_unsharded() -> None:
    step, plain = candidate(KIND).program.step, rewriter(SEPARATE).recording.at(SIZE)
    largest = max(int(plain.storages.bytes[p.storage]) for p in plain.parameters)
    ops = [op for op in range(step.ops.n) if "send_next" in step.names[step.ops.name[op]]]
    arriving = step.uses.storage[(step.uses.mode > 0) & [op in ops for op in step.uses.op.tolist()]]
    assert max(int(n) for n in step.storages.bytes[arriving]) == largest // 2


def test_peak_is_below_that_of_one_unsharded_layer() -> None:
    def peak_bytes(sharding: dict[str, Any]) -> int:
        choice = Choice.from_document({"execution": {"micro_batch": 2}, "sharding": sharding})
        made = rewriter(MODELS / "head.py", 4).candidate(choice)
        assert isinstance(made, Candidate), made
        return made.program.step.peak_bytes()

    mine = [peak_bytes({"parallel": {"kind": KIND, "in_place": in_place}}) for in_place in (False, True)]
    others = [peak_bytes({"states": {"kind": kind}}) for kind in ("ddp", "zero1", "zero3", "fsdp")]
    assert max(mine) < 0.75 * min(others)


# -- on gloo ranks -------------------------------------------------------------------------------------------


OTHERS: dict[str, dict[str, Any]] = {
    "alone": {},
    "full": {"recompute": {"kind": "full"}},
    "selective": {"recompute": {"kind": "selective"}},
    "copy_out": {"offload": {"activations": {"kind": "copy_out", "min_bytes": 0}}},
}


def assert_as_predicted(
    found: list[Measured], other_slots: dict[str, dict[str, Any]], ranks: int, node: int = 8, **knobs: Any
) -> None:
    """Assert peaks within 2 %, and the bytes of each class of link to the byte; recomputed blocks send their
    weights again.
    """
    degree, in_place = knobs.get("degree", ranks), knobs.get("in_place", False)
    intra, inter = sent(degree, in_place, ranks, knobs.get("accumulate", 1), node)
    again = (HELD - EMBEDDED) * (1 if in_place else (degree - 1) / degree)
    for name, more in other_slots.items():
        made = candidate(KIND, SEPARATE, ranks, more, **knobs).program
        predicted = simulate(made, hardware.detect("cpu")).peak_allocated_bytes
        for rank in found:
            assert (
                cpu_allocator.available() is not None or abs(rank[name][0] - predicted) <= 0.02 * predicted
            ), (
                name,
                rank,
                predicted,
            )
            assert rank[name][1:] == (intra + (again if "recompute" in more else 0), inter), (name, rank)


def check_predicted(other_slots: dict[str, dict[str, Any]], ranks: int, node: int = 8, **knobs: Any) -> None:
    asked = {name: config(KIND, ranks, more, **knobs) for name, more in other_slots.items()}
    assert_as_predicted(run_ranks(measured, ranks, asked, node), other_slots, ranks, node, **knobs)


def both(document: dict[str, Any]) -> tuple[Measured, dict[str, Any]]:
    return measured({"alone": document}), trained(2, document, True)


def test_two_ranks_train_as_one_with_clipping_as_predicted() -> None:
    found = run_ranks(both, 2, config(KIND))
    assert_as_predicted([rank for rank, _ in found], {"alone": {}}, 2)
    assert_trained_as_one([run for _, run in found], trained(2, None, True))
    assert found[0][1]["audit"]["sharding.parallel"] == {"degree": 2, "layers": 15, "rotated_bytes": 54272}


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_peaks_with_activation_techniques(ranks: int, in_place: bool) -> None:
    check_predicted(OTHERS, ranks, in_place=in_place)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs", [{}, {"degree": 2}, {"in_place": True}, {"degree": 2, "accumulate": 4}], ids=str
)
def test_bytes_on_two_nodes(knobs: dict[str, Any]) -> None:
    check_predicted({"alone": {}}, 4, 2, **knobs)


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{}, {"degree": 2}, {"in_place": True}], ids=str)
def test_four_ranks_train_as_one(knobs: dict[str, Any]) -> None:
    assert_trained_as_one(
        run_ranks(trained, 4, 4, config(KIND, 4, **knobs), True), trained(4, None, True), atol=1e-5
    )


def routed(document: dict[str, Any]) -> tuple[tuple[int, int], dict[str, Any]]:
    return bytes_received(document, ROUTED), trained(2, document, True, path=ROUTED)


@pytest.mark.parametrize(
    "other_slots",
    [OTHERS["full"], *(pytest.param(OTHERS[each], marks=pytest.mark.slow) for each in ("alone", "copy_out"))],
    ids=str,
)
def test_convolutions_and_experts_rotate_and_train_as_one(other_slots: dict[str, Any]) -> None:
    """Each rank calls one expert of four, and the others' weights pass it. An expert that no rank has called
    has no gradient and no state, as on one rank.
    """
    made = candidate(KIND, ROUTED, other_slots=other_slots)
    assert {"conv", "depthwise", "layers.1.experts.3.down"} <= set(
        made.plans["sharding.parallel"].document()["layers"]
    )
    found = run_ranks(routed, 2, config(KIND, 2, other_slots, ROUTED))
    wanted = trained(2, None, True, path=ROUTED)
    assert_trained_as_one([run for _, run in found], wanted)
    assert len(wanted["optimizer"]) < sum(1 for _ in build(ROUTED)[1].parameters())
    step = made.program.step
    averaged = [op for op in range(step.ops.n) if "allreduce" in step.names[step.ops.name[op]]]
    predicted = hops(step) + int(step.ops.traffic_bytes[averaged].sum())
    assert [n_bytes for n_bytes, _ in found] == [(predicted, 0)] * 2


STACKED, HASHED, SORTED, MIXTRAL = (
    MODELS / f"{name}.py" for name in ("stacked_experts", "hashed_experts", "sorted_experts", "mixtral")
)


def stacked(
    document: dict[str, Any], path: Path, accumulate: int
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    return measured({"": document}, path=path)[""], trained(2, document, True, accumulate, path=path)


@pytest.mark.parametrize(
    ("path", "knobs"),
    [
        (HASHED, {"in_place": True, "accumulate": 2}),
        (STACKED, {}),
        pytest.param(HASHED, {"other_slots": OTHERS["full"]}, marks=pytest.mark.slow),
        pytest.param(HASHED, {"other_slots": OTHERS["copy_out"]}, marks=pytest.mark.slow),
        pytest.param(SORTED, {}, marks=pytest.mark.slow),
        pytest.param(MIXTRAL, {"in_place": True}, marks=pytest.mark.slow),
    ],
    ids=lambda each: each.stem if isinstance(each, Path) else str(each),
)
def test_stacked_experts_rotate_and_train_as_one(path: Path, knobs: dict[str, Any]) -> None:
    """With rows for each shard that differ between ranks, on one of which some get none."""
    accumulate = knobs.get("accumulate", 1)
    made = candidate(KIND, path, **knobs)
    experts = [each for each in made.plans["sharding.parallel"].document()["layers"] if "experts" in each]
    assert len(experts) == 2
    found = run_ranks(stacked, 2, config(KIND, path=path, **knobs), path, accumulate)
    assert_trained_as_one([run for _, run in found], trained(2, None, True, accumulate, path=path), atol=1e-5)
    step = made.program.step
    averaged = [op for op in range(step.ops.n) if "allreduce" in step.names[step.ops.name[op]]]
    n_bytes = accumulate * hops(step) + int(step.ops.traffic_bytes[averaged].sum())
    assert [measured[1:] for measured, _ in found] == [(n_bytes, 0)] * 2
    if path == HASHED and cpu_allocator.available() is None:  # the choices of the busiest rank are known
        predicted = simulate(made.program, hardware.detect("cpu")).peak_allocated_bytes
        assert max(measured[0] for measured, _ in found) == pytest.approx(predicted, rel=0.02)


def test_stacked_experts_cross_the_link_three_times() -> None:
    step = candidate(KIND, HASHED).program.step
    rotated = {p.name: int(step.storages.bytes[p.storage]) for p in step.parameters if len(p.shape) > 1}
    # Half of each weight: forward, backward, and the sum of its gradient; an embedding skips the second.
    assert hops(step) == 3 * sum(rotated.values()) - rotated["embedding.weight"]


class EvenNet(TiedNet):
    """A `TiedNet` with some rows that four ranks divide, and some that they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
        self.head.weight = self.wte.weight
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3))


even = functools.partial(build_net, EvenNet)


class Upsampled(nn.Module):
    """Transposed convolutions of one and two dimensions, in groups, with an output size, without a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1)
        self.grouped = nn.ConvTranspose1d(8, 12, 3, groups=4, dilation=2, bias=False)
        self.plain, self.back = nn.Conv1d(6, 8, 1), nn.Conv1d(12, 4, 1)
        self.image = nn.ConvTranspose2d(4, 2, 2, output_padding=0, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x, output_size=[2 * x.shape[2]])
        y = self.back(self.grouped(self.plain(y).tanh()).tanh()).tanh()
        return torch.stack([self.image(each) for each in y.unsqueeze(3)])


def upsampled(in_place: bool, document: bool) -> tuple[dict[str, Any], list[str]]:
    """Train three steps; each rank has its own samples, the plain run all."""
    torch.manual_seed(0)
    model = Upsampled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layers = rotatable(model, 2)[0]
    if document:
        settings = {"sharding": {"parallel": {"kind": KIND, "in_place": in_place}}}
        apply(model, optimizer, {"settings": settings, "plan": plan_of(2, *layers)}, strict=False)
    torch.manual_seed(1)
    for _ in range(3):
        x = torch.randn(4, 4, 5)
        mine = x.chunk(2)[torch.distributed.get_rank()] if document else x
        model(mine).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in model.state_dict().items()
    }
    return {name: each.clone() for name, each in whole.items()}, layers


@pytest.mark.parametrize("in_place", [False, True])
def test_transposed_convolutions_rotate_and_train_as_one(in_place: bool) -> None:
    wanted, layers = upsampled(in_place, document=False)
    assert layers == ["wide", "grouped", "plain", "back", "image"]
    for found, _ in run_ranks(upsampled, 2, in_place, True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


Case = tuple[int, bool, int, float, bool]


def plan_of(degree: int, *layers: str) -> dict[str, Any]:
    fields = {"parameters": [f"{name}.weight" for name in layers], "divided_bytes": 0}
    return {"sharding.parallel": {"degree": degree, "layers": list(layers), **fields}}


def steps_of(cases: list[Case]) -> dict[Case, Any]:
    found = {}
    for degree, in_place, parts, clip, says_last in cases:
        model, optimizer = even()
        technique = {"kind": KIND, "degree": degree, "in_place": in_place}
        plan = plan_of(degree, *rotatable(model, degree)[0])
        document = {"settings": {"sharding": {"parallel": technique}}, "plan": plan}
        tuned = apply(model, optimizer, document, loss=loss, strict=False)
        found[degree, in_place, parts, clip, says_last] = on_this_rank(
            model, optimizer, tuned, batches, parts, clip, says_last
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_accumulation_and_clipping_train_as_one_rank(ranks: int) -> None:
    """Also in a loop that does not mark the last micro-batch."""
    cases = list(product({2, ranks}, (False, True), (1, 4), (0.0, 0.05), (False, True)))
    found = run_ranks(steps_of, ranks, cases, deadline_s=280)
    wanted = {clip: alone(*even(), batches, clip) for clip in (0.0, 0.05)}
    for case in cases:
        check([rank[case] for rank in found], wanted[case[3]])


class TestRtp(ShardedSuite):
    technique = Rtp
    models: ClassVar[dict[str, Path]] = {"separate": SEPARATE}
    variants = (Rtp(), Rtp(in_place=True))
    accumulate, peak_rel, briefly = 2, 0.02, False

    @pytest.mark.slow
    @pytest.mark.parametrize("variant", variants, ids=str)
    def test_convolutional_net_trains_as_the_plain_model(
        self, variant: Rtp, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(self), "models", {"cnn": ZOO["cnn_bn"]})
        self.check_training("cnn", variant)


class Branches(nn.Module):
    """One of two layers of one shape, chosen by the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.high(x) if x[0, 0] > 0 else self.low(x)
        return out


def branched(others_from: int) -> list[Any]:
    """Return the error of this rank and its step, if ranks take other branches from a step on."""
    torch.manual_seed(0)
    model = nn.Sequential(Branches(), nn.Linear(8, 8))
    plan = plan_of(2, "0.low", "0.high", "1")
    settings = {"sharding": {"parallel": {"kind": KIND}}}
    tuned = apply(
        model, torch.optim.SGD(model.parameters()), {"settings": settings, "plan": plan}, strict=False
    )
    for step in range(1, 9):
        sign = -1 if torch.distributed.get_rank() and step >= others_from else 1
        try:
            with torch.no_grad():
                tuned.model(sign * torch.ones(1, 8))
        except ApplyError as error:
            return [step, error.code]
    return []


@pytest.mark.slow
@pytest.mark.parametrize(("others_from", "noticed_at"), [(1, 1), (3, 4)])
def test_ranks_that_call_other_layers_raise(others_from: int, noticed_at: int) -> None:
    assert run_ranks(branched, 2, others_from) == [[noticed_at, "MT391"]] * 2
