"""Effects of a technique on a training step that techniques of other axes must know: declared once, read by
rules.

`Technique.effects` returns one frozen value; `search_spaces._support` holds the rules on it, `apply` and the
passes read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Averages = Literal["none", "experts", "blocks", "all"]
Calls = Literal["plain", "grad_hooks", "block_hooks", "expert_hooks", "parts", "schedule"]
Moves = Literal["none", "block", "chunk", "page", "tile", "expert"]
Activations = Literal["none", "uniform", "stage", "block", "tensor", "graph"]
Shards = Literal["none", "replicas", "optimizer", "gradients", "parameters", "nested"]
Span = tuple[int, int]
"""First block and the one after the last."""
Packing = Callable[[Any, int], tuple[Span, ...]]
"""From the technique's plan and the number of blocks to the packs."""

DISPATCH_MODE = "it sees which op runs through a dispatch mode"
SCHEDULE = "a frozen schedule takes the place of the model's code, compiled or not"
GRADIENTS_AT_END = "compiled graphs hand their gradients over at their end, not as they are made"
"""Reasons for `Effects.eager_only` of several techniques."""


@dataclass(frozen=True)
class Effects:
    """The effects of a technique with its knobs as they are; the defaults are those of a technique that does
    nothing.
    """

    averages: Averages = "none"
    """Gradients that it averages over ranks itself, before it uses them; DDP leaves them out of its buckets.
    """
    calls: Calls = "plain"
    """The calls of the model that it acts on or replaces.

    `grad_hooks`: it takes each gradient when it is ready, in backward; DDP all-reduces each by itself before
    that. `block_hooks`, `expert_hooks`: it brings parameters in before the calls of these modules and frees
    them after. `parts`: modules of blocks run over parts of their tokens, each with an autograd graph of its
    own. `schedule`: the forward and backward of the model, or of each block, run by a schedule in place of
    the model's code.
    """
    packs: Packing | None = None
    """Set where it runs layer-major (each pack of blocks over all micro-batches, then the next pack): the
    packs that run backward, each as its first block and the one after its last, in forward order.
    """
    moves: Moves = "none"
    """Unit in which parameters are offloaded and reloaded while a step runs."""
    activations: Activations = "none"
    """Scope in which it decides what of the activations is kept, recomputed or moved: by one rule for
    whatever blocks a rank has (`uniform`), for each pipeline stage, block by block for the whole model,
    tensor by tensor, or in compiled graphs.
    """

    shards: Shards = "none"
    """Of `sharding.states`: replicas, ZeRO 1 to 3, or each state over a group of its own inside the next
    one's (`nested`).
    """
    reduces: Literal["none", "ready", "step"] = "none"
    """Of `sharding.states`: a gradient has its final value with the reduction of its bucket or unit inside
    backward (`ready`), or after another reduction once per step.
    """
    finds_unused: bool = False
    """It expects parameters that get no gradient, which may differ from rank to rank."""
    every_micro_batch: bool = False
    """It gathers or reduces in every micro-batch, also on the stages of a pipeline."""
    among_copies: bool = False
    """It works among the ranks that hold the same part of a model, and sees only these as `ranks`."""
    layers: Literal["whole", "shared", "stages"] = "whole"
    """Of `sharding.parallel`: ranks compute layers together, or each has the blocks of its pipeline stages.
    """

    eager_only: str = ""
    """Why it does not work with torch.compile (it needs a dispatch mode, or the model's own ops); empty where
    it does.
    """
    host_share: float = 0.0
    """Least part of the optimizer's state in host memory, whatever the plan says; `apply` checks that it has
    room.
    """
    keeps_steps: bool = False
    """A run is resumed from its last step on SSD; until the new run's first step both are there."""

    @property
    def layer_major(self) -> bool:
        """Whether packs of blocks run one after the other, each over all micro-batches."""
        return self.packs is not None

    @property
    def follows_calls(self) -> bool:
        """Whether it acts on calls of blocks or on gradients when they are ready.

        A schedule of the whole model makes no such calls; a schedule of each block leaves them in place.
        """
        return self.calls in ("grad_hooks", "block_hooks")


NO_EFFECTS = Effects()
