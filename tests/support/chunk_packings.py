"""Small models for searches over chunks: bytes of parameters, and every packing of them."""

from __future__ import annotations

from hypothesis import strategies as st

from memtune.offload.core.parameter_layout import Chunks, pack

Sizes = tuple[tuple[int, ...], tuple[int, ...]]


@st.composite
def models(draw: st.DrawFn) -> Sizes:
    """Draw bytes of each parameter of two to four blocks, and their blocks."""
    blocks = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=2, max_size=4))
    return tuple(size for block in blocks for size in block), tuple(
        i for i, block in enumerate(blocks) for _ in block
    )


def size_packings(sizes: Sizes, *, above: bool = False) -> list[Chunks]:
    """Return packings with every chunk size from the largest parameter to the largest block, or with `above`
    to all parameters.
    """
    n_bytes, block = sizes
    most = (
        sum(n_bytes)
        if above
        else max(sum(n for n, of in zip(n_bytes, block, strict=True) if of == i) for i in set(block))
    )
    return [pack(n_bytes, block, size) for size in range(max(n_bytes), most + 1)]
