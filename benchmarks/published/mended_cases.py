"""Where cases of the folder state a measurement otherwise than its source does: the change, and the source.

A change is a rule on the beginning of a case's name. It is made because a source says so, never because a
prediction is off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mended:
    """Changes of the cases whose names start with `start`."""

    start: str
    source: str
    sizes: dict[str, Any] = field(default_factory=dict)
    execution: dict[str, Any] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)
    gpu_type: str = ""
    cuda: str = ""

    def settings(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the settings `given` with the changes."""
        execution = {**given.get("execution", {}), **self.execution}
        sharding = given.get("sharding", {})
        states = {**sharding.get("states", {}), **self.states}
        more = {"sharding": {**sharding, "states": states}} if states else {}
        return {**given, "execution": execution, **more}


_BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
_HELD = (
    "Stone-ResearchLife/xMem perf_estimator/trainer/train_loop.py: `outputs` keeps logits, keys and values"
    " until the next forward has returned; transformers before 4.46 copies the shifted logits (the source"
    " has 4.4x); the card is an RTX 3060"
)
MENDED = (
    Mended("xmem-", _HELD, {"HOLDS": 1, "SHIFTS": 1}, gpu_type="rtx-3060"),
    Mended("xmem-t5", _HELD, {"SHIFTS": 0}),
    Mended(
        "hf-bert-large-v100",
        "huggingface/transformers docs/source/en/perf_train_gpu_one.mdx @0016acf: V100 of 16 GB, CUDA 11.2,"
        " before torch 2.0, whose zero_grad kept gradients by default",
        {"KEEPS_GRADS": 1},
        gpu_type="v100-16g",
        cuda="11.2",
    ),
    Mended(
        "titan-",
        "pytorch/torchtitan: FSDP2 with param_dtype bfloat16 and reduce_dtype float32, not autocast",
        {"PARAM_DTYPE": 1},
        states=_BF16,
    ),
    Mended(
        "titan-8b-8h100",
        "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md: H100, 96 GB of HBM2e at 2.4 TB/s",
        gpu_type="h100-96g",
    ),
    Mended(
        "tune-3b-packed-chunked",
        "pytorch/torchtune README.md @bd2a0fc, 'Optimization flags': chunked cross-entropy follows 'compile';"
        " torchtune/training/_compile.py compiles layer by layer",
        execution={"compile": "blocks"},
    ),
    Mended(
        "mpt-",
        "mosaicml/llm-foundry scripts/train/benchmarking/README.md: FSDP's mixed precision DEFAULT, which"
        " gathers and computes in bfloat16 and reduces in float32",
        {"PARAM_DTYPE": 1},
        states=_BF16,
    ),
    Mended(
        "nanogpt-124m-compile",
        "karpathy/nanoGPT: the README's figures are of 2022-12-29, fused attention came with ae06d0b1 of"
        " 2023-01-30",
        {"ATTN": "manual", "TF32": 1},
    ),
)
