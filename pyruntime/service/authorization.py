"""Refuses calls without a token that allows them, before anything of the request is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc

from pyruntime.config import Settings
from pyruntime.service.interceptor import refusal
from pyruntime.service.tokens import TokenFile

HEALTH = "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection."
KEY = "authorization"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """``open_prefixes``: methods that anybody may call. All others need a token, those that do not exist included."""

    def __init__(self, tokens: TokenFile, open_prefixes: tuple[str, ...]) -> None:
        self._tokens = tokens
        self._open = open_prefixes

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if not method.startswith(self._open):
            given = [_text(value) for key, value in handler_call_details.invocation_metadata if key == KEY]
            if (error := self._tokens.refusal(method, given)) is not None:
                return refusal(error)
        return await continuation(handler_call_details)


def token_interceptors(
    option: str, path: str, methods: list[str], settings: Settings
) -> list[grpc.aio.ServerInterceptor]:
    """None without a file. ``option``: what names it; ``methods``: what its lines may allow."""
    if not path:
        return []
    exempt = [(HEALTH, settings.health), (REFLECTION, settings.reflection)]
    prefixes = tuple(prefix for prefix, access in exempt if access == "open")
    return [TokenInterceptor(TokenFile(option, path, methods), prefixes)]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
