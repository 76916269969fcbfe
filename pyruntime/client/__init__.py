"""Python client: ``Client`` for ordinary code, ``AsyncClient`` for asyncio. Results are str and numpy."""

from __future__ import annotations

from pyruntime.client.asynchronous import AsyncClient
from pyruntime.client.errors import ApiError
from pyruntime.client.sync import Client

__all__ = ["ApiError", "AsyncClient", "Client"]
