"""Detection of experts."""

from __future__ import annotations

from memtune.workload.expert_modules import find_experts


def test_find_experts_requires_equal_modules_in_a_list_named_experts() -> None:
    parts = (
        "norm.weight",
        "mlp.experts.0.up.weight",
        "mlp.experts.1.up.weight",
        "heads.0.weight",
        "heads.1.weight",
    )
    names = [f"layers.{block}.{part}" for block in range(2) for part in parts]
    shapes, block_of = [(4, 2)] * len(names), [0] * 5 + [1] * 5
    found = find_experts(names, shapes, block_of)
    assert [(each.block, each.name, each.parameters) for each in found] == [
        (0, "layers.0.mlp.experts.0", (1,)),
        (0, "layers.0.mlp.experts.1", (2,)),
        (1, "layers.1.mlp.experts.0", (6,)),
        (1, "layers.1.mlp.experts.1", (7,)),
    ]
    assert not find_experts(names, shapes, [-1] * 10)
    unlike = [(4, 2 + index) for index in range(len(names))]
    assert not find_experts(names, unlike, block_of)
    assert not find_experts(
        ["experts.0.weight", "experts.weight"], [(2,), (2,)], [0, 0]
    )  # one, and a fused tensor
