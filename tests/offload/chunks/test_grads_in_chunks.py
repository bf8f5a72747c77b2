"""Gradients in the places of their weights: blocks called again, and ops that still read a weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.suites.block_offload_suite import OWN
from support.zoo_paths import ZOO
from torch import Tensor

from memtune.api import Tuned, apply
from memtune.offload.gradients.block_grad_ready_pass import weights_are_free
from memtune.search_spaces.offload.states.patrickstar import PatrickStar
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import build, settings_of, train, train_under

CHUNKS = PatrickStar(kind="patrickstar", chunk_bytes=70_000)
pytestmark = pytest.mark.usefixtures("one_thread")
READS_WEIGHT_LATER = "self.norm(x))", "self.norm(x * self.norm.weight.detach()))"


def document(model: Path, **changed: Any) -> dict[str, Any]:
    """The config of `model` in chunks, with its plan."""
    plan = CHUNKS.plan(plain_program(model), target_of(CHUNKS)).document()
    return {"settings": settings_of(CHUNKS), "plan": {"offload.states": {**plan, **changed}}}


def started(model: Path, config: dict[str, Any]) -> tuple[Any, Tuned]:
    workload, plain, optimizer = build(model)
    return workload, apply(plain, optimizer, config, loss=workload.loss, strict=False)


@pytest.fixture(scope="module")
def model_reading_weight_later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose backward reads a weight after its gradient is ready."""
    text = ZOO["tied"].read_text()
    assert READS_WEIGHT_LATER[0] in text
    path = tmp_path_factory.mktemp("late") / "late.py"
    path.write_text(text.replace(*READS_WEIGHT_LATER))
    return path


def test_block_called_while_its_gradients_are_in_place_has_its_weights() -> None:
    """Call it inside backward when the first block's begins: the gradients of the others are in chunks of
    their own.
    """
    config = document(ZOO["tied"], chunk_bytes=66_816, slots=[3] * 6)
    workload, tuned = started(ZOO["tied"], config)
    layers: Any = tuned._context.model.get_submodule("layers")
    x = torch.randn(2, 64)
    found: list[Tensor] = []

    def call(gradient: Tensor) -> None:
        with torch.no_grad():
            found.extend(layer(x) for layer in layers[1:])

    def watch(module: Any, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(call)

    handle = layers[0].register_forward_hook(watch)
    torch.manual_seed(0)
    tuned.step([workload.make_batch(2)])
    handle.remove()
    _, plain, _ = build(ZOO["tied"])
    others: Any = plain.get_submodule("layers")
    assert len(found) == 2
    assert all(torch.equal(one, other(x)) for one, other in zip(found, others[1:], strict=True))
    assert tuned.audit()["offload.states"]["placed_bytes"] == sum(
        p.nbytes for layer in others for p in layer.parameters()
    )


def test_backward_can_run_again_over_a_retained_graph() -> None:
    """Gradients of two passes add up; the weight that autograd saved is restored with the version that it
    saved.
    """
    grads: list[list[np.ndarray[Any, Any]]] = []
    for config in ({"settings": {}}, document(ZOO["tied"])):
        workload, tuned = started(ZOO["tied"], config)
        torch.manual_seed(0)
        loss = workload.loss(tuned.model, workload.make_batch(2))
        loss.backward(retain_graph=True)
        loss.backward()
        tuned.optimizer.step()
        grads.append([value.numpy() for value in tuned.state_dict()["model"].values()])
    assert all(np.array_equal(one, other) for one, other in zip(*grads, strict=True))


def test_gradients_are_offloaded_in_their_own_memory_if_a_weight_is_read_later(
    model_reading_weight_later: Path,
) -> None:
    config = document(model_reading_weight_later)
    assert "gradients" not in config["plan"]["offload.states"]
    assert [
        weights_are_free(plain_program(each).step) for each in (model_reading_weight_later, ZOO["tied"])
    ] == [
        False,
        True,
    ]
    got, wanted = train_under(model_reading_weight_later, config), train(model_reading_weight_later, OWN)
    assert all(np.array_equal(got.weights[name], value) for name, value in wanted.weights.items())


def test_in_place_plan_for_a_weight_read_later_raises(model_reading_weight_later: Path) -> None:
    workload, tuned = started(
        model_reading_weight_later, document(model_reading_weight_later, gradients="in_place")
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tuned.step([workload.make_batch(2)])
