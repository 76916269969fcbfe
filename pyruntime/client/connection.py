"""How a client reaches its server: the address, what encrypts the way there, and the token that is shown."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypedDict

import grpc

from pyruntime.client.fields import shown

Pem: TypeAlias = bytes | str | os.PathLike[str]
"""PEM text as bytes, or the path of a file that holds it."""

Token: TypeAlias = str | Callable[[], str]
"""A bearer token, or what returns the one that counts now: it is asked before each call."""

Entries: TypeAlias = Mapping[str, str] | Iterable[tuple[str, str]]
Metadata: TypeAlias = Entries | Callable[[], Entries]
"""Entries that go with every call, or what returns those of the next one, such as the trace that it belongs to."""

TOKEN_KEY = "authorization"

_OPTIONS = [
    # Answers are as large as the client asks for: no limit here beside the server's.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A stream has no deadline: this finds out when the server's machine is gone.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that comes back is found within seconds, not within gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
]
# Schemes whose addresses gRPC reads itself.
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")


class Security(TypedDict, total=False):
    """What both clients take beside the address. All of it may be left out: plaintext, no token.

    tls                 True: encrypt; False: do not. Left out: encrypt when any of the next three is given
    root_certificates   whom to trust; left out: the public authorities that gRPC knows
    certificate, key    this client's own, for a server that asks for mutual TLS; both or neither
    server_name         the name in the server's certificate, where it is not the host of the address
    token               shown with every call. Where it would travel unencrypted to another machine, say ``tls=True``,
                        or ``tls=False`` when something else encrypts (a mesh's sidecar)
    metadata            further entries for every call, as ``traceparent``: a mapping, or a list of (key, value)
    """

    tls: bool | None
    root_certificates: Pem | None
    certificate: Pem | None
    key: Pem | None
    server_name: str | None
    token: Token | None
    metadata: Metadata | None


def open_channel(target: str, security: Security) -> grpc.Channel:
    """The blocking kind. ValueError for what cannot be meant, OSError for files that cannot be read."""
    credentials, options = _prepared(target, security)
    if credentials is None:
        channel = grpc.insecure_channel(target, options=options)
    else:
        channel = grpc.secure_channel(target, credentials, options=options)
    entries = entries_of(security)
    return channel if entries is None else grpc.intercept_channel(channel, _AddEntries(entries))


def open_async_channel(target: str, security: Security) -> grpc.aio.Channel:
    """For asyncio, without ``entries_of``, which ``FollowedChannel`` adds. Errors as ``open_channel``."""
    credentials, options = _prepared(target, security)
    running_loop()  # grpc would take, or make, a loop that may not be the one that runs later
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("make an AsyncClient inside the event loop that uses it: in an async function") from None


def entries_of(security: Security) -> Callable[[], list[tuple[str, str]]] | None:
    """What returns the metadata of the next call, the token among them; None for none."""
    token, given = security.get("token"), security.get("metadata")
    if token is None and given is None:
        return None

    def entries() -> list[tuple[str, str]]:
        found = checked_entries((given() if callable(given) else given) or ())
        return found if token is None else [*found, bearer(token)]

    return entries


def checked_entries(given: Entries) -> list[tuple[str, str]]:
    """TypeError and ValueError for what no header can hold: gRPC's own words would quote all entries, the token too."""
    entries = list(given.items() if isinstance(given, Mapping) else given)
    for entry in entries:
        if not (isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)):
            raise TypeError("metadata must be a mapping, or a list of (key, value)")
        key, value = entry
        if not re.fullmatch(r"[0-9a-z_.-]+", key):
            raise ValueError(f"the metadata key {key!r} is not of lower-case letters, digits, '.', '_' and '-'")
        if key.endswith("-bin") and isinstance(value, bytes):
            continue
        if not isinstance(value, str) or not re.fullmatch(r"[\x20-\x7e]*", value):
            raise ValueError(f"the metadata value of {key!r} is not a text of printable ASCII")
    return entries


def bearer(token: Token) -> tuple[str, str]:
    """The metadata entry. ValueError for a token that no header can hold."""
    value = token() if callable(token) else token
    if not isinstance(value, str):  # not shown: it is a secret
        raise TypeError(f"a token must be a text, or return one, not {type(value).__name__}")
    value = value.strip()
    if not re.fullmatch(r"[\x21-\x7e]+", value):
        raise ValueError("a token is printable ASCII without spaces, and not empty")
    return TOKEN_KEY, f"Bearer {value}"


def check_target(target: str) -> None:
    """ValueError for what people write that gRPC would take for a host name."""
    if not isinstance(target, str):
        raise TypeError(f"target must be a text as HOST:PORT, not {shown(target)}")
    if target.startswith(_SCHEMES):
        return
    if "://" in target:
        raise ValueError(f"target {target!r} is a URL; write HOST:PORT, and tls=True for an encrypted connection")
    host, colon, port = target.rpartition(":")
    if host.count(":") and not host.startswith("["):
        raise ValueError(f"target {target!r}: an IPv6 address is written in brackets, as [::1]:50051")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"target {target!r} is not HOST:PORT with a port of 1 to 65535, nor unix:PATH")


def is_local(target: str) -> bool:
    """Whether what is sent stays on this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = re.sub(r"^(dns:/*|ipv4:|ipv6:)", "", target).rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _prepared(target: str, security: Security) -> tuple[grpc.ChannelCredentials | None, list[tuple[str, Any]]]:
    """Credentials, or None for plaintext, and the channel's options."""
    unknown = security.keys() - Security.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}")
    check_target(target)
    # What http_proxy names is for other machines; grpc would send what is for this one there as well.
    options: list[tuple[str, Any]] = [*_OPTIONS, ("grpc.enable_http_proxy", int(not is_local(target)))]
    given = [name for name in ("root_certificates", "certificate", "key") if security.get(name) is not None]
    tls = security.get("tls")
    if tls is False and given:
        raise ValueError(f"{given[0]} is for an encrypted connection, and tls is False")
    if ("certificate" in given) != ("key" in given):
        raise ValueError("certificate and key belong together: give both or neither")
    if not tls and not given:
        if security.get("token") is not None and tls is None and not is_local(target):
            raise ValueError(
                f"the token would travel to {target} unencrypted: give tls=True or root_certificates,"
                " or tls=False where a mesh encrypts"
            )
        return None, options
    roots, certificate, key = (_pem(name, security.get(name)) for name in ("root_certificates", "certificate", "key"))
    name = security.get("server_name")
    if name:
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.ssl_channel_credentials(roots, key, certificate), options


def _pem(name: str, given: Any) -> bytes | None:
    if given is None:
        return None
    pem = given if isinstance(given, bytes) else Path(given).read_bytes()
    if b"-----BEGIN " not in pem:  # gRPC would say of it only that no connection can be made
        raise ValueError(f"{name}: {'the bytes are' if isinstance(given, bytes) else f'{given} is'} no PEM")
    return pem


class _Details(NamedTuple):
    """What gRPC passes from interceptor to interceptor; its own type cannot be made."""

    method: str
    timeout: float | None
    metadata: Sequence[tuple[str, str | bytes]]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _AddEntries(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds metadata to every call. Not call credentials: gRPC has these on encrypted connections alone."""

    def __init__(self, entries: Callable[[], list[tuple[str, str]]]) -> None:
        self._entries = entries

    def _call(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), *self._entries()]
        further = (details.credentials, details.wait_for_ready, details.compression)
        return continuation(_Details(details.method, details.timeout, metadata, *further), request)

    intercept_unary_unary: Any = _call
    intercept_unary_stream: Any = _call
    intercept_stream_unary: Any = _call
    intercept_stream_stream: Any = _call
