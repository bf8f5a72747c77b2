"""Every technique trains on the simulated accelerator as on the CPU, bit for bit and without races."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from support.gloo import run_ranks
from support.simulated_ranks import differences_on_ranks
from support.suites.block_offload_suite import without_gradients
from support.suites.catalogue import suite_files, suites_in
from support.suites.sharded_suite import ShardedSuite
from support.zoo_paths import ZOO

from memtune.device import Capability, platform_of
from memtune.search_spaces.offload.activations import copy_out
from memtune.search_spaces.recompute import selective
from memtune.ssd import offload_dir
from memtune.technique import Exactness
from memtune.testing import TechniqueSuite
from memtune.testing.training import config_of, differences, train, train_under

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("one_thread")]
HERE = torch.device(torch._C._get_privateuse1_backend_name(), 1)
"""Not the current device, which is 0: all that memtune does must find the one of the model."""


@pytest.mark.drawn(3)
@pytest.mark.parametrize("file", suite_files())
def test_technique_trains_as_on_the_cpu(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the models and with the knobs of its suite."""
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    for suite in suites_in(file):
        (on_ranks if isinstance(suite, ShardedSuite) else alone)(suite)


def alone(suite: TechniqueSuite) -> None:
    """A technique that is bitwise trains as the plain model there; one that reorders sums as on the CPU."""
    path = suite._path(suite._quick()[0])
    for variant in suite.variants or (suite.default(),):
        if lacking := set(variant.needs) - platform_of(HERE).capabilities:
            pytest.skip(f"the device lacks {', '.join(each.value for each in lacking)}")
        if Capability.OWN_ALLOCATOR in variant.needs:
            pytest.skip("in processes of their own: test_other_allocators.py")
        there = train_under(path, config_of(path, variant, device="sim"), device=HERE)
        is_bitwise = variant.exactly() is Exactness.BITWISE
        wanted = train_under(path, None, device=HERE) if is_bitwise else train(path, variant)
        # Updates inside backward leave no gradients.
        assert differences(without_gradients(there), without_gradients(wanted)) == []
        gc.collect()  # a model in cycles keeps its memory on the device


def on_ranks(suite: ShardedSuite) -> None:
    model = suite._quick()[0]
    cases = {str(variant): suite._config(model, variant) for variant in suite.variants or (suite.default(),)}
    path, ranks = str(suite._path(model)), suite.ranks
    # Its attention takes other kernels on an accelerator than on the CPU.
    tolerance = 1e-5 if suite.technique.__module__.endswith("head_context") else 0.0
    found = run_ranks(differences_on_ranks, ranks, path, cases, tolerance, device="sim", deadline_s=300)
    assert found == [{name: [] for name in cases}] * ranks


def test_two_techniques_train_as_on_the_cpu() -> None:
    both = (selective.Selective(), copy_out.CopyOut(ratio=0.5, min_bytes=0))
    assert differences(train(ZOO["gpt"], *both, device=HERE), train(ZOO["gpt"], *both)) == []
