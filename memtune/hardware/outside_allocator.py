"""Device memory that a training process holds outside PyTorch's allocator, each as a range with its source.

Tools that watch the device (`nvidia-smi`, NVML) count it; `torch.cuda.max_memory_reserved` does not. It
depends on the driver and on the kernels that a model loads, so every value is the middle of a range.
"""

from __future__ import annotations

from typing import NamedTuple

from memtune.units import GIB, MIB


class ByteRange(NamedTuple):
    """A value in bytes, its bounds, and its source."""

    n_bytes: int
    low_bytes: int
    high_bytes: int
    source: str

    def times(self, count: int) -> ByteRange:
        """Return the range of `count` of them."""
        return ByteRange(count * self.n_bytes, count * self.low_bytes, count * self.high_bytes, self.source)


def _gib(value: float, low: float, high: float, source: str) -> ByteRange:
    return ByteRange(int(value * GIB), int(low * GIB), int(high * GIB), source)


LAZY_LOADING = (11, 7)
"""First version of CUDA that loads a kernel when it first runs (CUDA C++ programming guide, "Lazy Loading");
before, all kernels of torch and its libraries were loaded with the context.
"""

_EAGER = _gib(
    1.31,
    1.0,
    1.6,
    "V100 with CUDA 11.2: 1,343 MiB after the first op (Hugging Face,"
    " docs/source/en/model_memory_anatomy.md)",
)
_LAZY = {
    "sm80": _gib(
        1.4,
        1.2,
        1.6,
        "A100 40 GB: 1.53 GiB of nvidia-smi for an MLP whose tensors take 0.13 (itu-rad/GPUMemNet,"
        " Datasets/MLP/mlp_data_step2.csv), and within 0.03 of it for 18 more; other drivers may differ",
    ),
    "sm86": _gib(
        0.25,
        0.2,
        0.5,
        "RTX 3060: NVML before and after the first op (Stone-ResearchLife/xMem, plot/data/001-Anova)",
    ),
}
_USUAL = _gib(
    0.5,
    0.25,
    1.4,
    "not measured on this architecture: about 300 MB for a small model since CUDA 11.7"
    " (https://github.com/pytorch/pytorch/issues/107667), more with more kernels; the bounds are those of RTX"
    " 3060 and A100",
)


_CUDNN = {
    "sm80": _gib(
        0.3,
        0.1,
        0.5,
        "A100 40 GB: nvidia-smi of CNNs with few bytes of tensors over that of MLPs (itu-rad/GPUMemNet,"
        " cnn_data_step1.csv @a79a76a and Datasets/MLP/mlp_data_step2.csv)",
    ),
    "sm86": _gib(
        0.05,
        0.0,
        0.3,
        "RTX 3060: chosen with the totals of eight ConvNeXts known, which leave no room for more"
        " (Stone-ResearchLife/xMem, plot/data/001-Anova)",
    ),
}
_USUAL_CUDNN = _gib(0.2, 0.0, 0.5, "not measured on this architecture: between those of RTX 3060 and A100")


def context(architecture: str, cuda: str | None = None) -> ByteRange:
    """Return CUDA's context, libraries' handles and loaded kernels; `cuda` None: of memtune's torch.

    Args:
        architecture: As `Hardware.architecture`.
        cuda: Version of CUDA, as `torch.version.cuda` has it; None for one that memtune's torch is built
            with.
    """
    if cuda and tuple(int(part) for part in cuda.split(".")[:2]) < LAZY_LOADING:
        return _EAGER
    return _LAZY.get(architecture, _USUAL)


def cudnn(architecture: str) -> ByteRange:
    """Return handles and loaded kernels of cuDNN, on AMD of MIOpen, in a process that runs any of them."""
    return _CUDNN.get(architecture, _USUAL_CUDNN)


def communicator(link_gb_per_s: float) -> ByteRange:
    """Return the buffers of one NCCL communicator on a device with links of `link_gb_per_s`."""
    channels = 16 if link_gb_per_s > 100 else 2
    buffers = 2 * 4 * MIB  # to and from the neighbour in a ring
    return ByteRange(
        channels * buffers,
        channels * buffers // 2,
        32 * buffers * 2,
        "estimate: channels × 2 neighbours of a ring × 4 MiB, NCCL's default buffer; memory grows with"
        " channels,"
        " not with ranks (NVIDIA/nccl issues 285 and 864); 16 channels with NVLink, 2 without; upper"
        " bound: 32"
        " channels (NCCL_MAX_NCHANNELS' limit) and a tree besides the ring",
    )
