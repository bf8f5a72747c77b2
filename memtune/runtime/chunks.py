"""What of the blocks' parameters comes and goes as one: each parameter by itself, or chunks that hold several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from memtune.chunks import Chunks
from memtune.runtime.context import Context
from memtune.runtime.gathered_rows import GatheredBlocks
from memtune.runtime.host_copies import to_host_now
from memtune.runtime.let_go import are_back, let_go, require_own_memory
from memtune.runtime.tiers import HOST, mark
from memtune.runtime.tree import local


class Piece(NamedTuple):
    """Memory of the device, and the host's copy of what belongs there."""

    there: Tensor
    host: Tensor
    in_frame: bool = False
    """The memory stays, others come to it in turn; else it is given back and taken anew."""
    padded_bytes: int = 0
    """Of the memory, where it is more than what is copied."""
    of: tuple[nn.Parameter, ...] = ()
    """The parameters that lie there, or whose rows do (`runtime.let_go`)."""

    def take(self) -> None:
        """Have the memory.

        Raises:
            ApplyError: A parameter is in other memory.
        """
        if not self.in_frame:
            require_own_memory(self.of, self.there)
            self.there.untyped_storage().resize_(self.padded_bytes or self.host.nbytes)
            are_back(self.of)

    def give_back(self) -> None:
        """What is there is not needed any more; raises as `take` does."""
        if not self.in_frame:
            require_own_memory(self.of, self.there)
            self.there.untyped_storage().resize_(0)
            let_go(self.of)


def in_chunks(
    context: Context,
    parameters: Sequence[nn.Parameter],
    hosts: dict[nn.Parameter, Tensor],
    chunks: Chunks,
    gathered: GatheredBlocks | None = None,
) -> list[Piece]:
    """Move `parameters`, and their host copies, side by side into chunks; both stay the same objects.

    Args:
        context: Whose `undo` takes it back.
        parameters: In the order of `chunks`.
        hosts: Their host copies; those of parameters that are not trained are replaced.
        chunks: Where each one goes.
        gathered: Where they are divided; it is their rows that go there.
    """
    if gathered is None:
        context.undo.callback(_apart, parameters)
    pieces = []
    for chunk in range(chunks.count):
        members = [(p, at) for p, of, at in zip(parameters, chunks.chunk, chunks.offset, strict=True) if of == chunk]
        there = torch.zeros(chunks.chunk_bytes, dtype=torch.uint8, device=context.device)
        for parameter, at in members:
            here = parameter.detach() if gathered is None else gathered.rows_of(parameter)
            place = place_in(there, here, at)
            place.copy_(here)
            if gathered is None:
                parameter.data = place
            else:
                gathered.put_rows(parameter, place)
        host = to_host_now(there)
        mark(host, HOST)
        for parameter, at in members:
            hosts[parameter] = place_in(host, local(parameter.detach()), at)
            if parameter in context.represented:
                context.represented[parameter].data = hosts[parameter]
        pieces.append(Piece(there, host, of=tuple(parameter for parameter, _ in members)))
    return pieces


def place_in(memory: Tensor, like: Tensor, at: int) -> Tensor:
    """The part of `memory` from byte `at` of its storage on that holds `like`."""
    return memory[at : at + like.nbytes].view(like.dtype).as_strided(like.size(), like.stride(), at // like.element_size())


def _apart(parameters: Sequence[nn.Parameter]) -> None:
    """Each parameter has memory of its own again."""
    for parameter in parameters:
        parameter.data = parameter.detach().clone()
