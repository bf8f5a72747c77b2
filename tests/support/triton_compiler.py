"""Triton's compiler for a GPU that is not there: from a kernel to the code of its machine."""

from __future__ import annotations

from typing import Any


def compiled(
    kernel: Any, architecture: int, types: dict[str, str], constants: dict[str, Any]
) -> dict[str, Any]:
    """Return what Triton makes of `kernel` for an NVIDIA GPU: `ptx` and `cubin` among it.

    Args:
        kernel: A function under `triton.jit`.
        architecture: As 90 for sm90.
        types: Types of its arguments as Triton writes them, `*fp32`; `i32` for those that are left out.
        constants: Arguments that are known at compile time, such as integers equal to one.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", architecture, 32)
    made: dict[str, Any] = triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm
    return made
