"""Suite for techniques that offload blocks and update them on the host."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache, partial
from threading import Event
from typing import Any, ClassVar

import pytest
import torch
from support.zoo_paths import ZOO

from memtune.api import Tuned, apply
from memtune.errors import MemtuneError
from memtune.offload.core.offloaded_parameter import allocate_together
from memtune.program.step import Resource, Step
from memtune.runtime.memory_tiers import DEVICE, mark
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.technique import Technique
from memtune.testing import TechniqueSuite, differences, train
from memtune.testing.training import Run, build, device_under_test, settings_of

NATIVE = OptimizerCpu(kind="optimizer_cpu", update="native")
OWN = OptimizerCpu(kind="optimizer_cpu")


def without_gradients(run: Run) -> Run:
    """Return the run without gradients of blocks, which are offloaded and used when backward returns."""
    return replace(run, gradients=[])


def to_the_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` on the device under test, in the tier of the device."""
    found = tensor.to(device_under_test())
    mark(found, DEVICE)
    return found


def require_waits(read: Callable[[], None], goes_on: Event) -> None:
    """Check that `read`, on its own thread, returns only after `goes_on` has been set."""
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read)
        assert wait([reading], timeout=0.2).not_done
        goes_on.set()
        reading.result(60)


def refusal(technique: Technique, plan: dict[str, Any]) -> MemtuneError:
    """Return the error with which `apply` refuses `plan` for `technique`."""
    _, model, optimizer = build(ZOO["gpt"])
    document = {"settings": settings_of(technique), "plan": {technique.slot: plan}}
    with pytest.raises(MemtuneError) as caught:
        apply(model, optimizer, document, strict=False)
    return caught.value


@cache
def in_place(model: str, update: OptimizerCpu) -> Run:
    """Return the same update without block offload."""
    return without_gradients(train(ZOO[model], update))


def block_bytes(step: Step) -> list[int]:
    """Return the bytes of each block's parameters in a plain step."""
    rows = [(p.block, int(step.storages.bytes[p.storage])) for p in step.parameters if p.block >= 0]
    return [sum(n for block, n in rows if block == i) for i in range(len(step.blocks))]


def total(step: Step, resource: Resource) -> int:
    return int(step.ops.traffic_bytes[step.ops.resource == resource].sum())


class LayersSuite(TechniqueSuite):
    """Suite for techniques that offload blocks and update them on the host.

    Attributes:
        update: The reference that must be bitwise equal: a native update in backward, or the user's own
            optimizer as in the plain model.
    """

    others: ClassVar = ZOO
    update: ClassVar[OptimizerCpu] = NATIVE

    @pytest.fixture(autouse=True)
    def _update_first(self, _one_thread: None) -> None:
        """Train the reference before a defect is seeded."""
        for model in self.models:
            in_place(model, self.update)

    def check_training(self, model: str, variant: Technique) -> None:
        """Check that losses and weights are bitwise equal to the same update in place."""
        found = differences(without_gradients(train(ZOO[model], variant)), in_place(model, self.update))
        assert not found, f"{len(found)} differences: {'; '.join(found[:5])}"

    @pytest.mark.drawn(8)
    @pytest.mark.parametrize("micro_batches", [1, 3])
    def test_five_steps_are_bitwise_equal_to_update_in_place(self, micro_batches: int) -> None:
        """Also with accumulation: the host sums in the order of the device."""
        found, wanted = (
            train(ZOO["gpt"], each, steps=5, micro_batches=micro_batches)
            for each in (self._any(), self.update)
        )
        assert not differences(without_gradients(found), without_gradients(wanted))

    def _any(self) -> Technique:
        return (self.variants or (self.default(),))[0]

    def sabotage(self, tuned: Tuned) -> bool:
        check: Any = tuned._context.checks["offload.states"]
        store: Any = check.args[0] if isinstance(check, partial) else check.__self__
        allocate_together(store.units.pieces[0])
        return True
