"""What floods of calls that are refused may not do: fill the log."""

from __future__ import annotations

import grpc
import pytest

from pyruntime.config import Settings
from pyruntime.v1 import embed_pb2
from tests.service.call_site import Log, call_site


async def test_of_a_flood_of_refusals_some_have_lines_and_all_are_counted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pyruntime.telemetry.quota.BURST", 3.0)
    monkeypatch.setattr("pyruntime.telemetry.quota.PER_S", 1e-6)
    with Log().kept() as log:
        async with call_site(Settings(port=0)) as (stack, _):
            for request in [embed_pb2.EmbedRequest(model="none", inputs=[{"text": "x"}])] * 8 + [
                embed_pb2.EmbedRequest(model="decoder")
            ]:
                with pytest.raises(grpc.aio.AioRpcError):
                    await stack.embed.Embed(request)
            await stack.embed.Embed(embed_pb2.EmbedRequest(model="decoder", inputs=[{"text": "words"}]))
            counted = stack.server.calls.ended["pyruntime.v1.EmbedService/Embed", "NOT_FOUND"]
    assert counted == 8
    assert [line["code"] for line in log.calls] == ["NOT_FOUND"] * 3 + ["INVALID_ARGUMENT", "OK"]
