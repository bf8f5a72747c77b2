"""Every technique trains on the simulated accelerator as on the CPU, bit for bit and without races."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from support.gloo import run_ranks
from support.simulated_ranks import differences_on_ranks
from support.suites.catalogue import suite_files, suites_in
from support.suites.sharded_suite import ShardedSuite
from support.zoo_paths import ZOO

from memtune.search_spaces.offload.activations import copy_out
from memtune.search_spaces.recompute import selective
from memtune.ssd import offload_dir
from memtune.testing import TechniqueSuite
from memtune.testing.training import differences, train, train_under

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("file", suite_files())
def test_technique_trains_as_on_the_cpu(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the models and with the knobs of its suite."""
    monkeypatch.setenv(offload_dir.VARIABLE, str(tmp_path))
    for suite in suites_in(file):
        (on_ranks if isinstance(suite, ShardedSuite) else alone)(suite)


def alone(suite: TechniqueSuite) -> None:
    model = suite._quick()[0]
    for variant in suite.variants or (suite.default(),):
        config = suite._config(model, variant)
        there = train_under(suite._path(model), config, device=torch.device("sim", 0))
        assert differences(there, train_under(suite._path(model), config)) == []
        gc.collect()  # a model in cycles keeps its memory on the device


def on_ranks(suite: ShardedSuite) -> None:
    model = suite._quick()[0]
    cases = {str(variant): suite._config(model, variant) for variant in suite.variants or (suite.default(),)}
    path, ranks = str(suite._path(model)), suite.ranks
    found = run_ranks(differences_on_ranks, ranks, path, cases, device="sim", deadline_s=300)
    assert found == [{name: [] for name in cases}] * ranks


def test_two_techniques_train_as_on_the_cpu() -> None:
    both = (selective.Selective(), copy_out.CopyOut(ratio=0.5, min_bytes=0))
    assert (
        differences(train(ZOO["gpt"], *both, device=torch.device("sim", 0)), train(ZOO["gpt"], *both)) == []
    )
