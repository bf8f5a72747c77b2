"""Check that the address of a Ray cluster accepts connections: Ray itself retries for minutes."""

from __future__ import annotations

import socket

from memtune.errors import EnvironmentFault, UsageError

_PATIENCE_S = 10.0
_CLIENT, _CLIENT_PORT = "ray://", 10001
_RESOLVED_BY_RAY = ("auto", "local")
"""Addresses that Ray resolves itself."""


def check_reachable(address: str, patience_s: float = _PATIENCE_S) -> None:
    """Open and close one connection to `address`: `host:port` or `ray://host[:port]`.

    Raises:
        UsageError: It is no such address.
        EnvironmentFault: There is no answer within `patience_s`.
    """
    if address in _RESOLVED_BY_RAY:
        return
    host, port = _parts(address)
    try:
        socket.create_connection((host, port), timeout=patience_s).close()
    except OSError as error:
        raise EnvironmentFault(
            f"The Ray cluster at {address} cannot be reached.",
            evidence=f"{host}, port {port}: {error}",
            fix="check --ray-address; `ray status` on the cluster shows where it listens",
            code="MT514",
        ) from error


def _parts(address: str) -> tuple[str, int]:
    client = address.startswith(_CLIENT)
    host, colon, port = address.removeprefix(_CLIENT).rpartition(":")
    if client and not colon:
        return port, _CLIENT_PORT
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--ray-address {address} is no address.", fix="HOST:6379, or ray://HOST:10001", code="MT100"
        )
    return host.strip("[]"), int(port)
