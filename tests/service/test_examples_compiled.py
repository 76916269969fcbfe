"""The Go and Java examples, built with Debian's compilers and libraries and run against the real server."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import google.rpc.status_pb2
import pytest

from tests import tools
from tests.service.conftest import Stack

pytestmark = pytest.mark.slow  # compilers

EXAMPLES = Path(__file__).parents[2] / "examples"
GO_PACKAGES = (
    "apt-get install golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev"
    " golang-google-genproto-dev protoc-gen-go-1-5 protobuf-compiler"
)
JAVA_PACKAGES = (
    "apt-get install openjdk-17-jdk-headless libgrpc-java libprotobuf-java libnetty-java libgoogle-gson-java"
    " libperfmark-java protobuf-compiler protobuf-compiler-grpc-java-plugin"
)
ENVIRONMENT = {**os.environ, "GOOGLEAPIS": str(Path(google.rpc.status_pb2.__file__).parents[2]), "LABELS": "y,n"}


async def ran(*command: str, **environment: str) -> list[str]:
    """The lines that a program prints; it must end well."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=ENVIRONMENT | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 250)
    assert process.returncode == 0, err.decode() + out.decode()
    return out.decode().splitlines()


def need_file(path: str, how_to_get: str) -> None:
    if not Path(path).exists():
        tools.missing(f"{path} is not there: {how_to_get}")


def check(lines: list[str], request_id: str, code: str) -> None:
    """What both examples tell of the fake models."""
    assert "generated: ok" in lines
    assert any(line.startswith("embedded: 0 12 numbers") for line in lines)
    assert any(line.startswith("embedded: 1 ") and "is blank" in line for line in lines)
    assert sum(line.startswith("scores: ") for line in lines) == 2
    assert any(line.startswith(f"error: {code}") and request_id in line for line in lines)
    assert "  reason: INVALID_FIELD" in lines
    assert any(line.startswith("  field: sampling.temperature") for line in lines)


async def test_go(stack: Stack, tmp_path: Path):
    for program in ("go", "protoc", "protoc-gen-go"):
        tools.need(program, GO_PACKAGES)
    need_file("/usr/share/gocode/src/google.golang.org/grpc/call.go", GO_PACKAGES)
    folder = tmp_path / "src" / "pyruntime-example"
    shutil.copytree(EXAMPLES / "go", folder)
    await ran("sh", str(EXAMPLES / "go" / "generate.sh"), str(folder))
    paths = {"GO111MODULE": "off", "GOPATH": f"{tmp_path}:/usr/share/gocode"}
    await ran("go", "build", "-o", str(tmp_path / "example"), "pyruntime-example", **paths)
    config = str(EXAMPLES.parent / "deploy" / "service-config.json")
    lines = await ran(str(tmp_path / "example"), stack.address, SERVICE_CONFIG=config)
    check(lines, "go-example-1", "InvalidArgument")
    assert {"health: SERVING", "deadline: true"} <= set(lines)


async def test_java(stack: Stack, tmp_path: Path):
    for program in ("javac", "protoc", "grpc_java_plugin"):
        tools.need(program, JAVA_PACKAGES)
    for jar in ("grpc-netty", "netty-handler", "perfmark-api", "gson"):
        need_file(f"/usr/share/java/{jar}.jar", JAVA_PACKAGES)
    (run,) = await ran("sh", str(EXAMPLES / "java" / "build.sh"), str(tmp_path))
    command = run.replace("'", "").replace("HOST:PORT", stack.address).split()
    lines = await ran(*command)
    check(lines, "java-example-1", "INVALID_ARGUMENT")
    assert "deadline: DEADLINE_EXCEEDED" in lines
