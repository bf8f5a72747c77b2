"""Differences between CUDA and CPU kernels: the data of `translate`, each entry with its source.

Sources name a file of the PyTorch repository (github.com/pytorch/pytorch) and a function in it, or an
address. `estimated` entries rest on no published formula; predictions that use them report it.

Legend of the formulas: B samples, H heads, G heads of key and value, Q and K sequence lengths, D head size, E
value's head size, S bytes per element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memtune.units import MIB


@dataclass(frozen=True)
class Attention:
    """One call of scaled_dot_product_attention, with the properties that select a kernel."""

    B: int
    H: int
    Q: int
    D: int
    G: int
    K: int
    E: int
    dtype: str
    dropout: float = 0.0
    causal: bool = False
    masked: bool = False
    dense: bool = True
    """True if the last dimension of query, key and value has stride 1."""
    aligned: bool = True
    """True if query, key and value start at a multiple of 16 bytes in their storages."""
    needs_grad: bool = True
    multiprocessors: int = 108

    @property
    def S(self) -> int:
        """Return bytes per element."""
        return {"float64": 8, "float32": 4}.get(self.dtype, 2)

    @property
    def scores(self) -> int:
        """Return bytes of one tensor of all queries × keys."""
        return self.B * self.H * self.Q * self.K * self.S

    @property
    def narrow(self) -> bool:
        """Return whether it computes in 16 bits."""
        return self.dtype in ("float16", "bfloat16")


def up(value: int, multiple: int) -> int:
    """Return `value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class AttentionKernel:
    """An attention kernel.

    When it is chosen, its results and saved tensors besides the output, scratch of its backward.
    """

    name: str
    forward: str
    backward: str
    fits: Callable[[Attention, int], bool]
    """(call, compute capability × 10) → whether the kernel supports the call."""
    made: Callable[[Attention], tuple[int, ...]]
    """Bytes of its results besides the output, in order; padded copies come last."""
    float_bytes: Callable[[Attention], tuple[int, ...]]
    """`Storages.float_bytes` of the same results; without the last ones, which have 0."""
    packed: Callable[[int], tuple[int, ...]]
    """(number of results besides the output) → those that autograd packs, in order; OUTPUT is the output."""
    forward_scratch: Callable[[Attention], int]
    backward_scratch: Callable[[Attention], int]
    source: str
    estimated: bool = False


OUTPUT = -1
"""The output, in `AttentionKernel.packed`."""
_SDP = "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
_FLASH_ROUNDED = (32, 64)


def _flash_head(a: Attention) -> int:
    """Return the head size that flash attention's backward rounds to."""
    head = up(a.D, 8)
    return up(head, _FLASH_ROUNDED[head > 128])


def _flash_fits(a: Attention, sm: int) -> bool:
    # These chips have 100 KiB of shared memory per multiprocessor, too little for wide heads in backward.
    small_cache = 86 <= sm <= 89 or 120 <= sm <= 121
    too_wide = small_cache and a.needs_grad and a.D > 192 and (a.D <= 224 or a.dropout > 0)
    square = not a.causal or a.Q == a.K
    return (
        sm >= 80
        and a.narrow
        and not a.masked
        and a.D == a.E
        and a.D <= 256
        and square
        and a.dense
        and not too_wide
    )


def float_bytes_of(size: int) -> int:
    """Return `Storages.float_bytes` of floating-point numbers of `size` bytes: 0 for those of 64 bits."""
    return size if size < 8 else 0


def _of_log_sum_exp(a: Attention) -> tuple[int, ...]:
    return (4,)


def _flash_made(a: Attention) -> tuple[int, ...]:
    random_state = (16, 8)  # uint64[2] and an unused uint64, on the device since 2.8
    no_weights = 0  # debug_attn_mask is there and empty
    padded = (
        ()
        if a.D % 8 == 0
        else (
            a.B * a.H * a.Q * up(a.D, 8) * a.S,
            *(a.B * a.G * a.K * up(a.D, 8) * a.S,) * 2,
            a.B * a.H * a.Q * up(a.D, 8) * a.S,
        )
    )
    return (4 * a.B * a.H * a.Q, *random_state, no_weights, *padded)


def flash_splits(a: Attention) -> int:
    """Return the number of splits of the keys in flash attention's forward, to fill the GPU."""
    head, slots = up(a.D, 8), 2 * a.multiprocessors
    blocks = a.B * a.H * -(-a.Q // 64)
    # The constants 0.8 and 0.85, and two blocks per multiprocessor, are those of num_splits_heuristic.
    if a.dropout or blocks >= 0.8 * slots:
        return 1
    n_blocks = -(-a.K // (256 if head <= 64 else 128 if head <= 128 else 64))
    most = min(128, slots, n_blocks)
    eligible = [n for n in range(1, most + 1) if n == 1 or -(-n_blocks // n) != -(-n_blocks // (n - 1))]
    filled = {n: blocks * n / slots / math.ceil(blocks * n / slots) for n in eligible}
    return next(n for n in eligible if filled[n] >= 0.85 * max(filled.values()))


def _flash_forward(a: Attention) -> int:
    splits = flash_splits(a)
    return 4 * splits * a.B * a.H * a.Q * (1 + _flash_head(a)) if splits > 1 else 0


def _flash_backward(a: Attention) -> int:
    rows = up(a.Q, 128)
    expanded = 2 * a.B * a.K * a.H * up(a.D, 8) * a.S if a.G != a.H else 0
    return 4 * a.B * a.H * rows * (1 + _flash_head(a)) + expanded


def _efficient_fits(a: Attention, sm: int) -> bool:
    types = ("float16", "float32", "bfloat16") if sm >= 80 else ("float16", "float32")
    alignment = 128 // (8 * a.S) if sm >= 80 or a.narrow else 1
    sizes = a.D % alignment == 0 == a.E % alignment
    return sm >= 50 and a.dtype in types and a.G == a.H and sizes and a.dense and (a.aligned or sm < 80)


def _efficient_backward(a: Attention) -> int:
    delta = 4 * a.B * a.H * a.Q
    # In 16 bits the query's gradient is summed in fp32, beyond a head size of 128 key's and value's as well.
    summed = 4 * a.B * a.H * (a.Q * a.D + (a.K * (a.D + a.E) if a.D > 128 else 0)) if a.narrow else 0
    return delta + summed


def _cudnn_fits(a: Attention, sm: int) -> bool:
    latent = sm // 10 in (9, 10) and (a.D, a.E) == (192, 128)  # multi-head latent attention
    sizes = (
        a.D % 8 == 0 == a.E % 8
        and (max(a.D, a.E) <= 128 or latent)
        and a.K != 1
        and (a.Q != 1 or a.dropout == 0)
    )
    return 80 <= sm <= 121 and a.narrow and sizes and a.dense and (16 * a.dropout).is_integer()


ATTENTION: Mapping[str, AttentionKernel] = {
    "cudnn": AttentionKernel(
        "cudnn",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_cudnn_attention_backward.default",
        _cudnn_fits,
        made=lambda a: (4 * a.B * a.H * a.Q, 8, 8),
        float_bytes=_of_log_sum_exp,
        packed=lambda n: (0, OUTPUT, 2, 1),
        forward_scratch=lambda a: 0,
        backward_scratch=lambda a: 4 * a.B * a.H * a.Q * (1 + a.D),
        source=(
            f"{_SDP} can_use_cudnn_attention, check_cudnn_tensor_shapes (cuDNN from 9.16 on);"
            " torch/_meta_registrations.py meta__scaled_dot_product_cudnn_attention (fp32 log-sum-exp, int64"
            " seed and offset); backward's workspace is cuDNN's own and taken to be flash attention's"
        ),
        estimated=True,
    ),
    "flash": AttentionKernel(
        "flash",
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_flash_attention_backward.default",
        _flash_fits,
        made=_flash_made,
        float_bytes=lambda a: (4, 0, 0, 0, *(a.S,) * 4),
        packed=lambda n: (0, OUTPUT, 1, 2, *range(4, n)),
        forward_scratch=_flash_forward,
        backward_scratch=_flash_backward,
        source=(
            f"{_SDP} can_use_flash_attention; aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp"
            " mha_fwd (softmax_lse, rng_state, _unused), set_params_splitkv (softmax_lse_accum, out_accum)"
            " and num_splits_heuristic, mha_bwd (softmax_d, dq_accum, dk_expanded, dv_expanded); padding to"
            " 8: aten/src/ATen/native/transformers/attention.cpp pad_last_dim"
        ),
    ),
    "efficient": AttentionKernel(
        "efficient",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_efficient_attention_backward.default",
        _efficient_fits,
        made=lambda a: (
            4 * a.B * a.H * up(a.Q, 32),
            0,
            0,
        ),  # seed and offset are on the host outside of graph capture
        float_bytes=_of_log_sum_exp,
        packed=lambda n: (0, OUTPUT, 2, 1),
        forward_scratch=lambda a: 4 * a.B * a.Q * a.H * a.E if a.narrow and a.E > 128 else 0,
        backward_scratch=_efficient_backward,
        source=(
            f"{_SDP} can_use_mem_efficient_attention (grouped queries only from 2.14 on: the doc of "
            "torch.nn.functional.scaled_dot_product_attention); torch/_meta_registrations.py "
            "meta__scaled_dot_product_efficient_attention (log-sum-exp padded to 32); "
            "aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h workspace_size"
        ),
    ),
    "math": AttentionKernel(
        "math",
        "aten._scaled_dot_product_attention_math.default",
        "aten._scaled_dot_product_attention_math_backward.default",
        lambda a, sm: True,
        # The weights after softmax, and with dropout the dropped weights and the mask.
        made=lambda a: (a.scores, *((a.scores, a.scores // a.S) if a.dropout else ())),
        float_bytes=lambda a: (float_bytes_of(a.S),) * 2,
        packed=lambda n: tuple(range(n)),
        forward_scratch=lambda a: a.scores,
        backward_scratch=lambda a: 2 * a.scores,
        source="aten/src/ATen/native/transformers/attention.cpp _scaled_dot_product_attention_math",
    ),
}

MULTIPROCESSORS = {
    "sm70": 80,
    "sm75": 72,
    "sm80": 108,
    "sm86": 82,
    "sm89": 128,
    "sm90": 132,
    "sm100": 148,
    "sm120": 170,
}
"""By architecture, of its most common training card: V100, RTX 6000, A100, RTX 3090, RTX 4090, H100 SXM,
B200, RTX 5090 (their white papers). Relevant for small batches only: the number of splits of flash
attention's keys.
"""

ATTENTION_ORDER: tuple[tuple[Callable[[int], bool], tuple[str, ...], str], ...] = (
    (
        lambda sm: sm // 10 in (9, 10),
        ("cudnn", "flash", "efficient", "math"),
        f"{_SDP} check_prefer_cudnn_attention",
    ),
    (lambda sm: True, ("flash", "efficient", "math"), "aten/src/ATen/Context.h sdp_priority_order"),
)
"""(compute capability × 10) → kernels in the order in which they are tried."""

PADS_MASK = "aten.constant_pad_nd.default"
"""Source: aten/src/ATen/native/transformers/attention.cpp preprocess_mask: efficient attention's mask is
expanded and its last dimension padded to a multiple of 16 unless it is one
"""

CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""Part of the names of CPU's attention ops, forward and backward."""

DROPOUT = ("aten.native_dropout.default", "aten.native_dropout_backward.default")
"""Source: aten/src/ATen/native/Dropout.cpp is_fused_kernel_acceptable; cuda/Dropout.cu dropout_cuda: saves a
bool mask
"""

RMS_NORM = ("aten._fused_rms_norm.default", "aten._fused_rms_norm_backward.default")
"""Source: aten/src/ATen/native/layer_norm.cpp rms_norm_symint: fused unless channels last, complex, or weight
of another type; tools/autograd/derivatives.yaml _fused_rms_norm saves input, weight and rstd;
cuda/layer_norm_kernel.cu: rstd in the accumulation type
"""

FOREACH_OPTIMIZERS = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""Source: torch/optim/optimizer.py _default_to_fused_or_foreach: foreach on CUDA where neither foreach nor
fused is set ; temporaries are those of torch's own _multi_tensor functions, recorded
"""
"""Source: torch/optim/adam.py Adam._init_group: `step` is a CPU tensor unless capturable or fused."""


@dataclass(frozen=True)
class Recurrent:
    """A recurrent layer on cuDNN: bytes of its reserve space, which backward reads."""

    forward: str
    backward: str
    per_state: int
    """Values kept per step, sample, hidden unit, layer and direction."""
    source: str


RECURRENT: Mapping[str, Recurrent] = {
    "lstm": Recurrent(
        "aten._cudnn_rnn.default",
        "aten._cudnn_rnn_backward.default",
        6,
        "aten/src/ATen/native/cudnn/RNN.cpp _cudnn_rnn saves input, states, flat weights, output and a"
        " reserve of a size that cudnnGetRNNTempSpaceSizes tells at run time; taken as four gates, cell and"
        " its tanh",
    ),
    "gru": Recurrent(
        "aten._cudnn_rnn.default",
        "aten._cudnn_rnn_backward.default",
        5,
        "aten/src/ATen/native/cudnn/RNN.cpp _cudnn_rnn, as LSTM; taken as three gates, the state and its"
        " candidate",
    ),
}

NORM_STATISTICS = {"aten.native_layer_norm.default": (1, 2), "aten.native_batch_norm.default": (1, 2)}
"""Outputs that CUDA keeps in fp32, and CPU in the input's dtype if weights are 16 bits too. Source:
aten/src/ATen/native/cuda/layer_norm_kernel.cu layer_norm_cuda and cuda/Normalization.cu batch_norm_cuda:
mean and rstd in the accumulation type
"""

BATCH_NORM = ("aten.native_batch_norm.default", "aten.native_batch_norm_backward.default")
CUDNN_BATCH_NORM = ("aten.cudnn_batch_norm.default", "aten.cudnn_batch_norm_backward.default")
BATCH_NORM_RESERVE = "aten.empty.memory_format"
"""The tensor that torch's own kernel allocates instead of cuDNN's reserve. Source:
aten/src/ATen/native/Normalization.cpp _select_batch_norm_backend, _batch_norm_impl_index (the reserve);
tools/autograd/derivatives.yaml cudnn_batch_norm: saves the reserve last, and has torch's own backward
outside of training; the reserve's size is cuDNN's own
(cudnnGetBatchNormalizationTrainingExReserveSpaceSize), taken to be none as torch's meta registration has
it
"""

CUBLAS_WORKSPACE: tuple[tuple[Callable[[str], bool], int], ...] = (
    (lambda chip: chip in ("sm90", "sm100", "sm103", "sm120", "sm121"), 32 * MIB),
    (lambda chip: chip.startswith("gfx94") or chip.startswith("gfx95"), 128 * MIB),
    (lambda chip: chip.startswith("gfx"), 32 * MIB),
    (lambda chip: True, 2 * 4096 * 1024 + 8 * 16 * 1024),
)
"""Source: aten/src/ATen/cuda/CublasHandlePool.cpp parseChosenWorkspaceSize: from the caching allocator, one
per handle and stream; forward and autograd's thread have a handle each; `:4096:2:16:8`, 8,519,680 bytes,
is the default: pull/91564 of github.com/pytorch/pytorch; 32 MiB on Hopper and by majors 10 and 12 on
Blackwell: pull/175344 (its revert, pull/182669, was closed unmerged); 128 MiB on gfx94 and gfx95, 32 MiB
on other AMD: pull/138791 and later
"""
CUBLAS_HANDLES = 2

CPU_ONLY = ("mkldnn", "_for_cpu", "onednn", "_cpu.")
"""Parts of names of ops that CUDA never runs."""
SAME_EVERYWHERE = ("aten.", "memtune.", "c10d.", "_c10d_functional.", "fsdp.", "prims.")
"""Namespaces whose ops, unless in this table, have outputs of equal sizes on both devices."""


def attention_kernel(call: Attention, architecture: str) -> AttentionKernel:
    """Return the kernel that CUDA runs for `call`; AMD's choices are taken to be those of 8.0."""
    sm = int(architecture.removeprefix("sm")) if architecture.startswith("sm") else 80
    order = next(order for matches, order, _ in ATTENTION_ORDER if matches(sm))
    return next(ATTENTION[name] for name in order if ATTENTION[name].fits(call, sm))


def attention_of(
    shapes: Sequence[Sequence[int]],
    dtype: str,
    options: Mapping[str, float],
    *,
    needs_grad: bool,
    architecture: str = "sm80",
) -> Attention:
    """Return the call from the shapes of its tensors (samples, heads, length, size) and its options."""
    (B, H, Q, D), (*_, G, K, _), (*_, E) = shapes[:3]
    return Attention(
        B=B,
        H=H,
        Q=Q,
        D=D,
        G=G,
        K=K,
        E=E,
        dtype=dtype,
        dropout=options["dropout"],
        causal=bool(options["causal"]),
        masked=bool(options["masked"]),
        dense=bool(options["dense"]),
        aligned=bool(options["aligned"]),
        needs_grad=needs_grad,
        multiprocessors=MULTIPROCESSORS.get(architecture, 108),
    )


Shaped = tuple[str, Sequence[int], Sequence[int]]
"""A tensor argument of an op: dtype, shape, strides."""


def runs_on_cudnn(
    x: Shaped, weight: Shaped | None, bias: Shaped | None, mean: Shaped | None, *, training: bool
) -> bool:
    """Return whether CUDA runs a batch norm of `x` with cuDNN's kernel, without copying `x` first.

    Args:
        x: The input.
        weight: None if there is none, as `bias`.
        bias: Likewise.
        mean: The running mean; the running variance exists if and only if it does.
        training: Statistics are those of the batch.
    """
    if weight is None or bias is None or (mean is None and not training):
        return False
    dtype, shape, strides = x
    types = dtype in ("float32", "float64") or (dtype == "float16" and weight[0] == "float32")
    fits = len(shape) >= 3 and shape[0] <= (880801 if training else 65535) and math.prod(shape) < 2**31 - 1
    return types and weight[0] != "bfloat16" and fits and _is_dense(shape, strides)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether it is contiguous, possibly channels last."""
    last = (0, *range(2, len(shape)), 1)
    for order in (range(len(shape)), last):
        sizes, wanted = [shape[dim] for dim in order], 1
        for size, stride in zip(reversed(sizes), reversed([strides[dim] for dim in order]), strict=True):
            if size != 1 and stride != wanted:
                break
            wanted *= size
        else:
            return True
    return False


def padded_mask_bytes(call: Attention) -> int:
    """Return bytes of the mask made for efficient attention if the given one must be padded, else 0."""
    return call.B * call.H * call.Q * up(call.K, 16) * call.S if call.masked and call.K % 16 else 0


def runs_everywhere(kernel: str, call: Attention) -> bool:
    """Return whether every GPU since Ampere runs `kernel` for `call`; math: small ops, as on CPU."""
    return all(
        attention_kernel(call, architecture).name == kernel
        for architecture in ("sm80", "sm89", "sm90", "sm100", "sm120")
    )


def cublas_workspace_bytes(architecture: str, config: str | None = None) -> int:
    """Return bytes of one cuBLAS workspace.

    `config` is CUBLAS_WORKSPACE_CONFIG (`:4096:8`: KiB and count, repeated).
    """
    if config:
        pairs = [part.split(":") for part in config.strip(":").replace("::", ":").split(",")]
        numbers = [int(each) for part in pairs for each in part if each.isdigit()]
        if numbers and len(numbers) % 2 == 0:
            return 1024 * sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True))
    return next(n_bytes for matches, n_bytes in CUBLAS_WORKSPACE if matches(architecture))


def reserve_bytes(kind: str, options: Mapping[str, float], itemsize: int, width: int) -> int:
    """Return bytes of cuDNN's reserve for a recurrent call, and of dropout masks between its layers."""
    cells = options["input"] / max(width, 1)  # steps × samples
    states = cells * options["hidden"] * options["layers"] * options["directions"]
    between = (
        cells * options["hidden"] * options["directions"] * (options["layers"] - 1)
        if options["dropout"]
        else 0
    )
    return math.ceil(itemsize * (RECURRENT[kind].per_state * states) + between)
