"""Models of a fixture, lent to one server after another."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping

from pyruntime.config import Settings
from pyruntime.registry import ModelRegistry, ServedModel
from pyruntime.service.server_builder import RuntimeServer, build_server


@contextlib.asynccontextmanager
async def serving(
    models: Mapping[str, ServedModel], settings: Settings | None = None
) -> AsyncIterator[tuple[RuntimeServer, ModelRegistry]]:
    """A started server of these models, which stay loaded when it ends."""
    registry = ModelRegistry()
    for name, model in models.items():
        registry.declare(name)
        registry.set_serving(name, model)
    server = build_server(registry, settings or Settings(port=0))
    await server.start()
    try:
        yield server, registry
    finally:
        # A server that ends turns away what its models' engines are still asked; these are asked by the next server.
        for name in models:
            registry.set_unloading(name)
            registry.remove(name)
        await server.drain(0)
