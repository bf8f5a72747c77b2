"""FSDP2 after a forward or a backward that raised, and was caught.

It keeps what it was to do at the end of that backward, and gradients that were not reduced: the next steps would be wrong without
a word. A forward of the whole model that begins outside of a backward finds that, and has FSDP2 forget it. What was reduced
before is the user's to clear (`zero_grad`), as in any loop. All ranks must have raised in one place.
"""

from __future__ import annotations

from typing import Any

import torch

from memtune.errors import ApplyError
from memtune.runtime.context import Context
from memtune.runtime.hooks import StaysBehind


def go_on_after_errors(context: Context) -> None:
    """Have the model of `context`, which FSDP2 divides, forget what raised. Its forward raises ApplyError where torch cannot."""
    model: Any = context.model

    def forward_begins() -> None:
        state = model._get_fsdp_state()._state_ctx
        raised = state.post_backward_final_callback_queued or state.iter_forward_root is not None
        if not raised or torch._C._current_graph_task_id() != -1:
            return
        if not hasattr(model, "reset_iter_state"):
            raise ApplyError(
                "A forward or a backward has raised, and FSDP2 of this torch cannot go on after it.",
                evidence=f"torch {torch.__version__} keeps what it was to do at the end of that backward.",
                fix="torch 2.13 or later; or begin again, from the last checkpoint", code="MT368",
            )  # fmt: skip
        for each in (each for one in state.all_states for each in _parameters(one)):
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None
        model.reset_iter_state()

    context.undo.callback(model.register_forward_pre_hook(StaysBehind(forward_begins), prepend=True).remove)


def _parameters(state: Any) -> list[Any]:
    return [] if state._fsdp_param_group is None else state._fsdp_param_group.fsdp_params
