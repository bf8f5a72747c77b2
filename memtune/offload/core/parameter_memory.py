"""Memory of offloaded parameters in pieces that are freed, allocated and copied as one: weights and chunks.

Memory is freed and allocated in place, so views of its storage, among them autograd's saved ones, remain
views of the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from memtune.offload.core.fsdp_shards import GatheredBlocks
from memtune.offload.core.offloaded_parameter import OffloadedParameter, set_data
from memtune.offload.core.optimizer_param import to_host_now
from memtune.offload.core.parameter_layout import Chunks
from memtune.runtime import HOST, Context, local, mark


class Piece(NamedTuple):
    """Device memory and the host copy of its contents, offloaded and loaded together."""

    memory: Tensor
    host: Tensor
    in_frame: bool = False
    """The memory is permanent and serves other pieces as well; otherwise it is freed and allocated again."""
    padded_bytes: int = 0
    """Bytes of the memory, where they exceed those copied."""
    of: tuple[OffloadedParameter, ...] = ()
    """The parameters whose memory, or whose rows' memory, this is."""


def allocate_together(pieces: Iterable[Piece]) -> None:
    """Allocate the memory of all `pieces`; their parameters show it once they are restored."""
    for piece in pieces:
        if not piece.in_frame:
            piece.memory.untyped_storage().resize_(piece.padded_bytes or piece.host.nbytes)


def free_together(pieces: Iterable[Piece]) -> None:
    """Free all of `pieces`, whose parameters are on the host from here on."""
    for piece in pieces:
        if not piece.in_frame:
            for each in piece.of:
                each.free()
            piece.memory.untyped_storage().resize_(0)


def in_chunks(
    context: Context,
    parameters: Sequence[nn.Parameter],
    hosts: dict[nn.Parameter, Tensor],
    chunks: Chunks,
    gathered: GatheredBlocks | None = None,
) -> list[Piece]:
    """Move `parameters` and their host copies into chunks; both stay the same Python objects.

    Args:
        context: `undo` gets the reverse.
        parameters: In the order of `chunks`.
        hosts: Their host copies; those of parameters that are not trained are replaced.
        chunks: Place of each one.
        gathered: Given where FSDP2 shards the parameters; their rows are moved then.
    """
    own = {} if gathered is not None else {each: each.detach() for each in parameters}
    context.undo.callback(lambda: [put_back(each, there, each.detach()) for each, there in own.items()])
    pieces = []
    for chunk in range(chunks.count):
        members = [
            (p, at) for p, of, at in zip(parameters, chunks.chunk, chunks.offset, strict=True) if of == chunk
        ]
        memory = torch.zeros(chunks.chunk_bytes, dtype=torch.uint8, device=context.device)
        for parameter, at in members:
            values = parameter.detach() if gathered is None else gathered.rows_of(parameter)
            place = place_in(memory, values, at)
            # Values first, then the views move: a failure in between leaves the parameter as it was.
            place.copy_(values)
            if gathered is None:
                set_data(parameter, place)
                own[parameter].untyped_storage().resize_(0)
            else:
                gathered.put_rows(parameter, place)
        # One host buffer per chunk, so that one copy loads it; the optimizer's parameters become views of it.
        host = to_host_now(memory)
        mark(host, HOST)
        for parameter, at in members:
            hosts[parameter] = place_in(host, local(parameter.detach()), at)
            if parameter in context.placement.optimizer_params:
                context.placement.optimizer_params[parameter].data = hosts[parameter]
        of = tuple(OffloadedParameter(parameter, hosts[parameter]) for parameter, _ in members)
        pieces.append(Piece(memory, host, of=of))
    return pieces


def place_in(memory: Tensor, like: Tensor, at: int) -> Tensor:
    """Return a view of `memory`, from byte `at` of its storage, with the shape and strides of `like`."""
    return (
        memory[at : at + like.nbytes]
        .view(like.dtype)
        .as_strided(like.size(), like.stride(), at // like.element_size())
    )


@torch.no_grad()
def put_back(parameter: nn.Parameter, own: Tensor, values: Tensor) -> None:
    """Give `parameter` its `own` storage again, whose memory may have been freed, with `values`.

    The storage, not another one: the user's code may hold views of it.
    """
    own.untyped_storage().resize_(own.nbytes)
    own.copy_(values)
    set_data(parameter, own)
