"""What tests of the transport share: certificates, servers with settings of their own, and a client by hand."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import trustme

from pyruntime.config import Settings
from pyruntime.lifecycle import ModelManager
from pyruntime.registry import ModelRegistry
from pyruntime.service.server_builder import RuntimeServer, build_server
from pyruntime.types import Capability
from tests.fakes import fake_model
from tests.service.admin_stack import AdminEngine
from tests.service.conftest import SETTINGS, Stack

GENERATE = "/pyruntime.v1.GenerateService/Generate"
STREAM = "/pyruntime.v1.GenerateService/GenerateStream"
LIST_MODELS = "/pyruntime.v1.ModelService/ListModels"


def settings(**changes: Any) -> Settings:
    return Settings.model_validate(dict(SETTINGS) | changes)


@contextlib.asynccontextmanager
async def running(options: Settings, manager: bool = False) -> AsyncIterator[tuple[RuntimeServer, ModelRegistry]]:
    """A server with the usual two models; ``manager``: with AdminService."""
    registry = ModelRegistry()
    server = build_server(registry, options, ModelManager(registry, options, print) if manager else None)
    await server.start()
    for model in (
        fake_model("decoder", {Capability.GENERATE, Capability.SCORE, Capability.EMBED}),
        fake_model("encoder", {Capability.EMBED}),
    ):
        model.engine = AdminEngine(model.info)  # type: ignore[assignment]
        registry.declare(model.info.name)
        registry.set_serving(model.info.name, model)
    try:
        yield server, registry
    finally:
        await server.drain(0)


@contextlib.asynccontextmanager
async def stack_of(options: Settings) -> AsyncIterator[Stack]:
    """The same with a channel in plaintext."""
    async with running(options) as (server, registry), grpc.aio.insecure_channel(server.address) as channel:
        decoder, encoder = registry.serving()
        yield Stack(registry, server, channel, decoder, encoder)


class Certificates:
    """An authority, and files that it has signed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.certificate, self.key = str(folder / "tls.crt"), str(folder / "tls.key")
        self.ca = str(folder / "ca.crt")
        self.authority.cert_pem.write_to_path(self.ca)
        self.rotate()

    def rotate(self) -> bytes:
        """A new pair in the same files; its certificate."""
        pair = self.authority.issue_cert("localhost", "127.0.0.1")
        pair.private_key_pem.write_to_path(self.key)
        chain = b"".join(pem.bytes() for pem in pair.cert_chain_pems)
        Path(self.certificate).write_bytes(chain)
        return chain

    def settings(self, **changes: Any) -> Settings:
        return settings(tls_certificate=self.certificate, tls_key=self.key, **changes)

    def client(self, authority: trustme.CA | None = None) -> grpc.ChannelCredentials:
        """Of a client that trusts this authority and has a certificate of ``authority``, if there is one."""
        roots = self.authority.cert_pem.bytes()
        if authority is None:
            return grpc.ssl_channel_credentials(roots)
        pair = authority.issue_cert("client")
        chain = b"".join(pem.bytes() for pem in pair.cert_chain_pems)
        return grpc.ssl_channel_credentials(roots, pair.private_key_pem.bytes(), chain)


def fresh_channel(address: str, credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
    """With a connection, and so a handshake, of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(address, credentials, options)


@dataclass
class Answer:
    """What came back of one call by hand."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""
    ended: str = ""  # the event that ended it: StreamEnded, StreamReset, ConnectionTerminated, closed, or "" for none

    @property
    def code(self) -> int | None:
        return int(self.headers["grpc-status"]) if "grpc-status" in self.headers else None


def frame(message: bytes, *, compressed: int = 0, length: int | None = None) -> bytes:
    """gRPC's prefix before a message; ``length``: a lie about it."""
    return struct.pack(">BI", compressed, len(message) if length is None else length) + message


class RawClient:
    """One HTTP/2 connection, blocking, that says what it likes. ``window``: of each stream, in bytes."""

    def __init__(self, port: int, window: int = 65535) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.settimeout(10)
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8", validate_outbound_headers=False)
        self.http = h2.connection.H2Connection(config)
        self.http.initiate_connection()
        self.http.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window})
        self.answers: dict[int, Answer] = {}
        self.flush()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def flush(self) -> None:
        self.socket.sendall(self.http.data_to_send())

    def open(self, path: str, headers: list[tuple[str, str]] = (), **changes: str) -> int:  # type: ignore[assignment]
        """Begin a call; its stream. ``changes``: of headers that every call has, with _ for -."""
        usual = {":method": "POST", ":path": path, ":scheme": "http", ":authority": "here"}
        usual |= {"te": "trailers", "content-type": "application/grpc"}
        usual |= {key.replace("_", "-"): value for key, value in changes.items()}
        stream = self.http.get_next_available_stream_id()
        self.answers[stream] = Answer()
        self.http.send_headers(stream, [*usual.items(), *headers])
        self.flush()
        return stream

    def send(self, stream: int, data: bytes, end: bool = True) -> None:
        """All of it, as far as the server's windows let it; as long as it takes."""
        while data and not self.answers[stream].ended:
            room = min(self.http.local_flow_control_window(stream), self.http.max_outbound_frame_size, len(data))
            if room:
                self.http.send_data(stream, data[:room])
                data = data[room:]
                self.flush()
            else:
                self.read()
        if end and not self.answers[stream].ended:
            self.http.end_stream(stream)
            self.flush()

    def read(self) -> bool:
        """Whatever comes next; False once the server has closed the connection."""
        try:
            data = self.socket.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            for answer in self.answers.values():
                answer.ended = answer.ended or "closed"
            return False
        try:
            events = self.http.receive_data(data)
        except h2.exceptions.ProtocolError:  # something came behind a GOAWAY, which may be, but h2 does not have it
            events = [h2.events.ConnectionTerminated()]
        for event in events:
            self._take(event)
        with contextlib.suppress(ConnectionError):
            self.flush()
        return True

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            for answer in self.answers.values():
                answer.ended = answer.ended or "ConnectionTerminated"
        answer = self.answers.get(getattr(event, "stream_id", None) or 0)
        if answer is None:
            return
        if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
            answer.headers |= dict(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            answer.data += event.data
        elif isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset)):
            answer.ended = answer.ended or type(event).__name__

    def finish(self, stream: int) -> Answer:
        """Read until the call has ended."""
        until = time.monotonic() + 20
        while not self.answers[stream].ended and time.monotonic() < until and self.read():
            pass
        return self.answers[stream]

    def call(self, path: str, data: bytes, headers: list[tuple[str, str]] = (), **changes: str) -> Answer:  # type: ignore[assignment]
        stream = self.open(path, headers, **changes)
        self.send(stream, data)
        return self.finish(stream)


async def by_hand(port: int, path: str, data: bytes, *arguments: Any, **changes: str) -> Answer:
    """One call on a connection of its own."""

    def work() -> Answer:
        with RawClient(port) as client:
            return client.call(path, data, *arguments, **changes)

    return await asyncio.to_thread(work)
