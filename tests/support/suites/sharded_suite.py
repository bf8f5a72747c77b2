"""Suite for techniques of several ranks: gloo ranks run its checks, and their ledger is compared with
`rewrite`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median_high
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from support.gloo import run_ranks
from support.ranks import model_parallel_runs
from support.ranks.gloo_memory import are_within, freed_to
from support.zoo_paths import ZOO

from memtune import hardware
from memtune.api import apply
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.errors import MemtuneError
from memtune.memory import cpu_allocator
from memtune.memory.ledger import Ledger
from memtune.runtime.memory_tiers import HOST, tier
from memtune.technique import Plan, Target, Technique
from memtune.testing import TechniqueSuite
from memtune.testing.drift_check import BLOCK_BYTES, peak_allocated_bytes, recording_of
from memtune.testing.seeded_defects import Mutation, mutations
from memtune.testing.training import build, device_under_test, on_device, plain, settings_of

RANKS = 2
SPARE_BYTES = 24
"""Scalars of FSDP2 and of gloo's average, a mesh's ranks."""
SPARE_BLOCKS = 4
"""The same on an accelerator."""
NOT_AT_THE_PEAK = ("rewrite frees a tensor one op too late", "rewrite loses an op")
"""Defects of a single op; the ledger on real ranks knows the peak alone."""


# -- what runs on each rank ----------------------------------------------------------------------------------


def peaks(
    path: str,
    settings: dict[str, dict[str, Any]],
    parts: int = 1,
    plans: dict[str, dict[str, Any]] | None = None,
) -> dict[str, tuple[int, list[int]]]:
    """Return per entry of `settings` the bytes that stay between steps, and the peaks of six steps after the
    first two.

    A step has `parts` micro-batches of two samples. `plans` has the plans of entries whose techniques need
    them.
    """
    ledger, found = Ledger.open(device_under_test()), {}
    first = freed_to(ledger)
    for name, chosen in settings.items():
        empty = freed_to(ledger, first + 64)
        workload, model, optimizer = build(Path(path))
        tuned = apply(
            model,
            optimizer,
            {"settings": chosen, "plan": (plans or {}).get(name, {})},
            loss=workload.loss,
            strict=False,
        )
        measured = []
        for _ in range(8):
            with tier(HOST):
                batches = [workload.make_batch(2) for _ in range(parts)]
            ledger.reset_peak()
            tuned.step(batches)
            measured.append(ledger.peak_allocated_bytes() - empty)
        found[name] = (ledger.live_bytes() - empty, measured[2:])
        del model, optimizer, tuned, workload
    return found


def on_rank(
    technique: type[Technique],
    suite: dict[str, Any],
    check: str,
    arguments: tuple[Any, ...],
    defect: str,
    device: str = "cpu",
) -> Any:
    """Run a check of the suite on this rank under the named defect; return its message ('' for none), or the
    peaks.

    Args:
        technique: The one under test.
        suite: Attributes of the suite, and its config as `config`.
        check: The name of a check or test.
        arguments: Of the check.
        defect: The name of a mutation.
        device: Type of the device; each rank has one of its own.
    """
    with on_rank_of(device):
        return _on_rank(technique, suite, check, arguments, defect)


@contextmanager
def on_rank_of(device: str) -> Iterator[None]:
    """Test on this rank's device, not the current one, in a group that sends what is on devices alone."""
    if device == "cpu":
        yield
        return
    from support.simulated_device import devices_alone, races

    rank = dist.get_rank()
    torch.accelerator.set_device_index(0)
    with on_device(torch.device(device, rank)), devices_alone():
        yield
        torch.accelerator.synchronize(rank)
        assert races() == []


def _on_rank(
    technique: type[Technique], suite: dict[str, Any], check: str, arguments: tuple[Any, ...], defect: str
) -> Any:
    config = suite.pop("config")
    suite = {**suite, "_config": lambda self, model, variant: config}
    one = type("OnRank", (TechniqueSuite,), {"__test__": False, "technique": technique, **suite})()
    seeded = {each.name: each for each in mutations(technique)}
    for path in suite["models"].values():
        plain(path)  # what it is compared with is made before the defect
    with seeded[defect].seed(technique) if defect else nullcontext():
        if check == "peaks":
            return peaks(*arguments)
        try:
            getattr(one, check)(*arguments)
        except (AssertionError, MemtuneError) as error:
            return str(error) or type(error).__name__
    return ""


# -- the suite -----------------------------------------------------------------------------------------------


class ShardedSuite(TechniqueSuite):
    """All ranks train on the same samples, so that their mean gradient is the plain model's."""

    models: ClassVar[dict[str, Path]] = {"gpt": ZOO["gpt"]}
    tolerance = 1e-4
    ranks: ClassVar[int] = RANKS
    accumulate: ClassVar[int] = 1
    """Micro-batches of the steps whose peaks are measured; training has two."""
    other_slots: ClassVar[tuple[Technique, ...]] = ()
    """Techniques of other slots that it needs."""
    peak_rel: ClassVar[float] = 0.0
    """Relative tolerance of the peak against the prediction beyond `SPARE_BYTES`."""
    busiest_only: ClassVar[bool] = False
    """True if the prediction is that of the rank with the largest peak."""
    briefly = True
    """True if a short test run also trains and measures the peak."""
    defect = ""
    not_shown: ClassVar[tuple[str, ...]] = NOT_AT_THE_PEAK

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Register the seeded defects by name, for the ranks."""

        @pytest.mark.slow
        @pytest.mark.parametrize(
            "mutation", [m for m in mutations(cls.technique) if m.name not in cls.not_shown], ids=str
        )
        def test_suite_fails_under(self: ShardedSuite, mutation: Mutation) -> None:
            check = {
                "drift": self.check_drift,
                "training": self.check_training,
                "untouched": self.check_untouched,
            }
            self.defect = mutation.name
            with mutation.seed(self.technique), pytest.raises((AssertionError, MemtuneError)):
                check[mutation.shown_by](self._quick()[0], (self.variants or (self.default(),))[0])

        cls.test_suite_fails_under = test_suite_fails_under  # type: ignore[attr-defined]
        super().__init_subclass__(**kwargs)
        pytest.mark.slow(cls.test_failed_apply_leaves_no_trace)  # briefly in memtune/runtime/test_sharding.py
        if not cls.briefly:
            pytest.mark.slow(cls.test_trains_as_the_plain_model)
            pytest.mark.slow(cls.test_rewrite_equals_the_recording_of_apply)

    @pytest.mark.slow
    def test_audit_finds_technique_not_in_effect(self) -> None:
        config = self._config(self._quick()[0], self.default())
        assert not any(self._on_ranks("test_audit_finds_technique_not_in_effect", config=config))

    def check_training(self, model: str, variant: Technique) -> None:
        found = self._on_ranks("check_training", model, variant, config=self._config(model, variant))
        assert not any(found), found

    def check_untouched(self, model: str, variant: Technique) -> None:
        found = self._on_ranks("check_untouched", model, variant, config=self._config(model, variant))
        assert not any(found), found

    def check_drift(self, model: str, variant: Technique) -> None:
        """Check that the peak of a rank's steps equals the prediction."""
        if cpu_allocator.available() is not None:
            pytest.skip(f"no native ledger here: {cpu_allocator.available()}")
        self.check_peak(model, variant)

    def check_peak(self, model: str, variant: Technique) -> None:
        device = device_under_test().type
        wanted = peak_allocated_bytes(self._candidate(model, variant).program.step, device)
        spare_bytes = SPARE_BYTES if device == "cpu" else SPARE_BLOCKS * BLOCK_BYTES
        low, high = wanted * (1 - self.peak_rel), wanted * (1 + self.peak_rel) + spare_bytes
        config = self._config(model, variant)
        settings, plans = {"": config["settings"]}, {"": config["plan"]}
        found = self._on_ranks("peaks", str(self.models[model]), settings, self.accumulate, plans)
        if self.busiest_only:
            found = [max(found, key=lambda rank: median_high(rank[""][1]))]
        for rank in found:
            assert are_within(rank[""][1], low, high), (rank, wanted)

    def _on_ranks(self, check: str, *arguments: Any, config: dict[str, Any] | None = None) -> list[Any]:
        suite = {"models": self.models, "tolerance": self.tolerance, "config": config}
        device = device_under_test().type
        how = (self.technique, suite, check, arguments, self.defect, device)
        return run_ranks(on_rank, self.ranks, *how, device=device, deadline_s=300)

    def _skip_unless_it_fits(self, model: str, variant: Technique) -> None:
        self._candidate(model, variant)

    def _plan(self, model: str, variant: Technique) -> Plan:
        return variant.plan_in(self._candidate(model, variant).plans)

    def _config(self, model: str, variant: Technique) -> dict[str, Any]:
        plans = self._candidate(model, variant).plans
        return {
            "settings": settings_of(*self.other_slots, variant),
            "plan": {slot: plan.document() for slot, plan in plans.items()},
        }

    def _candidate(self, model: str, variant: Technique) -> Candidate:
        execution = {"micro_batch": 2, "accumulate": self.accumulate}
        path, device = self.models[model], device_under_test().type
        cut = (
            model_parallel_runs.rewriter(path, device=device).target.sharded
            if self.technique.slot == "sharding.parallel"
            else None
        )
        rewriter = Rewriter(
            recording_of(path, device),
            Target(hardware.detect(device), self.ranks, sharded=cut),
            validate=False,
        )
        found = rewriter.candidate(
            Choice.from_document({**settings_of(*self.other_slots, variant), "execution": execution})
        )
        assert isinstance(found, Candidate), found
        return found
