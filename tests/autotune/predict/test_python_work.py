"""Host time of mechanisms in simulated steps, on a recorded GPT of a few blocks."""

from __future__ import annotations

import numpy as np
import pytest
from fixed_cpu import CPU
from support.zoo_paths import ZOO

from memtune.autotune.predict.python_work import NO_PYTHON, PythonWork, python_s
from memtune.program import Phase, Program
from memtune.search_spaces import find
from memtune.technique import Target
from memtune.testing.drift_check import plain_program


def host_s(program: Program, python: PythonWork = NO_PYTHON) -> float:
    """Return the seconds beyond those of the batch's upload."""
    found = python_s(program.step, CPU, python)
    upload = [name.startswith("memtune.to_device") for name in program.step.names]
    is_upload = np.asarray(upload)[program.step.ops.name] & (program.step.ops.phase == Phase.FORWARD)
    assert (found[is_upload] == CPU.hook_s).all()
    return float(found[~is_upload].sum())


def rewritten(slot: str, kind: str, **knobs: object) -> Program:
    program, target = plain_program(ZOO["gpt"]), Target(CPU)
    technique = find(slot, kind)(kind=kind, **knobs)
    return technique.rewrite(program, technique.plan(program, target), target)


def test_plain_step_has_no_python() -> None:
    assert host_s(plain_program(ZOO["gpt"])) == 0.0


def test_block_that_runs_again_costs_its_bookkeeping_and_a_hook_for_each_tensor() -> None:
    program = rewritten("recompute", "full")
    blocks, again = len(program.step.blocks), int((program.step.ops.phase == Phase.RECOMPUTE).sum())
    assert host_s(program) == pytest.approx(blocks * CPU.recomputed_block_s + again * CPU.saved_tensor_s)


def test_mode_sees_both_runs_of_blocks_that_run_again_and_no_other_op() -> None:
    every, some = rewritten("recompute", "selective"), rewritten("recompute", "every_nth", n=2)
    for program in (every, some):
        step = program.step
        again = step.ops.phase == Phase.RECOMPUTE
        there = np.isin(step.ops.block, step.ops.block[again]) & (step.ops.phase == Phase.FORWARD)
        seen = int((again | (there & (step.ops.block >= 0))).sum())
        more_s = host_s(program, PythonWork(observes_ops=True)) - host_s(program)
        assert more_s == pytest.approx(3 * seen * CPU.observed_op_s)


def test_schedule_costs_calls_and_gradients_but_no_hooks() -> None:
    program = rewritten("recompute", "full")
    one, three = (host_s(program, PythonWork(observes_ops=True, schedule_calls=n)) for n in (1, 3))
    assert three - one == pytest.approx(2 * CPU.scheduled_call_s)
    assert one < host_s(program)


def test_offloaded_optimizer_copies_small_tensors_together() -> None:
    program = rewritten("offload.states", "optimizer_cpu", update="native")
    # Of each parameter the gradient's copy, the update and the weight's copy.
    assert host_s(program) == pytest.approx(3 * len(program.step.parameters) * CPU.grouped_copy_s)
