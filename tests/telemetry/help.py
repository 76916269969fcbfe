"""A metrics port, and what a browser, a scraper or a rude client gets from it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from prometheus_client.parser import text_string_to_metric_families

from pyruntime.config import Settings
from pyruntime.telemetry import site
from tests.service.call_site import call_site
from tests.service.conftest import Stack

SETTINGS = Settings(port=0, metrics_port=0)


@dataclass
class Page:
    """An open metrics port, and the fake model behind the server."""

    address: str
    compute: Any = None

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers by lower-case name, body."""
        return await asyncio.to_thread(self._get, path, method, headers)

    def _get(self, path: str, method: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """Every sample by its name and its labels' values, in the order of the labels' names."""
        _, _, body = await self.get("/metrics")
        return samples(body.decode())

    async def metrics_after(self, count: int) -> dict[tuple[str, ...], float]:
        """The metrics once so many calls are counted: an error reaches its client a moment before that."""
        for _ in range(1000):
            found = await self.metrics()
            if sum(value for key, value in found.items() if key[0] == "pyruntime_requests_total") >= count:
                return found
            await asyncio.sleep(0.01)
        raise AssertionError(f"{count} calls are never counted")

    async def status(self) -> Any:
        return json.loads((await self.get("/status.json"))[2])


def samples(text: str) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *(value for _, value in sorted(sample.labels.items())))
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


@contextlib.asynccontextmanager
async def page_site(settings: Settings = SETTINGS) -> AsyncIterator[tuple[Stack, Page]]:
    """A server over a real engine with a fake model named ``decoder``, and its metrics port, which reuses no answer."""
    async with call_site(settings) as (stack, compute):
        server = stack.server
        with (
            mock.patch.object(site, "REUSE_FACTOR", 0),
            site.status_page(settings, stack.registry, server.calls, lambda: server.is_ready) as address,
        ):
            yield stack, Page(address, compute)
