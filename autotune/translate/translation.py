"""Translate a Step recorded on CPU into the Step of a CUDA run, with the data of `translation_table`.

Calls that CUDA runs as one kernel are fused: their CPU ops become one op in forward and one in backward, and
their saved tensors become those of the kernel. The optimizer phase becomes that of foreach kernels, cuBLAS's
workspaces exist from the start, scratch of CPU kernels is removed. Ops that the table does not know are kept
and named in the notes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memtune.autotune.translate import translation_table as table
from memtune.autotune.translate.composed_attention import composed_attention
from memtune.autotune.translate.convolution_workspace import estimated_workspaces
from memtune.autotune.translate.cuda_norms import use_cudnn, widen_statistics
from memtune.autotune.translate.foreach_pass import counters_on_host, with_foreach
from memtune.device import Capability
from memtune.hardware import Hardware
from memtune.memory import WorkspaceTable
from memtune.program import (
    F64,
    FOREVER,
    I32,
    I64,
    ON_GPU_ONLY,
    Call,
    Edit,
    Hints,
    Kind,
    Phase,
    Recording,
    Resource,
    Step,
)

Flags = npt.NDArray[np.bool_]
_MATMULS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.addbmm.")


def translate(
    recording: Recording, hardware: Hardware, *, workspace: WorkspaceTable | None = None
) -> Recording:
    """Return `recording` as if made on `hardware`; unchanged if both are the same kind of device.

    A device without a table of kernels gets only the changes that torch makes on every accelerator:
    dropout is one kernel, the optimizer takes all parameters at once. A note states it.

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
    slopes: tuple[I64, F64, I64] = (
        np.zeros(small.storages.n, np.int64),
        np.zeros(small.ops.n),
        np.zeros(small.ops.n, np.int64),
    )
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
        slopes = (
            (large.storages.bytes - small.storages.bytes) // more,
            (large.ops.flops - small.ops.flops) / more,
            (large.ops.traffic_bytes - small.ops.traffic_bytes) // more,
        )
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


def _resized(hints: Hints, other: Hints) -> Hints:
    """Return `hints` with the sizes of `other`.

    Rows and autograd's node numbers are those of the evaluated step.
    """
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


def _composed_note(step: Step, hints: Hints) -> list[str]:
    """Return a note on attention that keeps its scores although fused kernels exist."""
    count = composed_attention(step, hints)
    if not count:
        return []
    return [
        f"attention is computed from its parts {count} times, so its scores are kept for backward: a fused"
        f" kernel"
        " keeps none (torch.nn.functional.scaled_dot_product_attention; in transformers"
        " attn_implementation='sdpa')"
    ]


def unknown_ops(step: Step) -> list[str]:
    """Return the names of ops that CUDA does not run, or whose CUDA behaviour is unknown."""
    used = {step.names[i] for i in np.unique(step.ops.name)}
    foreign = {name for name in used if not name.startswith(table.SAME_EVERYWHERE)}
    return sorted(foreign | {name for name in used if any(part in name for part in table.CPU_ONLY)})


def translate_step(step: Step, hints: Hints, context: _Context) -> Step:
    """Return one step with CUDA's kernels; lifetimes follow from the reads and saves of the new ops."""
    fusion = _Fusion(step, empty_scratch=context.empty_scratch)
    for call in hints.calls:
        kernel = _kernel(call, step, context)
        if kernel is not None:
            fusion.fuse(call, kernel)
    if not context.architecture:
        step = fusion.done(lambda edit: None)
        return step if hints.foreach is None else with_foreach(step, hints.foreach)
    _compiled_attention(fusion, hints, context)
    _drop_scratch(fusion)
    widen_statistics(fusion, hints)
    if on_cudnn := context.architecture.startswith("sm") and use_cudnn(fusion, hints, _ROOM):
        context.count("cudnn batch norm", on_cudnn, estimated=True)
    step = fusion.done(lambda edit: _add_workspaces(edit, step, hints, context))
    if hints.foreach is not None:
        step = with_foreach(step, hints.foreach)
    return counters_on_host(step, hints.step_counters)


def _compiled_attention(fusion: _Fusion, hints: Hints, context: _Context) -> None:
    """Give attention in compiled graphs, where no call is recorded, the name and FLOPs of CUDA's kernel.

    What CPU's kernel saves has the same sizes.
    """
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
        if name not in fusion.names:
            fusion.names.append(name)
        fusion.op_name[op] = fusion.names.index(name)
        if asked.causal:
            fusion.flops[op] /= 2  # blocks above the diagonal are skipped
        fusion._scratch(op, kernel.backward_scratch(asked) if backward else kernel.forward_scratch(asked))
        if not backward:
            context.count(f"{kernel.name} attention", estimated=kernel.estimated)


@dataclass(frozen=True)
class _Kernel:
    """One fused kernel of one call: names, saved tensors, scratch."""

    forward: str
    backward: str
    saves_inputs: bool
    made_bytes: tuple[int, ...]
    """Bytes of its results besides the output, in the order in which it returns them."""
    made_float_bytes: tuple[int, ...]
    """`Storages.float_bytes` of these results."""
    packed: tuple[int, ...]
    """Indices of the results that autograd packs, in its order; `table.OUTPUT` is the output."""
    forward_scratch: int = 0
    backward_scratch: int = 0
    forward_flops: float | None = None
    backward_flops: float | None = None
    random: bool = False
    """True if it draws random numbers, which CPU's ops may not have done."""
    padded_mask_bytes: int = 0
    """Bytes of the padded mask that it reads instead of CPU's; 0 if it reads the same mask."""


def _kernel(call: Call, step: Step, context: _Context) -> _Kernel | None:
    """Return the kernel that the device runs for `call`; None if it runs the same ops as CPU, or if memtune
    does not know.
    """
    if call.kind == "dropout":
        context.count("native_dropout")
        return _Kernel(
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
        return _Kernel(
            *table.RMS_NORM, saves_inputs=True, made_bytes=(rstd,), made_float_bytes=(of_rstd,), packed=(0,)
        )
    entry = table.RECURRENT[call.kind]
    size = 2 if call.dtype in ("float16", "bfloat16") else 4
    reserve = table.reserve_bytes(call.kind, call.options, size, call.shapes[0][-1])
    context.count("cuDNN recurrent layer", estimated=True)
    return _Kernel(
        entry.forward,
        entry.backward,
        saves_inputs=True,
        made_bytes=(reserve,),
        made_float_bytes=(0,),
        packed=(0, table.OUTPUT),
    )


def _attention(call: Call, step: Step, context: _Context) -> _Kernel | None:
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
    return _Kernel(
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


class _Fusion:
    """Collects the calls to fuse, then edits the step once."""

    def __init__(self, step: Step, *, empty_scratch: bool) -> None:
        self.step, self._empty_scratch = step, empty_scratch
        self.names = list(step.names)
        self.op_name, self.flops = step.ops.name.copy(), step.ops.flops.copy()
        self.traffic, self.rng = step.ops.traffic_bytes.copy(), step.ops.rng.copy()
        self.producer, self.bytes = step.storages.producer.copy(), step.storages.bytes.copy()
        self.dropped_ops = np.zeros(step.ops.n, bool)
        self.dropped_uses = np.zeros(step.uses.n, bool)
        self.dropped_saves = np.zeros(step.saves.n, bool)
        self.gone = np.zeros(step.storages.n, bool)
        self.padded: dict[tuple[int, int], int] = {}
        """(mask, op that reads it) → bytes of the padded mask."""
        self.later: list[Callable[[Edit], object]] = []
        self._uses_of = np.searchsorted(step.uses.op, np.arange(step.ops.n + 1))
        self._cast = (
            step.names.index("aten._to_copy.default") if "aten._to_copy.default" in step.names else -1
        )
        # Backward ops carry the number of their autograd node, so a call's are a range of the sorted numbers.
        self._by_node = np.argsort(step.ops.sequence_nr, kind="stable")
        self._nodes = step.ops.sequence_nr[self._by_node]

    def fuse(self, call: Call, kernel: _Kernel) -> None:
        """Replace `call` by one op in forward and, if it has a backward, one op in backward."""
        step = self.step
        casts = bool(call.options.get("cast"))
        forward = self._kernel_alone(self._rows(np.arange(*call.ops, dtype=np.int32), casts))
        begin, end = np.searchsorted(self._nodes, call.nodes)
        backward = self._kernel_alone(self._rows(np.sort(self._by_node[begin:end]).astype(np.int32), casts))
        if not len(forward):
            return
        saves = np.arange(*call.saves, dtype=np.int32)
        inside = np.zeros(step.ops.n, bool)
        inside[forward] = inside[backward] = True
        made, inputs = self._outputs_of(forward), self._read_from_outside(forward)
        is_kept = self._seen_outside(made, inside, int(call.ops[1]) - 1, saves) | (made == call.output)
        outputs, gone = made[is_kept], made[~is_kept]
        last = int(forward[-1])
        self._becomes(last, kernel.forward, forward, outputs, kernel.forward_flops)
        self.rng[last] = max(self.rng[forward].max(), kernel.random)
        self.gone[gone] = True
        self._traffic(last, inputs, outputs, kernel.made_bytes)
        mask = -1
        if kernel.padded_mask_bytes:
            mask = int(next(each for each in inputs if each not in call.inputs[:3]))
        self.later.append(lambda edit: self._reads(edit, last, inputs, mask, kernel))
        self._scratch(last, kernel.forward_scratch)
        grads = np.empty(0, np.int32)
        first = -1
        if len(backward):
            first = int(backward[0])
            made = self._outputs_of(backward)
            keeps = self._seen_outside(made, inside, int(backward[-1]), saves) | (
                step.storages.grad_ready_after[made] >= 0
            )
            grads = made[keeps]
            self.gone[made[~keeps]] = True
            reads = np.setdiff1d(self._read_from_outside(backward), gone)
            self._becomes(first, kernel.backward, backward, grads, kernel.backward_flops)
            self._traffic(first, reads, grads, kernel.made_bytes)
            reads = reads[reads != mask].astype(np.int32)  # it reads what is packed
            self.later.append(lambda edit: edit.add_uses(np.full(len(reads), first, np.int32), reads))
            self._scratch(first, kernel.backward_scratch)
        # The kernel's own saves, added in `_save`, replace CPU's.
        self.dropped_saves[saves] = True
        if len(saves):
            # Saved-tensor hooks do not see parameters and buffers.
            lasting = (step.storages.producer < 0) & np.isin(
                step.storages.kind, (Kind.PARAMETER, Kind.BUFFER)
            )
            packed = _packed(call, inputs[~lasting[inputs]]) if kernel.saves_inputs else []
            self.later.append(
                lambda edit: self._save(edit, saves, (last, first), packed, call.output, kernel, mask)
            )
        else:
            self.later.append(lambda edit: _made_by(edit, kernel, last))

    def _rows(self, rows: I32, casts: bool) -> I32:
        """Return `rows` of kernels; casts of autocast are not fused."""
        rows = rows[self.step.ops.resource[rows] == Resource.COMPUTE]
        return rows[self.op_name[rows] != self._cast] if casts and self._cast >= 0 else rows

    def _kernel_alone(self, rows: I32) -> I32:
        """Return CPU's attention kernel among `rows`, if any.

        Torch's preparation of the mask before it runs on CUDA too.
        """
        mine = np.asarray([table.CPU_ATTENTION in self.names[name] for name in self.op_name[rows]], bool)
        return rows[mine] if mine.any() else rows

    def _outputs_of(self, rows: I32) -> I32:
        found: I32 = np.flatnonzero(np.isin(self.step.storages.producer, rows)).astype(np.int32)
        return found

    def _use_rows(self, rows: I32) -> I32:
        return np.concatenate(
            [np.arange(self._uses_of[row], self._uses_of[row + 1], dtype=np.int32) for row in rows]
        )

    def _read_from_outside(self, rows: I32) -> I32:
        read = np.unique(self.step.uses.storage[self._use_rows(rows)])
        found: I32 = read[~np.isin(self.step.storages.producer[read], rows)].astype(np.int32)
        return found

    def _seen_outside(self, storages: I32, inside: Flags, last: int, saves: I32) -> Flags:
        """Return which of `storages` are used, held or saved outside of the fused ops."""
        step = self.step
        seen = np.zeros(step.storages.n, bool)
        seen[step.uses.storage[~inside[step.uses.op]]] = True
        others = np.ones(step.saves.n, bool)
        others[saves] = False
        seen[step.saves.storage[others]] = True
        found: Flags = seen[storages] | (step.storages.held_until[storages] > last)
        return found

    def _becomes(self, op: int, name: str, rows: I32, outputs: I32, flops: float | None) -> None:
        """Make op `op` do the work of all `rows`, with `outputs`."""
        if name not in self.names:
            self.names.append(name)
        self.op_name[op] = self.names.index(name)
        self.flops[op] = self.step.ops.flops[rows].sum() if flops is None else flops
        self.producer[outputs] = op
        # The op that becomes the kernel is one of the rows.
        self.dropped_ops[rows] = True
        self.dropped_ops[op] = False
        self.dropped_uses[self._use_rows(rows)] = True

    def _traffic(self, op: int, reads: I32, writes: I32, saved: tuple[int, ...]) -> None:
        self.traffic[op] = (
            self.step.storages.bytes[reads].sum() + self.step.storages.bytes[writes].sum() + sum(saved)
        )

    def _scratch(self, op: int, n_bytes: int) -> None:
        if n_bytes or self._empty_scratch:
            self.later.append(
                lambda edit: edit.add_storages(
                    np.asarray([n_bytes]), producer=np.asarray([op], np.int32), kind=Kind.WORKSPACE
                )
            )

    def _reads(self, edit: Edit, op: int, inputs: I32, mask: int, kernel: _Kernel) -> None:
        """Add reads of `inputs` to `op`; a mask that must be padded is read through a copy."""
        if mask >= 0:
            row = edit.add_ops(
                table.PADS_MASK,
                before=np.asarray([op], np.int32),
                phase=Phase(int(self.step.ops.phase[op])),
                module=int(self.step.ops.module[op]),
                call=int(self.step.ops.call[op]),
                traffic_bytes=2 * kernel.padded_mask_bytes,
            )
            padded = edit.add_storages(
                np.asarray([kernel.padded_mask_bytes], np.int64),
                producer=row,
                float_bytes=self.step.storages.float_bytes[mask],
            )
            edit.add_uses(row, np.asarray([mask], np.int32))
            self.padded[mask, op] = int(padded[0])
            inputs = np.append(inputs[inputs != mask], padded).astype(np.int32)
        edit.add_uses(np.full(len(inputs), op, np.int32), inputs)

    def _save(
        self,
        edit: Edit,
        saves: I32,
        ops: tuple[int, int],
        inputs: list[int],
        output: int,
        kernel: _Kernel,
        mask: int,
    ) -> None:
        """Add the saves of the kernel: inputs before the op ran, outputs and extra results after it."""
        step, (last, first) = self.step, ops
        if mask >= 0:
            padded = self.padded[mask, last]
            inputs = [padded if each == mask else each for each in inputs]
            if first >= 0:
                # Backward reads the padded copy, which was packed instead of the mask.
                edit.add_uses(np.asarray([first], np.int32), np.asarray([padded], np.int32))
        made = _made_by(edit, kernel, last)
        packed = [output if each == table.OUTPUT else int(made[each]) for each in kernel.packed]
        storages = np.asarray([*inputs, *packed], np.int32)
        if first >= 0:
            edit.add_uses(np.full(len(packed), first, np.int32), np.asarray(packed, np.int32))
        # Autograd packs inputs before the op and its results after, which is before the next op.
        n_in, count = len(inputs), len(storages)
        before = np.where(np.arange(count) < n_in, last, last + 1).astype(np.int32)
        until = np.full(count, step.saves.held_until[saves].max(), np.int32)
        # Between the recorded orders, which `done` spreads by `_ROOM`.
        unpack_order = step.saves.unpack_order[saves].max() * _ROOM + np.arange(count)
        call = np.full(count, step.saves.call[saves[0]], np.int32)
        edit.add_saves(
            storages,
            packed_before=before,
            held_until=until,
            call=call,
            unpacked_before=np.full(count, first, np.int32),
            unpack_order=unpack_order,
            is_output=(np.arange(count) >= n_in).astype(np.uint8),
        )

    def done(self, more: Callable[[Edit], None]) -> Step:
        """Return the step with all calls fused, and the additions of `more`."""
        step = (
            replace(self.step, names=tuple(self.names))
            .with_ops(
                name=self.op_name,
                flops=self.flops,
                traffic_bytes=self.traffic,
                rng=self.rng,
                elementwise_bytes=(self.step.ops.elementwise_bytes & (ON_GPU_ONLY - 1)).astype(np.uint8),
            )
            .with_storages(producer=self.producer, bytes=self.bytes)
        )
        edit = Edit(step)
        edit.set_saves(unpack_order=edit.saves.unpack_order * _ROOM)
        edit.drop_uses(self.dropped_uses)
        edit.drop_ops(self.dropped_ops)
        edit.drop_saves(self.dropped_saves)
        edit.drop_storages(self.gone)
        for change in self.later:
            change(edit)
        more(edit)
        return _saves_in_order(edit.done())


def _made_by(edit: Edit, kernel: _Kernel, op: int) -> I32:
    """Add the results of `kernel` besides its output."""
    return edit.add_storages(
        np.asarray(kernel.made_bytes, np.int64),
        producer=np.full(len(kernel.made_bytes), op, np.int32),
        float_bytes=np.asarray(kernel.made_float_bytes, np.uint8),
    )


def _packed(call: Call, inputs: I32) -> list[int]:
    """Return the saved inputs of attention in autograd's alphabetical order (bias, key, query, value)."""
    found = [int(each) for each in inputs]
    if call.kind != "attention" or not set(call.inputs[:3]) <= set(found):
        return found
    query, key, value = call.inputs[:3]
    return [*(each for each in found if each not in call.inputs[:3]), key, query, value]


_ROOM = 64  # unpack orders between two recorded ones, for inserted saves; no kernel saves as many tensors


def _saves_in_order(step: Step) -> Step:
    """Sort rows of saves by packing: outputs of an op before inputs of the next op."""
    order = np.lexsort((1 - step.saves.is_output.astype(np.int8), step.saves.packed_before))
    return replace(step, saves=step.saves.rows(order))


def _drop_scratch(fusion: _Fusion) -> None:
    """Remove scratch of CPU kernels, which CUDA does not have."""
    fusion.bytes[fusion.step.storages.kind == Kind.WORKSPACE] = 0


def _add_workspaces(edit: Edit, step: Step, hints: Hints, context: _Context) -> None:
    """Add cuBLAS's workspaces, and the scratch of kernels: measured on the device, or that of convolutions
    estimated.
    """
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
