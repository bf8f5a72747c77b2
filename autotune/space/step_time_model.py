"""Posterior of step times: what the trials of a search say about the candidates it has not run.

The logarithm of measured over predicted step time is linear in features of a candidate: one for every step,
one per technique (`slot: kind`), one per technique with its knobs, and the exposed share of each resource.
Their coefficients have a Gaussian prior around 0, so a trial corrects all candidates that share a mechanism
with it, and the more uncertain a mechanism was, the more. Bayesian linear regression (Rasmussen, Williams
2006, section 2.1); the scale of the prior is averaged over a grid, weighted by the marginal likelihood
(section 5.2), so a search whose first trials come out as predicted trusts the simulator, and another one
explores.

Candidates are proposed by expected improvement (Jones, Schonlau, Welch 1998, equation 15).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from memtune.autotune.predict import Prediction
from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.scoring import Scored
from memtune.effects import DISPATCH_MODE
from memtune.technique import Technique

Kind = tuple[str, str]
"""Slot and technique."""

F64 = npt.NDArray[np.float64]

_STEP_SD = 0.5
"""Prior of the factor that all steps share: standard deviation of its logarithm before any trial."""
_SLOT_SD = {
    "recompute": 0.06,
    "split": 0.1,
    "execution.order": 0.06,
    "allocator": 0.06,
    "sharding.states": 0.1,
    "sharding.communication": 0.15,
    "sharding.parallel": 0.2,
    "offload.activations": 0.2,
    "offload.states": 0.2,
}
"""Prior standard deviation by slot for techniques that run the model's own ops; `_DISPATCH_SD` for those that
observe every op. On quiet CPUs recompute is predicted within a few percent, offload within tens.
"""
_DISPATCH_SD = 0.25
_COMPILE_SD = 0.3
_RESOURCE_SD = 0.25
"""Prior for a resource, times the share of the step that it is exposed."""
_KNOBS_SD = 0.04
"""Prior for the knobs of a technique, relative to others of its kind."""
_OWN_SD = 0.02
"""Error of a candidate that no feature explains, and of a measurement."""
_MICRO_BATCH_SD = 0.05
"""Prior per doubling of the micro-batch."""
_SCALES = (0.5, 1.0, 2.0, 4.0, 8.0)
_SCALE_SD = 0.7
"""Prior of the logarithm of the scale, a factor on all standard deviations but `_STEP_SD` and `_OWN_SD`."""
PRIOR_SCALE = {"cpu": 1.0, "cuda": 3.0}
"""Scale by device: published step times on GPUs are predicted with a median error of 13 %, on CPUs of 5 %."""
_COMPUTE = "compute"


class Observed(NamedTuple):
    """A candidate that ran, with its prediction, and its step time."""

    scored: Scored
    step_s: float
    noise: float = 0.0
    """Standard deviation of the logarithm of `step_s` beyond `_OWN_SD`: a busy machine, an unsteady step."""


class Posterior(NamedTuple):
    """(n,) each: mean and standard deviation of the logarithm of measured over predicted step time."""

    mean: F64
    sd: F64


def kinds(choice: Choice) -> frozenset[Kind]:
    """Return the techniques of `choice` without their knobs."""
    return frozenset((each.slot, each.kind) for each in choice.techniques)


@dataclass(frozen=True)
class StepTimeModel:
    """Corrects predicted step times by the trials in `observed`."""

    observed: Sequence[Observed] = ()
    prior_scale: float = 1.0
    """Expected scale of the prior: 1 for CPUs, whose predictions were compared with many trials."""

    def posterior(self, candidates: Sequence[Scored]) -> Posterior:
        """Return the posterior of each candidate, with the error of a single measurement."""
        features = _Features.of([each.scored for each in self.observed])
        at, own = features.matrix(candidates)
        if not self.observed:
            sd = np.sqrt(at**2 @ features.variance(1.0) + own * self.prior_scale**2 + _OWN_SD**2)
            return Posterior(np.zeros(len(candidates)), sd)
        seen, _ = features.matrix([each.scored for each in self.observed])
        target = np.log([each.step_s / each.scored.prediction.step_s for each in self.observed])
        noise = np.diag([_OWN_SD**2 + each.noise**2 for each in self.observed])
        means, variances, weights = [], [], []
        for scale in _SCALES:
            prior = features.variance(scale)
            between = seen * prior @ seen.T + noise
            factor = np.linalg.cholesky(between)
            white = np.linalg.solve(factor, target)
            toward = np.linalg.solve(factor, seen * prior @ at.T)  # (trials, candidates)
            means.append(white @ toward)
            variances.append(at**2 @ prior - (toward**2).sum(axis=0))
            weights.append(
                -0.5 * white @ white
                - np.log(np.diag(factor)).sum()
                - 0.5 * (math.log(scale / self.prior_scale) / _SCALE_SD) ** 2
            )
        weight = np.exp(np.array(weights) - max(weights))
        weight /= weight.sum()
        mean = weight @ np.array(means)
        spread = weight @ (np.maximum(np.array(variances), 0.0) + (np.array(means) - mean) ** 2)
        scale = float(weight @ np.array(_SCALES))
        return Posterior(mean, np.sqrt(spread + own * scale**2 + _OWN_SD**2))

    def step_s(self, scored: Scored) -> tuple[float, float, float]:
        """Return the expected step time of a candidate and the bounds of its 90 % interval, in seconds."""
        mean, sd = (float(each[0]) for each in self.posterior([scored]))
        at = scored.prediction.step_s * math.exp(mean)
        return at, at * math.exp(-1.645 * sd), at * math.exp(1.645 * sd)


def expected_improvement(log_s: F64, sd: F64, best_log_s: float) -> F64:
    """Return by how much the logarithm of the best is expected to fall, by candidate; (n,) each."""
    z = (best_log_s - log_s) / sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    found: F64 = sd * (z * ndtr(z) + density)
    return found


def chance_to_improve(log_s: F64, sd: F64, best_log_s: float, by: float) -> F64:
    """Return the probability that a candidate is faster than the best by more than the fraction `by`."""
    found: F64 = ndtr((best_log_s + math.log1p(-by) - log_s) / sd)
    return found


@dataclass(frozen=True)
class _Features:
    """Columns: every step, kinds, techniques that ran with these knobs, resources, doublings of the batch."""

    kinds: Mapping[Kind, int]
    with_knobs: Mapping[tuple[object, ...], int]
    resources: Mapping[str, int]
    micro_batch: int
    sd: F64

    @classmethod
    def of(cls, tried: Sequence[Scored]) -> _Features:
        """Return the features of the trials; a mechanism that no trial has adds variance, but no column."""
        names: dict[Kind, float] = {}
        with_knobs: dict[tuple[object, ...], None] = {}
        resources: dict[str, None] = {}
        for each in tried:
            for technique in each.choice.techniques:
                names[technique.slot, technique.kind] = _technique_sd(technique)
                with_knobs[_knobs_key(technique)] = None
            if each.choice.execution.compile:
                names["execution", "compile"] = _COMPILE_SD
            resources.update(dict.fromkeys(_shares(each.prediction)))
        sizes = len(names), len(with_knobs), len(resources)
        starts = np.cumsum([1, *sizes]).tolist()
        return cls(
            {kind: starts[0] + i for i, kind in enumerate(names)},
            {key: starts[1] + i for i, key in enumerate(with_knobs)},
            {name: starts[2] + i for i, name in enumerate(resources)},
            starts[3],
            np.array(
                [
                    _STEP_SD,
                    *names.values(),
                    *[_KNOBS_SD] * sizes[1],
                    *[_RESOURCE_SD] * sizes[2],
                    _MICRO_BATCH_SD,
                ]
            ),
        )

    def variance(self, scale: float) -> F64:
        """Return the prior variance of each coefficient."""
        found: F64 = (self.sd * np.array([1.0, *[scale] * (len(self.sd) - 1)])) ** 2
        return found

    def matrix(self, candidates: Sequence[Scored]) -> tuple[F64, F64]:
        """Return (candidates, columns) values, and (candidates,) variance of mechanisms without a column."""
        found, own = np.zeros((len(candidates), len(self.sd))), np.zeros(len(candidates))
        found[:, 0] = 1.0
        for row, each in enumerate(candidates):
            for technique in each.choice.techniques:
                column = self.kinds.get((technique.slot, technique.kind))
                if column is None:
                    own[row] += _technique_sd(technique) ** 2
                else:
                    found[row, column] = 1.0
                column = self.with_knobs.get(_knobs_key(technique))
                if column is None:
                    own[row] += _KNOBS_SD**2
                else:
                    found[row, column] = 1.0
            if each.choice.execution.compile:
                column = self.kinds.get(("execution", "compile"))
                if column is None:
                    own[row] += _COMPILE_SD**2
                else:
                    found[row, column] = 1.0
            for name, share in _shares(each.prediction).items():
                column = self.resources.get(name)
                if column is None:
                    own[row] += (share * _RESOURCE_SD) ** 2
                else:
                    found[row, column] = share
            found[row, self.micro_batch] = math.log2(each.choice.execution.micro_batch or 1)
        return found, own


def _technique_sd(technique: Technique) -> float:
    slot = _SLOT_SD[technique.slot]
    return max(slot, _DISPATCH_SD) if technique.effects.eager_only == DISPATCH_MODE else slot


def _knobs_key(technique: Technique) -> tuple[object, ...]:
    return technique.slot, technique.kind, *technique.knobs()


def _shares(prediction: Prediction) -> dict[str, float]:
    """Return by resource the share of the step during which compute waits for it."""
    whole = prediction.step_s or 1.0
    return {
        name: min(seconds / whole, 1.0)
        for name, seconds in prediction.exposed_s.items()
        if name != _COMPUTE and seconds > 0
    }
