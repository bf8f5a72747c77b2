"""Suite for techniques with memtune's own allocator: `from arena_suite import ArenaSuite`."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.errors import ApplyError
from memtune.memory import arena
from memtune.memory.ledger import Ledger
from memtune.search_spaces.allocator._own_allocator import SEARCHED
from memtune.search_spaces.offload.activations.copy_out import CopyOut
from memtune.search_spaces.recompute.full import Full
from memtune.technique import Target, Technique
from memtune.testing import TechniqueSuite, differences, train
from memtune.testing.drift_check import plain_program, target_of
from memtune.testing.training import build, one_step, plain, settings_of


def trained(sizes: list[int], technique: Technique | None) -> tuple[list[torch.Tensor], list[str]]:
    """Return losses and final weights over steps of these sizes, and the warnings."""
    workload, model, optimizer = build(ZOO["gpt"])
    tuned = (
        None
        if technique is None
        else apply(model, optimizer, {"settings": settings_of(technique)}, strict=False)
    )
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step, size in enumerate(sizes):
            found.append(
                one_step(workload, model, optimizer, tuned, seed=step, micro_batches=1, size=size)[0]
            )
    if tuned is not None:
        tuned.audit()
    return [*found, *(p.detach() for p in model.parameters())], [str(each.message) for each in told]


def noticed(self: TechniqueSuite) -> None:
    """Check that the audit detects a technique that does nothing: its step itself is equal."""
    _, model, optimizer = build(ZOO["tied"])
    tuned = apply(model, optimizer, {"settings": settings_of(self.default())}, strict=False)
    assert tuned.audit()["allocator"]["kind"] == self.default().kind
    arena.uninstall()
    with pytest.raises(ApplyError, match="MT352"):
        tuned.audit()


class ArenaSuite(TechniqueSuite):
    """On CPU these techniques run only if a config names them, so `fits` skips nothing here."""

    models: ClassVar[Mapping[str, Path]] = {name: ZOO[name] for name in ("gpt", "tied")}
    quick = ("tied",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        cls.test_suite_fails_under = noticed  # type: ignore[method-assign]  # defects of rewrite cannot show: there is none
        super().__init_subclass__(**kwargs)

    @pytest.fixture(autouse=True)
    def _alone(self) -> Iterator[None]:
        yield
        arena.uninstall()
        gc.collect()

    def _refusal(self, model: str, variant: Technique) -> None:
        return

    def check_training(self, model: str, variant: Technique) -> None:
        plain(self.models[model])  # kept by the suite: it is made before there is an arena
        super().check_training(model, variant)

    def check_untouched(self, model: str, variant: Technique) -> None:
        arena.install(variant.settings())  # type: ignore[attr-defined]  # so that each apply makes the same calls
        super().check_untouched(model, variant)

    def sabotage(self, tuned: Any) -> bool:
        arena.uninstall()
        return True

    def test_search_omits_allocator_unless_named(self) -> None:
        assert "budget on CPU" in str(
            self.default().fits(plain_program(ZOO["tied"]), target_of(self.default()))
        )

    def test_search_on_gpus_tries_named_allocator_without_nccl_registration(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program, two = plain_program(ZOO["tied"]), Target(hardware.find("h100-80g"), ranks=2)
        assert "not been measured on a GPU" in str(self.default().fits(program, two))
        monkeypatch.setenv(SEARCHED, "1")
        assert self.default().fits(program, two) is None
        monkeypatch.setenv("TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK", "1")
        assert "NCCL registers" in str(self.default().fits(program, two))
        assert self.default().fits(program, Target(hardware.find("h100-80g"))) is None

    def test_trial_peak_reserved_is_allocator_plus_malloc(self) -> None:
        with Ledger.open("cpu") as ledger:
            before = ledger.live_bytes()  # bytes that other tests keep or have not freed yet
            workload, model, optimizer = build(ZOO["gpt"])
            assert ledger.peak_reserved_bytes() == ledger.peak_allocated_bytes()
            parameters = sum(each.nbytes for each in model.parameters())
            tuned = apply(model, optimizer, {"settings": settings_of(self.default())}, strict=False)
            for step in range(3):
                ledger.reset_peak()
                one_step(workload, model, optimizer, tuned, seed=step, size=8)
            served = arena.statistics().peak_reserved_bytes
            assert ledger.peak_reserved_bytes() >= max(served + parameters, ledger.peak_allocated_bytes())
            assert (
                ledger.peak_reserved_bytes() <= before + served + 1.1 * parameters
            )  # the optimizer's state is the allocator's

    def test_works_with_recompute_and_offload(self) -> None:
        wanted = train(ZOO["gpt"], steps=5)
        assert not differences(
            train(ZOO["gpt"], Full(), CopyOut(min_bytes=0), self.default(), steps=5), wanted
        )
