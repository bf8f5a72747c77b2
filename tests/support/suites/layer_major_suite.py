"""Suite for techniques that run packs of blocks over all micro-batches (layer-major)."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from memtune.api import Tuned, apply
from memtune.autotune.record.recording_session import Trace, start_session
from memtune.autotune.search.dry_runs import traced_under
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.config.tuned_config import TunedConfig
from memtune.memory.ledger import Ledger
from memtune.program.step import Program, Step
from memtune.runtime.memory_tiers import HOST, tier
from memtune.search_spaces.execution import Execution
from memtune.search_spaces.offload.states.optimizer_cpu import OptimizerCpu
from memtune.technique import Technique
from memtune.testing import TechniqueSuite, differences, train
from memtune.testing.drift_check import compare, recording_of, target_of
from memtune.testing.training import Run, build, train_under
from memtune.workload.workload import Workload

CHAIN = Path(__file__).parents[1] / "models" / "chain_model.py"
NATIVE = OptimizerCpu(kind="optimizer_cpu", update="native")


def tied_chain(path: Path) -> Path:
    """Write to `path` the chain whose head has the embedding's weight; return `path`."""
    head = "        self.ln_f, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)\n"
    assert head in CHAIN.read_text()
    path.write_text(CHAIN.read_text().replace(head, f"{head}        self.head.weight = self.wte.weight\n"))
    return path


@cache
def planned(
    technique: Technique, micro_batches: int, budget_bytes: int | None = None, path: Path = CHAIN
) -> Candidate:
    """Return the chain, or the model in `path`, under `technique`, with a step of several micro-batches of 2
    samples.
    """
    target = replace(target_of(technique), budget_bytes=budget_bytes)
    choice = Choice.of(Execution(micro_batch=2, accumulate=micro_batches), {technique.slot: technique})
    candidate = Rewriter(recording_of(path), target).candidate(choice)
    assert isinstance(candidate, Candidate), candidate
    return candidate


def config(technique: Technique, micro_batches: int, path: Path = CHAIN) -> TunedConfig:
    """Return the config for training."""
    candidate = planned(technique, micro_batches, path=path)
    return TunedConfig(settings=candidate.choice, plan=dict(candidate.plans))


def trained(technique: Technique, micro_batches: int, steps: int = 5, path: Path = CHAIN) -> Run:
    """Run steps of the chain under `technique`."""
    document = config(technique, micro_batches, path).document()
    run = train_under(path, document, steps=steps, micro_batches=micro_batches)
    run.gradients.clear()
    return run


@cache
def in_place(micro_batches: int, steps: int = 5, path: Path = CHAIN) -> Run:
    """Return the same update of resident weights, one micro-batch after the other."""
    run = train(path, NATIVE, steps=steps, micro_batches=micro_batches)
    run.gradients.clear()
    return run


def recorded(technique: Technique, micro_batches: int, path: Path = CHAIN) -> Step:
    """Return the recorded step of the runtime."""
    session = start_session(Workload.load(path), recording_of(path).rung)
    trace = traced_under(session, config(technique, micro_batches, path), 2, micro_batches=micro_batches)
    assert isinstance(trace, Trace)
    return trace.step


def drifts(technique: Technique, micro_batches: int, path: Path = CHAIN) -> str:
    """Return the first difference between rewrite and recording, in ops, bytes of any tier at any op, and
    bytes on links.
    """
    return compare(
        planned(technique, micro_batches, path=path).program.step, recorded(technique, micro_batches, path)
    )


class PacksSuite(TechniqueSuite):
    """Suite for techniques that run packs of blocks over all micro-batches."""

    models: ClassVar = {"chain": CHAIN}
    quick = ("chain",)

    @pytest.fixture(autouse=True)
    def _update_first(self, _one_thread: None) -> None:
        """Train the reference before a defect is seeded."""
        in_place(2, 3)

    def check_training(self, model: str, variant: Technique) -> None:
        """Check that losses and weights are bitwise equal to the same update in place."""
        found = differences(trained(variant, 2, 3), in_place(2, 3))
        assert not found, f"{len(found)} differences: {'; '.join(found[:5])}"

    @pytest.mark.drawn(8)
    def test_five_steps_are_bitwise_equal_to_update_in_place(self) -> None:
        """Three micro-batches: summands of each weight's gradient are added in the plain order."""
        assert not differences(trained(self.variants[0], 3), in_place(3))

    @pytest.mark.native_ledger
    def test_trains_where_plain_model_is_out_of_memory(self) -> None:
        """Under a budget between the two predicted peaks the peak equals the prediction, and a step leaves no
        bytes.
        """
        technique = self.variants[0]
        candidate = planned(technique, 3)
        whole = Rewriter(recording_of(CHAIN), target_of()).program(
            Choice.of(Execution(micro_batch=2, accumulate=3), {})
        )
        assert isinstance(whole, Program)
        predicted, plain = candidate.program.step.peak_bytes(), whole.step.peak_bytes()
        gc.collect()
        empty = Ledger.open("cpu").live_bytes()
        budget = (predicted + plain) // 2
        assert predicted < budget < plain
        workload, model, optimizer = build(CHAIN)
        tuned = apply(model, optimizer, config(technique, 3), loss=workload.loss, strict=False)
        gc.collect()
        with Ledger.open("cpu", budget_bytes=empty + budget) as ledger:
            seen = [step_under(workload, tuned, ledger, 3) for _ in range(5)]
        assert max(peak for peak, *_ in seen[2:]) - empty == pytest.approx(predicted, rel=0.02)
        assert seen[2][1:] == seen[3][1:] == seen[4][1:], seen
        del tuned, model, optimizer
        workload, model, optimizer = build(CHAIN)
        plainly = apply(model, optimizer, {"settings": {}}, loss=workload.loss, strict=False)
        with Ledger.open("cpu", budget_bytes=empty + budget) as ledger, pytest.raises(torch.OutOfMemoryError):
            assert [step_under(workload, plainly, ledger, 3) for _ in range(2)]


def step_under(workload: Workload, tuned: Tuned, ledger: Ledger, micro_batches: int) -> tuple[int, int, int]:
    """Return the device peak of one step, and bytes live on device and host after it."""
    with tier(HOST):
        batches = [workload.make_batch(2) for _ in range(micro_batches)]
    ledger.reset_peak()
    tuned.step(batches)
    del batches
    return ledger.peak_allocated_bytes(), ledger.live_bytes(), ledger.live_bytes(HOST)
