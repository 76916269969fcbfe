"""The Node example, run against the real server."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pyruntime.errors import NotReady
from tests import tools
from tests.fakes import BOS, vector_of
from tests.service.conftest import Stack
from tests.service.secured import TOKEN, pem_files, served
from tests.service.test_service_config import failing_first
from tools import descriptor_set

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "node"


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("node") / "pyruntime.binpb"
    descriptor_set.write(path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Any]:
    return pem_files(tmp_path_factory.mktemp("pem"))


async def node(descriptors: Path, *arguments: str, **further: str) -> list[dict]:
    """The lines of JSON that a script prints."""
    program = tools.need("node", "Node.js 20 or newer, from nodejs.org or the distribution")
    if not (FOLDER / "node_modules").is_dir():
        tools.missing("the example's packages are not installed: cd examples/node && npm ci --ignore-scripts")
    environment = {**os.environ, "PYRUNTIME_DESCRIPTORS": str(descriptors), "LABELS": "y,n"} | further
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        cwd=FOLDER,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return [json.loads(line) for line in out.decode().splitlines()]


async def test_example(stack: Stack, descriptors: Path):
    lines = await node(descriptors, "example.mjs", stack.address)
    told = {key: [each[key] for each in lines if key in each] for line in lines for key in line}
    assert told["health"] == ["SERVING"]
    assert told["models"] == [["decoder", "encoder"]]
    assert told["generated"] == [{"text": "ok", "tokens": 2}]
    vector, bad = told["embedded"]
    assert vector["vector"] == vector_of([BOS, *b"A cat sits on the mat."], 12).tolist()
    assert (bad["index"], "is blank" in bad["error"]) == (1, True)
    assert [len(scores) for scores in told["scores"][0]] == [2, 2]
    (error,) = told["error"]
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert [each["field"] for each in error["violations"]] == ["sampling.temperature"]
    assert error["requestId"] == "node-example-1"
    assert told["deadline"] == ["DEADLINE_EXCEEDED"]


async def test_the_service_config_makes_grpc_js_send_again(stack: Stack, descriptors: Path):
    times = failing_first(stack, "embed", NotReady("loading", 0.3))
    await node(descriptors, "example.mjs", stack.address)
    assert len(times) == 2
    assert times[1] - times[0] >= 0.29


async def test_tls_and_a_token(descriptors: Path, files):
    settings = {"tls_certificate": files["server"], "tls_key": files["server_key"], "token_file": files["tokens"]}
    async with served(**settings) as address:
        lines = await node(descriptors, "example.mjs", address, CA=files["ca"], TOKEN=TOKEN)
    assert {"models": ["decoder"]} in lines
    assert {"generated": {"text": "ok", "tokens": 2}} in lines
