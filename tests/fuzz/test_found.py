"""Cases that the fuzzer found, made small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuzz import run
from fuzz.cases import Case
from fuzz.models import ModelSpec
from fuzz.ranks import Ranks
from fuzz.run import Recorded

pytestmark = pytest.mark.usefixtures("one_thread")


SMALL = {"min_bytes": 0}


def case(
    *pieces: str,
    loss: str = "mean",
    accumulate: int = 1,
    ranks: int = 1,
    blocks: int = 2,
    tied: bool = False,
    **slots: Any,
) -> Case:
    """Return a case with the technique or (technique, knobs) of each slot, dots written as `__`."""
    model = ModelSpec(pieces, blocks, loss, "fixed", tied=tied, nested=False, adam=False)
    given = {slot: value if isinstance(value, tuple) else (value, {}) for slot, value in slots.items()}
    settings = tuple(
        (slot.replace("__", "."), (("kind", kind), *knobs.items())) for slot, (kind, knobs) in given.items()
    )
    return Case(model, settings, (), accumulate, own_loop=False, ranks=ranks)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    "found",
    [
        # The first block takes the batch itself, which stays on the device.
        case("norm", blocks=1, accumulate=3, offload__states="mobius"),
        # The second run's tensors are returned to a backward that reads none of them.
        case("mlp", loss="penalty", recompute="balanced"),
        case("custom", "mlp", loss="penalty", recompute=("selective", {"matmuls": "every_second"})),
        # Of three micro-batches one holds all gradients through its backward.
        case("attention", accumulate=3, execution__order="roam", offload__activations=("copy_out", SMALL)),
        # No call follows that of the last block, which is the first one too: backward completes its copy.
        case("mlp", blocks=3, tied=True, offload__activations=("copy_out", SMALL | {"target": "ssd"})),
        # FSDP2 gathers the weights of blocks that it calls, also of those that compute nothing.
        case("unused", blocks=4, ranks=2, sharding__states=("zero3", {"blocks_per_unit": 2})),
        # Losses of routers are attributes, which outlive the step with their graph.
        case("attention", "router", loss="routed", blocks=4, recompute="selective"),
        # The input's own gradient lives until backward has returned.
        case("experts", loss="penalty", ranks=2, recompute="full", sharding__states="zero1"),
    ],
    ids=lambda found: f"{found.settings[-1][1][0][1]}-{found.model.pieces[0]}",
)
def test_recorded_peak_is_the_predicted_one(
    found: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SMALL_BYTES", 0)
    outcome = Recorded(found.model, None, tmp_path, found.ranks).peak(found)
    assert outcome.kind == "equal", outcome.text


@pytest.mark.parametrize(
    "found",
    [
        # Blocks are the first layer, the norm and the head: the norm alone saves something.
        case("norm", blocks=1, recompute="every_nth"),
        case("attention", recompute=("selective", {"matmuls": "every_second"})),
    ],
    ids=["every_nth", "every_second"],
)
def test_recompute_of_nothing_is_refused_before_a_trial(found: Case, tmp_path: Path) -> None:
    assert "autograd saves nothing" in Recorded(found.model, None, tmp_path).peak(found).text


def test_second_backward_through_updated_weights_is_named_by_recompute(tmp_path: Path) -> None:
    found = case(
        "batch_norm",
        "attention",
        "experts",
        blocks=4,
        recompute=("every_nth", {"n": 3}),
        offload__states="stronghold",
    )
    twice = replace(found, behaviours=("backward_twice",), own_loop=True)
    outcome = Recorded(found.model, None, tmp_path).outcome(twice)
    assert outcome.code == "MT307", outcome.text
    assert "a second backward through it finds those of an update" in outcome.text
    assert outcome.kind == "refused"


def test_tiles_of_layers_that_are_blocks_are_refused_before_a_trial(tmp_path: Path) -> None:
    """The forward of a block is recompute's; the first layer and the head are the blocks here."""
    tiles = "zero_infinity", {"parameters": "host", "tiles": 4}
    found = case("positions", "view", recompute="balanced", offload__states=tiles)
    outcome = Recorded(found.model, None, tmp_path).outcome(found)
    assert outcome.kind == "refused", outcome.text


def test_attention_of_blocks_that_run_nothing_is_refused(tmp_path: Path) -> None:
    found = case("unused", ranks=2, sharding__parallel="head_context")
    outcome = Recorded(found.model, None, tmp_path, found.ranks).peak(found)
    assert outcome.kind == "refused", outcome.text


def test_layer_major_order_of_draws_in_python_is_refused_before_a_trial(tmp_path: Path) -> None:
    """No op shows them; the order was refused in training, of a config that had been planned."""
    found = case("draw", "mlp", accumulate=2, offload__states="harmony")
    outcome = Recorded(found.model, None, tmp_path).peak(found)
    assert outcome.kind == "refused", outcome.text
    assert "draws random numbers in Python" in outcome.text


def test_layer_major_order_of_draws_of_an_own_generator_is_refused_before_a_trial(tmp_path: Path) -> None:
    """On two ranks stages drew other numbers in their second run."""
    found = case("own_generator", ranks=2, offload__states=("harmony", {"parallelism": "pipeline"}))
    outcome = Recorded(found.model, None, tmp_path, found.ranks).peak(found)
    assert outcome.kind == "refused", outcome.text
    assert "draws random numbers in Python" in outcome.text


def test_layer_major_order_of_draws_that_begin_in_a_later_step_is_refused_then(tmp_path: Path) -> None:
    """The recorded step draws nothing; forward packs drew for all micro-batches first, and backward again."""
    found = case("late_draw", "mlp", accumulate=2, offload__states="harmony")
    outcome = Recorded(found.model, None, tmp_path).outcome(found)
    assert outcome.kind == "refused", outcome.text
    assert "draws random numbers in Python" in outcome.text


def test_schedules_know_packed_sequences_of_known_lengths(tmp_path: Path) -> None:
    """Torch reads the lengths in C++: they were recorded, and not captured in training."""
    found = case("packed", "attention", recompute="attention_boundary")
    outcome = Recorded(found.model, None, tmp_path).outcome(found)
    assert outcome.kind == "equal", outcome.text


def test_batch_norm_that_is_kept_finds_its_statistics_as_saved(tmp_path: Path) -> None:
    found = case("unfused", "batch_norm", loss="penalty", recompute="balanced")
    outcome = Recorded(found.model, None, tmp_path).outcome(found)
    assert outcome.kind == "equal", outcome.text


def test_schedules_know_the_layout_of_batch_norm(tmp_path: Path) -> None:
    """On CPU it returns contiguous tensors, whatever it is given; fake ones keep the layout."""
    found = case("view", "batch_norm", "attention", recompute="attention_boundary")
    outcome = Recorded(found.model, None, tmp_path).outcome(found)
    assert outcome.kind == "equal", outcome.text


def test_state_dict_has_weights_of_experts_that_the_user_wrote(tmp_path: Path) -> None:
    """The last write, after which no step follows, reaches the records and their checksums."""
    found = replace(case("experts", offload__states="moesys"), behaviours=("decay_weights",))
    outcome = Recorded(found.model, None, tmp_path).outcome(found)
    assert outcome.kind == "equal", outcome.text


def test_recompute_leaves_the_storage_of_offloaded_weights_resizable(tmp_path: Path) -> None:
    """The check of the second forward reads values of saved tensors, among them views of weights."""
    found = case("experts", blocks=1, recompute="full", offload__states="moesys")
    outcome = Recorded(found.model, None, tmp_path).outcome(found)
    assert outcome.kind == "equal", outcome.text


@pytest.mark.parametrize("kind", ["l2l", "stronghold"])
def test_changed_gradients_are_refused_where_all_parameters_are_in_blocks(kind: str, tmp_path: Path) -> None:
    """The first layer and the head are the blocks, and one of them keeps its gradients for the step."""
    found = replace(case("positions", offload__states=kind), behaviours=("halve_grads",), own_loop=True)
    outcome = Recorded(found.model, None, tmp_path).outcome(found)
    assert outcome.kind == "refused", outcome.text
    assert outcome.code == "MT364"


@pytest.mark.slow
def test_changed_shards_are_refused_where_all_parameters_are_in_blocks(tmp_path: Path) -> None:
    found = case("custom", blocks=1, ranks=2, sharding__states="fsdp", offload__states="l2l")
    ranks = Ranks(2)
    try:
        outcome = Recorded(found.model, ranks, tmp_path).outcome(replace(found, behaviours=("halve_grads",)))
    finally:
        ranks.close()
    assert outcome.kind == "refused", outcome.text
    assert outcome.code == "MT364"


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["clamp_data", "replace_grads"])
@pytest.mark.parametrize(
    "found",
    [
        # The head is on the device when backward ends, and its gradient on the host.
        case(
            "separate",
            blocks=1,
            ranks=2,
            sharding__states="fsdp",
            offload__states=("zero_infinity", {"parameters": "host"}),
        ),
        case("mlp", ranks=2, sharding__states="fsdp", offload__states="zero_offload"),
        case("mlp", ranks=2, sharding__states="ddp", offload__states="zero_offload"),
    ],
    ids=lambda found: "-".join(fields[0][1] for _, fields in found.settings),
)
def test_changed_gradients_of_ranks_train_as_the_plain_model(
    found: Case, behaviour: str, tmp_path: Path
) -> None:
    ranks = Ranks(2)
    try:
        outcome = Recorded(found.model, ranks, tmp_path).outcome(replace(found, behaviours=(behaviour,)))
    finally:
        ranks.close()
    assert outcome.kind == "equal", outcome.text


@pytest.mark.slow
def test_gradients_of_zero_ranks_that_are_offloaded_are_refused_where_they_are_read(tmp_path: Path) -> None:
    found = case("mlp", ranks=2, sharding__states="zero1", offload__states="zero_offload")
    ranks = Ranks(2)
    try:
        outcome = Recorded(found.model, ranks, tmp_path).outcome(replace(found, behaviours=("halve_grads",)))
    finally:
        ranks.close()
    assert outcome.kind == "refused", outcome.text
    assert "divided over ranks" in outcome.text


@pytest.mark.parametrize(
    ("found", "behaviours"),
    [
        # Clips and the scaler change the shard's gradient, and the step uses the assigned one.
        (
            case("mlp", ranks=2, sharding__states="zero1", offload__states="smart_infinity"),
            ("clip_value", "replace_grads"),
        ),
        (case("mlp", ranks=2, sharding__states="zero1"), ("replace_grads", "scaler")),
    ],
    ids=["clipped", "unscaled"],
)
def test_assigned_gradients_of_zero_ranks_are_the_ones_that_are_rescaled(
    found: Case, behaviours: tuple[str, ...], tmp_path: Path
) -> None:
    ranks = Ranks(2)
    try:
        outcome = Recorded(found.model, ranks, tmp_path).outcome(replace(found, behaviours=behaviours))
    finally:
        ranks.close()
    assert outcome.kind == "equal", outcome.text


@pytest.mark.parametrize(
    ("found", "behaviours"),
    [
        # The frozen weights move by momentum, although the step has freed their gradients.
        (case("mlp", offload__states="zero_offload"), ("freeze", "zero_in_place")),
        (case("mlp", offload__states=("optimizer_cpu", {"update": "user"})), ("freeze", "zero_in_place")),
        # Among the frozen weights is the smallest one, whose gradient has a placeholder.
        (case("experts", "view", offload__states="zero_offload"), ("freeze", "zero_in_place")),
        # The frozen schedule's gradients are views.
        (case("dropout", blocks=1, execution__order="roam"), ("autograd_grad", "zero_in_place")),
    ],
    ids=["zero_offload", "optimizer_cpu", "placeholder", "views"],
)
def test_gradients_that_are_zeroed_in_place_remain_zeros(
    found: Case, behaviours: tuple[str, ...], tmp_path: Path
) -> None:
    loop = replace(found, behaviours=behaviours, own_loop=True)
    outcome = Recorded(found.model, None, tmp_path).outcome(loop)
    assert outcome.kind == "equal", outcome.text


def test_gradients_that_a_loop_adds_up_itself_are_refused_where_an_update_has_used_them(
    tmp_path: Path,
) -> None:
    """The update in the last backward had those of the earlier micro-batches alone."""
    found = replace(
        case("view", accumulate=2, offload__states="l2l"), behaviours=("autograd_grad",), own_loop=True
    )
    outcome = Recorded(found.model, None, tmp_path).outcome(found)
    assert outcome.kind == "refused", outcome.text
    assert "has been used and freed by an update inside backward" in outcome.text


@pytest.mark.slow
def test_smallest_parameter_of_ranks_that_a_loop_freezes_is_named(tmp_path: Path) -> None:
    """Planning has seen its gradient; without it, clipping by norm in this step could not be noticed."""
    found = case(
        *("weight_norm", "checkpoint"),
        loss="tokens",
        ranks=2,
        sharding__states="zero1",
        recompute=("selective", {"matmuls": "every_second"}),
        split="tiled",
        offload__states=("zero_offload", {"update": "native", "ratio": None}),
        offload__activations=("copy_out", SMALL | {"ratio": 1.0}),
    )
    # The first of two groups has every second parameter, and the loop freezes every third one.
    found = replace(found, model=replace(found.model, groups=True, nested=True))
    ranks = Ranks(2)
    try:
        outcome = Recorded(found.model, ranks, tmp_path).outcome(replace(found, behaviours=("freeze",)))
    finally:
        ranks.close()
    assert outcome.kind == "refused", outcome.text
    assert "The smallest parameter gets no gradient" in outcome.text


def test_schedules_of_blocks_that_sample_distributions_take_their_checks_as_true(tmp_path: Path) -> None:
    """Recordings assume it and note it; the checks read data, which no capture has."""
    found = case("sampled", "attention", blocks=1, recompute="attention_boundary")
    outcome = Recorded(found.model, None, tmp_path).outcome(found)
    assert outcome.kind == "equal", outcome.text
