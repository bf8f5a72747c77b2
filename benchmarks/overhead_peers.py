"""Stock and hand-written forms of offload and of a loss in parts, for `overhead.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from overhead_cases import Case, Step
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu


def saved_on_cpu(case: Case) -> Step:
    """Return the step whose saved tensors are copied out and back by torch's own hooks."""
    model, loss, batch = case.build(), case.source.loss, case.batch
    parameters = list(model.parameters())

    def run() -> None:
        with save_on_cpu():
            out = loss(model, batch)
        out.backward()
        for each in parameters:
            each.grad = None

    return run


def saved_copied(case: Case, min_bytes: int) -> Step:
    """Return the step whose saved activations of at least `min_bytes` are copied out and back by hooks by
    hand.

    `save_on_cpu` copies no tensor that is on the CPU already, so on a CPU it moves nothing; this moves the
    bytes that `copy_out` moves, those of the blocks' saved tensors, each storage once, without weights.
    """
    model, loss, batch = case.build(), case.source.loss, case.batch
    parameters = list(model.parameters())
    weights = {each.untyped_storage()._cdata for each in parameters}
    copies: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def pack(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in weights or storage.nbytes() < min_bytes:
            return tensor.detach()  # a node that holds its own output would be a reference cycle
        if key not in copies:
            n = storage.nbytes() // tensor.itemsize
            copies[key] = tensor.detach(), [tensor.detach().as_strided((n,), (1,), 0).clone()]
        return copies[key][1], tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        copy: list[Tensor]
        copy, size, stride, offset = packed
        if len(copy) == 1:  # the first view brings it back for all
            copy.append(copy[0].clone())
        return copy[1].as_strided(size, stride, offset)

    def hooked(forward: Any) -> Any:
        def run(*args: Any) -> Any:
            copies.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return forward(*args)

        return run

    for name in case.blocks:
        block = model.get_submodule(name)
        block.forward = hooked(block.forward)

    def run() -> None:
        loss(model, batch).backward()
        for each in parameters:
            each.grad = None

    return run


class _PartsOfLoss(torch.autograd.Function):
    """Cross-entropy of a linear head, part by part; gradients are computed in forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, parts: int) -> Tensor:
        total, d_weight, d_hidden = hidden.new_zeros(()), torch.zeros_like(weight), torch.empty_like(hidden)
        pieces = zip(hidden.chunk(parts), targets.chunk(parts), d_hidden.chunk(parts), strict=True)
        for rows, wanted, d_rows in pieces:
            logits = rows @ weight.t()
            log_p = torch.log_softmax(logits, -1)
            total += F.nll_loss(log_p, wanted, reduction="sum")
            d_logits = log_p.exp_()
            d_logits[torch.arange(len(wanted)), wanted] -= 1.0
            torch.mm(d_logits, weight, out=d_rows)
            d_weight.addmm_(d_logits.t(), rows)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.rows = len(hidden)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        scale = gradients[0] / ctx.rows
        return d_hidden * scale, d_weight * scale, None, None


def chunked_loss(case: Case, parts: int) -> Step:
    """Return the step with head and loss in parts."""
    model: Any = case.build()
    tokens, targets = case.batch
    parameters, head = list(model.parameters()), model.head
    model.head = nn.Identity()

    def run() -> None:
        hidden = model(tokens).flatten(0, 1)
        _PartsOfLoss.apply(hidden, head.weight, targets.flatten(), parts).backward()  # type: ignore[no-untyped-call]
        for each in parameters:
            each.grad = None

    return run


def host_adam(case: Case, *, in_backward: bool = False) -> Step:
    """Return the step that updates copies of the weights on the host: gradients out, AdamW, weights back.

    `in_backward`: gradients are copied and dropped by hooks as soon as they are accumulated, as torchao's
    `CPUOffloadOptimizer` does.
    """
    model, loss, batch = case.build(), case.source.loss, case.batch
    device = list(model.parameters())
    host = [each.detach().clone() for each in device]
    for each in host:
        each.grad = torch.empty_like(each)
    optimizer = torch.optim.AdamW(host, lr=1e-3, fused=True)
    if in_backward:

        def out(copy: Tensor, parameter: Tensor) -> None:
            assert copy.grad is not None
            assert parameter.grad is not None
            copy.grad.copy_(parameter.grad)
            parameter.grad = None

        for copy, parameter in zip(host, device, strict=True):
            parameter.register_post_accumulate_grad_hook(partial(out, copy))

    def run() -> None:
        loss(model, batch).backward()
        with torch.no_grad():
            if not in_backward:
                for copy, parameter in zip(host, device, strict=True):
                    copy.grad.copy_(parameter.grad)  # type: ignore[union-attr, arg-type]
                    parameter.grad = None
            optimizer.step()
            for copy, parameter in zip(host, device, strict=True):
                parameter.copy_(copy)

    return run


def block_fetching(case: Case) -> Step:
    """Return the step whose blocks' weights are fetched by module hooks for forward and for backward, with
    AdamW on the host.
    """
    model, loss, batch = case.build(), case.source.loss, case.batch
    host: dict[nn.Parameter, Tensor] = {}

    def fetch(module: nn.Module, *_: Any) -> None:
        for each in module.parameters():
            each.data = host[each].clone()

    def drop(module: nn.Module, *_: Any) -> None:
        for each in module.parameters():
            each.data = host[each]

    def gradient(parameter: Tensor) -> None:
        copy = host[parameter]  # type: ignore[index]
        assert parameter.grad is not None
        copy.grad = parameter.grad.clone()
        parameter.grad = None

    for parameter in model.parameters():
        host[parameter] = parameter.detach().clone()
    for name in case.blocks:
        block = model.get_submodule(name)
        block.register_forward_pre_hook(fetch)
        block.register_forward_hook(drop)
        block.register_full_backward_pre_hook(fetch)
        block.register_full_backward_hook(drop)
    for parameter in host:
        parameter.register_post_accumulate_grad_hook(gradient)
    optimizer = torch.optim.AdamW(list(host.values()), lr=1e-3, fused=True)

    def run() -> None:
        loss(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter, copy in host.items():
                if parameter.data_ptr() != copy.data_ptr():
                    parameter.copy_(copy)

    return run


def forward_alone(case: Case) -> dict[str, Step]:
    """Return forwards without gradients under `l2l` and accelerate's `cpu_offload`, which cannot train; empty
    if it is not installed.
    """
    try:
        from accelerate import cpu_offload
    except ImportError:
        return {}
    theirs = case.build()
    cpu_offload(theirs, execution_device=torch.device("cpu"))
    mine = case.tuned_model("offload.states", "l2l")

    def forward(model: nn.Module) -> Step:
        def run() -> None:
            with torch.no_grad():
                model(case.batch[0])

        return run

    return {
        "plain, forward alone": forward(case.build()),
        "accelerate cpu_offload, forward alone": forward(theirs),
        "l2l, forward alone": forward(mine),
    }
