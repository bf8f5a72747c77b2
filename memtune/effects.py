"""Effects of a technique on a training step that techniques of other axes must know.

`Technique.effects` returns one frozen `Effects`. The rules in `search_spaces._support`, `apply` and the
passes read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Averages = Literal["none", "blocks", "all"]
Calls = Literal["plain", "grad_hooks", "block_hooks", "expert_hooks", "parts", "schedule"]
Moves = Literal["none", "block", "chunk", "page", "tile", "expert"]
Activations = Literal["none", "uniform", "stage", "block", "model", "tensor", "graph"]
Shards = Literal["none", "replicas", "optimizer", "gradients", "parameters", "nested"]

DISPATCH_MODE = "it observes ops through a dispatch mode, which compiled code bypasses"
SCHEDULE = "a recorded schedule replaces the model's code, compiled or not"
GRADIENTS_AT_END = "compiled graphs return all gradients at their end, not one by one"
"""Reasons for `Effects.eager_only` that several techniques share."""


@dataclass(frozen=True)
class Effects:
    """Effects of a technique with its present knobs; by default those of one that does nothing."""

    averages: Averages = "none"
    """Gradients that it averages over ranks itself before it uses them; DDP's buckets exclude them."""
    calls: Calls = "plain"
    """The calls of the model that it acts on or replaces.

    `grad_hooks`: it takes each gradient when it is ready, in backward; DDP first all-reduces each gradient by
    itself. `block_hooks`, `expert_hooks`: it loads parameters before the calls of these modules and frees
    them after. `parts`: modules of blocks run over parts of their tokens, each part with its own autograd
    graph. `schedule`: a schedule runs forward and backward of the model, or of each block, instead of the
    model's code.
    """
    layer_major: bool = False
    """True if packs of blocks run one after the other, each over all micro-batches."""
    moves: Moves = "none"
    """Unit in which parameters are offloaded and reloaded during a step."""
    parameters_on: Literal["device", "host", "ssd"] = "device"
    """Tier of blocks' parameters between uses, on which those of a deferred model, or on CPU, start."""
    activations: Activations = "none"
    """Scope in which it decides which activations are kept, recomputed or offloaded.

    `uniform`: one rule for all blocks of a rank; `stage`: per pipeline stage; `block`: block by block over
    the whole model; `model`: within one budget of the whole model; `tensor`: tensor by tensor; `graph`: in
    compiled graphs.
    """

    shards: Shards = "none"
    """Sharding by `sharding.states`: replicas, ZeRO 1 to 3, or a group for each state (`nested`)."""
    reduces: Literal["none", "ready", "step"] = "none"
    """Time at which `sharding.states` completes a gradient: in backward, with the reduction of its bucket or
    unit (`ready`), or with another reduction once per step (`step`).
    """
    finds_unused: bool = False
    """True if it expects parameters without a gradient, which may differ between ranks."""
    every_micro_batch: bool = False
    """True if it gathers or reduces in every micro-batch, also on the stages of a pipeline."""
    among_copies: bool = False
    """True if it works among the ranks that hold the same part of a model, and sees only these as `ranks`."""
    layers: Literal["whole", "shared", "stages"] = "whole"
    """Parallelism: ranks compute layers together (`shared`), or have blocks of their own (`stages`)."""

    eager_only: str = ""
    """Reason why it does not work with torch.compile (a dispatch mode, the model's own ops), or ''."""
    host_share: float = 0.0
    """Least fraction of the optimizer state in host memory, for any plan, which `apply` checks."""
    keeps_steps: bool = False
    """True if a run resumes from its last step on SSD, of which both copies exist until a new one."""

    @property
    def follows_calls(self) -> bool:
        """True if it acts on calls of blocks or on ready gradients."""
        # A schedule of the whole model makes no such calls; a schedule of each block leaves them in place.
        return self.calls in ("grad_hooks", "block_hooks")


NO_EFFECTS = Effects()
