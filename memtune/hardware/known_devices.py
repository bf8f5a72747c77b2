"""Constants of known GPUs and of the nodes that usually hold them: field of `Hardware` → (value, source).

Rates are dense (no sparsity), with 32-bit accumulation, per direction. Memory is the total that torch reports
for the card, which is less than its nominal size. The file is long because it is a table, a source per value.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from memtune import device
from memtune.errors import UsageError
from memtune.hardware import mechanism_costs, outside_allocator
from memtune.units import GIB

if TYPE_CHECKING:  # importing it loads torch, and a typo in a name should cost nothing
    from memtune.hardware.cpu_probe import CpuRates

Constants = Mapping[str, tuple[Any, str]]


class _NodeModel(NamedTuple):
    """Typical node of a GPU."""

    source: str
    pcie: float  # GB/s that pinned copies reach
    link: float  # GB/s per GPU and direction inside the node
    network: float  # GB/s per GPU and direction between nodes
    host: int  # GiB
    host_adam: float  # GB/s
    cores: int
    gpus: int


_HGX5 = _NodeModel(
    "8-GPU HGX node: NVLink 450 GB/s each way, PCIe 5, 400 Gb/s a GPU (DGX H100 user guide,"
    " docs.nvidia.com/dgx)",
    55,
    450,
    50,
    2048,
    300,
    112,
    8,
)
_HGX4 = _NodeModel(
    "8-GPU HGX A100 node: NVLink 300 GB/s each way, PCIe 4, 200 Gb/s a GPU (DGX A100 user guide,"
    " docs.nvidia.com/dgx)",
    25,
    300,
    25,
    1024,
    200,
    128,
    8,
)
_PCIE5 = _NodeModel(
    "typical 8-GPU server, PCIe 5 without NVLink, 100 Gb/s per node", 50, 40, 1.5, 1024, 250, 96, 8
)
_PCIE4 = _NodeModel(
    "typical 8-GPU server, PCIe 4 without NVLink, 100 Gb/s per node", 25, 20, 1.5, 512, 150, 64, 8
)
_DESK4 = _NodeModel("typical workstation, PCIe 4, 10 Gb/s", 25, 12, 1.2, 128, 50, 16, 2)
_DESK5 = _NodeModel("typical workstation, PCIe 5, 10 Gb/s", 50, 25, 1.2, 128, 60, 16, 2)
_GRACE = _NodeModel(
    "Grace superchip: NVLink-C2C to the host, 450 GB/s each way for one GPU and half of it for each of"
    " two; NVLink"
    " 900 GB/s each way in a GB200 NVL72 rack, 400 Gb/s a GPU (NVIDIA GB200 NVL72 data sheet)",
    200,
    900,
    50,
    960,
    400,
    144,
    72,
)
_DGX1 = _NodeModel(
    "DGX-1 V100 node: NVLink 150 GB/s each way, PCIe 3, 4 × 100 Gb/s (DGX-1 system architecture white paper)",
    12,
    150,
    6,
    512,
    100,
    40,
    8,
)


_FRONTIER = _NodeModel(
    "Frontier node: 8 MI250X dies, 36 GB/s each way from the host to a die, 50 GB/s over the slowest link of"
    " a ring of dies, 4 × 200 Gb/s (OLCF, Frontier and Crusher user guides; copies: 80 % of the link)",
    28,
    50,
    12.5,
    512,
    150,
    64,
    8,
)
_AURORA = _NodeModel(
    "Aurora node: 12 Max 1550 stacks; PCIe 55 GB/s for the two of a card, Xe Link 15 GB/s measured to another"
    " card, 8 × 200 Gb/s (docs.alcf.anl.gov/aurora, machine and node performance overviews)",
    27,
    15,
    16.7,
    1024,
    300,
    104,
    12,
)


class _GpuModel(NamedTuple):
    title: str
    architecture: str
    memory: float  # GiB as torch reports it
    bf16: float  # TFLOP/s, as the next two
    tf32: float
    fp32: float
    bandwidth: float  # TB/s
    node: _NodeModel
    sheet: str
    fp16: float = 0.0  # TFLOP/s where it differs from bf16
    matmul: float = 0.0  # share of these rates that products of large matrices reach; 0: as the architecture
    matmul_fp32: float = 0.0  # likewise of fp32


_MAMF = (
    "largest measured bf16 rate of torch.matmul over the data sheet's: stas00/ml-engineering,"
    ' compute/accelerator/README.md @744d01e, "Maximum Achievable Matmul FLOPS comparison table"'
    " (A100 SXM 0.869, A100 PCIe 0.811, H100 SXM 0.803, GH200 0.838, B200 0.776, GB200 0.729, MI300X 0.514,"
    " MI325X 0.604, MI355X 0.68); cards missing there: median of the runs of torch.matmul in"
    " zzc0721/torch-performance-test-data database.md @9d82827 (RTX 3090 76.6 TFLOP/s, RTX 4090 164.8,"
    " RTX 4070 Ti SUPER 91, RTX 5090 238, L40S 269, L4 70.9, RTX A6000 123, H100 PCIe 496, H20 141.8,"
    " RTX PRO 6000 413.7; float16: V100 94.8, T4 42; RTX 3060 as RTX 3090): GeForce"
    " cards run at higher clocks than their data sheets state; 0.8 where neither has the card"
)
_ML = "https://github.com/stas00/ml-engineering/blob/744d01e/compute/accelerator/README.md"
_MATMUL = {"sm80": 0.869, "sm90": 0.803, "sm100": 0.776, "sm103": 0.786, "gfx942": 0.514, "gfx950": 0.68}
_MATMUL_FP32 = {
    "sm70": 0.896,
    "sm75": 0.537,
    "sm80": 0.98,
    "sm86": 0.69,
    "sm89": 0.66,
    "sm90": 0.77,
    "sm100": 0.83,
    "sm120": 0.645,
}
_FP32 = (
    "median of torch.matmul in float32 over the data sheet's rate: zzc0721/torch-performance-test-data"
    " database.md @9d82827 (TFLOP/s: V100 14.06, T4 4.35, A100 19.1, RTX 3090 24.8, RTX 4090 54.7, H100 SXM"
    " 51.9, H100 PCIe 36.95, H20 31.95, L40S 46.9, L4 15.4, RTX A6000 23.9, RTX 5090 67.6, RTX PRO 6000 77.1,"
    " B200 66.2); as tensor cores on other architectures"
)

_NV = "https://www.nvidia.com/en-us/data-center"
_H100 = (
    "NVIDIA H100 data sheet (half its sparse figures), checked against"
    " https://glennklockwood.com/garden/processors/h100"
)
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf,"
    " checked against https://glennklockwood.com/garden/processors/A100"
)
_VOLTA = (
    "NVIDIA V100 data sheet, https://developer.nvidia.com/programming-tensor-cores-cuda-9-0; bf16 is computed"
    " in fp32"
)
_GA102 = (
    "NVIDIA Ampere GA102 white paper v2.0, appendix A (tensor rates with 32-bit accumulation),"
    " docslib.org/doc/759549"
)

_CAPPED = (
    "products, which such a limit of power slows down, are not measured: rate per multiprocessor at the limit"
    " per multiprocessor, between H100 PCIe (350 W, 114) and H100 SXM (700 W, 132) in log-log"
)
_GPU_MODELS = {
    "h200": _GpuModel(
        "NVIDIA H200 SXM",
        "sm90",
        139.8,
        989,
        494.7,
        66.9,
        4.8,
        _HGX5,
        f"{_NV}/h200, half its sparse figures; checked against"
        " https://itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html",
    ),
    "h100-80g": _GpuModel("NVIDIA H100 SXM 80 GB", "sm90", 79.1, 989.4, 494.7, 66.9, 3.35, _HGX5, _H100),
    "h100-pcie": _GpuModel(
        "NVIDIA H100 PCIe 80 GB",
        "sm90",
        79.1,
        756,
        378,
        51,
        2.0,
        _PCIE5,
        "NVIDIA H100 data sheet (half its sparse figures),"
        " https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html",
        matmul=0.656,
        matmul_fp32=0.725,
    ),
    "b200": _GpuModel(
        "NVIDIA B200",
        "sm100",
        178.3,
        2250,
        1100,
        80,
        7.7,
        _HGX5._replace(link=900),
        "HGX variant at 1000 W, https://glennklockwood.com/garden/processors/B200; bandwidth: HGX B200, 62"
        " TB/s for eight",
    ),
    "a100-80g": _GpuModel("NVIDIA A100 SXM 80 GB", "sm80", 79.2, 312, 156, 19.5, 2.039, _HGX4, _A100),
    "a100-40g": _GpuModel("NVIDIA A100 SXM 40 GB", "sm80", 39.4, 312, 156, 19.5, 1.555, _HGX4, _A100),
    "l40s": _GpuModel(
        "NVIDIA L40S",
        "sm89",
        44.4,
        362.05,
        183,
        91.6,
        0.864,
        _PCIE4,
        "NVIDIA L40S data sheet (it lists dense | sparse), checked against"
        " https://www.mullet.se/product.html?product_id=355414",
        matmul=0.743,
        matmul_fp32=0.512,
    ),
    "l4": _GpuModel(
        "NVIDIA L4",
        "sm89",
        22.0,
        121,
        60,
        30.3,
        0.3,
        _PCIE4,
        "NVIDIA L4 data sheet (half of 242 and 120 with sparsity), checked against"
        " https://grokipedia.com/page/NVIDIA_L4_vs_L40S",
        matmul=0.586,
        matmul_fp32=0.508,
    ),
    "a10": _GpuModel(
        "NVIDIA A10",
        "sm86",
        22.0,
        125,
        62.5,
        31.2,
        0.6,
        _PCIE4,
        "NVIDIA A10 data sheet; fp32 and bandwidth checked against https://sysrqmts.com (A10 PCIe: 31.24"
        " TFLOPS, 600.2 GB/s)",
    ),
    "rtx-4090": _GpuModel(
        "NVIDIA GeForce RTX 4090",
        "sm89",
        23.6,
        165.2,
        82.6,
        82.6,
        1.008,
        _DESK4,
        "NVIDIA Ada GPU architecture white paper, appendix A; checked against https://hmc-tech.com (165.2 and"
        " 82.58)",
        matmul=0.998,
    ),
    "rtx-5090": _GpuModel(
        "NVIDIA GeForce RTX 5090",
        "sm120",
        31.4,
        209.5,
        104.8,
        104.8,
        1.792,
        _DESK5,
        "NVIDIA RTX Blackwell white paper (838 sparse with 16-bit accumulation is 209.5 dense with 32-bit);"
        " checked against https://www.spheron.network/blog/nvidia-rtx-5090-specs/",
        matmul=1.136,
    ),
    "rtx-3090": _GpuModel(
        "NVIDIA GeForce RTX 3090",
        "sm86",
        23.7,
        71,
        35.6,
        35.6,
        0.936,
        _DESK4,
        _GA102,
        matmul=1.079,
    ),
    "v100": _GpuModel(
        "NVIDIA V100 SXM2 32 GB",
        "sm70",
        31.7,
        15.7,
        15.7,
        15.7,
        0.9,
        _DGX1,
        _VOLTA,
        fp16=125,
        matmul=0.759,
    ),
    "mi300x": _GpuModel(
        "AMD Instinct MI300X",
        "gfx942",
        191.9,
        1307.4,
        653.7,
        163.4,
        5.3,
        _HGX5._replace(link=448),
        "AMD Instinct MI300X data sheet, dense; links and memory:"
        " https://www.emergentmind.com/topics/amd-mi300x-gpu",
    ),
    "h100-nvl": _GpuModel(
        "NVIDIA H100 NVL",
        "sm90",
        93.1,
        835.5,
        417.5,
        60,
        3.9,
        _PCIE5._replace(link=300),
        f"{_NV}/h100: half its sparse figures; pairs share an NVLink bridge of 600 GB/s; 400 W: {_CAPPED}",
        matmul=0.682,
        matmul_fp32=0.71,
    ),
    "h100-96g": _GpuModel(
        "NVIDIA H100 SXM 96 GB HBM2e",
        "sm90",
        95.0,
        989.4,
        494.7,
        66.9,
        2.4,
        _HGX5,
        "96 GB of HBM2e, 2.4 TB/s, 500 W: https://github.com/pytorch/torchtitan, benchmarks; rates of the"
        f" H100 SXM data sheet; {_CAPPED}",
        matmul=0.658,
        matmul_fp32=0.684,
    ),
    "h20": _GpuModel(
        "NVIDIA H20",
        "sm90",
        95.1,
        148,
        74,
        44,
        4.0,
        _HGX5,
        "NVIDIA H20 product brief: 148 TFLOP/s of bf16, 74 of TF32, 44 of FP32 dense, 96 GB at 4.0 TB/s,"
        " NVLink 900 GB/s; checked against https://willitrunai.com/es/gpus/h20-96gb",
        matmul=0.958,
        matmul_fp32=0.726,
    ),
    "h800": _GpuModel(
        "NVIDIA H800 SXM 80 GB",
        "sm90",
        79.1,
        989.4,
        494.7,
        66.9,
        3.35,
        _HGX5._replace(link=200),
        "as H100 SXM with NVLink of 400 GB/s: https://arxiv.org/abs/2412.19437 (DeepSeek-V3), section 3.1",
    ),
    "gh200-96g": _GpuModel(
        "NVIDIA GH200 96 GB",
        "sm90",
        94.5,
        989.4,
        494.7,
        66.9,
        4.0,
        _GRACE._replace(gpus=1, link=50, host=480),
        f"{_NV}/grace-hopper-superchip, half its sparse figures: 96 GB of HBM3, 4 TB/s; checked against"
        f" {_ML}",
        matmul=0.838,
    ),
    "gh200-144g": _GpuModel(
        "NVIDIA GH200 144 GB",
        "sm90",
        139.8,
        989.4,
        494.7,
        66.9,
        4.9,
        _GRACE._replace(gpus=1, link=50, host=480),
        f"{_NV}/grace-hopper-superchip, half its sparse figures: 144 GB of HBM3e, 4.9 TB/s",
        matmul=0.838,
    ),
    "gb200": _GpuModel(
        "NVIDIA GB200",
        "sm100",
        184.0,
        2500,
        1250,
        80,
        8.0,
        _GRACE,
        f"{_NV}/gb200-nvl72, a 72nd, half its sparse figures; 186 GB: {_ML}",
        matmul=0.729,
    ),
    "b300": _GpuModel(
        "NVIDIA B300",
        "sm103",
        267.0,
        2250,
        1125,
        80,
        8.0,
        _HGX5._replace(link=900),
        f"{_NV}/hgx: HGX B300, an eighth, dense; checked against {_ML}",
    ),
    "rtx-pro-6000": _GpuModel(
        "NVIDIA RTX PRO 6000 Blackwell",
        "sm120",
        94.9,
        503.8,
        251.9,
        125,
        1.792,
        _DESK5,
        "NVIDIA RTX Blackwell PRO GPU architecture white paper (workstation edition; dense, 32-bit"
        " accumulation"
        " at the full rate)",
        matmul=0.821,
    ),
    "rtx-a6000": _GpuModel(
        "NVIDIA RTX A6000",
        "sm86",
        47.5,
        154.8,
        77.4,
        38.7,
        0.768,
        _DESK4,
        f"RTX A6000 data sheet; {_GA102}",
        matmul=0.797,
        matmul_fp32=0.618,
    ),
    "rtx-3060": _GpuModel(
        "NVIDIA GeForce RTX 3060 12 GB",
        "sm86",
        11.8,
        25.5,
        12.7,
        12.7,
        0.36,
        _DESK4,
        "NVIDIA's specification of the card: 3,584 cores at 1.78 GHz, 360 GB/s; tensor rates per core as"
        " in the"
        " GA102 white paper, appendix A",
        matmul=1.079,
    ),
    "rtx-4070-ti-super": _GpuModel(
        "NVIDIA GeForce RTX 4070 Ti SUPER",
        "sm89",
        15.7,
        88.2,
        44.1,
        44.1,
        0.672,
        _DESK4,
        "NVIDIA's specification of the card: 8,448 cores at 2.61 GHz, 672 GB/s; tensor rates per core as in"
        " the Ada white paper, appendix A",
        matmul=1.032,
    ),
    "t4": _GpuModel(
        "NVIDIA T4",
        "sm75",
        14.6,
        8.1,
        8.1,
        8.1,
        0.32,
        _PCIE4._replace(pcie=12),
        f"{_NV}/tesla-t4; bf16 is computed in fp32",
        fp16=65,
        matmul=0.646,
    ),
    "v100-16g": _GpuModel(
        "NVIDIA V100 SXM2 16 GB",
        "sm70",
        15.8,
        15.7,
        15.7,
        15.7,
        0.9,
        _DGX1,
        _VOLTA,
        fp16=125,
        matmul=0.759,
    ),
    "a100-pcie": _GpuModel(
        "NVIDIA A100 PCIe 80 GB",
        "sm80",
        79.2,
        312,
        156,
        19.5,
        1.935,
        _PCIE4,
        _A100,
        matmul=0.811,
    ),
    "mi250x": _GpuModel(
        "AMD Instinct MI250X, one of its two dies",
        "gfx90a",
        63.98,
        191.5,
        47.9,
        47.9,
        1.638,
        _FRONTIER,
        "https://www.amd.com/en/products/accelerators/instinct/mi200/mi250x.html, half of the module's 383"
        " TFLOP/s (bf16), 95.7 (fp32, matrix) and 3.2768 TB/s: each die is a device; without TF32, so such"
        " products run in FP32",
    ),
    "max1550": _GpuModel(
        "Intel Data Center GPU Max 1550, one of its two stacks",
        "xe-hpc",
        64.0,
        419.4,
        209.7,
        26.2,
        1.638,
        _AURORA,
        "Intel Data Center GPU Max Series technical overview (intel.com, 766085): 64 Xe cores a stack at 1.6"
        " GHz, 4,096 bf16, 2,048 TF32 and 256 fp32 operations a cycle and core; half of the card's 3.2768"
        " TB/s, https://glennklockwood.com/garden/processors/pvc: each stack is a device. Products: 273"
        " TFLOP/s of bf16 measured on one (docs.alcf.anl.gov/aurora/node-performance-overview)",
        matmul=0.65,
    ),
    "mi325x": _GpuModel(
        "AMD Instinct MI325X",
        "gfx942",
        255.7,
        1307.4,
        653.7,
        163.4,
        6.0,
        _HGX5._replace(link=448),
        f"https://www.amd.com/en/products/accelerators/instinct/mi300/mi325x.html, dense; checked against"
        f" {_ML}",
        matmul=0.604,
    ),
    "mi355x": _GpuModel(
        "AMD Instinct MI355X",
        "gfx950",
        287.5,
        2516.6,
        157.3,
        157.3,
        8.0,
        _HGX5._replace(link=538),
        "https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html, dense; without TF32, so"
        " such"
        " products run in FP32",
    ),
}

ALIASES = {
    "h100": "h100-80g",
    "h100-sxm": "h100-80g",
    "h100-80gb": "h100-80g",
    "a100": "a100-80g",
    "a100-80gb": "a100-80g",
    "a100-40gb": "a100-40g",
    "h200-141g": "h200",
    "4090": "rtx-4090",
    "rtx4090": "rtx-4090",
    "5090": "rtx-5090",
    "rtx5090": "rtx-5090",
    "3090": "rtx-3090",
    "rtx3090": "rtx-3090",
    "v100-32g": "v100",
    "max-1550": "max1550",
    "gh200": "gh200-96g",
    "h100-sxm-96g": "h100-96g",
    "a6000": "rtx-a6000",
    "3060": "rtx-3060",
    "rtx-pro-6000-blackwell": "rtx-pro-6000",
}


def _outside(name: str, found: outside_allocator.ByteRange) -> dict[str, Any]:
    bounds = (found.low_bytes, found.high_bytes)
    return {f"{name}_bytes": (found.n_bytes, found.source), f"{name}_range": (bounds, found.source)}


def _constants(card: _GpuModel) -> Constants:
    sheet = f"dense, 32-bit accumulation: {card.sheet}"
    matmul = card.matmul or _MATMUL.get(card.architecture, 0.8)
    usual = card.node.source
    python = "rule of thumb: 8 to 10 times a dispatch; 8 to 15 times on a CPU"
    node: dict[str, Any] = {
        "host_to_device_bytes_per_s": card.node.pcie * 1e9,
        "device_to_host_bytes_per_s": card.node.pcie * 1e9,
        "intra_link_bytes_per_s": card.node.link * 1e9,
        "inter_link_bytes_per_s": card.node.network * 1e9,
        "host_memory_bytes": card.node.host * GIB,
        "host_adam_bytes_per_s": card.node.host_adam * 1e9,
        "cores": card.node.cores,
        "gpus_per_node": card.node.gpus,
    }
    return {
        "title": (card.title, sheet),
        "architecture": (
            card.architecture,
            "CUDA compute capability, https://developer.nvidia.com/cuda-gpus; AMD: ROCm's target; Intel: its"
            " family",
        ),
        "memory_bytes": (int(card.memory * GIB), "total that torch commonly reports for this card"),
        **_outside("context", outside_allocator.context(card.architecture)),
        **_outside("cudnn", outside_allocator.cudnn(card.architecture)),
        "bf16_flops_per_s": (card.bf16 * 1e12, sheet),
        "fp16_flops_per_s": ((card.fp16 or card.bf16) * 1e12, sheet),
        "tf32_flops_per_s": (card.tf32 * 1e12, sheet),
        "fp32_flops_per_s": (card.fp32 * 1e12, sheet),
        "memory_bytes_per_s": (card.bandwidth * 1e12, sheet),
        "launch_s": (5e-6, "rule of thumb: eager PyTorch dispatch and launch"),
        "hook_s": (50e-6, python),
        **mechanism_costs.defaults(5e-6),
        "intra_link_latency_s": (3e-6, "rule of thumb: one step of an NCCL ring"),
        "all_gather_rounds": (1.0, "NCCL's ring"),
        "reduce_scatter_rounds": (1.0, "NCCL's ring"),
        "inter_link_latency_s": (10e-6, "rule of thumb: one step of an NCCL ring"),
        "ssd_read_bytes_per_s": (6e9, "rule of thumb: one PCIe 4 NVMe drive"),
        "ssd_write_bytes_per_s": (4e9, "rule of thumb: one PCIe 4 NVMe drive"),
        "allocation_rounding_bytes": (512, "PyTorch's caching allocator, kMinBlockSize"),
        "gpus_per_pcie_root": (
            2 if card.node is _HGX4 else 1,
            "HGX A100: 4 PCIe switches for 8 GPUs; elsewhere taken as 1",
        ),
        "links_through_host": (
            card.title.startswith("NVIDIA GeForce"),
            "drivers of GeForce cards let none read another's memory over PCIe; NVLink not counted",
        ),
        "link_slowdown": (
            0.189,
            "mean over GPT and LLaMA on A100, H100, MI210, MI250: arXiv 2507.03114, abstract",
        ),
        **_outside("communicator", outside_allocator.communicator(card.node.link)),
        "matmul_efficiency": (matmul, _MAMF),
        "fp32_matmul_efficiency": (
            card.matmul_fp32 or _MATMUL_FP32.get(card.architecture, matmul),
            _FP32,
        ),
        **{name: (value, usual) for name, value in node.items()},
    }


GPUS: Mapping[str, Constants] = {key: _constants(card) for key, card in _GPU_MODELS.items()}


def match(title: str, memory_bytes: int) -> str | None:
    """Return the key of the card that the driver calls `title`, None if it is not in the table.

    Variants of a card differ in memory.
    """
    # "Intel Data Center GPU Max 1550" is two words, and "max" alone occurs in names of laptops' cards.
    words = title.lower().replace("-", " ").replace("max 1", "max1").split()
    stems = {key: key.removeprefix("rtx-").split("-")[0] for key in _GPU_MODELS}
    hits = [key for key, stem in stems.items() if stem in words]
    hits = [key for key in hits if all(each in words for each in ("ti", "super") if f"-{each}" in key)]
    if "pcie" not in words:
        hits = [key for key in hits if not key.endswith("-pcie")] or hits
    elif any(key.endswith("-pcie") for key in hits):
        hits = [key for key in hits if key.endswith("-pcie")]
    return min(hits, key=lambda key: abs(_GPU_MODELS[key].memory * GIB - memory_bytes), default=None)


def cpu(rates: CpuRates) -> Constants:
    """Return the constants of this machine's CPU as a device."""
    measured = f"measured in {rates.measured_s:.2f} s on this machine, one core × {rates.cores} cores"
    system = "the operating system, this machine"
    copies = rates.memory_bytes_per_s / 2  # one copying thread next to the training threads
    python = "the time of a small op, as steps of a GPT showed on a 2-core server"
    gloo = "gloo over loopback, two ranks on a 2-core server, 1 MiB messages; not this machine"
    return {
        "title": (rates.title, system),
        "architecture": ("cpu", system),
        "memory_bytes": (rates.memory_bytes, system),
        "context_bytes": (0, "the ledger counts all bytes"),
        "context_range": ((0, 0), "the ledger counts all bytes"),
        "cudnn_bytes": (0, "the ledger counts all bytes"),
        "cudnn_range": ((0, 0), "the ledger counts all bytes"),
        "bf16_flops_per_s": (rates.bf16_flops_per_s, measured),
        "fp16_flops_per_s": (rates.fp32_flops_per_s, "assumed equal to float32"),
        "tf32_flops_per_s": (rates.fp32_flops_per_s, measured),
        "fp32_flops_per_s": (rates.fp32_flops_per_s, measured),
        "memory_bytes_per_s": (rates.memory_bytes_per_s, measured),
        "launch_s": (rates.op_s, measured),
        "hook_s": (15 * rates.op_s, f"15 times {python}"),
        **mechanism_costs.defaults(rates.op_s),
        "host_to_device_bytes_per_s": (copies, "half of the measured memory rate"),
        "device_to_host_bytes_per_s": (copies, "half of the measured memory rate"),
        "intra_link_bytes_per_s": (0.6e9, gloo),
        "intra_link_latency_s": (150e-6, gloo),
        "all_gather_rounds": (1.25, gloo),
        "reduce_scatter_rounds": (2.6, gloo),
        "inter_link_bytes_per_s": (0.1e9, "rule of thumb: gloo over 1 Gb/s Ethernet"),
        "inter_link_latency_s": (300e-6, "rule of thumb: gloo over 1 Gb/s Ethernet"),
        "ssd_read_bytes_per_s": (1e9, "rule of thumb: one SATA or shared drive"),
        "ssd_write_bytes_per_s": (0.5e9, "rule of thumb: one SATA or shared drive"),
        "host_memory_bytes": (rates.memory_bytes, system),
        "host_adam_bytes_per_s": (rates.memory_bytes_per_s, "torch's fused AdamW runs at the memory rate"),
        "cores": (rates.cores, system),
        "gpus_per_node": (1, "the device is the machine"),
        "allocation_rounding_bytes": (1, "the CPU ledger counts what is asked for"),
        "gpus_per_pcie_root": (1, "the device is the machine"),
        "links_through_host": (False, "the device is the machine"),
        "link_slowdown": (
            0.0,
            "not measured: only the measured rates of trials include gloo's threads",
        ),
        "communicator_bytes": (0, "gloo's buffers are not in the ledger"),
        "communicator_range": ((0, 0), "gloo's buffers are not in the ledger"),
        "matmul_efficiency": (1.0, "rates of matrix products were measured"),
        "fp32_matmul_efficiency": (1.0, "rates of matrix products were measured"),
    }


def device_of(name: str) -> str:
    """Return torch's device type of a GPU of the table: `xpu` for Intel's, `cuda` for the others."""
    return device.device_of(_GPU_MODELS[name].architecture)


def names() -> tuple[str, ...]:
    """Return the names of all GPUs in the table."""
    return tuple(GPUS)


def known_name(name: str) -> str:
    """Return the table's name of a GPU; upper case, spaces and underscores are accepted for `h100-80g`.

    Raises:
        UsageError: There is no such GPU; the message has the most similar ones.
    """
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    key = ALIASES.get(key, key)
    if key in GPUS:
        return key
    begun = [each for each in names() if key and each.startswith(key)]
    near = begun[:5] or difflib.get_close_matches(key, names(), n=3, cutoff=0.4)
    raise UsageError(
        f"No hardware is called '{name}'.",
        evidence=f"Known: {', '.join(names())}.",
        fix=f"use {' or '.join(near)}" if near else "use one of the known names",
        code="MT208",
    )
