"""Posterior of step times: what the trials of a search say about the candidates it has not run.

A step is predicted as seconds of mechanisms: the model's own compute, recomputation, copies in each
direction, updates on the host, links, SSDs, the host's issuing of ops (`Prediction.mechanism_s`). Each has an
unknown factor on its seconds, and so has each technique on the seconds of the mechanisms that it uses:

    step = predicted × g × w(techniques) × (1 + Σ (f(mechanism, techniques) - 1) × share of the mechanism)

`g` is the factor that all steps share, `w` what a technique costs beyond its mechanisms. The logarithms of
all factors have a Gaussian prior, so a trial corrects all candidates that share a mechanism with it,
in proportion to the seconds that they spend there: settings whose mechanisms take few seconds are known well
before any trial. The posterior is Gaussian around its mode, found by Gauss-Newton steps (Laplace's method;
Bishop 2006, section 4.4). The scales of the two priors, of mechanisms and of `w`, are averaged over a grid,
weighted by the marginal likelihood (Rasmussen, Williams 2006, section 5.2): a search whose first trials come
out as predicted trusts the simulator, and another one explores. Mechanisms and techniques are expected to be
slower than predicted, by a fraction of their uncertainty: what a simulator does not know costs time. Else the
best of hundreds of predictions would be the one with the largest error ("optimizer's curse": Smith, Winkler
2006).

A trial that other work slowed down is an outlier in one direction. Each trial has a small probability to be
one, given what all others say of its setting (a mixture of two Gaussians, by its variational bound; Bishop
2006, section 10.1): it then counts little, and its setting stays as uncertain as if it had not run. To repeat
it is worth that probability times the expected improvement without it. A setting that ran again is known.

Candidates are proposed by expected improvement (Jones, Schonlau, Welch 1998, equation 15), averaged over the
scales.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
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
_SLOWER = 0.5
"""Mean of the priors of mechanisms and `w`, in their standard deviations."""
_SLOWED, _MOST_SLOWED = 0.02, 0.5
"""Prior probability that other work slowed a trial down, although nothing shows it; and at most."""
_SURPRISING = 0.15
"""Probability that a technique is much slower than predicted where no other trial has it."""
_MUCH_SLOWER_SD = 0.7
"""Standard deviation of the logarithm of how much slower either makes a trial."""
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
_ITERATIONS = 6
_DOUBTFUL = 0.02
"""Probability that other work slowed a trial down from which on to repeat it is considered."""
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
    """Corrects predicted step times by the trials in `observed`.

    Attributes:
        observed: Trials, with their step times.
        are_trials: Whether other work may have slowed `observed` down, and errors of predictions tend to one
            side. False for times that were computed.
    """

    observed: Sequence[Observed] = ()
    are_trials: bool = True

    def posterior(self, candidates: Sequence[Scored]) -> Posterior:
        """Return the posterior of each candidate's own step time, without the error of a measurement."""
        chances, means, variances = self._by_scale(candidates)
        mean = chances @ means
        # Law of total variance: within each scale, and between the scales' means.
        return Posterior(mean, np.sqrt(chances @ (variances + (means - mean) ** 2)))

    def improvement(
        self, candidates: Sequence[Scored], log_s: F64, best_log_s: float, error_sd: F64 | float = 0.0
    ) -> F64:
        """Return by how much the logarithm of the best is expected to fall, by candidate.

        Args:
            candidates: Settings.
            log_s: (n,) logarithms of what they are predicted to take.
            best_log_s: Logarithm of the best measurement.
            error_sd: (n,) standard deviations of the logarithms of the predictions, beyond the posterior's.
        """
        # Expected over the scales. One Gaussian with the mean and variance of all scales would take for a
        # chance to be faster that settings are slower by a large scale.
        chances, means, variances = self._by_scale(candidates)
        found: F64 = chances @ _improvement(log_s + means, np.sqrt(variances + error_sd**2), best_log_s)
        return found

    def _by_scale(self, candidates: Sequence[Scored]) -> tuple[F64, F64, F64]:
        """Return for each likely scale its probability, and means and variances of the candidates."""
        features = _Features([each.scored for each in self.observed], candidates)
        asked = features.matrix(candidates)
        means, variances, weights = [], [], []
        for weight, scales, fit in self._fits(features):
            slope = asked.slope(fit.mode)
            means.append(asked.value(fit.mode))
            variances.append(fit.variance(slope) + asked.unseen * scales[1] ** 2)
            weights.append(weight)
        return np.array(weights), np.array(means), np.array(variances)

    def _fits(self, features: _Features) -> list[tuple[float, tuple[float, float], _Fit]]:
        """Return the likely scales with their weights and fits."""
        trials = self._once()
        seen = features.matrix([each.scored for each in trials])
        target = np.log([each.step_s / each.scored.prediction.step_s for each in trials])
        noise = np.array([_NOISE_SD**2 + each.noise**2 for each in trials])
        slowed = np.array([self._slowed(each) for each in trials])
        kinds_of = [kinds(each.scored.choice) for each in trials]
        ran = Counter(kind for each in kinds_of for kind in each)
        # A technique in one setting alone: no other trial says whether it is slow, or was slowed down.
        is_new = np.array([any(ran[kind] == 1 for kind in each) for each in kinds_of], bool)
        slower = _SLOWER if self.are_trials else 0.0
        grid = list(itertools.product(_MECHANISM_SCALES, _TECHNIQUE_SCALES))
        fits = _fitted(
            seen,
            target,
            noise,
            slower * np.array([features.expected_sd(*scales) for scales in grid]),
            np.array([features.variance(*scales) for scales in grid]),
            slowed,
            is_new,
        )
        log_chance = np.array(
            [fit.log_evidence + _log_prior(scales) for scales, fit in zip(grid, fits, strict=True)]
        )
        chance = np.exp(log_chance - log_chance.max())
        # Most scales of the grid weigh nothing, and each costs products with the slopes of all candidates.
        likely = chance >= _UNLIKELY
        weight = chance[likely] / chance[likely].sum()
        found = itertools.compress(zip(grid, fits, strict=True), likely)
        return [(float(each), *fitted) for each, fitted in zip(weight, found, strict=True)]

    def _once(self) -> list[Observed]:
        """Return one observation of each setting: of two the faster one, as other work makes none faster."""
        if not self.are_trials:
            return list(self.observed)
        by_key: dict[str, list[Observed]] = {}
        for each in self.observed:
            by_key.setdefault(each.scored.key, []).append(each)
        # The lower median: of three the middle one, so that a single lucky measurement decides nothing.
        return [sorted(each, key=lambda one: one.step_s)[(len(each) - 1) // 2] for each in by_key.values()]

    def _slowed(self, trial: Observed) -> float:
        """Return the prior probability that other work slowed all trials of a setting down."""
        is_only = sum(each.scored.key == trial.scored.key for each in self.observed) == 1
        return min(_SLOWED + trial.noise, _MOST_SLOWED) if self.are_trials and is_only else 0.0

    def repeat_gains(self, best_s: float) -> dict[str, float]:
        """Return what to repeat a trial is worth, by the key of its setting.

        Args:
            best_s: Best measured seconds per sample.

        Returns:
            By how much the logarithm of `best_s` is expected to fall; trials that were hardly slowed down are
            left out.
        """
        trials = self._once()
        features = _Features([each.scored for each in trials], ())
        doubt = sum(weight * fit.doubt for weight, _, fit in self._fits(features)) if trials else ()
        found = {}
        for each, probability in zip(trials, np.asarray(doubt).tolist(), strict=True):
            if probability < _DOUBTFUL:
                continue
            # Without it: had it been slowed down, it would say nothing of its setting.
            others = replace(self, observed=[one for one in self.observed if one is not each])
            log_s = np.array([-math.log(each.scored.prediction.samples_per_s)])
            gain = others.improvement([each.scored], log_s, math.log(best_s))
            found[each.scored.key] = probability * float(gain[0])
        return found

    def believing(self, pending: Sequence[Scored]) -> StepTimeModel:
        """Return this model as if each candidate in `pending` had been measured at its expected step time."""
        # So candidates proposed together differ in the mechanisms that are uncertain ("kriging
        # believer": Ginsbourger, Le Riche, Carraro 2010, section 4.2).
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
    doubt: F64
    """(trials,) probabilities that other work slowed them down."""

    def variance(self, slope: F64) -> F64:
        """Return (n,) variances of what grows by `slope`, (n, columns), with the logarithms."""
        known = ((slope @ self.gain) * (slope @ self.shared)).sum(axis=1)
        found: F64 = (slope**2 @ self.prior - known).clip(0.0)
        return found


def _fitted(
    seen: _Matrix, target: F64, noise: F64, mean: F64, prior: F64, slowed: F64, is_new: npt.NDArray[np.bool_]
) -> list[_Fit]:
    """Return the posterior of all logarithms around its mode, and the evidence (Laplace), for each scale.

    Args:
        seen: Features of the trials.
        target: (trials,) logarithms of measured over predicted step times.
        noise: (trials,) variances of their errors.
        mean: (scales, columns) of the prior.
        prior: (scales, columns) variances of the prior.
        slowed: (trials,) prior probabilities that other work slowed them down.
        is_new: (trials,) whether a trial has a technique that no other has.
    """
    # All scales at once: trials are few, so that one at a time would spend its time in Python.
    mode, doubt = mean, np.zeros((len(mean), len(target)))
    if not len(target):
        # No trial: the prior itself.
        none = np.zeros((prior.shape[1], 0))
        return [_Fit(*each, none, none, 0.0, np.zeros(0)) for each in zip(mode, prior, strict=True)]
    for _ in range(_ITERATIONS):
        slope = seen.slope(mode)
        # Linearised at the mode (Gauss-Newton).
        rest = target - seen.value(mode) + _product(slope, mode - mean)
        # In the space of trials: they are few, the factors many.
        shared = prior[:, :, None] * slope.swapaxes(1, 2)
        error: F64 = 1 / ((1 - doubt) / noise + doubt / (noise + _MUCH_SLOWER_SD**2))
        own = error[:, :, None] * np.eye(len(target))
        between: F64 = np.linalg.inv(slope @ shared + own).astype(np.float64)
        mode = mean + _product(shared, _product(between, rest))
        # The evidence below needs the doubt by which `between` was computed, not the one after it.
        used, doubt = doubt, _doubt(between, rest, error, noise, slowed, is_new)
    _, log_det = np.linalg.slogdet(between)
    log_evidence = 0.5 * (log_det - (rest * _product(between, rest)).sum(axis=1))
    log_evidence += _log_chance(used, error, noise, slowed)
    return list(map(_Fit, mode, prior, shared @ between, shared, log_evidence.tolist(), doubt))


def _product(matrices: F64, vectors: F64) -> F64:
    found: F64 = (matrices @ vectors[:, :, None])[:, :, 0]
    return found


def _doubt(
    between: F64, rest: F64, error: F64, noise: F64, slowed: F64, is_new: npt.NDArray[np.bool_]
) -> F64:
    """Return (scales, trials) probabilities that other work slowed a trial down, given all other trials."""
    # Mean and variance that the others predict of each one (Rasmussen, Williams 2006, equation 5.12).
    precision = np.diagonal(between, axis1=1, axis2=2)
    excess = _product(between, rest) / precision
    # `1 / precision` includes the trial's own error, inflated by its doubt; a steady trial has `noise`
    # instead.
    variance = (1 / precision - error).clip(0.0) + noise
    # A technique that no other trial has may itself be that slow: no reason to doubt the trial.
    surprising = _SURPRISING * is_new
    steady = (1 - surprising) * _density(excess, variance)
    much_slower = _longer(excess, variance + _MUCH_SLOWER_SD**2)
    steady += surprising * much_slower
    longer = slowed * much_slower
    found: F64 = longer / ((1 - slowed) * steady + longer).clip(np.finfo(np.float64).tiny)
    return found


def _longer(at: F64, variance: F64) -> F64:
    # Half of a Gaussian: nothing of this kind makes a trial faster.
    found: F64 = 2 * _density(at, variance) * (at > 0)
    return found


def _density(at: F64, variance: F64) -> F64:
    found: F64 = np.exp(-0.5 * at**2 / variance) / np.sqrt(variance)
    return found


def _log_chance(doubt: F64, error: F64, noise: F64, slowed: F64) -> F64:
    """Return (scales,) differences of the evidence's variational bound from that of errors of `error`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [
            part * (np.log(chance / part) - 0.5 * np.log(variance))
            for part, chance, variance in (
                (1 - doubt, 1 - slowed, noise),
                (doubt, slowed, noise + _MUCH_SLOWER_SD**2),
            )
        ]
    found: F64 = np.nansum(parts, axis=(0, 2)) + 0.5 * np.log(error).sum(axis=1)
    return found


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
        slower = self.shares * np.exp(mode[..., self.uses].sum(axis=-1))
        whole = np.maximum(1 - self.shares.sum(axis=1) + slower.sum(axis=-1), _LEAST)
        return slower, whole

    def value(self, mode: F64) -> F64:
        """Return logarithms of the step's factor: (n,) for (columns,), (m, n) for (m, columns)."""
        found: F64 = mode @ self.linear.T + np.log(self._seconds(mode)[1])
        return found

    def slope(self, mode: F64) -> F64:
        """Return derivatives of `value`: (n, columns) for (columns,), (m, n, columns) for (m, columns)."""
        slower, whole = self._seconds(mode)
        shape, columns = whole.shape, mode.shape[-1]
        # By `bincount`: columns repeat (unused ones are all column 0), and an indexed sum would add once.
        rows = np.arange(whole.size).reshape(shape)
        at = rows[..., None, None] * columns + self.uses
        share = np.broadcast_to((slower / whole[..., None])[..., None], at.shape)
        added = np.bincount(at.ravel(), share.ravel(), whole.size * columns)
        found: F64 = self.linear + added.reshape(*shape, columns)
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
        self._sd_one_sided = [0.0, 0.0, 0.0]
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
                self._add(technique, technique=_KNOBS_SD, one_sided=False)
            # Its own column, so that the posterior of a trial that ran is nearly its measurement.
            self._add(each.key, technique=_OWN_SD, one_sided=False)

    def _add(
        self, name: object, *, mechanism: float = 0.0, technique: float = 0.0, one_sided: bool = True
    ) -> None:
        if name not in self._columns:
            self._columns[name] = len(self._columns)
            self._sd.append(0.0)
            self._sd_mechanism.append(mechanism)
            self._sd_technique.append(technique)
            self._sd_one_sided.append(technique if one_sided else 0.0)

    def variance(self, mechanism_scale: float, technique_scale: float) -> F64:
        """Return the prior variance of each column."""
        found: F64 = (
            np.array(self._sd)
            + mechanism_scale * np.array(self._sd_mechanism)
            + technique_scale * np.array(self._sd_technique)
        ) ** 2
        return found

    def expected_sd(self, mechanism_scale: float, technique_scale: float) -> F64:
        """Return (columns,) prior standard deviations of what tends to take longer, 0 elsewhere."""
        one_sided = technique_scale * np.array(self._sd_one_sided)
        found: F64 = mechanism_scale * np.array(self._sd_mechanism) + one_sided
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


def _improvement(log_s: F64, sd: F64, best_log_s: float) -> F64:
    """Return by how much a Gaussian with mean `log_s` is expected to fall below `best_log_s`."""
    z = (best_log_s - log_s) / sd
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    found: F64 = sd * (z * ndtr(z) + density)
    return found
