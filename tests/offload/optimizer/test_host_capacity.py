"""Too little host memory is reported before anything moves: by the machine, by control groups, for all ranks
of a host.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gloo import FRESH, run_ranks
from support.search import prepared_search
from torch import nn

import memtune
from memtune.autotune.search.preparation import parameter_bytes
from memtune.autotune.space.candidates import Candidate, Choice
from memtune.errors import EnvironmentFault
from memtune.offload.optimizer import host_capacity
from memtune.offload.optimizer.host_capacity import Limit, available_bytes, least_state_bytes, limits
from memtune.program.step import Tier
from memtune.search_spaces import find
from memtune.units import GIB, format_bytes

ALL_ON_HOST = ("optimizer_cpu", "zero_offload", "l2l", "stronghold", "harmony", "mobius")


def files(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {
    "proc/meminfo": "MemTotal:  99 kB\nMemAvailable:  8388608 kB\n",
    "proc/sys/kernel/random/boot_id": "boot\n",
}
V2 = "40 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1 = "40 31 0:38 {} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def group(root: str, limit: str, used: int, cache: int) -> dict[str, str]:
    stat = f"anon 5\ninactive_file {cache - 1}\nactive_file 1\nslab_reclaimable 0\n"
    return {f"{root}/memory.max": limit, f"{root}/memory.current": f"{used}\n", f"{root}/memory.stat": stat}


def test_limits_include_every_control_group_around_the_process(tmp_path: Path) -> None:
    """Control groups of version 2; page cache counts as available."""
    top = "sys/fs/cgroup"
    inner, outer = (
        group(f"{top}/job/step", "max\n", 1 * GIB, 100),
        group(f"{top}/job", f"{4 * GIB}\n", 3 * GIB, GIB),
    )
    root = files(
        tmp_path,
        {**MACHINE, **inner, **outer, "proc/self/cgroup": "0::/job/step\n", "proc/self/mountinfo": V2},
    )
    assert [each.n_bytes for each in limits(root)] == [2 * GIB, 8 * GIB]
    assert "/job allows 4.00 GiB" in limits(root)[0].text
    assert available_bytes(root) == 2 * GIB
    (root / f"{top}/job/step/memory.max").write_text(str(GIB + 50))
    assert available_bytes(root) == 150


@pytest.mark.parametrize("mounted", ["/", "/docker/abc"])
def test_limits_end_at_the_containers_own_group(tmp_path: Path, mounted: str) -> None:
    """Version 1: mounts start at the container's group, with the whole path in `/proc/self/cgroup`."""
    inside = "" if mounted == "/docker/abc" else "/docker/abc"
    at = f"sys/fs/cgroup/memory{inside}"
    texts = {
        f"{at}/memory.limit_in_bytes": f"{GIB}\n",
        f"{at}/memory.usage_in_bytes": f"{GIB // 2}\n",
        f"{at}/memory.stat": "total_inactive_file 7\ntotal_active_file 1\n",
        "proc/self/cgroup": "4:memory:/docker/abc\n1:cpu:/\n",
        "proc/self/mountinfo": V1.format(mounted),
    }
    assert available_bytes(files(tmp_path, {**MACHINE, **texts})) == GIB // 2 + 8


def test_limits_exclude_groups_that_the_process_is_not_in(tmp_path: Path) -> None:
    """A second mount, of another container's group."""
    own, other = group("sys/fs/cgroup/a", f"{4 * GIB}", GIB, 1), group("mnt/cg", f"{GIB}", GIB, 1)
    mounts = {
        "proc/self/mountinfo": V2 + "41 31 0:38 /b /mnt/cg rw - cgroup2 cgroup2 rw\n",
        "proc/self/cgroup": "0::/a\n",
    }
    assert available_bytes(files(tmp_path, {**MACHINE, **own, **other, **mounts})) == 3 * GIB + 1


@pytest.mark.parametrize(("path", "mounted"), [("/../../abc", "/"), ("/", "/..")])
def test_limits_include_the_top_group_of_a_cgroup_namespace(tmp_path: Path, path: str, mounted: str) -> None:
    mounts = {"proc/self/mountinfo": V2.replace(" / ", f" {mounted} ", 1), "proc/self/cgroup": f"0::{path}\n"}
    root = files(tmp_path, {**MACHINE, **group("sys/fs/cgroup", f"{4 * GIB}", GIB, 1), **mounts})
    (root / "sys/abc").mkdir()
    assert [each.n_bytes for each in limits(root)] == [3 * GIB + 1, 8 * GIB]


def test_limits_distinguish_two_machines(tmp_path: Path) -> None:
    """By their names where the kernel has no number of its start, and clones that have the same by their
    size.
    """
    name, number, memory = "proc/sys/kernel/hostname", "proc/sys/kernel/random/boot_id", "proc/meminfo"
    machines = [
        {name: "a\n", number: ""},
        {name: "b\n", number: ""},
        {},
        {memory: MACHINE[memory].replace("99", "98")},
    ]
    who = [limits(files(tmp_path / str(i), {**MACHINE, **each}))[0].owner for i, each in enumerate(machines)]
    assert len(set(who)) == 4


def test_unknown_limits_refuse_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes(tmp_path) is None
    monkeypatch.setattr(host_capacity, "limits", lambda: limits(tmp_path))
    tuned("zero_offload")


def in_a_group(folder: str, limit: int) -> None:
    Path(folder, "memory.limit_in_bytes").write_text(str(limit))
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    found = available_bytes()
    assert found is not None
    assert limit - 64 * 2**20 < found <= limit, found


@pytest.mark.slow
def test_limits_find_a_real_control_group() -> None:
    folder = Path(f"/sys/fs/cgroup/memory/memtune-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        child = FRESH.Process(target=in_a_group, args=(str(folder), 512 * 2**20))
        child.start()
        child.join()
        assert child.exitcode == 0
    finally:
        folder.rmdir()


def four_layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(50, 50)) for _ in range(4)))


def tuned(
    kind: str, *, strict: bool = True, stepped: bool = False, deferred_init: bool = False, **more: Any
) -> memtune.Tuned:
    model = memtune.deferred(four_layers) if deferred_init else four_layers()
    optimizer = torch.optim.AdamW(model.parameters())
    if stepped:
        model(torch.randn(2, 50)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = {"settings": {"offload": {"states": {"kind": kind}}}, **more}
        return memtune.apply(model, optimizer, config, loss=lambda m, x: m(x).sum(), strict=strict)


STATE_BYTES = (
    4 * (50 * 50 + 50) * 2 * 4
)  # two moments; the weights' copies take the place of nothing that is counted on CPU


def room(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    monkeypatch.setattr(host_capacity, "limits", lambda: [Limit(n_bytes, "machine", "")])


def test_apply_raises_before_anything_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, STATE_BYTES - 1)
    with pytest.raises(EnvironmentFault) as caught:
        tuned("zero_offload")
    assert caught.value.code == "MT366"
    needed, there = format_bytes(STATE_BYTES), format_bytes(STATE_BYTES - 1)
    assert f"at least {needed} are needed, {there} are available" in caught.value.what
    tuned("zero_offload", strict=False)
    room(monkeypatch, STATE_BYTES)
    tuned("zero_offload")


def test_message_in_a_trial_omits_the_strict_option(monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 1)
    for in_trial in (False, True):
        with pytest.raises(EnvironmentFault) as caught:
            tuned("zero_offload")
        assert ("strict=False" in caught.value.fix) is not in_trial
        monkeypatch.setenv("MEMTUNE_TRIAL_FILE", "trial.json")


def test_apply_accepts_the_host_bytes_that_the_search_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 10 * STATE_BYTES)
    more: dict[str, Any] = {"predicted": {"host_peak_bytes": 10 * STATE_BYTES + 1}, "made_for": {"model": ""}}
    with pytest.raises(EnvironmentFault, match="As predicted"):
        tuned("zero_offload", **more)


def test_state_in_host_memory_already_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU: state of an optimizer that has stepped, and weights of offloaded blocks, exist already."""
    room(monkeypatch, 10)
    tuned("zero_offload", stepped=True)
    weights = STATE_BYTES // 2
    more: dict[str, Any] = {
        "predicted": {"host_peak_bytes": 10 + weights + STATE_BYTES},
        "made_for": {"model": ""},
    }
    tuned("l2l", stepped=True, **more)
    with pytest.raises(
        EnvironmentFault, match=f"at least {format_bytes(10 + weights)} are needed"
    ):  # weights stay
        tuned("zero_offload", stepped=True, **more)
    more["predicted"]["host_peak_bytes"] += 1
    with pytest.raises(EnvironmentFault, match="at least 11 B are needed"):
        tuned("l2l", stepped=True, **more)
    with pytest.raises(
        EnvironmentFault, match=f"at least {format_bytes(11 + STATE_BYTES)} are needed"
    ):  # no step was made
        tuned("l2l", **more)


@pytest.mark.parametrize("kind", ALL_ON_HOST)
def test_reported_need_is_at_most_the_bytes_of_a_step(kind: str) -> None:
    """Moments and, on a GPU, weights of all trained parameters; compared with the pass."""
    made = prepared_search.rewriter("tied" if kind in ("harmony", "mobius") else "gpt")  # without dropout
    execution = {"micro_batch": 4, "accumulate": 2}
    found = made.candidate(
        Choice.from_document({"execution": execution, "offload": {"states": {"kind": kind}}})
    )
    assert isinstance(found, Candidate), found
    peak = found.program.step.peak_bytes(Tier.HOST)
    parameters = parameter_bytes(made.recording)
    assert find("offload.states", kind).model_validate({"kind": kind}).effects.host_share == 1.0
    assert 3 * parameters <= peak


def test_weights_of_a_deferred_model_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`apply` materializes them; blocks whose weights are offloaded take no more than their host copies."""
    weights = STATE_BYTES // 2
    for kind, needed in (("none", weights), ("zero_offload", weights + STATE_BYTES)):
        room(monkeypatch, needed - 1)
        with pytest.raises(EnvironmentFault, match=f"at least {format_bytes(needed)} are needed") as caught:
            tuned(kind, deferred_init=True)
        assert "The weights of a deferred model" in caught.value.evidence
        room(monkeypatch, needed)
        tuned(kind, deferred_init=True)
    more: dict[str, Any] = {
        "predicted": {"host_peak_bytes": STATE_BYTES + weights + 5},
        "made_for": {"model": ""},
    }
    room(monkeypatch, weights + STATE_BYTES + 4)
    with pytest.raises(EnvironmentFault, match="as predicted for this config"):
        tuned("l2l", deferred_init=True, **more)


def on_rank(limits: list[int]) -> list[str]:
    return [error_on_rank(each) for each in limits]


def error_on_rank(n_bytes: int) -> str:
    host_capacity.limits = lambda: [Limit(n_bytes, "machine", "")]  # type: ignore[assignment]
    model = nn.Linear(100, 100)
    settings = {"sharding": {"states": {"kind": "ddp"}}, "offload": {"states": {"kind": "optimizer_cpu"}}}
    try:
        memtune.apply(model, torch.optim.AdamW(model.parameters()), {"settings": settings})
    except EnvironmentFault as fault:
        return fault.what
    return ""


def test_ranks_on_one_host_share_its_limit() -> None:
    state = 10100 * 8
    for too_little, enough in run_ranks(on_rank, 2, [2 * state - 1, 2 * state]):
        assert (
            f"at least {format_bytes(2 * state)} are needed for 2 ranks of up to {format_bytes(state)}"
            in too_little
        )
        assert not enough


def test_narrow_moments_need_fewer_bytes() -> None:
    model = nn.Linear(10, 10)
    context = type(
        "Context", (), {"optimizer": torch.optim.AdamW(model.parameters()), "device": torch.device("cpu")}
    )
    sizes = [least_state_bytes(context, 1.0, moments) for moments in ("float32", "bfloat16", "int8")]  # type: ignore[arg-type]
    assert sizes == [880, 440, 220]
