"""AMSP: Chen et al. 2023, arXiv:2311.00257. 1.56 times the throughput of MiCS and ZeRO++ on 1024 GPUs."""

from __future__ import annotations

from dataclasses import replace

from published.paper import Claim, Paper, Shape

from memtune.hardware.spec import find

_A100 = find("a100-80g")
_LLAMA_7B = Shape(32, 4096, 32, 2048, 32000, "LLaMA, arXiv:2302.13971, table 2; its MLP has as many weights")
_AMSP = {"states": {"kind": "amsp", "parameters": 1, "gradients": 1, "optimizer": 8, "bucket_cap_mb": 200}}
_SOURCE = (
    "abstract of version 2: 1.56 over MiCS and ZeRO++ on 1024 GPUs; model, 4M tokens a step and factors (fm);"
    " of the bucket sizes that a search tries, the faster one"
)

PAPER = Paper(
    name="AMSP",
    hardware=replace(_A100, inter_link_bytes_per_s=4 * 100e9 / 8 / 8, gpus_per_node=8),
    sources={
        "inter_link_bytes_per_s": (
            "the authors' platform, 128 nodes of 4 × 100 Gb/s RoCE: InternLM/InternLM issue 22 on GitHub"
        ),
        "gpus_per_node": "8 GPUs with NVLink a node, the same issue; A100 80 GB (fm)",
    },
    claims=(
        Claim(
            name="LLaMA-7B on 1024 A100: (1, 1, 8) over MiCS in groups of a node",
            shape=_LLAMA_7B,
            nodes=128,
            micro_batch=2,
            accumulate=1,
            fast=_AMSP,
            slow={"states": {"kind": "fsdp", "degree": 8}},
            published=(1.56, 1.56),
            source=_SOURCE + "; with one micro-batch a step MiCS is fsdp in groups",
            recompute=False,
        ),
        Claim(
            name="LLaMA-7B on 1024 A100: (1, 1, 8) over ZeRO++",
            shape=_LLAMA_7B,
            nodes=128,
            micro_batch=2,
            accumulate=1,
            fast=_AMSP,
            slow={
                "states": {"kind": "fsdp"},
                "communication": {"kind": "zeropp", "hpz": True, "qwz": True, "qgz": True},
            },
            published=(1.56, 1.56),
            source=_SOURCE,
            recompute=False,
        ),
    ),
    other_networks_gbit_per_s=(200, 800),
)
