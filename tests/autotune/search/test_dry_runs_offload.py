"""Dry runs of blocks that are loaded and freed under FSDP: reading the shards does not bring freed memory
back.
"""

from __future__ import annotations

from support.zoo_paths import ZOO

from memtune import hardware
from memtune.autotune.search.dry_runs import dry_run
from memtune.autotune.space.candidates import Candidate, Choice, Rewriter
from memtune.program.step import Step
from memtune.technique import Target
from memtune.testing.drift_check import recording_of
from memtune.workload.workload import Workload


def test_dry_run_of_block_offload_under_fsdp() -> None:
    target = Target(hardware.detect("cpu"), ranks=2)
    settings = {"sharding": {"states": {"kind": "fsdp"}}, "offload": {"states": {"kind": "l2l"}}}
    found = Rewriter(recording_of(ZOO["gpt"]), target).candidate(
        Choice.from_document({"execution": {"micro_batch": 2, "accumulate": 1}, **settings})
    )
    assert isinstance(found, Candidate), found
    step = dry_run(Workload.load(ZOO["gpt"]), found, target)
    assert isinstance(step, Step), step
