from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from memtune.runtime.context import Snapshot


def test_snapshot_restore_keeps_hook_handles_valid() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    seen: list[str] = []
    handles = [
        model[0].register_forward_hook(lambda *_: seen.append("forward")),
        optimizer.register_step_post_hook(lambda *_: seen.append("step")),
    ]
    state, moments = optimizer.state, list(optimizer.state.values())
    kept = [dict(each) for each in moments]

    snapshot = Snapshot(model, optimizer)
    model[0].register_forward_hook(lambda *_: seen.append("of a technique"))
    model[1]._forward_hooks = OrderedDict()
    model[1].extra = 1
    optimizer.extra = 1  # type: ignore[attr-defined]
    moments[0].clear()
    optimizer.state = type(state)(dict)
    snapshot.restore()

    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert seen == ["forward", "step"]
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert seen == ["forward", "step"]
    assert optimizer.state is state
    assert [each.keys() for each in moments] == [each.keys() for each in kept]
    assert not hasattr(model[1], "extra")
    assert not hasattr(optimizer, "extra")
