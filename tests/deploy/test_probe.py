"""``pyruntime health``, which containers are probed with."""

from __future__ import annotations

import asyncio
import json

import pytest

from pyruntime.client import cli
from tests.service.conftest import Stack


async def probe(stack: Stack, *arguments: str) -> int:
    return await asyncio.to_thread(cli.main, ["health", "--target", stack.address, *arguments])


async def test_the_exit_status_is_the_health(stack: Stack, capsys: pytest.CaptureFixture[str]):
    assert await probe(stack) == 0
    assert await probe(stack, "model/decoder", "--json") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "SERVING"
    assert json.loads(second) == {"service": "model/decoder", "status": "SERVING"}
    stack.registry.drain()
    async with asyncio.timeout(10):
        while await probe(stack) == 0:
            pass
    assert capsys.readouterr().out.splitlines()[-1] == "NOT_SERVING"
    assert await probe(stack, "liveness") == 0


async def test_what_cannot_be_asked_is_not_healthy(bare: Stack, capsys: pytest.CaptureFixture[str]):
    assert await probe(bare) == 1
    assert capsys.readouterr().out.strip() == "NOT_SERVING"
    assert await probe(bare, "model/nobody") == 1
    assert "NOT_FOUND: the server has no service 'model/nobody'" in capsys.readouterr().err
    assert await asyncio.to_thread(cli.main, ["health", "--target", "127.0.0.1:1", "--timeout", "1"]) == 1
