"""torch.compile around a model or its blocks, with an audit that graphs ran.

Dynamo silently stays eager under a dispatch mode, after too many recompilations, and in code that it cannot
trace. So each call is counted, and whether a compiled graph ran in it; the audit fails for calls without one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memtune.compile import partitioner
from memtune.compile.low_peak_planner import LowPeak
from memtune.device import Capability, platform_of
from memtune.errors import ApplyError
from memtune.runtime import ForwardWrapper
from memtune.technique import lacking

if TYPE_CHECKING:
    from memtune.runtime import Context

BACKENDS: dict[str, str | Callable[..., Any]] = {
    "inductor": "inductor",
    "aot_eager": partitioner.aot_eager,
    "recorded inductor": partial(partitioner.aot_eager, as_inductor=True),
    "recorded aot_eager": partitioner.aot_eager,
}
"""Backend by its name in a config; those of recordings run the same graphs op by op."""
_TORN = 3
"""Ops per graph below which a region with several graphs counts as not compiled."""


@dataclass(frozen=True)
class Compiling:
    """The scope and backend of compilation."""

    scope: str
    """`blocks` or `model`."""
    backend: str
    partitioning: tuple[tuple[str, Any], ...] = ()
    """Settings of `torch._functorch.config` while graphs are made."""


@dataclass
class Region:
    """One compiled forward, with counts of its calls and graph runs."""

    name: str
    module: nn.Module
    calls: int = 0
    runs: int = 0
    eager_calls: int = 0
    """Calls in which no graph ran."""


class CompiledModel:
    """The compiled regions of a model.

    Args:
        model: The model that is trained.
        regions: Qualified names of the modules whose forward is compiled; `''` is the model itself.
        backend: Name of the backend that runs the graphs.
        partitioning: Settings of `torch._functorch.config` while graphs are made.
        change_graph: Changes each graph that Dynamo captured, in place.

    Attributes:
        sizes: Ops of each graph, in the order in which they were made.
        orders: Order of each graph that was reordered for few live bytes; forward and backward are separate.
        backend: Name of the backend that runs the graphs.
    """

    def __init__(
        self,
        model: nn.Module,
        regions: list[str],
        backend: str,
        partitioning: dict[str, Any],
        *,
        change_graph: Callable[[torch.fx.GraphModule], None] = lambda graph: None,
    ) -> None:
        self.regions = [Region(name, model.get_submodule(name)) for name in regions]
        self.partitioning = partitioning
        self.sizes: list[int] = []
        self.orders: list[LowPeak] = []
        self.backend = backend
        self._change_graph = change_graph
        self._running: Region | None = None
        self._complaints: Counter[str] = Counter()

    @property
    def is_whole(self) -> bool:
        """Return whether the model's forward is compiled, not those of its blocks."""
        return [region.name for region in self.regions] == [""]

    def install(self) -> None:
        """Replace each region's forward by a compiled one; graphs are made at its first call."""
        self._complaints = _complaints()
        for region in self.regions:
            # Compile `forward`, not the module: hooks (FSDP2's, a recorder's) stay outside the graph, and
            # names, parameters and state dicts do not change.
            before = region.module.forward
            region.module.forward = ForwardWrapper(
                self._forward(region, torch.compile(before, backend=self._make_graph)), before
            )

    def _forward(self, region: Region, compiled: Callable[..., Any]) -> Callable[..., Any]:
        from torch._dynamo.exc import TorchDynamoException

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Regions may nest: a compiled block that calls another one.
            before, outer, self._running = region.runs, self._running, region
            region.calls += 1
            try:
                return compiled(*args, **kwargs)
            except TorchDynamoException as error:
                raise _cannot_compile(region, error) from error
            finally:
                self._running = outer
                # In `finally`: a call that raised counts as well.
                region.eager_calls += region.runs == before

        return forward

    @cached_property
    def _make_graph(self) -> Callable[..., Any]:
        """Backend for Dynamo; one object, so that equal blocks share their graphs."""
        from torch._dynamo import lookup_backend

        inner = lookup_backend(BACKENDS[self.backend])

        def make_graph(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
            self.sizes.append(
                sum(node.op not in ("placeholder", "output", "get_attr") for node in graph.graph.nodes)
            )
            self._change_graph(graph)
            safe = (
                partitioner.in_inductor()
                if self.backend == "inductor" and self.partitioning
                else nullcontext()
            )
            with partitioner.partition_settings(self.partitioning, self.orders), safe:
                run = inner(graph, inputs, **options)

            def counted(*args: Any) -> Any:
                if self._running is not None:
                    self._running.runs += 1
                return run(*args)

            return counted

        return make_graph

    def _why_eager(self) -> str:
        """Return the reasons that Dynamo has logged since `install`, in a line."""
        for complaint in _complaints() - self._complaints:
            return f"Dynamo says: {' '.join(complaint.partition('Hint:')[0].split())[:300]}"
        return (
            "Dynamo compiles nothing under a dispatch mode, beyond its recompile limit, or in files that it"
            " skips."
        )

    def facts(self) -> dict[str, Any]:
        """Return facts for the audit: numbers of regions, graphs, calls and graph runs."""
        return {
            "compiled_regions": len(self.regions),
            "graphs": len(self.sizes),
            "graph_ops": sum(self.sizes),
            "calls": sum(region.calls for region in self.regions),
            "graph_runs": sum(region.runs for region in self.regions),
        }

    def check_orders(self) -> dict[str, Any]:
        """Return how far the peaks of ordered graphs fell.

        Raises:
            ApplyError: Graphs ran and none was reordered.
        """
        if any(region.runs for region in self.regions) and self.sizes and not self.orders:
            raise ApplyError("No graph of the compiled model was put in another order.", code="MT310")
        lower = [each for each in self.orders if each.peak_bytes < each.program_peak_bytes]
        saved = max((each.program_peak_bytes - each.peak_bytes for each in lower), default=0)
        return {"graphs": len(self.orders), "graphs_lowered": len(lower), "most_bytes_saved": saved}

    def check(self) -> dict[str, Any]:
        """Return `facts` if compilation is in effect.

        Raises:
            ApplyError: A forward was replaced, a call ran without a graph, or the code broke into graphs of a
                few ops.
        """
        for region in self.regions:
            if "forward" not in vars(region.module):
                raise ApplyError(
                    f"{_named(region)} should be compiled, but its forward was replaced.", code="MT313"
                )
            if region.eager_calls:
                raise ApplyError(
                    f"torch.compile stayed eager in {region.eager_calls} of {region.calls} calls of"
                    f" {_named(region)}.",
                    evidence=self._why_eager(),
                    fix="execution: {compile: false}",
                    code="MT310",
                )
        runs, calls = (sum(getattr(region, what) for region in self.regions) for what in ("runs", "calls"))
        # More runs than calls: Dynamo has broken the code into several graphs.
        if runs > calls and sum(self.sizes) < _TORN * len(self.sizes):
            raise ApplyError(
                f"torch.compile broke the code into {len(self.sizes)} graphs of"
                f" {sum(self.sizes) / len(self.sizes):.1f} ops.",
                evidence=self._why_eager(),
                fix="execution: {compile: false}",
                code="MT310",
            )
        return self.facts()


def compile_regions(context: Context, scope: str, backend: str) -> CompiledModel:
    """Compile the blocks or the model of `context`; the audit checks that graphs ran.

    Raises:
        ApplyError: There are no blocks, the model is compiled already, or the backend has no compiler for
            its device.
    """
    compiled_before = [name for name, module in context.model.named_modules() if _is_compiled(module)]
    if compiled_before:
        raise ApplyError(
            f"{compiled_before[0] or 'the model'} is compiled already.",
            fix="leave torch.compile to memtune, or set  execution: {compile: false}",
            code="MT310",
        )
    if scope == "blocks" and not context.blocks:
        raise ApplyError(
            "execution: {compile: blocks} finds no blocks in this model.",
            fix="compile: model, or say which they are: def blocks(model) in model.py",
            code="MT310",
        )
    needs = (Capability.INDUCTOR,) if backend == "inductor" else ()
    if (reason := lacking(platform_of(context.device), needs)) is not None:
        raise ApplyError(
            f"execution: {{compile: {scope}}} cannot be used here: {reason.text}.",
            fix="execution: {compile: false}, or compile_backend: aot_eager",
            code="MT310",
        )
    compiled = CompiledModel(context.model, context.blocks if scope == "blocks" else [""], backend, {})
    compiled.install()
    context.checks["execution"] = compiled.check
    return compiled


def _is_compiled(module: nn.Module) -> bool:
    # `module.compile()` sets the first, `torch.compile(module)` the second.
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _named(region: Region) -> str:
    return region.name or "the model"


def _complaints() -> Counter[str]:
    """Return Dynamo's counted reasons for code that it did not follow, in this process."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"]) + Counter(counters["unimplemented"])


def _cannot_compile(region: Region, error: Exception) -> ApplyError:
    # Dynamo wraps the error of the compiler behind it.
    error = getattr(error, "inner_exception", error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ApplyError(
        f"torch.compile fails in {_named(region)}: {lines[0] if lines else type(error).__name__}",
        evidence=next((line for line in lines[1:] if "rror" in line), ""),
        fix="execution: {compile: false}, or  compile_backend: aot_eager  where no compiler works",
        code="MT319",
    )
