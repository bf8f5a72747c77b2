"""Fuse the ops of recorded calls into kernels: one op in forward and one in backward, with its own saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memtune.autotune.translate import translation_table as table
from memtune.program import I32, ON_GPU_ONLY, Call, Edit, Kind, Phase, Resource, Step

Flags = npt.NDArray[np.bool_]
UNPACK_ROOM = 64
"""Unpack orders between two recorded ones, for inserted saves; no kernel saves as many tensors."""


@dataclass(frozen=True)
class FusedKernel:
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


class KernelFusion:
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

    def fuse(self, call: Call, kernel: FusedKernel) -> None:
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
        self.add_scratch(last, kernel.forward_scratch)
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
            self.later.append(lambda edit: edit.add_uses(first, reads))
            self.add_scratch(first, kernel.backward_scratch)
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
        """Return CPU's attention kernel among `rows`, if any."""
        # Torch's preparation of the mask before it runs on CUDA too.
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

    def rename(self, ops: npt.NDArray[np.integer], name: str) -> None:
        """Give `ops` another name."""
        if name not in self.names:
            self.names.append(name)
        self.op_name[ops] = self.names.index(name)

    def _becomes(self, op: int, name: str, rows: I32, outputs: I32, flops: float | None) -> None:
        """Make op `op` do the work of all `rows`, with `outputs`."""
        self.rename(np.asarray([op]), name)
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

    def add_scratch(self, op: int, n_bytes: int) -> None:
        """Add workspace to op `op`, live while it runs."""
        if n_bytes or self._empty_scratch:
            self.later.append(
                lambda edit: edit.add_storages(
                    np.asarray([n_bytes]), producer=np.asarray([op], np.int32), kind=Kind.WORKSPACE
                )
            )

    def _reads(self, edit: Edit, op: int, inputs: I32, mask: int, kernel: FusedKernel) -> None:
        """Add reads of `inputs` to `op`; a mask that must be padded is read through a copy."""
        if mask >= 0:
            row = edit.add_ops(
                table.PADS_MASK,
                before=np.asarray([op], np.int32),
                phase=Phase(int(self.step.ops.phase[op])),
                module=int(self.step.ops.module[op]),
                call=int(self.step.ops.call[op]),
                traffic_bytes=2 * kernel.padded_mask_bytes,
                reads=np.asarray([mask], np.int32),
            )
            padded = edit.add_storages(
                np.asarray([kernel.padded_mask_bytes], np.int64),
                producer=row,
                float_bytes=self.step.storages.float_bytes[mask],
            )
            self.padded[mask, op] = int(padded[0])
            inputs = np.append(inputs[inputs != mask], padded).astype(np.int32)
        edit.add_uses(op, inputs)

    def _save(
        self,
        edit: Edit,
        saves: I32,
        ops: tuple[int, int],
        inputs: list[int],
        output: int,
        kernel: FusedKernel,
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
        # Between the recorded orders, which `done` spreads by `UNPACK_ROOM`.
        unpack_order = step.saves.unpack_order[saves].max() * UNPACK_ROOM + np.arange(count)
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
        edit.set_saves(unpack_order=edit.saves.unpack_order * UNPACK_ROOM)
        edit.drop_uses(self.dropped_uses)
        edit.drop_ops(self.dropped_ops)
        edit.drop_saves(self.dropped_saves)
        edit.drop_storages(self.gone)
        for change in self.later:
            change(edit)
        more(edit)
        return _saves_in_order(edit.done())


def _made_by(edit: Edit, kernel: FusedKernel, op: int) -> I32:
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


def _saves_in_order(step: Step) -> Step:
    """Sort rows of saves by packing: outputs of an op before inputs of the next op."""
    order = np.lexsort((1 - step.saves.is_output.astype(np.int8), step.saves.packed_before))
    return replace(step, saves=step.saves.rows(order))
