"""What the attacks of ``hostile_attacks.py`` meet in place of the server, to tell what of their cost is the server's.

``python benchmarks/hostile_sinks.py sockets`` takes connections and bytes and answers nothing; ``grpc`` is the least
that ``grpc.aio`` can do: it refuses every Embed and lets a stream wait behind one message. Each prints its port.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import sys
from typing import Any, cast

HOST = "127.0.0.1"


def sockets() -> None:
    ready, room = selectors.DefaultSelector(), bytearray(2**16)
    with socket.create_server((HOST, 0)) as listener:
        ready.register(listener, selectors.EVENT_READ)
        print(listener.getsockname()[1], flush=True)
        while True:
            for key, _ in ready.select():
                each = cast("socket.socket", key.fileobj)
                if each is listener:
                    ready.register(listener.accept()[0], selectors.EVENT_READ)
                elif not _take(each, room):
                    ready.unregister(each)
                    each.close()


def _take(connection: socket.socket, room: bytearray) -> int:
    with contextlib.suppress(ConnectionError):
        return connection.recv_into(room)
    return 0


async def bare_grpc() -> None:
    import grpc

    async def refuse(request: bytes, context: Any) -> None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no message of this method's type")

    async def stream(request: bytes, context: Any) -> None:
        await context.write(b"one message")
        await asyncio.Event().wait()

    server = grpc.aio.server()
    handlers = {
        "EmbedService": {"Embed": grpc.unary_unary_rpc_method_handler(refuse)},
        "GenerateService": {"GenerateStream": grpc.unary_stream_rpc_method_handler(stream)},
    }
    for name, methods in handlers.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"pyruntime.v1.{name}", methods),))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    if sys.argv[1] == "grpc":
        asyncio.run(bare_grpc())
    else:
        sockets()
