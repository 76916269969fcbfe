"""What a type checker says of scripts that use the clients."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # reads numpy's types

RIGHT = """
import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pyruntime.client import NEVER, ApiError, AsyncClient, Client, RankedDocument, Retry, Violation
from pyruntime.v1 import model_pb2


def use(client: Client) -> None:
    text: str = client.generate("a", model="m", temperature=0, stop="x", json_schema={"type": "null"})
    chat: str = client.generate([{"role": "user", "content": text}], tools=[{"a": 1}])
    pieces: Iterator[str] = client.stream(chat, max_new_tokens=3)
    vectors: np.ndarray = client.embed([*pieces, [1, 2], np.array([1])], kind="dense", pooling="cls", dimensions=3)
    client.embed_many((str(number) for number in vectors), progress=True)
    scores: np.ndarray = client.score("q", ["a"], [" yes"], apply_softmax=True)
    ranked: list[RankedDocument] = client.rerank("q", ["a"], top_n=scores.size)
    able: bool = model_pb2.CAPABILITY_EMBED in client.models()[ranked[0].index].capabilities
    client.classify([("a", "b")], top_k=int(able))
    try:
        client.complete("a").usage.completion_tokens.bit_length()
    except ApiError as error:
        bad: tuple[Violation, ...] = error.violations
        print(bad, error.retry_after_s)


async def use_async(client: AsyncClient) -> None:
    async for piece in client.stream(await client.generate("a")):
        print(piece.upper())


def retry(error: ApiError, wait_s: float) -> None: ...


use(Client("h:1", retry=Retry(on_wait=retry), token=lambda: Path("x").read_text(), metadata={"x-a": "b"}))
use(Client(retry=NEVER, timeout_s=None))
asyncio.run(use_async(AsyncClient()))
"""
WRONG = """
from pyruntime.client import Client

client = Client()
client.generate("a", temprature=1)
client.generate("a", temperature="x")
client.embed(["a"], pooling="max")
client.embed(["a"], kind="dens")
client.rerank("q", [5])
Client(tokens="a")
"""


def test_right_uses_pass_and_wrong_ones_do_not(tmp_path: Path):
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "right.py", "wrong.py"]
    root = str(Path(__file__).resolve().parents[2])
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": root},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    # Of the scripts alone: what generated stubs lack in strictness is not told of an installed package.
    errors = [line for line in ran.stdout.splitlines() if re.match(r"\w+\.py:\d+: error: ", line)]
    lines = [line for line, text in enumerate(WRONG.splitlines(), 1) if "(" in text and text != "client = Client()"]
    assert [error.rpartition(": error: ")[0] for error in errors] == [f"wrong.py:{line}" for line in lines], ran.stdout
