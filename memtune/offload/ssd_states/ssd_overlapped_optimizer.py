"""The user's optimizer on SSD, each parameter updated inside backward as its gradient arrives
(`offload.optimizer.grad_offload`).

Five rules on top of those of `gradients_down` and `ssd_optimizer`, which the pass
`offload.ssd_states.ssd_overlapped_pass` follows op by op:

Rule 1. In the last micro-batch, reads of a bucket's pieces start just before its gradients go down: both are
on their way while
        backward goes on.
Rule 2. When a bucket has arrived, updates of its pieces begin on a thread of their own, beside backward.
First the updates of the
        bucket before it are awaited: weights go up, pieces are written, one after the other, each gradient
        let go in between. So one bucket is read, one updated and `WRITES` pieces are written at a time, and
        host memory holds no more.
Rule 3. Weights go up while backward goes on: no op of backward may need one whose gradient is complete, which
the pass looks for
        in the recorded step. A gradient that lands a second time in one backward (a reentrant checkpoint
        around parts that share a weight) was not complete the first time, and is refused.
Rule 4. `optimizer.step()` completes the last bucket, and updates what backward has not: the witness of
`gradients_down`, and all
        parameters in a loop that is not `Tuned.step`'s. When it returns, everything is written, and kept as
        one step where steps
        are: what backward has written is in other slots than the last complete step, which is there until
            then.
Rule 5. State that is loaded between backward and `step` stays: updates under way are waited for and dropped.
What backward has
        updated by then is what was loaded, and its gradient is gone; only the others, of Rule 4, are still
        updated in `step`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

import memtune.ssd.ssd_tensors  # noqa: F401  (defines torch.ops.memtune, to_ssd and from_ssd there too)
from memtune.errors import ApplyError
from memtune.offload.optimizer import on_update_thread
from memtune.offload.ssd_states.ssd_optimizer import SsdOptimizer
from memtune.runtime import HOST, Context, local, tier, transfer
from memtune.ssd import Piece


class SsdBesideBackward(SsdOptimizer):
    """Moves an optimizer's weights and state to SSD, and updates there what `GradientsDown` hands over.

    Args:
        context: Its model and optimizer; the optimizer is rebound in place.
        master: bfloat16 parameters have float32 masters.
        keep: Every complete step is kept, as `SsdOptimizer` has it.

    Raises:
        ApplyError: The optimizer or a parameter's type is none that the native update knows.
        EnvironmentFault: There is no room on SSD; says for which parameter.
    """

    def __init__(self, context: Context, *, master: bool, keep: bool = False) -> None:
        super().__init__(context, master=master, ahead=0, keep=keep)
        self._piece_of = {piece.device: (seed, piece) for seed, piece in enumerate(self._pieces)}
        self._reading: dict[nn.Parameter, Tensor] = {}
        self._updating: list[tuple[Piece, Tensor, Tensor]] = []  # the piece, in host memory, and its gradient
        self._under_way: list[Future[None]] = []
        self._used: set[nn.Parameter] = set()  # updated in the backward of this step
        self.n_early = 0

    def start_late(self) -> None:
        """No update is late; updates in backward begin with what others have written."""
        self._take_writes()

    def expect(self, parameters: Iterable[nn.Parameter]) -> None:
        """Rule 1."""
        for parameter in parameters:
            if (
                left := self._reading.pop(parameter, None)
            ) is not None:  # by a backward that was not completed
                transfer.abandon(left)
                del left
            self._reading[parameter] = torch.ops.memtune.from_ssd(self._piece_of[parameter][1].ssd)

    @torch.no_grad()
    def update(self, parameters: Iterable[nn.Parameter], *, at_once: bool) -> None:
        """Rule 2; `at_once` is not for what comes from SSD.

        Raises:
            ApplyError: Rule 3.
        """
        assert not at_once
        self._settle()
        with tier(HOST), on_update_thread(self._under_way):
            for parameter in parameters:
                seed, piece = self._piece_of[parameter]
                if parameter in self._used:
                    raise _landed_twice(piece.name)
                self._used.add(parameter)
                assert piece.held.grad is not None
                host, gradient, piece.held.grad = self._reading.pop(parameter), piece.held.grad, None
                self._updating.append((piece, host, gradient))
                self._on_host(piece, host, gradient, seed)

    def verify(self, only: Container[nn.Parameter] | None = None) -> None:
        """As `SsdOptimizer.verify`, of what is on SSD once all that is on the way has been written."""
        self._settle()
        super().verify(only)

    @torch.no_grad()
    def _settle(self) -> None:
        """Rule 2: what is being updated is awaited, goes up and is written."""
        while self._under_way:
            self._under_way.pop(0).result()
        while self._updating:
            piece, host, gradient = self._updating.pop(0)
            up = piece.parts(host)[0] if gradient.dtype is torch.float32 else gradient
            torch.ops.memtune.copy_to_device_(local(piece.device), up)
            self._writes.wrote(piece.device)
            del gradient, up
            self._write(piece, host)

    @torch.no_grad()
    def _reload(self) -> None:
        """Rule 5."""
        while self._under_way:
            self._under_way.pop(0).result()
        left = [host for _, host, _ in self._updating] + list(self._reading.values())
        self._updating.clear()
        self._reading.clear()
        while left:
            transfer.abandon(left.pop())
        while self._writing:
            self._finish_oldest()
        self._used.clear()
        super()._reload()

    def _update_all(self) -> None:
        """Rule 4."""
        self._settle()
        self.n_early = len(self._used)
        self._used.clear()
        super()._update_all()

    def check(self) -> dict[str, Any]:
        """Bytes on SSD, and how many parameters the last backward updated.

        Raises:
            ApplyError: Some state is elsewhere.
        """
        return {**super().check(), "updated_in_backward": self.n_early}


def _landed_twice(name: str) -> ApplyError:
    return ApplyError(
        f"The gradient of {name} was put in place twice in one backward.",
        evidence="It was updated after the first time, with a part of its gradient: this run cannot go on.",
        fix="torch.utils.checkpoint with use_reentrant=False, or  offload: {states: {kind: zero_infinity}}",
        code="MT367",
    )
