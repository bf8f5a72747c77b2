"""PaRO: Wu et al. 2023, arXiv:2310.06003. 1.19 to 2.50 times the throughput of its baselines."""

from __future__ import annotations

from dataclasses import replace

from published.paper import Claim, Paper, Shape

from memtune.hardware.spec import find

_A100 = find("a100-80g")
_RANGE, _SOURCE = (
    (1.19, 2.50),
    "abstract: 1.19 to 2.50 over all its settings; which setting has which ratio is not known here",
)

PAPER = Paper(
    name="PaRO",
    hardware=replace(_A100, inter_link_bytes_per_s=100e9 / 8 / 8, gpus_per_node=8),
    sources={
        "inter_link_bytes_per_s": "nodes on a network of 100 Gb/s (fm, uncertain: see the other networks)",
        "gpus_per_node": "8 A100 80 GB with NVLink a node (fm)",
    },
    claims=(
        Claim(
            name="LLaMA-7B on 64 A100: NIG over ZeRO-3",
            shape=Shape(
                32, 4096, 32, 2048, 32000, "LLaMA, arXiv:2302.13971, table 2; its MLP has as many weights"
            ),
            nodes=8,
            micro_batch=2,
            accumulate=4,
            fast={"states": {"kind": "paro", "strategy": "NIG", "group": 8}},
            slow={"states": {"kind": "fsdp"}},
            published=_RANGE,
            source=_SOURCE,
        ),
        Claim(
            name="LLaMA-7B on 64 A100: IIG over ZeRO-3",
            shape=Shape(
                32, 4096, 32, 2048, 32000, "LLaMA, arXiv:2302.13971, table 2; its MLP has as many weights"
            ),
            nodes=8,
            micro_batch=2,
            accumulate=4,
            fast={"states": {"kind": "paro", "strategy": "IIG", "group": 8}},
            slow={"states": {"kind": "fsdp"}},
            published=_RANGE,
            source=_SOURCE,
        ),
        Claim(
            name="LLaMA-65B on 64 A100: IIG over ZeRO-3",
            shape=Shape(
                80, 8192, 64, 2048, 32000, "LLaMA, arXiv:2302.13971, table 2; its MLP has as many weights"
            ),
            nodes=8,
            micro_batch=2,
            accumulate=4,
            fast={"states": {"kind": "paro", "strategy": "IIG", "group": 8}},
            slow={"states": {"kind": "fsdp"}},
            published=_RANGE,
            source=_SOURCE,
        ),
    ),
    other_networks_gbit_per_s=(200, 400, 800),
)
