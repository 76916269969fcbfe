"""The real service over fakes in a process of its own, to be killed: python -m tests.service.fake_server PORT."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from subprocess import PIPE, Popen

from pyruntime.registry import ModelRegistry
from pyruntime.service.server_builder import build_server
from pyruntime.types import Capability
from tests.fakes import fake_model


async def serve(port: int) -> None:
    from tests.service.conftest import SETTINGS

    registry = ModelRegistry()
    server = build_server(registry, SETTINGS.model_copy(update={"port": port}))
    registry.declare("decoder")
    print(await server.start(), flush=True)
    model = fake_model("decoder", {Capability.GENERATE, Capability.SCORE, Capability.EMBED})
    registry.set_serving("decoder", model)
    await server.wait_closed()


@contextmanager
def process(port: int = 0):
    """Runs while the block does; gives the process and its port."""
    child = Popen([sys.executable, "-m", "tests.service.fake_server", str(port)], stdout=PIPE, text=True)
    try:
        assert child.stdout is not None
        yield child, int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
