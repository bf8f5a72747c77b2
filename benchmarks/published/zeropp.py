"""ZeRO++: Wang et al. 2023, arXiv:2306.10209. Up to 2.16 times the throughput of ZeRO-3 on 384 GPUs."""

from __future__ import annotations

from dataclasses import replace

from published.paper import Claim, Paper, Shape

from memtune.hardware.spec import find

_V100 = find("v100")

PAPER = Paper(
    name="ZeRO++",
    hardware=replace(
        _V100,
        bf16_flops_per_s=_V100.fp16_flops_per_s,
        inter_link_bytes_per_s=100e9 / 8 / 16,
        gpus_per_node=16,
    ),
    sources={
        "bf16_flops_per_s": "V100 data sheet: 125 TFLOP/s in fp16, used for the recorded 16-bit type",
        "inter_link_bytes_per_s": (
            "one card of 100 Gb/s a node, shared by 16 GPUs: the paper's low-bandwidth setting (fm)"
        ),
        "gpus_per_node": (
            "DGX-2, 16 V100-SXM3 32 GB a node (deepspeed.ai/tutorials/zeropp says the same machine)"
        ),
    },
    claims=(
        Claim(
            name="GPT 18B on 384 V100, 1K tokens a GPU: hpZ, qwZ and qgZ over ZeRO-3",
            shape=Shape(
                40, 6144, 32, 512, 50304, "deepspeed.ai/tutorials/zeropp: its 18B model and these shapes"
            ),
            nodes=24,
            micro_batch=2,
            accumulate=1,
            fast={
                "states": {"kind": "fsdp"},
                "communication": {"kind": "zeropp", "hpz": True, "qwz": True, "qgz": True},
            },
            slow={"states": {"kind": "fsdp"}},
            published=(2.16, 2.16),
            source="abstract: up to 2.16 at 384 GPUs; that it is this setting (fm)",
        ),
    ),
)
