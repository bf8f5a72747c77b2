"""Choose the cases of this run: `drawn(n)` leaves n of a grid, `--slow-part` one part of the slow tests."""

from __future__ import annotations

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-part",
        metavar="SEED/N",
        type=lambda part: tuple(int(each) for each in part.split("/", 1)),
        help="of the tests marked slow, run part SEED modulo N of N parts alone",
    )


@pytest.hookimpl(tryfirst=True)  # before the plugin that drops those not asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_undrawn(items)
    if (part := config.getoption("slow_part")) is not None:
        seed, n = part
        others = [item for item in items if item.get_closest_marker("slow") and _part(item, n) != seed % n]
        dropped = set(others)
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=others)


def _part(item: pytest.Item, n: int) -> int:
    return zlib.crc32(item.nodeid.encode()) % n


def _mark_undrawn(items: list[pytest.Item]) -> None:
    """`drawn(n)`: n of a test's cases run by default, evenly spread and other ones for each test; the rest is
    marked slow.
    """
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("drawn"):
            grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in grids.items():
        mark = cases[0].get_closest_marker("drawn")
        assert mark is not None
        (n,) = mark.args
        first = zlib.crc32(name.encode())
        kept = {(first + i * len(cases) // n) % len(cases) for i in range(n)}
        for i, case in enumerate(cases):
            if i not in kept:
                case.add_marker(pytest.mark.slow)
