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
LATE = "self.norm(x))", "self.norm(x * self.norm.weight.detach()))"


def document(model: Path, **changed: Any) -> dict[str, Any]:
    """The config of `model` in chunks, with its plan."""
    plan = CHUNKS.plan(plain_program(model), target_of(CHUNKS)).document()
    return {"settings": settings_of(CHUNKS), "plan": {"offload.states": {**plan, **changed}}}


def started(model: Path, config: dict[str, Any]) -> tuple[Any, Tuned]:
    workload, plain, optimizer = build(model)
    return workload, apply(plain, optimizer, config, loss=workload.loss, strict=False)


@pytest.fixture(scope="module")
def late_reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose backward reads a weight after its gradient has landed."""
    text = ZOO["tied"].read_text()
    assert LATE[0] in text
    path = tmp_path_factory.mktemp("late") / "late.py"
    path.write_text(text.replace(*LATE))
    return path


def test_a_block_that_is_called_while_its_gradients_are_there_has_its_weights() -> None:
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


def test_backward_may_run_again_over_a_kept_graph() -> None:
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


def test_where_a_weight_is_needed_later_gradients_leave_from_where_they_are(late_reader: Path) -> None:
    config = document(late_reader)
    assert "gradients" not in config["plan"]["offload.states"]
    assert [weights_are_free(plain_program(each).step) for each in (late_reader, ZOO["tied"])] == [
        False,
        True,
    ]
    got, wanted = train_under(late_reader, config), train(late_reader, OWN)
    assert all(np.array_equal(got.weights[name], value) for name, value in wanted.weights.items())


def test_a_plan_that_overlooks_it_fails_and_computes_nothing_wrong(late_reader: Path) -> None:
    workload, tuned = started(late_reader, document(late_reader, gradients="in place"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        tuned.step([workload.make_batch(2)])
