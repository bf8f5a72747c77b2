"""The user's optimizer on SSD with updates overlapped with backward: each parameter is updated as its
gradient arrives.

Extends `offload.optimizer.grad_offload` and `offload.ssd_states.ssd_optimizer`; the pass
`offload.ssd_states.ssd_overlapped_pass` follows these rules op by op:

Rule 1. In the last micro-batch, reads of a bucket's records start just before the D2H copies of its
  gradients.
Rule 2. When a bucket has arrived, the updates of the bucket before it are awaited; its weights are copied to
  the device and its records written one by one, each gradient freed in between. Then the bucket's own updates
  start on the update thread. So one bucket is read, one is updated and `WRITES_IN_FLIGHT` records are written
  at a time, which bounds host memory.
Rule 3. Weights change on the device during backward, so no op of backward may read a weight after its
  gradient is complete; the recorded step is checked for it. A gradient that is ready twice in one backward (a
  reentrant checkpoint around parts that share a weight) was incomplete the first time, and is refused.
Rule 4. `optimizer.step()` finishes the last bucket and updates the rest: the sentinel gradient, and all
  parameters in loops other than `Tuned.step`'s. When it returns, all is written, and kept as one step if
  steps are kept: backward writes to other slots than those of the last complete step.
Rule 5. Loading state between backward and `step` waits for running updates and drops them. Parameters updated
  by then have the loaded values and no gradient; `step` updates only the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

import memtune.ssd.ssd_tensors  # noqa: F401  (defines torch.ops.memtune, to_ssd and from_ssd there too)
from memtune.errors import ApplyError
from memtune.offload.optimizer import on_update_thread, write_during_update_error
from memtune.offload.ssd_states.ssd_optimizer import SsdOptimizer, new_weight
from memtune.runtime import HOST, Context, local, tier, transfer
from memtune.ssd import Piece


class SsdOverlappedOptimizer:
    """Updates an optimizer's weights and state on SSD from the gradients that `GradientOffload` delivers.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        master: bfloat16 parameters have float32 masters.
        keep: Every complete step is kept, as in `SsdOptimizer`.

    Raises:
        ApplyError: The native update does not support the optimizer or a parameter's type.
        EnvironmentFault: There is no room on SSD; names the parameter.
    """

    def __init__(self, context: Context, *, master: bool, keep: bool = False) -> None:
        self._on_ssd = on_ssd = SsdOptimizer(context, master=master, read_ahead=0, keep=keep)
        on_ssd.update_all, on_ssd.settle, on_ssd.drop = self._update_all, self._settle, self._drop
        self._piece_of = {piece.device: (seed, piece) for seed, piece in enumerate(on_ssd.pieces)}
        self._reading: dict[nn.Parameter, Tensor] = {}
        self._updating: list[tuple[Piece, Tensor, Tensor]] = []  # (record, its values on the host, gradient)
        self._futures: list[Future[None]] = []
        self._used: set[nn.Parameter] = set()  # updated in the backward of this step
        self.n_early = 0

    def start_deferred(self) -> None:
        """Adopt external writes: updates in backward start from the user's values, and none is deferred."""
        self._on_ssd.stale.update(self._on_ssd.writes.take_external())

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start reading the records of `parameters`, whose gradients are about to be offloaded."""
        for parameter in parameters:
            if (left := self._reading.pop(parameter, None)) is not None:  # of a backward that raised
                transfer.abandon(left)
                del left
            self._reading[parameter] = self._on_ssd.load(self._piece_of[parameter][1])

    @torch.no_grad()
    def update(self, parameters: Iterable[nn.Parameter], *, at_once: bool) -> None:
        """Finish the bucket before and start the updates of `parameters` on the update thread.

        Args:
            parameters: A bucket whose gradients have arrived.
            at_once: Not supported: records are read first.

        Raises:
            ApplyError: A gradient was ready twice in one backward.
        """
        assert not at_once
        self._settle()
        with tier(HOST), on_update_thread(self._futures):
            for parameter in parameters:
                seed, piece = self._piece_of[parameter]
                if parameter in self._used:
                    raise _ready_twice_error(piece.name)
                self._used.add(parameter)
                assert piece.held.grad is not None
                # The queue holds the only references from here on: `_settle` frees record and gradient one by
                # one.
                host, gradient, piece.held.grad = self._reading.pop(parameter), piece.held.grad, None
                self._updating.append((piece, host, gradient))
                self._on_ssd.update(piece, host, gradient, seed)

    def _wait(self) -> None:
        while self._futures:
            self._futures.pop(0).result()

    @torch.no_grad()
    def _settle(self) -> None:
        """Wait for running updates; copy their weights to the device and start writing their records."""
        self._wait()
        while self._updating:
            piece, host, gradient = self._updating.pop(0)
            up = new_weight(piece, host, gradient)
            torch.ops.memtune.copy_to_device_(local(piece.device), up)
            self._on_ssd.writes.note_write(piece.device)
            # Freed before the write starts: the memory of a bucket shrinks record by record.
            del gradient, up
            self._on_ssd.write(piece, host)

    @torch.no_grad()
    def _drop(self) -> None:
        """Drop running updates, before what was loaded is written (Rule 5)."""
        self._wait()
        # Awaited, not dropped: reads in flight still write this memory.
        left = [host for _, host, _ in self._updating] + list(self._reading.values())
        self._updating.clear()
        self._reading.clear()
        while left:
            transfer.abandon(left.pop())
        self._on_ssd.finish_writes()
        self._used.clear()

    def _update_all(self) -> None:
        """Finish the updates of backward and run the others (Rule 4).

        Raises:
            ApplyError: User code has written a weight after its update.
        """
        # Before the last updates reach the device, where they would replace the write.
        written = self._on_ssd.writes.take_external()
        if not self._used.isdisjoint(written):
            raise write_during_update_error(len(written))
        self._on_ssd.stale.update(written)
        self._settle()
        self.n_early = len(self._used)
        self._used.clear()
        self._on_ssd.update_in_step()

    def check(self) -> dict[str, Any]:
        """Return bytes on SSD and the number of parameters that backward updated, for the audit.

        Raises:
            ApplyError: Some state is not on SSD.
        """
        return self._on_ssd.check() | {"updated_in_backward": self.n_early}


def _ready_twice_error(name: str) -> ApplyError:
    return ApplyError(
        f"The gradient of {name} was ready twice in one backward.",
        evidence=(
            "Its weight was updated after the first time, from a part of the gradient: this run cannot"
            " continue."
        ),
        fix="torch.utils.checkpoint with use_reentrant=False, or  offload: {states: {kind: zero_infinity}}",
        code="MT367",
    )
