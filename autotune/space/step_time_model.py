"""Posterior of step times: what the trials of a search say about the candidates it has not run.

A step is predicted as seconds of mechanisms: the model's own compute, recomputation, copies in each
direction, updates on the host, links, SSDs, the host's issuing of ops (`Prediction.mechanism_s`). Each has an
unknown factor on its seconds, and so has each technique on the seconds of the mechanisms that it uses:

    step = predicted × g × w(techniques) × (1 + Σ (f(mechanism, techniques) - 1) × share of the mechanism)

`g` is the factor that all steps share, `w` what a technique costs beyond its mechanisms. The logarithms of
all factors have a Gaussian prior around 0, so a trial corrects all candidates that share a mechanism with it,
in proportion to the seconds that they spend there: settings whose mechanisms take few seconds are known well
before any trial. The posterior is Gaussian around its mode, found by Gauss-Newton steps (Laplace's method;
Bishop 2006, section 4.4). The scales of the two priors, of mechanisms and of `w`, are averaged over a grid,
weighted by the marginal likelihood (Rasmussen, Williams 2006, section 5.2): a search whose first trials come
out as predicted trusts the simulator, and another one explores.

Candidates are proposed by expected improvement (Jones, Schonlau, Welch 1998, equation 15).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from memtune.autotune.space.candidates import Choice
from memtune.autotune.space.scoring import Scored
from memtune.effects import DISPATCH_MODE
from memtune.technique import Technique

Kind = tuple[str, str]
"""Slot and technique."""

F64 = npt.NDArray[np.float64]

_STEP_SD = 0.5
"""Prior of `g`: standard deviation of its logarithm before any trial. All priors below are alike."""
_MECHANISM_SD = 0.35
"""Prior of the factor on a mechanism's seconds."""
_USE_SD = 0.2
"""Prior of the factor on a mechanism's seconds in one technique, beyond the mechanism's own."""
_USES = {
    "recompute": ("recompute",),
    "split": ("recompute",),
    "sharding.states": ("intra_link", "inter_link", "optimizer"),
    "sharding.communication": ("intra_link", "inter_link"),
    "sharding.parallel": ("intra_link", "inter_link"),
    "offload.activations": ("host_to_device", "device_to_host", "host_threads", "ssd_read", "ssd_write"),
    "offload.states": ("host_to_device", "device_to_host", "host_threads", "ssd_read", "ssd_write"),
}
"""Mechanisms whose seconds the techniques of a slot cause."""
_TECHNIQUE_SD = {"sharding.parallel": 0.1, "allocator": 0.02, "execution.order": 0.03, "recompute": 0.03}
_OTHER_TECHNIQUE_SD = 0.05
_DISPATCH_SD = 0.1
_COMPILE_SD = 0.2
"""Prior of `w` by slot, of other slots, of techniques that observe every op, and of compiled code."""
_KNOBS_SD = 0.02
"""Prior for the knobs of a technique, relative to others of its kind."""
_OWN_SD = 0.01
"""Error of a candidate that no feature explains."""
_NOISE_SD = 0.01
"""Error of a measurement on a quiet machine."""
_MICRO_BATCH_SD = 0.03
"""Prior per doubling of the micro-batch."""
_MECHANISM_SCALES = (0.25, 0.5, 1.0, 2.0)
_TECHNIQUE_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
_SCALE_SD = 0.7
"""Prior of the logarithm of a scale, a factor on all standard deviations of mechanisms, or of `w`."""
_UNLIKELY = 0.02
"""Scales less likely than the likeliest by this factor are left out."""
_ITERATIONS = 4
_LEAST = 0.1
"""Least factor on a step of all mechanisms together: a negative one has no logarithm."""


class Observed(NamedTuple):
    """A candidate that ran, with its prediction, and its step time."""

    scored: Scored
    step_s: float
    noise: float = 0.0
    """Standard deviation of the logarithm of `step_s` beyond `_NOISE_SD`: other load, an unsteady step."""


class Posterior(NamedTuple):
    """(n,) each: mean and standard deviation of the logarithm of true over predicted step time."""

    mean: F64
    sd: F64


def kinds(choice: Choice) -> frozenset[Kind]:
    """Return the techniques of `choice` without their knobs."""
    return frozenset((each.slot, each.kind) for each in choice.techniques)


@dataclass(frozen=True)
class StepTimeModel:
    """Corrects predicted step times by the trials in `observed`."""

    observed: Sequence[Observed] = ()

    def posterior(self, candidates: Sequence[Scored]) -> Posterior:
        """Return the posterior of each candidate's own step time, without the error of a measurement."""
        features = _Features([each.scored for each in self.observed], candidates)
        seen = features.matrix([each.scored for each in self.observed])
        asked = features.matrix(candidates)
        target = np.log([each.step_s / each.scored.prediction.step_s for each in self.observed])
        noise = np.array([_NOISE_SD**2 + each.noise**2 for each in self.observed])
        fits = {
            scales: _fitted(seen, target, noise, features.variance(*scales))
            for scales in itertools.product(_MECHANISM_SCALES, _TECHNIQUE_SCALES)
        }
        log_chance = np.array([fit.log_evidence + _log_prior(scales) for scales, fit in fits.items()])
        chance = np.exp(log_chance - log_chance.max())
        # Most scales of the grid weigh nothing, and each costs products with the slopes of all candidates.
        likely = chance >= _UNLIKELY
        weight = chance[likely] / chance[likely].sum()
        means, variances = [], []
        for scales, fit in itertools.compress(fits.items(), likely):
            slope = asked.slope(fit.mode)
            means.append(asked.value(fit.mode))
            variances.append(fit.variance(slope) + asked.unseen * scales[1] ** 2)
        mean = weight @ np.array(means)
        # Law of total variance: within each scale, and between the scales' means.
        spread = weight @ (np.array(variances) + (np.array(means) - mean) ** 2)
        return Posterior(mean, np.sqrt(spread))

    def believing(self, pending: Sequence[Scored]) -> StepTimeModel:
        """Return this model as if each candidate in `pending` had been measured at its expected step time.

        So candidates proposed together differ in the mechanisms that are uncertain ("kriging believer":
        Ginsbourger, Le Riche, Carraro 2010, section 4.2).
        """
        if not pending:
            return self
        mean = self.posterior(pending).mean.tolist()
        believed = [
            Observed(each, each.prediction.step_s * math.exp(by))
            for each, by in zip(pending, mean, strict=True)
        ]
        return replace(self, observed=(*self.observed, *believed))

    def step_s(self, scored: Scored) -> tuple[float, float, float]:
        """Return the expected step time of a candidate and the bounds of its 90 % interval, in seconds."""
        mean, sd = (float(each[0]) for each in self.posterior([scored]))
        at = scored.prediction.step_s * math.exp(mean)
        return at, at * math.exp(-1.645 * sd), at * math.exp(1.645 * sd)


def _log_prior(scales: tuple[float, float]) -> float:
    return -0.5 * sum((math.log(scale) / _SCALE_SD) ** 2 for scale in scales)


class _Fit(NamedTuple):
    """Posterior of all logarithms.

    The (columns, columns) covariance is diag(prior) - gain @ shared.T. It is not computed: trials are few and
    columns many, so that products with its parts are cheap.
    """

    mode: F64
    prior: F64
    """(columns,) variances before any trial."""
    gain: F64
    """(columns, trials): by how much each trial's residual moves each logarithm."""
    shared: F64
    """(columns, trials): covariance of each logarithm and each trial before it was measured."""
    log_evidence: float

    def variance(self, slope: F64) -> F64:
        """Return (n,) variances of what grows by `slope`, (n, columns), with the logarithms."""
        known = ((slope @ self.gain) * (slope @ self.shared)).sum(axis=1)
        found: F64 = (slope**2 @ self.prior - known).clip(0.0)
        return found


def _fitted(seen: _Matrix, target: F64, noise: F64, prior: F64) -> _Fit:
    """Return the posterior of all logarithms around its mode, and the evidence (Laplace)."""
    mode = np.zeros(len(prior))
    if not len(target):
        # No trial: the prior itself.
        none = np.zeros((len(prior), 0))
        return _Fit(mode, prior, none, none, 0.0)
    for _ in range(_ITERATIONS):
        slope = seen.slope(mode)
        # Linearised at the mode (Gauss-Newton), with the prior's mean 0.
        rest = target - seen.value(mode) + slope @ mode
        # In the space of trials: they are few, the factors many.
        shared = prior[:, None] * slope.T
        between = np.linalg.inv(slope @ shared + np.diag(noise))
        gain = shared @ between
        mode = gain @ rest
    _, log_det = np.linalg.slogdet(between)
    return _Fit(mode, prior, gain, shared, 0.5 * float(log_det - rest @ between @ rest))


@dataclass(frozen=True)
class _Matrix:
    """Features of n candidates.

    Attributes:
        linear: (n, columns): what multiplies the logarithms of factors on whole steps.
        shares: (n, mechanisms): share of a step that each mechanism takes.
        uses: (n, mechanisms, uses): columns of the logarithms that add up to that of the mechanism's factor.
        unseen: (n,) variance of knobs that no trial has.
    """

    linear: F64
    shares: F64
    uses: npt.NDArray[np.intp]
    unseen: F64

    def _seconds(self, mode: F64) -> tuple[F64, F64]:
        # Logarithms of factors add up, so a factor is positive and twice is as far from 1 as half.
        slower = self.shares * np.exp(mode[self.uses].sum(axis=2))
        whole = np.maximum(1 - self.shares.sum(axis=1) + slower.sum(axis=1), _LEAST)
        return slower, whole

    def value(self, mode: F64) -> F64:
        """Return (n,) logarithms of the step's factor."""
        found: F64 = self.linear @ mode + np.log(self._seconds(mode)[1])
        return found

    def slope(self, mode: F64) -> F64:
        """Return (n, columns) derivatives of `value`."""
        slower, whole = self._seconds(mode)
        n, columns = self.linear.shape
        at = (np.arange(n)[:, None, None] * columns + self.uses).ravel()
        share = np.broadcast_to((slower / whole[:, None])[:, :, None], self.uses.shape).ravel()
        found: F64 = self.linear + np.bincount(at, share, n * columns).reshape(n, columns)
        return found


_UNUSED = 0
"""Column of a constant 0: a mechanism that a slot does not use."""
_STEP = 1


class _Features:
    """Columns: unused, every step, batch, mechanisms, their use by kinds, kinds, knobs that a trial had."""

    def __init__(self, tried: Sequence[Scored], candidates: Sequence[Scored]) -> None:
        self._columns: dict[object, int] = {"unused": _UNUSED, "step": _STEP, "micro-batch": 2}
        self._sd = [0.0, _STEP_SD, 0.0]
        self._sd_technique = [0.0, 0.0, _MICRO_BATCH_SD]
        self._sd_mechanism = [0.0, 0.0, 0.0]
        self._mechanisms = list(
            dict.fromkeys(name for each in (*tried, *candidates) for name in each.prediction.mechanism_shares)
        )
        for name in self._mechanisms:
            self._add(name, mechanism=_MECHANISM_SD)
        for technique in dict.fromkeys(
            one for each in (*tried, *candidates) for one in each.choice.techniques
        ):
            self._add((technique.slot, technique.kind), technique=_technique_sd(technique))
            for name in _USES.get(technique.slot, ()):
                if name in self._columns:
                    self._add((name, technique.slot, technique.kind), mechanism=_USE_SD)
        self._add(("execution", "compile"), technique=_COMPILE_SD)
        # Knobs that no trial had need no column; `matrix` adds their variance.
        for each in tried:
            for technique in each.choice.techniques:
                self._add(technique, technique=_KNOBS_SD)
            # Its own column, so that the posterior of a trial that ran is nearly its measurement.
            self._add(each.key, technique=_OWN_SD)

    def _add(self, name: object, *, mechanism: float = 0.0, technique: float = 0.0) -> None:
        if name not in self._columns:
            self._columns[name] = len(self._columns)
            self._sd.append(0.0)
            self._sd_mechanism.append(mechanism)
            self._sd_technique.append(technique)

    def variance(self, mechanism_scale: float, technique_scale: float) -> F64:
        """Return the prior variance of each column."""
        found: F64 = (
            np.array(self._sd)
            + mechanism_scale * np.array(self._sd_mechanism)
            + technique_scale * np.array(self._sd_technique)
        ) ** 2
        return found

    def matrix(self, candidates: Sequence[Scored]) -> _Matrix:
        """Return the features of candidates."""
        n, columns = len(candidates), self._columns
        linear, unseen = np.zeros((n, len(columns))), np.zeros(n)
        shares = np.zeros((n, len(self._mechanisms)))
        # A fixed width, padded with the column of 0: rows of arrays instead of lists of columns.
        uses = np.full((n, len(self._mechanisms), 1 + _MOST_USERS), _UNUSED)
        uses[:, :, 0] = [columns[name] for name in self._mechanisms]
        place = {name: i for i, name in enumerate(self._mechanisms)}
        linear[:, _STEP] = 1.0
        for row, each in enumerate(candidates):
            linear[row, columns["micro-batch"]] = math.log2(each.choice.execution.micro_batch or 1)
            if each.choice.execution.compile:
                linear[row, columns["execution", "compile"]] = 1.0
            for name, share in each.prediction.mechanism_shares.items():
                shares[row, place[name]] = share
            users = dict.fromkeys(self._mechanisms, 0)
            for technique in each.choice.techniques:
                linear[row, columns[technique.slot, technique.kind]] = 1.0
                for name in _USES.get(technique.slot, ()):
                    if name in users:
                        users[name] += 1
                        uses[row, place[name], users[name]] = columns[name, technique.slot, technique.kind]
                if technique in columns:
                    linear[row, columns[technique]] = 1.0
                else:
                    # No trial informs it, so it needs no column: its variance is added at the end.
                    unseen[row] += _KNOBS_SD**2
            if each.key in columns:
                linear[row, columns[each.key]] = 1.0
            else:
                unseen[row] += _OWN_SD**2
        return _Matrix(linear, shares, uses, unseen)


_MOST_USERS = max(
    sum(name in uses for uses in _USES.values())
    for name in {name for uses in _USES.values() for name in uses}
)


def _technique_sd(technique: Technique) -> float:
    found = _TECHNIQUE_SD.get(technique.slot, _OTHER_TECHNIQUE_SD)
    return max(found, _DISPATCH_SD) if technique.effects.eager_only == DISPATCH_MODE else found


def expected_improvement(log_s: F64, sd: F64, best_log_s: float) -> F64:
    """Return by how much the logarithm of the best is expected to fall, by candidate; (n,) each."""
    z = (best_log_s - log_s) / sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    found: F64 = sd * (z * ndtr(z) + density)
    return found
