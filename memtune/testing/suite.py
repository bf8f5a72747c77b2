"""Conformance suite: the tests that every technique must pass, built-in or third-party."""

from __future__ import annotations

import functools
import gc
import json
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from memtune.api import Tuned, apply
from memtune.config import Settings, TunedConfig, dump_yaml, load_config
from memtune.device import platform_of
from memtune.errors import ApplyError, MemtuneError
from memtune.hardware import cpu_threads
from memtune.runtime import DEVICE, current_tier
from memtune.search_spaces import find, kinds
from memtune.search_spaces.execution import Execution
from memtune.technique import Exactness, Plan, Reason, Technique
from memtune.testing.drift_check import (
    depends_on_data,
    drift,
    fresh_programs,
    peak_drift,
    plain_program,
    target_of,
)
from memtune.testing.seeded_defects import Mutation, mutations
from memtune.testing.training import (
    SEED,
    build,
    config_of,
    device_under_test,
    differences,
    one_step,
    plain,
    train_under,
)

_FINALIZERS = ("forget", "_forget", "__del__")
"""Functions that Python calls when an object is freed, other than through `weakref.finalize`.

It prints their exceptions, so they cannot fail `apply`.
"""
_FINALIZE = weakref.finalize.__call__.__code__
_ROOMS = (
    "activations",
    "checkpointer",
    "compile",
    "deferred_init",
    "memory",
    "offload",
    "parallel",
    "runtime",
    "search_spaces",
    "ssd",
)
_OURS = tuple(f"memtune.{room}" for room in _ROOMS)
_PLAIN = ("_pass", "_planner", "_plan", "_pattern")
_WAY_BACK = (".context", ".memory_tiers", ".error_propagation")
"""Functions in which no error is injected; the last one returns when all techniques are applied."""


class TechniqueSuite:
    """Base class of a technique's test; pytest collects the inherited tests from the subclass.

    Attributes:
        technique: The class under test.
        models: Workload files by name; every test that trains or records runs on each.
        others: Names and files of further models, which single tests use.
        variants: Knob settings to test; empty: the defaults.
        quick: Names of the models for the seeded defects, cheapest first.
        not_shown: Names of mutations that do not affect this technique; give the reason in a comment.
        drawn_defects: Number of seeded defects in a short test run; more where few suites have a defect.
        tolerance: For `Exactness.REORDERED`: largest difference relative to the largest value of a tensor.
    """

    technique: ClassVar[type[Technique]]
    models: ClassVar[Mapping[str, Path]]
    others: ClassVar[Mapping[str, Path]] = {}
    variants: ClassVar[tuple[Technique, ...]] = ()
    quick: ClassVar[tuple[str, ...]] = ()
    not_shown: ClassVar[tuple[str, ...]] = ()
    drawn_defects: ClassVar[int] = 1
    tolerance: ClassVar[float] = 0.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Copy every test to the subclass, parametrized by model, variant or mutation.

        Grids have the mark `drawn(n)`: a short test run may sample n cases of a grid and skip the others.
        """
        import pytest

        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "technique"):
            return
        cls._one_thread = pytest.fixture(autouse=True)(_one_thread)  # type: ignore[attr-defined]
        variants = cls.variants or (cls.default(),)
        variant = pytest.mark.parametrize("variant", variants, ids=[_named(each) for each in variants])
        model = pytest.mark.parametrize("model", list(cls.models))
        shown = [each for each in mutations(cls.technique) if each.name not in cls.not_shown]
        mutation = pytest.mark.parametrize("mutation", shown, ids=str)
        drawn = pytest.mark.drawn
        for name, marks in {
            "test_config_survives_yaml_and_json": (variant,),
            "test_plan_is_plain_data_and_stable": (model, variant, drawn(1)),
            "test_trains_as_the_plain_model": (model, variant, drawn(2)),
            "test_rewrite_equals_the_recording_of_apply": (model, variant, drawn(1)),
            "test_failed_apply_leaves_no_trace": (variant, drawn(1)),
            "test_suite_fails_under": (mutation, drawn(cls.drawn_defects)),
        }.items():
            if name not in vars(cls):
                setattr(
                    cls,
                    name,
                    functools.reduce(
                        lambda test, mark: mark(test), marks, _copied(getattr(TechniqueSuite, name))
                    ),
                )

    @classmethod
    def default(cls) -> Technique:
        """Return the technique with default knobs."""
        return cls.technique(kind=cls.technique.__module__.rpartition(".")[2])

    # -- the catalogue ---------------------------------------------------------------------------------------

    def test_kind_and_slot_match_file_and_folder(self) -> None:
        """Check that `find(slot, kind)` returns this class."""
        technique = self.default()
        assert technique.kind in kinds(self.technique.slot)
        assert find(self.technique.slot, technique.kind) is self.technique
        assert f".{self.technique.slot}.{technique.kind}" in self.technique.__module__
        assert self.technique.title
        assert self.technique.source
        assert json.dumps(technique.record(target_of(technique)))

    def test_config_survives_yaml_and_json(self, variant: Technique) -> None:
        """Check that a config with the technique is equal after a round trip."""
        config = TunedConfig(settings=Settings.of(Execution(), {variant.slot: variant}))
        assert load_config(dump_yaml(config)) == config
        assert load_config(json.loads(json.dumps(config.document()))) == config
        assert config.settings.technique(variant.slot) == variant

    def test_plan_is_plain_data_and_stable(self, model: str, variant: Technique) -> None:
        """Two plans for one program have equal hashes and survive JSON."""
        one, other = self._plan(model, variant), self._plan(model, variant)
        assert one.sha256 == other.sha256
        assert type(one).model_validate_json(one.model_dump_json()) == one

    # -- against the plain model -----------------------------------------------------------------------------

    def test_trains_as_the_plain_model(self, model: str, variant: Technique) -> None:
        """Losses, gradients, and weights and buffers after three steps are equal within the exactness."""
        self._skip_unless_it_fits(model, variant)
        self.check_training(model, variant)

    def test_rewrite_equals_the_recording_of_apply(self, model: str, variant: Technique) -> None:
        """Ops, live bytes of every tier at every op, and bytes on every link are equal; on an accelerator the
        peak of allocated bytes too.
        """
        self._skip_unless_it_fits(model, variant)
        self.check_drift(model, variant)

    def test_failed_apply_leaves_no_trace(self, variant: Technique) -> None:
        """Check that a failure anywhere in `apply` leaves model and optimizer unchanged."""
        self.check_untouched(self._quick()[0], variant)

    def test_audit_finds_technique_not_in_effect(self) -> None:
        """Check that the audit passes after a step, and fails if a parameter is in no group or `apply` is
        undone.

        A model whose weights the technique keeps off the device starts there, deferred, with the plain
        model's.
        """
        path, technique = self._path(self._quick()[0]), self.default()
        is_deferred = technique.effects.parameters_on != DEVICE
        workload, model, optimizer = build(path, is_deferred=is_deferred)
        tuned = apply(model, optimizer, self._config(self._quick()[0], technique), strict=False)
        loss, _ = one_step(workload, model, optimizer, tuned, seed=SEED + 1)
        assert not is_deferred or torch.equal(loss, plain(path).losses[0])
        assert tuned.audit()
        self._must_notice(tuned, self.sabotage)
        self._must_notice(tuned, _forget_parameters)

    def sabotage(self, tuned: Tuned) -> bool:
        """Undo the technique without memtune's knowledge; return False if there is nothing to undo."""
        table = tuned._context.activations
        claimed = any(region.recompute or region.move for region in table.regions)
        table.remove()
        return claimed

    def _must_notice(self, tuned: Tuned, change: Any) -> None:
        import pytest

        if change(tuned) is not False:
            with pytest.raises(ApplyError):
                tuned.audit()

    # -- the suite itself ------------------------------------------------------------------------------------

    def test_suite_fails_under(self, mutation: Mutation) -> None:
        """Check that the check named by a seeded defect fails under it."""
        if mutation.needs and mutation.needs not in self.models:
            import pytest

            pytest.skip(f"no model {mutation.needs} in this suite")
        check = {
            "drift": self.check_drift,
            "training": self.check_training,
            "untouched": self.check_untouched,
        }[mutation.shown_by]
        model = mutation.needs or self._quick()[0]
        # Cache the plain model's results and recording before the defect is seeded.
        plain(self._path(model))
        plain_program(self._path(model))
        for variant in self.variants or (self.default(),):  # one may not use the mechanism of the defect
            if self._refusal(model, variant) is not None:
                continue
            with mutation.seed(self.technique), fresh_programs():
                try:
                    check(model, variant)
                except (AssertionError, MemtuneError):
                    return
        raise AssertionError(f"nothing failed although {mutation}")

    # -- the checks ------------------------------------------------------------------------------------------

    def check_training(self, model: str, variant: Technique) -> None:
        """Raise AssertionError if training with `variant` differs from the plain model's."""
        path = self._path(model)
        tolerance = self.tolerance if variant.exactly() is not Exactness.BITWISE else 0.0
        found = differences(train_under(path, self._config(model, variant)), plain(path), tolerance)
        assert not found, f"{len(found)} differences: {'; '.join(found[:5])}"

    def check_drift(self, model: str, variant: Technique) -> None:
        """Raise AssertionError if the recording of `apply` differs from `rewrite`; on an accelerator, its
        allocator's peak too.
        """
        found = drift(self._path(model), variant)
        assert not found, found
        if not platform_of(device_under_test()).is_host and not depends_on_data(self._path(model)):
            self.check_peak(model, variant)

    def check_peak(self, model: str, variant: Technique) -> None:
        """Raise AssertionError if the device under test needs another peak than predicted."""
        found = peak_drift(self._path(model), variant)
        assert not found, found

    def check_untouched(self, model: str, variant: Technique) -> None:
        """Raise AssertionError if a failure in `apply` changes model or optimizer."""
        path = self._path(model)
        config = self._config(model, variant)
        for _ in range(2):  # a first run, so that imports and lazy initialization are not counted
            calls = _Failing(None)
            workload, net, optimizer = build(path)
            one_step(workload, net, optimizer, None, seed=SEED)  # so that there is optimizer state to lose
            with calls:
                apply(net, optimizer, config, strict=False)
        workload, net, optimizer = build(path)
        one_step(workload, net, optimizer, None, seed=SEED)
        wanted = one_step(workload, net, optimizer, None, seed=SEED + 1)
        shared = _shared(calls.seen)
        n = len(shared)
        for at in dict.fromkeys(shared[i] for i in (0, n // 3, n // 2, n * 4 // 5, n - 1) if n):
            workload, net, optimizer = build(path)
            one_step(workload, net, optimizer, None, seed=SEED)
            before = _state(net, optimizer)
            try:
                with _Failing(at):
                    apply(net, optimizer, config, strict=False)
            except _InjectedError:
                pass
            assert _state(net, optimizer) == before, f"{at} failed and left a trace"
            assert current_tier() == DEVICE, f"{at} failed and left the tier {current_tier()}"
            got = one_step(workload, net, optimizer, None, seed=SEED + 1)
            assert torch.equal(got[0], wanted[0])
            assert all(torch.equal(got[1][name], wanted[1][name]) for name in wanted[1])

    def _plan(self, model: str, variant: Technique) -> Plan:
        return variant.plan(plain_program(self._path(model)), target_of(variant))

    def _config(self, model: str, variant: Technique) -> dict[str, Any]:
        return config_of(self._path(model), variant)

    def _refusal(self, model: str, variant: Technique) -> Reason | None:
        return variant.fits(plain_program(self._path(model)), target_of(variant))

    def _skip_unless_it_fits(self, model: str, variant: Technique) -> None:
        import pytest

        if (reason := self._refusal(model, variant)) is not None:
            pytest.skip(str(reason))

    def _path(self, model: str) -> Path:
        return self.models[model] if model in self.models else self.others[model]

    def _quick(self) -> tuple[str, ...]:
        return self.quick or tuple(self.models)[:1]


def _forget_parameters(tuned: Tuned) -> None:
    for group in tuned.optimizer.param_groups:
        group["params"].clear()
    tuned._context.placement.optimizer_params.clear()


class _InjectedError(Exception):
    """Error that the suite injects."""


class _Call(NamedTuple):
    """A call of a function of memtune's mechanisms."""

    function: str
    number: int
    """Of the calls of this function."""


def _shared(calls: list[_Call]) -> list[_Call]:
    """Return the calls that every rank makes, in the order of the first one."""
    # A rank that fails alone leaves the others in a collective.
    if not dist.is_initialized():
        return calls
    of_ranks: list[list[_Call]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, calls)
    everywhere = set(calls).intersection(*of_ranks)
    return [call for call in of_ranks[0] if call in everywhere]


class _Failing:
    """Context in which the call `at` fails; None: note the calls."""

    def __init__(self, at: _Call | None) -> None:
        self.seen: list[_Call] = []
        self._at, self._numbers = at, Counter[str]()
        self._around: FrameType | None = None

    def __enter__(self) -> _Failing:
        gc.disable()  # else finalizers of earlier models may run inside, and are counted
        self._before, self._around = sys.gettrace(), sys._getframe(1)
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(self._before)
        self._around = None
        gc.enable()  # not before: the collection that follows would be traced

    def _call(self, frame: FrameType, event: str, arg: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_OURS) or name.endswith((*_WAY_BACK, *_PLAIN)):
            return
        if frame.f_code.co_name in _FINALIZERS or _is_finalizing(frame, self._around):
            return
        function = f"{name}.{frame.f_code.co_qualname}"
        self._numbers[function] += 1
        self.seen.append(_Call(function, self._numbers[function]))
        if self.seen[-1] == self._at:
            raise _InjectedError


def _is_finalizing(frame: FrameType, around: FrameType | None) -> bool:
    """Return whether `frame` is called by `weakref.finalize`, directly or not, inside of `around`."""
    # Of an earlier model's storages, say, which a recorder watches: when they are freed depends on what ran
    # before.
    back = frame.f_back
    while back is not None and back is not around:
        if back.f_code is _FINALIZE:
            return True
        back = back.f_back
    return False


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return identities of the state that a failed `apply` must not change."""
    # These are modules and their attributes, parameters, and the optimizer's groups, state and hooks.
    return {
        "modules": {name: (type(module), _all_ids(vars(module))) for name, module in model.named_modules()},
        "parameters": [
            (name, id(parameter), parameter._version) for name, parameter in model.named_parameters()
        ],
        "groups": [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups],
        "state": {id(parameter): _all_ids(state) for parameter, state in optimizer.state.items()},
        "optimizer": {key: _ids(value) for key, value in vars(optimizer).items() if "hooks" in key},
    }


def _all_ids(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _ids(value) for key, value in values.items()}


def _ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): id(each) for key, each in value.items()}
    return id(value) if isinstance(value, Tensor) else type(value)


def _named(technique: Technique) -> str:
    fields = type(technique).model_fields
    knobs = ",".join(f"{name}={value}" for name, value in technique.knobs() if value != fields[name].default)
    return f"{technique.kind}({knobs})" if knobs else technique.kind


def _one_thread(self: Any) -> Iterator[None]:
    """Run torch on one thread: the models are small, so more threads only add waiting."""
    with cpu_threads(1):
        yield


def _copied(function: Any) -> Any:
    """Return a copy of `function`, so that pytest marks on it belong to one suite."""
    twin = type(function)(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return functools.update_wrapper(twin, function, updated=())
