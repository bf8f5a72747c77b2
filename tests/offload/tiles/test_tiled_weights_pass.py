"""Pass of tiled weights: tiles on the device, copies and prefetch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from support.zoo_paths import ZOO

from memtune.offload.tiles.tile_ops_pass import TileGroup, split_rows
from memtune.offload.tiles.tiled_weights_pass import tileable
from memtune.program.edit import Edit
from memtune.program.parameter_columns import columns_of
from memtune.program.step import Kind, Resource, Step, Tier
from memtune.search_spaces.offload.states.zero_infinity import ZeroInfinity
from memtune.testing import drift, rewritten
from memtune.testing.drift_check import fresh_programs, plain_program

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("ssd")]
TILED = ZeroInfinity(kind="zero_infinity", parameters="host", tiles=4)
ON_SSD = TILED.model_copy(update={"parameters": "ssd", "tiles": 3})
ALL_ON_SSD = ON_SSD.model_copy(update={"gradients": "ssd"})


@given(st.integers(1, 300), st.integers(1, 80))
def test_split_rows_covers_every_row_once(count: int, parts: int) -> None:
    rows = split_rows(count, parts)
    assert [i for each in rows for i in range(each.start, each.stop)] == list(range(count))
    sizes = [each.stop - each.start for each in rows]
    assert max(sizes) - min(sizes) <= 1
    assert len(rows) == min(parts, count)


def test_tiled_weights_pass_numbers_names_in_the_order_of_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step depends on the seed of Python's hashes."""
    asked: list[str] = []
    name_id, put = Edit.name_id, TileGroup.insert

    def asks(edit: Edit, name: str) -> int:
        asked.append(name)
        return name_id(edit, name)

    def puts(tiles: TileGroup, step: Step, edit: Edit) -> None:
        asked.clear()
        put(tiles, step, edit)
        assert asked == list(dict.fromkeys(name for name, *_ in tiles.tile_ops.ops))

    monkeypatch.setattr(Edit, "name_id", asks)
    monkeypatch.setattr(TileGroup, "insert", puts)
    with fresh_programs():
        rewritten(ZOO["tied"], TILED)
    assert asked


def peaks_of(step: Step, parameter: int) -> tuple[int, int]:
    """Return the peak bytes on the device of a weight, and of its gradient in one micro-batch."""
    found = []
    for kind in (Kind.COMMUNICATION, Kind.TEMPORARY):
        mine = np.flatnonzero(
            (step.storages.owner == parameter)
            & (step.storages.kind == kind)
            & (step.storages.tier == Tier.DEVICE)
            & (step.storages.bytes > 0)
        )
        at = [
            step.storages.bytes[
                mine[(step.storages.producer[mine] <= op) & (step.freed_after[mine] >= op)]
            ].sum()
            for op in range(step.ops.n)
        ]
        found.append(int(max(at)))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("model", "technique"),
    [
        ("tied", TILED),
        ("tied", ON_SSD),
        ("tied", ALL_ON_SSD),
        pytest.param("gpt", ALL_ON_SSD, marks=pytest.mark.slow),
    ],
    ids=["host", "ssd", "gradients", "gpt"],
)
def test_tile_weights_has_at_most_two_tiles_on_the_device(model: str, technique: ZeroInfinity) -> None:
    """Of each large weight, and of its gradient, two tiles at most; every op and byte is as recorded."""
    assert drift(ZOO[model], technique) == ""
    plain = plain_program(ZOO[model]).step
    columns, tiled = columns_of(plain.parameters), tileable(plain, technique.tiles)
    assert tiled
    step, whole = (
        rewritten(ZOO[model], each) for each in (technique, technique.model_copy(update={"tiles": 1}))
    )
    for p in tiled:
        wide, deep = columns.shapes[p]
        tile_bytes = -(-wide // technique.tiles) * deep * int(columns.itemsize[p])
        assert max(peaks_of(step, p)) <= 2 * tile_bytes
        assert min(peaks_of(whole, p)) == wide * deep * columns.itemsize[p]
    assert step.peak_bytes() < whole.peak_bytes()
    resident = sum(
        int(
            whole.storages.bytes[whole.storages.kind == Kind.COMMUNICATION][
                whole.storages.owner[whole.storages.kind == Kind.COMMUNICATION] == p
            ].sum()
        )
        for p in tiled
    )
    weights = sum(int(columns.numel[p] * columns.itemsize[p]) for p in tiled)
    for link, more in (
        (Resource.HOST_TO_DEVICE, 2 * weights - resident),
        (Resource.DEVICE_TO_HOST, 0),
        (Resource.SSD_READ, 0),
        (Resource.SSD_WRITE, 0),
    ):
        mine, theirs = (
            int(each.ops.traffic_bytes[each.ops.resource == link].sum()) for each in (step, whole)
        )
        assert mine == theirs + more, (
            "every weight is loaded once in each pass, also that of a block which is resident between the two"
        )


def test_tile_weights_prefetches_the_next_tile_while_one_computes() -> None:
    step = rewritten(ZOO["tied"], TILED)
    names = [step.names[i] for i in step.ops.name]
    first = names.index("aten.addmm.out")
    assert names[first - 4 : first] == ["aten.empty.memory_format", "memtune.copy_to_device_.default"] * 2
    assert (step.ops.stream[first - 3], step.ops.prefetch[first - 1]) == (1, 1), (
        "compute waits for the first tile; the second is prefetched"
    )
