"""Run a case: the plain model and the tuned one side by side, in the user's loop; and say how they differ."""

from __future__ import annotations

import copy
import os
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuzz.cases import Case, draw_cases
from memtune import hardware
from memtune.api import Tuned, apply
from memtune.autotune.record.recorder import Trace, record, start_session
from memtune.autotune.record_parallel.sharded_recording import CutRecordings
from memtune.autotune.search.dry_runs import traced_under
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.config import load_config
from memtune.errors import MemtuneError
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Target
from memtune.testing.training import build
from memtune.workload import Workload

STEPS, SIZE = 3, 2
BUGS = ("MT900",)
REORDERED = 1e-3
"""Largest difference of weights after `STEPS` steps, relative to the largest value, in another order."""
PEAK, BUDGET = 0.01, 0.8
"""Largest error of a predicted peak; the budget of plans, as a share of the plain peak."""
SMALL_BYTES = 2048
"""Difference of peaks that is not counted: of models of kilobytes, less than an allocator's block."""


@dataclass(frozen=True)
class Outcome:
    """Result of a case."""

    kind: str
    """`equal`, `refused` with a reason, or a finding: `differs`, `peak`, `error`, `hangs`."""
    text: str = ""

    @property
    def is_finding(self) -> bool:
        """True if something is wrong."""
        return self.kind not in ("equal", "refused")


class Interrupted(Exception):
    """Raised by the user's own code."""


def run_case(case: Case, folder: Path) -> Outcome:
    """Return the outcome of `case`; on several ranks, what all of them agree on."""
    path = folder / "model.py"
    path.write_text(case.model.text())
    os.environ[offload_dir.VARIABLE] = str(folder)
    try:
        workload = Workload.load(path)
        plain = record(workload)
    except MemtuneError as error:
        return Outcome("error" if error.code in BUGS else "refused", f"recording: {error}")
    except Exception:
        return Outcome("error", traceback.format_exc(limit=-4))
    try:
        cut = CutRecordings(workload, plain) if case.ranks > 1 else None
        target = Target(hardware.detect("cpu"), case.ranks, int(BUDGET * plain.step.peak_bytes()), cut=cut)
        found = Rewriter(plain, target).candidate(Choice.from_document(case.document))
        if not isinstance(found, Candidate):
            return Outcome("refused", str(found))
    except MemtuneError as error:
        return Outcome("error" if error.code in BUGS else "refused", f"planning: {error}")
    except Exception:
        return Outcome("error", "planning\n" + traceback.format_exc(limit=-6))
    config = {
        "settings": case.document,
        "plan": {slot: plan.document() for slot, plan in found.plans.items() if not plan.is_empty},
    }
    if case.ranks > 1:
        return _on_ranks(case, path, config)
    outcome = compared(case, path, config)
    if outcome.kind == "equal" and plain.rung == "fake":
        return _peak_compared(path, config, found, case.accumulate)
    return outcome


def run_fitting(seed: int, ranks: int, folder: Path, draws: int = 6) -> tuple[Case, Outcome, int]:
    """Return the first case of `seed` whose settings are not refused, its outcome, and the number of refused
    ones; after `draws` the last one.
    """
    for refused, case in enumerate(draw_cases(seed, ranks)):
        outcome = run_case(case, folder)
        if outcome.kind != "refused" or refused + 1 == draws:
            return case, outcome, refused
    raise AssertionError("draws do not end")


def compared(case: Case, path: Path, config: dict[str, Any]) -> Outcome:
    """Return the outcome of training under `config` against the plain model, on this rank."""
    wanted = trained(case, path, None)
    try:
        got = trained(case, path, config)
    except MemtuneError as error:
        return Outcome("error" if error.code in BUGS else "refused", f"training: {error.code} {error}")
    except Exception:
        return Outcome("error", "training\n" + traceback.format_exc(limit=-8))
    classes = case.exactness
    if Exactness.LOSSY in classes:
        return Outcome("equal", "lossy")
    tolerance = 0.0 if classes <= {Exactness.BITWISE} and case.ranks == 1 else REORDERED
    for name, value in wanted.items():
        if not _close(got[name], value, tolerance):
            worst = float((got[name].double() - value.double()).abs().max())
            return Outcome("differs", f"{name} by {worst:.3g} of {float(value.double().abs().max()):.3g}")
    return Outcome("equal")


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if tolerance == 0 or not other.is_floating_point():
        return torch.equal(one, other)
    return bool(((one - other).abs() <= tolerance * max(float(other.abs().max()), 1e-3)).all())


def trained(case: Case, path: Path, config: dict[str, Any] | None) -> dict[str, Tensor]:
    """Return losses and the final weights of the case's loop, under `config` or plain."""
    workload, model, optimizer = build(path)
    is_rank = config is not None and case.ranks > 1
    rank = dist.get_rank() if is_rank else 0
    tuned = apply(model, optimizer, config, loss=workload.loss, strict=False) if config else None
    loop = _Loop(case, workload, tuned.model if tuned else model, optimizer, tuned)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        size = SIZE + 2 if "larger" in case.behaviours and step == 1 else SIZE
        batches = [workload.make_batch(size) for _ in range(case.accumulate * case.ranks)]
        if is_rank:
            batches = batches[rank * case.accumulate : (rank + 1) * case.accumulate]
        torch.manual_seed(7 + step)
        loss = loop.step(step, batches)
        if is_rank:
            dist.all_reduce(loss)
            loss /= case.ranks
        found[f"loss of step {step}"] = loss
    if tuned is not None:
        tuned.audit()
    state = tuned.state_dict()["model"] if tuned is not None else model.state_dict()
    return found | {name: value.detach().clone() for name, value in state.items()}


class _Loop:
    """The user's training loop and behaviour."""

    def __init__(
        self, case: Case, workload: Workload, model: nn.Module, optimizer: Any, tuned: Tuned | None
    ) -> None:
        self._case, self._workload, self._tuned = case, workload, tuned
        self._model, self._optimizer = model, optimizer
        self._does = case.behaviours
        self._scheduler = None
        if "scheduler" in self._does:
            self._scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self._average: dict[str, Tensor] = {}

    def step(self, step: int, batches: list[Any]) -> Tensor:
        """Run one step with what the user does around it; return its loss."""
        if "raise" in self._does and step == 1:
            self._interrupted(batches)
        if "evaluate" in self._does and step == 1:
            self._evaluated(batches[0])
        own = self._case.own_loop or {"clip", "clip_value", "closure"} & set(self._does)
        loss = self._own(batches) if own else self._by_step(batches)
        if self._scheduler is not None:
            self._scheduler.step()
        if "ema" in self._does:
            for name, value in self._state().items():
                mine = self._average.setdefault(name, torch.zeros_like(value))
                mine.copy_(mine * 0.5 + value * 0.5)
        if "load" in self._does and step == 1:
            self._loaded()
        if "copy" in self._does and step == 0 and self._case.ranks == 1:
            copy.deepcopy(self._model.state_dict())
        return loss

    def _state(self) -> dict[str, Tensor]:
        state = self._tuned.state_dict()["model"] if self._tuned else self._model.state_dict()
        return {name: value.detach().float() for name, value in state.items()}

    def _by_step(self, batches: list[Any]) -> Tensor:
        if self._tuned is not None:
            return self._tuned.step(batches).clone()
        loss = self._backward(batches)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss

    def _backward(self, batches: list[Any]) -> Tensor:
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            if self._tuned is not None:
                with self._tuned.micro_batch(last=last):
                    part = self._one(batch, len(batches))
            else:
                part = self._one(batch, len(batches))
            total = total + part
        return total

    def _one(self, batch: Any, count: int) -> Tensor:
        loss = self._workload.loss(self._model, batch)
        if count > 1:
            loss = loss / count
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _own(self, batches: list[Any]) -> Tensor:
        if "closure" in self._does:
            found: list[Tensor] = []

            def closure() -> Tensor:
                self._optimizer.zero_grad()
                found.append(self._backward(batches))
                return found[-1]

            self._optimizer.step(closure)
            self._optimizer.zero_grad()
            return found[0]
        loss = self._backward(batches)
        if "clip" in self._does:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 0.1, foreach=False)
        if "clip_value" in self._does:
            torch.nn.utils.clip_grad_value_(self._model.parameters(), 0.01, foreach=False)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def _interrupted(self, batches: list[Any]) -> None:
        """Raise in the user's loss, and go on with the next step."""
        rng = torch.get_rng_state()
        try:
            loss = self._workload.loss(self._model, batches[0])
            del loss
            raise Interrupted
        except Interrupted:
            self._optimizer.zero_grad()
        torch.set_rng_state(rng)

    def _evaluated(self, batch: Any) -> None:
        if self._case.model.loss in ("penalty", "twice"):
            return
        self._model.eval()
        with torch.no_grad():
            self._workload.loss(self._model, batch)
        self._model.train()

    def _loaded(self) -> None:
        if self._tuned is not None:
            self._tuned.load_state_dict(copy.deepcopy(self._tuned.state_dict()))
            return
        self._model.load_state_dict(copy.deepcopy(self._model.state_dict()))
        self._optimizer.load_state_dict(copy.deepcopy(self._optimizer.state_dict()))


def _peak_compared(path: Path, config: dict[str, Any], found: Candidate, accumulate: int) -> Outcome:
    """Return whether the recorded peak of the applied config is the predicted one."""
    try:
        session = start_session(Workload.load(path), "fake")
        trace = traced_under(session, load_config(config), SIZE, micro_batches=accumulate)
    except MemtuneError as error:
        return Outcome("refused", f"dry run: {error.code} {error}")
    except Exception:
        return Outcome("error", "dry run\n" + traceback.format_exc(limit=-6))
    if not isinstance(trace, Trace):
        return Outcome("equal", f"peak not compared: {trace}")
    peak, predicted = trace.step.peak_bytes(), found.program.step.peak_bytes()
    if abs(peak - predicted) > max(PEAK * peak, SMALL_BYTES):
        return Outcome("peak", f"{predicted} predicted, {peak} recorded ({predicted / peak - 1:+.1%})")
    return Outcome("equal")


def on_rank(case: Case, path: str, config: dict[str, Any]) -> tuple[str, str]:
    """Return the outcome on this rank; for `run_ranks`."""
    os.environ[offload_dir.VARIABLE] = str(Path(path).parent)
    outcome = compared(case, Path(path), config)
    return outcome.kind, outcome.text


def _on_ranks(case: Case, path: Path, config: dict[str, Any]) -> Outcome:
    from support.gloo import run_ranks

    try:
        each = run_ranks(on_rank, case.ranks, case, str(path), config, deadline_s=60)
    except AssertionError as error:
        text = str(error)
        return Outcome("hangs" if text.startswith("ranks hang") else "error", text[:200] + text[-1500:])
    kinds = {kind for kind, _ in each}
    if kinds == {"equal"}:
        return Outcome("equal")
    if "refused" in kinds and len(kinds) > 1:
        return Outcome("error", f"ranks disagree: {each}")
    return next(Outcome(*one) for one in each if one[0] != "equal")


def shrunk(case: Case, outcome: Outcome, tries: int = 60) -> tuple[Case, Outcome]:
    """Return the smallest case found whose outcome is of the same kind and begins with the same words."""
    while tries > 0:
        for smaller in case.smaller():
            tries -= 1
            with tempfile.TemporaryDirectory() as folder:
                found = run_case(smaller, Path(folder))
            if (
                found.kind == outcome.kind
                and found.text.split("\n")[-2:][0][:25] == outcome.text.split("\n")[-2:][0][:25]
            ):
                case, outcome = smaller, found
                break
            if tries <= 0:
                break
        else:
            break
    return case, outcome
