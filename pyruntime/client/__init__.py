"""Python client: ``Client`` for ordinary code, ``AsyncClient`` for asyncio. Results are str and numpy."""

from __future__ import annotations

from pyruntime.client.asynchronous import AsyncClient
from pyruntime.client.errors import ApiError, Violation
from pyruntime.client.ranking import ClassifiedToken, RankedDocument
from pyruntime.client.retry import NEVER, Retry
from pyruntime.client.sync import Client
from pyruntime.types import SparseVector

__all__ = [
    "NEVER",
    "ApiError",
    "AsyncClient",
    "ClassifiedToken",
    "Client",
    "RankedDocument",
    "Retry",
    "SparseVector",
    "Violation",
]
