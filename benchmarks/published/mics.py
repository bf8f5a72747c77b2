"""MiCS: Zhang et al. 2022, VLDB 16(1), arXiv:2205.00119. Up to 2.89 times the throughput of its baselines."""

from __future__ import annotations

from dataclasses import replace

from published.paper import Claim, Paper, Shape

from memtune.hardware.spec import find

_V100 = find("v100")

PAPER = Paper(
    name="MiCS",
    hardware=replace(
        _V100,
        bf16_flops_per_s=_V100.fp16_flops_per_s,
        inter_link_bytes_per_s=100e9 / 8 / 8,
        gpus_per_node=8,
    ),
    sources={
        "bf16_flops_per_s": "V100 data sheet: 125 TFLOP/s in fp16, used for the recorded 16-bit type",
        "inter_link_bytes_per_s": (
            "AWS p3dn.24xlarge, 100 Gb/s shared by 8 V100 (aws.amazon.com/ec2/instance-types/p3)"
        ),
        "gpus_per_node": "AWS p3dn.24xlarge: 8 V100 32 GB with NVLink",
    },
    claims=(
        Claim(
            name="BERT 10B on 128 V100: groups of a node over ZeRO-3",
            shape=Shape(127, 2560, 40, 512, 32008, "table of BERT configurations (fm)"),
            nodes=16,
            micro_batch=8,
            accumulate=8,
            fast={"states": {"kind": "mics", "group": 8}},
            slow={"states": {"kind": "fsdp"}},
            published=(2.89, 2.89),
            source=(
                "abstract: up to 2.89; that it is this setting: 100 Gb/s V100 cluster, global batch 8192 (fm)"
            ),
        ),
    ),
)
