"""Many calls at once with the client for asyncio: python many_calls.py [HOST:PORT]"""

from __future__ import annotations

import asyncio
import sys

from pyruntime.client import AsyncClient
from pyruntime.v1 import model_pb2


async def main() -> None:
    target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
    async with AsyncClient(target) as client:
        able = (each.name for each in await client.models() if model_pb2.CAPABILITY_GENERATE in each.capabilities)
        model = next(able)
        prompts = [f"Line {number}:" for number in range(8)]
        # All on one connection. The server batches what is open at the same time.
        texts = await asyncio.gather(*(client.generate(prompt, model=model, max_new_tokens=8) for prompt in prompts))
        print("generated:", texts)
        async with asyncio.timeout(60):  # cancelling the task cancels the call, and stops the server's work
            async for piece in client.stream("Once upon a time", model=model, max_new_tokens=8):
                print("piece:", piece)


if __name__ == "__main__":
    asyncio.run(main())
