"""The bytes at the peak, by module and kind."""

from __future__ import annotations

import pytest
from support.zoo_paths import ZOO

from memtune.activations.schedules import region_of, run_schedule
from memtune.autotune.predict.breakdown import OUTSIDE, at_peak, folded
from memtune.program import plain_schedule
from memtune.program.step import Kind
from memtune.testing.drift_check import plain_program


@pytest.mark.parametrize("model", ["gpt", "cnn_bn", "lora", "tied"])
def test_at_peak_rows_sum_to_peak_largest_first(model: str) -> None:
    step = plain_program(ZOO[model]).step
    rows = at_peak(step)
    assert sum(row.n_bytes for row in rows) == step.peak_bytes()
    assert [row.n_bytes for row in rows] == sorted((row.n_bytes for row in rows), reverse=True)
    assert len({(row.module, row.kind) for row in rows}) == len(rows)


def test_at_peak_assigns_state_to_parameter_and_merges_blocks() -> None:
    step = plain_program(ZOO["gpt"]).step
    found = {(row.module, row.kind): row.n_bytes for row in at_peak(step)}
    weights = int(step.storages.bytes[(step.storages.kind == Kind.PARAMETER)].sum())
    assert sum(n_bytes for (_, kind), n_bytes in found.items() if kind == "weights") == weights
    assert found["h.*.attn.qkv", "weights"] == 4 * (64 * 192 + 192) * 4  # blocks × (weight + bias) × float32
    assert found["h.*.attn.qkv", "optimizer"] == 2 * found["h.*.attn.qkv", "weights"]  # AdamW's two moments
    assert any(module == OUTSIDE for module, _ in found)


def test_folded_replaces_only_whole_numbers() -> None:
    assert folded("h.12.mlp.0") == "h.*.mlp.*"
    assert folded("layer1.0.conv2") == "layer1.*.conv2"
    assert folded("") == ""


def test_at_peak_shows_the_values_of_a_schedule_as_activations() -> None:
    step = plain_program(ZOO["gpt"]).step
    region = region_of(step)
    assert not isinstance(region, str), region
    scheduled = run_schedule(step, region, plain_schedule(region.graph))
    assert len(scheduled.saves.storage) < len(step.saves.storage) / 4  # autograd's table lacks most of them
    shown = sum(row.n_bytes for row in at_peak(scheduled) if row.kind == "activations")
    plain = sum(row.n_bytes for row in at_peak(step) if row.kind == "activations")
    assert 0.9 * plain < shown < 1.1 * plain
