"""Predictions of a case's peak by other tools, on this machine and without a GPU; None where a tool has none.

MemTracker (`torch.distributed._tools`) observes two steps on fake tensors. It supports recompute by torch's
own `checkpoint_wrapper` (`full`, `every_nth`), and no offload. SACEstimator of the same package predicts
memory and time of single ops, to choose what to recompute, but no peak: it has no column. Accelerate's
`estimate-memory` takes a model's bytes and dtype, neither batch nor settings: float32 weights, gradients and
Adam's two moments, four times the model. Its own two functions are called.
"""

from __future__ import annotations

from typing import Any

import torch
from predict_grid import Case
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._pytree import tree_leaves, tree_map_only

from memtune.workload.workload import Workload

_EVERY = {"none": 0, "full": 1, "every_nth": 2}
"""Of how many blocks one is wrapped; 0: none."""


def mem_tracker(workload: Workload, case: Case) -> tuple[int | None, str]:
    """Return MemTracker's peak bytes of two steps, or None and the error; both None if torch has no such
    setting.
    """
    if case.recompute not in _EVERY or case.offload != "none":
        return None, ""
    batch = workload.make_batch(case.batch)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        model = workload.build_model().train()
        _wrap(model, workload.find_blocks(model), _EVERY[case.recompute])
        optimizer = workload.make_optimizer(model)
        batch = tree_map_only(torch.Tensor, fake.from_tensor, batch)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *tree_leaves(batch))
        try:
            with tracker:
                for _ in range(2):
                    workload.loss(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    tracker.reset_mod_stats()
        except Exception as error:  # whatever another tool raises on a model is what there is to say of it
            cause = error.__cause__ or error
            return None, f"{type(cause).__name__}: {cause}".splitlines()[0]
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]), ""


def _wrap(model: nn.Module, blocks: list[str], every: int) -> None:
    for name in blocks[::every] if every else ():
        above, _, last = name.rpartition(".")
        model.get_submodule(above).register_module(last, checkpoint_wrapper(model.get_submodule(name)))


def accelerate_bytes(workload: Workload) -> int | None:
    """Return the "Training using Adam" figure of `accelerate estimate-memory` for float32; None without
    accelerate.
    """
    try:
        from accelerate.commands.estimate import estimate_training_usage
        from accelerate.utils import calculate_maximum_sizes
    except ImportError:
        return None
    with torch.device("meta"):
        model = workload.build_model()
    usage: dict[str, Any] = estimate_training_usage(calculate_maximum_sizes(model)[0], "float32")
    return int(max(usage.values()))
