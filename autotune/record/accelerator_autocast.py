"""Apply an accelerator's autocast policy to CPU tensors, so that a recording made on CPU for a GPU has that
GPU's casts.

CPU and accelerators have different op lists: CUDA, whose lists ATen shares with the others, runs norms,
softmax and sums in float32 and saves the cast tensors, CPU runs them in 16 bits, and `torch.autocast("cuda")`
does nothing without CUDA. Inside `accelerator_autocast_on_cpu` both device types follow CUDA's lists, and
queries (`torch.is_autocast_enabled`) answer for both.

Sources: ATen/autocast_mode.h (AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE, AT_FORALL_PROMOTE; it is
installed with torch) and aten/src/ATen/autocast_mode.cpp (TORCH_LIBRARY_IMPL of AutocastCPU: what only CPU
casts).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.autocast_mode import autocast
from torch.utils._pytree import tree_leaves, tree_map

from memtune._replaced import replaced

FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar"
    " pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm"
    " frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp"
    " upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d"
    " upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d"
    " _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
).split()
"""Ops whose floating-point arguments are cast to float32."""
FLOAT32_RESULT = (
    "softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm"
    " linalg_matrix_norm.str_ord sum sum.dim_IntList"
).split()
"""Ops that return float32 unless the caller asks for another dtype."""
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add".split()
"""Ops whose floating-point arguments are cast to the widest dtype among them."""
NARROW = (
    "_convolution addmv addr mv chain_matmul einsum linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell"
    " rnn_relu_cell"
).split()
"""Ops whose floating-point arguments are cast to autocast's dtype."""
NOT_CAST = (
    "adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d cat cross_entropy_loss"
    " fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_irfft"
    " fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn fractional_max_pool2d fractional_max_pool3d"
    " grid_sampler_2d grid_sampler_3d index_copy max_pool3d max_unpool2d max_unpool3d nanquantile quantile"
    " reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d stack trace"
    " view_as_complex"
).split()
"""Ops that CPU casts and CUDA does not."""

_Cast = Callable[[Sequence[Tensor]], torch.dtype]


@contextmanager
def accelerator_autocast_on_cpu(kind: str) -> Iterator[None]:
    """Make autocast for CPU and for the device type `kind` cast CPU tensors as CUDA does."""
    init, enter, leave = autocast.__init__, autocast.__enter__, autocast.__exit__
    made_before: dict[int, dict[str, Any]] = {}
    with ExitStack() as kernels:
        placed = False

        def on_cpu(
            self: autocast,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            if device_type in ("cpu", kind):
                device_type, dtype = "cpu", torch.get_autocast_dtype(kind) if dtype is None else dtype
            init(self, device_type, dtype, enabled, cache_enabled)

        def entered(self: autocast) -> Any:
            nonlocal placed
            if self.device == kind:  # made when the user's file was imported
                # Its own fields again on exit: the same object is entered later without these patches.
                made_before[id(self)] = dict(vars(self))
                on_cpu(
                    self, kind, self.fast_dtype, getattr(self, "asked", self._enabled), self._cache_enabled
                )
            if (
                not placed and self._enabled
            ):  # most models have no autocast: kernels are put in place when one is met
                placed = True
                kernels.enter_context(_kernels())
            return enter(self)  # type: ignore[no-untyped-call]

        def left(self: autocast, *raised: Any) -> Any:
            found = leave(self, *raised)
            if id(self) in made_before:
                vars(self).update(made_before.pop(id(self)))
            return found

        with (
            replaced(autocast, __init__=on_cpu, __enter__=entered, __exit__=left),
            replaced(torch, **_autocast_queries(kind)),
        ):
            yield


def _autocast_queries(kind: str) -> dict[str, Callable[..., Any]]:
    """Return torch's queries about autocast of `kind`, here the default, with the state of CPU's."""
    # Its own state never changes: Dynamo would restore it to the answer, and find that it had changed.
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype

    def set_autocast_enabled(*args: Any) -> None:
        if args[0] != kind:
            set_enabled(*args)

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        if device_type != kind:
            set_dtype(device_type, dtype)

    def is_autocast_enabled(device_type: str = kind) -> bool:
        return enabled("cpu" if device_type == kind else device_type)

    def get_autocast_dtype(device_type: str) -> torch.dtype:
        return dtype("cpu" if device_type == kind and enabled("cpu") else device_type)

    def get_autocast_gpu_dtype() -> torch.dtype:
        return get_autocast_dtype(kind)

    made = (
        *(is_autocast_enabled, get_autocast_dtype, get_autocast_gpu_dtype),
        *(set_autocast_enabled, set_autocast_dtype),
    )
    return {each.__name__: each for each in made}


@contextmanager
def _kernels() -> Iterator[None]:
    """Replace CPU's autocast policy by CUDA's for every op that they treat differently."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that kernels are replaced, as is meant
        _register(library)
    try:
        yield
    finally:
        library._destroy()


def _register(library: torch.library.Library) -> None:
    for names, policy in (
        (FLOAT32, partial(_with_arguments, lambda found: torch.float32)),
        (FLOAT32_RESULT, _with_result),
        (WIDEST, partial(_with_arguments, _widest)),
        (NARROW, partial(_with_arguments, lambda found: torch.get_autocast_dtype("cpu"))),
    ):
        for name in names:
            library.impl(name, partial(policy, _op(name)), "AutocastCPU")
    library.impl("norm.Scalar", _norm, "AutocastCPU")
    library.impl("norm.ScalarOpt_dim", _norm, "AutocastCPU")
    for name in NOT_CAST:
        library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _autocast_excluded() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _eligible(value: Any) -> bool:
    """Return whether autocast may cast a value: floating-point CPU tensors other than float64."""
    return (
        isinstance(value, Tensor)
        and value.is_cpu
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _widest(found: Sequence[Tensor]) -> torch.dtype:
    return (
        torch.float32
        if any(each.dtype == torch.float32 for each in found)
        else torch.get_autocast_dtype("cpu")
    )


def _with_arguments(dtype: _Cast, op: Any, *args: Any, **kwargs: Any) -> Any:
    with _autocast_excluded():
        wanted = dtype([each for each in tree_leaves((args, kwargs)) if _eligible(each)])
        args, kwargs = tree_map(lambda each: each.to(wanted) if _eligible(each) else each, (args, kwargs))
        return op(*args, **kwargs)


def _with_result(op: Any, *args: Any, **kwargs: Any) -> Any:
    with _autocast_excluded():
        if _eligible(args[0]):
            at = [each.name for each in op._schema.arguments].index("dtype")
            if at < len(args):
                args = (*args[:at], args[at] or torch.float32, *args[at + 1 :])
            else:
                kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.float32}
        return op(*args, **kwargs)


def _norm(tensor: Tensor, p: Any = 2, dim: Sequence[int] = (), keepdim: bool = False) -> Tensor:
    with _autocast_excluded():
        kind = torch.float32 if _eligible(tensor) else tensor.dtype
        found: Tensor = torch.ops.aten.norm.ScalarOpt_dim_dtype(tensor, p, list(dim), keepdim, dtype=kind)
        return found
