"""Ray clusters: whether an address answers, the bundles of a trial on its nodes, and a private cluster.

A bundle is as large as a node allows: a trial that fills nodes has them to itself, and a smaller one has all
of its ranks on one node. Concurrent trials have disjoint devices.

The private cluster on this machine runs below a supervisor, so that it ends with the driver.

Ray's own clean-up leaves two of its agents behind when the driver is killed, and they cannot be found by a
marker in their environment, which they overwrite with their titles. So the driver does not start Ray: a head
process below a supervisor does (`python -m memtune.executors.ray.cluster`), and reports the address that the
driver joins. All daemons, workers and ranks are then descendants of that supervisor.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from memtune._optional import require
from memtune.errors import EnvironmentFault, UsageError
from memtune.executors import core_wait_s, descendants, end_supervisor, last_line, masked, start_supervisor

START_S = 90.0
OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum is 75 MiB; only small records go through it
SOCKET_FOLDER_CHARS = 40  # Ray appends some 60 to it, and the name of a Unix socket has at most 107
_TOKEN = secrets.token_hex(32)  # one per process: Ray reads it once
_PATIENCE_S = 10.0
_CLIENT, _CLIENT_PORT = "ray://", 10001
_RESOLVED_BY_RAY = ("auto", "local")
"""Addresses that Ray resolves itself."""


def check_reachable(address: str) -> None:
    """Open and close one connection to `address`: `host:port` or `ray://host[:port]`.

    Raises:
        UsageError: It is no such address.
        EnvironmentFault: There is no answer.
    """
    if address in _RESOLVED_BY_RAY:
        return
    host, port = _parts(address)
    try:
        socket.create_connection((host, port), timeout=_PATIENCE_S).close()
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


def bundles(ranks: int, nodes: Sequence[int]) -> list[int]:
    """Return the ranks of each bundle of one trial, largest first; empty if the cluster is too small."""
    for size in range(min(ranks, max(nodes, default=0)), 0, -1):
        whole, rest = divmod(ranks, size)
        wanted = [size] * whole + [rest] * (rest > 0)
        if _fit(wanted, nodes) >= 1:
            return wanted
    return []


def side_by_side(ranks: int, nodes: Sequence[int]) -> int:
    """Return the number of trials of `ranks` that the nodes hold at the same time."""
    wanted = bundles(ranks, nodes)
    return _fit(wanted, nodes) if wanted else 0


def _fit(wanted: Sequence[int], nodes: Sequence[int]) -> int:
    """Return how many times the bundles fit, each placed on the node with the least room that holds it."""
    free, count = list(nodes), 0
    while True:
        for size in wanted:
            holding = [(room, i) for i, room in enumerate(free) if room >= size]
            if not holding:
                return count
            free[min(holding)[1]] -= size
        count += 1


def access() -> dict[str, str]:
    """Return the environment with which processes join the private cluster, token included."""
    # The token is the user's if there is one, else one that only this process and its children know.
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or _TOKEN}


class Cluster:
    """Starts a cluster without dashboard, in its own folder, that requires a token (`access`).

    Args:
        cpus: Logical processors, one for each rank that runs at the same time.

    Raises:
        EnvironmentFault: Ray does not start; the evidence is the last line of its output.
    """

    def __init__(self, cpus: int) -> None:
        base = tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="mt-", dir=base if len(base) < SOCKET_FOLDER_CHARS else "/tmp")
        own = {
            **access(),
            "RAY_USAGE_STATS_ENABLED": "0",
            # it would end actors for what their ranks use; the kernel finds the rank
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        head = {
            "rank": 0,
            "argv": [sys.executable, "-P", "-m", "memtune.executors.ray.cluster", str(cpus), self.folder],
            "env": {**os.environ, **own, "PYTHONUNBUFFERED": "1"},
            "log": f"{self.folder}/head.log",
        }
        self._shim = start_supervisor()
        try:
            self.address = _address(self._shim, {"ranks": [head], "scratch": self.folder})
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Return whether the head and its daemons run."""
        return self._shim.poll() is None

    def close(self) -> None:
        """Kill the whole cluster; return when nothing of it is left. May be called twice."""
        end_supervisor(self._shim)
        shutil.rmtree(self.folder, ignore_errors=True)


def _address(supervisor: subprocess.Popen[bytes], spec: dict[str, Any]) -> str:
    """Give the supervisor its spec and wait for the address that the head reports."""
    if supervisor.stdin is None or supervisor.stdout is None:
        raise ValueError("the supervisor was started without pipes")
    supervisor.stdin.write(json.dumps(spec).encode() + b"\n")
    supervisor.stdin.flush()
    why, stop_s = f"no answer after {START_S:g} s", time.monotonic() + START_S
    while True:
        left_s = stop_s + core_wait_s(supervisor.pid) - time.monotonic()
        if not select.select([supervisor.stdout], [], [], min(max(left_s, 0.0), 5.0))[0]:
            if left_s <= 0:
                break
            continue
        report = json.loads(
            supervisor.stdout.readline() or '{"exit": 0, "tail": "its supervisor was killed"}'
        )
        if "line" in report:
            return str(json.loads(report["line"])["address"])
        if "exit" in report:
            why = last_line(masked(report["tail"])) or f"exit code {report['exit']}"
            break
    raise EnvironmentFault(
        "Ray does not start.", evidence=why, fix="--executor local needs no Ray", code="MT513"
    )


def head(cpus: int, folder: str) -> None:
    """Start the cluster, report its address, and keep it until killed, or one of its daemons is gone."""
    # A cluster without its control store or raylet answers no request, and Ray would end the driver for
    # it after a minute.
    ray = require("ray")
    ray.init(
        address="local",  # never another cluster, whatever the environment or an address file says
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=folder,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    address = ray.get_runtime_context().gcs_address
    os.write(int(os.environ["MEMTUNE_REPORT_FD"]), json.dumps({"address": address}).encode() + b"\n")
    while set(descendants(os.getpid()).values()) >= {"gcs_server", "raylet"}:
        time.sleep(0.5)
    os._exit(1)  # not by way of Ray's own clean-up, which would wait for them


if __name__ == "__main__":
    head(int(sys.argv[1]), sys.argv[2])
