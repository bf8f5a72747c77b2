"""Recompute of every block: only the blocks' inputs are saved.

Distinguishing test: no activation made inside a block is saved; every block's ops run twice.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.zoo_paths import ZOO
from torch import nn
from torch.utils.checkpoint import checkpoint

from memtune.api import apply
from memtune.errors import ApplyError
from memtune.program.step import Phase
from memtune.search_spaces.recompute.full import Full
from memtune.testing import TechniqueSuite, rewritten
from memtune.testing.training import build, one_step, settings_of


class TestFull(TechniqueSuite):
    technique = Full
    models = ZOO
    quick = ("tied",)
    drawn_defects = 12  # all: other suites of the slot draw one each

    def test_blocks_save_their_inputs_alone_and_their_ops_run_twice(self) -> None:
        plain, step = rewritten(ZOO["gpt"]), rewritten(ZOO["gpt"], self.default())
        assert [step.saved_bytes(block) for block in range(4)] == [
            2 * 32 * 64 * 4
        ] * 4  # (micro-batch, sequence, width) float32
        inside = (step.ops.block >= 0) & (step.ops.phase == Phase.RECOMPUTE)
        again = Counter(step.names[i] for i in step.ops.name[inside])
        first = Counter(
            plain.names[i]
            for i in plain.ops.name[(plain.ops.block >= 0) & (plain.ops.phase == Phase.FORWARD)]
        )
        assert (
            again["aten.addmm.default"] == first["aten.addmm.default"] == 16
        )  # qkv, out, up, down in each of 4 blocks
        last = Counter(
            {"aten.mul.Tensor": 4, "aten.add.Tensor": 4}
        )  # dropout's product and the sum, after the last tensor saved
        assert first - again == last

    @pytest.mark.parametrize("kind", ["full", "every_nth", "selective", "attention_output"])
    def test_model_without_blocks_is_refused(self, kind: str) -> None:
        model = nn.Linear(2, 1)
        with pytest.raises(ApplyError, match="no blocks to recompute") as caught:
            apply(
                model,
                torch.optim.AdamW(model.parameters()),
                {"settings": {"recompute": {"kind": kind}}},
                strict=False,
            )
        assert caught.value.code == "MT303"

    def test_batchnorm_statistics_are_those_of_one_forward(self) -> None:
        workload, model, optimizer = build(ZOO["cnn_bn"])
        tuned = apply(model, optimizer, {"settings": settings_of(self.default())}, strict=False)
        one_step(workload, model, optimizer, tuned, seed=1, micro_batches=3)
        assert model.get_submodule("layer1.0.bn1").num_batches_tracked == 3
        other_workload, other, other_optimizer = build(ZOO["cnn_bn"])
        one_step(other_workload, other, other_optimizer, None, seed=1, micro_batches=3)
        assert all(torch.equal(one, two) for one, two in zip(model.buffers(), other.buffers(), strict=True))

    def test_graph_that_is_kept_can_be_walked_twice(self) -> None:
        gradients = []
        for tuned in (True, False):
            workload, model, optimizer = build(ZOO["gpt"])
            if tuned:
                apply(model, optimizer, {"settings": settings_of(self.default())}, strict=False)
            torch.manual_seed(3)
            loss = workload.loss(model, workload.make_batch(2))
            loss.backward(retain_graph=True)
            loss.backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))

    def test_forward_without_gradients_keeps_nothing_and_runs_once(self) -> None:
        workload, model, optimizer = build(ZOO["gpt"])
        outputs = []
        batch = workload.make_batch(2)
        tuned = apply(model, optimizer, {"settings": settings_of(self.default())}, strict=False)
        model.eval()
        with torch.no_grad():
            outputs.append(workload.loss(model, batch))
        assert not tuned._context.activations.traffic.forwards
        tuned._context.activations.remove()
        outputs.append(workload.loss(model, batch).detach())
        assert torch.equal(*outputs)

    def test_inside_the_users_own_checkpoint(self) -> None:
        gradients = []
        for tuned in (True, False):
            workload, model, optimizer = build(ZOO["tied"])
            if tuned:
                apply(model, optimizer, {"settings": settings_of(self.default())}, strict=False)
            _checkpointed(model.layers)
            torch.manual_seed(3)
            workload.loss(model, workload.make_batch(2)).backward()
            gradients.append([p.grad for p in model.parameters()])
        assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def _checkpointed(layers: nn.ModuleList) -> None:
    """The user wraps each block once more."""
    for layer in layers:
        inner = layer.forward
        layer.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
