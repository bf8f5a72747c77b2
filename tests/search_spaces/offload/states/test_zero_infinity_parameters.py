"""Parameters that come and go between SSD, host and device beside an optimizer on SSD, as every technique whose blocks do."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from layers_suite import LayersSuite
from zoo_paths import ZOO

from memtune._apply import apply
from memtune.errors import ApplyError
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.testing.training import SEED, build, config_of, one_step

ON_SSD = ZeroInfinity(kind="zero_infinity", parameters="ssd")


@pytest.mark.slow
@pytest.mark.usefixtures("ssd")
class TestParametersOnSsd(LayersSuite):
    technique = ZeroInfinity
    models: ClassVar = {name: ZOO[name] for name in ("tied", "gpt")}
    variants = (ON_SSD, ZeroInfinity(kind="zero_infinity", parameters="host", on_device=1))
    quick = ("tied",)

    @classmethod
    def default(cls) -> ZeroInfinity:
        return ON_SSD

    @pytest.mark.parametrize("model", sorted(set(ZOO) - {"moe"}))  # recorded for real, which keeps the model and its file
    def test_any_model(self, model: str) -> None:
        self._skip_unless_it_fits(model, ON_SSD)
        self.check_drift(model, ON_SSD)
        self.check_training(model, ON_SSD)

    def test_float32_masters_of_bfloat16_parameters(self) -> None:
        self.check_drift("tobf16", ON_SSD.model_copy(update={"update": "master"}))

    def test_weights_that_are_loaded_are_those_that_train(self) -> None:
        workload, model, optimizer = build(ZOO["tied"])
        tuned = apply(model, optimizer, config_of(ZOO["tied"], ON_SSD), strict=False)
        one_step(workload, model, optimizer, tuned, seed=SEED)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        wanted = one_step(workload, model, optimizer, tuned, seed=SEED + 1)
        model.load_state_dict(saved)
        assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
        assert torch.equal(one_step(workload, model, optimizer, tuned, seed=SEED + 1)[0], wanted[0])

    def test_scaled_gradients_are_noticed(self) -> None:
        workload, model, optimizer = build(ZOO["tied"])
        apply(model, optimizer, config_of(ZOO["tied"], ON_SSD), strict=False)
        workload.loss(model, workload.make_batch(2)).backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
        with pytest.raises(ApplyError, match="clipping"):
            optimizer.step()
