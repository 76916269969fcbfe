"""A server of this checkout on a free port, ready to be measured, and stopped whatever happens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
START_LIMIT_S = 300


@contextmanager
def running_server(dtype: str, log: Path, *options: str) -> Iterator[str]:
    """The address of a server with both demo models and ``options``, SERVING. Its output goes to ``log``.

    Raises ``RuntimeError`` with the end of the log when it stops or is not SERVING in time.
    """
    with started_server(log, "--demo", "--dtype", dtype, *options) as (address, _):
        yield address


@contextmanager
def started_server(log: Path, *options: str) -> Iterator[tuple[str, int]]:
    """The address and process id of a server with ``options`` alone, as ``running_server`` starts it."""
    address = f"127.0.0.1:{_free_port()}"
    host, port = address.split(":")
    command = [sys.executable, "server.py", "--host", host, "--port", port, *options]
    with log.open("w") as output:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait_until_serving(address, process, log)
            yield address, process.pid
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_serving(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the server stopped with code {process.returncode}:\n{_tail(log)}")
            try:
                answer = health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass  # not listening yet
            time.sleep(0.2)
    raise RuntimeError(f"the server is not SERVING after {START_LIMIT_S} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
