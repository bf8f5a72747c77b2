"""What tests of techniques share whose blocks come and go and are updated on the host."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
from threading import Event
from typing import ClassVar

import pytest
from support.zoo_paths import ZOO

from memtune.api import Tuned
from memtune.program.step import Resource, Step
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.technique import Technique
from memtune.testing import TechniqueSuite, differences, train
from memtune.testing.training import Run

NATIVE = OptimizerCpu(kind="optimizer_cpu", update="native")
OWN = OptimizerCpu(kind="optimizer_cpu")


def without_gradients(run: Run) -> Run:
    """Gradients of blocks have left, and been used, when backward returns."""
    return replace(run, gradients=[])


def require_waits(read: Callable[[], None], goes_on: Event) -> None:
    """`read`, on a thread of its own, is over only after `goes_on` has been set."""
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read)
        assert wait([reading], timeout=0.2).not_done
        goes_on.set()
        reading.result(60)


@cache
def in_place(model: str, update: OptimizerCpu) -> Run:
    """The same update without blocks that come and go."""
    return without_gradients(train(ZOO[model], update))


def block_bytes(step: Step) -> list[int]:
    """Bytes of each block's parameters, of a plain step."""
    rows = [(p.block, int(step.storages.bytes[p.storage])) for p in step.parameters if p.block >= 0]
    return [sum(n for block, n in rows if block == i) for i in range(len(step.blocks))]


def total(step: Step, resource: Resource) -> int:
    return int(step.ops.traffic_bytes[step.ops.resource == resource].sum())


class LayersSuite(TechniqueSuite):
    """Of techniques whose blocks come and go and are updated on the host.

    Attributes:
        update: What they are equal to, to the bit: natively in backward, or by the user's own optimizer, as
            the plain model is.
    """

    others: ClassVar = ZOO
    update: ClassVar[OptimizerCpu] = NATIVE

    @pytest.fixture(autouse=True)
    def _update_first(self, _one_thread: None) -> None:
        """What they are compared with is trained before a defect is seeded."""
        for model in self.models:
            in_place(model, self.update)

    def check_training(self, model: str, variant: Technique) -> None:
        """Losses and weights are those of the same update in place, to the bit."""
        found = differences(without_gradients(train(ZOO[model], variant)), in_place(model, self.update))
        assert not found, f"{len(found)} differences: {'; '.join(found[:5])}"

    @pytest.mark.parametrize("micro_batches", [1, 3])
    def test_five_steps_have_the_bits_of_the_update_in_place(self, micro_batches: int) -> None:
        """With accumulation as well: the host adds up in the order in which the device would."""
        found, wanted = (
            train(ZOO["gpt"], each, steps=5, micro_batches=micro_batches)
            for each in (self._any(), self.update)
        )
        assert not differences(without_gradients(found), without_gradients(wanted))

    def _any(self) -> Technique:
        return (self.variants or (self.default(),))[0]

    def sabotage(self, tuned: Tuned) -> bool:
        block = tuned._context.model.get_submodule(tuned._context.blocks[0])
        for parameter in block.parameters():
            parameter.untyped_storage().resize_(parameter.nbytes)
        return True
