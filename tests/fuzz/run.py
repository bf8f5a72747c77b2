"""Run a case: the plain model and the tuned one side by side, in the user's loop; and say how they differ."""

from __future__ import annotations

import copy
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from support.simulated_device import races
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fuzz.cases import OF_OWN_LOOP, Case
from fuzz.models import ModelSpec
from fuzz.ranks import Ranks, RanksFailed
from memtune import hardware
from memtune.api import Tuned, apply
from memtune.autotune.record.recorder import record
from memtune.autotune.record_parallel.sharded_recording import ShardedRecordings
from memtune.autotune.search.bucket_plans import plan_buckets
from memtune.autotune.search.bucket_recordings import record_buckets
from memtune.autotune.search.dry_runs import dry_run
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.autotune.translate import translate
from memtune.config import Bucket
from memtune.device import accelerator, streams
from memtune.errors import MemtuneError, WorkloadError
from memtune.offload.gradients import uncleared
from memtune.program import Recording
from memtune.random_seeds import seed_all
from memtune.runtime import DEVICE, HOST, tier
from memtune.ssd import offload_dir
from memtune.technique import Exactness, Reason, Target
from memtune.testing.training import build
from memtune.workload import Workload, to_device

STEPS, SIZE = 3, 2
BUGS = ("MT900",)
OF_THE_LOOP = {
    "MT364": OF_OWN_LOOP - {"closure", "keep_grads"} | {"freeze"},
    **{code: {"backward_twice"} for code in ("MT307", "MT331", "MT367", "torch")},
    "MT326": {"backward_twice", "evaluate_before_backward"},
    "MT335": {"module_hooks"},
    "MT397": {"module_hooks"},
    "MT346": {"freeze"},
    "MT313": {"module_hooks", "raise_in_block", "raise_in_backward"},
    "MT368": {"raise_in_backward"},
    "MT318": {"decay_weights", "sam"},
    "MT311": {"own loop", "evaluate", "raise", "raise_in_block", "raise_in_backward"},
}
"""Refusals of training that planning cannot know → what a loop must do for them to be true."""
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
    """`equal`, `refused` with a reason, or a finding: `late` (refused in training after planning had accepted
    it), `differs`, `peak`, `error`, `hangs`.
    """
    text: str = ""
    code: str = ""
    """Code of the error of a refusal."""

    @property
    def is_finding(self) -> bool:
        """True if something is wrong."""
        return self.kind not in ("equal", "refused")

    @property
    def key(self) -> str:
        """Return what findings of one cause have in common."""
        lines = self.text.rstrip().split("\n")
        return f"{self.kind} {lines[0 if self.code else -1]}"


class Interrupted(Exception):
    """Raised by the user's own code."""


class Recorded:
    """A model, recorded once; cases on it share the recording, the plain runs and the recorded peaks.

    Args:
        model: The model.
        ranks: The processes of the cases; None runs them in this one.
        folder: For `model.py` and for offloaded files.
        count: Number of ranks, where only peaks are compared.
        device: Device type on which it trains.
    """

    def __init__(
        self, model: ModelSpec, ranks: Ranks | None, folder: Path, count: int = 1, device: str = "cpu"
    ) -> None:
        self._model, self._ranks, self._count = model, ranks, ranks.count if ranks else count
        self._device = device
        self._path = folder / "model.py"
        self._path.write_text(model.text())
        os.environ[offload_dir.VARIABLE] = str(folder)
        self._found: dict[tuple[Any, int], Candidate | Outcome] = {}
        self._peaks: dict[tuple[Any, int], Outcome] = {}
        self._plain: dict[tuple[Any, ...], dict[str, Tensor]] = {}
        self.failed = self._recorded()
        """The outcome if the model cannot be recorded."""

    def _recorded(self) -> Outcome | None:
        found = guarded("recording", self._record)
        return found if isinstance(found, Outcome) else None

    def _record(self) -> None:
        self._workload = Workload.load(self._path)
        plain = record(self._workload)
        self._rung = plain.rung
        on = hardware.detect(self._device)

        def translated(each: Recording) -> Recording:
            return each if self._device == "cpu" else translate(each, on)

        cut = ShardedRecordings(self._workload, plain, translate=translated) if self._count > 1 else None
        budget_bytes = int(BUDGET * plain.step.peak_bytes())
        self._target = Target(on, self._count, budget_bytes, sharded=cut)
        self._rewriter = Rewriter(translated(plain), self._target)
        self._buckets = record_buckets(self._workload, plain.rung, record, lambda _: None)

    def fits(self, case: Case) -> bool:
        """Return False if the settings of `case` are refused for this model."""
        return self.failed is None and not (
            isinstance(found := self._candidate(case), Outcome) and found.kind == "refused"
        )

    def _candidate(self, case: Case) -> Candidate | Outcome:
        key = case.settings, case.accumulate
        if key not in self._found:
            found = guarded("planning", lambda: self._rewriter.candidate(Choice.from_document(case.document)))
            self._found[key] = Outcome("refused", str(found)) if isinstance(found, Reason) else found
        return self._found[key]

    def outcome(self, case: Case) -> Outcome:
        """Return the outcome of `case`, whose model is this one."""
        if self.failed is not None:
            return self.failed
        found = self._candidate(case)
        if isinstance(found, Outcome):
            return found
        plans = {slot: plan.document() for slot, plan in found.plans.items() if not plan.is_empty}
        config: dict[str, Any] = {"settings": case.document, "plan": plans}
        if self._buckets:
            buckets = guarded("planning of buckets", lambda: self._planned(found))
            if isinstance(buckets, Outcome):
                return buckets
            config["buckets"] = [each.document() for each in buckets]
        outcome = self._compared(case, config)
        return self.peak(case) if outcome.kind == "equal" else outcome

    def _planned(self, candidate: Candidate) -> tuple[Bucket, ...]:
        """Return the length buckets of `candidate`, as a search plans them."""
        setup: Any = SimpleNamespace(
            buckets=self._buckets, bucket_plans={}, scorer=SimpleNamespace(rewriter=self._rewriter)
        )
        return plan_buckets(setup, candidate)

    def peak(self, case: Case) -> Outcome:
        """Return whether the recorded peak of `case` is the predicted one; nothing is trained."""
        found = self.failed or self._candidate(case)
        if isinstance(found, Outcome):
            return found
        key = case.settings, case.accumulate
        if key not in self._peaks:
            is_compared = self._rung == "fake" and self._device == "cpu"
            self._peaks[key] = self._peak(found) if is_compared else Outcome("equal", "peak not compared")
        return self._peaks[key]

    def _compared(self, case: Case, config: dict[str, Any]) -> Outcome:
        """Return the outcome of training under `config` against the plain model."""
        key = case.behaviours, case.accumulate, case.own_loop
        if key not in self._plain:
            plain = guarded("plain training", lambda: trained(case, self._path, None))
            if isinstance(plain, Outcome):
                return plain
            self._plain[key] = plain
        if self._ranks is None:
            return differences(case, self._plain[key], attempt(case, str(self._path), config))
        try:
            each = self._ranks.run(attempt, case, str(self._path), config)
        except RanksFailed as error:
            return Outcome("hangs" if str(error).startswith("ranks hang") else "error", str(error))
        outcomes = [differences(case, self._plain[key], one) for one in each]
        if len({outcome.kind == "refused" for outcome in outcomes}) > 1:
            return Outcome("error", f"ranks disagree: {outcomes}")
        if any(outcome.is_finding for outcome in outcomes):
            self._ranks.close()  # the error may have left something behind
        return next((one for one in outcomes if one.kind != "equal"), outcomes[0])

    def _peak(self, found: Candidate) -> Outcome:
        """Return whether the recorded peak of the applied config is the predicted one."""
        step = guarded("dry run", lambda: dry_run(self._workload, found, self._target))
        if isinstance(step, Outcome):
            return step
        if isinstance(step, Reason):
            return Outcome("equal", f"peak not compared: {step}")
        peak, predicted = step.peak_bytes(), found.program.step.peak_bytes()
        if abs(peak - predicted) > max(PEAK * peak, SMALL_BYTES):
            return Outcome("peak", f"{predicted} predicted, {peak} recorded ({predicted / peak - 1:+.1%})")
        return Outcome("equal")


T = TypeVar("T")


def guarded(what: str, run: Callable[[], T]) -> T | Outcome:
    """Return the result of `run`, or the outcome that its error is."""
    try:
        return run()
    except MemtuneError as error:
        kind = "error" if error.code in BUGS else "refused"
        return Outcome(kind, f"{what}: {error}", error.code)
    except UserWarning as warning:
        return Outcome("refused", f"{what}: {warning}")
    except Exception as error:
        # torch's own refusal of a second backward, whose weights an update in the first one has changed.
        if "modified by an inplace operation" in str(error):
            return Outcome("refused", f"{what}: {error}", "torch")
        return Outcome("error", f"{what}\n{traceback.format_exc(limit=-8)}")


def run_case(case: Case, folder: Path, ranks: Ranks | None = None) -> Outcome:
    """Return the outcome of one case."""
    return Recorded(case.model, ranks, folder, device=case.device).outcome(case)


def attempt(case: Case, path: str, config: dict[str, Any]) -> dict[str, Tensor] | Outcome:
    """Return losses and final weights of `case` on this rank, or the outcome that an error is."""
    os.environ[offload_dir.VARIABLE] = str(Path(path).parent)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", re.escape(uncleared.TEXT))
        found = guarded("training", lambda: trained(case, Path(path), config))
    # An exception may have left collectives in flight, whose memory the next case gets.
    streams.synchronize(device_of(case, dist.get_rank() if case.ranks > 1 else 0))
    # Planning does not know that blocks of one layer save their inputs alone, nor what draws in Python or
    # sets attributes.
    known = (
        "nothing in them is recomputed",
        "draws random numbers in Python",
        *(("its forward sets the attribute",) if "router" in case.model.pieces else ()),
    )
    is_true = isinstance(found, Outcome) and any(each in found.text for each in known)
    if isinstance(found, Outcome) and found.kind == "refused" and found.code and not is_true:
        does = {*case.behaviours, *(("own loop",) if case.loops else ())}
        return found if does & OF_THE_LOOP.get(found.code, set()) else replace(found, kind="late")
    return found


def differences(case: Case, wanted: dict[str, Tensor], got: dict[str, Tensor] | Outcome) -> Outcome:
    """Return the outcome of a run with the values `got` where the plain one has `wanted`."""
    if isinstance(got, Outcome):
        return got
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
    if (wrong := torch.isnan(other)).any():  # the plain run has diverged
        return torch.equal(torch.isnan(one), wrong)
    if tolerance == 0 or not other.is_floating_point():
        return torch.equal(one, other)
    return bool(((one - other).abs() <= tolerance * max(float(other.abs().max()), 1e-3)).all())


def trained(case: Case, path: Path, config: dict[str, Any] | None) -> dict[str, Tensor]:
    """Return losses and the final weights of the case's loop, under `config` or plain."""
    is_rank = config is not None and case.ranks > 1
    rank = dist.get_rank() if is_rank else 0
    device = device_of(case, rank)
    workload, model, optimizer = built(path, case.start if config else "device", device)
    given = device if case.start == "host" else None
    tuned = (
        apply(model, optimizer, config, loss=workload.loss, strict=False, device=given) if config else None
    )
    loop = _Loop(case, workload, tuned.model if tuned else model, optimizer, tuned, path.parent, device)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        size = SIZE + 2 if "larger" in case.behaviours and step == 1 else SIZE
        of = workload.of_bucket(step - 1) if case.model.buckets and step else workload
        with tier(HOST if device.type != "cpu" else DEVICE):
            batches = [of.make_batch(size) for _ in range(case.accumulate * case.ranks)]
        if is_rank:
            batches = batches[rank * case.accumulate : (rank + 1) * case.accumulate]
        seed_all(7 + step)
        loss = loop.step(step, batches)
        if is_rank:
            dist.all_reduce(loss)
            loss /= case.ranks
        found[f"loss of step {step}"] = loss
    if tuned is not None:
        tuned.audit()
    state = tuned.state_dict()["model"] if tuned is not None else model.state_dict()
    found |= {name: value.detach().clone() for name, value in state.items()}
    if case.ranks == 1:  # ranks have parts of the batch and of the model
        found |= loop.seen
    streams.synchronize(device)
    if device.type == "sim" and (unordered := races()):
        raise RuntimeError("\n".join(unordered))
    return {name: value.cpu() for name, value in found.items()}


def device_of(case: Case, rank: int) -> torch.device:
    """Return the device of a rank; alone it is not the current one, which memtune must not need."""
    if case.device == "cpu":
        return torch.device("cpu")
    return torch.device(case.device, rank if case.ranks > 1 else 1)


def built(path: Path, start: str, device: torch.device) -> tuple[Workload, nn.Module, torch.optim.Optimizer]:
    """Return what `build` does, of a model that is on its device, on the host or `deferred`."""
    with tier(HOST if start == "host" else DEVICE):
        there = torch.device("cpu") if start == "host" else device
        return build(path, there, is_deferred=start == "deferred")


class _Loop:
    """The user's training loop and behaviour."""

    def __init__(
        self,
        case: Case,
        workload: Workload,
        model: nn.Module,
        optimizer: Any,
        tuned: Tuned | None,
        folder: Path,
        device: torch.device,
    ) -> None:
        self._case, self._workload, self._tuned, self._folder = case, workload, tuned, folder
        self._device = device
        self._model, self._optimizer = model, optimizer
        self._does = case.behaviours
        self._scheduler = None
        if "scheduler" in self._does:
            self._scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self._average: dict[str, Tensor] = {}
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.seen: dict[str, Tensor] = {}
        """Values that the user's code has seen, by name."""
        self._scaler = None
        if "scaler" in self._does and not {"closure", "autograd_grad"} & {*self._does}:  # neither unscales
            self._scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
        self._averaged = None
        if "averaged_model" in self._does and case.ranks == 1:
            self._averaged = torch.optim.swa_utils.AveragedModel(model)
        for parameter in self._trained[::3] if "grad_hooks" in self._does else ():
            parameter.register_hook(lambda gradient: gradient * 0.5)
        for name, module in model.named_modules() if "module_hooks" in self._does else ():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(partial(self._on_forward, name))

    def step(self, step: int, batches: list[Any]) -> Tensor:
        """Run one step with what the user does around it; return its loss."""
        # First: after an evaluation FSDP2 shows parameters that are not the optimizer's.
        if "freeze" in self._does:
            for parameter in self._trained[::3]:
                parameter.requires_grad_(step != 1)
        if "raise" in self._does and step == 1:
            self._interrupted(batches)
        if "raise_in_block" in self._does and step == 1:
            self._interrupted_in_block(batches[0])
        if "raise_in_backward" in self._does and step == 1:
            self._interrupted_in_backward(batches[0])
        if "evaluate" in self._does and step == 1:
            self._evaluated(batches[0])
        if "inference_mode" in self._does and step == 1:
            self._evaluated(batches[0], torch.inference_mode)
        loss = self._own(batches) if self._case.loops else self._by_step(batches)
        if self._scheduler is not None:
            self._scheduler.step()
        if "ema" in self._does:
            for name, value in self._state().items():
                mine = self._average.setdefault(name, torch.zeros_like(value))
                mine.copy_(mine * 0.5 + value * 0.5)
        if "load" in self._does and step == 1:
            self._loaded()
        if self._averaged is not None:
            self._averaged.update_parameters(self._model)
            for name, value in self._averaged.module.named_parameters():
                self.seen[f"average of {name}"] = value.detach().clone()
        if "decay_weights" in self._does:
            with torch.no_grad():
                for parameter in self._model.parameters():
                    parameter.mul_(0.99)
        if "log_norms" in self._does and self._case.ranks == 1:
            for name, value in self._model.named_parameters():
                self.seen[f"norm of {name}"] = value.detach().float().norm()
        if "save" in self._does and step == 1 and self._tuned is not None:
            self._tuned.save(self._folder / "checkpoint")
            self._tuned.load(self._folder / "checkpoint")
        in_processes = "smart_infinity" in str(self._case.settings)  # which have the moments
        if "clear_moments" in self._does and step == 1 and not in_processes:
            self._optimizer.state.clear()
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

    def _on_forward(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        mean = output.detach().float().mean()  # also of a block that backward runs again, as users' hooks do
        if torch._C._current_graph_task_id() == -1:
            self.seen[f"output of {name}"] = mean

    def _one(self, batch: Any, count: int) -> Tensor:
        loss = self._workload.loss(self._model, to_device(batch, self._device))
        if count > 1:
            loss = loss / count
        if "evaluate_before_backward" in self._does:
            with accelerator.fork_rng(self._device):
                self._evaluated(batch)
        if "autograd_grad" in self._does and self._case.ranks == 1:
            trained = [each for each in self._model.parameters() if each.requires_grad]
            for parameter, gradient in zip(
                trained, torch.autograd.grad(loss, trained, allow_unused=True), strict=True
            ):
                if gradient is not None:
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            return loss.detach()
        if "backward_twice" in self._does:
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
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
        if "sam" in self._does:
            loss = self._perturbed(batches)
        if "halve_grads" in self._does:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        if "replace_grads" in self._does:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 0.5
        if "clamp_data" in self._does:
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.clamp_(-0.02, 0.02)
        if "drop_grads" in self._does:
            for parameter in list(self._model.parameters())[::2]:
                parameter.grad = None
        if self._scaler is not None and "clip" in self._does:
            self._scaler.unscale_(self._optimizer)
        if "clip" in self._does:
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 0.1, foreach=False)
        if "clip_value" in self._does:
            torch.nn.utils.clip_grad_value_(self._model.parameters(), 0.01, foreach=False)
        if "state_dict_before_step" in self._does:
            self._state()  # its values are those after the step where backward has updates
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        if "keep_grads" not in self._does:
            self._optimizer.zero_grad(set_to_none="zero_in_place" not in self._does)
        return loss

    def _perturbed(self, batches: list[Any]) -> Tensor:
        """Run backward again with weights moved along their gradients, as SAM (Foret et al. 2021)."""
        moved: list[tuple[nn.Parameter, Tensor]] = []
        with torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.grad is not None:
                    moved.append((parameter, parameter.grad * 0.05))
                    parameter.add_(moved[-1][1])
        self._optimizer.zero_grad()
        loss = self._backward(batches)
        with torch.no_grad():
            for parameter, by in moved:
                parameter.sub_(by)
        return loss

    def _interrupted(self, batches: list[Any]) -> None:
        """Raise in the user's loss, and go on with the next step."""
        with accelerator.fork_rng(self._device):
            try:
                loss = self._workload.loss(self._model, to_device(batches[0], self._device))
                del loss
                raise Interrupted
            except Interrupted:
                self._optimizer.zero_grad()

    def _interrupted_in_block(self, batch: Any) -> None:
        """Raise in a block's forward, evaluate, and go on with the next step."""

        def interrupted(*_: object) -> None:
            raise Interrupted

        with accelerator.fork_rng(self._device):
            hook = self._middle().register_forward_hook(interrupted)
            with suppress(WorkloadError):
                self._workload.loss(self._model, to_device(batch, self._device))
            hook.remove()
            self._optimizer.zero_grad()
            self._evaluated(batch)

    def _interrupted_in_backward(self, batch: Any) -> None:
        """Raise in the backward of a block, and go on with the next step."""

        def interrupted(_: Tensor) -> None:
            raise Interrupted

        def hooked(module: nn.Module, args: Any, output: Any) -> None:
            for each in tree_leaves(output):
                if isinstance(each, Tensor) and each.requires_grad:
                    each.register_hook(interrupted)

        with accelerator.fork_rng(self._device):
            hook = self._middle().register_forward_hook(hooked)
            with suppress(Interrupted):
                self._one(batch, 1)
            hook.remove()
            self._optimizer.zero_grad()

    def _middle(self) -> nn.Module:
        """Return the block in the middle, or the model if it has none."""
        names = self._workload.find_blocks(self._model)
        return self._model.get_submodule(names[len(names) // 2] if names else "")

    def _evaluated(self, batch: Any, mode: Callable[[], Any] = torch.no_grad) -> None:
        if self._case.model.loss in ("penalty", "twice"):
            return
        self._model.eval()
        with mode():
            self._workload.loss(self._model, to_device(batch, self._device))
        self._model.train()

    def _loaded(self) -> None:
        if self._tuned is not None:
            self._tuned.load_state_dict(copy.deepcopy(self._tuned.state_dict()))
            return
        self._model.load_state_dict(copy.deepcopy(self._model.state_dict()))
        self._optimizer.load_state_dict(copy.deepcopy(self._optimizer.state_dict()))


def shrunk(case: Case, outcome: Outcome, ranks: Ranks | None = None, tries: int = 60) -> tuple[Case, Outcome]:
    """Return the smallest case found whose outcome is of the same kind and begins with the same words."""
    while tries > 0:
        for smaller in case.smaller():
            tries -= 1
            with tempfile.TemporaryDirectory() as folder:
                found = run_case(smaller, Path(folder), ranks)
            if found.key[:30] == outcome.key[:30] or found.kind == outcome.kind != "error":
                case, outcome = smaller, found
                break
            if tries <= 0:
                break
        else:
            break
    return case, outcome
