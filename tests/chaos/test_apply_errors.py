"""An error at a random call of `apply` (a function of memtune, an op, a hook's registration, a file that is
opened to write): model, optimizer and files are as before, and train as the plain ones.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from fixed_cpu import CPU
from support import interrupted_loops
from support.interrupted_loops import ALL, AT_END, Net, assert_equal, loss, weights
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import memtune
from memtune import search_spaces
from memtune.api import apply
from memtune.autotune.record import record
from memtune.autotune.record_parallel import fake_ranks
from memtune.autotune.space import Candidate, Choice, Rewriter
from memtune.errors import MemtuneError
from memtune.memory import arena
from memtune.ssd import offload_dir
from memtune.technique import Target
from memtune.testing.training import device_under_test, on_device
from memtune.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
SCALE = int(os.environ.get("MEMTUNE_CHAOS", "1"))
STATES = {name: {"offload": {"states": settings}} for name, (settings, _) in (ALL | AT_END).items()}
OTHERS: dict[str, dict[str, Any]] = {
    "planned_layout": {"allocator": {"kind": "planned_layout"}},
    "roam": {"execution": {"order": {"kind": "roam"}}},
    "full, copy_out, l2l": {
        "recompute": {"kind": "full"},
        "offload": {"activations": {"kind": "copy_out", "min_bytes": 0}, "states": {"kind": "l2l"}},
    },
}
ON_RANKS: dict[str, dict[str, Any]] = {
    f"{kind} on ranks": {"sharding": {"states": {"kind": kind}}} for kind in ("zero1", "zero2", "zero3")
} | {
    "zero3, zero_offload on ranks": {
        "sharding": {"states": {"kind": "zero3"}},
        "offload": {"states": {"kind": "zero_offload"}},
    },
}
"""On rank 0 of two of torch's fake process group, whose collectives move nothing."""
PLANNED: dict[str, tuple[float, dict[str, Any]]] = {
    **{
        kind: (share, {"recompute": {"kind": kind}})
        for kind, share in (
            *(("balanced", 1), ("planned", 0.9), ("checkmate", 0.9)),
            *(("dtr", 0.9), ("megtaichi", 0.9), ("coop", 0.9)),
        )
    },
    "every_second": (1, {"recompute": {"kind": "selective", "matmuls": "every_second"}}),
    **{kind: (1, {"offload": {"states": {"kind": kind}}}) for kind in ("mobius", "harmony")},
}
"""Budget as a share of the plain peak, and settings whose plan is solved for it."""
_REGISTER = {
    nn.Module: (
        "forward_pre_hook forward_hook full_backward_hook full_backward_pre_hook state_dict_pre_hook"
        " state_dict_post_hook load_state_dict_pre_hook load_state_dict_post_hook"
    ),
    Tensor: "hook post_accumulate_grad_hook",
    torch.optim.Optimizer: (
        "step_pre_hook step_post_hook state_dict_pre_hook state_dict_post_hook load_state_dict_pre_hook"
        " load_state_dict_post_hook"
    ),
}


class Injected(Exception):
    """The error."""


class Calls:
    """Counts calls while it is active; raises at the n-th."""

    def __init__(self, fails_at: int = -1) -> None:
        self.count, self._fails_at = 0, fails_at

    def one(self, error: Callable[[], Exception] = Injected) -> None:
        """Count one call, or raise."""
        self.count += 1
        if self.count == self._fails_at:
            raise error()


_ACTIVE: list[Calls] = []


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _ACTIVE:
        return
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if writes or event in ("os.mkdir", "os.rename"):
        _ACTIVE[-1].one(lambda: OSError(28, "No space left on device"))


sys.addaudithook(_audit)


class _Ops(TorchDispatchMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._calls.one()
        return func(*args, **(kwargs or {}))


_ROOTS = tuple(str(Path(each).resolve()) + os.sep for each in (*memtune.__path__, *search_spaces.__path__))
_ENDS = ("__exit__", "__del__")
"""An error in these, or in what they call, would be one in the handling of another."""


@contextlib.contextmanager
def counted(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count the calls inside."""

    def counting(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.one()
            return own(*args, **kwargs)

        return call

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(_ROOTS):
            return
        codes = [each.f_code for each in (frame, frame.f_back) if each is not None]
        # A generator's resumption may be the exit of a context as well.
        if not any(each.co_name in _ENDS or each.co_flags & inspect.CO_GENERATOR for each in codes):
            calls.one()

    with monkeypatch.context() as patch:
        for owner, names in _REGISTER.items():
            for name in (f"register_{each}" for each in names.split()):
                patch.setattr(owner, name, counting(getattr(owner, name)))
        _ACTIVE.append(calls)
        try:
            with _Ops(calls):
                sys.setprofile(profile)
                yield
        finally:
            sys.setprofile(None)
            _ACTIVE.pop()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, Any]:
    """Return all that `apply` may change: classes, attributes, hooks, memory, groups, files."""

    def sizes(values: dict[str, Any]) -> dict[str, Any]:
        return {name: len(each) if isinstance(each, dict) else id(each) for name, each in values.items()}

    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"module {name}"] = type(module), sizes(vars(module))
    for name, each in model.named_parameters():
        hooks = [len(found or ()) for found in (each._backward_hooks, each._post_accumulate_grad_hooks)]
        # The storage itself, not its address: it may have been freed and allocated again.
        memory = (
            each.untyped_storage()._cdata,
            each.untyped_storage().nbytes(),
            each.detach().clone().tolist(),
        )
        # FSDP2 numbers a parameter once and for all, so that shared ones are found.
        own = {key: value for key, value in vars(each).items() if key != "_fsdp_orig_uid"}
        found[f"parameter {name}"] = id(each), type(each), memory, hooks, each.grad is None, sizes(own)
    found["groups"] = [[id(each) for each in group["params"]] for group in optimizer.param_groups]
    found["optimizer"] = sizes(vars(optimizer))
    found["state"] = {id(each): sizes(state) for each, state in optimizer.state.items()}
    _wait_for_updaters(folder)
    found["files"] = sorted(str(each) for each in folder.rglob("*"))
    return found


def _wait_for_updaters(folder: Path) -> None:
    """Wait until updaters that nothing refers to have ended, and removed their files."""
    if not any(folder.iterdir()):
        return
    gc.collect()  # the model before is in cycles
    until, mine = time.monotonic() + 20, f"memtune-run-{os.getpid()}-"
    while any(not each.name.startswith(mine) for each in folder.iterdir()) and time.monotonic() < until:
        time.sleep(0.01)


def trained_once() -> tuple[Net, torch.optim.Optimizer]:
    model, optimizer = interrupted_loops.build()
    interrupted_loops.step(model, optimizer, 0)
    optimizer.zero_grad()
    return model, optimizer


@cache
def planned(name: str, folder: Path) -> dict[str, Any]:
    """Return the config of `PLANNED` with its plans."""
    text = "from support.interrupted_loops import *\ndef model(): return build()[0]\n"
    text += "def batch(size): return torch.randn(size, 8)\n"
    text += "def optimizer(params): return torch.optim.AdamW(params, lr=1e-2, fused=True)\n"
    path = folder / "model.py"
    path.write_text(text)
    with on_device(torch.device("cpu")):
        recording = record(Workload.load(path))
    path.unlink()
    share, settings = PLANNED[name]
    target = Target(CPU, 1, int(share * recording.at(64).peak_bytes()))
    document = {"execution": {"micro_batch": 64}, **settings}
    found = Rewriter(recording, target).candidate(Choice.from_document(document))
    assert isinstance(found, Candidate), found
    plans = {slot: plan.document() for slot, plan in found.plans.items() if not plan.is_empty}
    assert plans
    return {"settings": document, "plan": plans}


@pytest.mark.any_device
@pytest.mark.parametrize("name", [*STATES, *OTHERS, *PLANNED, *ON_RANKS])
def test_error_at_any_call_of_apply_leaves_all_as_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device_under_test().type != "cpu" and (name in ON_RANKS or name == "planned_layout"):
        pytest.skip(
            "torch's fake group has no other device; an allocator is installed before the device starts"
        )
    try:
        with fake_ranks(2 if name in ON_RANKS else 1):
            fails_and_restores(name, tmp_path, monkeypatch)
    finally:
        arena.uninstall()  # an allocator serves its process until then


def fails_and_restores(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    if name in PLANNED:
        config = planned(name, tmp_path)
    else:
        plan = (ALL | AT_END)[name][1] if name in STATES else {}
        settings = (STATES | OTHERS | ON_RANKS)[name]
        config = {"settings": settings, "plan": {"offload.states": plan} if plan else {}}
    wanted, optimizer = trained_once()
    interrupted_loops.step(wanted, optimizer, 1)
    model, optimizer = trained_once()
    calls = Calls()
    with counted(calls, monkeypatch):
        tuned = apply(model, optimizer, config, loss=loss, strict=False)
    tuned.finish()
    del tuned, model, optimizer
    every = range(1, calls.count + 1)
    drawn = random.Random(name).sample(every, min(len(every), 2 * SCALE))
    for fails_at in drawn:
        model, optimizer = trained_once()
        before = state_of(model, optimizer, tmp_path)
        try:
            with counted(Calls(fails_at), monkeypatch):
                tuned = apply(model, optimizer, config, loss=loss, strict=False)
            tuned.finish()
            del tuned
            continue  # `apply` has another way without this call
        except (Injected, MemtuneError, OSError):
            pass
        after = state_of(model, optimizer, tmp_path)
        changed = {key: (before[key], after.get(key)) for key in before if before[key] != after.get(key)}
        assert not changed, f"call {fails_at} of {calls.count}: {changed}"
        interrupted_loops.step(model, optimizer, 1)
        assert_equal(weights(model), weights(wanted))
    print(f"{name}: {len(drawn)} of {calls.count} calls")
