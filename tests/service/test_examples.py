"""The Python and ``buf curl`` examples, run against the real server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from pyruntime.types import Capability
from tests import tools
from tests.fakes import fake_model
from tests.service.conftest import Stack

EXAMPLES = Path(__file__).parents[2] / "examples"


async def output_of(*command: str, **environment: str) -> str:
    """What a program prints; it must end well."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | environment,
        cwd=EXAMPLES.parent,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_python(stack: Stack):
    first = fake_model("an-encoder", {Capability.EMBED})  # the demo's first model too can only embed
    stack.registry.declare(first.info.name)
    stack.registry.set_serving(first.info.name, first)
    example = str(EXAMPLES / "python" / "example.py")
    lines = (await output_of(sys.executable, example, stack.address, LABELS="y,n")).splitlines()
    assert lines == [
        "ok",
        "embedded: (10, 12) float32",
        "scored: (2, 2)",
        "error: INVALID_ARGUMENT INVALID_FIELD sampling.temperature python-example-1",
    ]
    example = str(EXAMPLES / "python" / "many_calls.py")
    lines = (await output_of(sys.executable, example, stack.address)).splitlines()
    assert lines == [f"generated: {['ok'] * 8}", "piece: o", "piece: k"]


async def test_buf(stack: Stack):
    buf = tools.need("buf", "pip install buf-bin")
    path = os.pathsep.join([str(Path(buf).parent), os.environ["PATH"]])
    models = {"GENERATE_MODEL": "decoder", "EMBED_MODEL": "encoder"}
    out = await output_of("sh", str(EXAMPLES / "buf" / "calls.sh"), stack.address, PATH=path, **models)
    decoder, values, text = json.JSONDecoder(), [], out.strip()
    while text:
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:].lstrip()
    assert values[0] == {"status": "SERVING"}
    assert [model["name"] for model in values[1]["models"]] == ["decoder", "encoder"]
    assert "".join(value.get("text", "") for value in values[2:4]) == "ok"
    assert len(values[4]["results"][0]["dense"]["values"]) == 12
    assert values[5]["tokenIds"][1:] == list(b"A cat")
