"""The user's code up to the first block, and the chain that follows: Rule 1 of `runtime.order`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memtune.runtime import loop
from memtune.runtime.block_calls import BlockCalls
from memtune.runtime.boundaries import nothing_saved
from memtune.runtime.chain import Chain, Given, Look, no_chain
from memtune.runtime.pack_store import PackStore


class _Stop(BaseException):
    """The user's code has come to the first block."""


class BeforeBlocks:
    """What the first block is given in each micro-batch, and how the others follow.

    Args:
        model: The user's.
        names: Of its blocks.
        calls: Of the same blocks.
        store: Where their parameters are.
    """

    def __init__(self, model: nn.Module, names: list[str], calls: BlockCalls, store: PackStore) -> None:
        self._model, self._names, self._calls, self._store = model, names, calls, store
        self._chains: dict[Any, Chain] = {}
        self.chain_of: dict[int, Chain] = {}
        """By micro-batch."""
        self.called_as: dict[int, Given] = {}
        """By micro-batch: how the first block was called, without tensors."""
        self.shared: dict[int, list[Any]] = {}
        """By micro-batch: what the first block is given and later ones as well."""

    def run(
        self,
        index: int,
        model: nn.Module,
        loss_function: loop.LossFunction,
        batch: Any,
        device: torch.device,
        upload: loop.Upload,
    ) -> tuple[Any, ...]:
        """What the first block is to be given in micro-batch `index`.

        Raises:
            ApplyError: The blocks are no chain.
        """
        taken: list[Given] = []

        def stop(block: int, forward: Any, args: Any, kwargs: Any) -> Any:
            taken.append(Given.of(args, kwargs))
            raise _Stop

        with self._calls.answered_by(stop), nothing_saved():
            try:
                loss_function(model, upload(batch, device))
            except _Stop:
                pass
        if not taken:
            raise no_chain(f"{self._names[0]} does not run")
        given = taken.pop()
        if given.key not in self._chains:
            self._chains[given.key] = self._look(lambda: loss_function(model, upload(batch, device)))
        chain = self.chain_of[index] = self._chains[given.key]
        self.called_as[index] = Given((), given.spec, given.autocast)
        later = {where for link in chain[1:] for kind, where in link.sources if kind == "first"}
        self.shared[index] = [leaf if at in later else None for at, leaf in enumerate(given.leaves)]
        return given.leaves

    def _look(self, run: Callable[[], Any]) -> Chain:
        look, store = Look(self._model, self._names), self._store

        def watched(block: int, forward: Any, args: Any, kwargs: Any) -> Any:
            store.fetch_one(block)
            try:
                return look.block(block, forward, args, kwargs)
            finally:
                store.release_one(block)

        with self._calls.answered_by(watched), nothing_saved():
            return look.chain(run)

    def forget(self, index: int | None = None) -> None:
        """Let go of micro-batch `index`, or of all."""
        for each in (self.chain_of, self.called_as, self.shared):
            if index is None:
                each.clear()
            else:
                each.pop(index, None)
