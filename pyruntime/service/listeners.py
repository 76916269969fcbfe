"""Where the servers listen, with or without TLS, and who gets to a Unix socket."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import shlex
import socket

import grpc

from pyruntime.config import Settings
from pyruntime.errors import UnsafeTransport
from pyruntime.service.incoming import COMPRESSION_OPTIONS

log = logging.getLogger(__name__)

UNIX = "unix:"
# Of a socket's rights, what each setting of socket_access takes away.
UMASKS = {"owner": 0o177, "group": 0o117, "all": 0o111}
HANDSHAKE_S = 20
# All metadata of a call together, as HTTP/2 counts it. Below the one number a call is never refused, above never taken.
METADATA_BYTES = 2**14
# Pings of clients that come faster than this count against them, and end the connection when there are several.
PING_INTERVAL_S = 5


def main_address(settings: Settings) -> str:
    """As gRPC writes it."""
    if is_unix(settings.host):
        return settings.host
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{host}:{settings.port}"


def is_unix(address: str) -> bool:
    return address.startswith(UNIX)


def refuse_open_plaintext(settings: Settings) -> None:
    """Raises ``UnsafeTransport`` when other machines could reach a listener without TLS and nobody has asked for it."""
    if settings.tls_certificate or settings.insecure:
        return
    for option, given, host in (
        ("--host", settings.host, settings.host),
        ("--admin-address", settings.admin_address, _host_of(settings.admin_address)),
    ):
        if not _is_local(host):
            raise UnsafeTransport(
                f"{option} {given} would serve other machines without TLS: give --tls-certificate and --tls-key, or "
                "--insecure where a mesh or a proxy encrypts"
            )


def warn_of_open_doors(settings: Settings) -> None:
    """What is allowed, but more likely forgotten than meant."""
    admin_host = _host_of(settings.admin_address)
    for tokens, host in ((settings.token_file, settings.host), (settings.admin_token_file, admin_host)):
        if tokens and not settings.tls_certificate and not _is_local(host):
            log.warning("the bearer tokens of %s are asked for without TLS: on the way here they can be read", tokens)
    if settings.token_file and not settings.admin_token_file and admin_host and not is_unix(admin_host):
        log.warning("AdminService on %s asks for no token: give --admin-token-file", settings.admin_address)


def _host_of(address: str) -> str:
    return address if is_unix(address) else address.rpartition(":")[0]


def _is_local(host: str) -> bool:
    """Also when there is none."""
    if not host or is_unix(host) or host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False  # a name: what it stands for is not this program's to judge


def listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None, access: str) -> str:
    """The address with the port that was got, which is another one than 0. Raises RuntimeError when it is not free.

    ``credentials``: for TLS; keep them as long as the server, since grpc does not. ``access``: of a Unix socket, as
    ``Settings.socket_access``; such a socket has no TLS.
    """
    _refuse_taken_socket(address)
    # A Unix socket is made with the rights that this leaves it, from the first moment on.
    others = os.umask(UMASKS[access]) if is_unix(address) else None
    try:
        if credentials is None or is_unix(address):
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise RuntimeError(f"cannot listen on {address}: {error}") from error
    finally:
        if others is not None:
            os.umask(others)
    return address if is_unix(address) else f"{address.rpartition(':')[0]}:{port}"


def _refuse_taken_socket(address: str) -> None:
    """gRPC would take a Unix socket away from a process that listens on it, as from one that has left it behind."""
    if not is_unix(address):
        return
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(address.removeprefix(UNIX))
        except (BlockingIOError, TimeoutError):  # so many wait to be let in that there is no room for one more
            pass
        except OSError:
            return
    raise RuntimeError(f"cannot listen on {address}: another process does")


def channel_options(settings: Settings) -> list[tuple[str, int]]:
    """Limits of messages, connections and time, as grpc's channel arguments."""
    options = [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES),
        ("grpc.max_concurrent_streams", settings.max_streams_per_connection),
        # Else a second server on the same port starts without a complaint and takes half of the connections.
        ("grpc.so_reuseport", 0),
        # Those who connect and then say nothing, or half of a TLS handshake.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_S * 1000),
        ("grpc.max_connection_age_grace_ms", _ms(settings.max_connection_grace_s)),
        *COMPRESSION_OPTIONS,
    ]
    if settings.keepalive_s:
        options += [
            ("grpc.keepalive_time_ms", _ms(settings.keepalive_s)),
            ("grpc.keepalive_timeout_ms", _ms(settings.keepalive_timeout_s)),
            ("grpc.http2.ping_timeout_ms", _ms(settings.keepalive_timeout_s)),
        ]
    if settings.max_connection_idle_s:
        options.append(("grpc.max_connection_idle_ms", _ms(settings.max_connection_idle_s)))
    if settings.max_connection_age_s:
        options.append(("grpc.max_connection_age_ms", _ms(settings.max_connection_age_s)))
    return options


def _ms(seconds: float) -> int:
    return min(2**31 - 1, max(1, round(seconds * 1000)))


def compression(settings: Settings) -> grpc.Compression:
    """Of answers; a client that does not take it gets them as they are."""
    return grpc.Compression.Gzip if settings.compress_responses else grpc.Compression.NoCompression


def grpcurl_flags(settings: Settings) -> str:
    """What a grpcurl call to the main listener needs beside its address."""
    flags = ["-plaintext"]
    if is_unix(settings.host):
        flags.append("-unix")
    elif settings.tls_certificate:
        flags = ["-cacert CA.pem"] + (["-cert CLIENT.pem -key CLIENT-KEY.pem"] if settings.tls_client_ca else [])
    if settings.token_file:
        flags.append("-H " + shlex.quote("authorization: Bearer TOKEN"))
    return " ".join(flags)
