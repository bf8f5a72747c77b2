"""Compiled blocks and models train on the simulated accelerator as eager ones, alone and on ranks.

Graphs run op by op there (`aot_eager`): what surrounds them, copies and collectives, is memtune's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gloo import run_ranks
from support.simulated_ranks import differences_on_ranks
from support.zoo_paths import ZOO

from memtune.testing.training import differences, train_under

pytestmark = [pytest.mark.device, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing else": ("model", {}),
    "recompute": ("blocks", {"recompute": {"kind": "full"}}),
    "activations on the host": (
        "blocks",
        {"offload": {"activations": {"kind": "copy_out", "min_bytes": 0}}},
    ),
    "moments on the host": ("model", {"offload": {"states": {"kind": "optimizer_cpu"}}}),
}
ON_RANKS: dict[str, dict[str, Any]] = {
    states: {"sharding": {"states": {"kind": states}}, **more}
    for states, more in (
        ("ddp", {}),
        ("zero2", {"recompute": {"kind": "full"}}),
        ("zero3", {"offload": {"activations": {"kind": "copy_out", "min_bytes": 0}}}),
        ("fsdp", {"recompute": {"kind": "full"}}),
    )
}


def compiled(scope: str, settings: dict[str, Any]) -> dict[str, Any]:
    execution = {"micro_batch": 2, "accumulate": 2, "compile": scope, "compile_backend": "aot_eager"}
    return {"settings": {"execution": execution, **settings}, "plan": {}}


@pytest.mark.parametrize("case", ALONE)
def test_compiled_model_trains_as_the_plain_one(case: str) -> None:
    device = torch.device("sim", 1)
    torch._dynamo.reset()
    got = train_under(ZOO["gpt"], compiled(*ALONE[case]), device=device)
    assert differences(got, train_under(ZOO["gpt"], None, device=device)) == []


def test_compiled_blocks_train_on_ranks_as_on_the_cpu() -> None:
    configs = {name: compiled("blocks", settings) for name, settings in ON_RANKS.items()}
    found = run_ranks(differences_on_ranks, 2, str(ZOO["gpt"]), configs, 1e-5, device="sim", deadline_s=280)
    assert found == [{name: [] for name in configs}] * 2
