"""Takes docs/status-page.png: serves both demo models, makes a mixed load, has Chromium draw the status page.

    python tools/status_page_shot.py [--seconds 150] [--out docs/status-page.png] [--dark]

For an otherwise idle machine; needs `chromium` on PATH.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc

from pyruntime.v1 import (
    common_pb2,
    embed_pb2,
    embed_pb2_grpc,
    generate_pb2,
    generate_pb2_grpc,
    score_pb2,
    score_pb2_grpc,
)

ROOT = Path(__file__).resolve().parent.parent
DECODER, ENCODER = "gemma-3-270m", "all-minilm-l6-v2"
WORDS = "the a river mountain light of and in house tree winter music silent garden water stone many under sky".split()
CHROMIUM = (
    "chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=7000"
).split()
SIZE = "1280,1440"

Call = Callable[[], Awaitable[None]]


class Load:
    """Clients that call now and then, each task at its own pace, and now and then wrongly."""

    def __init__(self, channel: grpc.aio.Channel, seconds: float) -> None:
        self._generate = generate_pb2_grpc.GenerateServiceStub(channel)
        self._embed = embed_pb2_grpc.EmbedServiceStub(channel)
        self._score = score_pb2_grpc.ScoreServiceStub(channel)
        self._random = random.Random(7)
        self._end = time.monotonic() + seconds
        self._prefix = self._text(100)

    async def run(self) -> None:
        wrong = (self._unknown_model, self._no_inputs, self._late)
        clients = [
            *(self._client(self._stream, 1.0) for _ in range(4)),
            *(self._client(lambda: self._embed_texts(ENCODER), 0.4) for _ in range(2)),
            self._client(lambda: self._embed_texts(DECODER), 1.0),
            self._client(self._score_items, 1.5),
            *(self._client(each, 40.0) for each in wrong),
        ]
        await asyncio.gather(*clients)

    async def _client(self, call: Call, pause_s: float) -> None:
        while time.monotonic() < self._end:
            await asyncio.sleep(self._random.expovariate(1 / pause_s))
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call()

    def _text(self, count: int) -> str:
        return " ".join(self._random.choices(WORDS, k=count))

    def _inputs(self, count: int, words: int) -> list[common_pb2.Input]:
        return [common_pb2.Input(text=" " + self._text(self._random.randint(3, words))) for _ in range(count)]

    async def _stream(self) -> None:
        stop = generate_pb2.Stop(max_new_tokens=self._random.randint(20, 80), ignore_eos=True)
        text = self._prefix + self._text(self._random.randint(5, 60))
        async for _ in self._generate.GenerateStream(generate_pb2.GenerateRequest(model=DECODER, text=text, stop=stop)):
            pass

    async def _embed_texts(self, model: str) -> None:
        await self._embed.Embed(embed_pb2.EmbedRequest(model=model, inputs=self._inputs(4, 60)))

    async def _score_items(self) -> None:
        query = common_pb2.Input(text=self._text(50))
        labels = [" yes", " no"]
        await self._score.Score(
            score_pb2.ScoreRequest(model=DECODER, query=query, items=self._inputs(8, 10), labels=labels)
        )

    async def _unknown_model(self) -> None:
        await self._embed.Embed(embed_pb2.EmbedRequest(model="gone", inputs=self._inputs(1, 5)))

    async def _no_inputs(self) -> None:
        await self._embed.Embed(embed_pb2.EmbedRequest(model=ENCODER))

    async def _late(self) -> None:
        stop = generate_pb2.Stop(max_new_tokens=2000, ignore_eos=True)
        await self._generate.Generate(generate_pb2.GenerateRequest(model=DECODER, text="It was", stop=stop), timeout=1)


async def under_load(address: str, page: str, arguments: argparse.Namespace) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        load = asyncio.create_task(Load(channel, arguments.seconds + 30).run())
        await asyncio.sleep(arguments.seconds)
        with tempfile.TemporaryDirectory() as profile:
            options = [f"--user-data-dir={profile}", f"--window-size={SIZE}", f"--screenshot={arguments.out}"]
            options += ["--blink-settings=preferredColorScheme=0"] if arguments.dark else []
            await asyncio.to_thread(subprocess.run, [*CHROMIUM, *options, page], check=True, timeout=120)
        load.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/status-page.png")
    parser.add_argument("--dark", action="store_true")
    arguments = parser.parse_args()
    command = [
        sys.executable,
        str(ROOT / "server.py"),
        "--demo",
        "--port",
        "0",
        "--metrics-port",
        "0",
        "--no-access-log",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        said = ""
        try:
            while not re.search(r"^status page .*$", said, re.M):
                line = server.stdout.readline()
                if not line:
                    raise SystemExit("the server did not start")
                said += line
            address = re.search(r"^SERVING on (\S+):", said, re.M)
            page = re.search(r"(http://\S+)$", said, re.M)
            assert address is not None
            assert page is not None
            asyncio.run(under_load(address[1], page[1], arguments))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
