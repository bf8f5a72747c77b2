"""Addresses of Ray clusters: what answers, what does not, and what is none."""

from __future__ import annotations

import socket

import pytest

from memtune.errors import EnvironmentFault, UsageError
from memtune.executors.ray.cluster import _parts, check_reachable


def test_check_reachable_accepts_open_port_and_reports_closed_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_reachable(f"127.0.0.1:{port}")
        check_reachable(f"ray://127.0.0.1:{port}")
    with pytest.raises(EnvironmentFault, match=f"127.0.0.1:{port} cannot be reached") as caught:
        check_reachable(f"127.0.0.1:{port}")
    assert "refused" in str(caught.value)


def test_check_reachable_reports_unresolved_name() -> None:
    with pytest.raises(EnvironmentFault, match="cannot be reached"):
        check_reachable("no-such-host.invalid:6379")


def test_check_reachable_skips_addresses_that_ray_resolves() -> None:
    check_reachable("auto")


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("head:6379", ("head", 6379)),
        ("ray://head", ("head", 10001)),
        ("ray://head:1", ("head", 1)),
        ("[::1]:6379", ("::1", 6379)),
    ],
)
def test_address_is_split_into_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert _parts(address) == parts


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:port", "head:70000", "ray://head:x"])
def test_check_reachable_refuses_malformed_address(address: str) -> None:
    with pytest.raises(UsageError, match="is no address"):
        check_reachable(address)
