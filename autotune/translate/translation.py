"""Translate a Step recorded on CPU into the Step of a CUDA run, with the data of `translation_table`.

Calls that CUDA runs as one kernel are fused: their CPU ops become one op in forward and one in backward, and
their saved tensors become those of the kernel. The optimizer phase becomes that of foreach kernels, cuBLAS's
workspaces exist from the start, scratch of CPU kernels is removed. Ops that the table does not know are kept
and named in the notes.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memtune.autotune.translate import translation_table as table
from memtune.autotune.translate.composed_attention import composed_attention
from memtune.autotune.translate.convolution_workspace import estimated_workspaces
from memtune.autotune.translate.cuda_norms import use_cudnn, widen_statistics
from memtune.autotune.translate.foreach_pass import counters_on_host, with_foreach
from memtune.autotune.translate.kernel_fusion import FusedKernel, KernelFusion
from memtune.device import Capability
from memtune.hardware import Hardware
from memtune.memory import WorkspaceTable
from memtune.program import (
    F64,
    FOREVER,
    I64,
    Call,
    Edit,
    Hints,
    Kind,
    Phase,
    Recording,
    Step,
    updates_on_host,
)

Flags = npt.NDArray[np.bool_]
_MATMULS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.addbmm.")


def translate(
    recording: Recording, hardware: Hardware, *, workspace: WorkspaceTable | None = None
) -> Recording:
    """Return `recording` as if made on `hardware`; unchanged if both are the same kind of device.

    A device without a table of kernels gets only the changes that torch makes on every accelerator:
    dropout is one kernel, the optimizer takes all parameters at once and counts its steps on the host. A note
    states it.

    Args:
        recording: Of a CPU run, on fake or real tensors.
        hardware: The target; its architecture selects the kernels.
        workspace: Scratch of kernels measured on that device; without it that of convolutions is estimated,
            and a note reports that.

    Returns:
        The recording with every step translated and with notes on assumptions and unknown ops.
    """
    if recording.device == hardware.device:
        return recording
    has_table = Capability.TRANSLATION in hardware.platform.capabilities
    known = _Context(hardware.architecture if has_table else "", workspace)
    hints = recording.hints.get(recording.small, Hints())
    small = translate_step(recording.step, hints, known)
    sizes = [size for size in recording.hints if size != recording.small and size not in recording.exact]
    large, more = None, 1
    if sizes:  # else sizes are known at this micro-batch only
        other, more = sizes[0], sizes[0] - recording.small
        # Twice, since kernels pad and round: sizes are affine only between two translated steps.
        its_hints = _resized(hints, recording.hints[other])
        large = translate_step(recording.at(other), its_hints, known.again())
        if large.storages.n != small.storages.n:
            # A kernel has scratch at one size only: flash attention splits the keys of small batches.
            known = _Context(known.architecture, workspace, empty_scratch=True)
            small = translate_step(recording.step, hints, known)
            large = translate_step(recording.at(other), its_hints, known.again())
    slopes = _slopes(small, large, more)
    exact = {
        size: translate_step(each, recording.hints.get(size, Hints()), known.again())
        for size, each in recording.exact.items()
    }
    if has_table:
        new_notes = (*known.notes(small), *_composed_note(recording.step, hints))
    else:
        new_notes = (
            f"kernels and what they save are those of a CPU: memtune has no table of {hardware.device}'s",
        )
    notes = (*recording.notes, *new_notes)
    hints_left = {
        size: replace(each, calls=(), signatures=(), foreach=None) for size, each in recording.hints.items()
    }
    return replace(
        recording,
        step=small,
        bytes_slope=slopes[0],
        flops_slope=slopes[1],
        traffic_slope=slopes[2],
        exact=exact,
        notes=notes,
        device=hardware.device,
        hints=hints_left,
    )


def _slopes(small: Step, large: Step | None, more: int) -> tuple[I64, F64, I64]:
    """Return bytes of storages, and FLOPs and traffic of ops, per sample; `large` has `more` samples."""
    if large is None:
        return np.zeros(small.storages.n, np.int64), np.zeros(small.ops.n), np.zeros(small.ops.n, np.int64)
    return (
        (large.storages.bytes - small.storages.bytes) // more,
        (large.ops.flops - small.ops.flops) / more,
        (large.ops.traffic_bytes - small.ops.traffic_bytes) // more,
    )


def _resized(hints: Hints, other: Hints) -> Hints:
    """Return `hints` with the sizes of `other`."""
    # Rows and autograd's node numbers are those of the evaluated step.
    calls = tuple(
        replace(ours, shapes=theirs.shapes, options=theirs.options)
        for ours, theirs in zip(hints.calls, other.calls, strict=True)
    )
    return replace(hints, calls=calls, signatures=other.signatures)


class _Context:
    """The target, and the kernels chosen for it; without an architecture there is no table of kernels.

    With `empty_scratch` kernels have their scratch also where it has no bytes, so that steps of different
    sizes have the same storages.
    """

    def __init__(
        self, architecture: str, workspace: WorkspaceTable | None, *, empty_scratch: bool = False
    ) -> None:
        self.architecture, self.workspace, self.empty_scratch = architecture, workspace, empty_scratch
        self.kernels: dict[str, int] = {}
        self.estimated: set[str] = set()

    def again(self) -> _Context:
        """Return the same target with empty counts."""
        return _Context(self.architecture, self.workspace, empty_scratch=self.empty_scratch)

    def count(self, kernel: str, calls: int = 1, *, estimated: bool = False) -> None:
        self.kernels[kernel] = self.kernels.get(kernel, 0) + calls
        if estimated:
            self.estimated.add(kernel)

    def notes(self, step: Step) -> list[str]:
        """Return notes for the user: the chosen kernels, estimated sizes, unknown ops."""
        notes = [f"recorded on CPU, translated to CUDA ({self.architecture})"]
        if self.kernels:
            names = ", ".join(f"{kernel} × {count}" for kernel, count in sorted(self.kernels.items()))
            notes[0] += f": {names}"
        if self.estimated:
            notes.append(
                "estimated, not known without the device: scratch or reserve of"
                f" {', '.join(sorted(self.estimated))}"
            )
        if self.workspace is None and any("convolution" in name for name in step.names):
            notes.append(
                "convolutions are counted with an estimated workspace: cuDNN's is known only on the device"
                " (memtune doctor --calibrate)"
            )
        phase = {step.names[i] for i in np.unique(step.ops.name[step.ops.phase == Phase.OPTIMIZER])}
        if phase and not any(name.startswith(("aten._foreach_", "aten._fused_")) for name in phase):
            notes.append("the optimizer is counted one parameter at a time")
        unknown = unknown_ops(step)
        if unknown:
            notes.append(f"no translation for {', '.join(unknown)}: counted as on CPU")
        return notes


COMPOSED_ATTENTION = "attention is computed from its parts"
"""Beginning of the note that tells users what to change in their model."""


def _composed_note(step: Step, hints: Hints) -> list[str]:
    """Return a note on attention that keeps its scores although fused kernels exist."""
    count = composed_attention(step, hints)
    if not count:
        return []
    return [
        f"{COMPOSED_ATTENTION} {count} times, so its scores are kept for backward: a fused kernel keeps none"
        " (torch.nn.functional.scaled_dot_product_attention; nn.MultiheadAttention needs need_weights=False,"
        " transformers attn_implementation='sdpa')"
    ]


def unknown_ops(step: Step) -> list[str]:
    """Return the names of ops that CUDA does not run, or whose CUDA behaviour is unknown."""
    used = {step.names[i] for i in np.unique(step.ops.name)}
    foreign = {name for name in used if not name.startswith(table.SAME_EVERYWHERE)}
    return sorted(foreign | {name for name in used if any(part in name for part in table.CPU_ONLY)})


def translate_step(step: Step, hints: Hints, context: _Context) -> Step:
    """Return one step with CUDA's kernels; lifetimes follow from the reads and saves of the new ops."""
    fusion = KernelFusion(step, empty_scratch=context.empty_scratch)
    for call in hints.calls:
        kernel = _kernel(call, step, context)
        if kernel is not None:
            fusion.fuse(call, kernel)
    if context.architecture:
        _compiled_attention(fusion, hints, context)
        _drop_scratch(fusion)
        widen_statistics(fusion, hints)
        if on_cudnn := context.architecture.startswith("sm") and use_cudnn(fusion, hints):
            context.count("cudnn batch norm", on_cudnn, estimated=True)
        step = fusion.done(lambda edit: _add_workspaces(edit, step, hints, context))
    else:
        step = fusion.done(lambda edit: None)
    if hints.foreach is not None:
        step = replace(with_foreach(step, hints.foreach), updates_on_host=updates_on_host(step))
    return counters_on_host(step, hints.step_counters)


def _compiled_attention(fusion: KernelFusion, hints: Hints, context: _Context) -> None:
    """Give attention in compiled graphs, where no call is recorded, the name and FLOPs of CUDA's kernel."""
    # CPU's kernel saves tensors of the same sizes.
    step = fusion.step
    named = np.array([table.CPU_ATTENTION in name for name in step.names])
    kept = ~fusion.dropped_ops & (fusion.op_name == step.ops.name)
    for op in np.flatnonzero(named[step.ops.name] & kept).tolist():
        call = json.loads(hints.signatures[op])[1] if op < len(hints.signatures) else []
        tensors = [each["t"] for each in call if isinstance(each, dict) and "t" in each]
        backward = "backward" in step.names[step.ops.name[op]]
        query, key, value = tensors[1:4] if backward else tensors[:3]
        options = dict.fromkeys(("masked", "mask_elements"), 0.0) | {
            "dense": 1.0,
            "aligned": 1.0,
            "dropout": 0.0,
        }
        options["causal"] = float(any(each is True for each in call))
        asked = table.attention_of(
            (query[1], key[1], value[1]),
            query[0],
            options,
            needs_grad=True,
            architecture=context.architecture,
        )
        kernel = table.attention_kernel(asked, context.architecture)
        if kernel.name == "math":
            continue
        name = kernel.backward if backward else kernel.forward
        fusion.rename(np.asarray([op]), name)
        if asked.causal:
            fusion.flops[op] /= 2  # blocks above the diagonal are skipped
        fusion.add_scratch(op, kernel.backward_scratch(asked) if backward else kernel.forward_scratch(asked))
        if not backward:
            context.count(f"{kernel.name} attention", estimated=kernel.estimated)


def _kernel(call: Call, step: Step, context: _Context) -> FusedKernel | None:
    """Return the kernel that the device runs for `call`; None if CPU's ops, or an unknown one."""
    if call.kind == "dropout":
        context.count("native_dropout")
        return FusedKernel(
            *table.DROPOUT,
            saves_inputs=False,
            made_bytes=(int(np.prod(call.shapes[0])),),
            made_float_bytes=(0,),
            packed=(0,),
        )
    if not context.architecture:
        return None
    if call.kind == "attention":
        return _attention(call, step, context)
    if call.kind == "rms_norm":
        context.count("fused RMS norm")
        size = 8 if call.dtype == "float64" else 4
        rstd, of_rstd = int(call.options["rows"]) * size, table.float_bytes_of(size)
        return FusedKernel(
            *table.RMS_NORM, saves_inputs=True, made_bytes=(rstd,), made_float_bytes=(of_rstd,), packed=(0,)
        )
    entry = table.RECURRENT[call.kind]
    size = 2 if call.dtype in ("float16", "bfloat16") else 4
    reserve = table.reserve_bytes(call.kind, call.options, size, call.shapes[0][-1])
    context.count("cuDNN recurrent layer", estimated=True)
    return FusedKernel(
        entry.forward,
        entry.backward,
        saves_inputs=True,
        made_bytes=(reserve,),
        made_float_bytes=(0,),
        packed=(0, table.OUTPUT),
    )


def _attention(call: Call, step: Step, context: _Context) -> FusedKernel | None:
    options = call.options
    needs_grad = call.saves[1] > call.saves[0]
    asked = table.attention_of(
        call.shapes, call.dtype, options, needs_grad=needs_grad, architecture=context.architecture
    )
    kernel = table.attention_kernel(asked, context.architecture)
    on_cpu = [step.names[i] for i in step.ops.name[slice(*call.ops)]]
    fused_on_cpu = any(table.CPU_ATTENTION in name for name in on_cpu)
    context.count(f"{kernel.name} attention", estimated=kernel.estimated)
    if kernel.name == "math" and not fused_on_cpu:
        return None  # CPU composed it as CUDA will
    # A multiplication and an addition per element of the scores and per feature.
    products = 2.0 * asked.B * asked.H * asked.Q * asked.K
    if asked.causal and kernel.name != "math":
        products /= 2  # blocks above the diagonal are skipped
    mask = (
        ()
        if fused_on_cpu or not options["mask_elements"]
        else (int(table.up(int(options["mask_elements"]), 16)) * asked.S,)
    )
    made = kernel.made(asked)
    floats = (*kernel.float_bytes(asked), *(0,) * len(made))[: len(made)]
    floats += (table.float_bytes_of(asked.S),) * len(mask)
    made += mask
    return FusedKernel(
        kernel.forward,
        kernel.backward,
        saves_inputs=True,
        made_bytes=made,
        made_float_bytes=floats,
        packed=(*kernel.packed(len(made) - len(mask)), *range(len(made) - len(mask), len(made))),
        random=bool(asked.dropout),
        padded_mask_bytes=(
            table.padded_mask_bytes(asked) if fused_on_cpu and kernel.name == "efficient" else 0
        ),
        forward_scratch=kernel.forward_scratch(asked),
        backward_scratch=kernel.backward_scratch(asked),
        forward_flops=products * (asked.D + asked.E),
        # Backward computes the scores again, and the gradients of query and key over D features; those of
        # value and of the probabilities over E.
        backward_flops=products * (3 * asked.D + 2 * asked.E),
    )


def _drop_scratch(fusion: KernelFusion) -> None:
    """Remove scratch of CPU kernels, which CUDA does not have."""
    fusion.bytes[fusion.step.storages.kind == Kind.WORKSPACE] = 0


def _add_workspaces(edit: Edit, step: Step, hints: Hints, context: _Context) -> None:
    """Add cuBLAS's workspaces, and the scratch of kernels: measured, or estimated for convolutions."""
    # cuBLAS allocates its workspaces with the first product of a process and keeps them.
    if any(name.startswith(_MATMULS) for name in step.names):
        size = table.cublas_workspace_bytes(context.architecture, os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        count = table.CUBLAS_HANDLES
        edit.add_storages(
            np.full(count, size, np.int64),
            producer=np.full(count, -1, np.int32),
            kind=Kind.WORKSPACE,
            held_until=np.full(count, FOREVER, np.int32),
        )
    if context.workspace is not None:
        scratch = np.asarray(
            [context.workspace.workspace_bytes(key) if key else 0 for key in hints.signatures], np.int64
        )
        wanted = [bool(key) for key in hints.signatures] if context.empty_scratch else scratch > 0
        ops = np.flatnonzero(wanted).astype(np.int32)
        edit.add_storages(scratch[ops], producer=ops, kind=Kind.WORKSPACE)
    else:
        ops, sizes = estimated_workspaces(step, hints, context.architecture)
        edit.add_storages(sizes, producer=ops, kind=Kind.WORKSPACE)
