"""Repeated blocks found from the module tree, and compressed lists of their names."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from memtune.errors import ConfigError
from memtune.workload.repeated_blocks import compress, expand, find_blocks


class Mlp(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim)


class Layer(nn.Module):
    def __init__(self, n_experts: int = 0, dim: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.experts = nn.ModuleList(Mlp(dim) for _ in range(n_experts)) if n_experts else Mlp(dim)


class Stage(nn.Module):
    def __init__(self, depth: int, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(dim=dim) for _ in range(depth))


class Level(nn.Sequential):
    """Level of a U-Net: a convolution, and a block with two small attentions."""

    def __init__(self, dim: int) -> None:
        attention = Holder(first=Mlp(4), second=Mlp(4), wide=nn.Linear(dim, dim))
        super().__init__(nn.Conv2d(dim, dim, 3), attention)


class Tower(nn.Module):
    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(n_layers)))


class Holder(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def layers(count: int, **kwargs: int) -> nn.ModuleList:
    return nn.ModuleList(Layer(**kwargs) for _ in range(count))


CASES = {
    "gpt": (
        Holder(wte=nn.Embedding(9, 4), wpe=nn.Embedding(9, 4), h=layers(3), head=nn.Linear(4, 9)),
        ["h.{0..2}"],
    ),
    "experts do not win": (
        Holder(embedding=nn.Embedding(9, 4), layers=layers(2, n_experts=8)),
        ["layers.{0..1}"],
    ),
    "u-net with a bottleneck of the same class": (
        Holder(
            down=nn.ModuleList([Level(8), Level(8), Level(16)]),
            middle=Level(32),
            up=nn.ModuleList([Level(16), Level(8)]),
        ),
        ["down.{0..2}", "middle", "up.{0..1}"],
    ),
    "levels that all differ and repeat little inside": (
        Holder(down=nn.ModuleList(Level(dim) for dim in (8, 16, 32))),
        ["down.{0..2}"],
    ),
    "wrapped": (
        Holder(base=Holder(model=Holder(layers=layers(4)), head=nn.Linear(4, 9))),
        ["base.model.layers.{0..3}"],
    ),
    "residual blocks in nested Sequentials": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.Sequential(Layer(), Layer()),
            nn.Sequential(Layer(dim=8), Layer(dim=8)),
            nn.Linear(4, 2),
        ),
        ["1.{0..1}", "2.{0..1}"],
    ),
    "stages that differ are replaced by their blocks": (
        Holder(stages=nn.ModuleList([Stage(2, 4), Stage(3, 8), Stage(2, 16)])),
        ["stages.0.blocks.{0..1}", "stages.1.blocks.{0..2}", "stages.2.blocks.{0..1}"],
    ),
    "two towers as attributes": (
        Holder(left=Tower(2), right=Tower(2)),
        ["left.layers.{0..1}", "right.layers.{0..1}"],
    ),
    "blocks as attributes": (
        Holder(block1=Layer(), block2=Layer(), head=nn.Linear(4, 2)),
        ["block1", "block2"],
    ),
    "blocks that are Sequentials": (
        Holder(
            blocks=nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)),
            head=nn.Linear(4, 2),
        ),
        ["blocks.{0..2}"],
    ),
    "a tiny stack next to a large one is omitted": (
        Holder(heads=nn.ModuleList([Mlp(), Mlp()]), layers=layers(2, dim=64)),
        ["layers.{0..1}"],
    ),
    "lstm": (
        Holder(embedding=nn.Embedding(9, 4), drop=nn.Dropout(), lstm=nn.LSTM(4, 4, 2), head=nn.Linear(4, 9)),
        ["embedding", "lstm", "head"],
    ),
    "a plain network in a wrapper": (
        Holder(net=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))),
        ["net.0", "net.2"],
    ),
    "tables in a list": (
        Holder(tables=nn.ModuleList(nn.Embedding(9, 4) for _ in range(3)), top=Mlp()),
        ["tables.{0..2}", "top"],
    ),
    "a leaf": (nn.Linear(4, 4), []),
    "nothing to train": (nn.Sequential(nn.ReLU(), nn.Dropout()), []),
}


@pytest.mark.parametrize("case", CASES)
def test_find_blocks_finds_repeated_modules(case):
    model, patterns = CASES[case]
    assert compress(find_blocks(model)) == patterns


def test_find_blocks_leaves_out_lists_of_parameters():
    model = nn.Module()
    model.scales = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(3))
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert find_blocks(model) == ["layers.0", "layers.1"]


def test_find_blocks_finds_encoder_and_decoder():
    model = nn.Transformer(d_model=8, nhead=2, num_encoder_layers=2, num_decoder_layers=3, dim_feedforward=16)
    assert compress(find_blocks(model)) == ["encoder.layers.{0..1}", "decoder.layers.{0..2}"]


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        ([f"h.{i}" for i in range(24)], ["h.{0..23}"]),
        (["h.0", "h.2", "h.3", "head"], ["h.0", "h.{2..3}", "head"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], ["a.0.b.{0..1}", "a.1.b.{0..1}"]),
        (["a.0.b", "a.1.b", "a.1.c"], ["a.{0..1}.b", "a.1.c"]),
        (["a.0.0", "a.0.1", "a.1.1"], ["a.0.{0..1}", "a.1.1"]),
        (["h.00", "h.01"], ["h.00", "h.01"]),
        (["h.9", "h.10"], ["h.{9..10}"]),
        (["x1", "x2"], ["x1", "x2"]),
        ([], []),
    ],
)
def test_compress_shortens_runs(names, patterns):
    assert compress(names) == patterns
    assert expand(patterns) == names


NAMES = st.lists(
    st.lists(
        st.one_of(st.sampled_from(["h", "attn", "0a", "00"]), st.integers(0, 12).map(str)),
        min_size=1,
        max_size=4,
    ).map(".".join)
)


@given(NAMES)
def test_expand_inverts_compress(names):
    patterns = compress(names)
    assert expand(patterns) == names
    assert len(patterns) <= len(names)


def test_expand_accepts_two_ranges():
    assert expand(["a.{0..1}.b.{3..4}"]) == ["a.0.b.3", "a.0.b.4", "a.1.b.3", "a.1.b.4"]


@pytest.mark.parametrize("pattern", ["h.{5..2}", "h.{0..999999999}", "a.{0..99999}.{0..99999}.{0..99999}"])
def test_expand_rejects_invalid_and_huge_ranges(pattern):
    with pytest.raises(ConfigError) as caught:
        expand([pattern])
    assert caught.value.code == "MT202"
    assert caught.value.fix
