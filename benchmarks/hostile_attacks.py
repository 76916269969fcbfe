"""What misbehaving clients send, from a process that costs next to nothing: bytes made once, plain sockets, no gRPC.

``python benchmarks/hostile_attacks.py NAME HOST PORT [BODY]`` says ``ready``, waits for a line that holds seconds,
misbehaves for so long and says how many times it did. ``BODY``: of ``streams``, a GenerateRequest in hex.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import sys
import time
from collections.abc import Callable

Address = tuple[str, int]
Attack = Callable[[Address, bytes, "Ticks"], int]

EMBED, STREAM = b"/pyruntime.v1.EmbedService/Embed", b"/pyruntime.v1.GenerateService/GenerateStream"
GARBAGE = random.Random(0).randbytes(4096)
# HTTP/2, RFC 9113: types and flags of frames.
DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4
CANCEL = 8


class Ticks:
    """Calls what it is given ``per_s`` times a second until the time is over; what comes late is made up for."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def __call__(self, per_s: float, act: Callable[[int], None]) -> int:
        """``act`` gets the numbers from 0; returns how many."""
        due, number = time.monotonic(), 0
        while due < self._end:
            time.sleep(max(0.0, due - time.monotonic()))
            act(number)
            due, number = due + 1 / per_s, number + 1
        return number


def connects(address: Address, body: bytes, ticks: Ticks) -> int:
    """10,000 connections a minute, each closed at once."""
    return ticks(10_000 / 60, lambda _: socket.create_connection(address).close())


def garbage(address: Address, body: bytes, ticks: Ticks) -> int:
    """4 KiB of random bytes on each of 50 connections a second."""

    def act(_: int) -> None:
        with socket.create_connection(address) as connection:
            connection.sendall(GARBAGE)

    return ticks(50, act)


def halves(address: Address, body: bytes, ticks: Ticks) -> int:
    """A preface and the beginning of a frame that never goes on, 20 connections a second, all kept."""
    half = _preface() + b"\x00\x40\x00\x01\x04\x00\x00\x00\x01half a header block"
    with contextlib.ExitStack() as kept:
        return ticks(20, lambda _: kept.enter_context(socket.create_connection(address)).sendall(half))


def bodies(address: Address, body: bytes, ticks: Ticks) -> int:
    """Calls whose bodies are no messages, 100 a second over one connection."""
    call = _call(EMBED, GARBAGE[:200])
    with _connected(address) as connection:

        def act(number: int) -> None:
            connection.sendall(call(2 * number + 1))
            _discard(connection)

        return ticks(100, act)


def streams(address: Address, body: bytes, ticks: Ticks) -> int:
    """Two streams of a decoder a second whose client has no room for a byte and gives each up after a second."""
    call = _call(STREAM, body)
    with _connected(address, window=0) as connection:

        def act(number: int) -> None:
            if number >= 2:
                connection.sendall(_frame(RST_STREAM, 0, 2 * number - 3, struct.pack(">I", CANCEL)))
            connection.sendall(call(2 * number + 1))
            _discard(connection)

        return ticks(2, act)


ATTACKS: dict[str, Attack] = {each.__name__: each for each in (connects, garbage, halves, bodies, streams)}


def _connected(address: Address, window: int = 65_535) -> socket.socket:
    """A connection of HTTP/2. ``window``: what the server may send of a stream."""
    connection = socket.create_connection(address)
    connection.sendall(_preface(struct.pack(">HI", INITIAL_WINDOW_SIZE, window)) + _frame(SETTINGS, ACK, 0, b""))
    return connection


def _preface(settings: bytes = b"") -> bytes:
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, settings)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _call(path: bytes, body: bytes) -> Callable[[int], bytes]:
    """The bytes of a whole call, of each stream of the connection."""
    fields = {
        b":method": b"POST",
        b":scheme": b"http",
        b":path": path,
        b":authority": b"localhost",
        b"te": b"trailers",
        b"content-type": b"application/grpc",
    }
    # RFC 7541, 6.2.2: literals without indexing, whose names are new.
    block = b"".join(
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields.items()
    )
    message = struct.pack(">BI", 0, len(body)) + body
    return lambda stream: _frame(HEADERS, END_HEADERS, stream, block) + _frame(DATA, END_STREAM, stream, message)


def _discard(connection: socket.socket) -> None:
    """What has come by now."""
    with contextlib.suppress(BlockingIOError):
        connection.recv(2**16, socket.MSG_DONTWAIT)


def main() -> None:
    name, host, port, *rest = sys.argv[1:]
    print("ready", flush=True)
    seconds = float(sys.stdin.readline())
    print(ATTACKS[name]((host, int(port)), bytes.fromhex("".join(rest)), Ticks(seconds)), flush=True)


if __name__ == "__main__":
    main()
